"""NVML as something that is started, watched for Xid errors, left when the driver goes, and started again."""

from __future__ import annotations

from typing import Any

from gpulse.model.metric import Values
from gpulse.sources.nvml import inventory, library
from gpulse.sources.nvml.events import XidLog, Xids, XidWatcher
from gpulse.sources.nvml.library import NVMLError
from gpulse.sources.nvml.target import Target


class Driver:
    """One user of NVML; every method but `leave` and the Xid readings may block, and runs on a lane."""

    def __init__(self, *, watch_xids: bool) -> None:
        self.count = 0
        """GPUs listed when NVML was started."""
        self.versions: tuple[str | None, str | None] = (None, None)
        self._watch_xids = watch_xids
        self._starts = 0
        self._left: list[Target] = []
        self._watcher: XidWatcher | None = None
        self._seen = XidLog()

    def start(self, *, calm: bool) -> int:
        """Start NVML; 0, or the error it gave. What was left of an earlier start is ended first.

        Without calm (a call of ours is still out) the earlier start stays: ending NVML under a call that
        hangs is asking for a crash.
        """
        self.stop(calm=calm)
        answer = inventory.start()
        if isinstance(answer, int):
            return answer
        self._starts += 1
        self.count, self.versions = answer
        if self._watch_xids:
            try:
                self._watcher = XidWatcher(self._seen)
            except NVMLError:  # no events on this driver: Xid readings stay unknown
                self._watcher = None
        return 0

    def watch(self, uuid: str, handle: Any) -> int:
        """Watch one GPU for Xid errors; 0, or the error that prevents it."""
        return 0 if self._watcher is None else self._watcher.add(uuid, handle)

    def leave(self, targets: list[Target]) -> None:
        """Give up what is open; `start` or `stop` ends it."""
        self._left.extend(targets)
        if self._watcher is not None:
            self._watcher.stop()

    def stop(self, *, calm: bool) -> None:
        """End what was started."""
        for target in self._left:
            target.close()
        self._left = []
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        while calm and self._starts:
            self._starts -= 1
            library.stop()

    def xids(self) -> dict[str, Xids]:
        """The Xid errors that the next frame tells of, by UUID."""
        return self._seen.next()

    def xid_values(self, uuid: str, seen: dict[str, Xids]) -> Values:
        """What is known of a GPU's Xid errors as readings; empty when none could have been seen."""
        if uuid not in seen:
            watched = self._watcher is not None and self._watcher.watches(uuid)
            return {"xid_errors_total": 0} if watched else {}
        total, code, time = seen[uuid]
        return {"xid_errors_total": total, "xid_last_code": code, "xid_last_timestamp_seconds": time}
