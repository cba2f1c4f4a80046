"""Jobs put together from control groups, environments and mapping directories, on small trees of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulse.model.device import Device
from gpulse.model.job import Job
from gpulse.sources.jobs import JobReader
from gpulse.sources.procfs import Roots
from gpulse.sources.slurm import Told
from tests.unit.trees import grow, pid_stat

NOW = 1_000_000.0
SLUID = "s5K1KKYAYG5D00"
GPUS = [Device(index, f"GPU-{index}", "H200", minor_number=index) for index in range(4)]
V1 = "cgroup /sys/fs/cgroup/freezer cgroup rw,freezer 0 0\ncgroup /sys/fs/cgroup/devices cgroup rw,devices 0 0\n"
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
SCOPE = "sys/fs/cgroup/system.slice/slurmstepd.scope"
Files = Mapping[str, str | bytes]


def process(
    pid: int, uid: int = 1001, *, cmdline: bytes = b"sh\0", state: bytes = b"S", **words: str
) -> Files:
    """A process with these words in its environment."""
    return {
        f"proc/{pid}/stat": pid_stat(pid, state=state),
        f"proc/{pid}/status": f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n",
        f"proc/{pid}/cmdline": cmdline,
        f"proc/{pid}/environ": b"".join(f"{name}={word}\0".encode() for name, word in words.items()),
    }


def version_1(*files: Files) -> Files:
    """A machine with version 1 of control groups."""
    return {"proc/self/mounts": V1, **{name: data for part in files for name, data in part.items()}}


def version_2(*files: Files) -> Files:
    """A machine with version 2."""
    return {"proc/self/mounts": V2, **{name: data for part in files for name, data in part.items()}}


def read(roots: Roots, now: float = NOW, reader: JobReader | None = None) -> tuple[Job, ...]:
    """The jobs of a machine with four GPUs."""
    return (reader or JobReader(roots)).read(now, GPUS)[0]


BATCH_2 = process(
    20,
    SLURM_JOB_ID="2",
    SLURM_JOB_NAME="train",
    SLURM_JOB_PARTITION="gpu",
    SLURM_JOB_ACCOUNT="ml",
    SLURM_JOB_GPUS="1,2",
)
JOB_2 = Job("slurm:2", "1001", 1001, "train", "gpu", "ml", ("GPU-1", "GPU-2"), "environment")


def test_two_jobs_of_two_users_in_version_1(tmp_path: Path) -> None:
    """As a real Slurm lays them out: users in the path, the step's daemon beside the tasks in one hierarchy."""

    freezer, devices = "sys/fs/cgroup/freezer/slurm_vm", "sys/fs/cgroup/devices/slurm_vm"
    files = version_1(
        {
            f"{freezer}/uid_1001/job_2/step_batch/cgroup.procs": "20\n21\n",
            f"{freezer}/uid_1001/job_2/step_extern/cgroup.procs": "22\n",
            f"{devices}/uid_1001/job_2/devices.list": "a *:* rwm\n",
            f"{devices}/uid_1001/job_2/step_batch/cgroup.procs": "23\n",
            f"{devices}/uid_1001/job_2/step_batch/task_0/cgroup.procs": "20\n21\n",
            f"{freezer}/uid_0/job_3/step_0/cgroup.procs": "30\n",
        },
        BATCH_2,
        process(22, 0, cmdline=b"sleep\x00100000000\0"),
        process(23, 0, cmdline=b"slurmstepd: [2.batch]\0"),
        process(30, 0, SLURM_JOB_ID="3", SLURM_STEP_GPUS="0"),
    )

    assert (JOB_2, Job("slurm:3", "root", 0, gpus=("GPU-0",), source="environment")) == read(
        grow(tmp_path, files)
    )


@pytest.mark.parametrize("scope", [SCOPE, "sys/fs/cgroup/gpu.slice/node07_slurmstepd.scope"])
def test_a_job_in_version_2(tmp_path: Path, scope: str) -> None:
    """The path has no user: whose it is, its tasks say."""

    files = version_2(
        {
            f"{scope}/system/cgroup.procs": "9\n",
            f"{scope}/job_2/cgroup.events": "populated 1\nfrozen 0\n",
            f"{scope}/job_2/step_extern/slurm/cgroup.procs": "18\n",
            f"{scope}/job_2/step_extern/user/task_special/cgroup.procs": "19\n",
            f"{scope}/job_2/step_batch/slurm/cgroup.procs": "17\n",
            f"{scope}/job_2/step_batch/user/task_0/cgroup.procs": "20\n",
        },
        BATCH_2,
        process(19, 0),
    )

    assert (JOB_2,) == read(grow(tmp_path, files))


def test_a_job_that_goes_by_its_sluid(tmp_path: Path) -> None:
    """Its number comes from the daemon's title, which everybody may read, and is handed on for its processes."""

    job = f"{SCOPE}/{SLUID}"
    files = version_2(
        {
            f"{job}/cgroup.events": "populated 1\n",
            f"{job}/step_0/slurm/cgroup.procs": "17\n",
            f"{job}/step_0/user/task_0/cgroup.procs": "20\n",
        },
        process(17, 0, cmdline=b"slurmstepd: [2.0]\0"),
        BATCH_2,
    )
    reader = JobReader(grow(tmp_path, files))

    assert {f"slurm:{SLUID}": "slurm:2"} == reader.numbers(NOW)
    assert (JOB_2,) == read(Roots(), NOW, reader)


def test_a_sluid_whose_number_only_the_environment_tells(tmp_path: Path) -> None:
    """With a hidden daemon; and where nothing tells it, the SLUID is the job's name."""

    job = f"{SCOPE}/{SLUID}"
    files = version_2({f"{job}/step_0/user/task_0/cgroup.procs": "20\n"}, BATCH_2)
    nameless = version_2({f"{job}/step_0/user/task_0/cgroup.procs": "20\n"}, process(20))

    assert (JOB_2,) == read(grow(tmp_path / "a", files))
    assert (Job(f"slurm:{SLUID}", "1001", 1001),) == read(grow(tmp_path / "b", nameless))


def test_directories_that_slurm_left_behind_are_no_jobs(tmp_path: Path) -> None:
    """A job without a process has ended, whatever is left of it."""

    files = version_2(
        {
            f"{SCOPE}/job_1/cgroup.events": "populated 0\n",
            f"{SCOPE}/job_1/step_0/user/task_0/cgroup.procs": "",
        }
    )

    assert () == read(grow(tmp_path, files))


def test_a_job_that_ends_is_gone_within_a_second(tmp_path: Path) -> None:
    """Its directory goes with it; a new one is found as soon."""

    files = version_2({f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n"}, BATCH_2)
    roots = grow(tmp_path, files)
    reader = JobReader(roots)
    before = read(roots, NOW, reader)
    (tmp_path / SCOPE / "job_2").rename(tmp_path / SCOPE / "job_3")
    at_once = read(roots, NOW + 0.5, reader)
    after = read(roots, NOW + 1.0, reader)

    assert (JOB_2,) == before == at_once
    assert ["slurm:3"] == [job.id for job in after]


def test_an_environment_that_names_another_job_is_not_believed(tmp_path: Path) -> None:
    """A job submitted from within a job inherits its words; the group it is in counts."""

    group = {f"{SCOPE}/job_5/step_batch/user/task_0/cgroup.procs": "20\n"}

    assert (Job("slurm:5", "1001", 1001),) == read(grow(tmp_path, version_2(group, BATCH_2)))


def test_steps_tell_their_gpus_together(tmp_path: Path) -> None:
    """Without a batch script no process knows all of them."""

    steps = {f"{SCOPE}/job_2/step_{step}/user/task_0/cgroup.procs": f"{20 + step}\n" for step in range(3)}
    tasks = [process(20 + step, SLURM_JOB_ID="2", SLURM_STEP_GPUS=f"{step}") for step in range(3)]

    assert ("GPU-0", "GPU-1", "GPU-2") == read(grow(tmp_path, version_2(steps, *tasks)))[0].gpus


def test_a_process_that_waits_in_the_kernel_is_not_asked(tmp_path: Path) -> None:
    """The read could hang with it; the next one knows as much."""

    group = {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "19\n20\n"}
    waiting = process(19, state=b"D", SLURM_JOB_ID="2", SLURM_JOB_NAME="stuck")

    assert (JOB_2,) == read(grow(tmp_path, version_2(group, waiting, BATCH_2)))


def test_a_list_of_allowed_devices_counts_more_than_an_environment(tmp_path: Path) -> None:
    """Root wrote the one, the job's user may have written the other."""

    files = version_1(
        {
            "sys/fs/cgroup/freezer/slurm/uid_1001/job_2/step_batch/cgroup.procs": "20\n",
            "sys/fs/cgroup/devices/slurm/uid_1001/job_2/devices.list": "c 1:3 rwm\nc 195:0 rwm\nc 195:255 rwm\n",
        },
        BATCH_2,
    )

    assert (JOB_2._replace(gpus=("GPU-0",), source="devices"),) == read(grow(tmp_path, files))


def test_a_mapping_directory_says_whose_the_gpus_are(tmp_path: Path) -> None:
    """More reliable than an environment, and enough for a job that has no process here."""

    roots = grow(
        tmp_path,
        version_2(
            {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n", "map/0": "2\n", "map/3": "9 0\n"},
            BATCH_2,
        ),
    )
    reader = JobReader(roots, folders=[str(tmp_path / "map")])

    assert (
        JOB_2._replace(gpus=("GPU-0",), source="map"),
        Job("slurm:9", "root", 0, gpus=("GPU-3",), source="map"),
    ) == read(roots, NOW, reader)


def test_a_mapping_directory_is_read_every_second(tmp_path: Path) -> None:
    """What a prolog writes into a file that is there already is not missed."""

    roots = grow(tmp_path, version_2({"map/0": "1\n"}))
    reader = JobReader(roots, folders=[str(tmp_path / "map")])
    seen = [read(roots, NOW, reader)]
    grow(tmp_path, {"map/0": "7\n"})
    seen += [read(roots, NOW + 0.5, reader), read(roots, NOW + 1.0, reader)]

    assert [["slurm:1"], ["slurm:1"], ["slurm:7"]] == [[job.id for job in jobs] for jobs in seen]


def test_jobs_without_control_groups_are_known_from_their_processes(tmp_path: Path) -> None:
    """Where Slurm tracks processes otherwise, those on GPUs speak for themselves."""

    told = Told("slurm:8", 1001, "ada", "fit", "gpu", None, gpus="2")
    jobs, health = JobReader(grow(tmp_path, {})).read(NOW, GPUS, [(told, 1001)])

    assert (Job("slurm:8", "1001", 1001, "fit", "gpu", None, ("GPU-2",), "environment"),) == jobs
    assert [] == health


def test_nobody_speaks_for_another_users_job(tmp_path: Path) -> None:
    """Anybody can write the number of a job into an environment."""

    group = {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n"}
    roots = grow(tmp_path, version_2(group, process(20)))
    told = Told("slurm:2", 1002, "eve", "mine", gpus="0,1,2,3")

    assert (Job("slurm:2", "1001", 1001),) == JobReader(roots).read(NOW, GPUS, [(told, 1002)])[0]
    assert ("GPU-3",) == JobReader(roots).read(NOW, GPUS, [(told._replace(gpus="3"), 1001)])[0][0].gpus


def test_a_machine_without_slurm_has_no_jobs(tmp_path: Path) -> None:
    """Nor anything to complain about, with or without control groups."""

    assert ((), []) == JobReader(grow(tmp_path / "a", version_2())).read(NOW, GPUS)
    assert ((), []) == JobReader(grow(tmp_path / "b", {})).read(NOW, GPUS)
