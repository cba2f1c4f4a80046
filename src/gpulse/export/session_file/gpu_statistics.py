"""Statistics of GPUs over a session of any length: means, extremes, percentiles and energy."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.export.session_file.frame_grid import ENERGY, POWER, SampleTable

Array = NDArray[np.float64]

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
_BIN_PERCENT = 0.01
_BIN_RATIO = 1.01
"""Ratio between two classes of rates, so that a percentile is off by at most half a percent."""
_MIN_RATE = 1e-6
_SHIFT = 32
_CLASS_OFFSET = 1 << 31
_MAX_CLASS = float(_CLASS_OFFSET - 1)
_MAX_PENDING = 1_000_000


class ColumnStatistics(NamedTuple):
    """Statistics of one column of numbers."""

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
    """Distribution of one quantity for many subjects: exact count, mean and extremes, and percentiles from a histogram.

    The classes of the histogram are hundredths of a percent, or rates that differ by one percent. Only classes that
    occur take memory, sixteen bytes each.
    """

    def __init__(self, *, is_percent: bool) -> None:
        self._is_percent = is_percent
        self._count = np.zeros(0, np.int64)
        self._sum, self._min, self._max = np.zeros(0), np.zeros(0), np.zeros(0)
        self._codes, self._counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._pending: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._pending_size = 0

    def add(self, rows: Array) -> None:
        """Add a row for each frame with a column for each subject; NaN is unknown. Later rows may have more columns."""
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
        if self._pending_size > max(_MAX_PENDING, len(self._codes)):
            self._merge()

    def of(self, columns: int | Collection[int]) -> ColumnStatistics | None:
        """Return the statistics of one subject, or of several together; None when there are no values."""
        which = [columns] if isinstance(columns, int) else sorted(set(columns))
        which = [column for column in which if column < len(self._count) and self._count[column]]
        if not which:
            return None
        count = int(self._count[which].sum())
        low, high = float(self._min[which].min()), float(self._max[which].max())
        quantiles = [min(high, max(low, value)) for value in self._quantiles(which, count)]
        return ColumnStatistics(count, float(self._sum[which].sum() / count), low, high, *quantiles)

    def _quantiles(self, which: list[int], count: int) -> list[float]:
        self._merge()
        begins = np.searchsorted(self._codes, [column << _SHIFT for column in which])
        ends = np.searchsorted(self._codes, [(column + 1) << _SHIFT for column in which])
        parts = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
        places = np.concatenate(parts)
        classes = self._codes[places] & ((1 << _SHIFT) - 1)
        order = np.argsort(classes, kind="stable")
        reached = np.cumsum(self._counts[places][order])
        # Nearest-rank percentiles: the smallest value that this percentage of all values does not exceed.
        ranks = np.ceil(np.asarray(PERCENTILES) / 100 * count)
        found = classes[order][np.searchsorted(reached, ranks)]
        return [self._value(int(number)) for number in found]

    def _classes(self, values: Array) -> NDArray[np.int64]:
        if self._is_percent:
            numbers = np.rint(np.clip(values / _BIN_PERCENT, -_MAX_CLASS, _MAX_CLASS))
        else:
            rates = np.clip(values, _MIN_RATE, 1e300)
            numbers = np.rint(np.log(rates / _MIN_RATE) / np.log(_BIN_RATIO)) + 1
            numbers[values < _MIN_RATE] = 0
        return numbers.astype(np.int64) + _CLASS_OFFSET

    def _value(self, number: int) -> float:
        number -= _CLASS_OFFSET
        if self._is_percent:
            return round(number * _BIN_PERCENT, 4)
        return 0.0 if number <= 0 else _MIN_RATE * float(_BIN_RATIO ** (number - 1))

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


class _GpuEnergy(NamedTuple):
    """Energy of one GPU since the start."""

    time: float = np.nan
    power: float = np.nan
    joules: float = 0.0
    """Integral of the power."""
    counter: float = np.nan
    grown: float = 0.0
    """Growth of the counter between its first and its last change."""
    first_step: float = 0.0
    before_first: float = np.nan
    """Integral of the power up to the counter's first change."""
    before_last: float = np.nan


class EnergyMeter:
    """Adds up the energy of many GPUs, from the GPU's own counter where possible, else from its power.

    The counter is read only now and then and does not change in between. Between its first and its last change it is
    exact; the energy before and after comes from the integral of the power.
    """

    def __init__(self, gpus: int, *, max_gap_seconds: float) -> None:
        """Start with no energy.

        Args:
            gpus: Number of GPUs.
            max_gap_seconds: Nothing is added for a longer gap between samples, since the power is unknown there.
        """
        self._by_gpu = [_GpuEnergy()] * gpus
        self._gap = max_gap_seconds

    def add(self, table: SampleTable) -> None:
        """Add samples, which must not be older than earlier ones."""
        if not len(table.times):
            return
        order = np.argsort(table.columns, kind="stable")
        columns = table.columns[order]
        edges = np.flatnonzero(np.concatenate(([True], columns[1:] != columns[:-1], [True])))
        for begin, end in itertools.pairwise(edges):
            which = order[begin:end]
            column = int(columns[begin])
            self._by_gpu[column] = self._continued(
                self._by_gpu[column],
                table.times[which],
                table.values[POWER][which],
                table.values[ENERGY][which],
            )

    def joules(self, gpu: int) -> float | None:
        """Return the energy that one GPU used; None when neither its power nor its counter was known."""
        energy = self._by_gpu[gpu]
        if np.isnan(energy.before_first):
            return None if np.isnan(energy.power) else energy.joules
        if np.isnan(energy.power):
            return energy.first_step + energy.grown
        outside = energy.joules - (energy.before_last - energy.before_first)
        return energy.grown + max(0.0, outside)

    def _continued(self, energy: _GpuEnergy, times: Array, power: Array, counter: Array) -> _GpuEnergy:
        known = ~np.isnan(power)
        grows = energy.joules + np.zeros(len(times))
        if known.any():
            moments = np.concatenate(([energy.time], times[known]))
            watts = np.concatenate(([energy.power], power[known]))
            lasted = np.diff(moments)
            parts = lasted * (watts[1:] + watts[:-1]) / 2
            parts[~((lasted >= 0) & (lasted <= self._gap))] = 0.0  # the very first one is NaN
            sums = energy.joules + np.cumsum(parts)
            energy = energy._replace(time=float(moments[-1]), power=float(watts[-1]), joules=float(sums[-1]))
            reached = np.cumsum(known)
            grows = np.where(reached > 0, sums[np.maximum(reached - 1, 0)], grows)
        return _with_counter(energy, counter, grows)


def _with_counter(energy: _GpuEnergy, counter: Array, joules: Array) -> _GpuEnergy:
    known = np.flatnonzero(~np.isnan(counter))
    if not len(known):
        return energy
    readings = np.concatenate(([energy.counter], counter[known]))
    steps = np.diff(readings)
    moved = np.flatnonzero(steps > 0)  # a decrease, or the very first reading, is ignored
    grown, first, last = energy.grown, energy.before_first, energy.before_last
    first_step = energy.first_step
    if len(moved):
        if np.isnan(first):
            # When the first change began is unknown; the counter is used from the end of that change on.
            first = float(joules[known[moved[0]]])
            first_step = float(steps[moved[0]])
            grown += float(steps[moved[1:]].sum())
        else:
            grown += float(steps[moved].sum())
        last = float(joules[known[moved[-1]]])
    return energy._replace(
        counter=float(readings[-1]),
        grown=grown,
        first_step=first_step,
        before_first=first,
        before_last=last,
    )
