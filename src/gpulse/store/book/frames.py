"""How the events inside frames change the book: processes that come and go, health, findings, everything else.

An agent sends what an earlier run of it left behind whenever it can, perhaps after its own first frames. What belongs
to a run that another one has followed since therefore never changes what the later run said.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any, NamedTuple

from gpulse.store.book.values import UNREADABLE, add_event, number, spelled, text, whole, without

KEPT_LATEST = frozenset({"health", "findings"})
"""Events that hold the whole state of a node, so that the last one is what holds now."""

_FIND = "SELECT id, run FROM processes WHERE node = ? AND pid = ? AND ifnull(start_time, -1) = ifnull(?, -1)"
_INSERT = """
INSERT INTO processes (node, pid, start_time, run, first_seen, ended, identity) VALUES (?, ?, ?, ?, ?, ?, ?)
"""
_END_EARLIER = """
UPDATE processes SET ended = max(?, first_seen) WHERE node = ? AND ended IS NULL AND run <> ?
"""


class FrameEvents(NamedTuple):
    """What happened in one frame."""

    node: int
    run: bytes
    sequence: int
    time: float
    """Epoch seconds, on the head's clock."""
    events: bytes
    """A JSON array of objects, as it came."""


def apply_frame(database: sqlite3.Connection, frame: FrameEvents) -> None:
    """Take the events of one frame in. What cannot be read of them is one event that says so."""
    unreadable = 0
    try:
        events = json.loads(frame.events) if frame.events else []
        if not isinstance(events, list):
            raise TypeError("it is not a list")
    except UNREADABLE:
        events, unreadable = [], 1
    for event in events:
        try:
            kind = text(event["event"])
            _HANDLERS.get(kind, _other)(database, frame, event)
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
        row = frame.node, pid, start, frame.run, frame.time, followed, identity
        database.execute(_INSERT, row)
    elif followed is None or found[1] == frame.run:
        database.execute(
            "UPDATE processes SET run = ?, identity = ?, ended = ? WHERE id = ?",
            (frame.run, identity, followed, found[0]),
        )
    else:
        database.execute(
            "UPDATE processes SET first_seen = min(first_seen, ?) WHERE id = ?", (frame.time, found[0])
        )


def _process_end(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    found = database.execute(_FIND, (frame.node, *_key(event))).fetchone()
    if found is not None and (found[1] == frame.run or _followed(database, frame) is None):
        database.execute(
            "UPDATE processes SET ended = max(?, first_seen) WHERE id = ?", (frame.time, found[0])
        )


def _agent_started(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    """What earlier runs left open has ended, and what they said of the node's state is old, for all that is known."""
    _other(database, frame, event)
    database.execute("INSERT OR IGNORE INTO starts VALUES (?, ?, ?)", (frame.node, frame.run, frame.time))
    if _followed(database, frame) is None:
        database.execute(_END_EARLIER, (frame.time, frame.node, frame.run))
        database.execute("DELETE FROM latest WHERE node = ?", (frame.node,))


def _other(database: sqlite3.Connection, frame: FrameEvents, event: dict[str, Any]) -> None:
    kind, detail = text(event["event"]), spelled(without(event, "event"))
    add_event(database, frame.time, frame.node, kind, detail, from_frame=True)
    if kind in KEPT_LATEST and _followed(database, frame) is None:
        row = kind, frame.node, frame.time, detail
        database.execute("INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?)", row)


def _key(event: dict[str, Any]) -> tuple[int, float | None]:
    start = event.get("start_time")
    return whole(event["pid"]), None if start is None else number(start)


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
