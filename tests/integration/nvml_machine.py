"""This machine with the fake driver's GPUs, read by hand and with little patience."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpulse.model.frame import Frame, GpuReading
from gpulse.model.source_health import Health
from gpulse.sources.frame_source import HealthLog
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.gpu_reader import GpuReader
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts
from tests.fakes.nvml import FakeNvml

QUICK = Cadence(second=0.05, gpm=0.1, graphics=0.1, shares=0.05, slow=0.1, pcie=0.05)
"""Every group often; a value is held for twice its period and a second."""
IMPATIENT = DriverTimeouts(start=1.0, call=1.0, survey=0.05, retry=0.05)
TICK_PATIENCE = 1.0
"""Like the patience with a call, a bound that only a call which hangs reaches: on a busy machine a healthy one may
wait for a CPU for some tenths of a second, and would count as hung with less."""
_WAIT_SECONDS = 60.0
"""How long a test waits for what must happen; only a failing test waits that long."""


class Gpus:
    """The GPUs alone, without a host around them."""

    def __init__(self, reader: GpuReader) -> None:
        self.reader = reader
        self._log = HealthLog()

    def tick(self, *, patience: float = 0.0) -> tuple[tuple[GpuReading, ...], tuple[Health, ...]]:
        """One reading."""
        now = time.time()
        self.reader.start(now)
        readings, health = self.reader.collect(now, tick_patience=TICK_PATIENCE, patience=patience)
        return readings, self._log.merge(health)

    def until(
        self, condition: Callable[[tuple[GpuReading, ...], tuple[Health, ...]], bool]
    ) -> tuple[tuple[GpuReading, ...], tuple[Health, ...]]:
        """Readings one after the other, until one is as it should be."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            readings, health = self.tick()
            if condition(readings, health):
                return readings, health
            assert time.monotonic() < deadline, (
                f"it did not come to pass: {[len(r.values) for r in readings]} {health}"
            )
            time.sleep(0.01)


@contextmanager
def reading(
    *, cadence: Cadence = QUICK, timeouts: DriverTimeouts = IMPATIENT, watch_xids: bool = False
) -> Iterator[Gpus]:
    """The fake driver's GPUs, given back afterwards."""
    reader = GpuReader(cadence, watch_xids=watch_xids, timeouts=timeouts)
    try:
        yield Gpus(reader)
    finally:
        reader.close()


@contextmanager
def machine(
    *,
    interval_seconds: float = 0.25,
    cadence: Cadence = QUICK,
    timeouts: DriverTimeouts = IMPATIENT,
    watch_xids: bool = False,
) -> Iterator[LocalMachine]:
    """This machine with the fake driver's GPUs, given back afterwards."""
    local = LocalMachine(
        interval_seconds=interval_seconds, cadence=cadence, timeouts=timeouts, watch_xids=watch_xids
    )
    try:
        yield local
    finally:
        local.close()


def frames_until(local: LocalMachine, condition: Callable[[Frame], bool]) -> Frame:
    """Frames one after the other, until one is as it should be."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition(frame := local.sample(time.time())):
        assert time.monotonic() < deadline, f"it did not come to pass: {frame.health}"
        time.sleep(0.01)
    return frame


def four(fake: FakeNvml) -> FakeNvml:
    """The machine with four GPUs."""
    for index in range(1, 4):
        fake.add(index)
    return fake


def codes(health: tuple[Health, ...], subject: str | None) -> set[str]:
    """What is wrong with one thing."""
    return {entry.code for entry in health if entry.subject == subject and entry.is_problem}
