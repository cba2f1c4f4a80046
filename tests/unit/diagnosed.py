"""Diagnoses of the recorded runs, for tests of their presentation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.second_aggregator import SecondAggregator
from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.model.finding import Diagnosis
from tests.unit.diagnosis_traces import whole

ROOT = Path(__file__).parents[2]
RECORDINGS = {
    path.name.removesuffix(".jsonl.gz"): path
    for folder in ("tests/data/traces", "src/gpulse/sources/demo")
    for path in sorted((ROOT / folder).glob("*.jsonl.gz"))
}


@cache
def diagnosed(name: str) -> Diagnosis:
    """What a recorded run shows."""
    return diagnose(whole(name))


@cache
def digested(name: str) -> dict[str, list[SecondSummary]]:
    """The seconds of a recorded run, by GPU."""
    digest = SecondAggregator()
    seconds: dict[str, list[SecondSummary]] = {}
    for frame in whole(name):
        for uuid, second in digest.feed(frame).items():
            seconds.setdefault(uuid, []).append(second)
    return seconds
