from __future__ import annotations

import time

import pynvml as nv
import pytest

from gpulse.model.frame import GpuReading
from gpulse.model.source_health import Health
from tests.fakes.nvml import FakeNvml
from tests.integration.nvml_machine import IMPATIENT, four, reading

FULL = 55


def _is_full(gpu: GpuReading) -> bool:
    return len(gpu.values) > FULL and gpu.processes is not None


def _all_full(readings: tuple[GpuReading, ...], _: tuple[Health, ...] = ()) -> bool:
    return len(readings) == 4 and all(map(_is_full, readings))


@pytest.mark.parametrize(
    "code", [nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_NO_PERMISSION, nv.NVML_ERROR_INVALID_ARGUMENT]
)
def test_a_refusal_that_passes_is_a_fault_and_then_forgotten(fake_nvml: FakeNvml, code: int) -> None:
    """What a GPU has told before is asked for again, and its refusal is a problem, not a fact."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(_all_full)
        fault = fake_nvml.fail("nvmlDeviceGetPowerUsage", 1, code)
        readings, health = gpus.tick()
        missing = "power_watts" not in readings[1].values
        problems = [(e.subject, e.code, e.metrics) for e in health if e.is_problem]
        fake_nvml.clear(fault)
        readings, health = gpus.tick()

    assert missing
    assert [("gpu 1", "failed", ("power_watts",))] == problems
    assert "power_watts" in readings[1].values
    assert not any(e.is_problem for e in health)


def test_a_gpu_that_refuses_everything_for_a_while_comes_back(fake_nvml: FakeNvml) -> None:
    """Not one of its readings is given up for good, and its loss is noticed meanwhile."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(_all_full)
        fault = fake_nvml.fail("*", 1, nv.NVML_ERROR_NOT_SUPPORTED)
        gpus.until(lambda readings, _: not readings[1].values)
        fake_nvml.lose(1)
        fake_nvml.clear(fault)
        gpus.until(lambda _, health: any(e.subject == "gpu 1" and e.code == "gpu_lost" for e in health))
        fake_nvml.restore(1)

        gpus.until(lambda readings, health: _all_full(readings) and not any(e.is_problem for e in health))


def test_a_gpu_that_hangs_shows_nothing_old(fake_nvml: FakeNvml) -> None:
    """Readings with longer periods go with the tick, and come back with it."""

    four(fake_nvml)
    with reading() as gpus:
        gpus.until(_all_full)
        fake_nvml.hang("nvmlDeviceGetPowerUsage", 1)
        readings, _ = gpus.tick()
        hung = (readings[1].values, readings[1].processes, readings[1].read_at)
        fake_nvml.clear_faults()
        gpus.until(_all_full)

    assert ({}, None, {}) == hung


def test_a_slow_gpu_does_not_age_the_others(fake_nvml: FakeNvml) -> None:
    """A round that waits for one GPU, and may wait a minute, does not keep the others from their next."""

    four(fake_nvml)
    with reading(timeouts=IMPATIENT._replace(call=60.0)) as gpus:
        gpus.until(_all_full)
        fake_nvml.hang("nvmlDeviceGetEnforcedPowerLimit", 1)
        gpus.until(lambda *_: fake_nvml.waiting == 1)
        for _ in range(3):
            now = time.time()
            gpus.until(
                lambda readings, _: all(readings[index].read_at.get("second", 0) > now for index in (0, 2, 3))  # noqa: B023  called at once
            )
        out = fake_nvml.waiting
        fake_nvml.release_hangs()

    assert 1 == out


def test_xids_are_unknown_where_they_cannot_be_seen(fake_nvml: FakeNvml) -> None:
    """A GPU whose events cannot be had, or that is lost, does not claim that there was none."""

    four(fake_nvml)
    fake_nvml.fail("nvmlDeviceRegisterEvents", 1, nv.NVML_ERROR_NOT_SUPPORTED)
    with reading(watch_xids=True) as gpus:
        readings, health = gpus.until(_all_full)
        fake_nvml.lose(2)
        lost, _ = gpus.tick()

    assert [0, None, 0, 0] == [gpu.values.get("xid_errors_total") for gpu in readings]
    assert any(e.subject == "gpu 1" and "xid_errors_total" in e.metrics for e in health)
    assert {} == lost[2].values


def test_a_mig_instance_that_cannot_be_opened_is_left_alone(fake_nvml: FakeNvml) -> None:
    """It does not make its GPU open anew at every look for changes."""

    four(fake_nvml)
    fake_nvml.add_mig(0, gpu_instance=1)
    fake_nvml.fail("nvmlDeviceGetGpuInstanceId", None, nv.NVML_ERROR_NO_PERMISSION)
    with reading() as gpus:
        gpus.until(lambda readings, _: len(readings) == 4 and all(r.processes is not None for r in readings))
        fake_nvml.reset_calls()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            gpus.tick()
            time.sleep(0.01)

        assert 0 == fake_nvml.calls("nvmlDeviceGetMinorNumber")
