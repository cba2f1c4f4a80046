"""The folder of one head in the shared directory: files of lines that are only ever appended to, and a sign of life.

A line holds a stretch of the head's log: what it tells of it, and up to which position. It counts once it is whole. A head
begins a file of its own whenever it starts, or when writing failed, so that what a crash left unfinished stays as it is.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from gpulse.store.disk import sync_directory, write_at
from gpulse.store.shared.facts import Told
from gpulse.store.shared.life import read_life

FACTS = re.compile(r"facts-(\d{6,})\.jsonl")
FILE_BYTES = 64 << 20
"""A file that is longer is not appended to any more."""
LINE_BYTES = 512 << 10
"""A line gets no more facts once it is so long."""
_UNFINISHED = "facts.unfinished"
_TAIL_BYTES = 1 << 20


def file_numbers(folder: str) -> list[int]:
    """The numbers of a head's files, oldest first.

    Raises:
        OSError: They cannot be listed.
    """
    with suppress(FileNotFoundError):
        found = (FACTS.fullmatch(name) for name in os.listdir(folder))
        return sorted(int(match[1]) for match in found if match)
    return []


def file_path(folder: str, number: int) -> str:
    """Where a head's file is."""
    return f"{folder}/facts-{number:06d}.jsonl"


def lines_of(told: Iterable[tuple[int, Sequence[Told]]], last: int) -> Iterator[tuple[int, bytes]]:
    """Lines, and up to which position each of them tells everything.

    Args:
        told: What to tell of entries, by position and in their order.
        last: Up to which position that is everything.
    """
    spelled: list[bytes] = []
    size = 0
    for position, facts in told:
        for fact in facts:
            with suppress(ValueError, RecursionError):  # an earlier version took in what no JSON holds
                line = json.dumps(fact, separators=(",", ":"), allow_nan=False).encode()
                spelled.append(line)
                size += len(line)
        if size >= LINE_BYTES:
            yield position, _line(position, spelled)
            spelled, size = [], 0
    if spelled:
        yield last, _line(last, spelled)


def _line(position: int, spelled: Sequence[bytes]) -> bytes:
    return b'{"to":%d,"facts":[%b]}\n' % (position, b",".join(spelled))


class Folder:
    """The writer of one head's folder."""

    def __init__(self, directory: str, head: str) -> None:
        """Prepare to write; nothing is touched yet.

        Args:
            directory: The one that is shared.
            head: Whose folder it is.
        """
        self.path = f"{directory}/{head}"
        self._directory = directory
        self._head = head
        self._file: int | None = None
        self._number = 0
        """The file's, or the last one's."""
        self._size = 0
        self._first = 0
        """How long the beginning of the file is."""

    def reached(self) -> int:
        """Up to which position everything was told before; makes the folder when there is none.

        Raises:
            OSError: It cannot be read or made.
        """
        os.makedirs(self.path, mode=0o750, exist_ok=True)
        life = read_life(self._directory, self._head)
        told = 0 if life is None else life.shared_to
        for number in reversed(file_numbers(self.path)):
            last = _last_position(file_path(self.path, number))
            if last is not None:
                return max(told, last)
        return told

    @property
    def is_there(self) -> bool:
        """Whether what is appended to is what others see: somebody may remove the folder, or mount something over it.

        Raises:
            OSError: That cannot be seen.
        """
        if self._file is None:
            return not self._number or os.path.isdir(self.path)
        try:
            return os.path.samestat(os.fstat(self._file), os.stat(file_path(self.path, self._number)))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever told here.

        Raises:
            OSError: That cannot be seen.
        """
        return not file_numbers(self.path)

    @property
    def is_begun(self) -> bool:
        """Whether there is a file to append to."""
        return self._file is not None and self._size - self._first < FILE_BYTES

    def begin(self, first: Iterable[bytes], now: float) -> None:
        """Begin the next file.

        Args:
            first: Its first lines.
            now: Epoch seconds.

        Raises:
            OSError: It cannot be written.
        """
        self.close()
        numbers = file_numbers(self.path)
        number = max(numbers[-1] + 1 if numbers else 1, round(now))  # no file in another directory had it
        path, unfinished = file_path(self.path, number), f"{self.path}/{_UNFINISHED}"
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
        self._file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        self._size = 0
        try:
            for line in first:
                self._write(line)
            self._first = self._size
            os.fsync(self._file)
            os.rename(unfinished, path)  # all of it is there at once: the number was never another file's
            self._number = number
            sync_directory(self.path)
        except BaseException:
            self.close()
            with suppress(OSError):  # it takes room that others may need
                os.unlink(unfinished)
            raise

    def append(self, line: bytes) -> None:
        """Append a line; it is on disk when this returns.

        Raises:
            OSError: That is not certain.
        """
        if self._file is None:
            raise ValueError("no file is begun")
        try:
            self._write(line)
        except OSError:  # nobody saw all of it, so that another line can take its place
            self._cut()
            raise
        try:
            os.fsync(self._file)
        except BaseException:  # somebody may have: what follows belongs into the next file
            self.close()
            raise

    def _cut(self) -> None:
        """Remove what is not whole at the end of the file; where that cannot be done, the next one is begun."""
        try:
            if self._file is not None:
                os.ftruncate(self._file, self._size)
        except OSError:
            self.close()

    def _write(self, line: bytes) -> None:
        assert self._file is not None  # noqa: S101  both callers have one
        write_at(self._file, line, self._size)
        self._size += len(line)

    def drop_before(self, time: float) -> list[str]:
        """Remove the files that were written to their end before a time; the newest always stays.

        Raises:
            OSError: They cannot be removed.
        """
        return drop_files(self.path, time)

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)


def drop_files(folder: str, time: float) -> list[str]:
    """Remove a head's files that were written to their end before a time; the newest always stays.

    Raises:
        OSError: They cannot be removed.
    """
    dropped = []
    for number in file_numbers(folder)[:-1]:
        path = file_path(folder, number)
        if os.stat(path).st_mtime >= time:
            break
        os.unlink(path)
        dropped.append(os.path.basename(path))
    return dropped


def _last_position(path: str) -> int | None:
    """The position in the last whole line of a file; None when there is no such line."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        length = _TAIL_BYTES
        while True:
            begin = max(0, end - length)
            file.seek(begin)
            *lines, _ = file.read(end - begin).split(b"\n")
            if begin > 0:
                lines = lines[1:]  # its beginning is further up
            for line in reversed(lines):
                with suppress(ValueError, TypeError, LookupError):
                    return int(json.loads(line)["to"])
            if begin == 0:
                return None
            length *= 2
