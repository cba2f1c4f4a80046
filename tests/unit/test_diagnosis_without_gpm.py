"""The recordings as a GPU without GPM would have given them."""

from __future__ import annotations

import json
from functools import cache

import pytest

from gpulse.diagnosis.engine import diagnose
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.model.finding import Diagnosis
from gpulse.model.frame import Frame
from tests.diagnosis_score import (
    NVML_ONLY,
    SETS,
    LabelledRun,
    Scored,
    findings_of,
    is_right,
    labelled_runs,
    read_frames,
    score,
    total,
    without_gpm,
)
from tests.unit.diagnosis_machine import Doing, lost, play

RUNS = {run.name: run for folder in SETS for run in labelled_runs(folder)}
UNKNOWABLE = frozenset({"tensor_cores_unused"})
"""What cannot be told from power, utilization and PCIe traffic."""
TOLD = [name for name, run in RUNS.items() if run.expect and not UNKNOWABLE & {*run.expect}]
HEALTHY = [name for name, run in RUNS.items() if not run.expect]
LIMITED = {run.name: run for run in labelled_runs(NVML_ONLY)}


@cache
def judged(name: str) -> Diagnosis:
    """The steady part of a recording without GPM."""
    return diagnose(without_gpm(RUNS[name].steady()))


@pytest.mark.parametrize("name", TOLD)
def test_the_cause_is_named(name: str) -> None:
    """First, as with GPM."""
    assert is_right(RUNS[name], judged(name))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str) -> None:
    """Neither in its steady part nor with its start-up, and however often PCIe traffic is measured."""
    assert () == judged(name).findings
    assert () == diagnose(without_gpm(read_frames(RUNS[name].path))).findings
    assert () == diagnose(without_gpm(RUNS[name].steady(), pcie=False)).findings


def test_nearly_every_recording_is_judged_rightly() -> None:
    """All but four causes of at least 70, and no false alarm in at least 20 healthy runs."""
    counted = total([Scored(run, judged(name), None) for name, run in RUNS.items()])

    assert counted.causes >= 70
    assert counted.healthy >= 20
    assert counted.wrong + counted.missed <= 4
    assert 0 == counted.false_alarms


@pytest.mark.parametrize("name", LIMITED)
def test_a_lowered_power_limit_or_clock_leads_nobody_astray(name: str) -> None:
    """What the program does is told in recordings that never had GPM, with their start-up and without."""
    run = LIMITED[name]

    assert is_right(run, diagnose(run.steady()))
    assert is_right(run, diagnose(read_frames(run.path)))


@pytest.mark.parametrize("name", [name for name in LIMITED if LIMITED[name].expect == ("thin_kernels",)])
def test_the_estimate_is_the_same_at_any_limit(name: str) -> None:
    """The same kernels fill the same part of the GPU, whatever it is allowed to draw."""
    limited = findings_of(LIMITED[name], diagnose(LIMITED[name].steady()))[0]
    free = judged("recordings/thin_decode").findings[0]

    assert limited.id == free.id
    assert limited.lost_ratio == pytest.approx(free.lost_ratio, abs=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "recordings/thin_decode",
        "recordings/launch_mlp",
        "recordings/offload_layers",
        "traces/single_block_kernel",
        "traces/cpu_offload",
        "recordings/hang_after_training",
    ],
)
def test_what_rests_on_an_estimate_is_inferred_and_less_sure(name: str) -> None:
    """It is marked in the JSON and in words, and with GPM neither."""
    inferred, measured = judged(name).findings[0], diagnose(RUNS[name].steady()).findings[0]

    assert inferred.id == measured.id
    assert (True, False) == (inferred.to_dict()["inferred"], measured.to_dict()["inferred"])
    assert "inferred from" in inferred.summary
    assert inferred.summary in judged(name).verdict
    assert inferred.confidence < measured.confidence


@pytest.mark.parametrize(
    "name", ["recordings/python_30", "recordings/loader_few4", "traces/checkpoint_stall"]
)
def test_what_is_measured_without_gpm_is_not_inferred(name: str) -> None:
    """Utilization and the CPU use of processes are no estimates."""
    assert not judged(name).findings[0].inferred


@pytest.mark.parametrize(
    ("name", "finding"),
    [("traces/memory_bandwidth", "memory_bandwidth_bound"), ("traces/healthy_gpt", "compute_bound")],
)
def test_the_limit_of_a_healthy_run_is_told(name: str, finding: str) -> None:
    """Memory by its utilization, arithmetic by its power."""
    told = {item.id: item.inferred for item in judged(name).info}

    assert told.get(finding) is True


def test_idle_power_that_was_seen_makes_an_estimate_surer() -> None:
    """The whole recording begins with a program on an idle GPU; its steady part alone leaves that to a guess."""
    run = RUNS["traces/launch_bound"]
    whole, part = diagnose(without_gpm(read_frames(run.path))).findings[0], judged(run.name).findings[0]

    assert {"launch_bound"} == {whole.id, part.id}
    assert whole.confidence > part.confidence


def test_copies_behind_kernels_are_no_lost_time() -> None:
    """The power draw shows that kernels run while batches cross the link."""
    assert "busy 9" in judged("recordings/healthy_prefetch").judged[0].state


def test_without_pcie_traffic_small_kernels_are_not_guessed() -> None:
    """Copies look the same then, and the verdict says so."""
    for name in ("traces/cpu_offload", "traces/single_block_kernel"):
        diagnosis = diagnose(without_gpm(RUNS[name].steady(), pcie=False))

        assert () == diagnosis.findings
        assert diagnosis.verdict.startswith("No cause found")
        assert any("cannot be distinguished" in gap for gap in diagnosis.data_gaps)


def test_the_length_that_a_verdict_takes_is_no_longer_than_with_gpm() -> None:
    """Nobody waits longer for an estimate."""
    names = ("recordings/thin_decode", "recordings/offload_layers", "recordings/launch_mlp")

    for name in names:
        measured, inferred = score(RUNS[name]), score(RUNS[name], without_gpm)
        assert measured.seconds is not None
        assert inferred.seconds is not None
        assert inferred.seconds <= measured.seconds + 1.5


def _blind(frames: list[Frame]) -> list[Frame]:
    """As of a MIG instance without GPM: memory and processes alone."""
    return [
        frame._replace(
            gpus=tuple(
                gpu._replace(values={"memory_used_bytes": gpu.values.get("memory_used_bytes", 0)})
                for gpu in frame.gpus
            )
        )
        for frame in frames
    ]


def _levels(run: LabelledRun) -> list[str | None]:
    changes = (list, without_gpm, lambda frames: _blind(without_gpm(frames)))
    return [diagnose(change(run.steady())).level for change in changes]


def test_each_diagnosis_has_a_level() -> None:
    """By what the readings allow, in the JSON too."""
    run = RUNS["recordings/launch_mlp"]

    assert ["full", "nvml_only", "host_only"] == _levels(run)
    document = json.loads(json.dumps(judged(run.name).to_dict()))
    assert ("nvml_only", ["nvml_only"]) == (
        document["level"],
        [entry["level"] for entry in document["judged"]],
    )


def test_a_recording_has_the_lowest_level_of_its_windows() -> None:
    """What could not be told for a while is not called known."""
    frames = RUNS["traces/healthy_gpt"].steady()
    length = frames[-1].time - frames[0].time + 0.1
    timeline = WindowedDiagnosis(window_seconds=15.0)
    for lap, part in enumerate((frames, without_gpm(frames))):
        for frame in part:
            later = lap * length
            timeline.feed(frame._replace(time=frame.time + later, monotonic=frame.monotonic + later))

    assert "nvml_only" == timeline.finish().level


def test_no_gpu_has_no_level() -> None:
    """Nothing was diagnosed."""
    assert None is Diagnosis("Not enough data.").level


def test_a_hang_after_work_with_a_power_reading_of_zero() -> None:
    """There is no drop from 0 watts, and no error."""
    polling = lost(0.0, gpu_utilization_ratio=1.0, power_watts=125.0, pcie_rx_bytes_per_second=0.0)
    working = lost(0.1, power_watts=0.0)
    frames = play(60, lambda now: Doing(working if now <= 20 else polling))

    assert diagnose(without_gpm(frames)).judged
