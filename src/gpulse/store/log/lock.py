"""One writer a log: an exclusive lock that ends with the process, and a file that says who holds it."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from gpulse.errors import LogError
from gpulse.store.disk import disk_errors, sync_directory


def take_lock(directory: str) -> int:
    """Make the directory when it is not there, and lock it; gives the file to close afterwards.

    A forked child that does not exec shares the lock and keeps it when this process ends.

    Raises:
        LogError: Another writer has it.
        DiskError: The directory cannot be made or written.
    """
    path = f"{directory}/lock"
    with disk_errors(f"open {path}"):
        if not os.path.isdir(directory):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            sync_directory(os.path.dirname(os.path.abspath(directory)))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file, 20, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise LogError(
                f"the log in {directory} is being written by {f'process {owner}' if owner else 'another process'}",
                hint="stop that process first, or use another directory",
            ) from None
        except BaseException:
            os.close(file)
            raise
    with suppress(OSError):  # a full disk: who holds it is a courtesy, the lock is not
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def writer_of(directory: str) -> int | None:
    """Return the process that writes a data directory, 0 when its pid is unknown, and None when there is none.

    The lock is not taken.
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
