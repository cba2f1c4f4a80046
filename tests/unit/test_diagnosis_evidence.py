from __future__ import annotations

from functools import cache

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.rule_registry import RULES_BY_ID
from gpulse.model.finding import Diagnosis, Finding
from tests.unit.diagnosis_perturb import NOISE
from tests.unit.diagnosis_recompute import HOLDS, everything, recomputed, unexplained, window
from tests.unit.diagnosis_traces import NAMES, steady

pytestmark = pytest.mark.slow
"""Hundreds of recordings are judged: seconds of CPU time together."""

LOOSE = {"slope", "extrapolated", "stall_written_bytes", "stall_seconds", "stall_ratio", "length"}
"""Computed here by another method, or over edges that fall between two frames."""


@cache
def judged(name: str) -> Diagnosis:
    """What the engine makes of a recording."""
    return diagnose(steady(name))


def findings(name: str) -> tuple[Finding, ...]:
    """All that it says, informational or not."""
    return (*judged(name).findings, *judged(name).info)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_can_be_computed_again(name: str) -> None:
    """From the frames of the time that was judged, by other means, and the same comes out."""

    for finding in findings(name):
        view = window(steady(name), judged(name).judged[0])
        for item in everything(finding):
            value = recomputed(item, view, finding)
            loose = {item.signal, item.statistic} & LOOSE

            assert value is not None, item
            assert item.value == pytest.approx(value, rel=0.15 if loose else 0.02, abs=1e-4), item


@pytest.mark.parametrize("name", NAMES)
def test_evidence_says_what_it_claims(name: str) -> None:
    """Each number is on the side of its threshold that it is said to be on, also when things are noisy."""

    for frames in (steady(name), *(change(steady(name)) for change in NOISE.values())):
        diagnosis = diagnose(frames)
        for finding in (*diagnosis.findings, *diagnosis.info):
            assert finding.evidence
            for item in everything(finding):
                assert HOLDS[item.comparison](item.value, item.threshold), (finding.id, item)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_sentence_is_evidence(name: str) -> None:
    """Written the same way, or as the lost share of the time."""

    for finding in findings(name):
        assert set() == unexplained(finding)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_ruled_out_names_its_measure(name: str) -> None:
    """A cause that was not blamed comes with the number that says so, below its threshold."""

    for finding in findings(name):
        measured = [words for words in finding.ruled_out if ", below " in words]

        assert measured or finding.lost_ratio is None or finding.family not in ("input", "host", "copy")
        assert all(words.partition(":")[0].split(", ")[0] in RULES_BY_ID for words in finding.ruled_out)
