"""What a source is, and how the parts of one report what they could not read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gpulse.model.frame import Frame
from gpulse.model.health import Health


class Source(Protocol):
    """Anything that can be asked for the next frame."""

    def sample(self, now: float) -> Frame:
        """Take one frame; `now` is the epoch time it is stamped with.

        Never raises for a reading that failed: that is a gap and a health entry in the frame.

        Raises:
            EndOfRecordingError: A recording has no frame left.
            ClosedError: The source was closed.
        """

    def close(self) -> None:
        """Give back what the source holds; a second call does nothing."""


class HealthLog:
    """Remembers since when each problem has been there.

    The parts of a source report what is wrong at each reading; this carries `since` over from one
    reading to the next and forgets what is no longer reported.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str | None, str], Health] = {}

    def merge(self, found: Iterable[Health]) -> tuple[Health, ...]:
        """The problems of this reading, each with the time at which it was first reported."""
        entries: dict[tuple[str, str | None, str], Health] = {}
        for health in found:
            key = (health.source, health.subject, health.code)
            known = self._entries.get(key)
            entry = health if known is None else health._replace(since=known.since)
            entries[key] = _joined(entries[key], entry) if key in entries else entry
        self._entries = entries
        return tuple(entries.values())


def _joined(one: Health, other: Health) -> Health:
    """Two problems of the same kind with the same thing as one."""
    detail = one.detail if other.detail in one.detail else f"{one.detail}; {other.detail}"
    return one._replace(detail=detail, metrics=tuple(sorted({*one.metrics, *other.metrics})))
