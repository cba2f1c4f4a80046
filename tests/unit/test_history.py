"""The sealed history: what is in the files, what questions give, what is merged, removed and refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from gpulse.errors import LogError, UsageError
from gpulse.model.packed_columns import ColumnBlock, ColumnLayout, LayoutColumn, PackedFrame, layout_id
from gpulse.store.damage import DamageList, add_checksum, strip_checksum
from gpulse.store.history import reader
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import (
    find_history_gaps,
    list_segment_names,
    read_segments,
    remove_leftovers,
    segment_name,
    set_damaged_segments_aside,
)
from gpulse.store.history.writer import find_outdated
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.log.log import Log
from gpulse.store.log.record_payloads import BATCH, FACT, FrameBatch, encode_fact
from gpulse.store.seal_process import open_writer
from gpulse.store.store import Series, Statistic
from tests.queries import query
from tests.unit.history_frames import BEGIN, GPUS, Fleet, power, write_log

_NODES = range(1, 3)
_ALWAYS: dict[str, Any] = {"start": 0, "end": BEGIN * 2}


def sealed(data_dir: Path, *ends: int) -> Fleet:
    """A history with a segment up to each of some seconds."""
    fleet = Fleet()
    with closing(open_writer(str(data_dir))) as writer:
        for begin, end in zip((0, *ends), ends, strict=False):
            writer.seal(write_log(data_dir, fleet, _NODES, range(begin, end)))
    return fleet


@contextmanager
def opened(data_dir: Path, recent: RecentFrames | None = None) -> Iterator[HistoryReader]:
    """What a head would ask."""
    damage = DamageList()
    with closing(SealedHistory(data_dir, damage=damage)) as history:
        yield HistoryReader(history, recent or RecentFrames({}), damage)


def rows_of(data_dir: Path, pattern: str, select: str) -> list[Any]:
    """What another program reads in the files."""
    with closing(duckdb.connect()) as database:
        found: list[Any] = database.execute(
            f"SELECT {select} FROM read_parquet(?)", [f"{data_dir}/history/*/{pattern}"]
        ).fetchall()
    return found


def test_other_programs_read_true_values(tmp_path: Path) -> None:
    """A file holds values in base units under the catalogue's names, with names of nodes and GPUs beside them."""
    sealed(tmp_path, 20)
    select = (
        "node, node_id, subject, gpu, model, epoch_us(time), sequence, power_watts::DOUBLE, "
        "memory_used_bytes, sm_clock_hertz, pcie_rx_bytes_per_second, sm_active_ratio::DOUBLE, typeof(power_watts)"
    )
    rows = rows_of(tmp_path, "gpu-000000.parquet", select)
    assert 20 * 2 * GPUS == len(rows)
    assert (
        "host-1",
        1,
        "GPU-1-1",
        "1",
        "NVIDIA H200",
        (BEGIN + 5) * 1_000_000,
        6,
        101.005,
        5 << 20,
        1_980_000_000,
        5120.0,
        0.5,
        "DECIMAL(9,3)",
    ) == rows[25]
    assert rows[24][11] is None


def test_files_are_kept_small(tmp_path: Path) -> None:
    """Integers are packed by their differences and everything is compressed."""
    sealed(tmp_path, 2000)
    with closing(duckdb.connect()) as database:
        found = dict(
            database.execute(
                "SELECT path_in_schema, encodings FROM parquet_metadata(?)",
                [f"{tmp_path}/history/*/gpu-000000.parquet"],
            ).fetchall()
        )
    assert "DELTA_BINARY_PACKED" == found["power_watts"]
    assert "DELTA_BINARY_PACKED" == found["time"]


_STEPS: list[tuple[float | None, int]] = [(None, 0), (7, 0), (60, 0), (60, 61), (120, 59), (600, 300)]
_STATISTICS: tuple[Statistic, ...] = ("mean", "min", "max", "last")
_QUESTIONS = list(product(_STEPS, _STATISTICS))


@pytest.mark.slow
def test_history_and_memory_answer_as_one(tmp_path: Path) -> None:
    """The same points come from memory alone, from segments with memory, and from merged segments with memory."""
    fleet = sealed(tmp_path, 700, 1500)
    memory, newest = RecentFrames(fleet.layouts), RecentFrames(fleet.layouts)
    for second in range(0, 4000, 50):
        memory.add(second // 50 + 1, fleet.batch(1, second, 50))
    with closing(SealedHistory(tmp_path / "empty")) as nothing:
        wanted = answers(HistoryReader(nothing, memory))
    with closing(open_writer(str(tmp_path))) as writer:
        position = write_log(tmp_path, fleet, _NODES, range(1500, 3700))
        writer.seal(position)
        for second in range(3700, 4000, 50):
            newest.add(position + second, fleet.batch(1, second, 50))
        with opened(tmp_path, newest) as samples:
            check_all_same(wanted, answers(samples))
            assert writer.compact()
            check_all_same(wanted, answers(samples))


def answers(samples: HistoryReader) -> list[list[Series]]:
    """To every question, in steps of every length, of every kind."""
    return [
        samples.series(
            query(
                "gpu",
                "power_watts",
                start=BEGIN + start,
                end=BEGIN + 3777,
                step=step,
                nodes=[1],
                statistic=statistic,
            )
        )
        for (step, start), statistic in _QUESTIONS
    ]


def check_all_same(wanted: list[list[Series]], found: list[list[Series]]) -> None:
    """Every question has the same answer."""
    for question, one, other in zip(_QUESTIONS, wanted, found, strict=True):
        print(question)
        check_same(one, other)


def check_same(wanted: list[Series], found: list[Series]) -> None:
    """Two answers have the same points; means of minutes are kept with seven digits."""
    assert [series.key for series in wanted] == [series.key for series in found]
    for one, other in zip(wanted, found, strict=True):
        assert one.times.tolist() == other.times.tolist()
        assert np.allclose(one.values, other.values, rtol=1e-6, equal_nan=True)


def test_a_batch_that_is_in_both_counts_once(tmp_path: Path) -> None:
    """Memory is asked only for what came after the sealed position, so that it may forget late."""
    fleet = sealed(tmp_path, 100)
    recent = RecentFrames(fleet.layouts)
    with closing(SealedHistory(tmp_path)) as history:
        recent.add(history.sealed_to, fleet.batch(1, 90, 10))
        recent.add(history.sealed_to + 1, fleet.batch(1, 100, 10))
        found = HistoryReader(history, recent).series(
            query("host", "cpu_utilization_ratio", nodes=[1], **_ALWAYS)
        )
    assert [*range(BEGIN, BEGIN + 110)] == found[0].times.tolist()


def test_a_scan_goes_stretch_by_stretch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample comes once, only so many at a time, unknown metrics as NaN."""
    monkeypatch.setattr(reader, "_SCAN_ROWS", 400 * GPUS)
    sealed(tmp_path, 400, 1000)
    with opened(tmp_path) as samples:
        parts = list(samples.scan(query("gpu", ["power_watts", "temperature_celsius"], **_ALWAYS)))
    assert len(parts) >= 5
    assert max(len(part.times) for part in parts) <= 400 * GPUS
    assert all(np.isnan(part.values["temperature_celsius"]).all() for part in parts)
    of_one = [part.sequences[part.series == part.keys.index((2, "GPU-2-0"))] for part in parts]
    assert [*range(1, 1001)] == np.concatenate(of_one).tolist()


def test_only_files_that_matter_are_read(tmp_path: Path) -> None:
    """A damaged file of another time or scope does not disturb a question, and one that matters is named."""
    sealed(tmp_path, 100, 200)
    second = tmp_path / "history" / list_segment_names(f"{tmp_path}/history")[1] / "gpu-000000.parquet"
    second.write_bytes(b"x" * second.stat().st_size)
    with opened(tmp_path) as samples:
        assert samples.series(query("gpu", "power_watts", start=BEGIN, end=BEGIN + 100))
        assert samples.series(query("host", "cpu_utilization_ratio", **_ALWAYS))
        with collect_missing() as incomplete:
            left = samples.series(query("gpu", "power_watts", **_ALWAYS))
        assert {100} == {len(one.times) for one in left}
        assert ["gpu-000000.parquet is damaged: its checksum is wrong" in note for note in incomplete] == [
            True
        ]


def test_merged_segments_hold_the_same_rows(tmp_path: Path) -> None:
    """An hour becomes one segment with the same samples, and a row a minute with mean, minimum and maximum."""
    sealed(tmp_path, 1000, 2000, 3700)
    select = "node, subject, time::VARCHAR, run, sequence, power_watts, sm_active_ratio"
    before = sorted(rows_of(tmp_path, "gpu-000000.parquet", select), key=repr)
    with closing(open_writer(str(tmp_path))) as writer:
        assert 3 == len(writer.compact()["compacted"])
        assert [] == writer.compact()["compacted"]
    assert before == sorted(rows_of(tmp_path, "gpu-000000.parquet", select), key=repr)
    (segment,) = read_segments(f"{tmp_path}/history")
    assert segment.is_compacted
    minute = rows_of(
        tmp_path,
        "gpu-000000.60s.parquet",
        "samples, power_watts, min_power_watts::DOUBLE, max_power_watts::DOUBLE, sm_active_ratio",
    )[1]
    assert (60, pytest.approx(100.0895), 100.06, 100.119, 0.5) == minute


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Unfinished directories go, and so do segments that had been merged already."""
    sealed(tmp_path, 100, 200)
    history = tmp_path / "history"
    names = list_segment_names(str(history))
    merged = segment_name(1, int(names[1][21:]))
    (history / ".unfinished-x").mkdir()
    os.rename(history / names[0], history / merged)
    os.mkdir(history / names[0])
    assert [merged] == list_segment_names(str(history))
    assert sorted([".unfinished-x", *names]) == remove_leftovers(str(history))
    assert {merged, "lock", "oldest.json"} == set(os.listdir(history))


def test_segments_that_overlap_are_refused(tmp_path: Path) -> None:
    """Nobody can say which of two is right."""
    for first, last in ((1, 10), (5, 20)):
        (tmp_path / segment_name(first, last)).mkdir()
    with pytest.raises(LogError, match="overlap"):
        list_segment_names(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "meta.json").unlink(), "meta.json is missing"),
        (lambda path: (path / "meta.json").write_text("{"), "Expecting property name"),
        (lambda path: (path / "meta.json").write_text("[]"), "its checksum is missing"),
        (lambda path: (path / "gpu-000000.parquet").write_bytes(b""), "it has 0 bytes instead of"),
    ],
)
def test_what_is_damaged_is_moved_aside(tmp_path: Path, damage: Any, reason: str) -> None:
    """It is named and kept, and the gap is known afterwards."""
    sealed(tmp_path, 100, 200, 300)
    name = list_segment_names(f"{tmp_path}/history")[1]
    damage(tmp_path / "history" / name)
    (found,) = set_damaged_segments_aside(f"{tmp_path}/history")
    assert reason in found.reason
    assert found.moved_to is not None
    assert Path(found.moved_to).exists()
    assert [] == set_damaged_segments_aside(f"{tmp_path}/history")
    (gap,) = find_history_gaps(f"{tmp_path}/history", read_segments(f"{tmp_path}/history"))
    assert gap.meets(BEGIN + 150.0, BEGIN + 160.0, frozenset({1}), "gpu")
    with opened(tmp_path) as samples:
        times = {time for one in samples.series(query("gpu", "power_watts", **_ALWAYS)) for time in one.times}
    assert {BEGIN + 99.0, BEGIN + 200.0} <= times
    assert not any(BEGIN + 100 <= time < BEGIN + 200 for time in times)


def test_damage_is_not_merged_into_a_file_with_a_right_checksum(tmp_path: Path) -> None:
    """The sealing process leaves a damaged file out, and the merged segment says so."""
    sealed(tmp_path, 1000, 2000, 3700)
    name = list_segment_names(f"{tmp_path}/history")[1]
    path = tmp_path / "history" / name / "gpu-000000.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with closing(open_writer(str(tmp_path))) as writer:
        assert 3 == len(writer.compact()["compacted"])
    (segment,) = read_segments(f"{tmp_path}/history")
    (lost,) = segment.damaged
    assert ("gpu-000000.parquet", "its checksum is wrong", True) == (lost.name, lost.reason, lost.is_lost)
    assert [f"history-{name}-gpu-000000.parquet"] == os.listdir(tmp_path / "damaged")
    with opened(tmp_path) as samples:
        times = {time for one in samples.series(query("gpu", "power_watts", **_ALWAYS)) for time in one.times}
    assert not any(BEGIN + 1000 <= time < BEGIN + 2000 for time in times)
    assert len(times) == 2700


def test_files_are_checked_before_anybody_reads_them(tmp_path: Path) -> None:
    """The newest first, and as many bytes at once as allowed."""
    sealed(tmp_path, 100, 200)
    names = list_segment_names(f"{tmp_path}/history")
    for name in names:
        path = tmp_path / "history" / name / "gpu-000000.parquet"
        path.write_bytes(bytes(reversed(path.read_bytes())))
    damage = DamageList()
    with closing(SealedHistory(tmp_path, damage=damage)) as history:
        history.check_files(1)
        history.check_files(1)
        assert [f"{tmp_path}/history/{names[1]}/gpu-000000.parquet"] == [one.path for one in damage.found]
        history.check_files()
        assert 2 == len(damage.found)
        history.check_files()
        assert 2 == len(damage.take())


def test_files_without_a_checksum_are_read_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Earlier versions wrote them; a file among them that cannot be read at all is left out."""
    sealed(tmp_path, 100, 200)
    names = list_segment_names(f"{tmp_path}/history")
    for name in names:
        meta = tmp_path / "history" / name / "meta.json"
        document = json.loads(meta.read_text())
        del document["checksum"], document["damaged"]
        for file in document["files"]:
            del file["checksum"]
        meta.write_text(json.dumps(document))
    with opened(tmp_path) as samples:
        for _ in range(2):
            assert samples.series(query("gpu", "power_watts", **_ALWAYS))
    assert 1 == caplog.text.count("have no checksum")
    second = tmp_path / "history" / names[1] / "gpu-000000.parquet"
    second.write_bytes(b"x" * second.stat().st_size)
    with opened(tmp_path) as samples:
        left = samples.series(query("gpu", "power_watts", **_ALWAYS))
    assert {100} == {len(one.times) for one in left}


def test_a_segment_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """By the format's number, with the version that reads it as the way out."""
    sealed(tmp_path, 10)
    (name,) = list_segment_names(f"{tmp_path}/history")
    meta = tmp_path / "history" / name / "meta.json"
    document = {**json.loads(strip_checksum(meta.read_bytes())[0]), "format": 99, "files": "other"}
    meta.write_bytes(add_checksum(json.dumps(document).encode()))
    with pytest.raises(LogError, match="format 99"):
        SealedHistory(tmp_path)


def test_the_oldest_go_first(tmp_path: Path) -> None:
    """By age or by size, never the newest, and nothing when there is no limit."""
    sealed(tmp_path, 100, 200, 300)
    segments = read_segments(f"{tmp_path}/history")
    none = {"now": BEGIN + 250.0, "keep_seconds": None, "limit_bytes": None}
    assert [] == find_outdated(segments, **none)  # type: ignore[arg-type]
    assert segments[:1] == find_outdated(segments, **{**none, "keep_seconds": 100})  # type: ignore[arg-type]
    assert segments[:2] == find_outdated(segments, **{**none, "limit_bytes": 1})  # type: ignore[arg-type]
    room = segments[1].size_bytes + segments[2].size_bytes
    assert segments[:1] == find_outdated(segments, **{**none, "limit_bytes": room})  # type: ignore[arg-type]


def write_foreign(log: Log, position: int, columns: tuple[LayoutColumn, ...], number: int) -> int:
    """A batch of a layout of one's own with one number a column; gives its position."""
    layout = ColumnLayout("gpu", ({"uuid": "GPU-x", "index": 0, "name": "X"},), columns, ())
    text = layout.to_json()
    block = ColumnBlock(
        layout_id(text), b"".join((number * 10**i).to_bytes(8, "little") for i in range(len(columns)))
    )
    frame = PackedFrame((BEGIN + position) * 1_000_000, 0, (block,)).to_bytes()
    log.append(FACT, encode_fact("layout", id=str(layout_id(text)), text=text.decode()))
    return log.append(BATCH, FrameBatch(b"r" * 16, 1, position, 1, 0, 0, frame).to_bytes())


def test_layouts_of_other_versions_come_together(tmp_path: Path) -> None:
    """Columns are the union of all layouts, steps may differ, and names that are no metrics are left out."""
    with Log(tmp_path / "log") as log:
        write_foreign(log, 1, (LayoutColumn("power_watts", 100), LayoutColumn("from_the_future", 10)), 1234)
        write_foreign(log, 2, (LayoutColumn("power_watts", 1000),), 1234)
        write_foreign(
            log,
            3,
            (LayoutColumn("power_watts", 1), LayoutColumn("Power_Watts", 3), LayoutColumn('"; x', 1)),
            1234,
        )
        write_foreign(log, 4, (LayoutColumn("power_watts", 7),), 700)
        position = log.sync()
    with closing(open_writer(str(tmp_path))) as writer:
        writer.seal(position - 2)
    assert [(12.34, 1234.0), (1.234, None), (1234.0, None)] == rows_of(
        tmp_path, "gpu-000000.parquet", "power_watts::DOUBLE, from_the_future::DOUBLE"
    )
    with closing(open_writer(str(tmp_path))) as writer:
        writer.seal(position)
    with opened(tmp_path) as samples:
        (series,) = samples.series(query("gpu", "power_watts", **_ALWAYS))
    assert [12.34, 1.234, 1234.0, 100.0] == series.values.tolist()


def test_the_metadata_has_what_the_log_has_dropped(tmp_path: Path) -> None:
    """Layouts and names of nodes come from the metadata when the log's facts are gone."""
    import sqlite3  # noqa: PLC0415  used here alone

    fleet = Fleet()
    batch = fleet.batch(1, 0, 10)
    with closing(sqlite3.connect(tmp_path / "metadata.sqlite")) as metadata, metadata:
        metadata.execute("CREATE TABLE layouts (id TEXT PRIMARY KEY, text TEXT)")
        metadata.execute(
            "CREATE TABLE nodes (id INTEGER PRIMARY KEY, name TEXT, host TEXT, machine TEXT, facts TEXT)"
        )
        metadata.execute("INSERT INTO nodes VALUES (1, 'told', 'told', 'm1', '{}')")
        rows = [(str(number), text.decode()) for number, text in fleet.texts.items()]
        metadata.executemany("INSERT INTO layouts VALUES (?, ?)", rows)
    with Log(tmp_path / "log") as log:
        log.append(BATCH, batch.to_bytes())
        position = log.sync()
    with closing(open_writer(str(tmp_path))) as writer:
        assert position == writer.seal(position)["sealed_to"]
    assert [("told",)] == rows_of(tmp_path, "gpu-000000.parquet", "DISTINCT node")


def test_a_stretch_without_frames_is_sealed_too(tmp_path: Path) -> None:
    """Facts alone move the sealed position on, so that the log can drop them."""
    with Log(tmp_path / "log") as log:
        log.append(FACT, encode_fact("node", id=1, name="a"))
        position = log.sync()
    with closing(open_writer(str(tmp_path))) as writer:
        writer.seal(position)
    with closing(SealedHistory(tmp_path)) as history:
        assert (1, 0) == (history.sealed_to, history.size_bytes)
        assert [] == HistoryReader(history, RecentFrames({})).series(query("gpu", "power_watts", **_ALWAYS))


def test_questions_hold_no_other_sql(tmp_path: Path) -> None:
    """Names come from the catalogue, everything else is bound, and files elsewhere cannot be read."""
    sealed(tmp_path, 10)
    with opened(tmp_path) as samples:
        with pytest.raises(UsageError):
            samples.series(query("gpu", 'power_watts" FROM x --', **_ALWAYS))
        with pytest.raises(UsageError):
            samples.series(query("gpu", "power_watts", statistic="sum(1)", **_ALWAYS))
        assert [] == samples.series(query("gpu", "power_watts", subjects=["' OR 1=1 --"], **_ALWAYS))
        with pytest.raises(duckdb.Error):
            samples._history._database.execute("SELECT * FROM read_text('/etc/hostname')")
    assert power(1, 0, 1) == 100.001


@pytest.mark.parametrize("time", [-(1 << 63), (1 << 63) - 1])
def test_nothing_that_a_node_sends_stops_sealing(tmp_path: Path, time: int) -> None:
    """Numbers, names and times that make no sense are kept as far as files can hold them."""
    columns = (
        LayoutColumn("nvlink_rx_bytes_total", 1, 1024),
        LayoutColumn("power_watts", 1000),
        LayoutColumn("run_wait", 10**9),
        LayoutColumn("odd", 3),
    )
    layout = ColumnLayout("gpu", ({"uuid": "a\0b\ud800", "index": "x", "name": 7},), columns, ())
    text = layout.to_json()
    numbers = b"".join(
        number.to_bytes(8, "little", signed=True) for number in ((1 << 62), -(1 << 63) + 1, 1, 7)
    )
    frame = PackedFrame(time, 0, (ColumnBlock(layout_id(text), numbers),)).to_bytes()
    with Log(tmp_path / "log") as log:
        log.append(FACT, encode_fact("layout", id=str(layout_id(text)), text=text.decode()))
        position = log.append(BATCH, FrameBatch(b"r" * 16, 1, 1, 1, 0, 9, frame).to_bytes())
        log.sync()
    with closing(open_writer(str(tmp_path))) as writer:
        writer.seal(position)
    select = "nvlink_rx_bytes_total, power_watts, run_wait::DOUBLE, odd"
    assert [(2.0**72, -(2.0**63) / 1000, 1e-9, 7 / 3)] == rows_of(tmp_path, "gpu-000000.parquet", select)
