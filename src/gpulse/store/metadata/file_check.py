"""Checksum and backup of the metadata file, by which damage is noticed and repaired.

SQLite changes its file only in a checkpoint; until then, changes are in the write-ahead log, which has checksums of its own.
The checksum of the file is therefore made void before each checkpoint and written after it. A process that ends without
closing the file may let SQLite checkpoint it without that. Such a file counts more transactions than its checksum says, and
is not taken for a damaged one. The file with the checksum always exists once it was written, so that its loss is noticed.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import closing, suppress
from typing import NamedTuple
from urllib.parse import quote
from zlib import crc32

from gpulse.atomic_files import replace_file, sync_directory
from gpulse.store.damage import Damage, add_checksum, file_checksum, set_aside, strip_checksum
from gpulse.store.disk_errors import disk_errors

METADATA_FILE = "metadata.sqlite"
"""Name of the metadata in a data directory."""
CHECK_SUFFIX = ".check"
BACKUP_SUFFIX = ".backup"
_SIDE_FILES = ("", "-wal", "-shm", "-journal")
_TRAILER = b"\ngpulse backup %08x\n"
_TRAILER_PATTERN = re.compile(rb"\ngpulse backup ([0-9a-f]{8})\n")
_TRAILER_BYTES = len(_TRAILER % 0)
_CHUNK_BYTES = 1 << 20


class _FileCheck(NamedTuple):
    """What a database file must be like."""

    size_bytes: int
    checksum: int
    writes: int
    """Number of transactions that it contains."""


_VOID = _FileCheck(-1, 0, -1)
"""The checksum of a file that may be changing. Earlier versions of gpulse take it for that of an older file."""
_DAMAGED = _FileCheck(-1, 0, 1 << 62)
"""The checksum of a file that is known to be damaged: no file has it, however many transactions are added."""


def write_check(path: str) -> None:
    """Store the checksum of a database file to which nobody writes at the moment.

    Raises:
        OSError: The file cannot be read, or the checksum cannot be written.
        sqlite3.Error: The file cannot be read.
    """
    check = _FileCheck(os.stat(path).st_size, file_checksum(path), _count_writes(path))
    replace_file(path + CHECK_SUFFIX, add_checksum(json.dumps(check._asdict()).encode()), 0o600)


def void_check(path: str) -> None:
    """Make the checksum of a database file void before the file changes.

    Raises:
        OSError: The file with the checksum cannot be written.
    """
    replace_file(path + CHECK_SUFFIX, add_checksum(json.dumps(_VOID._asdict()).encode()), 0o600)


def mark_damaged(path: str) -> None:
    """Make a database file count as damaged at the next start, whatever is written to it until then.

    Raises:
        OSError: The file with the checksum cannot be written.
    """
    replace_file(path + CHECK_SUFFIX, add_checksum(json.dumps(_DAMAGED._asdict()).encode()), 0o600)


def has_check(path: str) -> bool:
    """Whether a database file has a checksum that is not void; a damaged one counts."""
    with suppress(ValueError, TypeError):
        found = _read_check(path)
        return found is not None and found != _VOID
    return True


def _read_check(path: str) -> _FileCheck | None:
    """Return what a database file must be like; None if that was never written.

    Raises:
        ValueError: The file with the checksum is damaged.
        TypeError: It is.
    """
    with suppress(FileNotFoundError), open(path + CHECK_SUFFIX, "rb") as file:
        return _FileCheck(**json.loads(strip_checksum(file.read())[0]))
    return None


def find_damage(path: str) -> str | None:
    """Return what is wrong with a database file by its checksum; None if nothing is, or if it has no checksum.

    Raises:
        OSError: A file cannot be read.
    """
    try:
        check = _read_check(path)
    except (ValueError, TypeError):
        return None  # `find_check_damage` reports it
    if check is None or check == _VOID:
        return None
    try:
        if os.stat(path).st_size == check.size_bytes and file_checksum(path) == check.checksum:
            return None
    except FileNotFoundError:
        return "the file is missing"
    with suppress(sqlite3.Error, TypeError, ValueError, IndexError):
        if _count_writes(path, is_checked=True) > check.writes:
            return None
    return "its checksum is wrong"


def find_check_damage(path: str) -> str | None:
    """Return what is wrong with the checksum of a database file itself; None if nothing is.

    Raises:
        OSError: The checksum cannot be read.
    """
    try:
        with open(path + CHECK_SUFFIX, "rb") as file:
            data, is_protected = strip_checksum(file.read())
        _FileCheck(**json.loads(data))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        return str(error)
    return None if is_protected else "its checksum is missing"


def _count_writes(path: str, *, is_checked: bool = False) -> int:
    """Return the number of transactions in the file itself, without its write-ahead log."""
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as database:
        if is_checked and database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            return 0
        row = database.execute("SELECT value FROM meta WHERE key = 'writes'").fetchone()
        return int(row[0]) if row else 0


def read_recorded_files(path: str) -> frozenset[str]:
    """Return the files of the data directory that a database file has recorded, without opening it for a writer."""
    uri = f"file:{quote(path)}?mode=ro&immutable=1"
    with suppress(sqlite3.Error, ValueError, TypeError), closing(sqlite3.connect(uri, uri=True)) as database:
        row = database.execute("SELECT value FROM meta WHERE key = 'files'").fetchone()
        return frozenset(json.loads(row[0])) if row else frozenset()
    return frozenset()


def write_backup(path: str) -> None:
    """Copy a database file to which nobody writes at the moment, with a checksum.

    Raises:
        OSError: The backup cannot be written; the last one is unchanged.
    """
    part = f"{path}{BACKUP_SUFFIX}.part"
    check = 0
    with open(path, "rb") as source, open(part, "wb", opener=_open_private) as target:
        while chunk := source.read(_CHUNK_BYTES):
            check = crc32(chunk, check)
            target.write(chunk)
        target.write(_TRAILER % check)
        target.flush()
        os.fsync(target.fileno())
    os.replace(part, path + BACKUP_SUFFIX)
    sync_directory(os.path.dirname(path))


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def find_backup_damage(path: str) -> str | None:
    """Return what is wrong with the backup of a database file; None if nothing is, or if there is none.

    Raises:
        OSError: The backup cannot be read.
    """
    backup = path + BACKUP_SUFFIX
    try:
        size = os.stat(backup).st_size - _TRAILER_BYTES
        with open(backup, "rb") as file:
            check, rest = 0, max(0, size)
            while chunk := file.read(min(rest, _CHUNK_BYTES)):
                check = crc32(chunk, check)
                rest -= len(chunk)
            found = _TRAILER_PATTERN.fullmatch(file.read())
    except FileNotFoundError:
        return None
    if found is None or size < 0:
        return "the file is truncated"
    return None if int(found[1], 16) == check else "its checksum is wrong"


def copy_backup(path: str, target: str) -> bool:
    """Copy the backup of a database file to a path; return False if there is no good backup.

    Raises:
        OSError: The backup cannot be read, or the copy cannot be written.
    """
    if not os.path.exists(path + BACKUP_SUFFIX) or find_backup_damage(path) is not None:
        return False
    with open(path + BACKUP_SUFFIX, "rb") as file:
        replace_file(target, file.read()[:-_TRAILER_BYTES], 0o600)
    return True


def restore_database(path: str, reason: str) -> Damage:
    """Move a damaged database file aside, and put its backup into its place if there is a good one.

    Args:
        path: The database file, in the data directory.
        reason: What is wrong with it.

    Raises:
        DiskError: The files cannot be moved or written.
    """
    directory, name = os.path.split(path)
    with disk_errors(f"cannot restore {path}"):
        with suppress(FileNotFoundError):
            os.unlink(path + CHECK_SUFFIX)
        moved = None
        for suffix in _SIDE_FILES:
            if os.path.exists(path + suffix):
                moved = set_aside(directory, path + suffix, name + suffix) or moved
        has_backup = copy_backup(path, path)
        if has_backup:
            with suppress(sqlite3.Error):
                write_check(path)
    affects = (
        "the file was restored from its backup and the log"
        if has_backup
        else "nodes were restored from the history, and the events of the last minutes from the log; "
        "earlier sessions, events, findings and processes are missing"
    )
    return Damage(path, reason, affects, moved_to=moved and f"{directory}/damaged")
