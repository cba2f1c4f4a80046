"""Xid errors as they happen, without dmesg and without root."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, NamedTuple

import pynvml

from gpulse.sources.nvml.library import NVMLError

_WAIT_MILLISECONDS = 500


class Xids(NamedTuple):
    """The errors that one GPU reported so far."""

    total: int
    last_code: int
    last_time: float


class XidWatcher:
    """Waits for Xid errors on a thread of its own."""

    def __init__(self, seen: dict[str, Xids]) -> None:
        """Prepare to watch; `seen` holds the errors by UUID and outlives this watcher.

        Raises:
            NVMLError: The driver has no events.
        """
        self._events = pynvml.nvmlEventSetCreate()
        self._seen = seen
        self._uuids: dict[int | None, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpulse-xid", daemon=True)
        self._thread.start()

    def add(self, uuid: str, handle: Any) -> int:
        """Watch one GPU more; 0, or the error of a GPU without events, which costs only its own."""
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except NVMLError as error:
            return int(error.value)
        self._uuids[_address(handle)] = uuid
        return 0

    def watches(self, uuid: str) -> bool:
        """Whether errors of this GPU would be seen."""
        return uuid in self._uuids.values()

    def stop(self) -> None:
        """Let the thread end, without waiting for it."""
        self._stop.set()

    def close(self) -> None:
        """End the thread and give the events back."""
        self.stop()
        self._thread.join(4 * _WAIT_MILLISECONDS / 1000)
        if not self._thread.is_alive():
            try:
                pynvml.nvmlEventSetFree(self._events)
            except NVMLError:  # the driver went first
                return

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, _WAIT_MILLISECONDS)
            except NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    # A driver on its way out, or a GPU off the bus, answers at once, for ever.
                    self._stop.wait(_WAIT_MILLISECONDS / 1000)
                continue
            # Not asked of the driver: after the error that matters most the GPU no longer has a name.
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                known = self._seen.get(uuid)
                total = 1 if known is None else known.total + 1
                self._seen[uuid] = Xids(total, int(event.eventData), time.time())


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
