"""What an engine tells, in the shapes in which stores tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpulse.store.history.series import Points, microseconds
from gpulse.store.store import Samples, Statistic, Steps
from gpulse.store.tsdb.series_query import Line

if TYPE_CHECKING:
    from numpy.typing import NDArray


def at(line: Line | None, times: NDArray[np.int64], otherwise: float = np.nan) -> NDArray[np.float64]:
    """The values at some times."""
    values = np.full(len(times), otherwise, np.float64)
    if line is not None and len(line.times):
        places = np.minimum(np.searchsorted(line.times, times), len(line.times) - 1)
        is_there = line.times[places] == times
        values[is_there] = line.values[places[is_there]]
    return values


def points_of(line: Line, start: float, statistic: Statistic) -> Points:
    """Samples as points; one that was cut to the millisecond is no earlier than what was asked for."""
    count = len(line.times)
    times = np.maximum(line.times * 1000, microseconds(start))
    weights = times if statistic == "last" else np.ones(count, np.int64)
    return Points([line.key], np.zeros(count, np.int32), times, line.values, weights)


def steps_of(line: Line, metric: str, step_us: int) -> Steps:
    """The steps that samples fall into."""
    times = line.times * 1000 // step_us * step_us
    begins = np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))
    counts = np.diff(np.append(begins, len(times)))
    return Steps(
        line.key,
        metric,
        times[begins] / 1e6,
        np.add.reduceat(line.values, begins) / counts,
        np.minimum.reduceat(line.values, begins),
        np.maximum.reduceat(line.values, begins),
        line.times[begins + counts - 1] / 1000,
        counts,
    )


def samples_of(lines: Mapping[str, Sequence[Line]], start: float) -> Samples:
    """One row a subject and moment, from the samples of each metric."""
    keys = sorted({line.key for of_metric in lines.values() for line in of_metric})
    places = {key: place for place, key in enumerate(keys)}
    cells = {
        metric: _cells([(line.times * len(keys) + places[line.key], line.values) for line in of_metric])
        for metric, of_metric in lines.items()
    }
    rows = np.unique(np.concatenate([cell for cell, _ in cells.values()]))
    values = {metric: np.full(len(rows), np.nan) for metric in lines}
    for metric, (cell, found) in cells.items():
        values[metric][np.searchsorted(rows, cell)] = found
    times = rows // len(keys)
    return Samples(
        keys,
        (rows % len(keys)).astype(np.int32),
        np.maximum(times / 1000, start),
        np.zeros(len(rows), np.uint64),
        times,
        values,
    )


def _cells(
    lines: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Where values belong, and the values."""
    none = np.empty(0, np.int64), np.empty(0)
    cells, values = (np.concatenate(columns) for columns in zip(none, *lines, strict=True))
    return cells, values
