"""Probes of a GPU: each is one NVML call and the metrics that it fills."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from ctypes import byref, c_char, c_int, c_uint, c_ulonglong
from functools import cache
from typing import Any, NamedTuple

from gpulse.model.metric_catalog import Value, Values
from gpulse.sources.nvml import library
from gpulse.sources.nvml.library import (
    NO_DATA_ERRORS,
    PERMANENT_CODES,
    NVMLError,
    code_of,
    find_function,
)

Failures = dict[str, int]
"""NVML return codes by the name of the metric that could not be read."""
ReadFunction = Callable[[Any, Values, Failures], None]

_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024

# Constants of NVML, as its documentation names them.
_SM_CLOCK, _MEMORY_CLOCK, _VIDEO_CLOCK = 1, 2, 3
_GPU_SENSOR = 0
_TEMPERATURE_V1, _MARGIN_V1 = 0x0100000C, 0x01000008
_SENT_BYTES, _RECEIVED_BYTES = 0, 1
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_SINGLE_BIT_ERRORS, _DOUBLE_BIT_ERROR = 0, 1
_SHUTDOWN, _SLOWDOWN, _MEMORY_MAX, _GPU_MAX = 0, 1, 2, 3


class Probe(NamedTuple):
    """One NVML call and the metrics that it fills."""

    names: tuple[str, ...]
    read: ReadFunction


class NvmlField(NamedTuple):
    """One entry of nvmlDeviceGetFieldValues."""

    id: int
    name: str
    convert: Callable[[Any], Value] | None = None
    scope: int = 0


def percent(value: Any) -> float:
    """Convert NVML's 0..100 to a ratio; fans may report more."""
    return min(1.0, float(value / 100))


def milli(value: Any) -> float:
    """Convert thousandths to the base unit."""
    return float(value / 1000)


def mega(value: Any) -> int:
    """Convert MHz to Hz, and MB/s to bytes per second."""
    return int(value) * 1_000_000


def nano(value: Any) -> float:
    """Convert nanoseconds to seconds."""
    return float(value / 1e9)


def kibi(value: Any) -> int:
    """Convert KiB to bytes."""
    return int(value) * _KIB


def single_probe(
    name: str, function: Callable[[Any], Value], convert: Callable[[Any], Value] | None = None
) -> Probe:
    """Return a probe of one number that a function returns."""

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            value = function(handle)
        except NVMLError as error:
            failures[name] = error.value
        else:
            values[name] = value if convert is None else convert(value)

    return Probe((name,), read)


def number_probe(
    name: str,
    functions: str | tuple[str, ...],
    convert: Callable[[Any], Value] | None = None,
    arguments: tuple[int, ...] = (),
    *,
    kind: Any = c_uint,
    outputs: int = 1,
) -> Probe:
    """Return a probe of one number that a function of NVML stores at an address.

    Most probes are of this kind, so it does without exceptions and further calls.

    Args:
        name: Of the metric.
        functions: Of NVML; of several names for the same function, the first that the driver supports is used.
        convert: Converts the number to the metric's unit.
        arguments: Arguments between the handle and the address.
        kind: The number's C type.
        outputs: Number of addresses that the function stores at; the first one counts.
    """
    left = [functions] if isinstance(functions, str) else list(functions)
    function: Callable[..., int] | None = None

    def read(handle: Any, values: Values, failures: Failures) -> None:
        nonlocal function
        out = kind()
        found = function  # another thread may reset it
        if found is None:
            found = function = find_function(left[0])
        code = found(handle, *arguments, byref(out), *others)
        if not code:
            if len(left) > 1:
                left[1:] = []  # what has answered once is right, even if it refuses later
            values[name] = out.value if convert is None else convert(out.value)
        elif len(left) > 1 and code_of(code) in PERMANENT_CODES:
            left.pop(0)
            function = None
            read(handle, values, failures)
        else:
            failures[name] = code
            function = None

    others = tuple(byref(c_uint()) for _ in range(outputs - 1))
    return Probe((name,), read)


def multi_probe(names: tuple[str, ...], function: Callable[[Any], Sequence[Value]]) -> Probe:
    """Return a probe of several numbers that one function returns in the order of their names."""

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            values.update(zip(names, function(handle), strict=True))
        except NVMLError as error:
            failures.update(dict.fromkeys(names, error.value))

    return Probe(names, read)


_FIELD = struct.Struct("<II16xII8s")
"""nvmlFieldValue_t: field, scope, (times,) type of the value, return code, value."""
_FIELD_VALUES = tuple(struct.Struct(form) for form in ("<d", "<I4x", "<Q", "<Q", "<q", "<i4x", "<H6x"))
"""By NVML's type of the value."""
UNSIGNED_LONG_LONG = 3
"""NVML's type of 64-bit counters."""


class FieldAnswer(NamedTuple):
    """NVML's answer for one field."""

    code: int
    kind: int
    value: Value


def read_fields(handle: Any, fields: Sequence[tuple[int, int]]) -> list[FieldAnswer]:
    """Return the answers for fields, given as ID and scope.

    Raises:
        NVMLError: None of them could be read.
    """
    buffer = (c_char * (_FIELD.size * len(fields)))()
    for place, (field, scope) in enumerate(fields):
        _FIELD.pack_into(buffer, place * _FIELD.size, field, scope, 0, 0, b"")
    code = find_function("nvmlDeviceGetFieldValues")(handle, len(fields), buffer)
    if code:
        raise NVMLError(code)
    return [
        FieldAnswer(
            code,
            kind,
            _FIELD_VALUES[kind if kind < len(_FIELD_VALUES) else UNSIGNED_LONG_LONG].unpack(raw)[0],
        )
        for _, _, kind, code, raw in _FIELD.iter_unpack(buffer)
    ]


def field_probe(wanted: Sequence[NvmlField]) -> Probe:
    """Return a probe of many field values in one call; a field that fails affects no other."""
    names = tuple(field.name for field in wanted)
    ids = [(field.id, field.scope) for field in wanted]

    def read(handle: Any, values: Values, failures: Failures) -> None:
        try:
            answers = read_fields(handle, ids)
        except NVMLError as error:
            failures.update(dict.fromkeys(names, error.value))
            return
        for field, (code, _, value) in zip(wanted, answers, strict=True):
            if code:
                failures[field.name] = code
            elif math.isfinite(value):
                values[field.name] = value if field.convert is None else field.convert(value)

    return Probe(names, read)


_MEMORY_V2 = 0x02000028
"""Version and size of nvmlMemory_v2_t."""


def _read_memory(handle: Any) -> Sequence[Value]:
    memory = (c_ulonglong * 5)(_MEMORY_V2)
    library.call("nvmlDeviceGetMemoryInfo_v2", handle, memory)
    _, _, reserved, free, used = memory
    return used, free, reserved


def _read_memory_v1(handle: Any) -> tuple[int, int, int]:
    """Return the total, the free and the used memory."""
    memory = (c_ulonglong * 3)()
    library.call("nvmlDeviceGetMemoryInfo", handle, memory)
    total, free, used = memory
    return total, free, used


def memory() -> Probe:
    """Return a probe of memory, with the driver's own part where the driver reports it."""
    new = multi_probe(("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes"), _read_memory)
    old = multi_probe(
        ("memory_used_bytes", "memory_free_bytes"), lambda handle: _read_memory_v1(handle)[:0:-1]
    )
    modern, answered = True, False

    def read(handle: Any, values: Values, failures: Failures) -> None:
        nonlocal modern, answered
        if modern:
            problems: Failures = {}
            new.read(handle, values, problems)
            answered = answered or not problems
            if answered or not permanent_failures(problems):
                failures.update(problems)
                return
            modern = False
            failures["memory_reserved_bytes"] = library.NOT_SUPPORTED
        old.read(handle, values, failures)

    return Probe(new.names, read)


def tick_probes() -> tuple[Probe, ...]:
    """Return the probes of each tick: fast-changing and cheap. Created for each GPU, as they learn what it supports."""
    return (
        multi_probe(("gpu_utilization_ratio", "memory_utilization_ratio"), _read_utilization),
        memory(),
        number_probe("power_watts", "nvmlDeviceGetPowerUsage", milli),
        temperature(),
        number_probe("sm_clock_hertz", "nvmlDeviceGetClockInfo", mega, (_SM_CLOCK,)),
        number_probe("memory_clock_hertz", "nvmlDeviceGetClockInfo", mega, (_MEMORY_CLOCK,)),
        number_probe(
            "clocks_event_reasons",
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            kind=c_ulonglong,
        ),
        number_probe("performance_state", ("nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerState")),
    )


def temperature() -> Probe:
    """Return a probe of the temperature, by the function that the driver supports."""
    name = "temperature_celsius"
    plain = number_probe(name, "nvmlDeviceGetTemperature", arguments=(_GPU_SENSOR,))
    versioned = single_probe(name, _read_temperature_v1)
    is_plain, answered = True, False

    def read(handle: Any, values: Values, failures: Failures) -> None:
        nonlocal is_plain, answered
        if is_plain:
            plain.read(handle, values, failures)
            if answered or name in values:
                answered = True
                return
            if not permanent_failures({name: failures[name]}):
                return
            is_plain = False
            del failures[name]
        versioned.read(handle, values, failures)

    return Probe((name,), read)


def _read_temperature_v1(handle: Any) -> Value:
    answer = (c_int * 3)(_TEMPERATURE_V1, _GPU_SENSOR)
    library.call("nvmlDeviceGetTemperatureV", handle, answer)
    return answer[2]


def _read_utilization(handle: Any) -> Sequence[Value]:
    rates = (c_uint * 2)()
    library.call("nvmlDeviceGetUtilizationRates", handle, rates)
    return percent(rates[0]), percent(rates[1])


@cache
def second_probes() -> tuple[Probe, ...]:
    """Return the probes of the per-second group; together about 100 us."""
    return (
        number_probe("power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", milli),
        number_probe("video_clock_hertz", "nvmlDeviceGetClockInfo", mega, (_VIDEO_CLOCK,)),
        number_probe("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        number_probe("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        number_probe("encoder_utilization_ratio", "nvmlDeviceGetEncoderUtilization", percent, outputs=2),
        number_probe("decoder_utilization_ratio", "nvmlDeviceGetDecoderUtilization", percent, outputs=2),
        single_probe("fan_speed_ratio", lambda gpu: _read_fans(gpu, "nvmlDeviceGetFanSpeed_v2"), percent),
        single_probe("fan_target_ratio", lambda gpu: _read_fans(gpu, "nvmlDeviceGetTargetFanSpeed"), percent),
        field_probe(
            [
                NvmlField(82, "memory_temperature_celsius"),
                NvmlField(186, "power_instant_watts", milli),
                NvmlField(74, "power_cap_seconds_total", nano),
                NvmlField(76, "sync_boost_seconds_total", nano),
                NvmlField(269, "thermal_slowdown_seconds_total", nano),
                NvmlField(138, "nvlink_tx_bytes_total", kibi, _ALL_LINKS),
                NvmlField(139, "nvlink_rx_bytes_total", kibi, _ALL_LINKS),
            ]
        ),
    )


def pcie_counter_probe() -> Probe:
    """Return a probe of PCIe byte counters, for GPUs without GPM whose counters are 64 bits wide."""
    return field_probe([NvmlField(197, "pcie_tx_bytes_total"), NvmlField(198, "pcie_rx_bytes_total")])


def pcie_rate_probe() -> Probe:
    """Return a probe of PCIe rates by a call that samples for 20 ms per direction: the last resort, never on the tick."""

    def read(handle: Any) -> Sequence[Value]:
        received = library.read_number("nvmlDeviceGetPcieThroughput", handle, _RECEIVED_BYTES)
        sent = library.read_number("nvmlDeviceGetPcieThroughput", handle, _SENT_BYTES)
        return received * _KIB, sent * _KIB

    return multi_probe(("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second"), read)


@cache
def slow_probes() -> tuple[Probe, ...]:
    """Return the probes of the slow group: values that rarely change or take milliseconds to read."""
    ecc = "nvmlDeviceGetTotalEccErrors"
    return (
        number_probe("energy_joules_total", "nvmlDeviceGetTotalEnergyConsumption", milli, kind=c_ulonglong),
        single_probe("temperature_margin_celsius", _read_margin),
        number_probe("pcie_replays_total", "nvmlDeviceGetPcieReplayCounter"),
        number_probe("sm_clock_application_hertz", "nvmlDeviceGetApplicationsClock", mega, (_SM_CLOCK,)),
        number_probe("ecc_enabled", "nvmlDeviceGetEccMode", outputs=2),
        number_probe("ecc_corrected_errors_total", ecc, None, (_CORRECTED, _VOLATILE), kind=c_ulonglong),
        number_probe("ecc_uncorrected_errors_total", ecc, None, (_UNCORRECTED, _VOLATILE), kind=c_ulonglong),
        number_probe(
            "ecc_corrected_errors_lifetime_total", ecc, None, (_CORRECTED, _AGGREGATE), kind=c_ulonglong
        ),
        number_probe(
            "ecc_uncorrected_errors_lifetime_total", ecc, None, (_UNCORRECTED, _AGGREGATE), kind=c_ulonglong
        ),
        single_probe(
            "retired_pages_corrected", lambda handle: _count_retired_pages(handle, _SINGLE_BIT_ERRORS)
        ),
        single_probe(
            "retired_pages_uncorrected", lambda handle: _count_retired_pages(handle, _DOUBLE_BIT_ERROR)
        ),
        number_probe("retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus"),
        multi_probe(
            (
                "remapped_rows_corrected",
                "remapped_rows_uncorrected",
                "remapped_rows_pending",
                "remapped_rows_failed",
            ),
            lambda handle: library.read_numbers("nvmlDeviceGetRemappedRows", 4, handle),
        ),
        field_probe(
            [
                NvmlField(90, "nvlink_link_bytes_per_second", mega),
                NvmlField(230, "recovery_action"),
                NvmlField(270, "hardware_thermal_slowdown_seconds_total", nano),
                NvmlField(271, "power_brake_seconds_total", nano),
            ]
        ),
        multi_probe(("nvlink_links", "nvlink_links_active"), _read_nvlinks),
        single_probe("nvlink_errors_total", _sum_nvlink_errors),
        number_probe("mig_enabled", "nvmlDeviceGetMigMode", outputs=2),
        number_probe("compute_mode", "nvmlDeviceGetComputeMode"),
        number_probe("persistence_enabled", "nvmlDeviceGetPersistenceMode"),
        number_probe("display_active", "nvmlDeviceGetDisplayActive"),
    )


@cache
def fact_probes() -> tuple[Probe, ...]:
    """Return the probes of values that never change."""
    threshold, maximum = "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetMaxClockInfo"

    def limits(handle: Any) -> Sequence[Value]:
        lowest, highest = library.read_numbers("nvmlDeviceGetPowerManagementLimitConstraints", 2, handle)
        return lowest / 1000, highest / 1000

    return (
        single_probe("memory_total_bytes", lambda handle: _read_memory_v1(handle)[0]),
        number_probe("power_default_limit_watts", "nvmlDeviceGetPowerManagementDefaultLimit", milli),
        multi_probe(("power_min_limit_watts", "power_max_limit_watts"), limits),
        number_probe("temperature_shutdown_celsius", threshold, None, (_SHUTDOWN,)),
        number_probe("temperature_slowdown_celsius", threshold, None, (_SLOWDOWN,)),
        number_probe("temperature_max_celsius", threshold, None, (_GPU_MAX,)),
        number_probe("memory_temperature_max_celsius", threshold, None, (_MEMORY_MAX,)),
        number_probe("sm_clock_max_hertz", maximum, mega, (_SM_CLOCK,)),
        number_probe("memory_clock_max_hertz", maximum, mega, (_MEMORY_CLOCK,)),
        number_probe("video_clock_max_hertz", maximum, mega, (_VIDEO_CLOCK,)),
        number_probe("pcie_link_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
        number_probe("pcie_link_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    )


@cache
def mig_fact_probes() -> tuple[Probe, ...]:
    """Return the probes of values that never change, for a MIG instance."""
    return (single_probe("memory_total_bytes", lambda handle: _read_memory_v1(handle)[0]),)


def mig_tick_probes() -> tuple[Probe, ...]:
    """Return the probes of each tick, for a MIG instance."""
    return (memory(),)


def _read_fans(handle: Any, function: str) -> float:
    count = library.read_number("nvmlDeviceGetNumFans", handle)
    if count == 0:  # boards cooled by their server's fans
        raise NVMLError(library.NOT_SUPPORTED)
    return sum(library.read_number(function, handle, fan) for fan in range(count)) / count


def _read_margin(handle: Any) -> Value:
    answer = (c_int * 2)(_MARGIN_V1)
    library.call("nvmlDeviceGetMarginTemperature", handle, answer)
    if answer[1] <= 0:  # how boards without the sensor answer
        raise NVMLError(library.NO_DATA)
    return answer[1]


def _count_retired_pages(handle: Any, cause: int) -> int:
    count = c_uint()
    code = find_function("nvmlDeviceGetRetiredPages")(handle, cause, byref(count), None)
    if code not in (library.SUCCESS, library.INSUFFICIENT_SIZE):
        raise NVMLError(code)
    return count.value


def _read_nvlinks(handle: Any) -> Sequence[Value]:
    links = active = 0
    for link in range(library.MAX_LINKS):
        try:
            active += library.read_number("nvmlDeviceGetNvLinkState", handle, link)
        except NVMLError as error:
            if links == 0 or code_of(error.value) not in PERMANENT_CODES:
                raise
            break
        links += 1
    return links, active


def _sum_nvlink_errors(handle: Any) -> int:
    """Return the sum of the error totals (CRC of flits and data, replays, recoveries) that the driver reports."""
    answers = read_fields(handle, [(field, 0) for field in (38, 45, 52, 59)])
    known = [int(answer.value) for answer in answers if not answer.code]
    if not known:
        raise NVMLError(answers[0].code)
    return sum(known)


def permanent_failures(failures: Failures) -> dict[str, int]:
    """Return the failures that will be the same next time."""
    return {name: error for name, error in failures.items() if code_of(error) in PERMANENT_CODES}


def temporary_failures(failures: Failures) -> dict[str, int]:
    """Return the failures that should be reported now: neither permanent nor merely "no data"."""
    return {
        name: error
        for name, error in failures.items()
        if error not in NO_DATA_ERRORS and code_of(error) not in PERMANENT_CODES
    }
