"""A GPU, or one MIG instance of it, and the node it sits in: the facts that do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from gpulse.model.metric import Values

SSH_LABEL = "ssh"
"""The label of a node that says under which name it is reached over SSH, which may be another than its own."""


class Device(NamedTuple):
    """One GPU, or one MIG instance."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on a device
    """NVML's index; for a MIG instance that of its GPU."""
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
    """For a MIG instance, the GPU it is a part of."""
    mig_index: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    facts: Values = {}
    """Catalogue values that never change: memory size, maximal clocks, thresholds, default limits."""

    @property
    def label(self) -> str:
        """How people name it: `3`, or `3:1` for a MIG instance."""
        return str(self.index) if self.mig_index is None else f"{self.index}:{self.mig_index}"

    def is_meant_by(self, word: str) -> bool:
        """Whether an index, a label such as `3:1`, or the beginning of a UUID means this one."""
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
    """By NUMA node the kernel's list of its CPUs, such as `0-31,64-95`; empty for a node that has none.

    Nothing at all when the machine does not say.
    """


def visible(devices: Iterable[Device], variable: str) -> list[str]:
    """The words of CUDA_VISIBLE_DEVICES that count: CUDA ignores all from the first on that is no GPU here."""
    known = list(devices)
    words = (word.strip() for word in variable.split(","))
    return list(takewhile(lambda word: any(device.is_meant_by(word) for device in known), words))


def own_gpus(devices: Sequence[Device], variable: str | None, *, first_only: bool = False) -> list[Device]:
    """The GPUs of a process, in the order in which CUDA shows them to it.

    Args:
        devices: Those of the machine, each followed by its MIG instances.
        variable: CUDA_VISIBLE_DEVICES, None when it is not set.
        first_only: Only the first of them is the process's: dask-cuda lets each worker see all and begin with its own.
    """
    if variable is None:
        split = {device.parent_uuid for device in devices}
        chosen = [device for device in devices if device.uuid not in split]
    else:
        words = visible(devices, variable)
        chosen = [next(device for device in devices if device.is_meant_by(word)) for word in words]
    instances = {device.parent_uuid: device for device in reversed(devices) if device.parent_uuid is not None}
    chosen = [
        instances.get(device.uuid, device) for device in chosen
    ]  # of a split GPU programs see the first part
    chosen = list({device.uuid: device for device in chosen}.values())
    return chosen[:1] if first_only else chosen


_MOST_CPUS = 1 << 16


def cpus_in(text: str) -> frozenset[int]:
    """The CPUs of a kernel's list such as `0-3,8`; what is no CPU is left out."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            continue
        if low >= 0:
            cpus.update(range(low, min(high + 1, _MOST_CPUS)))
    return frozenset(cpus)


def ranges(labels: Iterable[str]) -> str:
    """`0,1,2,5,7:1` as `0-2,5,7:1`."""
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
