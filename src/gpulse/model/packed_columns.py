"""Packed frames: columns of integers that agents send, spools keep and stores seal.

A layout defines once which subjects (GPUs, disks, processes) and which metrics a block of numbers contains; a packed
frame is then little more than the numbers, as integer steps of each metric's resolution. The ID of a layout is a hash
of its content, so that every block that refers to it can be read by anyone who has it.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from sys import byteorder, intern
from typing import Any, NamedTuple, get_args

from gpulse.model.metric_catalog import CATALOG, Metric, Scope, Value, Values

MISSING_WIDE = -(1 << 63)
"""Marks a missing value in a 64-bit column."""
MISSING_NARROW = -(1 << 31)
"""Marks a missing value in a 32-bit column."""
MAX_SUBJECTS = 65_536
MAX_COLUMNS = 512
MAX_LAYOUT_BYTES = 4 << 20
"""Size of a layout's JSON."""
MAX_PACKED_SUBJECTS = 8192
"""Number of subjects of one scope that an agent sends; a frame of all scopes then fits into one message."""
_WIDE_LIMIT = (1 << 63) - 1
_NARROW_LIMIT = (1 << 31) - 1
_NARROW_UNITS = frozenset({"1", "watts", "celsius", "hertz", "lanes", "bool", "percent"})
_SCOPES: frozenset[str] = frozenset(get_args(Scope))
_FRAME_HEADER = struct.Struct("<IqqHI")
"""Length of the rest of the frame, time, monotonic time, number of blocks, length of the events."""
_LENGTH = struct.Struct("<I")
_BLOCK_HEADER = struct.Struct("<QI")
_NATIVE = byteorder == "little"

SubjectValues = tuple[Values, Values]
"""The readings of one subject, and its rates."""


class LayoutColumn(NamedTuple):
    """One metric of a layout, and how its values are encoded."""

    name: str
    steps: int = 1
    """Steps per unit: 100 for a resolution of a hundredth."""
    size: int = 1
    """Units per step: 1,000,000 for a resolution of a megahertz. One of `steps` and `size` is 1."""

    def value(self, number: int) -> Value:
        """Return the value of a number of steps."""
        return number / self.steps if self.steps > 1 else number * self.size


class ColumnLayout(NamedTuple):
    """The subjects and metrics of a block of numbers."""

    scope: Scope
    subjects: tuple[dict[str, Any], ...]
    """Descriptions of the subjects: fields that hardly change."""
    wide: tuple[LayoutColumn, ...]
    """64-bit columns, which come first."""
    narrow: tuple[LayoutColumn, ...]
    """32-bit columns."""

    @property
    def block_bytes(self) -> int:
        """Size of a block with this layout."""
        return len(self.subjects) * (8 * len(self.wide) + 4 * len(self.narrow))

    def to_json(self) -> bytes:
        """Return the canonical JSON of the layout."""
        document = {
            "scope": self.scope,
            "subjects": self.subjects,
            "wide": self.wide,
            "narrow": self.narrow,
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> ColumnLayout:
        """Parse a layout that a head has accepted; non-finite numbers become None.

        Raises:
            ValueError: It is not a layout, or its scope is unknown to this version.
        """
        try:
            decoded = text if isinstance(text, str) else text.decode()
            document = json.loads(decoded, parse_constant=lambda _: None)
            scope, subjects = document["scope"], document["subjects"]
            wide = tuple(_column(raw) for raw in document["wide"])
            narrow = tuple(_column(raw) for raw in document["narrow"])
            if scope not in _SCOPES or not all(isinstance(subject, dict) for subject in subjects):
                raise TypeError(scope)
            if len(subjects) > MAX_SUBJECTS or len(wide) + len(narrow) > MAX_COLUMNS:
                raise ValueError("it has too many subjects or columns")
            names = {column.name for column in (*wide, *narrow)}
            if len(names) != len(wide) + len(narrow):
                raise ValueError("a column appears twice")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a valid layout: {error}") from error
        return cls(scope, share_subjects(subjects), share_columns(wide), share_columns(narrow))


def share_subjects(subjects: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Let subjects share names of fields, and with others of their layout texts and facts: the GPUs of a node hardly differ."""
    texts: dict[str, str] = {}
    latest: dict[str, Any] = {}
    shared = []
    for subject in subjects:
        fields: dict[str, Any] = {
            intern(name): texts.setdefault(value, value) if type(value) is str else value
            for name, value in subject.items()
        }
        if facts := fields.get("facts"):
            latest = fields["facts"] = latest if facts == latest else facts
        shared.append(fields)
    return tuple(shared)


@lru_cache(256)
def share_columns(columns: tuple[LayoutColumn, ...]) -> tuple[LayoutColumn, ...]:
    """Return the same object for equal columns: a head keeps the layouts of thousands of nodes, which hardly differ."""
    return columns


def _column(raw: Sequence[Any]) -> LayoutColumn:
    name, steps, size = raw
    if not isinstance(name, str) or not isinstance(steps, int) or not isinstance(size, int):
        raise TypeError(name)
    if steps < 1 or size < 1 or max(steps, size) > 10**12:
        raise ValueError(name)
    return LayoutColumn(name, steps, size)


def layout_id(text: bytes) -> int:
    """Return the ID of a layout from its canonical JSON."""
    return int.from_bytes(sha256(text).digest()[:8], "little")


def build_column(metric: Metric) -> LayoutColumn:
    """Return the column of a metric."""
    if metric.resolution >= 1:
        return LayoutColumn(metric.name, 1, round(metric.resolution))
    return LayoutColumn(metric.name, round(1 / metric.resolution), 1)


def is_wide(metric: Metric) -> bool:
    """Whether a metric needs 64 bits; a rate of bytes in steps of 1024 does not."""
    if metric.kind == "counter":
        return True
    if metric.kind == "ratio" or metric.unit in _NARROW_UNITS:
        return False
    return not (metric.unit == "bytes/second" and metric.resolution >= 1024)


class ColumnBlock(NamedTuple):
    """The numbers of one layout at one instant, column by column."""

    layout: int
    numbers: bytes


class PackedFrame(NamedTuple):
    """A frame as it is sent and stored: blocks of numbers, and events."""

    time_us: int
    monotonic_us: int
    blocks: tuple[ColumnBlock, ...]
    events: bytes = b""
    """A JSON array; empty without events."""

    def to_bytes(self) -> bytes:
        """Return the frame as bytes, prefixed with its length."""
        pieces = [b""]
        length = _FRAME_HEADER.size - _LENGTH.size + len(self.events)
        for block in self.blocks:
            pieces += (_BLOCK_HEADER.pack(block.layout, len(block.numbers)), block.numbers)
            length += _BLOCK_HEADER.size + len(block.numbers)
        pieces.append(self.events)
        pieces[0] = _FRAME_HEADER.pack(
            length, self.time_us, self.monotonic_us, len(self.blocks), len(self.events)
        )
        return b"".join(pieces)


def read_frame_times(data: bytes, offset: int = 0) -> tuple[int, int]:
    """Return the wall time and the monotonic time of the packed frame at an offset, in microseconds; zeros if there is none."""
    if len(data) - offset < _FRAME_HEADER.size:
        return 0, 0
    _, time_us, monotonic_us, _, _ = _FRAME_HEADER.unpack_from(data, offset)
    return time_us, monotonic_us


def split_packed_frames(data: bytes) -> Iterator[PackedFrame]:
    """Yield the packed frames of a byte string.

    Raises:
        ValueError: The data does not consist of complete frames.
    """
    offset, end = 0, len(data)
    while offset < end:
        if end - offset < _FRAME_HEADER.size:
            raise ValueError("the data ends within the header of a frame")
        length, time_us, monotonic_us, count, events = _FRAME_HEADER.unpack_from(data, offset)
        stop = offset + _LENGTH.size + length
        offset += _FRAME_HEADER.size
        if stop > end or stop < offset:
            raise ValueError("a frame is shorter than its header says")
        blocks = []
        for _ in range(count):
            if stop - offset < _BLOCK_HEADER.size:
                raise ValueError("a frame ends within a block")
            layout, size = _BLOCK_HEADER.unpack_from(data, offset)
            offset += _BLOCK_HEADER.size
            if size > stop - offset:
                raise ValueError("a block is longer than its frame")
            blocks.append(ColumnBlock(layout, data[offset : offset + size]))
            offset += size
        if stop - offset != events:
            raise ValueError("the length of a frame does not match its header")
        yield PackedFrame(time_us, monotonic_us, tuple(blocks), data[offset:stop])
        offset = stop


def packed_time_range(data: bytes) -> tuple[int, int]:
    """Return the earliest and the latest time of the packed frames of a byte string, in microseconds.

    Raises:
        ValueError: The data does not consist of complete frames.
    """
    times, offset = [], 0
    try:
        while offset < len(data):
            length, time_us, *_ = _FRAME_HEADER.unpack_from(data, offset)
            times.append(time_us)
            offset += _LENGTH.size + length
        return min(times), max(times)
    except (struct.error, ValueError) as error:
        raise ValueError("the data does not consist of complete frames") from error


class BlockPacker:
    """Packs the readings of one scope, and tracks changes of their layout."""

    def __init__(self, scope: Scope, names: Iterable[str] | None = None) -> None:
        """Start without a layout.

        Args:
            scope: Scope of the readings.
            names: Metrics to pack; all metrics of the catalog when None.
        """
        self.scope: Scope = scope
        wanted = None if names is None else frozenset(names)
        self._catalog = [
            metric for metric in CATALOG[scope].values() if wanted is None or metric.name in wanted
        ]
        self._unseen = {metric.name for metric in self._catalog}
        self._met: set[str] = set()
        """All names in the rows so far, also of what is not packed."""
        self._wide: list[LayoutColumn] = []
        self._narrow: list[LayoutColumn] = []
        self._subjects: tuple[dict[str, Any], ...] | None = None
        """The subjects of the last call."""
        self._count = 0
        """How many of them are packed."""
        self.layout = ColumnLayout(scope, (), (), ())
        self.text = b""
        """Canonical JSON of the current layout."""
        self._id = 0

    def pack(
        self, subjects: Sequence[dict[str, Any]], rows: Sequence[SubjectValues]
    ) -> tuple[ColumnBlock, bool]:
        """Return the block of these readings, and whether its layout is new."""
        new = self._find_new(rows)
        if new:
            self._unseen -= new
            used = [metric for metric in self._catalog if metric.name not in self._unseen]
            self._wide = [build_column(metric) for metric in used if is_wide(metric)]
            self._narrow = [build_column(metric) for metric in used if not is_wide(metric)]
        kept = tuple(subjects)
        changed = bool(new) or kept != self._subjects
        if changed:
            self._subjects = kept
            self._describe(kept[:MAX_PACKED_SUBJECTS])
            self._id = layout_id(self.text)
        rows = rows[: self._count]
        numbers = _numbers("q", self._wide, rows) + _numbers("i", self._narrow, rows)
        return ColumnBlock(self._id, numbers), changed

    def _find_new(self, rows: Sequence[SubjectValues]) -> set[str]:
        """Return the names of metrics that were not in any row before."""
        new: set[str] = set()
        for part in (part for row in rows for part in row):
            if not self._met.issuperset(part):
                self._met.update(part)
                new.update(part)
        return new & self._unseen

    def _describe(self, subjects: tuple[dict[str, Any], ...]) -> None:
        """Build the layout with as many of the subjects as heads accept."""
        while True:
            self.layout = ColumnLayout(self.scope, subjects, tuple(self._wide), tuple(self._narrow))
            self.text = self.layout.to_json()
            self._count = len(subjects)
            if len(self.text) <= MAX_LAYOUT_BYTES:
                return
            subjects = subjects[: len(subjects) // 2]


def _numbers(code: str, columns: list[LayoutColumn], rows: Sequence[SubjectValues]) -> bytes:
    missing, limit = (MISSING_WIDE, _WIDE_LIMIT) if code == "q" else (MISSING_NARROW, _NARROW_LIMIT)
    numbers: list[int] = []
    append = numbers.append
    for name, steps, size in columns:
        high = limit * size
        for values, rates in rows:
            value = values.get(name)
            if value is None:
                value = rates.get(name)
                if value is None:
                    append(missing)
                    continue
            scaled = value * steps
            if not -high <= scaled <= high:  # also true for NaN
                append(missing)
            elif size != 1:
                append(round(value / size))
            else:
                append(scaled if type(scaled) is int else round(scaled))
    packed = array(code, numbers)
    if not _NATIVE:
        packed.byteswap()
    return packed.tobytes()


def unpack_block(layout: ColumnLayout, numbers: bytes) -> list[Values]:
    """Return the values of each subject of a block.

    Raises:
        ValueError: The length of the block does not match its layout.
    """
    if len(numbers) != layout.block_bytes:
        raise ValueError(f"the block has {len(numbers)} bytes, but its layout needs {layout.block_bytes}")
    count = len(layout.subjects)
    rows: list[Values] = [{} for _ in range(count)]
    cut = count * 8 * len(layout.wide)
    for code, missing, columns, part in (
        ("q", MISSING_WIDE, layout.wide, numbers[:cut]),
        ("i", MISSING_NARROW, layout.narrow, numbers[cut:]),
    ):
        found = array(code, part)
        if not _NATIVE:
            found.byteswap()
        for place, (name, steps, size) in enumerate(columns):
            for row, number in zip(rows, found[place * count : (place + 1) * count], strict=True):
                if number != missing:
                    row[name] = (
                        number / steps if steps > 1 else number * size
                    )  # the same as LayoutColumn.value, in half the time
    return rows
