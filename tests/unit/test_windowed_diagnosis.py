"""Runs of any length as one diagnosis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.windowed_diagnosis import MAX_UNWINDOWED_SECONDS, WindowedDiagnosis
from gpulse.errors import RecordingError
from gpulse.model.frame import Frame
from gpulse.model.source_health import Health
from gpulse.sources.demo_machine import DemoMachine
from tests.unit.diagnosis_traces import NAMES, steady

STARTED = 1_800_000_000.0


def demo(seconds: float, step: float = 1.0, gpus: int = 8) -> Iterator[Frame]:
    """Frames of the demo machine."""
    machine = DemoMachine(STARTED, gpus=gpus)
    return (machine.sample(STARTED + 5.0 + place * step) for place in range(int(seconds / step) + 1))


def fed(frames: Iterator[Frame] | tuple[Frame, ...], window: float | None = None) -> WindowedDiagnosis:
    """Return a windowed diagnosis of these frames."""
    timeline = WindowedDiagnosis(window_seconds=window)
    for frame in frames:
        timeline.feed(frame)
    return timeline


@pytest.mark.parametrize("name", NAMES)
def test_a_short_run_is_judged_as_a_whole(name: str) -> None:
    """Streaming makes no difference to the answer."""
    assert diagnose(steady(name)) == fed(steady(name)).finish()


@pytest.mark.slow
def test_a_finding_of_a_long_run_is_listed_once() -> None:
    """What every window shows is one finding, from the first to the last of them."""
    diagnosis = fed(demo(600)).finish()

    by_gpu = {finding.gpu: finding for finding in diagnosis.findings}
    assert {
        1: "input_too_few_workers",
        2: "launch_bound",
        3: "input_io_bound",
        4: "pcie_copy_bound",
    }.items() <= {gpu: finding.id for gpu, finding in by_gpu.items()}.items()
    assert 0 not in by_gpu
    assert 7 not in by_gpu
    loader = by_gpu[1]
    assert loader.start is not None
    assert loader.end is not None
    assert loader.end - loader.start > 500
    assert "in 5 of 5 windows" in loader.summary
    assert 601 == diagnosis.frames
    assert (STARTED + 5.0, STARTED + 605.0) == (diagnosis.start, diagnosis.end)


@pytest.mark.slow
def test_the_moment_in_which_a_run_becomes_long_loses_nothing() -> None:
    """The first windows are cut out of what had been kept as a whole."""
    shorter = fed(demo(MAX_UNWINDOWED_SECONDS - 1)).finish()
    longer = fed(demo(MAX_UNWINDOWED_SECONDS + 121)).finish()

    found = [{(finding.id, finding.gpu) for finding in each.findings} for each in (shorter, longer)]
    assert found[0] - {("gpu_memory_leak", 5)} == found[1] - {("gpu_memory_leak", 5)}
    assert {entry.gpu for entry in longer.judged} == set(range(8))


def test_windows_can_be_asked_for() -> None:
    """A short run is cut as well when somebody says so."""
    diagnosis = fed(steady("loader_all_cores")[:130], window=12.0).finish()

    assert ["input_cpu_bound"] == [finding.id for finding in diagnosis.findings]
    assert () == diagnosis.data_gaps  # the second that is left over was never meant to be judged


def test_a_window_longer_than_the_run_is_the_run() -> None:
    """Nothing is missing because the window never ended."""
    assert ["launch_bound"] == [f.id for f in fed(steady("launch_bound"), window=600.0).finish().findings]


def mixed(*starved: range) -> Iterator[Frame]:
    """Fifty minutes of one GPU that is healthy but for these minutes."""
    healthy, loader = DemoMachine(STARTED, gpus=1), DemoMachine(STARTED, gpus=2)
    for place in range(50 * 60):
        now = STARTED + place
        if any(place // 60 in minutes for minutes in starved):
            frame = loader.sample(now)
            device = frame.gpus[0].device
            yield frame._replace(gpus=(frame.gpus[1]._replace(device=device),))
        else:
            yield healthy.sample(now)


def test_a_short_problem_of_a_long_run_is_not_listed() -> None:
    """A single minute of it is no finding."""
    assert () == fed(mixed(range(20, 21))).finish().findings


def test_a_problem_of_minutes_is_listed_however_long_the_run() -> None:
    """With when it began and ended."""
    (finding,) = fed(mixed(range(20, 26))).finish().findings

    assert "input_too_few_workers" == finding.id
    assert finding.start is not None
    assert finding.end is not None
    assert abs(finding.start - STARTED - 20 * 60) < 180
    assert abs(finding.end - STARTED - 26 * 60) < 180


def test_two_episodes_are_two_findings() -> None:
    """Findings half an hour apart are listed separately."""
    found = fed(mixed(range(8, 13), range(40, 45))).finish().findings

    assert ["input_too_few_workers"] * 2 == [finding.id for finding in found]
    assert all((finding.end or 0) - (finding.start or 0) < 600 for finding in found)


def test_a_leak_too_slow_for_a_window_is_seen_over_the_run() -> None:
    """Two hundred megabytes a minute are nothing in a minute and everything in a night."""

    def leaking() -> Iterator[Frame]:
        for place, frame in enumerate(demo(40 * 60, gpus=1)):
            gpu = frame.gpus[0]
            values = {**gpu.values, "memory_used_bytes": 30e9 + place * 3.5e6}
            yield frame._replace(gpus=(gpu._replace(values=values),))

    (finding,) = fed(leaking()).finish().findings

    assert "gpu_memory_leak" == finding.id
    assert 8e9 < next(item.value for item in finding.evidence if item.statistic == "rise") < 8.5e9


def test_only_the_selected_gpus_are_listed() -> None:
    """Findings, verdict and what was judged are about them alone."""
    timeline = fed(demo(30, 0.2))
    wanted = {
        next(uuid for uuid, seconds in timeline.seconds.items() if seconds[-1].reading.device.index == 2)
    }

    diagnosis = timeline.finish(wanted)

    assert [("launch_bound", 2)] == [(finding.id, finding.gpu) for finding in diagnosis.findings]
    assert [2] == [entry.gpu for entry in diagnosis.judged]
    assert "GPU 2" in diagnosis.verdict


def test_a_recording_that_ends_early_says_so() -> None:
    """Missing data is listed in addition to the findings."""
    frames = list(steady("healthy_gpt"))
    cut = Health("recording", "truncated", "the recording ends early: line 9 is incomplete", frames[-1].time)
    frames[-1] = frames[-1]._replace(health=(cut,))

    diagnosis = fed(tuple(frames)).finish()

    assert cut.detail in diagnosis.data_gaps
    assert () == diagnosis.findings


def test_a_gpu_that_was_lost_for_a_while_is_a_fault() -> None:
    """Even when it is back at the end."""
    frames = list(demo(40, 1.0, gpus=2))
    lost = Health("nvml", "gpu_lost", "GPU is lost", frames[20].time, "gpu 1")
    frames[20] = frames[20]._replace(health=(lost,))

    found = fed(tuple(frames)).finish().findings

    assert ("gpu_fault", "critical", 1) == (found[0].id, found[0].severity, found[0].gpu)


def test_nothing_at_all_is_not_enough() -> None:
    """A diagnosis without frames has a verdict too."""
    diagnosis = WindowedDiagnosis().finish()

    assert diagnosis.verdict.startswith("Not enough data")
    assert () == diagnosis.judged


def test_frames_that_run_backwards_are_refused() -> None:
    """A mixed-up recording is an error, not a verdict."""
    timeline = fed(steady("healthy_gpt"))

    with pytest.raises(RecordingError, match="older than the frame before"):
        timeline.feed(steady("healthy_gpt")[0])
