"""How long to wait before the next attempt, so that a head that comes back is not overrun by all its agents."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
SHORTEST_SECONDS = 0.1
GOOD_SECONDS = 3.0
"""A connection that lasted so long was a good one: the next failure is the first again."""
_MOST_DOUBLINGS = 16


def delay(failures: int, chance: float, *, longest: float = LONGEST_SECONDS) -> float:
    """Seconds to wait after so many failures in a row.

    The limit doubles with every failure; where below it the wait ends is left to chance.

    Args:
        failures: At least one.
        chance: From 0 to 1.
        longest: No wait is longer.
    """
    limit = min(longest, FIRST_SECONDS * (1 << min(failures - 1, _MOST_DOUBLINGS)))
    return max(SHORTEST_SECONDS, chance * limit)


class Backoff:
    """Counts failures in a row."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Begin with none.

        Args:
            chance: Gives numbers from 0 to 1.
        """
        self._chance = chance
        self.failures = 0

    def failed(self, lasted_seconds: float) -> float:
        """Count a failure; how long to wait now.

        Args:
            lasted_seconds: How long the head had welcomed this agent; 0 when it had not.
        """
        self.failures = 1 if lasted_seconds >= GOOD_SECONDS else self.failures + 1
        return delay(self.failures, self._chance())

    def refused(self) -> float:
        """Count a failure that time alone will hardly mend; how long to wait now."""
        self.failures += 1
        return LONGEST_SECONDS * (0.5 + self._chance() / 2)
