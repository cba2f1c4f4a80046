from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

import pytest

from gpulse.model.process import ProcessReading
from gpulse.sources import procfs
from gpulse.sources.processes import ProcessReader
from tests.unit.trees import grow, pid_stat

FAMILY = """
import os, sys, time
for _ in range(2):
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(1, b"%d\\n" % os.getpid())
        else:
            os.write(1, b"%d\\n" % os.getpid())
        time.sleep(600)
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
RENAMED = """
import sys, time
with open("/proc/self/comm", "wb") as file:
    file.write(b"a) \\xff (b")
print("ready", flush=True)
time.sleep(600)
"""
BUSY = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""
GROWING = """
import os, sys, threading, time
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            threading.Thread(target=time.sleep, args=(600,)).start()
            print(os.getpid(), flush=True)
            time.sleep(600)
    else:
        os.kill(child, 9)
        os.wait()
        print("ended", flush=True)
"""
ZOMBIE = """
import os, time
child = os.fork()
if child == 0: os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(child, flush=True)
time.sleep(600)
"""
AS_NOBODY = """
import os
from gpulse.sources import processes
processes._HOST_PID_NAMESPACES = {os.readlink("/proc/self/ns/pid")}
import os, sys, time
from gpulse.sources.processes import ProcessReader
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
reading = ProcessReader().read(time.time(), [int(sys.argv[1])])[0][0]
owner, values = reading.identity.owner.user, reading.values
print(owner, reading.identity.command[-1:], reading.state is not None, "read_bytes_total" in values, "host_memory_bytes" in values)
"""


@contextmanager
def running(*command: str | bytes, lines: int = 1) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes]]]:
    """A process in a group of its own that has written so many lines, ended with all its children."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert child.stdout is not None
        yield child, [child.stdout.readline().strip() for _ in range(lines)]
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def python(code: str, *arguments: str | bytes) -> list[str | bytes]:
    """The command of a Python program."""
    return [sys.executable, "-c", code, *arguments]


def read(pid: int, *, threads: bool = False) -> tuple[ProcessReading, ...]:
    """One reading of a process and its descendants."""
    return ProcessReader(threads=threads).read(time(), [pid])[0]


def test_a_family_of_processes_is_found() -> None:
    """A parent with children and grandchildren is read as a whole, and nothing else is."""

    with running(*python(FAMILY), lines=5) as (child, lines):
        readings = read(child.pid)

    assert {int(line) for line in lines} == {reading.pid for reading in readings}
    assert [child.pid] == [reading.pid for reading in readings if reading.on_gpu]
    assert {child.pid} < {reading.identity.parent_pid for reading in readings}


def test_processes_that_come_and_go_are_noticed() -> None:
    """A child that starts later is found a second later, once and without its threads, and forgotten when it ended."""
    child = subprocess.Popen(
        python(GROWING), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: PT018
    family, began, found = procfs.ProcessDescendants(procfs.Roots()), time(), []

    with child:
        found.append(family.descendants(began, [child.pid]))
        child.stdin.write("fork\n")
        grandchild = int(child.stdout.readline())
        found.append(family.descendants(began + 1.1, [child.pid]))
        child.stdin.write("end\n")
        child.stdout.readline()
        found.append(family.descendants(began + 2.2, [child.pid]))
        child.stdin.close()

    assert [[], [grandchild], []] == found


def test_a_process_says_who_and_since_when() -> None:
    """Owner, command and start time of a real process are right."""

    before = time()
    with running(*python("print(flush=True); import time; time.sleep(600)", "--epochs=3")) as (child, _):
        identity = read(child.pid)[0].identity

    assert (os.getpid(), os.getuid()) == (identity.parent_pid, identity.owner.uid)
    assert "--epochs=3" == identity.command[-1]
    assert identity.start_time is not None
    assert abs(identity.start_time - before) < 3


def test_its_own_values_are_all_readable() -> None:
    """For a process of the same user, nothing is refused."""

    values = read(os.getpid())[0].values

    assert values["host_memory_bytes"] > 1_000_000
    assert len(os.sched_getaffinity(0)) == values["cpus_allowed"]
    assert {"run_wait_seconds_total", "read_chars_total", "read_bytes_total"} <= values.keys()
    assert values["cpu_user_seconds_total"] <= sum(os.times()[:2]) + 0.02


def test_a_name_that_is_not_text_is_read() -> None:
    """A process may call itself anything; what is not UTF-8 is replaced."""

    with running(*python(RENAMED)) as (child, _):
        reading = read(child.pid)[0]

    assert "a) \ufffd (b" == reading.identity.name


def test_escape_sequences_in_a_command_line_are_kept() -> None:
    """Control characters are the business of whoever prints them."""

    nasty = b"\x1b[2J\x1b]0;owned\x07\n\xff"
    with running(*python("print(flush=True); import time; time.sleep(600)", nasty)) as (child, _):
        command = read(child.pid)[0].identity.command

    assert "\x1b[2J\x1b]0;owned\x07\n\ufffd" == command[-1]


def test_a_process_that_ends_between_two_reads_is_absent() -> None:
    """Neither an error nor an entry: it is simply gone."""

    reader = ProcessReader()
    with running(*python("print(flush=True); import time; time.sleep(600)")) as (child, _):
        before = reader.read(time(), [child.pid])
    after = reader.read(time(), [child.pid])

    assert [child.pid] == [reading.pid for reading in before[0]]
    assert ((), (), []) == after


def test_a_pid_that_nobody_has_is_not_visible() -> None:
    """A pid beyond all that the kernel hands out can only be somebody else's."""

    readings, _, health = ProcessReader().read(time(), [1 << 22])

    assert [(1 << 22, None, {})] == [(reading.pid, reading.state, reading.values) for reading in readings]
    assert ["not_visible"] == [entry.code for entry in health]


def test_a_zombie_is_shown_as_dead() -> None:
    """A process that nobody waited for has a state and a name and nothing else of interest."""

    with running(*python(ZOMBIE)) as (child, lines):
        readings = {reading.pid: reading for reading in read(child.pid)}

    dead = readings[int(lines[0])]
    assert ("Z", (), 0) == (dead.state, dead.identity.command, dead.values["host_memory_bytes"])


def test_a_program_that_calls_exec_is_known_by_its_new_name() -> None:
    """The same process becomes another program: the name and the command follow at once."""

    reader = ProcessReader()
    code = "import os, sys; print(flush=True); sys.stdin.read(1); os.execvp('sleep', ['sleep', '600'])"
    child = subprocess.Popen(python(code), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        now = time() + 100
        before = reader.read(now, [child.pid])[0][0].identity
        child.stdin.write(b"x")
        child.stdin.close()
        after = before
        while after.name != "sleep":
            after = reader.read(now, [child.pid])[0][0].identity
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()

    assert (before.pid, before.start_time) == (after.pid, after.start_time)
    assert ("sleep", "600") == after.command


@pytest.mark.parametrize("state", [b"R", b"D"])
def test_in_the_middle_of_exec_a_process_is_still_the_program_before(tmp_path: Path, state: bytes) -> None:
    """Its new name is there before its new command line: until both are, neither is believed."""

    now = time()
    bash = {"proc/7/stat": pid_stat(7, comm=b"bash"), "proc/7/cmdline": b"bash\0"}
    reader = ProcessReader(grow(tmp_path, bash))
    seen = [reader.read(now, [7])[0][0].identity]
    grow(tmp_path, {"proc/7/stat": pid_stat(7, comm=b"python3", state=state), "proc/7/cmdline": b""})
    seen.append(reader.read(now + 1, [7])[0][0].identity)
    grow(tmp_path, {"proc/7/stat": pid_stat(7, comm=b"python3"), "proc/7/cmdline": b"python3\0train.py\0"})
    seen.append(reader.read(now + 1.1, [7])[0][0].identity)

    assert [("bash", ("bash",)), ("bash", ("bash",)), ("python3", ("python3", "train.py"))] == [
        (identity.name, identity.command) for identity in seen
    ]


def test_a_process_first_met_in_the_middle_of_exec_is_looked_at_again_soon(tmp_path: Path) -> None:
    """An empty command line is asked for again after a second, and then believed for half a minute."""

    now = time()
    reader = ProcessReader(grow(tmp_path, {"proc/7/stat": pid_stat(7), "proc/7/cmdline": b""}))
    commands = [reader.read(now, [7])[0][0].identity.command]
    grow(tmp_path, {"proc/7/cmdline": b"python3\0"})
    commands.append(reader.read(now + 1, [7])[0][0].identity.command)

    assert [(), ("python3",)] == commands


def test_a_process_that_erased_its_command_line_has_none(tmp_path: Path) -> None:
    """It is not taken for one in the middle of exec for longer than a second, nor asked over and over."""

    now = time()
    reader = ProcessReader(grow(tmp_path, {"proc/7/stat": pid_stat(7), "proc/7/cmdline": b"python3\0"}))
    reader.read(now, [7])
    grow(tmp_path, {"proc/7/stat": pid_stat(7, comm=b"hidden"), "proc/7/cmdline": b""})
    reader.read(now + 1, [7])
    erased = reader.read(now + 2, [7])[0][0].identity
    grow(tmp_path, {"proc/7/cmdline": b"shown\0"})
    commands = [reader.read(now + 2 + later, [7])[0][0].identity.command for later in (20, 30)]

    assert ("hidden", ()) == (erased.name, erased.command)
    assert [(), ("shown",)] == commands


def test_the_busy_thread_is_found() -> None:
    """The main thread comes first, then the one that works."""

    with running(*python(BUSY)) as (child, _):
        reader = ProcessReader(threads=True)
        now = time()
        threads = reader.read(now, [child.pid])[0][0].threads
        while len(threads) < 2 or threads[1].cpu_seconds_total < 0.1:
            now += 1
            threads = reader.read(now, [child.pid])[0][0].threads

    assert child.pid == threads[0].tid
    assert "R" == threads[1].state
    assert threads[1].cpu_seconds_total > threads[0].cpu_seconds_total


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_sees_of_a_process_what_the_kernel_shows_to_everyone() -> None:
    """Owner, command, state and memory are public; the traffic to disks is not."""

    with running(*python("print(flush=True); import time; time.sleep(600)", "600")) as (child, _):
        seen = subprocess.run(python(AS_NOBODY, str(child.pid)), capture_output=True, check=True, text=True)

    assert "root ('600',) True False True\n" == seen.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_root_sees_all_of_another_users_process() -> None:
    """A process of nobody's is read by root as if it were its own."""

    with running("runuser", "-u", "nobody", "--", "sh", "-c", "echo; sleep 600") as (child, _):
        readings = read(child.pid)

    theirs = [reading for reading in readings if reading.identity.owner.user == "nobody"]
    assert theirs
    assert all("read_bytes_total" in reading.values for reading in theirs)
