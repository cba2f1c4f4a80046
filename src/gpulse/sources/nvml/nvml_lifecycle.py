"""Lifecycle of NVML: start, watch for Xid errors, leave when the driver goes away, and start again."""

from __future__ import annotations

import struct
import threading
import time
from ctypes import c_char, c_uint, c_ulonglong, c_void_p
from typing import NamedTuple

from gpulse.model.metric_catalog import Values
from gpulse.sources.nvml import gpu_inventory, library
from gpulse.sources.nvml.library import NVMLError
from gpulse.sources.nvml.open_device import OpenDevice

_WAIT_MILLISECONDS = 500
_XID_ERROR = 8
"""NVML's bit for this type of event."""
_EVENT = struct.Struct("<QQQ8x")
"""nvmlEventData_t: device, type, Xid code."""


class XidSummary(NamedTuple):
    """Xid errors that one GPU has reported so far."""

    total: int
    last_code: int
    last_time: float


class XidLog:
    """Xid errors of all GPUs, reported one code per GPU and frame, so that no error hides another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: dict[str, XidSummary] = {}
        self._unreported: dict[str, dict[int, _UnreportedXids]] = {}

    def add(self, uuid: str, code: int, moment: float) -> None:
        """Add an error that a GPU reported."""
        with self._lock:
            codes = self._unreported.setdefault(uuid, {})
            before = codes.pop(code, None)  # put back at the end: the newest is reported last
            codes[code] = _UnreportedXids(1 if before is None else before.errors + 1, moment)

    def next(self) -> dict[str, XidSummary]:
        """Return the errors for the next frame, by UUID: those reported before, and one more code where one waits."""
        with self._lock:
            for uuid, codes in list(self._unreported.items()):
                code = next(iter(codes))
                errors, moment = codes.pop(code)
                known = self._reported.get(uuid)
                self._reported[uuid] = XidSummary(
                    errors + (0 if known is None else known.total), code, moment
                )
                if not codes:
                    del self._unreported[uuid]
            return self._reported.copy()


class _UnreportedXids(NamedTuple):
    """Errors of one code that no frame has reported yet."""

    errors: int
    last_time: float


class XidWatcher:
    """Waits for Xid errors on a thread of its own."""

    def __init__(self, seen: XidLog) -> None:
        """Prepare to watch; `seen` collects the errors and outlives this watcher.

        Raises:
            NVMLError: The driver does not support events.
        """
        self._events = library.read_handle("nvmlEventSetCreate")
        self._seen = seen
        self._uuids: dict[int | None, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpulse-xid", daemon=True)
        self._thread.start()

    def add(self, uuid: str, handle: c_void_p) -> int:
        """Watch one more GPU; return 0, or the error of a GPU without events, which affects only that GPU."""
        try:
            library.call("nvmlDeviceRegisterEvents", handle, c_ulonglong(_XID_ERROR), self._events)
        except NVMLError as error:
            return int(error.value)
        self._uuids[handle.value] = uuid
        return 0

    def watches(self, uuid: str) -> bool:
        """Return whether errors of this GPU are watched."""
        return uuid in self._uuids.values()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        """End the thread and free the events."""
        self.stop()
        self._thread.join(4 * _WAIT_MILLISECONDS / 1000)
        if not self._thread.is_alive():
            try:
                library.call("nvmlEventSetFree", self._events)
            except NVMLError:  # the driver went first
                return

    def _watch(self) -> None:
        event = (c_char * _EVENT.size)()
        while not self._stop.is_set():
            try:
                library.call("nvmlEventSetWait_v2", self._events, event, c_uint(_WAIT_MILLISECONDS))
            except NVMLError as error:
                if error.value != library.TIMEOUT:
                    # A driver that is unloading, or a GPU off the bus, returns this error immediately every time.
                    self._stop.wait(_WAIT_MILLISECONDS / 1000)
                continue
            # Not queried from the driver: after the most severe error the GPU no longer reports its UUID.
            device, kind, code = _EVENT.unpack(event)
            uuid = self._uuids.get(device)
            if uuid is not None and kind == _XID_ERROR:
                self._seen.add(uuid, code, time.time())


class NvmlDriver:
    """One user of NVML; every method but `leave` and the Xid readings may block, and runs in a timeout pool."""

    def __init__(self, *, watch_xids: bool) -> None:
        self.count = 0
        """GPUs listed when NVML was started."""
        self.versions: tuple[str | None, str | None] = (None, None)
        self._watch_xids = watch_xids
        self._starts = 0
        self._left: list[OpenDevice] = []
        self._watcher: XidWatcher | None = None
        self._seen = XidLog()

    def start(self, *, calm: bool) -> int:
        """Start NVML; return 0 or its error. Remains of an earlier start are ended first.

        Without `calm` (one of our calls is still pending) the earlier start stays: shutting NVML down under
        a call that hangs risks a crash.
        """
        self.stop(calm=calm)
        answer = gpu_inventory.start_driver()
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

    def watch(self, uuid: str, handle: c_void_p) -> int:
        """Watch one GPU for Xid errors; return 0, or the error that prevents it."""
        return 0 if self._watcher is None else self._watcher.add(uuid, handle)

    def leave(self, targets: list[OpenDevice]) -> None:
        """Leave the open devices; `start` or `stop` closes them."""
        self._left.extend(targets)
        if self._watcher is not None:
            self._watcher.stop()

    def stop(self, *, calm: bool) -> None:
        """Close devices and shut NVML down."""
        for target in self._left:
            target.close()
        self._left = []
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        while calm and self._starts:
            self._starts -= 1
            library.stop()

    def xids(self) -> dict[str, XidSummary]:
        """Return the Xid errors for the next frame, by UUID."""
        return self._seen.next()

    def xid_values(self, uuid: str, seen: dict[str, XidSummary]) -> Values:
        """Return a GPU's Xid errors as metric values; empty when they are not watched."""
        if uuid not in seen:
            watched = self._watcher is not None and self._watcher.watches(uuid)
            return {"xid_errors_total": 0} if watched else {}
        total, code, time = seen[uuid]
        return {"xid_errors_total": total, "xid_last_code": code, "xid_last_timestamp_seconds": time}
