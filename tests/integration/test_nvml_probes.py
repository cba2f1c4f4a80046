from __future__ import annotations

import os

import pynvml as nv
import pytest

from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import CATALOG
from gpulse.model.source_health import Health
from gpulse.sources.nvml import gpm, metric_probes
from tests.fakes.nvml import FakeNvml
from tests.integration.nvml_machine import Gpus, reading

LASTING = (nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_NO_PERMISSION)
CODES = {
    nv.NVML_ERROR_NOT_SUPPORTED: "not_supported",
    nv.NVML_ERROR_NO_PERMISSION: "no_permission",
    nv.NVML_ERROR_TIMEOUT: "timeout",
    nv.NVML_ERROR_UNKNOWN: "failed",
}
PROBES: dict[str, set[str]] = {
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization_ratio", "memory_utilization_ratio"},
    "nvmlDeviceGetMemoryInfo_v2": {"memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetClockInfo": {"sm_clock_hertz", "memory_clock_hertz", "video_clock_hertz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"clocks_event_reasons"},
    "nvmlDeviceGetPerformanceState": {"performance_state"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_link_generation"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_link_width"},
    "nvmlDeviceGetEncoderUtilization": {"encoder_utilization_ratio"},
    "nvmlDeviceGetDecoderUtilization": {"decoder_utilization_ratio"},
    "nvmlDeviceGetNumFans": {"fan_speed_ratio", "fan_target_ratio"},
    "nvmlDeviceGetFanSpeed_v2": {"fan_speed_ratio"},
    "nvmlDeviceGetTargetFanSpeed": {"fan_target_ratio"},
    "nvmlDeviceGetFieldValues": {
        "memory_temperature_celsius",
        "power_instant_watts",
        "power_cap_seconds_total",
        "sync_boost_seconds_total",
        "thermal_slowdown_seconds_total",
        "nvlink_tx_bytes_total",
        "nvlink_rx_bytes_total",
        "nvlink_link_bytes_per_second",
        "recovery_action",
        "hardware_thermal_slowdown_seconds_total",
        "power_brake_seconds_total",
        "nvlink_errors_total",
    },
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_joules_total"},
    "nvmlDeviceGetMarginTemperature": {"temperature_margin_celsius"},
    "nvmlDeviceGetPcieReplayCounter": {"pcie_replays_total"},
    "nvmlDeviceGetApplicationsClock": {"sm_clock_application_hertz"},
    "nvmlDeviceGetEccMode": {"ecc_enabled"},
    "nvmlDeviceGetTotalEccErrors": {
        "ecc_corrected_errors_total",
        "ecc_uncorrected_errors_total",
        "ecc_corrected_errors_lifetime_total",
        "ecc_uncorrected_errors_lifetime_total",
    },
    "nvmlDeviceGetRetiredPages": {"retired_pages_corrected", "retired_pages_uncorrected"},
    "nvmlDeviceGetRetiredPagesPendingStatus": {"retired_pages_pending"},
    "nvmlDeviceGetRemappedRows": {
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "remapped_rows_pending",
        "remapped_rows_failed",
    },
    "nvmlDeviceGetNvLinkState": {"nvlink_links", "nvlink_links_active"},
    "nvmlDeviceGetMigMode": {"mig_enabled"},
    "nvmlDeviceGetComputeMode": {"compute_mode"},
    "nvmlDeviceGetPersistenceMode": {"persistence_enabled"},
    "nvmlDeviceGetDisplayActive": {"display_active"},
    "nvmlDeviceGetMemoryInfo": {"memory_total_bytes"},
    "nvmlDeviceGetPowerManagementDefaultLimit": {"power_default_limit_watts"},
    "nvmlDeviceGetPowerManagementLimitConstraints": {"power_min_limit_watts", "power_max_limit_watts"},
    "nvmlDeviceGetTemperatureThreshold": {
        "temperature_shutdown_celsius",
        "temperature_slowdown_celsius",
        "temperature_max_celsius",
        "memory_temperature_max_celsius",
    },
    "nvmlDeviceGetMaxClockInfo": {"sm_clock_max_hertz", "memory_clock_max_hertz", "video_clock_max_hertz"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_link_generation_max"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_link_width_max"},
    "nvmlGpmSampleGet": set(gpm.GPM_METRICS),
    "nvmlGpmMetricsGet": set(gpm.GPM_METRICS),
    "nvmlDeviceGetComputeRunningProcesses": {"gpu_memory_bytes"},
    "nvmlDeviceGetGraphicsRunningProcesses": {"gpu_memory_bytes"},
    "nvmlDeviceGetProcessUtilization": {"sm_ratio"},
}
"""By NVML's function, what cannot be known without it."""
OF_PROCESSES = {"gpu_memory_bytes", "sm_ratio"}
STAND_INS: dict[str, set[str]] = {
    "nvmlDeviceGetMemoryInfo_v2": {"memory_reserved_bytes"},
    "nvmlDeviceGetTemperature": set(),
    "nvmlDeviceGetCurrentClocksEventReasons": set(),
    "nvmlDeviceGetPerformanceState": set(),
    "nvmlDeviceGetGraphicsRunningProcesses": set(),
}
"""Functions that an older one stands in for when the driver does not know them, and what is missing then."""
SYSTEM_WIDE = {"nvmlGpmMetricsGet"}
SICK = {function: gpu for gpu, function in enumerate([name for name in PROBES if name not in SYSTEM_WIDE], 1)}
"""On a machine with many GPUs, the one on which a function fails; the first is sound."""


def furnish(fake: FakeNvml, gpus: int = 2) -> None:
    """GPUs that can say everything there is, with a process on each."""
    for index in range(1, gpus):
        fake.add(index)
    for index in range(gpus):
        gpu = fake.gpu(index)
        gpu.fan_count, gpu.retired_supported = 1, 1
        for field in (38, 45, 52, 59):
            fake.set_field(index, field, 0)
        fake.add_process(index, os.getpid(), 1 << 30, sm=40)


def everything(gpus: Gpus, index: int, names: set[str]) -> set[str]:
    """All that is known of a GPU, once it has said these names or will not."""
    readings, _ = gpus.until(lambda readings, _: len(readings) == 2 and names <= known(readings[index]))
    return known(readings[index])


def known(reading: GpuReading) -> set[str]:
    """The names of a GPU's values, facts and processes."""
    processes = reading.processes or ()
    return {
        *reading.values,
        *reading.device.facts,
        *({"gpu_memory_bytes"} if reading.processes is not None else ()),
        *(("sm_ratio",) if any(p.sm_ratio is not None for p in processes) else ()),
    }


ALL = set().union(*PROBES.values())


def test_the_table_above_names_every_probe() -> None:
    """A new probe needs a row, so that its failure is tried too."""

    groups = [
        *metric_probes.tick_probes(),
        *metric_probes.second_probes(),
        *metric_probes.slow_probes(),
        *metric_probes.fact_probes(),
    ]

    assert {name for probe in groups for name in probe.names} | set(gpm.GPM_METRICS) | OF_PROCESSES == ALL
    assert ALL <= CATALOG["gpu"].keys() | CATALOG["process"].keys()


def test_a_sound_gpu_says_everything(fake_nvml: FakeNvml) -> None:
    """What the catalogue promises of NVML is there, and nobody has anything to complain about."""

    furnish(fake_nvml)
    with reading() as gpus:
        names = everything(gpus, 1, ALL)
        _, health = gpus.tick()

    assert names == ALL
    assert () == health


def lost_by(function: str, error: int) -> set[str]:
    """The names that a health entry lists when a function fails."""
    return STAND_INS.get(function, PROBES[function]) if error in LASTING else PROBES[function]


def left_by(function: str, error: int) -> set[str]:
    """What is known all the same."""
    lost = lost_by(function, error)
    return ALL - lost - ({"sm_ratio"} if "gpu_memory_bytes" in lost else set())


def complaints(health: tuple[Health, ...], gpu: int) -> dict[str, set[str]]:
    """What is missing of a GPU, by the reason."""
    return {entry.code: set(entry.metrics) for entry in health if entry.subject == f"gpu {gpu}"}


def expected_complaints(function: str, error: int) -> dict[str, set[str]]:
    """What should be missing when a function fails."""
    stood_in = function == "nvmlDeviceGetMemoryInfo_v2" and error in LASTING
    lost = lost_by(function, error)
    return {"not_supported" if stood_in else CODES[error]: lost} if lost else {}


@pytest.mark.parametrize("error", CODES, ids=CODES.values())
def test_a_call_that_fails_costs_only_its_own_names(fake_nvml: FakeNvml, error: int) -> None:
    """The names become a gap with a health entry that lists them; the rest, and the other GPUs, stay whole."""

    furnish(fake_nvml, 1 + len(SICK))
    for function, gpu in SICK.items():
        fake_nvml.fail(function, gpu, error)
    left = {0: ALL, **{gpu: left_by(function, error) for function, gpu in SICK.items()}}
    missing = {0: {}, **{gpu: expected_complaints(function, error) for function, gpu in SICK.items()}}

    def settled(readings: tuple[GpuReading, ...], health: tuple[Health, ...]) -> bool:
        return (
            len(readings) == len(left)
            and all(names <= known(readings[gpu]) for gpu, names in left.items())
            and all(wanted.keys() <= complaints(health, gpu).keys() for gpu, wanted in missing.items())
        )

    with reading() as gpus:
        readings, health = gpus.until(settled)

    assert left == {gpu: known(readings[gpu]) for gpu in left}
    assert missing == {gpu: complaints(health, gpu) for gpu in missing}


@pytest.mark.parametrize("error", CODES, ids=CODES.values())
@pytest.mark.parametrize("function", sorted(SYSTEM_WIDE))
def test_a_call_of_no_gpu_that_fails_costs_only_its_own_names(
    fake_nvml: FakeNvml, function: str, error: int
) -> None:
    """On every GPU, and each says so."""

    furnish(fake_nvml)
    fake_nvml.fail(function, None, error)
    left, missing = left_by(function, error), expected_complaints(function, error)
    with reading() as gpus:
        names = [everything(gpus, gpu, left) for gpu in range(2)]
        _, health = gpus.until(lambda _, health: all(complaints(health, gpu) == missing for gpu in range(2)))

    assert [left] * 2 == names
    assert [missing] * 2 == [complaints(health, gpu) for gpu in range(2)]


def test_what_is_not_supported_is_not_asked_again(fake_nvml: FakeNvml) -> None:
    """After the driver said that it cannot, it is left in peace."""

    asked = {function: gpu for function, gpu in SICK.items() if function not in STAND_INS}
    furnish(fake_nvml, 1 + len(SICK))
    for function, gpu in asked.items():
        fake_nvml.fail(function, gpu, nv.NVML_ERROR_NOT_SUPPORTED)
    calls_after_refusal(fake_nvml, asked)

    shared = {"nvmlDeviceGetMigMode"}  # the survey asks it too
    assert dict.fromkeys(asked.keys() - shared, 0) == {
        function: fake_nvml.calls(function, gpu) for function, gpu in asked.items() if function not in shared
    }


@pytest.mark.parametrize("function", sorted(SYSTEM_WIDE))
def test_what_the_driver_cannot_do_for_any_gpu_is_not_asked_again(fake_nvml: FakeNvml, function: str) -> None:
    """After it said so it is left in peace."""

    furnish(fake_nvml)
    fake_nvml.fail(function, None, nv.NVML_ERROR_NOT_SUPPORTED)
    calls_after_refusal(fake_nvml, {function: 1})

    assert 0 == fake_nvml.calls(function)


def calls_after_refusal(fake: FakeNvml, refused: dict[str, int]) -> None:
    """Watch until each function was refused on its GPU; what is called after that, in a whole round, is counted."""
    with reading() as gpus:
        gpus.until(
            lambda _, health: all(
                PROBES[function] <= complaints(health, gpu).get("not_supported", set())
                for function, gpu in refused.items()
            )
        )
        for _ in range(2):
            gpus.tick(patience=1.0)
        fake.reset_calls()
        begun = gpus.tick(patience=1.0)[0]
        gpus.until(
            lambda readings, _: all(
                readings[index].read_at[group] > before.read_at[group]
                for index, before in enumerate(begun)
                for group in ("second", "slow")
            )
        )


def test_a_fact_that_failed_for_a_moment_is_asked_again(fake_nvml: FakeNvml) -> None:
    """One bad answer at the start does not cost a fact for good."""

    furnish(fake_nvml)
    fake_nvml.fail("nvmlDeviceGetMaxPcieLinkWidth", 1, nv.NVML_ERROR_TIMEOUT, times=2)
    with reading() as gpus:
        before = known(gpus.tick(patience=1.0)[0][1])
        after = everything(gpus, 1, {"pcie_link_width_max"})

    assert "pcie_link_width_max" not in before
    assert "pcie_link_width_max" in after


def test_facts_are_read_once(fake_nvml: FakeNvml) -> None:
    """What never changes is asked for once, however long the machine is watched."""

    furnish(fake_nvml)
    with reading() as gpus:
        everything(gpus, 1, ALL)
        for _ in range(20):
            gpus.tick(patience=0.2)

    assert {1} == {
        fake_nvml.calls(function, 1)
        for function in ("nvmlDeviceGetMaxPcieLinkWidth", "nvmlDeviceGetPowerManagementDefaultLimit")
    }
    assert 3 == fake_nvml.calls("nvmlDeviceGetMaxClockInfo", 1)


def test_pcie_rates_come_from_gpm_where_there_is_gpm(fake_nvml: FakeNvml) -> None:
    """The call that waits 20 ms a direction is never made on such a GPU."""

    furnish(fake_nvml)
    with reading() as gpus:
        everything(gpus, 1, ALL)

    assert 0 == fake_nvml.calls("nvmlDeviceGetPcieThroughput")


def test_the_call_that_waits_is_made_off_the_tick(fake_nvml: FakeNvml) -> None:
    """Without GPM and without wide counters PCIe rates are had by waiting, which no tick does."""

    furnish(fake_nvml)
    fake_nvml.gpu(0).gpm_supported = fake_nvml.gpu(1).gpm_supported = 0
    fake_nvml.gpu(1).pcie_rx_kib_s = 2048
    fake_nvml.delay("nvmlDeviceGetPcieThroughput", None, 0.04)
    with reading() as gpus:
        readings, _ = gpus.until(lambda readings, _: "pcie_rx_bytes_per_second" in readings[1].values)
        ticks = fake_nvml.calls("nvmlDeviceGetPowerUsage", 1)
        waits = fake_nvml.calls("nvmlDeviceGetPcieThroughput", 1)

    assert 2048 * 1024 == readings[1].values["pcie_rx_bytes_per_second"]
    assert not readings[1].device.has_gpm
    assert waits <= 4
    assert ticks > waits


def test_the_call_that_waits_is_rare_when_nobody_wants_its_answer(fake_nvml: FakeNvml) -> None:
    """Its first answer stays for the diagnosis, and is renewed when it is wanted again."""

    furnish(fake_nvml)
    fake_nvml.gpu(1).gpm_supported = 0
    fake_nvml.gpu(1).pcie_rx_kib_s = 2048
    with reading() as gpus:
        gpus.reader.waits_for_pcie = False
        first, _ = gpus.until(lambda readings, _: "pcie_rx_bytes_per_second" in readings[1].values)
        read_at = first[1].read_at["second"]
        fake_nvml.gpu(1).pcie_rx_kib_s = 4096
        later, _ = gpus.until(lambda readings, _: readings[1].read_at["second"] > read_at + 0.2)
        assert 2048 * 1024 == later[1].values["pcie_rx_bytes_per_second"]
        assert 2 == fake_nvml.calls("nvmlDeviceGetPcieThroughput", 1)
        gpus.reader.waits_for_pcie = True
        gpus.until(lambda readings, _: readings[1].values.get("pcie_rx_bytes_per_second") == 4096 * 1024)


def test_without_gpm_everything_else_works(fake_nvml: FakeNvml) -> None:
    """An older card says so in one field, and misses nothing but GPM."""

    furnish(fake_nvml)
    fake_nvml.gpu(1).gpm_supported = 0
    fake_nvml.set_field(1, 198, 5_000_000_000)
    fake_nvml.set_field(1, 197, 6_000_000_000)
    with reading() as gpus:
        names = everything(gpus, 1, ALL - set(gpm.GPM_METRICS))
        readings, health = gpus.tick()

    assert (ALL - set(gpm.GPM_METRICS)) | {"pcie_rx_bytes_total", "pcie_tx_bytes_total"} == names
    assert [True, False] == [reading.device.has_gpm for reading in readings]
    assert () == health


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gpm_value_that_is_no_number_is_absent(fake_nvml: FakeNvml, value: float) -> None:
    """NaN and infinity cost the metric they stand for and nothing else."""

    furnish(fake_nvml)
    for metric in (2, 20):
        fake_nvml.set_gpm(1, metric, value)
    with reading() as gpus:
        names = everything(gpus, 1, ALL - {"sm_active_ratio", "pcie_tx_bytes_per_second"})

    assert ALL - {"sm_active_ratio", "pcie_tx_bytes_per_second"} == names


def test_ratios_stay_within_their_bounds(fake_nvml: FakeNvml) -> None:
    """Whatever the driver says, a ratio is between 0 and 1."""

    furnish(fake_nvml)
    gpu = fake_nvml.gpu(1)
    gpu.util_gpu, gpu.util_encoder, gpu.fans[0] = 104, 250, 130
    fake_nvml.set_gpm(1, 2, 100.4)
    fake_nvml.set_gpm(1, 5, -0.2)
    with reading() as gpus:
        everything(gpus, 1, ALL)
        values = gpus.tick()[0][1].values

    assert [1.0, 1.0, 1.0, 1.0, 0.0] == [
        values[name]
        for name in (
            "gpu_utilization_ratio",
            "encoder_utilization_ratio",
            "fan_speed_ratio",
            "sm_active_ratio",
            "tensor_active_ratio",
        )
    ]


def test_fans_are_averaged_and_boards_without_any_are_no_problem(fake_nvml: FakeNvml) -> None:
    """What they do and what is asked of them; a board that its server cools has neither."""

    furnish(fake_nvml)
    cooled, bare = fake_nvml.gpu(0), fake_nvml.gpu(1)
    cooled.fan_count, cooled.fans[:2], cooled.fan_targets[:2] = 2, [30, 50], [60, 80]
    bare.fan_count = 0
    fans = {"fan_speed_ratio", "fan_target_ratio"}
    with reading() as gpus:
        everything(gpus, 0, ALL)
        names = everything(gpus, 1, ALL - fans)
        readings, health = gpus.tick()

    assert (0.4, 0.7) == tuple(readings[0].values[name] for name in sorted(fans))
    assert ALL - fans == names
    assert [] == [entry for entry in health if entry.is_problem]


def test_gpm_samples_are_never_closer_than_they_may_be(fake_nvml: FakeNvml) -> None:
    """However fast the ticks, GPM is asked at most ten times a second."""

    furnish(fake_nvml)
    fake_nvml.set_gpm(1, 2, 50.0)
    with reading() as gpus:
        gpus.until(lambda readings, _: "sm_active_ratio" in readings[1].values)
        before = fake_nvml.calls("nvmlGpmSampleGet", 1)
        seen = set()
        for _ in range(50):
            seen.add(gpus.tick()[0][1].values.get("sm_active_ratio"))
        asked = fake_nvml.calls("nvmlGpmSampleGet", 1) - before

    assert {0.5} == seen
    assert asked <= 1 + 50 * 0.06 / 0.1


def test_a_field_that_is_no_number_is_absent(fake_nvml: FakeNvml) -> None:
    """A double field may hold NaN, which is no temperature."""

    furnish(fake_nvml)
    fake_nvml.set_field(1, 82, float("nan"), value_type=nv.NVML_VALUE_TYPE_DOUBLE)
    with reading() as gpus:
        names = everything(gpus, 1, ALL - {"memory_temperature_celsius"})

    assert ALL - {"memory_temperature_celsius"} == names
