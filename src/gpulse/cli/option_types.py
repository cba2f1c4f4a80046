"""Types of option values that several commands share: durations, sizes and labels."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

from gpulse.errors import UsageError
from gpulse.model.safe_text import quoted
from gpulse.model.session import MAX_LABEL_CHARS, MAX_LABELS
from gpulse.model.time_text import parse_duration

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def duration(text: str) -> float:
    """Return the seconds of a duration from the command line: `90`, `10m`, `1h30m`, `30d`.

    Raises:
        click.BadParameter: It is not a duration.
    """
    try:
        return parse_duration(text.strip().lower())
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a duration; write 90, 10m, 1h30m or 30d") from error


def size(text: str) -> int:
    """Return the bytes of a size from the command line: `500MB`, `50GiB`.

    Raises:
        click.BadParameter: It is not a size.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a valid size; use a value such as 500MB or 50GiB")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def labels(given: Iterable[str]) -> dict[str, str]:
    """Return the labels of `KEY=VALUE` texts from the command line.

    Raises:
        UsageError: A text is not a label, or there are too many.
    """
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"{text!r} is not a label", hint="write --label KEY=VALUE")
        if max(len(key), len(value)) > MAX_LABEL_CHARS or not text.isprintable():
            raise UsageError(
                f"{quoted(text)} is not a valid label: it is too long, or has unprintable characters",
                hint=f"use up to {MAX_LABEL_CHARS} characters each for the key and the value",
            )
        found[key] = value
    if len(found) > MAX_LABELS:
        raise UsageError(f"{len(found)} labels are too many", hint=f"give at most {MAX_LABELS}")
    return found
