"""Bytes of a record as the cells of its lines, and which line is broken."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator

from gpulse.errors import RecordingError

BLOCK_BYTES = 1 << 18
"""About how much is taken apart at a time."""
_CELL = re.compile(r'(?:"([^"]*(?:""[^"]*)*)"|([^",\r]*))(,|\r?\Z)')


def broken(source: str, line: int, why: str) -> RecordingError:
    """The error about a line."""
    return RecordingError(f"{source}, line {line}: {why}", hint="export it again with Monitor.to_csv()")


def whole_lines(chunks: Iterable[bytes], source: str) -> Iterator[list[str]]:
    """The lines in lists of some thousands."""
    waiting: list[bytes] = []
    size, line = 0, 2
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= BLOCK_BYTES and b"\n" in chunk:
            whole, _, rest = b"".join(waiting).rpartition(b"\n")
            lines = _decoded(whole, source, line)
            yield lines
            line += len(lines)
            waiting, size = [rest], len(rest)
    whole, end, _ = b"".join(waiting).rpartition(b"\n")
    if end:
        yield _decoded(whole, source, line)


def _decoded(whole: bytes, source: str, first_line: int) -> list[str]:
    try:
        return whole.decode().split("\n")
    except UnicodeDecodeError as error:
        line = first_line + whole.count(b"\n", 0, error.start)
        raise broken(source, line, "it is no text") from error


def rows_of(source: str, first_line: int, lines: list[str], width: int) -> list[list[str]]:
    """The cells of each line."""
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error:
        rows = []
    if len(rows) == len(lines) and all(len(row) == width for row in rows):
        return rows
    return [_checked(source, first_line + place, line, width) for place, line in enumerate(lines)]


def _checked(source: str, number: int, line: str, width: int) -> list[str]:
    cells = cells_of(line)
    if cells is None:
        raise broken(source, number, "its quotes do not match")
    if len(cells) != width:
        raise broken(source, number, f"{len(cells)} cells where the header has {width}")
    return cells


def cells_of(line: str) -> list[str] | None:
    """The cells of one line of any length; None when its quotes do not match."""
    found, place = [], 0
    while match := _CELL.match(line, place):
        quoted, plain, end = match.groups()
        found.append(plain if quoted is None else quoted.replace('""', '"'))
        place = match.end()
        if end != ",":
            return found
    return None
