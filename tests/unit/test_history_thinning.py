"""Segments from which what a time-series database has was taken out: what no database takes is still all there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulse.errors import DiskError
from gpulse.model.frame import HostReading
from gpulse.store.history import compaction, gpu_share_files
from gpulse.store.history import writer as history_writer
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.parquet import FAST_COMPRESSION, open_database
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.rollup import FINE_SECONDS
from gpulse.store.history.segments import (
    SHARE_SECONDS,
    list_segment_names,
    read_segments,
    read_summaries,
    valid_summaries,
)
from gpulse.store.history.writer import find_thinnable
from gpulse.store.seal_process import open_writer
from gpulse.store.store import GpuShare
from tests.queries import query
from tests.unit.report_lab import BEGIN, Held, Lab

pytestmark = pytest.mark.slow

NODES = (1, 2)
END = BEGIN + 9000
WHOLE_SECONDS = 3600.0
"""So long everything is kept: of five segments the first three become thin."""
EVER = 1e9
SPANS = ((0, 9000), (0, 3600), (-300, 7200), (660, 4140), (3000, 3060), (1230, 5010), (1210, 1230))
"""In seconds after the beginning: hours, minutes, and what begins and ends within a minute."""
PROCESS = ("gpu_memory_bytes", "sm_ratio")


@pytest.fixture(scope="module", autouse=True)
def short_days() -> Iterator[None]:
    """Half an hour is merged, and a day is less than two hours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "HOUR_US", 1_200_000_000)
        patch.setattr(compaction, "DAY_US", 6_000_000_000)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody changes: two nodes that work and rest, and whose processes come and go."""
    directory = tmp_path_factory.mktemp("whole")
    with Lab(directory, ("0", "1"), ("0",)) as lab, closing(open_writer(str(directory / "data"))) as writer:
        for begin in range(0, 9000, 600):
            for node in NODES:
                lab.add([frame(lab, second, node) for second in range(begin, begin + 600, 10)], node)
            writer.seal(lab.archive.metadata.applied)
            while writer.compact()["compacted"]:
                pass
    return directory / "data"


def frame(lab: Lab, second: int, node: int) -> Any:
    """What a node is at a second."""
    held = (Held(100, ("0",), sm=0.75), Held(101, ("0", "1"), user="bob", sm=0.25))
    values = {
        "gpu_utilization_ratio": 0.0 if second % 600 < 120 else 0.5,
        "power_watts": 200.0 + 100.0 * node,
        "memory_used_bytes": 1 << 30,
    }
    return lab.frame(
        second,
        *(held if second % 900 < 600 else held[:1]),
        node=node,
        values=dict.fromkeys("01", values),
        host=HostReading({"cpu_utilization_ratio": 0.5}),
    )


@pytest.fixture
def store(tmp_path: Path, whole: Path) -> Path:
    """One to change."""
    shutil.copytree(whole, tmp_path / "store")
    return tmp_path / "store"


def thinned(store: Path, keep_seconds: float | None = EVER, limit_bytes: int | None = None) -> dict[str, Any]:
    """What became of a store that keeps everything for an hour."""
    with closing(open_writer(str(store))) as writer:
        return writer.retain(END, keep_seconds, limit_bytes, WHOLE_SECONDS)


def asked(store: Path, start: float = 0, end: float = 9000) -> tuple[list[GpuShare], list[Any], list[Any]]:
    """What is told of processes."""
    with closing(SealedHistory(store)) as history:
        return told(HistoryReader(history, RecentFrames({})), start, end)


def told(samples: HistoryReader, start: float, end: float) -> tuple[list[GpuShare], list[Any], list[Any]]:
    """Shares, holdings and steps of processes."""
    span: Any = {"start": BEGIN + start, "end": BEGIN + end}
    steps = samples.series(query("process", PROCESS, step=60.0, **span))
    return (
        samples.gpu_time(query(**span)),
        samples.gpu_holders(query(**span)),
        [(one.key, one.metric, [np.asarray(column).tolist() for column in one[2:]]) for one in steps],
    )


def of_gpus(store: Path, metric: str, scope: Any = "gpu", step: float | None = None) -> list[float]:
    """When something is known of the first GPU, in seconds after the beginning."""
    with closing(SealedHistory(store)) as history:
        samples = HistoryReader(history, RecentFrames({}))
        found = samples.series(query(scope, metric, start=BEGIN, end=END, step=step, nodes={1}))
        return [] if not found else (found[0].times - BEGIN).tolist()


def check_near(wanted: list[GpuShare], found: list[GpuShare]) -> None:
    """Both say the same of every process and GPU, to a few seconds."""
    assert [one[:4] for one in wanted] == [one[:4] for one in found]
    for one, other in zip(wanted, found, strict=True):
        known = [np.nan if value is None else value for value in one[6:]]
        assert known == pytest.approx(
            [np.nan if value is None else value for value in other[6:]], nan_ok=True
        )


@pytest.mark.parametrize("span", SPANS)
def test_processes_are_told_as_before(store: Path, span: tuple[int, int]) -> None:
    """How GPUs are divided, who held them, and what they did on them: from hours, and from pieces of minutes."""
    before = asked(store, *span)
    assert 3 == len(thinned(store)["thinned"])
    after = asked(store, *span)

    assert len(before[0]) > 1
    check_near(before[0], after[0])
    assert before[1:] == after[1:]


def test_what_a_database_has_is_gone(store: Path) -> None:
    """Every sample of GPUs and hosts, up to the last piece that was old enough; minutes that divide GPUs stay."""
    segments = read_segments(f"{store}/history")
    names = thinned(store)["thinned"]
    cut = (segments[2].end or 0) / 1e6 - BEGIN

    assert [segment.name for segment in segments[:3]] == names
    assert cut < min(of_gpus(store, "power_watts"))
    assert cut < min(of_gpus(store, "memory_used_bytes", step=60.0))
    assert cut < min(of_gpus(store, "cpu_utilization_ratio", "host", step=60.0))
    assert of_gpus(store, "power_watts", step=60.0)[0] == 0.0
    thin, after = read_segments(f"{store}/history")[:3], read_segments(f"{store}/history")[3:]
    assert after == segments[3:]
    assert [segment.end for segment in segments[:3]] == [segment.thinned for segment in thin]
    assert sum(one.size_bytes for one in thin) < sum(one.size_bytes for one in segments[:3])
    files = [(file.scope, file.seconds) for file in thin[0].files]
    assert sorted([("process", 0), ("process", 60), ("process", 3600), ("gpu", 60)]) == sorted(files)
    assert {"removed": [], "thinned": []} == thinned(store)


def test_summaries_stay_right(store: Path) -> None:
    """One that was made before counts still, and one that is made after says the same of processes."""
    summaries = valid_summaries(read_summaries(f"{store}/history"), read_segments(f"{store}/history"))
    before = asked(store)
    thinned(store)
    directory = f"{store}/history"
    assert [one.segment for one in summaries] == [
        one.segment for one in valid_summaries(read_summaries(directory), read_segments(directory))
    ]

    shutil.rmtree(f"{directory}/{summaries[0].segment.name}")
    hosts = of_gpus(store, "cpu_utilization_ratio", "host", step=300.0)
    with closing(open_writer(str(store))) as writer:
        assert [summaries[0].segment.name] == writer.compact()["compacted"]
    (made,) = read_summaries(directory)
    assert {"process", "gpu", "host"} == {file.scope for file in made.files}
    assert hosts == of_gpus(store, "cpu_utilization_ratio", "host", step=300.0)
    check_near(before[0], asked(store)[0])
    assert before[1] == asked(store)[1]


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_process_that_is_killed_on_the_way_leaves_a_whole_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    """Either the segment or the thin one counts, and the next start removes what does not."""
    before = asked(store)
    names = list_segment_names(f"{store}/history")
    with closing(open_writer(str(store))) as writer, monkeypatch.context() as patch:
        patch.setattr("gpulse.store.history.writer.remove_segments", killed)
        if not is_renamed:
            patch.setattr("gpulse.store.history.writer.write_meta", killed)
            patch.setattr("gpulse.store.history.segments.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            writer.retain(END, None, None, WHOLE_SECONDS)
    left = f"{names[0]}-thin"
    assert (store / "history" / (left if is_renamed else f".unfinished-{left}")).is_dir()
    assert (store / "history" / names[0]).is_dir()

    assert [left if is_renamed else names[0], *names[1:]] == list_segment_names(f"{store}/history")
    check_near(before[0], asked(store)[0])
    with closing(open_writer(str(store))) as writer:
        assert [names[0] if is_renamed else f".unfinished-{left}"] == writer.tidied
    assert names[1 if is_renamed else 0 : 3] == thinned(store)["thinned"]
    check_near(before[0], asked(store)[0])


def test_the_gpu_time_of_an_hour_needs_its_minutes_only(store: Path, tmp_path: Path) -> None:
    """Samples are sixty times as many rows, so a merged segment is divided from its minutes."""
    segment = read_segments(f"{store}/history")[0]
    minutes = [file for file in segment.files if file.seconds == FINE_SECONDS]
    target = tmp_path / "minutes"
    target.mkdir()
    for file in minutes:
        shutil.copy(store / "history" / segment.name / file.name, target)
    with closing(open_database(str(tmp_path / "spill"))) as database:
        made = gpu_share_files.write_share_files(database, str(target), minutes, level=FAST_COMPRESSION)
    assert [file.rows for file in segment.shares] == [file.rows for file in made]
    assert made[0].rows > 0


def killed(*_: object, **__: object) -> None:
    """As if the process ended here."""
    raise KeyboardInterrupt


def test_one_who_asks_meanwhile_gets_an_answer(store: Path) -> None:
    """A history that was opened before looks again when its files are gone."""
    with closing(SealedHistory(store)) as history:
        samples = HistoryReader(history, RecentFrames({}))
        before = told(samples, 0, 9000)
        thinned(store)
        after = told(samples, 0, 9000)
        assert before[1:] == after[1:]
        check_near(before[0], after[0])
        assert 3 == sum(segment.thinned is not None for segment in history.segments)


def test_what_is_not_ready_waits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest, what is not merged yet, what has no shares or is not in the database; not all is done at once."""
    segments = read_segments(f"{store}/history")
    asked: dict[str, Any] = {"now": END + EVER, "whole_seconds": 1.0}
    assert segments[:-1] == find_thinnable([one._replace(is_compacted=True) for one in segments], **asked)
    assert segments[1:-1] == find_thinnable(
        [segments[0]._replace(is_compacted=False), *segments[1:]], **asked
    )
    undivided = [file for file in segments[0].files if file.seconds != SHARE_SECONDS]
    assert segments[1:-1] == find_thinnable(
        [segments[0]._replace(files=tuple(undivided)), *segments[1:]], **asked
    )
    assert [] == find_thinnable([one._replace(thinned=1) for one in segments], **asked)
    assert segments[1:2] == find_thinnable(segments, sent=(segments[0].first, segments[2].last - 1), **asked)

    monkeypatch.setattr(history_writer, "_THIN_SECONDS", 0.0)
    assert [[one.name] for one in segments[:3]] == [thinned(store)["thinned"] for _ in range(3)]


def test_thin_ones_go_when_they_are_old_or_too_much(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest first, also when a disk is too full to make one thin."""
    with monkeypatch.context() as patch:
        patch.setattr("gpulse.store.history.writer.write_file", full)
        with pytest.raises(DiskError):
            thinned(store, keep_seconds=END - BEGIN - 2500.0)
    thinned(store)
    names = list_segment_names(f"{store}/history")
    assert 4 == len(names)

    size = sum(segment.size_bytes for segment in read_segments(f"{store}/history"))
    assert names[:1] == thinned(store, limit_bytes=size - 1)["removed"]
    assert names[1:2] == thinned(store, keep_seconds=END - BEGIN - 5500.0)["removed"]


def full(*_: object, **__: object) -> None:
    """As if nothing could be written."""
    raise DiskError("no space")
