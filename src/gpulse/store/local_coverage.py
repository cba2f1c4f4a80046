"""Track for which nodes and time ranges this head's own disk has all frames."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.intervals import Interval, groups, merge, subtract
from gpulse.model.metric_catalog import Scope
from gpulse.store.history.segments import Segment
from gpulse.store.local import LocalStore
from gpulse.store.store import Query, Series

MINUTE_SECONDS = 60.0
_PRESENT_SECONDS = 15.0
"""A node whose last frame is this recent is still sending to this head."""
_MAX_GAPS = 8
"""Maximum number of gaps that one query fills from another store."""
_MAX_INTERVALS = 500
_MAX_MISSING_SAMPLES = 1
"""A step counts as complete with up to this many samples fewer than the median."""
_DAY_SECONDS = 86_400.0
_COARSE_SECONDS = 5 * MINUTE_SECONDS
"""Step for older days; the history has rollup rows of this length."""
_UNSEALED_SECONDS = 3600.0
"""Frames that are not sealed yet are at most this old."""
_STARTING_SECONDS = 2 * MINUTE_SECONDS
"""Frames sampled before the head started arrive for up to this long after the start."""
_IN_EVERY_FRAME: tuple[tuple[Scope, tuple[str, ...]], ...] = (
    ("host", ("cpu_user_seconds_total", "memory_available_bytes", "cpu_utilization_ratio")),
    ("gpu", ("power_watts", "memory_used_bytes", "gpu_utilization_ratio")),
)
"""Metrics of nearly every frame. Later entries are used for nodes that lack the earlier ones."""


class CoverageGap(NamedTuple):
    """A time range in which frames of some nodes are missing here."""

    start: float
    end: float
    nodes: frozenset[int]


class _OpenInterval(NamedTuple):
    """The newest interval of a node: its run, and the sequence number of its last frame. No frame in it is missing."""

    run: bytes
    last: int


class LocalCoverage:
    """The complete time ranges by node: from frames as they arrive, and from what was already on disk.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: dict[int, list[Interval[float]]] = {}
        """In the order of arrival; they may overlap."""
        self._open: dict[int, _OpenInterval] = {}
        self._found: dict[int, list[Interval[float]]] = {}
        self._from = self._samples_from = float("-inf")

    def add_frames(self, node: int, run: bytes, numbers: range, start: float, end: float) -> None:
        """Record that frames of a node arrived and are on disk.

        Args:
            node: The node's number.
            run: The agent's run.
            numbers: The frames' sequence numbers in that run, without gaps.
            start: When the first frame was sampled.
            end: When the last frame was sampled.
        """
        with self._lock:
            known, opened = self._intervals.setdefault(node, []), self._open.get(node)
            if known and opened == (run, numbers.start - 1):
                known[-1] = Interval(min(known[-1].start, start), max(known[-1].end, end))
            else:
                known.append(Interval(start, end))
                del known[:-_MAX_INTERVALS]
            self._open[node] = _OpenInterval(run, numbers.stop - 1)

    def add_steps(
        self,
        node: int,
        begins: NDArray[np.float64],
        counts: NDArray[np.int64],
        length: float = MINUTE_SECONDS,
    ) -> None:
        """Record which steps of a node were found on disk.

        A step with fewer samples than usual is incomplete. A step without neighbors on both sides may be incomplete.

        Args:
            node: The node's number.
            begins: Start times of the steps, in order.
            counts: Number of samples in each step.
            length: Length of a step in seconds.
        """
        if not len(begins):
            return
        is_inner = (np.diff(begins, prepend=-np.inf) <= length) & (np.diff(begins, append=np.inf) <= length)
        whole = begins[is_inner & (counts >= np.median(counts) - _MAX_MISSING_SAMPLES)]
        firsts = whole[np.diff(whole, prepend=-np.inf) > length].tolist()
        lasts = whole[np.diff(whole, append=np.inf) > length].tolist()
        found = [Interval(first, last + length) for first, last in zip(firsts, lasts, strict=True)]
        with self._lock:
            self._found[node] = merge([*self._found.get(node, []), *found])

    def forget_before(self, time: float) -> None:
        """Record that data before this time is no longer on disk."""
        with self._lock:
            self._from = max(self._from, time)

    def forget_samples_before(self, time: float) -> None:
        """Record that samples before this time are no longer on disk, in the scopes that a time-series database has."""
        with self._lock:
            self._samples_from = max(self._samples_from, time)

    def gaps(
        self, start: float, end: float, nodes: Collection[int], now: float, *, of_samples: bool = True
    ) -> list[CoverageGap]:
        """Return the gaps within `[start, end)`, in order.

        There are only a few; to limit their number, some are wider than necessary. Gaps of different nodes may overlap.

        Args:
            start: Epoch seconds.
            end: Epoch seconds, exclusive.
            nodes: The nodes to check.
            now: Epoch seconds.
            of_samples: Check the scopes that a time-series database has; otherwise the other scopes.
        """
        with self._lock:
            since = max(self._from, self._samples_from) if of_samples else self._from
            missing = {node: self._missing(node, start, end, now, since) for node in nodes}
        found: dict[Interval[float], set[int]] = {}
        for node, spans in missing.items():
            for span in merge(_round_to_minutes(span, start, end) for span in spans):
                found.setdefault(span, set()).add(node)
        gaps = [CoverageGap(*span, frozenset(of)) for span, of in sorted(found.items())]
        return gaps if len(gaps) <= _MAX_GAPS else merge_gaps(gaps)

    def _missing(
        self, node: int, start: float, end: float, now: float, since: float
    ) -> list[Interval[float]]:
        known = self._intervals.get(node, [])
        if known and known[-1].end > now - _PRESENT_SECONDS:
            known = [*known[:-1], Interval(known[-1].start, float("inf"))]
        here = [(max(first, since), last) for first, last in (*self._found.get(node, []), *known)]
        return subtract([(start, end)], here)


def _union_of_gaps(gaps: Sequence[CoverageGap]) -> CoverageGap:
    nodes: frozenset[int] = frozenset().union(*(gap.nodes for gap in gaps))
    return CoverageGap(gaps[0].start, max(gap.end for gap in gaps), nodes)


def _round_to_minutes(span: Interval[float], start: float, end: float) -> Interval[float]:
    """Widen an interval to whole minutes, so that many nodes have the same gaps."""
    first, last = (
        (span.start // MINUTE_SECONDS) * MINUTE_SECONDS,
        -(-span.end // MINUTE_SECONDS) * MINUTE_SECONDS,
    )
    return Interval(max(start, first), min(end, last))


def subtract_gaps(
    gaps: Iterable[CoverageGap], start: float, end: float, nodes: Iterable[int]
) -> list[CoverageGap]:
    """Return the parts of a time range outside of all gaps; nodes with the same parts are grouped."""
    by_node: dict[int, list[tuple[float, float]]] = {node: [] for node in nodes}
    for gap in gaps:
        for node in gap.nodes & by_node.keys():
            by_node[node].append((gap.start, gap.end))
    found: dict[Interval[float], set[int]] = {}
    for node, known in by_node.items():
        for span in subtract([(start, end)], known):
            found.setdefault(span, set()).add(node)
    return [CoverageGap(*span, frozenset(which)) for span, which in sorted(found.items())]


def merge_gaps(gaps: Iterable[CoverageGap]) -> list[CoverageGap]:
    """Merge gaps until few are left and none overlap, the closest ones first; return them in order."""
    found = [_union_of_gaps(group) for group in groups(gaps, lambda gap: (gap.start, gap.end))]
    widest_first = sorted(range(1, len(found)), key=lambda place: found[place - 1].end - found[place].start)
    cuts = [0, *sorted(widest_first[: _MAX_GAPS - 1]), len(found)]
    return [_union_of_gaps(found[begin:end]) for begin, end in pairwise(cuts) if begin < end]


class CoverageLoader:
    """Adds the data that was on disk before the head started to the coverage, day by day, when a query needs it.

    Safe to use from several threads.
    """

    def __init__(self, local: LocalStore, coverage: LocalCoverage, began: float) -> None:
        """Prepare to load; nothing is read yet.

        Args:
            local: The store to read.
            coverage: The coverage to add to.
            began: Since when arriving frames are added to the coverage, in epoch seconds.
        """
        self._local = local
        self._coverage = coverage
        self._until = began + _STARTING_SECONDS
        self._lock = threading.Lock()
        self._loaded_at: dict[int, float] = {}
        """When each day was last loaded; infinity if it cannot change any more."""
        self._segments: tuple[Segment, ...] = ()

    def load(self, start: float, end: float, now: float) -> None:
        """Add the data on disk within a time range to the coverage.

        Raises:
            GpulseError: The disk cannot be read.
        """
        with self._lock:
            self._notice_drops()
            files = [file.start for segment in self._segments for file in segment.files]
            oldest = min(files, default=math.inf) / 1e6
            begin = max(start, min(oldest, self._until - _UNSEALED_SECONDS))
            stop = min(end, self._until)
            if begin >= stop:
                return
            for day in range(math.floor(begin / _DAY_SECONDS), math.ceil(stop / _DAY_SECONDS)):
                if self._loaded_at.get(day, -math.inf) + MINUTE_SECONDS <= now:
                    self._load_day(day)
                    is_complete = min((day + 1) * _DAY_SECONDS, self._until) <= now
                    self._loaded_at[day] = math.inf if is_complete else now

    def _notice_drops(self) -> None:
        """Remove what retention dropped from the coverage; thinned segments no longer have every sample."""
        before, after = self._segments, self._local.segments
        if before is after:
            return
        kept = after[0].first if after else 0
        dropped = [segment.end for segment in before if segment.last < kept and segment.end is not None]
        thinned = [segment.thinned for segment in after if segment.thinned is not None]
        if dropped:
            self._coverage.forget_before(max(dropped) / 1e6 + MINUTE_SECONDS)
        if thinned:
            self._coverage.forget_samples_before(max(thinned) / 1e6 + MINUTE_SECONDS)
        self._segments = after

    def _load_day(self, day: int) -> None:
        found: set[int] = set()
        for scope, metrics in _IN_EVERY_FRAME:
            others = None if not found else frozenset(self._local.nodes()) - found
            found |= self._load_scope(day, scope, metrics, others)

    def _load_scope(
        self, day: int, scope: Scope, metrics: tuple[str, ...], nodes: frozenset[int] | None
    ) -> set[int]:
        if nodes is not None and not nodes:
            return set()
        best: dict[int, tuple[int, Series]] = {}
        length = MINUTE_SECONDS if (day + 2) * _DAY_SECONDS > self._until else _COARSE_SECONDS
        start, end = day * _DAY_SECONDS - length, min((day + 1) * _DAY_SECONDS + length, self._until)
        for series in self._local.series(Query(start, end, scope, metrics, nodes, step=length, spread=False)):
            known = 0 if series.counts is None else int(series.counts.sum())
            if known > best.get(series.key.node, (0,))[0]:
                best[series.key.node] = known, series
        for node, (_, series) in best.items():
            if series.counts is not None:
                self._coverage.add_steps(node, series.times, series.counts, length)
        return set(best)
