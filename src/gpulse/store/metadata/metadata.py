"""The book: what the log's facts and the events inside frames add up to, and how far in the log that reaches.

The log is the only truth. The book can lag behind it, never run ahead of it: every step is one transaction together
with the position it ends at, so that replaying the log from there gives the same book whatever happened in between.
Facts and frames change different tables, or commute, so it does not matter how the log is cut into steps.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Self

from gpulse.errors import LogError
from gpulse.model.columns import Layout
from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.store.log.record import Record
from gpulse.store.metadata.events import find_events, job_events
from gpulse.store.metadata.facts import apply_fact
from gpulse.store.metadata.file import MetadataFile
from gpulse.store.metadata.findings import find_findings
from gpulse.store.metadata.frames import apply_frame
from gpulse.store.metadata.lazy_json import Told
from gpulse.store.metadata.step import Step, Unreadable, steps_of
from gpulse.store.metadata.values import read_object
from gpulse.store.store import Query, StoredEvent, StoredFinding, StoredGpu, StoredNode, StoredProcess

__all__ = ("Metadata", "Step", "StoredRun")

_RECORDS_AT_ONCE = 5_000
_ROWS_AT_ONCE = 10_000
_WATERMARK = """
INSERT INTO runs (run, last) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET last = max(last, excluded.last)
"""
_JOB = "json_extract(identity, '$.owner.job')"
"""As the index has it."""
_NODES = "SELECT id, name, host, machine, first_seen, facts, labels, {via} FROM nodes ORDER BY id"
_GPUS = """
SELECT node, nodes.name, uuid, "index", mig_index, gpus.name, device, last_seen, {via}
FROM gpus LEFT JOIN nodes ON nodes.id = node ORDER BY node, "index", mig_index, uuid
"""


class StoredRun(NamedTuple):
    """One run of an agent."""

    node: int | None
    """None when the log has frames of a run that it never introduced."""
    last: int
    """The sequence number of its last frame; 0 when there is none."""
    time: float | None
    """When the head first heard of it."""
    version: str | None
    pid: int | None
    boot: str | None


class Metadata:
    """The book of one head; one process writes it, any number read it. Safe to use from several threads."""

    def __init__(self, path: str, *, read_only: bool = False, shown: str | None = None) -> None:
        """Open the book, or begin one.

        Args:
            path: The file, made together with its directory when it is not there.
            read_only: Never change it; then it has to be there.
            shown: What errors call it, when it is a copy of that.

        Raises:
            LogError: It is damaged, of a newer version, or another program's.
            DiskError: The disk is full, read-only or broken, or there is no such file to read.
        """
        self._file = MetadataFile(os.path.abspath(path), read_only=read_only, shown=shown)
        try:
            self.head_id = str(self._meta("head_id"))
            """Made at random when the book was begun."""
            self.unreadable: list[Unreadable] = []
            """Records of the log that a replay passed over."""
            self._has_via = bool(
                self._file.rows("SELECT 1 FROM pragma_table_info('gpus') WHERE name = 'via'")
            )
            """False of an older file that is only read."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> str:
        """The file."""
        return self._file.path

    @property
    def size_bytes(self) -> int:
        """What the file takes on disk, with what SQLite keeps beside it."""
        total = 0
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    @property
    def journal_mode(self) -> str:
        """`wal` on a file system of this machine, `delete` on one that is shared."""
        return self._file.journal_mode

    @property
    def applied(self) -> int:
        """Up to which position of the log the book is complete; 0 at first."""
        return int(self._meta("applied"))

    def apply(self, step: Step) -> bool:
        """Take a step in, whole or not at all; False when the book had come that far already.

        Raises:
            DiskError: It could not be written, and nothing of it is left. It can be tried again.
            LogError: The file is damaged.
        """
        with self._file.writing() as database:
            if step.position <= _applied(database):
                return False
            for fact in step.facts:
                apply_fact(database, fact)
            database.executemany(_WATERMARK, step.watermarks.items())
            for frame in step.events:
                apply_frame(database, frame)
            database.execute("UPDATE meta SET value = ? WHERE key = 'applied'", (step.position,))
        return True

    def replay(self, records: Iterable[Record], *, at_once: int = _RECORDS_AT_ONCE) -> int:
        """Take in what is new among records of the log, and give how many of them were.

        Args:
            records: In the order of the log, from the first that is not applied or any earlier one on.
            at_once: So many are one transaction.

        Raises:
            DiskError: Some could not be written; those before them are. It can be tried again.
            LogError: Records are missing, or the file is damaged.
        """
        count = 0
        for step, length in steps_of(_after(records, self.applied, self._file.shown), at_once):
            self.apply(step)
            self.unreadable.extend(step.unreadable)
            count += length
        return count

    def checkpoint(self) -> int:
        """Wait until all steps are on disk; gives the position up to which the log is no longer needed for the book.

        Raises:
            DiskError: It is not certain what is on disk.
        """
        position = self.applied
        self._file.sync()
        return position

    def drop_before(self, time: float) -> None:
        """Forget the events before a time, and the findings and processes that had ended by then.

        Raises:
            DiskError: It could not be written. It can be tried again.
        """
        for query in (
            "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE time < ? LIMIT ?)",
            'DELETE FROM findings WHERE id IN (SELECT id FROM findings WHERE "end" < ? LIMIT ?)',
            "DELETE FROM processes WHERE id IN (SELECT id FROM processes WHERE ended < ? LIMIT ?)",
        ):
            removed = _ROWS_AT_ONCE
            while removed == _ROWS_AT_ONCE:  # in pieces, so that steps need not wait for all of it
                with self._file.writing() as database:
                    removed = database.execute(query, (time, _ROWS_AT_ONCE)).rowcount

    def close(self) -> None:
        """Let go; the book cannot be used afterwards."""
        self._file.close()

    def nodes(self) -> dict[int, StoredNode]:
        """All nodes, by their numbers."""
        return {
            number: StoredNode(
                number, name, host, machine, first_seen, read_object(facts), read_object(labels), via
            )
            for number, name, host, machine, first_seen, facts, labels, via in self._file.rows(
                _NODES.format(via="via" if self._has_via else "NULL")
            )
        }

    def gpus(self) -> list[StoredGpu]:
        """All GPUs, by the names of their nodes and by index."""
        rows = self._file.rows(_GPUS.format(via="gpus.via" if self._has_via else "NULL"))
        found = [
            StoredGpu(
                node,
                str(node) if node_name is None else node_name,
                uuid,
                index,
                str(index) if mig_index is None else f"{index}:{mig_index}",
                name,
                read_object(device),
                told,
                via,
            )
            for node, node_name, uuid, index, mig_index, name, device, told, via in rows
        ]
        return sorted(found, key=lambda gpu: natural_key(gpu.node_name))

    def sessions(self) -> list[Session]:
        """All sessions, oldest first; what only a newer version can read is left out."""
        found = []
        for row in self._file.rows("SELECT document FROM sessions ORDER BY start, id"):
            with suppress(ValueError):
                found.append(Session.from_dict(json.loads(row[0])))
        return found

    def session(self, session_id: str) -> Session | None:
        """One session; None when there is none of that id."""
        for row in self._file.rows("SELECT document FROM sessions WHERE id = ?", (session_id,)):
            with suppress(ValueError):
                return Session.from_dict(json.loads(row[0]))
        return None

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        return find_events(self._file, query)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        return find_findings(self._file, query)

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        chosen = ["true"]
        values: list[Any] = []
        if query.start > -math.inf:
            chosen.append("(ended IS NULL OR ended >= ?)")
            values.append(query.start)
        if query.end < math.inf:
            chosen.append("first_seen < ?")
            values.append(query.end)
        for column, wanted in (("node", query.nodes), ("pid", query.pids), (_JOB, query.jobs)):
            if wanted is not None:
                chosen.append(f"{column} IN (SELECT value FROM json_each(?))")
                values.append(json.dumps(list(wanted)))
        rows = self._file.rows(
            "SELECT node, pid, start_time, first_seen, ended, identity FROM processes "
            f"WHERE {' AND '.join(chosen)} ORDER BY first_seen, node, pid, start_time",
            values,
        )
        return [
            StoredProcess(node, pid, began, first_seen, ended, Told(identity))
            for node, pid, began, first_seen, ended, identity in rows
        ]

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        return job_events(self._file, word)

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        rows = self._file.rows(f"SELECT DISTINCT {_JOB} FROM processes WHERE {_JOB} IS NOT NULL")
        return [name for (name,) in rows if isinstance(name, str)]

    def latest(self, kind: str) -> dict[int, tuple[float, dict[str, Any]]]:
        """By node its last event of a kind that holds a whole state (`health`, `findings`), and when that was.

        Nothing of a node whose agent started again and has not said anything since.
        """
        rows = self._file.rows("SELECT node, time, detail FROM latest WHERE kind = ? ORDER BY node", (kind,))
        return {node: (time, read_object(detail)) for node, time, detail in rows}

    def runs(self) -> dict[bytes, StoredRun]:
        """All runs of agents."""
        rows = self._file.rows("SELECT run, node, last, time, version, pid, boot FROM runs")
        return {row[0]: StoredRun(*row[1:]) for row in rows}

    def layouts(self, ids: Collection[int] | None = None) -> dict[int, Layout]:
        """All layouts, or those asked for; what only a newer version can read is left out."""
        query, values = "SELECT id, text FROM layouts", []
        if ids is not None:
            query += " WHERE id IN (SELECT value FROM json_each(?))"
            values.append(json.dumps([str(layout) for layout in ids]))
        found: dict[int, Layout] = {}
        for layout, text in self._file.rows(query, values):
            with suppress(ValueError):
                found[int(layout)] = Layout.from_json(text)
        return found

    def settings(self) -> dict[str, Any] | None:
        """The last settings, and since when; None when there were none."""
        document = self._meta("settings")
        if document is None:
            return None
        settings: dict[str, Any] = json.loads(document)
        return settings

    def _meta(self, key: str) -> Any:
        return self._file.rows("SELECT value FROM meta WHERE key = ?", (key,))[0][0]


def _after(records: Iterable[Record], applied: int, path: str) -> Iterator[Record]:
    """The records that are not applied yet."""
    expected = applied + 1
    for record in records:
        if record.position > expected:
            raise LogError(
                f"the log goes on at position {record.position}, but {path} only reaches {expected - 1}",
                hint="restore the file from a copy, or move the whole data directory away to begin a new one",
            )
        if record.position == expected:
            expected += 1
            yield record


def _applied(database: sqlite3.Connection) -> int:
    return int(database.execute("SELECT value FROM meta WHERE key = 'applied'").fetchone()[0])
