"""Times as session files of any age write them."""

from __future__ import annotations

import math
from datetime import datetime

_MILLISECONDS = 1e11
"""Epoch seconds of the year 5138: larger numbers are milliseconds, or smaller parts."""
_LATEST = 4e9


def epoch(raw: object) -> float | None:
    """Epoch seconds from a number, a number as text, or ISO 8601; None when it is no time.

    A time without a zone is local time: the tool that wrote such files did not say which, and meant that.
    """
    if isinstance(raw, str):
        try:
            return _from_number(float(raw))
        except ValueError:
            return _from_text(raw.strip())
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return _from_number(raw)
    return None


def _from_number(number: float) -> float | None:
    try:
        seconds = float(number)
    except OverflowError:
        return None
    while math.isfinite(seconds) and seconds > _MILLISECONDS:
        seconds /= 1000
    return seconds if 0 <= seconds <= _LATEST else None


def _from_text(text: str) -> float | None:
    try:
        return _from_number(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        return None
