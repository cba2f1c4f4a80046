"""Payloads of the records of a head's log: batches of frames as they came, and facts that change the metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

NOTHING = 0
"""The kind of a record that only shows whether the disk takes one."""
BATCH = 1
"""The kind of a record that holds frames."""
FACT = 2
"""The kind of a record that holds one JSON document with a `fact` in it."""
_HEAD = struct.Struct("<16sIQIqq")
MOST_FRAMES = 100_000
_MAX_TIME_US = 253_402_300_799_999_999
"""The end of the year 9999."""


class Batch(NamedTuple):
    """Frames of one run of one agent, in the order in which it took them."""

    run: bytes
    """Sixteen random bytes that the agent made when it started."""
    node: int
    """The node's number in the metadata."""
    first: int
    """The sequence number of the first frame; they count from 1 without gaps."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here
    received_us: int
    """When the head got it, on the head's clock."""
    shift_us: int
    """What to add to the frames' times to have them on the head's clock; 0 unless that node's clock is wrong."""
    frames: bytes
    """Packed frames (`model/columns.py`), one after the other."""

    @property
    def last(self) -> int:
        """The sequence number of the last frame."""
        return self.first + self.count - 1

    def to_bytes(self) -> bytes:
        """The payload of its record."""
        return _HEAD.pack(*self[:6]) + self.frames

    @classmethod
    def from_bytes(cls, payload: bytes) -> Batch:
        """Read a payload.

        Raises:
            ValueError: It is too short.
        """
        if len(payload) < _HEAD.size:
            raise ValueError("it is not a batch of frames")
        run, node, first, count, received_us, shift_us = _HEAD.unpack_from(payload)
        return cls(run, node, first, count, received_us, shift_us, payload[_HEAD.size :])


class FrameEvents(NamedTuple):
    """What happened in one frame."""

    node: int
    run: bytes
    sequence: int
    time: float
    """Epoch seconds, on the head's clock."""
    events: bytes
    """A JSON array of objects, as it came."""


class Entry(NamedTuple):
    """One record that is to be written, or was, together with what its payload means."""

    kind: int
    payload: bytes
    batch: Batch | None = None
    """What the payload is, when it is a batch."""
    fact: Mapping[str, Any] | None = None
    """What the payload is, when it is a fact."""
    events: tuple[FrameEvents, ...] = ()
    """What happened in the batch's frames."""

    @classmethod
    def of_batch(cls, batch: Batch, events: tuple[FrameEvents, ...]) -> Entry:
        """Return the entry for frames."""
        return cls(BATCH, batch.to_bytes(), batch, events=events)

    @classmethod
    def of_fact(cls, fact: str, **fields: Any) -> Entry:
        """Return the entry for a fact."""
        return cls(FACT, fact_bytes(fact, **fields), fact={"fact": fact, **fields})


def fact_bytes(fact: str, **fields: Any) -> bytes:
    """The payload of a fact's record."""
    return json.dumps({"fact": fact, **fields}, separators=(",", ":"), allow_nan=False).encode()


def read_fact(payload: bytes) -> dict[str, Any]:
    """Read a fact.

    Raises:
        ValueError: It is none.
    """
    try:
        document = json.loads(payload.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict) or not isinstance(document.get("fact"), str):
        raise ValueError("it is not a fact")  # noqa: TRY004  what was read is wrong, not who reads
    return document


def clipped(time_us: int) -> int:
    """Limit a time to what every program can show, whatever a node's clock says."""
    return min(max(time_us, 0), _MAX_TIME_US)
