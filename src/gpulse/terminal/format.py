"""What a terminal shows: numbers and times in people's units, and foreign text made harmless."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gpulse.model.text import plain
from gpulse.model.units import (
    UNKNOWN,
    bits,
    celsius,
    count,
    duration,
    energy,
    hours,
    megahertz,
    milliseconds,
    number,
    percent,
    rate,
    ratio,
    seconds,
    share,
    size,
    sizes,
    watts,
)

__all__ = [
    "UNKNOWN",
    "bits",
    "celsius",
    "command",
    "count",
    "duration",
    "energy",
    "hours",
    "megahertz",
    "milliseconds",
    "number",
    "percent",
    "plain",
    "rate",
    "ratio",
    "seconds",
    "share",
    "since",
    "size",
    "sizes",
    "watts",
]

_DAY_SECONDS = 86400.0


def command(words: Sequence[str], name: str | None) -> str:
    """A command line without the directory of its program: what tells two commands apart comes later."""
    if not words:
        return plain(name)
    program, *rest = words
    return plain(" ".join([program.rpartition("/")[2] or program, *rest]))


def since(start: float, now: float) -> str:
    """`since 11:42:10 (3:05)`: when something began, with the day if that was long ago, and how long it lasts."""
    pattern = "%H:%M:%S" if now - start < _DAY_SECONDS else "%m-%d %H:%M"
    try:
        began = time.strftime(pattern, time.localtime(start))
    except (OverflowError, ValueError, OSError):  # a damaged recording can claim any time
        return ""
    return f"since {began} ({duration(now - start)})"
