"""Which GPUs and MIG instances the driver lists right now."""

from __future__ import annotations

from typing import Any, NamedTuple

import pynvml

from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import NVMLError


class Listed(NamedTuple):
    """One GPU that the driver lists."""

    uuid: str | None
    """None when it cannot even say that."""
    instances: tuple[str, ...]
    """The UUIDs of its MIG instances."""


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


def survey() -> tuple[Listed, ...] | int:
    """What the driver lists now, by NVML's index, or the error of a driver that is gone."""
    try:
        count = pynvml.nvmlDeviceGetCount()
        while True:
            listed = tuple(_listed(index) for index in range(count))
            before, count = count, pynvml.nvmlDeviceGetCount()
            if count == before:  # else a GPU came or went meanwhile, and the list mixes two numberings
                return listed
    except NVMLError as error:
        return int(error.value)


def _listed(index: int) -> Listed:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return Listed(pynvml.nvmlDeviceGetUUID(handle), tuple(uuid for uuid, _ in mig_instances(handle)))
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return Listed(None, ())


def mig_instances(handle: Any) -> list[tuple[str, Any]]:
    """UUID and handle of each MIG instance of a GPU; empty when it is not split."""
    found: list[tuple[str, Any]] = []
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return found
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except NVMLError:
        return found
    for slot in range(most):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            found.append((pynvml.nvmlDeviceGetUUID(instance), instance))
        except (NVMLError, ValueError):  # an empty slot, or one that was just emptied
            continue
    return found
