"""Gaps: times in which there are no samples of a job's nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.reports.grid import Grid
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MIN_GAP_SECONDS = 15.0
"""In a shorter one, frames may be on their way."""
_MIN_MISSED_SAMPLES = 3
"""A gap is longer than this many of the intervals around it, which are the pace of the samples then."""
_INTERVALS_AROUND = 5
"""On either side."""


class Gap(NamedTuple):
    """A time in which there are no samples of a node."""

    node: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


def find_gaps(
    node: int,
    series: Iterable[Series],
    grid: Grid,
    spans: Sequence[tuple[float, float]],
    interval_seconds: float,
) -> list[Gap]:
    """Return the gaps in the samples of a node's GPUs.

    Args:
        node: The node.
        series: Of its GPUs.
        grid: Their grid.
        spans: Only gaps in these time spans.
        interval_seconds: From one sample to the next.
    """
    last = np.full(grid.count, np.nan)
    for one in series:
        positions = grid.positions(one.times)
        inside = (positions >= 0) & (positions < grid.count)
        ends = np.where(np.isnan(one.ends), one.times + grid.step, one.ends)
        last[positions[inside]] = np.fmax(last[positions[inside]], ends[inside])
    silences = _silences(last, grid)
    found = []
    for place, (first, stop) in enumerate(silences):
        for begin, end in spans:
            part = Gap(node, max(first, begin), min(stop, end))
            shortest = max(_MIN_GAP_SECONDS, _MIN_MISSED_SAMPLES * interval_seconds)
            if part.seconds >= shortest and part.seconds > _MIN_MISSED_SAMPLES * _usual(silences, place):
                found.append(part)
    return found


def _silences(last: NDArray[np.float64], grid: Grid) -> list[tuple[float, float]]:
    """Return the times between the last sample of a step and the next step that has one."""
    places = np.flatnonzero(~np.isnan(last))
    begins = [*(grid.start + places * grid.step).tolist(), np.inf]
    return list(zip([-np.inf, *last[places].tolist()], begins, strict=True))


def _usual(silences: Sequence[tuple[float, float]], place: int) -> float:
    """Return the median length of the silences around one; 0 when there are none."""
    near = [
        *silences[max(1, place - _INTERVALS_AROUND) : place],
        *silences[place + 1 : place + 1 + _INTERVALS_AROUND],
    ]
    known = [stop - first for first, stop in near if np.isfinite(stop)]
    return float(np.median(known)) if known else 0.0


def total_gap_seconds(gaps: Iterable[Gap]) -> float:
    """Return for how long at least one node has a gap."""
    total, until = 0.0, -np.inf
    for gap in sorted(gaps, key=lambda gap: gap.start):
        total += max(0.0, gap.end - max(gap.start, until))
        until = max(until, gap.end)
    return round(total, 3)
