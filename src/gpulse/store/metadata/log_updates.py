"""Convert records of the log to updates of the metadata: facts, last sequence numbers, and frames with events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.packed_columns import split_packed_frames
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, FrameEvents, LogEntry, parse_fact
from gpulse.store.log.segment import LogRecord
from gpulse.store.metadata.log_facts import Fact

_MAX_UPDATE_BYTES = 64 << 20
"""An update ends after this many bytes of the log, however few records that is."""


class UnreadableRecord(NamedTuple):
    """A record of the log whose payload is not valid for its kind."""

    position: int
    reason: str


class MetadataUpdate(NamedTuple):
    """The changes to the metadata from a range of the log."""

    position: int
    """The position of the last record of the range."""
    facts: Sequence[Fact] = ()
    """In the order of the log."""
    watermarks: Mapping[bytes, int] = {}
    """The last sequence number of each run."""
    events: Sequence[FrameEvents] = ()
    """The frames with events, in the order of the log."""
    unreadable: Sequence[UnreadableRecord] = ()
    """Skipped records."""


class UpdateBuilder:
    """Builds an update from records. It does not keep the samples of frames."""

    def __init__(self) -> None:
        self.records = 0
        self.payload_bytes = 0
        self._position = 0
        self._facts: list[Fact] = []
        self._watermarks: dict[bytes, int] = {}
        self._events: list[FrameEvents] = []
        self._unreadable: list[UnreadableRecord] = []

    def add(self, record: LogRecord) -> None:
        """Add the next record; unknown kinds of newer versions are ignored."""
        self.records += 1
        self.payload_bytes += len(record.payload)
        self._position = record.position
        try:
            if record.kind == FACT:
                self._facts.append(parse_fact(record.payload))
            elif record.kind == BATCH:
                self._add_batch(FrameBatch.from_bytes(record.payload))
        except ValueError as error:
            self._unreadable.append(UnreadableRecord(record.position, str(error)))

    def build(self) -> MetadataUpdate:
        """Return the update for all added records."""
        return MetadataUpdate(self._position, self._facts, self._watermarks, self._events, self._unreadable)

    def _add_batch(self, batch: FrameBatch) -> None:
        self._watermarks[batch.run] = max(batch.last, self._watermarks.get(batch.run, 0))
        self._events.extend(find_frame_events(batch))


def find_frame_events(batch: FrameBatch) -> Iterator[FrameEvents]:
    """Yield the frames of a batch that have events."""
    sequence = batch.first
    try:
        for frame in split_packed_frames(batch.frames):
            if frame.events:
                time = (frame.time_us + batch.shift_us) / 1e6
                yield FrameEvents(batch.node, batch.run, sequence, time, frame.events)
            sequence += 1
    except ValueError:  # the rest is unreadable; invalid JSON becomes an event of kind `unreadable_event`
        yield FrameEvents(batch.node, batch.run, sequence, batch.received_us / 1e6, b"?")


def parse_entry(record: LogRecord) -> LogEntry:
    """Return the log entry of a record; an unreadable payload is not parsed."""
    try:
        if record.kind == BATCH:
            batch = FrameBatch.from_bytes(record.payload)
            return LogEntry(BATCH, record.payload, batch, events=tuple(find_frame_events(batch)))
        if record.kind == FACT:
            return LogEntry(FACT, record.payload, fact=parse_fact(record.payload))
    except ValueError:
        pass
    return LogEntry(record.kind, record.payload)


def build_update(position: int, entries: Iterable[LogEntry]) -> MetadataUpdate:
    """Build the update for entries that end at a position."""
    watermarks: dict[bytes, int] = {}
    facts: list[Fact] = []
    events: list[FrameEvents] = []
    for entry in entries:
        if entry.batch is not None:
            watermarks[entry.batch.run] = entry.batch.last
            events += entry.events
        elif entry.fact is not None:
            facts.append(entry.fact)
    return MetadataUpdate(position, facts, watermarks, events)


def split_updates(records: Iterable[LogRecord], at_once: int) -> Iterator[tuple[MetadataUpdate, int]]:
    """Split records into updates; yield each with its number of records."""
    builder = UpdateBuilder()
    for record in records:
        builder.add(record)
        if builder.records >= at_once or builder.payload_bytes >= _MAX_UPDATE_BYTES:
            yield builder.build(), builder.records
            builder = UpdateBuilder()
    if builder.records:
        yield builder.build(), builder.records
