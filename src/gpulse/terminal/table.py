"""Tables and text that fit a terminal: cells are shortened, then columns dropped by priority."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

Paint = Callable[[str, str], str]
"""Adds a style to a text: `paint("warn", "92C")`."""

_GAP = "  "
_MIN_COLUMN_WIDTH = 3
_ANSI = {"title": "1", "dim": "2", "good": "32", "notice": "33", "warn": "31;1", "name": "36"}


class TableColumn(NamedTuple):
    """One column of a table."""

    title: str
    right: bool = True
    """Whether the cells are aligned to the right."""
    drop: int = 0
    """When space is short, the column with the highest number is dropped first; 0 is never dropped."""
    least: int = 0
    """Width to which the cells may be cut before any column is dropped; with 0 they are not cut."""
    optional: bool = False
    """Left out when every cell is empty."""


class TableCell(NamedTuple):
    """Text of a cell with its style."""

    text: str
    style: str = ""
    briefer: tuple[str, ...] = ()
    """Alternative texts, each shorter than the one before."""

    def within(self, width: int) -> str:
        """Return the longest text that fits this width."""
        fitting = (text for text in (self.text, *self.briefer) if display_width(text) <= width)
        return next(fitting, None) or truncate((self.text, *self.briefer)[-1], width)


def make_painter(*, color: bool) -> Paint:
    """Return a function that adds colors, or one that returns text unchanged."""
    if not color:
        return lambda _, text: text
    return lambda style, text: f"\x1b[{_ANSI[style]}m{text}\x1b[0m" if style else text


def display_width(text: str) -> int:
    """Return the terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415  most tables are ASCII and do not need it

    return cell_len(text)


def truncate(text: str, width: int) -> str:
    """Return the text, cut to the width with `~` at the end if it is longer."""
    if display_width(text) <= width:
        return text
    if width <= 1:
        return text[:width]
    kept = text[: width - 1]
    while display_width(kept) > width - 1:
        kept = kept[:-1]
    return f"{kept}~"


def wrap(text: str, width: int, indent: str = "") -> Iterator[str]:
    """Yield prose on as many lines as it needs; all but the first are indented."""
    room = max(width, len(indent) + 8)
    for line in textwrap.wrap(text, room, subsequent_indent=indent, break_on_hyphens=False):
        yield truncate(line, width)


def wrap_items(words: Iterable[str], width: int, gap: str, indent: str = "") -> Iterator[str]:
    """Yield items side by side on as many lines as they need, without breaking one; all but the first are indented."""
    line = ""
    for word in words:
        if line and display_width(line) + len(gap) + display_width(word) > width:
            yield truncate(line, width)
            line = indent + word
        else:
            line = f"{line}{gap}{word}" if line else word
    if line:
        yield truncate(line, width)


def render_table(
    columns: Sequence[TableColumn], rows: Iterable[Sequence[TableCell | str]], width: int, paint: Paint
) -> list[str]:
    """Return the table as lines no wider than `width`."""
    cells = [[cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row] for row in rows]
    filled = [
        place
        for place, column in enumerate(columns)
        if not column.optional or any(row[place].text not in ("", "-") for row in cells)
    ]
    shown = [
        _SizedColumn(
            columns[place], [TableCell(columns[place].title, "title"), *(row[place] for row in cells)]
        )
        for place in filled
    ]
    fitted = [(sized, sized.width) for sized in _fit_columns(shown, width)]
    return [
        _GAP.join(sized.padded(row, wide, paint) for sized, wide in fitted).rstrip()
        for row in range(len(cells) + 1)
    ]


class _SizedColumn(NamedTuple):
    """A column's cells, starting with its title, and the width that they may take."""

    column: TableColumn
    cells: list[TableCell]
    limit: int = 1_000_000

    @property
    def width(self) -> int:
        return max(display_width(cell.within(self.limit)) for cell in self.cells)

    @property
    def briefest(self) -> int:
        return max(display_width((cell.text, *cell.briefer)[-1]) for cell in self.cells)

    def shrunk(self, excess: int, least: int) -> _SizedColumn:
        """Return the column narrower by the excess, but no narrower than `least`."""
        return self._replace(limit=max(least, self.width - max(0, excess))) if self.width > least else self

    def padded(self, row: int, width: int, paint: Paint) -> str:
        cell = self.cells[row]
        text = cell.within(width)
        padding = " " * (width - display_width(text))
        painted = paint(cell.style, text)
        return padding + painted if self.column.right else painted + padding


def _fit_columns(shown: list[_SizedColumn], width: int) -> list[_SizedColumn]:
    """Shorten cells, the least important column first; then cut them, the widest first; then drop a column."""
    while _excess(shown, width) > 0:
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
            return _squeeze(fitted, width)
        shown = [sized for sized in shown if sized is not last]
    return shown


def _squeeze(shown: list[_SizedColumn], width: int) -> list[_SizedColumn]:
    """Cut even columns that must not be cut or dropped: a line that wraps is harder to read."""
    narrow = list(shown)
    while _excess(narrow, width) > 0:
        place = max(range(len(narrow)), key=lambda place: narrow[place].width)
        if narrow[place].width <= _MIN_COLUMN_WIDTH:
            break
        narrow[place] = narrow[place].shrunk(1, _MIN_COLUMN_WIDTH)
    return narrow


def _excess(shown: list[_SizedColumn], width: int) -> int:
    return sum(sized.width for sized in shown) + len(_GAP) * (len(shown) - 1) - width
