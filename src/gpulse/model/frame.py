"""The only currency: one node at one instant."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.device import Device, Node
from gpulse.model.health import Health
from gpulse.model.job import Job
from gpulse.model.metric import Value, Values
from gpulse.model.process import GpuProcess, ProcessReading


class GpuReading(NamedTuple):
    """One GPU, or one MIG instance, at one instant."""

    device: Device
    values: Values
    """Readings by catalogue name; what could not be had is absent."""
    processes: tuple[GpuProcess, ...] | None = None
    """The processes on it, busiest memory first; None when the list could not be had."""
    read_at: dict[str, float] = {}
    """Epoch seconds at which the groups of slower readings were taken: `second`, `gpm`, `slow`, and within
    them `shares` (of the processes) and `graphics` (GPM's graphics_active_ratio).

    A value is held for its group's period, so a frame between two reads repeats it; a value whose group
    is overdue is absent.
    """

    def get(self, name: str) -> Value | None:
        """A reading or a fact of the device by its catalogue name, None when unknown."""
        value = self.values.get(name)
        return self.device.facts.get(name) if value is None else value


class HostReading(NamedTuple):
    """CPUs and memory at one instant."""

    values: Values
    cores: tuple[tuple[int, ...], ...] = ()
    """Per CPU the kernel's ticks: user nice system idle iowait irq softirq steal."""


class DiskReading(NamedTuple):
    """One whole disk at one instant."""

    name: str
    kind: str | None
    """`ssd`, `hdd`, `nvme`, `virtual` (the kernel's word on rotation means nothing there), `memory`."""
    values: Values
    model: str | None = None


class FilesystemReading(NamedTuple):
    """One mounted file system at one instant."""

    mount_point: str
    device: str
    type: str
    disk: str | None
    """The whole disk under it, None for a network file system."""
    kind: str | None
    values: Values


class NetworkReading(NamedTuple):
    """One network interface at one instant."""

    name: str
    kind: str
    """`ethernet`, `infiniband`, `virtual`, `loopback`."""
    up: bool | None
    values: Values


class CgroupReading(NamedTuple):
    """The limits a control group puts on its processes, and what they cost."""

    path: str
    values: Values


class Frame(NamedTuple):
    """One node, one instant: its GPUs, its host, its processes, and what could not be read."""

    time: float
    """Epoch seconds."""
    monotonic: float
    """Seconds on a clock that nobody sets: what rates are computed over."""
    node: Node
    gpus: tuple[GpuReading, ...] = ()
    """In index order, the MIG instances of a GPU right after it."""
    host: HostReading | None = None
    disks: tuple[DiskReading, ...] = ()
    filesystems: tuple[FilesystemReading, ...] = ()
    network: tuple[NetworkReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()
    """The processes that hold a GPU and all their descendants."""
    cgroups: tuple[CgroupReading, ...] = ()
    health: tuple[Health, ...] = ()
    jobs: tuple[Job, ...] = ()
    """The scheduler's jobs that have an allocation on this node, by id."""
