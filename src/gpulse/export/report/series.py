"""Series of any length in as many columns as a picture has: of each column the lowest, the highest, the mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Small = NDArray[np.float32]

_MOST_COLUMNS = 2048
_MANY_GPUS = 256


class Curve(NamedTuple):
    """One quantity of one GPU, where something is known."""

    times: Array
    """The middle of each column."""
    low: Array
    mean: Array
    high: Array


class _Cells(NamedTuple):
    """A row a column of the picture, a column a GPU."""

    low: Small
    high: Small
    sum: Small
    known: NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, gpus: int) -> _Cells:
        shape = (rows, gpus)
        return cls(
            np.full(shape, np.inf, np.float32),
            np.full(shape, -np.inf, np.float32),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int32),
        )

    def grown(self, rows: int, gpus: int) -> _Cells:
        """At least so large."""
        rows, gpus = max(rows, self.low.shape[0]), max(gpus, self.low.shape[1])
        if (rows, gpus) == self.low.shape:
            return self
        larger = _Cells.empty(rows, gpus)
        for new, old in zip(larger, self, strict=True):
            new[: old.shape[0], : old.shape[1]] = old
        return larger

    def halved(self) -> _Cells:
        """Two rows together as one."""
        even = self.grown(self.low.shape[0] + self.low.shape[0] % 2, 0)
        return _Cells(
            np.minimum(even.low[::2], even.low[1::2]),
            np.maximum(even.high[::2], even.high[1::2]),
            even.sum[::2] + even.sum[1::2],
            even.known[::2] + even.known[1::2],
        )


class Thinned:
    """Collects rows of many GPUs, and gets coarser as time goes on."""

    def __init__(self, width_seconds: float) -> None:
        self.width = width_seconds
        self._start: float | None = None
        self._cells: dict[str, _Cells] = {}
        self._rows = 0

    def add(self, times: Array, values: dict[str, Array]) -> None:
        """Take a row a moment, in about the order of time."""
        if not len(times):
            return
        if self._start is None:
            self._start = float(times[0])
        gpus = max((matrix.shape[1] for matrix in values.values()), default=0)
        most = _MOST_COLUMNS if gpus <= _MANY_GPUS else _MOST_COLUMNS // 2
        while (float(times.max()) - self._start) / self.width >= most:
            self.width *= 2
            self._rows = (self._rows + 1) // 2
            self._cells = {name: cells.halved() for name, cells in self._cells.items()}
        places = np.clip(((times - self._start) / self.width + 1e-3).astype(np.int64), 0, None)
        order = np.argsort(places, kind="stable")
        sorted_places = places[order]
        first = np.flatnonzero(np.concatenate(([True], sorted_places[1:] != sorted_places[:-1])))
        rows = sorted_places[first]
        self._rows = max(self._rows, int(rows[-1]) + 1)
        for name, matrix in values.items():
            cells = self._cells.get(name) or _Cells.empty(0, 0)
            self._cells[name] = cells = cells.grown(self._rows, matrix.shape[1])
            _add(cells, rows, first, matrix[order])

    @property
    def start(self) -> float:
        """When the first column begins."""
        return self._start or 0.0

    @property
    def columns(self) -> int:
        """How many there are."""
        return self._rows

    def has(self, name: str) -> bool:
        """Whether anything is known of a quantity."""
        return name in self._cells and bool(self._cells[name].known.any())

    def curve(self, name: str, gpu: int, most: int = _MOST_COLUMNS) -> Curve:
        """A quantity of one GPU, in at most so many columns."""
        cells = self._cells.get(name)
        if cells is None or gpu >= cells.low.shape[1]:
            return Curve(*(np.empty(0) for _ in range(4)))
        cells = _Cells(*(array[:, gpu : gpu + 1] for array in cells))  # type: ignore[arg-type]  # each as it was
        width, gpu = self.width, 0
        while len(cells.low) > most:
            cells, width = cells.halved(), 2 * width
        rows = np.flatnonzero(cells.known[:, gpu])
        return Curve(
            np.asarray(self.start + (rows + 0.5) * width, np.float64),
            cells.low[rows, gpu].astype(np.float64),
            (cells.sum[rows, gpu] / cells.known[rows, gpu]).astype(np.float64),
            cells.high[rows, gpu].astype(np.float64),
        )

    def means(self, name: str, gpus: int) -> Array:
        """A row a GPU, a column a stretch of time; NaN where nothing is known."""
        cells = self._cells.get(name) or _Cells.empty(0, 0)
        cells = cells.grown(self._rows, gpus)
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.where(cells.known > 0, cells.sum / cells.known, np.nan)
        return found.T.astype(np.float64)


def _add(cells: _Cells, rows: NDArray[np.int64], first: NDArray[np.int64], matrix: Array) -> None:
    known = ~np.isnan(matrix)
    width = matrix.shape[1]
    low = np.minimum.reduceat(np.where(known, matrix, np.inf), first, axis=0).astype(np.float32)
    high = np.maximum.reduceat(np.where(known, matrix, -np.inf), first, axis=0).astype(np.float32)
    cells.low[rows, :width] = np.minimum(cells.low[rows, :width], low)
    cells.high[rows, :width] = np.maximum(cells.high[rows, :width], high)
    cells.sum[rows, :width] += np.add.reduceat(np.where(known, matrix, 0.0), first, axis=0).astype(np.float32)
    cells.known[rows, :width] += np.add.reduceat(known, first, axis=0, dtype=np.int32)
