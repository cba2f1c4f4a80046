"""Files that sessions are written to: complete or not there, and never in place of another one."""

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

from gpulse.errors import RecordingError, UsageError
from gpulse.model.session import checked_name

SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
_MOST_TRIES = 100_000
_DRAFT = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._-]*\.(?:json|jsonl|csv|parquet)(?:\.[0-9]+)?\.part")
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class SessionFile:
    """A file under a temporary name, until `publish` gives it its own.

    Left without that it is gone, and what a crash leaves behind carries the temporary name and is used again.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, suffix: str, *, taken: Collection[str] = ()
    ) -> None:
        """Create it.

        Args:
            directory: Where it will be.
            name: The session's.
            suffix: With its dot.
            taken: Paths that it must not get, because other files will.

        Raises:
            UsageError: It cannot be called so.
            RecordingError: No file can be made there.
        """
        if suffix not in SUFFIXES:
            raise UsageError(
                f"a session's file cannot end with {suffix!r}", hint=f"one of {', '.join(SUFFIXES)}"
            )
        self._name, self._suffix = checked_name(name), suffix
        self._directory = os.fspath(directory)
        self._taken = taken
        try:
            self._part, descriptor = self._draft()
        except OSError as error:
            raise RecordingError(
                f"no file can be made in {self._directory}: {error.strerror}",
                hint="name another directory with -o",
            ) from error
        self.file: BinaryIO = os.fdopen(descriptor, "wb")
        """Where the session goes."""
        self.path: str | None = None
        """Where it is, once it is published."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def publish(self) -> str:
        """Put what was written safely on disk and give it its name, with a number when that is taken.

        Raises:
            RecordingError: The disk is full or gone; nothing has the name then.
        """
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.path = self._named()
            _sync(self._directory)
        except OSError as error:
            raise RecordingError(
                f"cannot write {self._name}{self._suffix} in {self._directory}: {error.strerror}",
                hint="see whether the disk is full",
            ) from error
        finally:
            self.discard()
        return self.path

    def discard(self) -> None:
        """Drop what has no name yet."""
        if not self.file.closed:
            with suppress(OSError):
                os.unlink(self._part)  # before the lock goes, so that nobody takes it for an orphan
            with suppress(OSError):  # a full disk, of which `publish` told already
                self.file.close()

    def _draft(self) -> tuple[str, int]:
        """A temporary file of our own: a new one, or one whose writer is no more."""
        for number in range(1, _MOST_TRIES):
            count = "" if number == 1 else f".{number}"
            path = os.path.join(self._directory, f".{self._name}{self._suffix}{count}.part")
            flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                descriptor = os.open(path, flags, 0o666)
            except IsADirectoryError:
                continue
            try:
                if _is_ours(path, descriptor):
                    os.ftruncate(descriptor, 0)
                    return path, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise OSError(errno.EEXIST, "too many files of that name")

    def _named(self) -> str:
        for path in _paths(self._directory, self._name, self._suffix):
            if path in self._taken:
                continue
            try:
                _move(self._part, path)
            except FileExistsError:
                continue
            return path
        raise OSError(errno.EEXIST, "too many files of that name")


def create_session_file(
    directory: str | os.PathLike[str], name: str, suffix: str, *, taken: Collection[str] = ()
) -> SessionFile:
    """A new file for a session: write to its `file`, then `publish` it; the path is known only then.

    Args:
        directory: Where it will be.
        name: The session's.
        suffix: With its dot.
        taken: Paths that it must not get, because other files will.

    Raises:
        UsageError: It cannot be called so.
        RecordingError: No file can be made there.
    """
    return SessionFile(directory, name, suffix, taken=taken)


def free_path(
    directory: str | os.PathLike[str], name: str, suffix: str, *, taken: Collection[str] = ()
) -> str | None:
    """Return the path that a session's file would get now; None when every one is in use.

    Args:
        directory: Where it will be.
        name: The session's.
        suffix: With its dot.
        taken: Paths that other files will get.
    """
    paths = _paths(os.fspath(directory), checked_name(name), suffix)
    return next((path for path in paths if path not in taken and not os.path.lexists(path)), None)


def remove_stale_drafts(directory: str | os.PathLike[str]) -> list[str]:
    """Remove what writers that are no more left unfinished in a directory; the names of what is gone.

    A draft whose writer lives is locked, and stays. What cannot be looked at stays too.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if _DRAFT.fullmatch(name))
    except OSError:
        return []
    return [name for name in names if _remove_draft(os.path.join(directory, name))]


def _remove_draft(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        mine = os.fstat(descriptor)
        if not stat.S_ISREG(mine.st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(mine, os.stat(path, follow_symlinks=False)):
            return False
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _paths(directory: str, name: str, suffix: str) -> Iterator[str]:
    """Yield the paths that a session's file may have, the best first: run.json, run-2.json, run-3.json."""
    yield os.path.join(directory, f"{name}{suffix}")
    for number in range(2, _MOST_TRIES):
        yield os.path.join(directory, f"{name}-{number}{suffix}")


def _is_ours(path: str, descriptor: int) -> bool:
    """Lock a file; False when somebody else has it, or it was renamed since it was opened."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(path, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino, there.st_nlink) == (mine.st_dev, mine.st_ino, 1)


def _move(source: str, target: str) -> None:
    """Rename without ever replacing anything.

    Raises:
        FileExistsError: Something has that name.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.close(
            os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        )  # no links here: the name is ours now
        os.replace(source, target)


def _sync(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
