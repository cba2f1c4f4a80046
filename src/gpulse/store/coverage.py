"""Keep track of which stretches of time of which nodes are complete on this head's own disk."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.metric import Scope
from gpulse.store.history.segments import Segment
from gpulse.store.local import LocalStore
from gpulse.store.store import Query, Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

MINUTE = 60.0
_PRESENT_SECONDS = 15.0
"""A node whose last frame is this recent is still sending to this head."""
_MAX_HOLES = 8
"""For one query to this head, this many at most go to another store."""
_MAX_STRETCHES = 500
_MAX_FEWER_SAMPLES = 1
"""A complete step may have this many samples fewer than others."""
_DAY = 86_400.0
_COARSE_SECONDS = 5 * MINUTE
"""Older days are looked at in such steps, of which the history has rows ready."""
_UNSEALED_SECONDS = 3600.0
"""What is only in the log is no older than this."""
_STARTING_SECONDS = 2 * MINUTE
"""Frames of before the start come in for this long after it."""
_IN_EVERY_FRAME: tuple[tuple[Scope, tuple[str, ...]], ...] = (
    ("host", ("cpu_user_seconds_total", "memory_available_bytes", "cpu_utilization_ratio")),
    ("gpu", ("power_watts", "memory_used_bytes", "gpu_utilization_ratio")),
)
"""Metrics of nearly every frame; the later ones count for nodes of which the earlier ones are unknown."""


class Span(NamedTuple):
    """A stretch of time `[start, end)`, in epoch seconds."""

    start: float
    end: float


class Hole(NamedTuple):
    """A stretch of time of which some nodes' frames are not all here."""

    start: float
    end: float
    nodes: frozenset[int]


class _Open(NamedTuple):
    """The frames that come in now, without one missing since the stretch began."""

    run: bytes
    last: int


class Coverage:
    """What is complete here, by node: from frames as they come, and from what was on disk before.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[int, list[Span]] = {}
        """In the order in which they began to be seen; they may overlap."""
        self._open: dict[int, _Open] = {}
        self._found: dict[int, list[Span]] = {}
        self._from = self._samples_from = float("-inf")

    def add_frames(self, node: int, run: bytes, numbers: range, start: float, end: float) -> None:
        """Note that frames of a node came in and are on disk.

        Args:
            node: Whose.
            run: The agent's run.
            numbers: The frames' numbers in that run, which have no gaps.
            start: When the first was taken.
            end: When the last was taken.
        """
        with self._lock:
            known, opened = self._stretches.setdefault(node, []), self._open.get(node)
            if known and opened == (run, numbers.start - 1):
                known[-1] = Span(min(known[-1].start, start), max(known[-1].end, end))
            else:
                known.append(Span(start, end))
                del known[:-_MAX_STRETCHES]
            self._open[node] = _Open(run, numbers.stop - 1)

    def add_steps(
        self,
        node: int,
        begins: NDArray[np.float64],
        counts: NDArray[np.int64],
        length: float = MINUTE,
    ) -> None:
        """Note which steps of a node were found on disk.

        One with fewer samples than usual is not complete, and one without another before and after it may not be.

        Args:
            node: Whose.
            begins: When each begins, in order.
            counts: How many samples each has.
            length: How long each is, in seconds.
        """
        if not len(begins):
            return
        is_inner = (np.diff(begins, prepend=-np.inf) <= length) & (np.diff(begins, append=np.inf) <= length)
        whole = begins[is_inner & (counts >= np.median(counts) - _MAX_FEWER_SAMPLES)]
        firsts = whole[np.diff(whole, prepend=-np.inf) > length].tolist()
        lasts = whole[np.diff(whole, append=np.inf) > length].tolist()
        found = [Span(first, last + length) for first, last in zip(firsts, lasts, strict=True)]
        with self._lock:
            self._found[node] = _united([*self._found.get(node, []), *found])

    def forget_before(self, time: float) -> None:
        """Note that nothing older is on disk any more."""
        with self._lock:
            self._from = max(self._from, time)

    def forget_samples_before(self, time: float) -> None:
        """Note that nothing older is on disk any more of what time-series databases take."""
        with self._lock:
            self._samples_from = max(self._samples_from, time)

    def holes(
        self, start: float, end: float, nodes: Collection[int], now: float, *, of_samples: bool = True
    ) -> list[Hole]:
        """Return what of `[start, end)` is not complete here, in order; a few holes, some wider than need be.

        Two may overlap when they are of different nodes.

        Args:
            start: Epoch seconds.
            end: Epoch seconds; not within any more.
            nodes: Only these.
            now: Epoch seconds.
            of_samples: Of what time-series databases take; else of the rest.
        """
        with self._lock:
            since = max(self._from, self._samples_from) if of_samples else self._from
            missing = {node: self._missing(node, start, end, now, since) for node in nodes}
        found: dict[Span, set[int]] = {}
        for node, spans in missing.items():
            for span in _united(_in_minutes(span, start, end) for span in spans):
                found.setdefault(span, set()).add(node)
        holes = [Hole(*span, frozenset(of)) for span, of in sorted(found.items())]
        return holes if len(holes) <= _MAX_HOLES else apart(holes)

    def _missing(self, node: int, start: float, end: float, now: float, since: float) -> list[Span]:
        known = self._stretches.get(node, [])
        if known and known[-1].end > now - _PRESENT_SECONDS:
            known = [*known[:-1], Span(known[-1].start, float("inf"))]
        here = _united([*self._found.get(node, []), *known])
        missing, begin = [], start
        for span in here:
            first, last = max(span.start, since), span.end
            if last <= max(begin, first) or first >= end:
                continue
            if first > begin:
                missing.append(Span(begin, first))
            begin = max(begin, last)
        if begin < end:
            missing.append(Span(begin, end))
        return missing


def _united(spans: Iterable[Span]) -> list[Span]:
    """Those that touch as one, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def _as_one(holes: Sequence[Hole]) -> Hole:
    nodes: frozenset[int] = frozenset().union(*(hole.nodes for hole in holes))
    return Hole(holes[0].start, max(hole.end for hole in holes), nodes)


def _in_minutes(span: Span, start: float, end: float) -> Span:
    """A stretch from the beginning of a minute to the end of one: those of many nodes are alike then."""
    first, last = (span.start // MINUTE) * MINUTE, -(-span.end // MINUTE) * MINUTE
    return Span(max(start, first), min(end, last))


def outside(holes: Iterable[Hole], start: float, end: float, nodes: Iterable[int]) -> list[Hole]:
    """Return what of a time range lies outside of holes, by nodes that have the same of it."""
    by_node: dict[int, list[Hole]] = {node: [] for node in nodes}
    for hole in sorted(holes, key=lambda hole: hole[:2]):
        for node in hole.nodes & by_node.keys():
            by_node[node].append(hole)
    found: dict[tuple[float, float], set[int]] = {}
    for node, known in by_node.items():
        begin = start
        for hole in known:
            if begin < hole.start:
                found.setdefault((begin, hole.start), set()).add(node)
            begin = max(begin, hole.end)
        if begin < end:
            found.setdefault((begin, end), set()).add(node)
    return [Hole(*span, frozenset(which)) for span, which in sorted(found.items())]


def apart(holes: Iterable[Hole]) -> list[Hole]:
    """Return a few holes that do not overlap, in order: those that lie closest together become one."""
    found = [_as_one(group) for group in _touching(sorted(holes, key=lambda hole: hole[:2]))]
    widest_first = sorted(range(1, len(found)), key=lambda place: found[place - 1].end - found[place].start)
    cuts = [0, *sorted(widest_first[: _MAX_HOLES - 1]), len(found)]
    return [_as_one(found[begin:end]) for begin, end in pairwise(cuts) if begin < end]


def _touching(holes: Iterable[Hole]) -> Iterator[list[Hole]]:
    """Holes, in order, in groups between which there is something."""
    group: list[Hole] = []
    end = float("-inf")
    for hole in holes:
        if group and hole.start > end:
            yield group
            group = []
        group.append(hole)
        end = max(end, hole.end)
    if group:
        yield group


class CoverageLoader:
    """Finds out what was on disk before the head started, day by day, when a query needs to know.

    Safe to use from several threads.
    """

    def __init__(self, local: LocalStore, coverage: Coverage, began: float) -> None:
        """Begin with nothing.

        Args:
            local: What is on disk.
            coverage: Where the result goes.
            began: Since when frames are added to the coverage as they come.
        """
        self._local = local
        self._coverage = coverage
        self._until = began + _STARTING_SECONDS
        self._lock = threading.Lock()
        self._loaded_at: dict[int, float] = {}
        """By day, when it was looked at last; infinity when no more can come."""
        self._segments: tuple[Segment, ...] = ()

    def load(self, start: float, end: float, now: float) -> None:
        """Add what is on disk of a time range to the coverage.

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
            for day in range(math.floor(begin / _DAY), math.ceil(stop / _DAY)):
                if self._loaded_at.get(day, -math.inf) + MINUTE <= now:
                    self._load_day(day)
                    is_complete = min((day + 1) * _DAY, self._until) <= now
                    self._loaded_at[day] = math.inf if is_complete else now

    def _notice_drops(self) -> None:
        """Notice what retention dropped, the oldest first; thinned segments do not have every sample any more."""
        before, after = self._segments, self._local.segments
        if before is after:
            return
        kept = after[0].first if after else 0
        dropped = [segment.end for segment in before if segment.last < kept and segment.end is not None]
        thinned = [segment.thinned for segment in after if segment.thinned is not None]
        if dropped:
            self._coverage.forget_before(max(dropped) / 1e6 + MINUTE)
        if thinned:
            self._coverage.forget_samples_before(max(thinned) / 1e6 + MINUTE)
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
        length = MINUTE if (day + 2) * _DAY > self._until else _COARSE_SECONDS
        start, end = day * _DAY - length, min((day + 1) * _DAY + length, self._until)
        for series in self._local.series(Query(start, end, scope, metrics, nodes, step=length, spread=False)):
            known = 0 if series.counts is None else int(series.counts.sum())
            if known > best.get(series.key.node, (0,))[0]:
                best[series.key.node] = known, series
        for node, (_, series) in best.items():
            if series.counts is not None:
                self._coverage.add_steps(node, series.times, series.counts, length)
        return set(best)
