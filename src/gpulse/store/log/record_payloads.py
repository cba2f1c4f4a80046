"""Payloads of the records in a head's log: batches of frames as received, and facts that change the metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.message_limits import MAX_TIME_US
from gpulse.model.packed_columns import PackedFrame

PROBE = 0
"""Kind of a record without meaning, written to test whether the disk accepts writes."""
BATCH = 1
"""Kind of a record that contains frames."""
FACT = 2
"""Kind of a record that contains a JSON document with a `fact` field."""
_HEAD = struct.Struct("<16sIQIqq")
_MAX_BATCH_DELAY_US = 60_000_000
"""Frames usually arrive within this time, so lost ones may be that much older than the batch before them."""
MAX_BATCH_FRAMES = 100_000


class FrameBatch(NamedTuple):
    """Frames of one run of an agent, in the order in which they were sampled."""

    run: bytes
    """Sixteen random bytes that the agent generated when it started."""
    node: int
    """The node's number in the metadata."""
    first: int
    """Sequence number of the first frame; frames are numbered from 1 without gaps."""
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here
    received_us: int
    """When the head received the batch, by the head's clock."""
    shift_us: int
    """Added to the frames' times to convert them to the head's clock; 0 unless the node's clock is wrong."""
    frames: bytes
    """Packed frames (`model/packed_columns.py`), one after the other."""

    @property
    def last(self) -> int:
        """Sequence number of the last frame."""
        return self.first + self.count - 1

    def to_bytes(self) -> bytes:
        """Return the payload of its record."""
        return _HEAD.pack(*self[:6]) + self.frames

    @classmethod
    def from_bytes(cls, payload: bytes) -> FrameBatch:
        """Parse the payload of a record.

        Raises:
            ValueError: The payload is too short.
        """
        if len(payload) < _HEAD.size:
            raise ValueError("the record is not a batch of frames")
        run, node, first, count, received_us, shift_us = _HEAD.unpack_from(payload)
        return cls(run, node, first, count, received_us, shift_us, payload[_HEAD.size :])


class FrameEvents(NamedTuple):
    """The events of one frame."""

    node: int
    run: bytes
    sequence: int
    time: float
    """Epoch seconds, by the head's clock."""
    events: bytes
    """A JSON array of objects, as received."""


class LogEntry(NamedTuple):
    """A record of the log together with its parsed payload."""

    kind: int
    payload: bytes
    batch: FrameBatch | None = None
    """The parsed payload of a batch record."""
    fact: Mapping[str, Any] | None = None
    """The parsed payload of a fact record."""
    events: tuple[FrameEvents, ...] = ()
    """The events in the frames of the batch."""
    frames: Sequence[PackedFrame] | None = None
    """The frames of the batch, if they are decoded already."""

    @classmethod
    def of_batch(
        cls,
        batch: FrameBatch,
        events: tuple[FrameEvents, ...],
        frames: Sequence[PackedFrame] | None = None,
    ) -> LogEntry:
        """Return the entry for a batch of frames."""
        return cls(BATCH, batch.to_bytes(), batch, None, events, frames)

    @classmethod
    def of_fact(cls, fact: str, **fields: Any) -> LogEntry:
        """Return the entry for a fact."""
        return cls(FACT, encode_fact(fact, **fields), fact={"fact": fact, **fields})


def encode_fact(fact: str, **fields: Any) -> bytes:
    """Return the payload of a fact record."""
    return json.dumps({"fact": fact, **fields}, separators=(",", ":"), allow_nan=False).encode()


def parse_fact(payload: bytes) -> dict[str, Any]:
    """Parse the payload of a fact record.

    Raises:
        ValueError: The payload is not a fact.
    """
    try:
        document = json.loads(payload.decode())
    except RecursionError as error:
        raise ValueError("the document is nested too deeply") from error
    if not isinstance(document, dict) or not isinstance(document.get("fact"), str):
        raise ValueError("the record is not a metadata record")  # noqa: TRY004  the data is wrong, not the caller
    return document


class LostTime:
    """Estimates when the frames were received that a log has lost, from the batches before and after them."""

    def __init__(self, since_us: int = 0) -> None:
        """Start.

        Args:
            since_us: When the last batch before the log was received; 0 if that is unknown.
        """
        self.records = 0
        """Number of lost records."""
        self._received_us = since_us
        self._start_us: int | None = None
        self._end_us: int | None = None

    def lose(self, records: int) -> None:
        """Count records that were lost after the last batch."""
        self.records += records
        if records:
            if self._start_us is None:
                self._start_us = max(0, self._received_us - _MAX_BATCH_DELAY_US)
            self._end_us = None

    def receive(self, received_us: int) -> None:
        """Note when the next batch was received."""
        self._received_us = received_us
        if self._start_us is not None and self._end_us is None:
            self._end_us = received_us

    def span(self, now_us: int) -> tuple[int, int] | None:
        """Return the start and the end of the lost time in microseconds; None if nothing was lost.

        Args:
            now_us: The end if no batch follows.
        """
        if self._start_us is None:
            return None
        return self._start_us, max(self._start_us, now_us if self._end_us is None else self._end_us)


def clip_time_us(time_us: int) -> int:
    """Clip a time to the supported range, whatever a node's clock says."""
    return min(max(time_us, 0), MAX_TIME_US)
