"""What NVML is asked about a GPU: each probe is one call and the catalogue names it fills."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pynvml

from gpulse.model.metric import Value, Values
from gpulse.sources.nvml.library import LASTING, NO_DATA, NVMLError, code_of

Failures = dict[str, int]
"""Return codes by the catalogue name that could not be read."""
Read = Callable[[Any, Values, Failures], None]

_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


class Probe(NamedTuple):
    """One call, and what it fills."""

    names: tuple[str, ...]
    read: Read


class Field(NamedTuple):
    """One entry of nvmlDeviceGetFieldValues."""

    id: int
    name: str
    convert: Callable[[Any], Value] | None = None
    scope: int = 0


def percent(value: Any) -> float:
    """NVML's 0..100 as a ratio; fans, for one, may report more."""
    return min(1.0, float(value / 100))


def milli(value: Any) -> float:
    """Thousandths as a whole unit."""
    return float(value / 1000)


def mega(value: Any) -> int:
    """MHz as Hz."""
    return int(value) * 1_000_000


def nano(value: Any) -> float:
    """Nanoseconds as seconds."""
    return float(value / 1e9)


def kibi(value: Any) -> int:
    """KiB as bytes."""
    return int(value) * _KIB


def call(name: str) -> Callable[..., Any]:
    """A function of the binding, or one that says `not found` when the binding is older than it."""

    def missing(*_: Any) -> Any:
        raise NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    function: Callable[..., Any] = getattr(pynvml, name, missing)
    return function


def one(
    name: str, function: Callable[..., Any], convert: Callable[[Any], Value] | None = None, *arguments: Any
) -> Probe:
    """A probe of one number."""

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            value = function(handle, *arguments)
        except NVMLError as error:
            failures[name] = error.value
        else:
            values[name] = value if convert is None else convert(value)

    return Probe((name,), read)


def several(names: tuple[str, ...], function: Callable[[Any], Sequence[Value]]) -> Probe:
    """A probe of several numbers that one function returns in the order of their names."""

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            values.update(zip(names, function(handle), strict=True))
        except NVMLError as error:
            failures.update(dict.fromkeys(names, error.value))

    return Probe(names, read)


def fields(wanted: Sequence[Field]) -> Probe:
    """A probe of many field values in one call; a field that fails costs only itself."""
    names = tuple(field.name for field in wanted)
    ids = [(field.id, field.scope) for field in wanted]

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(handle, ids)
        except NVMLError as error:
            failures.update(dict.fromkeys(names, error.value))
            return
        for field, answer in zip(wanted, answers, strict=True):
            if answer.nvmlReturn != pynvml.NVML_SUCCESS:
                failures[field.name] = answer.nvmlReturn
            elif math.isfinite(value := _field_value(answer)):
                values[field.name] = value if field.convert is None else field.convert(value)

    return Probe(names, read)


_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def _field_value(answer: Any) -> Value:
    value: Value = getattr(
        answer.value, _UNION[answer.valueType] if answer.valueType < len(_UNION) else "ullVal"
    )
    return value


def first_of(*functions: Callable[..., Any]) -> Callable[..., Any]:
    """The first of several functions that the driver supports, for what NVML renamed over the years."""
    left = list(functions)

    def supported(*arguments: Any) -> Any:
        while len(left) > 1:
            try:
                answer = left[0](*arguments)
            except NVMLError as error:
                if code_of(error.value) not in LASTING:
                    raise
                left.pop(0)
            else:
                left[1:] = []  # what has answered once is right, even if it refuses later
                return answer
        return left[0](*arguments)

    return supported


def _memory(handle: Any) -> Sequence[Value]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return memory.used, memory.free, memory.reserved


def _memory_v1(handle: Any) -> Sequence[Value]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return memory.used, memory.free


def memory() -> Probe:
    """Memory with the driver's own share apart, or without it on drivers that do not say."""
    new = several(("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"), _memory)
    old = several(("memory_used_bytes", "memory_free_bytes"), _memory_v1)
    modern, answered = True, False

    def read(handle: Any, values: Values, failures: Failures) -> None:
        nonlocal modern, answered
        if modern:
            problems: Failures = {}
            new.read(handle, values, problems)
            answered = answered or not problems
            if answered or not lasting(problems):
                failures.update(problems)
                return
            modern = False
            failures["memory_reserved_bytes"] = pynvml.NVML_ERROR_NOT_SUPPORTED
        old.read(handle, values, failures)

    return Probe(new.names, read)


def tick() -> tuple[Probe, ...]:
    """What changes all the time and costs microseconds; made anew for each GPU, as it learns what the GPU supports."""

    def utilization(handle: Any) -> Sequence[Value]:
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        return percent(rates.gpu), percent(rates.memory)

    return (
        several(("gpu_utilization_ratio", "memory_utilization_ratio"), utilization),
        memory(),
        one("power_watts", pynvml.nvmlDeviceGetPowerUsage, milli),
        one(
            "temperature_celsius",
            first_of(call("nvmlDeviceGetTemperature"), call("nvmlDeviceGetTemperatureV")),
            None,
            pynvml.NVML_TEMPERATURE_GPU,
        ),
        one("sm_clock_hertz", pynvml.nvmlDeviceGetClockInfo, mega, pynvml.NVML_CLOCK_SM),
        one("memory_clock_hertz", pynvml.nvmlDeviceGetClockInfo, mega, pynvml.NVML_CLOCK_MEM),
        one(
            "clocks_event_reasons",
            first_of(
                call("nvmlDeviceGetCurrentClocksEventReasons"),
                call("nvmlDeviceGetCurrentClocksThrottleReasons"),
            ),
        ),
        one(
            "performance_state",
            first_of(call("nvmlDeviceGetPerformanceState"), call("nvmlDeviceGetPowerState")),
        ),
    )


@cache
def second() -> tuple[Probe, ...]:
    """What changes but is watched rather than measured; together some 100 us."""
    return (
        one("power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit, milli),
        one("video_clock_hertz", pynvml.nvmlDeviceGetClockInfo, mega, pynvml.NVML_CLOCK_VIDEO),
        one("pcie_link_generation", pynvml.nvmlDeviceGetCurrPcieLinkGeneration),
        one("pcie_link_width", pynvml.nvmlDeviceGetCurrPcieLinkWidth),
        one(
            "encoder_utilization_ratio",
            lambda handle: pynvml.nvmlDeviceGetEncoderUtilization(handle)[0],
            percent,
        ),
        one(
            "decoder_utilization_ratio",
            lambda handle: pynvml.nvmlDeviceGetDecoderUtilization(handle)[0],
            percent,
        ),
        one("fan_speed_ratio", _fans, percent, call("nvmlDeviceGetFanSpeed_v2")),
        one("fan_target_ratio", _fans, percent, call("nvmlDeviceGetTargetFanSpeed")),
        fields(
            [
                Field(82, "memory_temperature_celsius"),
                Field(186, "power_instant_watts", milli),
                Field(74, "power_cap_seconds_total", nano),
                Field(76, "sync_boost_seconds_total", nano),
                Field(269, "thermal_slowdown_seconds_total", nano),
                Field(138, "nvlink_tx_bytes_total", kibi, _ALL_LINKS),
                Field(139, "nvlink_rx_bytes_total", kibi, _ALL_LINKS),
            ]
        ),
    )


def pcie_counters() -> Probe:
    """Bytes over PCIe, for GPUs without GPM that count them wide enough."""
    return fields([Field(197, "pcie_tx_bytes_total"), Field(198, "pcie_rx_bytes_total")])


def pcie_by_waiting(is_wanted: Callable[[], bool] = lambda: True) -> Probe:
    """PCIe rates by the call that samples for 20 ms a direction: the last resort, and never on the tick.

    Args:
        is_wanted: Whether they are worth the wait at the moment.
    """

    def read(handle: Any) -> Sequence[Value]:
        received = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        sent = pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
        return received * _KIB, sent * _KIB

    probe = several(("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second"), read)

    def read_if_wanted(handle: Any, values: Values, failures: Failures) -> None:
        if is_wanted():
            probe.read(handle, values, failures)

    return probe._replace(read=read_if_wanted)


@cache
def slow() -> tuple[Probe, ...]:
    """What hardly ever changes, and what costs milliseconds to ask."""
    corrected, uncorrected = (
        pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    )
    volatile, aggregate = pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC
    ecc = pynvml.nvmlDeviceGetTotalEccErrors
    return (
        one("energy_joules_total", pynvml.nvmlDeviceGetTotalEnergyConsumption, milli),
        one("temperature_margin_celsius", _margin),
        one("pcie_replays_total", pynvml.nvmlDeviceGetPcieReplayCounter),
        one("sm_clock_application_hertz", call("nvmlDeviceGetApplicationsClock"), mega, pynvml.NVML_CLOCK_SM),
        one("ecc_enabled", lambda handle: int(pynvml.nvmlDeviceGetEccMode(handle)[0])),
        one("ecc_corrected_errors_total", ecc, None, corrected, volatile),
        one("ecc_uncorrected_errors_total", ecc, None, uncorrected, volatile),
        one("ecc_corrected_errors_lifetime_total", ecc, None, corrected, aggregate),
        one("ecc_uncorrected_errors_lifetime_total", ecc, None, uncorrected, aggregate),
        one(
            "retired_pages_corrected",
            _retired,
            None,
            pynvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        ),
        one(
            "retired_pages_uncorrected",
            _retired,
            None,
            pynvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
        ),
        one("retired_pages_pending", pynvml.nvmlDeviceGetRetiredPagesPendingStatus),
        several(
            (
                "remapped_rows_corrected",
                "remapped_rows_uncorrected",
                "remapped_rows_pending",
                "remapped_rows_failed",
            ),
            call("nvmlDeviceGetRemappedRows"),
        ),
        fields(
            [
                Field(230, "recovery_action"),
                Field(270, "hardware_thermal_slowdown_seconds_total", nano),
                Field(271, "power_brake_seconds_total", nano),
            ]
        ),
        several(("nvlink_links", "nvlink_links_active"), _nvlinks),
        one("nvlink_errors_total", _nvlink_errors),
        one(
            "mig_enabled",
            lambda handle: int(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE),
        ),
        one("compute_mode", pynvml.nvmlDeviceGetComputeMode),
        one("persistence_enabled", pynvml.nvmlDeviceGetPersistenceMode),
        one("display_active", pynvml.nvmlDeviceGetDisplayActive),
    )


@cache
def facts() -> tuple[Probe, ...]:
    """What never changes."""
    threshold = pynvml.nvmlDeviceGetTemperatureThreshold
    maximum = pynvml.nvmlDeviceGetMaxClockInfo

    def limits(handle: Any) -> Sequence[Value]:
        lowest, highest = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        return lowest / 1000, highest / 1000

    return (
        one("memory_total_bytes", lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        one("power_default_limit_watts", pynvml.nvmlDeviceGetPowerManagementDefaultLimit, milli),
        several(("power_min_limit_watts", "power_max_limit_watts"), limits),
        one("temperature_shutdown_celsius", threshold, None, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
        one("temperature_slowdown_celsius", threshold, None, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        one("temperature_max_celsius", threshold, None, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
        one("memory_temperature_max_celsius", threshold, None, pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
        one("sm_clock_max_hertz", maximum, mega, pynvml.NVML_CLOCK_SM),
        one("memory_clock_max_hertz", maximum, mega, pynvml.NVML_CLOCK_MEM),
        one("video_clock_max_hertz", maximum, mega, pynvml.NVML_CLOCK_VIDEO),
        one("pcie_link_generation_max", pynvml.nvmlDeviceGetMaxPcieLinkGeneration),
        one("pcie_link_width_max", pynvml.nvmlDeviceGetMaxPcieLinkWidth),
    )


@cache
def mig_facts() -> tuple[Probe, ...]:
    """What never changes of a MIG instance."""
    return (one("memory_total_bytes", lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).total),)


def mig_tick() -> tuple[Probe, ...]:
    """What a MIG instance can say of itself."""
    return (memory(),)


def _fans(handle: Any, ask: Callable[[Any, int], int]) -> float:
    count = pynvml.nvmlDeviceGetNumFans(handle)
    if count == 0:  # boards cooled by their server's fans
        raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return float(sum(ask(handle, fan) for fan in range(count)) / count)


def _margin(handle: Any) -> Value:
    margin: int = call("nvmlDeviceGetMarginTemperature")(handle)
    if margin <= 0:  # how boards without the sensor answer
        raise NVMLError(pynvml.NVML_ERROR_NO_DATA)
    return margin


def _retired(handle: Any, cause: int) -> int:
    return len(pynvml.nvmlDeviceGetRetiredPages(handle, cause))


def _nvlinks(handle: Any) -> Sequence[Value]:
    links = active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED)
        except NVMLError as error:
            if links == 0 or code_of(error.value) not in LASTING:
                raise
            break
        links += 1
    return links, active


def _nvlink_errors(handle: Any) -> int:
    """The sum of the error totals (CRC of flits and data, replays, recoveries) that the driver knows."""
    answers = pynvml.nvmlDeviceGetFieldValues(handle, [38, 45, 52, 59])
    known = [int(_field_value(answer)) for answer in answers if answer.nvmlReturn == pynvml.NVML_SUCCESS]
    if not known:
        raise NVMLError(answers[0].nvmlReturn)
    return sum(known)


def lasting(failures: Failures) -> dict[str, int]:
    """The failures that will be the same next time."""
    return {name: error for name, error in failures.items() if code_of(error) in LASTING}


def passing(failures: Failures) -> dict[str, int]:
    """The failures that are worth a word now: neither lasting nor merely `no data`."""
    return {
        name: error
        for name, error in failures.items()
        if error not in NO_DATA and code_of(error) not in LASTING
    }
