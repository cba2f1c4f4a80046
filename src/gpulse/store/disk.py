"""What the operating system says about a disk, in words and with the next thing to try."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpulse.errors import DiskError

_HINTS = {
    errno.ENOSPC: "free some space on that filesystem; writing goes on by itself once there is room",
    errno.EDQUOT: "the quota of this user is used up: free some space, or ask for more",
    errno.EFBIG: "the limit on file sizes is too low: see `ulimit -f`",
    errno.EROFS: "the filesystem is mounted read-only: see `dmesg`, then remount it, or use another directory",
    errno.EIO: "the disk or file server does not answer properly: see `dmesg`",
    errno.EACCES: "check who owns the directory",
    errno.EMFILE: "this process has too many files open: see `ulimit -n`",
}


def disk_error(doing: str, error: OSError) -> DiskError:
    """The error to raise for what the operating system refused."""
    return DiskError(f"cannot {doing}: {error.strerror}", hint=_HINTS.get(error.errno or 0))


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turns what the operating system refuses into a DiskError."""
    try:
        yield
    except OSError as error:
        raise disk_error(doing, error) from error


def sync_directory(directory: str) -> None:
    """Make the creation and removal of files in it last.

    Raises:
        OSError: It cannot be synced.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_at(file: int, data: bytes, offset: int) -> None:
    """Write all of it, with one call unless the disk fills up on the way.

    Raises:
        OSError: It cannot be written; a part of it may be there.
    """
    written = os.pwrite(file, data, offset)
    while written < len(data):
        more = os.pwrite(file, memoryview(data)[written:], offset + written)
        if not more:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written += more
