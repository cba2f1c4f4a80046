"""Processes: their identity and owner, their resource use, and their use of GPUs."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.metric_catalog import Values


class Owner(NamedTuple):
    """User, job, container and pod of a process."""

    user: str | None = None
    uid: int | None = None
    job: str | None = None
    """The scheduler's job, such as `slurm:4711`, or the harvest's, such as `harvest:fold`."""
    container: str | None = None
    """Container ID, shortened to twelve digits."""
    pod: str | None = None
    """Kubernetes pod UID."""


class ProcessIdentity(NamedTuple):
    """Constant properties of a process (until it calls exec)."""

    pid: int
    parent_pid: int | None = None
    start_time: float | None = None
    """Epoch seconds. With the PID it identifies a process uniquely, because PIDs are reused."""
    name: str | None = None
    """The program, such as `python3`."""
    command: tuple[str, ...] = ()
    """The command line; empty when it is hidden because the process belongs to another user."""
    owner: Owner = Owner()
    cgroup: str | None = None


class Thread(NamedTuple):
    """One thread of a process."""

    tid: int
    name: str
    state: str
    cpu_seconds_total: float
    run_wait_seconds_total: float | None = None


class ProcessReading(NamedTuple):
    """One process at one instant."""

    identity: ProcessIdentity
    state: str | None
    """The kernel's state letter: R running, S sleeping, D waiting for a disk, Z zombie."""
    values: Values
    threads: tuple[Thread, ...] = ()
    """The busiest threads, if they were requested."""
    on_gpu: bool = False
    """True for a process on a GPU, False for a descendant of one."""

    @property
    def pid(self) -> int:
        """The process ID."""
        return self.identity.pid


class GpuProcess(NamedTuple):
    """Use of one GPU by one process."""

    pid: int
    kind: str
    """`compute`, `graphics` or `compute+graphics`."""
    gpu_memory_bytes: int | None = None
    sm_ratio: float | None = None
