"""Turn disk errors of the operating system into errors with a hint on what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from gpulse.errors import DiskError

_HINTS = {
    errno.ENOSPC: "free some space on that file system; writing resumes by itself once there is space",
    errno.EDQUOT: "free some space or request a larger quota: the disk quota of this user is exhausted",
    errno.EFBIG: "raise the file size limit, which is too low (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only: check `dmesg` and remount it, or use another directory",
    errno.EIO: "see `dmesg`: the disk or file server reports an I/O error",
    errno.EACCES: "check the owner and permissions of the directory",
    errno.EMFILE: "raise the limit on open files, which this process has reached (see `ulimit -n`)",
}


def disk_error(failure: str, error: OSError) -> DiskError:
    """Return the DiskError for an error of the operating system; `failure` says what failed: "cannot read …"."""
    return DiskError(f"{failure}: {error.strerror}", hint=_HINTS.get(error.errno or 0))


@contextmanager
def disk_errors(failure: str) -> Iterator[None]:
    """Raise errors of the operating system as DiskErrors."""
    try:
        yield
    except OSError as error:
        raise disk_error(failure, error) from error


def write_at(file: int, data: bytes, offset: int) -> None:
    """Write all data at an offset, usually with one system call.

    Raises:
        OSError: Writing failed; part of the data may be in the file.
    """
    written = os.pwrite(file, data, offset)
    while written < len(data):
        more = os.pwrite(file, memoryview(data)[written:], offset + written)
        if not more:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written += more
