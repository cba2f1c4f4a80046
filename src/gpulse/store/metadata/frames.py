"""Apply the events inside frames to the tables: processes that come and go, health, findings, everything else.

An agent sends what an earlier run of it left behind whenever it can, perhaps after its own first frames. What belongs
to a run that another one has followed since therefore never changes what the later run said. Where several heads share a
database, frames of one run may come in any order, and more than once: each counts once, and what a later frame said stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gpulse.store.agent_events import decode_events
from gpulse.store.log.records import FrameEvents
from gpulse.store.metadata.database import Database
from gpulse.store.metadata.events import add_event
from gpulse.store.metadata.values import UNREADABLE, number, spelled, text, whole, without

KEPT_LATEST = frozenset({"health", "findings"})
"""Events that hold the whole state of a node, so that the last one is what holds now."""

_FIND = "SELECT id, run, sequence FROM processes WHERE node = ? AND pid = ? AND coalesce(start_time, -1) = ?"
_INSERT = """
INSERT INTO processes (node, pid, start_time, run, first_seen, ended, sequence, job, identity)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_EARLY_END = """
DELETE FROM early_ends WHERE node = ? AND pid = ? AND start_time = ? AND run = ? AND sequence > ?
RETURNING time, sequence
"""
_PUT_EARLY_END = """
INSERT INTO early_ends VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (node, pid, start_time) DO UPDATE SET
    run = excluded.run, sequence = excluded.sequence, time = excluded.time
"""
_START = """
INSERT INTO starts VALUES (?, ?, ?) ON CONFLICT (node, run) DO UPDATE SET time = least(starts.time, excluded.time)
"""
_LATEST = """
INSERT INTO latest VALUES (?, ?, ?, ?)
ON CONFLICT (kind, node) DO UPDATE SET time = excluded.time, detail = excluded.detail
"""
_END_EARLIER = """
UPDATE processes SET ended = greatest(?, first_seen) WHERE node = ? AND ended IS NULL AND run <> ?
"""


def apply_frame(database: Database, frame: FrameEvents) -> None:
    """Apply the events of one frame. What cannot be read of them becomes one event that says so."""
    if not _is_new(database, frame):
        return
    decoded = decode_events(frame.events, kinds=None)
    unreadable = len(decoded.problems)
    for event in decoded.events:
        try:
            _HANDLERS.get(event["event"], _other)(database, frame, event)
        except UNREADABLE:
            unreadable += 1
    if unreadable:
        detail = {"run": frame.run.hex(), "sequence": frame.sequence, "events": unreadable}
        add_event(database, frame.time, frame.node, "unreadable_event", detail, from_frame=True)


def _process(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _key(event)
    identity, job = spelled(without(event, "event")), _job(event)
    followed = _followed(database, frame)
    found = _find(database, frame, pid, start)
    if found is None:
        early = _early_end(database, frame, pid, start)
        ended, sequence = early or (followed, frame.sequence)
        row = frame.node, pid, start, frame.run, frame.time, ended, sequence, job, identity
        database.execute(_INSERT, row)
    elif (followed is None or found[1] == frame.run) and not _is_late(found, frame):
        database.execute(
            "UPDATE processes SET run = ?, job = ?, identity = ?, ended = ?, sequence = ? WHERE id = ?",
            (frame.run, job, identity, followed, frame.sequence, found[0]),
        )
    else:
        database.execute(
            "UPDATE processes SET first_seen = least(first_seen, ?) WHERE id = ?", (frame.time, found[0])
        )


def _process_end(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _key(event)
    found = _find(database, frame, pid, start)
    if found is None:
        if database.is_shared:  # another head may have seen it begin
            row = frame.node, pid, _known(start), frame.run, frame.sequence, frame.time
            database.execute(_PUT_EARLY_END, row)
    elif found[1] == frame.run and not _is_late(found, frame):
        database.execute(
            "UPDATE processes SET ended = greatest(?, first_seen), sequence = ? WHERE id = ?",
            (frame.time, frame.sequence, found[0]),
        )
    elif found[1] != frame.run and _followed(database, frame) is None:
        database.execute(
            "UPDATE processes SET ended = greatest(?, first_seen) WHERE id = ?", (frame.time, found[0])
        )


def _agent_started(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    """What earlier runs left open has ended, and what they said of the node's state is old, for all that is known."""
    _other(database, frame, event)
    database.execute(_START, (frame.node, frame.run, frame.time))
    if _followed(database, frame) is None:
        database.execute(_END_EARLIER, (frame.time, frame.node, frame.run))
        before = frame.time if _is_overtaken(database, frame) else math.inf
        database.execute("DELETE FROM latest WHERE node = ? AND time < ?", (frame.node, before))


def _other(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    kind, detail = text(event["event"]), without(event, "event")
    add_event(database, frame.time, frame.node, kind, detail, from_frame=True)
    if kind in KEPT_LATEST and _followed(database, frame) is None:
        row = kind, frame.node, frame.time, spelled(detail)
        query = f"{_LATEST} WHERE latest.time < excluded.time" if _is_overtaken(database, frame) else _LATEST
        database.execute(query, row)


def _key(event: dict[str, Any]) -> tuple[int, float | None]:
    start = event.get("start_time")
    return whole(event["pid"]), None if start is None else number(start)


def _known(start: float | None) -> float:
    """Return a start time as the key of a process has it."""
    return -1.0 if start is None else start


def _find(
    database: Database, frame: FrameEvents, pid: int, start: float | None
) -> tuple[int, bytes, int] | None:
    """Return the row, run and sequence number of a process of the frame's node."""
    found: tuple[int, bytes, int] | None
    found = database.execute(_FIND, (frame.node, pid, _known(start))).fetchone()
    return found


def _early_end(
    database: Database, frame: FrameEvents, pid: int, start: float | None
) -> tuple[float, int] | None:
    """Return when a process ended of whose end another head heard before this one heard of its start."""
    if not database.is_shared:
        return None
    key = frame.node, pid, _known(start), frame.run, frame.sequence
    found: tuple[float, int] | None = database.execute(_EARLY_END, key).fetchone()
    return found


def _job(event: Mapping[str, Any]) -> str | None:
    """Return the job that a process belongs to, as far as that is a text."""
    owner = event.get("owner")
    job = owner.get("job") if isinstance(owner, dict) else None
    return text(job) if isinstance(job, str) else None


def _is_new(database: Database, frame: FrameEvents) -> bool:
    """Whether no head has sent this frame before."""
    if not database.is_shared:
        return True
    row = frame.run, frame.sequence, frame.time
    return (
        database.execute("INSERT INTO seen_frames VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount > 0
    )


def _is_overtaken(database: Database, frame: FrameEvents) -> bool:
    """Whether a later frame of its run came before it."""
    if not database.is_shared:
        return False
    statement = "SELECT 1 FROM seen_frames WHERE run = ? AND sequence > ? LIMIT 1"
    return database.execute(statement, (frame.run, frame.sequence)).fetchone() is not None


def _is_late(found: tuple[int, bytes, int], frame: FrameEvents) -> bool:
    """Whether a later frame of its run changed what is known of a process."""
    return found[1] == frame.run and frame.sequence < found[2]


def _followed(database: Database, frame: FrameEvents) -> float | None:
    """When the next run of that node's agent began, if it has begun already."""
    query = "SELECT min(time) FROM starts WHERE node = ? AND run <> ? AND time > ?"
    found: float | None = database.execute(query, (frame.node, frame.run, frame.time)).fetchone()[0]
    return found


_HANDLERS: dict[str, Callable[[Database, FrameEvents, dict[str, Any]], None]] = {
    "process": _process,
    "process_end": _process_end,
    "agent_started": _agent_started,
}
