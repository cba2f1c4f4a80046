"""Errors say what happened, why and what to try; they end with the right code and without a traceback."""

from __future__ import annotations

import gzip
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.commands import BIN, TRACES, environment, run

TRACE = TRACES / "gpu_shared.jsonl.gz"


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        ("there is no option '--nosuch'", "--nosuch"),
        ("there is no command 'nosuch'; the commands are: ", "nosuch"),
        ("--json and --csv cannot be used together", "--json --csv --demo"),
        ("--demo and --replay cannot be used together", "--demo --replay x"),
        ("--at shows one moment of a recording", "--at 3 --demo"),
        ("--at shows one moment of a recording", "--replay x --at 3 -w"),
        ("--at takes seconds after the recording's start", "--replay x --at soon"),
        ("--at takes seconds after the recording's start", "--replay x --at nan"),
        ("--at takes seconds after the recording's start", "--replay x --at=-1"),
        ("there is no GPU 99; available: 0-7", "--demo --gpus 99"),
        ("--gpus takes indices and UUIDs", "--demo --gpus foo"),
        ("CSV output holds only one table", "--demo --csv -c -d"),
        ("0 is not a positive number of seconds", "--demo -w 0"),
        ("-1 is not a positive number of seconds", "record -o x.jsonl --interval=-1"),
        ("nan is not a positive number of seconds", "--demo -w nan"),
        ("inf is not a positive number of seconds", "--demo -w inf"),
        ("the sampling interval must be at least 0.05 s, not 0.001 s", "--demo -w 0.001"),
        ("0 is not a positive number of seconds", "record -o x.jsonl -i 0"),
        ("inf is not a positive number of seconds", "record -o x.jsonl -i inf"),
        ("nan is not a positive number of seconds", "record -o x.jsonl -t nan"),
        ("Missing option '-o'", "record"),
        ("cannot tell the format of x.parquet from its extension", "record -o x.parquet --demo"),
        ("--demo and --replay cannot be used with a COMMAND", "record -o x.jsonl --demo -- true"),
        ("CSV output holds only one table", "--demo --csv -a"),
        ("`gpulse top` has no option --all; only `gpulse` without a command has it", "-a top"),
        ("--gpus must come after the command: gpulse top --gpus", "--gpus 0 top"),
        ("--json must come after the command: gpulse doctor --json", "--json doctor"),
    ],
)
def test_wrong_usage_ends_with_2(says: str, arguments: str, tmp_path: Path) -> None:
    """One message, one thing to try, nothing on standard output, no file left behind."""
    ended = run(*arguments.split(), cwd=tmp_path)

    assert (2, "") == (ended.code, ended.out)
    assert says in ended.err
    assert "\n  try: " in ended.err
    assert "Traceback" not in ended.err
    assert [] == list(tmp_path.iterdir())


def test_a_verbs_usage_error_points_to_the_verbs_help() -> None:
    """The help of `gpulse` would not say how `record` is used."""

    assert "try: gpulse record --help" in run("record").err


@pytest.mark.parametrize(
    ("says", "content"),
    [
        ("is empty", b""),
        ("is not a recording", b"garbage\n"),
        ("is not a recording", b"\x00\xff\xfe" * 100),
        ("is not a recording", b"[1, 2]\n"),
        ("is damaged", gzip.compress(b'{"trace": 1}', mtime=0)[:12]),
        (
            "version 99; this version of gpulse reads version 1",
            b'{"format": "gpulse-recording", "version": 99}\n',
        ),
        ("contains no frames", b'{"format": "gpulse-recording", "version": 1}\n'),
        (
            "line 2 is damaged: this is not a line of a gpulse recording\n  try: ",
            b'{"format": "gpulse-recording", "version": 1}\n{"frame": {}}\n{"frame": {}}\n',
        ),
    ],
)
def test_what_is_no_recording_ends_with_1(says: str, content: bytes, tmp_path: Path) -> None:
    """The file is named with what is wrong about it."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    ended = run("--replay", path)

    assert (1, "") == (ended.code, ended.out)
    assert f"gpulse: {path}" in ended.err
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_a_missing_recording_ends_with_1() -> None:
    """With the system's reason, and what to do."""
    ended = run("--replay", "nosuch")

    assert (1, "") == (ended.code, ended.out)
    assert ended.err.startswith(
        "gpulse: cannot read nosuch: No such file or directory\n  try: check the path"
    )


def test_a_recording_that_ends_early_is_shown_up_to_there(tmp_path: Path) -> None:
    """Its writer was killed: every whole frame counts, and the look says so."""
    path = tmp_path / "run.jsonl.gz"
    path.write_bytes(TRACE.read_bytes()[:5000])
    ended = run("--replay", path)

    assert 0 == ended.code
    assert "H200" in ended.out
    assert "the recording ends early" in ended.out


def test_a_moment_after_the_end_is_a_usage_error() -> None:
    """With the recording's length."""
    ended = run("--replay", TRACE, "--at", "+1000")

    assert (2, "gpulse: --at +1000 is after the end of the recording, which is at +34.2") == (
        ended.code,
        ended.err.splitlines()[0],
    )


def test_databases_that_cannot_be_written_end_with_1(tmp_path: Path) -> None:
    """A missing folder, a file of something else, another program's database: each with its reason."""
    text, foreign = tmp_path / "text", tmp_path / "foreign.db"
    text.write_text("not a database " * 100)
    with closing(sqlite3.connect(foreign)) as database:
        database.execute("CREATE TABLE mine (x)")
    wanted = {
        tmp_path / "no" / "x.db": "No such file or directory",
        text: "file is not a database",
        foreign: "the database belongs to another program",
    }
    ended = {path: run("--demo", "--sqlite", path) for path in wanted}

    assert [1, 1, 1] == [item.code for item in ended.values()]
    assert [True] * 3 == [
        says in ended[path].err and "\n  try: " in ended[path].err for path, says in wanted.items()
    ]


def test_a_full_disk_under_a_database_ends_with_1(tmp_path: Path) -> None:
    """The limit on file sizes stands in for the disk; the database stays readable."""
    path = tmp_path / "looks.db"
    assert 0 == run("--demo", "--sqlite", path).code
    before = path.read_bytes()
    command = f"export PYTHONDONTWRITEBYTECODE=1; ulimit -f {len(before) // 1024}; trap '' XFSZ; exec '{BIN}/gpulse' --demo --sqlite '{path}'"
    env = environment({"PYTHONDONTWRITEBYTECODE": "1"})  # the limit would cut our own bytecode off, too
    ended = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)

    assert 1 == ended.returncode
    assert f"gpulse: cannot write {path}: " in ended.stderr
    assert run("--demo", "--sqlite", path).code == 0


@pytest.mark.parametrize("options", ["", "--json", "--csv"])
def test_a_full_disk_under_standard_output_ends_with_1(options: str) -> None:
    """It says so, and what to do."""
    command = f"'{BIN}/gpulse' --demo {options} > /dev/full"
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert 1 == ended.returncode
    assert [
        "gpulse: cannot use standard output: No space left on device",
        "  try: free space on the disk, or choose another file",
    ] == ended.stderr.splitlines()


@pytest.mark.parametrize("options", ["", "--json", "--csv", "-w 0.05", "--help", "doctor --json"])
def test_a_look_that_nobody_can_see_ends_with_1(options: str) -> None:
    """Without standard output there is nothing to show it on, and silence would pass for success."""
    command = f"'{BIN}/gpulse' --demo {options} >&-".replace("--demo doctor", "doctor")
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert (1, "gpulse: cannot use standard output: Bad file descriptor\n") == (
        ended.returncode,
        ended.stderr,
    )


def test_a_recorder_needs_no_standard_output(tmp_path: Path) -> None:
    """What it makes is a file."""
    command = f"'{BIN}/gpulse' record --demo -q -t 0.2 -o '{tmp_path}/run.jsonl' >&-"
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("redirection", ["2>&-", "<&-", "2>&- <&-"])
def test_closed_streams_are_no_reason_to_fail(redirection: str) -> None:
    """Started by something that gives it no streams, a look still works."""
    command = f"'{BIN}/gpulse' --demo {redirection}"
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert (0, "") == (ended.returncode, ended.stderr)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`gpulse -w | head -1` is silent."""
    command = f"set -o pipefail; '{BIN}/gpulse' --demo -w 0.05 | head -1"
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert (0, "", 1) == (ended.returncode, ended.stderr, len(ended.stdout.splitlines()))


def test_debug_shows_the_traceback() -> None:
    """For those who report a bug."""
    ended = run("--debug", "--replay", "nosuch")

    assert 1 == ended.code
    assert "Traceback (most recent call last)" in ended.err


def test_debug_of_a_recorded_command_is_the_commands(tmp_path: Path) -> None:
    """Its arguments are none of ours."""
    ended = run("record", "-o", tmp_path / "no" / "run.jsonl", "--", "true", "--debug")

    assert 1 == ended.code
    assert "Traceback" not in ended.err


def test_a_bug_while_the_gpus_are_opened_early_is_reported_like_any_other() -> None:
    """The early start lies outside of what turns errors into messages."""
    code = """
import sys
from gpulse.sources.nvml import gpu_reader
gpu_reader.GpuReader.open = lambda self, now: {}["lost"]
sys.argv = ["gpulse"]
from gpulse.cli import entry
entry.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (1, "gpulse: unexpected error, probably a bug: KeyError: 'lost'") == (
        ended.returncode,
        ended.stderr.splitlines()[0],
    )


def test_a_bug_is_one_line_that_asks_for_a_report() -> None:
    """Even what nobody thought of ends without a traceback."""
    code = """
import sys, click
from gpulse.cli import common
sys.exit(common.run(click.Command("x", callback=lambda: {}["lost"]), name="gpulse"))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (1, "gpulse: unexpected error, probably a bug: KeyError: 'lost'") == (
        ended.returncode,
        ended.stderr.splitlines()[0],
    )
    assert "--debug" in ended.stderr


def test_a_surrounding_without_home_or_a_writable_folder_is_enough() -> None:
    """A look writes nothing anywhere."""
    command = f"unset HOME; cd /proc/self; '{BIN}/gpulse' --demo"
    ended = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, check=False
    )

    assert (0, "") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("columns", [20, 33, 40])
@pytest.mark.parametrize("command", ["doctor", "explain input_io_bound", "explain"])
def test_narrow_windows_get_whole_words(command: str, columns: int) -> None:
    """Texts stand below their titles where there is no room beside them; only a long word is wider."""
    lines = run(*command.split(), env={"COLUMNS": str(columns)}).out.splitlines()

    assert [] == [line for line in lines if len(line) > columns and len(line.split()) > 1]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few names and no content."""
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        (place / "filler").write_bytes(bytes(4096))
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    "command",
    [
        "record --demo -t 1 -o {}/run.jsonl",
        "record --demo -t 1 -o {}/run.csv",
        "record --demo -t 1 -o {}/run.sqlite",
        "--demo --sqlite {}/looks.db",
        "why --demo --window 11 -q --plot {}/why.html",
        "harvest init {}/harvest.toml",
        "harvest init --force {}/filler",
    ],
)
def test_a_full_disk_is_said_and_nothing_is_left(command: str, full_disk: Path) -> None:
    """The file and what to do are named; what was there stays, and no half of a file or draft does."""
    ended = run(*command.format(full_disk).split())

    assert ended.code in (1, 2)
    assert f"{full_disk}/" in ended.err
    assert "  try: free space on the disk, or choose another file" in ended.err.splitlines()
    assert {"filler": bytes(4096)} == {
        path.name: path.read_bytes() for path in full_disk.iterdir() if not path.name.startswith("run.")
    }
    assert all(path.stat().st_size == 0 for path in full_disk.glob("run.*"))


@pytest.mark.parametrize(
    ("hint", "command"),
    [
        ("check the path; to write a file, create its directory first", "--replay /nowhere/run.jsonl"),
        (
            "check the path; to write a file, create its directory first",
            "record --demo -t 1 -o /nowhere/run.jsonl",
        ),
        (
            "check the path; to write a file, create its directory first",
            "record --demo -t 1 -o /nowhere/run.csv",
        ),
    ],
)
def test_a_file_that_cannot_be_used_comes_with_what_to_do(hint: str, command: str) -> None:
    """After the file and the reason."""
    ended = subprocess.run(
        ["sh", "-c", f"exec gpulse {command}"], env=environment(), capture_output=True, text=True, check=False
    )

    assert 1 == ended.returncode
    assert f"  try: {hint}" in ended.stderr
