"""Apply the events inside frames to the tables: starts and ends of processes, health, findings, and others.

An agent may send the unsent frames of an earlier run after its own first frames. Frames of a run that another run has
followed therefore never change what the later run reported. If several heads share a database, the frames of a run may arrive
in any order and more than once: each is applied once, and the latest frame wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gpulse.store.event_decoder import decode_events
from gpulse.store.log.record_payloads import FrameEvents
from gpulse.store.metadata.event_tables import add_event
from gpulse.store.metadata.sql_dialects import Database
from gpulse.store.metadata.value_checks import (
    FORMAT_ERRORS,
    check_integer,
    check_number,
    check_text,
    dump_json,
    omit_fields,
)

STATE_EVENTS = frozenset({"health", "findings"})
"""Events that contain the whole state of a node, so that the last one is the current state."""

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
    """Apply the events of one frame. Unreadable events are counted in one event of kind `unreadable_event`."""
    if not _is_new(database, frame):
        return
    decoded = decode_events(frame.events, kinds=None)
    unreadable = len(decoded.problems)
    for event in decoded.events:
        try:
            _HANDLERS.get(event["event"], _apply_other)(database, frame, event)
        except FORMAT_ERRORS:
            unreadable += 1
    if unreadable:
        detail = {"run": frame.run.hex(), "sequence": frame.sequence, "events": unreadable}
        add_event(database, frame.time, frame.node, "unreadable_event", detail, from_frame=True)


def _apply_process(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _process_key(event)
    identity, job = dump_json(omit_fields(event, "event")), _find_job(event)
    followed = _find_next_run_start(database, frame)
    found = _find_process(database, frame, pid, start)
    if found is None:
        early = _find_early_end(database, frame, pid, start)
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


def _apply_process_end(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    pid, start = _process_key(event)
    found = _find_process(database, frame, pid, start)
    if found is None:
        if database.is_shared:  # another head may have received its start
            row = frame.node, pid, _start_key(start), frame.run, frame.sequence, frame.time
            database.execute(_PUT_EARLY_END, row)
    elif found[1] == frame.run and not _is_late(found, frame):
        database.execute(
            "UPDATE processes SET ended = greatest(?, first_seen), sequence = ? WHERE id = ?",
            (frame.time, frame.sequence, found[0]),
        )
    elif found[1] != frame.run and _find_next_run_start(database, frame) is None:
        database.execute(
            "UPDATE processes SET ended = greatest(?, first_seen) WHERE id = ?", (frame.time, found[0])
        )


def _apply_agent_started(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    """End the processes of earlier runs, and delete the node state that they reported."""
    _apply_other(database, frame, event)
    database.execute(_START, (frame.node, frame.run, frame.time))
    if _find_next_run_start(database, frame) is None:
        database.execute(_END_EARLIER, (frame.time, frame.node, frame.run))
        before = frame.time if _is_overtaken(database, frame) else math.inf
        database.execute("DELETE FROM latest WHERE node = ? AND time < ?", (frame.node, before))


def _apply_other(database: Database, frame: FrameEvents, event: dict[str, Any]) -> None:
    kind, detail = check_text(event["event"]), omit_fields(event, "event")
    add_event(database, frame.time, frame.node, kind, detail, from_frame=True)
    if kind in STATE_EVENTS and _find_next_run_start(database, frame) is None:
        row = kind, frame.node, frame.time, dump_json(detail)
        query = f"{_LATEST} WHERE latest.time < excluded.time" if _is_overtaken(database, frame) else _LATEST
        database.execute(query, row)


def _process_key(event: dict[str, Any]) -> tuple[int, float | None]:
    start = event.get("start_time")
    return check_integer(event["pid"]), None if start is None else check_number(start)


def _start_key(start: float | None) -> float:
    """Return a start time for the key of a process; -1 if it is unknown."""
    return -1.0 if start is None else start


def _find_process(
    database: Database, frame: FrameEvents, pid: int, start: float | None
) -> tuple[int, bytes, int] | None:
    """Return the row, run and sequence number of a process of the frame's node."""
    found: tuple[int, bytes, int] | None
    found = database.execute(_FIND, (frame.node, pid, _start_key(start))).fetchone()
    return found


def _find_early_end(
    database: Database, frame: FrameEvents, pid: int, start: float | None
) -> tuple[float, int] | None:
    """Return when a process ended, if another head wrote its end before this head wrote its start."""
    if not database.is_shared:
        return None
    key = frame.node, pid, _start_key(start), frame.run, frame.sequence
    found: tuple[float, int] | None = database.execute(_EARLY_END, key).fetchone()
    return found


def _find_job(event: Mapping[str, Any]) -> str | None:
    """Return the job of a process; None if it has no valid one."""
    owner = event.get("owner")
    job = owner.get("job") if isinstance(owner, dict) else None
    return check_text(job) if isinstance(job, str) else None


def _is_new(database: Database, frame: FrameEvents) -> bool:
    """Whether no head has applied this frame before; records the frame."""
    if not database.is_shared:
        return True
    row = frame.run, frame.sequence, frame.time
    return (
        database.execute("INSERT INTO seen_frames VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount > 0
    )


def _is_overtaken(database: Database, frame: FrameEvents) -> bool:
    """Whether a later frame of the same run was applied before."""
    if not database.is_shared:
        return False
    statement = "SELECT 1 FROM seen_frames WHERE run = ? AND sequence > ? LIMIT 1"
    return database.execute(statement, (frame.run, frame.sequence)).fetchone() is not None


def _is_late(found: tuple[int, bytes, int], frame: FrameEvents) -> bool:
    """Whether a later frame of the same run already updated a process."""
    return found[1] == frame.run and frame.sequence < found[2]


def _find_next_run_start(database: Database, frame: FrameEvents) -> float | None:
    """Return when the next run of the node's agent started; None if there is none yet."""
    query = "SELECT min(time) FROM starts WHERE node = ? AND run <> ? AND time > ?"
    found: float | None = database.execute(query, (frame.node, frame.run, frame.time)).fetchone()[0]
    return found


_HANDLERS: dict[str, Callable[[Database, FrameEvents, dict[str, Any]], None]] = {
    "process": _apply_process,
    "process_end": _apply_process_end,
    "agent_started": _apply_agent_started,
}
