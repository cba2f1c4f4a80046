"""Findings on a live stream are reported in time, and do not flicker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

import pytest

from gpulse.diagnosis import live_diagnosis
from gpulse.diagnosis.live_diagnosis import INTERVAL_SECONDS, WINDOW_SECONDS, LiveDiagnosis
from gpulse.model.finding import MAX_GAP_SECONDS, Finding
from gpulse.model.frame import Frame
from gpulse.model.metric_catalog import Values
from gpulse.model.process import GpuProcess
from gpulse.model.xid import XidCounts
from gpulse.sources.demo_machine import DEMO_WORKLOADS, DemoMachine
from gpulse.sources.recording_reader import Recording
from tests.unit.diagnosis_machine import BUSY, GIB, PID, Doing, lost, play
from tests.unit.diagnosis_perturb import without_gpm
from tests.unit.diagnosis_traces import labels

STARTED = 1_800_000_000.0
RECORDINGS = Path(__file__).parents[1] / "data" / "recordings"


@lru_cache(1000)
def sampled(now: float) -> Frame:
    """The demo with all its scenes, which depends on nothing but the time."""
    return machine().sample(now)


@cache
def machine() -> DemoMachine:
    """A demo that plays every scene."""
    return DemoMachine(STARTED, gpus=len(DEMO_WORKLOADS))


def changing(*parts: tuple[int, float], step: float = 1.0) -> Iterator[Frame]:
    """One GPU that shows one scene of the demo after the other, each for so many seconds."""
    now = STARTED + 5.0
    first = sampled(now).gpus[0].device
    for scene, seconds in parts:
        for _ in range(round(seconds / step)):
            frame = sampled(now)
            gpu = frame.gpus[scene]._replace(device=first)
            pids = {process.pid for process in gpu.processes or ()}
            family = tuple(p for p in frame.processes if p.pid in pids or p.identity.parent_pid in pids)
            yield frame._replace(gpus=(gpu,), processes=family)
            now += step


def told(frames: Iterable[Frame], monitor: LiveDiagnosis | None = None) -> list[tuple[float, list[Finding]]]:
    """What is said at each moment after the start."""
    monitor = monitor or LiveDiagnosis()
    return [(frame.time - STARTED - 5.0, monitor(frame)) for frame in frames]


@pytest.mark.parametrize("step", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("scene", range(len(DEMO_WORKLOADS)))
def test_a_steady_scene_is_reported_and_stays(scene: int, step: float) -> None:
    """Once reported, a finding stays, at any frame rate."""
    said = [{finding.id for finding in findings} for _, findings in told(changing((scene, 90), step=step))]
    expected = labels()[DEMO_WORKLOADS[scene].recording].expect

    if not expected:
        assert not set().union(*said)
        return
    if DEMO_WORKLOADS[scene].recording == "gpu_memory_leak":  # the demo's leak starts over every half minute
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


def test_a_short_disturbance_is_not_reported() -> None:
    """Three seconds of starving within a healthy run are no finding."""
    assert not any(findings for _, findings in told(changing((0, 60), (1, 3), (0, 60))))


def test_driver_faults_are_reported_at_once() -> None:
    """A fault needs no window."""
    monitor = LiveDiagnosis()
    frame = next(changing((0, 1)))
    gpu = frame.gpus[0]._replace(values={**frame.gpus[0].values, "clocks_event_reasons": 0x40})

    (finding,) = monitor(frame._replace(gpus=(gpu,)))

    assert ("thermal_throttle", "critical") == (finding.id, finding.severity)


def test_each_fault_of_a_gpu_keeps_its_start() -> None:
    """From when it was first seen; one that was gone for long is a new one."""
    monitor = LiveDiagnosis()
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
    monitor = LiveDiagnosis()
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


def test_an_xid_began_when_the_driver_reported_it() -> None:
    """Not when it was first seen, and not with its repetition; an agent that restarts knows it from the one before."""
    frame = next(changing((0, 1)))
    first, before = LiveDiagnosis(), XidCounts()
    starts = []
    for second, (total, moment) in enumerate(((1, -20.0), (2, 0.5))):
        faults: Values = {
            "xid_errors_total": total,
            "xid_last_code": 94,
            "xid_last_timestamp_seconds": STARTED + moment,
        }
        gpu = frame.gpus[0]._replace(values={**frame.gpus[0].values, **faults})
        now = frame._replace(gpus=(gpu,), time=STARTED + second)
        before.follow(now)
        starts += [finding.start for finding in first(now)]
    again = XidCounts()
    for xid in before.errors():
        again.add(xid)
    starts += [finding.start for finding in LiveDiagnosis(xids=again)(frame._replace(time=STARTED + 90))]

    assert [STARTED - 20] * 3 == starts


def test_a_replay_that_starts_over_begins_anew() -> None:
    """Time that jumps back is no reason to fail, and what was known is forgotten."""
    monitor = LiveDiagnosis()
    told(changing((1, 60)), monitor)

    again = told(changing((0, 60)), monitor)

    assert not again[-1][1]


def test_eight_gpus_are_watched_at_once() -> None:
    """Each one with its own findings."""
    monitor = LiveDiagnosis()
    machine = DemoMachine(STARTED)
    findings: list[Finding] = []
    for second in range(60):
        findings = monitor(machine.sample(STARTED + 5 + second))
    found = {finding.gpu: finding.id for finding in findings}

    for place, scene in enumerate(DEMO_WORKLOADS):
        expected = labels()[scene.recording].expect
        if scene.recording != "gpu_memory_leak":
            assert found.get(place) == (expected[0] if expected else None)


def slowing(*shares: tuple[float, float]) -> list[Frame]:
    """A program that computes on the host for some share of the time, each for so many seconds."""
    ends = list(accumulate(seconds for _, seconds in shares))

    def doing(now: float) -> Doing:
        share = next(
            (share for (share, _), end in zip(shares, ends, strict=True) if now < end), shares[-1][0]
        )
        return Doing(lost(share))

    return play(ends[-1], doing, step=1.0)


def severities(frames: Iterable[Frame], rule: str) -> list[tuple[float, str]]:
    """When the severity of a finding changed."""
    found: list[tuple[float, str]] = []
    monitor = LiveDiagnosis()
    first: float | None = None
    for frame in frames:
        first = frame.time if first is None else first
        now = next((finding.severity for finding in monitor(frame) if finding.id == rule), "none")
        if now != (found[-1][1] if found else "none"):
            found.append((frame.time - first, now))
    return found


def test_a_severity_near_its_threshold_does_not_flicker() -> None:
    """A loss that moves around 40% every few seconds is reported with one severity."""
    around = slowing(*((0.36, 8.0), (0.44, 7.0)) * 16)

    assert 1 == len(severities(around, "host_single_thread"))


def test_a_severity_that_really_changed_is_reported() -> None:
    """Within one window when it rises, and within two when it falls."""
    (_, first), (risen, worse), (fallen, better) = severities(
        slowing((0.3, 60.0), (0.8, 90.0), (0.3, 90.0)), "host_single_thread"
    )

    assert ("medium", "high", "medium") == (first, worse, better)
    assert 60 < risen <= 60 + WINDOW_SECONDS
    assert 150 < fallen <= 150 + 2 * WINDOW_SECONDS + INTERVAL_SECONDS


def test_a_severity_falls_although_the_clock_was_set_back() -> None:
    """What was seen at later times than now is not the newest."""
    frames = list(slowing((0.8, 90.0), (0.3, 120.0)))
    shifted = [frame._replace(time=frame.time - 1000.0) for frame in frames[90:]]
    changes = [severity for _, severity in severities([*frames[:90], *shifted], "host_single_thread")]

    assert ["high", "medium"] == changes


def test_a_signal_that_is_missing_for_a_while_does_not_end_a_finding() -> None:
    """Not being able to tell is no sign that it ended; after two minutes it is not reported anymore."""
    frames = play(360, Doing(), step=1.0)
    second = GpuProcess(PID + 50, "compute", 10 * GIB, 0.6)

    def shared(frame: Frame, place: int) -> Frame:
        both = (*(frame.gpus[0].processes or ()), second)
        if 60 <= place < 100 or place >= 160:
            both = tuple(process._replace(sm_ratio=None) for process in both)
        return frame._replace(gpus=(frame.gpus[0]._replace(processes=both),))

    changes = severities((shared(frame, place) for place, frame in enumerate(frames)), "gpu_contention")

    assert ["high", "none"] == [severity for _, severity in changes]
    assert 160 + MAX_GAP_SECONDS < changes[1][0] <= 160 + MAX_GAP_SECONDS + 2 * WINDOW_SECONDS


@pytest.mark.parametrize("every", [5.0, 10.0])
@pytest.mark.parametrize("name", ["hang_after_training", "hang_on_host_flag"])
@pytest.mark.parametrize("blind", [False, True])
def test_a_hang_is_found_within_thirty_seconds(name: str, every: float, *, blind: bool) -> None:
    """And stays, with GPM and without, also when the window does not show the work before it anymore."""
    frames = list(Recording(RECORDINGS / f"{name}.jsonl.gz"))
    label = json.loads((RECORDINGS / "labels.json").read_text())[name]
    frames = without_gpm(frames) if blind else frames
    monitor = LiveDiagnosis(every_seconds=every)
    begun = label["marks"][0]["at"]
    said = [(frame.time - begun, {finding.id for finding in monitor(frame)}) for frame in frames]
    found = [second for second, ids in said if "collective_hang" in ids]

    assert 10 <= found[0] <= 30
    assert all("collective_hang" in ids for second, ids in said if found[0] <= second <= label["end"] - begun)


def test_thin_kernels_after_training_are_not_a_hang() -> None:
    """One small kernel after the other makes progress, with GPM and without."""
    frames = list(Recording(RECORDINGS / "thin_after_training.jsonl.gz"))
    monitors = LiveDiagnosis(), LiveDiagnosis()
    found = {
        finding.id
        for monitor, part in zip(monitors, (frames, without_gpm(frames)), strict=True)
        for frame in part
        for finding in monitor(frame)
    }

    assert "collective_hang" not in found


def test_a_finding_that_yields_is_silent_beside_the_better_one() -> None:
    """While a hang is about to end in the report, kernels that leave the GPU unused are not reported beside it."""
    monitor = LiveDiagnosis()
    polling = {**BUSY, "graphics_active_ratio": 1.0, "sm_active_ratio": 0.1, "power_watts": 130}
    polling |= {f"{name}_active_ratio": 0.0 for name in ("tensor", "dram", "fp32")}
    thin = {**polling, "graphics_active_ratio": 0.99, "fp32_active_ratio": 0.02}
    frames = play(120, lambda now: Doing(polling if now < 60 else thin), step=1.0)
    said = [{finding.id for finding in monitor(frame)} for frame in frames]

    assert {"collective_hang"} == said[59]
    assert {"thin_kernels"} == said[-1]
    assert not any({"collective_hang", "thin_kernels"} <= ids for ids in said)


def test_findings_do_not_depend_on_when_seconds_are_summarized(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once or when they are judged: the same, also after a pause, and for a GPU that was away."""
    frames = list(changing((1, 60), (2, 60)))
    frames = [
        frame._replace(gpus=()) if 20 <= place < 55 else frame
        for place, frame in enumerate(frames)
        if not 70 <= place < 110
    ]
    late = told(frames)
    monkeypatch.setattr(live_diagnosis, "_MAX_WAITING_FRAMES", 0)
    at_once = told(frames)

    assert at_once == late
    assert any(findings for _, findings in late)
