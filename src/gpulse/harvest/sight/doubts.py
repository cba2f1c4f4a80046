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


class Doubts:
    """What is not explained yet; times are monotonic."""

    def __init__(self) -> None:
        self._doubts: dict[int, Doubt] = {}
        self._opened_at: dict[int, float] = {}
        self._own_at: dict[int, float] = {}
        self._closed_at: dict[int, float] = {}

    def saw(self, minor: int, clock: float, *, ours: bool) -> None:
        """Somebody in sight has this GPU open under a descriptor that was not there before."""
        self._opened_at[minor] = clock
        if ours:
            self._own_at[minor] = clock
        self._doubts.pop(minor, None)

    def heard(self, opened: Mapping[int, bool], closed: Iterable[int], clock: float, *, hidden: bool) -> None:
        """Take in what happened to the device files, after looking who did it."""
        for minor in closed:
            if not hidden:  # whoever it was is gone
                self._doubts.pop(minor, None)
            elif minor in self._doubts:
                self._doubts[minor] = self._doubts[minor]._replace(is_open=False)
        for minor, is_open in opened.items():
            if minor in self._doubts:
                doubt = self._doubts[minor]
                self._doubts[minor] = doubt._replace(is_open=doubt.is_open or is_open)
            elif clock - self._opened_at.get(minor, -inf) < _JUST_SECONDS:
                continue
            elif is_open:
                self._doubts[minor] = Doubt(clock, 0, is_open)
            elif hidden and clock - self._closed_at.get(minor, -inf) >= _AGAIN_SECONDS:
                self._closed_at[minor] = clock
                self._doubts[minor] = Doubt(clock, 0, is_open)

    def due(self, clock: float, *, hidden: bool) -> list[int]:
        """The GPUs to look at again now."""
        return [minor for minor, doubt in self._doubts.items() if _at(doubt, hidden=hidden) <= clock]

    def next(self, *, hidden: bool) -> float | None:
        """When the next one is due."""
        return min((_at(doubt, hidden=hidden) for doubt in self._doubts.values()), default=None)

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
            if doubt.step + 1 >= len(HIDDEN_SECONDS if hidden else SIGHTED_SECONDS):
                del self._doubts[minor]
        return unseen


def _at(doubt: Doubt, *, hidden: bool) -> float:
    steps = HIDDEN_SECONDS if hidden else SIGHTED_SECONDS
    return doubt.since + steps[min(doubt.step, len(steps) - 1)]
