"""Which GPUs and MIG instances the driver lists right now."""

from __future__ import annotations

from typing import Any

import pynvml

from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import NVMLError


def start() -> tuple[int, tuple[str | None, str | None]] | int:
    """Start NVML: how many GPUs there are and the versions, or the error it gave."""
    try:
        library.start()
    except NVMLError as error:
        return int(error.value)
    try:
        return int(pynvml.nvmlDeviceGetCount()), library.versions()
    except NVMLError as error:
        library.stop()
        return int(error.value)


def survey() -> tuple[str | None, ...] | int:
    """The UUIDs of the GPUs and MIG instances that answer now, or the error of a driver that is gone."""
    found: list[str | None] = []
    try:
        count = pynvml.nvmlDeviceGetCount()
    except NVMLError as error:
        return int(error.value)
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found.append(pynvml.nvmlDeviceGetUUID(handle))
        except NVMLError:
            found.append(None)
            continue
        found.extend(_mig_uuids(handle))
    return tuple(found)


def _mig_uuids(handle: Any) -> list[str]:
    found: list[str] = []
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return found
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except NVMLError:
        return found
    for slot in range(most):
        try:
            found.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
        except NVMLError:
            continue
    return found
