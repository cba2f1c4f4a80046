"""What the clusters of tests compute, and how a task knows that it was seen: workers import this module."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

from distributed import get_client, worker_client

from gpulse.integrations.dask import custom_metric

_PATIENCE_SECONDS = 60.0
_beats = threading.Condition()
_count = 0


def beat(worker: Any, handles: list[Any]) -> int:  # noqa: ARG001  it is given both
    """Counts measurements, and tells the tasks of the worker."""
    global _count  # noqa: PLW0603  one a worker process
    with _beats:
        _count += 1
        _beats.notify_all()
        return _count


BEAT = custom_metric("beat", per_device=False)(beat)


@custom_metric("broken")
def broken(worker: Any, handle: Any) -> None:  # noqa: ARG001
    """Never works."""
    raise RuntimeError("the sensor fell off")


@custom_metric("stuck")
def stuck(worker: Any, handle: Any) -> None:  # noqa: ARG001
    """Never answers."""
    threading.Event().wait()


@custom_metric("odd", per_device=False)
def odd(worker: Any, handles: list[Any]) -> object:  # noqa: ARG001
    """Answers with what cannot be written down."""
    return object()


@custom_metric("state", per_device=False)
def state(worker: Any, handles: list[Any]) -> str:
    """What only a worker knows, with text that CSV has to quote."""
    return f'"{worker.state.executing_count}",\n{len(handles)}'


def seen(*before: Any, times: int = 2) -> int:
    """Goes on until the worker was measured: of two measurements that end meanwhile, one began meanwhile too."""
    with _beats:
        wanted = _count + times
        if not _beats.wait_for(lambda: _count >= wanted, _PATIENCE_SECONDS):
            raise TimeoutError("the worker is not measured")
    return len(before)


async def seen_async() -> int:
    """The same for a task that is a coroutine."""
    return await asyncio.to_thread(seen)


def seen_block(block: Any) -> Any:
    """The same for a block of an array."""
    seen()
    return block


def held(begun: str, go: str) -> int:
    """Says that it has begun, and goes on until it may end."""
    Path(begun).touch()
    pause = threading.Event()
    while not Path(go).exists():
        pause.wait(0.01)
    return seen()


def together(folder: str, number: int, times: int = 2) -> int:
    """Goes on until the other one of two is being executed as well, and for so many measurements."""
    Path(folder, f"begun-{number}").touch()
    pause = threading.Event()
    while not Path(folder, f"begun-{1 - number}").exists():
        pause.wait(0.01)
    return seen(times=times)


def seen_after_failing(path: str) -> int:
    """Fails the first time that it is tried, measured both times."""
    seen()
    if not Path(path).exists():
        Path(path).touch()
        raise ValueError("the first try fails")
    return seen()


def submits_with_get_client(name: str) -> int:
    """A task that has another one computed, by the worker's own client."""
    seen()
    result: int = get_client().submit(seen, key=name).result()
    seen()
    return result


def submits_with_worker_client(name: str) -> int:
    """A task that has another one computed, and gives up its thread meanwhile."""
    seen()
    with worker_client() as client:
        result: int = client.submit(seen, key=name).result()
    return result


def spawns_family(name: str) -> int:
    """A task that has a task computed that has a task computed."""
    result: int = (
        get_client().submit(submits_with_get_client, f"{name}-grandchild", key=f"{name}-child").result()
    )
    return result
