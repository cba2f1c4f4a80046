"""What is read of the harvests on a machine, and what is not believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulse.model.harvest import HarvestGpu, HarvestProcess, HarvestRun, HarvestStatus, to_document
from gpulse.sources.harvest import HarvestReader, program_of, status_path, together
from gpulse.sources.owners import find_owner
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow, pid_stat

NOW = 1_700_000_000.0
ME = os.getuid()
GPU = HarvestGpu(0, "GPU-0", "harvested", NOW, "", "fold", 60.0, 2)
STATUS = HarvestStatus(NOW, 50, 500, ME, "ada", "harvest.toml", 10.0, gpus=(GPU,))
VALUES = {"harvest_state": 2, "harvested_seconds_total": 60.0, "harvest_preemptions_total": 2}


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A machine on which the process of the harvest runs."""
    return grow(
        tmp_path, {"proc/50/stat": pid_stat(50, start=500), "dev/shm/torch_1": "", "proc/stat": "btime 1\n"}
    )


def publish(roots: Roots, status: HarvestStatus, uid: int = ME) -> Path:
    """Write a status as a harvest does."""
    path = Path(status_path(roots, uid))
    made = path.with_suffix(".new")
    made.write_text(json.dumps(to_document(status)))
    made.chmod(0o644)
    made.replace(path)
    return path


def aged(roots: Roots, seconds: float) -> None:
    """Make the folder one that was last changed so long before now."""
    os.utime(f"{roots.dev}/shm", (NOW - seconds, NOW - seconds))


def test_a_harvest_that_is_alive_is_read(roots: Roots) -> None:
    """Its GPUs' values under the catalogue's names, and nothing for the machine without one."""
    reader = HarvestReader(roots)

    assert {} == reader.read(NOW).gpus
    publish(roots, STATUS)

    assert {"GPU-0": VALUES} == reader.read(NOW + 1).gpus


def test_a_status_is_followed(roots: Roots) -> None:
    """At most once a second, whether the file is a new one or the harvest has gone."""
    reader = HarvestReader(roots)
    path = publish(roots, STATUS)
    aged(roots, 100)
    assert VALUES == reader.read(NOW).gpus["GPU-0"]

    publish(roots, STATUS._replace(gpus=(GPU._replace(state="stopping"),)))

    assert 2 == reader.read(NOW + 0.9).gpus["GPU-0"]["harvest_state"]
    assert 3 == reader.read(NOW + 1).gpus["GPU-0"]["harvest_state"]
    path.unlink()
    assert {} == reader.read(NOW + 2).gpus


def test_a_folder_that_did_not_change_is_not_listed_again(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it changed so recently that the next change may carry the same time."""
    listed: list[str] = []
    names = os.listdir

    def listing(path: str) -> list[str]:
        listed.append(path)
        return names(path)

    monkeypatch.setattr(os, "listdir", listing)
    reader = HarvestReader(roots)
    aged(roots, 1)
    for second in range(6):
        reader.read(NOW + second)
    assert 3 == len(listed)

    Path(f"{roots.dev}/shm/other").touch()
    reader.read(NOW + 7)

    assert 4 == len(listed)


def changed(**changes: Any) -> Callable[[Roots], object]:
    """Publishes a status with some of it other than it should be."""
    return lambda roots: publish(roots, STATUS._replace(**changes))


def linked(roots: Roots) -> None:
    """A link to a status elsewhere."""
    path = publish(roots, STATUS)
    path.rename(f"{roots.dev}/elsewhere")
    path.symlink_to(f"{roots.dev}/elsewhere")


def too_large(roots: Roots) -> None:
    """A good status with a megabyte of blanks after it."""
    with publish(roots, STATUS).open("a") as file:
        file.write(" " * (1 << 20))


@pytest.mark.parametrize(
    "prepare",
    [
        pytest.param(changed(pid=51), id="its process is gone"),
        pytest.param(changed(pid_start_ticks=501), id="its pid is somebody else's"),
        pytest.param(changed(time=NOW - 36), id="it has not been heard of for three intervals"),
        pytest.param(changed(time=NOW + 36), id="it is from the future"),
        pytest.param(changed(uid=ME + 1), id="it speaks for another user"),
        pytest.param(lambda roots: publish(roots, STATUS._replace(uid=ME + 1), ME + 1), id="not their file"),
        pytest.param(lambda roots: publish(roots, STATUS).chmod(0o666), id="others can write it"),
        pytest.param(lambda roots: publish(roots, STATUS).write_text("[" * 100_000), id="too deep"),
        pytest.param(lambda roots: publish(roots, STATUS).write_text("{"), id="cut off"),
        pytest.param(lambda roots: publish(roots, STATUS).write_bytes(b"\xff\xfe"), id="not text"),
        pytest.param(lambda roots: os.mkfifo(status_path(roots, ME), 0o644), id="a pipe"),
        pytest.param(lambda roots: Path(status_path(roots, ME)).mkdir(), id="a folder"),
        pytest.param(linked, id="a link"),
        pytest.param(too_large, id="too large"),
    ],
)
def test_a_file_that_is_not_what_it_says_counts_for_nothing(
    roots: Roots, prepare: Callable[[Roots], object]
) -> None:
    """And neither holds the reader up nor leads it elsewhere."""
    prepare(roots)

    assert ((), {}) == HarvestReader(roots).read(NOW)[:2]


def test_a_pipe_is_not_listened_to(roots: Roots) -> None:
    """Though what comes out of it is a status."""
    said = publish(roots, STATUS).read_bytes()
    Path(status_path(roots, ME)).unlink()
    os.mkfifo(status_path(roots, ME), 0o644)
    pipe = os.open(status_path(roots, ME), os.O_RDWR)
    try:
        os.write(pipe, said)

        assert () == HarvestReader(roots).read(NOW).statuses
    finally:
        os.close(pipe)


def test_nothing_is_there_without_shared_memory(tmp_path: Path) -> None:
    """A machine without /dev/shm has no harvest that could be read."""

    assert {} == HarvestReader(grow(tmp_path, {})).read(NOW).gpus


def test_a_harvest_that_only_tries_says_nothing_of_gpus(roots: Roots) -> None:
    """It is there for who asks, but harvests nothing."""
    publish(roots, STATUS._replace(dry_run=True))
    found = HarvestReader(roots).read(NOW)

    assert ([True], {}, {}) == ([status.dry_run for status in found.statuses], found.gpus, found.programs)


def test_harvests_of_one_gpu_add_up() -> None:
    """What one of them runs is what the GPU does, though to the other one it is somebody's use."""
    other = STATUS._replace(
        uid=0, gpus=(GPU._replace(state="people", harvested_seconds=40.0, preemptions=1),)
    )

    assert {
        "GPU-0": {"harvest_state": 2, "harvested_seconds_total": 100.0, "harvest_preemptions_total": 3}
    } == together([other, STATUS]).gpus


def running(uid: int = 1000) -> HarvestStatus:
    """A harvest of that user with a program under a keeper."""
    run = HarvestRun("r", "fold", (0,), NOW, "running", HarvestProcess(60, 600), HarvestProcess(61, 601))
    return STATUS._replace(uid=uid, runs=(run,))


FAMILY = {
    "proc/60/stat": pid_stat(60, 50, start=600),
    "proc/61/stat": pid_stat(61, 60, start=601),
    "proc/62/stat": pid_stat(62, 61, start=602),
    "proc/63/stat": pid_stat(63, 60, start=603),
    "proc/70/stat": pid_stat(70, 50, start=700),
    "proc/71/stat": pid_stat(71, 72, start=701),
    "proc/72/stat": pid_stat(72, 71, start=702),
}


@pytest.mark.parametrize(
    ("pid", "uid", "program"),
    [
        pytest.param(61, 1000, "fold", id="the program itself"),
        pytest.param(62, 1000, "fold", id="its child"),
        pytest.param(63, 1000, "fold", id="one that left its parent and has the keeper"),
        pytest.param(70, 1000, None, id="another child of the same parent"),
        pytest.param(61, 1001, None, id="a process of another user"),
        pytest.param(71, 1000, None, id="a circle of parents"),
        pytest.param(99, 1000, None, id="nobody"),
    ],
)
def test_processes_are_a_programs_by_their_parents(
    roots: Roots, tmp_path: Path, pid: int, uid: int, program: str | None
) -> None:
    """Whatever they are called."""
    grow(tmp_path, FAMILY)

    assert program == program_of(pid, uid, together([running()]), roots)


def test_a_pid_that_is_used_again_is_no_programs(roots: Roots, tmp_path: Path) -> None:
    """The number is the same, the start is not."""
    grow(tmp_path, {**FAMILY, "proc/61/stat": pid_stat(61, 50, start=999)})

    assert program_of(61, 1000, together([running()]), roots) is None


def test_roots_harvest_may_run_programs_as_others(roots: Roots, tmp_path: Path) -> None:
    """It is believed about every user's processes."""
    grow(tmp_path, FAMILY)

    assert "fold" == program_of(62, 1001, together([running(uid=0)]), roots)


def test_the_environment_names_the_program() -> None:
    """Made harmless; a Slurm job is what the process is for all the same."""
    harvested = b"A=1\0GPULSE_HARVEST_PROGRAM=fold \x1b[1m\0"

    assert "harvest:fold_1m" == find_owner(0, [], harvested).job
    assert "slurm:7" == find_owner(0, [], harvested + b"SLURM_JOB_ID=7\0").job
    assert "slurm:8" == find_owner(0, ["/slurm/uid_0/job_8"], harvested).job
    assert find_owner(0, [], b"GPULSE_HARVEST_PROGRAM=\0XGPULSE_HARVEST_PROGRAM=x\0").job is None


@pytest.mark.parametrize(
    ("environ", "job"),
    [(b"", "harvest:fold"), (b"SLURM_JOB_ID=7\0", "slurm:7"), (b"GPULSE_HARVEST_PROGRAM=x\0", "harvest:x")],
)
def test_a_process_that_hides_its_environment_is_known_by_its_run(
    roots: Roots, tmp_path: Path, environ: bytes, job: str
) -> None:
    """What is published is asked only where the process itself says nothing."""
    status = "Uid:\t1000\t1000\t1000\t1000\n"
    grow(tmp_path, {**FAMILY, "proc/62/status": status, "proc/62/cmdline": "x", "proc/62/environ": environ})

    readings, _, _ = ProcessReader(roots).read(NOW, [62], together([running()]))

    assert job == readings[0].identity.owner.job
