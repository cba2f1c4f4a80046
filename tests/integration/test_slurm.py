"""Jobs of a real Slurm: whose GPU is it, with root and without, and what an epilog says in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulse.model.device import Device
from gpulse.model.job import Job
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.procfs import Roots
from gpulse.sources.scheduler_jobs import JobReader
from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import cluster_in, until
from tests.integration.nvml_machine import IMPATIENT, QUICK, four, frames_until
from tests.integration.slurm_machine import SlurmMachine, slurm_machine

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, for Slurm to start jobs of other users"),
    pytest.mark.requires("Slurm"),
]

CONTRIB = Path(__file__).parents[2] / "contrib" / "slurm"
NOBODY, DAEMON = 65534, 1
GPUS = [Device(index, f"GPU-{index}", "H200", minor_number=index) for index in range(4)]
AS_NOBODY = """
import json, os, sys, time
from gpulse.model.device import Device
from gpulse.sources.scheduler_jobs import JobReader
devices = [Device(index, f"GPU-{index}", "H200", minor_number=index) for index in range(4)]
JobReader(folders=sys.argv[1:]).read(time.time(), devices)  # loads all modules, which others may not be able to read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
jobs, health = JobReader(folders=sys.argv[1:]).read(time.time(), devices)
print(json.dumps([[[job.id, job.user, job.name, job.gpus, job.source] for job in jobs], [[entry.code, entry.detail] for entry in health]]))
"""


class Running(NamedTuple):
    """Two jobs of two users."""

    first: str
    first_pid: int
    second: str
    second_pid: int


def configure(folder: Path, **words: str) -> None:
    """What the prolog and the epilog are to know."""
    lines = [f"{name}={word}\n" for name, word in {"MAP": f"{folder}/map", "REPORTS": "", **words}.items()]
    (folder / "gpulse.conf").write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmMachine]:
    """A Slurm with our prolog and epilog."""
    scripts = tmp_path_factory.mktemp("scripts")
    with slurm_machine(Prolog=f"{scripts}/prolog.sh", Epilog=f"{scripts}/epilog.sh") as machine:
        for name in ("prolog.sh", "epilog.sh"):
            text = (CONTRIB / name).read_text(encoding="utf-8")
            (scripts / name).write_text(
                text.replace("/etc/gpulse/slurm.conf", f"{machine.folder}/gpulse.conf"), encoding="utf-8"
            )
            (scripts / name).chmod(0o755)
        configure(machine.folder)
        yield machine


@pytest.fixture(scope="module")
def running(slurm: SlurmMachine) -> Running:
    """One GPU for one of them, two for the other."""
    return Running(*slurm.submit(NOBODY, 1, "train"), *slurm.submit(DAEMON, 2, "other"))


def as_nobody(running: Running, *folders: Path) -> tuple[list[list[object]], list[str]]:
    """What a user without rights sees of the jobs, and which of them is said to be hidden."""
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *map(str, folders)], capture_output=True, text=True, check=True
    )
    jobs, health = json.loads(done.stdout)
    names = (f"slurm:{running.first}", f"slurm:{running.second}")
    details = [detail.replace(": ", " ").split() for code, detail in health if code == "not_visible"]
    # Other tests may run jobs of their own.
    return [job for job in jobs if job[0] in names], [
        name for name in names if any(name in words for words in details)
    ]


def test_two_jobs_of_two_users_are_distinguished(
    slurm: SlurmMachine, running: Running, fake_nvml: FakeNvml
) -> None:
    """Each process on a GPU has its job and its user, and each job its GPUs, also the one that nobody uses."""

    four(fake_nvml)
    fake_nvml.add_process(0, running.first_pid, 5 << 30, sm=60)
    fake_nvml.add_process(1, running.second_pid, 3 << 30, sm=10)
    local = LocalMachine(
        cadence=QUICK, timeouts=IMPATIENT, watch_xids=False, roots=Roots(dev=f"{slurm.folder}/dev")
    )
    try:
        names = {f"slurm:{running.first}", f"slurm:{running.second}"}
        frame = frames_until(
            local, lambda frame: names <= {job.id for job in frame.jobs} and len(frame.processes) >= 2
        )
    finally:
        local.close()
    owners = {process.pid: process.identity.owner for process in frame.processes if process.on_gpu}
    uuids = [gpu.device.uuid for gpu in frame.gpus]

    assert {
        running.first_pid: ("nobody", f"slurm:{running.first}"),
        running.second_pid: ("daemon", f"slurm:{running.second}"),
    } == {pid: (owner.user, owner.job) for pid, owner in owners.items()}
    assert (
        Job(f"slurm:{running.first}", "nobody", NOBODY, "train", "gpu", None, (uuids[0],), "environment"),
        Job(
            f"slurm:{running.second}",
            "daemon",
            DAEMON,
            "other",
            "gpu",
            None,
            tuple(uuids[1:3]),
            "environment",
        ),
    ) == tuple(job for job in frame.jobs if job.id in names)
    assert [] == [entry for entry in frame.health if entry.source == "jobs"]


def test_nobody_is_in_a_job_by_saying_so(slurm: SlurmMachine, running: Running, fake_nvml: FakeNvml) -> None:
    """A number in an environment counts for the job's own user, and for a job that there is."""

    four(fake_nvml)
    said = [(DAEMON, running.first), (NOBODY, running.first), (NOBODY, "99999999")]
    with ExitStack() as stack:
        liars = [stack.enter_context(_sleeping(uid, SLURM_JOB_ID=job)) for uid, job in said]
        for pid in liars:
            fake_nvml.add_process(0, pid, 1 << 30)
        local = LocalMachine(
            cadence=QUICK, timeouts=IMPATIENT, watch_xids=False, roots=Roots(dev=f"{slurm.folder}/dev")
        )
        try:
            frame = frames_until(local, lambda frame: set(liars) <= {one.pid for one in frame.processes})
        finally:
            local.close()
    jobs = {process.pid: process.identity.owner.job for process in frame.processes}

    assert [None, f"slurm:{running.first}", None] == [jobs[pid] for pid in liars]


@contextmanager
def _sleeping(uid: int, **env: str) -> Iterator[int]:
    with subprocess.Popen(["/bin/sleep", "600"], env=env, user=uid, group=uid) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_without_root_the_jobs_of_others_are_known_but_not_their_gpus(running: Running) -> None:
    """The control group says job and user; that an environment could not be read is said."""

    jobs, hidden = as_nobody(running)

    assert [
        [f"slurm:{running.first}", "nobody", "train", ["GPU-0"], "environment"],
        [f"slurm:{running.second}", "daemon", None, [], None],
    ] == jobs
    assert [f"slurm:{running.second}"] == hidden


def test_the_prologs_directory_tells_the_gpus_without_root(slurm: SlurmMachine, running: Running) -> None:
    """It is written when the job gets its GPUs, before it starts anything."""

    jobs, hidden = as_nobody(running, slurm.folder / "map")

    assert [(f"slurm:{running.first}", ["GPU-0"]), (f"slurm:{running.second}", ["GPU-1", "GPU-2"])] == [
        (job[0], job[3]) for job in jobs
    ]
    assert [] == hidden


@pytest.mark.usefixtures("running")
def test_the_epilog_reports_and_gives_the_gpus_back(
    slurm: SlurmMachine, tmp_path: Path, fake_nvml: FakeNvml, nvml_library: Path
) -> None:
    """One line about the job from the head; in the directory only the others' GPUs are left."""

    four(fake_nvml)
    program = tmp_path / "gpulse"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpulse "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    with cluster_in(tmp_path) as cluster:
        head = cluster.head()
        reports = slurm.folder / "reports"
        configure(
            slurm.folder,
            GPULSE=str(program),
            GPULSE_HEAD=f"127.0.0.1:{head.port}",
            REPORTS=str(reports),
            TELL_USER="yes",
        )
        job, pid = slurm.submit(NOBODY, 1, "short")
        fake_nvml.add_process(3, pid, 5 << 30, sm=60)
        options = ("--interval", "0.2", "--job-map", f"{slurm.folder}/map")
        cluster.agent("n1", head.port, *options, source=(), env=fake_nvml.env(nvml_library))
        kinds = "/api/v1/events?kinds=job&from=-1h"
        until(
            lambda: any(event["detail"]["id"] == f"slurm:{job}" for event in head.get(kinds)["events"]),
            "the head knows the job",
        )
        until(lambda: head.ask(f"/api/v1/jobs/{job}")[0] == 200, "the head can report")
        during = sorted(path.name for path in (slurm.folder / "map").glob("nvidia*"))
        slurm.cancel(job)
        line = until(lambda: reports.exists() and reports.read_text(encoding="utf-8"), "the epilog reports")
    outputs = {path.name: path.read_text(encoding="utf-8") for path in (slurm.folder / "out").iterdir()}

    assert ["nvidia0", "nvidia1", "nvidia2", "nvidia3"] == during
    assert ["nvidia0", "nvidia1", "nvidia2"] == sorted(
        path.name for path in (slurm.folder / "map").glob("nvidia*")
    )
    assert 1 == line.count("\n")
    assert job in line
    assert "1 GPU" in line
    assert len(line) < 200
    assert outputs[job].endswith(line)
    assert [] == [name for name in outputs if not name.isdecimal()]


@pytest.mark.usefixtures("running")
def test_an_allocation_in_which_nothing_runs_is_seen(slurm: SlurmMachine) -> None:
    """Its GPU is known from the prolog's directory; without that it is said that it is not."""

    slurm.ask("salloc", "--no-shell", "--gres=gpu:1", "--job-name=empty")
    job = slurm.ask("squeue", "-h", "-n", "empty", "-o", "%A")
    name = f"slurm:{job}"
    now = time.time()
    without, with_map = JobReader(), JobReader(folders=[f"{slurm.folder}/map"])
    until(lambda: name in {one.id for one in JobReader().read(now, GPUS)[0]}, "the job is there")
    for reader in (without, with_map):
        reader.read(now, GPUS)
    seen = {
        reader: {one.id: one for one in reader.read(now + 6, GPUS)[0]}[name].gpus
        for reader in (without, with_map)
    }
    health = [entry.detail for entry in without.read(now + 6, GPUS)[1]]

    assert {without: (), with_map: ("GPU-3",)} == seen
    assert any(f"{name}: none of the processes" in detail for detail in health)
