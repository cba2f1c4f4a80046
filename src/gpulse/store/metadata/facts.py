"""How each fact of the log changes the book."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from gpulse.model.columns import Layout
from gpulse.model.session import Session
from gpulse.store.metadata.events import add_event
from gpulse.store.metadata.values import UNREADABLE, number, spelled, text, whole, without
from gpulse.store.store import HEARSAY

Fact = Mapping[str, Any]

_NODE = """
INSERT INTO nodes (id, name, host, machine, first_seen, facts, labels, via) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    name = excluded.name, host = excluded.host, machine = excluded.machine, via = excluded.via,
    first_seen = min(first_seen, excluded.first_seen), facts = excluded.facts, labels = excluded.labels
"""
_RUN = """
INSERT INTO runs (run, node, time, version, pid, boot) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (run) DO UPDATE SET
    node = excluded.node, time = excluded.time, version = excluded.version, pid = excluded.pid, boot = excluded.boot
"""
_GPU = """
INSERT INTO gpus (node, uuid, "index", mig_index, name, device, first_seen, last_seen, via)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node, uuid) DO
"""
_ADDED = f"{_GPU} NOTHING"
_CHANGED = f"""{_GPU} UPDATE SET
    "index" = excluded."index", mig_index = excluded.mig_index, name = excluded.name, device = excluded.device,
    first_seen = min(first_seen, excluded.first_seen), last_seen = excluded.last_seen, via = excluded.via
"""
_CHANGED_SINCE = f"""{_CHANGED}
WHERE gpus.via = '{HEARSAY}' OR excluded.last_seen > gpus.last_seen
"""


def apply_fact(database: sqlite3.Connection, fact: Fact) -> None:
    """Take one fact in. One of a newer version becomes an event, and so does one that cannot be read."""
    try:
        _FACTS.get(fact.get("fact", ""), _other)(database, fact)
    except UNREADABLE as error:
        with suppress(*UNREADABLE):  # without a time it is no event, either
            detail = spelled({"fact": str(fact.get("fact"))[:100], "reason": str(error)[:200]})
            add_event(database, number(fact["time"]), None, "unreadable_fact", detail, from_frame=False)


def _node(database: sqlite3.Connection, fact: Fact) -> None:
    row = (
        whole(fact["id"]),
        text(fact["name"]),
        text(fact["host"]),
        text(fact["machine"]),
        number(fact["time"]),
        spelled(dict(fact.get("facts") or {})),
        spelled(dict(fact.get("labels") or {})),
        _via(fact),
    )
    database.execute(_NODE, row)


def _via(fact: Fact) -> str | None:
    return None if fact.get("via") is None else text(fact["via"])


def _run(database: sqlite3.Connection, fact: Fact) -> None:
    version, pid, boot = fact.get("version"), fact.get("pid"), fact.get("boot")
    row = (
        bytes.fromhex(fact["run"]),
        whole(fact["node"]),
        number(fact["time"]),
        None if version is None else text(version),
        None if pid is None else whole(pid),
        None if boot is None else text(str(boot)),
    )
    database.execute(_RUN, row)


def _layout(database: sqlite3.Connection, fact: Fact) -> None:
    row = _layout_key(fact["id"]), text(fact["text"])
    database.execute("INSERT OR IGNORE INTO layouts VALUES (?, ?)", row)


def _layout_key(value: Any) -> str:
    """Its number as digits: SQLite's integers end at half of what a layout's number may be."""
    return str(int(text(value)))


def _forget(database: sqlite3.Connection, fact: Fact) -> None:
    """Layouts that nothing refers to any more."""
    keys = [(_layout_key(value),) for value in fact["layouts"]]
    database.executemany("DELETE FROM layouts WHERE id = ?", keys)


def _devices(database: sqlite3.Connection, fact: Fact) -> None:
    """The GPUs of a layout are those of a node. What an engine tells of them adds those that are not known."""
    node, time = whole(fact["node"]), number(fact["time"])
    found = database.execute(
        "SELECT text FROM layouts WHERE id = ?", (_layout_key(fact["layout"]),)
    ).fetchone()
    if found is None:
        raise ValueError(f"there is no layout {fact['layout']}")
    layout = Layout.from_json(found[0])
    if layout.scope == "gpu":
        via = _via(fact)
        rows = [_gpu(node, device, time, via) for device in layout.subjects]
        database.executemany(_CHANGED if via is None else _ADDED, rows)


def hear_gpu(
    database: sqlite3.Connection, node: int, device: dict[str, Any], time: float, via: str, *, is_here: bool
) -> None:
    """Take a GPU in of which its node told another head at a time; what the node said since then counts more.

    Args:
        database: The book's.
        node: Whose it is.
        device: What was told.
        time: When.
        via: The other head.
        is_here: Whether the node speaks to this head by now, which knows better what it knows.

    Raises:
        ValueError: It is none.
    """
    database.execute(_ADDED if is_here else _CHANGED_SINCE, _gpu(node, device, time, via))


def _gpu(node: int, device: dict[str, Any], time: float, via: str | None) -> tuple[Any, ...]:
    mig_index = device.get("mig_index")
    return (
        node,
        text(device["uuid"]),
        whole(device["index"]),
        None if mig_index is None else whole(mig_index),
        text(device["name"]),
        spelled(device),
        time,
        time,
        via,
    )


def _session(database: sqlite3.Connection, fact: Fact) -> None:
    put_session(database, without(fact, "fact"))


def put_session(database: sqlite3.Connection, document: dict[str, Any]) -> None:
    """Take a session in as it is by now.

    Raises:
        ValueError: It is none.
    """
    session = Session.from_dict(document)
    row = (
        text(session.id),
        text(session.name),
        number(session.start),
        None if session.end is None else number(session.end),
        text(session.state),
        spelled(document),
    )
    database.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?)", row)


def _event(database: sqlite3.Connection, fact: Fact) -> None:
    time, node, kind = number(fact["time"]), fact.get("node"), text(fact["kind"])
    detail = spelled(dict(fact.get("detail") or {}))
    add_event(database, time, None if node is None else whole(node), kind, detail, from_frame=False)


def _settings(database: sqlite3.Connection, fact: Fact) -> None:
    row = "settings", spelled(without(fact, "fact"))
    database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", row)


def _other(database: sqlite3.Connection, fact: Fact) -> None:
    """What only a newer version knows: when it says at what time, it is kept as an event."""
    if "time" not in fact:
        return
    kind, node = text(fact.get("fact")), fact.get("node")
    known = node if isinstance(node, int) and not isinstance(node, bool) else None
    detail = spelled(without(fact, "fact", "time", "node"))
    whole_node = None if known is None else whole(known)
    add_event(database, number(fact["time"]), whole_node, kind, detail, from_frame=False)


_FACTS: dict[str, Callable[[sqlite3.Connection, Fact], None]] = {
    "node": _node,
    "run": _run,
    "layout": _layout,
    "forget": _forget,
    "devices": _devices,
    "session": _session,
    "event": _event,
    "settings": _settings,
}
