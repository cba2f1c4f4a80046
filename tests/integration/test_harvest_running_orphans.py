from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest

from gpulse.harvest.running import orphans
from gpulse.harvest.running.told import Process
from tests.integration.harvest_runs import SECONDS, TREE, python, there

HARVEST = """
import asyncio, json, os, sys
from gpulse.harvest.running.runner import Runner
from gpulse.harvest.running.told import Started
from gpulse.harvest.settings import Program
from gpulse.sources.procfs import Roots

def report(news):
    assert isinstance(news, Started), news
    print(json.dumps([news.keeper, news.program]), flush=True)

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
    keeper: Process
    program: Process
    daemon: Process

    def die(self) -> None:
        """Be killed, so that nothing can be tidied up."""
        self.child.kill()
        self.child.wait()

    def left(self) -> list[bool]:
        """Whether keeper, program and daemon are there."""
        return [there(process) for process in (self.keeper, self.program, self.daemon)]


@contextmanager
def a_harvest(mark: str, grace: float = 0.2) -> Iterator[Harvest]:
    """A harvest whose program ends when asked and left a daemon that does not."""
    child = subprocess.Popen(
        [sys.executable, "-c", HARVEST, mark, str(grace), *python(FAMILY)], stdout=subprocess.PIPE, text=True
    )
    left: list[Process] = []
    try:
        assert child.stdout is not None
        said: dict[str, Process] = {}
        while len(said) < 4:
            line = child.stdout.readline()
            assert line
            if line.startswith("["):
                keeper, program = (Process(*pair) for pair in json.loads(line))
                said |= {"keeper": keeper, "started": program}
            else:
                word, number = line.split()
                process = TREE.find(int(number))
                assert process is not None
                said[word] = process
        left += said.values()
        assert said["started"] == said["program"]
        yield Harvest(mark, child, said["keeper"], said["program"], said["daemon"])
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        for process in left:
            TREE.send(process, signal.SIGKILL)


def wait_for(*processes: Process) -> None:
    """Wait until they have ended, whoever their parent is."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if there(process):
                assert select.select([descriptor], [], [], SECONDS)[0]
        finally:
            os.close(descriptor)


@pytest.fixture(name="mark")
def _mark(tmp_path: Path) -> str:
    return f"ledger-{os.getpid()}-{tmp_path.name}"


@pytest.fixture(name="bystander")
def _bystander(mark: str) -> Iterator[Process]:
    """Somebody whose mark only looks like ours."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "GPULSE_HARVEST_RUN": f"{mark}x/run-7"})
    try:
        process = TREE.find(child.pid)
        assert process is not None
        yield process
    finally:
        child.kill()
        child.wait()


@pytest.fixture(name="unmarked")
def _unmarked() -> Iterator[tuple[Process, Process]]:
    """A parent and its child without an environment, who are not below this process."""
    code = 'os.fork() == 0 and os.execve("/bin/sh", ["sh", "-c", "echo child $$; sleep 60 & wait"], {}); rest("parent")'
    with subprocess.Popen(["setsid", "--fork", *python(code)], stdout=subprocess.PIPE) as starter:
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


def test_a_keeper_ends_its_program_when_harvest_is_killed(mark: str) -> None:
    """Nobody needs to come back: the program is asked, the daemon killed after the grace, then the keeper goes."""

    with a_harvest(mark) as harvest:
        begun = monotonic()
        harvest.die()
        wait_for(harvest.program, harvest.daemon, harvest.keeper)

        assert monotonic() - begun < 1.0
        assert [] == orphans.find(mark, [harvest.keeper, harvest.program])


async def test_a_keeper_that_is_at_it_is_left_to_finish(mark: str, bystander: Process) -> None:
    """It is found with everything below it, and does its work within the grace; nobody else is touched."""

    with a_harvest(mark) as harvest:
        os.kill(harvest.keeper.pid, signal.SIGSTOP)
        harvest.die()
        found = orphans.find(mark, [])

        assert {
            (harvest.keeper, "run-7", True),
            (harvest.program, "run-7", False),
            (harvest.daemon, "run-7", False),
        } == {(orphan.process, orphan.run, orphan.is_keeper) for orphan in found}
        begun = monotonic()
        assert [] == await orphans.end(found, 5.0)
        assert monotonic() - begun < 2.0
        assert [False, False, False] == harvest.left()
        assert there(bystander)


async def test_what_lost_harvest_and_keeper_is_found_and_ended(mark: str, bystander: Process) -> None:
    """By its mark alone, though it has left its family: asked, and killed after the grace."""

    with a_harvest(mark) as harvest:
        os.kill(harvest.keeper.pid, signal.SIGSTOP)
        harvest.die()
        os.kill(harvest.keeper.pid, signal.SIGKILL)
        wait_for(harvest.keeper)
        found = orphans.find(mark, [])

        assert sorted([harvest.program, harvest.daemon]) == [orphan.process for orphan in found]
        assert [] == await orphans.end(found, 0.2)
        assert [False, False, False] == harvest.left()
        assert there(bystander)


async def test_a_keeper_that_does_nothing_is_killed_with_all_it_keeps(mark: str) -> None:
    """One whose grace is longer than ours is not waited for."""

    with a_harvest(mark, grace=600.0) as harvest:
        harvest.die()
        assert [] == await orphans.end(orphans.find(mark, [harvest.keeper]), 0.1)
        assert [False, False, False] == harvest.left()


def test_what_a_ledger_knows_counts_only_with_its_start(mark: str, bystander: Process) -> None:
    """A number that was used again is nobody of ours; one with the right start is, though it bears no mark."""

    reused = Process(bystander.pid, bystander.start_ticks - 1)

    assert [] == orphans.find(mark, [reused])
    assert not TREE.send(reused, signal.SIGKILL)
    assert there(bystander)


async def test_what_bears_no_mark_is_found_below_what_is_known(
    mark: str, unmarked: tuple[Process, Process]
) -> None:
    """A child that cleared its environment is an orphan because its parent is one."""

    parent, child = unmarked
    found = orphans.find(mark, [parent])

    assert {(parent, None), (child, None)} <= {(orphan.process, orphan.run) for orphan in found}
    assert [] == await orphans.end(found, 0.1)
    assert [False, False] == [there(parent), there(child)]


def test_this_process_and_what_it_runs_are_no_orphans(mark: str) -> None:
    """A mark below us is that of a run of our own."""

    with subprocess.Popen(["sleep", "60"], env={"GPULSE_HARVEST_RUN": f"{mark}/run-7"}) as child:
        assert [] == orphans.find(mark, [TREE.myself()])
        child.kill()
