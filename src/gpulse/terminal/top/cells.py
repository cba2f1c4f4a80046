"""What the live view is made of: toned pieces of text, lines of them, and columns that fit a width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

Tone = Literal[
    "plain",
    "dim",
    "strong",
    "head",
    "bar",
    "bar_accent",
    "border",
    "title",
    "accent",
    "key",
    "good",
    "warn",
    "bad",
    "memory",
    "power",
    "level0",
    "level1",
    "level2",
    "level3",
    "level4",
    "alert",
]
"""What a piece means; the palette says how that looks. A tone never says what no word or sign says too."""

ENDLESS = 10_000


class Piece(NamedTuple):
    """Text in one tone."""

    text: str
    tone: Tone = "plain"


Line = tuple[Piece, ...]
EMPTY: Line = ()


def words(text: str, tone: Tone = "plain") -> Line:
    """A line of one piece."""
    return (Piece(text, tone),)


def width(line: Line) -> int:
    """How many cells of the terminal a line takes."""
    return sum(cell_len(piece.text) for piece in line)


def cut(text: str, cells: int, ellipsis: str) -> str:
    """The text, with its end replaced by an ellipsis when it takes more cells."""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1) + ellipsis if cells > 0 else ""


def padded(line: Line, cells: int, *, right: bool = False) -> Line:
    """The line in exactly so many cells: filled up with blanks, or cut off."""
    missing = cells - width(line)
    if missing < 0:
        return clipped(line, cells)
    if missing == 0:
        return line
    blank = Piece(" " * missing)
    return (blank, *line) if right else (*line, blank)


def clipped(line: Line, cells: int) -> Line:
    """The first so many cells of a line."""
    kept: list[Piece] = []
    for piece in line:
        taken = min(cells, cell_len(piece.text))
        if taken > 0:
            kept.append(
                piece
                if taken == cell_len(piece.text)
                else Piece(set_cell_size(piece.text, taken), piece.tone)
            )
        cells -= taken
    return tuple(kept)


def ends(left: Line, right: Line, cells: int) -> Line:
    """Two lines at the two ends of one; the left one gives way."""
    room = cells - width(right)
    return (*padded(left, max(0, room)), *clipped(right, cells))


def joined(lines: Iterable[Line], gap: str = " ") -> Line:
    """Lines one after the other with a gap between them."""
    pieces: list[Piece] = []
    for line in lines:
        if pieces:
            pieces.append(Piece(gap))
        pieces.extend(line)
    return tuple(pieces)


def fitted(parts: Sequence[tuple[int, Line]], cells: int, gap: str = "  ") -> Line:
    """As many of the parts as fit, the lowest numbers kept longest, in the order in which they are given."""
    kept: set[int] = set()
    room = cells + len(gap)
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        needed = width(parts[index][1]) + len(gap)
        if needed <= room:
            kept.add(index)
            room -= needed
    return joined((line for index, (_, line) in enumerate(parts) if index in kept), gap)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: what it needs, and how soon it is given up."""

    key: str
    title: str
    width: int
    priority: int
    """The lowest numbers are kept longest."""
    right: bool = True
    stretch: int = 0
    """How many cells more it can make use of."""


def chosen(columns: Sequence[Column], cells: int) -> list[tuple[Column, int]]:
    """The columns that fit, in their order, each with the width it gets; one blank is between two."""
    room = cells + 1
    kept: set[str] = set()
    for column in sorted(columns, key=lambda column: column.priority):
        if column.width + 1 <= room:
            kept.add(column.key)
            room -= column.width + 1
    extra = {column.key: 0 for column in columns}
    for column in sorted(columns, key=lambda column: column.stretch):
        if column.key in kept and room > 0:
            extra[column.key] = min(column.stretch, room)
            room -= extra[column.key]
    return [(column, column.width + extra[column.key]) for column in columns if column.key in kept]
