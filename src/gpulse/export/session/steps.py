"""How many steps a session has, and how many are too many for a file."""

from __future__ import annotations

import math

from gpulse.errors import UsageError
from gpulse.model.session import Session

MOST_STEPS = 60_000_000
"""A month of 50 ms is 52 million; more would be a mistake, and fill a disk with it."""


def steps(start: float, end: float, interval_ms: int) -> int:
    """How many frames a session between two moments has.

    A last step that was cut off is one of them from half an interval on: in less, many nodes have no sample, and the
    session would seem to end with a gap.
    """
    intervals = round(
        (end - start) * 1000 / interval_ms, 3
    )  # the clock's microseconds are no step of their own
    return max(0, math.floor(intervals + 0.5))


def checked_steps(session: Session, end: float) -> int:
    """How many frames a session that ends then has, if a file can hold so many.

    Raises:
        UsageError: It cannot.
    """
    count = steps(session.start, end, session.interval_ms)
    if count > MOST_STEPS:
        raise UsageError(
            f"session {session.name} would have {count:,} frames of {session.interval_ms} ms, "
            f"and a file takes {MOST_STEPS:,}",
            hint="start it with a longer interval (--freq 1000 is a frame a second), or less far in the past",
        )
    return count
