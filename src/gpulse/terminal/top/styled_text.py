"""Text of the live views: pieces with a style, lines of pieces, columns that fit a width, and characters to draw with.

Terminals that lack the characters for bars, trends, trees and boxes get ASCII ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len, set_cell_size

from gpulse.terminal import value_format as human

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
"""Meaning of a piece of text; the palette defines its color. A tone never carries information of its own."""

UNLIMITED_CELLS = 10_000
_COERCED_LOCALES = frozenset({"C.UTF-8", "C.utf8", "UTF-8"})
"""Values that Python itself puts into LC_CTYPE in the C locale; the user did not choose them."""
_MIN_DRAWN_RATIO = 0.005
"""Smallest ratio that is shown as 1% and not as 0%."""
_LEVELS: tuple[Tone, ...] = ("level0", "level1", "level2", "level3", "level4")


class StyledText(NamedTuple):
    """Piece of text in one tone."""

    text: str
    tone: Tone = "plain"


Line = tuple[StyledText, ...]


def styled(text: str, tone: Tone = "plain") -> Line:
    """Return a line of one piece."""
    return (StyledText(text, tone),)


def width(line: Line) -> int:
    """Return how many terminal cells a line takes."""
    return sum(cell_len(piece.text) for piece in line)


def truncate(text: str, cells: int, ellipsis: str) -> str:
    """Return the text, cut with an ellipsis if it takes more cells."""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1) + ellipsis if cells > 0 else ""


def pad(line: Line, cells: int, *, right: bool = False) -> Line:
    """Return the line in exactly this many cells: padded with blanks, or cut."""
    missing = cells - width(line)
    if missing < 0:
        return clip(line, cells)
    if missing == 0:
        return line
    blank = StyledText(" " * missing)
    return (blank, *line) if right else (*line, blank)


def clip(line: Line, cells: int) -> Line:
    """Return the first cells of a line."""
    kept: list[StyledText] = []
    for piece in line:
        taken = min(cells, cell_len(piece.text))
        if taken > 0:
            kept.append(
                piece
                if taken == cell_len(piece.text)
                else StyledText(set_cell_size(piece.text, taken), piece.tone)
            )
        cells -= taken
    return tuple(kept)


def align_both(left: Line, right: Line, cells: int) -> Line:
    """Return one line with the first text at the left and the second at the right; the left one is cut if needed."""
    room = cells - width(right)
    return (*pad(left, max(0, room)), *clip(right, cells))


def join(lines: Iterable[Line], gap: str = " ") -> Line:
    """Return lines joined into one, with a gap between them."""
    pieces: list[StyledText] = []
    for line in lines:
        if pieces:
            pieces.append(StyledText(gap))
        pieces.extend(line)
    return tuple(pieces)


def fit_parts(parts: Sequence[tuple[int, Line]], cells: int, gap: str = "  ") -> Line:
    """Return as many parts as fit, in their order; those with the highest numbers are dropped first."""
    kept: set[int] = set()
    room = cells + len(gap)
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        needed = width(parts[index][1]) + len(gap)
        if needed <= room:
            kept.add(index)
            room -= needed
    return join((line for index, (_, line) in enumerate(parts) if index in kept), gap)


@dataclass(frozen=True, slots=True)
class PanelColumn:
    """One column of a table: its width, and how soon it is dropped."""

    key: str
    title: str
    width: int
    priority: int
    """Columns with the highest numbers are dropped first."""
    right: bool = True
    extra_cells: int = 0
    """How many cells more it can use."""


def fit_columns(columns: Sequence[PanelColumn], cells: int) -> list[tuple[PanelColumn, int]]:
    """Return the columns that fit, in their order, each with its width; one blank separates two columns."""
    room = cells + 1
    kept: set[str] = set()
    for column in sorted(columns, key=lambda column: column.priority):
        if column.width + 1 <= room:
            kept.add(column.key)
            room -= column.width + 1
    extra = {column.key: 0 for column in columns}
    for column in sorted(columns, key=lambda column: column.extra_cells):
        if column.key in kept and room > 0:
            extra[column.key] = min(column.extra_cells, room)
            room -= extra[column.key]
    return [(column, column.width + extra[column.key]) for column in columns if column.key in kept]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of characters."""

    is_ascii: bool
    bar: str
    """A cell that is filled more and more; the last one is full."""
    bar_rest: str
    trend: str
    """From empty to full; the last one leaves a gap, so that adjacent rows do not merge into one block."""
    rise: str
    """From an empty cell to a full one, filled from the bottom."""
    up: str
    down: str
    cursor: str
    ellipsis: str
    dot: str
    folded: str
    unfolded: str
    branch: str
    last_branch: str
    trunk: str
    warning: str
    corners: str
    """Top left, top right, bottom left, bottom right, horizontal, vertical."""

    def clean(self, text: str | None) -> str:
        """Return foreign text as this terminal can show it."""
        shown = human.plain(text)
        return shown.encode("ascii", "replace").decode() if self.is_ascii else shown


UNICODE = Glyphs(
    is_ascii=False,
    bar="╸━",
    bar_rest="─",
    trend="▁▂▃▄▅▆▇",
    rise=" ▁▂▃▄▅▆▇█",
    up="▲",
    down="▼",
    cursor="▌",
    ellipsis="…",
    dot="·",
    folded="▸",
    unfolded="▾",
    branch="├─ ",
    last_branch="└─ ",
    trunk="│  ",
    warning="▲",
    corners="╭╮╰╯─│",
)
ASCII = Glyphs(
    is_ascii=True,
    bar="#",
    bar_rest=".",
    trend="_.-=+*#",
    rise=" .:#",
    up="^",
    down="v",
    cursor=">",
    ellipsis="~",
    dot="-",
    folded="+",
    unfolded="-",
    branch="|- ",
    last_branch="`- ",
    trunk="|  ",
    warning="!",
    corners="++++-|",
)


def glyphs_for(environment: Mapping[str, str], encoding: str | None) -> Glyphs:
    """Return the characters that a terminal with these variables and this encoding can be expected to show."""
    kind = environment.get("LC_CTYPE", "")
    locale = (
        environment.get("LC_ALL") or ("" if kind in _COERCED_LOCALES else kind) or environment.get("LANG", "")
    )
    if (
        locale in ("C", "POSIX")
        or "utf" not in (encoding or "").lower()
        or environment.get("TERM") == "linux"
    ):
        return ASCII
    return UNICODE


def terminal_glyphs() -> Glyphs:
    """Return the characters for the current terminal."""
    return glyphs_for(os.environ, getattr(sys.__stdout__, "encoding", None))


def level(value: float | None) -> Tone:
    """Return the tone of an activity: the higher, the brighter."""
    if value is None:
        return "dim"
    return _LEVELS[0 if value < _MIN_DRAWN_RATIO else min(4, 1 + int(value * 4))]


def bar(value: float | None, cells: int, tone: Tone, glyphs: Glyphs) -> Line:
    """Return a bar of this many cells; blank when the value is unknown."""
    if value is None or cells <= 0:
        return (StyledText(" " * max(0, cells)),)
    steps = len(glyphs.bar)
    filled = round(min(1.0, max(0.0, value)) * cells * steps)
    # Even a small value gets a visible bar.
    filled = max(filled, int(value >= _MIN_DRAWN_RATIO))
    whole, part = divmod(filled, steps)
    drawn = glyphs.bar[-1] * whole + (glyphs.bar[part - 1] if part else "")
    return (StyledText(drawn, tone), StyledText(glyphs.bar_rest * (cells - len(drawn)), "border"))


def trend(values: Sequence[float | None], cells: int, glyphs: Glyphs) -> Line:
    """Return the newest values as a row of small columns, aligned to the right; blank where unknown."""
    newest = values[-cells:] if cells > 0 else ()
    pieces: list[StyledText] = [StyledText(" " * (cells - len(newest)))]
    run, tone = "", "dim"  # type: tuple[str, Tone]
    for value in newest:
        sign, own = _column(value, glyphs), level(value)
        if own != tone and run:
            pieces.append(StyledText(run, tone))
            run = ""
        run, tone = run + sign, own
    return (*pieces, StyledText(run, tone))


def _column(value: float | None, glyphs: Glyphs) -> str:
    if value is None:
        return " "
    top = len(glyphs.trend) - 1
    return glyphs.trend[min(top, max(0, round(value * top)))]


def underline_heading(line: Line) -> Line:
    """Return a heading with a background, which separates it from the lines above where there is no box."""
    return tuple(
        StyledText(text, "bar" if tone in ("plain", "head", "dim") else "bar_accent") for text, tone in line
    )


def draw_box(lines: Sequence[Line], title: Line, status: Line, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return lines, each two cells narrower than the box, in a box with a title and a status in its upper edge."""
    top_left, top_right, bottom_left, bottom_right, flat, upright = tuple(glyphs.corners)
    left: Line = (StyledText(top_left + flat, "border"), StyledText(" "), *title, StyledText(" "))
    right: Line = (
        (StyledText(" "), *status, StyledText(" "), StyledText(flat + top_right, "border"))
        if status
        else (StyledText(flat + top_right, "border"),)
    )
    rest = cells - sum(len(piece.text) for piece in (*left, *right))
    side = StyledText(upright, "border")
    return [
        (*left, StyledText(flat * max(0, rest), "border"), *right),
        *((side, *line, side) for line in lines),
        (StyledText(bottom_left + flat * (cells - 2) + bottom_right, "border"),),
    ]
