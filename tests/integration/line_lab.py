"""Runs the programs of tests/line_programs beside the fake driver, which reports what their pretended GPU did."""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.fakes.nvml import FakeNvml
from tests.integration.commands import environment

PROGRAMS = Path(__file__).parents[1] / "line_programs"
_STATE = struct.Struct("<ddd")
_GRAPHICS, _SM, _TENSOR, _DRAM, _RECEIVED = 1, 2, 5, 10, 21
"""Numbers of GPM's metrics."""
_TICK_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0
_MEAN_SECONDS = 0.2
"""The driver reports means over this time."""
_WHY = """
import sys, time
from gpulse.diagnosis import thresholds
thresholds.DEFAULTS = thresholds.DEFAULTS._replace(min_seconds=3.0)
from gpulse.cli import why_sources
from gpulse.sampling.stack_collector import StackCollector
why_sources.MIN_WORK_SECONDS = 2.0
why_sources._EVERY_SECONDS = 0.5

def collect_quickly(reader):
    def read(pid):
        stacks = reader.read(pid, time.time)
        with open({reads!r}, "a") as file:
            file.write("x")
        return stacks
    return StackCollector(read, interval_seconds=0.2, max_cpu_share=0.5)

why_sources.collect_with = collect_quickly
{spy}
from gpulse.cli.entry import main
main()
"""
"""`gpulse` that judges after three seconds, suspects after two and reads stacks five times a second, so that a program
need not run for twenty. It notes each read in a file."""


class PretendedGpu:
    """The state of a program's pretended GPU, which the fake driver follows."""

    def __init__(self, path: Path, fake: FakeNvml) -> None:
        path.write_bytes(bytes(_STATE.size))
        self._fake = fake
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _STATE.size)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following the program."""
        self._over.set()
        self._thread.join()

    def _busy_seconds(self, now: float) -> float:
        began, until, before = _STATE.unpack_from(self._map)
        return float(before + max(0.0, min(now, until) - began))

    def _follow(self) -> None:
        seen: deque[tuple[float, float]] = deque([(time.time(), 0.0)])
        while not self._over.wait(_TICK_SECONDS):
            now = time.time()
            seen.append((now, self._busy_seconds(now)))
            while len(seen) > 2 and now - seen[1][0] >= _MEAN_SECONDS:
                seen.popleft()
            (begin, before), (end, after) = seen[0], seen[-1]
            self._report(min(1.0, max(0.0, (after - before) / (end - begin))))

    def _report(self, duty: float) -> None:
        gpu = self._fake.gpu(0)
        gpu.util_gpu = round(100 * duty)
        gpu.clocks[:] = [*gpu.clocks_max]  # a GPU with work boosts; the idle clock would look locked
        gpu.power_mw = gpu.power_average_mw = round(100_000 + 400_000 * duty)
        for metric, full in ((_GRAPHICS, 100.0), (_SM, 80.0), (_TENSOR, 45.0), (_DRAM, 40.0)):
            self._fake.set_gpm(0, metric, full * duty)
        self._fake.set_gpm(0, _RECEIVED, 60.0)  # MiB per second: a program that gives its GPU work


@contextmanager
def program(
    name: str, fake: FakeNvml, folder: Path, *, workers: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that uses the fake machine's GPU, and kill it in the end.

    Args:
        name: Its file, without the extension.
        fake: The machine.
        folder: For the state of the GPU.
        workers: Wait until it has this many children.
    """
    with pretended_gpu(fake, folder) as env:
        child = subprocess.Popen(
            command(name), env=environment(env), cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            fake.add_process(0, child.pid, 2 << 30, sm=50)
            wait_until(lambda: len(children_of(child.pid)) >= workers)
            yield child
        finally:
            fake.remove_process(0, child.pid)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def pretended_gpu(fake: FakeNvml, folder: Path) -> Iterator[dict[str, str]]:
    """Give the environment of a program whose kernels the fake driver shows."""
    state = folder / "pretended-gpu"
    gpu = PretendedGpu(state, fake)
    try:
        yield {"PRETEND_GPU": str(state), "PYTHONPATH": str(PROGRAMS / "site-packages")}
    finally:
        gpu.close()


def command(name: str) -> list[str]:
    """The command that runs a program."""
    return [sys.executable, str(PROGRAMS / f"{name}.py")]


def children_of(pid: int) -> list[int]:
    """The children of a process's main thread."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until something is so; it must come to pass within a minute."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


def why_command(*options: str, reads: Path, py_spy: Path | None = None) -> list[str]:
    """The command that diagnoses sooner than usual, if wanted with another py-spy.

    Args:
        options: Options of `gpulse why`.
        reads: File that gets a character for each read of a stack.
        py_spy: Instead of the real one.
    """
    spy = "" if py_spy is None else f"why_sources.find_py_spy = lambda: {str(py_spy)!r}"
    return [sys.executable, "-c", _WHY.format(spy=spy, reads=str(reads)), "why", *options]


def count_reads(reads: Path) -> int:
    """How often stacks were read."""
    return reads.stat().st_size if reads.exists() else 0


def why(
    pid: int,
    env: Mapping[str, str],
    reads: Path,
    *options: str,
    seconds: float = _PATIENCE_SECONDS,
    enough_reads: int | None = None,
    py_spy: Path | None = None,
    prefix: Sequence[str] = (),
) -> dict[str, Any]:
    """Diagnose a process with `gpulse why`, and return its JSON.

    Args:
        pid: The process.
        env: Environment of the command.
        reads: File that counts the reads of stacks.
        options: More options.
        seconds: How long to watch.
        enough_reads: End the watching after this many more reads, as Ctrl-C does.
        py_spy: Instead of the real one.
        prefix: Runs the command.
    """
    words = ("--json", "--pid", str(pid), "--window", f"{seconds}", *options)
    before = count_reads(reads)
    watching = subprocess.Popen(
        [*prefix, *why_command(*words, reads=reads, py_spy=py_spy)],
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        if enough_reads is not None:
            deadline = time.monotonic() + seconds
            while count_reads(reads) < before + enough_reads and time.monotonic() < deadline:
                if watching.poll() is not None:
                    break
                time.sleep(0.02)
            watching.send_signal(signal.SIGINT)
        output, errors = watching.communicate(timeout=seconds + _PATIENCE_SECONDS)
    finally:
        watching.kill()
        watching.communicate()
    assert watching.returncode in (0, 1, 3), f"{watching.returncode}: {errors.decode()}{output.decode()}"
    document: dict[str, Any] = json.loads(output)
    return document


def guilty_line(name: str) -> int | None:
    """Return the line that is marked in a program."""
    lines = (PROGRAMS / f"{name}.py").read_text().splitlines()
    return next((number for number, text in enumerate(lines, 1) if text.endswith("# guilty")), None)
