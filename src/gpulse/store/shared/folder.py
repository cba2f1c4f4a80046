"""The folder of one head in the shared directory: files of lines that are only ever appended to, and a sign of life.

A line holds a stretch of the head's log: what it tells of it, and up to which position. It counts once it is whole. A head
begins a file of its own whenever it starts, or when writing failed, so that what a crash left unfinished stays as it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpulse.store.disk import sync_directory, write_at
from gpulse.store.shared.facts import Told

FACTS = re.compile(r"facts-(\d{6,})\.jsonl")
HEAD = re.compile(r"[0-9a-f][0-9a-f-]{7,63}")
FILE_BYTES = 64 << 20
"""A file that is longer is not appended to any more."""
LINE_BYTES = 512 << 10
"""A line gets no more facts once it is so long."""
_LIFE = "head.json"
_UNFINISHED = "facts.unfinished"
_TAIL_BYTES = 1 << 20


class Life(NamedTuple):
    """What a head says of itself."""

    id: str
    host: str
    started: float
    alive: float
    """When it said so, on its clock."""
    newest: float | None = None
    """When it got frames last."""
    shared_to: int = 0
    """Up to which position of its log everything is told."""
    ended: bool = False
    """True when it went on purpose."""
    written: float = 0.0
    """When that was, on the file server's clock."""


def head_ids(directory: str) -> list[str]:
    """The heads that have a folder.

    Raises:
        OSError: They cannot be listed.
    """
    with os.scandir(directory) as found:
        return sorted(entry.name for entry in found if HEAD.fullmatch(entry.name))


def read_life(directory: str, head: str) -> Life | None:
    """What a head said of itself last; None when that cannot be understood.

    Raises:
        OSError: It cannot be read.
    """
    try:
        with open(f"{directory}/{head}/{_LIFE}", encoding="utf-8") as file:
            document = json.load(file)
            document["written"] = os.fstat(file.fileno()).st_mtime
        return Life(**{name: document[name] for name in Life._fields if name in document})
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_life(directory: str, life: Life) -> float:
    """Say how this head is; when that was, on the file server's clock.

    Raises:
        OSError: It cannot be written.
    """
    path = f"{directory}/{life.id}/{_LIFE}"
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(life._asdict(), file)
        file.flush()
        os.fsync(file.fileno())
        written = os.fstat(file.fileno()).st_mtime
    os.replace(f"{path}.new", path)
    return written


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
        spelled += [json.dumps(fact, separators=(",", ":"), allow_nan=False).encode() for fact in facts]
        size += sum(map(len, spelled[len(spelled) - len(facts) :]))
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
            sync_directory(self.path)
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> None:
        """Append a line; it is on disk when this returns.

        Raises:
            OSError: That is not certain; the next file has to be begun.
        """
        if self._file is None:
            raise ValueError("no file is begun")
        before = self._size
        try:
            self._write(line)
            os.fsync(self._file)
        except BaseException:
            with suppress(OSError):  # else others stop at what is not whole
                os.ftruncate(self._file, before)
            self.close()
            raise

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


class Stretch(NamedTuple):
    """A part of what a head tells."""

    file: int
    """The file in which it ends."""
    offset: int
    """The byte after it."""
    position: int
    """Up to which position of that head's log it reaches; 0 when that is not told."""
    facts: list[Told]
    unreadable: int
    """How many lines could not be understood."""


def read_on(
    folder: str, file: int, offset: int, position: int, *, most_bytes: int = 1 << 20
) -> Stretch | None:
    """What a head tells after a place; None when that is nothing yet.

    Args:
        folder: The head's.
        file: Up to which file it was read; 0 at first.
        offset: Up to which byte of it.
        position: Up to which position of that head's log it was read: what is told again is left out.
        most_bytes: About so much at once.

    Raises:
        OSError: It cannot be read.
    """
    numbers = file_numbers(folder)  # before a file is read: what has a successor is complete
    if file not in numbers:
        later = [number for number in numbers if number > file]
        if not later:
            return None
        file, offset = later[0], 0
    data = _read(file_path(folder, file), offset, most_bytes)
    whole = data.rfind(b"\n") + 1
    if not whole:
        later = [number for number in numbers if number > file]
        return Stretch(later[0], 0, 0, [], 0) if later else None
    facts, reached, unreadable = _understood(data[: whole - 1].split(b"\n"), position)
    return Stretch(file, offset + whole, reached, facts, unreadable)


def _read(path: str, offset: int, most_bytes: int) -> bytes:
    """Bytes of a file from a place on: many, or up to the end of a line that is longer."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(most_bytes)
        while data and b"\n" not in data:
            more = file.read(most_bytes)
            if not more:
                break
            data += more
        return data


def _understood(lines: Sequence[bytes], position: int) -> tuple[list[Told], int, int]:
    facts: list[Told] = []
    unreadable = reached = 0
    for line in lines:
        try:
            document: dict[str, Any] = json.loads(line)
            told = [fact for fact in document["facts"] if not 0 < fact["position"] <= position]
            position = max(position, int(document["to"]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            unreadable += 1
            continue
        facts += told
        reached = position
    return facts, reached, unreadable
