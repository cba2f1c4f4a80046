"""Jobs put together from control groups, environments and mapping directories, on small trees of files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulse.model.device import Device
from gpulse.model.job import Job
from gpulse.sources.process_owners import JobRegistry
from gpulse.sources.procfs import Roots
from gpulse.sources.scheduler_jobs import JobReader
from gpulse.sources.slurm import JobEnvironment
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

    assert JobRegistry({f"slurm:{SLUID}": "slurm:2"}, {"slurm:2": 1001}, has_groups=True) == reader.register(
        NOW
    )
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


def test_a_mapping_directory_names_the_job_of_each_gpu(tmp_path: Path) -> None:
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

    told = JobEnvironment("slurm:8", 1001, "ada", "fit", "gpu", None, gpus="2")
    jobs, health = JobReader(grow(tmp_path, {})).read(NOW, GPUS, [(told, 1001)])

    assert (Job("slurm:8", "1001", 1001, "fit", "gpu", None, ("GPU-2",), "environment"),) == jobs
    assert [] == health


def test_nobody_speaks_for_another_users_job(tmp_path: Path) -> None:
    """Anybody can write the number of a job into an environment."""

    group = {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n"}
    roots = grow(tmp_path, version_2(group, process(20)))
    told = JobEnvironment("slurm:2", 1002, "eve", "mine", gpus="0,1,2,3")

    assert (Job("slurm:2", "1001", 1001),) == JobReader(roots).read(NOW, GPUS, [(told, 1002)])[0]
    assert ("GPU-3",) == JobReader(roots).read(NOW, GPUS, [(told._replace(gpus="3"), 1001)])[0][0].gpus


def test_the_oldest_process_speaks_for_a_job(tmp_path: Path) -> None:
    """It has what Slurm gave it; those that came later have what the job's user made of it."""

    group = {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "30\n20\n"}
    later = process(30, SLURM_JOB_ID="2", SLURM_JOB_GPUS="0,1,2,3", SLURM_JOB_NAME="forged")
    roots = grow(tmp_path, version_2(group, later, {**BATCH_2, "proc/20/stat": pid_stat(20, start=1)}))

    assert (JOB_2,) == read(roots)


def test_nobody_can_claim_a_gpu_that_another_job_was_given(tmp_path: Path) -> None:
    """What a directory of root's says of others is left out of an environment; a job without any left has an unknown number."""

    groups = {
        f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n",
        f"{SCOPE}/job_4/step_batch/user/task_0/cgroup.procs": "40\n",
        f"{SCOPE}/job_5/step_batch/user/task_0/cgroup.procs": "50\n",
        "map/nvidia1": "2 1001\n",
        "map/nvidia2": "2 1001\n",
    }
    greedy = process(40, 1002, SLURM_JOB_ID="4", SLURM_JOB_GPUS="0-3")
    liar = process(50, 1002, SLURM_JOB_ID="5", SLURM_JOB_GPUS="1")
    roots = grow(tmp_path, version_2(groups, BATCH_2, greedy, liar))

    assert [
        (("GPU-1", "GPU-2"), "map"),
        (("GPU-0", "GPU-3"), "environment"),
        ((), None),
    ] == [(job.gpus, job.source) for job in read(roots, NOW, JobReader(roots, folders=[f"{tmp_path}/map"]))]


def test_a_job_in_which_nothing_runs_that_knows_its_gpus_is_said(tmp_path: Path) -> None:
    """After a while, for a job begins so; not where there is no GPU, nor where a prolog writes down who has one."""

    files = {f"{SCOPE}/job_2/step_extern/user/task_special/cgroup.procs": "22\n", "map/.lock": ""}
    roots = grow(tmp_path, version_2(files, process(22, 0, cmdline=b"sleep\x00100000000\0")))
    reader = JobReader(roots)
    young = reader.read(NOW, GPUS)
    jobs, [health] = reader.read(NOW + 6, GPUS)

    assert ((Job("slurm:2"),), []) == young
    assert (Job("slurm:2"),) == jobs
    assert (
        "not_visible",
        "cannot determine the GPUs allocated to slurm:2: none of the processes has Slurm's variables in its environment",
    ) == health[1:3]
    assert [] == reader.read(NOW + 7, [])[1]
    with_map = JobReader(roots, folders=[f"{tmp_path}/map"])
    assert [[], []] == [with_map.read(NOW + later, GPUS)[1] for later in (0, 6)]


def test_a_job_that_was_given_no_gpu_is_nothing_to_complain_about(tmp_path: Path) -> None:
    """Its processes say all that there is to say."""

    group = {f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n"}
    reader = JobReader(grow(tmp_path, version_2(group, process(20, SLURM_JOB_ID="2", SLURM_JOB_NAME="cpu"))))

    assert [[], []] == [reader.read(NOW + later, GPUS)[1] for later in (0, 6)]


def test_the_user_of_a_job_is_in_control_groups_and_mapping_directories(tmp_path: Path) -> None:
    """Both are root's; where a job has had a group all of them have one, also after it is gone."""

    files = {
        f"{SCOPE}/job_2/step_batch/user/task_0/cgroup.procs": "20\n",
        "map/0": "2 7\n",
        "map/1": "9 1002\n",
    }
    roots = grow(tmp_path, version_2(files, BATCH_2))
    reader = JobReader(roots, folders=[f"{tmp_path}/map"])
    reader.read(NOW, GPUS)
    register = reader.register(NOW)
    again = reader.register(NOW + 1)
    (tmp_path / SCOPE / "job_2").rename(tmp_path / SCOPE / "gone")
    after = reader.register(NOW + 2)

    assert JobRegistry({}, {"slurm:2": 1001, "slurm:9": 1002}, has_groups=True) == register
    assert register is again
    assert JobRegistry({}, {"slurm:2": 7, "slurm:9": 1002}, has_groups=True) == after


def test_a_scope_without_jobs_does_not_say_that_jobs_have_groups(tmp_path: Path) -> None:
    """A daemon may make it and track its jobs by other means; version 1 has directories only where they are used."""

    empty = {"proc/self/mounts": V1 + V2, f"{SCOPE}/system/cgroup.procs": "9\n"}
    used = version_1({"sys/fs/cgroup/freezer/slurm_n1/cgroup.procs": ""})

    assert not JobReader(grow(tmp_path / "a", empty)).register(NOW).has_groups
    assert JobReader(grow(tmp_path / "b", used)).register(NOW).has_groups


def test_a_scope_in_a_users_part_of_the_tree_holds_no_jobs(tmp_path: Path) -> None:
    """Nor is a slice within a slice overlooked."""

    users, nested = "sys/fs/cgroup/user.slice", "sys/fs/cgroup/gpu.slice/gpu-batch.slice"
    files = {
        f"{users}/slurmstepd.scope/job_5/step_batch/user/task_0/cgroup.procs": "20\n",
        f"{nested}/slurmstepd.scope/job_2/step_batch/user/task_0/cgroup.procs": "20\n",
    }

    assert (JOB_2,) == read(grow(tmp_path, version_2(files, BATCH_2)))


def test_a_machine_without_slurm_has_no_jobs(tmp_path: Path) -> None:
    """Nor anything to complain about, with or without control groups."""

    assert ((), []) == JobReader(grow(tmp_path / "a", version_2())).read(NOW, GPUS)
    assert ((), []) == JobReader(grow(tmp_path / "b", {})).read(NOW, GPUS)
