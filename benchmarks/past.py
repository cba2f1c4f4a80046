"""What questions about weeks cost: one GPU's month as a chart, and who held a thousand GPUs in a day and in a month."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table, Target
from gpulse.cluster.head.operations import ReportRunner
from gpulse.cluster.protocol.requests import GetHistory, GetUsage, Time
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import BlockPacker, ColumnLayout, PackedFrame, SubjectValues
from gpulse.reports.metric_history import HistoryReport
from gpulse.reports.usage_report import UsageReport
from gpulse.store.history import compaction, gpu_share_files, rollup
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.parquet import FAST_COMPRESSION, open_database, write_file
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import SealedFile, Segment, new_segment, read_segments, write_meta
from gpulse.store.local import StoreReader
from gpulse.store.log.record_payloads import FrameBatch, LogEntry
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.metadata.log_updates import build_update
from gpulse.store.node_registry import NodeRegistry

NAME = "past"
_GPUS = 8
_NODES_A_FILE = 8
_HOUR, _DAY = 3600, 86_400
_DAYS = 30
_BEGIN = 1_760_054_400
"""Epoch seconds; midnight."""
_PIECE = 600
_NEWEST_SECONDS = 300
"""How long the frames go back that are not sealed yet."""
_JOBS_A_DAY = 3
_USERS = 40
_PROCESSES = 4
"""So many has a job for each of its GPUs; one or two of them hold it."""
_PID = "1000 + {} * 1000 + {} * 100 + {} * 10"
_NARROW = gpu_share_files.GPU_METRICS
_WIDE = tuple(name for name in CATALOG["gpu"])[:45]
_CHART = (
    "power_watts",
    "gpu_utilization_ratio",
    "sm_active_ratio",
    "memory_used_bytes",
    "temperature_celsius",
)
_COUNTER = "energy_joules_total"
_MOST_CHART, _MOST_DAY, _MOST_MONTH = 0.300, 0.500, 3.0


class Size(NamedTuple):
    """How much there is."""

    nodes: int
    days: int

    @property
    def end(self) -> int:
        """Epoch seconds of now, 37 seconds after a minute began."""
        return _BEGIN + self.days * _DAY - _HOUR + 6 * _PIECE + _NEWEST_SECONDS - 23


class Maker:
    """Makes a history as sealing and merging leave it, without a sample a second for a month."""

    def __init__(
        self, directory: Path, size: Size, wide: tuple[str, ...] = _WIDE, *, is_whole: bool = False
    ) -> None:
        """Prepare to write.

        Args:
            directory: Where the history goes.
            size: How much of it.
            wide: The metrics of the first nodes; others have fewer.
            is_whole: Whether hours that a summary stands for can be read as well, which takes minutes to write.
        """
        self._wide = wide
        self._is_whole = is_whole
        self._history = directory / "history"
        self._history.mkdir(parents=True)
        self._size = size
        self._database = open_database(str(directory / "spill"))
        self._position = 0

    def make(self) -> None:
        """Every day has its summary but the first, of which an hour is too old, and the last, which goes on."""
        with closing(self._database):
            hours = [self._hour(hour) for hour in range(24)]
            for _ in compaction.summarize_day(
                self._database, str(self._history), read_segments(str(self._history))
            ):
                pass
            template = next(self._history.glob("summary-*"))
            for day in range(1, self._size.days):
                for hour in range(24 if day < self._size.days - 1 else 23):
                    self._copy(hours[hour], day, is_real=self._is_whole or day == self._size.days - 1)
                if day < self._size.days - 1:
                    self._summary(template, day)
            for piece in range(6):
                self._piece(_BEGIN + self._size.days * _DAY - _HOUR + piece * _PIECE)
            shutil.rmtree(template)
            shutil.rmtree(self._history / hours[0].name)

    def _hour(self, hour: int) -> Segment:
        begin = _BEGIN + hour * _HOUR
        with self._segment(begin, _HOUR) as (target, files):
            for first in range(0, self._size.nodes, _NODES_A_FILE):
                nodes = range(first, min(first + _NODES_A_FILE, self._size.nodes))
                metrics = _NARROW if first else self._wide
                files.append(self._write(target, "gpu", nodes, _gpus(nodes, begin, _HOUR, 60, metrics), 60))
            nodes = range(self._size.nodes)
            files.append(self._write(target, "process", nodes, _processes(nodes, begin, _HOUR, 60), 60))
            files.extend(
                gpu_share_files.write_share_files(self._database, target, files, level=FAST_COMPRESSION)
            )
        return read_segments(str(self._history))[-1]

    def _piece(self, begin: int) -> None:
        """Ten minutes that are not merged yet."""
        nodes = range(self._size.nodes)
        with self._segment(begin, _PIECE, is_compacted=False) as (target, files):
            files.append(self._write(target, "gpu", nodes, _gpus(nodes, begin, _PIECE, 1, _NARROW), 0))
            files.append(self._write(target, "process", nodes, _processes(nodes, begin, _PIECE, 5), 0))
            files.extend(
                gpu_share_files.write_share_files(self._database, target, files, level=FAST_COMPRESSION)
            )

    @contextmanager
    def _segment(
        self, begin: int, seconds: int, *, is_compacted: bool = True
    ) -> Iterator[tuple[str, list[SealedFile]]]:
        self._position += 1
        position = self._position
        with new_segment(str(self._history), position, position) as target:
            files: list[SealedFile] = []
            yield target, files
            received = begin * 1_000_000, (begin + seconds) * 1_000_000
            write_meta(target, Segment(position, position, "", 0, received, is_compacted, tuple(files)))

    def _write(self, target: str, scope: Scope, nodes: range, query: str, seconds: int) -> SealedFile:
        suffix = f".{seconds}s" if seconds else ""
        name = f"{scope}-{nodes[0] // _NODES_A_FILE:06d}{suffix}.parquet"
        file = SealedFile(name, scope, tuple(nodes), 0, 0, 0, 0, {}, seconds)
        return write_file(self._database, query, target, file, level=FAST_COMPRESSION)

    def _copy(self, segment: Segment, day: int, *, is_real: bool) -> None:
        """The same hour of another day; where a summary stands for it, its files may as well be the same."""
        source = self._history / segment.name
        received = segment.received or (0, 0)
        with self._segment((received[0] // 1_000_000) + day * _DAY, _HOUR) as (target, files):
            for file in segment.files:
                if is_real:
                    files.append(self._shifted(source / file.name, target, file, day))
                else:
                    os.link(source / file.name, f"{target}/{file.name}")
                    files.append(_later(file, day))

    def _summary(self, template: Path, day: int) -> None:
        made = json.loads((template / "meta.json").read_text())
        first = day * 24 + 1
        with new_segment(str(self._history), first, first + 23, is_summary=True) as target:
            files = []
            for raw in made["files"]:
                file = SealedFile(**{**raw, "nodes": tuple(raw["nodes"]), "columns": {}})
                files.append(self._shifted(template / file.name, target, file, day))
            write_meta(target, Segment(first, first + 23, "", 0, None, True, tuple(files), is_summary=True))

    def _shifted(self, source: Path, target: str, file: SealedFile, day: int) -> SealedFile:
        columns = [
            row[0]
            for row in self._database.execute(
                "DESCRIBE SELECT * FROM read_parquet(?)", [str(source)]
            ).fetchall()
        ]
        moved = {
            name: f"{name} + INTERVAL {day} DAY" for name in ("time", rollup.FIRST_TIME, rollup.LAST_TIME)
        }
        moved |= {name: f"{name} + {day * _DAY * 1_000_000}" for name in ("first", "last")}
        moved["start_time"] = f"start_time + {day * _DAY}"
        changes = ", ".join(f"{change} AS {name}" for name, change in moved.items() if name in columns)
        query = f"SELECT * REPLACE ({changes}) FROM read_parquet('{source}')"
        return write_file(self._database, query, target, file, level=FAST_COMPRESSION)


def _later(file: SealedFile, day: int) -> SealedFile:
    shift = day * _DAY * 1_000_000
    return file._replace(start=file.start + shift, end=file.end + shift)


def _uuid(node: str, gpu: str) -> str:
    return f"'GPU-' || lpad({node}::VARCHAR, 8, '0') || '-0000-4000-8000-' || lpad({gpu}::VARCHAR, 12, '0')"


def _pid(node: int, job: int, gpu: int) -> int:
    return 1000 + node * 1000 + job * 100 + gpu * 10


def _gpus(nodes: range, begin: int, seconds: int, step: int, metrics: tuple[str, ...]) -> str:
    """Rows of GPUs, one a step."""
    select = [
        f"'node-' || node_id AS node, node_id::INTEGER AS node_id, {_uuid('node_id', 'place')} AS subject",
        "place::VARCHAR AS gpu, 'NVIDIA H200' AS model, make_timestamptz(us) AS time",
    ]
    if step == 60:
        select.append(_rolled_words())
    else:
        select.append("1::UBIGINT AS run, us // 1000000 AS sequence")
    for place, metric in enumerate(metrics):
        value = f"(hash(us, node_id, place, {place}) % 1000000 / 1000)"
        if metric.endswith("_ratio"):
            value = f"if(hash(us // 1800000000, node_id, place) % 5 = 0, 0, {value} / 1000)"
        if metric == _COUNTER:
            value = "(us // 1000000 * 300 / 1000)"
        if step == 60:
            select.append(f'{value}::FLOAT AS "{metric}", {value}::DECIMAL(18,3) AS "min_{metric}"')
            select.append(f'({value} + 1)::DECIMAL(18,3) AS "max_{metric}", 60::INTEGER AS "known_{metric}"')
        else:
            select.append(f'{value}::DECIMAL(18,3) AS "{metric}"')
    return (
        f"SELECT {', '.join(select)} FROM {_moments(nodes, begin, seconds, step)} ORDER BY node_id, place, us"
    )


def _processes(nodes: range, begin: int, seconds: int, step: int) -> str:
    """Rows of processes: most GPUs have one, some two, some none."""
    day = begin // _DAY * _DAY
    job = f"((us // 1000000 - {day}) // {_DAY // _JOBS_A_DAY})"
    pid = f"({_PID.format('node_id', job, 'place')} + turn)"
    select = [
        f"'node-' || node_id AS node, node_id::INTEGER AS node_id, {pid} || '@' || {_uuid('node_id', 'place')} AS subject",
        f"{pid}::BIGINT AS pid, ({day} + {job} * {_DAY // _JOBS_A_DAY})::DOUBLE AS start_time",
        f"{_uuid('node_id', 'place')} AS gpu, make_timestamptz(us) AS time",
        _rolled_words().replace("60::", "12::")
        if step == 60
        else "1::UBIGINT AS run, us // 1000000 AS sequence",
    ]
    for metric, value in zip(gpu_share_files.PROCESS_METRICS, ("40e9", "0.25"), strict=True):
        select.append(f'{value}::DOUBLE AS "{metric}"')
        if step == 60:
            select.append(f'{value}::DOUBLE AS "min_{metric}", {value}::DOUBLE AS "max_{metric}"')
            select.append(f'12::INTEGER AS "known_{metric}"')
    holders = "if((node_id * 8 + place) % 7 = 0, 0, if((node_id * 8 + place) % 5 = 0, 2, 1))"
    return (
        f"SELECT {', '.join(select)} FROM {_moments(nodes, begin, seconds, step)}, range(2) turns(turn) "
        f"WHERE turn < {holders} ORDER BY node_id, subject, us"
    )


def _rolled_words() -> str:
    return f"60::INTEGER AS samples, make_timestamptz(us) AS {rollup.FIRST_TIME}, make_timestamptz(us + 59000000) AS {rollup.LAST_TIME}"


def _moments(nodes: range, begin: int, seconds: int, step: int) -> str:
    return (
        f"range({nodes.start}, {nodes.stop}) nodes(node_id), range({_GPUS}) places(place), "
        f"range({begin * 1_000_000}, {(begin + seconds) * 1_000_000}, {step * 1_000_000}) moments(us)"
    )


def make_recent(size: Size) -> tuple[RecentFrames, dict[int, ColumnLayout], list[bytes]]:
    """Frames that came since the last sealing, and the layouts of GPUs by node."""
    layouts: dict[int, ColumnLayout] = {}
    recent, texts = RecentFrames(layouts), []
    for node in range(size.nodes):
        of_gpus, of_processes = BlockPacker("gpu"), BlockPacker("process")
        uuids = [f"GPU-{node:08d}-0000-4000-8000-{gpu:012d}" for gpu in range(_GPUS)]
        gpus = [{"uuid": uuid, "index": gpu, "name": "NVIDIA H200"} for gpu, uuid in enumerate(uuids)]
        start = float((size.end - 1) // _DAY * _DAY)
        held = [
            {"pid": _pid(node, _JOBS_A_DAY - 1, gpu), "start_time": start, "gpu": uuid}
            for gpu, uuid in enumerate(uuids)
        ]
        values: list[SubjectValues] = [(dict.fromkeys(_NARROW, 0.5), {})] * _GPUS
        used: list[SubjectValues] = [({"gpu_memory_bytes": 40 << 30, "sm_ratio": 0.25}, {})] * _GPUS
        frames = []
        for second in range(size.end - _NEWEST_SECONDS, size.end):
            blocks = [of_gpus.pack(gpus, values)[0]]
            if second % 5 == 0:
                blocks.append(of_processes.pack(held, used)[0])
            frames.append(PackedFrame(second * 1_000_000, second, tuple(blocks)).to_bytes())
        for packer in (of_gpus, of_processes):
            layouts[packer._id] = packer.layout  # noqa: SLF001
        texts.append(of_gpus.text)
        run = node.to_bytes(16, "big")
        recent.add(1000 + node, FrameBatch(run, node, 1, len(frames), 0, 0, b"".join(frames)))
    return recent, layouts, texts


def make_metadata(path: Path, size: Size, layouts: dict[int, ColumnLayout], texts: list[bytes]) -> Metadata:
    """Nodes, their GPUs, and the processes of all days."""
    ids = {layout.to_json(): number for number, layout in layouts.items()}
    facts = []
    for node, text in enumerate(texts):
        number = str(ids[text])
        name = f"node-{node}"
        facts += [
            LogEntry.of_fact(
                "node", id=node, name=name, host=name, machine=name, time=float(_BEGIN), facts={}, labels={}
            ),
            LogEntry.of_fact("layout", id=number, text=text.decode()),
            LogEntry.of_fact("devices", node=node, layout=number, time=float(_BEGIN)),
        ]
    with Metadata(str(path)) as metadata:
        metadata.apply(build_update(len(facts), facts))
    length = _DAY // _JOBS_A_DAY
    rows = (
        (
            node,
            _pid(node, job, gpu) + turn,
            float(begin),
            b"r" * 16,
            float(begin),
            float(begin + length),
            1,
            told,
        )
        for day in range(size.days)
        for job in range(_JOBS_A_DAY)
        for begin in [_BEGIN + day * _DAY + job * length]
        for node in range(size.nodes)
        for gpu in range(_GPUS)
        for turn in range(_PROCESSES)
        for told in [_identity(_pid(node, job, gpu) + turn, node * 31 + gpu * 7 + day + job)]
    )
    with closing(sqlite3.connect(path)) as database, database:
        database.executemany(
            "INSERT INTO processes (node, pid, start_time, run, first_seen, ended, sequence, identity) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        database.execute("UPDATE processes SET job = identity ->> '$.owner.job'")
    return Metadata(str(path))


def _identity(pid: int, chance: int) -> str:
    owner = {"user": f"user{chance % _USERS}", "job": f"slurm:{chance}"}
    return json.dumps(
        {
            "pid": pid,
            "name": "python3",
            "command": ["python3", "train.py", "--config", "a.yaml"],
            "owner": owner,
        }
    )


_Answer = TypeVar("_Answer")


def _asked(
    takes: int, ask: Callable[[], Coroutine[Any, Any, _Answer]]
) -> tuple[float, Spread, Spread, _Answer]:
    """The first answer's time, the spread of later ones in time and in CPU time, and an answer."""
    times, spent = [], []
    for _ in range(takes + 1):
        begun, used = time.perf_counter(), time.process_time()
        answer = asyncio.run(ask())
        times.append(time.perf_counter() - begun)
        spent.append(time.process_time() - used)
    return times[0], Spread.of(times[1:]), Spread.of(spent[1:]), answer


def run(*, quick: bool, takes: int) -> Report:
    """Make a store of a month and ask what people ask of it."""
    report = Report(NAME, "Questions about weeks")
    size = Size(16, 3) if quick else Size(125, _DAYS)
    base = Path(tempfile.mkdtemp(prefix="gpulse-past-"))
    begun = time.perf_counter()
    try:
        Maker(base, size).make()
        recent, layouts, texts = make_recent(size)
        made = time.perf_counter() - begun
        with (
            make_metadata(base / "metadata.sqlite", size, layouts, texts) as metadata,
            closing(SealedHistory(base)) as history,
        ):
            store = StoreReader(metadata, history, recent)
            reports = ReportRunner(store, NodeRegistry(metadata.nodes().values()), lambda: 1.0)
            _questions(report, reports, size, takes)
            files = len(history.segments), len(history.summaries), history.size_bytes
    finally:
        shutil.rmtree(base)
    report.notes.append(
        f"{size.nodes * _GPUS} GPUs, {size.days} days in {files[0]} segments and {files[1]} summaries, "
        f"{_NEWEST_SECONDS} s of frames in memory; made in {made:.0f} s. The oldest and the newest day have no summary."
    )
    return report


def _questions(report: Report, reports: ReportRunner, size: Size, takes: int) -> None:
    month = float(size.end - size.days * _DAY + _HOUR)

    async def chart() -> HistoryReport:
        request = GetHistory(
            metrics=(*_CHART, _COUNTER), gpus=("node-3:5",), start=Time(month), points=600, spread=True
        )
        return await reports.history(request, float(size.end))

    async def usage(start: float) -> UsageReport:
        return await reports.usage(GetUsage(start=Time(start)), float(size.end))

    table = Table("Time of the first answer and CPU time of later ones:", ("what", "first", "CPU", "answer"))
    gpus = size.nodes * _GPUS
    questions: list[tuple[str, float, Callable[[], Coroutine[Any, Any, HistoryReport | UsageReport]]]] = [
        (f"one GPU's {size.days} days, 6 metrics", _MOST_CHART, chart),
        (f"who held {gpus} GPUs in 24 h", _MOST_DAY, lambda: usage(float(size.end - _DAY))),
        (f"who held {gpus} GPUs in {size.days} days", _MOST_MONTH, lambda: usage(month)),
    ]
    for what, most, ask in questions:
        first, spread, spent, answer = _asked(takes, ask)
        scale, digits, unit = (1e3, 0, " ms") if most < 1 else (1.0, 2, " s")
        target = f"{most * scale:.0f}{unit}"
        report.targets.append(Target(what, spread.text(scale, digits, unit), target, spread.median <= most))
        told = (
            f"{len(answer.series)} x {len(answer.times)} points"
            if isinstance(answer, HistoryReport)
            else f"{len(answer.rows)} rows, {answer.gpu_seconds / _HOUR:,.0f} GPU-hours"
        )
        table.rows.append((what, f"{first * 1e3:.0f} ms", spent.text(1e3, 0, " ms"), told))
    report.tables.append(table)


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"takes": 5}).parse_args()
    measure.publish(run(quick=given.quick, takes=given.takes), write=given.write)
