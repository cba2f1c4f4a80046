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


class XidLog:
    """The errors of all GPUs, told one code of a GPU at a time: so no frame hides one behind another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, Xids] = {}
        self._waiting: dict[str, dict[int, _Waiting]] = {}

    def add(self, uuid: str, code: int, moment: float) -> None:
        """A GPU reported an error."""
        with self._lock:
            codes = self._waiting.setdefault(uuid, {})
            before = codes.pop(code, None)  # put back at the end: what was seen last is told last
            codes[code] = _Waiting(1 if before is None else before.errors + 1, moment)

    def next(self) -> dict[str, Xids]:
        """What the next frame is to say, by UUID: what was told before, and one code more where one waits."""
        with self._lock:
            for uuid, codes in list(self._waiting.items()):
                code = next(iter(codes))
                errors, moment = codes.pop(code)
                known = self._told.get(uuid)
                self._told[uuid] = Xids(errors + (0 if known is None else known.total), code, moment)
                if not codes:
                    del self._waiting[uuid]
            return self._told.copy()


class _Waiting(NamedTuple):
    """Errors of one code that no frame has told yet."""

    errors: int
    last_time: float


class XidWatcher:
    """Waits for Xid errors on a thread of its own."""

    def __init__(self, seen: XidLog) -> None:
        """Prepare to watch; `seen` takes the errors and outlives this watcher.

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
                self._seen.add(uuid, int(event.eventData), time.time())


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
