"""`gpulse record`, alone and beside a command."""

from __future__ import annotations

import csv
import gzip
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpulse import Recording
from tests.integration.commands import BIN, STUBBORN, TRACES, environment, pid_of_stubborn, run, terminal

PATIENT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
print("stopped", flush=True)
sys.exit(7)
"""
"""It waits for the signal instead of handling it: a handler could run inside the first print, or before the wait."""


def frames(path: Path) -> int:
    """How many frames a recording holds."""
    return len(list(Recording(path)))


def started(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """A recorder in the background."""
    return subprocess.Popen(
        [BIN / "gpulse", "record", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_recording_can_be_replayed(name: str, tmp_path: Path) -> None:
    """What was recorded is what is shown."""
    path = tmp_path / name
    ended = run("record", "-o", path, "--demo", "-t", "0.4", "-i", "0.1")
    shown = run("--replay", path)

    assert (0, "") == (ended.code, ended.out)
    assert ended.err.startswith("recorded 0.")
    assert "katherine" in shown.out


def test_tables_are_recorded_by_the_files_name(tmp_path: Path) -> None:
    """CSV and SQLite hold the same rows."""
    for name in ("run.csv", "run.sqlite"):
        assert 0 == run("record", "-q", "-o", tmp_path / name, "--demo", "-t", "0.2").code
    with (
        (tmp_path / "run.csv").open(newline="") as file,
        closing(sqlite3.connect(tmp_path / "run.sqlite")) as database,
    ):
        gpus = {row["gpu"] for row in csv.DictReader(file)}
        stored = database.execute("SELECT DISTINCT gpu FROM gpu").fetchall()

    assert {str(index) for index in range(8)} == gpus == {row[0] for row in stored}


@pytest.mark.parametrize(
    ("code", "script"), [(0, "exit 0"), (3, "exit 3"), (143, "kill -TERM $$"), (137, "kill -KILL $$")]
)
def test_the_commands_exit_code_is_ours(code: int, script: str, tmp_path: Path) -> None:
    """A signal counts as 128 and its number, as in a shell."""
    path = tmp_path / "run.jsonl"
    ended = run("record", "-o", path, "--", "sh", "-c", f"sleep 0.15; echo done; {script}")

    assert (code, "done\n") == (ended.code, ended.out)
    assert frames(path) >= 1


@pytest.mark.parametrize(("code", "command"), [(127, "nosuchcommand"), (126, "/etc/passwd")])
def test_a_command_that_cannot_start_leaves_no_file(code: int, command: str, tmp_path: Path) -> None:
    """So that the corrected command line works at once."""
    ended = run("record", "-o", tmp_path / "run.jsonl", "--", command)

    assert code == ended.code
    assert f"gpulse: cannot run {command}: " in ended.err
    assert [] == list(tmp_path.iterdir())


def test_an_existing_file_is_refused_before_the_command_runs(tmp_path: Path) -> None:
    """Nothing runs, nothing is lost."""
    path = tmp_path / "run.jsonl"
    path.write_text("precious")
    ended = run("record", "-o", path, "--", "touch", tmp_path / "ran")

    assert (1, f"gpulse: {path} already exists\n  try: choose another name, or remove the file first\n") == (
        ended.code,
        ended.err,
    )
    assert [path] == list(tmp_path.iterdir())


def test_a_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    """With the system's reason, and what to do."""
    path = tmp_path / "no" / "run.jsonl"
    ended = run("record", "-o", path, "--demo", "-t", "1")

    assert (1, "") == (ended.code, ended.out)
    assert ended.err.startswith(
        f"gpulse: cannot create {path}: No such file or directory\n  try: check the path"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_polite_kill_finish_the_file(number: signal.Signals, tmp_path: Path) -> None:
    """Every frame up to then can be read, and nothing says that it was cut off."""
    path = tmp_path / "run.jsonl.gz"
    with terminal("record", "-o", path, "--demo", "-i", "0.05") as recorder:
        recorder.until(b"recording ")
        recorder.child.send_signal(number)
        seen = recorder.to_the_end()

    assert 0 == recorder.child.returncode
    assert b"\r\x1b[Krecorded " in seen
    assert [()] == list({frame.health for frame in Recording(path)})


def test_a_polite_kill_reaches_the_command(tmp_path: Path) -> None:
    """The recorder ends with its command, not before it."""
    path = tmp_path / "run.jsonl"
    recorder = started("-o", path, "--", sys.executable, "-c", PATIENT)
    assert recorder.stdout is not None
    assert b"ready\n" == recorder.stdout.readline()
    recorder.send_signal(signal.SIGTERM)
    out, _ = recorder.communicate(timeout=60)

    assert (7, b"stopped\n") == (recorder.returncode, out)


@pytest.mark.parametrize("length", [(), ("-t", "0.2")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_recording_alone(
    number: signal.Signals, length: tuple[str, ...], tmp_path: Path
) -> None:
    """The file is whole, and a command that ignores both goes on."""
    path, err = tmp_path / "run.jsonl.gz", tmp_path / "err"
    with err.open("wb") as stderr:
        recorder = subprocess.Popen(
            [BIN / "gpulse", "record", "-o", path, *length, "--", *STUBBORN, tmp_path / "pid"],
            env=environment(),
            stdout=stderr,
            stderr=stderr,
        )
    pid = pid_of_stubborn(tmp_path / "pid")
    try:
        recorder.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            recorder.wait(1.0)
        recorder.send_signal(number)

        assert 128 + number == recorder.wait(60)
        assert f"gpulse: the command (pid {pid}) is still running\nrecorded " in err.read_text()
        assert not any(entry.source == "recording" for frame in Recording(path) for entry in frame.health)
        os.kill(pid, 0)  # it is there
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_full_disk_does_not_end_the_command(tmp_path: Path) -> None:
    """The training is worth more than its recording; the code says that something failed."""
    path = tmp_path / "run.jsonl"
    inner = "trap '' XFSZ; sleep 1.6; echo trained"
    script = f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f 1; trap '' XFSZ; exec gpulse record -i 0.05 -o '{path}' -- sh -c \"{inner}\""
    env = environment({"PYTHONDONTWRITEBYTECODE": "1"})  # the limit would cut our own bytecode off, too
    ended = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)

    assert (1, "trained\n") == (ended.returncode, ended.stdout)
    assert [f"gpulse: cannot write {path}: File too large; the command continues"] == [
        line for line in ended.stderr.splitlines() if "cannot write" in line
    ]


def test_the_commands_code_is_ours_after_a_full_disk_too(tmp_path: Path) -> None:
    """A recording that failed does not hide how the training ended."""
    path = tmp_path / "run.jsonl"
    script = f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f 1; trap '' XFSZ; exec gpulse record -i 0.05 -o '{path}' -- sh -c 'sleep 1.6; exit 9'"
    env = environment({"PYTHONDONTWRITEBYTECODE": "1"})
    ended = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)

    assert 9 == ended.returncode
    assert 1 == ended.stderr.count("cannot write")


def test_the_last_line_is_about_the_recording_not_the_command(tmp_path: Path) -> None:
    """A command that goes on after -t does not make the recording longer."""
    ended = run("record", "-o", tmp_path / "run.jsonl", "-t", "0.3", "--", "sleep", "1.6")

    assert 0 == ended.code
    assert ended.err.startswith("recorded 0.")


def test_a_recording_of_a_recording_ends_with_it(tmp_path: Path) -> None:
    """The older trace format becomes ours."""
    path, trace = tmp_path / "short.jsonl", tmp_path / "trace.jsonl"
    trace.write_bytes(
        b"".join(gzip.decompress((TRACES / "gpu_shared.jsonl.gz").read_bytes()).splitlines(True)[:4])
    )

    assert 0 == run("record", "-o", path, "--replay", trace, "-i", "0.1").code
    assert frames(path) >= 1


def test_progress_is_for_people_alone(tmp_path: Path) -> None:
    """On a terminal one line is rewritten; in a log there is only the last word, and none with -q."""
    with terminal("record", "-o", tmp_path / "a.jsonl", "--demo", "-t", "1.2") as shown:
        seen = shown.to_the_end()
    logged = run("record", "-o", tmp_path / "b.jsonl", "--demo", "-t", "0.2").err
    quiet = run("record", "-q", "-o", tmp_path / "c.jsonl", "--demo", "-t", "0.2").err

    assert b"\r\x1b[Krecording " in seen
    assert (1, "") == (len(logged.splitlines()), quiet)
