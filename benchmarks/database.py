"""What sharing a PostgreSQL database costs a head of 10,000 GPUs with a process each, and what questions to it take."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.integration.postgres import PASSWORD, PostgresServer

from benchmarks import measure
from benchmarks.fleet import gpu_uuid, host_name, machine_name
from benchmarks.measure import Report, Spread, Table, Target
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.frame_packing import FramePacker
from gpulse.model.packed_columns import ColumnBlock, ColumnLayout, PackedFrame, layout_id
from gpulse.model.process import GpuProcess
from gpulse.reports.time_grid import ReportContext
from gpulse.reports.usage_report import build_usage_report
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import FrameBatch, FrameEvents, LogEntry
from gpulse.store.metadata.postgres_connection import (
    DatabaseConfig,
    close,
    connect,
    parse_database_url,
    prepare_schema,
)
from gpulse.store.metadata.postgres_gpu_time import GpuTimeWriter
from gpulse.store.metadata.postgres_store import PostgresStore
from gpulse.store.metadata.postgres_writer import PostgresWriter, SeenNode
from gpulse.store.store import Query, StoredNode

NAME = "database"
_GPUS = 8
_BEGAN = 1_790_000_040.0
_MAX_SHARE = 0.10
_MAX_SECONDS = 1.0
_DAYS = 30
_USERS = 1000
_DAY_US = 86_400_000_000
_FIRST_DAY = int(_BEGAN // 86_400) - _DAYS - 1
_FINDING = {"id": "slow", "severity": "high", "summary": "waits", "gpu": 0, "label": "0"}


class Cost(NamedTuple):
    """CPU seconds of a head."""

    start: float
    """Once, for the processes of all GPUs."""
    writing: float
    """For a second of events and findings."""
    noting: float
    """For a second, to note which time was received."""
    counting: float
    """For a minute of GPU time."""


def nodes_of(count: int) -> dict[int, StoredNode]:
    """The nodes of a fleet."""
    return {
        number: StoredNode(number, host_name(number), host_name(number), machine_name(number), _BEGAN, {}, {})
        for number in range(1, count + 1)
    }


def cost(config: DatabaseConfig, directory: str, count: int, seconds: int) -> Cost:
    """Commit what a fleet sends, and see what the threads of the database take."""
    nodes, now = nodes_of(count), [_BEGAN]
    with LocalStore(directory) as archive:
        writer = _Writer(archive, config, nodes, lambda: now[0])
        counter = GpuTimeWriter(
            archive,
            config,
            head=archive.head_id,
            node_of=nodes.get,
            is_ready=lambda: True,
            now=lambda: now[0],
        )
        archive.follow_with(writer)
        writer.start()
        blocks = _introduce(archive, nodes)
        start = noting = 0.0
        for second in range(seconds):
            now[0] = _BEGAN + second
            entries = [_entry(number, second, blocks[second % len(blocks)]) for number in nodes]
            archive.commit(entries)
            before = time.thread_time()
            counter.add(entry.batch for entry in entries if entry.batch is not None)
            noting += time.thread_time() - before
            while not writer.wait_for(archive.accepted, 60.0):
                pass
            if second == 0:
                start = writer.cpu_seconds()
        writing = writer.cpu_seconds() - start
        now[0] += 300.0
        connection = connect(config, timeout_seconds=60.0)
        before = time.process_time()
        counter._count(connection)  # noqa: SLF001  without the wait between two counts
        counting = time.process_time() - before
        close(connection)
        writer.close(5.0)
    return Cost(start, writing / (seconds - 1), noting / seconds, counting * 60 / seconds)


class _Writer(PostgresWriter):
    """A writer that knows how much CPU its thread took."""

    def __init__(
        self,
        archive: LocalStore,
        config: DatabaseConfig,
        nodes: dict[int, StoredNode],
        now: Callable[[], float],
    ) -> None:
        super().__init__(
            archive,
            config,
            host="head",
            node_of=nodes.get,
            seen=lambda: [SeenNode(number, now(), "1") for number in nodes],
            on_changes=lambda _: None,
            now=now,
        )
        self._thread_id = 0

    def run(self) -> None:
        """Follow the log until `close`."""
        self._thread_id = threading.get_native_id()
        super().run()

    def cpu_seconds(self) -> float:
        """How much CPU the thread took so far."""
        fields = Path(f"/proc/self/task/{self._thread_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


def _introduce(archive: LocalStore, nodes: dict[int, StoredNode]) -> list[tuple[ColumnBlock, ...]]:
    """Commit the facts of a fleet; what its frames hold, second after second."""
    packer, blocks, facts = FramePacker(), [], []
    for second in range(10):
        gpus = tuple(
            GpuReading(
                Device(place, gpu_uuid(0, place), "NVIDIA H200"),
                {"power_watts": 300.0 + second, "gpu_utilization_ratio": 0.9, "memory_used_bytes": 1 << 30},
                (GpuProcess(4000 + place, "compute", 1 << 30, 0.5),),
            )
            for place in range(_GPUS)
        )
        packed, texts = packer.pack(Frame(_BEGAN, _BEGAN, Node("n"), gpus), ())
        blocks.append(packed.blocks)
        for text in texts:
            archive.layouts[layout_id(text)] = ColumnLayout.from_json(text)
            facts.append(LogEntry.of_fact("layout", id=str(layout_id(text)), text=text.decode()))
    for number, node in nodes.items():
        known = {"name": node.name, "host": node.host, "machine": node.machine, "facts": {}, "labels": {}}
        facts.append(LogEntry.of_fact("node", id=number, time=_BEGAN, **known))
    archive.commit(facts)
    return blocks


def _entry(number: int, second: int, blocks: tuple[ColumnBlock, ...]) -> LogEntry:
    events = b""
    if second == 0:
        events = json.dumps([{"event": "agent_started"}, *_processes()]).encode()
    elif number % 10 == 0 and (second + number) % 30 == 0:  # a tenth of the nodes have findings
        events = json.dumps([{"event": "findings", "findings": [_FINDING]}]).encode()
    run, moment = number.to_bytes(16, "big"), _BEGAN + second
    frame = PackedFrame(round(moment * 1e6), 0, blocks, events).to_bytes()
    batch = FrameBatch(run, number, second + 1, 1, round(moment * 1e6), 0, frame)
    return LogEntry.of_batch(batch, (FrameEvents(number, run, second + 1, moment, events),) if events else ())


def _processes() -> list[dict[str, object]]:
    return [
        {
            "event": "process",
            "pid": 4000 + place,
            "start_time": _BEGAN - 5.0,
            "name": "python",
            "owner": {"user": f"user{place}", "job": f"slurm:{place}"},
        }
        for place in range(_GPUS)
    ]


def fill(server: PostgresServer, database: str, count: int) -> None:
    """Fill a database with a month of GPU time: every GPU is held by one process all the time."""
    numbers = "1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1"
    fleet = f"generate_series(1, {count}) AS n, generate_series(0, {_GPUS - 1}) AS g"
    hours = f"(SELECT h FROM generate_series(0, {24 * (_DAYS + 2)}) AS h WHERE h < 72 OR h > {24 * (_DAYS - 2)}) AS hours"
    who = "n, 'GPU-' || n || '-' || g, n * 8 + g, 1.0"
    server.execute(
        database,
        "SET search_path TO gpulse",
        f"INSERT INTO nodes SELECT n, 'node' || n, 'node' || n, 'm' || n, 0, '{{}}', '{{}}' FROM generate_series(1, {count}) AS n",
        f"INSERT INTO gpu_days SELECT {who}, ({_FIRST_DAY} + d) * {_DAY_US}::int8, ({_FIRST_DAY} + d) * 86400.0, "
        f"({_FIRST_DAY} + d) * 86400.0 + 86399, {numbers} FROM {fleet}, generate_series(0, {_DAYS + 1}) AS d",
        f"INSERT INTO gpu_hours SELECT {who}, {_FIRST_DAY} * {_DAY_US}::int8 + h * 3600000000::int8, "
        f"{_FIRST_DAY} * 86400.0 + h * 3600, {_FIRST_DAY} * 86400.0 + h * 3600 + 3599, {numbers} FROM {fleet}, {hours}",
        "INSERT INTO processes (node, pid, start_time, run, first_seen, sequence, identity) "
        f"SELECT n, n * 8 + g, 1.0, '', 1.0, 1, json_build_object('pid', n * 8 + g, 'start_time', 1.0, "
        f"'owner', json_build_object('user', 'user' || (n * 8 + g) % {_USERS})) FROM {fleet}",
        "ANALYZE",
    )


def run(*, quick: bool = False, nodes: int = 1250, seconds: int = 62) -> Report:
    """Measure it."""
    count, length = (100, 32) if quick else (nodes, seconds)
    report = Report(NAME, "A PostgreSQL database that heads share")
    with PostgresServer("shared_buffers=256MB") as server, tempfile.TemporaryDirectory() as directory:
        database = server.make_database()
        found = cost(parse_database_url(server.url(database), PASSWORD, 1 << 40), directory, count, length)
        month = server.make_database()
        config = parse_database_url(server.url(month), PASSWORD, 1 << 40)
        connection = connect(config, timeout_seconds=60.0)
        prepare_schema(config, connection)
        close(connection)
        fill(server, month, count)
        known = {number: node._replace(host=f"node{number}") for number, node in nodes_of(count).items()}
        store = PostgresStore(config, nodes=lambda: known, number_of=lambda host, _: int(host[4:]))
        context = ReportContext(store, {number: node.name for number, node in known.items()}, 1.0)
        query = Query(_BEGAN - _DAYS * 86_400.0, _BEGAN)
        takes = []
        for _ in range(3 if quick else 9):
            before = time.perf_counter()
            rows = len(build_usage_report(context, query, by="user", users=()).rows)
            takes.append(time.perf_counter() - before)
        store.close()
    share = found.writing + found.noting + found.counting / 60
    spread = Spread.of(takes)
    report.targets += [
        Target(
            f"{count * _GPUS:,} GPUs with a process each, more of a core",
            f"{share:.1%}",
            f"{_MAX_SHARE:.0%}",
            share <= _MAX_SHARE,
        ),
        Target(
            f"usage of {rows:,} users over {_DAYS} days",
            spread.text(1, 2, " s"),
            f"{_MAX_SECONDS:.0f} s",
            spread.median < _MAX_SECONDS,
        ),
    ]
    table = Table("CPU of the head:", ("what", "figure"))
    table.rows += [
        (f"{count * _GPUS:,} processes that start at once", f"{found.start:.1f} s, once"),
        ("events and findings, findings of a tenth of the nodes", f"{found.writing * 1000:.1f} ms a second"),
        ("which time was received", f"{found.noting * 1000:.1f} ms a second"),
        ("GPU time", f"{found.counting:.2f} s a minute"),
    ]
    report.tables.append(table)
    return report


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"nodes": 1250, "seconds": 62}).parse_args()
    measure.publish(run(quick=given.quick, nodes=given.nodes, seconds=given.seconds), write=given.write)
