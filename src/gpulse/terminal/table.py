"""Tables that fit: columns give way by their priority until the table is as narrow as the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Paint = Callable[[str, str], str]
"""Puts a style on a text: `paint("warn", "92C")`."""

_GAP = "  "
_ANSI = {"title": "1", "dim": "2", "good": "32", "notice": "33", "warn": "31;1", "name": "36"}


class Column(NamedTuple):
    """One column."""

    title: str
    right: bool = True
    drop: int = 0
    """When space is short the column with the highest number goes first; 0 never goes."""
    least: int = 0
    """A column that may be cut down to this width before any column is dropped; 0 is never cut."""


class Cell(NamedTuple):
    """One text with its style."""

    text: str
    style: str = ""


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


def render(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell | str]], width: int, paint: Paint
) -> list[str]:
    """The table as lines no wider than `width`, unless even its last columns need more."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    natural = [
        max([width_of(column.title), *(width_of(row[place].text) for row in cells)])
        for place, column in enumerate(columns)
    ]
    shown, widths = _fit(columns, natural, width)
    lines = [_line([Cell(columns[place].title, "title") for place in shown], columns, shown, widths, paint)]
    lines.extend(_line([row[place] for place in shown], columns, shown, widths, paint) for row in cells)
    return lines


def _fit(columns: Sequence[Column], natural: list[int], width: int) -> tuple[list[int], dict[int, int]]:
    shown = list(range(len(columns)))
    while True:
        widths = {place: natural[place] for place in shown}
        excess = sum(widths.values()) + len(_GAP) * (len(shown) - 1) - width
        for place in sorted(shown, key=lambda place: -natural[place]):
            if excess > 0 and columns[place].least and widths[place] > columns[place].least:
                given = min(excess, widths[place] - columns[place].least)
                widths[place] -= given
                excess -= given
        droppable = [place for place in shown if columns[place].drop]
        if excess <= 0 or not droppable:
            return shown, widths
        shown.remove(max(droppable, key=lambda place: columns[place].drop))


def _line(
    cells: list[Cell], columns: Sequence[Column], shown: list[int], widths: dict[int, int], paint: Paint
) -> str:
    parts = []
    for cell, place in zip(cells, shown, strict=True):
        text = cut(cell.text, widths[place])
        padding = " " * (widths[place] - width_of(text))
        painted = paint(cell.style, text)
        parts.append(padding + painted if columns[place].right else painted + padding)
    return _GAP.join(parts).rstrip()
