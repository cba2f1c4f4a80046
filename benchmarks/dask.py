"""What monitoring costs a Dask cluster: time of its tasks, memory of eight hours, and the time of an export."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from distributed import wait
from tests.fakes.nvml import build
from tests.integration.dask_machine import DaskMachine, dask_machine

from benchmarks import measure
from benchmarks.children import dask_rows
from benchmarks.measure import Report, Spread, Table, Target
from gpulse.integrations.dask import Monitor

NAME = "dask"
_GPUS = 8
_WORKERS = 2
_TRACKING = ["tasks", "total-mem", "mem-util", "compute-util"]
_SETTLE_SECONDS = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")
_UNREST = 0.01
"""Two equal runs that differ by more cannot tell whether the target is met."""


class Size(NamedTuple):
    """How much of everything."""

    tasks: int = 20_000
    rounds: int = 5
    hours: float = 8.0
    mem_limit: int = 1_000


_FULL = Size()
_QUICK = Size(tasks=1_000, rounds=2, hours=0.25)


@contextmanager
def _cluster() -> Iterator[DaskMachine]:
    """A scheduler and two workers that see eight H200s, as slow as real ones."""
    folder = Path(tempfile.mkdtemp(prefix="gpulse-bench-"))
    try:
        with dask_machine(folder / "machine", build(folder / "library"), _GPUS) as machine:
            machine.fake.h200_latencies()
            machine.start_workers([None] * _WORKERS)
            yield machine
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _increment(number: int) -> int:
    return number + 1


class Take(NamedTuple):
    """What the same tasks cost once."""

    wall: float
    cpu: float
    """Of scheduler and workers."""


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _run_tasks(machine: DaskMachine, count: int) -> Take:
    pids = [machine.scheduler.popen.pid, *(worker.popen.pid for worker in machine.workers.values())]
    with machine.client() as client, client.as_current():
        before, begun = sum(map(_cpu_seconds, pids)), time.perf_counter()
        futures = client.map(_increment, range(count), pure=False)
        wait(futures)  # type: ignore[no-untyped-call]
        wall = time.perf_counter() - begun
        cpu = sum(map(_cpu_seconds, pids)) - before
        del futures
        while client.who_has():
            time.sleep(0.01)
    return Take(wall, cpu)


def overhead(report: Report, size: Size) -> None:
    """The same tasks with and without a monitor, in turn, on one cluster."""
    with _cluster() as machine, machine.client() as client:
        monitor = Monitor(client)

        def bare() -> Take:
            return _run_tasks(machine, size.tasks)

        def monitored() -> Take:
            monitor.attach(tracking=_TRACKING)
            monitor.start()
            time.sleep(_SETTLE_SECONDS)  # what is done once at the start is not the cost of a task
            take = _run_tasks(machine, size.tasks)
            monitor.stop()
            monitor.detach()
            return take

        bare()
        contenders: dict[str, Callable[[], Take]] = {
            "without": bare,
            "at 200 ms": monitored,
            "without again": bare,
        }
        takes = measure.in_turn(size.rounds, contenders)
    what = f"{size.tasks:,} short tasks on {_WORKERS} workers with {_GPUS} GPUs"
    table = Table(
        f"{what}, {size.rounds} rounds in turn:", ("", "wall", "over without", "CPU", "over without")
    )
    ratios = {}
    for name, found in takes.items():
        walls, cpus = ([getattr(take, field) for take in found] for field in ("wall", "cpu"))
        over = [
            _ratios([getattr(t, f) for t in takes["without"]], [getattr(t, f) for t in found])
            for f in ("wall", "cpu")
        ]
        ratios[name] = [Spread.of(values) for values in over]
        table.rows.append(
            (
                name,
                Spread.of(walls).text(digits=2, unit=" s"),
                ratios[name][0].text(digits=3),
                Spread.of(cpus).text(digits=2, unit=" s"),
                ratios[name][1].text(digits=3),
            )
        )
    report.tables.append(table)
    wall, unrest = ratios["at 200 ms"][0].median, ratios["without again"][0]
    is_quiet = max(abs(unrest.low - 1), abs(unrest.high - 1)) <= _UNREST
    met = wall <= 1 + _UNREST if is_quiet else None
    report.targets.append(Target(f"{what}: wall time against without", f"{wall:.3f}", "1.010", met))
    report.notes.append(
        "Ratios are taken round by round; `without again` is what the machine's own unrest makes of two equal runs. CPU is that "
        "of the scheduler and the workers together."
    )


def _ratios(base: list[float], other: list[float]) -> list[float]:
    return [mine / theirs for theirs, mine in zip(base, other, strict=True)]


def memory(report: Report, size: Size) -> None:
    """Eight hours of made-up time in a worker's recorder, and their lines in a real scheduler."""
    environment = measure.child_environment()
    with measure.child("dask_rows", [str(_GPUS), str(size.hours)], environment) as child:
        worker = child.hear()
    what = f"{size.hours:g} h at 200 ms with {_GPUS} GPUs"
    header = ("", "worker, at first", "and then", "scheduler", "on disk", "export")
    table = Table(f"{what}, one worker, {', '.join(_TRACKING)}:", header)
    for limit in (None, size.mem_limit):
        kept = _kept(size, limit)
        most = 200e6 if limit is None else 20e6
        name = "without mem_limit" if limit is None else f"mem_limit={limit}"
        table.rows.append(
            (
                name,
                *(_mb(kept.loaded), _mb(worker["grown"]), _mb(kept.grown), _mb(kept.on_disk)),
                f"{kept.export_seconds:.1f} s",
            )
        )
        in_worker = kept.loaded + worker["grown"]
        for place, grown in (("the worker", in_worker), ("the scheduler, a worker", kept.grown)):
            report.targets.append(
                Target(f"{what}, {name}: memory of {place}", _mb(grown), _mb(most), grown <= most)
            )
        report.targets.append(
            Target(
                f"{what}, {name}: export to CSV",
                f"{kept.export_seconds:.1f} s",
                "20 s",
                kept.export_seconds < 20,
            )
        )
    report.tables.append(table)
    report.notes.append(
        f"{worker['measurements']:,} measurements, {_mb(worker['bytes'])} as CSV. Memory is what the process does not share "
        f"with others, after what it was before. A measurement takes {1e6 * statistics.fmean(worker['seconds']):.0f} µs "
        "to be written as a line, readings aside."
    )


class Kept(NamedTuple):
    """What a record costs."""

    loaded: int
    """In a worker, before there is anything to keep."""
    grown: int
    """In the scheduler."""
    on_disk: int
    export_seconds: float


def _kept(size: Size, limit: int | None) -> Kept:
    with _cluster() as machine, machine.client() as client:
        dumps, out = machine.directory / "dumps", machine.directory / "out"
        worker = next(iter(machine.workers.values())).popen.pid
        bare = dask_rows.private_bytes(worker)
        monitor = Monitor(client)
        monitor.attach(tracking=_TRACKING, mem_limit=limit, dump_loc=str(dumps))
        monitor.start()
        time.sleep(_SETTLE_SECONDS)
        loaded = dask_rows.private_bytes(worker) - bare
        monitor.stop()
        scheduler: Any = client
        before = dask_rows.private_bytes(machine.scheduler.popen.pid)
        measurements = scheduler.run_on_scheduler(dask_rows.fill, _GPUS, size.hours)
        grown = dask_rows.private_bytes(machine.scheduler.popen.pid) - before
        on_disk = sum(path.stat().st_size for path in dumps.rglob("*") if path.is_file())
        begun = time.perf_counter()
        files = monitor.to_csv(out)
        seconds = time.perf_counter() - begun
        lines = sum(path.read_bytes().count(b"\n") - 1 for path in files)
        if lines < measurements:
            raise RuntimeError(f"{measurements - lines} of {measurements} measurements are missing")
        monitor.detach()
        return Kept(loaded, grown, on_disk, seconds)


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


class _Part(NamedTuple):
    title: str
    work: Callable[[Report, Size], None]


_PARTS = {
    "overhead": _Part("Monitoring a Dask cluster", overhead),
    "memory": _Part("Eight hours of a Dask worker", memory),
}


def main() -> None:
    """`python -m benchmarks.dask --only overhead`."""
    parser = measure.parser(NAME, __doc__)
    measure.add_only(parser, _PARTS)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = _QUICK if given.quick else _FULL
    for name in given.only:
        report = Report(f"{NAME}_{name}", _PARTS[name].title, module=NAME)
        _PARTS[name].work(report, size)
        measure.publish(report, write=given.write)


if __name__ == "__main__":
    main()
