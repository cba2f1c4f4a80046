"""List the GPUs and MIG instances that the driver knows now."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import NVMLError


class ListedGpu(NamedTuple):
    """One GPU that the driver lists."""

    uuid: str | None
    """None when the GPU does not report it."""
    instances: tuple[str, ...]
    """The UUIDs of its MIG instances."""


def start_driver() -> tuple[int, tuple[str | None, str | None]] | int:
    """Start NVML; return the number of GPUs and the versions, or NVML's error."""
    try:
        library.start()
    except NVMLError as error:
        return int(error.value)
    try:
        return count_gpus(), library.read_versions()
    except NVMLError as error:
        library.stop()
        return int(error.value)


def count_gpus() -> int:
    """Return the number of GPUs.

    Raises:
        NVMLError: The driver is gone.
    """
    return library.read_number("nvmlDeviceGetCount_v2")


def is_split(handle: Any) -> bool:
    """Return whether a GPU is split into MIG instances.

    Raises:
        NVMLError: It does not report it.
    """
    return bool(library.read_numbers("nvmlDeviceGetMigMode", 2, handle)[0])


def list_gpus() -> tuple[ListedGpu, ...] | int:
    """Return the GPUs that the driver lists, by NVML's index, or the error of a driver that is gone."""
    try:
        count = count_gpus()
        while True:
            listed = tuple(_list_gpu(index) for index in range(count))
            before, count = count, count_gpus()
            if count == before:  # else a GPU came or went meanwhile, and the list mixes two sets of indices
                return listed
    except NVMLError as error:
        return int(error.value)


def _list_gpu(index: int) -> ListedGpu:
    try:
        handle = library.read_handle("nvmlDeviceGetHandleByIndex_v2", index)
        uuid = library.read_text("nvmlDeviceGetUUID", handle)
        return ListedGpu(uuid, tuple(uuid for uuid, _ in find_mig_instances(handle)))
    except (NVMLError, ValueError):  # ValueError: text that is not UTF-8
        return ListedGpu(None, ())


def find_mig_instances(handle: Any) -> list[tuple[str, Any]]:
    """Return UUID and handle of each MIG instance of a GPU; empty when it is not split."""
    found: list[tuple[str, Any]] = []
    try:
        if not is_split(handle):
            return found
        most = library.read_number("nvmlDeviceGetMaxMigDeviceCount", handle)
    except NVMLError:
        return found
    for slot in range(most):
        try:
            instance = library.read_handle("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            found.append((library.read_text("nvmlDeviceGetUUID", instance), instance))
        except (NVMLError, ValueError):  # an empty slot, or one that was just emptied
            continue
    return found
