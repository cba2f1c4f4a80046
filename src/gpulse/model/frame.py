"""The frame: all readings of one node at one instant, which everything else works on."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.device import Device, Node
from gpulse.model.job import Job
from gpulse.model.metric_catalog import Value, Values
from gpulse.model.process import GpuProcess, ProcessReading
from gpulse.model.source_health import Health


class GpuReading(NamedTuple):
    """One GPU, or one MIG instance, at one instant."""

    device: Device
    values: Values
    """Readings by metric name; unknown values are absent."""
    processes: tuple[GpuProcess, ...] | None = None
    """Its processes, largest memory first; None when they could not be listed."""
    read_at: dict[str, float] = {}
    """When the groups of slower readings were read, in epoch seconds: `second`, `gpm`, `slow`, and within
    them `shares` (of the processes) and `graphics` (GPM's graphics_active_ratio).

    Frames between two reads of a group repeat its values; the values of an overdue group are absent.
    """

    def get(self, name: str) -> Value | None:
        """Return a reading or a fact of the device by its metric name; None when unknown."""
        value = self.values.get(name)
        return self.device.facts.get(name) if value is None else value


class HostReading(NamedTuple):
    """CPUs and memory at one instant."""

    values: Values
    cores: tuple[tuple[int, ...], ...] = ()
    """Kernel ticks of each CPU: user nice system idle iowait irq softirq steal."""


class DiskReading(NamedTuple):
    """One whole disk at one instant."""

    name: str
    kind: str | None
    """`ssd`, `hdd`, `nvme`, `virtual` (for which the kernel's rotational flag is meaningless), `memory`."""
    values: Values
    model: str | None = None


class FilesystemReading(NamedTuple):
    """One mounted file system at one instant."""

    mount_point: str
    device: str
    type: str
    disk: str | None
    """The disk that contains it; None for a network file system."""
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
    """Limits of a cgroup, and how they throttle its processes."""

    path: str
    values: Values


class Frame(NamedTuple):
    """One node at one instant: GPUs, host, processes, and the health of the sources."""

    time: float
    """Epoch seconds."""
    monotonic: float
    """Seconds on a clock that cannot be set; rates are computed with it."""
    node: Node
    gpus: tuple[GpuReading, ...] = ()
    """In index order, the MIG instances of a GPU right after it."""
    host: HostReading | None = None
    disks: tuple[DiskReading, ...] = ()
    filesystems: tuple[FilesystemReading, ...] = ()
    network: tuple[NetworkReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()
    """The processes on the GPUs, and all their descendants."""
    cgroups: tuple[CgroupReading, ...] = ()
    health: tuple[Health, ...] = ()
    jobs: tuple[Job, ...] = ()
    """The scheduler's jobs with an allocation on this node, sorted by ID."""
