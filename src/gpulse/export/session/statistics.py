"""Means, extremes and percentiles of endless columns in little memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
_BIN_PERCENT = 0.01
_BIN_RATIO = 1.01
"""From one class of rates to the next, so that a percentile is off by half a percent at most."""
_LEAST_RATE = 1e-6
_SHIFT = 32
_MIDDLE = 1 << 31
_FARTHEST = float(_MIDDLE - 1)
_MOST_PENDING = 1_000_000


class Statistics(NamedTuple):
    """What a column of numbers looks like."""

    known: int
    mean: float
    min: float
    max: float
    p5: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float


class Distribution:
    """One quantity of many subjects: exact count, mean and extremes, and percentiles from how often each value came.

    Values fall into classes: hundredths of a percent, or rates that differ by one percent. Only classes that occur
    take memory, sixteen bytes each.
    """

    def __init__(self, *, is_percent: bool) -> None:
        self._is_percent = is_percent
        self._count = np.zeros(0, np.int64)
        self._sum, self._min, self._max = np.zeros(0), np.zeros(0), np.zeros(0)
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._pending_size = 0

    def add(self, rows: Array) -> None:
        """Take a row a moment and a column a subject; NaN is unknown. Later rows may have more columns."""
        self._grow(rows.shape[1])
        known = ~np.isnan(rows)
        counts = known.sum(axis=0)
        width = len(counts)
        self._count[:width] += counts
        self._sum[:width] += np.where(known, rows, 0.0).sum(axis=0)
        if not len(rows):
            return
        np.minimum(self._min[:width], np.where(known, rows, np.inf).min(axis=0), out=self._min[:width])
        np.maximum(self._max[:width], np.where(known, rows, -np.inf).max(axis=0), out=self._max[:width])
        columns = np.nonzero(known)[1].astype(np.int64)
        codes, often = np.unique((columns << _SHIFT) + self._classes(rows[known]), return_counts=True)
        self._pending.append((codes, often))
        self._pending_size += len(codes)
        if self._pending_size > max(_MOST_PENDING, len(self._codes)):
            self._merge()

    def of(self, columns: int | Collection[int]) -> Statistics | None:
        """The statistics of one subject, or of several together; None when nothing is known of them."""
        which = [columns] if isinstance(columns, int) else sorted(set(columns))
        which = [column for column in which if column < len(self._count) and self._count[column]]
        if not which:
            return None
        count = int(self._count[which].sum())
        low, high = float(self._min[which].min()), float(self._max[which].max())
        quantiles = [min(high, max(low, value)) for value in self._quantiles(which, count)]
        return Statistics(count, float(self._sum[which].sum() / count), low, high, *quantiles)

    def _quantiles(self, which: list[int], count: int) -> list[float]:
        self._merge()
        begins = np.searchsorted(self._codes, [column << _SHIFT for column in which])
        ends = np.searchsorted(self._codes, [(column + 1) << _SHIFT for column in which])
        parts = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        places = np.concatenate(parts)
        classes = self._codes[places] & ((1 << _SHIFT) - 1)
        order = np.argsort(classes, kind="stable")
        reached = np.cumsum(self._counts[places][order])
        # The nearest rank: the smallest value that so many percent of all do not exceed.
        ranks = np.ceil(np.asarray(PERCENTILES) / 100 * count)
        found = classes[order][np.searchsorted(reached, ranks)]
        return [self._value(int(number)) for number in found]

    def _classes(self, values: Array) -> NDArray[np.int64]:
        if self._is_percent:
            numbers = np.rint(np.clip(values / _BIN_PERCENT, -_FARTHEST, _FARTHEST))
        else:
            rates = np.clip(values, _LEAST_RATE, 1e300)
            numbers = np.rint(np.log(rates / _LEAST_RATE) / np.log(_BIN_RATIO)) + 1
            numbers[values < _LEAST_RATE] = 0
        return numbers.astype(np.int64) + _MIDDLE

    def _value(self, number: int) -> float:
        number -= _MIDDLE
        if self._is_percent:
            return round(number * _BIN_PERCENT, 4)
        return 0.0 if number <= 0 else _LEAST_RATE * float(_BIN_RATIO ** (number - 1))

    def _grow(self, width: int) -> None:
        more = width - len(self._count)
        if more > 0:
            self._count = np.concatenate((self._count, np.zeros(more, np.int64)))
            self._sum = np.concatenate((self._sum, np.zeros(more)))
            self._min = np.concatenate((self._min, np.full(more, np.inf)))
            self._max = np.concatenate((self._max, np.full(more, -np.inf)))

    def _merge(self) -> None:
        if not self._pending:
            return
        codes = np.concatenate([self._codes, *(part for part, _ in self._pending)])
        counts = np.concatenate([self._counts, *(part for _, part in self._pending)])
        self._pending, self._pending_size = [], 0
        order = np.argsort(codes, kind="stable")
        codes, counts = codes[order], counts[order]
        first = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
        self._codes = codes[first]
        self._counts = np.add.reduceat(counts, first) if len(counts) else counts
