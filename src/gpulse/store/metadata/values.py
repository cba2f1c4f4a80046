"""Checks what facts and events hold before it becomes a row: anything else in them must not stop the metadata."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from gpulse.model.bounds import MAX_DEPTH, MAX_TEXT_CHARS, check_document

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading a fact or event that is not as it should be may raise."""
_MAX_INTEGER = (1 << 63) - 1
_ODD = re.compile(r"\\u|\d{19}|NaN|Infinity")


def text(value: Any) -> str:
    """A string that a file can hold.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} where a text belongs")  # noqa: TRY004  one error for all
    value.encode()  # half of a surrogate pair is refused here
    return value


def number(value: Any) -> float:
    """A finite number.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("it is not a number")
    return float(value)


def whole(value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
        raise ValueError("it is not a whole number")
    return value


def read_object(written: str) -> dict[str, Any]:
    """A JSON object of the metadata; empty, but for why, when an earlier version wrote what cannot be read any more."""
    try:
        found = json.loads(written)
        if _needs_check(written):
            check_document(found)
    except UNREADABLE as error:
        return {"unreadable": str(error)[:200]}
    return found if isinstance(found, dict) else {"unreadable": "it is not an object"}


def _needs_check(written: str) -> bool:
    """Whether a document may be deep, or hold long texts and numbers; that of most of them is known at once."""
    is_flat = written.count("{") + written.count("[") <= MAX_DEPTH
    return not is_flat or len(written) > MAX_TEXT_CHARS or _ODD.search(written) is not None


def spelled(document: Any) -> str:
    """A document as JSON.

    Raises:
        ValueError: It cannot be spelled: not a number, or infinite.
    """
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A document but for some of its fields."""
    return {name: value for name, value in document.items() if name not in names}
