"""Window of the log that is sent again: a time-series database that dies forgets what it confirmed last.

Nothing here sends or waits; times are arguments, on a clock that never runs backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

OVERLAP_SECONDS = 90.0
"""So much that was confirmed is sent again after a failure."""
_SOFT_SECONDS = 300.0
"""From one rewind to the next for a time-series database that answers, if only to say that it cannot: else it would never get on."""


class Overlap:
    """The positions of a log that a time-series database confirmed lately."""

    def __init__(self, position: int, ends: Iterable[int] = ()) -> None:
        """Begin.

        Args:
            position: Everything up to here need not be sent again.
            ends: Where requests after it ended when they were sent before.
        """
        self._safe = position
        self._recent: deque[tuple[float, int]] = deque()
        self._owed: int | None = None
        self._rewound: float | None = None
        self.reached = position
        """Up to where everything was confirmed, since the last rewind."""
        self.furthest = position
        """Up to where everything was ever confirmed."""
        self._ends: deque[int] = deque(ends)
        self._repeat: deque[int] = deque(self._ends)

    @property
    def safe(self) -> int:
        """Up to where nothing will be sent again, whatever happens."""
        return self._safe if self._owed is None else min(self._safe, self._owed)

    @property
    def ends(self) -> list[int]:
        """Where requests ended that may be sent again."""
        return list(self._ends)

    def next_end(self) -> int | None:
        """Where the next request has to end because it did so before; None when it is a new one."""
        while self._repeat and self._repeat[0] <= self.reached:
            self._repeat.popleft()
        return self._repeat[0] if self._repeat else None

    def confirmed(self, end: int, now: float) -> None:
        """Everything up to here is at the time-series database."""
        self.reached = end
        self.furthest = max(self.furthest, end)
        self._recent.append((now, end))
        if not self._ends or end > self._ends[-1]:
            self._ends.append(end)
        while self._recent[0][0] < now - OVERLAP_SECONDS:
            self._safe = max(self._safe, self._recent.popleft()[1])
        while self._ends and self._ends[0] <= self.safe:
            self._ends.popleft()

    def failed(self, now: float, *, hard: bool) -> bool:
        """A request failed, or the time-series database is another one now; whether to go back now.

        Args:
            now: The time.
            hard: It may have died; else it answered, or answers too slowly.
        """
        if self._owed is None:
            self._owed = self._safe
        if not hard and self._rewound is not None and now - self._rewound < _SOFT_SECONDS:
            return False
        self.rewind(now)
        return True

    def due(self, now: float) -> bool:
        """Whether it is time to go back for a failure of before."""
        return self._owed is not None and self._rewound is not None and now - self._rewound >= _SOFT_SECONDS

    def rewind(self, now: float) -> None:
        """Go back to what may have been forgotten."""
        self._rewound = now
        self.reached, self._owed = self.safe, None
        self._recent.clear()
        self._repeat = deque(self._ends)
