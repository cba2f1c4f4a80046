"""What the signals of evidence are called by people, and how their numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from gpulse.model import units
from gpulse.model.clocks import REASONS
from gpulse.model.finding import Evidence
from gpulse.model.metric import CATALOGUE

Unit = Literal[
    "share",
    "bytes",
    "bytes/second",
    "cpus",
    "number",
    "count",
    "seconds",
    "celsius",
    "watts",
    "hertz",
    "bits",
    "time",
]


class Signal(NamedTuple):
    """One quantity that rules speak of."""

    words: str
    unit: Unit


class Told(NamedTuple):
    """One piece of evidence as people read it."""

    words: str
    value: str
    against: str
    """What it is compared with; empty for a number that is only worth knowing."""


# fmt: off
DERIVED: dict[str, Signal] = {
    "lost_ratio": Signal("lost time", "share"),
    "lost_time_throttled_ratio": Signal("of it while the CPU limit held", "share"),
    "lost_time_swapping_ratio": Signal("of it while the machine swapped", "share"),
    "lost_time_crowded_ratio": Signal("of it while waiting for a CPU", "share"),
    "lost_time_storage_ratio": Signal("of it while waiting for storage", "share"),
    "lost_time_copies_ratio": Signal("of it while copying", "share"),
    "lost_time_workers_ratio": Signal("of it while workers computed", "share"),
    "lost_time_main_ratio": Signal("of it while the program computed", "share"),
    "lost_time_none_ratio": Signal("of it while nothing was busy", "share"),
    "duty": Signal("kernels running", "share"),
    "fill_ratio": Signal("SMs filled by its kernels", "share"),
    "power_ratio": Signal("power, of its limit", "share"),
    "memory_used_ratio": Signal("GPU memory, of all", "share"),
    "pcie_bytes_per_second": Signal("PCIe traffic", "bytes/second"),
    "pcie_link_ratio": Signal("PCIe speed, of the link's", "share"),
    "feeding_cores": Signal("CPUs used by its two busiest threads", "cpus"),
    "trainer_cores": Signal("CPUs used by the program", "cpus"),
    "job_cores": Signal("CPUs used by the whole job", "cpus"),
    "cpus": Signal("CPUs that the job may use", "cpus"),
    "cpus_left": Signal("CPUs left to the job", "cpus"),
    "workers": Signal("data-loading workers", "number"),
    "saturated_workers": Signal("workers that never rest", "number"),
    "processes_waiting_for_disks": Signal("processes waiting for disks", "number"),
    "job_read_bytes_per_second": Signal("read by the job", "bytes/second"),
    "job_resident_bytes": Signal("host memory of the job", "bytes"),
    "runnable_per_cpu": Signal("threads wanting each CPU", "number"),
    "remote_cpu_ratio": Signal("CPU time on a far NUMA node", "share"),
    "network_busy_ratio": Signal("network link in use", "share"),
    "network_error_ratio": Signal("network packets in error", "share"),
    "processes_on_gpu": Signal("processes on the GPU", "count"),
    "computing_processes": Signal("processes computing on it", "count"),
    "stalls": Signal("pauses", "count"),
    "stall_seconds": Signal("length of a pause", "seconds"),
    "stall_ratio": Signal("time spent in pauses", "share"),
    "stall_spacing_seconds": Signal("from one pause to the next", "seconds"),
    "stall_written_bytes": Signal("written in a pause", "bytes"),
    "seconds": Signal("lasting for", "seconds"),
    "seconds_left": Signal("time left", "seconds"),
    "startup_seconds": Signal("time since it started", "seconds"),
    "last_heard_timestamp_seconds": Signal("last heard", "time"),
    "expected_since_timestamp_seconds": Signal("expected since", "time"),
    "blocked_seconds": Signal("time stuck in the kernel", "seconds"),
    **{
        f"clocks_event_{reason.bit:#x}_ratio": Signal(f"{reason.name} in force", "share")
        for reason in REASONS
    },
}
"""Quantities that only the diagnosis computes."""

CALLED: dict[str, str] = {
    "clocks_event_reasons": "clocks held down by",
    "cpu_throttled_ratio": "periods out of CPU time",
    "cpu_utilization_ratio": "CPUs in use",
    "dram_active_ratio": "GPU memory interface in use",
    "ecc_uncorrected_errors_total": "uncorrectable memory errors",
    "fan_speed_ratio": "fan speed",
    "fan_target_ratio": "fan speed asked for",
    "fp16_active_ratio": "fp16 pipes in use",
    "fp32_active_ratio": "fp32 pipes in use",
    "fp64_active_ratio": "fp64 pipes in use",
    "gpu_utilization_ratio": "utilization",
    "hardware_thermal_slowdown_seconds_total": "slowed by the hardware for heat",
    "memory_available_bytes": "host memory available",
    "memory_temperature_celsius": "memory temperature",
    "memory_used_bytes": "GPU memory in use",
    "nfs_reads_in_flight": "NFS reads outstanding",
    "oom_kills_total": "processes killed by the kernel",
    "pcie_link_generation": "PCIe generation",
    "pcie_link_width": "PCIe lanes",
    "pcie_replays_total": "PCIe packets sent again",
    "pcie_rx_bytes_per_second": "PCIe traffic to the GPU",
    "pcie_tx_bytes_per_second": "PCIe traffic from the GPU",
    "power_brake_seconds_total": "slowed by the power brake",
    "power_limit_watts": "power limit",
    "power_watts": "power draw",
    "pressure_cpu_some_ratio": "tasks short of a CPU (PSI)",
    "pressure_io_some_ratio": "tasks waiting for I/O (PSI)",
    "pressure_memory_full_ratio": "all tasks short of memory (PSI)",
    "recovery_action": "recovery asked for by the driver",
    "remapped_rows_failed": "memory rows not remapped",
    "remapped_rows_pending": "memory rows to be remapped",
    "retired_pages_pending": "memory pages to be retired",
    "run_wait_ratio": "main thread kept from running",
    "sm_active_ratio": "SMs in use",
    "sm_clock_application_hertz": "clock asked for",
    "sm_clock_hertz": "SM clock",
    "sm_ratio": "share of the GPU",
    "swap_in_pages_per_second": "pages a second from swap",
    "temperature_celsius": "temperature",
    "tensor_active_ratio": "tensor cores in use",
    "thermal_slowdown_seconds_total": "slowed by the driver for heat",
    "xid_errors_total": "Xid errors",
}
"""Short words for rows of the metric catalogue, which has the unit and the whole sentence."""
# fmt: on

_UNITS: dict[str, Unit] = {
    "bytes": "bytes",
    "bytes/second": "bytes/second",
    "seconds": "seconds",
    "celsius": "celsius",
    "watts": "watts",
    "hertz": "hertz",
    "bitmask": "bits",
}

_WRITTEN: Mapping[Unit, Callable[[float], str]] = {
    "share": units.share,
    "bytes": units.long_size,
    "cpus": lambda value: units.number(value, 1),
    "bytes/second": units.rate,
    "number": units.quantity,
    "count": units.count,
    "seconds": units.seconds,
    "celsius": units.celsius,
    "watts": units.watts,
    "hertz": units.megahertz,
    "bits": lambda value: f"{int(value):#x}",
    "time": units.local_time,
}

STATISTICS = {
    "first": ", at first",
    "last": ", at last",
    "rise": ", rise",
    "rise a minute": ", a minute",
    "fall": ", fall",
    "slope": ", growth",
    "max": ", at most",
    "max under load": " under load",
    "median before": ", before",
    "median after": ", after",
    "mean since it started": " so far",
    "mean between pauses": " between pauses",
    "median of the job's GPUs": " of its peers",
}
"""What a statistic adds to the words where it is more than the plain mean, share or count."""
_OF_A_PID = "mean of pid "
COMPARED = {">=": "from", ">": "above", "<": "below", "<=": "up to", "==": "is"}


def signal(name: str) -> Signal | None:
    """The words and the unit of a signal; None for one that nobody has named."""
    if name in DERIVED:
        return DERIVED[name]
    metric = next((metrics[name] for metrics in CATALOGUE.values() if name in metrics), None)
    if metric is None or name not in CALLED:
        return None
    return Signal(CALLED[name], "share" if metric.kind == "ratio" else _UNITS.get(metric.unit, "number"))


def told(evidence: Evidence) -> Told:
    """One piece of evidence in words; a signal without words keeps its name."""
    known = signal(evidence.signal) or Signal(evidence.signal.replace("_", " "), "number")
    unit = _unit(known.unit, evidence.statistic)
    if evidence.comparison == "has bit":
        return Told(known.words, _reason(int(evidence.threshold)), "")
    return Told(
        known.words + _statistic(evidence, known.unit),
        _WRITTEN[unit](evidence.value),
        _against(evidence, unit),
    )


def told_measure(evidence: Evidence) -> str:
    """`processes waiting for disks 0, below 0.35`: one piece of evidence in one line."""
    said = told(evidence)
    return f"{said.words} {said.value}{f', {said.against}' if said.against else ''}"


def written(value: float, unit: Unit) -> str:
    """A number in people's units."""
    return _WRITTEN[unit](value)


def _unit(unit: Unit, statistic: str) -> Unit:
    """The unit of what a statistic makes of a quantity: growth of bytes is a rate."""
    if statistic == "slope" and unit == "bytes":
        return "bytes/second"
    if statistic == "rate" and unit == "seconds":
        return "share"  # seconds a second
    return unit


def _statistic(evidence: Evidence, unit: Unit) -> str:
    statistic = evidence.statistic
    if statistic.startswith(_OF_A_PID):
        return f" of pid {statistic.removeprefix(_OF_A_PID)}"
    if statistic == "last" and (unit != "bytes" or evidence.threshold != 0):
        return ""  # the value that counts, not the end of a rise
    return STATISTICS.get(statistic, "")


def _against(evidence: Evidence, unit: Unit) -> str:
    if evidence.comparison in (">=", ">") and evidence.threshold == 0:
        return ""  # nothing is less: the number is there to be known
    compared = COMPARED.get(evidence.comparison, evidence.comparison)
    return f"{compared} {_WRITTEN[unit](evidence.threshold)}"


def _reason(bit: int) -> str:
    return next((reason.name for reason in REASONS if reason.bit == bit), f"{bit:#x}")
