"""From records of the log to steps of the metadata: facts, the last sequence numbers, and frames in which something happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.columns import split
from gpulse.store.log.record import Record
from gpulse.store.log.records import BATCH, FACT, Batch, Entry, FrameEvents, read_fact
from gpulse.store.metadata.facts import Fact

_BYTES_AT_ONCE = 64 << 20
"""A step of so much of the log is long enough, however few records that is."""


class Unreadable(NamedTuple):
    """A record of the log that holds neither frames nor a fact, though it should."""

    position: int
    reason: str


class Step(NamedTuple):
    """A stretch of the log, as far as the metadata is concerned."""

    position: int
    """Its last record's."""
    facts: Sequence[Fact] = ()
    """In the order of the log."""
    watermarks: Mapping[bytes, int] = {}
    """By run the last sequence number in it."""
    events: Sequence[FrameEvents] = ()
    """The frames in which something happened, in the order of the log."""
    unreadable: Sequence[Unreadable] = ()
    """Records that are passed over."""


class StepBuilder:
    """Gathers what records mean to the metadata; of the numbers in frames nothing is held."""

    def __init__(self) -> None:
        self.records = 0
        self.payload_bytes = 0
        self._position = 0
        self._facts: list[Fact] = []
        self._watermarks: dict[bytes, int] = {}
        self._events: list[FrameEvents] = []
        self._unreadable: list[Unreadable] = []

    def add(self, record: Record) -> None:
        """Take the next record; one of a kind that only a newer version knows means nothing."""
        self.records += 1
        self.payload_bytes += len(record.payload)
        self._position = record.position
        try:
            if record.kind == FACT:
                self._facts.append(read_fact(record.payload))
            elif record.kind == BATCH:
                self._add_batch(Batch.from_bytes(record.payload))
        except ValueError as error:
            self._unreadable.append(Unreadable(record.position, str(error)))

    def step(self) -> Step:
        """The step from the first record to the last."""
        return Step(self._position, self._facts, self._watermarks, self._events, self._unreadable)

    def _add_batch(self, batch: Batch) -> None:
        self._watermarks[batch.run] = max(batch.last, self._watermarks.get(batch.run, 0))
        self._events.extend(events_of(batch))


def events_of(batch: Batch) -> Iterator[FrameEvents]:
    """The frames of a batch in which something happened."""
    sequence = batch.first
    try:
        for frame in split(batch.frames):
            if frame.events:
                time = (frame.time_us + batch.shift_us) / 1e6
                yield FrameEvents(batch.node, batch.run, sequence, time, frame.events)
            sequence += 1
    except ValueError:  # the rest cannot be read; what is no JSON becomes an event that says so
        yield FrameEvents(batch.node, batch.run, sequence, batch.received_us / 1e6, b"?")


def entry_of(record: Record) -> Entry:
    """Return the entry that was written as this record; one that cannot be read means nothing."""
    try:
        if record.kind == BATCH:
            batch = Batch.from_bytes(record.payload)
            return Entry(BATCH, record.payload, batch, events=tuple(events_of(batch)))
        if record.kind == FACT:
            return Entry(FACT, record.payload, fact=read_fact(record.payload))
    except ValueError:
        pass
    return Entry(record.kind, record.payload)


def step_of(position: int, entries: Iterable[Entry]) -> Step:
    """Return what entries up to a position mean to the metadata."""
    watermarks: dict[bytes, int] = {}
    facts: list[Fact] = []
    events: list[FrameEvents] = []
    for entry in entries:
        if entry.batch is not None:
            watermarks[entry.batch.run] = entry.batch.last
            events += entry.events
        elif entry.fact is not None:
            facts.append(entry.fact)
    return Step(position, facts, watermarks, events)


def steps_of(records: Iterable[Record], at_once: int) -> Iterator[tuple[Step, int]]:
    """Cut records into steps, and say how many are in each."""
    builder = StepBuilder()
    for record in records:
        builder.add(record)
        if builder.records >= at_once or builder.payload_bytes >= _BYTES_AT_ONCE:
            yield builder.step(), builder.records
            builder = StepBuilder()
    if builder.records:
        yield builder.step(), builder.records
