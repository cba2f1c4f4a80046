"""Reading stacks with py-spy: its JSON, its failures, and what happens when it hangs or writes too much."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.sources import python_stacks
from gpulse.sources.procfs import Roots
from gpulse.sources.python_stacks import (
    MAX_FRAMES,
    MAX_OUTPUT_BYTES,
    MAX_THREADS,
    PySpyResult,
    SourceLines,
    StackReader,
    decode_dump,
    explain_failure,
    yama_scope,
)
from tests.integration.cluster import until

FRAME = {"name": "step", "filename": "/home/u/train.py", "short_filename": "train.py", "line": 7}
THREAD = {"thread_name": "MainThread", "os_thread_id": 42, "active": True, "frames": [FRAME]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "frames",
                    "name",
                    "filename",
                    "short_filename",
                    "line",
                    "thread_name",
                    "os_thread_id",
                    "active",
                    "x",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=24,
)


def program(folder: Path, text: str) -> str:
    """Return an executable Python script."""
    path = folder / "py-spy"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def children() -> list[str]:
    """Return the child processes of this one, zombies included."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_dump_is_decoded() -> None:
    """Threads with their frames, innermost first."""
    (thread,) = decode_dump(json.dumps([THREAD]).encode())

    assert ("MainThread", 42, True) == thread[:3]
    assert (("/home/u/train.py", 7, "step", "train.py"),) == thread.frames


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_odd_output_gives_no_threads_or_complete_ones(output: bytes) -> None:
    """Whatever py-spy writes, nothing is raised, and what comes out has its types."""
    for thread in decode_dump(output):
        assert thread.frames
        assert isinstance(thread.name, str)
        for frame in thread.frames:
            assert isinstance(frame.file, str)
            assert isinstance(frame.line, int)


@given(JSON)
def test_a_complete_thread_is_found_beside_odd_ones(odd: object) -> None:
    """One bad entry costs that entry alone."""
    threads = decode_dump(json.dumps([odd, THREAD]).encode())

    assert "MainThread" == threads[-1].name


def test_output_is_bounded() -> None:
    """Thousands of threads with thousands of frames and long names become a few of each."""
    deep = {**THREAD, "frames": [{**FRAME, "name": "f" * 10_000}, *[FRAME] * (MAX_FRAMES + 9)]}
    threads = decode_dump(json.dumps([deep, *[THREAD] * (MAX_THREADS + 9)]).encode())

    assert MAX_THREADS == len(threads)
    assert MAX_FRAMES == len(threads[0].frames)
    assert 512 == len(threads[0].frames[0].function)


def test_deep_nesting_is_refused() -> None:
    """A document that would exhaust the parser's stack is no dump."""
    assert () == decode_dump(b"[" * 200_000)


def test_control_characters_do_not_pass() -> None:
    """Names of functions and files are chosen by the program that is read."""
    (thread,) = decode_dump(json.dumps([{**THREAD, "frames": [{**FRAME, "name": "a\x1b[2Jb"}]}]).encode())

    assert "a?[2Jb" == thread.frames[0].function


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ("Permission Denied: Try running again with elevated permissions", "not_permitted"),
        ("Error: Operation not permitted (os error 1)", "not_permitted"),
        ("Error: Failed to find python version from target process", "not_python"),
        ("Error: Failed to get process executable name. Check that the process is running.", "gone"),
        ("Error: Failed to get python thread 3", "failed"),
        ("", "failed"),
    ],
)
def test_failures_are_told_apart(errors: str, code: str) -> None:
    """By what py-spy says about a process that exists."""
    problem = explain_failure(os.getpid(), PySpyResult(1, b"", errors, 0.0), Roots())

    assert code == problem.code


def test_a_process_that_does_not_exist_is_gone() -> None:
    """Whatever py-spy says."""
    problem = explain_failure(2**22 + 1, PySpyResult(1, b"", "Permission Denied", 0.0), Roots())

    assert "gone" == problem.code


@pytest.mark.parametrize(
    ("user", "scope", "words"),
    [
        (1000, None, ["process 7 belongs to another user", "run gpulse, or its agent, as root"]),
        (4000, "1", ["ptrace_scope is 1", "run gpulse, or its agent, as root", "gpulse why -- COMMAND"]),
        (4000, "2", ["only root", "ptrace_scope is 2", "run gpulse, or its agent, as root"]),
        (4000, "3", ["ptrace_scope is 3", "reboot"]),
        (4000, None, ["not permitted here", "--cap-add SYS_PTRACE"]),
        (0, None, ["not even as root", "--cap-add SYS_PTRACE"]),
        (0, "3", ["ptrace_scope is 3"]),
    ],
)
def test_a_refusal_names_its_reason_and_a_remedy(
    user: int, scope: str | None, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, which depends on who we are and what the kernel permits."""
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    problem = python_stacks.explain_refusal(7, 4000, Roots(proc=str(tmp_path)))

    assert "not_permitted" == problem.code
    assert [] == [text for text in words if text not in problem.sentence]


def test_a_kernel_without_yama_has_no_scope(tmp_path: Path) -> None:
    """None is not 0: the file is missing."""
    assert yama_scope(Roots(proc=str(tmp_path))) is None


def test_without_py_spy_the_reason_is_how_to_install_it() -> None:
    """The command installs the extra."""
    stacks = StackReader(None).read(os.getpid(), time.time)

    assert stacks.problem is not None
    assert "no_py_spy" == stacks.problem.code
    assert "lines]" in stacks.problem.sentence


def test_a_py_spy_that_hangs_is_killed_and_reaped(tmp_path: Path) -> None:
    """At the deadline, and nothing is left of it."""
    before = children()
    hanging = program(tmp_path, "import time; time.sleep(600)")
    stacks = StackReader(hanging, deadline_seconds=0.3).read(os.getpid(), time.time)

    assert stacks.problem is not None
    assert f"py-spy did not return the stacks of process {os.getpid()} in time" == stacks.problem.reason
    assert before == children()


def test_a_py_spy_that_closes_its_output_and_stays_is_killed(tmp_path: Path) -> None:
    """The deadline is for the process, not for its output alone."""
    before = children()
    marker = tmp_path / "closed"
    text = f"import os, time; os.close(1); os.close(2); open({str(marker)!r}, 'w'); time.sleep(600)"
    spy = program(tmp_path, text)
    for seconds in (1.0, 4.0, 16.0, 60.0):  # a busy machine takes longer to start it
        stacks = StackReader(spy, deadline_seconds=seconds).read(os.getpid(), time.time)
        if marker.exists():
            break

    assert marker.exists()
    assert stacks.problem is not None
    assert before == children()


def test_a_py_spy_that_writes_without_end_is_killed(tmp_path: Path) -> None:
    """What it wrote is not kept, and it is not waited for."""
    before = children()
    text = f"import os\nwhile True: os.write(1, b'x' * {MAX_OUTPUT_BYTES})"
    stacks = StackReader(program(tmp_path, text), deadline_seconds=600.0).read(os.getpid(), time.time)

    assert stacks.problem is not None
    assert before == children()


def test_a_py_spy_that_cannot_be_started_is_a_problem(tmp_path: Path) -> None:
    """It is not an exception."""
    path = tmp_path / "py-spy"
    path.write_text("")
    stacks = StackReader(str(path)).read(os.getpid(), time.time)

    assert stacks.problem is not None
    assert "py-spy cannot be started: Permission denied" == stacks.problem.reason


def test_the_time_of_a_dump_is_its_middle(tmp_path: Path) -> None:
    """The process was read at some time in between."""
    ticks = iter([10.0, 12.0])
    whole = {**THREAD, "frames": [{**FRAME, "name": "<module>"}]}
    found = program(tmp_path, f"print({json.dumps(json.dumps([whole]))})")
    stacks = StackReader(found).read(os.getpid(), lambda: next(ticks))

    assert (11.0, None) == (stacks.time, stacks.problem)
    assert stacks.cpu_seconds > 0


@pytest.mark.parametrize(("torn", "reads"), [(1, 2), (9, 3)])
def test_a_stack_without_its_beginning_is_read_again(tmp_path: Path, torn: int, reads: int) -> None:
    """Up to three times; a process whose stacks never have one is read once from then on."""
    whole = {**THREAD, "frames": [FRAME, {**FRAME, "name": "<module>"}]}
    found = program(
        tmp_path,
        "import pathlib, sys\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "count = len(log.read_text()) if log.exists() else 0\n"
        "log.write_text('x' * (count + 1))\n"
        f"print({json.dumps(json.dumps([THREAD]))} if count < {torn} else {json.dumps(json.dumps([whole]))})",
    )
    reader = StackReader(found)
    first = reader.read(os.getpid(), time.time)

    assert (None, reads) == (first.problem, len((tmp_path / "log").read_text()))
    reader.read(os.getpid(), time.time)
    assert reads + 1 == len((tmp_path / "log").read_text())


def test_children_of_a_wrapper_end_with_it(tmp_path: Path) -> None:
    """A py-spy may be a script that starts the real one."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    hanging = program(
        tmp_path, f"import subprocess; subprocess.run(['sh', '-c', 'exec 9<>{fifo}; sleep 600'])"
    )
    StackReader(hanging, deadline_seconds=1.0).read(os.getpid(), time.time)

    until(lambda: not _is_open(fifo), "nobody has it open")


def _is_open(fifo: Path) -> bool:
    """Whether a process reads from a FIFO; one that was killed may take a moment to go."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def test_a_parent_that_ignores_the_end_of_children_costs_no_stacks(tmp_path: Path) -> None:
    """The kernel reaps them then, and their exit code is not known."""
    whole = {**THREAD, "frames": [{**FRAME, "name": "<module>"}]}
    found = program(tmp_path, f"print({json.dumps(json.dumps([whole]))})")
    code = (
        "import os, signal, time\n"
        "from gpulse.sources.python_stacks import StackReader\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"print(StackReader({found!r}).read(os.getpid(), time.time).problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "None\n" == done.stdout


def test_the_innermost_line_has_its_source(tmp_path: Path) -> None:
    """Where the file can be read; a pipe is not waited for."""
    source = tmp_path / "train.py"
    source.write_text("a = 1\n    loss.item()\n")
    os.mkfifo(tmp_path / "pipe.py")
    lines, pid = SourceLines(Roots()), os.getpid()

    assert "loss.item()" == lines.get(pid, str(source), 2)
    assert lines.get(pid, str(source), 3) is None
    assert lines.get(pid, str(source), 0) is None
    assert lines.get(pid, str(tmp_path / "pipe.py"), 1) is None
    assert lines.get(pid, "<string>", 1) is None


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    """The line is that of the file as it is now."""
    source = tmp_path / "train.py"
    lines = SourceLines(Roots())
    source.write_text("old()\n")
    os.utime(source, (1, 1))
    before = lines.get(os.getpid(), str(source), 1)
    source.write_text("new()\n")

    assert ("old()", "new()") == (before, lines.get(os.getpid(), str(source), 1))


def test_a_file_is_that_of_the_process(tmp_path: Path) -> None:
    """A process in a container has another file of the same name, or one that does not exist here."""
    here, proc = tmp_path / "train.py", tmp_path / "proc"
    here.write_text("host()\n")
    there = proc / "7/root" / str(here)[1:]
    there.parent.mkdir(parents=True)
    there.write_text("container()\n")
    (proc / "8/root").mkdir(parents=True)
    lines = SourceLines(Roots(proc=str(proc)))

    assert "container()" == lines.get(7, str(here), 1)
    assert lines.get(8, str(here), 1) is None


def test_where_a_root_is_not_permitted_the_file_here_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most processes have the same root directory as we."""
    source, opened = tmp_path / "train.py", os.open
    source.write_text("step()\n")

    def refuse(path: str, flags: int) -> int:
        if path.startswith("/proc/"):
            raise PermissionError
        return opened(path, flags)

    monkeypatch.setattr(os, "open", refuse)

    assert "step()" == SourceLines(Roots()).get(1, str(source), 1)


def test_few_lines_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was used the longest time ago is read again."""
    source, read = tmp_path / "train.py", os.read
    source.write_text("x\n" * 1000)
    reads: list[int] = []

    def count(descriptor: int, most: int) -> bytes:
        reads.append(most)
        return read(descriptor, most)

    monkeypatch.setattr(os, "read", count)
    lines = SourceLines(Roots())
    for line in (*range(1, 257), 1, 257, 1, 2):
        lines.get(os.getpid(), str(source), line)

    assert 256 + len((257, 2)) == len(reads)
