"""Apply the facts in the log to the tables: nodes, runs, layouts, GPUs, sessions, events and settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpulse.model.packed_columns import ColumnLayout
from gpulse.model.session import Session
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


def is_newer(session: Session, known: Session) -> bool:
    """Whether a version of a session replaces the known one; the result does not depend on the order of arrival.

    A stopped session stays stopped. Otherwise the version with the latest change wins, by the heads' clocks.
    """
    return _version_key(session) > _version_key(known)


def _version_key(session: Session) -> tuple[bool, float, bool]:
    moments = [session.created, session.end or 0.0]
    for gap in session.interruptions:
        moments += [gap.start, gap.end or 0.0]
    return session.state == "finished", max(moments), session.output is not None


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
    """Apply one fact. Unknown facts of a newer version and unreadable facts become events."""
    try:
        _FACTS.get(fact.get("fact", ""), _apply_unknown)(database, fact)
    except FORMAT_ERRORS as error:
        with suppress(*FORMAT_ERRORS):  # without a time, it cannot become an event
            detail = {"fact": str(fact.get("fact"))[:100], "reason": str(error)[:200]}
            add_event(database, check_number(fact["time"]), None, "unreadable_fact", detail, from_frame=False)


def _apply_node(database: Database, fact: Fact) -> None:
    row = (
        check_integer(fact["id"]),
        check_text(fact["name"]),
        check_text(fact["host"]),
        check_text(fact["machine"]),
        check_number(fact["time"]),
        dump_json(dict(fact.get("facts") or {})),
        dump_json(dict(fact.get("labels") or {})),
    )
    database.execute(_NODE, row)


def _apply_run(database: Database, fact: Fact) -> None:
    version, pid, boot = fact.get("version"), fact.get("pid"), fact.get("boot")
    row = (
        bytes.fromhex(fact["run"]),
        check_integer(fact["node"]),
        check_number(fact["time"]),
        None if version is None else check_text(version),
        None if pid is None else check_integer(pid),
        None if boot is None else check_text(str(boot)),
    )
    database.execute(_RUN, row)


def _apply_layout(database: Database, fact: Fact) -> None:
    row = _layout_key(fact["id"]), check_text(fact["text"])
    database.execute("INSERT INTO layouts VALUES (?, ?) ON CONFLICT DO NOTHING", row)


def _layout_key(value: Any) -> str:
    """Return a layout ID as a string: IDs exceed SQLite's integers."""
    return str(int(check_text(value)))


def _apply_forget(database: Database, fact: Fact) -> None:
    """Delete layouts that are no longer referenced."""
    database.execute("DELETE FROM layouts WHERE id = ANY(?)", [[_layout_key(one) for one in fact["layouts"]]])


def _apply_devices(database: Database, fact: Fact) -> None:
    """Store the GPUs of a node: those of a layout, or those listed in the fact."""
    node, time = check_integer(fact["node"]), check_number(fact["time"])
    devices = fact["devices"] if "devices" in fact else _layout_devices(database, fact["layout"])
    statement = _NEWER_GPU if database.is_shared else _GPU
    for device in devices:
        mig_index = device.get("mig_index")
        row = (
            node,
            check_text(device["uuid"]),
            check_integer(device["index"]),
            None if mig_index is None else check_integer(mig_index),
            check_text(device["name"]),
            dump_json(device),
            time,
            time,
        )
        database.execute(statement, row)


def _layout_devices(database: Database, layout: Any) -> Sequence[Mapping[str, Any]]:
    key = _layout_key(layout)
    found = database.execute("SELECT text FROM layouts WHERE id = ?", (key,)).fetchone()
    if found is None:
        raise ValueError(f"unknown layout {key}")
    return layout_gpus(ColumnLayout.from_json(found[0]))


def layout_gpus(layout: ColumnLayout) -> Sequence[Mapping[str, Any]]:
    """Return the GPUs of a layout; empty if its scope is not `gpu`."""
    return layout.subjects if layout.scope == "gpu" else ()


def _apply_session(database: Database, fact: Fact) -> None:
    """Store a version of a session; in a shared database, only if it is the newest."""
    document = omit_fields(fact, "fact")
    session = Session.from_dict(document)
    if database.is_shared and not _is_newest(database, session):
        return
    row = (
        check_text(session.id),
        check_text(session.name),
        check_number(session.start),
        None if session.end is None else check_number(session.end),
        check_text(session.state),
        dump_json(document),
    )
    database.execute(_SESSION, row)


def _is_newest(database: Database, session: Session) -> bool:
    found = database.execute("SELECT document FROM sessions WHERE id = ?", (session.id,)).fetchone()
    return found is None or is_newer(session, Session.from_dict(json.loads(found[0])))


def _apply_event(database: Database, fact: Fact) -> None:
    time, node, kind = check_number(fact["time"]), fact.get("node"), check_text(fact["kind"])
    detail = dict(fact.get("detail") or {})
    add_event(database, time, None if node is None else check_integer(node), kind, detail, from_frame=False)


def _apply_settings(database: Database, fact: Fact) -> None:
    row = "settings", dump_json(omit_fields(fact, "fact"))
    database.execute(
        "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", row
    )


def _apply_unknown(database: Database, fact: Fact) -> None:
    """Store an unknown fact of a newer version as an event, if it has a time."""
    if "time" not in fact:
        return
    kind, node = check_text(fact.get("fact")), fact.get("node")
    known = node if isinstance(node, int) and not isinstance(node, bool) else None
    detail = omit_fields(fact, "fact", "time", "node")
    whole_node = None if known is None else check_integer(known)
    add_event(database, check_number(fact["time"]), whole_node, kind, detail, from_frame=False)


_FACTS: dict[str, Callable[[Database, Fact], None]] = {
    "node": _apply_node,
    "run": _apply_run,
    "layout": _apply_layout,
    "forget": _apply_forget,
    "devices": _apply_devices,
    "session": _apply_session,
    "event": _apply_event,
    "settings": _apply_settings,
}
