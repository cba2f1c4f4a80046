"""Backoff with jitter between an agent's attempts to connect, so that a returning head is not overrun by its agents."""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS = 1.0
"""The upper limit of the first wait."""
GROWTH = 1.5
"""The limit grows by this factor with every failure: slowly, since a head that restarts is back within seconds."""
MAX_SECONDS = 10.0
"""No wait for a head that does not answer is longer: a thousand agents come back at two hundred a second."""
MIN_SECONDS = 0.1
MAX_REFUSED_SECONDS = 60.0
"""No wait after a refusal is longer."""
GOOD_SECONDS = 3.0
"""A connection that lasted this long was a good one; shorter ones in a row are counted."""
_MAX_STEPS = 32


def delay(failures: int, chance: float) -> float:
    """Return how many seconds to wait after this many failures in a row.

    The limit grows with every failure; where below it the wait ends is left to chance.

    Args:
        failures: At least one.
        chance: From 0 to 1.
    """
    limit = min(MAX_SECONDS, FIRST_SECONDS * GROWTH ** min(failures - 1, _MAX_STEPS))
    return max(MIN_SECONDS, chance * limit)


class Backoff:
    """Failures in a row, and the wait that they lead to."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Begin with none.

        Args:
            chance: Gives numbers from 0 to 1.
        """
        self._chance = chance
        self._failures = 0
        self._short = 0
        """How many connections in a row ended soon after the head's welcome."""

    def failed(self, lasted_seconds: float | None) -> float:
        """Count a failure; return how long to wait now.

        A welcome ends the count of failed attempts, so a head that restarts twice is waited for as if it had restarted
        once. Only connections that keep ending soon after their welcome make the wait longer.

        Args:
            lasted_seconds: How long the head had welcomed this agent, None when it had not.
        """
        if lasted_seconds is None:
            self._failures += 1
        else:
            self._short = 0 if lasted_seconds >= GOOD_SECONDS else self._short + 1
            self._failures = 1 + self._short
        return delay(self._failures, self._chance())

    def refused(self) -> float:
        """Count a failure that time alone will hardly mend; return how long to wait now."""
        self._failures += 1
        return MAX_REFUSED_SECONDS * (0.5 + self._chance() / 2)
