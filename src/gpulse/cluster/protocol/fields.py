"""The fields of a request: what each may hold, in words for people, in code, and as a JSON schema."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gpulse.errors import UsageError
from gpulse.model.session import LONGEST_LABEL, MOST_LABELS, checked_name

LONGEST_TEXT = 200
MOST_ITEMS = 10_000
MOST_REPEATED = 500
"""How often one field may be in an address."""
MOST_CHOSEN = 32
"""How many of some words one field may hold."""
LATEST = 253_402_300_799.0
"""The last second of the year 9999."""
LONGEST_SECONDS = 3650 * 86400.0
"""Ten years: nothing that is stored is older, and nobody waits for longer."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = r"[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d|w)"
_PARTS = re.compile(rf"(?:{_PART}){{1,8}}")
_ONE_PART = re.compile(r"([0-9.]+)(ms|s|m|h|d|w)")
_NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?")
_WHOLE = re.compile(r"-?[0-9]{1,30}")
_CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029"
_CONTROL = re.compile(f"[{_CONTROLS}]")

Schema = dict[str, Any]


class Kind(NamedTuple):
    """What a field may hold."""

    parse: Callable[[Any, float], Any]
    """From JSON, or from the text of a query, and the time now. Raises ValueError with what is wrong."""
    schema: Schema
    is_list: bool = False
    """Whether a query may give it more than once."""


class Field(NamedTuple):
    """One field of a request."""

    name: str
    kind: Kind
    help: str
    required: bool = False
    may_be_empty: bool = False
    """An empty text stands for nothing, as clients of old send it."""

    def schema(self, *, in_body: bool) -> Schema:
        """What it may hold, null for nothing included where JSON has it."""
        schema: Schema = {**self.kind.schema, "description": self.help}
        if not in_body or self.required:
            return schema
        others: list[Schema] = [{"type": "null"}]
        if self.may_be_empty:
            others.append({"type": "string", "const": ""})
        return {"anyOf": [self.kind.schema, *others], "description": self.help}


def parse(fields: Sequence[Field], body: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The values of the fields that were given.

    Raises:
        UsageError: A field is unknown, is missing, or holds what it cannot.
    """
    known = {field.name: field for field in fields}
    for name in body:
        if name not in known:
            raise UsageError(f"there is no field {_shown(name)} here", hint=_known(known))
    values: dict[str, Any] = {}
    for field in fields:
        given = body.get(field.name)
        if given is None or (given == "" and field.may_be_empty):
            if field.required:
                raise UsageError(f"{field.name} is missing", hint=f"{field.name}: {field.help}")
            continue
        try:
            values[field.name] = field.kind.parse(given, now)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"{field.name}: {error}", hint=f"{field.name}: {field.help}") from error
    return values


def duration(given: Any) -> float:
    """A length of time in seconds, from a number of them or from text such as `10m` or `1h30m`.

    Raises:
        ValueError: It is none, or more than ten years.
    """
    seconds = _as_number(given)
    if seconds is None and isinstance(given, str) and _PARTS.fullmatch(given):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _ONE_PART.findall(given))
    if seconds is None or seconds < 0:
        raise ValueError(f"{_shown(given)} is not a length of time, such as 600, 10m or 1h30m")
    if seconds > LONGEST_SECONDS:
        raise ValueError(f"{_shown(given)} is too long, ten years (3650d) are the most")
    return seconds


def moment(given: Any, now: float) -> float:
    """A time in epoch seconds, from such a number, ISO 8601 (UTC unless it says otherwise), `-10m` or `now`.

    A date before 1970 means the first moment of that year, where everything that is stored is later.

    Raises:
        ValueError: It is none, or after the year 9999.
    """
    seconds = _as_number(given)
    if seconds is not None and seconds > LATEST:
        raise ValueError(f"{_shown(given)} is after the year 9999; times are in seconds, not in milliseconds")
    if seconds is not None and seconds >= 0:
        return seconds
    if seconds is None and isinstance(given, str):
        if given == "now":
            return now
        if given.startswith("-") and _PARTS.fullmatch(given[1:]):
            return max(0.0, now - duration(given[1:]))
        try:
            read = datetime.fromisoformat(given.upper()) if len(given) >= 8 else None
        except ValueError:
            read = None
        if read is not None:
            aware = read if read.tzinfo is not None else read.replace(tzinfo=UTC)
            return min(max(0.0, aware.timestamp()), LATEST)
    raise ValueError(
        f"{_shown(given)} is not a time, such as 1767225600, 2026-01-01T00:00:00Z, -10m (ten minutes ago) or now"
    )


def text(given: Any, longest: int = LONGEST_TEXT) -> str:
    """A text that is not empty, not too long, and can be written as UTF-8.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(given, str):
        raise ValueError(f"{_shown(given)} is not a text")  # noqa: TRY004  one kind of error for every wrong value
    if not given:
        raise ValueError("it is empty")
    if len(given) > longest:
        raise ValueError(f"it has {len(given):,} characters, {longest:,} are the most")
    try:
        given.encode()
    except UnicodeEncodeError:
        raise ValueError("it has half a character (a lone surrogate), which is no text") from None
    if _CONTROL.search(given):
        raise ValueError(f"{_shown(given)} has a control character, such as a line's end, which is no text")
    return given


def _word(given: Any) -> str:
    word = text(given)
    if "/" in word or word in (".", ".."):
        raise ValueError(f"{_shown(given)} has a slash, or is one of . and ..")
    return word


def _texts(given: Any, _now: float) -> tuple[str, ...]:
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"{_shown(given)} is not a list of texts")  # noqa: TRY004  as in text()
    if len(given) > MOST_ITEMS:
        raise ValueError(f"it has {len(given):,} entries, {MOST_ITEMS:,} are the most")
    return tuple(text(item) for item in given)


def _parts(given: Any, now: float) -> tuple[str, ...]:
    """A list from a query: given again and again, or once with commas, or both."""
    items = given if isinstance(given, (list, tuple)) else [given]
    split = [part for item in items for part in (item.split(",") if isinstance(item, str) else [item])]
    return _texts(split, now)


def _labels(given: Any, _now: float) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{_shown(given)} is not an object of texts")  # noqa: TRY004  as in text()
    if len(given) > MOST_LABELS:
        raise ValueError(f"it has {len(given)} labels, {MOST_LABELS} are the most")
    labels = {}
    for key, value in given.items():
        if value == "":
            labels[text(key, LONGEST_LABEL)] = ""
        else:
            labels[text(key, LONGEST_LABEL)] = text(value, LONGEST_LABEL)
    return labels


def _name(given: Any, _now: float) -> str:
    if not isinstance(given, str):
        raise ValueError(f"{_shown(given)} is not a name")  # noqa: TRY004  as in text()
    return checked_name(given)


def _as_number(given: Any) -> float | None:
    """A finite number, or None for anything else."""
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


def whole(least: int, most: int) -> Kind:
    """A whole number between two others."""

    def read(given: Any, _now: float) -> int:
        number = None
        if isinstance(given, str) and _WHOLE.fullmatch(given):
            number = int(given)
        elif isinstance(given, int) and not isinstance(given, bool):
            number = given
        elif isinstance(given, float) and given.is_integer():
            number = int(given)
        if number is None or not least <= number <= most:
            raise ValueError(f"{_shown(given)} is not a whole number from {least:,} to {most:,}")
        return number

    return Kind(read, {"type": "integer", "minimum": least, "maximum": most})


def choice(*words: str) -> Kind:
    """One of a few words."""

    def read(given: Any, _now: float) -> str:
        if not isinstance(given, str) or given not in words:
            some = ", ".join(words) if len(words) <= 10 else f"{', '.join(words[:10])}, …"
            raise ValueError(f"{_shown(given)} is none of: {some}")
        return given

    return Kind(read, {"type": "string", "enum": list(words)})


def some_of(*words: str) -> Kind:
    """A few of some words, each once; in a query given again and again, or with commas."""
    one = choice(*words)

    def read(given: Any, now: float) -> tuple[str, ...]:
        found = dict.fromkeys(one.parse(item, now) for item in _parts(given, now))
        if not found:
            raise ValueError("it is empty")
        if len(found) > MOST_CHOSEN:
            raise ValueError(f"it has {len(found)} entries, {MOST_CHOSEN} are the most")
        return tuple(found)

    items = {"type": "array", "minItems": 1, "maxItems": MOST_CHOSEN, "items": one.schema}
    return Kind(read, items, is_list=True)


def _flag_word(given: Any, now: float) -> bool:
    return given == "true" if given in ("true", "false") else _flag(given, now)


def _flag(given: Any, _now: float) -> bool:
    if isinstance(given, bool):
        return given
    raise ValueError(f"{_shown(given)} is neither true nor false")


_CONTROLS_ESCAPED = r"\u0000-\u001f\u007f-\u009f\u2028\u2029"
_NO_CONTROLS = f"^[^{_CONTROLS_ESCAPED}]*$"
_NO_COMMA: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": LONGEST_TEXT,
    "pattern": f"^[^,{_CONTROLS_ESCAPED}]+$",
}
# What certainly is no more than ten years; a pattern cannot add up.
_LENGTHS = "|".join(
    rf"[0-9]{{1,{digits}}}(\.[0-9]{{1,9}})?{unit}"
    for unit, digits in {"ms": 10, "s": 7, "m": 6, "h": 4, "d": 3, "w": 2}.items()
)
_DURATION = f"({_LENGTHS}){{1,3}}"

NAME = Kind(_name, {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"})
TEXT = Kind(
    lambda given, _now: text(given),
    {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT, "pattern": _NO_CONTROLS},
)
WORD = Kind(
    lambda given, _now: _word(given),
    {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT, "pattern": f"^[^/{_CONTROLS_ESCAPED}]+$"},
)
"""A text that can be one part of a path."""
TEXTS = Kind(
    _texts,
    {
        "type": "array",
        "maxItems": MOST_ITEMS,
        "items": {"type": "string", "minLength": 1, "maxLength": LONGEST_TEXT, "pattern": _NO_CONTROLS},
    },
)
PARTS = Kind(_parts, {"type": "array", "maxItems": MOST_REPEATED, "items": _NO_COMMA}, is_list=True)
LABELS = Kind(
    _labels,
    {
        "type": "object",
        "maxProperties": MOST_LABELS,
        "propertyNames": {"minLength": 1, "maxLength": LONGEST_LABEL, "pattern": _NO_CONTROLS},
        "additionalProperties": {"type": "string", "maxLength": LONGEST_LABEL, "pattern": _NO_CONTROLS},
    },
)
FLAG = Kind(_flag, {"type": "boolean"})
FLAG_WORD = Kind(_flag_word, {"type": "boolean"})
"""For a query, where everything is text."""
DURATION = Kind(
    lambda given, _now: duration(given),
    {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": LONGEST_SECONDS},
            {"type": "string", "pattern": f"^{_DURATION}$"},
        ]
    },
)
TIME = Kind(
    moment,
    {
        "anyOf": [
            {"type": "number", "minimum": 0, "maximum": LATEST},
            {"type": "string", "format": "date-time"},
            {"type": "string", "pattern": f"^(now|-{_DURATION})$"},
        ]
    },
)


def _shown(given: Any) -> str:
    """A few characters of what was given, safe to print."""
    shown = (
        ascii(given) if isinstance(given, str) else repr(given) if _is_short(given) else type(given).__name__
    )
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _is_short(given: Any) -> bool:
    return (
        given is None or isinstance(given, (bool, float)) or (isinstance(given, int) and abs(given) < 10**18)
    )


def _known(fields: Mapping[str, Field]) -> str:
    return f"the fields are: {', '.join(fields)}" if fields else "it takes no fields"
