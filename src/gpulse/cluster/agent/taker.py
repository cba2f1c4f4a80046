"""Takes frames in a thread of its own and hands them on packed; waits for neither network nor disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpulse.cluster.agent.changes import Changes, Event
from gpulse.errors import GpulseError
from gpulse.model.columns import PackedFrame
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.packing import FramePacker
from gpulse.model.xid import XidLedger
from gpulse.sampling.sampler import SHORTEST_INTERVAL_SECONDS, Sampler
from gpulse.sources.base import Source

if TYPE_CHECKING:
    from gpulse.diagnosis.live import Monitor

_log = logging.getLogger(__name__)

Taken = Callable[[Frame, PackedFrame, Sequence[bytes]], None]
Seen = Callable[[Frame, Sequence[Finding], float], None]
"""Gets a frame, what is wrong as of it, and the seconds after which the next one is to come."""

_JUDGE_SECONDS = 10.0
"""Half as often as for somebody who watches: an agent runs for months."""


class Taker:
    """The sampling thread. The source is its own: it is closed in the end."""

    def __init__(
        self,
        source: Source,
        interval_seconds: float,
        *,
        changes: Changes,
        taken: Taken,
        ended: Callable[[], None],
        diagnosis: bool = True,
        xids: XidLedger | None = None,
        seen: Seen = lambda _frame, _findings, _interval: None,
    ) -> None:
        """Prepare to sample.

        Args:
            source: Where frames come from.
            interval_seconds: Time from one frame to the next.
            changes: Tells what happened from one frame to the next.
            taken: Gets each frame, as it is and packed, with the layouts not used before; called in the thread.
            ended: Called in the thread when there are no more frames.
            diagnosis: Judge what is seen.
            xids: Xid errors that are known already; the diagnosis adds those that it sees.
            seen: Gets each frame; called in the thread.
        """
        self._source = source
        self._interval = interval_seconds
        self._changes = changes
        self._taken = taken
        self._ended = ended
        self._seen = seen
        self._monitor = _monitor(xids) if diagnosis else None
        self._packer = FramePacker()
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._stopping = False
        self._anew = False
        self._thread = threading.Thread(target=self._run, name="gpulse-sampler", daemon=True)
        self.error: GpulseError | None = None
        """Why there are no more frames, if it is a reason to complain."""

    @property
    def interval_seconds(self) -> float:
        """Time from one frame to the next."""
        return self._interval

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def set_interval(self, seconds: float) -> None:
        """Sample at another pace from now on."""
        seconds = max(seconds, SHORTEST_INTERVAL_SECONDS)
        with self._lock:
            if seconds == self._interval:
                return
            self._interval, self._anew = seconds, True
            if self._sampler is not None:
                self._sampler.stop()

    def stop(self) -> None:
        """Take one last frame and end."""
        with self._lock:
            self._stopping = True
            if self._sampler is not None:
                self._sampler.stop()

    def join(self, patience_seconds: float) -> bool:
        """Wait for the end; False when a reading does not come back."""
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
        except Exception as error:  # noqa: BLE001  most likely of the last sample: the sampler guards the others
            if self._stopping:
                _log.warning("the last frame could not be taken: %s", error)
            else:
                self.error = GpulseError(f"sampling ended, which is a fault in gpulse: {error!r}")
        finally:
            self._source.close()
            self._ended()

    def _next_sampler(self) -> Sampler | None:
        """One for the pace that is wanted now, None when there is nothing left to sample."""
        with self._lock:
            if self._stopping or (self._sampler is not None and not self._anew):
                return None
            self._anew = False
            self._sampler = Sampler(self._source, interval_seconds=self._interval)
            return self._sampler

    def _take(self, frame: Frame, more: Sequence[Event] = ()) -> None:
        try:
            findings = self._monitor(frame) if self._monitor is not None else ()
            self._seen(frame, findings, self._interval)
            events = [*self._changes(frame, findings), *more]
            packed, texts = self._packer.pack(frame, events)
        except Exception:  # noqa: BLE001
            # A fault of ours in what goes along with the readings must not end the readings.
            _log.exception("a fault in gpulse; going on without diagnosis")
            self._monitor = None
            packed, texts = self._packer.pack(frame, more)
        self._taken(frame, packed, texts)


def _monitor(xids: XidLedger | None) -> Monitor:
    from gpulse.diagnosis.live import Monitor  # noqa: PLC0415  not needed without a diagnosis

    return Monitor(every_seconds=_JUDGE_SECONDS, xids=xids)
