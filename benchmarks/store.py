"""What history costs: bytes a GPU-sample on disk, the speed of sealing, and two questions people ask of it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import numpy as np

from benchmarks import measure
from benchmarks.measure import Report, Spread, Table, Target
from gpulse.model.metric_catalog import CATALOG, Metric
from gpulse.model.packed_columns import (
    MISSING_NARROW,
    MISSING_WIDE,
    ColumnBlock,
    ColumnLayout,
    LayoutColumn,
    PackedFrame,
    build_column,
    is_wide,
    layout_id,
)
from gpulse.sources.recording_reader import Recording
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.frame_blocks import build_stack
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import BATCH, FrameBatch, LogEntry
from gpulse.store.metadata.local_metadata import Metadata
from gpulse.store.metadata.log_updates import MetadataUpdate, build_update
from gpulse.store.seal_process import open_writer
from gpulse.store.store import Query

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "store"
_RECORDINGS = measure.ROOT / "tests" / "data" / "recordings"
_GPUS = 8
_BEGIN = 1_760_000_400
_BATCH_FRAMES = 60
_MEMORY_BYTES = 150_754_820_096
_SEAL_SECONDS = 600
_HOUR = 3600
_MOST_BYTES = 20.0
_MOST_DAY_SECONDS = 0.100
_MOST_FLEET_SECONDS = 0.500
_FRAMES_A_SECOND = 5
_HELD_SECONDS = {"energy_joules_total": 30, "graphics_active_ratio": 10}
"""What an agent reads more rarely, and repeats in between."""
_LAP_NOISE, _NOISE = 0.01, 0.001
"""How much a lap and a sample differ from the recording, so that no lap repeats another."""


class Looped:
    """GPUs that replay recordings of real ones, each lap a little different, one row a second."""

    def __init__(self, recordings: Sequence[Path], seed: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._turn = count()
        rows = [[frame.gpus[0].values for frame in Recording(path) if frame.gpus] for path in recordings]
        present = {name for recording in rows for values in recording for name in values}
        self.metrics = [metric for metric in CATALOG["gpu"].values() if metric.name in present]
        self.columns = [build_column(metric) for metric in self.metrics]
        self._noisy = np.array([_is_noisy(metric) for metric in self.metrics])
        self._laps = [
            [
                np.array([[_steps(values.get(c.name), c) for c in self.columns] for values in lap])
                for phase in range(_FRAMES_A_SECOND)
                if len(lap := recording[2 + phase :: _FRAMES_A_SECOND]) > 5
            ]
            for recording in rows
        ]

    def series(self, seconds: int) -> NDArray[np.int64]:
        """One GPU's numbers by second and metric; an absent one is MISSING_WIDE."""
        laps = self._laps[next(self._turn) % len(self._laps)]
        pieces: list[NDArray[np.int64]] = []
        while sum(map(len, pieces)) < seconds:
            lap = laps[self._chance.integers(len(laps))]
            factor = 1 + _LAP_NOISE * self._chance.standard_normal(len(self.columns)) * self._noisy
            factor = factor + _NOISE * self._chance.standard_normal(lap.shape) * self._noisy
            known = np.where(lap == MISSING_WIDE, 0, lap)
            pieces.append(
                np.where(lap == MISSING_WIDE, MISSING_WIDE, np.rint(known * factor).astype(np.int64))
            )
        numbers = np.concatenate(pieces)[:seconds]
        names = [metric.name for metric in self.metrics]
        power = numbers[:, names.index("power_watts")]
        energy = self._chance.integers(10**9, 10**12) + np.cumsum(np.where(power == MISSING_WIDE, 0, power))
        numbers[:, names.index("energy_joules_total")] = energy
        for name, period in _HELD_SECONDS.items():
            place = names.index(name)
            numbers[:, place] = numbers[np.arange(seconds) // period * period, place]
        return numbers


def _is_noisy(metric: Metric) -> bool:
    if metric.unit == "watts":
        return "limit" not in metric.name
    return metric.unit == "bytes/second" or (metric.kind == "ratio" and metric.resolution < 0.01)


def _steps(value: float | None, column: LayoutColumn) -> int:
    return MISSING_WIDE if value is None else round(value * column.steps / column.size)


class NodeFrames(NamedTuple):
    """A node's frames as an agent would send them."""

    layout: ColumnLayout
    blocks: NDArray[np.uint8]
    """By second and byte."""
    times: NDArray[np.int64]
    first: int = 0
    """The second of the history at which it begins."""
    host: str = ""
    machine: str = ""

    def batches(self, node: int, seconds: range) -> Iterator[FrameBatch]:
        """Frames of some seconds."""
        number = layout_id(self.layout.to_json())
        begin, end = max(seconds.start - self.first, 0), seconds.stop - self.first
        for first in range(begin, end, _BATCH_FRAMES):
            count = min(_BATCH_FRAMES, end - first)
            frames = b"".join(
                PackedFrame(
                    int(self.times[at]), at, (ColumnBlock(number, self.blocks[at].tobytes()),)
                ).to_bytes()
                for at in range(first, first + count)
            )
            run = node.to_bytes(16, "big")
            yield FrameBatch(run, node, first + 1, count, int(self.times[first + count - 1]), 0, frames)


def make_node(
    looped: Looped,
    node: int,
    seconds: int,
    *,
    begin: int = _BEGIN,
    first: int = 0,
    uuid: Callable[[int, int], str] | None = None,
    host: str = "",
    machine: str = "",
) -> NodeFrames:
    """So many seconds of a node, from a second of a history that begins at `begin`."""
    name = uuid or _uuid
    numbers = np.stack([looped.series(seconds) for _ in range(_GPUS)], axis=2)
    wide = [place for place, metric in enumerate(looped.metrics) if is_wide(metric)]
    narrow = [place for place, metric in enumerate(looped.metrics) if not is_wide(metric)]
    small = numbers[:, narrow]
    small = np.where(small == MISSING_WIDE, MISSING_NARROW, small).astype("<i4")
    layout = ColumnLayout(
        "gpu",
        tuple(
            {
                "uuid": name(node, gpu),
                "index": gpu,
                "name": "NVIDIA H200",
                "mig_index": None,
                "facts": {"memory_total_bytes": _MEMORY_BYTES},
            }
            for gpu in range(_GPUS)
        ),
        tuple(looped.columns[place] for place in wide),
        tuple(looped.columns[place] for place in narrow),
    )
    pieces = (np.ascontiguousarray(numbers[:, wide]).astype("<i8"), np.ascontiguousarray(small))
    blocks = np.concatenate([piece.reshape(seconds, -1).view(np.uint8) for piece in pieces], axis=1)
    chance = np.random.default_rng(node)
    jitter = np.abs(chance.normal(0, 25, seconds)).astype(np.int64) + chance.integers(1_000_000)
    times = (begin + first + np.arange(seconds)) * 1_000_000 + jitter
    return NodeFrames(layout, blocks, times, first, host, machine)


def _uuid(node: int, gpu: int) -> str:
    return f"GPU-{zlib.crc32(f'{node}.{gpu}'.encode()):08x}-0000-4000-8000-{node:06d}{gpu:06d}"


class Made(NamedTuple):
    """A history, and what making it took."""

    samples: int
    seal_seconds: float
    """CPU time."""
    compact_seconds: float
    sealed_bytes: int
    """Of the files of minutes."""


def make_store(
    directory: Path, nodes: Mapping[int, NodeFrames], seconds: int, facts: Sequence[LogEntry] = ()
) -> Made:
    """Write a log as a head does, and keep the metadata, seal and merge as it grows; `facts` come after the nodes'."""
    sealing = compacting = 0.0
    sealed_bytes = samples = 0
    directory.mkdir(parents=True, exist_ok=True)
    with Log(directory / "log") as log, Metadata(str(directory / "metadata.sqlite")) as metadata:
        known = [*node_facts(nodes), *facts]
        log.append_many((entry.kind, entry.payload) for entry in known)
        metadata.apply(build_update(log.sync(), known))
        with closing(open_writer(str(directory))) as writer:
            for begin in range(0, seconds, _SEAL_SECONDS):
                span = range(begin, min(begin + _SEAL_SECONDS, seconds))
                lasts = {}
                for node, made in nodes.items():
                    for batch in made.batches(node, span):
                        log.append(BATCH, batch.to_bytes())
                        lasts[batch.run] = batch.last
                        samples += batch.count * _GPUS
                position = log.sync()
                metadata.apply(MetadataUpdate(position, [], lasts, []))
                spent, answer = _timed(lambda position=position: writer.seal(position))  # type: ignore[misc]
                sealing += spent
                sealed_bytes += sum(
                    file.stat().st_size
                    for name in answer["segments"]
                    for file in (directory / "history" / name).iterdir()
                )
                compacting += _timed(writer.compact)[0]
                log.drop_before(min(position, metadata.checkpoint()))
    return Made(samples, sealing, compacting, sealed_bytes)


def node_facts(nodes: Mapping[int, NodeFrames]) -> Iterator[LogEntry]:
    """What a head writes down when nodes say hello."""
    for node, made in nodes.items():
        text = made.layout.to_json()
        begin = int(made.times[0]) / 1e6
        host = made.host or f"node-{node:04d}"
        yield LogEntry.of_fact(
            "node",
            id=node,
            name=host,
            host=host,
            machine=made.machine or host,
            time=begin,
            facts={},
            labels={},
        )
        yield LogEntry.of_fact(
            "run", run=node.to_bytes(16, "big").hex(), node=node, time=begin, version="", pid=1, boot=""
        )
        yield LogEntry.of_fact("layout", id=str(layout_id(text)), text=text.decode())
        yield LogEntry.of_fact("devices", node=node, layout=str(layout_id(text)), time=begin)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    answer = work()
    return time.process_time() - begun, answer


def _sizes(directory: Path) -> dict[str, int]:
    """What the merged files take, by what they are."""
    found = {"samples": 0, "minutes": 0}
    for file in (directory / "history").rglob("gpu-*.parquet"):
        found["minutes" if ".60s." in file.name else "samples"] += file.stat().st_size
    return found


def _columns(directory: Path, samples: int) -> Table:
    """Which metrics take how much."""
    table = Table("Bytes a GPU-sample by column, the largest ones:", ("column", "bytes", "encoding"))
    with closing(duckdb.connect()) as database:
        rows = database.execute(
            "SELECT path_in_schema, sum(total_compressed_size) AS size, any_value(encodings) "
            "FROM parquet_metadata(?) GROUP BY 1 ORDER BY 2 DESC",
            [f"{directory}/history/*/gpu-0?????.parquet"],
        ).fetchall()
    for name, size, encoding in rows[:16]:
        table.rows.append((name, f"{size / samples:.2f}", encoding))
    rest = sum(size for _, size, _ in rows[16:])
    table.rows.append((f"{len(rows) - 16} others", f"{rest / samples:.2f}", ""))
    return table


def _references(node: NodeFrames, seconds: int) -> dict[str, float]:
    """The same samples as others would keep them, in bytes a GPU-sample: JSON lines and rows of SQLite."""
    stack = build_stack(
        1, node.layout, node.times[:seconds], [1] * seconds, range(seconds), node.blocks[:seconds].tobytes()
    )
    names = [column.name for column in (*node.layout.wide, *node.layout.narrow)]
    values = {name: stack.values(name) for name in names}
    count = seconds * _GPUS
    lines, rows = 0, []
    for at in range(seconds):
        for gpu in range(_GPUS):
            row = {name: values[name][at, gpu] for name in names}
            known = {name: round(value, 5) for name, value in row.items() if value == value}  # noqa: PLR0124
            lines += len(json.dumps({"time": int(node.times[at]) / 1e6, "gpu": gpu, **known})) + 1
            rows.append((int(node.times[at]), gpu, *(known.get(name) for name in names)))
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/rows.sqlite"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(f"CREATE TABLE samples (time, gpu, {', '.join(names)})")
            database.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * (len(names) + 2))})", rows)
        sqlite = os.stat(path).st_size
    return {"JSON lines": lines / count, "rows of SQLite": sqlite / count}


def _ask(directory: Path, takes: int, work: Callable[[HistoryReader], int]) -> tuple[float, Spread, int]:
    """The first answer of a fresh history, the spread of later ones, and how many points each has."""
    with closing(SealedHistory(directory)) as history:
        samples = HistoryReader(history, RecentFrames({}))
        times = []
        points = 0
        for _ in range(takes + 1):
            begun = time.perf_counter()
            points = work(samples)
            times.append(time.perf_counter() - begun)
    return times[0], Spread.of(times[1:]), points


def _day(samples: HistoryReader, hours: int) -> int:
    found = samples.series(
        Query(
            _BEGIN,
            _BEGIN + hours * _HOUR,
            "gpu",
            ("power_watts",),
            nodes=frozenset({3}),
            subjects=frozenset({_uuid(3, 5)}),
            step=hours * _HOUR / 1000,
            spread=False,
        )
    )
    return sum(len(series.times) for series in found)


def _fleet(samples: HistoryReader, seconds: int, step: float) -> int:
    start = _BEGIN + 7
    found = samples.series(
        Query(start, start + seconds, "gpu", ("sm_active_ratio",), step=step, spread=False)
    )
    return sum(len(series.times) for series in found)


def run(*, quick: bool, takes: int) -> Report:
    """Make two histories, a narrow one of a day and a wide one of an hour, and ask both."""
    report = Report(NAME, "The history on disk")
    looped = Looped(sorted(_RECORDINGS.glob("*.jsonl.gz")), seed=4)
    hours, wide = (2, 16) if quick else (24, 125)
    base = Path(tempfile.mkdtemp(prefix="gpulse-store-"))
    try:
        nodes = {node: make_node(looped, node, hours * _HOUR) for node in range(1, 4)}
        references = _references(nodes[1], 200)
        make_store(base / "day", nodes, hours * _HOUR)
        nodes = {node: make_node(looped, node, _HOUR + _SEAL_SECONDS) for node in range(1, wide + 1)}
        fleet = make_store(base / "fleet", nodes, _HOUR + _SEAL_SECONDS)
        del nodes
        sizes = _sizes(base / "fleet")
        first_day, day_spread, day_points = _ask(base / "day", takes, lambda s: _day(s, hours))
        first, spread, points = _ask(base / "fleet", takes, lambda s: _fleet(s, _HOUR, 60))
        first_raw, raw_spread, raw_points = _ask(base / "fleet", takes, lambda s: _fleet(s, _HOUR, 50))
        columns = _columns(base / "fleet", fleet.samples)
    finally:
        shutil.rmtree(base)
    per_sample = sizes["samples"] / fleet.samples
    speed = fleet.samples / fleet.seal_seconds
    report.targets += [
        Target("bytes a GPU-sample", f"{per_sample:.1f}", f"{_MOST_BYTES:.0f}", per_sample <= _MOST_BYTES),
        Target(
            f"one GPU's {hours} h to {day_points} points",
            day_spread.text(1e3, 0, " ms"),
            "100 ms",
            day_spread.median <= _MOST_DAY_SECONDS,
        ),
        Target(
            f"{wide * _GPUS} GPUs x 1 h to {points} means of a minute",
            spread.text(1e3, 0, " ms"),
            "500 ms",
            spread.median <= _MOST_FLEET_SECONDS,
        ),
    ]
    table = Table("Bytes a GPU-sample:", ("kept as", "bytes"))
    table.rows += [(name, f"{size:.1f}") for name, size in references.items()]
    table.rows += [
        ("packed frames, as the log has them", f"{looped_bytes(looped):.1f}"),
        ("files of ten minutes", f"{fleet.sealed_bytes / fleet.samples:.1f}"),
        ("files of an hour", f"{per_sample:.1f}"),
        ("their means, minima and maxima of minutes", f"{sizes['minutes'] / fleet.samples:.1f}"),
    ]
    speeds = Table("Speed:", ("what", "figure"))
    speeds.rows += [
        ("sealing, GPU-samples a second of one core", f"{speed:,.0f}"),
        ("merging, GPU-samples a second of one core", f"{fleet.samples / fleet.compact_seconds:,.0f}"),
        ("one GPU's day, first question", f"{first_day * 1e3:.0f} ms"),
        ("the fleet's hour in minutes, first question", f"{first * 1e3:.0f} ms"),
        (
            f"the same in steps of 50 s, {raw_points} points, first question",
            f"{first_raw * 1e3:.0f} ms",
        ),
        ("the same, later ones", raw_spread.text(1e3, 0, " ms")),
    ]
    report.tables += [table, columns, speeds]
    report.notes.append(
        f"{len(looped.metrics)} metrics a GPU, from {len(looped._laps)} recordings of one H200 at 1 Hz, "  # noqa: SLF001
        "replayed in laps that differ by 1 % and in samples that differ by 0.1 %, so that nothing repeats itself."
    )
    return report


def looped_bytes(looped: Looped) -> float:
    """What one GPU's numbers take in a frame."""
    return float(sum(8 if is_wide(metric) else 4 for metric in looped.metrics))


if __name__ == "__main__":
    given = measure.parser(NAME, __doc__, {"takes": 7}).parse_args()
    measure.publish(run(quick=given.quick, takes=given.takes), write=given.write)
