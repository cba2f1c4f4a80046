"""Sample in a thread that waits for neither network nor disk, and pass packed frames on."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpulse._version import __version__
from gpulse.cluster.agent.event_detector import Event, EventDetector
from gpulse.diagnosis.live_diagnosis import LiveDiagnosis
from gpulse.errors import GpulseError
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.frame_packing import FramePacker
from gpulse.model.packed_columns import PackedFrame
from gpulse.model.xid import XidCounts
from gpulse.sampling.sampler import MIN_INTERVAL_SECONDS, Sampler
from gpulse.sources.frame_source import Source

if TYPE_CHECKING:
    from gpulse.cluster.agent.line_collection import LineCollection

_log = logging.getLogger(__name__)

PackedFrameCallback = Callable[[Frame, PackedFrame, Sequence[bytes]], None]
FrameCallback = Callable[[Frame, Sequence[Finding], float], None]
"""Receives a frame, the findings as of it, and the seconds until the next frame."""

_DIAGNOSIS_SECONDS = 10.0
"""Half as often as for a user who watches, because an agent runs for months."""


class SamplingThread:
    """The sampling thread. It owns the source and closes it at the end."""

    def __init__(
        self,
        source: Source,
        interval_seconds: float,
        *,
        changes: EventDetector,
        taken: PackedFrameCallback,
        ended: Callable[[], None],
        diagnosis: bool = True,
        xids: XidCounts | None = None,
        lines: LineCollection | None = None,
        seen: FrameCallback = lambda _frame, _findings, _interval: None,
    ) -> None:
        """Prepare to sample.

        Args:
            source: Source of the frames.
            interval_seconds: Sampling interval.
            changes: Detects the events of each frame.
            taken: Called in the thread with each frame, unpacked and packed, and with the layouts it is first to use.
            ended: Called in the thread when there are no more frames.
            diagnosis: Whether to diagnose the frames.
            xids: Xid errors so far; the diagnosis adds new ones.
            lines: Adds lines of code to the findings; None for findings without.
            seen: Called in the thread with each frame.
        """
        self._source = source
        self._interval = interval_seconds
        self._changes = changes
        self._taken = taken
        self._ended = ended
        self._seen = seen
        self._monitor = _make_monitor(xids) if diagnosis else None
        self._lines = lines
        self._packer = FramePacker()
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._stopping = False
        self._anew = False
        self._thread = threading.Thread(target=self._run, name="gpulse-sampler", daemon=True)
        self.error: GpulseError | None = None
        """Why sampling failed; None if it ended normally."""

    @property
    def interval_seconds(self) -> float:
        """Sampling interval."""
        return self._interval

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_interval(self, seconds: float) -> None:
        """Change the sampling interval."""
        seconds = max(seconds, MIN_INTERVAL_SECONDS)
        with self._lock:
            if seconds == self._interval:
                return
            self._interval, self._anew = seconds, True
            if self._sampler is not None:
                self._sampler.stop()

    def stop(self) -> None:
        """Take one last frame and end the thread."""
        with self._lock:
            self._stopping = True
            if self._sampler is not None:
                self._sampler.stop()

    def join(self, patience_seconds: float) -> bool:
        """Wait for the thread to end; return False if a reading hangs."""
        self._thread.join(patience_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (sampler := self._next_sampler()) is not None:
                for frame in sampler:
                    self._take(frame)
            if self._stopping:
                self._take(self._source.sample(time.time()), ({"event": "agent_stopping"},))
        except GpulseError as error:
            if not self._stopping:
                self.error = error
        except Exception as error:  # noqa: BLE001  most likely the last sample: the sampler handles errors in the others
            if self._stopping:
                _log.warning("cannot take the last sample: %s", error)
            else:
                self.error = GpulseError(f"sampling ended because of a bug in gpulse: {error!r}")
        finally:
            self._source.close()
            self._ended()

    def _next_sampler(self) -> Sampler | None:
        """Return a sampler for the current interval; None if there is nothing left to sample."""
        with self._lock:
            if self._stopping or (self._sampler is not None and not self._anew):
                return None
            self._anew = False
            self._sampler = Sampler(self._source, interval_seconds=self._interval)
            return self._sampler

    def _take(self, frame: Frame, more: Sequence[Event] = ()) -> None:
        try:
            findings: Sequence[Finding] = self._monitor(frame) if self._monitor is not None else ()
            findings = self._add_lines(frame, findings)
            self._seen(frame, findings, self._interval)
            events = [*self._changes(frame, findings), *more]
            packed, texts = self._packer.pack(frame, events)
        except Exception:  # noqa: BLE001
            # A bug in diagnosis or event detection must not end sampling.
            _log.exception("diagnosis failed because of a bug in gpulse; continuing without diagnosis")
            self._monitor = self._lines = None
            packed, texts = self._packer.pack(frame, more)
        self._taken(frame, packed, texts)

    def _add_lines(self, frame: Frame, findings: Sequence[Finding]) -> Sequence[Finding]:
        """Return the findings with their lines of code; without, if these cannot be found."""
        if self._lines is None:
            return findings
        try:
            return self._lines(frame, findings)
        except Exception:  # noqa: BLE001  the diagnosis continues
            _log.exception("cannot find lines of code because of a bug in gpulse; continuing without them")
            self._lines = None
            return findings


def _make_monitor(xids: XidCounts | None) -> LiveDiagnosis:
    return LiveDiagnosis(every_seconds=_DIAGNOSIS_SECONDS, xids=xids)


class RetimedSource:
    """A recorded or simulated machine whose frames get the current times of this machine."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def sample(self, now: float) -> Frame:
        """Return the next frame with the current times.

        Raises:
            EndOfRecordingError: There is none left.
        """
        monotonic = time.monotonic()  # read before sampling, so that it matches `now`
        return self._source.sample(now)._replace(time=now, monotonic=monotonic)

    def close(self) -> None:
        """Close the wrapped source."""
        self._source.close()


_LAST_FRAME_SECONDS = 0.4


async def sample_standalone(
    source: Source,
    *,
    interval_seconds: float,
    seen: FrameCallback,
    stop: asyncio.Event,
    diagnosis: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Sample this machine without a head, for Prometheus scrapes, until `stop` is set or a recording ends.

    Args:
        source: Source of the frames; closed at the end.
        interval_seconds: Sampling interval.
        seen: Called with each frame, in the sampling thread.
        stop: Set it to end sampling.
        diagnosis: Whether to diagnose the frames.
        ready: Called once sampling runs.

    Raises:
        GpulseError: Nothing can be sampled.
    """
    loop = asyncio.get_running_loop()

    def ended() -> None:
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop.set)

    sampling = SamplingThread(
        source,
        interval_seconds,
        changes=EventDetector(version=__version__, pid=os.getpid()),
        taken=lambda _frame, _packed, _texts: None,
        ended=ended,
        diagnosis=diagnosis,
        seen=seen,
    )
    sampling.start()
    try:
        ready()
        await stop.wait()
    finally:
        sampling.stop()
        await asyncio.to_thread(sampling.join, _LAST_FRAME_SECONDS)
    if sampling.error is not None:
        raise sampling.error
