"""Damage in a data directory: checksums that reveal it, what it affects, and the directory to which it is moved."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from zlib import crc32

from gpulse.atomic_files import sync_directory
from gpulse.model.formatting import local_time
from gpulse.store.disk_errors import disk_errors
from gpulse.store.incomplete_answers import note_missing

log = logging.getLogger(__name__)

METADATA_SCOPE = "metadata"
"""The scope of damage to sessions, events, findings and processes."""
DAMAGED_DIRECTORY = "damaged"
"""Directory in a data directory to which damaged files are moved. Nothing in it is ever read or removed."""
_MAX_SENTENCES = 10
_CHUNK_BYTES = 1 << 20
_TAIL = b',"checksum":"%08x"}'
_TAIL_PATTERN = re.compile(rb',"checksum":"([0-9a-f]{8})"\}')
_TAIL_BYTES = 23
_MIN_ALIKE = 8
"""A file whose end equals a checksum's in this many of 15 fixed characters had a checksum."""


class Damage(NamedTuple):
    """A damaged part of a data directory, and what it affects."""

    path: str
    reason: str
    """Completes "PATH: …"."""
    affects: str
    """What is missing because of it, as a sentence without a full stop."""
    start: float | None = None
    """Start of the affected time in epoch seconds; None if it is unknown or if no samples are affected."""
    end: float | None = None
    nodes: tuple[int, ...] | None = None
    """The affected nodes; None for all."""
    scope: str | None = None
    """The affected scope of metrics, or `METADATA_SCOPE`; None for all scopes of metrics."""
    moved_to: str | None = None
    """Where the damaged file was moved, or a copy of it."""

    @property
    def sentence(self) -> str:
        """The damage in one line, for people."""
        moved = f" (moved to {self.moved_to})" if self.moved_to else ""
        return f"{self.path} is damaged: {self.reason}{moved}; {self.affects}"

    @property
    def note(self) -> str:
        """What is missing from an answer because of it."""
        return f"{self.affects} ({os.path.basename(self.path)} is damaged: {self.reason})"

    @property
    def key(self) -> tuple[object, ...]:
        """Identifies the damage, also when its segment was merged into another one or its file was moved aside."""
        if self.start is None:
            return self.path, self.reason
        return os.path.basename(self.path), self.scope, self.start, self.end

    @classmethod
    def from_detail(cls, detail: Mapping[str, Any]) -> Damage:
        """Return the damage that an event describes.

        Raises:
            TypeError: The event does not describe damage.
        """
        found = cls(**detail)
        return found if found.nodes is None else found._replace(nodes=tuple(found.nodes))

    def to_detail(self) -> dict[str, Any]:
        """Return the content of the event."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def meets(
        self, start: float, end: float, nodes: frozenset[int] | None = None, scope: str | None = None
    ) -> bool:
        """Whether data of a scope in a time range, and optionally of some nodes, is missing because of it."""
        return (
            self.start is not None
            and self.end is not None
            and self.start < end
            and self.end >= start
            and (nodes is None or self.nodes is None or not nodes.isdisjoint(self.nodes))
            and (scope == self.scope or (self.scope is None and scope != METADATA_SCOPE))
        )


class DamageList:
    """The known damage of a data directory. Safe to use from several threads."""

    def __init__(self) -> None:
        self.gaps: tuple[Damage, ...] = ()
        """Damage because of which something is missing from answers."""
        self.found: tuple[Damage, ...] = ()
        """Damage that was found since the head started."""
        self._lock = threading.Lock()
        self._known: set[tuple[object, ...]] = set()
        self._unreported: list[Damage] = []

    def add(self, damage: Damage, *, is_known: bool = False, is_gap: bool = True) -> None:
        """Add damage, and log it unless that was done before.

        Args:
            damage: The damage.
            is_known: Whether it was reported before the head was started.
            is_gap: Whether something is missing from answers because of it, if it has a time range.
        """
        with self._lock:
            is_new = damage.key not in self._known
            self._known.add(damage.key)
            if is_gap and damage.start is not None and damage.key not in {one.key for one in self.gaps}:
                self.gaps = (*self.gaps, damage)
            if is_known or not is_new:
                return
            self.found = (*self.found, damage)
            self._unreported.append(damage)
        log.error("%s", damage.sentence)

    def take(self) -> list[Damage]:
        """Return the damage that was found since the last call, to be written as events."""
        with self._lock:
            found, self._unreported = self._unreported, []
        return found

    def sentences(self) -> list[str]:
        """Return the newest damage and the gaps, each in one line."""
        newest = (*self.gaps, *self.found)[-_MAX_SENTENCES:]
        return list(dict.fromkeys(damage.sentence for damage in newest))

    def note_gaps(self, start: float, end: float, nodes: frozenset[int] | None, scope: str) -> None:
        """Add notes to the current answer about what is missing from it."""
        for damage in self.gaps:
            if damage.meets(start, end, nodes, scope):
                note_missing(damage.note)


def describe_time_range(start: float, end: float) -> str:
    """Return a time range as text: `from 2026-03-01 10:00:00 to 2026-03-01 10:10:00`; without a start if that is 0."""
    return f"from {local_time(start)} to {local_time(end)}" if start > 0 else f"before {local_time(end)}"


def add_checksum(document: bytes) -> bytes:
    """Add a checksum as the last field of a JSON object that has at least one field."""
    return document[:-1] + _TAIL % crc32(document[:-1])


def strip_checksum(data: bytes) -> tuple[bytes, bool]:
    """Check and remove the checksum of a JSON object; return the object and whether it had one.

    Raises:
        ValueError: The checksum is wrong.
    """
    tail = data[-_TAIL_BYTES:]
    found = _TAIL_PATTERN.fullmatch(tail)
    if found is None:
        template = _TAIL % 0
        alike = sum(
            one == other
            for place, (one, other) in enumerate(zip(tail, template, strict=False))
            if not _TAIL_BYTES - 10 <= place < _TAIL_BYTES - 2
        )
        if alike >= _MIN_ALIKE:
            raise ValueError("its checksum cannot be read")
        return data, False
    if crc32(data[:-_TAIL_BYTES]) != int(found[1], 16):
        raise ValueError("its checksum is wrong")
    return data[:-_TAIL_BYTES] + b"}", True


def file_checksum(path: str) -> int:
    """Return the CRC-32 of a file.

    Raises:
        OSError: The file cannot be read.
    """
    check = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            check = crc32(chunk, check)
    return check


def set_aside(data_dir: str, path: str, name: str) -> str | None:
    """Move a damaged file or directory out of the way; return its new path, or None if it no longer exists.

    Args:
        data_dir: The head's data directory.
        path: What to move.
        name: Its name in the directory of damaged files; a number is added if the name is taken.

    Raises:
        DiskError: It cannot be moved.
    """
    with disk_errors(f"cannot move the damaged {path} aside"), suppress(FileNotFoundError):
        target = free_damaged_path(data_dir, name)
        os.rename(path, target)
        sync_directory(os.path.dirname(target))
        sync_directory(os.path.dirname(path))
        return target
    return None


def damaged_path(data_dir: str, name: str) -> str:
    """Return the path of a file in the directory of damaged files."""
    return f"{data_dir}/{DAMAGED_DIRECTORY}/{name}"


def free_damaged_path(data_dir: str, name: str) -> str:
    """Return an unused path in the directory of damaged files, which is created if needed.

    Raises:
        OSError: The directory cannot be created.
    """
    os.makedirs(f"{data_dir}/{DAMAGED_DIRECTORY}", mode=0o700, exist_ok=True)
    target = damaged_path(data_dir, name)
    if os.path.lexists(target):
        target = f"{target}.{time.time_ns()}"
    return target


def count_damaged_files(data_dir: str) -> int:
    """Return how many damaged files and directories were moved aside."""
    with suppress(OSError):
        return len(os.listdir(f"{data_dir}/{DAMAGED_DIRECTORY}"))
    return 0
