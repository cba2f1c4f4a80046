"""Encode remote-write requests: series as protobuf, and templates in which only values and times change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpulse.model.metric_catalog import CATALOG
from gpulse.model.packed_columns import MISSING_NARROW, MISSING_WIDE, ColumnLayout

SAMPLE_BYTES = 18
"""Size of the sample at the end of a series."""
VALUE_AT = 3
"""Offset of the value in a sample."""
TIME_AT = 12
"""Offset of the time in a sample."""
TIME_BYTES = 6
MAX_TIME_MS = (1 << 42) - 1
"""The latest time that fits in six bytes, in the year 2109."""
NAME_LABEL = "__name__"
_SERIES, _LABEL, _NAME, _VALUE = b"\x0a", b"\x0a", b"\x0a", b"\x12"
_EMPTY_SAMPLE = b"\x12\x10\x09" + bytes(8) + b"\x10" + b"\x80" * (TIME_BYTES - 1) + b"\x00"
_MAX_LABEL_CHARS = 1000


def encode_labels(labels: Mapping[str, str]) -> bytes:
    """Encode labels, sorted by name; labels with an empty value are omitted."""
    return b"".join(_encode_label(name, labels[name]) for name in sorted(labels) if labels[name])


def encode_series(labels: bytes) -> bytes:
    """Encode a series with these labels and an empty sample."""
    content = labels + _EMPTY_SAMPLE
    return _SERIES + encode_varint(len(content)) + content


def encode_time(time_ms: int) -> bytes:
    """Encode a time with a fixed size."""
    return bytes([*(time_ms >> shift & 0x7F | 0x80 for shift in range(0, 35, 7)), time_ms >> 35])


def split_series(request: bytes) -> Iterator[bytes]:
    """Split a request into its series."""
    begin = 0
    while begin < len(request):
        length, at = _decode_varint(request, begin + 1)
        yield request[begin : at + length]
        begin = at + length


def series_labels(series: bytes) -> bytes:
    """Return the encoded labels of a series with one sample, which identify it."""
    _, at = _decode_varint(series, 1)
    return series[at:-SAMPLE_BYTES]


def format_labels(labels: bytes) -> str:
    """Decode labels and format them as in PromQL."""
    found: dict[str, str] = {}
    begin = 0
    while begin < len(labels):
        _, at = _decode_varint(labels, begin + 1)
        length, at = _decode_varint(labels, at + 1)
        name = labels[at : at + length].decode()
        length, at = _decode_varint(labels, at + length + 1)
        found[name] = labels[at : at + length].decode(errors="replace")
        begin = at + length
    name = found.pop(NAME_LABEL, "")
    return f"{name}{{{', '.join(f'{key}={value!r}' for key, value in found.items())}}}"


def encode_varint(number: int) -> bytes:
    """Encode a number as a protobuf varint."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] > 0x7F:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | data[at] << shift, at + 1


def _encode_label(name: str, value: str) -> bytes:
    key, text = name.encode(), value[:_MAX_LABEL_CHARS].encode("utf-8", "replace")
    content = _NAME + encode_varint(len(key)) + key + _VALUE + encode_varint(len(text)) + text
    return _LABEL + encode_varint(len(content)) + content


_MAX_PATTERNS = 4
"""Maximum number of cached combinations of known values per block."""


class SeriesTemplate:
    """Concatenated series, each with one sample to fill in."""

    def __init__(self, series: NDArray[np.uint8], lengths: NDArray[np.intp]) -> None:
        samples = np.cumsum(lengths) - SAMPLE_BYTES
        self.series = series
        self.lengths = lengths
        self._value_at = samples[:, None] + np.arange(VALUE_AT, VALUE_AT + 8)
        self._time_at = samples[:, None] + np.arange(TIME_AT, TIME_AT + TIME_BYTES)

    @classmethod
    def of(cls, series: Sequence[bytes]) -> SeriesTemplate:
        """Build a template from series encoded by `encode_series`."""
        lengths = np.array([len(one) for one in series], np.intp)
        return cls(np.frombuffer(bytearray(b"".join(series)), np.uint8), lengths)

    def only(self, wanted: NDArray[np.bool_]) -> SeriesTemplate:
        """Return a template with some of the series."""
        return SeriesTemplate(self.series[np.repeat(wanted, self.lengths)], self.lengths[wanted])

    def put_values(self, values: NDArray[np.float64]) -> None:
        """Set the values of all samples."""
        self.series[self._value_at] = values.view(np.uint8).reshape(-1, 8)

    def at(self, time: bytes) -> bytes:
        """Return the request with all samples at a time, encoded by `encode_time`."""
        self.series[self._time_at] = np.frombuffer(time, np.uint8)
        return self.series.tobytes()


class BlockTemplate:
    """Request template for the blocks of one layout and node."""

    def __init__(self, layout: ColumnLayout, series: Sequence[bytes], places: Sequence[int]) -> None:
        """Create the template.

        Args:
            layout: The layout of the blocks.
            series: The encoded series to send.
            places: For each series, the index of its number in the block.
        """
        count = len(layout.subjects)
        columns = (*layout.wide, *layout.narrow)
        self._wide = count * len(layout.wide)
        self._total = count * len(columns)
        self._bytes = layout.block_bytes
        self._steps = np.repeat(np.array([column.steps for column in columns], np.float64), count)
        factors = {name: metric.prometheus_factor for name, metric in CATALOG[layout.scope].items()}
        sizes = [column.size * factors.get(column.name, 1) for column in columns]
        self._sizes = np.repeat(np.array(sizes, np.float64), count)
        self._places = None if list(places) == list(range(self._total)) else np.array(places, np.intp)
        self._whole = SeriesTemplate.of(series)
        self._patterns: dict[bytes, SeriesTemplate] = {}

    def request(self, numbers: bytes, time: bytes) -> tuple[bytes, int]:
        """Return the request for a block at a time, without unknown values, and its number of samples.

        Raises:
            ValueError: The size of the block does not match the layout.
        """
        if len(numbers) != self._bytes:
            raise ValueError(f"expected a block of {self._bytes} bytes, but got {len(numbers)} bytes")
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

    def _pattern(self, known: NDArray[np.bool_]) -> SeriesTemplate:
        key = known.tobytes()
        prepared = self._patterns.pop(key, None) or self._whole.only(known)
        self._patterns[key] = prepared  # most recently used last
        if len(self._patterns) > _MAX_PATTERNS:
            del self._patterns[next(iter(self._patterns))]
        return prepared
