"""Which stretches of time of which nodes are wholly on this head's own disk."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MINUTE = 60.0
_PRESENT_SECONDS = 15.0
"""A node that was heard of so recently is still sending here."""
_MOST_HOLES = 8
"""So many questions at most are asked elsewhere for one that was asked here."""
_MOST_STRETCHES = 500
_JITTER = 1
"""A whole step may have so many samples fewer than others."""


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
    """What is here, by node: learnt from frames as they come, and from what was on disk before. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[int, list[Span]] = {}
        """In the order in which they began to be seen; they may overlap."""
        self._open: dict[int, _Open] = {}
        self._learnt: dict[int, list[Span]] = {}
        self._from = self._samples_from = float("-inf")

    def saw(self, node: int, run: bytes, numbers: range, start: float, end: float) -> None:
        """Frames of a node came in and are on disk.

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
                del known[:-_MOST_STRETCHES]
            self._open[node] = _Open(run, numbers.stop - 1)

    def learn(
        self,
        node: int,
        begins: NDArray[np.float64],
        counts: NDArray[np.int64],
        length: float = MINUTE,
    ) -> None:
        """Steps of a node that were found on disk.

        One with fewer samples than usual is not whole, and one without another before and after it may not be.

        Args:
            node: Whose.
            begins: When each begins, in order.
            counts: How many samples each has.
            length: How long each is, in seconds.
        """
        if not len(begins):
            return
        is_inner = (np.diff(begins, prepend=-np.inf) <= length) & (np.diff(begins, append=np.inf) <= length)
        whole = begins[is_inner & (counts >= np.median(counts) - _JITTER)]
        firsts = whole[np.diff(whole, prepend=-np.inf) > length].tolist()
        lasts = whole[np.diff(whole, append=np.inf) > length].tolist()
        found = [Span(first, last + length) for first, last in zip(firsts, lasts, strict=True)]
        with self._lock:
            self._learnt[node] = _united([*self._learnt.get(node, []), *found])

    def forget_before(self, time: float) -> None:
        """What was older is not on disk any more."""
        with self._lock:
            self._from = max(self._from, time)

    def forget_samples_before(self, time: float) -> None:
        """Of what was older only that is on disk which no engine takes."""
        with self._lock:
            self._samples_from = max(self._samples_from, time)

    def holes(
        self, start: float, end: float, nodes: Collection[int], now: float, *, of_samples: bool = True
    ) -> list[Hole]:
        """What of `[start, end)` is not wholly here, in order; a few at most, so that some may be wider than need be.

        Two may overlap when they are of different nodes.

        Args:
            start: Epoch seconds.
            end: Epoch seconds; not within any more.
            nodes: Only these.
            now: Epoch seconds.
            of_samples: Of what an engine takes; else of the rest.
        """
        with self._lock:
            since = max(self._from, self._samples_from) if of_samples else self._from
            missing = {node: self._missing(node, start, end, now, since) for node in nodes}
        found: dict[Span, set[int]] = {}
        for node, spans in missing.items():
            for span in _united(_in_minutes(span, start, end) for span in spans):
                found.setdefault(span, set()).add(node)
        holes = [Hole(*span, frozenset(of)) for span, of in sorted(found.items())]
        return holes if len(holes) <= _MOST_HOLES else apart(holes)

    def _missing(self, node: int, start: float, end: float, now: float, since: float) -> list[Span]:
        known = self._stretches.get(node, [])
        if known and known[-1].end > now - _PRESENT_SECONDS:
            known = [*known[:-1], Span(known[-1].start, float("inf"))]
        here = _united([*self._learnt.get(node, []), *known])
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
    """What of a time lies outside of holes, nodes of which it is the same together."""
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
    """A few holes that do not overlap, in order: those that lie closest together as one."""
    found = [_as_one(group) for group in _touching(sorted(holes, key=lambda hole: hole[:2]))]
    widest_first = sorted(range(1, len(found)), key=lambda place: found[place - 1].end - found[place].start)
    cuts = [0, *sorted(widest_first[: _MOST_HOLES - 1]), len(found)]
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
