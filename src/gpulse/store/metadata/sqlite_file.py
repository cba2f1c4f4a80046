"""SQLite file of the metadata: one connection that writes, several that read, and errors with hints."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any
from urllib.parse import quote

from gpulse.atomic_files import make_directories, sync_directory
from gpulse.errors import ClosedError, DiskError, GpulseError, LogError
from gpulse.sources.disks import NETWORK_TYPES
from gpulse.sources.procfs import unescape
from gpulse.store.disk_errors import disk_error, disk_errors
from gpulse.store.metadata.file_check import (
    find_damage,
    has_check,
    mark_damaged,
    void_check,
    write_backup,
    write_check,
)
from gpulse.store.metadata.schema import check_version, create_tables
from gpulse.store.metadata.sql_dialects import SqliteDatabase, sqlite_values, to_sqlite

_MOUNTINFO = "/proc/self/mountinfo"
_SHARED_TYPES = NETWORK_TYPES | {"fuse", "gfs2", "gofer", "ncpfs", "ocfs2", "orangefs", "panfs", "pvfs2"}


def filesystem_type(path: str, mountinfo: bytes) -> str | None:
    """Return the filesystem type of an absolute path without links; None if no mount point contains it."""
    wanted = os.fsencode(path).rstrip(b"/") + b"/"
    found, longest = None, -1
    for line in mountinfo.split(b"\n"):
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if not after or len(fields) < 5:
            continue
        mount_point = unescape(fields[4]).rstrip(b"/") + b"/"
        # A later mount at the same mount point hides an earlier one.
        if wanted.startswith(mount_point) and len(mount_point) >= longest:
            found, longest = after.split(b" ")[0].decode("ascii", "replace"), len(mount_point)
    return found


def is_local_type(kind: str | None) -> bool:
    """Whether a filesystem type is known not to be shared between machines."""
    return kind is not None and kind not in _SHARED_TYPES and not kind.startswith("fuse.")


def is_local(path: str) -> bool:
    """Whether a path is on a local filesystem; False if that is unknown."""
    try:
        with open(_MOUNTINFO, "rb") as file:
            mountinfo = file.read()
    except OSError:
        return False
    return is_local_type(filesystem_type(os.path.realpath(path), mountinfo))


_MAX_JOURNAL_BYTES = 64 << 20
"""Size of the write-ahead log at which it is checkpointed. Large, because the writer checkpoints before the log is shortened and
need not wait for the disk in between."""
_SMALL_BYTES = 1 << 20
"""A file of this size is backed up at every checkpoint. While the backup is as new as the log is old, nothing can be lost."""
_BACKUP_BYTES_PER_SECOND = 25_000
"""Backups are written at most this fast on average: a file of 15 MB every ten minutes, one of 90 MB every hour."""
_BUSY_SECONDS = 5.0
"""How long to wait for another process that has locked the file."""
_COUNT_WRITE = "INSERT INTO meta VALUES ('writes', 1) ON CONFLICT (key) DO UPDATE SET value = meta.value + 1"
_CHECKPOINT_BUSY_MS = 200
"""The same for a checkpoint, where there is an alternative."""
_MAX_IDLE_CONNECTIONS = 4
_PRIMARY_CODE = 0xFF
_ERRNO_BY_CODE = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}
_HINTS = {
    sqlite3.SQLITE_IOERR: "see `df`, `quota` and `dmesg`: the disk may be full, over quota or failing",
    sqlite3.SQLITE_CANTOPEN: "check that the path is a file, in a directory that this user may write to",
    sqlite3.SQLITE_BUSY: "stop the process that has locked the file, or use another directory",
    sqlite3.SQLITE_LOCKED: "stop the process that has locked the file, or use another directory",
}


class DamagedMetadataError(LogError):
    """The metadata file is damaged; it can be restored from its backup when the head starts."""


def to_store_error(path: str, doing: str, error: sqlite3.Error) -> GpulseError:
    """Return the GpulseError for an SQLite error."""
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DamagedMetadataError(
            f"{path} is damaged: {error}",
            hint="restart the head, which restores the file from its backup and keeps all other data",
        )
    if code in _ERRNO_BY_CODE:
        number = _ERRNO_BY_CODE[code]
        return disk_error(f"cannot {doing} {path}", OSError(number, os.strerror(number)))
    return DiskError(f"cannot {doing} {path}: {error}", hint=_HINTS.get(code))


class MetadataFile:
    """The metadata database. Safe to use from several threads."""

    def __init__(self, path: str, *, read_only: bool = False, shown: str | None = None) -> None:
        """Open the file; create it if it does not exist, except with `read_only`.

        Raises:
            LogError: The file is damaged, has another format, or belongs to another program.
            DiskError: The disk is full, read-only or failing, or a file to read does not exist.
        """
        self.path = path
        self.shown = shown or path
        """The path shown in errors; for a copy, the path of the original."""
        self.read_only = read_only
        self._closed = False
        self._lock = threading.Lock()
        """Held to write."""
        self._pool_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._writer: sqlite3.Connection | None = None
        self._is_immutable = False
        self._is_local = True
        self._checkpoint_lock = threading.Lock()
        """Held to checkpoint, and while the file must not change. Acquired before `_lock`."""
        self._has_check = False
        """Whether there is a checksum that must be made void before the file changes."""
        self._backed_up_at = -inf
        try:
            if read_only:
                self._open_to_read()
            else:
                self._open_to_write()
        except sqlite3.Error as error:
            self.close()
            raise to_store_error(self.shown, "open", error) from error
        except BaseException:
            self.close()
            raise

    @property
    def journal_mode(self) -> str:
        """`wal` on a local filesystem, `delete` on a shared one."""
        return str(self.rows("PRAGMA journal_mode")[0][0])

    def rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a statement. Another thread may write at the same time.

        Raises:
            LogError: The file is damaged.
            DiskError: The file cannot be read.
            ClosedError: The file is closed.
        """
        connection = self._take()
        try:
            found = connection.execute(to_sqlite(statement), sqlite_values(values)).fetchall()
        except sqlite3.Error as error:
            connection.close()
            raise to_store_error(self.shown, "read", error) from error
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return found

    @contextmanager
    def writing(self) -> Iterator[SqliteDatabase]:
        """Run the block as one transaction, which is rolled back if the block fails.

        Raises:
            LogError: The file is damaged.
            DiskError: The file cannot be written; try again later.
            ClosedError: The file is closed.
        """
        with self._lock:
            try:
                connection = self._writing_connection()
                connection.execute("BEGIN IMMEDIATE")
                if not self._is_local:
                    self._void_check()  # a commit changes the file at once
                yield SqliteDatabase(connection)
                connection.execute(_COUNT_WRITE)
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise to_store_error(self.shown, "write", error) from error
            except BaseException:
                self._roll_back()
                raise
        if self._journal_bytes() > _MAX_JOURNAL_BYTES and self._checkpoint_lock.acquire(blocking=False):
            try:
                with suppress(GpulseError):  # what was written is in the write-ahead log
                    self._checkpoint()
            finally:
                self._checkpoint_lock.release()

    def sync(self) -> None:
        """Wait until everything that was written is on disk, and back the file up if it is time.

        Raises:
            LogError: The file is damaged.
            DiskError: The data may not be on disk.
            ClosedError: The file is closed.
        """
        with self._checkpoint_lock:
            self._checkpoint()
            now = time.monotonic()
            size = os.stat(self.path).st_size if self._has_check else 0
            is_due = size <= _SMALL_BYTES or now - self._backed_up_at >= size / _BACKUP_BYTES_PER_SECOND
            if self._has_check and is_due:
                with disk_errors(f"cannot back up {self.path}"), self._unchanged():
                    if self._has_check:
                        write_backup(self.path)
                        self._backed_up_at = now

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Keep the file unchanged during the block; with a write-ahead log, only checkpoints change it."""
        if self._is_local:
            yield
        else:
            with self._lock:
                yield

    def _checkpoint(self) -> None:
        """Write the write-ahead log to the file, and store the checksum of the file; the caller has `_checkpoint_lock`."""
        with disk_errors(f"cannot read {self.shown}"):
            reason = find_damage(self.path) if self._has_check else None
        if reason is not None:  # a new checksum would hide it, and the backup would be lost
            raise DamagedMetadataError(
                f"{self.shown} is damaged: {reason}",
                hint="restart the head, which restores the file from its backup and the log",
            )
        with self._lock:
            self._void_check()
            try:
                connection = self._writing_connection()
                connection.execute(f"PRAGMA busy_timeout = {_CHECKPOINT_BUSY_MS}")
                try:
                    busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
                finally:
                    connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")
            except sqlite3.Error as error:
                raise to_store_error(self.shown, "sync", error) from error
            if busy:  # readers block the checkpoint: sync the write-ahead log instead
                self._sync_journal()
                return
        with disk_errors(f"cannot write the checksum of {self.shown}"), self._unchanged():
            try:
                write_check(self.path)
            except sqlite3.Error as error:
                raise to_store_error(self.shown, "read", error) from error
            self._has_check = True

    def _void_check(self) -> None:
        if self._has_check:
            with disk_errors(f"cannot write the checksum of {self.shown}"):
                void_check(self.path)
            self._has_check = False

    def _journal_bytes(self) -> int:
        with suppress(OSError):
            return os.stat(f"{self.path}-wal").st_size
        return 0

    def close(self) -> None:
        """Close the connections; queries that are running can finish."""
        if self._writer is not None and not self._closed:
            self._checkpoint_at_end()
        with self._lock:
            with self._pool_lock:
                self._closed = True
                idle, self._idle = self._idle, []
            writer, self._writer = self._writer, None
            for connection in (*idle, *([writer] if writer else [])):
                with suppress(sqlite3.Error):
                    connection.close()

    def _checkpoint_at_end(self) -> None:
        """Write the last checksum. SQLite itself also writes to a damaged file when it is closed, so that one is marked."""
        with self._checkpoint_lock:
            try:
                self._checkpoint()
            except DamagedMetadataError:
                with suppress(OSError):
                    mark_damaged(self.path)
            except GpulseError:
                pass

    def _open_to_read(self) -> None:
        with disk_errors(f"cannot open {self.shown}"):
            os.stat(self.path)
        try:
            self._check_readable()
        except sqlite3.OperationalError:
            # In a read-only directory, SQLite must be told that there is no writer, if there is none.
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
                f"{self.shown} is empty",
                hint="start a head with this data directory first, or use another one",
            )

    def _open_to_write(self) -> None:
        directory = os.path.dirname(os.path.abspath(self.path))
        with disk_errors(f"cannot open {self.shown}"):
            make_directories(directory)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        self._is_local = is_local(directory)
        self._has_check = has_check(self.path)
        connection = self._writing_connection()
        connection.execute("BEGIN IMMEDIATE")
        create_tables(connection, self.shown)
        connection.execute("COMMIT")
        with disk_errors(f"cannot sync {directory}"):
            sync_directory(directory)

    def _connect(self) -> sqlite3.Connection:
        # Readers also recover what a killed writer left unfinished, if they have write permission.
        mode = "ro" if self.read_only and not os.access(self.path, os.W_OK) else "rw"
        extra = "&immutable=1" if self._is_immutable else ""
        connection = sqlite3.connect(
            f"file:{quote(self.path)}?mode={mode}{extra}",
            uri=True,
            timeout=_BUSY_SECONDS,
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
            raise DiskError(f"cannot write {self.shown}: it was opened read-only")
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
        check_version(connection, self.shown)  # before the journal mode changes a file of another program
        wanted = "wal" if self._is_local else "delete"
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != wanted:
            self._void_check()  # the mode is a part of the file
        mode = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0]
        connection.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")

    def _roll_back(self) -> None:
        """Roll back a failed transaction, if necessary by closing the connection."""
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
        with disk_errors(f"cannot sync {self.path}-wal"):
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
            raise to_store_error(self.shown, "open", error) from error

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._pool_lock:
            if not self._closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()
