"""gpulse calls libnvidia-ml as NVIDIA's own binding does: names, structures, constants, arguments and figures.

nvidia-ml-py (pynvml) is generated from NVIDIA's header, so it is the reference. Without a GPU, a wrong offset or a
truncated handle would only be seen on a user's machine.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import re
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pynvml as nv
import pytest

import gpulse
from gpulse.errors import CollectionError
from gpulse.harvest.watch.gpu_contexts import ContextReader, find_gpus
from gpulse.model.metric_catalog import Values
from gpulse.sources.network import PciDevices
from gpulse.sources.nvml import (
    gpm,
    gpu_inventory,
    gpu_processes,
    gpu_topology,
    library,
    metric_probes,
    nvml_lifecycle,
    open_device,
)
from gpulse.sources.nvml.gpu_topology import PeerGpu
from gpulse.sources.nvml.nvml_lifecycle import NvmlDriver
from gpulse.sources.nvml.open_device import OpenDevice, open_gpu
from gpulse.sources.nvml.read_timing import Cadence, DriverTimeouts
from tests.fakes.nvml import COMPUTE, GRAPHICS, FakeNvml

CADENCE = Cadence(graphics=0.0, shares=0.0)
PATIENCE_SECONDS = 60.0
PATIENT = DriverTimeouts(start=PATIENCE_SECONDS, call=PATIENCE_SECONDS)
GPM_PAUSE_SECONDS = gpm.MIN_GPM_SECONDS + 0.005
"""Between two samples: the driver has no values for less."""
GROUPS = ("facts", "tick", "second", "pcie", "slow")
ANSWERS = {
    symbol: part.partition("(")[0]
    for part in re.split(r"^def ", inspect.getsource(nv), flags=re.MULTILINE)[1:]
    for symbol in re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', part)
}
"""The function of pynvml that calls a symbol of the library, by symbol."""
RENAMED = (
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetMemoryInfo_v2",
)
"""Functions that gpulse replaces by another one where the library lacks them."""
FIELDS = (
    nv.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    nv.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    nv.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    nv.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    nv.NVML_FI_DEV_PERF_POLICY_POWER,
    nv.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,
    nv.NVML_FI_DEV_POWER_INSTANT,
    nv.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
    nv.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
    nv.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    nv.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON,
    nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
    nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
    nv.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
)


class Argument(NamedTuple):
    """One argument as the library receives it."""

    kind: str
    """handle, word (32 bits), long (64 bits), text, null or memory."""
    value: Any
    """The number, the text, or the memory's content before the call."""
    size: int = 0
    target: Any = None
    """The memory, to read it after the call."""


class Call(NamedTuple):
    """One call of a function of the library."""

    name: str
    arguments: tuple[Argument, ...]
    code: int
    after: tuple[bytes, ...]
    """Content of each memory argument after the call."""


def describe(argument: Any) -> Argument:
    """Return an argument in the form in which ctypes passes it when a function has no argtypes."""
    if argument is None:
        return Argument("null", None)
    if isinstance(argument, int):
        assert -(2**31) <= argument < 2**31, f"ctypes passes a plain {argument} as 32 bits"
        return Argument("word", argument)
    if isinstance(argument, bytes):
        return Argument("text", argument)
    if isinstance(argument, ctypes.c_char_p):
        return Argument("text", argument.value)
    if isinstance(argument, ctypes.c_void_p | ctypes._Pointer):
        return Argument("handle", ctypes.cast(argument, ctypes.c_void_p).value)
    if isinstance(argument, ctypes._SimpleCData):
        return Argument({4: "word", 8: "long"}[ctypes.sizeof(argument)], argument.value)
    target = getattr(argument, "_obj", argument)  # what byref refers to
    return Argument("memory", bytes(target), ctypes.sizeof(target), target)


class RecordedLibrary:
    """A library that records every call; it can lack functions."""

    def __init__(self, real: ctypes.CDLL, lacks: frozenset[str] = frozenset()) -> None:
        self.calls: list[Call] = []
        self.lacks = lacks
        self._real = real

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.lacks:
            raise AttributeError(name)
        function = getattr(self._real, name)

        def call(*arguments: Any) -> int:
            described = tuple(map(describe, arguments))
            function.restype = getattr(call, "restype", ctypes.c_int)
            code: int = function(*arguments)
            after = tuple(bytes(argument.target) for argument in described if argument.kind == "memory")
            self.calls.append(Call(name, described, code, after))
            return code

        return call


@pytest.fixture
def recorded(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedLibrary]:
    """A machine whose every figure is different, and the calls that gpulse makes there."""
    configure(fake_nvml)
    library.start()
    library.stop()
    recorder = RecordedLibrary(library._library)  # type: ignore[arg-type]
    monkeypatch.setattr(library, "_library", recorder)
    monkeypatch.setattr(library, "_TEXTS", dict(library._TEXTS))
    forget_functions()
    library.start()
    nv.nvmlInit()
    yield recorder
    nv.nvmlShutdown()
    library.stop()
    forget_functions()
    assert fake_nvml.open_gpm_samples == 0


def forget_functions() -> None:
    """Drop the probes that are shared by all GPUs, since each keeps the function that it found."""
    for probes in (
        metric_probes.second_probes,
        metric_probes.slow_probes,
        metric_probes.fact_probes,
        metric_probes.mig_fact_probes,
    ):
        probes.cache_clear()


def configure(fake: FakeNvml) -> None:
    """Make a machine with an NVLink pair, a split GPU and two without GPM, all of whose figures differ."""
    for index in range(1, 5):
        fake.add(index)
    for index in range(5):
        gpu = fake.gpu(index)
        figures = iter(range(3 + 10 * index, 1000))
        gpu.util_gpu, gpu.util_mem, gpu.util_encoder, gpu.util_decoder = (next(figures) for _ in range(4))
        gpu.memory_used = (5 << 32) + index
        for name in ("power_mw", "power_average_mw", "power_limit_mw", "power_enforced_mw"):
            setattr(gpu, name, 100_000 + next(figures))
        gpu.power_default_mw, gpu.power_min_mw, gpu.power_max_mw = 600_001, 200_002, 700_003
        gpu.energy_mj = (7 << 32) + next(figures)
        gpu.temperature, gpu.temperature_memory, gpu.margin = (next(figures) for _ in range(3))
        gpu.thresholds[:] = [91, 92, 93, 94]
        gpu.clocks[:] = [1001, 1002, 1003, 1004]
        gpu.clocks_max[:] = [2001, 2002, 2003, 2004]
        gpu.clocks_app[:] = [3001, 3002, 3003, 3004]
        gpu.reasons = (1 << 40) + 5
        gpu.pstate = 8
        gpu.fan_count = 2
        gpu.fans[:2], gpu.fan_targets[:2] = [31, 34], [41, 46]
        gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max = 3, 4, 8, 12
        gpu.pcie_tx_kib_s, gpu.pcie_rx_kib_s, gpu.pcie_replays = 501, 502, 503
        gpu.ecc, gpu.ecc_pending = 1, 0
        gpu.ecc_volatile[:], gpu.ecc_aggregate[:] = [(1 << 33) + 1, 2], [3, (1 << 34) + 4]
        gpu.retired_supported = gpu.retired_pending = 1
        gpu.retired_count[:] = [3, 5]
        gpu.remapped_corrected, gpu.remapped_uncorrected = 11, 12
        gpu.remapped_pending, gpu.remapped_failed = 0, 1
        gpu.recovery_action, gpu.compute_mode, gpu.persistence, gpu.display_active = 2, 3, 0, 1
        gpu.links[5].active = 0
        for number, link in enumerate(gpu.links[:18]):
            link.tx_kib, link.rx_kib = 1000 + number, (1 << 35) + number
        for number, field in enumerate(FIELDS):
            fake.set_field(index, field, (1 << 36) + 1000 * number)
        fake.set_field(index, nv.NVML_FI_DEV_MEMORY_TEMP, 71.5, value_type=nv.NVML_VALUE_TYPE_DOUBLE)
        for metric in range(1, 98):
            fake.set_gpm(index, metric, metric + 0.25)
        fake.add_process(index, 4001, (6 << 32) + 1, sm=21, mem=22, sampled_us=2_000_000)
        fake.add_process(index, 4002, None, kind=GRAPHICS, sm=23, sampled_us=2_000_001)
    fake.gpu(0).links[0].remote = 2
    fake.gpu(0).links[1].remote = 2
    fake.gpu(0).host_bridge = fake.gpu(1).host_bridge = 1
    fake.gpu(3).gpm_supported = fake.gpu(4).gpm_supported = 0
    for instance in (7, 9):
        mig = fake.add_mig(2, gpu_instance=instance, compute_instance=instance + 1)
        mig.memory_used = (instance << 32) + 3
        mig.gpm[:98] = [metric + instance / 64 for metric in range(98)]
        for pid, kind in ((4100 + instance, COMPUTE), (4200 + instance, GRAPHICS)):
            fake.add_process(
                2, pid, instance << 33, kind=kind, gpu_instance=instance, compute_instance=instance + 1
            )
    fake.set_field(3, nv.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 9, value_type=nv.NVML_VALUE_TYPE_UNSIGNED_INT)


def open_all() -> list[OpenDevice]:
    """Open every GPU and MIG instance."""
    return [target for index in range(gpu_inventory.count_gpus()) for target in open_gpu(index, CADENCE)]


def read_everything() -> dict[str, Any]:
    """Read all that gpulse reads from the driver; return values, processes and details by device."""
    found: dict[str, Any] = {}
    targets = open_all()
    peers = [PeerGpu(target.device, target.handle) for target in targets if target.device.parent_uuid is None]
    for target in targets:
        target.read("gpm", 0.0)  # the first sample of those that have none yet
    time.sleep(GPM_PAUSE_SECONDS)
    for target in targets:
        values: Values = {}
        for group in GROUPS:
            result = target.read(group, 2.5)
            assert result is not None
            values.update(result.values)
            if result.processes is not None:
                found[f"{target.device.uuid} processes"] = result.processes
            found[f"{target.device.uuid} {group} details"] = result.details
        if target.gpm is not None:
            result = target.read("gpm", 0.0)
            assert result is not None
            values.update(result.values)
        if target.device.parent_uuid is None:
            found[f"{target.device.uuid} topology"] = target.read_topology(0.0, peers, PciDevices()).details
        found[target.device.uuid] = values
        found[f"{target.device.uuid} device"] = target.device
        target.close()
    return found


@cache
def called_names() -> frozenset[str]:
    """Return every name of a function of NVML in the source, which never composes one."""
    sources = [path.read_text() for path in Path(gpulse.__file__).parent.rglob("*.py")]
    assert not any('f"nvml' in source for source in sources)
    return frozenset(
        {"nvmlErrorString"}.union(*(re.findall(r'"(nvml[A-Z]\w+)"', source) for source in sources))
    )


def is_text(arguments: tuple[Argument, ...]) -> bool:
    """Return whether the arguments end in a text buffer and its size."""
    return len(arguments) > 1 and arguments[-2].kind == "memory" and arguments[-2].size == arguments[-1].value


def arguments_of_binding(call: Call) -> tuple[Any, ...]:
    """Return the arguments with which pynvml makes the same call."""
    arguments = call.arguments
    memory = [argument for argument in arguments if argument.kind == "memory"]
    if call.name == "nvmlGpmMetricsGet":
        size = ctypes.sizeof(nv.c_nvmlGpmMetricsGet_t)  # its table grows with the versions of NVML
        return (nv.c_nvmlGpmMetricsGet_t.from_buffer_copy(memory[0].value.ljust(size, b"\0")),)
    if call.name == "nvmlDeviceGetFieldValues":
        starts = range(0, memory[0].size, ctypes.sizeof(nv.c_nvmlFieldValue_t))
        fields = [struct.unpack_from("<II", memory[0].value, start) for start in starts]
        return ctypes.c_void_p(arguments[0].value), fields
    given = [
        ctypes.c_void_p(argument.value) if argument.kind == "handle" else argument.value
        for argument in arguments
        if argument.kind not in ("memory", "null")
    ]
    if call.name == "nvmlDeviceGetMemoryInfo_v2":
        given.append(nv.nvmlMemory_v2)
    if call.name == "nvmlDeviceGetTemperatureV":
        given.append(nv.NVML_TEMPERATURE_GPU)
    return tuple(given[:-1] if is_text(arguments) else given)


def form(call: Call) -> tuple[Any, ...]:
    """Return what must be the same in two calls of a function, however large their buffers are."""
    parts: list[Any] = []
    for place, (kind, value, size, _) in enumerate(call.arguments):
        if kind != "memory":
            parts.append((kind, value))
        elif is_text(call.arguments):
            return tuple(parts)
        elif "RunningProcesses" in call.name and place == 2:
            (room,) = struct.unpack("<I", call.arguments[1].value)
            parts.append((kind, size / room))
        elif call.name == "nvmlGpmMetricsGet":  # the driver uses as much of the table as there are metrics
            (metrics,) = struct.unpack_from("<I", value, nv.c_nvmlGpmMetricsGet_t.numMetrics.offset)
            used = nv.c_nvmlGpmMetricsGet_t.metrics.offset + metrics * ctypes.sizeof(nv.c_nvmlGpmMetric_t)
            assert used <= size
            parts.append((kind, value[:used]))
        else:  # a number and an event may still have the value of an earlier call
            is_input = size > 4 and call.name != "nvmlEventSetWait_v2"
            parts.append((kind, size, value if is_input else None))
    return tuple(parts)


def outcome(call: Call) -> tuple[int, tuple[bytes, ...]]:
    """Return the code and the memory that a call filled, without the driver's times."""
    if call.code not in (nv.NVML_SUCCESS, nv.NVML_ERROR_INSUFFICIENT_SIZE):
        return call.code, ()
    if call.name != "nvmlDeviceGetFieldValues":
        return call.code, call.after
    size = ctypes.sizeof(nv.c_nvmlFieldValue_t)
    (after,) = call.after
    entries = [after[start : start + size] for start in range(0, len(after), size)]
    return call.code, tuple(entry[:8] + entry[24:] for entry in entries)


def cannot_repeat(name: str) -> bool:
    """Return whether a function changes something, or needs memory that is freed by then."""
    return name in ("nvmlInitWithFlags", "nvmlShutdown") or (
        ("Event" in name or "Gpm" in name)
        and name not in ("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetCurrentClocksEventReasons")
    )


class RepeatedLibrary(RecordedLibrary):
    """A library for pynvml: calls that cannot be repeated are recorded, but not made."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not cannot_repeat(name):
            return super().__getattr__(name)

        def call(*arguments: Any) -> int:
            self.calls.append(Call(name, tuple(map(describe, arguments)), 0, ()))
            return 0

        return call


def make_all_calls(fake: FakeNvml, recorded: RecordedLibrary) -> None:
    """Have gpulse call every function that it knows."""
    driver = NvmlDriver(watch_xids=True)
    assert driver.start(calm=True) == 0
    for target in open_all():
        assert driver.watch(target.device.uuid, target.handle) in (0, nv.NVML_ERROR_NOT_SUPPORTED)
        target.close()
    fake.push_xid(1, 79)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not driver.xids():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [(79, fake.gpu(1).uuid.decode())] == [
        (seen.last_code, uuid) for uuid, seen in driver.xids().items()
    ]
    driver.stop(calm=True)
    read_everything()
    contexts = ContextReader(find_gpus(PATIENCE_SECONDS), PATIENT)
    contexts.ask([0])
    contexts.wait(PATIENCE_SECONDS)
    contexts.close()
    recorded.lacks = frozenset(RENAMED)
    forget_functions()
    for target in open_all():
        target.read("tick", 0.0)
        target.close()
    assert library.text_of(nv.NVML_ERROR_IN_USE) == "GPU is currently in use"


def test_calls_are_those_of_the_binding(
    fake_nvml: FakeNvml, recorded: RecordedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each function that gpulse calls exists, and pynvml calls it with arguments of the same form and value."""
    make_all_calls(fake_nvml, recorded)
    names = {call.name for call in recorded.calls}
    assert called_names() == names
    assert not names - ANSWERS.keys()
    handles = [part.value for call in recorded.calls for part in call.arguments if part.kind == "handle"]
    assert min(handle for handle in handles if handle) > 2**32

    repeated = RepeatedLibrary(recorded._real)
    monkeypatch.setattr(nv, "nvmlLib", repeated)
    monkeypatch.setattr(nv, "_nvmlGetFunctionPointer_cache", {})
    for ours in recorded.calls:
        repeated.calls.clear()
        with suppress(nv.NVMLError):
            getattr(nv, ANSWERS[ours.name])(*arguments_of_binding(ours))
        same = [theirs for theirs in repeated.calls if form(theirs) == form(ours)]
        assert same, (ours, repeated.calls)
        if is_text(ours.arguments):
            assert ours.arguments[-1].value >= same[0].arguments[-1].value
            assert ours.after[0].partition(b"\0")[0] == same[0].after[0].partition(b"\0")[0]
        elif not cannot_repeat(ours.name) and "RunningProcesses" not in ours.name:
            assert outcome(ours) in map(outcome, same)


def fan_mean(read: Callable[[Any, int], int]) -> Callable[[Any], float]:
    """Return a function that reads the mean of a GPU's fans."""
    return lambda gpu: (
        sum(read(gpu, fan) for fan in range(nv.nvmlDeviceGetNumFans(gpu)))
        / (100 * nv.nvmlDeviceGetNumFans(gpu))
    )


def field_of(name: str, factor: float = 1, scope: int = 0) -> Callable[[Any], float]:
    """Return a function that reads a field of nvmlDeviceGetFieldValues by the name of its constant."""

    def read(gpu: Any) -> float:
        (answer,) = nv.nvmlDeviceGetFieldValues(gpu, [(getattr(nv, f"NVML_FI_DEV_{name}"), scope)])
        assert answer.nvmlReturn == nv.NVML_SUCCESS
        is_double = answer.valueType == nv.NVML_VALUE_TYPE_DOUBLE
        is_short = answer.valueType == nv.NVML_VALUE_TYPE_UNSIGNED_INT
        value = answer.value
        return factor * float(value.dVal if is_double else value.uiVal if is_short else value.ullVal)

    return read


def ecc_errors(kind: str, period: str) -> Callable[[Any], int]:
    """Return a function that counts ECC errors."""
    kinds = getattr(nv, f"NVML_MEMORY_ERROR_TYPE_{kind}"), getattr(nv, f"NVML_{period}_ECC")
    return lambda gpu: nv.nvmlDeviceGetTotalEccErrors(gpu, *kinds)


def threshold(name: str) -> Callable[[Any], int]:
    """Return a function that reads a limit of the temperature."""
    return lambda gpu: nv.nvmlDeviceGetTemperatureThreshold(
        gpu, getattr(nv, f"NVML_TEMPERATURE_THRESHOLD_{name}")
    )


def clock(read: Callable[[Any, int], int], name: str) -> Callable[[Any], int]:
    """Return a function that reads a clock in hertz."""
    return lambda gpu: read(gpu, getattr(nv, f"NVML_CLOCK_{name}")) * 1_000_000


def link_states(gpu: Any) -> list[int]:
    """Return the states of a GPU's NVLinks."""
    states: list[int] = []
    with suppress(nv.NVMLError):
        while len(states) < nv.NVML_NVLINK_MAX_LINKS:
            states.append(nv.nvmlDeviceGetNvLinkState(gpu, len(states)))
    return states


def memory(gpu: Any) -> Any:
    """Return the memory with the driver's part."""
    return nv.nvmlDeviceGetMemoryInfo(gpu, version=nv.nvmlMemory_v2)


ALL_LINKS = 0xFFFFFFFF
LINK_ERRORS = [
    field_of(f"NVLINK_{kind}_ERROR_COUNT_TOTAL") for kind in ("CRC_FLIT", "CRC_DATA", "REPLAY", "RECOVERY")
]
MEMORY_FIGURES: dict[str, Callable[[Any], float]] = {
    "memory_used_bytes": lambda gpu: memory(gpu).used,
    "memory_free_bytes": lambda gpu: memory(gpu).free,
    "memory_reserved_bytes": lambda gpu: memory(gpu).reserved,
    "memory_total_bytes": lambda gpu: nv.nvmlDeviceGetMemoryInfo(gpu).total,
}
UTILIZATION: dict[str, Callable[[Any], float]] = {
    "gpu_utilization_ratio": lambda gpu: nv.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "memory_utilization_ratio": lambda gpu: nv.nvmlDeviceGetUtilizationRates(gpu).memory / 100,
    "encoder_utilization_ratio": lambda gpu: nv.nvmlDeviceGetEncoderUtilization(gpu)[0] / 100,
    "decoder_utilization_ratio": lambda gpu: nv.nvmlDeviceGetDecoderUtilization(gpu)[0] / 100,
}
"""Unknown on a GPU that is split."""
FIGURES: dict[str, Callable[[Any], float]] = MEMORY_FIGURES | {
    "power_watts": lambda gpu: nv.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "temperature_celsius": lambda gpu: nv.nvmlDeviceGetTemperature(gpu, nv.NVML_TEMPERATURE_GPU),
    "sm_clock_hertz": clock(nv.nvmlDeviceGetClockInfo, "SM"),
    "memory_clock_hertz": clock(nv.nvmlDeviceGetClockInfo, "MEM"),
    "video_clock_hertz": clock(nv.nvmlDeviceGetClockInfo, "VIDEO"),
    "clocks_event_reasons": nv.nvmlDeviceGetCurrentClocksEventReasons,
    "performance_state": nv.nvmlDeviceGetPerformanceState,
    "power_limit_watts": lambda gpu: nv.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
    "pcie_link_generation": nv.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_link_width": nv.nvmlDeviceGetCurrPcieLinkWidth,
    "fan_speed_ratio": fan_mean(nv.nvmlDeviceGetFanSpeed_v2),
    "fan_target_ratio": fan_mean(nv.nvmlDeviceGetTargetFanSpeed),
    "memory_temperature_celsius": field_of("MEMORY_TEMP"),
    "power_instant_watts": field_of("POWER_INSTANT", 1e-3),
    "power_cap_seconds_total": field_of("PERF_POLICY_POWER", 1e-9),
    "sync_boost_seconds_total": field_of("PERF_POLICY_SYNC_BOOST", 1e-9),
    "thermal_slowdown_seconds_total": field_of("CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN", 1e-9),
    "nvlink_tx_bytes_total": field_of("NVLINK_THROUGHPUT_DATA_TX", 1024, ALL_LINKS),
    "nvlink_rx_bytes_total": field_of("NVLINK_THROUGHPUT_DATA_RX", 1024, ALL_LINKS),
    "energy_joules_total": lambda gpu: nv.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    "temperature_margin_celsius": nv.nvmlDeviceGetMarginTemperature,
    "pcie_replays_total": nv.nvmlDeviceGetPcieReplayCounter,
    "sm_clock_application_hertz": clock(nv.nvmlDeviceGetApplicationsClock, "SM"),
    "ecc_enabled": lambda gpu: nv.nvmlDeviceGetEccMode(gpu)[0],
    "ecc_corrected_errors_total": ecc_errors("CORRECTED", "VOLATILE"),
    "ecc_uncorrected_errors_total": ecc_errors("UNCORRECTED", "VOLATILE"),
    "ecc_corrected_errors_lifetime_total": ecc_errors("CORRECTED", "AGGREGATE"),
    "ecc_uncorrected_errors_lifetime_total": ecc_errors("UNCORRECTED", "AGGREGATE"),
    "retired_pages_corrected": lambda gpu: len(
        nv.nvmlDeviceGetRetiredPages(gpu, nv.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS)
    ),
    "retired_pages_uncorrected": lambda gpu: len(
        nv.nvmlDeviceGetRetiredPages(gpu, nv.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    ),
    "retired_pages_pending": nv.nvmlDeviceGetRetiredPagesPendingStatus,
    "remapped_rows_corrected": lambda gpu: nv.nvmlDeviceGetRemappedRows(gpu)[0],
    "remapped_rows_uncorrected": lambda gpu: nv.nvmlDeviceGetRemappedRows(gpu)[1],
    "remapped_rows_pending": lambda gpu: nv.nvmlDeviceGetRemappedRows(gpu)[2],
    "remapped_rows_failed": lambda gpu: nv.nvmlDeviceGetRemappedRows(gpu)[3],
    "nvlink_link_bytes_per_second": field_of("NVLINK_SPEED_MBPS_COMMON", 1e6),
    "recovery_action": field_of("GET_GPU_RECOVERY_ACTION"),
    "hardware_thermal_slowdown_seconds_total": field_of("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", 1e-9),
    "power_brake_seconds_total": field_of("CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN", 1e-9),
    "nvlink_links": lambda gpu: len(link_states(gpu)),
    "nvlink_links_active": lambda gpu: link_states(gpu).count(nv.NVML_FEATURE_ENABLED),
    "nvlink_errors_total": lambda gpu: sum(read(gpu) for read in LINK_ERRORS),
    "mig_enabled": lambda gpu: int(nv.nvmlDeviceGetMigMode(gpu)[0] == nv.NVML_DEVICE_MIG_ENABLE),
    "compute_mode": nv.nvmlDeviceGetComputeMode,
    "persistence_enabled": nv.nvmlDeviceGetPersistenceMode,
    "display_active": nv.nvmlDeviceGetDisplayActive,
    "power_default_limit_watts": lambda gpu: nv.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000,
    "power_min_limit_watts": lambda gpu: nv.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[0] / 1000,
    "power_max_limit_watts": lambda gpu: nv.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1] / 1000,
    "temperature_shutdown_celsius": threshold("SHUTDOWN"),
    "temperature_slowdown_celsius": threshold("SLOWDOWN"),
    "temperature_max_celsius": threshold("GPU_MAX"),
    "memory_temperature_max_celsius": threshold("MEM_MAX"),
    "sm_clock_max_hertz": clock(nv.nvmlDeviceGetMaxClockInfo, "SM"),
    "memory_clock_max_hertz": clock(nv.nvmlDeviceGetMaxClockInfo, "MEM"),
    "video_clock_max_hertz": clock(nv.nvmlDeviceGetMaxClockInfo, "VIDEO"),
    "pcie_link_generation_max": nv.nvmlDeviceGetMaxPcieLinkGeneration,
    "pcie_link_width_max": nv.nvmlDeviceGetMaxPcieLinkWidth,
}
PCIE_RATES: dict[str, Callable[[Any], float]] = {
    "pcie_tx_bytes_per_second": lambda gpu: (
        nv.nvmlDeviceGetPcieThroughput(gpu, nv.NVML_PCIE_UTIL_TX_BYTES) * 1024
    ),
    "pcie_rx_bytes_per_second": lambda gpu: (
        nv.nvmlDeviceGetPcieThroughput(gpu, nv.NVML_PCIE_UTIL_RX_BYTES) * 1024
    ),
}
PCIE_COUNTERS = {
    "pcie_tx_bytes_total": field_of("PCIE_COUNT_TX_BYTES"),
    "pcie_rx_bytes_total": field_of("PCIE_COUNT_RX_BYTES"),
}
GPM_NAMES = {
    "graphics_active_ratio": "GRAPHICS_UTIL",
    "sm_active_ratio": "SM_UTIL",
    "sm_occupancy_ratio": "SM_OCCUPANCY",
    "integer_active_ratio": "INTEGER_UTIL",
    "tensor_active_ratio": "ANY_TENSOR_UTIL",
    "tensor_fp64_active_ratio": "DFMA_TENSOR_UTIL",
    "tensor_half_active_ratio": "HMMA_TENSOR_UTIL",
    "tensor_integer_active_ratio": "IMMA_TENSOR_UTIL",
    "dram_active_ratio": "DRAM_BW_UTIL",
    "fp64_active_ratio": "FP64_UTIL",
    "fp32_active_ratio": "FP32_UTIL",
    "fp16_active_ratio": "FP16_UTIL",
    "pcie_tx_bytes_per_second": "PCIE_TX_PER_SEC",
    "pcie_rx_bytes_per_second": "PCIE_RX_PER_SEC",
    "nvlink_rx_bytes_per_second": "NVLINK_TOTAL_RX_PER_SEC",
    "nvlink_tx_bytes_per_second": "NVLINK_TOTAL_TX_PER_SEC",
}


def read_gpm(gpu: Any, instance: int | None = None) -> dict[str, float]:
    """Return the GPM metrics of a GPU, or of a GPU instance, as pynvml reads them."""
    samples = [nv.nvmlGpmSampleAlloc() for _ in range(2)]
    for pause, sample in zip((0.0, GPM_PAUSE_SECONDS), samples, strict=True):
        time.sleep(pause)
        if instance is None:
            nv.nvmlGpmSampleGet(gpu, sample)
        else:
            nv.nvmlGpmMigSampleGet(gpu, instance, sample)
    request = nv.c_nvmlGpmMetricsGet_t()
    request.version = nv.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(GPM_NAMES)
    request.sample1, request.sample2 = samples
    for place, name in enumerate(GPM_NAMES.values()):
        request.metrics[place].metricId = getattr(nv, f"NVML_GPM_METRIC_{name}")
    nv.nvmlGpmMetricsGet(request)
    for sample in samples:
        nv.nvmlGpmSampleFree(sample)
    return {
        name: request.metrics[place].value * ((1 << 20) if "per_second" in name else 0.01)
        for place, name in enumerate(GPM_NAMES)
    }


def read_processes(gpu: Any) -> dict[int, tuple[str, int | None, float | None]]:
    """Return kind, memory and share of each process of a GPU as pynvml reads them."""
    shares: dict[int, float] = {}
    with suppress(nv.NVMLError):
        samples = nv.nvmlDeviceGetProcessUtilization(gpu, 1_500_000)
        shares = {sample.pid: sample.smUtil / 100 for sample in samples}
    return {
        process.pid: (kind, process.usedGpuMemory, shares.get(process.pid))
        for kind, processes in (
            ("compute", nv.nvmlDeviceGetComputeRunningProcesses(gpu)),
            ("graphics", nv.nvmlDeviceGetGraphicsRunningProcesses(gpu)),
        )
        for process in processes
    }


def test_a_full_read_equals_that_of_the_binding(recorded: RecordedLibrary) -> None:
    """Every metric, process, detail and connection has the value that pynvml reads by the constant's name."""
    assert recorded.lacks == frozenset()
    found = read_everything()
    gpus = [nv.nvmlDeviceGetHandleByIndex(index) for index in range(nv.nvmlDeviceGetCount())]
    for index, gpu in enumerate(gpus):
        uuid = nv.nvmlDeviceGetUUID(gpu)
        figures = FIGURES | (UTILIZATION if index != 2 else {})
        figures |= PCIE_RATES if index == 3 else PCIE_COUNTERS if index == 4 else {}
        expected = {name: read(gpu) for name, read in figures.items()}
        expected |= read_gpm(gpu) if index < 2 else {}
        assert found[uuid] == pytest.approx(expected, rel=1e-12, abs=1e-5), index
        compare_identity(found, uuid, gpu, gpus)
    split = gpus[2]
    for slot in range(2):
        instance = nv.nvmlDeviceGetMigDeviceHandleByIndex(split, slot)
        uuid = nv.nvmlDeviceGetUUID(instance)
        number = nv.nvmlDeviceGetGpuInstanceId(instance)
        expected = {name: read(instance) for name, read in MEMORY_FIGURES.items()}
        assert found[uuid] == pytest.approx(expected | read_gpm(split, number), rel=1e-12, abs=1e-5)
        device = found[f"{uuid} device"]
        assert (device.gpu_instance, device.compute_instance, device.name, device.parent_uuid) == (
            number,
            nv.nvmlDeviceGetComputeInstanceId(instance),
            nv.nvmlDeviceGetName(instance),
            nv.nvmlDeviceGetUUID(split),
        )
        compare_processes(found, uuid, instance)


def compare_processes(found: dict[str, Any], uuid: str, gpu: Any) -> None:
    """Compare the processes of a GPU or MIG instance."""
    processes = found[f"{uuid} processes"]
    expected = read_processes(gpu)
    assert expected
    assert {one.pid: (one.kind, one.gpu_memory_bytes, one.sm_ratio) for one in processes} == expected


def compare_identity(found: dict[str, Any], uuid: str, gpu: Any, gpus: list[Any]) -> None:
    """Compare who a GPU is, its processes and how it is connected."""
    compare_processes(found, uuid, gpu)
    device, details = found[f"{uuid} device"], found[f"{uuid} facts details"]
    assert (device.name, device.bus_id, device.minor_number, device.has_gpm) == (
        nv.nvmlDeviceGetName(gpu),
        nv.nvmlDeviceGetPciInfo(gpu).busId.lower(),
        nv.nvmlDeviceGetMinorNumber(gpu),
        bool(nv.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice),
    )
    nodes = nv.nvmlDeviceGetMemoryAffinity(gpu, 4, nv.NVML_AFFINITY_SCOPE_NODE)
    cpus = [
        64 * place + bit
        for place, word in enumerate(nv.nvmlDeviceGetCpuAffinity(gpu, 32))
        for bit in range(64)
        if word >> bit & 1
    ]
    assert details == {
        "serial": nv.nvmlDeviceGetSerial(gpu),
        "vbios": nv.nvmlDeviceGetVbiosVersion(gpu),
        "board_part_number": nv.nvmlDeviceGetBoardPartNumber(gpu),
        "architecture": "Hopper",
        "compute_capability": "{}.{}".format(*nv.nvmlDeviceGetCudaComputeCapability(gpu)),
        "numa_node": int(math.log2(nodes[0])),
        "cpu_affinity": f"{cpus[0]}-{cpus[-1]}",
    }
    topology = found[f"{uuid} topology"]
    links = [link for link, state in enumerate(link_states(gpu)) if state == nv.NVML_FEATURE_ENABLED]
    kinds = [nv.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) for link in links]
    remotes = [
        nv.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId
        for link, kind in zip(links, kinds, strict=True)
        if kind == nv.NVML_NVLINK_DEVICE_TYPE_GPU
    ]
    others = [other for other in gpus if nv.nvmlDeviceGetUUID(other) != uuid]
    assert topology["switch_links"] == kinds.count(nv.NVML_NVLINK_DEVICE_TYPE_SWITCH)
    assert [(path.to, path.pcie, path.nvlinks) for path in topology["paths"]] == [
        (
            nv.nvmlDeviceGetUUID(other),
            LEVELS[nv.nvmlDeviceGetTopologyCommonAncestor(gpu, other)],
            remotes.count(nv.nvmlDeviceGetPciInfo(other).busId),
        )
        for other in others
    ]


LEVELS = {
    nv.NVML_TOPOLOGY_INTERNAL: "PIX",
    nv.NVML_TOPOLOGY_SINGLE: "PIX",
    nv.NVML_TOPOLOGY_MULTIPLE: "PXB",
    nv.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    nv.NVML_TOPOLOGY_NODE: "NODE",
    nv.NVML_TOPOLOGY_SYSTEM: "SYS",
}


def filled(structure: Any, **fields: Any) -> Any:
    """Return a structure of pynvml whose other bytes are all 0xA5, so that a shifted field is noticed."""
    made = structure()
    ctypes.memset(ctypes.byref(made), 0xA5, ctypes.sizeof(made))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


WORD, LONG, SIGNED = 0xFEDCBA98, 0xFEDCBA9876543210, -7


def test_packed_structures() -> None:
    """Each structure that gpulse takes apart by itself has the size and the offsets of pynvml's."""
    event = filled(nv.c_nvmlEventData_t, eventType=LONG - 1, eventData=LONG - 2)
    event.device = ctypes.cast(LONG, nv.c_nvmlDevice_t)
    assert nvml_lifecycle._EVENT.unpack(bytes(event)) == (LONG, LONG - 1, LONG - 2)
    for structure in (nv.c_nvmlProcessInfo_v2_t, nv.c_nvmlProcessInfo_v3_t):
        process = filled(structure, pid=WORD, usedGpuMemory=LONG)
        assert gpu_processes._PROCESS.unpack(bytes(process)) == (WORD, LONG)
    assert nv.NVML_VALUE_NOT_AVAILABLE_ulonglong.value == gpu_processes._UNKNOWN_BYTES
    sample = filled(nv.c_nvmlProcessUtilizationSample_t, pid=WORD, smUtil=WORD - 1)
    assert gpu_processes._SHARE.unpack(bytes(sample)) == (WORD, WORD - 1)
    metric = filled(nv.c_nvmlGpmMetric_t, metricId=WORD, nvmlReturn=WORD - 1, value=-1.25)
    assert gpm._METRIC.unpack(bytes(metric)) == (WORD, WORD - 1, -1.25)
    request = filled(nv.c_nvmlGpmMetricsGet_t, version=WORD, numMetrics=WORD - 1)
    request.sample1, request.sample2 = (
        ctypes.cast(value, nv.c_nvmlGpmSample_t) for value in (LONG, LONG - 1)
    )
    assert gpm._REQUEST.unpack_from(bytes(request)) == (WORD, WORD - 1, LONG, LONG - 1)
    assert nv.c_nvmlGpmMetricsGet_t.metrics.offset == gpm._REQUEST.size
    field = filled(nv.c_nvmlFieldValue_t, fieldId=WORD, scopeId=WORD - 1, valueType=2, nvmlReturn=WORD - 2)
    field.value.ullVal = LONG
    expected = (WORD, WORD - 1, 2, WORD - 2, struct.pack("<Q", LONG))
    assert metric_probes._FIELD.unpack(bytes(field)) == expected


def test_values_of_fields() -> None:
    """A field's value is read from the union's member that pynvml has for its type."""
    members = {
        nv.NVML_VALUE_TYPE_DOUBLE: ("dVal", -2.5),
        nv.NVML_VALUE_TYPE_UNSIGNED_INT: ("uiVal", WORD),
        nv.NVML_VALUE_TYPE_UNSIGNED_LONG: ("ulVal", LONG),
        nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: ("ullVal", LONG),
        nv.NVML_VALUE_TYPE_SIGNED_LONG_LONG: ("sllVal", SIGNED),
        nv.NVML_VALUE_TYPE_SIGNED_INT: ("siVal", SIGNED),
        nv.NVML_VALUE_TYPE_UNSIGNED_SHORT: ("usVal", 65_000),
    }
    assert len(members) == len(metric_probes._FIELD_VALUES) <= nv.NVML_VALUE_TYPE_COUNT
    for kind, (member, value) in members.items():
        answer = filled(nv.c_nvmlValue_t, **{member: value})
        assert metric_probes._FIELD_VALUES[kind].unpack(bytes(answer)) == (value,)
    assert nv.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG == metric_probes.UNSIGNED_LONG_LONG


class StructureLibrary:
    """A library whose functions fill in one structure of pynvml, and check its size and version."""

    def __init__(self, answer: Any, version: int | None = None) -> None:
        self._answer = answer
        self._version = version

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            assert ctypes.sizeof(self._answer) == ctypes.sizeof(arguments[-1])
            if self._version is not None:
                assert type(self._answer).from_buffer_copy(arguments[-1]).version == self._version
            ctypes.memmove(arguments[-1], ctypes.byref(self._answer), ctypes.sizeof(self._answer))
            return 0

        return call


def test_filled_structures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each structure that the driver fills in is read at pynvml's offsets, and has the version of pynvml's."""

    def answer(read: Callable[[Any], Any], structure: Any, version: int | None = None) -> Any:
        monkeypatch.setattr(library, "_library", StructureLibrary(structure, version))
        return read(ctypes.c_void_p(LONG))

    modern = filled(nv.c_nvmlMemory_v2_t, total=1, reserved=LONG, free=LONG - 1, used=LONG - 2)
    expected = (LONG - 2, LONG - 1, LONG)
    assert answer(metric_probes._read_memory, modern, nv.nvmlMemory_v2) == expected
    old = filled(nv.c_nvmlMemory_t, total=LONG, free=LONG - 1, used=LONG - 2)
    assert answer(metric_probes._read_memory_v1, old) == (LONG, LONG - 1, LONG - 2)
    rates = filled(nv.c_nvmlUtilization_t, gpu=25, memory=50)
    assert answer(metric_probes._read_utilization, rates) == (0.25, 0.5)
    temperature = filled(nv.c_nvmlTemperature_v1_t, temperature=SIGNED)
    assert answer(metric_probes._read_temperature_v1, temperature, nv.nvmlTemperature_v1) == SIGNED
    margin = filled(nv.c_nvmlMarginTemperature_v1_t, marginTemperature=21)
    assert answer(metric_probes._read_margin, margin, nv.nvmlMarginTemperature_v1) == 21
    for supported in (0, 1):
        support = filled(nv.c_nvmlGpmSupport_t, isSupportedDevice=supported)
        assert answer(gpm.is_supported, support, nv.NVML_GPM_SUPPORT_VERSION) is bool(supported)
    for bus_id in (b"00000000:AB:00.0", b"F" * (nv.NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE - 1)):
        place = filled(nv.nvmlPciInfo_t, busId=bus_id)
        read = partial(gpu_topology.read_bus_id, "nvmlDeviceGetPciInfo_v3")
        assert answer(read, place) == bus_id.decode().lower()


def test_constants() -> None:
    """Each number that stands for something has the value of pynvml's constant."""
    special = {
        "SUCCESS": "NVML_SUCCESS",
        "VERSION_MISMATCH": "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
        "MAX_LINKS": "NVML_NVLINK_MAX_LINKS",
    }
    numbers = {
        name: value for name, value in vars(library).items() if name.isupper() and isinstance(value, int)
    }
    del numbers["_MAX_TEXT_BYTES"]
    assert len(numbers) > 15
    assert numbers == {name: getattr(nv, special.get(name, f"NVML_ERROR_{name}")) for name in numbers}
    assert (
        nv.NVMLError._errcode_to_string.items()
        >= {
            code: text for code, text in library._TEXTS.items() if code in nv.NVMLError._errcode_to_string
        }.items()
    )
    sizes = (value for name, value in vars(nv).items() if re.fullmatch(TEXT_SIZES, name))
    assert library._MAX_TEXT_BYTES == max(sizes)
    assert gpu_topology._LEVELS == LEVELS
    assert gpu_topology._LINKED_TO_GPU == nv.NVML_NVLINK_DEVICE_TYPE_GPU
    assert gpu_topology._LINKED_TO_SWITCH == nv.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert gpm._VERSION == nv.NVML_GPM_METRICS_GET_VERSION == nv.NVML_GPM_SUPPORT_VERSION
    assert len(gpm._GPM_FIELDS) <= gpm._MAX_METRICS <= nv.NVML_GPM_METRIC_MAX
    metrics = {name: getattr(nv, f"NVML_GPM_METRIC_{of}") for name, of in GPM_NAMES.items()}
    assert {name: metric for name, metric, _ in gpm._GPM_FIELDS} == metrics
    assert nvml_lifecycle._XID_ERROR == nv.nvmlEventTypeXidCriticalError
    assert open_device._WHOLE_NODE == nv.NVML_AFFINITY_SCOPE_NODE
    prefix = "NVML_DEVICE_ARCH_"
    named = {
        value: name.removeprefix(prefix).capitalize()
        for name, value in vars(nv).items()
        if name.startswith(prefix)
    }
    accelerators = {nv.NVML_DEVICE_ARCH_DLA, nv.NVML_DEVICE_ARCH_DLA2}
    assert open_device._ARCHITECTURES.items() <= named.items()
    assert {value for value in named if value <= nv.NVML_DEVICE_ARCH_RUBIN} - accelerators <= set(
        open_device._ARCHITECTURES
    )


TEXT_SIZES = (
    "NVML_(DEVICE_(NAME|UUID)_V2|DEVICE_(SERIAL|PART_NUMBER|VBIOS_VERSION)|SYSTEM_DRIVER_VERSION)_BUFFER_SIZE"
)


def test_functions_that_an_old_library_lacks(recorded: RecordedLibrary) -> None:
    """Without a function its metrics fail as "function not found"; all others are read as before."""
    whole, refused = read_gpu()
    always = {"nvmlInitWithFlags", "nvmlShutdown", "nvmlGpmSampleFree"}
    for name in sorted(called_names() - always):
        recorded.lacks = frozenset({name})
        forget_functions()
        read_inventory()
        if name == "nvmlDeviceGetHandleByIndex_v2":
            with pytest.raises(library.NVMLError, match="Function Not Found"):
                open_gpu(0, CADENCE)
            continue
        values, failures = read_gpu()
        if name == "nvmlDeviceGetMemoryInfo_v2":  # the older one counts the driver's own memory as used
            assert values.pop("memory_used_bytes") == whole["memory_used_bytes"] + values_of_memory()
            assert failures.pop("memory_reserved_bytes") == nv.NVML_ERROR_NOT_SUPPORTED
        elif name in RENAMED:
            assert values == whole
        lost = dict.fromkeys(whole.keys() - values.keys(), nv.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name != "nvmlDeviceGetMemoryInfo_v2":
            assert failures.items() - refused.items() - PROCESS_FAILURES == lost.items(), name
        found = {metric: value for metric, value in values.items() if metric not in PCIE_COUNTERS}
        assert found.items() <= whole.items()


def test_an_old_library_without_process_lists(recorded: RecordedLibrary) -> None:
    """The list of compute processes is then unknown; that of graphics processes is only left out."""
    for kind, expected in (("Compute", None), ("Graphics", [4001])):
        recorded.lacks = frozenset({f"nvmlDeviceGet{kind}RunningProcesses_v3"})
        (target,) = open_gpu(0, CADENCE)
        result = target.read("second", 2.5)
        target.close()
        assert result is not None
        assert expected == (result.processes and [process.pid for process in result.processes])
        unknown = result.failures.get("gpu_memory_bytes")
        assert unknown == (nv.NVML_ERROR_FUNCTION_NOT_FOUND if expected is None else None)


def test_an_old_library_without_events_and_texts(recorded: RecordedLibrary) -> None:
    """The driver is started without a watcher, and an error that only the library can describe keeps its number."""
    recorded.lacks = frozenset({"nvmlEventSetCreate", "nvmlErrorString"})
    driver = NvmlDriver(watch_xids=True)
    assert driver.start(calm=True) == 0
    assert driver.xid_values("GPU-1", driver.xids()) == {}
    driver.stop(calm=True)
    assert str(library.NVMLError(nv.NVML_ERROR_IN_USE)) == "NVML Error with code 19"


def read_inventory() -> None:
    """Read what is not a metric; a function that is missing must not be an error of another type."""
    library.read_versions()
    gpu_inventory.list_gpus()
    with suppress(CollectionError):
        find_gpus(PATIENCE_SECONDS)
    with suppress(library.NVMLError):
        targets = open_gpu(0, CADENCE)
        peers = [PeerGpu(target.device, target.handle) for target in targets]
        for target in targets:
            target.read_topology(0.0, peers, PciDevices())
            target.close()


def values_of_memory() -> int:
    """Return the driver's own memory on the first GPU."""
    return int(memory(nv.nvmlDeviceGetHandleByIndex(0)).reserved)


PROCESS_FAILURES = {(name, nv.NVML_ERROR_FUNCTION_NOT_FOUND) for name in ("gpu_memory_bytes", "sm_ratio")}


def read_gpu() -> tuple[Values, dict[str, int]]:
    """Return the values and failures of the first GPU, except GPM."""
    values: Values = {}
    failures: dict[str, int] = {}
    for target in open_gpu(0, CADENCE):
        for group in GROUPS:
            result = target.read(group, 2.5)
            assert result is not None
            values.update(result.values)
            failures.update(result.failures)
        target.close()
    return values, failures
