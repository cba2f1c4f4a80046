"""One head's metadata in SQLite: the state derived from the facts and frame events in its log.

The log is the source of truth. The metadata may lag behind it but is never ahead: each update and the log position at which it
ends are one transaction, so that replaying the log from there always gives the same metadata. Facts and frames change
different tables, or commute, so the result does not depend on how the log is split into updates.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Self

from gpulse.errors import LogError
from gpulse.model.finding_acknowledgement import MAX_SILENCE_SECONDS, RESPONSE_EVENTS
from gpulse.model.packed_columns import ColumnLayout
from gpulse.store.log.segment import LogRecord
from gpulse.store.metadata.frame_events import apply_frame
from gpulse.store.metadata.log_facts import apply_fact
from gpulse.store.metadata.log_updates import MetadataUpdate, UnreadableRecord, split_updates
from gpulse.store.metadata.reader import MetadataReader
from gpulse.store.metadata.sql_dialects import Database
from gpulse.store.metadata.sqlite_file import MetadataFile

__all__ = ("Metadata", "MetadataUpdate", "StoredRun")

_RECORDS_AT_ONCE = 5_000
_ROWS_AT_ONCE = 10_000
_WATERMARK = """
INSERT INTO runs (run, last) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET
    last = greatest(runs.last, excluded.last)
"""

_RESPONSE_KINDS = ", ".join(f"'{kind}'" for kind in sorted(RESPONSE_EVENTS))
DELETE_OLD = (
    f"DELETE FROM events WHERE id IN (SELECT id FROM events WHERE time < ? AND kind NOT IN ({_RESPONSE_KINDS}) LIMIT ?)",
    # Silences last for up to 30 days, acknowledgements as long as a finding that began before them.
    (
        f"DELETE FROM events WHERE id IN (SELECT id FROM events WHERE time < ? - {MAX_SILENCE_SECONDS:.0f} "
        f"AND node IS NULL AND kind IN ({_RESPONSE_KINDS}) AND NOT EXISTS ("
        'SELECT 1 FROM findings WHERE "end" IS NULL AND findings.start <= events.time) LIMIT ?)'
    ),
    'DELETE FROM findings WHERE id IN (SELECT id FROM findings WHERE "end" < ? LIMIT ?)',
    "DELETE FROM processes WHERE id IN (SELECT id FROM processes WHERE ended < ? LIMIT ?)",
)
"""Statements that delete a limited number of rows that ended before a time."""


class StoredRun(NamedTuple):
    """One run of an agent."""

    node: int | None
    """None if the log has frames of a run without a fact for the run."""
    last: int
    """Sequence number of its last frame; 0 if there is none."""
    time: float | None
    """When the head first received data of the run."""
    version: str | None
    pid: int | None
    boot: str | None


class Metadata(MetadataReader):
    """The metadata of one head, with one writing process and any number of readers. Safe to use from several threads."""

    def __init__(self, path: str, *, read_only: bool = False, shown: str | None = None) -> None:
        """Open the metadata, or create it.

        Args:
            path: The file; created together with its directory if it does not exist.
            read_only: Do not change or create the file.
            shown: The path shown in errors, if the file is a copy.

        Raises:
            LogError: The file is damaged, has another format, or belongs to another program.
            DiskError: The disk is full, read-only or failing, or a file to read does not exist.
        """
        self._file = MetadataFile(os.path.abspath(path), read_only=read_only, shown=shown)
        super().__init__(self._file.rows)
        try:
            self.head_id = str(self._meta("head_id"))
            """Random ID, generated when the metadata was created."""
            self.unreadable: list[UnreadableRecord] = []
            """Unreadable records that a replay skipped."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file(self) -> MetadataFile:
        """The database file, for copying it."""
        return self._file

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._file.path

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk, including SQLite's journal files."""
        total = 0
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    @property
    def applied(self) -> int:
        """The log position up to which the metadata is complete; initially 0."""
        return int(self._meta("applied"))

    @property
    def log_id(self) -> bytes | None:
        """The ID of the log that it was made from; None if it is not known yet."""
        rows = self._file.rows("SELECT value FROM meta WHERE key = 'log'")
        return bytes.fromhex(rows[0][0]) if rows else None

    def set_log_id(self, log_id: bytes) -> None:
        """Record the ID of the log that it is made from.

        Raises:
            DiskError: The file could not be written.
        """
        with self._file.writing() as database:
            database.execute(
                "INSERT INTO meta VALUES ('log', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (log_id.hex(),),
            )

    def files(self) -> frozenset[str]:
        """Return the files of the data directory that existed when they were last recorded."""
        rows = self._file.rows("SELECT value FROM meta WHERE key = 'files'")
        return frozenset(json.loads(rows[0][0])) if rows else frozenset()

    def set_files(self, names: Iterable[str]) -> None:
        """Record which files of the data directory exist, so that the loss of one is noticed.

        Raises:
            DiskError: The file could not be written.
        """
        with self._file.writing() as database:
            database.execute(
                "INSERT INTO meta VALUES ('files', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (json.dumps(sorted(names)),),
            )

    def apply(self, update: MetadataUpdate) -> bool:
        """Apply an update in one transaction; return False if it was already applied.

        Raises:
            DiskError: Writing failed and left nothing behind; try again later.
            LogError: The file is damaged.
        """
        with self._file.writing() as database:
            if update.position <= _read_applied(database):
                return False
            for fact in update.facts:
                apply_fact(database, fact)
            database.executemany(_WATERMARK, update.watermarks.items())
            for frame in update.events:
                apply_frame(database, frame)
            database.execute("UPDATE meta SET value = ? WHERE key = 'applied'", (update.position,))
        return True

    def replay(self, records: Iterable[LogRecord], *, at_once: int = _RECORDS_AT_ONCE) -> int:
        """Apply the records of the log that are not applied yet, and return their number.

        Args:
            records: In the order of the log, starting at or before the first record that is not applied.
            at_once: Number of records per transaction.

        Raises:
            DiskError: Some records could not be written; those before them were. Try again later.
            LogError: Records are missing, or the file is damaged.
        """
        count = 0
        for update, length in split_updates(_skip_applied(records, self.applied, self._file.shown), at_once):
            self.apply(update)
            self.unreadable.extend(update.unreadable)
            count += length
        return count

    def skip_to(self, position: int) -> None:
        """Continue after a position without the records before it, which no longer exist.

        Raises:
            DiskError: The file could not be written.
        """
        with self._file.writing() as database:
            database.execute("UPDATE meta SET value = ? WHERE key = 'applied'", (position,))

    def checkpoint(self) -> int:
        """Wait until all updates are on disk; return the position up to which the metadata no longer needs the log.

        Raises:
            DiskError: It is unknown what is on disk.
        """
        position = self.applied
        self._file.sync()
        return position

    def drop_before(self, time: float) -> None:
        """Delete the events before a time, and the findings and processes that ended before it.

        Raises:
            DiskError: The file could not be written; try again later.
        """
        for query in DELETE_OLD:
            removed = _ROWS_AT_ONCE
            while removed == _ROWS_AT_ONCE:  # in chunks, so that updates do not wait for all of it
                with self._file.writing() as database:
                    removed = database.execute(query, (time, _ROWS_AT_ONCE)).rowcount

    def close(self) -> None:
        """Close the metadata."""
        self._file.close()

    def runs(self) -> dict[bytes, StoredRun]:
        """Return all runs of agents, by run ID."""
        rows = self._file.rows("SELECT run, node, last, time, version, pid, boot FROM runs")
        return {row[0]: StoredRun(*row[1:]) for row in rows}

    def layouts(self, ids: Collection[int] | None = None) -> dict[int, ColumnLayout]:
        """Return all layouts, or those with some IDs, without layouts that only a newer version can read."""
        query, values = "SELECT id, text FROM layouts", []
        if ids is not None:
            query += " WHERE id = ANY(?)"
            values.append([str(layout) for layout in ids])
        found: dict[int, ColumnLayout] = {}
        for layout, text in self._file.rows(query, values):
            with suppress(ValueError):
                found[int(layout)] = ColumnLayout.from_json(text)
        return found

    def settings(self) -> dict[str, Any] | None:
        """Return the newest settings and their time; None if there are none."""
        document = self._meta("settings")
        if document is None:
            return None
        settings: dict[str, Any] = json.loads(document)
        return settings

    def _meta(self, key: str) -> Any:
        return self._file.rows("SELECT value FROM meta WHERE key = ?", (key,))[0][0]


def _skip_applied(records: Iterable[LogRecord], applied: int, path: str) -> Iterator[LogRecord]:
    """Yield the records that are not applied yet."""
    expected = applied + 1
    for record in records:
        if record.position > expected:
            raise LogError(
                f"the log continues at position {record.position}, but {path} ends at position {expected - 1}",
                hint="restore the file from a backup, or move the whole data directory away to start a new one",
            )
        if record.position == expected:
            expected += 1
            yield record


def _read_applied(database: Database) -> int:
    return int(database.execute("SELECT value FROM meta WHERE key = 'applied'").fetchone()[0])
