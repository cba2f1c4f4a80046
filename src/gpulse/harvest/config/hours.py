"""Hours of the day as people write them: `22:00-07:00`, `mon-fri 20:00-07:00`, `sat,sun`."""

from __future__ import annotations

import re

from gpulse.harvest.config.faults import WrongError
from gpulse.harvest.config.values import shown
from gpulse.harvest.settings import Hours, Span

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_WEEK = frozenset(range(7))
_DAY_MINUTES = 24 * 60
_SHORTEST_DAY = 3
_LONGEST = 200
_SPAN = re.compile(
    r"(?P<days>[a-z][a-z, -]*?)?\s*(?:(?P<start>[0-9:]+)\s*-\s*(?P<end>[0-9:]+))?", re.ASCII | re.IGNORECASE
)
_TIME = re.compile(r"([0-9]{1,2})(?::([0-9]{2}))?", re.ASCII)
_HINT = 'such as "22:00-07:00", "mon-fri 20:00-07:00" or "sat,sun"'


def hours(value: object) -> Hours:
    """One span, or a list of them."""
    spans = value if isinstance(value, list) else [value]
    if not spans:
        raise WrongError("there is no span in it", f"{_HINT}; leave it out for always")
    return Hours(tuple(_span(span) for span in spans))


def _span(value: object) -> Span:
    match = _SPAN.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= _LONGEST else None
    if match is None or not (match["days"] or match["start"]):
        raise WrongError(f"{shown(value)} are no hours", _HINT)
    days = _days(match["days"]) if match["days"] else _WEEK
    if match["start"] is None:
        return Span(days, 0, _DAY_MINUTES)
    start, end = _minute(match["start"]), _minute(match["end"])
    if start in {end, _DAY_MINUTES}:
        raise WrongError(f"{shown(value)} begins when it ends", "leave out the times for the whole day")
    return Span(days, start, end)


def _minute(given: str) -> int:
    match = _TIME.fullmatch(given)
    minute = int(match[1]) * 60 + int(match[2] or 0) if match else None
    if match is None or minute is None or minute > _DAY_MINUTES or int(match[2] or 0) >= 60:
        raise WrongError(f"{shown(given)} is not a time of the day", "from 00:00 to 24:00")
    return minute


def _days(given: str) -> frozenset[int]:
    found: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.partition("-")
        start = _day(first)
        length = (_day(last) - start) % 7 if dash else 0
        found |= {(start + step) % 7 for step in range(length + 1)}
    return frozenset(found)


def _day(given: str) -> int:
    word = given.strip().lower()
    for number, day in enumerate(_DAYS):
        if len(word) >= _SHORTEST_DAY and day.startswith(word):
            return number
    raise WrongError(f"{shown(given.strip())} is not a day", "mon, tue, wed, thu, fri, sat, sun")
