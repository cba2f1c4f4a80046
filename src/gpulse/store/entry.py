"""What goes into a head's log, together with what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpulse.store.log.record import Record
from gpulse.store.log.records import BATCH, FACT, Batch, fact_bytes, read_fact
from gpulse.store.metadata.frames import FrameEvents
from gpulse.store.metadata.step import Step, events_of


class Entry(NamedTuple):
    """One record that is to be written, or was."""

    kind: int
    payload: bytes
    batch: Batch | None = None
    """What the payload says, when it is a batch."""
    fact: Mapping[str, Any] | None = None
    """What it says, when it is a fact."""
    events: tuple[FrameEvents, ...] = ()
    """What happened in the batch's frames."""

    @classmethod
    def of_batch(cls, batch: Batch, events: tuple[FrameEvents, ...]) -> Entry:
        """The entry for frames."""
        return cls(BATCH, batch.to_bytes(), batch, events=events)

    @classmethod
    def of_fact(cls, fact: str, **fields: Any) -> Entry:
        """The entry for a fact."""
        return cls(FACT, fact_bytes(fact, **fields), fact={"fact": fact, **fields})

    @classmethod
    def of_record(cls, record: Record) -> Entry:
        """The entry that was written as this record.

        Raises:
            ValueError: It holds neither frames nor a fact.
        """
        if record.kind == BATCH:
            batch = Batch.from_bytes(record.payload)
            return cls(BATCH, record.payload, batch, events=tuple(events_of(batch)))
        if record.kind == FACT:
            return cls(FACT, record.payload, fact=read_fact(record.payload))
        return cls(record.kind, record.payload)


def step_of(position: int, entries: Iterable[Entry]) -> Step:
    """What entries up to a position mean to the book."""
    watermarks: dict[bytes, int] = {}
    facts: list[Mapping[str, Any]] = []
    events: list[FrameEvents] = []
    for entry in entries:
        if entry.batch is not None:
            watermarks[entry.batch.run] = entry.batch.last
            events += entry.events
        elif entry.fact is not None:
            facts.append(entry.fact)
    return Step(position, facts, watermarks, events)
