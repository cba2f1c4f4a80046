"""Diagnoses of the recorded runs, for tests of how they are told."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gpulse.diagnosis.digest import Digest
from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.seconds import Second
from gpulse.model.finding import Diagnosis
from gpulse.sources.recording import Recording

ROOT = Path(__file__).parents[2]
RECORDINGS = {
    path.name.removesuffix(".jsonl.gz"): path
    for folder in ("tests/data/traces", "src/gpulse/sources/demo")
    for path in sorted((ROOT / folder).glob("*.jsonl.gz"))
}


@cache
def diagnosed(name: str) -> Diagnosis:
    """What a recorded run shows."""
    return diagnose(Recording(RECORDINGS[name]))


@cache
def digested(name: str) -> dict[str, list[Second]]:
    """The seconds of a recorded run, by GPU."""
    digest = Digest()
    seconds: dict[str, list[Second]] = {}
    for frame in Recording(RECORDINGS[name]):
        for uuid, second in digest.feed(frame).items():
            seconds.setdefault(uuid, []).append(second)
    return seconds
