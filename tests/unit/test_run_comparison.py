"""Two runs compared: known numbers, noise, missing figures, and what must hold for any runs."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulse.cli.run_comparison import comparison_lines
from gpulse.diagnosis.evidence import Cause
from gpulse.model.finding import SEVERITIES
from gpulse.model.safe_text import plain
from gpulse.reports.comparison_text import CAUSE_TITLES, NO_STEP_TIME, OTHER_WORK, OUTCOMES
from gpulse.reports.recorded_run import PAUSES
from gpulse.reports.run_comparison import Change, ComparedQuantity, Outcome, RunComparison, compare_runs
from gpulse.reports.run_figures import (
    FindingShare,
    Measure,
    RunFigures,
    RunFinding,
    StepRhythm,
    combine_measures,
    measure,
    merge_findings,
    name_program,
)
from gpulse.terminal.table import make_painter

INPUT = RunFinding("input_cpu_bound", "high", "GPU 0 waits for workers", 0.55)
SLOW = RunFigures(
    name="before.jsonl.gz",
    start=1e9,
    recorded_seconds=60.0,
    seconds=60.0,
    models=("NVIDIA H200",),
    programs=("train.py",),
    utilization=Measure(0.41, 0.004),
    sm_activity=Measure(0.35, 0.004),
    tensor_activity=Measure(0.2, 0.003),
    power_watts=Measure(300.0, 2.0),
    lost_time={"workers": 0.55, "none": 0.04},
    rhythm=StepRhythm(0.95, 0.005, 0.9),
    findings=(INPUT,),
)
FAST = SLOW._replace(
    name="after.jsonl.gz",
    utilization=Measure(0.93, 0.004),
    sm_activity=Measure(0.8, 0.004),
    tensor_activity=Measure(0.45, 0.003),
    power_watts=Measure(600.0, 2.0),
    lost_time={"none": 0.07},
    rhythm=StepRhythm(0.42, 0.003, 0.9),
    findings=(),
)


def row(comparison: RunComparison, name: str) -> ComparedQuantity:
    """One quantity of a comparison."""
    return next(one for one in comparison.quantities if one.name == name)


def test_a_fix_that_helped() -> None:
    """The verdict has the activity, the finding that is gone, and the step time."""
    found = compare_runs(SLOW, FAST)

    assert "better" == found.outcome
    assert (
        "GPU utilization rose from 41% to 93%: input_cpu_bound is gone; a step takes 0.42 s instead of 0.95 s."
        == found.verdict
    )
    assert ("rose", "better", "+52 points") == _change(row(found, "gpu_utilization_ratio"))
    assert ("fell", "better", "-56%") == _change(row(found, "step_seconds"))


def _change(quantity: ComparedQuantity) -> tuple[str, str, str]:
    return quantity.change, quantity.effect, quantity.change_text


def test_energy_is_compared_per_gpu_hour_and_per_step() -> None:
    """Totals of unequal lengths are shown, but not compared."""
    found = compare_runs(SLOW, FAST._replace(seconds=600.0, recorded_seconds=600.0))

    assert (300.0 * 3600, 600.0 * 3600) == _values(row(found, "energy_joules_per_gpu_hour"))
    assert (18_000.0, 360_000.0) == _values(row(found, "energy_joules"))
    assert "not_compared" == row(found, "energy_joules").change
    assert (285.0, 252.0) == _values(row(found, "energy_joules_per_step"))
    assert "better" == row(found, "energy_joules_per_step").effect
    assert any("1:00 before, 10:00 after" in note for note in found.notes)


def _values(quantity: ComparedQuantity) -> tuple[float | None, float | None]:
    return quantity.before, quantity.after


def test_several_gpus_have_their_energy_per_hour_together() -> None:
    """With one GPU it would be the same number twice."""
    pair = SLOW._replace(models=("NVIDIA H200", "NVIDIA H200"))

    assert 2 * 300.0 * 3600 == row(compare_runs(pair, pair), "energy_joules_per_hour").before
    assert "energy_joules_per_hour" not in [one.name for one in compare_runs(SLOW, FAST).quantities]


def test_a_difference_within_the_variation_is_no_clear_change() -> None:
    """The same difference is clear in steady runs, and not clear in unsteady ones."""
    steady = SLOW._replace(utilization=Measure(0.46, 0.004), rhythm=None, findings=(INPUT,))
    unsteady = steady._replace(utilization=Measure(0.46, 0.03))
    before = SLOW._replace(rhythm=None)

    assert "rose" == row(compare_runs(before, steady), "gpu_utilization_ratio").change
    assert "no_clear_change" == row(compare_runs(before, unsteady), "gpu_utilization_ratio").change


def test_a_faster_step_is_better_although_the_gpu_is_less_busy() -> None:
    """Faster kernels leave a GPU waiting for the same host."""
    faster = FAST._replace(
        utilization=Measure(0.7, 0.004), sm_activity=Measure(0.4), rhythm=StepRhythm(0.3, 0.002, 0.9)
    )

    assert "better" == compare_runs(FAST, faster).outcome


def test_periods_of_different_work_are_not_compared() -> None:
    """Twice as many workers deliver twice as many steps at a time: the period is longer, and no step is slower."""
    bundled = FAST._replace(
        utilization=Measure(0.93, 0.004), rhythm=StepRhythm(0.84, 0.003, 0.9), findings=()
    )
    found = compare_runs(FAST, bundled)

    assert "no_clear_change" == found.outcome
    assert "not_compared" == row(found, "step_seconds").change
    assert OTHER_WORK in found.notes


def test_missing_metrics_stay_unknown() -> None:
    """Without GPM there is no SM activity; it is neither 0 nor a change."""
    found = compare_runs(SLOW, FAST._replace(sm_activity=None, tensor_activity=None, rhythm=None))

    assert (0.35, None) == _values(row(found, "sm_active_ratio"))
    assert "unknown" == row(found, "sm_active_ratio").change
    assert "-" == row(found, "sm_active_ratio").after_text
    assert "better" == found.outcome
    assert NO_STEP_TIME in found.notes
    assert (
        "Not measured in the second run: SM activity, Tensor core activity, Step time, Energy per step."
        in found.notes
    )


def test_findings_decide_where_the_activity_did_not_change() -> None:
    """Tensor cores that are used now, at the same utilization."""
    before = SLOW._replace(rhythm=None, findings=(RunFinding("tensor_cores_unused", "medium", "s"),))
    after = before._replace(findings=())

    assert "better" == compare_runs(before, after).outcome
    assert "worse" == compare_runs(after, before).outcome
    low = before._replace(findings=(RunFinding("tensor_cores_unused", "low", "s"),))
    assert "no_clear_change" == compare_runs(low, after).outcome


def test_findings_that_went_came_and_stayed() -> None:
    """Each with its lost time; one whose loss is unknown has none."""
    before = SLOW._replace(findings=(INPUT, RunFinding("launch_bound", "medium", "l", 0.2)))
    after = FAST._replace(
        findings=(RunFinding("launch_bound", "low", "l", 0.05), RunFinding("gpu_fault", "critical", "f"))
    )
    found = compare_runs(before, after)

    assert [
        ("input_cpu_bound", "gone", "it cost 55% of the time"),
        ("launch_bound", "stayed", "it costs 5% of the time (20% before)"),
        ("gpu_fault", "new", ""),
    ] == [(one.id, one.change, one.loss_text) for one in found.findings]
    assert "mixed" == found.outcome  # faster, but a GPU is failing


def test_lost_time_by_cause() -> None:
    """The largest first; a cause that only one run has is 0 in the other."""
    found = compare_runs(SLOW, FAST)

    assert [("workers", 0.55, 0.0), ("none", 0.04, 0.07)] == [
        (one.name, one.before, one.after) for one in found.lost_time
    ]


def test_the_table_and_the_notes_show_the_same_length() -> None:
    """It is rounded once."""
    short = SLOW._replace(seconds=9.9999, recorded_seconds=9.9999)
    lines = "\n".join(comparison_lines(compare_runs(short, short), 120, make_painter(color=False)))

    assert "  10s  " in lines
    assert "Only 10s could be compared" in lines


def test_a_change_from_zero_is_not_called_new() -> None:
    """There is no percentage of 0."""
    idle = SLOW._replace(power_watts=Measure(0.0))

    assert "from 0" == row(compare_runs(idle, FAST), "energy_joules_per_gpu_hour").change_text


def test_unknown_lost_time_is_not_zero() -> None:
    """Neither that of one cause nor that of a run without causes becomes worse."""
    after = SLOW._replace(lost_time={"workers": 0.4})
    for unknown in (None, {"workers": None}):
        (lost,) = compare_runs(SLOW._replace(lost_time=unknown), after).lost_time

        assert (None, 0.4, "unknown", "none") == (lost.before, lost.after, lost.change, lost.effect)


def test_different_runs_are_named() -> None:
    """Other programs, GPUs and labels are in the verdict and in the notes."""
    other = FAST._replace(programs=("serve.py",), models=("NVIDIA A100",) * 2, labels={"lr": "0.1"})
    found = compare_runs(SLOW, other)

    assert found.verdict.endswith("the runs differ in program and GPU model and number of GPUs.")
    assert 4 == sum("differ" in note for note in found.notes)


def test_unknown_programs_are_named() -> None:
    """A session file does not say which programs ran."""
    for before, after in ((SLOW._replace(programs=None), FAST), (SLOW, FAST._replace(programs=None))):
        assert any("both runs are of the same job" in note for note in compare_runs(before, after).notes)
    assert not any("both runs are of the same job" in note for note in compare_runs(SLOW, FAST).notes)


def test_a_run_without_a_job_cannot_be_compared() -> None:
    """The outcome is unknown, and the reason is in the verdict."""
    found = compare_runs(SLOW, RunFigures("idle", None, 30.0, 0.0, missing="no job ran on its GPUs"))

    assert "unknown" == found.outcome
    assert "Not enough data: after (idle): no job ran on its GPUs." == found.verdict
    assert all(one.change == "unknown" for one in found.quantities)


def test_a_mean_with_its_error() -> None:
    """The error comes from blocks, so slow variation makes it large; a single value has none."""
    slow_wave = measure((1.0, 0.2 if second < 30 else 0.8) for second in range(60))
    fast_wave = measure((1.0, 0.2 if second % 2 else 0.8) for second in range(60))

    assert slow_wave is not None
    assert fast_wave is not None
    assert pytest.approx((0.5, 0.5)) == (slow_wave.value, fast_wave.value)
    assert (slow_wave.error or 0.0) > 3 * (fast_wave.error or 0.0)
    assert Measure(0.4) == measure([(1.0, 0.4)])
    assert None is measure([(1.0, None)])
    assert Measure(0.5, 0.2) == combine_measures(
        [(1.0, Measure(0.2, 0.2)), (1.0, Measure(0.8, 0.2)), (1.0, None)]
    )


def test_findings_are_merged_over_gpus() -> None:
    """Lost time is that of all GPUs in use, for as long as a finding held; informational ones do not count."""
    shares = (
        FindingShare("launch_bound", "medium", "GPU 0", 0.4, None, 1.0),
        FindingShare("launch_bound", "high", "GPU 1", 0.4, None, 0.5),
        FindingShare("memory_bandwidth_bound", "info", "GPU 1", None, None, 1.0),
    )
    (found,) = merge_findings(shares, 4)

    assert ("launch_bound", "high", "GPU 1") == found[:3]
    assert pytest.approx(0.15) == found.lost_ratio


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("python3", ("python3", "/home/ada/train.py", "--lr", "1"), "train.py"),
        ("python3.11", ("python", "-m", "vllm.entrypoints"), "vllm.entrypoints"),
        ("python3", ("python3", "-u", "train.py"), "train.py"),
        (
            "python3",
            ("python3", "-uB", "-X", "dev", "-Wignore", "-W", "error", "a/train.py", "-m"),
            "train.py",
        ),
        ("python3", ("python3", "--check-hash-based-pycs", "never", "train.py"), "train.py"),
        ("python3", ("python3", "-um", "vllm.entrypoints", "serve"), "vllm.entrypoints"),
        ("python3", ("python3", "-mvllm"), "vllm"),
        ("python3", ("python3", "-u", "-c", "import this", "train.py"), "python3"),
        ("python3", ("python3", "-", "train.py"), "python3"),
        ("python3", ("python3", "-m"), "python3"),
        ("python3", (), "python3"),
        (None, ("/opt/bin/trainer",), "trainer"),
        (None, (), None),
    ],
)
def test_the_name_of_a_program(name: str | None, command: tuple[str, ...], expected: str | None) -> None:
    """A script by its file, without directories and arguments."""
    assert expected == name_program(name, command)


def test_every_cause_and_outcome_has_a_text() -> None:
    """A new cause of lost time needs one."""
    assert {*get_args(Cause), PAUSES} == set(CAUSE_TITLES)
    assert set(get_args(Outcome)) == set(OUTCOMES)


_measures = st.none() | st.builds(Measure, st.floats(0, 1), st.none() | st.floats(0, 0.2))
_findings = st.lists(
    st.builds(
        RunFinding,
        st.sampled_from(["input_cpu_bound", "launch_bound", "gpu_fault", "from\u202else"]),
        st.sampled_from(SEVERITIES[1:]),
        st.just("summary"),
        st.none() | st.floats(0, 1),
    ),
    max_size=4,
    unique_by=lambda one: one.kind,
)
_runs = st.builds(
    RunFigures,
    name=st.text(max_size=8),
    start=st.none() | st.floats(0, 2e9),
    recorded_seconds=st.floats(10, 1e6),
    seconds=st.floats(10, 1e6),
    models=st.lists(st.sampled_from(["NVIDIA H200", "NVIDIA A100"]), min_size=1, max_size=3).map(tuple),
    programs=st.none() | st.lists(st.text(max_size=5), max_size=2).map(tuple),
    labels=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
    utilization=_measures,
    sm_activity=_measures,
    tensor_activity=_measures,
    power_watts=st.none() | st.builds(Measure, st.floats(50, 700), st.none() | st.floats(0, 50)),
    lost_time=st.none()
    | st.dictionaries(st.sampled_from(["workers", "main", "none"]), st.none() | st.floats(0, 1)),
    rhythm=st.none()
    | st.builds(StepRhythm, st.floats(0.1, 10), st.floats(0.001, 0.05), st.floats(0.5, 0.95)),
    findings=_findings.map(tuple),
    gpu_seconds=st.none() | st.floats(10, 1e7),
    missing=st.none() | st.none() | st.just("it is too short"),
)
_MIRRORED: dict[Outcome, Outcome] = {
    "better": "worse",
    "worse": "better",
    "mixed": "mixed",
    "no_clear_change": "no_clear_change",
    "unknown": "unknown",
}
_OPPOSITE: dict[Change, Change] = {
    "rose": "fell",
    "fell": "rose",
    "no_clear_change": "no_clear_change",
    "unknown": "unknown",
    "not_compared": "not_compared",
}


@settings(max_examples=200, deadline=None)
@given(_runs)
def test_a_run_compared_with_itself_has_no_change(run: RunFigures) -> None:
    """Whatever it was."""
    found = compare_runs(run, run)

    assert ("no_clear_change" if run.missing is None else "unknown") == found.outcome
    assert {"rose", "fell"}.isdisjoint(one.change for one in [*found.quantities, *found.lost_time])
    assert {"stayed"} >= {one.change for one in found.findings}


@settings(max_examples=200, deadline=None)
@given(_runs, _runs)
def test_exchanged_runs_have_the_opposite_comparison(before: RunFigures, after: RunFigures) -> None:
    """Better is worse, and what rose fell."""
    there, back = compare_runs(before, after), compare_runs(after, before)

    assert _MIRRORED[there.outcome] == back.outcome
    assert [(one.name, _OPPOSITE[one.change], one.after, one.before) for one in there.quantities] == [
        (one.name, one.change, one.before, one.after) for one in back.quantities
    ]
    mirrored = {"gone": "new", "new": "gone", "stayed": "stayed"}
    assert {(one.id, mirrored[one.change]) for one in there.findings} == {
        (one.id, one.change) for one in back.findings
    }


@settings(max_examples=100, deadline=None)
@given(_runs, _runs, st.integers(40, 140))
def test_any_comparison_can_be_printed_and_sent(before: RunFigures, after: RunFigures, width: int) -> None:
    """No line is wider than the window, no text moves the cursor, and JSON is read back as it was."""
    found = compare_runs(before, after)
    lines = list(comparison_lines(found, width, make_painter(color=False)))

    assert all(len(line) <= width or not line.isascii() for line in lines)
    assert [plain(line) for line in lines] == lines
    assert found == msgspec.json.decode(msgspec.json.encode(found), type=RunComparison)
