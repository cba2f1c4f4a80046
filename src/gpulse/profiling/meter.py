"""One GPU's readings one after the other, as stretches of time that can be shared out to blocks.

Readings come in groups with times of their own: a tick, power and processes, GPM, the counter of energy. Each group is
a line of points in time, and two points are a stretch: power in it runs straight from one to the other, activity is
what the later one says of the time before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the catalogue is loaded by the thread that reads, not by the first block
    from gpulse.model.frame import GpuReading
    from gpulse.model.metric import Value

UTILIZATION = "gpu_utilization_ratio"
ACTIVITY = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
"""What GPM says of the time between two of its samples."""
MEMORY = "memory_used_bytes"
OWN_MEMORY = "process_memory_bytes"
_INSTANT = "power_instant_watts"
_AVERAGE = "power_watts"
_ENERGY = "energy_joules_total"

_MOST_CORRECTION = 1.5
"""A counter of energy that tells a more different story than this from the power is not believed."""
_MOST_POWERED = 2000
_LEAST_COVERED = 0.95
"""How much of the time between two looks at the counter must have been measured to compare them."""


class Stretch(NamedTuple):
    """The time between two readings of a group, and what they say of it; the first one is the end of no time."""

    start: float
    end: float
    watts: tuple[float, float] | None = None
    """Power at its start and end."""
    means: tuple[tuple[str, float], ...] = ()
    peaks: tuple[tuple[str, Value], ...] = ()
    """What was read at its end."""
    is_tick: bool = False


class Correction(NamedTuple):
    """What the counter of energy says about a time over which power was looked at now and then."""

    start: float
    end: float
    factor: float
    """The counter's energy over that of the power."""


class _Point(NamedTuple):
    """One reading of a group."""

    at: float
    watts: float | None = None


class Meter:
    """Takes the readings of one GPU and tells the stretches of time that they complete."""

    def __init__(self) -> None:
        self._last: dict[str, _Point] = {}
        """By group."""
        self._taken: dict[str, float] = {}
        """By group when its last reading was taken, in epoch seconds."""
        self._has_instant = False
        self._powered: deque[tuple[float, float, float, float]] = deque(maxlen=_MOST_POWERED)
        """Start, end and power of the stretches since the counter of energy was last seen."""
        self._counted: tuple[float, float] | None = None
        """When the counter of energy was last read, and what it said."""

    @property
    def upto(self) -> float:
        """The moment up to which all groups of readings have come."""
        return min((point.at for point in self._last.values()), default=inf)

    def take(
        self, reading: GpuReading, now: float, monotonic: float, pid: int | None
    ) -> tuple[list[Stretch], Correction | None]:
        """What one reading completes.

        Args:
            reading: Of this GPU.
            now: Its time, in epoch seconds.
            monotonic: The same on the monotonic clock.
            pid: Under which number the driver knows this process, None when nobody can say.

        Returns:
            The stretches, and what the counter of energy says about the time since it was last looked at; None when it
            says nothing new, or nothing that can be believed.
        """
        stretches = [*self._tick(reading, monotonic)]
        moments = {
            group: min(monotonic, at + monotonic - now)
            for group, at in reading.read_at.items()
            if at != self._taken.get(group)  # otherwise it is held from the frame before
        }
        self._taken |= reading.read_at
        if "second" in moments:
            stretches += self._second(reading, moments["second"], pid)
        if "gpm" in moments:
            stretches += self._gpm(reading, moments["gpm"])
        for stretch in stretches:
            if stretch.watts is not None:
                self._powered.append((stretch.start, stretch.end, *stretch.watts))
        return stretches, self._correction(reading, moments["slow"]) if "slow" in moments else None

    def _tick(self, reading: GpuReading, at: float) -> Iterator[Stretch]:
        values = reading.values
        self._has_instant = self._has_instant or _INSTANT in values
        watts = None if self._has_instant else values.get(_AVERAGE)
        busy, memory = values.get(UTILIZATION), values.get(MEMORY)
        if busy is None and memory is None and watts is None:
            self._last.pop("tick", None)
            return
        for stretch in self._between("tick", at, watts):
            yield stretch._replace(
                means=() if busy is None else ((UTILIZATION, busy),),
                peaks=() if memory is None else ((MEMORY, memory),),
                is_tick=True,
            )

    def _second(self, reading: GpuReading, at: float, pid: int | None) -> Iterator[Stretch]:
        own = [process.gpu_memory_bytes for process in reading.processes or () if process.pid == pid]
        known = [memory for memory in own if memory is not None]
        for stretch in self._between("second", at, reading.values.get(_INSTANT)):
            yield stretch._replace(peaks=((OWN_MEMORY, sum(known)),) if known else ())

    def _gpm(self, reading: GpuReading, at: float) -> Iterator[Stretch]:
        means = tuple((name, reading.values[name]) for name in ACTIVITY if name in reading.values)
        for stretch in self._between("gpm", at, None):
            yield stretch._replace(means=means)

    def _between(self, group: str, at: float, watts: float | None) -> Iterator[Stretch]:
        last = self._last.get(group)
        if last is not None:
            at = max(at, last.at)  # the two clocks are not read at the same instant; no time counts twice
        self._last[group] = _Point(at, watts)
        if last is None or at == last.at:
            yield Stretch(at, at)
            return
        known = None if watts is None or last.watts is None else (last.watts, watts)
        yield Stretch(last.at, at, known)

    def _correction(self, reading: GpuReading, at: float) -> Correction | None:
        energy = reading.values.get(_ENERGY)
        if energy is None or (self._counted is not None and at <= self._counted[0]):
            return None
        before, self._counted = self._counted, (at, energy)
        found = None if before is None else self._compared(before[0], at, energy - before[1])
        while self._powered and self._powered[0][1] <= at:
            self._powered.popleft()
        return found

    def _compared(self, start: float, end: float, joules: float) -> Correction | None:
        """Two looks at the counter beside the power between them."""
        covered = shared = 0.0
        for low, high, first, last in self._powered:
            begin, stop = max(low, start), min(high, end)
            if begin < stop:
                middle = (begin + stop) / 2
                covered += stop - begin
                shared += (stop - begin) * (first + (last - first) * (middle - low) / (high - low))
        if covered < _LEAST_COVERED * (end - start) or shared <= 0:
            return None
        factor = joules / shared
        is_credible = 1 / _MOST_CORRECTION <= factor <= _MOST_CORRECTION
        return Correction(start, end, factor) if is_credible else None
