"""Curves of any length in as many points as a picture has, broken where nothing is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Piece(NamedTuple):
    """A part of a curve without a gap: of each point the lowest, the mean and the highest of what it stands for."""

    times: Array
    low: Array
    mean: Array
    high: Array

    @property
    def is_thinned(self) -> bool:
        """Whether its points stand for more than one value."""
        return bool((self.low != self.high).any())


def pieces(times: Array, values: Array, gap: float, most: int) -> list[Piece]:
    """A curve in about so many points.

    Args:
        times: When each value was.
        values: NaN where nothing is known.
        gap: From which distance on nothing is known between two values.
        most: How many points are enough.
    """
    found: list[Piece] = []
    for run in runs(times, gap):
        count = max(1, round(most * (run.stop - run.start) / max(1, len(times))))
        found += _known(_thinned(times[run], values[run], count))
    return found


def runs(times: Array, gap: float) -> Iterator[slice]:
    """The stretches between gaps."""
    if len(times):
        cuts = np.flatnonzero(np.diff(times) > gap) + 1
        edges = [0, *map(int, cuts), len(times)]
        yield from (slice(start, end) for start, end in pairwise(edges))


def _thinned(times: Array, values: Array, count: int) -> Piece:
    if len(times) <= count:
        return Piece(times, values, values, values)
    edges = np.linspace(0, len(times), count, endpoint=False).astype(np.int64)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known, edges, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), edges) / counts
    return Piece(
        np.add.reduceat(times, edges) / np.diff(np.append(edges, len(times))),
        np.fmin.reduceat(values, edges),
        np.where(counts > 0, mean, np.nan),
        np.fmax.reduceat(values, edges),
    )


def _known(piece: Piece) -> Iterator[Piece]:
    """The parts of it in which something is known."""
    known = ~np.isnan(piece.mean)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], known, [False]))))
    for start, end in edges.reshape(-1, 2):
        yield Piece(*(array[start:end] for array in piece))
