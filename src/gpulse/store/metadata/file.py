"""The SQLite file under the metadata: one connection that writes, a few that read, and its refusals in our words."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from gpulse.errors import ClosedError, DiskError, GpulseError, LogError
from gpulse.store.disk import disk_error, disk_errors, sync_directory
from gpulse.store.metadata.database import SqliteDatabase, sqlite_values, to_sqlite
from gpulse.store.metadata.filesystem import is_local
from gpulse.store.metadata.schema import check_version, prepare

_AUTOCHECKPOINT_PAGES = 16_384
"""Whoever writes the metadata checkpoints it before the log is shortened; in between it need not wait for the disk."""
_PATIENCE_SECONDS = 5.0
"""How long to wait for another process that holds the file."""
_CHECKPOINT_PATIENCE_MS = 200
"""The same when there is another way."""
_MAX_IDLE = 4
_PRIMARY_CODE = 0xFF
_LIKE_ERRNO = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
_HINTS = {
    sqlite3.SQLITE_IOERR: "the disk may be full or over quota, or not answer properly: see `df`, `quota` and `dmesg`",
    sqlite3.SQLITE_CANTOPEN: "see that it is a file in a directory that you may write",
    sqlite3.SQLITE_BUSY: "another process holds it: stop that one first, or use another directory",
    sqlite3.SQLITE_LOCKED: "another process holds it: stop that one first, or use another directory",
}


def refusal_of(path: str, doing: str, error: sqlite3.Error) -> GpulseError:
    """The error to raise for what SQLite refused."""
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return LogError(
            f"{path} is damaged: {error}",
            hint="restore the file from a copy, or move the whole data directory away to begin a new one",
        )
    if code in _LIKE_ERRNO:
        number = _LIKE_ERRNO[code]
        return disk_error(f"{doing} {path}", OSError(number, os.strerror(number)))
    return DiskError(f"cannot {doing} {path}: {error}", hint=_HINTS.get(code))


class MetadataFile:
    """A database with the metadata's tables; safe to use from several threads."""

    def __init__(self, path: str, *, read_only: bool = False, shown: str | None = None) -> None:
        """Open the file; without `read_only` it is made when it is not there.

        Raises:
            LogError: It is damaged, of a newer version, or another program's.
            DiskError: The disk is full, read-only or broken, or there is no such file to read.
        """
        self.path = path
        self.shown = shown or path
        """What it is called in errors: a copy goes by the name of what it was copied from."""
        self.read_only = read_only
        self._closed = False
        self._lock = threading.Lock()
        """For whoever writes."""
        self._pool_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._is_immutable = False
        self._is_local = True
        try:
            if read_only:
                self._open_to_read()
            else:
                self._open_to_write()
        except sqlite3.Error as error:
            self.close()
            raise refusal_of(self.shown, "open", error) from error
        except BaseException:
            self.close()
            raise

    @property
    def journal_mode(self) -> str:
        """`wal` on a file system of this machine, `delete` on one that is shared."""
        return str(self.rows("PRAGMA journal_mode")[0][0])

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return what a statement finds; others may write meanwhile.

        Raises:
            LogError: The file is damaged.
            DiskError: It cannot be read.
            ClosedError: It was closed.
        """
        connection = self._take()
        try:
            found = connection.execute(to_sqlite(statement), sqlite_values(values)).fetchall()
        except sqlite3.Error as error:
            connection.close()
            raise refusal_of(self.shown, "read", error) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return found

    @contextmanager
    def writing(self) -> Iterator[SqliteDatabase]:
        """One transaction: all of the block is kept, or nothing when it fails.

        Raises:
            LogError: The file is damaged.
            DiskError: It cannot be written; it can be tried again.
            ClosedError: It was closed.
        """
        with self._lock:
            try:
                connection = self._writing_connection()
                connection.execute("BEGIN IMMEDIATE")
                yield SqliteDatabase(connection)
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise refusal_of(self.shown, "write", error) from error
            except BaseException:
                self._roll_back()
                raise

    def sync(self) -> None:
        """Wait until everything that was written is on disk.

        Raises:
            DiskError: That is not certain.
            ClosedError: It was closed.
        """
        with self._lock:
            try:
                connection = self._writing_connection()
                connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_PATIENCE_MS}")
                try:
                    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                finally:
                    connection.execute(f"PRAGMA busy_timeout = {int(_PATIENCE_SECONDS * 1000)}")
            except sqlite3.Error as error:
                raise refusal_of(self.shown, "sync", error) from error
            if busy:  # somebody reads: then the journal itself has to last
                self._sync_journal()

    def close(self) -> None:
        """Let go; whoever is reading may finish."""
        with self._lock:
            with self._pool_lock:
                self._closed = True
                idle, self._idle = self._idle, []
            writer, self._writer = self._writer, None
            for connection in (*idle, *([writer] if writer else [])):
                with suppress(sqlite3.Error):
                    connection.close()

    def _open_to_read(self) -> None:
        with disk_errors(f"open {self.shown}"):
            os.stat(self.path)
        try:
            self._check_readable()
        except sqlite3.OperationalError:
            # In a directory that cannot be written SQLite has to be told that nobody else writes, if that is so.
            if any(os.path.exists(f"{self.path}-{journal}") for journal in ("wal", "journal")):
                raise
            self._is_immutable = True
            self._check_readable()

    def _check_readable(self) -> None:
        connection = self._connect()
        try:
            version = check_version(connection, self.shown)
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        if not version:
            raise LogError(
                f"{self.shown} is empty", hint="start a head with this directory first, or use another one"
            )

    def _open_to_write(self) -> None:
        directory = os.path.dirname(os.path.abspath(self.path))
        with disk_errors(f"open {self.shown}"):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        self._is_local = is_local(directory)
        connection = self._writing_connection()
        connection.execute("BEGIN IMMEDIATE")
        prepare(connection, self.shown)
        connection.execute("COMMIT")
        with disk_errors(f"sync {directory}"):
            sync_directory(directory)

    def _connect(self) -> sqlite3.Connection:
        # Readers, too, clear up what a writer that was killed left half done, wherever they may.
        mode = "ro" if self.read_only and not os.access(self.path, os.W_OK) else "rw"
        extra = "&immutable=1" if self._is_immutable else ""
        connection = sqlite3.connect(
            f"file:{quote(self.path)}?mode={mode}{extra}",
            uri=True,
            timeout=_PATIENCE_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        if self.read_only:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _writing_connection(self) -> sqlite3.Connection:
        if self._closed:
            raise ClosedError(f"{self.shown} is closed")
        if self.read_only:
            raise DiskError(f"cannot write {self.shown}: it was opened to be read only")
        if self._writer is None:
            connection = self._connect()
            try:
                self._set_up(connection)
            except BaseException:
                connection.close()
                raise
            self._writer = connection
        return self._writer

    def _set_up(self, connection: sqlite3.Connection) -> None:
        check_version(connection, self.shown)  # before the journal's mode changes another program's file
        wanted = "wal" if self._is_local else "delete"
        mode = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_AUTOCHECKPOINT_PAGES}")

    def _roll_back(self) -> None:
        """Leave nothing of a failed transaction, if need be by letting go of the connection."""
        connection = self._writer
        if connection is None or not connection.in_transaction:
            return
        try:
            connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._writer = None
            with suppress(sqlite3.Error):
                connection.close()

    def _sync_journal(self) -> None:
        with disk_errors(f"sync {self.path}-wal"):
            file = os.open(f"{self.path}-wal", os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def _take(self) -> sqlite3.Connection:
        with self._pool_lock:
            if self._closed:
                raise ClosedError(f"{self.shown} is closed")
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except sqlite3.Error as error:
            raise refusal_of(self.shown, "open", error) from error

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._pool_lock:
            if not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()
