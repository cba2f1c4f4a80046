"""Opens that nobody in sight explains: how long they are looked into, and when they count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

SIGHTED_SECONDS = (0.01, 0.06, 0.3, 1.0, 3.0)
"""After which times an unexplained open is looked into again. The kernel tells of an open before the descriptor
can be seen, and on a machine that is overrun much may lie between the two."""
HIDDEN_SECONDS = (0.01, 0.1, 0.5, 1.0, 2.0)
"""The same where processes are hidden: until the driver shows the context of whoever opened the GPU."""
_JUST_SECONDS = 0.25
"""An event is read after the descriptor that it is about was seen."""
_OWN_SECONDS = 5.0
"""So long after a process of ours opened a GPU nobody's open is taken for a stranger's: CUDA opens and closes a lot
while it starts."""
_CALM_SECONDS = 1.0
"""An open so long after the last that was heard of ours, or of a close, is no part of such a start: it is kept in mind
until it may be told."""
_AGAIN_SECONDS = 10.0
"""So long after a GPU that was opened and closed out of sight was looked into, the next time waits: whoever looks often
does not make us look often."""


class Doubt(NamedTuple):
    """One GPU that was opened by nobody in sight."""

    since: float
    step: int
    is_open: bool
    """No close came after it."""
    told: bool = False
    calm: bool = True
    """Nothing else happened to the GPU just before."""


class Doubts:
    """What is not explained yet; times are monotonic."""

    def __init__(self) -> None:
        self._doubts: dict[int, Doubt] = {}
        self._opened_at: dict[int, float] = {}
        self._own_at: dict[int, float] = {}
        self._shut_at: dict[int, float] = {}
        self._closed_at: dict[int, float] = {}

    def saw(self, minor: int, clock: float, *, ours: bool) -> None:
        """Somebody in sight has this GPU open under a descriptor that was not there before."""
        self._opened_at[minor] = clock
        if ours:
            self._own_at[minor] = clock
        doubt = self._doubts.get(minor)
        if doubt is not None and doubt.step < len(HIDDEN_SECONDS):  # later it cannot be what was heard
            del self._doubts[minor]

    def heard(
        self,
        opened: Mapping[int, bool],
        closed: Iterable[int],
        clock: float,
        *,
        hidden: bool,
        shut: Iterable[int] = (),
    ) -> None:
        """Take in what happened to the device files, after looking who did it.

        Args:
            opened: The GPUs that were opened; True when no close came after it.
            closed: Those of which something was closed last.
            clock: The time.
            hidden: Not all processes are in sight.
            shut: Those of which something was closed at all.
        """
        self._shut_at.update(dict.fromkeys(shut, clock))
        for minor in closed:
            if minor in self._doubts and (not hidden or self._doubts[minor].step >= len(HIDDEN_SECONDS)):
                del self._doubts[minor]  # whoever it was is gone
            elif minor in self._doubts:
                self._doubts[minor] = self._doubts[minor]._replace(is_open=False)
        for minor, is_open in opened.items():
            last = max(self._own_at.get(minor, -inf), self._shut_at.get(minor, -inf))
            calm = clock - last >= _CALM_SECONDS
            if minor in self._doubts:
                doubt = self._doubts[minor]
                if not doubt.is_open:
                    self._doubts[minor] = doubt._replace(is_open=is_open, calm=calm)
            elif clock - self._opened_at.get(minor, -inf) < _JUST_SECONDS:
                continue
            elif is_open:
                self._doubts[minor] = Doubt(clock, 0, is_open, calm=calm)
            elif hidden and clock - self._closed_at.get(minor, -inf) >= _AGAIN_SECONDS:
                self._closed_at[minor] = clock
                self._doubts[minor] = Doubt(clock, 0, is_open)

    def due(self, clock: float, *, hidden: bool) -> list[int]:
        """The GPUs to look at again now."""
        return [
            minor for minor, doubt in self._doubts.items() if self._at(minor, doubt, hidden=hidden) <= clock
        ]

    def next(self, *, hidden: bool) -> float | None:
        """When the next one is due."""
        times = (self._at(minor, doubt, hidden=hidden) for minor, doubt in self._doubts.items())
        return min(times, default=None)

    def is_deep(self, minors: Iterable[int], *, hidden: bool) -> bool:
        """True when it is time to read every descriptor for one of these, which is done once.

        Where processes are hidden there are few to read, and it is done before somebody else is suspected.
        """
        step = 0 if hidden else 1
        return any(self._doubts[minor].step == step for minor in minors if minor in self._doubts)

    def advance(self, minors: Iterable[int], clock: float, *, hidden: bool) -> set[int]:
        """After looking at these again: those that were opened by somebody out of sight, each told once."""
        unseen: set[int] = set()
        for minor in minors:
            doubt = self._doubts.get(minor)
            if doubt is None:
                continue
            starting = clock - self._own_at.get(minor, -inf) < _OWN_SECONDS
            if hidden and doubt.is_open and not doubt.told and not starting:
                unseen.add(minor)
                doubt = doubt._replace(told=True)
            self._doubts[minor] = doubt._replace(step=doubt.step + 1)
            waits = hidden and doubt.is_open and doubt.calm and not doubt.told
            if doubt.step + 1 >= len(HIDDEN_SECONDS if hidden else SIGHTED_SECONDS) and not waits:
                del self._doubts[minor]
        return unseen

    def _at(self, minor: int, doubt: Doubt, *, hidden: bool) -> float:
        """When to look into it again; after the last time it waits until it may be told."""
        steps = HIDDEN_SECONDS if hidden else SIGHTED_SECONDS
        if doubt.step < len(steps):
            return doubt.since + steps[doubt.step]
        return self._own_at.get(minor, -inf) + _OWN_SECONDS
