"""Check values of facts and events before they are stored, so that invalid data cannot stop the metadata."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from gpulse.model.message_limits import MAX_NESTING_DEPTH, MAX_TEXT_CHARS, check_document

FORMAT_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions that an invalid fact or event may cause."""
_MAX_INTEGER = (1 << 63) - 1
_SUSPECT = re.compile(r"\\u|\d{19}|NaN|Infinity")


def check_text(value: Any) -> str:
    """Return a value that is a valid UTF-8 string.

    Raises:
        ValueError: The value is not one.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a string, not {type(value).__name__}")  # noqa: TRY004  the data is wrong, not the caller
    value.encode()  # fails for unpaired surrogates
    return value


def check_number(value: Any) -> float:
    """Return a value that is a finite number.

    Raises:
        ValueError: The value is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


def check_integer(value: Any) -> int:
    """Return a value that is a non-negative integer.

    Raises:
        ValueError: The value is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
        raise ValueError("expected a non-negative integer")
    return value


def parse_object(written: str) -> dict[str, Any]:
    """Parse a JSON object of the metadata; if it is unreadable, return an object with only the reason."""
    try:
        found = json.loads(written)
        if _needs_check(written):
            check_document(found)
    except FORMAT_ERRORS as error:
        return {"unreadable": str(error)[:200]}
    return found if isinstance(found, dict) else {"unreadable": "expected an object"}


def _needs_check(written: str) -> bool:
    """Whether a document may be deeply nested, or contain long texts or large numbers; a quick test for most of them."""
    is_flat = written.count("{") + written.count("[") <= MAX_NESTING_DEPTH
    return not is_flat or len(written) > MAX_TEXT_CHARS or _SUSPECT.search(written) is not None


def dump_json(document: Any) -> str:
    """Return a document as JSON.

    Raises:
        ValueError: The document contains NaN or infinity.
    """
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def omit_fields(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a document without some of its fields."""
    return {name: value for name, value in document.items() if name not in names}
