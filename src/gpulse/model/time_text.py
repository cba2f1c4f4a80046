"""Parse and format times: ISO 8601, and times and durations as people type them (`10m`, `1h30m`, `-10m`, `now`).

Local times and durations for people to read are in `gpulse.model.formatting`.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from gpulse.model.message_limits import MAX_TIME_SECONDS
from gpulse.model.safe_text import quoted

MAX_DURATION_SECONDS = 3650 * 86400.0
"""Ten years; stored data is never older."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d|w)"
_PARTS = re.compile(rf"(?:{_PART}){{1,8}}")
_ONE_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|w)")
_NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?")


def parse_duration(given: object) -> float:
    """Parse a duration: a number of seconds, or text such as `10m` or `1h30m`.

    Raises:
        ValueError: It is not a duration, or longer than ten years.
    """
    seconds = _as_number(given)
    if seconds is None and isinstance(given, str) and _PARTS.fullmatch(given):
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _ONE_PART.findall(given))
    if seconds is None or seconds < 0:
        raise ValueError(f"{quoted(given)} is not a duration; examples: 600 (seconds), 10m, 1h30m")
    if seconds > MAX_DURATION_SECONDS:
        raise ValueError(f"{quoted(given)} is longer than the maximum of ten years (3650d)")
    return seconds


def parse_time(given: object, now: float) -> float:
    """Parse a time: epoch seconds, ISO 8601 (UTC unless it has an offset), `-10m` or `now`.

    A date before 1970 means the start of 1970, because all stored data is later.

    Raises:
        ValueError: It is not a time, or it is after the year 9999.
    """
    seconds = _as_number(given)
    if seconds is not None and seconds > MAX_TIME_SECONDS:
        raise ValueError(f"{quoted(given)} is after the year 9999; times are in seconds, not in milliseconds")
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
            return _in_calendar(aware.timestamp())
    raise ValueError(
        f"{quoted(given)} is not a time; examples: 1767225600, 2026-01-01T00:00:00Z, -10m (ten minutes ago), now"
    )


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


def format_iso(seconds: float) -> str:
    """Format epoch seconds as ISO 8601 in UTC, rounded to the millisecond: `2026-11-16T09:13:47.068Z`."""
    whole, milliseconds = divmod(round(_in_calendar(seconds) * 1000), 1000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03}Z"


def format_iso_seconds(seconds: float) -> str:
    """Format epoch seconds as ISO 8601 in UTC, without the fraction: `2026-11-16T09:13:47Z`."""
    return f"{datetime.fromtimestamp(_in_calendar(seconds), UTC):%Y-%m-%dT%H:%M:%SZ}"


def parse_iso(text: object) -> float | None:
    """Parse an ISO 8601 time, local unless it has an offset, as epoch seconds; None for anything else."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _in_calendar(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_TIME_SECONDS)
