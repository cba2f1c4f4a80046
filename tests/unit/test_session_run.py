"""Figures of sessions at a head and in files, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulse.cluster.protocol import requests as r
from gpulse.errors import RefusedError
from gpulse.export.session_report.file_reader import read_report
from gpulse.export.session_report.session_figures import session_file_figures
from gpulse.model.session import Session
from gpulse.reports.run_comparison import RunComparison, compare_runs
from gpulse.reports.run_figures import RunFigures, RunFinding
from gpulse.reports.session_run import WorkingPart, find_working_part, lost_by_finding
from gpulse.store.log.record_payloads import LogEntry
from tests.unit.report_lab import BEGIN, Held, Lab

SLOW = {
    "gpu_utilization_ratio": 0.4,
    "sm_active_ratio": 0.3,
    "tensor_active_ratio": 0.1,
    "power_watts": 300.0,
}
FAST = {
    "gpu_utilization_ratio": 0.9,
    "sm_active_ratio": 0.8,
    "tensor_active_ratio": 0.5,
    "power_watts": 600.0,
}
IDLE = {"gpu_utilization_ratio": 0.0, "sm_active_ratio": 0.0, "power_watts": 100.0}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """One node with two GPUs, of which only the first is used: slowly, then fast."""
    with Lab(tmp_path, ("0", "1")) as made:
        made.fill(range(0, 600, 5), Held(7), values={"0": SLOW, "1": IDLE})
        made.fill(range(600, 1200, 5), Held(7), values={"0": FAST, "1": IDLE})
        for second in range(0, 600, 30):
            _report(made, second, {"id": "input_cpu_bound", "severity": "high", "lost_ratio": 0.6})
        _report(made, 600)
        _add_session(made, "slow", 60, 540)
        _add_session(made, "fast", 660, 1140)
        yield made


def _report(lab: Lab, second: float, *findings: dict[str, Any]) -> None:
    found = [{"summary": "waits", "gpu": 0, "label": "0", **one} for one in findings]
    lab.archive.commit(
        [LogEntry.of_fact("event", time=BEGIN + second, kind="findings", node=1, detail={"findings": found})]
    )


def _add_session(lab: Lab, name: str, start: float, end: float, nodes: tuple[str, ...] = ()) -> None:
    begin = BEGIN + start
    session = Session(f"id-{name}", name, begin, begin, 1000, "finished", BEGIN + end, nodes)
    lab.archive.commit([LogEntry.of_fact("session", **session.to_dict())])


async def compare(lab: Lab, before: str, after: str) -> RunComparison:
    """Two sessions as the head compares them."""
    request = r.CompareSessions(before=before, after=after)
    return await lab.reports.compare_sessions(request, float(BEGIN + 1300))


def values(comparison: RunComparison) -> dict[str, tuple[float | None, float | None]]:
    """Each quantity before and after."""
    return {one.name: (one.before, one.after) for one in comparison.quantities}


async def test_two_sessions_of_a_head(lab: Lab) -> None:
    """Means of the GPU in use, energy per GPU-hour, and the finding that is gone with its lost time."""
    found = await compare(lab, "slow", "id-fast")

    assert "better" == found.outcome
    assert "GPU utilization rose from 40% to 90%: input_cpu_bound is gone." == found.verdict
    assert {
        "gpu_utilization_ratio": (0.4, 0.9),
        "sm_active_ratio": (0.3, 0.8),
        "tensor_active_ratio": (0.1, 0.5),
        "energy_joules_per_gpu_hour": (300.0 * 3600, 600.0 * 3600),
        "energy_joules": (300.0 * 480, 600.0 * 480),
    } == {name: pytest.approx(pair) for name, pair in values(found).items()}
    (lost,) = found.lost_time
    assert "input_cpu_bound" == lost.name
    assert pytest.approx((0.6, 0.0)) == (lost.before, lost.after)
    assert (1, ["NVIDIA H200"], ["train.py"]) == (
        found.after.gpus,
        found.after.models,
        found.after.programs,
    )


async def test_a_session_compared_with_itself(lab: Lab) -> None:
    """Nothing changed."""
    found = await compare(lab, "slow", "slow")

    assert "no_clear_change" == found.outcome
    assert ["stayed"] == [one.change for one in found.findings]


async def test_sessions_that_are_exchanged(lab: Lab) -> None:
    """The slow one is worse."""
    found = await compare(lab, "fast", "slow")

    assert "worse" == found.outcome
    assert ["new"] == [one.change for one in found.findings]


async def test_a_program_that_starts_within_the_session(lab: Lab) -> None:
    """The time before it is left out, and so is its start-up."""
    lab.fill(range(1200, 1300, 5), values={"0": IDLE, "1": IDLE})
    young = Held(8, start=BEGIN + 1299.0)
    lab.fill(range(1300, 1400, 5), young, values={"0": IDLE, "1": IDLE})
    lab.fill(range(1400, 1900, 5), young, values={"0": FAST, "1": IDLE})
    _add_session(lab, "late", 1210, 1890)
    found = await compare(lab, "fast", "late")

    assert (0.9, 0.9) == pytest.approx(values(found)["gpu_utilization_ratio"])
    assert 480 <= found.after.compared_seconds <= 500
    assert any("of the second run are left out" in note for note in found.notes)


async def test_a_session_without_work(lab: Lab) -> None:
    """There is nothing to compare."""
    lab.fill(range(1200, 1300, 5), values={"0": IDLE, "1": IDLE})
    _add_session(lab, "empty", 1210, 1290)
    found = await compare(lab, "slow", "empty")

    assert "unknown" == found.outcome
    assert "Not enough data: after (empty): its GPUs were not used." == found.verdict


async def test_a_session_that_does_not_exist(lab: Lab) -> None:
    """It is refused by name."""
    with pytest.raises(RefusedError, match="there is no session 'other'"):
        await compare(lab, "slow", "other")


async def test_a_rhythm_at_a_head(lab: Lab) -> None:
    """A step of forty seconds shows in samples of five."""
    frames = [
        lab.frame(second, Held(7), values={"0": FAST if second % 40 < 20 else IDLE, "1": IDLE})
        for second in range(1200, 2400, 5)
    ]
    for place, frame in enumerate(frames):  # no two readings are equal
        reading = frame.gpus[0]
        activity = float(reading.values["sm_active_ratio"]) + 0.01 * (place % 7)
        changed = reading._replace(values={**reading.values, "sm_active_ratio": activity})
        frames[place] = frame._replace(gpus=(changed, *frame.gpus[1:]))
    lab.add(frames)
    _add_session(lab, "steps", 1200, 2400)
    found = await lab.reports.compare_sessions(
        r.CompareSessions(before="steps", after="steps"), float(BEGIN + 2500)
    )

    assert pytest.approx((40.0, 40.0), rel=0.02) == values(found)["step_seconds"]


async def test_lost_time_without_diagnosis_is_unknown(tmp_path: Path) -> None:
    """A node whose agent never had a finding may run without diagnosis."""
    with Lab(tmp_path, ("0",), ("0",)) as lab:
        lab.fill(range(0, 600, 5), Held(7), values={"0": SLOW})
        lab.fill(range(600, 1200, 5), Held(7), node=2, values={"0": SLOW})
        for second in range(0, 600, 30):
            _report(lab, second, {"id": "input_cpu_bound", "severity": "high", "lost_ratio": 0.6})
        _report(lab, 600)
        _add_session(lab, "diagnosed", 60, 540, nodes=("n1",))
        _add_session(lab, "not-diagnosed", 660, 1140, nodes=("n2",))
        (lost,) = (await compare(lab, "diagnosed", "not-diagnosed")).lost_time

    assert pytest.approx(0.6) == lost.before
    assert (None, "unknown") == (lost.after, lost.change)


def test_lost_time_by_finding() -> None:
    """Findings with the same ID count together; if one is unknown, so is their sum."""
    fault = RunFinding("gpu_fault", "critical", "f", 0.1, "xid_79")
    findings = (fault, fault._replace(cause="xid_13"), RunFinding("oom", "high", "o"))

    assert {"gpu_fault": pytest.approx(0.2), "oom": None} == lost_by_finding(findings, is_diagnosed=True)
    assert {"gpu_fault": None} == lost_by_finding((fault, fault._replace(lost_ratio=None)), is_diagnosed=True)
    assert {} == lost_by_finding((), is_diagnosed=True)
    assert None is lost_by_finding((), is_diagnosed=False)


def test_the_part_in_which_a_job_worked() -> None:
    """Idle ends and a slow start are left out; time in which a program held the GPU is not."""
    values = [0.0, 0.0, 0.02, 0.9, 0.8, None, 0.9, 0.0, 0.0]

    assert WorkingPart(3, 6) == find_working_part(values)
    assert WorkingPart(1, 8) == find_working_part(values, (1, 8), is_starting=False)
    assert WorkingPart(3, 8) == find_working_part(values, (1, 8), is_starting=True)
    assert None is find_working_part([0.0, None])


def session_file(path: Path, util: float, **more: Any) -> RunFigures:
    """The figures of a file with one GPU in use, and one without work."""
    frames = [
        {
            "frame_id": number,
            "time": 1e9 + number,
            "gpu_id": ["n1:0:H200", "n1:1:H200"],
            "gpu_util": [util, 0.0],
        }
        for number in range(60)
    ]
    document = {
        "session_name": "from a file",
        "interval_ms": 1000,
        "start_time": 1e9,
        "end_time": 1e9 + 60,
        "frames": frames,
        "summary_by_device": {"n1:0:H200": {"energy_joules": 18_000.0}, "n1:1:H200": {"energy_joules": None}},
        **more,
    }
    path.write_text(json.dumps(document))
    return session_file_figures(read_report(path))


def test_a_file_has_utilization_energy_and_findings(tmp_path: Path) -> None:
    """What a file does not have is unknown."""
    finding = {
        "id": "launch_bound",
        "severity": "medium",
        "summary": "s",
        "lost_ratio": 0.5,
        "active_seconds": 30,
    }
    found = session_file(tmp_path / "a.json", 40.0, findings=[finding], labels={"lr": "0.1"})

    assert found.utilization is not None
    assert found.power_watts is not None
    assert pytest.approx((0.4, 300.0)) == (found.utilization.value, found.power_watts.value)
    assert (None, None, None, None) == (
        found.sm_activity,
        found.tensor_activity,
        found.rhythm,
        found.programs,
    )
    assert {"launch_bound": 0.25} == found.lost_time
    assert None is session_file(tmp_path / "b.json", 40.0, findings=[]).lost_time
    assert (("H200",), {"lr": "0.1"}, None) == (found.models, found.labels, found.missing)


@pytest.mark.parametrize(
    "broken",
    [
        {"findings": [{"id": 5, "lost_ratio": "much", "active_seconds": None}, {"id": "x", "severity": []}]},
        {"findings": [{"id": "x", "severity": "high", "lost_ratio": 7, "active_seconds": 1e300}]},
        {"summary_by_device": {"n1:0:H200": {"energy_joules": "1e999"}}},
        {"labels": ["a"]},
    ],
)
def test_a_strange_file_is_compared_as_far_as_it_can_be(tmp_path: Path, broken: dict[str, Any]) -> None:
    """What is not understood is unknown; lost time is never more than all of it."""
    found = session_file(tmp_path / "a.json", 40.0, **broken)

    assert "no_clear_change" == compare_runs(found, found).outcome
    assert all(one.lost_ratio is None or 0 <= one.lost_ratio <= 1 for one in found.findings)


@pytest.mark.parametrize(
    ("lost", "active", "expected"),
    [(10**400, 30, None), (0.5, 10**400, 0.5), (-1e308, 30, 0.0), (7, 30, 0.5)],
)
def test_numbers_of_a_file_are_bounded(
    tmp_path: Path, lost: float, active: float, expected: float | None
) -> None:
    """JSON has integers that no float can hold."""
    document = {"id": "x", "severity": "high", "lost_ratio": lost, "active_seconds": active}
    session_file(tmp_path / "a.json", 40.0)
    report = read_report(tmp_path / "a.json")._replace(findings=(document,))
    (found,) = session_file_figures(report).findings

    assert expected == found.lost_ratio


def test_an_idle_file_has_no_figures(tmp_path: Path) -> None:
    """And neither has one of a few seconds."""
    assert "its GPUs were idle" == session_file(tmp_path / "a.json", 0.0).missing
