"""Write events and the time spans of findings to the tables, and query them by time or job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gpulse.model.finding import (
    NODE_FINDINGS,
    FindingKey,
    FindingSpan,
    finding_from_document,
    finding_key,
    start_finding_span,
    watched_seconds_of,
)
from gpulse.store.metadata.sql_dialects import Database, QueryRunner
from gpulse.store.metadata.value_checks import check_text, dump_json, parse_object
from gpulse.store.store import Query, StoredEvent, StoredFinding

_REPORT_KIND = "findings"
_SILENCING_KINDS = frozenset({"agent_stopping", "node_lost"})
"""Events after which it is unknown whether the findings of a node still hold.

The start of an agent is not one of them: the agent reports within a minute, and its findings are assumed to hold until then."""
_ENDED_BY = {"node_back": "node_lost", "node_found": "node_missing"}
"""Events that end a finding of the head, and the ID of that finding."""
_MAX_LATER_EVENTS = 20
"""How many later events are examined for the end of a finding that was reported late."""
_FINDING_COLUMNS = 'id, start, last, "end", is_over'
_INSERT = """
INSERT INTO findings (node, "key", start, last, "end", is_over, by_head, detail)
VALUES (?, ?, ?, ?, ?, ?, ?, ?) RETURNING id
"""


def node_condition(node: int | None) -> tuple[str, tuple[Any, ...]]:
    """Return the SQL condition for rows of a node, or of no node, and its values."""
    return ("node IS NULL", ()) if node is None else ("node = ?", (node,))


def update_findings(
    database: Database, time: float, node: int | None, kind: str, detail: Mapping[str, Any]
) -> None:
    """Update the time spans of findings after an event of any kind."""
    if kind == _REPORT_KIND:
        listed = detail.get("findings")
        found = listed if isinstance(listed, list) else []
        _apply_report(database, time, node, found, watched_seconds_of(detail))
        return
    if kind in _SILENCING_KINDS and node is not None:
        for row, span in _open_findings(database, node, by_head=False):
            _update_span(database, row[0], span.silent(time, _last_contact(detail)))
    if kind == "node_back" and node is not None:
        _resume_findings(database, node)
    if kind in _ENDED_BY:
        key = _ENDED_BY[kind], None, str(detail.get("name") or "") if node is None else ""
        for row, span in _open_findings(database, node, by_head=True):
            if row[1] == _key_text(key):
                _update_span(database, row[0], span.absent(time))
    elif isinstance(detail.get("finding"), dict):
        _add_report(database, time, node, detail["finding"], by_head=True)


def find_findings(rows: QueryRunner, query: Query) -> list[StoredFinding]:
    """Return the findings that held within the time range, ordered by start."""
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
        StoredFinding(
            node, FindingSpan(began, last, over, bool(is_over)), finding_from_document(parse_object(detail))
        )
        for node, detail, began, last, over, is_over in rows(statement, values)
    ]


def _apply_report(
    database: Database, time: float, node: int | None, listed: list[Any], watched_seconds: float | None
) -> None:
    reported: dict[str, Mapping[str, Any]] = {}
    for finding in listed:
        if (
            isinstance(finding, dict)
            and isinstance(finding.get("id"), str)
            and finding["id"] not in NODE_FINDINGS
        ):
            reported.setdefault(_key_text(finding_key(finding)), finding)
    for row, span in _open_findings(database, node, by_head=False):
        if row[1] not in reported:
            _update_span(database, row[0], span.absent(time, watched_seconds))
    for finding in reported.values():
        _add_report(database, time, node, finding, by_head=False)
    if reported:
        _end_late_findings(database, time, node)


def _end_late_findings(database: Database, time: float, node: int | None) -> None:
    """End the findings of a late report if a later event of the node already shows that they ended.

    A loss of the node at the very time of the report counts as later, whichever of them is stored first.
    """
    where, values = node_condition(node)
    silencing = list(_SILENCING_KINDS)
    later = database.execute(
        f"SELECT time, kind, detail FROM events WHERE {where} "
        "AND (time > ? AND kind = ANY(?) OR time = ? AND kind = ANY(?)) ORDER BY time, from_frame, id LIMIT ?",
        (*values, time, [_REPORT_KIND, *silencing], time, silencing, _MAX_LATER_EVENTS),
    ).fetchall()
    if not later:
        return
    reports = [(moment, kind, json.loads(detail)) for moment, kind, detail in later]
    for row, span in _open_findings(database, node, by_head=False):
        if span.last == time:
            _update_span(database, row[0], _after_reports(span, row[1], reports))


def _after_reports(
    span: FindingSpan, key: str, reports: Iterable[tuple[float, str, Mapping[str, Any]]]
) -> FindingSpan:
    """Return the span of a finding after the first of some later events that says whether it was over."""
    for moment, kind, detail in reports:
        if kind != _REPORT_KIND:
            return span.silent(moment)
        if key in {_key_text(finding_key(one)) for one in detail["findings"] if isinstance(one, dict)}:
            break
        ended = span.absent(moment, watched_seconds_of(detail))
        if ended != span:
            return ended
    return span


def _add_report(
    database: Database, time: float, node: int | None, finding: Mapping[str, Any], *, by_head: bool
) -> None:
    key, detail = _key_text(finding_key(finding)), json.dumps(finding, separators=(",", ":"))
    where, values = node_condition(node)
    before = database.execute(
        f'SELECT {_FINDING_COLUMNS} FROM findings WHERE {where} AND "key" = ? AND start <= ? ORDER BY start DESC LIMIT 1',
        (*values, key, time),
    ).fetchone()
    span = None if before is None else _span(before).reported(finding, time)
    if before is not None and span is None and before[3] is None:  # its end was never reported
        _update_span(database, before[0], _span(before).silent(before[2]))
    if before is None or span is None:
        span = start_finding_span(finding, time)
        if by_head and isinstance(finding.get("start"), int | float):  # by the head's own clock
            span = span._replace(start=float(finding["start"]))
        row = node, key, *span, by_head, detail
        number = database.execute(_INSERT, row).fetchone()[0]
    else:
        number = before[0]
        _update_span(database, number, span, detail if time > before[2] else None)
    _join_next(database, node, key, number, span)


def _join_next(database: Database, node: int | None, key: str, number: int | None, span: FindingSpan) -> None:
    """Merge two spans if a late report closes the gap between them."""
    where, values = node_condition(node)
    after = database.execute(
        f'SELECT {_FINDING_COLUMNS}, detail FROM findings WHERE {where} AND "key" = ? AND start > ? ORDER BY start LIMIT 1',
        (*values, key, span.start),
    ).fetchone()
    if after is None:
        return
    later, detail = _span(after[:-1]), after[-1]
    if span.reported({"id": json.loads(detail)["id"]}, later.start) is not None:
        _update_span(database, number, later._replace(start=span.start), detail)
        database.execute("DELETE FROM findings WHERE id = ?", (after[0],))


def _resume_findings(database: Database, node: int) -> None:
    """Resume the findings of a node that is back, if its agent was only disconnected: agents report only changes."""
    for row, span in _open_findings(database, node, by_head=False):
        restarted = database.execute(
            "SELECT 1 FROM events WHERE node = ? AND kind IN ('agent_started', 'agent_stopping') AND time > ?",
            (node, span.last),
        ).fetchone()
        if span.end is not None and restarted is None:
            _update_span(database, row[0], span._replace(end=None))


def _last_contact(detail: Mapping[str, Any]) -> float | None:
    """Return when a lost node was last in contact."""
    finding = detail.get("finding")
    start = finding.get("start") if isinstance(finding, dict) else None
    return float(start) if isinstance(start, int | float) else None


def _open_findings(
    database: Database, node: int | None, *, by_head: bool
) -> list[tuple[tuple[int, str], FindingSpan]]:
    where, values = node_condition(node)
    rows = database.execute(
        f'SELECT "key", {_FINDING_COLUMNS} FROM findings WHERE {where} AND is_over = 0 AND by_head = ?',
        (*values, by_head),
    ).fetchall()
    return [((row[1], row[0]), _span(row[1:])) for row in rows]


def _update_span(
    database: Database, number: int | None, span: FindingSpan, detail: str | None = None
) -> None:
    database.execute(
        'UPDATE findings SET start = ?, last = ?, "end" = ?, is_over = ?, detail = coalesce(?, detail) WHERE id = ?',
        (*span, detail, number),
    )


def _span(row: tuple[Any, ...]) -> FindingSpan:
    _, start, last, end, is_over = row
    return FindingSpan(start, last, end, bool(is_over))


def _key_text(key: FindingKey) -> str:
    return json.dumps(key)


_COLUMNS = "time, kind, node, detail"
# At equal times, events of the head come first: the order must not depend on how the log is split into updates.
_ORDER = "time, from_frame, id"
_NEWEST_FIRST = "time DESC, from_frame DESC, id DESC"
_MAX_SAME_NAME_JOBS = 100
_JOB_EVENTS = f"""
WITH jobs AS (
    SELECT id FROM events WHERE job_number = ?
    UNION ALL SELECT id FROM events WHERE job_array = ?
    UNION ALL SELECT id FROM (SELECT id FROM events WHERE job_array > ? AND job_array < ? LIMIT ?) AS tasks
    UNION ALL SELECT id FROM (SELECT id FROM events WHERE job_name = ? ORDER BY time DESC LIMIT ?) AS namesakes
)
SELECT {_COLUMNS} FROM events WHERE id IN (
    SELECT id FROM jobs
    UNION ALL SELECT id FROM events WHERE kind = 'job_end' AND job IN (
        SELECT job FROM events WHERE id IN (SELECT id FROM jobs))
)
ORDER BY {_ORDER}
"""
_ADD = """
INSERT INTO events (time, node, kind, from_frame, job, job_number, job_array, job_name, detail)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_SAME_EVENT = "SELECT 1 FROM events WHERE time = ? AND kind = ? AND detail = ? AND "


def find_job_events(rows: QueryRunner, word: str) -> list[StoredEvent]:
    """Return the events of jobs that a word may refer to; see `store.store.Store`."""
    number = word.partition(":")[2] or word
    tasks = f"{word}_", f"{word}`"  # task numbers sort between these two
    return _events(rows, _JOB_EVENTS, [number, word, *tasks, _MAX_SAME_NAME_JOBS, word, _MAX_SAME_NAME_JOBS])


def find_events(rows: QueryRunner, query: Query) -> list[StoredEvent]:
    """Return events, oldest first; if there are more than the limit, the newest ones."""
    chosen = "time >= ? AND time < ?"
    values: list[Any] = [query.start, query.end]
    for column, wanted in (("kind", query.kinds), ("node", query.nodes)):
        if wanted is not None:
            chosen += f" AND {column} = ANY(?)"
            values.append(list(wanted))
    if query.limit is not None:
        chosen = f"id IN (SELECT id FROM events WHERE {chosen} ORDER BY {_NEWEST_FIRST} LIMIT ?)"
        values.append(query.limit)
    return _events(rows, f"SELECT {_COLUMNS} FROM events WHERE {chosen} ORDER BY {_ORDER}", values)


def _events(rows: QueryRunner, query: str, values: list[Any]) -> list[StoredEvent]:
    return [
        StoredEvent(time, kind, node, parse_object(detail))
        for time, kind, node, detail in rows(query, values)
    ]


def add_event(
    database: Database,
    time: float,
    node: int | None,
    kind: str,
    detail: Mapping[str, Any],
    *,
    from_frame: bool,
) -> None:
    """Add an event, and update the findings accordingly.

    An identical event is not added again: an agent that switches heads resends its newest frames, and a head may copy its
    metadata to PostgreSQL more than once.
    """
    written = dump_json(detail)
    if _exists(database, time, node, kind, written):
        return
    database.execute(_ADD, (time, node, kind, from_frame, *_job_columns(kind, detail), written))
    update_findings(database, time, node, kind, detail)


def _exists(database: Database, time: float, node: int | None, kind: str, detail: str) -> bool:
    where, values = node_condition(node)
    return database.execute(_SAME_EVENT + where, (time, kind, detail, *values)).fetchone() is not None


def _job_columns(kind: str, detail: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the job ID of an event, the ID without the scheduler, the job array and the job name."""
    if kind == "job_end":
        return _text_or_none(detail.get("job")), None, None, None
    if kind != "job":
        return None, None, None, None
    job = _text_or_none(detail.get("id"))
    number = None if job is None else job[job.find(":") + 1 :]
    return job, number, _text_or_none(detail.get("array")), _text_or_none(detail.get("name"))


def _text_or_none(value: Any) -> str | None:
    return check_text(value) if isinstance(value, str) else None
