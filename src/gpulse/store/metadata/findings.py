"""The spans of findings as rows: updated with every event that reports findings, or ends the reports of a node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpulse.model.finding import NODE_FINDINGS, FindingKey, finding_key, from_document
from gpulse.model.finding_span import FindingSpan, new_span
from gpulse.store.metadata.database import Database, Rows
from gpulse.store.metadata.values import read_object
from gpulse.store.store import Query, StoredFinding

_REPORT = "findings"
_SILENCE = frozenset({"agent_stopping", "node_lost"})
"""Events after which it is unknown whether the findings of a node still hold.

An agent that starts is none: it reports within a minute, and until then they count as holding."""
_ENDS = {"node_back": "node_lost", "node_found": "node_missing"}
"""Events that end a finding that the head itself made."""
_COLUMNS = 'id, start, last, "end", is_over'
_INSERT = """
INSERT INTO findings (node, "key", start, last, "end", is_over, by_head, detail)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING id
"""


def of_node(node: int | None) -> tuple[str, tuple[Any, ...]]:
    """Return the condition that a row is of a node, or of none, and its values."""
    return ("node IS NULL", ()) if node is None else ("node = ?", (node,))


def follow(database: Database, time: float, node: int | None, kind: str, detail: Mapping[str, Any]) -> None:
    """Update the spans of findings by one event, whatever kind of event that is."""
    if kind == _REPORT:
        listed = detail.get("findings")
        _report(database, time, node, listed if isinstance(listed, list) else [])
        return
    if kind in _SILENCE and node is not None:
        for row, span in _open(database, node, by_head=False):
            _update(database, row[0], span.silent(time, _last_heard(detail)))
    if kind == "node_back" and node is not None:
        _resume(database, node)
    if kind in _ENDS:
        key = _ENDS[kind], None, str(detail.get("name") or "") if node is None else ""
        for row, span in _open(database, node, by_head=True):
            if row[1] == _text(key):
                _update(database, row[0], span.absent(time))
    elif isinstance(detail.get("finding"), dict):
        _reported(database, time, node, detail["finding"], by_head=True)


def find_findings(rows: Rows, query: Query) -> list[StoredFinding]:
    """Return the findings that held in the time range, those that began first before the others."""
    chosen = 'start < ? AND ("end" IS NULL OR "end" > ?)'
    values: list[Any] = [query.end, query.start]
    if query.nodes is not None:
        chosen += " AND node = ANY(?)"
        values.append(list(query.nodes))
    if query.limit is not None:
        newest = '"end" IS NULL DESC, "end" DESC, start DESC, id DESC'
        chosen = f"id IN (SELECT id FROM findings WHERE {chosen} ORDER BY {newest} LIMIT ?)"
        values.append(query.limit)
    statement = (
        'SELECT node, detail, start, last, "end", is_over FROM findings '
        f'WHERE {chosen} ORDER BY start, node NULLS FIRST, "key"'
    )
    return [
        StoredFinding(node, FindingSpan(began, last, over, bool(is_over)), from_document(read_object(detail)))
        for node, detail, began, last, over, is_over in rows(statement, values)
    ]


def _report(database: Database, time: float, node: int | None, listed: list[Any]) -> None:
    told: dict[str, Mapping[str, Any]] = {}
    for finding in listed:
        if (
            isinstance(finding, dict)
            and isinstance(finding.get("id"), str)
            and finding["id"] not in NODE_FINDINGS
        ):
            told.setdefault(_text(finding_key(finding)), finding)
    for row, span in _open(database, node, by_head=False):
        if row[1] not in told:
            _update(database, row[0], span.absent(time))
    for finding in told.values():
        _reported(database, time, node, finding, by_head=False)
    if told:
        _catch_up(database, time, node)


def _catch_up(database: Database, time: float, node: int | None) -> None:
    """End what a late report began, where the next event of the node is known already."""
    where, values = of_node(node)
    after = database.execute(
        f"SELECT time, kind, detail FROM events WHERE {where} AND time > ? AND kind = ANY(?) "
        "ORDER BY time, from_frame, id LIMIT 1",
        (*values, time, [_REPORT, *_SILENCE]),
    ).fetchone()
    if after is None:
        return
    listed = json.loads(after[2]).get("findings") if after[1] == _REPORT else None
    told = {_text(finding_key(one)) for one in listed or () if isinstance(one, dict)}
    for row, span in _open(database, node, by_head=False):
        if span.last == time and row[1] not in told:
            _update(database, row[0], span.silent(after[0]) if listed is None else span.absent(after[0]))


def _reported(
    database: Database, time: float, node: int | None, finding: Mapping[str, Any], *, by_head: bool
) -> None:
    key, detail = _text(finding_key(finding)), json.dumps(finding, separators=(",", ":"))
    where, values = of_node(node)
    before = database.execute(
        f'SELECT {_COLUMNS} FROM findings WHERE {where} AND "key" = ? AND start <= ? ORDER BY start DESC LIMIT 1',
        (*values, key, time),
    ).fetchone()
    span = None if before is None else _span(before).reported(finding, time)
    if before is not None and span is None and before[3] is None:  # nobody said when it was over
        _update(database, before[0], _span(before).silent(before[2]))
    if before is None or span is None:
        span = new_span(finding, time)
        if by_head and isinstance(finding.get("start"), int | float):  # on this very clock
            span = span._replace(start=float(finding["start"]))
        row = node, key, *span, by_head, detail
        number = database.execute(_INSERT, row).fetchone()[0]
    else:
        number = before[0]
        _update(database, number, span, detail if time > before[2] else None)
    _join_next(database, node, key, number, span)


def _join_next(database: Database, node: int | None, key: str, number: int | None, span: FindingSpan) -> None:
    """Make one of two spans when a report that came late closes the gap between them."""
    where, values = of_node(node)
    after = database.execute(
        f'SELECT {_COLUMNS}, detail FROM findings WHERE {where} AND "key" = ? AND start > ? ORDER BY start LIMIT 1',
        (*values, key, span.start),
    ).fetchone()
    if after is None:
        return
    later, detail = _span(after[:-1]), after[-1]
    if span.reported({"id": json.loads(detail)["id"]}, later.start) is not None:
        _update(database, number, later._replace(start=span.start), detail)
        database.execute("DELETE FROM findings WHERE id = ?", (after[0],))


def _resume(database: Database, node: int) -> None:
    """Go on with the findings of a node whose agent was cut off and runs still: it reports changes alone."""
    for row, span in _open(database, node, by_head=False):
        restarted = database.execute(
            "SELECT 1 FROM events WHERE node = ? AND kind IN ('agent_started', 'agent_stopping') AND time > ?",
            (node, span.last),
        ).fetchone()
        if span.end is not None and restarted is None:
            _update(database, row[0], span._replace(end=None))


def _last_heard(detail: Mapping[str, Any]) -> float | None:
    """Return when something came from a node that is lost by now."""
    finding = detail.get("finding")
    start = finding.get("start") if isinstance(finding, dict) else None
    return float(start) if isinstance(start, int | float) else None


def _open(
    database: Database, node: int | None, *, by_head: bool
) -> list[tuple[tuple[int, str], FindingSpan]]:
    where, values = of_node(node)
    rows = database.execute(
        f'SELECT "key", {_COLUMNS} FROM findings WHERE {where} AND is_over = 0 AND by_head = ?',
        (*values, by_head),
    ).fetchall()
    return [((row[1], row[0]), _span(row[1:])) for row in rows]


def _update(database: Database, number: int | None, span: FindingSpan, detail: str | None = None) -> None:
    database.execute(
        'UPDATE findings SET start = ?, last = ?, "end" = ?, is_over = ?, detail = coalesce(?, detail) WHERE id = ?',
        (*span, detail, number),
    )


def _span(row: tuple[Any, ...]) -> FindingSpan:
    _, start, last, end, is_over = row
    return FindingSpan(start, last, end, bool(is_over))


def _text(key: FindingKey) -> str:
    return json.dumps(key)
