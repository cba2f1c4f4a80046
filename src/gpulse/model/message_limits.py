"""Size limits of agent messages: heads reject what exceeds them, and agents truncate before they send."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpulse.model.safe_text import replace_surrogates

MAX_TEXT_CHARS = 4096
"""Length of any text; kernel paths are not longer."""
MAX_KEY_CHARS = 256
"""Length of a field name."""
MAX_NESTING_DEPTH = 16
"""Nesting depth of lists and objects in one event; agents send at most four levels."""
MAX_EVENT_BYTES = 1 << 20
"""Size of one event."""
MAX_EVENTS_BYTES = 4 << 20
"""Size of all events of one frame."""
MAX_FRAME_EVENTS = 4096
"""Number of events of one frame."""
MAX_LIST_ITEMS = 4096
"""Length of a list in an event: arguments of a command, findings, health entries."""
MAX_COMMAND_CHARS = 8192
"""Total length of a command line; the rest is cut off."""
MAX_CODE_LOCATIONS = 10
"""Lines of code that one finding names."""
MAX_PATH_CHARS = 512
"""Length of a source file's path in a finding or stack; a longer one is cut at its start."""
MAX_FUNCTION_CHARS = 256
"""Length of a function's name in a finding or stack."""
MAX_CODE_TEXT_CHARS = 1024
"""Length of a sentence about lines of code."""
MAX_INTEGER = (1 << 63) - 1
"""Largest integer that databases and Parquet files can hold."""
MAX_VALUE = 1e18
"""Largest value of a quantity in a GPU's description, in its base unit."""
MAX_TIME_SECONDS = 253_402_300_799.0
"""The last second of the year 9999, where Python's calendar ends."""
MAX_TIME_US = 253_402_300_799_999_999
"""The last microsecond of the year 9999."""
EVENTS_LEFT_OUT = "events_left_out"
"""Kind of the event that reports how many events did not fit into a frame."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def bound_text(text: str) -> str:
    """Return the text in a form that heads accept: valid UTF-8, without NUL, and not too long."""
    if len(text) > MAX_TEXT_CHARS:
        text = text[: MAX_TEXT_CHARS - 1] + "…"
    text = replace_surrogates(text)
    return text.replace("\0", "?") if "\0" in text else text


def bound_name(text: str) -> str:
    """Like `bound_text`, and without control characters: for names of disks, mount points and GPUs."""
    text = bound_text(text)
    return text if text.isprintable() else _CONTROL.sub("?", text)


def bound_command(command: Iterable[str]) -> list[str]:
    """Return the arguments of a command line, cut off at the limits that heads accept."""
    kept: list[str] = []
    left = MAX_COMMAND_CHARS
    for argument in command:
        if left <= 0 or len(kept) >= MAX_LIST_ITEMS - 1:
            kept.append("…")
            break
        kept.append(bound_text(argument if len(argument) <= left else argument[: left - 1] + "…"))
        left -= len(argument)
    return kept


def bound_path(path: str) -> str:
    """Return the path of a source file without control characters, cut at its start: its end names the file."""
    path = bound_name(path[-MAX_PATH_CHARS - 1 :])
    return path if len(path) <= MAX_PATH_CHARS else f"…{path[1 - MAX_PATH_CHARS :]}"


def bound_code_text(text: str, max_chars: int = MAX_CODE_TEXT_CHARS) -> str:
    """Return the name of a function, or a sentence about code, without control characters and not too long."""
    text = bound_name(text)
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def bound_event(value: Any) -> Any:
    """Return an event with all its texts and lists cut to the limits."""
    if isinstance(value, str):
        return bound_text(value)
    if isinstance(value, Mapping):
        return {name: bound_event(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [bound_event(item) for item in value[:MAX_LIST_ITEMS]]
    return value


def encode_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode the events of a frame; those that do not fit are only counted, in an event of their own.

    Raises:
        ValueError: An event contains a non-finite number.
    """
    pieces: list[str] = []
    size = left_out = 0
    for event in events:
        piece = json.dumps(bound_event(event), separators=(",", ":"), allow_nan=False)
        is_full = len(pieces) >= MAX_FRAME_EVENTS - 1 or size + len(piece) > MAX_EVENTS_BYTES - 1024
        if is_full or len(piece) > MAX_EVENT_BYTES:
            left_out += 1
            continue
        pieces.append(piece)
        size += len(piece) + 1
    if left_out:
        pieces.append(json.dumps({"event": EVENTS_LEFT_OUT, "events": left_out}))
    return f"[{','.join(pieces)}]".encode() if pieces else b""


def check_document(value: Any) -> None:
    """Check that a JSON value can be stored, written as JSON again and forwarded.

    Raises:
        ValueError: It is nested too deeply, or databases cannot hold one of its texts or numbers.
    """
    level = [value]
    for _ in range(MAX_NESTING_DEPTH):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                _check_text(item, MAX_TEXT_CHARS)
            elif kind is int:
                if not -MAX_INTEGER <= item <= MAX_INTEGER:
                    raise ValueError("an integer has more than 64 bits")
            elif kind is float:
                if not math.isfinite(item):
                    raise ValueError("a number is not finite")
            elif kind is dict:
                for name in item:
                    if type(name) is not str:
                        raise ValueError("a field name is not a string")
                    _check_text(name, MAX_KEY_CHARS)
                inner += item.values()
            elif kind is list or kind is tuple:
                inner += item
            elif item is not None and kind is not bool:
                raise ValueError(f"{kind.__name__} is not a JSON type")
        if not inner:
            return
        level = inner
    raise ValueError(f"lists and objects are nested more than {MAX_NESTING_DEPTH} levels deep")


def _check_text(text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise ValueError(f"a string has more than {max_chars} characters")
    if "\0" in text:
        raise ValueError("a string contains a NUL character")
    if not text.isascii():
        text.encode()  # raises for a lone surrogate
