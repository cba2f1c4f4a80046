"""Time spans in which processes were on a GPU, from their samples, and what the GPU did during them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.device import IDLE_RATIO
from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.model.intervals import Interval, overlap, subtract, total
from gpulse.reports.process_report import STEP_SECONDS, GpuKey
from gpulse.reports.time_grid import TimeGrid
from gpulse.store.store import Series

Spans = Sequence[tuple[float, float]]
"""Time spans in epoch seconds."""

PROCESS_METRICS = ("gpu_memory_bytes", "sm_ratio")
"""Every process on a GPU has at least one of them."""
WORK_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio")
"""Metrics of how busy a GPU is, in order of preference."""
_MAX_USUAL_SECONDS, _MAX_SLOW_SECONDS = 60.0, 3600.0
"""Maximum interval between samples: the first, or up to the second if most intervals are longer than the first."""
_MIN_INTERVALS = 10
"""Minimum number of intervals for their median to be used."""
_MAX_MISSED_SAMPLES = 2.5
"""A process that is seen again after at most this many intervals was there in between."""
_MAX_LATE_INTERVALS = 1.5
"""A sample is valid for this many intervals, or until the next one."""


class SampleIntervals(NamedTuple):
    """The intervals between the samples of a GPU."""

    times: NDArray[np.float64]
    """Starts of the steps with samples."""
    seconds: NDArray[np.float64]
    """Sampling interval in each of these steps."""

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the intervals at some times."""
        if not len(self.times):
            return np.full(len(times), SLOW_SECONDS)
        places = np.clip(np.searchsorted(self.times, times, side="right") - 1, 0, None)
        return self.seconds[places]

    @property
    def median(self) -> float:
        """Median interval in seconds."""
        return float(np.median(self.seconds)) if len(self.seconds) else SLOW_SECONDS


def find_sample_intervals(series: Sequence[Series], step: float, interval_seconds: float) -> SampleIntervals:
    """Return the intervals between a GPU's samples.

    Args:
        series: Series of the GPU.
        step: Length of their steps in seconds.
        interval_seconds: Current sampling interval of agents; it may have been different earlier.
    """
    if not series:
        return SampleIntervals(np.zeros(0), np.zeros(0))
    most = max(series, key=lambda one: len(one.times))
    counts = np.ones(len(most.times)) if most.counts is None else np.maximum(most.counts, 1)
    if most.counts is None:
        counts *= max(1.0, step / max(interval_seconds, 1e-3))
    apart = np.diff(most.times) / counts[:-1]
    before = np.concatenate((apart[:1], apart)) if len(apart) else np.full(1, step) / counts
    after = np.concatenate((apart, apart[-1:])) if len(apart) else before
    longest = max(_MAX_USUAL_SECONDS, _MAX_LATE_INTERVALS * interval_seconds)
    if len(apart) >= _MIN_INTERVALS:
        longest = max(longest, min(_MAX_SLOW_SECONDS, _MAX_LATE_INTERVALS * float(np.median(apart))))
    return SampleIntervals(most.times, np.clip(np.minimum(before, after), SLOW_SECONDS, longest))


def find_process_spans(
    series: Sequence[Series], step: float, intervals: SampleIntervals
) -> list[Interval[float]]:
    """Return the time spans in which a process was on a GPU.

    Args:
        series: Series of one process on that GPU, one for each known metric.
        step: Length of their steps in seconds.
        intervals: Intervals between the samples of the GPU.
    """
    most = max(series, key=lambda one: len(one.times))
    times, counts = most.times, most.counts
    usual = intervals.at(times)
    if counts is None or np.isnan(most.ends).any():
        return _intervals(times, times + np.maximum(step, usual))
    ends = most.ends
    own = np.diff(ends, prepend=np.nan) / np.maximum(counts, 1)
    if len(own) > 1:
        own[0] = own[1]
    seconds = np.where((own >= usual / 2) & (own <= _MAX_MISSED_SAMPLES * usual), own, usual)
    begins = np.maximum(times, ends - (counts - 1) * seconds)
    stops = ends + seconds
    is_near = begins[1:] - ends[:-1] <= _MAX_MISSED_SAMPLES * seconds[:-1]
    stops[:-1] = np.where(is_near, begins[1:], stops[:-1])
    return _intervals(begins, stops)


def _intervals(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> list[Interval[float]]:
    return [Interval(*span) for span in zip(starts.tolist(), ends.tolist(), strict=True)]


def overlap_seconds(times: NDArray[np.float64], step: float, spans: Spans) -> NDArray[np.float64]:
    """Return how many seconds of each step lie within some time spans."""
    found = np.zeros(len(times))
    for first, last in spans:
        begin, stop = np.searchsorted(times, (first - step, last))
        part = slice(begin, stop)
        found[part] += np.clip(
            np.minimum(times[part] + step, last) - np.maximum(times[part], first), 0.0, None
        )
    return found


def sampled_seconds(
    series: Sequence[Series], step: float, intervals: SampleIntervals, during: tuple[float, float]
) -> float:
    """Return how long a GPU has samples; each sample counts for at most a minute."""
    if not series:
        return 0.0
    most = max(series, key=lambda one: len(one.times))
    seconds = overlap_seconds(most.times, step, [during])
    if most.counts is not None:
        seconds = np.minimum(seconds, most.counts * np.minimum(intervals.at(most.times), STEP_SECONDS))
    return float(seconds.sum())


class ProcessSpans(NamedTuple):
    """Time spans in which processes of the subject, and others, were on a GPU."""

    own: Spans = ()
    """Spans of the subject's processes, in order and without overlap."""
    others: Spans = ()
    """Spans of other processes."""
    sm: Sequence[Series] = ()
    """SM use of each of the subject's processes."""
    is_sm_known: bool = False
    """Whether the SM use of all of them is known."""

    def shared_seconds(self, during: Spans) -> float:
        """Return how long other processes were on the GPU during some time spans."""
        return total(overlap(during, self.others))


class GpuWork(NamedTuple):
    """What a GPU did while the subject's processes were on it."""

    seconds: float
    """How long they were on it."""
    known: float = 0.0
    """How much of that time its utilization is known."""
    busy: float = 0.0
    """The known time multiplied by the utilization."""
    idle: float = 0.0
    """How much of the known time the GPU was idle, or only others used it."""
    energy: float | None = None


def measure_work(
    series: Sequence[Series], grid: TimeGrid, held: ProcessSpans, intervals: SampleIntervals
) -> GpuWork:
    """Return what a GPU did while the subject was on it, computed per minute or in longer steps.

    Args:
        series: Series of the GPU.
        grid: Grid of the series.
        held: When processes were on it.
        intervals: Intervals between its samples.
    """
    seconds = total(held.own)
    if not grid.count or not held.own:
        return GpuWork(seconds)
    times = np.array(grid.times())
    weights = overlap_seconds(times, grid.step, held.own)
    reach = intervals.at(times)
    rows = {one.metric: _fill_short_steps(place_on_grid(one, grid), grid.step, reach) for one in series}
    used = np.full(grid.count, np.nan)
    for metric in WORK_METRICS:
        used = np.where(np.isnan(used), rows.get(metric, used), used)
    known = np.where(np.isnan(used), 0.0, weights)
    busy = np.where(np.isnan(used), 0.0, used) * known
    power = rows.get("power_watts", np.full(grid.count, np.nan))
    powered = np.where(np.isnan(power), 0.0, weights)
    energy = float((np.nan_to_num(power) * powered).sum()) if powered.any() else None
    minutes = np.floor(times / max(STEP_SECONDS, grid.step)).astype(np.int64)
    groups = minutes - minutes[0]
    held_known, worked = _sum_groups(groups, known), _sum_groups(groups, busy)
    is_idle = (held_known > 0) & (worked <= IDLE_RATIO * held_known)
    if held.is_sm_known and held.others:
        shared = _sum_groups(groups, overlap_seconds(times, grid.step, held.others))
        own = _sum_groups(groups, _sum_sm(held, grid, reach) * known)
        is_idle |= (held_known > 0) & (shared > SLOW_SECONDS) & (own <= IDLE_RATIO * held_known)
    return GpuWork(
        seconds,
        float(known.sum()),
        float(busy.sum()),
        float(held_known[is_idle].sum()),
        energy,
    )


def _sum_sm(held: ProcessSpans, grid: TimeGrid, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the SM use of the subject's processes."""
    total = np.zeros(grid.count)
    for one in held.sm:
        total += np.nan_to_num(
            _fill_short_steps(place_on_grid(one, grid), grid.step, _MAX_MISSED_SAMPLES * reach)
        )
    return total


def _fill_short_steps(
    values: NDArray[np.float64], step: float, reach: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Fill steps that are shorter than the sampling interval: a value is valid until the next one, but not for too long."""
    places = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, places))
    is_near = (last >= 0) & ((places - last) * step < _MAX_LATE_INTERVALS * reach)
    return np.where(is_near, values[last], np.nan)


def place_on_grid(series: Series, grid: TimeGrid) -> NDArray[np.float64]:
    """Return the values of a series on the grid; NaN is unknown."""
    found = np.full(grid.count, np.nan)
    positions = grid.positions(series.times)
    inside = (positions >= 0) & (positions < grid.count)
    found[positions[inside]] = series.values[inside]
    return found


def _sum_groups(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(groups, weights=values).astype(np.float64)


def group_by_process(series: Iterable[Series]) -> dict[GpuKey, dict[int, list[Series]]]:
    """Return the series of processes by GPU, then by PID."""
    found: dict[GpuKey, dict[int, list[Series]]] = {}
    for one in series:
        pid, _, uuid = one.key.subject.partition("@")
        if uuid and pid.isdecimal():
            found.setdefault((one.key.node, uuid), {}).setdefault(int(pid), []).append(one)
    return found


def collect_process_spans(
    processes: Mapping[int, Sequence[Series]],
    step: float,
    intervals: SampleIntervals,
    own_spans: Callable[[int], Spans | None],
    clip: Callable[[Iterable[tuple[float, float]]], list[Interval[float]]],
) -> ProcessSpans:
    """Return the time spans in which processes were on a GPU.

    Args:
        processes: Series of all processes on the GPU, by PID.
        step: Length of their steps in seconds.
        intervals: Intervals between the samples of the GPU.
        own_spans: Returns when the process with a PID belonged to the subject; None for always.
        clip: Clips time spans to the subject's time, and merges those that touch.
    """
    own: list[Interval[float]] = []
    others: list[Interval[float]] = []
    used: list[Series] = []
    is_sm_known = True
    for pid, series in processes.items():
        there, alive = clip(find_process_spans(series, step, intervals)), own_spans(pid)
        mine = there if alive is None else overlap(there, alive)
        own += mine
        if alive is not None:
            others += subtract(there, alive)
        if mine:
            known = [one for one in series if one.metric == "sm_ratio"]
            used += known
            is_sm_known &= bool(known)
    return ProcessSpans(clip(own), clip(others), used, is_sm_known and bool(used))
