"""GPU usage of code blocks: attribute the GPU readings to the blocks that were open meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from gpulse.errors import RecordingError

if TYPE_CHECKING:
    from gpulse.diagnosis.second_aggregator import SecondAggregator
    from gpulse.diagnosis.second_summary import SecondSummary
    from gpulse.model.device import Device
    from gpulse.model.frame import Frame, GpuReading
    from gpulse.model.metric_catalog import Value


UTILIZATION = "gpu_utilization_ratio"
ACTIVITY = ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio")
"""GPM metrics: means over the time between two samples."""
MEMORY = "memory_used_bytes"
OWN_MEMORY = "process_memory_bytes"
_INSTANT = "power_instant_watts"
_AVERAGE = "power_watts"
_ENERGY = "energy_joules_total"

_MAX_CORRECTION_FACTOR = 1.5
"""The energy counter is ignored when it differs from the integrated power by more than this factor."""
_MAX_POWER_INTERVALS = 2000
_MIN_COVERED_RATIO = 0.95
"""Fraction of the time between two reads of the energy counter that must be measured for a comparison."""


class ReadingInterval(NamedTuple):
    """The time between two readings of a group, and its values; empty for the first reading."""

    start: float
    end: float
    watts: tuple[float, float] | None = None
    """Power at the start and the end."""
    means: tuple[tuple[str, float], ...] = ()
    peaks: tuple[tuple[str, Value], ...] = ()
    """Values read at the end."""
    is_tick: bool = False


class EnergyCorrection(NamedTuple):
    """Correction of the energy from sampled power by the energy counter."""

    start: float
    end: float
    factor: float
    """Energy of the counter divided by the energy from power samples."""


class _Point(NamedTuple):
    """One reading of a group."""

    at: float
    watts: float | None = None


class GpuMeter:
    """Takes the readings of one GPU, and returns the intervals that they complete."""

    def __init__(self) -> None:
        self._last: dict[str, _Point] = {}
        """Last reading by group."""
        self._taken: dict[str, float] = {}
        """Time of the last reading by group, in epoch seconds."""
        self._has_instant = False
        self._powered: deque[tuple[float, float, float, float]] = deque(maxlen=_MAX_POWER_INTERVALS)
        """Start, end and power of the intervals since the last read of the energy counter."""
        self._counted: tuple[float, float] | None = None
        """Time and value of the last read of the energy counter."""

    @property
    def complete_until(self) -> float:
        """Time up to which the readings of all groups have arrived."""
        return min((point.at for point in self._last.values()), default=inf)

    def add_reading(
        self, reading: GpuReading, now: float, monotonic: float, pid: int | None
    ) -> tuple[list[ReadingInterval], EnergyCorrection | None]:
        """Add a reading, and return the intervals that it completes.

        Args:
            reading: A reading of this GPU.
            now: Its time in epoch seconds.
            monotonic: Its time on the monotonic clock.
            pid: PID of this process in the driver's namespace; None when unknown.

        Returns:
            The intervals, and the correction of their energy; None when the energy counter has no new or no plausible
            value.
        """
        intervals = [*self._tick(reading, monotonic)]
        moments = {
            group: min(monotonic, at + monotonic - now)
            for group, at in reading.read_at.items()
            if at != self._taken.get(group)  # otherwise the reading repeats the one before
        }
        self._taken |= reading.read_at
        if "second" in moments:
            intervals += self._second(reading, moments["second"], pid)
        if "gpm" in moments:
            intervals += self._gpm(reading, moments["gpm"])
        for interval in intervals:
            if interval.watts is not None:
                self._powered.append((interval.start, interval.end, *interval.watts))
        return intervals, self._correction(reading, moments["slow"]) if "slow" in moments else None

    def _tick(self, reading: GpuReading, at: float) -> Iterator[ReadingInterval]:
        values = reading.values
        self._has_instant = self._has_instant or _INSTANT in values
        watts = None if self._has_instant else values.get(_AVERAGE)
        busy, memory = values.get(UTILIZATION), values.get(MEMORY)
        if busy is None and memory is None and watts is None:
            self._last.pop("tick", None)
            return
        for interval in self._between("tick", at, watts):
            yield interval._replace(
                means=() if busy is None else ((UTILIZATION, busy),),
                peaks=() if memory is None else ((MEMORY, memory),),
                is_tick=True,
            )

    def _second(self, reading: GpuReading, at: float, pid: int | None) -> Iterator[ReadingInterval]:
        own = [process.gpu_memory_bytes for process in reading.processes or () if process.pid == pid]
        known = [memory for memory in own if memory is not None]
        for interval in self._between("second", at, reading.values.get(_INSTANT)):
            yield interval._replace(peaks=((OWN_MEMORY, sum(known)),) if known else ())

    def _gpm(self, reading: GpuReading, at: float) -> Iterator[ReadingInterval]:
        means = tuple((name, reading.values[name]) for name in ACTIVITY if name in reading.values)
        for interval in self._between("gpm", at, None):
            yield interval._replace(means=means)

    def _between(self, group: str, at: float, watts: float | None) -> Iterator[ReadingInterval]:
        last = self._last.get(group)
        if last is not None:
            at = max(at, last.at)  # the two clocks are not read at the same instant; never count time twice
        self._last[group] = _Point(at, watts)
        if last is None or at == last.at:
            yield ReadingInterval(at, at)
            return
        known = None if watts is None or last.watts is None else (last.watts, watts)
        yield ReadingInterval(last.at, at, known)

    def _correction(self, reading: GpuReading, at: float) -> EnergyCorrection | None:
        energy = reading.values.get(_ENERGY)
        if energy is None or (self._counted is not None and at <= self._counted[0]):
            return None
        before, self._counted = self._counted, (at, energy)
        found = None if before is None else self._compared(before[0], at, energy - before[1])
        while self._powered and self._powered[0][1] <= at:
            self._powered.popleft()
        return found

    def _compared(self, start: float, end: float, joules: float) -> EnergyCorrection | None:
        """Compare the energy of the counter with the power between its two reads."""
        covered = shared = 0.0
        for low, high, first, last in self._powered:
            begin, stop = max(low, start), min(high, end)
            if begin < stop:
                middle = (begin + stop) / 2
                covered += stop - begin
                shared += (stop - begin) * (first + (last - first) * (middle - low) / (high - low))
        if covered < _MIN_COVERED_RATIO * (end - start) or shared <= 0:
            return None
        factor = joules / shared
        is_credible = 1 / _MAX_CORRECTION_FACTOR <= factor <= _MAX_CORRECTION_FACTOR
        return EnergyCorrection(start, end, factor) if is_credible else None


_MAX_RUNS = 100_000
"""Runs that wait for their readings; an unresponsive driver must not fill the memory."""


class RunTimes:
    """Times in which at least one run of a block was active, on the monotonic clock."""

    def __init__(self) -> None:
        self.count = 0
        """Number of runs so far."""
        self.depth = 0
        """Number of active runs."""
        self.ended_at = -inf
        """When the last run ended."""
        self._seconds = 0.0
        """Time with at least one active run, up to the last end."""
        self._runs_seconds = 0.0
        """Total length of all runs; while some are active, minus their start times."""
        self._began_at = 0.0
        self._closed: deque[tuple[float, float]] = deque(maxlen=_MAX_RUNS)

    def enter(self, at: float) -> None:
        """Record the start of a run."""
        if self.depth == 0:
            self._began_at = at
        self.count += 1
        self.depth += 1
        self._runs_seconds -= at

    def leave(self, at: float) -> None:
        """Record the end of a run; ignore a run that began before a fork."""
        if self.depth == 0:
            return
        self.depth -= 1
        self._runs_seconds += at
        if self.depth == 0:
            self.ended_at = at
            self._seconds += at - self._began_at
            if at > self._began_at:
                self._closed.append((self._began_at, at))

    def seconds(self, now: float) -> float:
        """Return the time with at least one active run."""
        return self._seconds + (max(0.0, now - self._began_at) if self.depth else 0.0)

    def runs_seconds(self, now: float) -> float:
        """Return the total length of all runs, overlapping or not."""
        return self._runs_seconds + self.depth * now

    def within(self, start: float, end: float) -> tuple[float, float]:
        """Return how much of an interval was in the block, and the middle of that part, in seconds from its start."""
        length = moment = 0.0
        if self.depth and self._began_at < end:
            low = max(start, self._began_at)
            length += end - low
            moment += (end - low) * ((low + end) / 2 - start)
        for began, ended in reversed(self._closed):
            if ended <= start:
                break
            low, high = max(start, began), min(end, ended)
            if low < high:
                length += high - low
                moment += (high - low) * ((low + high) / 2 - start)
        return (length, moment / length) if length else (0.0, 0.0)

    def covers(self, at: float) -> bool:
        """Whether a run was active at this time."""
        if self.depth and self._began_at <= at:
            return True
        for began, ended in reversed(self._closed):
            if ended < at:
                return False
            if began <= at:
                return True
        return False

    def forget(self, before: float) -> None:
        """Drop runs that ended before this time."""
        while self._closed and self._closed[0][1] < before:
            self._closed.popleft()

    def is_inactive(self, before: float) -> bool:
        """Whether no run was active since this time."""
        return self.depth == 0 and self.ended_at < before


_MAX_SECONDS_KEPT = 600
"""Number of seconds of a block that are kept for its diagnosis."""
_MIN_INSIDE_RATIO = 0.9
"""Fraction of a second that must be in a block for the second to count for it."""
_MIN_CORRECTED_RATIO = 0.98
"""Fraction of the time between two reads of the energy counter that must be in a block for them to correct it."""
_READING_TIMEOUT_SECONDS = 10.0
"""How long a run waits for its readings, which arrive some samples later."""
BlockEvent = tuple[float, "BlockUsage", bool]
"""Time, block, and whether a run began or ended."""


class BlockOverlap(NamedTuple):
    """The part of an interval that was in a block."""

    seconds: float
    middle: float
    """Middle of that part, in seconds from the start of the interval."""
    is_inside: bool
    """Whether the end of the interval, when the values were read, was in the block."""


class GpuUsage:
    """Usage of one GPU by one block."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.samples = 0
        """Number of readings while the block was open."""
        self.seconds = 0.0
        """Time of the block with known power."""
        self.joules = 0.0
        self.rough_joules = 0.0
        """Energy since the last read of the counter, from power alone."""
        self.sums: dict[str, list[float]] = {}
        """Weighted sum and weight in seconds, by metric name."""
        self.peaks: dict[str, Value] = {}

    def add(self, interval: ReadingInterval, part: BlockOverlap) -> None:
        """Add the block's part of an interval."""
        length, middle, is_inside = part
        if is_inside:
            self.samples += interval.is_tick
            for name, value in interval.peaks:
                self.peaks[name] = max(value, self.peaks.get(name, value))
        if length == 0.0:
            return
        if interval.watts is not None:
            first, last = interval.watts
            self.rough_joules += length * (first + (last - first) * middle / (interval.end - interval.start))
            self.seconds += length
        for name, mean in interval.means:
            total = self.sums.setdefault(name, [0.0, 0.0])
            total[0] += mean * length
            total[1] += length

    def correct(self, factor: float) -> None:
        """Correct the energy since the last read of the counter."""
        self.joules += self.rough_joules * factor
        self.rough_joules = 0.0


class BlockUsage:
    """Times and GPU usage of one block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_wanted: Callable[[], object] = lambda: True
        """Whether the block is still referenced."""
        self.begin()

    def begin(self) -> None:
        """Start empty."""
        self.run_times = RunTimes()
        self.measured_seconds = 0.0
        """Time of the block between two readings of the machine."""
        self.gpu_usages: dict[str, GpuUsage] = {}
        """By UUID."""
        self.seconds: dict[str, deque[SecondSummary]] = {}
        """Seconds for the diagnosis of the block, by UUID."""
        self.frame: Frame | None = None
        """The last full frame while the block was open."""

    def restart(self, now: float) -> None:
        """Discard all data; active runs count from now."""
        depth = self.run_times.depth
        self.begin()
        for _ in range(depth):
            self.run_times.enter(now)

    def gpu_usage(self, device: Device) -> GpuUsage:
        """Return the usage of one GPU."""
        gpu_usage = self.gpu_usages.get(device.uuid)
        if gpu_usage is None:
            gpu_usage = self.gpu_usages[device.uuid] = GpuUsage(device)
        return gpu_usage


class UsageTracker:
    """Attributes readings to the open blocks. Callers must hold the profiler's lock."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """PID of this process in the driver's namespace; None when unknown."""
        self.used_uuids: set[str] = set()
        """UUIDs of GPUs that list this process."""
        self.seen_at: float | None = None
        """Time of the newest reading on the monotonic clock."""
        self._overlaps: dict[tuple[BlockUsage, float, float], BlockOverlap] = {}
        """Cache for the current sample: GPUs are read together, so each overlap is needed often."""
        self._active: dict[BlockUsage, None] = {}
        self._ended_at: float | None = None
        self._meters: dict[str, GpuMeter] = {}
        self._uncorrected: dict[str, dict[GpuUsage, RunTimes]] = {}
        """Usages with energy that was not compared with the counter yet, by UUID."""
        self._digest: SecondAggregator | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no block is open."""
        return all(usage.run_times.depth == 0 for usage in self._active)

    def last_end(self) -> float | None:
        """Return when the last run of any block ended; None before the first."""
        return self._ended_at

    def is_settled(self, at: float) -> bool:
        """Whether every GPU has been read since this time on the monotonic clock."""
        return self.seen_at is not None and all(meter.complete_until >= at for meter in self._meters.values())

    def add_event(self, event: BlockEvent) -> None:
        """Record the start or the end of a run."""
        at, usage, begins = event
        if begins:
            self._active[usage] = None
            usage.run_times.enter(at)
        else:
            usage.run_times.leave(at)
            self._ended_at = at

    def tidy(self) -> None:
        """Drop blocks that are no longer referenced."""
        for usage in [a for a in self._active if a.run_times.depth == 0 and not a.is_wanted()]:
            del self._active[usage]

    def add_readings(self, gpus: Iterable[GpuReading], now: float, monotonic: float) -> None:
        """Attribute the readings of one sample; `now` is in epoch seconds, `monotonic` on the monotonic clock."""
        self._overlaps.clear()
        self.tidy()
        if self.seen_at is not None and monotonic > self.seen_at:
            for usage in self._active:
                usage.measured_seconds += self._overlap(usage, self.seen_at, monotonic).seconds
        self.seen_at = monotonic
        for gpu in gpus:
            self._attribute(gpu, now, monotonic)
        for usage in [
            a for a in self._active if a.run_times.is_inactive(monotonic - _READING_TIMEOUT_SECONDS)
        ]:
            del self._active[usage]
        for usage in self._active:
            usage.run_times.forget(monotonic - _READING_TIMEOUT_SECONDS)

    def add_frame(self, frame: Frame) -> None:
        """Keep the data of a full frame that the diagnosis of the open blocks needs."""
        from gpulse.diagnosis.second_aggregator import SecondAggregator  # noqa: PLC0415  loaded by the sampling thread

        if self._digest is None:
            self._digest = SecondAggregator()
        try:
            done = self._digest.feed(frame)
        except RecordingError:  # the machine was renamed
            self._digest, done = None, {}
        offset = frame.monotonic - frame.time
        for usage in self._active:
            if usage.run_times.covers(frame.monotonic):
                usage.frame = frame
            for uuid, second in done.items():
                inside, _ = usage.run_times.within(second.start + offset, second.end + offset)
                if inside >= _MIN_INSIDE_RATIO * (second.end - second.start):
                    kept = usage.seconds.setdefault(uuid, deque(maxlen=_MAX_SECONDS_KEPT))
                    kept.append(second)

    def stop(self) -> None:
        """End the readings; later ones do not continue them."""
        for gpu_usage in [gpu_usage for gpu_usages in self._uncorrected.values() for gpu_usage in gpu_usages]:
            gpu_usage.correct(1.0)
        self._meters.clear()
        self._uncorrected.clear()
        self._digest = None
        self.seen_at = None

    def _attribute(self, gpu: GpuReading, now: float, monotonic: float) -> None:
        uuid = gpu.device.uuid
        meter = self._meters.setdefault(uuid, GpuMeter())
        intervals, correction = meter.add_reading(gpu, now, monotonic, self.pid)
        uncorrected = self._uncorrected.setdefault(uuid, {})
        for interval in intervals:
            if any(name == OWN_MEMORY for name, _ in interval.peaks):
                self.used_uuids.add(uuid)
            for usage in self._active:
                gpu_usage = usage.gpu_usage(gpu.device)
                gpu_usage.add(interval, self._overlap(usage, interval.start, interval.end))
                if gpu_usage.rough_joules:
                    uncorrected[gpu_usage] = usage.run_times
        if correction is not None:
            start, end, factor = correction
            for gpu_usage, run_times in uncorrected.items():
                # If only a part was in the block, the counter does not show how that part differed from the rest.
                is_whole = run_times.within(start, end)[0] >= _MIN_CORRECTED_RATIO * (end - start)
                gpu_usage.correct(factor if is_whole else 1.0)
            uncorrected.clear()

    def _overlap(self, usage: BlockUsage, start: float, end: float) -> BlockOverlap:
        key = (usage, start, end)
        part = self._overlaps.get(key)
        if part is None:
            run_times = usage.run_times
            part = self._overlaps[key] = BlockOverlap(*run_times.within(start, end), run_times.covers(end))
        return part
