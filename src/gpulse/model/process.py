"""Processes: who they are, what they use of the machine, and what they hold on a GPU."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.metric import Values


class Owner(NamedTuple):
    """On whose behalf a process runs."""

    user: str | None = None
    uid: int | None = None
    job: str | None = None
    """The scheduler's job, such as `slurm:4711`, or the harvest's, such as `harvest:fold`."""
    container: str | None = None
    """Container id, shortened to twelve digits."""
    pod: str | None = None
    """Kubernetes pod UID."""


class ProcessIdentity(NamedTuple):
    """What stays the same while a process lives (until it calls exec)."""

    pid: int
    parent_pid: int | None = None
    start_time: float | None = None
    """Epoch seconds. With the pid it names a process for good: pids are used again."""
    name: str | None = None
    """The program, such as `python3`."""
    command: tuple[str, ...] = ()
    """The command line; empty when another user's process hides it."""
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
    """The kernel's letter: R running, S asleep, D waiting for a disk, Z dead."""
    values: Values
    threads: tuple[Thread, ...] = ()
    """The busiest threads, when they were asked for."""
    on_gpu: bool = False
    """True for a process that holds a GPU, false for a descendant of one."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.identity.pid


class GpuProcess(NamedTuple):
    """What one process holds on one GPU."""

    pid: int
    kind: str
    """`compute`, `graphics` or `compute+graphics`."""
    gpu_memory_bytes: int | None = None
    sm_ratio: float | None = None
