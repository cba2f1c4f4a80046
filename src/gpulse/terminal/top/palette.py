"""How tones look: colours where the terminal has them, weight and reversal where it has not."""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.theme import Theme

from gpulse.terminal.top.cells import Line, Tone

THEME = Theme(
    name="gpulse",
    primary="#5fb3f6",
    secondary="#7c8cff",
    warning="#f0b352",
    error="#f2637e",
    success="#59d38c",
    accent="#5fd7c7",
    foreground="#d5dbe6",
    background="#0e1116",
    surface="#161b22",
    panel="#1c232d",
    dark=True,
)

COLOURS: dict[Tone, Style] = {
    "plain": Style(),
    "dim": Style(color="#79869a"),
    "strong": Style(color="#ffffff", bold=True),
    "head": Style(color="#7f93b2", bold=True),
    "bar": Style(color="#9fb3d1", bgcolor="#1c2633", bold=True),
    "bar_accent": Style(color="#5fd7c7", bgcolor="#1c2633", bold=True),
    "border": Style(color="#34404f"),
    "title": Style(color="#5fd7c7", bold=True),
    "accent": Style(color="#5fd7c7"),
    "key": Style(color="#f0b352", bold=True),
    "good": Style(color="#59d38c"),
    "warn": Style(color="#f0b352"),
    "bad": Style(color="#f2637e", bold=True),
    "memory": Style(color="#8f9bff"),
    "power": Style(color="#d98f5c"),
    "level0": Style(color="#566274"),
    "level1": Style(color="#4a90d9"),
    "level2": Style(color="#3fb6c4"),
    "level3": Style(color="#4ccb8b"),
    "level4": Style(color="#8be25c"),
    "alert": Style(color="#0e1116", bgcolor="#f0b352", bold=True),
}
"""The level tones say how much and not how good: a busy GPU is no danger."""

_BOLD = Style(bold=True)
_DIM = Style(dim=True)
_REVERSE = Style(bold=True, reverse=True)
_UNDERLINED = Style(bold=True, underline=True)
PLAIN: dict[Tone, Style] = dict.fromkeys(COLOURS, Style()) | {
    "dim": _DIM,
    "border": _DIM,
    "strong": _BOLD,
    "head": _BOLD,
    "bar": _UNDERLINED,
    "bar_accent": _UNDERLINED,
    "title": _BOLD,
    "key": _BOLD,
    "bad": _BOLD,
    "warn": _BOLD,
    "alert": _REVERSE,
}
"""For NO_COLOR."""

CURSOR = Style(bgcolor="#243447")
RESTING_CURSOR = Style(bgcolor="#171e27")
PLAIN_CURSOR = Style(reverse=True)


def styles_for(*, coloured: bool) -> dict[Tone, Style]:
    """The look of each tone."""
    return COLOURS if coloured else PLAIN


def strip(line: Line, cells: int, styles: dict[Tone, Style], base: Style) -> Strip:
    """A line ready for the screen, in exactly so many cells."""
    segments = [Segment(text, base + styles[tone]) for text, tone in line if text]
    return Strip(segments).adjust_cell_length(cells, base)
