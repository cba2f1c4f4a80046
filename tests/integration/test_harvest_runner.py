from __future__ import annotations

import asyncio
import os
import pwd
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio

from gpulse.harvest.events import ProgramExited, ProgramGone, ProgramStarted, ProgramStartFailed
from gpulse.harvest.supervise import runner
from gpulse.harvest.supervise.process_tree import is_subreaper
from tests.integration.harvest_runs import MARK, SECONDS, Lab, a_lab, python, there

FACTS = """
say("fds", *sorted(os.listdir("/proc/self/fd"), key=int)[:-1])
say("stdin", os.readlink("/proc/self/fd/0"))
for line in open("/proc/self/status"):
    if line.startswith(("SigBlk", "SigIgn")):
        say(line.split()[0], int(line.split()[1], 16) & ~(3 << 31))  # two that the C library keeps for itself
say("leads", os.getsid(0) == os.getpgrp() == os.getpid())
say("here", os.getcwd())
say("marks", os.environ["GPULSE_HARVEST_RUN"], os.environ["GPULSE_HARVEST_PROGRAM"])
say("own", os.environ["OWN"], os.environ["GIVEN"])
say("end")
sys.exit(3)
"""
LIMITS = """
say(os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0)))
import ctypes
say(ctypes.CDLL(None).syscall(ctypes.c_long({"x86_64": 252, "aarch64": 31}[os.uname().machine]), 1, 0) >> 13)
"""

HOPELESS = """
sys.stdin.readline()
say('{"started": 1, "ticks": 1}')
for line in sys.stdin:
    say('{"killing": true}')
"""


@pytest_asyncio.fixture(name="lab")
async def _lab(tmp_path: Path) -> AsyncIterator[Lab]:
    async with a_lab(tmp_path) as lab:
        yield lab


async def lines_until(lab: Lab, last: str) -> dict[str, str]:
    """What a program wrote, by the first word of each line."""
    found: dict[str, str] = {}
    while (line := await lab.line()) != last:
        word, _, rest = line.partition(" ")
        found[word] = rest
    return found


async def test_a_program_finds_what_it_would_find_in_a_shell(lab: Lab, tmp_path: Path) -> None:
    """It leads a session, has three descriptors and all its signals, and its status is told before it is gone."""

    await lab.started(
        FACTS,
        directory=str(tmp_path),
        variables={**os.environ, "GIVEN": "a", "OWN": "old"},
        environment=(("OWN", "b"),),
    )
    facts = await lines_until(lab, "end")

    assert {
        "fds": "0 1 2",
        "stdin": "/dev/null",
        "SigBlk:": "0",
        "SigIgn:": str(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1),  # Python's own
        "leads": "True",
        "here": str(tmp_path),
        "marks": f"{MARK}/run work",
        "own": "b a",
    } == facts
    assert ProgramExited("run", 3) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)


async def test_the_environment_may_be_large_and_odd(lab: Lab) -> None:
    """Bytes that are no text and hundreds of kilobytes come through; the program's own variables win."""

    code = (
        'say(os.environ["OWN"], len(os.environ["A"] + os.environ["C"]), os.environb[b"ODD"] == b"\\xff\\n")'
    )
    large = {name: name * 100_000 for name in "ABC"}
    odd = ("ODD", os.fsdecode(b"\xff\n"))
    lab.start(code, variables={**large, "OWN": "old"}, environment=(("OWN", "new"), odd))

    assert "new 200000 True" == await lab.line()
    await lab.gone()


async def test_output_is_appended_to_the_log(lab: Lab, tmp_path: Path) -> None:
    """What a log holds stays in it; both outputs go there."""

    log = tmp_path / "log"
    log.write_text("before\n")
    await lab.started('say("out"); os.write(2, b"error\\n")', log=str(log))
    await lab.gone()

    assert "before\nout\nerror\n" == log.read_text()


@pytest.mark.skipif(
    os.uname().machine not in {"x86_64", "aarch64"}, reason="the program asks by number of call"
)
async def test_limits_apply_to_the_program(lab: Lab) -> None:
    """Nice, ionice and CPUs are those of the configuration."""

    cpu = min(os.sched_getaffinity(0))
    nice = min(19, os.nice(0) + 7)  # only root may be less nice than whoever runs the tests
    await lab.started(LIMITS, nice=nice, ionice="idle", cpus=(cpu,))

    assert f"{nice} [{cpu}]" == await lab.line()
    assert "3" == await lab.line()
    await lab.gone()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
async def test_a_program_of_another_user_is_ended_like_any() -> None:
    """It runs as that user, in their groups and with their home, and goes when it is told."""

    nobody = pwd.getpwnam("nobody")
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)  # that of other tests is closed to others
        async with a_lab(Path(folder)) as lab:
            command = ("sh", "-c", "echo $(id -u) $(id -g) $(id -G) $HOME $USER; exec sleep 60")
            started = await lab.started("", command=command, user="nobody", directory="/")

            groups = os.getgrouplist("nobody", nobody.pw_gid)
            expected = [nobody.pw_uid, nobody.pw_gid, *groups, nobody.pw_dir, "nobody"]
            assert " ".join(map(str, expected)) == await lab.line()
            lab.runner.signal("run", signal.SIGTERM)
            await lab.gone()
            assert not there(started.program)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"command": ("gpulse-no-such-program",)},
            (
                "cannot run gpulse-no-such-program: No such file or directory; "
                "it is not in any directory of PATH; use its full path"
            ),
        ),
        ({"command": ("/etc/passwd",)}, "cannot run /etc/passwd: Permission denied; chmod +x /etc/passwd"),
        (
            {"directory": "/no/such/directory"},
            "cannot enter the working directory /no/such/directory: No such file or directory",
        ),
        ({"log": "/"}, "cannot write the log file /: Is a directory"),
        ({"user": "gpulse-no-such-user"}, "there is no user 'gpulse-no-such-user'"),
        ({"ionice": "fast"}, "'fast' is not a valid I/O priority"),
        ({"cpus": (4095,)}, "cannot set the CPU affinity: Invalid argument"),
        ({"command": ("/bin/sh", "\0")}, "cannot run /bin/sh: embedded null byte"),
    ],
)
async def test_a_program_that_cannot_be_started_says_why(lab: Lab, options: dict[str, Any], why: str) -> None:
    """The reason is told, nothing else is, and nothing is left."""

    lab.start("", **options)

    assert ProgramStartFailed("run", why) == await lab.next(ProgramStartFailed)
    await lab.runner.close(1.0)
    assert lab.told.empty()


async def test_a_signal_to_a_program_that_is_being_started_is_not_lost(lab: Lab) -> None:
    """It is asked to end as soon as it is there."""

    lab.start('rest("up")')
    lab.runner.signal("run", signal.SIGTERM)

    await lab.next(ProgramStarted)
    assert ProgramExited("run", -signal.SIGTERM) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)


async def test_a_program_that_obeys_is_gone_at_once(lab: Lab) -> None:
    """From the order to the news that nothing is left no grace is waited for, which would be ten minutes."""

    await lab.started('rest("up")', grace_seconds=600.0)
    await lab.processes(1)
    lab.runner.signal("run", signal.SIGTERM)
    await lab.gone()


async def test_own_processes_are_recognized(lab: Lab) -> None:
    """A supervisor, its program and the program's daemons are ours, our own parent is not."""

    started = await lab.started('rest("daemon") if daemon() else rest("program")')
    processes = await lab.processes(2)

    assert started.program == processes["program"]
    ours = [os.getpid(), started.supervisor.pid, processes["program"].pid, processes["daemon"].pid]
    assert [True] * 8 == [lab.runner.is_ours(pid) for pid in ours * 2]
    assert [False] * 6 == [lab.runner.is_ours(pid) for pid in [os.getppid(), 1, 2**22 + 1] * 2]


async def test_closing_ends_everything(lab: Lab) -> None:
    """Programs are asked, and killed after the grace; this process is no reaper of others any more."""

    was = is_subreaper()
    await lab.started('rest("obeys")', run="obeys")
    await lab.started('deaf(); rest("deaf")', run="deaf")
    processes = await lab.processes(2)
    assert is_subreaper()

    await lab.runner.close(0.1)

    assert [False, False] == [there(process) for process in processes.values()]
    assert {
        ProgramExited("obeys", -signal.SIGTERM),
        ProgramGone("obeys"),
        ProgramExited("deaf", -signal.SIGKILL),
        ProgramGone("deaf"),
    } == {lab.told.get_nowait() for _ in range(lab.told.qsize())}
    assert was == is_subreaper()
    lab.start("", run="late")
    assert ProgramStartFailed("late", "harvest is shutting down") == await lab.next(ProgramStartFailed)


@pytest.fixture(name="hopeless")
def _hopeless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Supervisors that do what they are told without ever coming to an end, as if the driver held what they keep."""
    supervisors = []

    def start_supervisor(_environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            supervisors.append(
                subprocess.Popen(python(HOPELESS), stdin=theirs.fileno(), stdout=theirs.fileno())
            )
        return supervisors[-1], ours

    monkeypatch.setattr(runner, "start_supervisor", start_supervisor)
    monkeypatch.setattr(runner, "_CLOSE_SECONDS", 0.7)
    yield supervisors
    for supervisor in supervisors:
        supervisor.kill()
        supervisor.wait()


async def test_closing_does_not_wait_for_what_cannot_be_killed(
    lab: Lab, hopeless: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before, twice: no grace is waited for, its supervisor is left alone with it, and that was all."""

    await lab.started("")
    lab.runner.kill("run")
    lab.runner.kill("run")
    async with asyncio.timeout(SECONDS):
        await lab.runner.close(600.0)
        monkeypatch.setattr(runner, "_CLOSE_SECONDS", 600.0)
        await lab.runner.close(600.0)

    assert lab.told.empty()
    assert 0 == hopeless[0].wait(SECONDS)


async def test_closing_after_a_kill_waits_for_the_end(lab: Lab) -> None:
    """A program that was killed twice is gone once, and is gone when the runner is closed."""

    started = await lab.started('deaf(); rest("deaf")', grace_seconds=600.0)
    await lab.processes(1)
    lab.runner.kill("run")
    lab.runner.kill("run")
    await lab.runner.close(600.0)

    assert [False, False] == [there(started.supervisor), there(started.program)]
    assert ProgramExited("run", -signal.SIGKILL) == await lab.next(ProgramExited)
    assert ProgramGone("run") == await lab.next(ProgramGone)
    assert lab.told.empty()


async def test_two_runs_have_two_names(lab: Lab) -> None:
    """A second run under the name of one that is there is refused, and the first goes on."""

    first = await lab.started('rest("up")')
    lab.start('rest("up")')

    assert ProgramStartFailed("run", "run is already running") == await lab.next(ProgramStartFailed)
    assert there(first.program)
    lab.runner.signal("no such run", signal.SIGTERM)
    lab.runner.kill("no such run")
