"""Checks what facts and events hold before it becomes a row: anything else in them must not stop the book."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from typing import Any

from gpulse.store.book.findings import follow

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""What reading a fact or event that is not as it should be may raise."""
_LARGEST = (1 << 63) - 1


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
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError("it is not a whole number")
    return value


def spelled(document: Any) -> str:
    """A document as JSON.

    Raises:
        ValueError: It cannot be spelled: not a number, or infinite.
    """
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A document but for some of its fields."""
    return {name: value for name, value in document.items() if name not in names}


def add_event(
    database: sqlite3.Connection, time: float, node: int | None, kind: str, detail: str, *, from_frame: bool
) -> None:
    """Add one row to the events, and what it says of findings to theirs."""
    database.execute(
        "INSERT INTO events (time, node, kind, from_frame, detail) VALUES (?, ?, ?, ?, ?)",
        (time, node, kind, from_frame, detail),
    )
    follow(database, time, node, kind, detail)
