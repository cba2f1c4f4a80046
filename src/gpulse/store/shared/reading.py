"""Reads what another head tells, from where it was read last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulse.store.shared.facts import Told
from gpulse.store.shared.folder import file_numbers, file_path


class Stretch(NamedTuple):
    """A part of what a head tells."""

    file: int
    """The file in which it ends."""
    offset: int
    """The byte after it."""
    position: int
    """Up to which position of that head's log it reaches; 0 when that is not told."""
    facts: list[Told]
    unreadable: int
    """How many lines could not be understood."""


def read_on(
    folder: str, file: int, offset: int, position: int, *, most_bytes: int = 1 << 20
) -> Stretch | None:
    """What a head tells after a place; None when that is nothing yet.

    Args:
        folder: The head's.
        file: Up to which file it was read; 0 at first.
        offset: Up to which byte of it.
        position: Up to which position of that head's log it was read: what is told again is left out.
        most_bytes: About so much at once.

    Raises:
        OSError: It cannot be read.
    """
    numbers = file_numbers(folder)  # before a file is read: what has a successor is complete
    if file not in numbers:
        later = [number for number in numbers if number > file]
        if not later:
            return None
        file, offset = later[0], 0
    data = _read(file_path(folder, file), offset, most_bytes)
    whole = data.rfind(b"\n") + 1
    if not whole:
        later = [number for number in numbers if number > file]
        return Stretch(later[0], 0, 0, [], 0) if later else None
    facts, reached, unreadable = _understood(data[: whole - 1].split(b"\n"), position)
    return Stretch(file, offset + whole, reached, facts, unreadable)


def _read(path: str, offset: int, most_bytes: int) -> bytes:
    """Bytes of a file from a place on: many, or up to the end of a line that is longer."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(most_bytes)
        while data and b"\n" not in data:
            more = file.read(most_bytes)
            if not more:
                break
            data += more
        return data


def _understood(lines: Sequence[bytes], position: int) -> tuple[list[Told], int, int]:
    facts: list[Told] = []
    unreadable = reached = 0
    for line in lines:
        try:
            document: dict[str, Any] = json.loads(line)
            told = [fact for fact in document["facts"] if not 0 < fact["position"] <= position]
            position = max(position, int(document["to"]))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            unreadable += 1
            continue
        facts += told
        reached = position
    return facts, reached, unreadable
