"""Makes records of workers as a monitored cluster writes them: jobs, graphs, GPUs, gaps."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpulse.integrations.dask.csv_files import WorkerTable, format_file_name, parse_record, write_files

GIB = 1 << 30
Reading = Callable[["Instant"], Any]


class Instant(NamedTuple):
    """What a made-up worker is asked about."""

    place: int
    seconds: float
    job: int
    dag: int
    gpus: int
    worker: int
    dice: random.Random


class Plan(NamedTuple):
    """What a record is to hold."""

    metrics: tuple[str, ...] = ("tasks", "total-mem", "mem-util", "compute-util")
    lines: int = 300
    gpus: int = 2
    interval: float = 0.2
    jobs: int = 2
    dags: int = 3
    gap: tuple[float, float] | None = None
    """From when to when the worker was away."""
    worker: int = 0
    start: float = 0.0


def busy(at: Instant, gpu: int) -> float:
    """How busy a GPU is, from 0 to 1: waves while a graph runs, little between graphs."""
    if not at.dag:
        return at.dice.uniform(0.0, 0.05)
    wave = (
        0.55
        + 0.35 * math.sin(at.seconds / (3 + at.dag % 4) + gpu + 2.4 * at.worker)
        + 0.08 * at.dice.uniform(-1, 1)
    )
    return min(1.0, max(0.0, wave))


def _each(read: Callable[[Instant, int], Any]) -> Reading:
    return lambda at: [read(at, gpu) for gpu in range(at.gpus)]


def _memory(at: Instant, gpu: int) -> float:
    return (
        0.1
        + 0.08 * (gpu % 4)
        + 0.03 * (at.worker % 3)
        + (0.45 + 0.1 * math.sin(at.seconds / 20)) * bool(at.dag)
    )


READINGS: dict[str, Reading] = {
    "tasks": lambda at: [f"('transform-{at.dag:04x}', {at.place % 97})", "read-0"] if at.dag else [],
    "total-mem": _each(lambda at, gpu: int(80 * GIB * min(1.0, _memory(at, gpu)))),
    "mem-util": _each(lambda at, gpu: round(100 * min(1.0, _memory(at, gpu)), 2)),
    "compute-util": _each(lambda at, gpu: round(100 * busy(at, gpu))),
    "power_watts": _each(lambda at, gpu: round(90 + 600 * busy(at, gpu), 3)),
    "cpu_utilization_ratio": lambda at: round(0.2 + 0.6 * busy(at, 0), 4),
    "rx_bytes_per_second": lambda at: {"eth0": round(1e8 * busy(at, 0), 1), "lo": 0.0},
    "rows-done": lambda at: at.place * 1000,
}
"""What each metric says; any other is unknown."""


def lines_of(plan: Plan) -> Iterator[list[Any]]:
    """The cells of each line, as Python values."""
    dice = random.Random(plan.worker)
    each = max(1, plan.lines // max(1, plan.jobs))
    for place in range(plan.lines):
        seconds = plan.start + place * plan.interval
        if plan.gap and plan.gap[0] <= seconds < plan.gap[1]:
            continue
        job, within = min(plan.jobs, 1 + place // each) if plan.jobs else 0, place % each / each
        dag = 1 + int(within * plan.dags) if job and plan.dags else 0
        pause = plan.dags <= 20 and within * plan.dags % 1 > 0.9
        at = Instant(place, seconds, job, 0 if pause else dag, plan.gpus, plan.worker, dice)
        yield [
            at.job,
            at.dag,
            seconds,
            *(READINGS[name](at) if name in READINGS else None for name in plan.metrics),
        ]


def as_bytes(columns: Sequence[str], lines: Iterator[list[Any]] | Sequence[list[Any]]) -> tuple[bytes, bytes]:
    """The header and the lines of a record."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for job, dag, seconds, *values in lines:
        writer.writerow(
            [job, dag, f"{seconds:.3f}", *("" if value is None else json.dumps(value) for value in values)]
        )
    return ",".join(("job", "dag", "timestamp", *columns)).encode(), text.getvalue().encode()


def record(plan: Plan | None = None) -> tuple[bytes, list[bytes]]:
    """A made-up record: its header, and its lines in one chunk."""
    plan = plan or Plan()
    header, lines = as_bytes(plan.metrics, lines_of(plan))
    return header, [lines]


def table(columns: Sequence[str], *lines: list[Any]) -> WorkerTable:
    """A record of these very lines."""
    header, content = as_bytes(columns, lines)
    return parse_record(header, [content], "worker-0.csv")


def export(folder: Path, plan: Plan | None = None, workers: int = 1) -> Path:
    """The files of a made-up cluster, in a folder."""
    plan = plan or Plan()
    write_files(folder, {index: record(plan._replace(worker=index)) for index in range(workers)})
    return folder


def one_file(folder: Path, plan: Plan | None = None) -> Path:
    """The file of a made-up worker."""
    return export(folder, plan) / format_file_name(0)
