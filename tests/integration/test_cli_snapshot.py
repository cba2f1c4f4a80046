"""`gpulse` and `bmon` as people and programs run them, on the demo, on recordings and on a fake driver."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpulse.cli.snapshot import DIAGNOSIS_SECONDS
from gpulse.model.metric_catalog import CATALOG
from tests.fakes.nvml import FakeNvml
from tests.integration.commands import TRACES, environment, fresh_program, run

GIB = 1 << 30
TRACE = TRACES / "gpu_shared.jsonl.gz"
DISK_BOUND = TRACES / "disk_small_random.jsonl.gz"
Machine = Callable[[int], FakeNvml]
HOSTILE = """
import sys, time
with open("/proc/self/comm", "wb") as file:
    file.write(b"\\x1b[2J\\xff\\n[red]")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Makes a fake machine with so many H200."""
    made: list[FakeNvml] = []

    def make(gpus: int) -> FakeNvml:
        made.append(FakeNvml.create(tmp_path / f"control{len(made)}", gpus))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


@contextmanager
def child(*arguments: str | bytes) -> Iterator[int]:
    """The pid of a process that says when it is ready."""
    running = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE)
    try:
        assert running.stdout is not None
        assert b"ready\n" == running.stdout.readline()
        yield running.pid
    finally:
        running.kill()
        running.communicate()


def test_a_look_without_a_driver_shows_the_host_and_what_to_try() -> None:
    """A machine without a GPU is no error."""
    ended = run("-a", env={"LD_LIBRARY_PATH": "/nonexistent"})

    assert (0, "") == (ended.code, ended.err)
    assert "No GPU to show: " in ended.out
    assert "gpulse --demo" in ended.out
    assert "CPU " in ended.out


@pytest.mark.parametrize(
    ("shows", "option"),
    [
        ("waiting for cpu", "-c"),
        ("python3 train_gpt.py --config gpt-1b.yaml", "--cpu"),
        ("nvme0n1", "-d"),
        ("Mounted on", "--disk"),
        ("100 Gb/s", "-n"),
        ("Interface", "--net"),
        ("[high] GPU 4 waits 100% of the time for copies", "-b"),
        ("raise num_workers until no GPU time is lost", "--bottleneck"),
        ("GPU-de300000", "-v"),
        ("Rates are averages over 0.50 s.", "-c"),
    ],
)
def test_each_part_has_an_option(plain_look: str, shows: str, option: str) -> None:
    """What was not asked for is not shown."""

    assert [False, True] == [shows in shown for shown in (plain_look, run(option, "--demo").out)]


@pytest.fixture(scope="module")
def plain_look() -> str:
    """What is shown of the demo when nothing in particular is asked for."""
    ended = run("--demo")
    assert (0, "") == (ended.code, ended.err)
    return ended.out


def test_all_is_every_part_at_once() -> None:
    """-a is -b -c -d -n, with the diagnosis."""
    shown = run("-a", "--demo").out
    wanted = ("waiting for cpu", "Disk", "Interface", "[high] GPU 4 waits 100% of the time for copies")

    assert [] == [word for word in wanted if word not in shown]


@pytest.mark.parametrize("program", ["gpulse", "bmon"])
def test_all_names_the_bottleneck_of_a_job(program: str) -> None:
    """A job that waits for its disk is not called faultless, neither on the terminal nor for programs."""
    text = run("-a", "--replay", DISK_BOUND, program=program).out
    document = json.loads(run("-a", "--json", "--replay", DISK_BOUND, program=program).out)

    assert "no fault" not in text
    assert "of its processes wait for disks" in text
    assert ["input_io_bound"] == [finding["id"] for finding in document["findings"]]


def test_all_watches_the_jobs_of_this_machine(machine: Machine, nvml_library: Path) -> None:
    """Ten seconds later it says what it saw of them; where nothing runs it says that at once."""
    fake = machine(1)
    idle = run("-a", env=fake.env(nvml_library))
    began = time.monotonic()
    with child("-c", "import time; print('ready', flush=True); time.sleep(600)") as pid:
        fake.add_process(0, pid, GIB)
        watched = run("-a", program="bmon", env=fake.env(nvml_library))

    assert "no process uses a GPU" in idle.out
    assert "watching" not in idle.err
    assert DIAGNOSIS_SECONDS < time.monotonic() - began
    assert "watching this machine for 11 s" in watched.err
    assert "The driver reports no faults" not in watched.out


def test_a_busy_gpu_without_listed_processes_is_diagnosed(machine: Machine, nvml_library: Path) -> None:
    """In a container the driver may list none, although a job runs."""
    fake = machine(1)
    fake.gpu(0).util_gpu = 97
    watched = run("-b", env=fake.env(nvml_library))

    assert "no process uses a GPU" not in watched.out
    assert "GPU 0" in watched.out


def test_bmon_has_its_old_flags() -> None:
    """People's fingers and scripts keep working."""
    flags = ("-a", "-b -c", "-d -v", "-h", "-abcdv")
    with ThreadPoolExecutor(len(flags)) as all_at_once:
        ended = list(all_at_once.map(lambda words: run(*words.split(), program="bmon").code, flags))

    assert [0] * 5 == ended


def test_bmon_writes_what_other_programs_read(tmp_path: Path) -> None:
    """Network, JSON, CSV and SQLite are what its document promised."""
    path = tmp_path / "looks.db"
    network, document, table, kept = (
        run(*words.split(), "--demo", program="bmon")
        for words in ("-n", "--json", "-b --csv", f"-a --sqlite {path}")
    )
    with closing(sqlite3.connect(path)) as database:
        stored = database.execute("SELECT id FROM finding WHERE gpu = '4'").fetchall()

    assert [(0, "")] * 3 == [(ended.code, ended.err) for ended in (network, document, table)]
    assert "Interface" in network.out
    assert 8 == len(json.loads(document.out)["gpus"])
    found = [row["id"] for row in csv.DictReader(io.StringIO(table.out)) if row["gpu"] == "4"]
    assert (0, [(name,) for name in found]) == (kept.code, stored)
    assert found


def test_only_the_chosen_gpus_are_shown() -> None:
    """With their processes, and nobody else's."""
    document = json.loads(run("--demo", "--json", "--gpus", "0,5-6").out)

    assert [0, 5, 6] == [gpu["index"] for gpu in document["gpus"]]
    assert [2201, 51625, 61781] == [item["pid"] for gpu in document["gpus"] for item in gpu["processes"]]


@pytest.mark.parametrize(
    ("expected", "variable"), [([0, 1], "1,0"), ([2], "GPU-de300000-0000-4000-8000-000000000002")]
)
def test_visible_follows_cuda(expected: list[int], variable: str) -> None:
    """What programs would see is what is shown."""
    ended = run("--demo", "--json", "--gpus", "visible", env={"CUDA_VISIBLE_DEVICES": variable})

    assert expected == [gpu["index"] for gpu in json.loads(ended.out)["gpus"]]


@pytest.mark.parametrize("variable", ["", "-1"])
def test_visible_says_when_everything_is_hidden(variable: str) -> None:
    """Instead of an empty table."""
    ended = run("--demo", "--gpus", "visible", env={"CUDA_VISIBLE_DEVICES": variable})

    assert (1, f"gpulse: CUDA_VISIBLE_DEVICES={variable} hides every GPU from programs") == (
        ended.code,
        ended.err.splitlines()[0],
    )


def test_json_of_a_real_machine_is_complete(machine: Machine, nvml_library: Path) -> None:
    """Every catalogue name of every GPU is there, and rates were measured."""
    ended = run("--json", env=machine(2).env(nvml_library))
    document = json.loads(ended.out)

    assert [[], []] == [sorted(CATALOG["gpu"].keys() - gpu.keys()) for gpu in document["gpus"]]
    assert document["rates_interval_seconds"] >= 0.5
    assert "NaN" not in ended.out


def test_watching_prints_one_document_a_line() -> None:
    """Each look is a line that a program can read as it comes, the first one with rates too."""
    command = ["bash", "-c", "gpulse --demo --json -w 0.05 | head -3"]
    lines = subprocess.run(command, env=environment(), capture_output=True, check=True).stdout.splitlines()

    assert [True] * 3 == [json.loads(line)["rates_interval_seconds"] is not None for line in lines]


@pytest.mark.parametrize(("rows", "option"), [(8, None), (17, "-c"), (1, "-d"), (1, "-n")])
def test_csv_is_one_table(rows: int, option: str | None) -> None:
    """GPUs, or with an option processes, disks or interfaces."""
    ended = run("--demo", "--csv", *([option] if option else []))

    assert rows == len(list(csv.DictReader(io.StringIO(ended.out))))


def test_sqlite_is_appended_to(tmp_path: Path) -> None:
    """Two looks are two times eight rows, and standard output stays free."""
    path = tmp_path / "looks.db"
    ended = [run("--demo", "--sqlite", path) for _ in range(2)]
    with closing(sqlite3.connect(path)) as database:
        counted = database.execute("SELECT count(*), count(DISTINCT time) FROM gpu").fetchall()

    assert [(0, "", f"appended a snapshot of 8 GPUs to {path}\n")] * 2 == ended
    assert [(16, 2)] == counted


def test_a_recording_can_be_looked_at_at_any_moment() -> None:
    """The same moment gives the same look."""
    early, late, again = (run("--replay", TRACE, "--at", at).out for at in ("+2", "+20", "20"))

    assert early != late == again


def test_a_machine_with_faults_says_so_unasked(machine: Machine, nvml_library: Path) -> None:
    """One lost GPU neither hides the others nor slows the look down."""
    fake = machine(4)
    fake.lose(2)
    fake.gpu(1).ecc_volatile[1] = 3
    ended = run(env=fake.env(nvml_library))

    assert 0 == ended.code
    assert "[critical] GPU 2: GPU is lost" in ended.out
    assert "[critical] GPU 1: uncorrectable memory errors" in ended.out
    assert ["0", "1", "2", "3"] == [line.split()[0] for line in ended.out.splitlines()[2:6]]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("the NVIDIA kernel driver is not loaded", 9),
        ("the versions of the NVIDIA library and the kernel driver differ", 18),
        ("cannot start NVML: ", 999),
    ],
)
def test_a_driver_that_cannot_be_started_is_a_fault(
    machine: Machine, nvml_library: Path, says: str, error: int
) -> None:
    """On the terminal and for programs."""
    fake = machine(2)
    fake.fail_init(error)
    text, document = (run("-b", *options, env=fake.env(nvml_library)).out for options in ((), ("--json",)))

    assert f"[critical] {says}" in text
    assert "The driver reports no faults" not in text
    assert [("gpu_fault", None)] == [(f["id"], f["gpu"]) for f in json.loads(document)["findings"]]


def test_watching_a_choice_outlives_another_gpu(machine: Machine, nvml_library: Path) -> None:
    """The chosen GPU is the same one under its new index, and nothing ends."""
    fake = machine(3)
    chosen = json.loads(run("--json", "--gpus", "2", env=fake.env(nvml_library)).out)["gpus"][0]["uuid"]
    words = ("-w", "1", "--json", "--gpus", "2")
    with subprocess.Popen(
        [
            *fresh_program(
                {"gpulse.sources.nvml.read_timing:DriverTimeouts.__new__.__defaults__": (3.0, 2.0, 1.0, 2.0)}
            ),
            *words,
        ],
        env=environment(fake.env(nvml_library)),
        stdout=subprocess.PIPE,
    ) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        fake.remove(0)
        looks = (json.loads(line) for line in watching.stdout)
        moved = next(look for look in looks if [gpu["index"] for gpu in look["gpus"]] != [2])
        watching.terminate()

    assert [[chosen]] * 2 == [[gpu["uuid"] for gpu in look["gpus"]] for look in (first, moved)]


def test_a_choice_of_gpus_leaves_out_the_troubles_of_others(machine: Machine, nvml_library: Path) -> None:
    """Who asks about GPU 0 is not told about GPU 1."""
    fake = machine(2)
    fake.lose(1)

    assert "lost" not in run("--gpus", "0", "-b", env=fake.env(nvml_library)).out


def test_sixty_four_gpus_are_sixty_four_rows(machine: Machine, nvml_library: Path) -> None:
    """A large machine is shown whole."""
    ended = run(env=machine(64).env(nvml_library))

    assert [str(index) for index in range(64)] == [line.split()[0] for line in ended.out.splitlines()[2:66]]


def test_another_users_process_is_shown_with_its_owner(machine: Machine, nvml_library: Path) -> None:
    """Who holds the GPU is the point of looking."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to start a process of another user")
    fake = machine(1)
    # In a container only who holds a GPU's file is believed to be the one that the driver means.
    code = (
        "import os, time; os.open('/dev/nvidia-test', os.O_CREAT | os.O_RDWR, 0o600); os.unlink('/dev/nvidia-test'); "
        "os.setuid(65534); print('ready', flush=True); time.sleep(600)"
    )
    with child("-c", code) as pid:
        fake.add_process(0, pid, 3 * GIB)
        ended = run(env=fake.env(nvml_library))

    assert f"nobody:{Path(sys.executable).name[:15]}/{pid} 3.0G" in ended.out


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("options", ["-c -d -n -v", "--csv -c", "--json"])
def test_a_hostile_process_cannot_reach_the_terminal(
    machine: Machine, nvml_library: Path, options: str, locale: str
) -> None:
    """Its name and arguments hold escape sequences, broken UTF-8, line ends and a direction override."""
    fake = machine(1)
    with child("-c", HOSTILE, b"\x1b]0;owned\x07\xff", "\u202eevil", "a\nb") as pid:
        fake.add_process(0, pid, GIB)
        env = {"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", **fake.env(nvml_library)}
        ended = run(*options.split(), env=env)

    assert (0, "") == (ended.code, ended.err)
    assert str(pid) in ended.out
    if "--csv" not in options:
        assert not set(ended.out) & {"\x1b", "\x07", "\u202e", "\r"}
    if "--json" in options:
        assert json.loads(ended.out)["gpus"][0]["processes"][0]["pid"] == pid


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_is_wider_than_the_window(machine: Machine, nvml_library: Path, columns: int) -> None:
    """Faults, long command lines and all."""
    fake = machine(8)
    fake.lose(3)
    fake.gpu(1).reasons, fake.gpu(1).clocks[1] = 0x48, 600
    with child(
        "-c", "import time; print('ready', flush=True); time.sleep(600)", "--data", "/very/long" * 20
    ) as pid:
        for index in (0, 1, 2):
            fake.add_process(index, pid, GIB)
        ended = run("-c", "-d", "-n", "-v", env={"COLUMNS": str(columns), **fake.env(nvml_library)})

    assert [] == [line for line in ended.out.splitlines() if len(line) > columns]


def test_plain_ascii_terminals_get_plain_ascii() -> None:
    """In the C locale nothing fails and nothing but ASCII is printed."""
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    assert run("--demo", "-a", "-v", env=env).out.isascii()


def test_help_names_every_verb_and_keeps_its_lines() -> None:
    """Examples stand one below the other."""
    shown = run("--help").out

    assert "  gpulse -a              show everything\n" in shown
    assert "\\b" not in shown
    assert [] == [verb for verb in ("record", "doctor", "completion") if f"\n  {verb} " not in shown]


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_completion_prints_a_script(shell: str) -> None:
    """For each shell, and for one's own without being told."""

    assert run("completion", shell).out == run("completion", env={"SHELL": f"/usr/bin/{shell}"}).out != ""


def test_completion_completes() -> None:
    """The script's question is answered with the verbs."""
    env = {"_GPULSE_COMPLETE": "bash_complete", "COMP_WORDS": "gpulse doc", "COMP_CWORD": "1"}

    assert "plain,doctor\n" == run(env=env).out
