"""Makes the shared fixtures known to every test, and fails a test that leaves something running or open."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

pytest_plugins = ["tests.fakes.nvml.fixtures"]

_GRACE_SECONDS = 3.0
"""For threads that were told to end and processes that were killed."""


def pytest_collection_finish() -> None:
    """Thousands of tests and all that they import stay: whoever collects garbage need not look at them each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """In the end everything goes."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run in a container, whose processes hold no GPU: the fake driver's numbers are meant as they are."""
    here = {os.readlink("/proc/self/ns/pid"), "pid:[4026531836]"}
    monkeypatch.setattr("gpulse.sources.namespaces._OF_HOSTS", here)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, child processes or open files behind."""
    before = _held()
    yield
    if request.node.get_closest_marker("gpu") is not None:
        return  # a real driver's library keeps event files open for as long as it is loaded
    left = _held() - before
    deadline = time.monotonic() + _GRACE_SECONDS
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = _held() - before
    assert set() == left


def _held() -> set[str]:
    return {*_threads(), *_children(), *_files()}


def _threads() -> Iterator[str]:
    for thread in threading.enumerate():
        if thread.is_alive():
            yield f"thread {thread.name} ({thread.ident})"


def _children() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            yield from (f"process {pid}" for pid in file.read().split())


def _files() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if not target.startswith("/proc/"):  # the listing's own
                yield f"file {descriptor}: {target}"
