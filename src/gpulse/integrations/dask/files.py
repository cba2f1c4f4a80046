"""A worker's record as CSV: reading it from files or from bytes, line by line, and the files of an export."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gpulse.errors import RecordingError
from gpulse.integrations.dask.lines import BLOCK_BYTES, broken, cells_of, rows_of, whole_lines
from gpulse.integrations.dask.publishing import Kind, publish
from gpulse.integrations.dask.tracking import ALWAYS, ArgumentError

_NAME = re.compile(r"worker-(0|[1-9]\d{0,8})\.csv")
_LONGEST_HEADER = 1 << 20
_MOST_NUMBER = (1 << 63) - 1
_MOST_SECONDS = 1e12
_BETWEEN = '"~~"'
"""Between cells that are read at once: one that goes on in the next would have it inside."""
_decode = json.JSONDecoder(parse_constant=lambda _: None).decode


def file_name(index: int) -> str:
    """What the file of a worker is called."""
    return f"worker-{index}.csv"


class Batch(NamedTuple):
    """Some lines of a record that follow each other, by column."""

    source: str
    """What the record is called in errors."""
    first_line: int
    columns: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    """Of each column the text of its cells."""

    @property
    def jobs(self) -> list[int]:
        """The job of each line."""
        return self._numbers(0, _count)

    @property
    def dags(self) -> list[int]:
        """The graph of each line."""
        return self._numbers(1, _count)

    @property
    def timestamps(self) -> list[float]:
        """The seconds of each line."""
        return self._numbers(2, _seconds)

    def values(self, metric: str) -> list[Any]:
        """What a metric's cells say, None where they are empty.

        Raises:
            RecordingError: A cell is no JSON.
        """
        cells = self.cells[self.columns.index(metric)]
        found = _at_once(cells)
        return self._each(cells, _value) if found is None else found

    def _numbers(self, place: int, read: Any) -> list[Any]:
        cells = self.cells[place]
        try:
            return list(map(read, cells))
        except ValueError:
            return self._each(cells, read)

    def _each(self, cells: Sequence[str], read: Any) -> list[Any]:
        """Cell by cell, so that the one that is broken can be named."""
        found = []
        for place, cell in enumerate(cells):
            try:
                found.append(read(cell))
            except (ValueError, RecursionError) as error:
                raise broken(self.source, self.first_line + place, f"{_quoted(cell)} is no value") from error
        return found


class WorkerTable(NamedTuple):
    """A worker's record, which can be gone through any number of times."""

    source: str
    """What it is called in errors."""
    columns: tuple[str, ...]
    chunks: Iterable[bytes]
    """The lines after the header."""

    @property
    def tracked(self) -> tuple[str, ...]:
        """The metrics in it."""
        return self.columns[len(ALWAYS) :]

    def batches(self) -> Iterator[Batch]:
        """All lines, some thousands at a time; a last one that was cut off is left out.

        Raises:
            RecordingError: A line is broken.
        """
        line = 2
        for text in whole_lines(self.chunks, self.source):
            rows = rows_of(self.source, line, text, len(self.columns))
            yield Batch(self.source, line, self.columns, tuple(zip(*rows, strict=True)))
            line += len(rows)


def parse(header: bytes, chunks: Iterable[bytes], source: str = "the record") -> WorkerTable:
    """A record whose bytes are at hand.

    Args:
        header: Its first line, with or without its end.
        chunks: What follows.
        source: What to call it in errors.

    Raises:
        RecordingError: It is no record of ours.
    """
    again = list(chunks) if isinstance(chunks, Iterator) else chunks
    return WorkerTable(source, _columns(header, source), again)


def read_table(path: str | os.PathLike[str]) -> WorkerTable:
    """The record in a file, which is read while its lines are gone through.

    Raises:
        ArgumentError: There is no such file.
        RecordingError: It cannot be read, or is no record of ours.
    """
    file = _RecordFile(Path(path))
    return parse(file.header(), file, file.path.name)


def worker_files(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """The files of an export by the index of their worker, in order.

    Raises:
        ArgumentError: There is no such folder, or no such file in it.
        RecordingError: The folder cannot be looked at.
    """
    place = Path(folder)
    hint = "the folder that Monitor.to_csv() was given"
    if not place.exists():
        raise ArgumentError(f"there is no folder {place}", hint=hint)
    if not place.is_dir():
        raise ArgumentError(f"{place} is no folder", hint=hint)
    try:
        names = os.listdir(place)
    except OSError as error:
        raise RecordingError(f"{place} cannot be looked at: {error.strerror}", hint=hint) from error
    found = {int(match[1]): place / name for name in names if (match := _NAME.fullmatch(name))}
    if not found:
        raise ArgumentError(f"there is no worker-0.csv, worker-1.csv, … in {place}", hint=hint)
    return dict(sorted(found.items()))


def read_folder(folder: str | os.PathLike[str]) -> dict[int, WorkerTable]:
    """The records of an export by the index of their worker, in order.

    Raises:
        ArgumentError: There is no such folder, or no record in it.
        RecordingError: One cannot be read, or is no record of ours.
    """
    return {index: read_table(path) for index, path in worker_files(folder).items()}


def write_files(
    folder: str | os.PathLike[str], records: Mapping[int, tuple[bytes, Iterable[bytes]]]
) -> list[Path]:
    """Write an export: all files or none, and none of an earlier export stays beside them.

    Args:
        folder: Where to; it is made when it is not there.
        records: The header and the lines of each worker.

    Returns:
        The files, in the order of the workers.

    Raises:
        ArgumentError: No files can be made there, or one there is not ours to replace.
        RecordingError: The disk is full or broken.
    """
    writers = {file_name(index): partial(_write, *records[index]) for index in sorted(records)}
    return publish(Path(folder), writers, Kind(_NAME, _is_record))


class _RecordFile:
    """A file; going through it gives what follows its header."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def header(self) -> bytes:
        """Its first line."""
        if self.path.is_dir():
            raise ArgumentError(f"{self.path} is a folder", hint=f"one file of it, such as {file_name(0)}")
        with self._open() as file:
            header = file.readline(_LONGEST_HEADER)
        if not header.endswith(b"\n"):
            raise _foreign(self.path.name)
        return header

    def __iter__(self) -> Iterator[bytes]:
        with self._open() as file:
            file.readline(_LONGEST_HEADER)
            while block := file.read(BLOCK_BYTES):
                yield block

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except FileNotFoundError as error:
            raise ArgumentError(
                f"there is no file {self.path}", hint="a file that Monitor.to_csv() wrote"
            ) from error
        except OSError as error:
            raise RecordingError(f"{self.path} cannot be read: {error.strerror}") from error


def _write(header: bytes, chunks: Iterable[bytes], file: BinaryIO) -> None:
    file.write(header.rstrip(b"\n") + b"\n")
    file.writelines(chunks)


def _is_record(path: Path) -> bool:
    begin = ",".join(ALWAYS).encode()
    with path.open("rb") as file:
        return file.read(len(begin)) == begin


def _columns(header: bytes, source: str) -> tuple[str, ...]:
    try:
        text = header.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _foreign(source) from error
    columns = tuple(cells_of(text) or ())
    if columns[: len(ALWAYS)] != ALWAYS:
        raise _foreign(source)
    for place, name in enumerate(columns):
        if name in columns[:place]:
            raise RecordingError(f"{source}, line 1: two columns are called {_quoted(name)}")
    return columns


def _foreign(source: str) -> RecordingError:
    return RecordingError(
        f"{source}, line 1: a worker's record begins with {','.join(ALWAYS)}, this does not",
        hint=f"a file that Monitor.to_csv() wrote, such as {file_name(0)}",
    )


def _value(cell: str) -> Any:
    return _decode(cell) if cell else None


def _at_once(cells: Sequence[str]) -> list[Any] | None:
    """What the cells say, in a fraction of the time that each alone would take; None when not every cell is JSON."""
    text = f",{_BETWEEN},".join([cell or "null" for cell in cells])
    try:
        found: list[Any] = _decode(f"[{text}]")
    except (ValueError, RecursionError):
        return None
    between = len(cells) - 1
    is_whole = len(found) == len(cells) + between and text.count(_BETWEEN) == between
    return found[::2] if is_whole and found[1::2].count(_BETWEEN[1:-1]) == between else None


def _count(cell: str) -> int:
    number = int(cell)
    if not 0 <= number <= _MOST_NUMBER:
        raise ValueError(cell)
    return number


def _seconds(cell: str) -> float:
    number = float(cell)
    if not abs(number) <= _MOST_SECONDS:
        raise ValueError(cell)
    return number


def _quoted(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else f"{cell[:39]}…")
