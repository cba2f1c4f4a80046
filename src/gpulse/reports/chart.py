"""Several metrics over time on one grid of moments: steps of round lengths, counters as rates, gaps as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.metric import CATALOGUE, Metric, Scope
from gpulse.model.packing import SLOW_SECONDS
from gpulse.store.store import Series

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DAY = 86_400
_ROUND = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, _DAY)
LOOK_BACK = 3
"""A counter's rate is that since the last step before it, when that is at most so many steps ago."""
_QUICK: tuple[Scope, ...] = ("gpu", "host")
_RATE_DIGITS = 9
"""What happens once a month is a rate above zero, too."""


class Grid(NamedTuple):
    """The moments of a chart: beginnings of steps at multiples of their length."""

    step: float
    first: int
    """The number of the first step since the epoch."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here

    @property
    def start(self) -> float:
        """When the first step begins."""
        return self.first * self.step

    def times(self) -> list[float]:
        """When each step begins."""
        return [(self.first + place) * self.step for place in range(self.count)]

    def places(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Which steps begin at these times, counted from the first."""
        return np.rint(times / self.step).astype(np.int64) - self.first


def grid(start: float, end: float, points: int, pace: float) -> Grid:
    """The grid with the shortest round steps that has at most so many of them; none when the time is empty.

    Args:
        start: Epoch seconds; within the first step.
        end: Epoch seconds; the last step begins before.
        points: The most steps.
        pace: Seconds between two samples; no step is shorter.
    """
    for step in _ROUND:
        first = math.floor(start / step)
        count = max(0, math.ceil(end / step) - first) if start < end else 0
        if step >= pace and count <= points:
            return Grid(float(step), first, count)
    days = max(math.ceil(pace / _DAY), math.ceil((end - start) / _DAY / (points - 1)))
    first = math.floor(start / (days * _DAY))
    return Grid(float(days * _DAY), first, max(0, math.ceil(end / (days * _DAY)) - first))


def pace_of(scope: Scope, interval_seconds: float) -> float:
    """How often a scope's numbers are taken."""
    return interval_seconds if scope in _QUICK else max(SLOW_SECONDS, interval_seconds)


def unit_of(metric: Metric) -> str:
    """The unit of a metric in a chart: counters are rates there."""
    return f"{metric.unit}/second" if metric.kind == "counter" else metric.unit


def drawn(
    found: Series, scope: Scope, moments: Grid, *, spread: bool
) -> Mapping[str, list[float | None]] | None:
    """A series on the grid, null where nothing is known; None when nothing is known at all."""
    if CATALOGUE[scope][found.metric].kind == "counter":
        columns = {"values": _rates(found, moments)}
    elif spread:
        columns = {"values": found.values, "lows": found.lows, "highs": found.highs}
    else:
        columns = {"values": found.values}
    places = moments.places(found.times)
    inside = (places >= 0) & (places < moments.count) & ~np.isnan(columns["values"])
    if not inside.any():
        return None
    digits = _digits(CATALOGUE[scope][found.metric])
    return {
        name: _spread_out(np.round(values[inside], digits), places[inside], moments)
        for name, values in columns.items()
    }


def _digits(metric: Metric) -> int:
    """How many digits after the point are worth telling: two more than a source reports, as these are means."""
    if metric.kind == "counter":
        return _RATE_DIGITS
    return max(0, math.ceil(-math.log10(metric.resolution))) + 2


def _rates(found: Series, moments: Grid) -> NDArray[np.float64]:
    """How much a counter grew a second from the last sample of one step to that of the next.

    Nothing where it went back, as after a restart: how far it had come before nobody knows.
    """
    rates = np.full(len(found.times), np.nan)
    grown, seconds = np.diff(found.highs), np.diff(found.ends)
    is_near = np.diff(moments.places(found.times)) <= LOOK_BACK
    is_known = is_near & (seconds > 0) & (found.lows[1:] >= found.highs[:-1])
    rates[1:][is_known] = grown[is_known] / seconds[is_known]
    return rates


def _spread_out(values: NDArray[np.float64], places: NDArray[np.int64], moments: Grid) -> list[float | None]:
    row: list[float | None] = [None] * moments.count
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        row[place] = value
    return row


def size(series: Sequence[Series], moments: Grid, *, spread: bool) -> int:
    """How many numbers an answer has."""
    return len(series) * moments.count * (3 if spread else 1)
