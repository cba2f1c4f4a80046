"""Describes the control block once, for ctypes here and for the C library through a generated header."""

import ctypes
import re
from ctypes import Array, Structure, c_char, c_double, c_int32, c_uint32, c_uint64
from pathlib import Path
from typing import Annotated, TypeVar, cast

MAX_GPUS = 64
MAX_PROCESSES = 128
MAX_LINKS = 36
MAX_MIG = 8
MAX_FANS = 8
MAX_PAGES = 64
MAX_RULES = 64
MAX_EVENTS = 256
MAX_OVERRIDES = 32
MAX_FIELDS = 300
MAX_GPM = 256

ANY = -1
"""Stands for every function or every GPU in a rule, and for every scope in a field override."""

FAIL, DELAY, HANG = 1, 2, 3
COMPUTE, GRAPHICS, MPS = 1, 2, 4
MAGIC = 0x4C4D564E454B4146

SOURCE = Path(__file__).with_name("fake_nvml.c")
FUNCTIONS: tuple[str, ...] = tuple(
    re.findall(r"^(?:[A-Z0-9_]+\(|nvmlReturn_t )(nvml\w+)", SOURCE.read_text(), re.MULTILINE)
)
MAX_FUNCTIONS = 256

U32 = Annotated[int, c_uint32]
I32 = Annotated[int, c_int32]
U64 = Annotated[int, c_uint64]
F64 = Annotated[float, c_double]
Text = Annotated[bytes, c_char * 96]

_S = TypeVar("_S", bound=type[Structure])


def _fields(cls: _S) -> _S:
    """Turns the annotations of a structure into its ctypes fields."""
    cls._fields_ = [(name, hint.__metadata__[0]) for name, hint in cls.__annotations__.items()]
    return cls


@_fields
class Process(Structure):
    """One process on one GPU; `kind` is a mask of COMPUTE, GRAPHICS and MPS, 0 means a free slot."""

    kind: U32
    pid: U32
    used_memory: U64
    gpu_instance: U32
    compute_instance: U32
    sm: U32
    mem: U32
    enc: U32
    dec: U32
    sampled_us: U64  # time of the utilisation sample; 0 follows the clock at the driver's own pace


@_fields
class Link(Structure):
    """One NVLink."""

    active: U32
    version: U32
    remote: U32  # 0 is an NVSwitch, else the GPU in this slot, counted from 1
    padding: U32
    tx_kib: U64
    rx_kib: U64
    errors: Annotated[Array[c_uint64], c_uint64 * 5]  # by nvmlNvLinkErrorCounter_t
    counters: Annotated[Array[c_uint64], c_uint64 * 15]  # fields 201 to 215


@_fields
class Mig(Structure):
    """One MIG device."""

    present: U32
    gpu_instance: U32
    compute_instance: U32
    gpu_slices: U32
    compute_slices: U32
    multiprocessors: U32
    memory_total: U64
    memory_reserved: U64
    memory_used: U64
    gpm: Annotated[Array[c_double], c_double * MAX_GPM]
    name: Text
    uuid: Text


@_fields
class Override(Structure):
    """Replaces the value or the return code of one field of nvmlDeviceGetFieldValues."""

    active: U32
    field: U32
    scope: I32
    value_type: U32
    code: U32
    padding: U32
    value: U64


@_fields
class Gpu(Structure):
    """One GPU; every member may change while programs run."""

    present: U32
    lost: U32
    name: Text
    uuid: Text
    bus_id: Text
    serial: Text
    vbios: Text
    part_number: Text
    minor: U32
    numa_node: I32
    pcie_switch: U32  # GPUs with the same number share a PCIe switch; 0 has none
    host_bridge: U32  # GPUs with the same number share a PCIe host bridge; 0 has its own
    pci_device_id: U32
    pci_subsystem_id: U32
    brand: U32
    architecture: U32
    capability_major: U32
    capability_minor: U32
    cores: U32
    memory_bus_width: U32
    memory_total: U64
    memory_reserved: U64
    memory_used: U64
    bar1_total: U64
    bar1_used: U64
    util_gpu: U32
    util_mem: U32
    util_encoder: U32
    util_decoder: U32
    util_jpeg: U32
    util_ofa: U32
    util_period_us: U32
    power_mw: U32
    power_average_mw: U32
    power_limit_mw: U32
    power_enforced_mw: U32
    power_default_mw: U32
    power_min_mw: U32
    power_max_mw: U32
    energy_mj: U64
    temperature: U32
    temperature_memory: U32
    margin: I32
    thresholds: Annotated[Array[c_uint32], c_uint32 * 4]  # shutdown, slowdown, memory, GPU; 0 = none
    tlimits: Annotated[Array[c_int32], c_int32 * 4]  # in the same order, fields 193 to 196
    clocks: Annotated[Array[c_uint32], c_uint32 * 4]  # graphics, SM, memory, video
    clocks_max: Annotated[Array[c_uint32], c_uint32 * 4]
    clocks_app: Annotated[Array[c_uint32], c_uint32 * 4]
    clocks_app_default: Annotated[Array[c_uint32], c_uint32 * 4]
    reasons: U64
    reasons_supported: U64
    pstate: U32
    fan_count: U32
    fans: Annotated[Array[c_uint32], c_uint32 * MAX_FANS]
    fan_targets: Annotated[Array[c_uint32], c_uint32 * MAX_FANS]
    pcie_gen: U32
    pcie_gen_max: U32
    pcie_gen_gpu_max: U32
    pcie_width: U32
    pcie_width_max: U32
    pcie_tx_kib_s: U32
    pcie_rx_kib_s: U32
    pcie_replays: U32
    pcie_tx_bytes: U64
    pcie_rx_bytes: U64
    ecc: U32
    ecc_pending: U32
    ecc_supported: U32
    ecc_volatile: Annotated[Array[c_uint64], c_uint64 * 2]  # corrected, uncorrected
    ecc_aggregate: Annotated[Array[c_uint64], c_uint64 * 2]
    retired_supported: U32
    retired_count: Annotated[Array[c_uint32], c_uint32 * 2]  # multiple single bit, double bit
    retired: Annotated[Array[c_uint64], c_uint64 * MAX_PAGES]  # addresses shared by both causes
    retired_pending: U32
    remapped_corrected: U32
    remapped_uncorrected: U32
    remapped_pending: U32
    remapped_failed: U32
    recovery_action: U32
    violation_ns: Annotated[Array[c_uint64], c_uint64 * 6]  # by nvmlPerfPolicyType_t
    event_sw_thermal_ns: U64
    event_hw_thermal_ns: U64
    event_hw_brake_ns: U64
    link_count: U32
    link_mbps: U32
    links: Annotated[Array[Link], Link * MAX_LINKS]
    compute_mode: U32
    persistence: U32
    display_mode: U32
    display_active: U32
    mig_mode: U32
    mig_pending: U32
    mig_supported: U32
    mig_max: U32
    mig: Annotated[Array[Mig], Mig * MAX_MIG]
    gpm_supported: U32
    gpm_streaming: U32
    gpm: Annotated[Array[c_double], c_double * MAX_GPM]  # value by metric id, may be NaN
    gpm_codes: Annotated[Array[c_uint32], c_uint32 * MAX_GPM]  # return code by metric id
    event_types: U64
    utilization_slots: U32  # what a size query for process utilisation reports
    processes: Annotated[Array[Process], Process * MAX_PROCESSES]
    overrides: Annotated[Array[Override], Override * MAX_OVERRIDES]


@_fields
class Rule(Structure):
    """One fault; a non-zero serial makes it active, so the serial is written last."""

    serial: U32
    kind: U32
    function: I32
    gpu: I32
    code: U32
    spin: U32
    after: U64
    times: U64
    duration_ns: U64
    seen: U64


@_fields
class Event(Structure):
    """One event of the ring that event sets read."""

    gpu: U32
    gpu_instance: U32
    compute_instance: U32
    padding: U32
    type: U64
    data: U64


@_fields
class Control(Structure):
    """The whole control block, which is the whole control file."""

    magic: U64
    size: U64
    owner_pid: U32  # hangs end when this process is gone, so no orphan waits for ever
    cuda_version: U32
    driver_version: Text
    nvml_version: Text
    init_error: U32
    driver_error: U32
    reload_error: U32
    driver_epoch: U32
    inits: U64
    shutdowns: U64
    gpm_samples: I32
    event_sets: I32
    hanging: I32
    rule_count: U32
    rules: Annotated[Array[Rule], Rule * MAX_RULES]
    event_head: U64
    events: Annotated[Array[Event], Event * MAX_EVENTS]
    latency_ns: Annotated[Array[c_uint64], c_uint64 * MAX_FUNCTIONS]
    field_latency_ns: Annotated[Array[c_uint64], c_uint64 * MAX_FIELDS]
    graphics_latency_ns: U64
    calls: Annotated[Array[Array[c_uint64]], (c_uint64 * (MAX_GPUS + 1)) * MAX_FUNCTIONS]
    gpus: Annotated[Array[Gpu], Gpu * MAX_GPUS]


_C_TYPES = {
    c_char: "char",
    c_double: "double",
    c_int32: "int32_t",
    c_uint32: "uint32_t",
    c_uint64: "uint64_t",
}
_STRUCTS = (Process, Link, Mig, Override, Gpu, Rule, Event, Control)
_CONSTANTS = (
    "MAX_GPUS MAX_PROCESSES MAX_LINKS MAX_MIG MAX_PAGES MAX_RULES MAX_EVENTS MAX_OVERRIDES "
    "MAX_FIELDS MAX_GPM ANY FAIL DELAY HANG COMPUTE GRAPHICS MPS MAGIC"
)


def _declare(name: str, ctype: type) -> str:
    """Writes one C member."""
    dimensions, element = "", ctype
    while issubclass(element, Array):
        dimensions += f"[{element._length_}]"
        element = cast("type", element._type_)
    base = _C_TYPES.get(element) or f"struct {element.__name__.lower()}"
    return f"{base} {name}{dimensions};"


def c_header() -> str:
    """The header that gives the C library the same structures, constants and function numbers."""
    lines = [f"#define {name} ({globals()[name]})" for name in _CONSTANTS.split()]
    for cls in _STRUCTS:
        members = " ".join(_declare(field[0], field[1]) for field in cls._fields_)
        lines.append(f"struct {cls.__name__.lower()} {{ {members} }};")
        size = ctypes.sizeof(cls)
        lines.append(f'_Static_assert(sizeof(struct {cls.__name__.lower()}) == {size}, "layout");')
    lines.append("enum function { " + ", ".join(f"FN_{name}" for name in FUNCTIONS) + " };")
    return "\n".join(lines) + "\n"
