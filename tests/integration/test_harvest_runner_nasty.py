from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
import pytest_asyncio

from gpulse.harvest.events import ProgramExited, ProgramGone
from tests.integration.harvest_runs import TREE, Lab, a_lab, python, there, wait_for

COUNTING = """
def count(word):
    def asked(number, frame):
        say(word, "asked")
        if word == "program":
            os._exit(0)
    signal.signal(signal.SIGTERM, asked)
    rest(word)
if os.fork() == 0:
    count("member")
count("daemon" if daemon() else "program")
"""
BOMB = """
end = time.monotonic() + 45
deaf()
say("bomb")
os.fork()
os.fork()
while time.monotonic() < end:
    if os.fork() == 0:
        os.setsid()
    else:
        os._exit(0)
say("nobody killed it")
"""
FILLING = """
os.set_blocking(1, False)
try:
    while True:
        os.write(1, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(1, True)
with open(sys.argv[1], "w") as ready:
    ready.write("full\\n")
os.write(1, b"x" * 4096)
"""
STRIKING = """
if daemon():
    deaf()
    rest("daemon")
os.fork() == 0 and rest("child")
signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getppid(), signal.SIGKILL))
rest("program")
"""

UNMARKED = """
daemon() and os.execve("/bin/sh", ["sh", "-c", "echo daemon $$; exec sleep 60"], {"A": "b"})
deaf()
rest("program")
"""


@pytest_asyncio.fixture(name="lab")
async def _lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with a_lab(tmp_path) as lab:
        yield lab


@pytest.fixture(name="own")
def _own() -> Iterator[subprocess.Popen[bytes]]:
    """A child that the runner did not start."""
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


async def test_what_a_program_forked_goes_with_it(lab: Lab) -> None:
    """Children, and daemons that left its group and session, are asked to end as the program is."""

    await lab.started('os.fork() == 0 and rest("child"); rest("daemon") if daemon() else rest("program")')
    processes = await lab.processes(3)
    lab.runner.signal("run", signal.SIGTERM)
    await lab.gone()

    assert {"child": False, "daemon": False, "program": False} == {w: there(p) for w, p in processes.items()}


async def test_nobody_is_asked_twice(lab: Lab) -> None:
    """The program, a deaf member of its group and a deaf daemon each get the signal once; then they are killed."""

    await lab.started(COUNTING)
    await lab.processes(3)
    lab.runner.signal("run", signal.SIGTERM)
    assert ProgramExited("run", 0) == await lab.next(ProgramExited)
    lab.runner.signal("run", signal.SIGTERM)
    assert ProgramGone("run") == await lab.next(ProgramGone)

    assert ["daemon asked", "member asked", "program asked"] == sorted(await lab.rest())


async def test_a_daemon_that_outlives_its_parent_is_ended(lab: Lab) -> None:
    """When the program ends, what it left is asked, and killed after the grace; only then is it gone."""

    await lab.started(
        'daemon() and (signal.signal(signal.SIGTERM, lambda *_: say("daemon", "asked")), rest("daemon"))\n'
        'say("program", os.getppid()); sys.exit(0)'
    )
    daemon = (await lab.processes(2))["daemon"]
    assert ProgramExited("run", 0) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)

    assert ["daemon asked"] == await lab.rest()
    assert not there(daemon)


async def test_a_program_that_ignores_the_signal_is_killed(lab: Lab) -> None:
    """It stays until the order to kill, and is gone with its daemon a moment after that."""

    await lab.started('deaf(); rest("daemon") if daemon() else rest("program")', grace_seconds=600.0)
    processes = await lab.processes(2)
    lab.runner.signal("run", signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert [True, True] == [there(process) for process in processes.values()]

    lab.runner.kill("run")
    await lab.gone()

    assert [False, False] == [there(process) for process in processes.values()]


async def test_a_supervisor_kills_by_itself_when_the_grace_is_over(lab: Lab) -> None:
    """When harvest hangs after the order to end, everything is killed in time; its own order to kill comes too late."""

    await lab.started('deaf(); rest("daemon") if daemon() else rest("program")', grace_seconds=0.2)
    processes = await lab.processes(2)
    begun = monotonic()
    lab.runner.signal("run", signal.SIGTERM)
    wait_for(*processes.values())

    assert 0.2 <= monotonic() - begun
    lab.runner.kill("run")
    assert ProgramExited("run", -signal.SIGKILL) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)


@pytest.mark.parametrize("supervisor", ["kept", "lost"])
async def test_a_fork_bomb_is_outrun(lab: Lab, supervisor: str) -> None:
    """Processes that fork, change their session and exit as fast as they can are killed to the last."""

    before = TREE.below(TREE.myself()).keys()
    started = await lab.started(BOMB, grace_seconds=600.0)
    await lab.line()
    await lab.next(ProgramExited)
    if supervisor == "lost":
        os.kill(started.supervisor.pid, signal.SIGKILL)
    lab.runner.kill("run")
    assert ProgramGone("run") == await lab.next(ProgramGone)

    assert [] == await lab.rest()
    await lab.runner.close(1.0)
    assert before == TREE.below(TREE.myself()).keys()


async def test_a_program_that_nobody_listens_to_can_be_ended(lab: Lab, tmp_path: Path) -> None:
    """One that hangs because its output is full goes when it is told."""

    full = tmp_path / "full"
    os.mkfifo(full)
    descriptor = os.open(full, os.O_RDONLY | os.O_NONBLOCK)
    try:
        started = await lab.started("", command=python(FILLING, str(lab.pipe)), log=str(full))
        assert "full" == await lab.line()
        lab.runner.signal("run", signal.SIGTERM)
        await lab.gone()
    finally:
        os.close(descriptor)

    assert not there(started.program)


async def test_a_program_without_descriptors_is_ended(lab: Lab) -> None:
    """It closed everything it had, and neither its supervisor nor we depend on that."""

    started = await lab.started('say("up"); os.closerange(0, 1024); signal.pause()')
    await lab.line()
    lab.runner.signal("run", signal.SIGTERM)
    await lab.gone()

    assert not there(started.program)


@pytest.mark.parametrize("who", ["program", "somebody"])
async def test_what_loses_its_supervisor_is_ended(lab: Lab, who: str) -> None:
    """A supervisor that is killed, by its own program or by others, leaves its whole tree to us: asked, then killed."""

    started = await lab.started(STRIKING)
    processes = await lab.processes(3)
    if who == "program":
        os.kill(started.program.pid, signal.SIGUSR1)
    else:
        os.kill(started.supervisor.pid, signal.SIGKILL)
    assert ProgramExited("run", -signal.SIGTERM) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)

    assert {"child": False, "daemon": False, "program": False} == {w: there(p) for w, p in processes.items()}


async def test_one_lost_supervisor_leaves_other_runs_alone(lab: Lab, own: subprocess.Popen[bytes]) -> None:
    """What another supervisor has is not touched, nor is a child that we started ourselves."""

    lost = await lab.started('deaf(); rest("lost")', run="lost")
    kept = await lab.started('deaf(); rest("kept")', run="kept")
    await lab.processes(2)
    os.kill(lost.supervisor.pid, signal.SIGKILL)
    await lab.gone("lost")

    assert [False, True, True] == [there(lost.program), there(kept.program), there(kept.supervisor)]
    assert own.poll() is None


@pytest.fixture(name="start_helper")
def _start_helper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a child that is no business of the runner, though it leads a session of its own."""
    helpers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        helpers.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return helpers[-1]

    yield start
    for helper in helpers:
        helper.kill()
        helper.wait()


async def test_only_what_is_provably_of_a_lost_supervisor_is_ended(
    lab: Lab, start_helper: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """What left its session and its mark is known when it was seen before; a helper of ours and another run are not it."""

    started = await lab.started(UNMARKED, run="lost")
    other = await lab.started('deaf(); rest("other")', run="other", grace_seconds=600.0)
    processes = await lab.processes(3)
    assert lab.runner.is_ours(processes["daemon"].pid)
    helper = start_helper()
    lab.runner.kill("lost")
    for supervisor in (started.supervisor, other.supervisor):
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(supervisor.pid, signal.SIGKILL)
    await lab.gone("lost")

    assert [False, False] == [there(processes[word]) for word in ("program", "daemon")]
    assert there(other.program)
    lab.runner.kill("other")
    await lab.gone("other")
    assert helper.poll() is None


async def test_a_supervisor_that_was_stopped_goes_on(lab: Lab) -> None:
    """An order wakes it."""

    started = await lab.started('rest("program")', grace_seconds=600.0)
    await lab.processes(1)
    os.kill(started.supervisor.pid, signal.SIGSTOP)
    lab.runner.signal("run", signal.SIGTERM)
    await lab.gone()

    assert not there(started.program)


async def test_a_supervisor_that_does_not_kill_is_killed_itself(lab: Lab) -> None:
    """When it is stopped as soon as it wakes, we do its work: daemons and all are gone soon after."""

    started = await lab.started(
        'deaf(); rest("daemon") if daemon() else rest("program")', grace_seconds=600.0
    )
    processes = await lab.processes(2)
    os.kill(started.supervisor.pid, signal.SIGSTOP)
    lab.runner.kill("run")
    os.kill(started.supervisor.pid, signal.SIGSTOP)
    await lab.gone()

    assert [False, False] == [there(process) for process in processes.values()]
