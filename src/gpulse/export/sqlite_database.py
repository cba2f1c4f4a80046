"""SQLite database: every table of snapshots is appended to one file."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from pathlib import Path

from gpulse.atomic_files import open_output, resolve_output
from gpulse.errors import RecordingError, file_hint
from gpulse.export.snapshot_documents import TABLE_NAMES, TEXT_COLUMNS, TableName, build_rows, column_names
from gpulse.model.frame import Frame
from gpulse.model.snapshot import Snapshot

SCHEMA_VERSION = 1
APPLICATION_ID = 0x67506C73
"""`gPls` in ASCII, which marks a database as written by gpulse."""
_LOCK_TIMEOUT_SECONDS = 5.0
"""How long to wait for a lock of another program."""
_COMPANION_SUFFIXES = ("-journal", "-wal", "-shm")
"""Files that SQLite has beside a database."""


class SqliteSink:
    """Appends snapshots to a database; columns that an older file lacks are added."""

    def __init__(self, path: Path) -> None:
        """Open or create the database.

        Raises:
            RecordingError: The file is not a gpulse database, a newer gpulse wrote it, or another user has put it there.
        """
        self._path = path
        self._before: Frame | None = None
        self._database: sqlite3.Connection | None = None
        try:
            self._place, is_new = _find_or_create(path)
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}", hint=file_hint(error)) from error
        try:
            self._database = sqlite3.connect(self._place, timeout=_LOCK_TIMEOUT_SECONDS)
            self._claim(self._database)
            for table in TABLE_NAMES:
                self._prepare(self._database, table)
            self._database.commit()
        except sqlite3.Error as error:
            self.close()
            if is_new:  # do not leave an incomplete database behind
                Path(self._place).unlink(missing_ok=True)
            raise RecordingError(f"cannot write {path}: {error}", hint=_hint(error)) from error
        except RecordingError:
            self.close()
            raise

    def write(self, frame: Frame) -> None:
        """Append one frame, with rates since the previous frame."""
        self.append(Snapshot.of(self._before, frame))
        self._before = frame

    def append(self, snapshot: Snapshot) -> None:
        """Append one snapshot in one transaction.

        Raises:
            RecordingError: The database cannot be written: it is locked, or the disk is full.
        """
        assert self._database is not None  # noqa: S101  only close() resets it
        try:
            _check_companions(self._place)
            with self._database:
                for table in TABLE_NAMES:
                    wanted = column_names(table)
                    marks = ",".join("?" * len(wanted))
                    values = [[row.get(name) for name in wanted] for row in build_rows(table, snapshot)]
                    insert = f"INSERT INTO {table} ({_quote(wanted)}) VALUES ({marks})"  # noqa: S608  the names are constants
                    self._database.executemany(insert, values)
        except sqlite3.Error as error:
            raise RecordingError(f"cannot write {self._path}: {error}", hint=_hint(error)) from error
        except OSError as error:
            raise RecordingError(
                f"cannot write {self._path}: {error.strerror}", hint=file_hint(error)
            ) from error

    def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _claim(self, database: sqlite3.Connection) -> None:
        """Mark a new file as a gpulse database; never write into another program's database."""
        owner = database.execute("PRAGMA application_id").fetchone()[0]
        version = database.execute("PRAGMA user_version").fetchone()[0]
        tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if owner != APPLICATION_ID and (owner or version or tables):
            raise RecordingError(
                f"cannot write {self._path}: the database belongs to another program",
                hint="choose another file",
            )
        if version > SCHEMA_VERSION:
            raise RecordingError(
                f"cannot write {self._path}: a newer version of gpulse wrote it "
                f"(schema {version}; this version supports schema {SCHEMA_VERSION})",
                hint="update gpulse, or choose another file",
            )
        if owner != APPLICATION_ID:
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @staticmethod
    def _prepare(database: sqlite3.Connection, table: TableName) -> None:
        wanted = column_names(table)
        types = {
            name: "TEXT" if name in TEXT_COLUMNS else "REAL" if name == "time" else "NUMERIC"
            for name in wanted
        }
        database.execute(
            f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(f'{_quote([n])} {types[n]}' for n in wanted)})"
        )
        present = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        for name in wanted:
            if name not in present:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {_quote([name])} {types[name]}")
        database.execute(f"CREATE INDEX IF NOT EXISTS {table}_time ON {table} (time)")


def _find_or_create(path: Path) -> tuple[str, bool]:
    """Return where a database is, and whether it was created now.

    Raises:
        OSError: It cannot be created, is not a regular file, or another user has put it there.
    """
    place = resolve_output(path)
    _check_companions(place)
    try:
        os.close(open_output(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        if not stat.S_ISREG(os.lstat(place).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file") from None
        return place, False
    return place, True


def _check_companions(place: str) -> None:
    """Refuse journals of another user: SQLite applies any that it finds beside a database, at every transaction.

    Raises:
        OSError: Another user has put one there.
    """
    for suffix in _COMPANION_SUFFIXES:
        resolve_output(place + suffix)


def _hint(error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text:
        return "stop the program that has locked the file, or choose another file"
    if "full" in text:
        return "free space on the disk, or choose another file"
    return "choose another file, or check that this file is an SQLite database that you may write to"


def _quote(columns: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in columns)
