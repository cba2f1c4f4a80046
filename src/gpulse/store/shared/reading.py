"""Reads what another head tells, from where it was read last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

from gpulse.store.book.values import UNREADABLE, whole
from gpulse.store.shared.facts import Told
from gpulse.store.shared.folder import file_numbers, file_path

LONGEST_LINE_BYTES = 16 << 20
"""A line is longer than a head makes them by one record of its log at most."""


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
    with open(file_path(folder, file), "rb") as opened:
        opened.seek(offset)
        data = opened.read(most_bytes)
        if len(data) == most_bytes and b"\n" not in data:
            data += opened.read(LONGEST_LINE_BYTES - most_bytes)
        if len(data) >= LONGEST_LINE_BYTES and b"\n" not in data:
            return _without_line(opened, file, offset + len(data))
    length = data.rfind(b"\n") + 1
    if not length:
        later = [number for number in numbers if number > file]
        return Stretch(later[0], 0, 0, [], 0) if later else None
    facts, reached, unreadable = _understood(data[: length - 1].split(b"\n"), position)
    return Stretch(file, offset + length, reached, facts, unreadable)


def _without_line(opened: BinaryIO, file: int, offset: int) -> Stretch:
    """What is left of a line that no head would have written: nothing, up to its end if that is there."""
    while data := opened.read(1 << 20):
        end = data.find(b"\n")
        if end >= 0:
            return Stretch(file, offset + end + 1, 0, [], 1)
        offset += len(data)
    return Stretch(file, offset, 0, [], 1)


def _understood(lines: Sequence[bytes], position: int) -> tuple[list[Told], int, int]:
    facts: list[Told] = []
    unreadable = reached = 0
    for line in lines:
        try:
            document: dict[str, Any] = json.loads(line, parse_constant=_refuse)
            told = [fact for fact in document["facts"] if not 0 < fact["position"] <= position]
            position = max(position, whole(document["to"]))
        except UNREADABLE:
            unreadable += 1
            continue
        facts += told
        reached = position
    return facts, reached, unreadable


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
