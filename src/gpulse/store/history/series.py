"""Points of several homes for data, brought together as series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.errors import UsageError
from gpulse.model.metric import CATALOGUE
from gpulse.store.store import Samples, Series, SeriesKey, Statistic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EARLIEST, _LATEST = -(1 << 62), 1 << 62


class Points(NamedTuple):
    """Points of many series, in any order; several may belong to the same step."""

    keys: Sequence[SeriesKey]
    series: NDArray[np.int32]
    """For each point the index of its key."""
    times: NDArray[np.int64]
    """Microseconds: of the sample, or of its step's beginning."""
    values: NDArray[np.float64]
    weights: NDArray[np.int64]
    """How many samples a mean is of; for a last value, when it was."""


def check_metrics(scope: str, metrics: Sequence[str]) -> None:
    """Refuse what the catalogue does not know, so that no other name gets into a query.

    Raises:
        UsageError: There is no such scope or metric.
    """
    known = CATALOGUE.get(scope)  # type: ignore[call-overload]  # from users it may be anything
    if known is None:
        raise UsageError(f"there is no scope {scope[:40]!r}", hint=f"one of {', '.join(CATALOGUE)}")
    for metric in metrics:
        if metric not in known:
            raise UsageError(
                f"there is no metric {metric[:80]!r} of scope {scope}", hint="see docs/metrics.md"
            )


def microseconds(seconds: float) -> int:
    """A time as a store counts it; one that is too far away becomes the farthest there is."""
    if math.isnan(seconds):
        raise UsageError("a time must be a number")
    if not _EARLIEST < seconds * 1e6 < _LATEST:
        return _EARLIEST if seconds < 0 else _LATEST
    return round(seconds * 1e6)


def step_microseconds(step: float | None) -> int | None:
    """The length of a step.

    Raises:
        UsageError: It has none.
    """
    if step is None:
        return None
    if not 1e-6 <= step <= 1e10:
        raise UsageError(f"a step of {step} seconds makes no sense")
    return round(step * 1e6)


def no_points() -> Points:
    """None at all."""
    none: NDArray[Any] = np.empty(0)
    return Points((), none.astype(np.int32), none.astype(np.int64), none, none.astype(np.int64))


def to_series(parts: Sequence[Points], statistic: Statistic, step_us: int | None) -> list[Series]:
    """The series of several homes for data as one, each in the order of time.

    With a step, points of one step become one; those of which nothing is known are left out. Series of which nothing is
    known at all are left out.
    """
    keys = sorted({key for part in parts for key in part.keys})
    places = {key: place for place, key in enumerate(keys)}
    series, times, values, weights = (
        np.concatenate(columns)
        for columns in zip(
            *((_moved(part, places), *part[2:]) for part in parts or [no_points()]), strict=True
        )
    )
    if step_us is not None:
        known = ~np.isnan(values)
        series, times, values, weights = series[known], times[known], values[known], weights[known]
        times = times // step_us * step_us
    order = np.lexsort((weights, times, series) if statistic == "last" else (times, series))
    series, times, values, weights = series[order], times[order], values[order], weights[order]
    if step_us is not None and len(series):
        series, times, values = _reduced(series, times, values, weights, statistic)
    edges = np.flatnonzero(np.diff(series, prepend=-1, append=len(keys)))
    found = []
    for begin, end in pairwise(edges):
        if not np.isnan(values[begin:end]).all():
            found.append(Series(keys[series[begin]], times[begin:end] / 1e6, values[begin:end]))
    return found


def _moved(part: Points, places: dict[SeriesKey, int]) -> NDArray[np.int32]:
    """The points' series by their places among all keys."""
    return np.array([places[key] for key in part.keys], np.int32)[part.series]


def _reduced(
    series: NDArray[np.int32],
    times: NDArray[np.int64],
    values: NDArray[np.float64],
    weights: NDArray[np.int64],
    statistic: Statistic,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]]:
    """One point a step, from points that are sorted."""
    is_first = np.ones(len(series), bool)
    is_first[1:] = (np.diff(series) != 0) | (np.diff(times) != 0)
    begins = np.flatnonzero(is_first)
    if statistic == "mean":
        reduced = np.add.reduceat(values * weights, begins) / np.add.reduceat(weights, begins)
    elif statistic == "min":
        reduced = np.minimum.reduceat(values, begins)
    elif statistic == "max":
        reduced = np.maximum.reduceat(values, begins)
    else:
        reduced = values[np.append(begins[1:], len(values)) - 1]
    return series[begins], times[begins], reduced


def join_samples(parts: Sequence[Samples], metrics: Sequence[str]) -> Samples:
    """The samples of several homes for data as one, in the order of time."""
    keys = sorted({key for part in parts for key in part.keys})
    places = {key: place for place, key in enumerate(keys)}
    series = np.concatenate(
        [np.array([places[key] for key in part.keys], np.int32)[part.series] for part in parts]
    )
    times = np.concatenate([part.times for part in parts])
    sequences = np.concatenate([part.sequences for part in parts])
    order = np.lexsort((sequences, series, times))
    return Samples(
        keys,
        series[order],
        times[order],
        np.concatenate([part.runs for part in parts])[order],
        sequences[order],
        {metric: np.concatenate([part.values[metric] for part in parts])[order] for metric in metrics},
    )
