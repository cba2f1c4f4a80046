"""Another machine's frames as if they were of now."""

from __future__ import annotations

import time

from gpulse.model.frame import Frame
from gpulse.sources.base import Source


class Stamped:
    """A recorded or simulated machine with the clocks of this one."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def sample(self, now: float) -> Frame:
        """The next frame, with the times of now.

        Raises:
            EndOfRecordingError: There is none left.
        """
        monotonic = time.monotonic()  # of the same moment as `now`: the other machine may take its time
        return self._source.sample(now)._replace(time=now, monotonic=monotonic)

    def close(self) -> None:
        """Let the other one go."""
        self._source.close()
