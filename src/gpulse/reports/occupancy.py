"""When processes were on a GPU, from their samples, and what the GPU did in that time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports.gpu_time import STEP_SECONDS, GpuKey
from gpulse.reports.grid import Grid
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

Spans = Sequence[tuple[float, float]]
"""Time spans in epoch seconds."""

HELD_METRICS = ("gpu_memory_bytes", "sm_ratio")
"""One of them is known of a process that is on a GPU."""
WORK_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio")
"""Metrics that say how busy a GPU is, the best first."""
_MAX_USUAL_SECONDS, _MAX_SLOW_SECONDS = 60.0, 3600.0
"""Samples are not further apart than the first, unless most of them are, and never further than the second."""
_MIN_INTERVALS = 10
"""From this many intervals on their median is taken as the usual one."""
_MAX_MISSED_SAMPLES = 2.5
"""A process that is seen again after at most this many samples was there in between."""
_MAX_LATE_INTERVALS = 1.5
"""A sample is valid for this many intervals, or until the next one."""


class Pace(NamedTuple):
    """The intervals between the samples of a GPU."""

    times: NDArray[np.float64]
    """When the steps that have samples begin."""
    seconds: NDArray[np.float64]
    """The interval in each of them."""

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the interval at some times; processes are sampled less often than GPUs may be."""
        if not len(self.times):
            return np.full(len(times), SLOW_SECONDS)
        places = np.clip(np.searchsorted(self.times, times, side="right") - 1, 0, None)
        return self.seconds[places]

    @property
    def usual(self) -> float:
        """The median."""
        return float(np.median(self.seconds)) if len(self.seconds) else SLOW_SECONDS


def pace_of(series: Sequence[Series], step: float, interval_seconds: float) -> Pace:
    """Return the intervals between a GPU's samples.

    Args:
        series: Of the GPU.
        step: Length of their steps in seconds.
        interval_seconds: The interval of agents now; it may have been another one.
    """
    if not series:
        return Pace(np.zeros(0), np.zeros(0))
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
    return Pace(most.times, np.clip(np.minimum(before, after), SLOW_SECONDS, longest))


def spans_of(series: Sequence[Series], step: float, pace: Pace) -> list[tuple[float, float]]:
    """Return from when to when a process was on a GPU.

    Args:
        series: Of one process on that GPU, one for each metric that is known of it.
        step: Length of their steps in seconds.
        pace: The intervals between the samples of the GPU.
    """
    most = max(series, key=lambda one: len(one.times))
    times, counts = most.times, most.counts
    usual = pace.at(times)
    if counts is None or np.isnan(most.ends).any():
        return list(zip(times.tolist(), (times + np.maximum(step, usual)).tolist(), strict=True))
    ends = most.ends
    own = np.diff(ends, prepend=np.nan) / np.maximum(counts, 1)
    if len(own) > 1:
        own[0] = own[1]
    seconds = np.where((own >= usual / 2) & (own <= _MAX_MISSED_SAMPLES * usual), own, usual)
    begins = np.maximum(times, ends - (counts - 1) * seconds)
    stops = ends + seconds
    is_near = begins[1:] - ends[:-1] <= _MAX_MISSED_SAMPLES * seconds[:-1]
    stops[:-1] = np.where(is_near, begins[1:], stops[:-1])
    return list(zip(begins.tolist(), stops.tolist(), strict=True))


def overlap_seconds(times: NDArray[np.float64], step: float, spans: Spans) -> NDArray[np.float64]:
    """Return for how many seconds each step lies within some time spans."""
    found = np.zeros(len(times))
    for first, last in spans:
        begin, stop = np.searchsorted(times, (first - step, last))
        part = slice(begin, stop)
        found[part] += np.clip(
            np.minimum(times[part] + step, last) - np.maximum(times[part], first), 0.0, None
        )
    return found


def sampled_seconds(series: Sequence[Series], step: float, pace: Pace, during: tuple[float, float]) -> float:
    """Return for how long there are samples of a GPU; each counts for a minute at most."""
    if not series:
        return 0.0
    most = max(series, key=lambda one: len(one.times))
    seconds = overlap_seconds(most.times, step, [during])
    if most.counts is not None:
        seconds = np.minimum(seconds, most.counts * np.minimum(pace.at(most.times), STEP_SECONDS))
    return float(seconds.sum())


def overlap(one: Spans, other: Spans) -> list[tuple[float, float]]:
    """Return the time that is in both; the spans of each are in order and apart."""
    found = []
    place = 0
    for first, last in one:
        while place < len(other) and other[place][1] <= first:
            place += 1
        for begin, end in other[place:]:
            if begin >= last:
                break
            found.append((max(first, begin), min(last, end)))
    return found


def total_seconds(spans: Spans) -> float:
    """Return the length of some time spans together."""
    return sum(last - first for first, last in spans)


class Occupancy(NamedTuple):
    """When processes of the subject, and of others, were on a GPU."""

    own: Spans = ()
    """The subject's, in order and apart."""
    others: Spans = ()
    """Those of others."""
    sm: Sequence[Series] = ()
    """SM use of each of the subject's processes."""
    is_sm_known: bool = False
    """Whether it is known for all of them."""

    def shared_seconds(self, during: Spans) -> float:
        """Return for how long others were on it in some time spans."""
        return total_seconds(overlap(during, self.others))


class Work(NamedTuple):
    """What a GPU did while the subject's processes were on it."""

    seconds: float
    """For how long they were on it."""
    known: float = 0.0
    """For how much of that its utilization is known."""
    busy: float = 0.0
    """That time multiplied by the utilization."""
    idle: float = 0.0
    """For how much of that the GPU was idle, or only others used it."""
    energy: float | None = None


def measure_work(series: Sequence[Series], grid: Grid, held: Occupancy, pace: Pace) -> Work:
    """Return what a GPU did while the subject was on it, minute by minute or in longer steps.

    Args:
        series: Of the GPU.
        grid: Their grid.
        held: Who was on it.
        pace: The intervals between its samples.
    """
    seconds = total_seconds(held.own)
    if not grid.count or not held.own:
        return Work(seconds)
    times = np.array(grid.times())
    weights = overlap_seconds(times, grid.step, held.own)
    reach = pace.at(times)
    rows = {one.metric: _filled(on_grid(one, grid), grid.step, reach) for one in series}
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
    held_known, worked = _sums(groups, known), _sums(groups, busy)
    is_idle = (held_known > 0) & (worked <= IDLE_RATIO * held_known)
    if held.is_sm_known and held.others:
        beside = _sums(groups, overlap_seconds(times, grid.step, held.others))
        own = _sums(groups, _sm(held, grid, reach) * known)
        is_idle |= (held_known > 0) & (beside > SLOW_SECONDS) & (own <= IDLE_RATIO * held_known)
    return Work(
        seconds,
        float(known.sum()),
        float(busy.sum()),
        float(held_known[is_idle].sum()),
        energy,
    )


def _sm(held: Occupancy, grid: Grid, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the SM use of all of the subject's processes together."""
    total = np.zeros(grid.count)
    for one in held.sm:
        total += np.nan_to_num(_filled(on_grid(one, grid), grid.step, _MAX_MISSED_SAMPLES * reach))
    return total


def _filled(values: NDArray[np.float64], step: float, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fill steps that are shorter than the interval between samples: a value is valid until the next, for a while."""
    places = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, places))
    is_near = (last >= 0) & ((places - last) * step < _MAX_LATE_INTERVALS * reach)
    return np.where(is_near, values[last], np.nan)


def on_grid(series: Series, grid: Grid) -> NDArray[np.float64]:
    """Return the values of a series on the grid, NaN where nothing is known."""
    found = np.full(grid.count, np.nan)
    positions = grid.positions(series.times)
    inside = (positions >= 0) & (positions < grid.count)
    found[positions[inside]] = series.values[inside]
    return found


def _sums(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(groups, weights=values).astype(np.float64)


def by_process(series: Iterable[Series]) -> dict[GpuKey, dict[int, list[Series]]]:
    """Return the series of processes by GPU, then by pid."""
    found: dict[GpuKey, dict[int, list[Series]]] = {}
    for one in series:
        pid, _, uuid = one.key.subject.partition("@")
        if uuid and pid.isdecimal():
            found.setdefault((one.key.node, uuid), {}).setdefault(int(pid), []).append(one)
    return found


def find_occupancy(
    processes: Mapping[int, Sequence[Series]],
    step: float,
    pace: Pace,
    own_spans: Callable[[int], Spans | None],
    clip: Callable[[Iterable[tuple[float, float]]], list[tuple[float, float]]],
) -> Occupancy:
    """Return when processes were on a GPU.

    Args:
        processes: All series there, by pid.
        step: Length of their steps in seconds.
        pace: The intervals between the samples of the GPU.
        own_spans: When a process with some pid was the subject's; None for always.
        clip: Cuts time spans to the subject's time, and merges those that meet.
    """
    own: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    used: list[Series] = []
    is_sm_known = True
    for pid, series in processes.items():
        there, alive = clip(spans_of(series, step, pace)), own_spans(pid)
        mine = there if alive is None else overlap(there, alive)
        own += mine
        if alive is not None:
            others += _subtract(there, alive)
        if mine:
            known = [one for one in series if one.metric == "sm_ratio"]
            used += known
            is_sm_known &= bool(known)
    return Occupancy(clip(own), clip(others), used, is_sm_known and bool(used))


def _subtract(spans: Spans, taken: Spans) -> list[tuple[float, float]]:
    """Return the spans without the time that is taken; both are in order and apart."""
    found = []
    for first, last in spans:
        begin = first
        for away, back in taken:
            if back <= begin or away >= last:
                continue
            if away > begin:
                found.append((begin, away))
            begin = back
        if begin < last:
            found.append((begin, last))
    return found
