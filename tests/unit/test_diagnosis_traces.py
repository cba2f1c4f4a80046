from __future__ import annotations

from functools import cache

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.model.finding import Diagnosis
from gpulse.sources.demo_machine import DEMO_WORKLOADS, DemoMachine
from tests.unit.diagnosis_traces import HEALTHY, NAMES, SICK, labels, steady, whole

STARTED = 1_800_000_000.0


@pytest.mark.parametrize("name", SICK)
def test_the_first_finding_is_the_cause(name: str) -> None:
    """The induced problem comes first, with high confidence and without wrong findings."""

    found = diagnose(steady(name)).findings

    assert found
    assert found[0].id in labels()[name].right
    assert found[0].confidence >= 0.5
    assert set() == {finding.id for finding in found} - labels()[name].right


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    """A tool that cries wolf is turned off."""

    assert () == diagnose(steady(name)).findings


@pytest.mark.parametrize("name", NAMES)
def test_a_start_up_is_not_mistaken_for_trouble(name: str) -> None:
    """Over the whole recording, imports and warm-up and all, the same comes out and nothing else."""

    diagnosis = diagnose(whole(name))

    assert set() == {finding.id for finding in diagnosis.findings} - labels()[name].right
    assert bool(labels()[name].expect) == bool(diagnosis.findings)


@pytest.mark.parametrize("name", [name for name in NAMES if labels()[name].mark is not None])
def test_trouble_that_began_midway_is_dated(name: str) -> None:
    """Its start is within two seconds of when it was induced."""

    for frames in (steady(name), whole(name)):
        start = diagnose(frames).findings[0].start

        assert start is not None
        assert start == pytest.approx(labels()[name].mark, abs=2.0)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_judged_lies_within_the_recording(name: str) -> None:
    """Each GPU with its time and frames, and every finding within it, with something to do."""

    frames = whole(name)
    diagnosis = diagnose(frames)

    assert (frames[0].time, frames[-1].time, len(frames)) == (
        diagnosis.start,
        diagnosis.end,
        diagnosis.frames,
    )
    [judged] = diagnosis.judged
    assert frames[0].time <= judged.start < judged.end <= frames[-1].time
    assert 0 < judged.frames <= len(frames)
    for finding in (*diagnosis.findings, *diagnosis.info):
        assert finding.start is not None
        assert frames[0].time <= finding.start <= (finding.end or finding.start) <= frames[-1].time
        assert finding.gpu == 0
        assert finding.summary.startswith("GPU 0 ")
        assert finding.advice
        assert finding.pids == () or set(finding.pids) <= {p.pid for f in frames for p in f.processes}


def test_the_verdict_is_one_sentence_about_the_first_finding() -> None:
    """Healthy, idle and ailing runs each have their own."""

    assert diagnose(steady("launch_bound")).verdict.startswith(
        "Launch overhead dominates because kernels are too small: GPU 0"
    )
    assert diagnose(steady("healthy_gpt")).verdict.startswith("No bottleneck found: GPU 0 busy 99%")
    assert diagnose(steady("idle")).verdict.startswith("The GPU is idle")


def test_a_job_that_has_not_reached_the_gpu_is_starting() -> None:
    """Seconds of imports are informational, and the verdict says what is missing."""

    begin = labels()["healthy_cnn_with_loader"].begin
    frames = [frame for frame in whole("healthy_cnn_with_loader") if frame.time < begin - 7]
    diagnosis = diagnose(frames)

    assert () == diagnosis.findings
    assert () == diagnosis.judged
    assert "Not enough data" in diagnosis.verdict


@cache
def demo() -> Diagnosis:
    """Eight GPUs of one machine, each with another recording, over 25 s."""
    machine = DemoMachine(STARTED)
    return diagnose([machine.sample(STARTED + number * 0.2) for number in range(126)])


@pytest.mark.parametrize("gpu", range(len(DEMO_WORKLOADS)))
def test_every_gpu_of_a_machine_is_judged_by_its_own_job(gpu: int) -> None:
    """Neighbours that starve, swap and copy change nothing: each scene has its finding, and the sound none."""

    found = [finding.id for finding in demo().findings if finding.gpu == gpu]
    label = labels()[DEMO_WORKLOADS[gpu].recording]

    assert (found[0] in label.right and set(found) <= label.right) if label.expect else found == []


def test_a_machine_says_which_gpus_it_judged() -> None:
    """All eight, the idle one as idle."""

    assert list(range(8)) == [judged.gpu for judged in demo().judged]
    assert ["idle"] == [judged.state for judged in demo().judged if not judged.state.startswith("busy")]
