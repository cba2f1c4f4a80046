"""Events: add them, and find those of a time or of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulse.store.metadata.database import Database, Rows
from gpulse.store.metadata.findings import follow, of_node
from gpulse.store.metadata.values import read_object, spelled, text
from gpulse.store.store import Query, StoredEvent

_COLUMNS = "time, kind, node, detail"
# At the same moment what the head says comes first: the order must not depend on how the log was cut.
_ORDER = "time, from_frame, id"
_NEWEST_FIRST = "time DESC, from_frame DESC, id DESC"
_MAX_NAMESAKES = 100
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
_SAME = "SELECT 1 FROM events WHERE time = ? AND kind = ? AND detail = ? AND "


def job_events(rows: Rows, word: str) -> list[StoredEvent]:
    """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
    number = word.partition(":")[2] or word
    tasks = f"{word}_", f"{word}`"  # the digits of a task's number lie between
    return _events(rows, _JOB_EVENTS, [number, word, *tasks, _MAX_NAMESAKES, word, _MAX_NAMESAKES])


def find_events(rows: Rows, query: Query) -> list[StoredEvent]:
    """Return what happened, oldest first; of more than the limit the newest."""
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


def _events(rows: Rows, query: str, values: list[Any]) -> list[StoredEvent]:
    return [
        StoredEvent(time, kind, node, read_object(detail)) for time, kind, node, detail in rows(query, values)
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
    """Add one event, and update the findings by it.

    An event that is there already, the same in everything, is not added again: an agent that changes heads sends the newest
    frames again, and a head may copy what it copied before.
    """
    written = spelled(detail)
    if _is_known(database, time, node, kind, written):
        return
    database.execute(_ADD, (time, node, kind, from_frame, *_job_columns(kind, detail), written))
    follow(database, time, node, kind, detail)


def _is_known(database: Database, time: float, node: int | None, kind: str, detail: str) -> bool:
    where, values = of_node(node)
    return database.execute(_SAME + where, (time, kind, detail, *values)).fetchone() is not None


def _job_columns(kind: str, detail: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the id of the job that an event is about, its id without the scheduler, its array and its name."""
    if kind == "job_end":
        return _word(detail.get("job")), None, None, None
    if kind != "job":
        return None, None, None, None
    job = _word(detail.get("id"))
    number = None if job is None else job[job.find(":") + 1 :]
    return job, number, _word(detail.get("array")), _word(detail.get("name"))


def _word(value: Any) -> str | None:
    return text(value) if isinstance(value, str) else None
