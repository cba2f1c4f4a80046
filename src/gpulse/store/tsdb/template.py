"""Prepared requests: the series of a block of numbers as bytes, in which only values and times are ever changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpulse.model.columns import MISSING_NARROW, MISSING_WIDE, Layout
from gpulse.model.metric import CATALOGUE
from gpulse.store.tsdb.wire import SAMPLE_BYTES, TIME_AT, TIME_BYTES, VALUE_AT

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_PATTERNS = 4
"""So many combinations of known values are kept ready for a block."""


class Prepared:
    """Series one after the other, each with one sample to be filled in."""

    def __init__(self, series: NDArray[np.uint8], lengths: NDArray[np.intp]) -> None:
        samples = np.cumsum(lengths) - SAMPLE_BYTES
        self.series = series
        self.lengths = lengths
        self._value_at = samples[:, None] + np.arange(VALUE_AT, VALUE_AT + 8)
        self._time_at = samples[:, None] + np.arange(TIME_AT, TIME_AT + TIME_BYTES)

    @classmethod
    def of(cls, series: Sequence[bytes]) -> Prepared:
        """Prepare series as they come from `wire.series_bytes`."""
        lengths = np.array([len(one) for one in series], np.intp)
        return cls(np.frombuffer(bytearray(b"".join(series)), np.uint8), lengths)

    def only(self, wanted: NDArray[np.bool_]) -> Prepared:
        """Some of the series."""
        return Prepared(self.series[np.repeat(wanted, self.lengths)], self.lengths[wanted])

    def put_values(self, values: NDArray[np.float64]) -> None:
        """Fill values in."""
        self.series[self._value_at] = values.view(np.uint8).reshape(-1, 8)

    def at(self, time: bytes) -> bytes:
        """The request of all series at a time, given as `wire.time_bytes` writes it."""
        self.series[self._time_at] = np.frombuffer(time, np.uint8)
        return self.series.tobytes()


class BlockTemplate:
    """The request for a block of numbers of one layout and node."""

    def __init__(self, layout: Layout, series: Sequence[bytes], places: Sequence[int]) -> None:
        """Prepare it.

        Args:
            layout: What the numbers are.
            series: Those that are sent.
            places: The number of the block that each of them takes.
        """
        count = len(layout.subjects)
        columns = (*layout.wide, *layout.narrow)
        self._wide = count * len(layout.wide)
        self._total = count * len(columns)
        self._bytes = layout.block_bytes
        self._steps = np.repeat(np.array([column.steps for column in columns], np.float64), count)
        factors = {name: metric.prometheus_factor for name, metric in CATALOGUE[layout.scope].items()}
        sizes = [column.size * factors.get(column.name, 1) for column in columns]
        self._sizes = np.repeat(np.array(sizes, np.float64), count)
        self._places = None if list(places) == list(range(self._total)) else np.array(places, np.intp)
        self._whole = Prepared.of(series)
        self._patterns: dict[bytes, Prepared] = {}

    def request(self, numbers: bytes, time: bytes) -> tuple[bytes, int]:
        """The request for a block at a time, and how many samples it has: what is not known is left out.

        Raises:
            ValueError: The block is not as long as its layout says.
        """
        if len(numbers) != self._bytes:
            raise ValueError(f"a block of {len(numbers)} bytes where {self._bytes} belong")
        values = np.empty(self._total)
        known = np.empty(self._total, np.bool_)
        wide = np.frombuffer(numbers, "<i8", self._wide)
        narrow = np.frombuffer(numbers, "<i4", self._total - self._wide, 8 * self._wide)
        values[: self._wide], values[self._wide :] = wide, narrow
        np.not_equal(wide, MISSING_WIDE, out=known[: self._wide])
        np.not_equal(narrow, MISSING_NARROW, out=known[self._wide :])
        values *= self._sizes  # one of the two is 1, or a power of two
        values /= self._steps
        if self._places is not None:
            values, known = values[self._places], known[self._places]
        prepared = self._whole
        if not known.all():
            values = values[known]
            prepared = self._pattern(known)
        if not len(values):
            return b"", 0
        prepared.put_values(values)
        return prepared.at(time), len(values)

    def _pattern(self, known: NDArray[np.bool_]) -> Prepared:
        key = known.tobytes()
        prepared = self._patterns.pop(key, None) or self._whole.only(known)
        self._patterns[key] = prepared  # the last one is the one that was used last
        if len(self._patterns) > _MAX_PATTERNS:
            del self._patterns[next(iter(self._patterns))]
        return prepared
