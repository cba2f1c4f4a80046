from __future__ import annotations

import pytest

from gpulse.diagnosis.rules.faults import find_faults
from gpulse.model.metric_catalog import Values
from gpulse.model.source_health import Health, HealthCode
from tests.unit.frames import NOON, frame, gpu


def test_a_sound_gpu_has_no_faults() -> None:
    """Nor has one at its power limit, which is how a busy GPU runs."""

    readings: Values = {
        "clocks_event_reasons": 0x4,
        "ecc_uncorrected_errors_total": 0,
        "remapped_rows_failed": 0,
        "recovery_action": 0,
        "xid_errors_total": 0,
    }

    assert [] == find_faults(frame(gpu(0, readings), gpu(1, {"clocks_event_reasons": 0x1})))


@pytest.mark.parametrize(
    ("readings", "name", "severity"),
    [
        ({"clocks_event_reasons": 0x20}, "thermal_throttle", "high"),
        ({"clocks_event_reasons": 0x40}, "thermal_throttle", "critical"),
        ({"clocks_event_reasons": 0x48}, "thermal_throttle", "critical"),
        ({"clocks_event_reasons": 0x80}, "power_brake", "critical"),
        ({"clocks_event_reasons": 0x88}, "power_brake", "critical"),
        ({"clocks_event_reasons": 0x8}, "hw_slowdown", "critical"),
        ({"ecc_uncorrected_errors_total": 2}, "gpu_fault", "critical"),
        ({"remapped_rows_failed": 1}, "gpu_fault", "critical"),
        ({"remapped_rows_pending": 1}, "gpu_fault", "medium"),
        ({"retired_pages_pending": 1}, "gpu_fault", "medium"),
        ({"recovery_action": 1}, "gpu_fault", "critical"),
        ({"recovery_action": 77}, "gpu_fault", "critical"),
        ({"xid_errors_total": 3, "xid_last_code": 79}, "gpu_fault", "critical"),
    ],
)
def test_what_the_driver_reports_is_a_finding(readings: Values, name: str, severity: str) -> None:
    """One for each, about its GPU, with the value as evidence and something to do."""

    found = find_faults(frame(gpu(0), gpu(1, readings)))

    assert [(name, severity, 1, 1.0)] == [(f.id, f.severity, f.gpu, f.confidence) for f in found]
    assert found[0].evidence[0].value in readings.values()
    assert found[0].advice
    assert "GPU 1" in found[0].summary


def test_the_worst_comes_first() -> None:
    """Across GPUs."""

    found = find_faults(frame(gpu(0, {"remapped_rows_pending": 1}), gpu(1, {"recovery_action": 2})))

    assert [("critical", 1), ("medium", 0)] == [(f.severity, f.gpu) for f in found]


@pytest.mark.parametrize("code", ["gpu_lost", "not_answering"])
def test_a_gpu_that_is_gone_is_a_fault(code: HealthCode) -> None:
    """Since when it is gone."""

    lost = Health("nvml", code, "it is gone", NOON - 60, "gpu 1")
    found = find_faults(frame(gpu(0), gpu(1), health=(lost,)))

    assert [("gpu_fault", "critical", 1, NOON - 60)] == [(f.id, f.severity, f.gpu, f.start) for f in found]


def test_a_gpu_that_is_no_longer_listed_is_a_fault_of_itself_alone() -> None:
    """Its index may belong to another GPU by now, which is sound."""

    gone, other = gpu(1), gpu(1)
    other = other._replace(device=other.device._replace(uuid="GPU-other"))
    lost = Health("nvml", "gpu_lost", "no longer listed", NOON, gone.device.uuid)

    assert 1 == len(find_faults(frame(other, gone, health=(lost,))))


def test_a_late_call_is_no_fault() -> None:
    """A GPU that took a moment too long is not broken."""

    late = Health("nvml", "timeout", "60 ms", NOON, "gpu 1")

    assert [] == find_faults(frame(gpu(0), gpu(1), health=(late,)))


def test_instances_do_not_repeat_the_faults_of_their_gpu() -> None:
    """A GPU that is split is one board."""

    readings: Values = {"recovery_action": 1}

    assert [0] == [f.gpu for f in find_faults(frame(gpu(0, readings), gpu(0, readings, mig=0)))]


@pytest.mark.parametrize(
    "code", ["driver_mismatch", "driver_unloaded", "not_answering", "failed", "no_permission"]
)
def test_a_driver_that_is_there_and_does_not_work_is_a_fault(code: HealthCode) -> None:
    """Of the node, with the hint as what to do."""

    (found,) = find_faults(frame(health=(Health("nvml", code, "it does not work", NOON, hint="mend it"),)))

    assert ("gpu_fault", "fault", "critical", None) == (found.id, found.family, found.severity, found.gpu)
    assert ("it does not work", "mend it") == (found.summary, found.advice[0].do)


def test_a_machine_without_a_driver_is_sound() -> None:
    """It may have no GPU at all."""

    assert [] == find_faults(frame(health=(Health("nvml", "driver_missing", "no driver", NOON),)))


def test_other_sources_do_not_make_faults_of_gpus() -> None:
    """A disk that cannot be read says nothing about the driver."""

    assert [] == find_faults(frame(gpu(), health=(Health("disks", "failed", "no disks", NOON),)))


def test_gpus_with_the_same_trouble_are_one_fault() -> None:
    """Since the first of them had it; how long each is silent is no difference."""

    gpus = tuple(gpu(index) for index in range(64))
    silent = tuple(
        Health("nvml", "not_answering", f"silent for {index} s", NOON - index, f"gpu {index}")
        for index in range(64)
    )

    assert [("GPUs 0-63: silent for 63 s", None, NOON - 63)] == [
        (f.summary, f.gpu, f.start) for f in find_faults(frame(*gpus, health=silent))
    ]


def test_a_driver_that_is_gone_is_not_repeated_for_its_gpus() -> None:
    """One cause, one finding."""

    whole = Health("nvml", "driver_unloaded", "the driver is not loaded", NOON)
    each = tuple(Health("nvml", "driver_unloaded", "Driver Not Loaded", NOON, f"gpu {n}") for n in range(3))
    gpus = tuple(gpu(index) for index in range(3))

    assert [["GPUs 0-2: Driver Not Loaded"], ["the driver is not loaded"]] == [
        [f.summary for f in find_faults(frame(*gpus, health=health))] for health in (each, (whole, *each))
    ]
