"""The tick: asks a source for a frame at a steady pace and never dies of what it finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from gpulse.errors import UsageError
from gpulse.model.frame import Frame
from gpulse.sources.base import Source
from gpulse.sources.recording import EndOfRecordingError

SHORTEST_INTERVAL_SECONDS = 0.05


class Sampler:
    """Frames of a machine, one every interval, for as long as somebody asks.

    Without a source it samples this machine. Iterate over it, and use it as a context manager so that
    its threads and the driver are given back:

        with Sampler(interval_seconds=1.0) as sampler:
            for frame in sampler:
                print(frame.gpus[0].get("power_watts"))
    """

    def __init__(self, source: Source | None = None, *, interval_seconds: float = 1.0) -> None:
        """Prepare to sample.

        Args:
            source: Where frames come from; this machine when None.
            interval_seconds: Time from one frame to the next, at least 0.05.

        Raises:
            UsageError: The interval is too short.
        """
        if not interval_seconds >= SHORTEST_INTERVAL_SECONDS:
            raise UsageError(
                f"an interval of {interval_seconds:g} s is too short",
                hint=f"the shortest is {SHORTEST_INTERVAL_SECONDS} s",
            )
        self.interval_seconds = interval_seconds
        self._stop = threading.Event()
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Frame]:
        """Frames until `stop` or the end of a recording.

        Ticks keep to a fixed grid: one that comes late does not move the later ones, and ticks that
        were missed altogether (a suspended laptop) are left out rather than made up for.
        """
        source = self._opened()
        due = time.monotonic()
        while not self._stop.is_set():
            try:
                yield source.sample(time.time())
            except EndOfRecordingError:
                return
            due += self.interval_seconds
            late = time.monotonic() - due
            if late > 0:
                due += self.interval_seconds * int(late / self.interval_seconds + 1)
            self._stop.wait(due - time.monotonic())

    def stop(self) -> None:
        """End the iteration, from any thread or signal handler, without waiting for the next tick."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and give back what the source holds."""
        self.stop()
        if self._source is not None:
            self._source.close()

    def _opened(self) -> Source:
        if self._source is None:
            from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding

            self._source = LocalMachine(interval_seconds=self.interval_seconds)
        return self._source
