"""Slurm's layout in version 2 of control groups, made by hand in the kernel's own file system."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulse.model.device import Device
from gpulse.model.job import Job
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import parse_mounts
from gpulse.sources.scheduler_jobs import JobReader
from tests.integration.job_cgroups import creating_job_cgroups

SLUID = "s5K1KKYAYG5D00"
GPUS = [Device(index, f"GPU-{index}", "H200", minor_number=index) for index in range(4)]
_MOUNTS = parse_mounts(Path("/proc/self/mounts").read_bytes())
_UNIFIED = [mount.mount_point for mount in _MOUNTS if mount.type == "cgroup2" and "rw" in mount.options]

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not _UNIFIED, reason="needs root, and version 2 of control groups"
)


class Scope:
    """A scope as Slurm's daemon has it, with processes in it."""

    def __init__(self) -> None:
        self._slice = Path(_UNIFIED[0]) / f"gpulse{os.getpid()}.slice"
        self._top = self._slice / "n1_slurmstepd.scope"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, place: str, uid: int, title: str = "sleep", **env: str) -> int:
        """A process in a group; its pid."""
        (self._top / place).mkdir(parents=True)
        process = subprocess.Popen([title, "600"], executable="/bin/sleep", env=env, user=uid)
        self._processes.append(process)
        (self._top / place / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
        return process.pid

    def leave(self, place: str) -> None:
        """A group with nobody in it."""
        (self._top / place).mkdir(parents=True)

    def close(self) -> None:
        """Nothing is left."""
        for process in self._processes:
            process.kill()
            process.wait()
        groups = [path for path in self._slice.rglob("*") if path.is_dir()]
        for group in [*sorted(groups, reverse=True), self._slice]:
            with suppress(FileNotFoundError):
                group.rmdir()


@pytest.fixture
def scope() -> Iterator[Scope]:
    """Gone afterwards."""
    with creating_job_cgroups():
        made = Scope()
        try:
            yield made
        finally:
            made.close()


def test_jobs_by_number_and_by_sluid_are_distinguished(scope: Scope) -> None:
    """The kernel says who lives in a group; the daemon's title and the processes say the rest."""

    scope.start(f"{SLUID}/step_batch/slurm", 0, "slurmstepd: [42.batch]")
    first = scope.start(
        f"{SLUID}/step_batch/user/task_0", 65534, SLURM_JOB_ID="42", SLURM_JOB_GPUS="3", SLURM_JOB_NAME="a b"
    )
    second = scope.start("job_9/step_0/user/task_0", 1, SLURM_JOB_ID="9", SLURM_STEP_GPUS="0,1")
    scope.leave("job_8/step_0")
    now, reader = time.time(), JobReader()
    register = reader.register(now)
    jobs = {job.id: job for job in reader.read(now, GPUS)[0]}
    processes, _, _ = ProcessReader().read(now, [first, second], None, register)

    assert "slurm:42" == register.numbers[f"slurm:{SLUID}"]
    assert (65534, 1) == (register.users["slurm:42"], register.users["slurm:9"])
    assert Job("slurm:42", "nobody", 65534, "a b", gpus=("GPU-3",), source="environment") == jobs["slurm:42"]
    assert Job("slurm:9", "daemon", 1, gpus=("GPU-0", "GPU-1"), source="environment") == jobs["slurm:9"]
    assert "slurm:8" not in jobs
    assert {first: ("nobody", "slurm:42"), second: ("daemon", "slurm:9")} == {
        process.pid: (process.identity.owner.user, process.identity.owner.job) for process in processes
    }
