"""Xid errors as they happen, without dmesg and without root."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import pynvml

from gpulse.sources.nvml.library import NVMLError

_WAIT_MILLISECONDS = 500


class Xid(NamedTuple):
    """One error that the driver reported."""

    uuid: str
    code: int
    time: float


class XidWatcher:
    """Waits for Xid errors on a thread of its own."""

    def __init__(self, gpus: Iterable[tuple[str, Any]]) -> None:
        """Register for the events of the GPUs, given as UUID and handle.

        Raises:
            NVMLError: The driver has no events.
        """
        self._events = pynvml.nvmlEventSetCreate()
        self._seen: list[Xid] = []
        self._uuids: dict[str, str] = {}
        for uuid, handle in gpus:
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except NVMLError:  # a GPU without events costs only its own
                continue
            self._uuids[uuid] = uuid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpulse-xid", daemon=True)
        self._thread.start()

    def seen(self) -> list[Xid]:
        """Every error seen so far, oldest first."""
        return list(self._seen)

    def close(self) -> None:
        """End the thread and give the events back."""
        self._stop.set()
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
                uuid = pynvml.nvmlDeviceGetUUID(event.device)
            except NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT:
                    self._stop.wait(
                        _WAIT_MILLISECONDS / 1000
                    )  # a driver on its way out answers at once, for ever
                continue
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                self._seen.append(Xid(uuid, int(event.eventData), time.time()))
