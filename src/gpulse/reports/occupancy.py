"""When processes were on a GPU, from their samples, and what the GPU did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.idleness import IDLE_RATIO
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports.chart import Grid
from gpulse.reports.usage import STEP_SECONDS
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

Spans = Sequence[tuple[float, float]]
"""Stretches of time, in epoch seconds."""

HELD_METRICS = ("gpu_memory_bytes", "sm_ratio")
"""One of them is known of a process that is on a GPU."""
WORK_METRICS = ("gpu_utilization_ratio", "graphics_active_ratio", "sm_active_ratio")
"""What says how busy a GPU is, the best first."""
_LONGEST_SECONDS, _SLOWEST_SECONDS = 60.0, 3600.0
"""Samples are not further apart than the one, unless most of them are, and never than the other."""
_ENOUGH = 10
_MISSED = 2.5
"""A process that is seen again after no more than so many samples was there in between."""


_LATE = 1.5
"""A sample stands for so many times as long as samples are apart until the next."""


class Pace(NamedTuple):
    """How far apart the samples of a GPU are."""

    times: NDArray[np.float64]
    """When steps with samples begin."""
    seconds: NDArray[np.float64]
    """Between two samples in each of them."""

    def at(self, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """At some times; processes are looked at less often than GPUs may be."""
        if not len(self.times):
            return np.full(len(times), SLOW_SECONDS)
        places = np.clip(np.searchsorted(self.times, times, side="right") - 1, 0, None)
        return self.seconds[places]

    @property
    def usual(self) -> float:
        """The one that most of the samples have."""
        return float(np.median(self.seconds)) if len(self.seconds) else SLOW_SECONDS


def pace_of(steps: Sequence[Series], step: float, interval_seconds: float) -> Pace:
    """How far apart a GPU's samples are.

    Args:
        steps: Of the GPU.
        step: How long each is.
        interval_seconds: How often agents sample now; they may have had another pace.
    """
    if not steps:
        return Pace(np.zeros(0), np.zeros(0))
    most = max(steps, key=lambda one: len(one.times))
    counts = np.ones(len(most.times)) if most.counts is None else np.maximum(most.counts, 1)
    if most.counts is None:
        counts *= max(1.0, step / max(interval_seconds, 1e-3))
    apart = np.diff(most.times) / counts[:-1]
    before = np.concatenate((apart[:1], apart)) if len(apart) else np.full(1, step) / counts
    after = np.concatenate((apart, apart[-1:])) if len(apart) else before
    longest = max(_LONGEST_SECONDS, _LATE * interval_seconds)
    if len(apart) >= _ENOUGH:
        longest = max(longest, min(_SLOWEST_SECONDS, _LATE * float(np.median(apart))))
    return Pace(most.times, np.clip(np.minimum(before, after), SLOW_SECONDS, longest))


def spans_of(steps: Sequence[Series], step: float, pace: Pace) -> list[tuple[float, float]]:
    """From when to when a process was on a GPU.

    Args:
        steps: Of one process on that GPU, one for each metric that is known of it.
        step: How long each is.
        pace: How far apart the samples of the GPU are.
    """
    most = max(steps, key=lambda one: len(one.times))
    times, counts = most.times, most.counts
    usual = pace.at(times)
    if counts is None or np.isnan(most.ends).any():
        return list(zip(times.tolist(), (times + np.maximum(step, usual)).tolist(), strict=True))
    ends = most.ends
    own = np.diff(ends, prepend=np.nan) / np.maximum(counts, 1)
    if len(own) > 1:
        own[0] = own[1]
    seconds = np.where((own >= usual / 2) & (own <= _MISSED * usual), own, usual)
    begins = np.maximum(times, ends - (counts - 1) * seconds)
    stops = ends + seconds
    is_near = begins[1:] - ends[:-1] <= _MISSED * seconds[:-1]
    stops[:-1] = np.where(is_near, begins[1:], stops[:-1])
    return list(zip(begins.tolist(), stops.tolist(), strict=True))


def within(times: NDArray[np.float64], step: float, spans: Spans) -> NDArray[np.float64]:
    """How much of each step lies in some stretches of time, in seconds."""
    found = np.zeros(len(times))
    for first, last in spans:
        begin, stop = np.searchsorted(times, (first - step, last))
        part = slice(begin, stop)
        found[part] += np.clip(
            np.minimum(times[part] + step, last) - np.maximum(times[part], first), 0.0, None
        )
    return found


def sampled(steps: Sequence[Series], step: float, pace: Pace, during: tuple[float, float]) -> float:
    """For how long there are samples of a GPU, each of which stands for a minute at most."""
    if not steps:
        return 0.0
    most = max(steps, key=lambda one: len(one.times))
    seconds = within(most.times, step, [during])
    if most.counts is not None:
        seconds = np.minimum(seconds, most.counts * np.minimum(pace.at(most.times), STEP_SECONDS))
    return float(seconds.sum())


def overlap(one: Spans, other: Spans) -> list[tuple[float, float]]:
    """The time that is in both; each has its stretches in order and apart."""
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


def length(spans: Spans) -> float:
    """How long some stretches are together."""
    return sum(last - first for first, last in spans)


class Occupancy(NamedTuple):
    """Who was on a GPU when."""

    own: Spans = ()
    """When a process of the subject was, in order and apart."""
    others: Spans = ()
    """When another's was."""
    sm: Sequence[Series] = ()
    """How much each of the subject's processes used of it."""
    is_sm_known: bool = False
    """Whether that is known of all of them."""

    def shared_seconds(self, during: Spans) -> float:
        """For how long others were on it in some stretches of time."""
        return length(overlap(during, self.others))


class Work(NamedTuple):
    """What a GPU did while the subject's processes were on it."""

    seconds: float
    """For how long they were."""
    known: float = 0.0
    """For how much of that it is known how busy it was."""
    busy: float = 0.0
    """That time multiplied with the utilization."""
    idle: float = 0.0
    """For how much of it neither it nor, beside others, they did anything."""
    energy: float | None = None


def work(steps: Sequence[Series], moments: Grid, held: Occupancy, pace: Pace) -> Work:
    """What a GPU did while somebody was on it, minute by minute or in longer steps.

    Args:
        steps: Of the GPU.
        moments: Their grid.
        held: Who was on it.
        pace: How far apart its samples are.
    """
    seconds = length(held.own)
    if not moments.count or not held.own:
        return Work(seconds)
    times = np.array(moments.times())
    weights = within(times, moments.step, held.own)
    reach = pace.at(times)
    rows = {one.metric: _filled(row(one, moments), moments.step, reach) for one in steps}
    used = np.full(moments.count, np.nan)
    for metric in WORK_METRICS:
        used = np.where(np.isnan(used), rows.get(metric, used), used)
    known = np.where(np.isnan(used), 0.0, weights)
    busy = np.where(np.isnan(used), 0.0, used) * known
    power = rows.get("power_watts", np.full(moments.count, np.nan))
    powered = np.where(np.isnan(power), 0.0, weights)
    energy = float((np.nan_to_num(power) * powered).sum()) if powered.any() else None
    minutes = np.floor(times / max(STEP_SECONDS, moments.step)).astype(np.int64)
    groups = minutes - minutes[0]
    held_known, worked = _sums(groups, known), _sums(groups, busy)
    is_idle = (held_known > 0) & (worked <= IDLE_RATIO * held_known)
    if held.is_sm_known and held.others:
        beside = _sums(groups, within(times, moments.step, held.others))
        own = _sums(groups, _sm(held, moments, reach) * known)
        is_idle |= (held_known > 0) & (beside > SLOW_SECONDS) & (own <= IDLE_RATIO * held_known)
    return Work(
        seconds,
        float(known.sum()),
        float(busy.sum()),
        float(held_known[is_idle].sum()),
        energy,
    )


def _sm(held: Occupancy, moments: Grid, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much all of the subject's processes used."""
    total = np.zeros(moments.count)
    for one in held.sm:
        total += np.nan_to_num(_filled(row(one, moments), moments.step, _MISSED * reach))
    return total


def _filled(values: NDArray[np.float64], step: float, reach: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of steps that are shorter than samples are apart: each holds until the next, for a while."""
    places = np.arange(len(values))
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, places))
    is_near = (last >= 0) & ((places - last) * step < _LATE * reach)
    return np.where(is_near, values[last], np.nan)


def row(steps: Series, moments: Grid) -> NDArray[np.float64]:
    """The means of steps on their grid, NaN where nothing is known."""
    found = np.full(moments.count, np.nan)
    places = moments.places(steps.times)
    inside = (places >= 0) & (places < moments.count)
    found[places[inside]] = steps.values[inside]
    return found


def _sums(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(groups, weights=values).astype(np.float64)


def by_process(steps: Iterable[Series]) -> dict[tuple[int, str], dict[int, list[Series]]]:
    """The steps of processes by node and GPU, then by pid."""
    found: dict[tuple[int, str], dict[int, list[Series]]] = {}
    for one in steps:
        pid, _, uuid = one.key.subject.partition("@")
        if uuid and pid.isdecimal():
            found.setdefault((one.key.node, uuid), {}).setdefault(int(pid), []).append(one)
    return found


def occupancy(
    processes: Mapping[int, Sequence[Series]],
    step: float,
    pace: Pace,
    lives: Callable[[int], Spans | None],
    merged: Callable[[Iterable[tuple[float, float]]], list[tuple[float, float]]],
) -> Occupancy:
    """Who was on a GPU when.

    Args:
        processes: Everybody's steps there, by pid.
        step: How long each is.
        pace: How far apart the samples of the GPU are.
        lives: When a process with some pid was the subject's; None for always.
        merged: Cuts stretches to the subject's time, and makes one of those that meet.
    """
    own: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    used: list[Series] = []
    is_sm_known = True
    for pid, steps in processes.items():
        there, alive = merged(spans_of(steps, step, pace)), lives(pid)
        mine = there if alive is None else overlap(there, alive)
        own += mine
        if alive is not None:
            others += _without(there, alive)
        if mine:
            known = [one for one in steps if one.metric == "sm_ratio"]
            used += known
            is_sm_known &= bool(known)
    return Occupancy(merged(own), merged(others), used, is_sm_known and bool(used))


def _without(spans: Spans, taken: Spans) -> list[tuple[float, float]]:
    """What is left of some stretches; both are in order and apart."""
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
