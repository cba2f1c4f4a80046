"""`gpulse why`, as people run it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.sources.recording import Recording
from tests.fakes.nvml import FakeNvml
from tests.integration.commands import BIN, TRACES, environment, run, terminal
from tests.unit.diagnosis_traces import labels

LOADER = TRACES / "loader_all_cores.jsonl.gz"
HEALTHY = TRACES / "healthy_graphs.jsonl.gz"


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with two idle GPUs."""
    made = FakeNvml.create(tmp_path / "control", 2)
    yield made
    made.close()


def judged(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON of a diagnosis."""
    ended = run("why", *arguments, "--json")
    document: dict[str, Any] = json.loads(ended.out)
    return ended.code, document


@pytest.mark.parametrize(
    ("code", "name"), [(1, "loader_all_cores"), (0, "healthy_graphs"), (1, "checkpoint_stall")]
)
def test_a_recording_is_judged(code: int, name: str) -> None:
    """The exit code says whether something was found, the text says what."""
    ended = run("why", TRACES / f"{name}.jsonl.gz")

    assert (code, "") == (ended.code, ended.err)
    assert all(expected in ended.out for expected in labels()[name].expect)


def test_the_json_has_the_promised_shape() -> None:
    """Every key of the interface, with its type."""
    code, document = judged(LOADER)
    (finding,) = document["findings"]

    assert 1 == code
    assert {"verdict", "findings", "info", "data_gaps"} <= document.keys()
    assert ("input_cpu_bound", "input", "high", 0) == tuple(
        finding[key] for key in ("id", "family", "severity", "gpu")
    )
    assert 0 <= finding["confidence"] <= 1
    assert finding["start"] < finding["end"]
    assert all(isinstance(pid, int) for pid in finding["pids"])
    assert {"signal", "statistic", "value", "comparison", "threshold"} == finding["evidence"][0].keys()
    assert {"do", "why", "confirm"} == finding["advice"][0].keys()
    assert {"counter_evidence", "ruled_out", "url", "lost_ratio"} <= finding.keys()


def test_a_part_of_a_recording_can_be_judged() -> None:
    """From and to, as epoch seconds and as seconds after the start, mean the same."""
    label = labels()["cpu_oversubscribed"]
    path = TRACES / "cpu_oversubscribed.jsonl.gz"
    first = next(iter(Recording(path))).time
    assert label.mark is not None
    _, before = judged(path, "--from", f"{label.begin}", "--to", f"{label.mark}")
    code, after = judged(path, "--from", f"{label.begin}", "--to", f"{label.end}")
    _, relative = judged(path, "--from", f"+{label.begin - first}", "--to", f"+{label.end - first}")

    assert not before["findings"]
    assert (1, "cpu_oversubscribed") == (code, after["findings"][0]["id"])
    assert after["findings"] == relative["findings"]


def test_too_little_is_not_enough() -> None:
    """Five seconds are no verdict, whatever they show."""
    code, document = judged(LOADER, "--from", "+14", "--to", "+19")

    assert 3 == code
    assert document["verdict"].startswith("Not enough data")
    assert not document["findings"]


def test_a_window_can_be_chosen() -> None:
    """A recording is judged in windows of that length."""
    code, document = judged(LOADER, "--window", "11")

    assert (1, ["input_cpu_bound"]) == (code, [finding["id"] for finding in document["findings"]])


def test_the_demo_is_judged_at_once() -> None:
    """Every GPU of it, as its recording is labelled."""
    code, document = judged("--demo")
    found = {finding["gpu"]: finding["id"] for finding in document["findings"]}

    assert 1 == code
    assert {
        1: "input_too_few_workers",
        2: "launch_bound",
        3: "input_io_bound",
        4: "pcie_copy_bound",
    }.items() <= (found.items())
    assert not found.keys() & {0, 7}


def test_some_gpus_can_be_chosen() -> None:
    """The others are not mentioned."""
    _, document = judged("--demo", "--gpus", "2")

    assert ["launch_bound"] == [finding["id"] for finding in document["findings"]]


def test_a_process_can_be_chosen() -> None:
    """Its GPU is judged, and no other."""
    _, everything = judged("--demo")
    pid = next(finding["pids"][0] for finding in everything["findings"] if finding["id"] == "launch_bound")

    _, document = judged("--demo", "--pid", str(pid))

    assert ["launch_bound"] == [finding["id"] for finding in document["findings"]]
    assert [2] == [entry["gpu"] for entry in document["judged"]]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("exclude each other", [HEALTHY, "--demo"]),
        ("moments of a RECORDING", ["--from", "+3"]),
        ("is no moment", [HEALTHY, "--from", "yesterday"]),
        ("is no moment", [HEALTHY, "--to", "nan"]),
        ("no COMMAND after --", ["--"]),
        ("exclude each other", [HEALTHY, "--", "true"]),
        ("exclude each other", ["--pid", "1", "--", "true"]),
        ("there is no file", ["nowhere.jsonl.gz"]),
        ("not a number of seconds", ["--window", "0"]),
        ("no interval to sample at", ["-i", "0.001"]),
        ("cannot draw", [HEALTHY, "--plot", "picture.doc"]),
        ("there is no GPU 9", ["--demo", "--gpus", "9"]),
    ],
)
def test_what_makes_no_sense_is_refused(said: str, arguments: list[str | Path]) -> None:
    """With exit code 2 and what to try."""
    ended = run("why", *arguments)

    assert 2 == ended.code
    assert said in ended.err
    assert "" == ended.out


def corrupt(path: Path, text: bytes) -> Path:
    """A file with this content."""
    path.write_bytes(text)
    return path


def test_what_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    """Empty, foreign, torn and scrambled files are errors with exit code 3, never findings."""
    packed = LOADER.read_bytes()
    lines = gzip.decompress(packed).splitlines()
    scrambled = b"\n".join([lines[0], *reversed(lines[1:])])
    torn = b"\n".join([*lines[:100], lines[100][:50], *lines[101:]])
    files = {
        "empty": b"",
        "foreign": b"hello\nworld\n",
        "torn": torn,
        "scrambled": scrambled,
        "garbage.gz": packed[:20] + os.urandom(200),
    }
    for name, text in files.items():
        ended = run("why", corrupt(tmp_path / name, text), "--json")

        assert (name, 3) == (name, ended.code)
        assert json.loads(ended.out)["verdict"].startswith("Not enough data")
        assert not json.loads(ended.out)["findings"]
        assert ended.err.startswith("gpulse: ")


def test_a_recording_that_was_cut_off_is_judged_as_far_as_it_goes(tmp_path: Path) -> None:
    """And says that it ends early."""
    packed = LOADER.read_bytes()
    ended = run("why", corrupt(tmp_path / "cut.jsonl.gz", packed[: len(packed) * 9 // 10]), "--json")
    document = json.loads(ended.out)

    assert "input_cpu_bound" == document["findings"][0]["id"]
    assert any("ends early" in gap for gap in document["data_gaps"])


def test_a_command_is_watched_to_its_end(fake: FakeNvml, nvml_library: Path) -> None:
    """Its own output is its own, and a command that uses no GPU is not judged."""
    ended = run("why", "--", sys.executable, "-c", "print('mine')", env=fake.env(nvml_library))

    assert 3 == ended.code
    assert ended.out.startswith("mine\n")
    assert "never seen on a GPU" in ended.out


def test_the_exit_code_of_the_command_is_told(fake: FakeNvml, nvml_library: Path) -> None:
    """It does not become gpulse's own, but it is not lost either."""
    ended = run(
        "why", "--json", "--", sys.executable, "-c", "raise SystemExit(7)", env=fake.env(nvml_library)
    )

    assert 7 == json.loads(ended.out)["command_exit_code"]
    assert any("exit code 7" in gap for gap in json.loads(ended.out)["data_gaps"])


def test_a_command_that_is_not_there_is_said_so() -> None:
    """As a shell says it."""
    ended = run("why", "--", "/nowhere/at/all")

    assert 127 == ended.code
    assert "command not found" in ended.err


def test_a_process_on_no_gpu_is_refused(fake: FakeNvml, nvml_library: Path) -> None:
    """At once, not after twenty seconds."""
    ended = run("why", "--pid", str(os.getpid()), env=fake.env(nvml_library))

    assert 2 == ended.code
    assert "is on no GPU" in ended.err


def test_without_a_driver_nothing_is_waited_for() -> None:
    """There is nothing to watch."""
    ended = run("why", env={"LD_LIBRARY_PATH": "/nonexistent"})

    assert 3 == ended.code
    assert "no NVIDIA driver here" in ended.out


def test_idle_gpus_are_fine(fake: FakeNvml, nvml_library: Path) -> None:
    """Nothing runs, so nothing is slow."""
    ended = run("why", "--window", "11", env=fake.env(nvml_library))

    assert 0 == ended.code
    assert "idle: nothing runs" in ended.out
    assert ended.err.startswith("watching this machine for 11 s")


def test_ctrl_c_ends_the_watching_with_a_verdict(fake: FakeNvml, nvml_library: Path) -> None:
    """What was seen so far is judged."""
    child = subprocess.Popen(
        [BIN / "gpulse", "why", "--window", "60"],
        env=environment(fake.env(nvml_library)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    child.stderr.readline()  # it has begun
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=20)

    assert 3 == child.returncode
    assert b"Not enough data" in out


def test_progress_is_shown_on_a_terminal_and_wiped_away(fake: FakeNvml, nvml_library: Path) -> None:
    """A bar while it watches, and the verdict alone in the end."""
    with terminal("why", "--window", "2", env=fake.env(nvml_library)) as screen:
        screen.until(b"/2 s")
        seen = screen.to_the_end()

    assert b"\r\x1b[K" in seen
    assert b"Verdict" in seen


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    """As a file of its own, beside the text."""
    for name, magic in (("why.png", b"\x89PNG"), ("why.html", b"<!")):
        ended = run("why", LOADER, "--plot", tmp_path / name)

        assert 1 == ended.code
        assert (tmp_path / name).read_bytes().startswith(magic)
