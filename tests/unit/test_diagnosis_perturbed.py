from __future__ import annotations

from functools import cache

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.model.finding import Diagnosis, Finding
from tests.unit.diagnosis_perturb import BLINDNESS, NOISE, chain, every, glue, scale_cpu, scale_gpu
from tests.unit.diagnosis_traces import HEALTHY, NAMES, SICK, labels, steady, whole

pytestmark = pytest.mark.slow
"""Hundreds of recordings are judged: seconds of CPU time together."""

SURE = 0.5
UNKNOWABLE = {
    ("gpu_shared", "1 Hz"),  # the recording has the shares of processes in every second frame alone
    ("gpu_shared", "5 Hz"),
    ("loader_waits_on_service", "1 Hz"),  # its steps fall between the looks
    ("loader_waits_on_service", "1 Hz, a little later"),
}
"""What cannot be seen any more after some noise; a recording that became too short is not judged either."""

PAIRS = [
    *((name, NAMES[(place + 1) % len(NAMES)]) for place, name in enumerate(NAMES)),
    *((name, NAMES[(place + 11) % len(NAMES)]) for place, name in enumerate(NAMES)),
    ("healthy_gpt", "loader_too_few_workers"),
    ("loader_too_few_workers", "healthy_gpt"),
    ("disk_read", "launch_bound"),
    ("thin_graph_decode", "idle_allocated"),
    ("healthy_graphs", "idle_allocated"),
    ("gpu_memory_leak", "checkpoint_stall"),
]


def wrong(findings: tuple[Finding, ...], *names: str) -> list[tuple[str, float]]:
    """Findings that none of these recordings should have."""
    right = frozenset[str]().union(*(labels()[name].right for name in names))
    return [(finding.id, finding.confidence) for finding in findings if finding.id not in right]


@cache
def blinded(name: str, blindness: str) -> Diagnosis:
    """What is found in a recording without its start-up when some signals are missing."""
    return diagnose(BLINDNESS[blindness](steady(name)))


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("name", SICK)
def test_noise_does_not_change_the_answer(name: str, noise: str) -> None:
    """Readings, times and frames that are a little off lead to the same finding, and to no other."""

    diagnosis = diagnose(NOISE[noise](steady(name)))

    assert [] == wrong(diagnosis.findings, name)
    assert diagnosis.findings or not diagnosis.judged or (name, noise) in UNKNOWABLE


@pytest.mark.parametrize("noise", [*NOISE, *BLINDNESS])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_stays_healthy(name: str, noise: str) -> None:
    """Noise and missing signals make no findings, however unsure, with the start-up or without."""

    change = {**NOISE, **BLINDNESS}[noise]

    assert () == diagnose(change(steady(name))).findings
    assert () == diagnose(change(whole(name))).findings


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("name", SICK)
def test_who_sees_less_is_less_sure(name: str, blindness: str) -> None:
    """Without some signals the answer may be unsure, or missing, and is never sure and wrong."""

    for diagnosis in (blinded(name, blindness), diagnose(BLINDNESS[blindness](whole(name)))):
        mistakes = wrong(diagnosis.findings, name)

        assert [] == [mistake for mistake in mistakes if mistake[1] >= SURE]
        assert diagnosis.findings or diagnosis.data_gaps


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("name", SICK)
def test_lost_time_is_never_called_healthy(name: str, blindness: str) -> None:
    """A GPU that loses time and has no finding is not called well used."""

    diagnosis = blinded(name, blindness)
    busy = [entry for entry in diagnosis.judged if entry.state not in ("busy 99%", "busy 100%")]

    assert diagnosis.findings or not busy or "No bottleneck found" not in diagnosis.verdict


@pytest.mark.parametrize("name", SICK)
def test_several_small_errors_at_once(name: str) -> None:
    """All readings too low, all CPU time too high, at a third of the pace: nothing sure and wrong."""

    change = chain(scale_gpu(0.9), scale_cpu(1.1), every(3))

    assert [] == [entry for entry in wrong(diagnose(change(steady(name))).findings, name) if entry[1] >= SURE]


@pytest.mark.parametrize(("first", "second"), dict.fromkeys(PAIRS))
def test_two_runs_after_one_another_are_not_mixed_up(first: str, second: str) -> None:
    """What is found belongs to one of them, and the seam between them is nobody's."""

    for part in (steady, whole):
        assert [] == wrong(diagnose(glue(part(first), part(second))).findings, first, second)


@pytest.mark.parametrize("name", NAMES)
def test_any_eleven_seconds_are_enough_not_to_be_wrong(name: str) -> None:
    """A window may begin and end anywhere, in the middle of a start-up or of a pause."""

    for part in (steady, whole):
        for begin in range(0, len(part(name)) - 110, 30):
            mistakes = wrong(diagnose(part(name)[begin : begin + 110]).findings, name)

            assert [] == [mistake for mistake in mistakes if mistake[1] >= SURE or name in HEALTHY]
