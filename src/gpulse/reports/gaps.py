"""When nothing is known of a job's nodes, and how that is said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.reports.chart import Grid
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHORTEST_SECONDS = 15.0
"""What is shorter is no gap: frames are on their way."""
_MISSED = 3
"""Neither is what is not longer than so many of the silences around it, which are the pace of the samples then."""
_AROUND = 5
"""So many of them on either side."""


class Missing(NamedTuple):
    """A stretch of time in which nothing is known of a node."""

    node: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


def missing(
    node: int,
    steps: Iterable[Series],
    moments: Grid,
    spans: Sequence[tuple[float, float]],
    pace: float,
) -> list[Missing]:
    """When nothing is known of a node's GPUs in some stretches of time.

    Args:
        node: The node.
        steps: Of its GPUs.
        moments: Their grid.
        spans: The time that matters.
        pace: Seconds between two samples.
    """
    last = np.full(moments.count, np.nan)
    for one in steps:
        places = moments.places(one.times)
        inside = (places >= 0) & (places < moments.count)
        ends = np.where(np.isnan(one.ends), one.times + moments.step, one.ends)
        last[places[inside]] = np.fmax(last[places[inside]], ends[inside])
    silences = _silences(last, moments)
    found = []
    for place, (first, stop) in enumerate(silences):
        for begin, end in spans:
            part = Missing(node, max(first, begin), min(stop, end))
            if part.seconds >= max(SHORTEST_SECONDS, _MISSED * pace) and part.seconds > _MISSED * _usual(
                silences, place
            ):
                found.append(part)
    return found


def _silences(last: NDArray[np.float64], moments: Grid) -> list[tuple[float, float]]:
    """The stretches between the last sample of a step and the next step that has one."""
    places = np.flatnonzero(~np.isnan(last))
    begins = [*(moments.start + places * moments.step).tolist(), np.inf]
    return list(zip([-np.inf, *last[places].tolist()], begins, strict=True))


def _usual(silences: Sequence[tuple[float, float]], place: int) -> float:
    """How long those around one are; 0 when there are none."""
    near = [*silences[max(1, place - _AROUND) : place], *silences[place + 1 : place + 1 + _AROUND]]
    known = [stop - first for first, stop in near if np.isfinite(stop)]
    return float(np.median(known)) if known else 0.0


def seconds_of(gaps: Iterable[Missing]) -> float:
    """For how long something is missing of at least one node."""
    total, until = 0.0, -np.inf
    for gap in sorted(gaps, key=lambda gap: gap.start):
        total += max(0.0, gap.end - max(gap.start, until))
        until = max(until, gap.end)
    return round(total, 3)
