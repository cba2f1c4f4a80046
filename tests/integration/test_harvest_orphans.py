from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulse.harvest.events import ProcessId
from gpulse.harvest.supervise import own_processes
from gpulse.harvest.supervise.own_processes import RUN_VARIABLE
from tests.integration.hands import IS_ROOT
from tests.integration.harvest_runs import SECONDS, TREE, python, there, wait_for
from tests.integration.test_other_users import _as
from tests.unit.trees import grow, pid_stat

HARVEST = """
import asyncio, json, os, sys
from gpulse.harvest.supervise.runner import Runner
from gpulse.harvest.events import ProgramStarted
from gpulse.harvest.settings import Program
from gpulse.sources.procfs import Roots

def report(news):
    assert isinstance(news, ProgramStarted), news
    print(json.dumps([news.supervisor, news.program]), flush=True)

async def main():
    runner = Runner(mark=sys.argv[1], report=report, roots=Roots())
    program = Program("work", tuple(sys.argv[3:]), (0,), grace_seconds=float(sys.argv[2]))
    runner.start("run-7", program, os.environ)
    await asyncio.Event().wait()

asyncio.run(main())
"""
FAMILY = """
if daemon():
    deaf()
    rest("daemon")
rest("program")
"""


class Harvest(NamedTuple):
    """A harvest in a process of its own, and what it started."""

    mark: str
    child: subprocess.Popen[str]
    supervisor: ProcessId
    program: ProcessId
    daemon: ProcessId

    def die(self) -> None:
        """Be killed, so that nothing can be tidied up."""
        self.child.kill()
        self.child.wait()

    def left(self) -> list[bool]:
        """Whether supervisor, program and daemon are there."""
        return [there(process) for process in (self.supervisor, self.program, self.daemon)]


@contextmanager
def a_harvest(mark: str, grace: float = 0.2) -> Iterator[Harvest]:
    """A harvest whose program ends when asked and left a daemon that does not."""
    child = subprocess.Popen(
        [sys.executable, "-c", HARVEST, mark, str(grace), *python(FAMILY)], stdout=subprocess.PIPE, text=True
    )
    left: list[ProcessId] = []
    try:
        assert child.stdout is not None
        said: dict[str, ProcessId] = {}
        while len(said) < 4:
            line = child.stdout.readline()
            assert line
            if line.startswith("["):
                supervisor, program = (ProcessId(*pair) for pair in json.loads(line))
                said |= {"supervisor": supervisor, "started": program}
            else:
                word, number = line.split()
                process = TREE.find(int(number))
                assert process is not None
                said[word] = process
        left += said.values()
        assert said["started"] == said["program"]
        yield Harvest(mark, child, said["supervisor"], said["program"], said["daemon"])
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        for process in left:
            TREE.send(process, signal.SIGKILL)


@pytest.fixture(name="mark")
def _mark(tmp_path: Path) -> str:
    return f"ledger-{os.getpid()}-{tmp_path.name}"


@pytest.fixture(name="bystander")
def _bystander(mark: str) -> Iterator[ProcessId]:
    """Somebody whose mark only looks like ours."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_VARIABLE: f"{mark}x/run-7"})
    try:
        process = TREE.find(child.pid)
        assert process is not None
        yield process
    finally:
        child.kill()
        child.wait()


@contextmanager
def a_family(
    environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[tuple[ProcessId, ProcessId]]:
    """A parent, and its child without an environment, who are not below this process."""
    code = 'os.fork() == 0 and os.execve("/bin/sh", ["sh", "-c", "echo child $$; exec sleep 60"], {}); rest("parent")'
    command = ["setsid", "--fork", *prefix, *python(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **environment}) as starter:
        assert starter.stdout is not None
        said = dict(starter.stdout.readline().split() for _ in range(2))
    parent, child = (TREE.find(int(said[word])) for word in (b"parent", b"child"))
    assert parent is not None
    assert child is not None
    try:
        yield parent, child
    finally:
        TREE.send(parent, signal.SIGKILL)
        TREE.send(child, signal.SIGKILL)


def test_a_supervisor_ends_its_program_when_harvest_is_killed(mark: str) -> None:
    """Nobody needs to come back: the program is asked, the daemon killed after the grace, then the supervisor goes."""

    with a_harvest(mark) as harvest:
        harvest.die()
        wait_for(harvest.program, harvest.daemon, harvest.supervisor)

        assert [] == own_processes.find_orphans(mark, [harvest.supervisor, harvest.program])


async def test_a_supervisor_that_is_at_it_is_left_to_finish(mark: str, bystander: ProcessId) -> None:
    """It is found with everything below it, and does its work long before the grace is over; nobody else is touched."""

    with a_harvest(mark) as harvest:
        os.kill(harvest.supervisor.pid, signal.SIGSTOP)
        harvest.die()
        found = own_processes.find_orphans(mark, [harvest.supervisor])

        assert {
            (harvest.supervisor, "run-7", True),
            (harvest.program, "run-7", False),
            (harvest.daemon, "run-7", False),
        } == {(orphan.process, orphan.run, orphan.is_supervisor) for orphan in found}
        async with asyncio.timeout(SECONDS):
            assert [] == await own_processes.end_orphans(found, 600.0)
        assert [False, False, False] == harvest.left()
        assert there(bystander)


async def test_what_lost_harvest_and_supervisor_is_found_and_ended(mark: str, bystander: ProcessId) -> None:
    """Though it has left its family, the state directory knows it: asked, and killed after the grace."""

    with a_harvest(mark) as harvest:
        os.kill(harvest.supervisor.pid, signal.SIGSTOP)
        harvest.die()
        os.kill(harvest.supervisor.pid, signal.SIGKILL)
        wait_for(harvest.supervisor)
        found = own_processes.find_orphans(mark, [harvest.supervisor, harvest.program, harvest.daemon])

        assert sorted([harvest.program, harvest.daemon]) == [orphan.process for orphan in found]
        assert [] == await own_processes.end_orphans(found, 0.2)
        assert [False, False, False] == harvest.left()
        assert there(bystander)


async def test_a_supervisor_that_does_nothing_is_killed_with_all_it_keeps(mark: str) -> None:
    """One whose grace is longer than ours is not waited for."""

    with a_harvest(mark, grace=600.0) as harvest:
        harvest.die()
        assert [] == await own_processes.end_orphans(
            own_processes.find_orphans(mark, [harvest.supervisor]), 0.1
        )
        assert [False, False, False] == harvest.left()


def test_what_a_ledger_knows_counts_only_with_its_start(mark: str) -> None:
    """A number that was used again is nobody of ours."""

    with a_family({}) as (parent, _):
        reused = ProcessId(parent.pid, parent.start_ticks - 1)

        assert [] == own_processes.find_orphans(mark, [reused])
        assert not TREE.send(reused, signal.SIGKILL)
        assert there(parent)


async def test_what_bears_no_mark_is_found_below_what_does(mark: str) -> None:
    """A child that cleared its environment is an orphan because its parent is one, and stays it without the parent."""

    with a_family({RUN_VARIABLE: f"{mark}/run-7"}) as (parent, child):
        found = own_processes.find_orphans(mark, [parent])

        assert {(parent, "run-7"), (child, None)} == {(orphan.process, orphan.run) for orphan in found}
        TREE.send(parent, signal.SIGKILL)
        wait_for(parent)
        assert [] == await own_processes.end_orphans(found, 0.1)
        assert not there(child)


def test_what_a_ledger_knows_is_not_ours_without_the_mark(mark: str) -> None:
    """A process whose environment can be read and names no run of ours only has a number that once was ours."""

    with a_family({}) as family:
        assert [] == own_processes.find_orphans(mark, family)


@pytest.mark.parametrize(
    "user", [0, pytest.param(65534, marks=pytest.mark.skipif(not IS_ROOT, reason="only root is two users"))]
)
async def test_the_mark_alone_proves_nothing(mark: str, user: int) -> None:
    """Whoever copied the variable is left alone, and so is what it started; root reads the environment of all users."""

    prefix = _as(user) if user else []
    with (
        a_family({RUN_VARIABLE: f"{mark}/run-7"}, prefix) as (parent, child),
        a_harvest(mark) as harvest,
    ):
        os.kill(harvest.supervisor.pid, signal.SIGSTOP)
        harvest.die()
        found = own_processes.find_orphans(mark, [harvest.supervisor, harvest.program])

        assert {harvest.supervisor, harvest.program, harvest.daemon} == {orphan.process for orphan in found}
        assert [] == await own_processes.end_orphans(found, SECONDS)
        assert [False, False, False] == harvest.left()
        assert [] == own_processes.find_orphans(mark, [])
        assert there(parent)
        assert there(child)


def test_who_stays_in_the_session_of_a_program_that_ended_is_found(mark: str) -> None:
    """Nobody but its descendants can be there; one that began after the last list was saved is ended as well."""

    code = 'os.fork() == 0 or os._exit(0); print("left", os.getpid(), os.getsid(0), flush=True); rest("left")'
    command = ["setsid", "--fork", *python(code)]
    environment = {**os.environ, RUN_VARIABLE: f"{mark}/run-7"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment
    ) as starter:  # it goes on to write there
        assert starter.stdout is not None
        _, pid, session = starter.stdout.readline().split()
        left = TREE.find(int(pid))
        assert left is not None
        try:
            assert [left] == [
                orphan.process for orphan in own_processes.find_orphans(mark, [ProcessId(int(session), 1)])
            ]
            assert [] == own_processes.find_orphans(mark, [ProcessId(int(session) + 1, 1)])
        finally:
            TREE.send(left, signal.SIGKILL)


JOB = "/system.slice/slurmstepd.scope/job_{}/step_batch/user/task_0"
SESSION = 5_000_000
"""A number that no process has."""
CONTAINER = f"/system.slice/docker-{'ab' * 32}.scope"


@pytest.mark.parametrize(
    ("own", "known", "expected"),
    [
        ("/user.slice", [], [104]),
        (JOB.format(4711), [], [101, 104]),
        (CONTAINER, [], [103, 104]),
        ("/user.slice", [ProcessId(102, 100)], [102, 104]),
    ],
)
def test_who_got_the_mark_through_others_is_no_orphan(
    tmp_path: Path, own: str, known: list[ProcessId], expected: list[int]
) -> None:
    """Jobs and containers with our environment were never below a supervisor, unless the state directory knows them or we are there."""

    places = {
        101: JOB.format(4711),
        102: JOB.format(4712),
        103: CONTAINER,
        104: "/user.slice",
        105: f"{JOB.format(4711)}/{'cd' * 32}",
    }
    files: dict[str, str | bytes] = {f"proc/{os.getpid()}/cgroup": f"0::{own}\n"}
    for pid, path in places.items():
        files[f"proc/{pid}/environ"] = f"A=b\0{RUN_VARIABLE}=ledger/run-7\0"
        files[f"proc/{pid}/stat"] = pid_stat(pid, session=SESSION)
        files[f"proc/{pid}/cgroup"] = f"0::{path}\n"

    found = own_processes.find_orphans("ledger", [ProcessId(SESSION, 1), *known], grow(tmp_path, files))
    assert expected == [orphan.process.pid for orphan in found]


def test_this_process_and_what_it_runs_are_no_orphans(mark: str) -> None:
    """A mark below us is that of a run of our own."""

    with subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: f"{mark}/run-7"}) as child:
        assert [] == own_processes.find_orphans(mark, [TREE.myself()])
        child.kill()
