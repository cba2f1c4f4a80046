"""Read how a GPU is connected to the other GPUs of its node: PCIe levels, NVLinks and NVSwitches."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import create_string_buffer
from typing import Any, NamedTuple

from gpulse.model.device import MAX_PATHS, Device, DevicePath, PcieLevel
from gpulse.sources.network import PciDevices
from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import PERMANENT_CODES, NVMLError, code_of

_LEVELS: dict[int, PcieLevel] = {
    0: "PIX",  # two GPUs on one board
    10: "PIX",
    20: "PXB",
    30: "PHB",
    40: "NODE",
    50: "SYS",
}
"""By NVML's numbers of the levels."""
_LINKED_TO_GPU, _LINKED_TO_SWITCH = 0, 2
_PCI_INFO_BYTES, _BUS_ID_OFFSET = 68, 36
"""Of nvmlPciInfo_t."""


class PeerGpu(NamedTuple):
    """A GPU of the node and its NVML handle."""

    device: Device
    handle: Any


class GpuConnections(NamedTuple):
    """How a GPU is connected to other devices."""

    switch_links: int | None
    paths: tuple[DevicePath, ...]
    adapter_paths: tuple[DevicePath, ...]
    is_complete: bool
    """False when the driver could not answer now, so that reading again may tell more."""


class _NvLinks(NamedTuple):
    """Number of a GPU's active NVLinks, by what is at the other end."""

    to_switches: int | None
    to_gpus: dict[str, int]
    """By bus ID."""


def read_connections(gpu: PeerGpu, peers: Sequence[PeerGpu], pci: PciDevices) -> GpuConnections:
    """Return how a GPU is connected to the other GPUs and to the network adapters.

    Args:
        gpu: The GPU.
        peers: All GPUs of the node.
        pci: The PCI devices of the node.
    """
    errors: list[int] = []
    links = _read_nvlinks(gpu.handle, errors)
    paths = [
        DevicePath(
            peer.device.uuid,
            _read_level(gpu.handle, peer.handle, errors),
            None if links.to_switches is None else links.to_gpus.get(peer.device.bus_id or "", 0),
        )
        for peer in peers
        if peer.device.uuid != gpu.device.uuid
    ]
    adapters = [] if gpu.device.bus_id is None else pci.find_adapters(gpu.device.bus_id)
    return GpuConnections(
        links.to_switches,
        tuple(paths[:MAX_PATHS]),
        tuple(DevicePath(name, level) for name, level in adapters),
        is_complete=all(code_of(error) in PERMANENT_CODES for error in errors),
    )


def _read_level(handle: Any, other: Any, errors: list[int]) -> PcieLevel | None:
    try:
        return _LEVELS.get(library.read_number("nvmlDeviceGetTopologyCommonAncestor", handle, other))
    except NVMLError as error:
        errors.append(error.value)
        return None


def _read_nvlinks(handle: Any, errors: list[int]) -> _NvLinks:
    """Return where the active NVLinks lead; None and nothing on a GPU without NVLink."""
    switches = 0
    gpus: dict[str, int] = {}
    for link in range(library.MAX_LINKS):
        try:
            is_active = bool(library.read_number("nvmlDeviceGetNvLinkState", handle, link))
        except NVMLError as error:
            if code_of(error.value) not in PERMANENT_CODES:
                errors.append(error.value)
                return _NvLinks(None, {})
            return _NvLinks(switches if link else None, gpus)
        if not is_active:
            continue
        try:
            kind = library.read_number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
            if kind == _LINKED_TO_SWITCH:
                switches += 1
            elif kind == _LINKED_TO_GPU:
                bus_id = read_bus_id("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link)
                gpus[bus_id] = gpus.get(bus_id, 0) + 1
        except NVMLError as error:
            errors.append(error.value)
    return _NvLinks(switches, gpus)


def read_bus_id(function: str, *arguments: Any) -> str:
    """Return the bus ID, in lower case, from a function of NVML that describes a PCI device.

    Raises:
        NVMLError: The function failed.
        ValueError: The bus ID is not UTF-8.
    """
    info = create_string_buffer(_PCI_INFO_BYTES)
    library.call(function, *arguments, info)
    return info.raw[_BUS_ID_OFFSET:].partition(b"\0")[0].decode().lower()
