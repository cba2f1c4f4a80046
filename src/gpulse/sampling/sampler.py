"""The tick: asks a source for a frame at a steady pace and never dies of what it finds."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from math import inf
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from gpulse.errors import GpulseError, UsageError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.sources.base import Source
from gpulse.sources.recording import EndOfRecordingError

SHORTEST_INTERVAL_SECONDS = 0.05


def checked_interval(seconds: float) -> float:
    """The interval, if one can sample at it.

    Raises:
        UsageError: It is too short, endless or not a number.
    """
    if not SHORTEST_INTERVAL_SECONDS <= seconds < inf:
        hint = f"the shortest is {SHORTEST_INTERVAL_SECONDS} s"
        raise UsageError(f"{seconds:g} s is no interval to sample at", hint=hint)
    return seconds


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
            UsageError: The interval is too short, or endless.
        """
        self.interval_seconds = checked_interval(interval_seconds)
        self._source = source
        self._stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Not an Event: only this may be used from a signal handler that interrupts the wait for it."""
        self._last: tuple[Frame, float] | None = None
        """The last frame of the source, and our own monotonic time when it came."""
        self._failing_since: float | None = None

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
        while not self._stopped:
            frame = self._sample(source)
            if frame is None:
                return
            yield frame
            due += self.interval_seconds
            late = time.monotonic() - due
            if late > 0:
                due += self.interval_seconds * int(late / self.interval_seconds + 1)
            self._wait(due - time.monotonic())

    def stop(self) -> None:
        """End the iteration, from any thread or signal handler, without waiting for the next tick."""
        self._stopped = True
        self._wake.put(None)

    def close(self) -> None:
        """Stop, and give back what the source holds."""
        self.stop()
        if self._source is not None:
            self._source.close()

    def _wait(self, seconds: float) -> None:
        try:
            self._wake.get(timeout=max(0.0, seconds))
        except Empty:
            return

    def _sample(self, source: Source) -> Frame | None:
        """One frame, an empty one that says why there is none (the guard), or None at the end."""
        now = time.time()
        try:
            frame = source.sample(now)
        except EndOfRecordingError:
            return None
        except GpulseError:
            if self._stopped:  # another thread closed the source meanwhile
                return None
            raise
        except Exception as error:  # noqa: BLE001  a fault of ours must not end the sampling
            return self._failed(now, error)
        self._last, self._failing_since = (frame, time.monotonic()), None
        return frame

    def _failed(self, now: float, error: Exception) -> Frame:
        self._failing_since = self._failing_since or now
        node, monotonic = Node(platform.node()), time.monotonic()
        if self._last is not None:
            last, then = self._last
            node, monotonic = last.node, last.monotonic + monotonic - then
        health = Health(
            "sampler",
            "failed",
            f"a fault in gpulse: {error!r}",
            self._failing_since,
            hint="please report it; --debug shows the traceback",
        )
        return Frame(time=now, monotonic=monotonic, node=node, health=(health,))

    def _opened(self) -> Source:
        if self._source is None:
            from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding

            self._source = LocalMachine(interval_seconds=self.interval_seconds)
        return self._source
