"""`gpulse why`, as people run it."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpulse.cli.why import WATCH_SECONDS
from gpulse.model.finding import Diagnosis, JudgedGpu, finding_from_document
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading
from gpulse.sampling.recorder import Recorder
from gpulse.sources.recording_reader import Recording
from gpulse.terminal.diagnosis_verdict import verdict_lines
from tests.fakes.nvml import FakeNvml
from tests.integration.commands import (
    BIN,
    STUBBORN,
    TRACES,
    environment,
    pid_of_stubborn,
    run,
    terminal,
)
from tests.unit.diagnosis_traces import labels, steady

ROOT = Path(__file__).parents[2]
LOADER = TRACES / "loader_all_cores.jsonl.gz"
HEALTHY = TRACES / "healthy_graphs.jsonl.gz"
_SOON = """
from gpulse.diagnosis import thresholds
thresholds.DEFAULTS = thresholds.DEFAULTS._replace(min_seconds=2.0)
from gpulse.cli.entry import main
main()
"""
"""`gpulse` that judges what it saw for two seconds."""


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


def test_a_neighbour_on_the_gpu_does_not_count_as_the_process(tmp_path: Path) -> None:
    """The CPU time of another program on the same GPU is not that of the chosen one."""
    recorder = Recorder(tmp_path / "shared.jsonl.gz")
    first = steady("launch_bound")[0].time
    for frame in steady("launch_bound"):
        gpu, values = (
            frame.gpus[0],
            {"cpu_user_seconds_total": frame.time - first, "cpu_system_seconds_total": 0},
        )
        busy = ProcessReading(ProcessIdentity(777, 1, 1.0, "other"), "R", values, on_gpu=True)
        holders = (*(gpu.processes or ()), GpuProcess(777, "compute", 2**30))
        recorder.write(
            frame._replace(gpus=(gpu._replace(processes=holders),), processes=(*frame.processes, busy))
        )
    recorder.close()
    pid = str((steady("launch_bound")[0].gpus[0].processes or ())[0].pid)

    both, one = (
        judged(recorder.path, *choice)[1]["findings"][0]["evidence"] for choice in ((), ("--pid", pid))
    )
    cores = [
        next(item["value"] for item in evidence if item["signal"] == "trainer_cores")
        for evidence in (both, one)
    ]

    assert cores == [pytest.approx(2.0, abs=0.1), pytest.approx(1.0, abs=0.1)]


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ("cannot be used together", [HEALTHY, "--demo"]),
        ("require a RECORDING", ["--from", "+3"]),
        ("is not a time", [HEALTHY, "--from", "yesterday"]),
        ("is not a time", [HEALTHY, "--to", "nan"]),
        ("a COMMAND is missing after --", ["--"]),
        ("cannot be used together", [HEALTHY, "--", "true"]),
        ("cannot be used together", ["--pid", "1", "--", "true"]),
        ("there is no file", ["nowhere.jsonl.gz"]),
        ("not a positive number of seconds", ["--window", "0"]),
        ("the sampling interval must be at least 0.05 s", ["-i", "0.001"]),
        ("cannot draw", [HEALTHY, "--plot", "picture.doc"]),
        ("there is no GPU 9", ["--demo", "--gpus", "9"]),
        ("directory nodir does not exist", [HEALTHY, "--plot", "nodir/why.png"]),
        ("--to +5 is before --from +20", [HEALTHY, "--from", "+20", "--to", "+5"]),
        ("--to 5 is before --from +20", [HEALTHY, "--from", "+20", "--to", "5"]),
        ("'--pid'", ["--pid", "-5"]),
        ("'--pid'", ["--pid", "0"]),
        ("/dev/zero is not a file", ["/dev/zero"]),
        ("is not a file", [TRACES]),
        ("--compare and --pid cannot be used together", ["--compare", LOADER, HEALTHY, "--pid", "1"]),
        ("--compare and a RECORDING", ["--compare", LOADER, HEALTHY, LOADER]),
        ("--compare and --plot and --verbose", ["--compare", LOADER, HEALTHY, "-v", "--plot", "a.png"]),
        ("--compare and a COMMAND", ["--compare", LOADER, HEALTHY, "--", "true"]),
        ("--compare and --no-lines", ["--compare", LOADER, HEALTHY, "--no-lines"]),
        ("--no-lines and a RECORDING cannot be used together", [HEALTHY, "--no-lines"]),
        ("--no-lines and --demo cannot be used together", ["--demo", "--no-lines"]),
        ("requires 2 arguments", ["--compare", LOADER]),
        ("there is no file missing.jsonl.gz", ["--compare", LOADER, "missing.jsonl.gz"]),
        ("is not a file", ["--compare", TRACES, LOADER]),
    ],
)
def test_what_makes_no_sense_is_refused(said: str, arguments: list[str | Path]) -> None:
    """With exit code 2 and what to try."""
    ended = run("why", *arguments)

    assert 2 == ended.code
    assert said in ended.err
    assert "" == ended.out


def test_what_has_no_beginning_to_go_back_to_is_refused(tmp_path: Path) -> None:
    """A pipe would be waited for without end."""
    pipe, listener = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(listener))
        for path in (pipe, listener):
            ended = run("why", path)

            assert (2, "") == (ended.code, ended.out)
            assert f"{path} is not a file" in ended.err


@pytest.mark.parametrize(
    ("said", "bounds"),
    [
        (r"the recording ends at \+\d+\.\d, before --from \+2000", ["--from", "+2000"]),
        (r"the recording begins at \d+\.\d, after --to 5", ["--to", "5"]),
    ],
)
def test_a_part_beside_the_recording_is_said_so(said: str, bounds: list[str]) -> None:
    """There is nothing in it to judge."""
    code, document = judged(HEALTHY, *bounds)

    assert 3 == code
    assert re.fullmatch(f"Not enough data: {said}.", document["verdict"]) is not None


def test_the_way_to_more_data_fits_what_was_judged(fake: FakeNvml, nvml_library: Path) -> None:
    """Nobody can watch a recording for longer, or a command that has ended."""
    part = run("why", LOADER, "--from", "+14", "--to", "+19")
    command = run("why", "--", "true", env=fake.env(nvml_library))
    machine = run("why", "--window", "1", env=fake.env(nvml_library))
    driverless = run("why", env={"LD_LIBRARY_PATH": "/nonexistent"})

    assert "Next     -> choose a longer range with --from and --to, or record longer" in part.out
    assert "Next     -> let the command run longer" in command.out
    assert "Next     -> watch longer: gpulse why --window 60" in machine.out
    assert "Next     -> run `gpulse doctor`" in driverless.out
    assert 3 == sum("--window" not in ended.out for ended in (part, command, driverless))


def test_nothing_that_goes_wrong_looks_like_a_finding() -> None:
    """Exit code 1 is taken."""
    hidden = run("why", "--demo", "--gpus", "visible", env={"CUDA_VISIBLE_DEVICES": "none"})

    assert 3 == hidden.code
    assert "hides every GPU" in hidden.err


@pytest.mark.parametrize("streams", [">/dev/full", ">&-", ">/dev/full 2>/dev/full"])
def test_an_answer_that_cannot_be_written_is_an_error(streams: str) -> None:
    """With an exit code of its own."""
    ended = subprocess.run(
        ["bash", "-c", f'"$0" why "$1" {streams}', BIN / "gpulse", LOADER],
        env=environment(),
        stdin=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )

    assert 2 == ended.returncode


@pytest.mark.parametrize(("code", "path"), [(1, LOADER), (0, HEALTHY)])
def test_a_reader_who_has_seen_enough_changes_nothing(code: int, path: Path, tmp_path: Path) -> None:
    """The exit code is the diagnosis' own, and the picture is drawn."""
    arguments = (BIN / "gpulse", path, tmp_path / "why.html")
    ended = subprocess.run(
        ["bash", "-c", '"$0" why "$1" --plot "$2" | true; exit ${PIPESTATUS[0]}', *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        timeout=30,
        check=False,
    )

    assert code == ended.returncode
    assert (tmp_path / "why.html").exists()


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


def test_json_is_alone_on_standard_output(fake: FakeNvml, nvml_library: Path) -> None:
    """What the command prints goes where people read."""
    ended = run("why", "--json", "--", sys.executable, "-c", "print('mine')", env=fake.env(nvml_library))

    assert 0 == json.loads(ended.out)["command_exit_code"]
    assert "mine\n" in ended.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_goes_on_is_judged_and_left_alone(
    number: signal.Signals, fake: FakeNvml, nvml_library: Path, tmp_path: Path
) -> None:
    """The first Ctrl-C or polite kill is the command's, the second ends the watching."""
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            [BIN / "gpulse", "why", "--json", "--", *STUBBORN, tmp_path / "pid"],
            env=environment(fake.env(nvml_library)),
            stdout=stdout,
            stderr=stderr,
        )
    pid = pid_of_stubborn(tmp_path / "pid")
    try:
        child.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1.0)
        child.send_signal(number)

        assert 3 == child.wait(60)
        assert f"gpulse: the command (pid {pid}) is still running" in err.read_text()
        assert "was never seen on a GPU" in json.loads(out.read_text())["verdict"]
        os.kill(pid, 0)  # it is there
    finally:
        os.kill(pid, signal.SIGKILL)


def test_the_exit_code_of_the_command_is_told(fake: FakeNvml, nvml_library: Path) -> None:
    """It does not become gpulse's own, but it is not lost either."""
    ended = run(
        "why", "--json", "--", sys.executable, "-c", "raise SystemExit(7)", env=fake.env(nvml_library)
    )

    assert 7 == json.loads(ended.out)["command_exit_code"]
    assert any("exit code 7" in gap for gap in json.loads(ended.out)["data_gaps"])


def test_a_command_that_is_not_there_is_said_so() -> None:
    """With its name."""
    ended = run("why", "--", "/nowhere/at/all")

    assert 127 == ended.code
    assert "gpulse: cannot run /nowhere/at/all: No such file or directory\n" == ended.err


def test_a_process_on_no_gpu_is_refused(fake: FakeNvml, nvml_library: Path) -> None:
    """At once, not after twenty seconds."""
    ended = run("why", "--pid", str(os.getpid()), env=fake.env(nvml_library))

    assert 2 == ended.code
    assert "does not use a GPU" in ended.err


def test_without_a_driver_nothing_is_waited_for() -> None:
    """There is nothing to watch."""
    ended = run("why", env={"LD_LIBRARY_PATH": "/nonexistent"})

    assert 3 == ended.code
    assert "no NVIDIA driver" in ended.out


def test_idle_gpus_are_fine(fake: FakeNvml, nvml_library: Path) -> None:
    """Nothing runs, so nothing is slow."""
    done = subprocess.run(
        [sys.executable, "-c", _SOON, "why", "--window", "3"],
        env=environment(fake.env(nvml_library)),
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode
    assert "idle: nothing is running" in done.stdout
    assert done.stderr.startswith("watching this machine for 3 s")


def test_a_gpu_without_gpm_is_judged_by_its_power(fake: FakeNvml, nvml_library: Path) -> None:
    """Always busy at little power: small kernels, which is inferred, and the level says why."""
    for name, value in {"gpm_supported": 0, "util_gpu": 100, "power_mw": 150_000}.items():
        setattr(fake.gpu(0), name, value)
    fake.gpu(0).clocks[:] = [1980, 1980, 3201, 1545]
    fake.set_field(0, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, code=pynvml.NVML_ERROR_NOT_SUPPORTED)
    fake.add_process(0, os.getpid(), 2**30)
    done = subprocess.run(
        [sys.executable, "-c", _SOON, "why", "--window", "4", "--json"],
        env=environment(fake.env(nvml_library)),
        capture_output=True,
        text=True,
        check=False,
    )
    document = json.loads(done.stdout)

    assert (1, "nvml_only") == (done.returncode, document["level"])
    assert [("thin_kernels", True)] == [(item["id"], item["inferred"]) for item in document["findings"]]
    assert "inferred from" in document["verdict"]


def test_a_sure_verdict_ends_the_watching(fake: FakeNvml, nvml_library: Path) -> None:
    """Without a time of its own, it watches for no longer than needed; with one, for all of it."""
    documents = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", _SOON, "why", "--json", *options],
                env=environment(fake.env(nvml_library)),
                capture_output=True,
                text=True,
                check=False,
            ).stdout
        )
        for options in ((), ("--window", "6"))
    ]
    early, whole = (document["end"] - document["start"] for document in documents)

    assert 3.9 <= early < WATCH_SECONDS - 1
    assert whole >= 5.5
    assert documents[0]["verdict"] == documents[1]["verdict"]


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
    out, _ = child.communicate(timeout=60)

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
        assert f"wrote {tmp_path / name}" in ended.err


def test_a_picture_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    """The verdict is told, the picture before it stays whole, and the exit code says that one is missing."""
    picture = tmp_path / "why.html"
    picture.write_text("old")
    ended = subprocess.run(
        [
            "bash",
            "-c",
            'export PYTHONDONTWRITEBYTECODE=1; ulimit -f 1; exec "$0" why "$1" --plot "$2"',
            BIN / "gpulse",
            LOADER,
            picture,
        ],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
        check=False,
        text=True,
    )

    assert 2 == ended.returncode
    assert "input_cpu_bound" in ended.stdout
    assert f"gpulse: cannot write the plot {picture}: File too large" in ended.stderr
    assert "old" == picture.read_text()
    assert [picture] == list(tmp_path.iterdir())


def test_the_readme_shows_what_is_printed() -> None:
    """Its sample is the diagnosis of a program on an H200, as kept in its JSON, up to the dots."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sample = readme.partition("$ gpulse why\n")[2].partition("         ...\n")[0]
    document = json.loads((ROOT / "tests/data/readme_why.json").read_text())
    diagnosis = Diagnosis(
        document["verdict"],
        tuple(map(finding_from_document, document["findings"])),
        judged=tuple(JudgedGpu(**judged) for judged in document["judged"]),
        start=document["start"],
        end=document["end"],
        frames=document["frames"],
    )
    printed = "\n".join(verdict_lines(diagnosis, 120, lambda _, text: text, verbose=False))

    assert sample
    assert printed.startswith(sample)


def test_a_comparison_says_whether_it_helped() -> None:
    """The verdict first; the exit code tells scripts: 0 better, 1 worse."""
    better = run("why", "--compare", LOADER, HEALTHY)
    worse = run("why", "--compare", HEALTHY, LOADER)

    assert (0, 1) == (better.code, worse.code)
    first, verdict, *_ = better.out.splitlines()
    assert "Better" == first
    assert re.fullmatch(r"GPU utilization rose from [\d.]+% to \d+%: input_cpu_bound is gone.*", verdict)
    assert "data-loading workers busy" in better.out
    assert worse.out.startswith("Worse\nGPU utilization fell from")
    assert "input_cpu_bound is new" in worse.out
    assert "" == better.err


def test_a_recording_compared_with_itself() -> None:
    """Nothing changed, which is not worse."""
    ended = run("why", "--compare", HEALTHY, HEALTHY, "--json")
    document = json.loads(ended.out)

    assert 0 == ended.code
    assert ("no_clear_change", "No clear change") == (document["outcome"], document["title"])
    assert {"unknown", "no_clear_change", "not_compared"} >= {row["change"] for row in document["quantities"]}


def test_parts_of_recordings_are_compared() -> None:
    """--from and --to are about both; a part that is too short has no figures, and the exit code is 3."""
    short = run("why", "--compare", LOADER, HEALTHY, "--from", "+14", "--to", "+19")
    beyond = run("why", "--compare", LOADER, HEALTHY, "--from", "+100000")
    other = run("why", "--compare", LOADER, HEALTHY, "--gpus", "7")

    assert [3, 3, 2] == [short.code, beyond.code, other.code]
    assert short.out.startswith("Not enough data\n")
    assert "the recording ends at +" in beyond.out


def test_a_broken_recording_is_not_compared(tmp_path: Path) -> None:
    """It is neither better nor worse: the exit code is 3."""
    ended = run("why", "--compare", LOADER, corrupt(tmp_path / "a.jsonl.gz", b"nothing"))

    assert 3 == ended.code
    assert "" == ended.out
    assert "a.jsonl.gz" in ended.err
