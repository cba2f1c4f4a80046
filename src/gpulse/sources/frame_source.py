"""Interface of frame sources, and the log of problems that their parts report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gpulse.errors import RecordingError
from gpulse.model.frame import Frame
from gpulse.model.source_health import Health


class EndOfRecordingError(RecordingError):
    """A recording has no frame left."""


class Source(Protocol):
    """A source of frames."""

    def sample(self, now: float) -> Frame:
        """Take one frame; `now` is the epoch time it is stamped with.

        Never raises for a reading that failed: that is a gap and a health entry in the frame.

        Raises:
            EndOfRecordingError: A recording has no frame left.
            ClosedError: The source was closed.
        """

    def close(self) -> None:
        """Release what the source holds; a second call does nothing."""


class HealthLog:
    """Remembers when each problem was first reported.

    The parts of a source report what is wrong at each reading; this carries `since` over from one
    reading to the next and forgets what is no longer reported.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str | None, str], Health] = {}

    def merge(self, found: Iterable[Health]) -> tuple[Health, ...]:
        """Return the problems of this reading, each with the time at which it was first reported."""
        entries: dict[tuple[str, str | None, str], Health] = {}
        for health in found:
            key = (health.source, health.subject, health.code)
            known = self._entries.get(key)
            entry = health if known is None else health._replace(since=known.since)
            entries[key] = _merge_health(entries[key], entry) if key in entries else entry
        self._entries = entries
        return tuple(entries.values())


def _merge_health(one: Health, other: Health) -> Health:
    """Merge two problems of the same kind with the same subject."""
    detail = one.detail if other.detail in one.detail else f"{one.detail}; {other.detail}"
    return one._replace(detail=detail, metrics=tuple(sorted({*one.metrics, *other.metrics})))
