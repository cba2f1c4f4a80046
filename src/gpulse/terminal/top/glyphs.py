"""The signs that bars, trends and trees are drawn with, and plain ones for terminals that lack them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpulse.terminal import format as human
from gpulse.terminal.top.cells import Line, Piece, Tone

_COERCED = frozenset({"C.UTF-8", "C.utf8", "UTF-8"})
"""What Python itself puts into LC_CTYPE when it finds the C locale: no word of the user's."""
_LEAST = 0.005
"""What is shown as 1% and not as 0%."""
_LEVELS: tuple[Tone, ...] = ("level0", "level1", "level2", "level3", "level4")


@dataclass(frozen=True, slots=True)
class Glyphs:
    """One set of signs."""

    is_ascii: bool
    bar: str
    """A cell filled by more and more of it; the last one is full."""
    bar_rest: str
    trend: str
    """From nothing to full; the last one leaves a gap, lest the rows above each other become one block."""
    rise: str
    """From an empty cell to a full one, bottom up."""
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
        """Foreign text that can be shown here."""
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
    """The signs that a terminal with these variables and this encoding can be expected to show."""
    kind = environment.get("LC_CTYPE", "")
    locale = environment.get("LC_ALL") or ("" if kind in _COERCED else kind) or environment.get("LANG", "")
    if (
        locale in ("C", "POSIX")
        or "utf" not in (encoding or "").lower()
        or environment.get("TERM") == "linux"
    ):
        return ASCII
    return UNICODE


def this_terminal() -> Glyphs:
    """The signs for the terminal we run in."""
    return glyphs_for(os.environ, getattr(sys.__stdout__, "encoding", None))


def level(value: float | None) -> Tone:
    """The tone of an activity: the more, the brighter."""
    if value is None:
        return "dim"
    return _LEVELS[0 if value < _LEAST else min(4, 1 + int(value * 4))]


def bar(value: float | None, cells: int, tone: Tone, glyphs: Glyphs) -> Line:
    """A bar of so many cells; blank when the value is unknown."""
    if value is None or cells <= 0:
        return (Piece(" " * max(0, cells)),)
    steps = len(glyphs.bar)
    filled = round(min(1.0, max(0.0, value)) * cells * steps)
    # A little is more than nothing, and a bar says so.
    filled = max(filled, int(value >= _LEAST))
    whole, part = divmod(filled, steps)
    drawn = glyphs.bar[-1] * whole + (glyphs.bar[part - 1] if part else "")
    return (Piece(drawn, tone), Piece(glyphs.bar_rest * (cells - len(drawn)), "border"))


def trend(values: Sequence[float | None], cells: int, glyphs: Glyphs) -> Line:
    """The newest values as a row of small columns that ends at the right; blank where unknown."""
    newest = values[-cells:] if cells > 0 else ()
    pieces: list[Piece] = [Piece(" " * (cells - len(newest)))]
    run, tone = "", "dim"  # type: tuple[str, Tone]
    for value in newest:
        sign, own = _column(value, glyphs), level(value)
        if own != tone and run:
            pieces.append(Piece(run, tone))
            run = ""
        run, tone = run + sign, own
    return (*pieces, Piece(run, tone))


def _column(value: float | None, glyphs: Glyphs) -> str:
    if value is None:
        return " "
    top = len(glyphs.trend) - 1
    return glyphs.trend[min(top, max(0, round(value * top)))]


def barred(line: Line) -> Line:
    """A heading that is set off from what is above it, where there is no frame to do it."""
    return tuple(
        Piece(text, "bar" if tone in ("plain", "head", "dim") else "bar_accent") for text, tone in line
    )


def boxed(lines: Sequence[Line], title: Line, status: Line, cells: int, glyphs: Glyphs) -> list[Line]:
    """The lines, each already two cells narrower, in a frame with a title and a status in its upper edge."""
    top_left, top_right, bottom_left, bottom_right, flat, upright = tuple(glyphs.corners)
    left: Line = (Piece(top_left + flat, "border"), Piece(" "), *title, Piece(" "))
    right: Line = (
        (Piece(" "), *status, Piece(" "), Piece(flat + top_right, "border"))
        if status
        else (Piece(flat + top_right, "border"),)
    )
    rest = cells - sum(len(piece.text) for piece in (*left, *right))
    side = Piece(upright, "border")
    return [
        (*left, Piece(flat * max(0, rest), "border"), *right),
        *((side, *line, side) for line in lines),
        (Piece(bottom_left + flat * (cells - 2) + bottom_right, "border"),),
    ]
