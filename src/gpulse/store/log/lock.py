"""Lock file of a log: at most one writer. The lock ends with the process, and the file contains its PID."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from gpulse.atomic_files import make_directories
from gpulse.errors import LogError
from gpulse.store.disk_errors import disk_errors


def acquire_lock(directory: str) -> int:
    """Lock a directory, creating it if needed; return the file descriptor that releases the lock when closed.

    A forked child that does not exec shares the lock, and keeps it after this process has ended.

    Raises:
        LogError: Another process has the lock.
        DiskError: The directory cannot be created or written.
    """
    path = f"{directory}/lock"
    with disk_errors(f"cannot open {path}"):
        make_directories(directory)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise LogError(
                f"cannot open the log in {directory}: {f'process {owner}' if owner else 'another process'} is writing to it",
                hint="stop that process, or use another directory",
            ) from None
        except BaseException:
            os.close(file)
            raise
    with suppress(OSError):  # the disk may be full; the PID is only informative
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def find_writer(directory: str) -> int | None:
    """Return the PID of the process that writes a data directory: 0 if it is unknown, None if there is no writer.

    This does not acquire the lock.
    """
    try:
        file = os.open(f"{directory}/log/lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(file, 20, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(file)
    return None
