"""Decode and validate the messages of agents, or refuse them with a reason.

Code after this module trusts its results: they can be stored, sealed, forwarded and shown without further checks.
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
from gpulse.model.device import MAX_LINKS, MAX_PATHS, PcieLevel
from gpulse.model.message_limits import MAX_FRAME_EVENTS, MAX_TEXT_CHARS, MAX_TIME_US, MAX_VALUE
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import (
    MAX_COLUMNS,
    MAX_LAYOUT_BYTES,
    MAX_PACKED_SUBJECTS,
    ColumnLayout,
    LayoutColumn,
    PackedFrame,
    share_columns,
    share_subjects,
    split_packed_frames,
)
from gpulse.model.safe_text import printable, quoted
from gpulse.model.session import MAX_LABEL_CHARS, MAX_LABELS
from gpulse.store.event_decoder import JSON_ERRORS, EpochSeconds, Pid, decode_events
from gpulse.store.history.frame_blocks import subject_key

_Message = TypeVar("_Message", bound=Message)

MAX_RUNS = 10_000
MAX_BATCH_FRAMES = 10_000
MAX_BATCH_EVENTS = 32_768
"""Number of events in all frames of a batch, which take a second or two to store."""
MAX_FRAME_NUMBER = 1 << 62
"""Maximum frame number and frame count; far beyond any real run, and half of what the store can hold."""
_MAX_BLOCKS = 64
_MAX_CACHED_SHAPES = 10_000
_MAX_NAME_CHARS = {"host": 253, "machine": 200, "boot": 100, "instance": 100, "version": 100}
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
_Links = Annotated[int, Meta(ge=0, le=MAX_LINKS)]
_Path = tuple[_Name, PcieLevel | None, _Links | None]
_Metric = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,99}$")]
_Steps = Annotated[int, Meta(ge=1, le=10**12)]


class CallRefusedError(Exception):
    """An agent's call must end; has the status code and the reason for the agent."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def invalid_message(reason: str) -> CallRefusedError:
    """Return the refusal of a message that no agent of this version sends."""
    return CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, printable(reason, _MAX_REASON_CHARS))


def decode_message(kind: type[_Message], data: bytes) -> _Message:
    """Decode a protobuf message.

    Raises:
        CallRefusedError: The data is not such a message.
    """
    try:
        return kind.FromString(data)
    except (DecodeError, ValueError) as error:  # depends on the installed version of protobuf
        raise invalid_message("not a message of the gpulse protocol") from error


# --- hello


class _NodeFacts(Struct):
    """The fields of `model.device.Node`, without its name."""

    driver: _Text | UnsetType | None = UNSET
    cuda: _Text | UnsetType | None = UNSET
    kernel: _Text | UnsetType | None = UNSET
    cpu_model: _Text | UnsetType | None = UNSET
    ticks_per_second: Annotated[int, Meta(gt=0, le=1_000_000)] | UnsetType = UNSET
    numa_cpus: Annotated[list[_Text], Meta(max_length=_MAX_NUMA_NODES)] | UnsetType = UNSET


def decode_hello(hello: Hello) -> dict[str, Any]:
    """Validate an agent's hello message and return the facts about its node.

    Raises:
        CallRefusedError: The message is invalid.
    """
    if hello.protocol != wire.PROTOCOL:
        raise CallRefusedError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the head uses protocol {wire.PROTOCOL} (gpulse {__version__}), but this agent uses protocol {hello.protocol}"
            f" (gpulse {printable(hello.version, 40) or 'unknown'}); install the same version of gpulse on both",
        )
    for name, longest in _MAX_NAME_CHARS.items():
        _check_name(name, getattr(hello, name), longest)
    if not hello.host or not hello.machine:
        raise _invalid_hello("the host name or the machine ID is missing")
    labels = [text for pair in hello.labels.items() for text in pair]
    if len(hello.labels) > MAX_LABELS or any(
        len(text) > MAX_LABEL_CHARS or not text.isprintable() for text in labels
    ):
        raise _invalid_hello(
            f"there are more than {MAX_LABELS} labels, or one is longer than {MAX_LABEL_CHARS} characters or has unprintable characters"
        )
    for name in ("time_us", "monotonic_us", "shift_us"):
        if not -MAX_TIME_US <= getattr(hello, name) <= MAX_TIME_US:
            raise _invalid_hello(f"{name} is out of range")
    if not 1 <= len(hello.runs) <= MAX_RUNS or len({run.id for run in hello.runs}) != len(hello.runs):
        raise _invalid_hello(f"the message must announce between 1 and {MAX_RUNS} different runs")
    for run in hello.runs:
        check_run(run)
    if len(hello.node) > _MAX_NODE_BYTES:
        raise _invalid_hello(f"the node information is larger than {_MAX_NODE_BYTES >> 10} KiB")
    try:
        return {} if not hello.node else dict(_builtins(_NODE_DECODER.decode(hello.node)))
    except JSON_ERRORS as error:
        raise _invalid_hello(f"invalid node information: {error}") from error


_MAX_DAMAGED_RANGES = 1000


def check_run(run: WireRun) -> None:
    """Validate what an agent says about a run.

    Raises:
        CallRefusedError: The values are invalid.
    """
    if len(run.id) != wire.RUN_BYTES:
        raise _invalid_hello(f"a run ID must have {wire.RUN_BYTES} bytes")
    _check_name("boot", run.boot, _MAX_NAME_CHARS["boot"])
    for name in ("first_kept", "dropped", "elsewhere", "dropped_elsewhere", "last", "other_head_last"):
        if getattr(run, name) > MAX_FRAME_NUMBER:
            raise _invalid_hello(f"{name} of a run is larger than the maximum frame number")
    if len(run.damaged) > _MAX_DAMAGED_RANGES:
        raise _invalid_hello(f"a run has more than {_MAX_DAMAGED_RANGES} damaged frame ranges")
    for damage in run.damaged:
        if max(damage.first, damage.last) > MAX_FRAME_NUMBER:
            raise _invalid_hello("the first or last frame number of a damaged range exceeds the maximum")
        if not all(0 <= time_us <= MAX_TIME_US for time_us in (damage.start_us, damage.end_us)):
            raise _invalid_hello("the start or end time of a damaged frame range is invalid")


def _check_name(name: str, text: str, longest: int) -> None:
    if len(text) > longest or not text.isprintable():
        raise _invalid_hello(f"{name} is longer than {longest} characters or has unprintable characters")


def _invalid_hello(reason: str) -> CallRefusedError:
    return invalid_message(f"invalid hello message: {reason}")


# --- layouts


class _GpuSubject(Struct):
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
    facts: Annotated[dict[_Metric, _Fact], Meta(max_length=MAX_COLUMNS)] | UnsetType = UNSET
    board_part_number: _Text | UnsetType | None = UNSET
    cpu_affinity: _Text | UnsetType | None = UNSET
    switch_links: _Links | UnsetType | None = UNSET
    paths: Annotated[list[_Path], Meta(max_length=MAX_PATHS)] | UnsetType = UNSET
    adapter_paths: Annotated[list[_Path], Meta(max_length=MAX_PATHS)] | UnsetType = UNSET


class _HostSubject(Struct):
    """The machine itself, which has no fields."""


class _DiskSubject(Struct):
    name: _Name
    kind: _Text | UnsetType | None = UNSET
    model: _Text | UnsetType | None = UNSET


class _FilesystemSubject(Struct):
    mount_point: _Name
    device: _Text | UnsetType = UNSET
    type: _Text | UnsetType = UNSET
    disk: _Text | UnsetType | None = UNSET
    kind: _Text | UnsetType | None = UNSET


class _NetworkSubject(Struct):
    name: _Name
    kind: _Text | UnsetType = UNSET
    up: bool | UnsetType | None = UNSET


class _CgroupSubject(Struct):
    path: _Name


class _ProcessSubject(Struct):
    pid: Pid
    start_time: EpochSeconds | UnsetType | None = UNSET
    gpu: _Name | UnsetType = UNSET
    kind: _Text | UnsetType = UNSET


_SUBJECT_TYPES: dict[Scope, type[Struct]] = {
    "gpu": _GpuSubject,
    "host": _HostSubject,
    "disk": _DiskSubject,
    "filesystem": _FilesystemSubject,
    "network": _NetworkSubject,
    "cgroup": _CgroupSubject,
    "process": _ProcessSubject,
}


class _ScopeOnly(Struct):
    scope: str


_Columns = Annotated[list[tuple[_Metric, _Steps, _Steps]], Meta(max_length=MAX_COLUMNS)]


def _layout_decoder(subject: type[Struct]) -> msgspec.json.Decoder[Any]:
    subjects = Annotated[list[subject], Meta(max_length=MAX_PACKED_SUBJECTS)]  # type: ignore[valid-type]
    fields = [("subjects", subjects), ("wide", _Columns), ("narrow", _Columns)]
    return msgspec.json.Decoder(msgspec.defstruct("LayoutDocument", fields))


_builtins = msgspec.to_builtins
_NODE_DECODER = msgspec.json.Decoder(_NodeFacts)
_SCOPE_DECODER = msgspec.json.Decoder(_ScopeOnly)
_LAYOUT_DECODERS = {scope: _layout_decoder(subject) for scope, subject in _SUBJECT_TYPES.items()}


def decode_layout(text: bytes) -> ColumnLayout:
    """Decode a layout, with the fields of its subjects that this version knows.

    Raises:
        CallRefusedError: The text is not a layout, or exceeds a limit.
    """
    if len(text) > MAX_LAYOUT_BYTES:
        raise invalid_message(f"a column layout exceeds the limit of {MAX_LAYOUT_BYTES >> 20} MiB")
    try:
        text.decode()  # unknown fields are not validated otherwise
        scope = _SCOPE_DECODER.decode(text).scope
        if scope not in _LAYOUT_DECODERS:
            raise ValueError(f"unknown scope {quoted(scope, 40)}")
        document = _LAYOUT_DECODERS[scope].decode(text)
        layout = ColumnLayout(
            scope,
            share_subjects(_builtins(subject) for subject in document.subjects),
            share_columns(tuple(map(_decode_column, document.wide))),
            share_columns(tuple(map(_decode_column, document.narrow))),
        )
        _check_layout(layout)
    except JSON_ERRORS as error:
        raise invalid_message(f"invalid layout: {error}") from error
    return layout


def _decode_column(raw: tuple[str, int, int]) -> LayoutColumn:
    column = LayoutColumn(*raw)
    if column.steps > 1 and column.size > 1:
        raise ValueError(f"column {column.name} has both steps and a size, but only one of them is allowed")
    return column


def _check_layout(layout: ColumnLayout) -> None:
    names = [column.name for column in (*layout.wide, *layout.narrow)]
    if len(names) > MAX_COLUMNS or len(set(names)) != len(names):
        raise ValueError(f"the layout has more than {MAX_COLUMNS} columns, or lists a column twice")
    if layout.scope == "host" and len(layout.subjects) != 1:
        raise ValueError("a layout of scope host must have exactly one subject")
    keys = {subject_key(layout.scope, subject) for subject in layout.subjects}
    if len(keys) != len(layout.subjects):
        raise ValueError(f"two subjects of scope {layout.scope} have the same name")


def find_unknown_metrics(layout: ColumnLayout) -> set[str]:
    """Return the columns of a layout that are not in the metric catalog."""
    return {
        column.name
        for column in (*layout.wide, *layout.narrow)
        if column.name not in CATALOG.get(layout.scope, ())
    }


# --- frames


class FrameShapes:
    """Validates which blocks may occur together in a frame, and caches their sizes by layouts."""

    def __init__(self, layouts: Mapping[int, ColumnLayout]) -> None:
        self._layouts = layouts
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def clear(self) -> None:
        """Clear the cache, because layouts were forgotten."""
        self._known.clear()

    def sizes(self, names: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the blocks of these layouts.

        Raises:
            ValueError: A layout is unknown, or they cannot occur together in a frame.
        """
        known = self._known.get(names)
        if known is None:
            known = self._find(names)
            if len(self._known) >= _MAX_CACHED_SHAPES:
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
                raise ValueError("a block uses a layout that was never sent")
            # The GPU use of processes is a separate table.
            kind = layout.scope, layout.scope == "process" and any("gpu" in one for one in layout.subjects)
            if layout.subjects and kind in kinds:
                raise ValueError(f"a frame has two blocks of scope {layout.scope}")
            if layout.subjects:
                kinds.add(kind)
            found.append(layout.block_bytes)
        return tuple(found)


class DecodedBatch(NamedTuple):
    """Decoded frames of a batch."""

    frames: list[PackedFrame]
    data: bytes
    """All frames as bytes."""
    frame_events: dict[int, list[dict[str, Any]]]
    """Events by index of the frame."""
    problems: list[str]
    """Why events were left out."""
    refused: dict[int, str]
    """Why a frame was refused, by its index; an empty frame replaces it."""


def decode_frames(
    data: bytes, count: int, shapes: FrameShapes, without: Collection[int] = (), *, now_us: int
) -> DecodedBatch:
    """Decode the frames of a batch and check that each matches its layouts.

    Args:
        data: The concatenated frames.
        count: Expected number of frames.
        shapes: The valid combinations of blocks.
        without: Refused layouts, whose blocks are left out.
        now_us: Time of the empty frame that replaces a refused one.

    Raises:
        CallRefusedError: The data is not made of whole frames, or their number is wrong.
    """
    if len(data) > wire.MAX_BATCH_BYTES:
        raise invalid_message(f"a batch is larger than {wire.MAX_BATCH_BYTES >> 20} MiB")
    if not 0 < count <= MAX_BATCH_FRAMES:
        raise invalid_message(f"a batch has {count} frames; it must have between 1 and {MAX_BATCH_FRAMES}")
    try:
        frames = list(split_packed_frames(data))
    except ValueError as error:
        raise invalid_message(f"a batch contains an incomplete frame: {error}") from error
    if len(frames) != count:
        raise invalid_message(f"a batch has {len(frames)} frames, but announces {count}")
    frame_events: dict[int, list[dict[str, Any]]] = {}
    problems: list[str] = []
    refused: dict[int, str] = {}
    is_changed = False
    left = MAX_BATCH_EVENTS
    for place, frame in enumerate(frames):
        time_us, monotonic_us, blocks, events = frame
        if without and any(block.layout in without for block in blocks):
            blocks = tuple(block for block in blocks if block.layout not in without)
            frames[place] = frame._replace(blocks=blocks)
            is_changed = True
        try:
            if not (0 <= time_us <= MAX_TIME_US and -MAX_TIME_US <= monotonic_us <= MAX_TIME_US):
                raise ValueError("its time is out of range")
            sizes = shapes.sizes(tuple([block[0] for block in blocks]))
            if sizes != tuple([len(block[1]) for block in blocks]):
                raise ValueError("the size of a block does not match its layout")
        except ValueError as error:
            refused[place] = str(error)
            frames[place] = PackedFrame(now_us, 0, ())
            is_changed = True
            continue
        if events:
            found = decode_events(events, max_events=min(MAX_FRAME_EVENTS, left))
            left -= len(found.events)
            if found.events:
                frame_events[place] = found.events
            if found.problems:
                problems += found.problems
                frames[place] = frames[place]._replace(events=_encode_events(found.events))
                is_changed = True
    if is_changed:
        data = b"".join(frame.to_bytes() for frame in frames)
    return DecodedBatch(frames, data, frame_events, problems, refused)


def _encode_events(events: list[dict[str, Any]]) -> bytes:
    return json.dumps(events, separators=(",", ":"), allow_nan=False).encode() if events else b""


def check_batch_numbers(first: int, count: int, sent_us: int) -> None:
    """Check that the frame numbers and the time of a batch are valid.

    Raises:
        CallRefusedError: They are not.
    """
    if not 0 < first <= MAX_FRAME_NUMBER - count:
        raise invalid_message(
            f"a batch begins with frame {first}; frames are numbered from 1 to {MAX_FRAME_NUMBER}"
        )
    if not -MAX_TIME_US <= sent_us <= MAX_TIME_US:
        raise invalid_message("the time at which a batch was sent is out of range")


def decompress(data: bytes) -> bytes:
    """Decompress the frames of a batch.

    Raises:
        CallRefusedError: The data is not compressed, or is too large.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, wire.MAX_BATCH_BYTES + 1)
    except zlib.error as error:
        raise invalid_message(f"cannot decompress frames: {error}") from error
    if not unpacker.eof:
        raise invalid_message(
            f"compressed frames are incomplete or larger than {wire.MAX_BATCH_BYTES >> 20} MiB"
        )
    return plain
