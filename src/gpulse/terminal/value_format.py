"""Formats for terminals: numbers and times with their units, and foreign text without control characters."""

from __future__ import annotations

from collections.abc import Sequence

from gpulse.model.formatting import (
    UNKNOWN,
    bits,
    celsius,
    clock_time,
    count,
    duration,
    energy,
    hours,
    local_text,
    local_time,
    megahertz,
    milliseconds,
    number,
    percent,
    rate,
    ratio,
    seconds,
    share,
    short_duration,
    size,
    sizes,
    watts,
)
from gpulse.model.safe_text import plain

__all__ = [
    "UNKNOWN",
    "bits",
    "celsius",
    "clock_time",
    "count",
    "count_noun",
    "duration",
    "energy",
    "hours",
    "local_time",
    "megahertz",
    "milliseconds",
    "number",
    "percent",
    "plain",
    "rate",
    "ratio",
    "seconds",
    "share",
    "short_duration",
    "shorten_command",
    "since",
    "size",
    "sizes",
    "watts",
]

_DAY_SECONDS = 86400.0


def count_noun(number: float | None, noun: str) -> str:
    """Return a count with its noun: `1 GPU`, `8 GPUs`, `1.2k frames`."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def shorten_command(words: Sequence[str], name: str | None) -> str:
    """Return a command line without the directory of its program, because the arguments tell two commands apart."""
    if not words:
        return plain(name)
    program, *rest = words
    return plain(" ".join([program.rpartition("/")[2] or program, *rest]))


def since(start: float, now: float) -> str:
    """Return when something began and how long ago: `since 11:42:10 (3:05)`, with the date from one day on."""
    pattern = "%H:%M:%S" if now - start < _DAY_SECONDS else "%m-%d %H:%M"
    began = local_text(start, pattern)
    return "" if began is None else f"since {began} ({duration(now - start)})"
