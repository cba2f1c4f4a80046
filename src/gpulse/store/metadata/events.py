"""How events are found in the book: all of a time, or the newest of them."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from gpulse.store.metadata.file import MetadataFile
from gpulse.store.metadata.findings import follow
from gpulse.store.metadata.values import read_object
from gpulse.store.store import Query, StoredEvent

_COLUMNS = "time, kind, node, detail"
# At the same moment what the head says comes first: the order must not depend on how the log was cut.
_ORDER = "time, from_frame, id"
_NEWEST_FIRST = "time DESC, from_frame DESC, id DESC"
_MAX_NAMESAKES = 100
_JOB_EVENTS = f"""
WITH jobs AS (
    SELECT id FROM events WHERE kind = 'job'
        AND substr(json_extract(detail, '$.id'), instr(json_extract(detail, '$.id'), ':') + 1) = ?
    UNION ALL SELECT id FROM events WHERE kind = 'job' AND json_extract(detail, '$.array') = ?
    UNION ALL SELECT * FROM (
        SELECT id FROM events WHERE kind = 'job' AND json_extract(detail, '$.array') > ? || '_'
            AND json_extract(detail, '$.array') < ? || '`' LIMIT ?)
    UNION ALL SELECT * FROM (
        SELECT id FROM events WHERE kind = 'job' AND json_extract(detail, '$.name') = ?
        ORDER BY time DESC LIMIT ?)
)
SELECT {_COLUMNS} FROM events WHERE id IN (
    SELECT id FROM jobs
    UNION ALL SELECT id FROM events WHERE kind = 'job_end' AND json_extract(detail, '$.job') IN (
        SELECT json_extract(detail, '$.id') FROM events WHERE id IN (SELECT id FROM jobs))
)
ORDER BY {_ORDER}
"""


def job_events(file: MetadataFile, word: str) -> list[StoredEvent]:
    """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
    number = word.partition(":")[2] or word
    return _events(file, _JOB_EVENTS, [number, word, word, word, _MAX_NAMESAKES, word, _MAX_NAMESAKES])


def find_events(file: MetadataFile, query: Query) -> list[StoredEvent]:
    """Return what happened, oldest first; of more than the limit the newest."""
    chosen = "time >= ? AND time < ?"
    values: list[Any] = [query.start, query.end]
    for column, wanted in (("kind", query.kinds), ("node", query.nodes)):
        if wanted is not None:
            chosen += f" AND {column} IN (SELECT value FROM json_each(?))"
            values.append(json.dumps(list(wanted)))
    if query.limit is not None:
        chosen = f"id IN (SELECT id FROM events WHERE {chosen} ORDER BY {_NEWEST_FIRST} LIMIT ?)"
        values.append(query.limit)
    return _events(file, f"SELECT {_COLUMNS} FROM events WHERE {chosen} ORDER BY {_ORDER}", values)


def _events(file: MetadataFile, query: str, values: list[Any]) -> list[StoredEvent]:
    return [
        StoredEvent(time, kind, node, read_object(detail))
        for time, kind, node, detail in file.rows(query, values)
    ]


def add_event(
    database: sqlite3.Connection, time: float, node: int | None, kind: str, detail: str, *, from_frame: bool
) -> None:
    """Add one row to the events, and what it says of findings to theirs."""
    database.execute(
        "INSERT INTO events (time, node, kind, from_frame, detail) VALUES (?, ?, ?, ?, ?)",
        (time, node, kind, from_frame, detail),
    )
    follow(database, time, node, kind, detail)
