"""A fake machine with as many H200s and processes as a benchmark wants, for us and for those beside us."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.fakes.nvml import FakeNvml, build

from benchmarks.measure import child_environment

_MIB = 1 << 20
_SLEEP_SECONDS = 86_400
"""Longer than any benchmark."""


class Machine(NamedTuple):
    """The fake driver's controls, and the environment in which a child finds it."""

    fake: FakeNvml
    environment: dict[str, str]


@contextmanager
def fake_machine(gpus: int, processes_per_gpu: int = 0) -> Iterator[Machine]:
    """H200s with the latencies of real ones, each with so many processes, which are real and asleep."""
    with (
        tempfile.TemporaryDirectory(prefix="gpulse-bench-") as folder,
        _sleepers(gpus * processes_per_gpu) as pids,
    ):
        fake = FakeNvml.create(Path(folder, "control"), gpus=gpus)
        fake.h200_latencies()
        for number, pid in enumerate(pids):
            fake.add_process(number % gpus, pid, (500 + number) * _MIB, sm=number % 90)
        try:
            yield Machine(fake, child_environment(fake.env(_library())))
        finally:
            fake.close()


@contextmanager
def _sleepers(count: int) -> Iterator[list[int]]:
    sleep = shutil.which("sleep") or "/bin/sleep"
    pids: list[int] = []
    try:
        for _ in range(count):
            pids.append(os.posix_spawn(sleep, [sleep, str(_SLEEP_SECONDS)], os.environ))  # noqa: PERF401  ended below even when one cannot be started
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


@cache
def _library() -> Path:
    folder = tempfile.mkdtemp(prefix="gpulse-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(Path(folder))
