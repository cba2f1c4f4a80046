"""Decide a node's state from when it last reported."""

from __future__ import annotations

from gpulse.cluster.protocol.answers import NodeState
from gpulse.model.frame import Frame

LATE_SECONDS = 5.0
LATE_INTERVALS = 5
LOST_SECONDS = 30.0
RETURN_SECONDS = 12.0
"""How long agents may take to come back to a head that was not listening: they try at least every ten seconds."""
_TSDB_SECONDS = 10.0
"""What other heads write to a time-series database is found there, and noticed here, this much later."""
_UNDECIDED_SECONDS = 20.0
"""A time-series database that says nothing is not waited for any longer."""
_AHEAD_SECONDS = 3.0
"""A node's clock may be so much ahead: what is not newer by that may have come through this head."""


def state_of(silent_seconds: float, interval_seconds: float) -> NodeState:
    """How a node is that was silent for so long, when it should speak once an interval."""
    late = max(LATE_SECONDS, LATE_INTERVALS * interval_seconds)
    if silent_seconds >= max(LOST_SECONDS, 2 * late):
        return "lost"
    return "late" if silent_seconds >= late else "healthy"


class Abroad:
    """What is known of a node through a time-series database, to which other heads write as well."""

    def __init__(self) -> None:
        self.seen = 0.0
        """When another head last got something from it."""
        self.frame: Frame | None = None
        """Its newest readings."""
        self.moved = False
        """Whether its agent said that it goes on at another head."""

    def is_newer(self, seen: float) -> bool:
        """Whether another head has it, when something came from it here at `seen` last."""
        return self.moved or self.seen > seen + _AHEAD_SECONDS

    def state(self, seen: float, now: float, interval_seconds: float) -> NodeState:
        """How a node is that another head has."""
        return state_of(max(0.0, now - max(seen, self.seen) - _TSDB_SECONDS), interval_seconds)


def is_undecided(asked: float | None, seen: float, now: float) -> bool:
    """Whether a node that left may yet turn out to be at another head.

    Args:
        asked: When the time-series database was asked last, None when there is none to ask.
        seen: When something came from the node here last.
        now: On the same clock.
    """
    return asked is not None and asked < seen + _TSDB_SECONDS and now < seen + _UNDECIDED_SECONDS
