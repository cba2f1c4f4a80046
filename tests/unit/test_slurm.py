"""How Slurm's control groups and environments are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.model.device import Device
from gpulse.model.process import Owner
from gpulse.sources.process_owners import JobRegistry, find_owner
from gpulse.sources.slurm import (
    JobEnvironment,
    find_allocated_gpus,
    find_allowed_gpus,
    find_named_gpus,
    find_slurm_job,
    is_sluid,
    parse_daemon_title,
    parse_environ,
    parse_job_folder,
)

SLUID = "s5K1KKYAYG5D00"
GPUS = [Device(index, f"GPU-{index}", "H200", minor_number=index) for index in range(4)]
PART = Device(3, "MIG-30", "1g.18gb", parent_uuid="GPU-3", mig_index=0, gpu_instance=7)
SWAPPED = [Device(0, "GPU-a", "H200", minor_number=1), Device(1, "GPU-b", "H200", minor_number=0)]


def environ(**words: str) -> bytes:
    """An environment as the kernel shows it."""
    return b"".join(f"{name}={value}\0".encode() for name, value in words.items())


@pytest.mark.parametrize(
    "path",
    [
        f"/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0",
        f"/system.slice/node07_slurmstepd.scope/{SLUID}",
        f"/../../{SLUID}/step_batch/user/task_special",
    ],
)
def test_a_job_may_go_by_its_sluid(path: str) -> None:
    """Newer versions name the group so, with and without a cgroup namespace; it is known for what it is."""

    assert f"slurm:{SLUID}" == find_slurm_job([path])
    assert is_sluid(f"slurm:{SLUID}")
    assert not is_sluid("slurm:4711")


@pytest.mark.parametrize(
    "path",
    [
        f"/user.slice/{SLUID}",
        "/system.slice/slurmstepd.scope/s5K1KKYAYG5D0",
        "/system.slice/slurmstepd.scope/S5K1KKYAYG5D00/step_0",
        "/system.slice/slurmstepd.scope/s5K1KKYAYG5DOI/step_0",
        "/system.slice/slurmstepd.scope/system",
    ],
)
def test_what_only_looks_like_a_sluid_is_none(path: str) -> None:
    """It has fourteen characters of Crockford's alphabet, and a place."""

    assert find_slurm_job([path]) is None


def test_the_number_of_a_sluid_comes_from_the_step_daemon_or_the_environment() -> None:
    """Where neither says it, the SLUID is a name as good as any; an ordinary group needs neither."""

    path = f"/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0"
    said = environ(SLURM_JOB_ID="99")

    assert (
        "slurm:7" == find_owner(None, [path], said, register=JobRegistry({f"slurm:{SLUID}": "slurm:7"})).job
    )
    assert f"slurm:{SLUID}" == find_owner(1, [path], said, register=JobRegistry(users={"slurm:99": 2})).job
    assert "slurm:99" == find_owner(None, [path], said).job
    assert f"slurm:{SLUID}" == find_owner(None, [path]).job
    assert Owner(job="slurm:5") == find_owner(None, ["/slurm/uid_0/job_5/step_0"], said)


@pytest.mark.parametrize(
    ("title", "job"),
    [
        (b"slurmstepd: [4711.batch]", "slurm:4711"),
        (b"slurmstepd: [4711.0]\0\0\0", "slurm:4711"),
        (b"slurmstepd: [4711+1.0]\0", "slurm:4711"),
        (b"slurmstepd: [x.0]", None),
        (b"/usr/sbin/slurmstepd\0infinity\0", None),
        (b"", None),
    ],
)
def test_a_step_daemon_has_its_job_in_its_title(title: bytes, job: str | None) -> None:
    """Which everybody may read, unlike an environment."""

    assert job == parse_daemon_title(title)


def test_directories_of_jobs_are_distinguished_from_others() -> None:
    """Slurm keeps more than jobs beside them."""

    names = ["job_12", SLUID, "uid_0", "system", "job_x", "job_12.bak", ""]

    assert ["slurm:12", f"slurm:{SLUID}", *[None] * 5] == [parse_job_folder(name) for name in names]


def test_an_environment_tells_all_of_a_job() -> None:
    """As it stands in a batch job of a real Slurm."""

    told = parse_environ(
        environ(
            PATH="/bin",
            SLURM_JOB_ID="2",
            SLURM_JOB_UID="1001",
            SLURM_JOB_USER="ada",
            SLURM_JOB_NAME="other job",
            SLURM_JOB_PARTITION="gpu",
            SLURM_JOB_ACCOUNT="ml",
            SLURM_JOB_GPUS="1,2",
            CUDA_VISIBLE_DEVICES="0,1",
            GPU_DEVICE_ORDINAL="0,1",
        )
    )

    assert JobEnvironment("slurm:2", 1001, "ada", "other job", "gpu", "ml", "1,2", None, "0,1") == told


def test_a_task_of_an_array_has_a_second_name() -> None:
    """Which is how people and Slurm's own commands name it."""

    told = parse_environ(environ(SLURM_JOB_ID="4714", SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="3"))

    assert ("slurm:4714", "4711_3") == (told and told.job, told and told.array)


def test_an_environment_without_a_job_tells_nothing() -> None:
    """Neither other variables nor what is no number is a job."""

    assert parse_environ(environ(SLURM_JOB_NAME="x")) is None
    assert parse_environ(environ(SLURM_JOB_ID="x", SLURM_JOB_GPUS="0")) is None
    assert parse_environ(environ(SLURM_JOB_ID="9" * 40)) is None
    assert parse_environ(b"") is None


def test_what_an_environment_says_is_bounded() -> None:
    """A name may be of any length; the first of two words of the same name counts, as for programs."""

    told = parse_environ(environ(SLURM_JOB_ID="2", SLURM_JOB_NAME="x" * 9999) + b"SLURM_JOB_ID=3\0")

    assert told is not None
    assert ("slurm:2", 256) == (told.job, len(told.name or ""))


@pytest.mark.parametrize(
    ("told", "gpus"),
    [
        ([JobEnvironment("j", gpus="1,2", visible="0,1")], ("GPU-1", "GPU-2")),
        ([JobEnvironment("j", gpus="0-2")], ("GPU-0", "GPU-1", "GPU-2")),
        ([JobEnvironment("j", step_gpus="0"), JobEnvironment("j", step_gpus="3,0")], ("GPU-0", "GPU-3")),
        ([JobEnvironment("j", gpus="1", step_gpus="0")], ("GPU-1",)),
        ([JobEnvironment("j", visible="0,1")], ()),
        ([JobEnvironment("j", visible="MIG-30")], ("MIG-30",)),
        ([JobEnvironment("j", gpus="2", visible="MIG-30")], ("MIG-30",)),
        ([JobEnvironment("j", gpus="2,3", visible="GPU-2")], ("GPU-2", "GPU-3")),
        ([JobEnvironment("j", visible="gpu-2,GPU-77")], ("GPU-2",)),
        ([JobEnvironment("j", gpus="7,x,1-x,-,99999999999")], ()),
        ([JobEnvironment("j")], ()),
        ([], ()),
    ],
)
def test_the_gpus_of_a_job_are_read_off_its_environments(
    told: list[JobEnvironment], gpus: tuple[str, ...]
) -> None:
    """Slurm's numbers and UUIDs count; numbers for CUDA are renumbered in each job, and Slurm's for MIG instances: they do not."""

    assert gpus == find_allocated_gpus(told, [*GPUS, PART])


def test_slurm_counts_device_files_not_indices() -> None:
    """The driver may number GPUs in another order than their files."""

    assert ["GPU-b", "GPU-a"] == find_named_gpus("0,1", SWAPPED)
    assert ["GPU-x"] == find_named_gpus("0", [Device(0, "GPU-x", "H200")])


def test_a_list_of_allowed_devices_names_the_gpus() -> None:
    """Only where everything else is forbidden does the kernel list them; otherwise nothing is known."""

    some = b"c 1:3 rwm\nc 195:1 rwm\nc 195:255 rwm\nc 195:3 m\nc 136:* rwm\n"

    assert ("GPU-1",) == find_allowed_gpus(some, GPUS)
    assert () == find_allowed_gpus(b"c 1:3 rwm\n", GPUS)
    assert find_allowed_gpus(b"a *:* rwm\n", GPUS) is None
    assert find_allowed_gpus(b"c 195:* rwm\n", GPUS) is None


@given(st.binary(max_size=300))
def test_no_environment_and_no_list_raises(data: bytes) -> None:
    """Whatever a program writes there."""

    told = parse_environ(b"SLURM_JOB_ID=1\0SLURM_JOB_GPUS=" + data)
    find_allocated_gpus([told] if told else [], GPUS)
    find_allowed_gpus(data, GPUS)
    parse_environ(data)
