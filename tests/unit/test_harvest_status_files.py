"""What is read of the harvests on a machine, and what is not believed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulse.model.harvest_status import (
    HarvestGpu,
    HarvestProcess,
    HarvestRun,
    HarvestStatus,
    status_to_document,
)
from gpulse.sources.harvest_status import (
    HarvestReader,
    PublishedHarvests,
    combine_statuses,
    find_program,
    status_path,
    verify_status,
)
from gpulse.sources.process_owners import find_owner
from gpulse.sources.processes import ProcessReader
from gpulse.sources.procfs import Roots
from tests.unit.trees import grow, pid_stat

NOW = 1_700_000_000.0
ME = os.getuid()
MARK = "0123456789abcdef" * 2
GPU = HarvestGpu(0, "GPU-0", "harvested", NOW, "", "fold", 60.0, 2)
RUN = HarvestRun("r", "fold", (0,), NOW, "running", HarvestProcess(60, 600), HarvestProcess(61, 601))
STATUS = HarvestStatus(NOW, 50, 500, ME, "ada", "harvest.toml", 10.0, gpus=(GPU,), runs=(RUN,))
VALUES = {"harvest_state": 2, "harvested_seconds_total": 60.0, "harvest_preemptions_total": 2}


def uid_of(uid: int) -> str:
    """What /proc/PID/status says of a process of that user."""
    return f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A machine on which the harvest runs, with a supervisor and its program."""
    return grow(
        tmp_path,
        {
            "proc/50/stat": pid_stat(50, start=500),
            "proc/60/stat": pid_stat(60, 50, start=600),
            "proc/61/stat": pid_stat(61, 60, start=601),
            **{f"proc/{pid}/status": uid_of(ME) for pid in (50, 60, 61)},
            "dev/shm/torch_1": "",
            "proc/stat": "btime 1\n",
        },
    )


def publish(roots: Roots, status: HarvestStatus, uid: int = ME, mark: str = MARK) -> Path:
    """Write a status as a harvest does."""
    path = Path(status_path(roots, uid, mark))
    made = path.with_suffix(".new")
    made.write_text(json.dumps(status_to_document(status)))
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
        pytest.param(lambda roots: os.mkfifo(status_path(roots, ME, MARK), 0o644), id="a pipe"),
        pytest.param(lambda roots: Path(status_path(roots, ME, MARK)).mkdir(), id="a folder"),
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
    Path(status_path(roots, ME, MARK)).unlink()
    os.mkfifo(status_path(roots, ME, MARK), 0o644)
    pipe = os.open(status_path(roots, ME, MARK), os.O_RDWR)
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
    } == combine_statuses([other, STATUS]).gpus


def test_all_harvests_of_a_user_are_read(roots: Roots) -> None:
    """Each has a file of its own, and one that an earlier gpulse publishes is read beside them."""
    assert f"{roots.dev}/shm/gpulse-harvest-1000-01234567.json" == status_path(roots, 1000, MARK)
    for place, mark in enumerate(("a" * 32, "b" * 32, "c" * 32)):
        publish(roots, STATUS._replace(gpus=(GPU._replace(uuid=f"GPU-{place}"),)), mark=mark)
    Path(status_path(roots, ME, "c" * 32)).rename(f"{roots.dev}/shm/gpulse-harvest-{ME}.json")
    publish(roots, STATUS).rename(f"{roots.dev}/shm/gpulse-harvest-{ME}-0123456.json")

    assert {"GPU-0", "GPU-1", "GPU-2"} == HarvestReader(roots).read(NOW).gpus.keys()


def test_a_user_cannot_publish_without_end(roots: Roots) -> None:
    """The newest files are read, whatever else lies there under the user's number."""
    for place in range(20):
        path = publish(roots, STATUS._replace(config=f"{place}"), mark=f"{place:08x}")
        os.utime(path, (NOW + place, NOW + place))

    read = {status.config for status in HarvestReader(roots).read(NOW).statuses}

    assert {f"{place}" for place in range(4, 20)} == read


def running(uid: int = 1000) -> HarvestStatus:
    """A harvest of that user with a program under a supervisor."""
    return STATUS._replace(uid=uid)


FAMILY = {
    "proc/62/stat": pid_stat(62, 61, start=602),
    "proc/63/stat": pid_stat(63, 60, start=603),
    "proc/70/stat": pid_stat(70, 50, start=700),
    "proc/71/stat": pid_stat(71, 72, start=701),
    "proc/72/stat": pid_stat(72, 71, start=702),
}
THEIRS = {f"proc/{pid}/status": uid_of(1001) for pid in (60, 61)}
HERS = running()
NO_RUN = RUN._replace(supervisor=None, process=None)


@pytest.mark.parametrize(
    ("status", "files", "found"),
    [
        pytest.param(HERS, {}, ("harvested", "fold", 2), id="its supervisor and its program"),
        pytest.param(
            HERS._replace(runs=(RUN._replace(process=None),)), {}, ("harvested", "fold", 1), id="a supervisor"
        ),
        pytest.param(HERS._replace(runs=()), {}, ("unknown", None, 0), id="no run"),
        pytest.param(HERS._replace(runs=(NO_RUN,)), {}, ("unknown", None, 0), id="a run without processes"),
        pytest.param(
            HERS._replace(runs=(RUN._replace(gpus=(1,)),)), {}, ("unknown", None, 2), id="a run elsewhere"
        ),
        pytest.param(HERS, THEIRS, ("unknown", None, 0), id="somebody else's processes"),
        pytest.param(
            HERS,
            {"proc/60/stat": pid_stat(60, start=1), "proc/61/stat": pid_stat(61, 60, start=601, state=b"Z")},
            ("unknown", None, 0),
            id="processes that are gone",
        ),
        pytest.param(
            HERS._replace(gpus=(GPU._replace(state="stopping"),), runs=()),
            {},
            ("unknown", None, 0),
            id="it stops nothing",
        ),
        *(
            pytest.param(
                HERS._replace(gpus=(GPU._replace(state=state),), runs=()), {}, (state, None, 0), id=state
            )
            for state in ("people", "waiting", "unknown")
        ),
        pytest.param(HERS._replace(uid=0, runs=()), {}, ("harvested", "fold", 0), id="root says so"),
        pytest.param(HERS._replace(uid=0), THEIRS, ("harvested", "fold", 2), id="root runs it as another"),
    ],
)
def test_only_what_is_proven_is_believed(
    roots: Roots,
    tmp_path: Path,
    status: HarvestStatus,
    files: dict[str, str | bytes],
    found: tuple[str, str, int],
) -> None:
    """A GPU is harvested with a run on it whose process lives and is of the harvest's user."""
    grow(tmp_path, {**{f"proc/{pid}/status": uid_of(1000) for pid in (60, 61)}, **files})
    believed = verify_status(status, roots)

    assert found == (
        believed.gpus[0].state,
        believed.gpus[0].program,
        len(combine_statuses([believed]).programs),
    )


@pytest.mark.skipif(ME != 0, reason="needs root, to give files away")
def test_a_file_of_one_user_is_believed_about_that_user_alone(roots: Roots, tmp_path: Path) -> None:
    """Who says that root's processes are their program says nothing, and changes nothing of what root says."""
    grow(tmp_path, {"proc/50/status": uid_of(1000)})
    lie = running()._replace(runs=(RUN._replace(program="mine"),))
    os.chown(publish(roots, lie, 1000, "a" * 32), 1000, 1000)

    alone = HarvestReader(roots).read(NOW)
    publish(roots, STATUS._replace(gpus=()))
    both = HarvestReader(roots).read(NOW)

    assert ({}, 4) == (alone.programs, alone.gpus["GPU-0"]["harvest_state"])
    assert ({(0, "fold")}, 4) == (set(both.programs.values()), both.gpus["GPU-0"]["harvest_state"])


@pytest.mark.skipif(ME != 0, reason="needs root, to give files away")
def test_a_harvest_whose_process_is_another_users_counts_for_nothing(roots: Roots) -> None:
    """It is not the one that publishes."""
    os.chown(publish(roots, running(), 1000), 1000, 1000)

    assert () == HarvestReader(roots).read(NOW).statuses


def test_nobody_takes_a_process_from_another_harvest(roots: Roots, tmp_path: Path) -> None:
    """What the first says of it stays; root's file comes before all others."""
    grow(tmp_path, FAMILY)
    other = RUN._replace(program="mine")

    found = combine_statuses([running(0), running()._replace(runs=(other,))])

    assert "fold" == find_program(62, 1000, found, roots)
    assert "mine" == find_program(
        62,
        1000,
        combine_statuses(
            [running(7), running()._replace(runs=(other._replace(supervisor=HarvestProcess(62, 602)),))]
        ),
        roots,
    )


@pytest.mark.parametrize(
    ("pid", "uid", "program"),
    [
        pytest.param(61, 1000, "fold", id="the program itself"),
        pytest.param(62, 1000, "fold", id="its child"),
        pytest.param(63, 1000, "fold", id="one that left its parent and has the supervisor"),
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

    assert program == find_program(pid, uid, combine_statuses([running()]), roots)


def test_a_pid_that_is_used_again_is_no_programs(roots: Roots, tmp_path: Path) -> None:
    """The number is the same, the start is not."""
    grow(tmp_path, {**FAMILY, "proc/61/stat": pid_stat(61, 50, start=999)})

    assert find_program(61, 1000, combine_statuses([running()]), roots) is None


def test_roots_harvest_may_run_programs_as_others(roots: Roots, tmp_path: Path) -> None:
    """It is believed about every user's processes."""
    grow(tmp_path, FAMILY)

    assert "fold" == find_program(62, 1001, combine_statuses([running(uid=0)]), roots)


def test_a_harvest_is_more_than_what_an_environment_says() -> None:
    """It may be inherited; a control group of Slurm's cannot be, and wins. What a process calls itself is nothing."""
    inherited = b"GPULSE_HARVEST_PROGRAM=mine\0GPULSE_HARVEST_RUN=1/2\0"

    assert find_owner(0, [], inherited).job is None
    assert "slurm:7" == find_owner(0, [], inherited + b"SLURM_JOB_ID=7\0").job
    assert "harvest:fold" == find_owner(0, [], b"SLURM_JOB_ID=7\0", "fold").job
    assert "slurm:8" == find_owner(0, ["/slurm/uid_0/job_8"], inherited, "fold").job


@pytest.mark.parametrize(
    ("harvests", "environ", "job"),
    [
        (combine_statuses([running()]), b"", "harvest:fold"),
        (combine_statuses([running()]), b"SLURM_JOB_ID=7\0", "harvest:fold"),
        (combine_statuses([running()]), b"GPULSE_HARVEST_PROGRAM=x\0", "harvest:fold"),
        (combine_statuses([running(1001)]), b"GPULSE_HARVEST_PROGRAM=x\0", None),
        (PublishedHarvests(), b"GPULSE_HARVEST_PROGRAM=x\0", None),
        (PublishedHarvests(), b"SLURM_JOB_ID=7\0", "slurm:7"),
    ],
)
def test_a_process_is_a_harvests_by_its_run_alone(
    roots: Roots, tmp_path: Path, harvests: PublishedHarvests, environ: bytes, job: str | None
) -> None:
    """Whatever its environment says."""
    grow(
        tmp_path,
        {**FAMILY, "proc/62/status": uid_of(1000), "proc/62/cmdline": "x", "proc/62/environ": environ},
    )

    readings, _, _ = ProcessReader(roots).read(NOW, [62], harvests)

    assert job == readings[0].identity.owner.job


def test_a_process_that_was_seen_before_its_run_is_reported_again(roots: Roots, tmp_path: Path) -> None:
    """At once, however long it is until the next look at who it is."""
    grow(tmp_path, {**FAMILY, "proc/62/status": uid_of(1000), "proc/62/cmdline": "x"})
    reader = ProcessReader(roots)

    jobs = [
        reader.read(NOW + second, [62], harvests)[0][0].identity.owner.job
        for second, harvests in enumerate(
            (PublishedHarvests(), combine_statuses([running()]), PublishedHarvests())
        )
    ]

    assert [None, "harvest:fold", "harvest:fold"] == jobs
