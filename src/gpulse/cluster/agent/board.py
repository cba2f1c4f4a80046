"""What an agent shows Prometheus: the newest frame, as it was taken; nothing is read because somebody asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from gpulse._version import __version__
from gpulse.cluster.agent.identity import Identity
from gpulse.export.prometheus import own
from gpulse.export.prometheus.exposed import Census, Exposed, stale_after
from gpulse.export.prometheus.page import exposition
from gpulse.export.prometheus.text import Family
from gpulse.model.finding import Finding
from gpulse.model.frame import (
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.metric import Values
from gpulse.model.rates import between
from gpulse.model.xid import XidLedger


class _Newest(NamedTuple):
    """The newest frame and the one before it."""

    frame: Frame | None = None
    before: Frame | None = None
    findings: tuple[Finding, ...] = ()
    interval_seconds: float = 0.0
    """After which the next frame is to come."""

    def rated(self) -> Frame | None:
        """The newest frame with the rates since the one before it."""
        if self.frame is None or self.before is None:
            return self.frame
        bare = [frame._replace(processes=(), cgroups=()) for frame in (self.before, self.frame)]
        rates = between(*bare, cores=False)
        frame = self.frame
        return frame._replace(
            gpus=tuple(_with(gpu, rates.gpus.get(gpu.device.uuid)) for gpu in frame.gpus),
            host=None if frame.host is None else _with(frame.host, rates.host),
            disks=tuple(_with(disk, rates.disks.get(disk.name)) for disk in frame.disks),
            filesystems=tuple(
                _with(item, rates.filesystems.get(item.mount_point)) for item in frame.filesystems
            ),
            network=tuple(_with(link, rates.network.get(link.name)) for link in frame.network),
        )


_Reading = TypeVar("_Reading", GpuReading, HostReading, DiskReading, FilesystemReading, NetworkReading)


def _with(reading: _Reading, rates: Values | None) -> _Reading:
    return reading._replace(values={**rates, **reading.values}) if rates else reading


class Board:
    """The newest frame of this machine. Written by the sampling thread, read by whoever serves it."""

    def __init__(
        self,
        me: Identity,
        *,
        dcgm_names: bool = False,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing to show.

        Args:
            me: Whose frames they are.
            dcgm_names: Readings under DCGM's names, not under ours.
            clock: Epoch seconds.
            monotonic: The clock that nobody sets, as in frames.
        """
        self._dcgm_names = dcgm_names
        self._clock = clock
        self._monotonic = monotonic
        self._started = clock()
        self._xids = XidLedger()
        self._census = Census()
        self._frames = 0
        self._me = Exposed(me.host, None, (), self._xids, me.host, me.machine, __version__)
        self._newest = _Newest()

    def show(self, frame: Frame, findings: Sequence[Finding], interval_seconds: float) -> None:
        """Put up the next frame; called by the sampling thread.

        Args:
            frame: The frame.
            findings: What is wrong as of it.
            interval_seconds: After which the next one is to come.
        """
        self._xids.follow(frame)
        self._frames += 1
        self._newest = _Newest(frame, self._newest.frame, tuple(findings), interval_seconds)

    def pieces(self) -> Iterator[str]:
        """The page."""
        newest = self._newest
        return exposition(
            [self._me._replace(frame=newest.rated(), findings=newest.findings)],
            now=self._now(newest.frame),
            interval_seconds=newest.interval_seconds,
            version=__version__,
            dcgm_names=self._dcgm_names,
            more=self._own(),
            census=self._census,
        )

    def trouble(self) -> str | None:
        """Why there is nothing to show, None when there is."""
        newest = self._newest
        if newest.frame is None:
            return "no frame was taken yet"
        age = self._now(newest.frame) - newest.frame.time
        if age > stale_after(newest.interval_seconds):
            return f"the newest frame is {age:.0f} s old"
        return None

    def _now(self, newest: Frame | None) -> float:
        """The time on the clock as it was when a frame was taken, however often it was set since."""
        return self._clock() if newest is None else newest.time + self._monotonic() - newest.monotonic

    def _own(self) -> Iterator[Family]:
        yield from own.of_process(self._started)
        yield from own.of_agent(self._frames)
