"""Values as people write them, made into what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast, get_args

from gpulse.harvest.config.faults import WrongError
from gpulse.harvest.settings import Restart

LONGEST_NAME = 64
_MOST_SHOWN = 200
LARGEST = 10**18
"""Larger whole numbers are never meant, and some cannot even be written down again."""
_DAY_SECONDS = 86_400
SHORTEST_INTERVAL_SECONDS = 0.1
LONGEST_INTERVAL_SECONDS = _DAY_SECONDS
LONGEST_SECONDS = 30 * _DAY_SECONDS
LONGEST_GRACE_SECONDS = 3_600
SHORTEST_BACKOFF_SECONDS = 0.1
MOST_MEMORY_BYTES = 1 << 50
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGTP])(I?))?B", re.ASCII | re.IGNORECASE)
_POWERS = "KMGTP"
_SIZE_HINT = 'a number of bytes, or such as "512MiB" or "1GiB"'


def shown(value: object) -> str:
    """A value as a message may show it: on one line, and not too long."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]!a}…"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < LARGEST else "so large a number"
    if isinstance(value, list):
        return "a list"
    return "a table" if isinstance(value, dict) else "a date or time"


def text(value: object) -> str:
    """A text that is not empty and has no character that ends strings or lines."""
    if not isinstance(value, str):
        raise WrongError(f"{shown(value)} is not a text", "write it in quotes")
    if not value.strip():
        raise WrongError("it is empty")
    if any(character in value for character in "\0\n\r"):
        raise WrongError(f"{shown(value)} has a line break or a zero in it")
    return value


def name(value: object) -> str:
    """What a program may be called."""
    given = text(value)
    if given != given.strip() or not given.isprintable() or len(given) > LONGEST_NAME:
        raise WrongError(f"{shown(given)} is not a name", f"at most {LONGEST_NAME} printable characters")
    return given


def number(least: float, most: float) -> Callable[[Any], float]:
    """Takes numbers of this range."""

    def take(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongError(f"{shown(value)} is not a number", f"a number from {least:g} to {most:g}")
        if not least <= value <= most:
            raise WrongError(f"{shown(value)} is not a number from {least:g} to {most:.15g}")
        return float(value)

    return take


def whole_number(least: int, most: int) -> Callable[[Any], int]:
    """Takes whole numbers of this range."""

    def take(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise WrongError(f"{shown(value)} is not a whole number from {least} to {most}")
        return value

    return take


interval_seconds = number(SHORTEST_INTERVAL_SECONDS, LONGEST_INTERVAL_SECONDS)
seconds = number(0, LONGEST_SECONDS)
grace_seconds = number(0, LONGEST_GRACE_SECONDS)
backoff_seconds = number(SHORTEST_BACKOFF_SECONDS, LONGEST_SECONDS)


def flag(value: object) -> bool:
    """A yes or no."""
    if not isinstance(value, bool):
        raise WrongError(f"{shown(value)} is neither true nor false", "without quotes")
    return value


def ratio(value: object) -> float:
    """A percentage as a ratio."""
    return number(0, 100)(value) / 100


def size(value: object) -> int:
    """Bytes, as a number of them or with a unit: 1kB is 1000 of them, 1KiB is 1024."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _fitting(value, value)
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise WrongError(f"{shown(value)} is not a size", _SIZE_HINT)
    step = 1024 if match[3] else 1000
    power = _POWERS.index(match[2].upper()) + 1 if match[2] else 0
    return _fitting(int(float(match[1]) * step**power), value)


def _fitting(size_bytes: int, written: object) -> int:
    if not 0 <= size_bytes <= MOST_MEMORY_BYTES:
        raise WrongError(f"{shown(written)} is not a size that can be meant", _SIZE_HINT)
    return size_bytes


def words(value: object) -> tuple[str, ...]:
    """A list of words, or one text with commas between them."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list):
        raise WrongError(f"{shown(value)} is not a list", 'such as ["a", "b"]')
    return tuple(text(part).strip() for part in value)


def program_names(value: object) -> frozenset[str]:
    """Programs as the process list calls them."""
    found = words(value)
    for given in found:
        if "/" in given:
            raise WrongError(f"{shown(given)} is a path", "the name of the program alone, such as nvidia-smi")
    return frozenset(found)


def restart(value: object) -> Restart:
    """Whether a program that ended is started again."""
    for known in get_args(Restart):
        if value == known:
            return cast("Restart", known)
    raise WrongError(f"{shown(value)} is not known", f"known: {', '.join(get_args(Restart))}")
