"""Play the recordings of the demo in a loop, with counters that keep growing."""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from itertools import accumulate
from typing import NamedTuple

from gpulse.model.frame import Frame, GpuReading, HostReading
from gpulse.model.metric_catalog import CATALOG, Scope, Value, Values
from gpulse.sources.recording_reader import TraceDecoder

Cores = tuple[tuple[int, ...], ...]
_COARSE_RESOLUTION = 0.01
_BUSY_SECONDS = (
    "cpu_user_seconds_total",
    "cpu_nice_seconds_total",
    "cpu_system_seconds_total",
    "cpu_softirq_seconds_total",
    "cpu_iowait_seconds_total",
)
ACTIVITY_METRICS = ("gpu_utilization_ratio", "sm_active_ratio")
_AVERAGED_METRICS = {
    name
    for name, metric in CATALOG["gpu"].items()
    if metric.kind == "ratio" or name in ("power_watts", "power_instant_watts")
}


class PackagedRecording:
    """One packaged recording, decoded as it is needed."""

    def __init__(self, name: str) -> None:
        packed = files("gpulse.sources").joinpath("demo", f"{name}.jsonl.gz").read_bytes()
        header, *self._lines = gzip.decompress(packed).splitlines()
        self._decoder = TraceDecoder()
        self._decoder.feed(header.decode())
        self._frames: dict[int, Frame] = {}
        self.first = self.frame(0)

    def __len__(self) -> int:
        return len(self._lines)

    def frame(self, index: int) -> Frame:
        """Return the frame of one line; concurrent threads may both decode it, with the same result."""
        frame = self._frames.get(index)
        if frame is None:
            decoded = self._decoder.feed(self._lines[index].decode())
            assert decoded is not None  # noqa: S101  the header was removed before
            frame = self._frames[index] = decoded
        return frame

    def index(self, seconds: float) -> int:
        """Return the last line at or before this many seconds; lines are about 0.1 s apart."""
        origin = self.first.time
        index = min(len(self) - 1, max(0, int(seconds * 10)))
        while index > 0 and self.frame(index).time - origin > seconds:
            index -= 1
        while index + 1 < len(self) and self.frame(index + 1).time - origin <= seconds:
            index += 1
        return index


class LoopFrame(NamedTuple):
    """One frame of a recording that plays in a loop."""

    frame: Frame
    loops: int
    """Number of completed loops."""
    pids: set[int]
    """The processes that hold the GPU, and their descendants."""
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    """Line of the recording."""


class RecordingLoop:
    """The part of a recording that repeats, and how much its counters grow each time."""

    def __init__(self, name: str, begin: float) -> None:
        """Find the part to repeat.

        Args:
            name: Name of the recording.
            begin: Start of the interesting part, in seconds after the recording's start.
        """
        self._recording = PackagedRecording(name)
        self.first = self._recording.first
        self._begin = self._recording.index(begin)
        self._end = self._last_alike(self._begin)
        self.base = self._recording.frame(self._begin)
        self.end = self._recording.frame(self._end)
        self.span = self.end.time - self.base.time
        self._origin = self.base.time - self.first.time
        base, end = self.base, self.end
        self.gpu = compute_growth("gpu", base.gpus[0].values, end.gpus[0].values)
        self.host = compute_growth("host", host_values(base.host), host_values(end.host))
        self.cores = compute_core_growth(_cores(base.host), _cores(end.host))
        self.disks = [
            compute_growth("disk", b.values, e.values) for b, e in zip(base.disks, end.disks, strict=True)
        ]
        self.links = [
            compute_growth("network", b.values, e.values)
            for b, e in zip(base.network, end.network, strict=True)
        ]
        last = {process.pid: process.values for process in end.processes}
        self.processes = {
            process.pid: compute_growth("process", process.values, last.get(process.pid, {}))
            for process in base.processes
        }
        self.load = sum(self.host.get(name, 0) for name in _BUSY_SECONDS) / self.span
        """Mean number of CPUs that were busy, or waited for a disk."""
        self.reserved_bytes = _find_reserved_bytes(base.gpus[0])
        self.holders = sorted(process.pid for process in base.processes if process.on_gpu)
        """The processes that hold the GPU."""
        self._trees: dict[int, set[int]] = {}
        self._means: dict[tuple[int, int], Values] = {}

    def at(self, seconds: float) -> LoopFrame:
        """Return the frame this many seconds after the first loop began."""
        loops, offset = divmod(max(0.0, seconds), self.span)
        index = self._recording.index(self._origin + offset)
        frame = self._recording.frame(index)
        pids = self._trees.get(index)
        if pids is None:
            pids = self._trees[index] = find_gpu_processes(frame)
        return LoopFrame(frame, int(loops), pids, index)

    def means(self, played: LoopFrame, length: float) -> Values:
        """Return the mean of the GPU's varying metrics over some time up to a frame, at most over the whole loop."""
        count = self._end - self._begin
        wanted = min(count, max(1, round(count * length / self.span)))
        first = 0 if wanted == count else played.index - self._begin + 1 - wanted + count
        found = self._means.get((first, wanted))
        if found is None:
            found = self._means[first, wanted] = {
                name: _compute_mean(totals[first + wanted] - totals[first], wanted, name)
                for name, totals in self._totals.items()
            }
        return found

    @cached_property
    def sm_shares(self) -> Mapping[int, float]:
        """Share of each process in the work of the GPU, by PID: the recording does not have it in every frame."""
        found: dict[int, list[float]] = {}
        for index in range(self._begin, self._end):
            for process in self._recording.frame(index).gpus[0].processes or ():
                ratios = found.setdefault(process.pid, [])
                if process.sm_ratio is not None:
                    ratios.append(process.sm_ratio)
        means = {pid: sum(ratios) / len(ratios) if ratios else 0.0 for pid, ratios in found.items()}
        total = sum(means.values())
        return {pid: mean / total if total else 1 / len(means) for pid, mean in means.items()}

    @cached_property
    def _totals(self) -> dict[str, list[float]]:
        """Cumulative sums of each metric over the loop played twice."""
        played = [self._recording.frame(index).gpus[0].values for index in range(self._begin, self._end)]
        found = {}
        for name in _AVERAGED_METRICS.intersection(*played):
            values = [float(values[name]) for values in played]
            found[name] = list(accumulate([*values, *values, values[0]], initial=0.0))
        return found

    def _last_alike(self, begin: int) -> int:
        """Return the last line with the same processes: near the end of a recording they exit."""
        pids = find_gpu_processes(self._recording.frame(begin))
        index = len(self._recording) - 1
        while index > begin and find_gpu_processes(self._recording.frame(index)) != pids:
            index -= 1
        return index


def _find_reserved_bytes(gpu: GpuReading) -> int:
    """Return the memory in use that belongs to no process: the driver's own."""
    held = sum(process.gpu_memory_bytes or 0 for process in gpu.processes or ())
    return max(0, int(gpu.values.get("memory_used_bytes", 0)) - held)


def _compute_mean(total: float, count: int, name: str) -> float:
    """Return a mean; for metrics with coarse resolution rounded up, so that a little activity does not become zero."""
    resolution = CATALOG["gpu"][name].resolution
    mean = round(total / count, 6)
    return mean if resolution < _COARSE_RESOLUTION else math.ceil(mean / resolution) * resolution


@cache
def load_loop(name: str, begin: float) -> RecordingLoop:
    """Return the loop of a recording, shared by all that play it."""
    return RecordingLoop(name, begin)


def find_gpu_processes(frame: Frame) -> set[int]:
    """Return the processes that hold the GPU and their descendants."""
    pids = {process.pid for process in frame.processes if process.on_gpu}
    grew = True
    while grew:
        children = {process.pid for process in frame.processes if process.identity.parent_pid in pids}
        grew = not children <= pids
        pids |= children
    return pids


def compute_growth(scope: Scope, base: Values, end: Values) -> Values:
    """Return how much each counter grows from one reading to another."""
    metrics = CATALOG[scope]
    return {
        name: max(0, end.get(name, value) - value)
        for name, value in base.items()
        if metrics[name].kind == "counter"
    }


def compute_core_growth(base: Cores, end: Cores) -> Cores:
    """Return how much the ticks of every CPU grow."""
    return tuple(
        tuple(last - first for first, last in zip(old, new, strict=True))
        for old, new in zip(base, end, strict=True)
    )


class CounterOffsets(NamedTuple):
    """Increments of the counters by a GPU's earlier workloads."""

    gpu: Values
    host: Values
    disk: Values
    link: Values
    cores: Cores


_NOTHING: Values = {}
NO_OFFSETS = CounterOffsets(_NOTHING, _NOTHING, _NOTHING, _NOTHING, ())
"""Offsets of the first workload."""


def add_growth(values: Values, growth: Values, loops: int, offsets: Mapping[str, Value] = _NOTHING) -> Values:
    """Return the values with their counters increased by the completed loops and earlier workloads."""
    made = dict(values)
    if loops or offsets:
        for name, more in growth.items():
            if name in made:
                # Rounded, or the last digit of a sum could decrease where the loop restarts.
                made[name] = round(made[name] + loops * more + offsets.get(name, 0), 6)
    return made


def add_core_growth(cores: Cores, growth: Cores, loops: int, offsets: Cores = ()) -> Cores:
    """Return the ticks of CPUs increased in the same way."""
    if not loops and not offsets:
        return cores
    if not offsets:
        return tuple(
            tuple(now + loops * more for now, more in zip(core, grows, strict=True))
            for core, grows in zip(cores, growth, strict=True)
        )
    return tuple(
        tuple(now + loops * more + before for now, more, before in zip(core, grows, carried, strict=True))
        for core, grows, carried in zip(cores, growth, offsets, strict=True)
    )


def host_values(host: HostReading | None) -> Values:
    """Return the values of a host; none when it was not read."""
    return {} if host is None else host.values


def _cores(host: HostReading | None) -> Cores:
    return () if host is None else host.cores


def sum_values(parts: Sequence[Values]) -> Values:
    """Return the sums of values by name."""
    total: dict[str, Value] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total
