"""How the events inside frames change the book: processes that come and go, health, findings, everything else.

An agent sends what an earlier run of it left behind whenever it can, perhaps after its own first frames. What belongs
to a run that another one has followed since therefore never changes what the later run said.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from typing import Any

from gpulse.store.agent_events import decode_events
from gpulse.store.log.records import FrameEvents
from gpulse.store.metadata.events import add_event
from gpulse.store.metadata.values import UNREADABLE, number, spelled, text, whole, without

KEPT_LATEST = frozenset({"health", "findings"})
"""Events that hold the whole state of a node, so that the last one is what holds now."""

_FIND = "SELECT id, run, sequence FROM processes WHERE node = ? AND pid = ? AND ifnull(start_time, -1) = ifnull(?, -1)"
_INSERT = """
INSERT INTO processes (node, pid, start_time, run, first_seen, ended, identity, sequence) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_EARLY_END = """
DELETE FROM early_ends WHERE node = ? AND pid = ? AND start_time = ifnull(?, -1) AND run = ? AND sequence > ?
RETURNING time, sequence
"""
_START = """
INSERT INTO starts VALUES (?, ?, ?) ON CONFLICT (node, run) DO UPDATE SET time = min(time, excluded.time)
"""
_LATEST = """
INSERT INTO latest VALUES (?, ?, ?, ?)
ON CONFLICT (kind, node) DO UPDATE SET time = excluded.time, detail = excluded.detail
"""
_END_EARLIER = """
UPDATE processes SET ended = max(?, first_seen) WHERE node = ? AND ended IS NULL AND run <> ?
"""


def apply_frame(database: sqlite3.Connection, frame: FrameEvents) -> None:
    """Take the events of one frame in. What cannot be read of them is one event that says so."""
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
        detail = spelled({"run": frame.run.hex(), "sequence": frame.sequence, "events": unreadable})
        add_event(database, frame.time, frame.node, "unreadable_event", detail, from_frame=True)


def _process(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _key(event)
    identity = spelled(without(event, "event"))
    followed = _followed(database, frame)
    found = database.execute(_FIND, (frame.node, pid, start)).fetchone()
    if found is None:
        early = database.execute(_EARLY_END, (frame.node, pid, start, frame.run, frame.sequence)).fetchone()
        ended, sequence = early or (followed, frame.sequence)
        row = frame.node, pid, start, frame.run, frame.time, ended, identity, sequence
        database.execute(_INSERT, row)
    elif (followed is None or found[1] == frame.run) and not _is_late(found, frame):
        database.execute(
            "UPDATE processes SET run = ?, identity = ?, ended = ?, sequence = ? WHERE id = ?",
            (frame.run, identity, followed, frame.sequence, found[0]),
        )
    else:
        database.execute(
            "UPDATE processes SET first_seen = min(first_seen, ?) WHERE id = ?", (frame.time, found[0])
        )


def _process_end(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _key(event)
    found = database.execute(_FIND, (frame.node, pid, start)).fetchone()
    if found is None:
        if _is_shared(database):  # another head may have seen it begin
            row = frame.node, pid, -1.0 if start is None else start, frame.run, frame.sequence, frame.time
            database.execute("INSERT OR REPLACE INTO early_ends VALUES (?, ?, ?, ?, ?, ?)", row)
    elif found[1] == frame.run and not _is_late(found, frame):
        database.execute(
            "UPDATE processes SET ended = max(?, first_seen), sequence = ? WHERE id = ?",
            (frame.time, frame.sequence, found[0]),
        )
    elif found[1] != frame.run and _followed(database, frame) is None:
        database.execute(
            "UPDATE processes SET ended = max(?, first_seen) WHERE id = ?", (frame.time, found[0])
        )


def _agent_started(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    """What earlier runs left open has ended, and what they said of the node's state is old, for all that is known."""
    _other(database, frame, event)
    database.execute(_START, (frame.node, frame.run, frame.time))
    if _followed(database, frame) is None:
        database.execute(_END_EARLIER, (frame.time, frame.node, frame.run))
        before = frame.time if _is_overtaken(database, frame) else math.inf
        database.execute("DELETE FROM latest WHERE node = ? AND time < ?", (frame.node, before))


def _other(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    kind, detail = text(event["event"]), spelled(without(event, "event"))
    add_event(database, frame.time, frame.node, kind, detail, from_frame=True)
    if kind in KEPT_LATEST and _followed(database, frame) is None:
        row = kind, frame.node, frame.time, detail
        query = f"{_LATEST} WHERE time < excluded.time" if _is_overtaken(database, frame) else _LATEST
        database.execute(query, row)


def _key(event: dict[str, Any]) -> tuple[int, float | None]:
    start = event.get("start_time")
    return whole(event["pid"]), None if start is None else number(start)


def _is_shared(database: sqlite3.Connection) -> bool:
    """Whether other heads' frames are taken in, too."""
    return database.execute("SELECT 1 FROM meta WHERE key = 'sharing'").fetchone() is not None


def _is_new(database: sqlite3.Connection, frame: FrameEvents) -> bool:
    """Whether nobody told of this frame before."""
    if not _is_shared(database):
        return True
    row = frame.run, frame.sequence, frame.time
    return database.execute("INSERT OR IGNORE INTO told VALUES (?, ?, ?)", row).rowcount > 0


def _is_overtaken(database: sqlite3.Connection, frame: FrameEvents) -> bool:
    """Whether a later frame of its run was told of before."""
    query = "SELECT 1 FROM told WHERE run = ? AND sequence > ? LIMIT 1"
    return database.execute(query, (frame.run, frame.sequence)).fetchone() is not None


def _is_late(found: tuple[int, bytes, int], frame: FrameEvents) -> bool:
    """Whether a later frame of its run changed what is known of a process."""
    return found[1] == frame.run and frame.sequence < found[2]


def _followed(database: sqlite3.Connection, frame: FrameEvents) -> float | None:
    """When the next run of that node's agent began, if it has begun already."""
    query = "SELECT min(time) FROM starts WHERE node = ? AND run <> ? AND time > ?"
    found: float | None = database.execute(query, (frame.node, frame.run, frame.time)).fetchone()[0]
    return found


_HANDLERS: dict[str, Callable[[sqlite3.Connection, FrameEvents, dict[str, Any]], None]] = {
    "process": _process,
    "process_end": _process_end,
    "agent_started": _agent_started,
}
