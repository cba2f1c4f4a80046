"""How what other heads wrote down changes the book: each of it once, whoever said it first.

One fact of the log, `shared`, holds a stretch of what one other head wrote, together with where that stretch begins and ends.
A stretch that does not begin where the last one ended is not taken in. Frames that agents sent to several heads are known
by their run and number (`told`), so that what happened in them is written down once.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.model.session import Session
from gpulse.store.book.events import add_event
from gpulse.store.book.facts import Fact, apply_fact, hear_gpu, put_session
from gpulse.store.book.frames import FrameEvents, apply_frame
from gpulse.store.book.sessions import newer
from gpulse.store.book.values import UNREADABLE, number, spelled, text, whole, without

_TOLD_SECONDS = 2 * 86_400.0
"""For so long it is remembered which frames were told; no agent sends them again after that."""
_REACHED = """
INSERT INTO shared VALUES (?, ?, ?, ?) ON CONFLICT (head) DO UPDATE SET
    file = excluded.file, offset = excluded.offset, position = max(position, excluded.position)
"""
_PROCESS = """
INSERT OR IGNORE INTO processes (node, pid, start_time, run, first_seen, ended, identity) VALUES (?, ?, ?, x'', ?, ?, ?)
"""
_SAME = "SELECT 1 FROM events WHERE node IS ? AND time = ? AND kind = ? AND detail = ?"


class Reached(NamedTuple):
    """How far another head's facts are taken in."""

    file: int
    """The number of its file; 0 when nothing is."""
    offset: int
    """Up to which byte of it."""
    position: int = 0
    """Up to which position of the other head's log."""


NOTHING = Reached(0, 0)


def take_fact(database: sqlite3.Connection, fact: Fact) -> None:
    """Take one fact of the log in, of whoever it is."""
    match fact.get("fact"):
        case "shared":
            with suppress(*UNREADABLE):
                _take_stretch(database, fact)
        case "sharing":
            database.execute("INSERT OR IGNORE INTO meta VALUES ('sharing', 1)")
        case _:
            apply_fact(database, fact)


def _take_stretch(database: sqlite3.Connection, fact: Fact) -> None:
    head = text(fact["head"])
    begin, end = Reached(*map(whole, fact["from"])), Reached(*map(whole, fact["to"]))
    found = database.execute("SELECT file, offset, position FROM shared WHERE head = ?", (head,)).fetchone()
    known = Reached(*found) if found else NOTHING
    if known[:2] != begin[:2]:
        return
    now = number(fact["time"])
    newest = {table: _newest(database, table) for table in ("events", "processes")}
    for told in fact["facts"]:
        try:
            _FACTS[told["fact"]](database, {**told, "via": head})
        except UNREADABLE as error:
            detail = spelled({"head": head, "fact": str(told)[:100], "reason": str(error)[:200]})
            add_event(database, now, None, "unreadable_fact", detail, from_frame=False)
    for table, last in newest.items():
        database.execute(f"UPDATE {table} SET via = ? WHERE id > ?", (head, last))
    database.execute(_REACHED, (head, *end))
    for table in ("told", "early_ends"):
        database.execute(f"DELETE FROM {table} WHERE time < ?", (now - _TOLD_SECONDS,))


def _newest(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT ifnull(max(id), 0) FROM {table}").fetchone()[0])


def _devices(database: sqlite3.Connection, fact: Fact) -> None:
    for device in fact["devices"]:
        hear_gpu(
            database,
            whole(fact["node"]),
            device,
            number(fact["time"]),
            fact["via"],
            is_here=bool(fact.get("here")),
        )


def _session(database: sqlite3.Connection, fact: Fact) -> None:
    document = without(fact, "fact", "via")
    told = Session.from_dict(document)
    found = database.execute("SELECT document FROM sessions WHERE id = ?", (told.id,)).fetchone()
    if found is None or newer(Session.from_dict(json.loads(found[0])), told) is told:
        put_session(database, document)


def _event(database: sqlite3.Connection, fact: Fact) -> None:
    """Something that happened; what was before the other head began to tell here may be known."""
    if fact.get("past"):
        row = whole(fact["node"]) if fact.get("node") is not None else None, number(fact["time"])
        known = database.execute(_SAME, (*row, text(fact["kind"]), spelled(fact["detail"])))
        if known.fetchone() is not None:
            return
    apply_fact(database, fact)


def _frame(database: sqlite3.Connection, fact: Fact) -> None:
    events = text(fact["events"]).encode()
    run = bytes.fromhex(fact["run"])
    apply_frame(
        database, FrameEvents(whole(fact["node"]), run, whole(fact["sequence"]), number(fact["time"]), events)
    )


def _process(database: sqlite3.Connection, fact: Fact) -> None:
    """A process of before the other head began to tell; of one that is known more is known already."""
    start, ended = fact.get("start_time"), fact.get("ended")
    row = (
        whole(fact["node"]),
        whole(fact["pid"]),
        None if start is None else number(start),
        number(fact["first_seen"]),
        None if ended is None else number(ended),
        spelled(dict(fact["identity"])),
    )
    database.execute(_PROCESS, row)


_FACTS: Mapping[str, Callable[[sqlite3.Connection, dict[str, Any]], None]] = {
    "devices": _devices,
    "session": _session,
    "event": _event,
    "frame": _frame,
    "process": _process,
}
