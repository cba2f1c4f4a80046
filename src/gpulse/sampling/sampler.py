"""Sample a source at a fixed interval; errors of the source do not end the sampling."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from math import inf
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from gpulse.errors import GpulseError, UsageError
from gpulse.model.device import Node
from gpulse.model.frame import Frame
from gpulse.model.snapshot import Snapshot
from gpulse.model.source_health import Health
from gpulse.sources.frame_source import EndOfRecordingError, Source
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.gpm import MIN_GPM_SECONDS
from gpulse.sources.nvml.gpu_reader import GpuReader, snapshot_reader
from gpulse.sources.nvml.read_timing import detailed_cadence

MIN_INTERVAL_SECONDS = 0.05


def check_interval(seconds: float) -> float:
    """Return the interval if it is valid.

    Raises:
        UsageError: It is too short, infinite or not a number.
    """
    if not MIN_INTERVAL_SECONDS <= seconds < inf:
        raise UsageError(
            f"the sampling interval must be at least {MIN_INTERVAL_SECONDS} s, not {seconds:g} s",
            hint="choose a longer interval",
        )
    return seconds


class Sampler:
    """Iterator over frames of a machine, one per interval.

    Without a source it samples this machine. Use it as a context manager, so that its threads and the driver
    are released:

        with Sampler(interval_seconds=1.0) as sampler:
            for frame in sampler:
                print(frame.gpus[0].get("power_watts"))
    """

    def __init__(self, source: Source | None = None, *, interval_seconds: float = 1.0) -> None:
        """Store the settings; sampling starts with the iteration.

        Args:
            source: Where frames come from; this machine when None.
            interval_seconds: Time from one frame to the next, at least 0.05.

        Raises:
            UsageError: The interval is too short or infinite.
        """
        self.interval_seconds = check_interval(interval_seconds)
        self._source = source
        self._stopped = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        """Not an Event: only a SimpleQueue may be used in a signal handler that interrupts the wait for it."""
        self._last: tuple[Frame, float] | None = None
        """The last frame of the source, and our monotonic time when it arrived."""
        self._failing_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Frame]:
        """Yield frames until `stop` or the end of a recording.

        Frames keep to a fixed schedule: a late frame does not delay the later ones, and frames that were missed
        (a suspended laptop) are skipped.
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
        """End the iteration, from any thread or signal handler, without waiting for the next frame."""
        self._stopped = True
        self._wake.put(None)

    def close(self) -> None:
        """Stop, and close the source."""
        self.stop()
        if self._source is not None:
            self._source.close()

    def _wait(self, seconds: float) -> None:
        try:
            self._wake.get(timeout=max(0.0, seconds))
        except Empty:
            return

    def _sample(self, source: Source) -> Frame | None:
        """Return one frame, an empty frame with the error if sampling failed, or None at the end."""
        now = time.time()
        try:
            frame = source.sample(now)
        except EndOfRecordingError:
            return None
        except GpulseError:
            if self._stopped:  # another thread has closed the source
                return None
            raise
        except Exception as error:  # noqa: BLE001  a bug in gpulse must not end the sampling
            return self._failed(now, error)
        self._last, self._failing_since = (frame, time.monotonic()), None
        return frame

    def _failed(self, now: float, error: Exception) -> Frame:
        self._failing_since = self._failing_since or now
        node, monotonic = Node(os.uname().nodename), time.monotonic()
        if self._last is not None:
            last, then = self._last
            node, monotonic = last.node, last.monotonic + monotonic - then
        health = Health(
            "sampler",
            "failed",
            f"internal error in gpulse: {error!r}",
            self._failing_since,
            hint="please report it; --debug shows the traceback",
        )
        return Frame(time=now, monotonic=monotonic, node=node, health=(health,))

    def _opened(self) -> Source:
        if self._source is None:
            self._source = LocalMachine(interval_seconds=self.interval_seconds)
        return self._source


_MARGIN_SECONDS = 0.0005
"""Safety margin, so that a timer that fires slightly early does not cost the reading."""


def open_machine_for_snapshot(gpus: GpuReader | None = None) -> LocalMachine:
    """Open this machine for a single snapshot; pass `gpus` if they are already open."""
    return LocalMachine(cadence=detailed_cadence(MIN_GPM_SECONDS), gpus=gpus or snapshot_reader())


def take_snapshot(machine: LocalMachine, *, rates_seconds: float | None) -> Snapshot:
    """Take a snapshot; without `rates_seconds` there is a second reading only if a GPU's GPM needs it."""
    earlier = machine.sample(time.time(), patient=True)
    rates_at = None if rates_seconds is None else earlier.monotonic + rates_seconds
    due = [moment for moment in (machine.gpm_ready_at, rates_at) if moment is not None]
    if not due:
        return Snapshot.of(None, earlier)
    time.sleep(max(0.0, max(due) + _MARGIN_SECONDS - time.monotonic()))
    return Snapshot.of(earlier, machine.sample(time.time(), patient=True))
