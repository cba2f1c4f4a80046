"""Select one of several heads and the delay before the next attempt; no I/O, the time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpulse.errors import GpulseError

FIRST_DELAY_SECONDS = 1.0
"""Upper limit of the first delay."""
DELAY_GROWTH = 1.5
"""The limit grows by this factor with every failure; slowly, because a restarting head is back within seconds."""
MAX_DELAY_SECONDS = 10.0
"""Maximum delay for a head that does not answer: 1000 agents then reconnect at 200 per second."""
MIN_DELAY_SECONDS = 0.1
MAX_REFUSED_DELAY_SECONDS = 60.0
"""Maximum delay after a refusal."""
STABLE_SECONDS = 3.0
"""A connection that lasted this long was stable; consecutive shorter ones lengthen the delay."""
_MAX_GROWTH_STEPS = 32


def backoff_delay(failures: int, chance: float) -> float:
    """Return the delay in seconds after consecutive failures: random, below a limit that grows with every failure.

    Args:
        failures: Number of failures, at least 1.
        chance: Random number from 0 to 1.
    """
    limit = min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * DELAY_GROWTH ** min(failures - 1, _MAX_GROWTH_STEPS))
    return max(MIN_DELAY_SECONDS, chance * limit)


class Backoff:
    """Counts consecutive failures and computes the delay before the next attempt."""

    def __init__(self, chance: Callable[[], float]) -> None:
        """Start without failures.

        Args:
            chance: Returns random numbers from 0 to 1.
        """
        self._chance = chance
        self._failures = 0
        self._short = 0
        """Number of consecutive connections that ended soon after the head's welcome."""

    def failed(self, lasted_seconds: float | None) -> float:
        """Count a failure and return the delay in seconds.

        A welcome resets the count of failed attempts, so that a second restart of the head costs no more than the
        first. Only connections that repeatedly end soon after the welcome lengthen the delay.

        Args:
            lasted_seconds: Time since the head's welcome; None if the head did not welcome this agent.
        """
        if lasted_seconds is None:
            self._failures += 1
        else:
            self._short = 0 if lasted_seconds >= STABLE_SECONDS else self._short + 1
            self._failures = 1 + self._short
        return backoff_delay(self._failures, self._chance())

    def refused(self) -> float:
        """Count a refusal, which is unlikely to pass by itself, and return the delay in seconds."""
        self._failures += 1
        return MAX_REFUSED_DELAY_SECONDS * (0.5 + self._chance() / 2)


PROBE_SECONDS = 10.0
"""Minimum time between two attempts to reach a preferred head."""
_STEADY_SECONDS = 60.0
"""A preferred head whose connection failed twice sooner than this is not tried for a while, to avoid flapping."""
_FIRST_HOLD_SECONDS = 20.0
_MAX_HOLD_SECONDS = 300.0
_SPREAD_SECONDS = 0.5
"""Agents that lose their head at the same moment connect to the next one over this time."""


class HeadCandidate:
    """One head of the list and the history of connections to it."""

    def __init__(self, place: int, target: str, chance: Callable[[], float]) -> None:
        self.place = place
        self.target = target
        """`host:port`."""
        self.backoff = Backoff(chance)
        self.due = 0.0
        """Earliest time of the next attempt."""
        self.held = 0.0
        """Earliest time to leave another head for this one."""
        self.short = 0
        """Number of consecutive short connections."""
        self.refusal: GpulseError | None = None
        """Why the head refused this agent."""
        self.was_tried = False
        self.said: tuple[str, float] = ("", 0.0)
        """Last warning logged about this head, and when."""


class HeadSelection:
    """The heads in order of preference."""

    def __init__(self, targets: Sequence[str], chance: Callable[[], float]) -> None:
        """Start with no head tried.

        Args:
            targets: `host:port` of each head, at least one.
            chance: Returns random numbers from 0 to 1.
        """
        self.all = [HeadCandidate(place, target, chance) for place, target in enumerate(targets)]
        self._chance = chance

    @property
    def has_several(self) -> bool:
        """Whether there is more than one head."""
        return len(self.all) > 1

    @property
    def words(self) -> str:
        """All heads as text, separated by commas."""
        return ",".join(head.target for head in self.all)

    @property
    def all_refused(self) -> bool:
        """Whether every head refused this agent."""
        return all(head.refusal is not None for head in self.all)

    def next(self, now: float) -> HeadCandidate | None:
        """Return the first head that is due for an attempt; None if none is."""
        if not self.has_several:
            return self.all[0]
        return next((head for head in self.all if head.due <= now), None)

    def wait(self, now: float) -> float:
        """Return the seconds until the next head is due."""
        return max(0.0, min(head.due for head in self.all) - now)

    def better(self, than: HeadCandidate, now: float) -> list[HeadCandidate]:
        """Return the heads that are preferred to the given one and may be tried now."""
        return [head for head in self.all[: than.place] if head.held <= now]

    def probe_delay(self) -> float:
        """Return the seconds to wait before the next attempt to reach a preferred head."""
        return PROBE_SECONDS * (1.0 + self._chance() / 2)

    def welcomed(self, head: HeadCandidate) -> None:
        """Record that a head welcomed this agent."""
        head.refusal, head.said = None, ("", 0.0)

    def failed(self, head: HeadCandidate, now: float, lasted_seconds: float | None) -> float:
        """Record that a head cannot be used now; return the seconds to wait before calling `next`.

        Args:
            head: The head.
            now: Time on the monotonic clock.
            lasted_seconds: Time since the head's welcome; None if it did not welcome this agent.
        """
        wait = head.backoff.failed(lasted_seconds)
        head.due = now + wait
        if lasted_seconds is not None:
            head.short = head.short + 1 if lasted_seconds < _STEADY_SECONDS else 0
        if head.short > 1:
            head.held = now + min(_MAX_HOLD_SECONDS, _FIRST_HOLD_SECONDS * (1 << min(head.short - 2, 8)))
        if not self.has_several:
            return wait
        if self.next(now) is None:
            return self.wait(now)
        return 0.0 if lasted_seconds is None else self._chance() * _SPREAD_SECONDS

    def refused(self, head: HeadCandidate, now: float, why: GpulseError) -> float:
        """Record that a head refused this agent; return the seconds to wait before calling `next`."""
        head.refusal = why
        wait = head.backoff.refused()
        head.due = head.held = now + wait
        if not self.has_several:
            return wait
        return self.wait(now) if self.next(now) is None else 0.0
