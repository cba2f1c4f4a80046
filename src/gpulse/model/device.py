"""Constant facts about a GPU, or one MIG instance of it: its identity, and its paths to other devices of its node; and about the node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeGuard, get_args

from gpulse.model.metric_catalog import Values

PcieLevel = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
"""What a path over PCIe crosses: one switch, several switches, a host bridge, two host bridges of one NUMA node, or
the link between two NUMA nodes."""
PCIE_LEVELS: tuple[PcieLevel, ...] = get_args(PcieLevel)
"""Nearest first."""
MAX_PATHS = 63
"""Paths of one GPU to other GPUs, and to network adapters: a topology has at most 64 GPUs."""
MAX_LINKS = 1024
"""NVLinks between two devices; today's GPUs have 18."""


class DevicePath(NamedTuple):
    """The path from a GPU to another device of its node."""

    to: str
    """UUID of a GPU, or name of a network adapter."""
    pcie: PcieLevel | None = None
    nvlinks: int | None = None
    """Number of NVLinks that connect the two GPUs directly; None when unknown. Links to switches are not counted."""


def paths_from_document(raw: Any) -> tuple[DevicePath, ...]:
    """Return the paths in a stored or recorded description of a GPU; invalid ones are dropped."""
    if not isinstance(raw, list | tuple):
        return ()
    return tuple(_read_paths(raw[:MAX_PATHS]))


def _read_paths(raw: Iterable[Any]) -> Iterable[DevicePath]:
    for item in raw:
        if not isinstance(item, list | tuple) or len(item) != len(DevicePath._fields):
            continue
        to, pcie, nvlinks = item
        if isinstance(to, str) and to:
            yield DevicePath(
                to, pcie if _is_level(pcie) else None, nvlinks if _is_link_count(nvlinks) else None
            )


def _is_level(value: object) -> TypeGuard[PcieLevel]:
    return value in PCIE_LEVELS


def _is_link_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_LINKS


SSH_LABEL = "ssh"
"""Node label with the host name to use for SSH, which may differ from the node's name."""
IDLE_RATIO = 0.01
"""A GPU that is busy for at most this fraction of the time counts as idle."""


class Device(NamedTuple):
    """One GPU, or one MIG instance."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    """NVML index; for a MIG instance, the index of its GPU."""
    uuid: str
    name: str
    bus_id: str | None = None
    minor_number: int | None = None
    """N of /dev/nvidiaN."""
    serial: str | None = None
    vbios: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    has_gpm: bool = False
    """True when the GPU reports GPM activity (Hopper and later)."""
    parent_uuid: str | None = None
    """UUID of the GPU that a MIG instance belongs to."""
    mig_index: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    facts: Values = {}
    """Constant metrics: memory size, maximum clocks, thresholds, default limits."""
    board_part_number: str | None = None
    cpu_affinity: str | None = None
    """The CPUs nearest to the GPU, as a list of the kernel such as `0-31,64-95`."""
    switch_links: int | None = None
    """Number of its NVLinks that are up and lead to an NVSwitch."""
    paths: tuple[DevicePath, ...] = ()
    """Paths to the other GPUs of its node."""
    adapter_paths: tuple[DevicePath, ...] = ()
    """Paths to the network adapters of its node."""

    @property
    def label(self) -> str:
        """Name for people: `3`, or `3:1` for a MIG instance."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    def matches(self, word: str) -> bool:
        """Whether an index, a label such as `3:1`, or the beginning of a UUID selects this device."""
        if word.isdecimal():
            return self.index == int(word)
        if word.upper().startswith(("GPU-", "MIG-")):
            return self.uuid.lower().startswith(word.lower())
        return self.label == word


class Node(NamedTuple):
    """One machine."""

    name: str
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""
    kernel: str | None = None
    cpu_model: str | None = None
    ticks_per_second: int = 100
    """The kernel's unit of CPU time."""
    numa_cpus: tuple[str, ...] = ()
    """The kernel's CPU list of each NUMA node, such as `0-31,64-95`; an empty text for a NUMA node without CPUs.

    Empty when unknown.
    """


def visible_device_words(devices: Iterable[Device], variable: str) -> list[str]:
    """Return the valid entries of CUDA_VISIBLE_DEVICES: CUDA ignores the first invalid entry and all after it."""
    known = list(devices)
    words = (word.strip() for word in variable.split(","))
    return list(takewhile(lambda word: any(device.matches(word) for device in known), words))


def select_own_gpus(
    devices: Sequence[Device], variable: str | None, *, first_only: bool = False
) -> list[Device]:
    """Return the GPUs of a process, in CUDA's order.

    Args:
        devices: The GPUs of the machine, each followed by its MIG instances.
        variable: CUDA_VISIBLE_DEVICES; None when it is not set.
        first_only: Return only the first GPU: with dask-cuda each worker sees all GPUs, its own first.
    """
    if variable is None:
        split = {device.parent_uuid for device in devices}
        chosen = [device for device in devices if device.uuid not in split]
    else:
        words = visible_device_words(devices, variable)
        chosen = [next(device for device in devices if device.matches(word)) for word in words]
    instances = {device.parent_uuid: device for device in reversed(devices) if device.parent_uuid is not None}
    chosen = [
        instances.get(device.uuid, device) for device in chosen
    ]  # of a GPU in MIG mode, programs see the first instance
    chosen = list({device.uuid: device for device in chosen}.values())
    return chosen[:1] if first_only else chosen


_MAX_CPUS = 1 << 16


def parse_cpu_ranges(text: str) -> frozenset[int]:
    """Parse a CPU list of the kernel such as `0-3,8`; invalid entries are ignored."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            continue
        if low >= 0:
            cpus.update(range(low, min(high + 1, _MAX_CPUS)))
    return frozenset(cpus)


def gpu_label(labels: Iterable[str]) -> str:
    """Return the name of one or several GPUs: `GPU 3`, `GPUs 0-2,5`."""
    listed = list(labels)
    return f"{'GPU' if len(listed) == 1 else 'GPUs'} {format_ranges(listed)}"


def format_ranges(labels: Iterable[str]) -> str:
    """Format `0,1,2,5,7:1` as `0-2,5,7:1`."""
    runs: list[list[str]] = []
    for label in labels:
        before = runs[-1][-1] if runs else ""
        if label.isdigit() and before.isdigit() and int(label) == int(before) + 1:
            runs[-1].append(label)
        else:
            runs.append([label])
    return ",".join(
        run[0] if len(run) == 1 else f"{run[0]}{'-' if len(run) > 2 else ','}{run[-1]}" for run in runs
    )
