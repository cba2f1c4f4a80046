"""What a report about a job costs its head: a day of eight GPUs, in the middle of a thousand others."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table, Target
from benchmarks.past import Maker, Size, make_metadata, make_recent
from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol.requests import GetJob, Time
from gpulse.errors import RefusedError
from gpulse.export.job_report_html import build_page
from gpulse.model.metric_catalog import CATALOG
from gpulse.reports.job_gpu_use import METRICS
from gpulse.reports.job_report import JobReport
from gpulse.reports.report_subject import JobKind
from gpulse.store.history import gpu_share_files
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.local import StoreReader
from gpulse.store.node_registry import NodeRegistry

NAME = "job"
_DAY = 86_400
_NODE = 3
_GPUS = 8
_JOB = "slurm:4711"
_TOLD_SECONDS = 30
_OTHERS = 50_000
"""Short jobs of others in that day, as arrays of them are."""
_MOST_SECONDS = 1.0
_POINTS = 240


def add_job(path: Path, size: Size) -> None:
    """One job on all GPUs of a node for a day, and what the agents of all nodes said meanwhile."""
    begin = size.end - _DAY
    uuids = [f"GPU-{_NODE:08d}-0000-4000-8000-{gpu:012d}" for gpu in range(_GPUS)]
    job = {"id": _JOB, "user": "ada", "name": "llama", "partition": "gpu", "gpus": uuids}
    finding = {"id": "input_io_bound", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}
    rows = [(float(begin), _NODE, "job", 1, json.dumps(job))]
    for node in range(size.nodes):
        told = json.dumps({"findings": [finding] if node == _NODE else []})
        rows += [
            (float(moment), node, "findings", 1, told) for moment in range(begin, size.end, _TOLD_SECONDS)
        ]
    for number in range(_OTHERS):
        node, begun = number % size.nodes, begin + number * (_DAY - 60) / _OTHERS
        other = {"id": f"slurm:{100_000 + number}", "user": "bob", "name": "sweep", "array": f"99_{number}"}
        rows.append((begun, node, "job", 1, json.dumps(other)))
        rows.append((begun + 30.0, node, "job_end", 1, json.dumps({"job": other["id"]})))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "UPDATE processes SET job = ?1, identity = json_set(identity, '$.owner.job', ?1, '$.owner.user', 'ada') "
            "WHERE node = ?2 AND ended > ?3",
            (_JOB, _NODE, begin),
        )
        database.executemany(
            "INSERT INTO events (time, node, kind, from_frame, detail) VALUES (?, ?, ?, ?, ?)", rows
        )
        database.execute("UPDATE events SET job = detail ->> '$.job' WHERE kind = 'job_end'")
        database.execute(
            "UPDATE events SET job = detail ->> '$.id', job_number = replace(detail ->> '$.id', 'slurm:', ''), "
            "job_array = detail ->> '$.array', job_name = detail ->> '$.name' WHERE kind = 'job'"
        )


def _asked(
    reports: ReportRunner, takes: int, size: Size, **asked: Any
) -> tuple[float, Spread, Spread, JobReport | RefusedError]:
    """The first answer's time, the spread of later ones in time and CPU time, and an answer; a refusal is one, too."""
    kind: JobKind | None = asked.pop("kind", None)
    wanted = GetJob(**{"kind": kind, "start": Time(size.end - _DAY), **asked})
    times, spent = [], []
    answer: JobReport | RefusedError
    for _ in range(takes + 1):
        begun, used = time.perf_counter(), time.process_time()
        try:
            answer = asyncio.run(reports.job(wanted, float(size.end)))
            msgspec.json.encode(answer)
        except RefusedError as error:
            answer = error
        times.append(time.perf_counter() - begun)
        spent.append(time.process_time() - used)
    return times[0], Spread.of(times[1:]), Spread.of(spent[1:]), answer


def run(*, quick: bool, takes: int) -> Report:
    """Make a store of some days and ask for reports."""
    report = Report(NAME, "Reports about jobs")
    size = Size(16, 3) if quick else Size(125, 30)
    base = Path(tempfile.mkdtemp(prefix="gpulse-job-"))
    try:
        Maker(
            base, size, tuple(dict.fromkeys((*gpu_share_files.GPU_METRICS, *METRICS, *CATALOG["gpu"])))[:45]
        ).make()
        recent, layouts, texts = make_recent(size)
        with (
            make_metadata(base / "metadata.sqlite", size, layouts, texts) as metadata,
            closing(SealedHistory(base)) as history,
        ):
            add_job(base / "metadata.sqlite", size)
            store = StoreReader(metadata, history, recent)
            reports = ReportRunner(store, NodeRegistry(metadata.nodes().values()), lambda: 1.0)
            _questions(report, reports, size, takes)
    finally:
        shutil.rmtree(base)
    report.notes.append(
        f"{size.nodes * _GPUS} GPUs with {size.days} days of history, of which the cluster's average is made too, and "
        f"{_OTHERS:,} other jobs on that day; "
        "JSON is written, the way to the client is not measured."
    )
    return report


def _questions(report: Report, reports: ReportRunner, size: Size, takes: int) -> None:
    gpus = size.nodes * _GPUS
    table = Table("", ("what", "first", "later", "CPU", "answer"))
    for what, asked in (
        (f"a day of {_GPUS} of {gpus} GPUs", {"job": "4711"}),
        ("the same, as a page", {"job": "4711", "points": _POINTS}),
        ("the same, without saying when it was", {"job": "4711", "start": None}),
        ("a process and all below it", {"job": str(_pid()), "kind": "process"}),
        ("a job that there is not", {"job": "nothing", "start": None}),
    ):
        first, spread, spent, answer = _asked(reports, takes, size, **asked)
        told = (
            answer.message
            if isinstance(answer, RefusedError)
            else f"{answer.gpu_seconds / 3600:.0f} GPU-hours of {answer.gpus} GPUs"
        )
        table.rows.append(
            (what, f"{first * 1e3:.0f} ms", spread.text(1e3, 0, " ms"), spent.text(1e3, 0, " ms"), told)
        )
        if asked == {"job": "4711"}:
            target = f"{_MOST_SECONDS:.0f} s"
            is_met = max(first, spread.median) <= _MOST_SECONDS
            report.targets.append(Target(what, spread.text(1.0, 2, " s"), target, is_met))
        if isinstance(answer, JobReport) and answer.series:
            begun = time.perf_counter()
            text = build_page(answer)
            written = (time.perf_counter() - begun) * 1e3
            report.notes.append(f"The page has {len(text) / 1e3:.0f} kB and is written in {written:.0f} ms.")
    report.tables.append(table)


def _pid() -> int:
    """A process of the job's last hours."""
    return 1000 + _NODE * 1000 + 2 * 100


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"takes": 5}).parse_args()
    measure.publish(run(quick=given.quick, takes=given.takes), write=given.write)
