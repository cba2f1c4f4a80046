"""Remote write's message as bytes: series of labels and one sample, whose value and time are put in later.

A `WriteRequest` is nothing but its series one after the other, so that requests are joined and split without reading
them. A sample is always as long as any other: eight bytes of value and six of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

SAMPLE_BYTES = 18
"""What a series ends with."""
VALUE_AT = 3
"""Where the value is in it."""
TIME_AT = 12
"""Where the time is."""
TIME_BYTES = 6
LATEST_MS = (1 << 42) - 1
"""The latest time that six bytes can hold, in the year 2109."""
NAME_LABEL = "__name__"
_SERIES, _LABEL, _NAME, _VALUE = b"\x0a", b"\x0a", b"\x0a", b"\x12"
_EMPTY_SAMPLE = b"\x12\x10\x09" + bytes(8) + b"\x10" + b"\x80" * (TIME_BYTES - 1) + b"\x00"
_MAX_TEXT = 1000


def labels_bytes(labels: Mapping[str, str]) -> bytes:
    """Labels as they are sent, by name; those without a value do not exist."""
    return b"".join(_label(name, labels[name]) for name in sorted(labels) if labels[name])


def series_bytes(labels: bytes) -> bytes:
    """A series of these labels, with a sample of 0 at the beginning of time."""
    content = labels + _EMPTY_SAMPLE
    return _SERIES + varint(len(content)) + content


def time_bytes(time_ms: int) -> bytes:
    """A time as it stands in a sample, always as long."""
    return bytes([*(time_ms >> shift & 0x7F | 0x80 for shift in range(0, 35, 7)), time_ms >> 35])


def split_series(request: bytes) -> Iterator[bytes]:
    """Take the series of a request apart."""
    begin = 0
    while begin < len(request):
        length, at = _read_varint(request, begin + 1)
        yield request[begin : at + length]
        begin = at + length


def series_labels(series: bytes) -> bytes:
    """The labels of a series of one sample, as they are sent: what tells it from others."""
    _, at = _read_varint(series, 1)
    return series[at:-SAMPLE_BYTES]


def shown_labels(labels: bytes) -> str:
    """Labels as people write them."""
    found: dict[str, str] = {}
    begin = 0
    while begin < len(labels):
        _, at = _read_varint(labels, begin + 1)
        length, at = _read_varint(labels, at + 1)
        name = labels[at : at + length].decode()
        length, at = _read_varint(labels, at + length + 1)
        found[name] = labels[at : at + length].decode(errors="replace")
        begin = at + length
    name = found.pop(NAME_LABEL, "")
    return f"{name}{{{', '.join(f'{key}={value!r}' for key, value in found.items())}}}"


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while data[at] > 0x7F:
        number |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return number | data[at] << shift, at + 1


def _label(name: str, value: str) -> bytes:
    key, text = name.encode(), value[:_MAX_TEXT].encode("utf-8", "replace")
    content = _NAME + varint(len(key)) + key + _VALUE + varint(len(text)) + text
    return _LABEL + varint(len(content)) + content
