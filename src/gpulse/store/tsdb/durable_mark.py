"""What the head says to the process that sends: up to where the log is on disk, and when to end."""

from __future__ import annotations

import threading
import time


class Wakes:
    """What was said so far, for those who wait for it."""

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound
        self.ended: float | None = None
        """When it was told to end."""
        self._news = threading.Condition()

    def hear(self, bound: int) -> None:
        """More is on disk."""
        with self._news:
            self.bound = max(self.bound, bound)
            self._news.notify_all()

    def end(self) -> None:
        """No more will come."""
        with self._news:
            self.ended = time.monotonic()
            self._news.notify_all()

    def wait(self, seconds: float, *, after: int | None = None) -> None:
        """Wait for the end, or for more than there is up to a position."""
        with self._news:
            self._news.wait_for(
                lambda: self.ended is not None or (after is not None and self.bound > after), seconds
            )
