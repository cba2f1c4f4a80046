"""Tables and text that fit: columns say less, then give way by their priority, until the table is narrow enough."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

Paint = Callable[[str, str], str]
"""Puts a style on a text: `paint("warn", "92C")`."""

_GAP = "  "
_NARROWEST = 3
_ANSI = {"title": "1", "dim": "2", "good": "32", "notice": "33", "warn": "31;1", "name": "36"}


class Column(NamedTuple):
    """One column."""

    title: str
    right: bool = True
    drop: int = 0
    """When space is short the column with the highest number gives way first; 0 stays to the last."""
    least: int = 0
    """A column that may be cut down to this width before any column is dropped; 0 is not cut."""
    optional: bool = False
    """Left out when no row knows anything to say in it."""


class Cell(NamedTuple):
    """One text with its style."""

    text: str
    style: str = ""
    briefer: tuple[str, ...] = ()
    """Shorter ways to say it, each shorter than the one before."""

    def within(self, width: int) -> str:
        """The most that can be said in so many columns."""
        said = (text for text in (self.text, *self.briefer) if width_of(text) <= width)
        return next(said, None) or cut((self.text, *self.briefer)[-1], width)


def painter(*, color: bool) -> Paint:
    """A painter for a terminal with colours, or one that leaves text alone."""
    if not color:
        return lambda _, text: text
    return lambda style, text: f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if style else text


def width_of(text: str) -> int:
    """Terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415  most tables are ASCII and do not need it

    return cell_len(text)


def cut(text: str, width: int) -> str:
    """The text, or as much of it as fits with a mark that something is missing."""
    if width_of(text) <= width:
        return text
    if width <= 1:
        return text[:width]
    kept = text[: width - 1]
    while width_of(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept}~"


def wrapped(text: str, width: int, indent: str = "") -> Iterator[str]:
    """Prose on as many lines as it needs, the later ones indented."""
    room = max(width, len(indent) + 8)
    for line in textwrap.wrap(text, room, subsequent_indent=indent, break_on_hyphens=False):
        yield cut(line, width)


def flowed(words: Iterable[str], width: int, gap: str, indent: str = "") -> Iterator[str]:
    """Words that stay whole side by side, on as many lines as they need, the later ones indented."""
    line = ""
    for word in words:
        if line and width_of(line) + len(gap) + width_of(word) > width:
            yield cut(line, width)
            line = indent + word
        else:
            line = f"{line}{gap}{word}" if line else word
    if line:
        yield cut(line, width)


def render(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell | str]], width: int, paint: Paint
) -> list[str]:
    """The table as lines no wider than `width`."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    telling = [
        place
        for place, column in enumerate(columns)
        if not column.optional or any(row[place].text not in ("", "-") for row in cells)
    ]
    shown = [
        _Sized(columns[place], [Cell(columns[place].title, "title"), *(row[place] for row in cells)])
        for place in telling
    ]
    fitted = [(sized, sized.width) for sized in _fit(shown, width)]
    return [
        _GAP.join(sized.padded(row, wide, paint) for sized, wide in fitted).rstrip()
        for row in range(len(cells) + 1)
    ]


class _Sized(NamedTuple):
    """A column's cells, its title first, and the width they may take."""

    column: Column
    cells: list[Cell]
    limit: int = 1_000_000

    @property
    def width(self) -> int:
        return max(width_of(cell.within(self.limit)) for cell in self.cells)

    @property
    def briefest(self) -> int:
        return max(width_of((cell.text, *cell.briefer)[-1]) for cell in self.cells)

    def shrunk(self, excess: int, least: int) -> _Sized:
        """Narrower by the excess, but no narrower than `least`."""
        return self._replace(limit=max(least, self.width - max(0, excess))) if self.width > least else self

    def padded(self, row: int, width: int, paint: Paint) -> str:
        cell = self.cells[row]
        text = cell.within(width)
        padding = " " * (width - width_of(text))
        painted = paint(cell.style, text)
        return padding + painted if self.column.right else painted + padding


def _fit(shown: list[_Sized], width: int) -> list[_Sized]:
    """Say less, the least important column first; then cut, the widest first; then leave a column out."""
    while True:
        fitted = list(shown)
        for place in sorted(range(len(fitted)), key=lambda place: -fitted[place].column.drop):
            fitted[place] = fitted[place].shrunk(_excess(fitted, width), fitted[place].briefest)
        for place in sorted(range(len(fitted)), key=lambda place: -fitted[place].width):
            if fitted[place].column.least:
                fitted[place] = fitted[place].shrunk(_excess(fitted, width), fitted[place].column.least)
        if _excess(fitted, width) <= 0:
            return fitted
        last = max(shown, key=lambda sized: sized.column.drop)
        if not last.column.drop:
            return _squeezed(fitted, width)
        shown = [sized for sized in shown if sized is not last]


def _squeezed(shown: list[_Sized], width: int) -> list[_Sized]:
    """What may neither go nor be cut, cut all the same: a line that wraps is harder to read."""
    narrow = list(shown)
    while _excess(narrow, width) > 0:
        place = max(range(len(narrow)), key=lambda place: narrow[place].width)
        if narrow[place].width <= _NARROWEST:
            break
        narrow[place] = narrow[place].shrunk(1, _NARROWEST)
    return narrow


def _excess(shown: list[_Sized], width: int) -> int:
    return sum(sized.width for sized in shown) + len(_GAP) * (len(shown) - 1) - width
