"""`gpulse dask` against a real scheduler with two workers, and against what is none."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from gpulse.integrations.dask import Monitor
from tests.integration.cluster import free_port
from tests.integration.commands import Ended, run, terminal
from tests.integration.dask_machine import DaskMachine, columns, dask_machine, read_rows
from tests.integration.dask_tasks import seen

pytestmark = pytest.mark.slow

CUSTOM = """
from gpulse.integrations.dask import custom_metric
from tests.integration.dask_tasks import beat

@custom_metric("beat", per_device=False)
def counted(worker, handles):
    return beat(worker, handles)
"""
"""A metric of somebody's own, in a file that the workers do not have."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[DaskMachine]:
    """A scheduler and two workers with a GPU each, for all tests of this file."""
    with dask_machine(tmp_path_factory.mktemp("dask"), nvml_library) as made:
        made.start_workers(["0", "1"])
        yield made


def dask(machine: DaskMachine, *words: str | Path) -> Ended:
    """Run `gpulse dask` as somebody on that machine."""
    return run("dask", *words, env=machine.environment, cwd=machine.directory)


def answer_lines(ended: Ended) -> int:
    """Return how many lines of errors there are, without those that say what a slow machine waits for."""
    return sum(
        not line.startswith("waiting for ") and not line.endswith(" ...") for line in ended.err.splitlines()
    )


def ask(machine: DaskMachine, *words: str | Path) -> str:
    """Run `gpulse dask` without anything going wrong or being said beside the answer; the answer."""
    ended = dask(machine, *words)
    assert (0, 0) == (ended.code, answer_lines(ended)), ended.err
    return ended.out


def test_from_attaching_to_files(machine: DaskMachine) -> None:
    """Everything that people do without code, each time with a connection of its own."""
    at, folder = machine.address, machine.directory / "out"
    (machine.directory / "metrics.py").write_text(CUSTOM)
    attached = ask(
        *(machine, "attach", at, "--track", "tasks,mem-util", "--track", "compute-util", "--interval", "50"),
        *("--custom", "metrics.py:counted", "--start"),
    )
    assert (
        "recording: tasks, mem-util, compute-util, beat of 2 workers with 1 GPU each (NVIDIA H200), every 50 ms\n"
        f"stop recording with: gpulse dask stop {at}\n"
    ) == attached
    with machine.client() as client:
        client.gather(client.map(seen, range(2), pure=False))

    shown = ask(machine, "status", at)
    assert "is being monitored: newest job 1 (one job per client), 1 graph" in shown
    assert 2 == shown.count("  recording  1 NVIDIA H200  ")
    assert "stopped: " in ask(machine, "stop", at)
    assert f"wrote 2 files to {folder}: worker-0.csv, worker-1.csv\n" == ask(machine, "csv", at, folder)
    expected = ["job", "dag", "timestamp", "tasks", "mem-util", "compute-util", "beat"]
    assert [expected] * 2 == [columns(folder / f"worker-{index}.csv") for index in (0, 1)]
    assert {(1, 1)} <= {row.label for row in read_rows(folder / "worker-0.csv")}
    peaks = json.loads(ask(machine, "peaks", at, "beat", "--workers", "1,0", "--json"))
    assert Monitor.peaks_from_csv(folder, "beat", [1, 0]) == [
        {peak["job"]: peak["values"]} for peak in peaks["peaks"]
    ]
    assert "detached; discarded: " in ask(machine, "detach", at)


def test_nothing_attached_is_3(machine: DaskMachine) -> None:
    """So that scripts can tell."""
    ended = dask(machine, "status", machine.address)

    assert (3, "", 2) == (ended.code, ended.out, answer_lines(ended))
    assert "no monitor is attached to this cluster: `gpulse dask attach` was never called, " in ended.err
    assert f"\n  try: gpulse dask attach {machine.address} --start\n" in ended.err


def test_what_makes_no_sense_is_refused(machine: DaskMachine) -> None:
    """With what is allowed, in one message and in the words of the command line."""
    file = machine.directory / "scheduler.json"
    file.write_text(json.dumps({"address": machine.address}))
    ended = dask(machine, "attach", "--scheduler-file", file, "--interval=-1")

    assert (2, "") == (ended.code, ended.out)
    assert "gpulse: --interval must be a number of milliseconds from 50" in ended.err
    assert "\n  try: gpulse dask attach --help\n" in ended.err


def test_a_worker_is_no_scheduler(machine: DaskMachine) -> None:
    """The commonest address to be taken for the scheduler's."""
    ended = dask(machine, "status", machine.workers["w0"].address)

    assert 1 == ended.code
    assert "is the address of a Dask worker, not of a scheduler\n  try: use HOST" in ended.err


def test_nobody_there_is_said_at_once() -> None:
    """Dask alone would try for as long as it may."""
    ended = run("dask", "status", f"127.0.0.1:{free_port()}", "--timeout", "600")

    assert (1, "", 2) == (ended.code, ended.out, answer_lines(ended))
    assert "Connection refused" in ended.err


@contextmanager
def silence() -> Iterator[socket.socket]:
    """A port at which somebody listens who never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener


def place_of(listener: socket.socket) -> str:
    """As people write it."""
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_silence_is_not_waited_for_too_long() -> None:
    """What listens there may be anything."""
    with silence() as listener:
        ended = run("dask", "status", place_of(listener), "--timeout", "0.6")

    assert (1, "", 2) == (ended.code, ended.out, answer_lines(ended))
    assert "no Dask scheduler answered at tcp://127.0.0.1:" in ended.err
    assert "this is the scheduler's address, not its dashboard's" in ended.err


def answer(listener: socket.socket, said: bytes) -> None:
    """Say the same to everybody, and hang up."""
    with suppress(OSError):  # it was closed
        while True:
            with listener.accept()[0] as connection:
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass


@pytest.mark.parametrize(
    "said",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", bytes(64), b"\xff" * 64],
    ids=["web", "zeros", "ones"],
)
def test_what_speaks_another_language_is_no_scheduler(said: bytes) -> None:
    """Dask takes it for the length of a message, whatever it is."""
    with silence() as listener:
        answering = Thread(target=answer, args=(listener, said))
        answering.start()
        ended = run("dask", "status", place_of(listener))
        listener.shutdown(socket.SHUT_RDWR)
        answering.join()

    assert (1, "", 2) == (ended.code, ended.out, answer_lines(ended))
    assert "is not a Dask scheduler: it does not speak" in ended.err
    assert "HOST:8786" in ended.err


def test_a_mistyped_folder_may_have_been_meant() -> None:
    """A name without a dot or slash is a host, too."""
    ended = run("dask", "peaks", f"localhost:{free_port()}", "mem-util")

    assert 1 == ended.code
    assert "or give a directory that `gpulse dask csv` wrote ('localhost:" in ended.err


def test_ctrl_c_ends_the_waiting() -> None:
    """At once, without a word, as everywhere."""
    with silence() as listener:
        command = terminal("dask", "stop", place_of(listener), "--timeout", "30")
        with command as screen, listener.accept()[0]:
            screen.press_ctrl_c()
            said = screen.to_the_end()

    assert (130, b"^C") == (screen.child.returncode, said.replace(b"\r\x1b[K", b"").strip())
