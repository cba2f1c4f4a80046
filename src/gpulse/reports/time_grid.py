"""Time grid of an answer (steps of round lengths, the same for all series), and the context of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.model.metric_catalog import Scope
from gpulse.store.store import Store

_DAY_SECONDS = 86_400
_ROUND_SECONDS = (
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    _DAY_SECONDS,
)
_SCOPES_IN_EVERY_FRAME: tuple[Scope, ...] = ("gpu", "host")


class TimeGrid(NamedTuple):
    """Time steps of equal length, which start at multiples of that length."""

    step: float
    """Seconds."""
    first: int
    """Number of the first step, counted from the epoch."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here

    @property
    def start(self) -> float:
        """Start of the first step."""
        return self.first * self.step

    def times(self) -> list[float]:
        """Return the start of each step."""
        return [(self.first + place) * self.step for place in range(self.count)]

    def positions(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the indexes of the steps that start at these times."""
        return np.rint(times / self.step).astype(np.int64) - self.first


def make_grid(start: float, end: float, max_steps: int, min_step_seconds: float) -> TimeGrid:
    """Return the grid with the shortest round steps that cover a time range; an empty one for an empty range.

    Args:
        start: Epoch seconds; lies within the first step.
        end: Epoch seconds; the last step starts before it.
        max_steps: Maximum number of steps.
        min_step_seconds: Minimum length of a step, usually the sampling interval.
    """
    for step in _ROUND_SECONDS:
        first = math.floor(start / step)
        count = max(0, math.ceil(end / step) - first) if start < end else 0
        if step >= min_step_seconds and count <= max_steps:
            return TimeGrid(float(step), first, count)
    days = max(
        math.ceil(min_step_seconds / _DAY_SECONDS), math.ceil((end - start) / _DAY_SECONDS / (max_steps - 1))
    )
    step = days * _DAY_SECONDS
    first = math.floor(start / step)
    return TimeGrid(float(step), first, max(0, math.ceil(end / step) - first))


def sampling_seconds(scope: Scope, interval_seconds: float) -> float:
    """Return the sampling interval of a scope."""
    return interval_seconds if scope in _SCOPES_IN_EVERY_FRAME else max(SLOW_SECONDS, interval_seconds)


class ReportContext(NamedTuple):
    """Store that a report is computed from, with the names and the interval of its nodes."""

    store: Store
    node_names: Mapping[int, str]
    """Names by node number; other nodes are left out of answers."""
    interval_seconds: float
    """Sampling interval of agents."""
    deadline: float | None = None
    """Monotonic seconds; data that a backend has not delivered by then is missing from the report."""

    def gpu_labels(self) -> dict[tuple[int, str], str]:
        """Return the labels of all GPUs, by node and UUID."""
        return {(gpu.node, gpu.uuid): gpu.label for gpu in self.store.gpus()}
