"""Frames as columns of integers: what agents send, spools keep and stores seal.

A layout says once which subjects (GPUs, disks, processes) and which metrics a block of numbers is about; a packed
frame then is little more than the numbers, as whole steps of each metric's resolution. Layouts are named by their
content, so that whoever has seen one can read every block that refers to it.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, get_args

from gpulse.model.metric import CATALOGUE, Metric, Scope, Value, Values

MISSING_WIDE = -(1 << 63)
"""What stands for an absent value among 64-bit integers."""
MISSING_NARROW = -(1 << 31)
"""The same among 32-bit ones."""
MOST_SUBJECTS = 65_536
MOST_COLUMNS = 512
MAX_LAYOUT_BYTES = 4 << 20
"""Of a layout's spelling."""
MAX_PACKED_SUBJECTS = 8192
"""So many subjects of one scope an agent tells of; a frame of all scopes then fits into a message."""
_WIDE_LIMIT = (1 << 63) - 1
_NARROW_LIMIT = (1 << 31) - 1
_NARROW_UNITS = frozenset({"1", "watts", "celsius", "hertz", "lanes", "bool", "percent"})
_SCOPES: frozenset[str] = frozenset(get_args(Scope))
_HEAD = struct.Struct("<IqqHI")
"""Length of all that follows it, time, monotonic time, number of blocks, length of the events."""
_LENGTH = struct.Struct("<I")
_BLOCK = struct.Struct("<QI")
_NATIVE = sys.byteorder == "little"

Row = tuple[Values, Values]
"""The readings of one subject, and the rates that go with them."""


class Column(NamedTuple):
    """One metric of a layout and how its numbers are written."""

    name: str
    steps: int = 1
    """Steps in one unit: 100 for a hundredth."""
    size: int = 1
    """Units in one step: 1,000,000 for a megahertz. One of the two is 1."""

    def value(self, number: int) -> Value:
        """The value that a number of steps means."""
        return number / self.steps if self.steps > 1 else number * self.size


class Layout(NamedTuple):
    """What a block of numbers is about."""

    scope: Scope
    subjects: tuple[dict[str, Any], ...]
    """Who each number is of, described in words that hardly change."""
    wide: tuple[Column, ...]
    """The columns of 64 bits, which come first."""
    narrow: tuple[Column, ...]
    """The columns of 32 bits."""

    @property
    def block_bytes(self) -> int:
        """How long a block of this layout is."""
        return len(self.subjects) * (8 * len(self.wide) + 4 * len(self.narrow))

    def to_json(self) -> bytes:
        """The layout's one spelling."""
        document = {
            "scope": self.scope,
            "subjects": self.subjects,
            "wide": self.wide,
            "narrow": self.narrow,
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Layout:
        """Read a layout that a head has taken in; numbers that are not finite are None.

        Raises:
            ValueError: It is none, or one of a scope that this version does not know.
        """
        try:
            spelling = text if isinstance(text, str) else text.decode()
            document = json.loads(spelling, parse_constant=lambda _: None)
            scope, subjects = document["scope"], tuple(document["subjects"])
            wide = tuple(_column(raw) for raw in document["wide"])
            narrow = tuple(_column(raw) for raw in document["narrow"])
            if scope not in _SCOPES or not all(isinstance(subject, dict) for subject in subjects):
                raise TypeError(scope)
            if len(subjects) > MOST_SUBJECTS or len(wide) + len(narrow) > MOST_COLUMNS:
                raise ValueError("too large")
            names = {column.name for column in (*wide, *narrow)}
            if len(names) != len(wide) + len(narrow):
                raise ValueError("a column twice")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is not a layout: {error}") from error
        return cls(scope, subjects, wide, narrow)


def _column(raw: Sequence[Any]) -> Column:
    name, steps, size = raw
    if not isinstance(name, str) or not isinstance(steps, int) or not isinstance(size, int):
        raise TypeError(name)
    if steps < 1 or size < 1 or max(steps, size) > 10**12:
        raise ValueError(name)
    return Column(name, steps, size)


def layout_id(text: bytes) -> int:
    """The name of a layout, from its one spelling."""
    return int.from_bytes(sha256(text).digest()[:8], "little")


def column_of(metric: Metric) -> Column:
    """How a metric's values are written."""
    if metric.resolution >= 1:
        return Column(metric.name, 1, round(metric.resolution))
    return Column(metric.name, round(1 / metric.resolution), 1)


def is_wide(metric: Metric) -> bool:
    """Whether a metric needs 64 bits; a rate of bytes in steps of 1024 does not."""
    if metric.kind == "counter":
        return True
    if metric.kind == "ratio" or metric.unit in _NARROW_UNITS:
        return False
    return not (metric.unit == "bytes/second" and metric.resolution >= 1024)


class Block(NamedTuple):
    """The numbers of one layout at one instant, one metric after the other."""

    layout: int
    numbers: bytes


class PackedFrame(NamedTuple):
    """A frame as it travels: numbers, and what happened in words."""

    time_us: int
    monotonic_us: int
    blocks: tuple[Block, ...]
    events: bytes = b""
    """A JSON array, empty when nothing happened."""

    def to_bytes(self) -> bytes:
        """The frame as one piece that says how long it is."""
        pieces = [b""]
        length = _HEAD.size - _LENGTH.size + len(self.events)
        for block in self.blocks:
            pieces += (_BLOCK.pack(block.layout, len(block.numbers)), block.numbers)
            length += _BLOCK.size + len(block.numbers)
        pieces.append(self.events)
        pieces[0] = _HEAD.pack(length, self.time_us, self.monotonic_us, len(self.blocks), len(self.events))
        return b"".join(pieces)


def split(data: bytes) -> Iterator[PackedFrame]:
    """Take frames that stand one after the other apart.

    Raises:
        ValueError: They are not whole frames.
    """
    offset, end = 0, len(data)
    while offset < end:
        if end - offset < _HEAD.size:
            raise ValueError("it ends within the head of a frame")
        length, time_us, monotonic_us, count, events = _HEAD.unpack_from(data, offset)
        stop = offset + _LENGTH.size + length
        offset += _HEAD.size
        if stop > end or stop < offset:
            raise ValueError("a frame says that it is longer than it is")
        blocks = []
        for _ in range(count):
            if stop - offset < _BLOCK.size:
                raise ValueError("a frame ends within a block")
            layout, size = _BLOCK.unpack_from(data, offset)
            offset += _BLOCK.size
            if size > stop - offset:
                raise ValueError("a block is longer than its frame")
            blocks.append(Block(layout, data[offset : offset + size]))
            offset += size
        if stop - offset != events:
            raise ValueError("a frame is not as long as it says")
        yield PackedFrame(time_us, monotonic_us, tuple(blocks), data[offset:stop])
        offset = stop


def time_span(data: bytes) -> tuple[int, int]:
    """When the first and the last of the frames that stand one after the other were taken, in microseconds.

    Raises:
        ValueError: They are not whole frames.
    """
    times, offset = [], 0
    try:
        while offset < len(data):
            length, time_us, *_ = _HEAD.unpack_from(data, offset)
            times.append(time_us)
            offset += _LENGTH.size + length
        return min(times), max(times)
    except (struct.error, ValueError) as error:
        raise ValueError("they are not whole frames") from error


class BlockPacker:
    """Packs the readings of one scope, and says when their layout is a new one."""

    def __init__(self, scope: Scope, names: Iterable[str] | None = None) -> None:
        """Prepare to pack.

        Args:
            scope: What the readings are of.
            names: The only metrics wanted; all of the catalogue when None.
        """
        self.scope: Scope = scope
        wanted = None if names is None else frozenset(names)
        self._catalogue = [
            metric for metric in CATALOGUE[scope].values() if wanted is None or metric.name in wanted
        ]
        self._unseen = {metric.name for metric in self._catalogue}
        self._wide: list[Column] = []
        self._narrow: list[Column] = []
        self._subjects: tuple[dict[str, Any], ...] | None = None
        """Those that were given last."""
        self._count = 0
        """How many of them are packed."""
        self.layout = Layout(scope, (), (), ())
        self.text = b""
        """The spelling of the layout in use."""
        self._id = 0

    def pack(self, subjects: Sequence[dict[str, Any]], rows: Sequence[Row]) -> tuple[Block, bool]:
        """The block of these readings, and whether its layout was not in use before."""
        new = {name for values, rates in rows for name in (*values, *rates)} & self._unseen
        if new:
            self._unseen -= new
            used = [metric for metric in self._catalogue if metric.name not in self._unseen]
            self._wide = [column_of(metric) for metric in used if is_wide(metric)]
            self._narrow = [column_of(metric) for metric in used if not is_wide(metric)]
        kept = tuple(subjects)
        changed = bool(new) or kept != self._subjects
        if changed:
            self._subjects = kept
            self._describe(kept[:MAX_PACKED_SUBJECTS])
            self._id = layout_id(self.text)
        rows = rows[: self._count]
        numbers = _numbers("q", self._wide, rows) + _numbers("i", self._narrow, rows)
        return Block(self._id, numbers), changed

    def _describe(self, subjects: tuple[dict[str, Any], ...]) -> None:
        """Make the layout of as many of the subjects as heads take."""
        while True:
            self.layout = Layout(self.scope, subjects, tuple(self._wide), tuple(self._narrow))
            self.text = self.layout.to_json()
            self._count = len(subjects)
            if len(self.text) <= MAX_LAYOUT_BYTES:
                return
            subjects = subjects[: len(subjects) // 2]


def _numbers(code: str, columns: list[Column], rows: Sequence[Row]) -> bytes:
    missing, limit = (MISSING_WIDE, _WIDE_LIMIT) if code == "q" else (MISSING_NARROW, _NARROW_LIMIT)
    numbers: list[int] = []
    for name, steps, size in columns:
        for values, rates in rows:
            value = values.get(name)
            if value is None:
                value = rates.get(name)
            if value is None or not -limit * size <= value * steps <= limit * size:  # NaN is not, either
                numbers.append(missing)
            elif steps != 1:
                numbers.append(round(value * steps))
            elif size != 1:
                numbers.append(round(value / size))
            else:
                numbers.append(value if type(value) is int else round(value))
    packed = array(code, numbers)
    if not _NATIVE:
        packed.byteswap()
    return packed.tobytes()


def unpack(layout: Layout, numbers: bytes) -> list[Values]:
    """The values of each subject of a block.

    Raises:
        ValueError: The block is not as long as its layout says.
    """
    if len(numbers) != layout.block_bytes:
        raise ValueError(f"a block of {len(numbers)} bytes where {layout.block_bytes} belong")
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
                    )  # as Column.value, in half the time
    return rows
