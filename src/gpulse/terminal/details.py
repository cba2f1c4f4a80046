"""What is known of each GPU beyond its row in the table: `gpulse -v`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpulse.model.frame import GpuReading
from gpulse.model.metric import Value
from gpulse.model.snapshot import Snapshot
from gpulse.terminal import format as f
from gpulse.terminal import harvested
from gpulse.terminal.table import Paint, flowed

Say = Callable[[Value], str]


def _kilowatt_hours(joules: Value) -> str:
    return f"{joules / 3.6e6:.2f}kWh"


def _times(count: Value) -> str:
    return "once" if count == 1 else f"{f.count(count)} times"


def _on(value: Value) -> str:
    return "on" if value else "off"


_SUBJECTS: dict[str, tuple[tuple[str, str, Say], ...]] = {
    "clocks": (
        ("SM", "sm_clock_hertz", f.megahertz),
        ("at most", "sm_clock_max_hertz", f.megahertz),
        ("memory", "memory_clock_hertz", f.megahertz),
        ("P-state", "performance_state", f.number),
    ),
    "heat": (
        ("memory", "memory_temperature_celsius", f.celsius),
        ("slowdown at", "temperature_slowdown_celsius", f.celsius),
        ("fan", "fan_speed_ratio", f.ratio),
    ),
    "power": (
        ("limit", "power_limit_watts", f.watts),
        ("default", "power_default_limit_watts", f.watts),
        ("energy so far", "energy_joules_total", _kilowatt_hours),
    ),
    "activity": (
        ("occupancy", "sm_occupancy_ratio", f.ratio),
        ("DRAM", "dram_active_ratio", f.ratio),
        ("FP16", "fp16_active_ratio", f.ratio),
        ("FP32", "fp32_active_ratio", f.ratio),
        ("FP64", "fp64_active_ratio", f.ratio),
        ("encoder", "encoder_utilization_ratio", f.ratio),
        ("decoder", "decoder_utilization_ratio", f.ratio),
    ),
    "PCIe": (
        ("gen", "pcie_link_generation", f.number),
        ("lanes", "pcie_link_width", f.number),
        ("to GPU", "pcie_rx_bytes_per_second", f.rate),
        ("from GPU", "pcie_tx_bytes_per_second", f.rate),
        ("replays", "pcie_replays_total", f.count),
    ),
    "NVLink": (
        ("up", "nvlink_links_active", f.number),
        ("to GPU", "nvlink_rx_bytes_per_second", f.rate),
        ("from GPU", "nvlink_tx_bytes_per_second", f.rate),
    ),
    "memory": (
        ("reserved", "memory_reserved_bytes", f.size),
        ("ECC uncorrected", "ecc_uncorrected_errors_total", f.count),
        ("remapped rows", "remapped_rows_uncorrected", f.count),
    ),
    "harvest": (
        ("now", "harvest_state", harvested.state),
        ("so far", "harvested_seconds_total", f.hours),
        ("given back", "harvest_preemptions_total", _times),
    ),
    "mode": (
        ("compute", "compute_mode", f.number),
        ("persistence", "persistence_enabled", _on),
    ),
}
_INDENT = " " * 12


def detail_lines(snapshot: Snapshot, width: int, paint: Paint) -> Iterator[str]:
    """A few lines a GPU, one a subject; readings it does not have are left out."""
    for gpu in snapshot.frame.gpus:
        yield ""
        for line in flowed(_facts(gpu), width, "  ", "  "):
            yield paint("name", line)
        for subject, readings in _SUBJECTS.items():
            words = [
                f"{label} {say(value)}"
                for label, name, say in readings
                if (value := snapshot.gpu(gpu, name)) is not None
            ]
            if words:
                first, *rest = words
                yield from flowed([f"  {subject:8}  {first}", *rest], width, ", ", _INDENT)


def _facts(gpu: GpuReading) -> list[str]:
    device = gpu.device
    facts = [
        f"GPU {device.label}",
        device.name,
        device.architecture,
        device.uuid,
        device.bus_id,
        device.vbios and f"VBIOS {device.vbios}",
        device.serial and f"serial {device.serial}",
    ]
    return [f.plain(fact) for fact in facts if fact]
