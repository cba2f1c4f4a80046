"""`gpulse why` names the guilty line of real programs, with the real py-spy; only the GPU is pretended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.nvml import FakeNvml
from tests.integration.commands import BIN, environment, run
from tests.integration.hands import IS_ROOT
from tests.integration.line_lab import (
    PROGRAMS,
    children_of,
    command,
    count_reads,
    guilty_line,
    pretended_gpu,
    program,
    wait_until,
    why,
    why_command,
)

AS_NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--"),
)
"""Runs a command as another user, who can read the interpreter wherever that is."""
READS = (20, 60, 200)
"""Reads of a program after which its line is named, although not all of them count: on a busy machine only the more do."""
GUILTY = sorted(path.stem for path in PROGRAMS.glob("*.py") if guilty_line(path.stem) is not None)
GROUPS = [GUILTY[first::5] for first in range(5)]
"""Programs that run at the same time; more than four would have too little CPU time to show what they do."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeNvml]:
    """A machine with one GPU."""
    made = FakeNvml.create(tmp_path / "control", 1)
    yield made
    made.close()


def watched(
    name: str,
    fake: FakeNvml,
    library: Path,
    folder: Path,
    *options: str,
    is_enough: Callable[[dict[str, Any]], bool] | None = None,
    reads: Sequence[int] = READS,
    prefix: Sequence[str] = (),
) -> tuple[int, list[dict[str, Any]]]:
    """The process ID of a program and the findings about it.

    Args:
        name: The program.
        fake: The machine.
        library: The fake driver.
        folder: For the state of the GPU.
        options: Options of `gpulse why`.
        is_enough: Whether the first finding is complete; this is when enough stacks were taken for its lines.
        reads: Number of reads after which it is judged, for each try.
        prefix: Runs `gpulse why`.
    """
    is_enough = is_enough or has_enough_stacks
    file = folder / "reads"
    with program(name, fake, folder) as child:
        for number in reads:
            found = why(child.pid, fake.env(library), file, *options, enough_reads=number, prefix=prefix)[
                "findings"
            ]
            if found and is_enough(found[0]):
                break
    return child.pid, [finding for finding in found if isinstance(finding, dict)]


def first_place(name: str, library: Path, folder: Path) -> tuple[str, int] | str:
    """The first line of the first finding about a program that runs on a machine of its own; else what was found."""
    folder.mkdir()
    fake = FakeNvml.create(folder / "control", 1)
    try:
        _, found = watched(name, fake, library, folder)
    finally:
        fake.close()
    if not found or not found[0].get("where"):
        return str(found)
    place = found[0]["where"][0]
    return Path(place["file"]).name, place["line"]


def has_enough_stacks(finding: dict[str, Any]) -> bool:
    """Whether a line was looked for in enough stacks."""
    note = finding.get("where_note") or ""
    return "where" in finding and not any(
        words in note for words in ("too few stacks", "only stack", "none of the")
    )


def test_there_are_enough_programs() -> None:
    """Of the kinds that people write."""
    assert len(GUILTY) >= 14


@pytest.mark.parametrize("names", GROUPS, ids=",".join)
def test_the_guilty_line_is_named(names: Sequence[str], nvml_library: Path, tmp_path: Path) -> None:
    """It is the first line of the first finding; each program has a machine of its own."""
    with ThreadPoolExecutor(len(names)) as pool:
        found = pool.map(lambda name: first_place(name, nvml_library, tmp_path / name), names)

    assert {name: (f"{name}.py", guilty_line(name)) for name in names} == dict(zip(names, found, strict=True))


def test_no_line_is_claimed_where_none_stands_out(fake: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """The note has the three most frequent."""
    _, (finding, *_) = watched("spread_out", fake, nvml_library, tmp_path)

    assert [] == finding["where"]
    assert finding["where_note"].startswith("no single line stands out: ")


def test_a_healthy_program_is_not_touched(fake: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """There is no finding, and py-spy was never started."""
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    spy.chmod(0o755)
    with program("healthy", fake, tmp_path) as child:
        found = why(child.pid, fake.env(nvml_library), tmp_path / "reads", seconds=8.0, py_spy=spy)[
            "findings"
        ]

    assert [] == found
    assert not (tmp_path / "started").exists()


def test_lines_can_be_switched_off(fake: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """The finding has neither lines nor a note."""
    with program("dataset_getitem", fake, tmp_path) as child:
        for seconds in (5.0, 40.0):  # a busy machine gets more time
            env = fake.env(nvml_library)
            found = why(child.pid, env, tmp_path / "reads", "--no-lines", seconds=seconds)["findings"]
            if found:
                break

    assert 0 == count_reads(tmp_path / "reads")
    assert found
    assert not {"where", "where_note"} & found[0].keys()


def test_a_command_is_read_as_well(fake: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """`gpulse why -- COMMAND` names the line on the terminal, and draws it."""
    plot, name = tmp_path / "why.svg", "dataset_getitem"
    for number in READS:
        output = why_of_a_command(name, fake, nvml_library, tmp_path, plot, number)
        if "Where " in output:
            break

    assert f"Where    {name}.py:{guilty_line(name)} Pictures.decode, " in output
    assert "stacks taken while the GPU was idle" in output
    assert f"{name}.py:{guilty_line(name)}" in plot.read_text()


def why_of_a_command(name: str, fake: FakeNvml, library: Path, folder: Path, plot: Path, reads: int) -> str:
    """What `gpulse why -- COMMAND` prints about a program that is killed after so many reads."""
    file = folder / f"{reads}-reads"
    with pretended_gpu(fake, folder) as env:
        watching = subprocess.Popen(
            why_command("--plot", str(plot), "--no-color", "--", *command(name), reads=file),
            env=environment({**env, **fake.env(library), "COLUMNS": "140"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        wait_until(lambda: children_of(watching.pid))
        (child, *_) = children_of(watching.pid)
        fake.add_process(0, child, 2 << 30, sm=50)
        wait_until(lambda: count_reads(file) >= reads)
        os.kill(child, signal.SIGKILL)
        output, _ = watching.communicate(timeout=60.0)
        fake.remove_process(0, child)
    return output


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user as well")
def test_another_users_program_keeps_its_verdict(nvml_library: Path) -> None:
    """One sentence says why there is no line, and which command gives it."""
    with tempfile.TemporaryDirectory(prefix="gpulse-lines-") as made:
        folder = Path(made)
        folder.chmod(0o777)
        library = Path(shutil.copy(nvml_library, folder))
        fake = FakeNvml.create(folder / "control", 1)
        fake.path.chmod(0o666)
        pid, (finding, *_) = watched(
            "dataset_getitem",
            fake,
            library,
            folder,
            is_enough=lambda finding: "process" in finding.get("where_note", ""),
            reads=(1, 1),
            prefix=AS_NOBODY,
        )
        fake.close()

    assert "where" not in finding
    assert (
        f"line of code unknown: process {pid} belongs to another user; run gpulse, or its agent, as root: sudo gpulse why --pid {pid}"
        == finding["where_note"]
    )


def test_stacks_are_printed_once(fake: FakeNvml, nvml_library: Path, tmp_path: Path) -> None:
    """Of the processes on GPUs, then of their workers, equal ones together."""
    with program("worker_processes", fake, tmp_path, workers=2) as child:
        text = run("stacks", env=fake.env(nvml_library))
        document = json.loads(run("stacks", "--json", env=fake.env(nvml_library)).out)
        own = run("stacks", "--pid", str(child.pid))
        none = run("stacks", "--job", "4711", env=fake.env(nvml_library))

    assert (0, "") == (text.code, text.err)
    assert f"1 process, pid {child.pid}, GPU 0" == text.out.splitlines()[0]
    assert "worker_processes.py:" in text.out
    assert {"time", "groups", "problems", "unanswered"} == document.keys()
    roles = [process["role"] for group in document["groups"] for process in group["processes"]]
    assert ["main", "worker", "worker"] == roles
    assert f"1 process, pid {child.pid}" == own.out.splitlines()[0]
    assert (2, "gpulse: no process of job 4711 uses a GPU of this machine") == (
        none.code,
        none.err.splitlines()[0],
    )


def test_stacks_of_a_process_that_is_not_python_are_nothing_to_show() -> None:
    """The reason is printed."""
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        ended = run("stacks", "--pid", str(sleeping.pid))
        sleeping.kill()

    assert 3 == ended.code
    assert f"no stacks of pid {sleeping.pid}: process {sleeping.pid} is not a Python program\n" == ended.out


def test_doctor_says_whether_lines_can_be_named() -> None:
    """Before anybody needs them."""
    checks = {check["topic"]: check for check in json.loads(run("doctor", "--json").out)}
    script = "import sys; sys.executable = '/nonexistent/python'; from gpulse.cli.entry import main; main()"
    without = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--json"],
        env=environment({"PATH": "/nonexistent"}),
        capture_output=True,
        check=False,
    )
    missing = {check["topic"]: check for check in json.loads(without.stdout)}["lines of code"]

    assert "lines of code" in checks
    assert ("limited", "py-spy is not installed, so `gpulse why` cannot name lines of code") == (
        missing["status"],
        missing["detail"],
    )
    assert "lines]" in missing["advice"]
    assert (BIN / "py-spy").exists()
