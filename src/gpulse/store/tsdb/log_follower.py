"""Reads a head's log from a place on, in rounds that are confirmed as a whole."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from gpulse.store.log.reader import Cursor, LogReader
from gpulse.store.log.records import BATCH, FACT, Batch

_ROUND_BYTES = 256 << 10
"""So much of the log goes into one round, about: some fifty thousand samples."""


class Round(NamedTuple):
    """Records one after the other."""

    last: int
    """The position of the last one."""
    entries: tuple[Batch | bytes, ...]
    """Batches, and facts as they were written, in their order."""
    missing: int
    """How many records were dropped from the log before they could be read."""
    is_repeated: bool
    """True when the same records were sent together before."""

    @property
    def began(self) -> float | None:
        """When the head got the first of it."""
        return min(self._times(), default=None)

    @property
    def received(self) -> float | None:
        """When the head got the last of it."""
        return max(self._times(), default=None)

    def _times(self) -> list[float]:
        return [entry.received_us / 1e6 for entry in self.entries if isinstance(entry, Batch)]


class LogFollower:
    """A place in a log that others write."""

    def __init__(self, log: LogReader, after: int) -> None:
        self._log = log
        self._after = after
        self._cursor: Cursor = log.follow(after + 1)

    def seek(self, after: int) -> None:
        """Go on with the record after a position."""
        self._cursor.close()
        self._after = after
        self._cursor = self._log.follow(after + 1)

    def take(self, bound: int, end: int | None = None) -> Round | None:
        """The next records, None when there are none yet.

        Args:
            bound: Up to where the log is on disk.
            end: Where the round has to end; after so many bytes when None.

        Raises:
            LogError: The log is damaged.
            DiskError: It cannot be read.
        """
        last = bound if end is None else min(end, bound)
        if self._after >= last:
            return None
        found: list[Batch | bytes] = []
        begin, size, read = self._after, 0, 0
        for record in self._cursor:
            self._after = record.position
            read += 1
            size += len(record.payload)
            if record.kind == BATCH:
                with suppress(ValueError):  # the metadata tells of it
                    found.append(Batch.from_bytes(record.payload))
            elif record.kind == FACT:
                found.append(record.payload)
            if self._after >= last or (end is None and size >= _ROUND_BYTES):
                break
        if not read:
            return None
        return Round(self._after, tuple(found), self._after - begin - read, end is not None)

    @property
    def waiting_bytes(self) -> int:
        """How much of the log comes after what was read."""
        return self._cursor.waiting_bytes

    def close(self) -> None:
        """Let go of the log."""
        self._cursor.close()
