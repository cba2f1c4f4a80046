"""The order in which people list names with numbers in them: `node2` before `node10`."""

from __future__ import annotations

import re

_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_MAX_DIGITS = 4000
"""Python refuses to read longer numbers; no name of a machine has them."""

NaturalKey = tuple[tuple[tuple[str, int], ...], str]


def natural_key(name: str) -> NaturalKey:
    """Return the key to sort names by: numbers in them by their value, letters whatever their case."""
    parts = _NUMBERS.split(name.casefold())
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=True)
    return tuple((text, int(number[:_MAX_DIGITS]) if number else -1) for text, number in pairs), name
