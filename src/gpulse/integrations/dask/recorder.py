"""The measuring thread of a worker: takes a frame, asks which tasks execute, and keeps the lines until they are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpulse.integrations.dask.asking import CustomReader
from gpulse.integrations.dask.jobs import Label
from gpulse.integrations.dask.rows import FrameReader, lines
from gpulse.model.frame import Frame
from gpulse.sampling.sampler import Sampler
from gpulse.sources.base import Source

_MOST_WAITING = 20_000
"""Measurements that wait for a scheduler which does not take them; then the oldest are given up."""


class Executing(NamedTuple):
    """What a worker is at."""

    tasks: tuple[str, ...] = ()
    """The keys."""
    labels: tuple[Label | None, ...] = (None,)
    """Their graphs, each once; None where only the scheduler can tell."""


class Parcel(NamedTuple):
    """Measurements on their way to the scheduler."""

    rows: str
    measurements: int
    last: float
    """The timestamp of the newest."""
    lost: int = 0
    """How many were given up before these."""


class Recorder:
    """Measures at a steady pace on a thread of its own, between `start` and `stop`."""

    def __init__(
        self,
        source: Source,
        interval_seconds: float,
        *,
        frames: FrameReader,
        custom: CustomReader,
        executing: Callable[[], Executing],
        elapsed: Callable[[float], float],
        taken: Callable[[Frame], None] = lambda _: None,
    ) -> None:
        """Prepare to measure.

        Args:
            source: Where frames come from; not closed.
            interval_seconds: Time from one measurement to the next.
            frames: Reads the columns.
            custom: Reads people's own; not closed.
            executing: What the worker is at.
            elapsed: Seconds since the start of monitoring, of a moment on the monotonic clock.
            taken: Gets each frame as well, in the thread.
        """
        self._sampler = Sampler(source, interval_seconds=interval_seconds)
        self._frames = frames
        self._custom = custom
        self._executing = executing
        self._elapsed = elapsed
        self._taken = taken
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._last = 0.0
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="gpulse-dask", daemon=True)
        self.error: Exception | None = None
        """What went wrong with a measurement, or ended them all."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, patience_seconds: float = 2.0) -> None:
        """End, without waiting for a reading that does not come back."""
        self._sampler.stop()
        if self._thread.is_alive():
            self._thread.join(patience_seconds)

    def take(self, frame: Frame) -> None:
        """Make a measurement of a frame."""
        timestamp = max(0.0, self._elapsed(frame.monotonic))
        tasks, labels = self._executing()
        cells = [*self._frames.cells(frame, tasks), *self._custom.cells()]
        text = lines(labels, timestamp, cells)
        with self._lock:
            self._waiting.append(text)
            self._last = timestamp
            if len(self._waiting) > _MOST_WAITING:
                del self._waiting[0]
                self._lost += 1

    def parcel(self) -> Parcel | None:
        """What waits to be sent, which is the caller's from now on; None when nothing does."""
        with self._lock:
            if not self._waiting:
                return None
            waiting, self._waiting = self._waiting, []
            lost, self._lost = self._lost, 0
            return Parcel("".join(waiting), len(waiting), self._last, lost)

    def _run(self) -> None:
        try:
            for frame in self._sampler:
                self._take(frame)
        except Exception as error:  # noqa: BLE001  the end of a thread that nobody watches: told by `error`
            self.error = error

    def _take(self, frame: Frame) -> None:
        try:
            self.take(frame)
            self._taken(frame)
        except Exception as error:  # noqa: BLE001  a fault of ours in one measurement is not the end of all
            self.error = error


def same_once(labels: Sequence[Label | None]) -> tuple[Label | None, ...]:
    """Each graph once; what has no number says nothing beside what has one."""
    known = {label[:2]: label for label in labels if label is not None}
    return tuple(known[numbers] for numbers in sorted(known)) or (None,)
