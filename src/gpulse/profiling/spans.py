"""When a block was open: its runs, however they overlap, as one line of time."""

from __future__ import annotations

from collections import deque
from math import inf

_MOST_SPANS = 100_000
"""Runs that wait for the readings of their time; a driver that does not answer must not fill the memory."""


class Spans:
    """The times at which at least one run of a block was under way, on the monotonic clock."""

    def __init__(self) -> None:
        self.count = 0
        """Runs that have begun."""
        self.depth = 0
        """Runs under way now."""
        self.ended_at = -inf
        """When the last run ended."""
        self._seconds = 0.0
        """Time with at least one run, up to the end of the last of them."""
        self._runs_seconds = 0.0
        """The lengths of all runs added up; while some are under way, less the times at which they began."""
        self._began_at = 0.0
        self._closed: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)

    def enter(self, at: float) -> None:
        """A run begins."""
        if self.depth == 0:
            self._began_at = at
        self.count += 1
        self.depth += 1
        self._runs_seconds -= at

    def leave(self, at: float) -> None:
        """A run ends; one that began before a fork is none of ours."""
        if self.depth == 0:
            return
        self.depth -= 1
        self._runs_seconds += at
        if self.depth == 0:
            self.ended_at = at
            self._seconds += at - self._began_at
            if at > self._began_at:
                self._closed.append((self._began_at, at))

    def seconds(self, now: float) -> float:
        """Time with at least one run."""
        return self._seconds + (max(0.0, now - self._began_at) if self.depth else 0.0)

    def runs_seconds(self, now: float) -> float:
        """The lengths of all runs added up, however they overlap."""
        return self._runs_seconds + self.depth * now

    def within(self, start: float, end: float) -> tuple[float, float]:
        """How much of a stretch of time was in the block, and the middle of that part, as seconds from the start."""
        length = moment = 0.0
        if self.depth and self._began_at < end:
            low = max(start, self._began_at)
            length += end - low
            moment += (end - low) * ((low + end) / 2 - start)
        for began, ended in reversed(self._closed):
            if ended <= start:
                break
            low, high = max(start, began), min(end, ended)
            if low < high:
                length += high - low
                moment += (high - low) * ((low + high) / 2 - start)
        return (length, moment / length) if length else (0.0, 0.0)

    def cover(self, at: float) -> bool:
        """Whether a run was under way at that moment."""
        if self.depth and self._began_at <= at:
            return True
        for began, ended in reversed(self._closed):
            if ended < at:
                return False
            if began <= at:
                return True
        return False

    def forget(self, before: float) -> None:
        """Let go of runs whose time every reading has passed."""
        while self._closed and self._closed[0][1] < before:
            self._closed.popleft()

    def is_asleep(self, before: float) -> bool:
        """Whether no run was under way since."""
        return self.depth == 0 and self.ended_at < before
