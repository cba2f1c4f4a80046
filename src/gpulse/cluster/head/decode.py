"""Decode what agents send into typed, bounded values, or refuse it with the reason.

Nothing behind this module looks at what agents send with doubt: what passes it can be stored, sealed, sent on and shown.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message
from msgspec import UNSET, Meta, Struct, UnsetType

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import Hello
from gpulse.cluster.wire_pb2 import Run as WireRun
from gpulse.model.bounds import MAX_TEXT_CHARS, MAX_TIME_SECONDS, MAX_VALUE
from gpulse.model.columns import (
    MAX_LAYOUT_BYTES,
    MOST_COLUMNS,
    MOST_SUBJECTS,
    Column,
    Layout,
    PackedFrame,
    split,
)
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.session import LONGEST_LABEL, MOST_LABELS
from gpulse.store.agent_events import UNREADABLE, Pid, Time, decode_events
from gpulse.store.history.blocks import subject_key

_Message = TypeVar("_Message", bound=Message)

MAX_RUNS = 10_000
MAX_BATCH_FRAMES = 10_000
MAX_NUMBER = 1 << 62
"""Of a frame's number, and of all counts of frames: no run lasts so long; the store's numbers end at twice as much."""
MAX_TIME_US = int(MAX_TIME_SECONDS) * 1_000_000
_MAX_BLOCKS = 64
_MAX_SHAPES = 10_000
_MAX_NAMES_CHARS = {"host": 253, "machine": 200, "boot": 100, "instance": 100, "version": 100}
_MAX_NUMA_NODES = 4096
_MAX_NODE_BYTES = 1 << 20
_MAX_REASON_CHARS = 300
_NO_CONTROL = r"^[^\x00-\x1f\x7f]*$"

_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS, pattern=_NO_CONTROL)]
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS, pattern=_NO_CONTROL)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Small = Annotated[int, Meta(ge=-1, lt=1 << 31)]
_Fact = (
    Annotated[int, Meta(ge=-int(MAX_VALUE), le=int(MAX_VALUE))]
    | Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
)
_Metric = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,99}$")]
_Steps = Annotated[int, Meta(ge=1, le=10**12)]


class Refused(Exception):  # noqa: N818  it is no error of ours
    """An agent's call that is ended, with the reason it is told."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def invalid(reason: str) -> Refused:
    """A refusal of something that no agent of this version sends."""
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, shown(reason, _MAX_REASON_CHARS))


def shown(text: str, most: int) -> str:
    """Text of another machine as it may stand in a message."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


def read_message(kind: type[_Message], data: bytes) -> _Message:
    """Decode a protobuf message.

    Raises:
        Refused: It is not one of this kind.
    """
    try:
        return kind.FromString(data)
    except (DecodeError, ValueError) as error:  # which of both depends on the protobuf that is installed
        raise invalid("the message is not one of gpulse's protocol") from error


# --- hello


class _Node(Struct):
    """The fields of `model.device.Node`, without its name."""

    driver: _Text | UnsetType | None = UNSET
    cuda: _Text | UnsetType | None = UNSET
    kernel: _Text | UnsetType | None = UNSET
    cpu_model: _Text | UnsetType | None = UNSET
    ticks_per_second: Annotated[int, Meta(gt=0, le=1_000_000)] | UnsetType = UNSET
    numa_cpus: Annotated[list[_Text], Meta(max_length=_MAX_NUMA_NODES)] | UnsetType = UNSET


def decode_hello(hello: Hello) -> dict[str, Any]:
    """The facts about the node, when everything in an agent's hello is as it should be.

    Raises:
        Refused: Something is not.
    """
    if hello.protocol != wire.PROTOCOL:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the head speaks protocol {wire.PROTOCOL} (gpulse {__version__}), this agent protocol {hello.protocol}"
            f" (gpulse {shown(hello.version, 40) or 'unknown'}); install the same gpulse on both",
        )
    for name, longest in _MAX_NAMES_CHARS.items():
        _check_name(name, getattr(hello, name), longest)
    if not hello.host or not hello.machine:
        raise _wrong_hello("it does not say which machine it is on")
    labels = [text for pair in hello.labels.items() for text in pair]
    if len(hello.labels) > MOST_LABELS or any(
        len(text) > LONGEST_LABEL or not text.isprintable() for text in labels
    ):
        raise _wrong_hello(
            f"its labels are more than {MOST_LABELS}, longer than {LONGEST_LABEL} characters, or not printable"
        )
    for name in ("time_us", "monotonic_us", "shift_us"):
        if not -MAX_TIME_US < getattr(hello, name) < MAX_TIME_US:
            raise _wrong_hello(f"its {name} is beyond the year 9999")
    if not 1 <= len(hello.runs) <= MAX_RUNS or len({run.id for run in hello.runs}) != len(hello.runs):
        raise _wrong_hello(f"it must name between 1 and {MAX_RUNS} different runs")
    for run in hello.runs:
        check_run(run)
    if len(hello.node) > _MAX_NODE_BYTES:
        raise _wrong_hello(f"what it says about its node takes more than {_MAX_NODE_BYTES >> 10} KiB")
    try:
        return {} if not hello.node else dict(_builtins(_NODE.decode(hello.node)))
    except UNREADABLE as error:
        raise _wrong_hello(f"what it says about its node is wrong: {error}") from error


def check_run(run: WireRun) -> None:
    """See that what an agent says about a run can be stored.

    Raises:
        Refused: It cannot.
    """
    if len(run.id) != wire.RUN_BYTES:
        raise _wrong_hello(f"the id of a run has {wire.RUN_BYTES} bytes")
    _check_name("boot", run.boot, _MAX_NAMES_CHARS["boot"])
    for name in ("first_kept", "dropped", "elsewhere", "dropped_elsewhere"):
        if getattr(run, name) > MAX_NUMBER:
            raise _wrong_hello(f"{name} of a run is more frames than a run can have")


def _check_name(name: str, text: str, longest: int) -> None:
    if len(text) > longest or not text.isprintable():
        raise _wrong_hello(f"its {name} is longer than {longest} characters, or not printable")


def _wrong_hello(reason: str) -> Refused:
    return invalid(f"this is not an agent's hello: {reason}")


# --- layouts


class _Gpu(Struct):
    """The fields of `model.device.Device`."""

    index: _Index
    uuid: _Name
    name: _Text
    bus_id: _Text | UnsetType | None = UNSET
    minor_number: _Small | UnsetType | None = UNSET
    serial: _Text | UnsetType | None = UNSET
    vbios: _Text | UnsetType | None = UNSET
    architecture: _Text | UnsetType | None = UNSET
    compute_capability: _Text | UnsetType | None = UNSET
    numa_node: _Small | UnsetType | None = UNSET
    has_gpm: bool | UnsetType = UNSET
    parent_uuid: _Text | UnsetType | None = UNSET
    mig_index: _Index | UnsetType | None = UNSET
    gpu_instance: _Small | UnsetType | None = UNSET
    compute_instance: _Small | UnsetType | None = UNSET
    facts: Annotated[dict[_Metric, _Fact], Meta(max_length=MOST_COLUMNS)] | UnsetType = UNSET


class _Host(Struct):
    """The machine itself, which needs no name."""


class _Disk(Struct):
    name: _Name
    kind: _Text | UnsetType | None = UNSET
    model: _Text | UnsetType | None = UNSET


class _Filesystem(Struct):
    mount_point: _Name
    device: _Text | UnsetType = UNSET
    type: _Text | UnsetType = UNSET
    disk: _Text | UnsetType | None = UNSET
    kind: _Text | UnsetType | None = UNSET


class _Network(Struct):
    name: _Name
    kind: _Text | UnsetType = UNSET
    up: bool | UnsetType | None = UNSET


class _Cgroup(Struct):
    path: _Name


class _Process(Struct):
    pid: Pid
    start_time: Time | UnsetType | None = UNSET
    gpu: _Name | UnsetType = UNSET
    kind: _Text | UnsetType = UNSET


_SUBJECTS: dict[Scope, type[Struct]] = {
    "gpu": _Gpu,
    "host": _Host,
    "disk": _Disk,
    "filesystem": _Filesystem,
    "network": _Network,
    "cgroup": _Cgroup,
    "process": _Process,
}


class _Scope(Struct):
    scope: str


_Columns = Annotated[list[tuple[_Metric, _Steps, _Steps]], Meta(max_length=MOST_COLUMNS)]


def _layout_decoder(subject: type[Struct]) -> msgspec.json.Decoder[Any]:
    subjects = Annotated[list[subject], Meta(max_length=MOST_SUBJECTS)]  # type: ignore[valid-type]
    fields = [("subjects", subjects), ("wide", _Columns), ("narrow", _Columns)]
    return msgspec.json.Decoder(msgspec.defstruct("LayoutDocument", fields))


_builtins = msgspec.to_builtins
_NODE = msgspec.json.Decoder(_Node)
_SCOPE = msgspec.json.Decoder(_Scope)
_LAYOUTS = {scope: _layout_decoder(subject) for scope, subject in _SUBJECTS.items()}


def decode_layout(text: bytes) -> Layout:
    """The layout with what this version knows of its subjects.

    Raises:
        Refused: It is not a layout, or something in it is beyond the limits.
    """
    if len(text) > MAX_LAYOUT_BYTES:
        raise invalid(f"a layout takes more than {MAX_LAYOUT_BYTES >> 20} MiB")
    try:
        text.decode()  # what is not known here is not looked at otherwise
        scope = _SCOPE.decode(text).scope
        if scope not in _LAYOUTS:
            raise ValueError(f"nothing is known of the scope {scope[:40]!a}")
        document = _LAYOUTS[scope].decode(text)
        layout = Layout(
            scope,
            tuple(map(_builtins, document.subjects)),
            tuple(map(_column, document.wide)),
            tuple(map(_column, document.narrow)),
        )
        _check_layout(layout)
    except UNREADABLE as error:
        raise invalid(f"a layout is wrong: {error}") from error
    return layout


def _column(raw: tuple[str, int, int]) -> Column:
    column = Column(*raw)
    if column.steps > 1 and column.size > 1:
        raise ValueError(f"{column.name} has both steps and a size")
    return column


def _check_layout(layout: Layout) -> None:
    names = [column.name for column in (*layout.wide, *layout.narrow)]
    if len(names) > MOST_COLUMNS or len(set(names)) != len(names):
        raise ValueError(f"it has more than {MOST_COLUMNS} columns, or one of them twice")
    if layout.scope == "host" and len(layout.subjects) != 1:
        raise ValueError("a node has one host")
    keys = {subject_key(layout.scope, subject) for subject in layout.subjects}
    if len(keys) != len(layout.subjects):
        raise ValueError(f"two subjects of the scope {layout.scope} have the same name")


def unknown_metrics(layout: Layout) -> set[str]:
    """Return the names of a layout's columns that the catalogue does not have."""
    return {
        column.name
        for column in (*layout.wide, *layout.narrow)
        if column.name not in CATALOGUE.get(layout.scope, ())
    }


# --- frames


class Shapes:
    """Which blocks may stand together in a frame, and how long they are; found out once for frames of the same layouts."""

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        self._layouts = layouts
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def clear(self) -> None:
        """Find out anew: layouts were forgotten."""
        self._known.clear()

    def sizes(self, names: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of blocks of these layouts.

        Raises:
            ValueError: One is not known, or they do not belong into one frame.
        """
        known = self._known.get(names)
        if known is None:
            known = self._find(names)
            if len(self._known) >= _MAX_SHAPES:
                self._known.clear()
            self._known[names] = known
        return known

    def _find(self, names: tuple[int, ...]) -> tuple[int, ...]:
        if len(names) > _MAX_BLOCKS:
            raise ValueError(f"a frame has more than {_MAX_BLOCKS} blocks")
        found: list[int] = []
        kinds: set[tuple[str, bool]] = set()
        for name in names:
            layout = self._layouts.get(name)
            if layout is None:
                raise ValueError("a block's layout was never told")
            # What processes hold on GPUs is a table of its own.
            kind = layout.scope, layout.scope == "process" and any("gpu" in one for one in layout.subjects)
            if layout.subjects and kind in kinds:
                raise ValueError(f"a frame has two blocks of the scope {layout.scope}")
            if layout.subjects:
                kinds.add(kind)
            found.append(layout.block_bytes)
        return tuple(found)


class DecodedBatch(NamedTuple):
    """The frames of a batch."""

    frames: list[PackedFrame]
    data: bytes
    """All of them as bytes."""
    happened: dict[int, list[dict[str, Any]]]
    """By a frame's place the events in it."""
    problems: list[str]
    """What is wrong with events that are left out."""
    refused: dict[int, str]
    """By place why a frame is refused; an empty one stands in its place."""


def decode_frames(
    data: bytes, count: int, shapes: Shapes, without: Collection[int] = (), *, now_us: int
) -> DecodedBatch:
    """Take the frames of a batch apart and see that each fits its layouts.

    Args:
        data: The frames, one after the other.
        count: How many they should be.
        shapes: What belongs into a frame.
        without: Layouts that were refused: their blocks are left out.
        now_us: The time of what stands in place of a refused frame.

    Raises:
        Refused: They are not whole frames, or not as many as announced.
    """
    if len(data) > wire.MOST_BATCH_BYTES:
        raise invalid(f"a batch takes more than {wire.MOST_BATCH_BYTES >> 20} MiB")
    if not 0 < count <= MAX_BATCH_FRAMES:
        raise invalid(f"a batch has {count} frames; it must have between 1 and {MAX_BATCH_FRAMES}")
    try:
        frames = list(split(data))
    except ValueError as error:
        raise invalid(f"a batch is not made of whole frames: {error}") from error
    if len(frames) != count:
        raise invalid(f"a batch has {len(frames)} frames, but says {count}")
    happened: dict[int, list[dict[str, Any]]] = {}
    problems: list[str] = []
    refused: dict[int, str] = {}
    is_changed = False
    for place, frame in enumerate(frames):
        time_us, monotonic_us, blocks, events = frame
        if without and any(block.layout in without for block in blocks):
            blocks = tuple(block for block in blocks if block.layout not in without)
            frames[place] = frame._replace(blocks=blocks)
            is_changed = True
        try:
            if not (0 <= time_us < MAX_TIME_US and -MAX_TIME_US < monotonic_us < MAX_TIME_US):
                raise ValueError("its time is beyond the year 9999")
            sizes = shapes.sizes(tuple([block[0] for block in blocks]))
            if sizes != tuple([len(block[1]) for block in blocks]):
                raise ValueError("a block is not as long as its layout says")
        except ValueError as error:
            refused[place] = str(error)
            frames[place] = PackedFrame(now_us, 0, ())
            is_changed = True
            continue
        if events:
            found = decode_events(events)
            if found.events:
                happened[place] = found.events
            if found.problems:
                problems += found.problems
                frames[place] = frames[place]._replace(events=_written(found.events))
                is_changed = True
    if is_changed:
        data = b"".join(frame.to_bytes() for frame in frames)
    return DecodedBatch(frames, data, happened, problems, refused)


def _written(events: list[dict[str, Any]]) -> bytes:
    return json.dumps(events, separators=(",", ":"), allow_nan=False).encode() if events else b""


def check_numbers(first: int, count: int, sent_us: int) -> None:
    """See that a batch has numbers that the store can hold.

    Raises:
        Refused: It has not.
    """
    if not 0 < first <= MAX_NUMBER - count:
        raise invalid(f"a batch begins with frame {first}; frames are numbered from 1 on, up to {MAX_NUMBER}")
    if not -MAX_TIME_US < sent_us < MAX_TIME_US:
        raise invalid("a batch was sent at a time beyond the year 9999")


def unzipped(data: bytes) -> bytes:
    """The frames that were zipped.

    Raises:
        Refused: They were not, or are more than a batch may be.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, wire.MOST_BATCH_BYTES + 1)
    except zlib.error as error:
        raise invalid(f"frames cannot be unzipped: {error}") from error
    if not unpacker.eof:
        raise invalid(f"zipped frames are cut off, or take more than {wire.MOST_BATCH_BYTES >> 20} MiB")
    return plain
