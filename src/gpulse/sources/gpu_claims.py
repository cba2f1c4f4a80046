"""Claims on GPUs of this machine: lock files in /dev/shm, which every user can check.

`gpulse wait` claims the GPUs that it gives to a command, so that two of them never choose the same GPU, and harvests
give way to a claim. The kernel releases a claim when its process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from typing import NamedTuple

from gpulse.sources.procfs import Roots, try_read

_UNSAFE = re.compile(r"[^A-Za-z0-9-]")
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNUSABLE = frozenset((errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENODEV))
"""Errors of opening a link, a file without permissions, a socket or a device."""
_MAX_ATTEMPTS = 100
"""The file may vanish between opening and locking it, whenever its last holder ends."""


class GpuClaim(NamedTuple):
    """A claim that this process holds."""

    path: str
    descriptor: int

    def release(self) -> None:
        """Give the GPU back."""
        with suppress(OSError):  # in /dev/shm only the owner may remove a file
            os.unlink(self.path)
        os.close(self.descriptor)


class Claimant(NamedTuple):
    """The holder of a claim."""

    pid: int | None
    """None when its process is not visible here."""


def claim_path(uuid: str, roots: Roots) -> str:
    """Return the lock file of a GPU."""
    return f"{roots.dev}/shm/gpulse-wait-{_UNSAFE.sub('_', uuid)}.lock"


def claim_gpu(uuid: str, roots: Roots) -> GpuClaim | None:
    """Claim a GPU; None if another process has claimed it, or if its lock file cannot be used (`find_lock_problem`).

    Raises:
        OSError: There is no place for the lock file.
    """
    path = claim_path(uuid, roots)
    for _ in range(_MAX_ATTEMPTS):
        try:
            descriptor = _open(path)
        except _UnusableLockError:
            return None
        if descriptor is None:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        if _is_same_file(path, descriptor):
            return GpuClaim(path, descriptor)
        os.close(descriptor)
    return None


def find_claimant(uuid: str, roots: Roots) -> Claimant | None:
    """Return who has claimed a GPU; None if nobody has."""
    try:
        descriptor = _open_existing(claim_path(uuid, roots))
    except (OSError, _UnusableLockError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return Claimant(_find_holder(os.fstat(descriptor), roots))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def find_lock_problem(uuid: str, roots: Roots) -> str | None:
    """Return why the lock file of a GPU cannot be used, with its name; None if nothing prevents it.

    Any user can create a file with this name, so one that is not a lock file only makes its GPU unavailable.
    """
    path = claim_path(uuid, roots)
    try:
        os.close(_open_existing(path))
    except _UnusableLockError as error:
        return f"its lock file {error}; remove {path}"
    except OSError:
        return None
    return None


class _UnusableLockError(Exception):
    """What has the name of the lock file is not one, or cannot be opened."""


def _open_existing(path: str) -> int:
    """Open a lock file without following links and without waiting, whatever another user may have put there."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            raise _UnusableLockError("cannot be opened") from error
        raise _UnusableLockError("is not a regular file") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _UnusableLockError("is not a regular file")
    return descriptor


def _open(path: str) -> int | None:
    """Open the lock file, and create it if needed; None if another process created it at the same time.

    A file of another user is opened without O_CREAT, which the kernel refuses for it in a directory like /dev/shm.
    """
    try:
        return _open_existing(path)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        os.fchmod(descriptor, 0o644)  # whatever the umask is: other users must be able to open it
        return descriptor


def _is_same_file(path: str, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False


def _find_holder(file: os.stat_result, roots: Roots) -> int | None:
    """Return the process that has locked a file, from the kernel's list of locks."""
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in (try_read(f"{roots.proc}/locks") or b"").decode("ascii", "replace").splitlines():
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK" and words[5] == place and words[4].isdecimal():
            return int(words[4]) or None
    return None
