"""The thread that samples while the view draws, so that a slow source never freezes the keyboard."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from gpulse.errors import CollectionError, GpulseError
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.rates import between
from gpulse.sampling.sampler import Sampler
from gpulse.sources.base import Source
from gpulse.sources.recording import EndOfRecordingError
from gpulse.terminal.top.snapshot import Snapshot

_MOST_WAITING = 120
_PATIENCE_SECONDS = 2.0

_INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


def next_interval(seconds: float, step: int) -> float:
    """The next longer interval, or for a negative step the next shorter; the same at either end."""
    longer = [choice for choice in _INTERVALS if choice > seconds]
    shorter = [choice for choice in _INTERVALS if choice < seconds]
    return next(iter(longer if step > 0 else reversed(shorter)), seconds)


class Feed:
    """Snapshots of a source, taken on a thread of their own and fetched by the view when it has time.

    The source stays with whoever made it: closing the feed ends the thread but does not close the source.
    """

    def __init__(
        self,
        source: Source,
        *,
        interval_seconds: float,
        narrow: Callable[[Frame], Frame] | None,
        findings: Callable[[Frame], Sequence[Finding]],
        wake: Callable[[], object],
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            source: Where frames come from.
            interval_seconds: Time from one frame to the next.
            narrow: Leaves out of each frame what is not to be shown.
            findings: Asked about every frame, in order, on the thread.
            wake: Called on the thread whenever there is something to fetch.
        """
        self.interval_seconds = interval_seconds
        self._source = source
        self._narrow = narrow
        self._findings = findings
        self._wake = wake
        self._waiting: deque[Snapshot] = deque(maxlen=_MOST_WAITING)
        self._closing = threading.Event()
        self._sampler = Sampler(self, interval_seconds=interval_seconds)
        self._thread = threading.Thread(target=self._run, name="gpulse-top", daemon=True)
        self._last: Frame | None = None
        self.ended = False
        """True once a recording has no frame left."""
        self.refused: GpulseError | None = None
        """Why there is nothing to show of what was asked for: a GPU that is not here."""
        self.failure: str | None = None
        """Why the last attempt to sample failed, None when it did not."""

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def fetch(self) -> list[Snapshot]:
        """What came in since the last call, oldest first."""
        snapshots = []
        while self._waiting:
            snapshots.append(self._waiting.popleft())
        return snapshots

    def set_interval(self, seconds: float) -> None:
        """Sample at another pace, from now on rather than after the wait that is under way."""
        self.interval_seconds = seconds
        self._sampler.stop()

    def stop(self) -> bool:
        """End the thread; False when it sits in a call of the source that does not come back."""
        self._closing.set()
        self._sampler.stop()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)
        return not self._thread.is_alive()

    def sample(self, now: float) -> Frame:
        """One frame of the source, for the sampler.

        A fault of the source becomes an error that the sampler passes on: an empty frame in its place
        would blank the tables, and here the last good one stays.
        """
        try:
            return self._source.sample(now)
        except EndOfRecordingError:
            self.ended = True
            raise
        except GpulseError:
            raise
        except Exception as error:
            raise CollectionError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Nothing: the source is its maker's to close."""

    def _run(self) -> None:
        while not self._closing.is_set() and not self.ended and self.refused is None:
            self._sampler = sampler = Sampler(self, interval_seconds=self.interval_seconds)
            # Somebody may have stopped the sampler before this one.
            if self._closing.is_set() or sampler.interval_seconds != self.interval_seconds:
                continue
            try:
                for frame in sampler:
                    if self._closing.is_set():
                        return
                    self._take(frame)
            except Exception as error:  # noqa: BLE001  the guard: whatever a source does, the view stays
                self.failure = (
                    error.message if isinstance(error, GpulseError) else f"{type(error).__name__}: {error}"
                )
                if self.refused is None:
                    self._tell()
                    self._closing.wait(self.interval_seconds)
        self._tell()

    def _take(self, frame: Frame) -> None:
        if self._narrow is not None:
            try:
                frame = self._narrow(frame)
            except GpulseError as error:
                self.refused = error
                raise
        last = self._last if self._last is not None else frame
        self._waiting.append(Snapshot(frame, between(last, frame), tuple(self._findings(frame))))
        self._last = frame
        self.failure = None
        self._tell()

    def _tell(self) -> None:
        # A call that came back too late finds a view that is gone.
        if not self._closing.is_set():
            self._wake()
