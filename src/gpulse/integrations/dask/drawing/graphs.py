"""When which graph ran: bands under each other where several ran at once, and which of them are named."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby, pairwise
from typing import NamedTuple

from gpulse.integrations.dask.drawing.selection import Stretch

_MOST_LANES = 3
_SHADES = 3


class Band(NamedTuple):
    """The time in which a graph ran."""

    label: str
    """Its number; empty when there is no lane for it alone."""
    words: str
    job: int
    number: int
    """By which some graphs are named where there is no room for all."""
    start: float
    end: float
    lane: int
    """0 unless another graph ran at the same time."""
    shade: int
    """Other than that of its neighbours."""
    more: int
    """How many lanes would have been needed beside those there are."""

    @property
    def middle(self) -> float:
        """Where its name is."""
        return (self.start + self.end) / 2


def in_turn(stretches: Iterable[Stretch], slack: float) -> list[Stretch]:
    """Stretches without overlaps that come from workers that look at different moments.

    Args:
        stretches: Those of all workers.
        slack: Up to which overlap two graphs are taken to have run one after the other.
    """
    found: list[Stretch] = []
    running: list[int] = []
    for stretch in sorted(stretches, key=_order):
        running = [place for place in running if found[place].end > stretch.start]
        for place in running:
            before = found[place]
            if before.start < stretch.start and before.end - stretch.start <= slack:
                found[place] = before._replace(end=stretch.start)
        running.append(len(found))
        found.append(stretch)
    return found


def bands(stretches: Iterable[Stretch], with_jobs: bool) -> tuple[Band, ...]:
    """When which graph ran, those at the same time under each other."""
    found: list[Band] = []
    newest: list[Band] = []
    numbers: dict[tuple[int, int], int] = {}
    for stretch in sorted(stretches, key=_order):
        lane = next(
            (place for place, band in enumerate(newest) if band.end <= stretch.start + 1e-6), len(newest)
        )
        number = numbers.setdefault((stretch.job, stretch.dag), len(numbers) + 1)
        words = f"job {stretch.job}, graph {stretch.dag}"
        label = f"{stretch.job}.{stretch.dag}" if with_jobs else str(stretch.dag)
        more = max(0, lane + 1 - _MOST_LANES)
        band = Band(
            "" if more else label,
            words,
            stretch.job,
            number if with_jobs else stretch.dag,
            stretch.start,
            stretch.end,
            lane - more,
            _shade(words, [*found[-1:], *newest[lane : lane + 1]]),
            more,
        )
        newest[lane : lane + 1] = [band]
        found.append(band)
    return tuple(found)


def named(found: Iterable[Band], room: float) -> list[Band]:
    """The bands that have their name written on them: all, or every so many-th where there is no room for all.

    Args:
        found: All there are.
        room: How many seconds wide the longest name is.
    """
    lanes = groupby(sorted((band for band in found if band.label), key=_place), key=lambda band: band.lane)
    return [band for _, several in lanes for band in _named_in_lane(list(several), room)]


def job_starts(found: Iterable[Band]) -> list[float]:
    """When each job but the first began."""
    starts: dict[int, float] = {}
    for band in found:
        starts[band.job] = min(band.start, starts.get(band.job, band.start))
    return sorted(starts.values())[1:]


def _order(stretch: Stretch) -> tuple[float, int, int]:
    return stretch.start, stretch.job, stretch.dag


def _place(band: Band) -> tuple[int, float]:
    return band.lane, band.start


def _shade(words: str, near: Sequence[Band]) -> int:
    """That which the graph has next to it already, else the first that no neighbour has."""
    own = [band.shade for band in near if band.words == words]
    taken = {band.shade for band in near if band.words != words}
    free: list[int] = [shade for shade in (*own, *range(_SHADES)) if shade not in taken]
    return free[0]


def _named_in_lane(found: Sequence[Band], room: float) -> list[Band]:
    wide = [band for band in found if band.end - band.start >= room]
    narrow = [band for band in found if band.end - band.start < room]
    some = next(some for some in _thinned(narrow) if _are_apart([band.middle for band in some], room))
    middles = [band.middle for band in wide]
    return wide + [band for band in some if _is_free(middles, band.middle, room)]


def _thinned(found: Sequence[Band]) -> Iterator[list[Band]]:
    """All, then those with even numbers, every fifth, every tenth, and so on."""
    for power in count():
        for times in (1, 2, 5):
            yield [band for band in found if band.number % (times * 10**power) == 0]


def _is_free(middles: Sequence[float], middle: float, room: float) -> bool:
    """Whether a name has room there beside those in order."""
    place = bisect_left(middles, middle)
    return all(abs(middle - other) >= room for other in middles[max(0, place - 1) : place + 1])


def _are_apart(middles: Sequence[float], room: float) -> bool:
    return all(later - sooner >= room for sooner, later in pairwise(middles))
