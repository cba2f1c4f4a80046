"""Real Dask clusters for tests: a scheduler and workers as processes, on a machine with the fake driver's GPUs."""

from __future__ import annotations

import csv
import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pynvml
from distributed import Client
from distributed.utils import _offload_executor

from tests.fakes.nvml import FakeNvml
from tests.integration.cluster import Process, free_port, until

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
_AMBIENT = ("CUDA_", "DASK_")
"""Nothing of the environment of whoever runs the tests says how dask or CUDA are set."""
# The one thread that dask starts when it must and never ends is no test's own.
_offload_executor.submit(int).result()


class DaskProcess(Process):
    """A `dask scheduler` or a `dask worker`."""

    name: str

    @cached_property
    def address(self) -> str:
        """Where it listens, once it does."""
        words = "Scheduler at:" if self.name == "scheduler" else "Start worker at:"
        return self.said(words).split()[-1]


class DaskMachine:
    """One machine with GPUs, and the cluster that runs on it."""

    def __init__(self, directory: Path, library: Path, gpus: int = 2) -> None:
        """A machine without GPUs has no driver either."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.fake = FakeNvml.create(directory / "nvml-control", gpus=gpus)
        if not gpus:
            self.fake.fail_init(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.environment = {
            **self.fake.env(library),
            "DASK_CONFIG": str(directory / "config"),
            "DASK_TEMPORARY_DIRECTORY": str(directory / "scratch"),
            "HOME": str(directory),
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "XDG_STATE_HOME": str(directory / "state"),
        }
        self.port = free_port()
        self.address = f"tcp://{HOST}:{self.port}"
        self.workers: dict[str, DaskProcess] = {}
        self._stack = ExitStack()
        self._stack.callback(self.fake.close)
        self.scheduler = self.start_scheduler()

    def start_scheduler(self, *options: str) -> DaskProcess:
        """Start a scheduler, always at the same address; it may still be about to listen."""
        command = ["scheduler", "--host", HOST, "--port", str(self.port), "--no-dashboard", *options]
        self.scheduler = self._started(command, "scheduler", {})
        return self.scheduler

    def worker(
        self,
        name: str,
        *options: str,
        visible: str | None = None,
        threads: int = 1,
        port: int = 0,
        nanny: bool = False,
        env: dict[str, str] | None = None,
    ) -> DaskProcess:
        """Start a worker that sees these GPUs (as CUDA_VISIBLE_DEVICES says it), or all of them."""
        command = [
            *("worker", self.address, "--name", name, "--host", HOST, "--worker-port", str(port)),
            *("--nthreads", str(threads), "--memory-limit", "0", "--death-timeout", "60", "--no-dashboard"),
            *("--local-directory", str(self.directory / "scratch"), "--nanny" if nanny else "--no-nanny"),
            *options,
        ]
        seen = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        started = self._started(command, name, {**seen, **(env or {})}, gently=nanny)
        self.workers[name] = started
        return started

    def start_workers(self, visible: Sequence[str | None], *, threads: int = 1, prefix: str = "w") -> None:
        """Start workers at once, called `w0`, `w1` and so on, and wait until all have joined."""
        started = [
            self.worker(f"{prefix}{number}", visible=seen, threads=threads)
            for number, seen in enumerate(visible)
        ]
        for process in started:
            self.joined(process)

    def joined(self, process: DaskProcess) -> DaskProcess:
        """Wait until a worker has joined."""
        process.said("Registered to")
        return process

    def restart(self, name: str, **given: Any) -> DaskProcess:
        """Start a worker that has ended again, under its old address."""
        port = int(self.workers[name].address.rpartition(":")[2])
        return self.joined(self.worker(name, port=port, **given))

    def _started(
        self, command: list[str], name: str, env: dict[str, str], *, gently: bool = False
    ) -> DaskProcess:
        process = DaskProcess(
            *command,
            cwd=self.directory,
            env={**self.environment, **env},
            module="dask",
            unset=_AMBIENT,
        )
        process.name = name
        self._stack.callback(process.end, signal.SIGKILL)
        if gently:
            self._stack.callback(process.end)
        return process

    @contextmanager
    def client(self, **given: Any) -> Iterator[Any]:
        """A connection of its own, which is not the one that computations take by default."""
        made: Any = Client  # it has no types
        with made(self.address, **{"set_as_default": False, "timeout": 30, **given}) as client:
            yield client

    def run_script(self, path: Path, *arguments: str, env: dict[str, str] | None = None) -> Process:
        """Run a program with the machine's environment to its end."""
        process = Process(
            *arguments,
            cwd=self.directory,
            env={"MPLBACKEND": "agg", **self.environment, **(env or {})},
            unset=_AMBIENT,
            command=[sys.executable, str(path)],
        )
        try:
            process.popen.wait(60)
        finally:
            process.kill()
        return process

    def logs(self) -> str:
        """What everybody said."""
        return "\n".join(
            f"--- {process.name}\n{process.text}" for process in (self.scheduler, *self.workers.values())
        )

    def close(self) -> None:
        """End everything."""
        self._stack.close()


@contextmanager
def dask_machine(directory: Path, library: Path, gpus: int = 2) -> Iterator[DaskMachine]:
    """A machine with a scheduler, gone in the end; give it workers."""
    machine = DaskMachine(directory, library, gpus)
    try:
        yield machine
    finally:
        machine.close()


class Row(NamedTuple):
    """One line of a worker's file."""

    job: int
    dag: int
    timestamp: float
    cells: dict[str, Any]
    """The other columns, None where they are empty."""

    @property
    def label(self) -> tuple[int, int]:
        """Job and graph."""
        return self.job, self.dag


def read_rows(path: Path) -> list[Row]:
    """The lines of a worker's file, read as the documentation describes them and by none of our own code."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file, strict=True)
        header = next(lines)
        assert ["job", "dag", "timestamp"] == header[:3]
        return [_row(header, line) for line in lines]


def _row(header: Sequence[str], line: Sequence[str]) -> Row:
    assert len(header) == len(line), line
    values = [json.loads(cell) if cell else None for cell in line[3:]]
    return Row(int(line[0]), int(line[1]), float(line[2]), dict(zip(header[3:], values, strict=True)))


def columns(path: Path) -> list[str]:
    """The names in the first line of a worker's file."""
    with path.open(newline="", encoding="utf-8") as file:
        return next(csv.reader(file))


def labels_of(rows: Iterable[Row], prefix: str) -> set[tuple[int, int]]:
    """Jobs and graphs of the lines in which a task ran whose key begins so."""
    return {row.label for row in rows if any(prefix in key for key in row.cells["tasks"])}


def rows_until(
    read: Callable[[], Iterable[Row]], condition: Callable[[list[Row]], bool], what: str
) -> list[Row]:
    """Read a record again and again until it is as it should be."""
    found: list[Row] = []

    def as_wanted() -> bool:
        found[:] = read()
        return condition(found)

    until(as_wanted, what)
    return found
