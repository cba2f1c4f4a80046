"""Output file of a session: it appears only when it is complete, and never replaces another file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self

from gpulse.atomic_files import move_to_new_name, resolve_output, sync_directory
from gpulse.errors import RecordingError, UsageError
from gpulse.model.session import check_session_name

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_MAX_FILE_NUMBERS = 100_000
_DRAFT_NAME = re.compile(
    r"\.[A-Za-z0-9][A-Za-z0-9._-]*\.(?:json|jsonl|csv|parquet)(?:\.[0-9]+)?\.gpulse-part"
)
"""No other program names its temporary files like this."""


class SessionFile:
    """File under a temporary name, until `publish` gives it its final name.

    Without `publish` it is removed. After a crash it stays under the temporary name, which the next writer reuses.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, suffix: str, *, taken: Collection[str] = ()
    ) -> None:
        """Create the file.

        Args:
            directory: Directory of the file.
            name: Name of the session.
            suffix: Extension with its dot.
            taken: Paths that are reserved for other files.

        Raises:
            UsageError: The name or the suffix is not allowed.
            RecordingError: No file can be created there.
        """
        if suffix not in SUFFIXES:
            raise UsageError(
                f"the name of a session file cannot end with {suffix!r}",
                hint=f"use one of {', '.join(SUFFIXES)}",
            )
        self._name, self._suffix = check_session_name(name), suffix
        self._directory = os.fspath(directory)
        self._taken = taken
        try:
            self._part, descriptor = self._draft()
        except OSError as error:
            raise RecordingError(
                f"cannot create a file in {self._directory}: {error.strerror}",
                hint="choose another directory with -o",
            ) from error
        self.file: BinaryIO = os.fdopen(descriptor, "wb")
        """Open file that the session is written to."""
        self._mode = 0o600
        self.path: str | None = None
        """Final path after `publish`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def make_private(self) -> None:
        """Let only the owner read the file.

        Raises:
            OSError: The file system does not permit it.
        """
        self._mode = stat.S_IMODE(os.fstat(self.file.fileno()).st_mode)
        os.fchmod(self.file.fileno(), self._mode & 0o700)

    def undo_private(self) -> None:
        """Let others read the file again, as the umask permits.

        Raises:
            OSError: The file system does not permit it.
        """
        os.fchmod(self.file.fileno(), self._mode)

    def publish(self) -> str:
        """Flush the file to disk and give it its final name, with a number when that is taken.

        Raises:
            RecordingError: The file cannot be written, for example because the disk is full; then it is removed.
        """
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.path = self._named()
            sync_directory(self._directory)
        except OSError as error:
            raise RecordingError(
                f"cannot write {self._name}{self._suffix} in {self._directory}: {error.strerror}",
                hint="check whether the disk is full",
            ) from error
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Remove the file unless it is published."""
        if not self.file.closed:
            with suppress(OSError):
                os.unlink(self._part)  # before the lock is released, so that no other writer reuses it
            with suppress(OSError):  # a full disk, which `publish` has reported already
                self.file.close()

    def _draft(self) -> tuple[str, int]:
        """Return the path and descriptor of a temporary file: a new one, or one of ours whose writer has died."""
        resolve_output(self._directory)
        for number in range(1, _MAX_FILE_NUMBERS):
            count = "" if number == 1 else f".{number}"
            path = os.path.join(self._directory, f".{self._name}{self._suffix}{count}.gpulse-part")
            if (descriptor := _open_draft(path, create=True)) is not None:
                os.ftruncate(descriptor, 0)
                return path, descriptor
        raise OSError(errno.EEXIST, "too many files with this name")

    def _named(self) -> str:
        for path in _candidate_paths(self._directory, self._name, self._suffix):
            if path in self._taken:
                continue
            try:
                move_to_new_name(self._part, path)
            except FileExistsError:
                continue
            return path
        raise OSError(errno.EEXIST, "too many files with this name")


def find_free_path(
    directory: str | os.PathLike[str], name: str, suffix: str, *, taken: Collection[str] = ()
) -> str | None:
    """Return the path that a session's file would get now; None when all candidates are in use.

    Args:
        directory: Directory of the file.
        name: Name of the session.
        suffix: Extension with its dot.
        taken: Paths that are reserved for other files.
    """
    paths = _candidate_paths(os.fspath(directory), check_session_name(name), suffix)
    return next((path for path in paths if path not in taken and not os.path.lexists(path)), None)


def remove_stale_drafts(directory: str | os.PathLike[str]) -> list[str]:
    """Remove the unfinished files of dead writers of this user in a directory, and return their names.

    Drafts of running writers are locked and stay, and so do those of other users.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if _DRAFT_NAME.fullmatch(name))
    except OSError:
        return []
    return [name for name in names if _remove_draft(os.path.join(directory, name))]


def _remove_draft(path: str) -> bool:
    try:
        descriptor = _open_draft(path, create=False)
        if descriptor is None:
            return False
        try:
            os.unlink(path)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _candidate_paths(directory: str, name: str, suffix: str) -> Iterator[str]:
    """Yield the paths that a session's file may get, in order of preference: run.json, run-2.json, run-3.json."""
    yield os.path.join(directory, f"{name}{suffix}")
    for number in range(2, _MAX_FILE_NUMBERS):
        yield os.path.join(directory, f"{name}-{number}{suffix}")


def _open_draft(path: str, *, create: bool) -> int | None:
    """Open and lock a temporary file of this user; None if it belongs to another, is in use, or is not a draft.

    Raises:
        OSError: No file can be created there.
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666) if create else os.open(path, flags)
    except FileExistsError:
        return _open_draft(path, create=False)
    except OSError:
        if create:
            raise
        return None  # it is a link, a directory, a pipe, or gone, or we may not write it
    try:
        if _lock_draft(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock_draft(path: str, descriptor: int) -> bool:
    """Lock a file; return False if it is not a file of this user, is locked already, or has been renamed."""
    mine = os.fstat(descriptor)
    if not stat.S_ISREG(mine.st_mode) or mine.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(path, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino, there.st_nlink) == (mine.st_dev, mine.st_ino, 1)
