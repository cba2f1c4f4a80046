"""Everything that agents told this head of events and processes, piece by piece: for those who are told of it later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gpulse.store.base import StoredEvent, StoredProcess
from gpulse.store.book.file import BookFile
from gpulse.store.book.told import Told

_ROWS_AT_ONCE = 10_000
_NEWEST = """
SELECT (SELECT ifnull(max(id), 0) FROM events), (SELECT ifnull(max(id), 0) FROM processes),
    (SELECT value FROM meta WHERE key = 'applied')
"""
_EVENTS = f"""
SELECT id, time, kind, node, detail FROM events WHERE id > ? AND id <= ? AND via IS NULL ORDER BY id LIMIT {_ROWS_AT_ONCE}
"""
_PROCESSES = f"""
SELECT id, node, pid, start_time, first_seen, ended, identity FROM processes
WHERE id > ? AND id <= ? AND via IS NULL ORDER BY id LIMIT {_ROWS_AT_ONCE}
"""


class Newest(NamedTuple):
    """How far a book is at a moment; events and processes are numbered as they come."""

    event: int
    process: int
    position: int
    """Of the log: everything up to there is in the book."""


def newest(file: BookFile) -> Newest:
    """How far a book is."""
    return Newest(*map(int, file.rows(_NEWEST)[0]))


def past_events(file: BookFile, last: int) -> Iterator[StoredEvent]:
    """Every event up to a number that no other head told, in the order in which they came."""
    after = 0
    while rows := file.rows(_EVENTS, (after, last)):
        for after, time, kind, node, detail in rows:  # noqa: B007  the last number is where to go on
            yield StoredEvent(time, kind, node, Told(detail))


def past_processes(file: BookFile, last: int) -> Iterator[StoredProcess]:
    """Every process up to a number that no other head told first."""
    after = 0
    while rows := file.rows(_PROCESSES, (after, last)):
        for after, node, pid, start, first_seen, ended, identity in rows:  # noqa: B007  as above
            yield StoredProcess(node, pid, start, first_seen, ended, Told(identity))
