"""Figures of recordings, and comparisons of recorded runs: slow and healthy ones."""

from __future__ import annotations

import gc
import math
from functools import cache

import pytest

from gpulse.diagnosis.second_summary import SecondSummary
from gpulse.model.frame import Frame
from gpulse.reports.recorded_run import RecordedRun
from gpulse.reports.run_comparison import RunComparison, compare_runs
from gpulse.reports.run_figures import RunFigures
from tests.unit.diagnosis_machine import Doing, lost, play
from tests.unit.diagnosis_traces import NAMES, whole
from tests.unit.test_diagnosis_recordings import frames


def figures(played: list[Frame] | tuple[Frame, ...], name: str = "run") -> RunFigures:
    """What a run of these frames is."""
    run = RecordedRun(name)
    for frame in played:
        run.feed(frame)
    return run.finish()


@cache
def recorded(name: str) -> RunFigures:
    """What a recording is."""
    return figures(frames(name), name)


def compared(before: str, after: str) -> RunComparison:
    """Two recordings side by side."""
    return compare_runs(recorded(before), recorded(after))


def test_figures_of_a_known_run() -> None:
    """Means over the time at work, the lost time by cause, and energy."""
    found = figures(play(40, Doing(lost(0.6), cores=0.1, helpers=(1.0,) * 3)))

    assert found.utilization is not None
    assert pytest.approx(0.4) == found.utilization.value
    assert found.power_watts is not None
    assert pytest.approx(130 + 530 * 0.4) == found.power_watts.value
    assert found.energy_joules is not None
    assert pytest.approx(found.power_watts.value * 40, rel=0.03) == found.energy_joules
    assert found.lost_time is not None
    assert {"workers": pytest.approx(0.6)} == dict(found.lost_time)
    assert ("NVIDIA H200",) == found.models
    assert ("train.py",) == found.programs
    assert ["input_too_few_workers"] == [one.id for one in found.findings]


def test_a_start_up_is_left_out() -> None:
    """A program that loads for twenty seconds before it works is as fast as one that works at once."""
    at_once = figures(play(60))
    late = figures(
        play(60, lambda now: Doing() if now > 20 else Doing(lost(1.0, memory_used_bytes=1e9)), age=1.0)
    )

    assert late.seconds < 45 < at_once.seconds
    assert "no_clear_change" == compare_runs(at_once, late).outcome


def test_an_idle_machine_has_no_figures() -> None:
    """There is nothing to compare, which is said."""
    found = figures(play(30, Doing(lost(1.0, memory_used_bytes=0), on_gpu=False)))

    assert "no job ran on its GPUs" == found.missing
    assert "unknown" == compare_runs(found, found).outcome


def test_too_short_a_run_has_no_figures() -> None:
    """And neither has one without frames."""
    assert None is not figures(play(4)).missing
    assert "there are no frames" == figures([]).missing


def test_a_rhythm_is_a_step_time() -> None:
    """Work for a second, wait for a second: a step takes two, and one after the fix."""

    def steps(period: float) -> RunFigures:
        return figures(
            play(
                60,
                lambda now: Doing(
                    lost((0.01 if math.fmod(now, period) < period / 2 else 0.9) + 0.01 * math.sin(now) ** 2)
                ),
                step=0.125,
            )
        )

    found = compare_runs(steps(2.0), steps(1.0))
    (step,) = (one for one in found.quantities if one.name == "step_seconds")

    assert pytest.approx((2.0, 1.0), rel=0.02) == (step.before, step.after)


def test_a_long_recording_is_compared_in_windows() -> None:
    """The figures of ten minutes are those of one."""
    short, long = (figures(play(seconds, Doing(lost(0.3)), step=0.5)) for seconds in (60, 600))

    assert long.utilization is not None
    assert pytest.approx(0.7, abs=0.01) == long.utilization.value
    assert 590 <= long.seconds <= 600
    assert "no_clear_change" == compare_runs(short, long).outcome


def test_a_long_recording_takes_little_memory() -> None:
    """Its seconds are not kept: those of a day of eight GPUs would take hundreds of megabytes."""
    kept = _count_seconds()
    run = RecordedRun("run")
    for frame in play(900, Doing(lost(0.3)), step=0.5):
        run.feed(frame)

    assert _count_seconds() - kept < 100
    assert run.finish().seconds > 850


def _count_seconds() -> int:
    gc.collect()
    return sum(isinstance(each, SecondSummary) for each in gc.get_objects())


def test_without_gpm() -> None:
    """What NVML alone shows is compared; the rest is unknown."""
    values = {name: value for name, value in lost(0.5).items() if not name.endswith("active_ratio")}
    found = figures(play(40, Doing(values)))

    assert found.utilization is not None
    assert pytest.approx(0.5) == found.utilization.value
    assert (None, None, None) == (found.sm_activity, found.tensor_activity, found.rhythm)


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("loader_all16", "healthy_cnn_loader", "input_cpu_bound"),
        ("loader_few4", "healthy_vit", "input_too_few_workers"),
        ("python_30", "healthy_gemm", "host_single_thread"),
        ("pageable_256m", "healthy_prefetch", "pcie_copy_bound"),
        ("launch_amp_gpt", "healthy_compiled", "launch_bound"),
        ("fp32_mlp", "healthy_gemm", "tensor_cores_unused"),
        ("thin_graph", "healthy_gemm", "thin_kernels"),
    ],
)
def test_a_slow_run_and_a_healthy_one(before: str, after: str, gone: str) -> None:
    """The healthy one is better, and the finding is gone; the other way round it is new."""
    there, back = compared(before, after), compared(after, before)

    assert ("better", "worse") == (there.outcome, back.outcome)
    assert (gone, "gone") in [(one.id, one.change) for one in there.findings]
    assert (gone, "new") in [(one.id, one.change) for one in back.findings]
    assert f"{gone} is gone" in there.verdict


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("healthy")])
def test_two_halves_of_a_healthy_run_are_alike(name: str) -> None:
    """The variation of a run is not a change."""
    part = [frame for frame in whole(name) if frame.gpus]
    middle = len(part) // 2
    before, after = figures(part[:middle]), figures(part[middle:])
    if before.missing is None and after.missing is None:
        found = compare_runs(before, after)

        assert "no_clear_change" == found.outcome, found.verdict


def test_lost_time_of_a_finding_that_began_late() -> None:
    """It is a part of the whole run, however late it began; of a long run, a part of its windows."""
    whole = figures(
        play(60, lambda now: Doing(lost(0.0 if now < 30 else 0.8), helpers=(1.0,) * 3, cores=0.1))
    )
    late = figures(
        play(
            900,
            lambda now: Doing(lost(0.05 if now < 600 else 0.6), helpers=(1.0,) * 3, cores=0.1),
            step=0.5,
        )
    )

    assert whole.findings
    assert pytest.approx(0.4, abs=0.05) == whole.findings[0].lost_ratio
    assert late.findings
    assert pytest.approx(0.2, abs=0.06) == late.findings[0].lost_ratio
