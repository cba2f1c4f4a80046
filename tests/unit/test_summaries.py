"""Summaries of a day: made once, removed with their segments, and never needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulse.errors import DiskError
from gpulse.store.history import compaction
from gpulse.store.history import writer as history_writer
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent_frames import RecentFrames
from gpulse.store.history.segments import DaySummary, read_segments, read_summaries, valid_summaries
from gpulse.store.history.writer import find_outdated
from gpulse.store.seal_process import open_writer
from tests.queries import query
from tests.unit.history_frames import BEGIN, Fleet, write_log

pytestmark = pytest.mark.slow

NODES = range(1, 3)
ASKED: dict[str, Any] = {"start": BEGIN - 1000.0, "end": BEGIN + 10_000.0, "step": 300.0}


@pytest.fixture(scope="module", autouse=True)
def short_days() -> Iterator[None]:
    """An hour has two minutes, and a day five of these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "HOUR_US", 100_000_000)
        patch.setattr(compaction, "DAY_US", 590_000_000)
        yield


@pytest.fixture(scope="module")
def two_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that nobody changes."""
    path = tmp_path_factory.mktemp("days")
    fleet = Fleet()
    with closing(open_writer(str(path))) as writer:
        for second in range(0, 1260, 60):
            writer.seal(write_log(path, fleet, NODES, range(second, second + 60)))
            while writer.compact()["compacted"]:
                pass
    return path


@pytest.fixture
def store(tmp_path: Path, two_days: Path) -> Path:
    """One to change."""
    shutil.copytree(two_days, tmp_path / "store")
    return tmp_path / "store"


def of(store: Path) -> list[DaySummary]:
    """The summaries that count."""
    directory = f"{store}/history"
    return valid_summaries(read_summaries(directory), read_segments(directory))


def means(store: Path) -> list[list[float]]:
    """Something to ask."""
    with closing(SealedHistory(store)) as history:
        found = HistoryReader(history, RecentFrames({})).series(
            query("gpu", ["power_watts", "sm_active_ratio"], **ASKED)
        )
        return [steps.values.tolist() for steps in found]


def test_a_day_is_summed_up_once(store: Path) -> None:
    """A summary stands for whole segments one after the other, and those stay."""
    first, second = of(store)
    assert first.segment.last + 1 == second.segment.first
    assert first.members == tuple(read_segments(f"{store}/history")[: len(first.members)])
    assert {"gpu", "host", "process"} == {file.scope for file in first.segment.files}
    with closing(open_writer(str(store))) as writer:
        assert ([], []) == (writer.tidied, writer.compact()["compacted"])


def test_a_summary_goes_with_the_first_of_its_segments(store: Path) -> None:
    """Nothing is kept for longer than its segments, and what it took on disk counts."""
    directory = f"{store}/history"
    segments, (first, second) = read_segments(directory), of(store)
    total = sum(one.size_bytes for one in (*segments, first.segment, second.segment))
    kept: dict[str, Any] = {"now": 0.0, "keep_seconds": None, "summaries": [first, second]}
    assert [] == find_outdated(segments, limit_bytes=total, **kept)
    room = total - segments[0].size_bytes - first.segment.size_bytes
    assert segments[:1] == find_outdated(segments, limit_bytes=room, **kept)
    assert segments[:2] == find_outdated(segments, limit_bytes=room - 1, **kept)
    with closing(open_writer(str(store))) as writer:
        removed = writer.retain(0.0, None, room)["removed"]
        assert [segments[0].name] == removed
        assert [] == writer.compact()["compacted"]
    assert [second] == of(store)
    assert not os.path.exists(f"{directory}/{first.segment.name}")


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_answers_are_the_same_when_a_summary_is_lost(store: Path) -> None:
    """One that was removed, damaged or cut off is left out, and made again."""
    wanted = means(store)
    first, second = of(store)
    changes: list[Callable[[Path], object]] = [
        lambda path: (path / "meta.json").unlink(),
        lambda path: (path / "gpu-000000.300s.parquet").write_bytes(b""),
        lambda path: flip(path / "gpu-000000.300s.parquet"),
        lambda path: path.rename(path.parent / f".unfinished-{path.name}"),
    ]
    for change in changes:
        change(store / "history" / first.segment.name)
        assert all(np.allclose(one, other) for one, other in zip(wanted, means(store), strict=True))
        with closing(SealedHistory(store, moves_damage=True)) as history:
            history.check_files()
        assert [second] == of(store)
        with closing(open_writer(str(store))) as writer:
            assert [first.segment.name] == writer.compact()["compacted"]
    assert [first, second] == of(store)
    assert all(np.allclose(one, other) for one, other in zip(wanted, means(store), strict=True))


def test_a_question_finds_its_files_gone(store: Path) -> None:
    """A history that was opened before a summary was removed answers without it."""
    wanted = means(store)
    first, _ = of(store)
    with closing(SealedHistory(store)) as history:
        os.rename(f"{history.path}/{first.segment.name}", f"{history.path}/.removed-x")
        found = HistoryReader(history, RecentFrames({})).series(
            query("gpu", ["power_watts", "sm_active_ratio"], **ASKED)
        )
    assert all(np.allclose(one, steps.values) for one, steps in zip(wanted, found, strict=True))


def test_a_full_disk_leaves_nothing_of_a_summary(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be made is tried again."""
    directory = store / "history"
    first, second = of(store)
    os.rename(directory / first.segment.name, directory / ".removed-x")

    def full(*_: object, **__: object) -> None:
        raise DiskError("no space")

    with closing(open_writer(str(store))) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(compaction, "write_file", full)
            with pytest.raises(DiskError):
                writer.compact()
        assert not [name for name in os.listdir(directory) if name.startswith(".")]
        assert [second] == of(store)
        assert [first.segment.name] == writer.compact()["compacted"]


def test_a_summary_is_made_bit_by_bit(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealing goes on between its files; what is not finished when the process ends is begun anew."""
    monkeypatch.setattr(history_writer, "_SUMMARY_SECONDS", 0.0)
    directory = store / "history"
    first, second = of(store)
    shutil.rmtree(directory / first.segment.name)
    with closing(open_writer(str(store))) as writer:
        assert [] == writer.compact()["compacted"]
        assert [f".unfinished-{first.segment.name}"] == [
            name for name in os.listdir(directory) if name.startswith(".")
        ]
        assert [second] == of(store)
    assert not [name for name in os.listdir(directory) if name.startswith(".")]
    with closing(open_writer(str(store))) as writer:
        tries = [writer.compact()["compacted"] for _ in range(len(first.segment.files) + 1)]
    assert [*[[]] * len(first.segment.files), [first.segment.name]] == tries
    assert [first, second] == of(store)
