"""Apply the facts of the log to the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpulse.model.columns import Layout
from gpulse.model.session import Session
from gpulse.store.metadata.database import Database
from gpulse.store.metadata.events import add_event
from gpulse.store.metadata.sessions import is_newer
from gpulse.store.metadata.values import UNREADABLE, number, spelled, text, whole, without

Fact = Mapping[str, Any]

_NODE = """
INSERT INTO nodes (id, name, host, machine, first_seen, facts, labels) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    name = excluded.name, host = excluded.host, machine = excluded.machine,
    first_seen = least(nodes.first_seen, excluded.first_seen), facts = excluded.facts, labels = excluded.labels
"""
_RUN = """
INSERT INTO runs (run, node, time, version, pid, boot) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (run) DO UPDATE SET
    node = excluded.node, time = excluded.time, version = excluded.version, pid = excluded.pid, boot = excluded.boot
"""
_GPU = """
INSERT INTO gpus (node, uuid, "index", mig_index, name, device, first_seen, last_seen)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (node, uuid) DO UPDATE SET
    "index" = excluded."index", mig_index = excluded.mig_index, name = excluded.name, device = excluded.device,
    first_seen = least(gpus.first_seen, excluded.first_seen), last_seen = excluded.last_seen
"""
_NEWER_GPU = f"{_GPU} WHERE excluded.last_seen >= gpus.last_seen"
_SESSION = """
INSERT INTO sessions (id, name, start, "end", state, document) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    name = excluded.name, start = excluded.start, "end" = excluded."end", state = excluded.state,
    document = excluded.document
"""


def apply_fact(database: Database, fact: Fact) -> None:
    """Apply one fact. One of a newer version becomes an event, and so does one that cannot be read."""
    try:
        _FACTS.get(fact.get("fact", ""), _other)(database, fact)
    except UNREADABLE as error:
        with suppress(*UNREADABLE):  # without a time it is no event, either
            detail = {"fact": str(fact.get("fact"))[:100], "reason": str(error)[:200]}
            add_event(database, number(fact["time"]), None, "unreadable_fact", detail, from_frame=False)


def _node(database: Database, fact: Fact) -> None:
    row = (
        whole(fact["id"]),
        text(fact["name"]),
        text(fact["host"]),
        text(fact["machine"]),
        number(fact["time"]),
        spelled(dict(fact.get("facts") or {})),
        spelled(dict(fact.get("labels") or {})),
    )
    database.execute(_NODE, row)


def _run(database: Database, fact: Fact) -> None:
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


def _layout(database: Database, fact: Fact) -> None:
    row = _layout_key(fact["id"]), text(fact["text"])
    database.execute("INSERT INTO layouts VALUES (?, ?) ON CONFLICT DO NOTHING", row)


def _layout_key(value: Any) -> str:
    """Return a layout's number as digits: SQLite's integers end at half of what it may be."""
    return str(int(text(value)))


def _forget(database: Database, fact: Fact) -> None:
    """Delete the layouts that nothing refers to any more."""
    database.execute("DELETE FROM layouts WHERE id = ANY(?)", [[_layout_key(one) for one in fact["layouts"]]])


def _devices(database: Database, fact: Fact) -> None:
    """Store the GPUs of a node: those of a layout, or those that the fact lists itself."""
    node, time = whole(fact["node"]), number(fact["time"])
    devices = fact["devices"] if "devices" in fact else _layout_devices(database, fact["layout"])
    statement = _NEWER_GPU if database.is_shared else _GPU
    for device in devices:
        mig_index = device.get("mig_index")
        row = (
            node,
            text(device["uuid"]),
            whole(device["index"]),
            None if mig_index is None else whole(mig_index),
            text(device["name"]),
            spelled(device),
            time,
            time,
        )
        database.execute(statement, row)


def _layout_devices(database: Database, layout: Any) -> Sequence[Mapping[str, Any]]:
    key = _layout_key(layout)
    found = database.execute("SELECT text FROM layouts WHERE id = ?", (key,)).fetchone()
    if found is None:
        raise ValueError(f"there is no layout {key}")
    return gpus_of(Layout.from_json(found[0]))


def gpus_of(layout: Layout) -> Sequence[Mapping[str, Any]]:
    """Return the GPUs that a layout is about; none when it is about something else."""
    return layout.subjects if layout.scope == "gpu" else ()


def _session(database: Database, fact: Fact) -> None:
    """Store a version of a session; where several heads change it, the newest."""
    document = without(fact, "fact")
    session = Session.from_dict(document)
    if database.is_shared and not _is_news(database, session):
        return
    row = (
        text(session.id),
        text(session.name),
        number(session.start),
        None if session.end is None else number(session.end),
        text(session.state),
        spelled(document),
    )
    database.execute(_SESSION, row)


def _is_news(database: Database, session: Session) -> bool:
    found = database.execute("SELECT document FROM sessions WHERE id = ?", (session.id,)).fetchone()
    return found is None or is_newer(session, Session.from_dict(json.loads(found[0])))


def _event(database: Database, fact: Fact) -> None:
    time, node, kind = number(fact["time"]), fact.get("node"), text(fact["kind"])
    detail = dict(fact.get("detail") or {})
    add_event(database, time, None if node is None else whole(node), kind, detail, from_frame=False)


def _settings(database: Database, fact: Fact) -> None:
    row = "settings", spelled(without(fact, "fact"))
    database.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", row
    )


def _other(database: Database, fact: Fact) -> None:
    """Keep what only a newer version knows as an event, when it says at what time it was."""
    if "time" not in fact:
        return
    kind, node = text(fact.get("fact")), fact.get("node")
    known = node if isinstance(node, int) and not isinstance(node, bool) else None
    detail = without(fact, "fact", "time", "node")
    whole_node = None if known is None else whole(known)
    add_event(database, number(fact["time"]), whole_node, kind, detail, from_frame=False)


_FACTS: dict[str, Callable[[Database, Fact], None]] = {
    "node": _node,
    "run": _run,
    "layout": _layout,
    "forget": _forget,
    "devices": _devices,
    "session": _session,
    "event": _event,
    "settings": _settings,
}
