"""Format times as ISO 8601 text."""

from __future__ import annotations

from datetime import UTC, datetime

_MAX_SECONDS = 253_402_300_799.0
"""The end of the year 9999: calendars go no further."""


def iso(seconds: float) -> str:
    """Format epoch seconds as ISO 8601 in UTC, rounded to the millisecond: `2026-11-16T09:13:47.068Z`."""
    whole, milliseconds = divmod(round(min(max(seconds, 0.0), _MAX_SECONDS) * 1000), 1000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03}Z"
