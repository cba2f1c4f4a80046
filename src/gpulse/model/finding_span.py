"""The span of a finding: from when to when it held, put together from the reports of its node.

A node reports all of its findings whenever one comes, changes or goes, and again every half minute. The rules here decide
which reports belong to one finding, for the live view and for what is stored alike, so that it has one start everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gpulse.model.finding import SEVERAL_CAUSES

MAX_GAP_SECONDS = 120.0
"""A finding that is back after no more than this goes on; after a longer absence it is a new one."""
MAX_SILENCE_SECONDS = 3600.0
"""The same when the node reported nothing in between, as while its agent restarts.

A fault goes on after any silence: the driver reports it until somebody resets the GPU.
"""
_MAX_HELD_SECONDS = 30 * 86_400.0
"""A report that claims to hold for longer is of a clock that was set meanwhile."""


class FindingSpan(NamedTuple):
    """From when to when a finding held, as far as its node has reported."""

    start: float
    """When it began, in epoch seconds; it does not change while the finding goes on."""
    last: float
    """The time of the newest report that has it."""
    end: float | None = None
    """When it was over, or when its node stopped reporting; None while it holds."""
    is_over: bool = False
    """Whether a report without it ended it; False where the node stopped reporting."""

    def reported(self, finding: Mapping[str, Any], time: float) -> FindingSpan | None:
        """Return the span with one more report of the finding; None when that is a new finding."""
        if time <= self.last:
            return self
        away = began(finding, time) - self.last
        if away > MAX_GAP_SECONDS and (self.is_over or not _outlasts(finding, away)):
            return None
        if self.end is not None and self.end > time:  # the report came late
            return self._replace(last=time)
        return FindingSpan(self.start, time)

    def absent(self, time: float) -> FindingSpan:
        """Return the span after a report without the finding."""
        if time <= self.last or self.is_over:
            return self
        return self._replace(end=time if self.end is None else min(self.end, time), is_over=True)

    def silent(self, time: float, heard: float | None = None) -> FindingSpan:
        """Return the span after the node stopped reporting, or its agent started again.

        Args:
            time: When that was noticed.
            heard: When the node was last heard, where that is known.
        """
        if time < self.last or self.end is not None:
            return self
        return self._replace(end=time if heard is None else max(heard, self.last))


def new_span(finding: Mapping[str, Any], time: float) -> FindingSpan:
    """Return the span of a finding that is reported for the first time."""
    return FindingSpan(began(finding, time), time)


def began(finding: Mapping[str, Any], time: float) -> float:
    """Return when a finding began as its report says, on the clock of the one who got the report at `time`.

    The node's own clock may differ, so only the length of time between its start and end counts.
    """
    start, end = finding.get("start"), finding.get("end")
    if (
        isinstance(start, int | float)
        and isinstance(end, int | float)
        and 0 <= end - start <= _MAX_HELD_SECONDS
    ):
        return time - (end - start)
    return time


def _outlasts(finding: Mapping[str, Any], silent_seconds: float) -> bool:
    return silent_seconds <= MAX_SILENCE_SECONDS or finding.get("id") == SEVERAL_CAUSES
