"""The head's clock: it never runs backwards, whatever is done to the machine's."""

from __future__ import annotations

from collections.abc import Callable

STEP_SECONDS = 1.0
"""A difference from which on somebody set the clock, rather than steered it."""


class SteadyClock:
    """Epoch seconds that follow the machine's clock forwards only.

    Sessions are intervals on this clock, and so are the times of all that is stored. When the machine's clock is set
    back, this one goes on as if it had not been, until the head starts anew; when it is set forward, this one follows.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Begin at the machine's time.

        Args:
            wall: The machine's clock.
            monotonic: One that nobody sets.
        """
        self._wall = wall
        self._monotonic = monotonic
        self._offset = self._seen = wall() - monotonic()

    def now(self) -> float:
        """Epoch seconds."""
        return self._monotonic() + self._offset

    def step(self) -> float | None:
        """By how many seconds the machine's clock was set since this was asked last, None when it was not."""
        offset = self._wall() - self._monotonic()
        moved = offset - self._seen
        self._seen = offset
        if abs(moved) < STEP_SECONDS:
            # Steering: small differences are taken over as they come, unless a step back is being sat out.
            if abs(offset - self._offset) < STEP_SECONDS:
                self._offset = max(offset, self._offset - abs(moved))
            return None
        self._offset = max(self._offset, offset)
        return moved
