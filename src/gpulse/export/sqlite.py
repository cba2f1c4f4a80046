"""SQLite: every table appended to one file that people can query with what they have."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gpulse.errors import RecordingError
from gpulse.export.tables import TABLES, TEXT, Table, columns, rows
from gpulse.model.frame import Frame
from gpulse.model.snapshot import Snapshot

SCHEMA_VERSION = 1
APPLICATION_ID = 0x67506C73
"""`gPls`: how a database says whose it is."""
_PATIENCE_SECONDS = 5.0
"""How long to wait for another program that is writing."""


class SqliteSink:
    """Appends looks to a database; columns that a newer gpulse knows are added to an older file."""

    def __init__(self, path: Path) -> None:
        """Open or create the database.

        Raises:
            RecordingError: The file is not a database of ours, or a newer gpulse wrote it.
        """
        self._path = path
        is_new = not path.exists()
        self._before: Frame | None = None
        self._database: sqlite3.Connection | None = None
        try:
            self._database = sqlite3.connect(path, timeout=_PATIENCE_SECONDS)
            self._claim(self._database)
            for table in TABLES:
                self._prepare(self._database, table)
            self._database.commit()
        except sqlite3.Error as error:
            self.close()
            if is_new:  # half a database would only stand in the way
                path.unlink(missing_ok=True)
            raise RecordingError(f"cannot write {path}: {error}", hint=_hint(error)) from error
        except RecordingError:
            self.close()
            raise

    def write(self, frame: Frame) -> None:
        """Append one frame, with rates since the frame before."""
        self.append(Snapshot.of(self._before, frame))
        self._before = frame

    def append(self, snapshot: Snapshot) -> None:
        """Append one look, whole or not at all.

        Raises:
            RecordingError: The database cannot be written: it is locked, or the disk is full.
        """
        assert self._database is not None  # noqa: S101  only close() takes it away
        try:
            with self._database:
                for table in TABLES:
                    wanted = columns(table)
                    marks = ",".join("?" * len(wanted))
                    values = [[row.get(name) for name in wanted] for row in rows(table, snapshot)]
                    insert = f"INSERT INTO {table} ({_quoted(wanted)}) VALUES ({marks})"  # noqa: S608  names are ours
                    self._database.executemany(insert, values)
        except sqlite3.Error as error:
            raise RecordingError(f"cannot write {self._path}: {error}", hint=_hint(error)) from error

    def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _claim(self, database: sqlite3.Connection) -> None:
        """Mark a new file as ours; never write into another program's database."""
        owner = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if owner != APPLICATION_ID and (owner or version or tables):
            raise RecordingError(
                f"{self._path} is another program's database", hint="choose another file, or a new one"
            )
        if version > SCHEMA_VERSION:
            raise RecordingError(
                f"{self._path} was written by a newer gpulse (schema {version}; this one knows {SCHEMA_VERSION})",
                hint="update gpulse, or choose another file",
            )
        if owner != APPLICATION_ID:
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @staticmethod
    def _prepare(database: sqlite3.Connection, table: Table) -> None:
        wanted = columns(table)
        types = {name: "TEXT" if name in TEXT else "REAL" if name == "time" else "NUMERIC" for name in wanted}
        database.execute(
            f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(f'{_quoted([n])} {types[n]}' for n in wanted)})"
        )
        present = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        for name in wanted:
            if name not in present:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {_quoted([name])} {types[name]}")
        database.execute(f"CREATE INDEX IF NOT EXISTS {table}_time ON {table} (time)")


def _hint(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "another program holds it; end that one, or choose another file"
    if "full" in text:
        return "make room on that disk, or choose another file"
    return "choose another file, or see that it is a SQLite database that you may write"


def _quoted(columns: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)
