"""Types of the values in requests: what each may hold, in code, in JSON schema and in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from gpulse.model.metric import CATALOGUE
from gpulse.model.session import (
    LONGEST_LABEL,
    MAX_INTERVAL_MS,
    MIN_INTERVAL_MS,
    MOST_LABELS,
    checked_name,
)
from gpulse.model.time_text import MAX_DURATION_SECONDS, MAX_TIME_SECONDS, parse_duration, parse_time

MAX_TEXT_CHARACTERS = 200
MAX_ITEMS = 10_000
MAX_REPEATED = 500
"""How often one field may stand in an address."""
MAX_METRICS = 32

_END = r"$(?!\n)"
"""The end of a text; `$` alone also matches before a line end."""
_CONTROLS = r"\u0000-\u001f\u007f-\u009f\u2028\u2029"
_LINE = f"^[^{_CONTROLS}]*{_END}"
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_TEXT_IN_WORDS = f"a text of 1 to {MAX_TEXT_CHARACTERS} characters"
_NO_CONTROLS = "without control characters such as line ends"
# What certainly is no more than ten years; a pattern cannot add up.
_LENGTHS = "|".join(
    rf"[0-9]{{1,{digits}}}(\.[0-9]{{1,9}})?{unit}"
    for unit, digits in {"ms": 10, "s": 7, "m": 6, "h": 4, "d": 3, "w": 2}.items()
)
_LENGTH = f"({_LENGTHS}){{1,3}}"


class Duration(float):
    """A length of time in seconds: a number of them, or text such as `10m`."""

    SCHEMA: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": MAX_DURATION_SECONDS},
            {"type": "string", "pattern": f"^{_LENGTH}$"},
        ]
    }

    @classmethod
    def decode(cls, given: object, _now: float) -> Self:
        """Read a length of time.

        Raises:
            ValueError: It is not one.
        """
        return cls(parse_duration(given))


class Time(float):
    """A time in epoch seconds: such a number, ISO 8601, `-10m` or `now`."""

    SCHEMA: ClassVar[dict[str, Any]] = {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": MAX_TIME_SECONDS},
            {"type": "string", "format": "date-time"},
            {"type": "string", "pattern": f"^(now|-{_LENGTH})$"},
        ]
    }

    @classmethod
    def decode(cls, given: object, now: float) -> Self:
        """Read a time.

        Raises:
            ValueError: It is not one.
        """
        return cls(parse_time(given, now))


def schema_of(kind: type) -> dict[str, Any]:
    """Return the JSON schema of a type that msgspec does not know."""
    if issubclass(kind, (Duration, Time)):
        return dict(kind.SCHEMA)
    raise NotImplementedError


_CHECK_NAME = {"check": checked_name}
"""Raises the error for a name that no session can have, in the same words as everywhere."""
SessionName = Annotated[str, Meta(pattern=f"^{_NAME}{_END}", title="a session's name", extra=_CHECK_NAME)]
OptionalSessionName = Annotated[
    str, Meta(pattern=f"^({_NAME})?{_END}", title="a session's name", extra=_CHECK_NAME)
]
Text = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=_LINE,
        title=f"{_TEXT_IN_WORDS} {_NO_CONTROLS}",
    ),
]
PathText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=rf"^(?!\.{{1,2}}{_END})[^/{_CONTROLS}]+{_END}",
        title=f"{_TEXT_IN_WORDS} without slashes and {_NO_CONTROLS}, other than . and ..",
    ),
]
"""A text that can be one part of a path."""
_ListedText = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_TEXT_CHARACTERS,
        pattern=f"^[^,{_CONTROLS}]+{_END}",
        title=f"{_TEXT_IN_WORDS} without commas and {_NO_CONTROLS}",
    ),
]
Texts = Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)]
QueryTexts = Annotated[tuple[_ListedText, ...], Meta(max_length=MAX_ITEMS)]
"""Texts in an address, with commas or repeated."""
Labels = Annotated[
    dict[
        Annotated[str, Meta(min_length=1, max_length=LONGEST_LABEL, pattern=_LINE)],
        Annotated[str, Meta(max_length=LONGEST_LABEL, pattern=_LINE)],
    ],
    Meta(
        max_length=MOST_LABELS,
        title=f"an object of at most {MOST_LABELS} texts by name, each of at most {LONGEST_LABEL} characters {_NO_CONTROLS}",
    ),
]
IntervalMs = Annotated[int, Meta(ge=MIN_INTERVAL_MS, le=MAX_INTERVAL_MS)]
_METRICS = tuple(dict.fromkeys(name for names in CATALOGUE.values() for name in names))
if TYPE_CHECKING:
    Metric = str
else:
    Metric = Literal[_METRICS]
Metrics = Annotated[tuple[Metric, ...], Meta(min_length=1, max_length=MAX_METRICS)]
