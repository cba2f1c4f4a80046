"""The same answer from samples, minutes, shares and summaries, however a store came to be."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulse.model.frame import Frame
from gpulse.store.history import compaction
from gpulse.store.history.duckdb_query import SealedHistory
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.segments import SHARE_SECONDS, Segment, valid_summaries
from gpulse.store.seal_process import open_writer
from gpulse.store.store import GpuShare, Series
from tests.queries import query
from tests.unit.report_lab import BEGIN, Held, Lab

LABELS = ("0", "1"), ("0", "1", "1:0", "1:1")
BLOCK = 600
BLOCKS = 26
METRICS = ["power_watts", "gpu_utilization_ratio", "energy_joules_total"]


@pytest.fixture(autouse=True)
def short_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are merged after half an hour, and summed up after two hours."""
    monkeypatch.setattr(compaction, "HOUR_US", 1_800_000_000)
    monkeypatch.setattr(compaction, "DAY_US", 7_200_000_000)


class Story:
    """What happens on a few nodes, by chance."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab = lab
        self._chance = random.Random(seed)
        self._late: list[tuple[int, list[Frame]]] = []

    def block(self, place: int) -> None:
        """Ten minutes: nodes send, are away, send what they kept, or have a clock that steps back."""
        chance = self._chance
        for node in self._lab.machines:
            fate = chance.choices(("sends", "away", "keeps", "steps back"), (12, 1, 1, 1))[0]
            if fate == "away":
                continue
            begin = BLOCK * place - (400 if fate == "steps back" and place else 0)
            frames = self._frames(node, begin)
            if fate == "keeps":
                self._late.append((node, frames))
            else:
                self._lab.add(frames, node)
        if self._late and chance.random() < 0.4:
            node, frames = self._late.pop()
            self._lab.add(frames, node)

    def _frames(self, node: int, begin: int) -> list[Frame]:
        chance = self._chance
        labels = [device.label for device in self._lab.machines[node].devices]
        held = [
            Held(
                100 + place,
                tuple(chance.sample(labels, chance.randint(1, 2))),
                user=f"u{place}",
                sm=chance.choice((None, 0.0, 0.25, 0.7)),
                memory=chance.choice((None, 1 << 30, 3 << 30)),
                start=BEGIN - 100.0 - chance.randint(0, 2),
            )
            for place in range(chance.randint(0, 3))
        ]
        pace = chance.choice((15, 25, 40))
        frames = []
        for second in range(begin + chance.randint(0, 9), begin + BLOCK, pace):
            some = [one for one in held if chance.random() < 0.9]
            frames.append(self._lab.frame(second, *some, node=node, values=self._values(labels, second)))
        return frames

    def _values(self, labels: Sequence[str], second: int) -> dict[str, dict[str, float]]:
        found = {}
        for label in labels:
            values = {
                "gpu_utilization_ratio": self._chance.choice((0.0, 0.01, 0.6)),
                "power_watts": self._chance.randint(50, 700) / 1.0,
                "energy_joules_total": 1000.0 + 5 * second,
            }
            if self._chance.random() < 0.3:
                del values[self._chance.choice(list(values))]
            found[label] = values
        return found


def shown(history: SealedHistory, *, shares: bool, summaries: bool) -> None:
    """Let a history look as if an earlier version had written it."""

    def older(segment: Segment) -> Segment:
        return segment._replace(
            files=tuple(file for file in segment.files if shares or file.seconds != SHARE_SECONDS)
        )

    history.segments = tuple(map(older, history.segments))
    history.summaries = history.summaries if summaries else ()


def check_shares(wanted: list[GpuShare], found: list[GpuShare]) -> None:
    """Both say the same of every process and GPU."""
    assert [share[:4] for share in wanted] == [share[:4] for share in found]
    for one, other in zip(wanted, found, strict=True):
        for value, twin in zip(one[4:], other[4:], strict=True):
            assert value == (None if twin is None else pytest.approx(twin, rel=1e-5, abs=1e-6)), (one, other)


def check_steps(wanted: list[Series], found: list[Series]) -> None:
    """Both have the same steps."""
    assert [(one.key, one.metric) for one in wanted] == [(one.key, one.metric) for one in found]
    for one, other in zip(wanted, found, strict=True):
        for column in ("times", "values", "lows", "highs", "ends", "counts"):
            assert np.allclose(getattr(one, column), getattr(other, column), rtol=1e-5), column


def windows(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Times to ask about: all, whole hours, and any."""
    end = BLOCK * BLOCKS
    spans = [(-1000, end + 1000), (3600, 3 * 3600), (0, end)]
    spans += [sorted(chance.sample(range(-100, end), 2)) for _ in range(3)]  # type: ignore[misc]
    for start, stop in spans:
        yield {
            "start": float(BEGIN + start),
            "end": BEGIN + stop + 0.25,
            "nodes": chance.choice((None, [1], [2])),
        }


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_all_paths_agree(tmp_path: Path, seed: int) -> None:
    """Whatever nodes did and however far sealing, merging and summing up came."""
    chance = random.Random(1000 + seed)
    with Lab(tmp_path, *LABELS) as lab:
        story = Story(lab, seed)
        with closing(open_writer(str(tmp_path / "data"))) as writer:
            for place in range(BLOCKS):
                story.block(place)
                if chance.random() < 0.6 or place == BLOCKS - 3:
                    writer.seal(lab.archive.metadata.applied)
                    while chance.random() < 0.8 and writer.compact()["compacted"]:
                        pass
        check_paths(lab, tmp_path / "data", chance)


def check_paths(lab: Lab, data_dir: Path, chance: random.Random) -> None:
    """The answers of a store as it is, and as others would have it, are those from memory."""
    memory = lab.archive._recent  # never told that something was sealed
    asked = list(windows(chance))
    with closing(SealedHistory(data_dir.parent / "nothing")) as nothing:
        source = HistoryReader(nothing, memory)
        wanted = [
            (
                source.gpu_time(query(**one)),
                source.gpu_holders(query(**one)),
                source.series(query("gpu", METRICS, step=600.0, **one)),
            )
            for one in asked
        ]
    for shares, summaries in ((True, True), (True, False), (False, True), (False, False)):
        with closing(SealedHistory(data_dir)) as history:
            assert valid_summaries(history.summaries, history.segments)
            shown(history, shares=shares, summaries=summaries)
            source = HistoryReader(history, memory)
            for one, (divided, held, steps) in zip(asked, wanted, strict=True):
                check_shares(divided, source.gpu_time(query(**one)))
                check_steps(steps, source.series(query("gpu", METRICS, step=600.0, **one)))
                found = source.gpu_holders(query(**one))
                assert [one[:6] for one in held] == [one[:6] for one in found]
