"""Limits of what agents tell heads: heads refuse what is beyond them, and agents cut it off before they send it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_TEXT_CHARS = 4096
"""Of any text: a path of the kernel's is no longer."""
MAX_KEY_CHARS = 256
"""Of a field's name."""
MAX_DEPTH = 16
"""How deep lists and objects of one event may lie within each other; what agents send is four deep."""
MAX_EVENT_BYTES = 1 << 20
"""Of one event."""
MAX_EVENTS_BYTES = 4 << 20
"""Of all events of one frame."""
MAX_LIST_ITEMS = 4096
"""Of a list within an event: arguments of a command, findings, entries of health."""
MAX_COMMAND_CHARS = 8192
"""Of a command line in all; the rest of it is left out."""
MAX_INTEGER = (1 << 63) - 1
"""What databases and Parquet files can hold."""
MAX_VALUE = 1e18
"""Of a quantity that a GPU is described with, in its base unit."""
MAX_TIME_SECONDS = 253_402_300_800.0
"""Where calendars end, with the year 9999."""
LEFT_OUT = "events_left_out"
"""The kind of event that says how many others did not fit into a frame."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def bounded_text(text: str) -> str:
    """The text without what no head takes: characters that UTF-8 does not have, NUL, and what is too long."""
    if len(text) > MAX_TEXT_CHARS:
        text = text[: MAX_TEXT_CHARS - 1] + "…"
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()
    return text.replace("\0", "?") if "\0" in text else text


def bounded_name(text: str) -> str:
    """The same without control characters, for what names a disk, a mount point or a GPU."""
    text = bounded_text(text)
    return text if text.isprintable() else _CONTROL.sub("?", text)


def bounded_command(command: Iterable[str]) -> list[str]:
    """The arguments of a command line up to what heads take of it."""
    kept: list[str] = []
    left = MAX_COMMAND_CHARS
    for argument in command:
        if left <= 0 or len(kept) >= MAX_LIST_ITEMS - 1:
            kept.append("…")
            break
        kept.append(bounded_text(argument if len(argument) <= left else argument[: left - 1] + "…"))
        left -= len(argument)
    return kept


def bounded(value: Any) -> Any:
    """An event of an agent's own making with all of its texts and lists within the limits."""
    if isinstance(value, str):
        return bounded_text(value)
    if isinstance(value, Mapping):
        return {name: bounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [bounded(item) for item in value[:MAX_LIST_ITEMS]]
    return value


def encode_events(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events as they travel in a frame; those that do not fit are counted in one of their own.

    Raises:
        ValueError: One holds a number that is not finite.
    """
    pieces: list[str] = []
    size = left_out = 0
    for event in events:
        piece = json.dumps(bounded(event), separators=(",", ":"), allow_nan=False)
        if len(piece) > MAX_EVENT_BYTES or size + len(piece) > MAX_EVENTS_BYTES - 1024:
            left_out += 1
            continue
        pieces.append(piece)
        size += len(piece) + 1
    if left_out:
        pieces.append(json.dumps({"event": LEFT_OUT, "events": left_out}))
    return f"[{','.join(pieces)}]".encode() if pieces else b""


def check_document(value: Any) -> None:
    """See that a JSON value can be stored, written as JSON again and sent on, whatever it says.

    Raises:
        ValueError: It is too deep, or a text or a number in it is beyond what databases hold.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                _check_text(item, MAX_TEXT_CHARS)
            elif kind is int:
                if not -MAX_INTEGER <= item <= MAX_INTEGER:
                    raise ValueError("a whole number has more than 64 bits")
            elif kind is float:
                if not math.isfinite(item):
                    raise ValueError("a number is not finite")
            elif kind is dict:
                for name in item:
                    if type(name) is not str:
                        raise ValueError("a field's name is not a text")
                    _check_text(name, MAX_KEY_CHARS)
                inner += item.values()
            elif kind is list or kind is tuple:
                inner += item
            elif item is not None and kind is not bool:
                raise ValueError(f"{kind.__name__} is not a JSON type")
        if not inner:
            return
        level = inner
    raise ValueError(f"lists and objects lie more than {MAX_DEPTH} deep within each other")


def _check_text(text: str, longest: int) -> None:
    if len(text) > longest:
        raise ValueError(f"a text has more than {longest} characters")
    if "\0" in text:
        raise ValueError("a text has a NUL character in it")
    if not text.isascii():
        text.encode()  # half of a surrogate pair is refused here
