"""Times and lengths of time as people write them: `10m`, `1h30m`, `-10m`, `now`, ISO 8601, or a number of seconds."""

from __future__ import annotations

import math
import re
import reprlib
from datetime import UTC, datetime

MAX_TIME_SECONDS = 253_402_300_799.0
"""The last second of the year 9999."""
MAX_DURATION_SECONDS = 3650 * 86400.0
"""Ten years: nothing that is stored is older."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d|w)"
_PARTS = re.compile(rf"(?:{_PART}){{1,8}}")
_ONE_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|w)")
_NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?")


def parse_duration(given: object) -> float:
    """Return a length of time in seconds, from a number of them or from text such as `10m` or `1h30m`.

    Raises:
        ValueError: It is not a length of time, or it is more than ten years.
    """
    seconds = _as_number(given)
    if seconds is None and isinstance(given, str) and _PARTS.fullmatch(given):
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _ONE_PART.findall(given))
    if seconds is None or seconds < 0:
        raise ValueError(f"{shown(given)} is not a length of time, such as 600, 10m or 1h30m")
    if seconds > MAX_DURATION_SECONDS:
        raise ValueError(f"{shown(given)} is longer than ten years (3650d), which is the longest allowed")
    return seconds


def parse_time(given: object, now: float) -> float:
    """Return a time in epoch seconds, from such a number, ISO 8601 (UTC unless it has an offset), `-10m` or `now`.

    A date before 1970 means the start of 1970: everything that is stored is later.

    Raises:
        ValueError: It is not a time, or it is after the year 9999.
    """
    seconds = _as_number(given)
    if seconds is not None and seconds > MAX_TIME_SECONDS:
        raise ValueError(f"{shown(given)} is after the year 9999; times are in seconds, not in milliseconds")
    if seconds is not None and seconds >= 0:
        return seconds
    if seconds is None and isinstance(given, str):
        if given == "now":
            return now
        if given.startswith("-") and _PARTS.fullmatch(given[1:]):
            return max(0.0, now - parse_duration(given[1:]))
        try:
            read = datetime.fromisoformat(given.upper()) if len(given) >= 8 else None
        except ValueError:
            read = None
        if read is not None:
            aware = read if read.tzinfo is not None else read.replace(tzinfo=UTC)
            return min(max(0.0, aware.timestamp()), MAX_TIME_SECONDS)
    raise ValueError(
        f"{shown(given)} is not a time, such as 1767225600, 2026-01-01T00:00:00Z, -10m (ten minutes ago) or now"
    )


def shown(given: object) -> str:
    """Return the beginning of a value for a message, safe to print whatever it holds."""
    text = ascii(given) if isinstance(given, str) else _SHORT.repr(given)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}…"


def _as_number(given: object) -> float | None:
    """Return a finite number, None for anything else."""
    if isinstance(given, str):
        if not _NUMBER.fullmatch(given):
            return None
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


_MAX_SHOWN_CHARACTERS = 60
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
