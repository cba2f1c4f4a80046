"""Half-open intervals `[start, end)` of time or of numbers: merge, cut, overlap, subtract, total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

N = TypeVar("N", int, float)
T = TypeVar("T")


class Interval(NamedTuple, Generic[N]):
    """The numbers from `start` up to, but not including, `end`; empty when the end is not after the start."""

    start: N
    end: N


class TimeSpan(Protocol):
    """Anything with a start and an end."""

    @property
    def start(self) -> float: ...  # noqa: D102
    @property
    def end(self) -> float: ...  # noqa: D102


def shared_length(one: TimeSpan, other: TimeSpan) -> float:
    """Return the length of the overlap of two time spans; 0 if they do not overlap."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def merge(intervals: Iterable[tuple[N, N]]) -> list[Interval[N]]:
    """Merge intervals that overlap or touch; return them sorted, without empty ones."""
    found: list[Interval[N]] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if found and start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Interval(start, end))
    return found


def cut(intervals: Iterable[tuple[N, N]], start: N, end: N) -> list[Interval[N]]:
    """Clip intervals to `[start, end)`, and merge them."""
    return merge((max(first, start), min(last, end)) for first, last in intervals)


def overlap(one: Iterable[tuple[N, N]], other: Iterable[tuple[N, N]]) -> list[Interval[N]]:
    """Return the intersection of two sets of intervals, merged."""
    mine, theirs = merge(one), merge(other)
    found: list[Interval[N]] = []
    place = 0
    for start, end in mine:
        while place < len(theirs) and theirs[place].end <= start:
            place += 1
        following = place
        while following < len(theirs) and theirs[following].start < end:
            begin, stop = theirs[following]
            found.append(Interval(max(start, begin), min(end, stop)))
            following += 1
    return found


def subtract(intervals: Iterable[tuple[N, N]], taken: Iterable[tuple[N, N]]) -> list[Interval[N]]:
    """Return the intervals without the parts covered by `taken`, merged."""
    found: list[Interval[N]] = []
    without = merge(taken)
    place = 0
    for start, end in merge(intervals):
        begin = start
        while place < len(without) and without[place].end <= start:
            place += 1
        following = place
        while following < len(without) and without[following].start < end:
            away, back = without[following]
            if begin < away:
                found.append(Interval(begin, away))
            begin = back
            following += 1
        if begin < end:
            found.append(Interval(begin, end))
    return found


def total(intervals: Iterable[tuple[N, N]]) -> N:
    """Return the total length of the merged intervals."""
    return sum(end - start for start, end in merge(intervals))


def groups(
    items: Iterable[T], interval_of: Callable[[T], tuple[N, N]], *, touching: bool = True
) -> Iterator[list[T]]:
    """Yield groups of items with overlapping intervals, in order of time.

    Args:
        items: The items.
        interval_of: Returns the interval of an item.
        touching: Whether intervals that only touch belong together too.
    """
    group: list[T] = []
    latest: N | None = None
    for (start, end), item in sorted(((interval_of(item), item) for item in items), key=lambda pair: pair[0]):
        if latest is not None and (start > latest or (start == latest and not touching)):
            yield group
            group, latest = [], None
        group.append(item)
        latest = end if latest is None else max(latest, end)
    if group:
        yield group
