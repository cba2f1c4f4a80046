"""What is on show: the newest snapshot and the history, or both as they were when somebody paused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpulse.model.frame import GpuReading
from gpulse.terminal.top.history import History
from gpulse.terminal.top.snapshot import Snapshot


class Stage:
    """Goes on taking in snapshots while what it shows stands still."""

    def __init__(self) -> None:
        self._newest: Snapshot | None = None
        self._running = History()
        self.snapshot: Snapshot | None = None
        """The one on show."""
        self.history = self._running
        """The history up to it."""

    @property
    def gpus(self) -> Sequence[GpuReading]:
        """The GPUs on show."""
        return () if self.snapshot is None else self.snapshot.frame.gpus

    def take(self, snapshots: Iterable[Snapshot]) -> None:
        """Take in what came, in order; only the last is worth showing."""
        follows = self.history is self._running
        for snapshot in snapshots:
            self._newest = snapshot
            self._running.add(snapshot.frame)
        if follows:
            self.snapshot = self._newest

    def pause(self, *, paused: bool) -> None:
        """Stand still, or go on with the newest."""
        if paused:
            self.history = self._running.copy()
        else:
            self.snapshot, self.history = self._newest, self._running
