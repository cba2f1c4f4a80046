"""Everything that a book holds of events and processes, piece by piece: for those who are told of it later."""

from __future__ import annotations

from collections.abc import Iterator

from gpulse.store.base import StoredEvent, StoredProcess
from gpulse.store.book.file import BookFile
from gpulse.store.book.told import Told

_ROWS_AT_ONCE = 10_000
_NEWEST = "SELECT (SELECT ifnull(max(id), 0) FROM events), (SELECT ifnull(max(id), 0) FROM processes)"
_EVENTS = f"""
SELECT id, time, kind, node, detail FROM events WHERE id > ? AND id <= ? ORDER BY id LIMIT {_ROWS_AT_ONCE}
"""
_PROCESSES = f"""
SELECT id, node, pid, start_time, first_seen, ended, identity FROM processes
WHERE id > ? AND id <= ? ORDER BY id LIMIT {_ROWS_AT_ONCE}
"""


def last_numbers(file: BookFile) -> tuple[int, int]:
    """The numbers of the newest event and the newest process; they are numbered as they come."""
    event, process = file.rows(_NEWEST)[0]
    return int(event), int(process)


def past_events(file: BookFile, last: int) -> Iterator[StoredEvent]:
    """Every event up to a number, in the order in which they came."""
    after = 0
    while rows := file.rows(_EVENTS, (after, last)):
        for after, time, kind, node, detail in rows:  # noqa: B007  the last number is where to go on
            yield StoredEvent(time, kind, node, Told(detail))


def past_processes(file: BookFile, last: int) -> Iterator[StoredProcess]:
    """Every process up to a number."""
    after = 0
    while rows := file.rows(_PROCESSES, (after, last)):
        for after, node, pid, start, first_seen, ended, identity in rows:  # noqa: B007  as above
            yield StoredProcess(node, pid, start, first_seen, ended, Told(identity))
