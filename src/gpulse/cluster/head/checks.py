"""What agents send, looked at before it is believed: nothing that makes no sense gets into the log."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from gpulse.cluster import wire
from gpulse.cluster.head.greeting import Refused
from gpulse.model.columns import Layout, PackedFrame, split
from gpulse.model.packing import device_of

_Message = TypeVar("_Message", bound=Message)
MOST_LAYOUT_BYTES = 4 << 20
_LAST_NUMBER = 1 << 62
"""No run lasts so long; the store's numbers end at twice as much."""
_LAST_MOMENT_US = 253_402_300_800 * 1_000_000
"""Where calendars end, with the year 9999."""
_NAMED_BY = {
    "disk": "name",
    "filesystem": "mount_point",
    "network": "name",
    "cgroup": "path",
    "process": "pid",
}


def read_message(kind: type[_Message], data: bytes) -> _Message:
    """A message of this kind.

    Raises:
        Refused: It is none.
    """
    try:
        return kind.FromString(data)
    except (DecodeError, ValueError) as error:  # which of both depends on the protobuf that is installed
        raise _refused("a message that makes no sense") from error


def checked_layout(text: bytes) -> Layout:
    """The layout, when it is one whose subjects all say who they are.

    Raises:
        Refused: It is not.
    """
    if len(text) > MOST_LAYOUT_BYTES:
        raise _refused("a layout that is too large")
    try:
        layout = Layout.from_json(text)
        for subject in layout.subjects:
            name = _NAMED_BY.get(layout.scope)
            if layout.scope == "gpu":
                device_of(subject)
            elif name is not None and not isinstance(
                subject.get(name), int if layout.scope == "process" else str | int
            ):
                raise ValueError(f"a {layout.scope} without {name}")
    except ValueError as error:
        raise _refused(str(error)) from error
    return layout


def checked_frames(data: bytes, count: int, layouts: Mapping[int, Layout]) -> list[PackedFrame]:
    """The frames of a batch, when they are as many as announced and fit their layouts.

    Raises:
        Refused: They do not.
    """
    if len(data) > wire.MOST_BATCH_BYTES:
        raise _refused("a batch that is too large")
    try:
        frames = list(split(data))
        if len(frames) != count or not frames:
            raise ValueError(f"{len(frames)} frames where {count} were announced")
        for frame in frames:
            for name, numbers in frame.blocks:
                layout = layouts.get(name)
                if layout is None or len(numbers) != layout.block_bytes:
                    raise ValueError("a block that does not fit its layout")
            if frame.events and not isinstance(json.loads(frame.events), list):
                raise ValueError("events that are no list")
    except (ValueError, RecursionError) as error:
        raise _refused(f"a batch that makes no sense: {error}") from error
    return frames


def check_numbers(first: int, count: int) -> None:
    """See that frames have numbers that the store can hold.

    Raises:
        Refused: They have not.
    """
    if not 0 < first <= _LAST_NUMBER - count:
        raise _refused(f"a batch that makes no sense: it begins with frame {first}")


def check_moments(frames: Sequence[PackedFrame], shift_us: int) -> None:
    """See that frames are of a time that a calendar has, on their own clock and on the head's.

    Raises:
        Refused: One is not.
    """
    for frame in frames:
        if not all(0 <= moment < _LAST_MOMENT_US for moment in (frame.time_us, frame.time_us + shift_us)):
            raise _refused("a batch that makes no sense: a time that no calendar has")


def unzipped(data: bytes) -> bytes:
    """The frames that were zipped.

    Raises:
        Refused: They were not, or are more than a batch may be.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, wire.MOST_BATCH_BYTES + 1)
    except zlib.error as error:
        raise _refused(f"frames that cannot be unzipped: {error}") from error
    if not unpacker.eof:
        raise _refused("zipped frames that are too large or cut off")
    return plain


def _refused(reason: str) -> Refused:
    return Refused(grpc.StatusCode.INVALID_ARGUMENT, reason)
