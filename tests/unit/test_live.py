"""Findings on a live stream: told in time, and without flicker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from gpulse.diagnosis.live import Monitor
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.metric import Values
from gpulse.sources.simulated import SCENES, DemoMachine
from tests.unit.diagnosis_traces import labels

STARTED = 1_800_000_000.0


def changing(*parts: tuple[int, float], step: float = 1.0) -> Iterator[Frame]:
    """One GPU that shows one scene of the demo after the other, each for so many seconds."""
    machines = [DemoMachine(STARTED, gpus=len(SCENES)) for _ in parts]
    now = STARTED + 5.0
    first = machines[0].sample(now).gpus[0].device
    for machine, (scene, seconds) in zip(machines, parts, strict=True):
        for _ in range(round(seconds / step)):
            frame = machine.sample(now)
            gpu = frame.gpus[scene]._replace(device=first)
            pids = {process.pid for process in gpu.processes or ()}
            family = tuple(p for p in frame.processes if p.pid in pids or p.identity.parent_pid in pids)
            yield frame._replace(gpus=(gpu,), processes=family)
            now += step


def told(frames: Iterable[Frame], monitor: Monitor | None = None) -> list[tuple[float, list[Finding]]]:
    """What is said at each moment after the start."""
    monitor = monitor or Monitor()
    return [(frame.time - STARTED - 5.0, monitor(frame)) for frame in frames]


@pytest.mark.parametrize("step", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("scene", range(len(SCENES)))
def test_a_steady_scene_is_told_and_stays(scene: int, step: float) -> None:
    """Once a finding is told it is told at every later moment, at whatever pace frames come."""
    said = [{finding.id for finding in findings} for _, findings in told(changing((scene, 90), step=step))]
    expected = labels()[SCENES[scene].recording].expect

    if not expected:
        assert not set().union(*said)
        return
    if SCENES[scene].recording == "gpu_memory_leak":  # the demo's leak starts over every half minute
        assert set().union(*said) <= set(expected)
        return
    first = next(place for place, ids in enumerate(said) if ids)
    assert first * step <= 40
    assert all(set(expected) == ids for ids in said[first:])


def test_a_finding_comes_and_goes_once() -> None:
    """Healthy, starved, healthy: it is raised once, cleared once, and knows when it began."""
    said = told(changing((0, 60), (1, 60), (0, 90)))
    raised = [bool(findings) for _, findings in said]
    changes = [place for place in range(1, len(raised)) if raised[place] != raised[place - 1]]

    assert 2 == len(changes)
    assert 60 < changes[0] <= 90
    assert 120 < changes[1] <= 160
    finding = said[changes[0]][1][0]
    assert finding.start is not None
    assert abs(finding.start - STARTED - 65.0) < 5
    assert abs((said[changes[1] - 1][1][0].start or 0) - finding.start) < 5


def test_a_short_disturbance_is_not_told() -> None:
    """Three seconds of starving within a healthy run are no finding."""
    assert not any(findings for _, findings in told(changing((0, 60), (1, 3), (0, 60))))


def test_what_the_driver_reports_is_told_at_once() -> None:
    """A fault needs no window."""
    monitor = Monitor()
    frame = next(changing((0, 1)))
    gpu = frame.gpus[0]._replace(values={**frame.gpus[0].values, "clocks_event_reasons": 0x40})

    (finding,) = monitor(frame._replace(gpus=(gpu,)))

    assert ("thermal_throttle", "critical") == (finding.id, finding.severity)


def test_each_fault_of_a_gpu_keeps_its_start() -> None:
    """From when it was first seen; one that was gone for long is a new one."""
    monitor = Monitor()
    frame = next(changing((0, 1)))
    starts: dict[str | None, list[float]] = {}
    for second, faults in (
        (0, {"remapped_rows_pending": 1}),
        (1, {"remapped_rows_pending": 1, "ecc_uncorrected_errors_total": 2, "xid_last_code": 94}),
        (100, {"ecc_uncorrected_errors_total": 3, "xid_last_code": 94}),
        (200, {"remapped_rows_pending": 1, "ecc_uncorrected_errors_total": 4}),
    ):
        gpu = frame.gpus[0]._replace(values={**frame.gpus[0].values, **faults})
        for finding in monitor(frame._replace(gpus=(gpu,), time=STARTED + second)):
            starts.setdefault(finding.cause, []).append((finding.start or 0.0) - STARTED)

    assert {
        "remapped_rows_pending": [0, 0, 200],
        "ecc_uncorrected_errors_total": [1, 1, 1],
        "xid_94": [1, 1],
    } == starts


def test_each_xid_code_of_a_gpu_is_a_fault_of_its_own() -> None:
    """Another code does not replace the one before; each has its own start and count, the worst comes first."""
    monitor = Monitor()
    frame = next(changing((0, 1)))
    seen: list[list[tuple[str | None, float, float]]] = []
    for second, (total, code) in enumerate(((1, 94), (3, 79), (4, 94))):
        faults: Values = {"xid_errors_total": total, "xid_last_code": code}
        gpu = frame.gpus[0]._replace(values={**frame.gpus[0].values, **faults})
        found = monitor(frame._replace(gpus=(gpu,), time=STARTED + second))
        seen.append([(f.cause, (f.start or 0.0) - STARTED, f.evidence[0].value) for f in found])

    assert [
        [("xid_94", 0, 1)],
        [("xid_79", 1, 2), ("xid_94", 0, 1)],
        [("xid_79", 1, 2), ("xid_94", 0, 2)],
    ] == seen


def test_a_replay_that_starts_over_begins_anew() -> None:
    """Time that jumps back is no reason to fail, and what was known is forgotten."""
    monitor = Monitor()
    told(changing((1, 60)), monitor)

    again = told(changing((0, 60)), monitor)

    assert not again[-1][1]


def test_eight_gpus_are_watched_at_once() -> None:
    """Each one with its own findings."""
    monitor = Monitor()
    machine = DemoMachine(STARTED)
    findings: list[Finding] = []
    for second in range(60):
        findings = monitor(machine.sample(STARTED + 5 + second))
    found = {finding.gpu: finding.id for finding in findings}

    for place, scene in enumerate(SCENES):
        expected = labels()[scene.recording].expect
        if scene.recording != "gpu_memory_leak":
            assert found.get(place) == (expected[0] if expected else None)
