"""A real Slurm on this machine: controller, node daemon and munge, with four GPUs that are device files and nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.integration.cluster import free_port, until
from tests.integration.job_cgroups import creating_job_cgroups

GPUS = 4
GPU_MAJOR = 195
_CGROUPS = Path("/sys/fs/cgroup")
_CONFIG = """
ClusterName=gpulse
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{tasks}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
PrologFlags=Alloc,Contain
MailProg=/bin/true
KillWait=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,defer_batch
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=512 Gres=gpu:{gpus}
PartitionName=gpu Nodes={node} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
{more}
"""
_JOB = """#!/bin/sh
exec 3<{folder}/dev/nvidia0
echo $$ > {folder}/pids/$SLURM_JOB_ID.new
mv {folder}/pids/$SLURM_JOB_ID.new {folder}/pids/$SLURM_JOB_ID
while :; do sleep 1000; done
"""


class SlurmMachine:
    """One node that is its own controller."""

    def __init__(self, folder: Path, more: Mapping[str, str]) -> None:
        self.folder = folder
        self.node = f"gpulse-{free_port()}"
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._is_grouped = (_CGROUPS / "freezer").is_dir()
        self._children: list[subprocess.Popen[bytes]] = []
        self._write(more)

    def _write(self, more: Mapping[str, str]) -> None:
        for name in ("dev", "spool", "state"):
            (self.folder / name).mkdir()
        for name in ("pids", "out"):
            (self.folder / name).mkdir()
            (self.folder / name).chmod(0o1777)
        for number in range(GPUS):
            os.mknod(self.folder / "dev" / f"gpu{number}", 0o020666, os.makedev(GPU_MAJOR, number))
        (self.folder / "dev" / "nvidia0").touch()  # held by the jobs, as a driver's file would be
        config = _CONFIG.format(
            folder=self.folder,
            host=socket.gethostname().partition(".")[0],
            node=self.node,
            controller=free_port(),
            daemon=free_port(),
            tracking="cgroup" if self._is_grouped else "linuxproc",
            tasks="cgroup" if self._is_grouped else "none",
            cpus=os.cpu_count() or 1,
            gpus=GPUS,
            more="\n".join(f"{name}={value}" for name, value in more.items()),
        )
        files = {
            "slurm.conf": config,
            "gres.conf": f"NodeName={self.node} Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}]\n",
            "cgroup.conf": "CgroupPlugin=cgroup/v1\nConstrainDevices=yes\n" if self._is_grouped else "",
            "job.sh": _JOB.format(folder=self.folder),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        (self.folder / "job.sh").chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o400)

    def start(self) -> None:
        """Start the daemons, and wait until the node can take jobs."""
        places = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        places |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self._daemon(
            "/usr/sbin/munged",
            "--foreground",
            "--force",
            *(f"--{name}={self.folder / file}" for name, file in places.items()),
        )
        until((self.folder / "munge.socket").exists, "munge listens")
        self._daemon("/usr/sbin/slurmctld", "-D", "-i")
        self._daemon("/usr/sbin/slurmd", "-D", "-N", self.node)
        until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T", check=False), "the node takes jobs")

    def _daemon(self, *command: str) -> None:
        self._children.append(
            subprocess.Popen(
                command,
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def ask(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands says."""
        done = subprocess.run(
            command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, (command, done.stderr, self.log())
        return done.stdout.strip()

    def log(self) -> str:
        """What the daemons wrote down."""
        return "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in self.folder.glob("slurm*.log")
        )

    def submit(self, uid: int, gpus: int, name: str) -> tuple[str, int]:
        """Start a job of a user, which waits to be cancelled; its number and its process."""
        job = self.ask(
            "sbatch",
            "--parsable",
            *(f"--uid={uid}", f"--gid={uid}", f"--job-name={name}", f"--gres=gpu:{gpus}"),
            *("--chdir=/", "--output", f"{self.folder}/out/%j", str(self.folder / "job.sh")),
        )
        file = self.folder / "pids" / job
        until(file.exists, f"job {job} runs")
        return job, int(file.read_text(encoding="ascii"))

    def cancel(self, *jobs: str) -> None:
        """End jobs, and wait until nothing of them is left, epilogs included."""
        self.ask("scancel", *jobs)
        until(lambda: not self.ask("squeue", "-h", "-j", ",".join(jobs), check=False), "the jobs have ended")

    def close(self) -> None:
        """End all jobs and daemons; what they left among the control groups is removed."""
        if len(self._children) == 3:
            with suppress(AssertionError):
                self.ask("scancel", f"--nodelist={self.node}", check=False)
                until(lambda: not self.ask("squeue", "-h", check=False), "all jobs have ended")
        for child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(60.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for top in _CGROUPS.glob(f"*/slurm_{self.node}"):
            _remove_groups(top)


def _remove_groups(top: Path) -> None:
    deadline = time.monotonic() + 5.0
    for folder in sorted((path for path in (top, *top.rglob("*")) if path.is_dir()), reverse=True):
        while time.monotonic() < deadline:
            with suppress(OSError):
                folder.rmdir()
            if not folder.exists():
                break
            for word in (folder / "cgroup.procs").read_text(encoding="ascii").split():
                with suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
            time.sleep(0.02)


@contextmanager
def slurm_machine(**more: str) -> Iterator[SlurmMachine]:
    """A running Slurm with further lines in its configuration, gone afterwards with all its jobs."""
    # A place that other users can reach, with a name short enough for a socket.
    folder = Path(tempfile.mkdtemp(prefix="gpulse-slurm-"))
    folder.chmod(0o755)
    with creating_job_cgroups():
        machine = SlurmMachine(folder, more)
        try:
            machine.start()
            yield machine
        finally:
            machine.close()
            shutil.rmtree(folder, ignore_errors=True)
