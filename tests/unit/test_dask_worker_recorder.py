"""One worker's monitoring: what it brings to the scheduler, and how it ends whatever the scheduler does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulse.integrations.dask import worker_plugin as module
from gpulse.integrations.dask.monitor_settings import MonitorSettings, build_settings
from gpulse.integrations.dask.worker_plugin import WorkerRecorder
from gpulse.integrations.dask.worker_registry import COMMAND_HANDLER, WorkerCommand


class FakeScheduler:
    """What a worker sees of its scheduler; it takes rows unless it is told not to."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self.answer: Callable[[], Any] | None = None

    async def gpulse_join(self, **_: Any) -> None:
        """Nothing runs yet."""

    async def gpulse_rows(self, **message: Any) -> dict[int, str] | None:
        """Rows, and whatever answer is prepared."""
        self.taken.append(message)
        self.asked.set()
        return {} if self.answer is None else await self.answer()

    async def brought(self, rows: int) -> None:
        """Wait until that many rows have come."""
        async with asyncio.timeout(60):
            while len(self.rows()) < rows:
                self.asked.clear()
                await self.asked.wait()

    def rows(self) -> list[str]:
        """The lines that came, each batch once."""
        batches = {
            message["number"]: message["batch"]["rows"]
            for message in self.taken
            if message["batch"] is not None
        }
        return b"".join(batches.values()).decode().splitlines()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are brought often, and answers are not waited for so long."""
    monkeypatch.setattr(module, "_SEND_SECONDS", 0.1)
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def wanted() -> MonitorSettings:
    """Something that every machine can tell."""
    return build_settings(["load1", "tasks"], (), "client", 50, None, "temp")


@asynccontextmanager
async def recording(scheduler: FakeScheduler, folder: Path) -> AsyncIterator[tuple[WorkerRecorder, Any]]:
    """A worker that is monitored, until it ends."""
    worker: Any = SimpleNamespace(
        scheduler=scheduler,
        address="tcp://127.0.0.1:1",
        handlers={},
        plugins={},
        active_keys=set(),
        state=SimpleNamespace(tasks={}),
        scheduler_delay=0.0,
        local_directory=str(folder),
    )
    made = WorkerRecorder(worker, wanted())
    await made.open()
    try:
        yield made, worker
    finally:
        await made.close()


def started() -> dict[str, Any]:
    """The command to begin, as a scheduler that began long ago sends it now."""
    command = WorkerCommand(
        running=True, elapsed=time.monotonic(), sent=time.time(), tracked=wanted().tracked
    )
    return command._asdict()


async def test_rows_come_while_it_runs_and_the_last_ones_when_it_stops(tmp_path: Path) -> None:
    """None is missing: as many lines as measurements, and nothing after the stop."""
    scheduler = FakeScheduler()
    async with recording(scheduler, tmp_path) as (_, worker):
        await worker.handlers[COMMAND_HANDLER](**started())
        await scheduler.brought(2)
        await worker.handlers[COMMAND_HANDLER](**WorkerCommand(stop=True)._asdict())
        stopped = len(scheduler.taken)
        batches = {message["number"]: message["batch"] for message in scheduler.taken if message["batch"]}
        told = sum(batch["measurements"] for batch in batches.values())
        await asyncio.sleep(0.15)

    assert stopped == len(scheduler.taken)
    assert told == len(scheduler.rows()) >= 2
    assert COMMAND_HANDLER not in worker.handlers


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
async def test_a_stop_is_heard_while_rows_are_on_their_way(tmp_path: Path, delay: float) -> None:
    """At whichever moment the answer comes."""
    scheduler = FakeScheduler()
    scheduler.answer = lambda: asyncio.sleep(delay, {})
    async with recording(scheduler, tmp_path) as (_, worker):
        for _ in range(3):
            await worker.handlers[COMMAND_HANDLER](**started())
            scheduler.asked.clear()
            await scheduler.asked.wait()
            async with asyncio.timeout(60):
                await worker.handlers[COMMAND_HANDLER](**WorkerCommand(stop=True)._asdict())

    times = [float(line.split(",")[2]) for line in scheduler.rows()]
    assert sorted(times) == times


@pytest.mark.parametrize("silent", [False, True])
async def test_what_the_scheduler_did_not_take_comes_again(tmp_path: Path, silent: bool) -> None:
    """Under the same number, so that it counts once; dask answers what it does not know with nothing."""
    scheduler = FakeScheduler()

    async def refuse() -> None:
        scheduler.answer = None
        if not silent:
            raise OSError("away")

    scheduler.answer = refuse
    async with recording(scheduler, tmp_path) as (_, worker):
        await worker.handlers[COMMAND_HANDLER](**started())
        while len(scheduler.taken) < 3:
            scheduler.asked.clear()
            await scheduler.asked.wait()

    first, second = scheduler.taken[:2]
    assert (first["life"], first["number"], first["batch"]) == (
        second["life"],
        second["number"],
        second["batch"],
    )
    assert scheduler.taken[2]["number"] == first["number"] + 1


async def test_a_scheduler_that_is_gone_holds_no_worker_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends in good time and says what is lost."""
    scheduler = FakeScheduler()
    scheduler.answer = lambda: asyncio.sleep(600)
    with caplog.at_level(logging.WARNING, "distributed.worker.gpulse"):
        async with asyncio.timeout(60), recording(scheduler, tmp_path) as (_, worker):
            await worker.handlers[COMMAND_HANDLER](**started())
            await scheduler.asked.wait()

    assert "measurements lost" in caplog.text


async def test_a_worker_whose_tasks_are_all_cancelled_still_brings_its_last_rows(tmp_path: Path) -> None:
    """As when a signal ends it."""
    scheduler = FakeScheduler()
    async with recording(scheduler, tmp_path) as (made, worker):
        await worker.handlers[COMMAND_HANDLER](**started())
        await scheduler.asked.wait()
        assert made._delivery is not None
        made._delivery.cancel()
        before = len(scheduler.rows())
        thread = made._thread
        assert thread is not None
        async with asyncio.timeout(60):
            while not thread._waiting:  # noqa: ASYNC110  another thread measures
                await asyncio.sleep(0.01)

    assert len(scheduler.rows()) > before


async def test_a_stop_goes_on_trying_while_the_scheduler_is_busy(tmp_path: Path) -> None:
    """And loses nothing."""
    scheduler = FakeScheduler()
    busy = 3

    async def answer() -> dict[int, str]:
        nonlocal busy
        busy -= 1
        if busy > 0:
            await asyncio.sleep(1)
        return {}

    async with recording(scheduler, tmp_path) as (made, worker):
        await worker.handlers[COMMAND_HANDLER](**started())
        await scheduler.asked.wait()
        scheduler.answer = answer
        while busy == 3:  # noqa: ASYNC110  there is something to bring
            await asyncio.sleep(0.01)
        assert made._unsent is not None
        said = await worker.handlers[COMMAND_HANDLER](**WorkerCommand(stop=True)._asdict())

    assert {"lost": 0} == said
    assert busy <= 0


async def test_faults_of_the_scheduler_do_not_keep_a_worker_from_stopping(tmp_path: Path) -> None:
    """Whatever they are, and it can be started again."""
    scheduler = FakeScheduler()

    async def broken() -> None:
        raise RuntimeError("a fault")

    async with recording(scheduler, tmp_path) as (made, worker):
        await worker.handlers[COMMAND_HANDLER](**started())
        scheduler.answer = broken
        await scheduler.asked.wait()
        async with asyncio.timeout(60):
            said = await made._stop_recording(0.3)
        scheduler.answer = None
        await worker.handlers[COMMAND_HANDLER](**started())
        scheduler.asked.clear()
        await scheduler.asked.wait()

    assert said > 0
