"""The segments of a log that are complete: they are only read any more, and dropped, the oldest first."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from gpulse.store.disk import disk_errors
from gpulse.store.log.segment import Header, segment_path


class SealedSegments:
    """Every segment but the newest."""

    def __init__(self, directory: str, segments: Iterable[tuple[Header, int]]) -> None:
        self._directory = directory
        self._segments = deque(segments)
        self.size_bytes = sum(size for _, size in self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, header: Header, size_bytes: int) -> None:
        """One more is complete."""
        self._segments.append((header, size_bytes))
        self.size_bytes += size_bytes

    def first(self, newest: Header) -> int:
        """The oldest position, given the segment after these."""
        return self._segments[0][0].first if self._segments else newest.first

    def second(self, newest: Header) -> int:
        """The oldest position if the oldest segment were dropped."""
        return self._segments[1][0].first if len(self._segments) > 1 else newest.first

    def drop_oldest(self) -> None:
        """Remove one.

        Raises:
            DiskError: It cannot be removed.
        """
        header, size_bytes = self._segments[0]
        path = segment_path(self._directory, header.number)
        with disk_errors(f"remove {path}"), suppress(FileNotFoundError):
            os.unlink(path)
        self._segments.popleft()
        self.size_bytes -= size_bytes
