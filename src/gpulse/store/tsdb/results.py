"""Convert lines of a time-series database to series and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpulse.store.store import Samples, Series, Statistic
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


def series_of(line: Line, metric: str, start: float) -> Series:
    """Return every sample; one whose time was cut to the millisecond is no earlier than what was asked for."""
    times = np.maximum(line.times / 1000, start)
    return Series(line.key, metric, times, line.values, line.values, line.values, times)


def steps_of(line: Line, metric: str, start_us: int, step_us: int, statistic: Statistic) -> Series:
    """Return the steps that samples fall into; none of them was before what was asked for."""
    times = np.maximum(line.times * 1000, start_us) // step_us * step_us
    begins = np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))
    counts = np.diff(np.append(begins, len(times)))
    lows, highs = np.minimum.reduceat(line.values, begins), np.maximum.reduceat(line.values, begins)
    lasts = begins + counts - 1
    values: dict[Statistic, NDArray[np.float64]] = {
        "mean": np.add.reduceat(line.values, begins) / counts,
        "min": lows,
        "max": highs,
        "last": line.values[lasts],
    }
    ends = line.times[lasts] / 1000
    return Series(line.key, metric, times[begins] / 1e6, values[statistic], lows, highs, ends, counts)


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
