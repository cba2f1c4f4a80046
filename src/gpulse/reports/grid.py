"""Time grids: steps of round lengths, the same for all series of an answer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.metric import Scope
from gpulse.model.packing import SLOW_SECONDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DAY_SECONDS = 86_400
_ROUND_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    _DAY_SECONDS,
)
_EVERY_FRAME: tuple[Scope, ...] = ("gpu", "host")


class Grid(NamedTuple):
    """Steps that begin at multiples of their length."""

    step: float
    """Seconds."""
    first: int
    """The number of the first step since the epoch."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here

    @property
    def start(self) -> float:
        """When the first step begins."""
        return self.first * self.step

    def times(self) -> list[float]:
        """Return when each step begins."""
        return [(self.first + place) * self.step for place in range(self.count)]

    def positions(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return which steps begin at these times, counted from the first."""
        return np.rint(times / self.step).astype(np.int64) - self.first


def make_grid(start: float, end: float, max_steps: int, min_step_seconds: float) -> Grid:
    """Return the grid with the shortest round steps that cover a time range; an empty one for an empty range.

    Args:
        start: Epoch seconds; within the first step.
        end: Epoch seconds; the last step begins before.
        max_steps: At most this many.
        min_step_seconds: The time between two samples.
    """
    for step in _ROUND_SECONDS:
        first = math.floor(start / step)
        count = max(0, math.ceil(end / step) - first) if start < end else 0
        if step >= min_step_seconds and count <= max_steps:
            return Grid(float(step), first, count)
    days = max(
        math.ceil(min_step_seconds / _DAY_SECONDS), math.ceil((end - start) / _DAY_SECONDS / (max_steps - 1))
    )
    step = days * _DAY_SECONDS
    first = math.floor(start / step)
    return Grid(float(step), first, max(0, math.ceil(end / step) - first))


def sample_seconds(scope: Scope, interval_seconds: float) -> float:
    """Return the time between two samples of a scope."""
    return interval_seconds if scope in _EVERY_FRAME else max(SLOW_SECONDS, interval_seconds)
