"""Which of several heads an agent turns to, and when it looks for a better one; no network, and time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpulse.cluster.agent.backoff import Backoff
from gpulse.errors import GpulseError

LOOK_SECONDS = 10.0
"""A better head is looked for no more often than this."""
_STEADY_SECONDS = 60.0
"""A better head that did not last so long twice is left alone for a while: going back and forth helps nobody."""
_LEFT_ALONE_SECONDS = 20.0
_LONGEST_SECONDS = 300.0
_SPREAD_SECONDS = 0.5
"""Agents that lose their head all at once come to the next one over so long."""


class Candidate:
    """One head of the list, and how it went with it."""

    def __init__(self, place: int, target: str, chance: Callable[[], float]) -> None:
        self.place = place
        self.target = target
        """`host:port`."""
        self.backoff = Backoff(chance)
        self.due = 0.0
        """Not to be tried before this."""
        self.held = 0.0
        """Nobody leaves another head for this one before this."""
        self.short = 0
        """How many connections in a row did not last."""
        self.refusal: GpulseError | None = None
        """Why it does not want this agent."""
        self.was_tried = False
        self.said: tuple[str, float] = ("", 0.0)
        """What was told of it last, and when."""


class Heads:
    """The heads in their order, the best first."""

    def __init__(self, targets: Sequence[str], chance: Callable[[], float]) -> None:
        """Begin with none tried.

        Args:
            targets: `host:port` of each, at least one.
            chance: Numbers from 0 to 1.
        """
        self.all = [Candidate(place, target, chance) for place, target in enumerate(targets)]
        self._chance = chance

    @property
    def are_several(self) -> bool:
        """Whether there is a choice."""
        return len(self.all) > 1

    @property
    def words(self) -> str:
        """All of them, as people write them."""
        return ",".join(head.target for head in self.all)

    @property
    def refuse_all(self) -> bool:
        """Whether none of them wants this agent."""
        return all(head.refusal is not None for head in self.all)

    def next(self, now: float) -> Candidate | None:
        """The one to try: the first that is due, None when none is."""
        if not self.are_several:
            return self.all[0]
        return next((head for head in self.all if head.due <= now), None)

    def wait(self, now: float) -> float:
        """How long until one of them is to be tried."""
        return max(0.0, min(head.due for head in self.all) - now)

    def better(self, than: Candidate, now: float) -> list[Candidate]:
        """Those before it that are worth a look."""
        return [head for head in self.all[: than.place] if head.held <= now]

    def look_after(self) -> float:
        """How long to wait before the next look for a better one."""
        return LOOK_SECONDS * (1.0 + self._chance() / 2)

    def welcomed(self, head: Candidate) -> None:
        """It wants this agent."""
        head.refusal, head.said = None, ("", 0.0)

    def failed(self, head: Candidate, now: float, lasted_seconds: float | None) -> float:
        """It cannot be used now; how long to wait before `next` is asked.

        Args:
            head: Which.
            now: On the monotonic clock.
            lasted_seconds: How long it had welcomed this agent, None when it had not.
        """
        wait = head.backoff.failed(lasted_seconds)
        head.due = now + wait
        if lasted_seconds is not None:
            head.short = head.short + 1 if lasted_seconds < _STEADY_SECONDS else 0
        if head.short > 1:
            head.held = now + min(_LONGEST_SECONDS, _LEFT_ALONE_SECONDS * (1 << min(head.short - 2, 8)))
        if not self.are_several:
            return wait
        if self.next(now) is None:
            return self.wait(now)
        return 0.0 if lasted_seconds is None else self._chance() * _SPREAD_SECONDS

    def refused(self, head: Candidate, now: float, why: GpulseError) -> float:
        """It does not want this agent; how long to wait before `next` is asked."""
        head.refusal = why
        wait = head.backoff.refused()
        head.due = head.held = now + wait
        if not self.are_several:
            return wait
        return self.wait(now) if self.next(now) is None else 0.0
