"""Everything there is to say about each finding, from the rules themselves: for `gpulse explain` and the documents."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpulse.diagnosis.rule import Rule
from gpulse.diagnosis.rulebook import RULES
from gpulse.diagnosis.seconds import SIGNALS
from gpulse.diagnosis.signals import Unit, written
from gpulse.diagnosis.thresholds import DEFAULTS, Thresholds
from gpulse.model.finding import Advice, Family

FAMILIES: dict[Family, str] = {
    "input": "Input: the GPU waits for data",
    "host": "Host: the GPU waits for the program",
    "copy": "Copies between host and GPU",
    "stall": "Pauses, hangs and a pace that broke",
    "gpu_use": "Use of the GPU itself",
    "contention": "Several programs or GPUs",
    "memory": "Memory",
    "clocks": "Clocks, heat and power",
    "link": "PCIe and NUMA",
    "network": "Network",
    "fault": "Faults",
}
"""What each family is called, in the order in which people meet them."""

# fmt: off
_LIMITS: dict[str, tuple[str, Unit]] = {
    "lost": ("lost time, from", "share"),
    "explained": ("of the lost time explained, from", "share"),
    "throttled_periods": ("periods out of CPU time, from", "share"),
    "memory_pressure": ("all tasks short of memory, from", "share"),
    "swapped_pages_per_second": ("pages a second from swap, from", "number"),
    "runnable_per_core": ("threads wanting each CPU, from", "number"),
    "run_wait": ("main thread kept from running, from", "share"),
    "cpu_pressure": ("tasks short of a CPU, from", "share"),
    "blocked": ("processes waiting for disks, from", "number"),
    "io_pressure": ("tasks waiting for I/O, from", "share"),
    "job_read_bytes_per_second": ("read by the job, from", "bytes/second"),
    "copy_bytes_per_second": ("PCIe traffic, from", "bytes/second"),
    "copy_sm": ("SMs in use meanwhile, below", "share"),
    "link_share": ("the link is full, from", "share"),
    "active_worker": ("a worker that counts uses a CPU, from", "share"),
    "saturated_worker": ("a worker that never rests uses a CPU, from", "share"),
    "cores_used": ("CPUs of the job used up, from", "share"),
    "pegged": ("CPUs used by the program, from", "number"),
    "asleep": ("CPUs used by the program, below", "number"),
    "launch_fill": ("SMs filled by its kernels, below", "share"),
    "launch_bytes_per_second": ("PCIe traffic of the launches, from", "bytes/second"),
    "underused_bytes_per_second": ("PCIe traffic to the GPU, below", "bytes/second"),
    "busy": ("kernels running, from", "share"),
    "thin_sm": ("SMs in use, below", "share"),
    "thin_dram": ("GPU memory interface in use, below", "share"),
    "thin_tensor": ("tensor cores in use, below", "share"),
    "tensor_unused": ("tensor cores in use, below", "share"),
    "fp32_busy": ("fp32 pipes in use, from", "share"),
    "sm_busy": ("SMs in use, from", "share"),
    "compute_tensor": ("tensor cores in use, from", "share"),
    "compute_sm": ("or SMs in use, from", "share"),
    "dram_bound": ("GPU memory interface in use, from", "share"),
    "still": ("kernels running, below", "share"),
    "held_bytes": ("GPU memory in use, from", "bytes"),
    "contention": ("share of the GPU of each process, from", "share"),
    "stall_seconds": ("length of a pause, from", "seconds"),
    "checkpoint_seconds": ("length of a pause, from", "seconds"),
    "stall_share": ("time spent in pauses, from", "share"),
    "checkpoint_bytes": ("written in a pause, from", "bytes"),
    "regression": ("fall of the pace, from", "share"),
    "regression_seconds": ("steady before and after, for at least", "seconds"),
    "leak_bytes": ("rise, from", "bytes"),
    "oom_used": ("GPU memory in use, from", "share"),
    "oom_seconds": ("time left, below", "seconds"),
    "slowed_share": ("clocks held down, from", "share"),
    "power_capped_share": ("power cap in force, from", "share"),
    "clock_below_hertz": ("clock asked for below the highest, from", "hertz"),
    "fan_stopped": ("fan speed, below", "share"),
    "fan_wanted": ("fan speed asked for, from", "share"),
    "fan_hot_celsius": ("temperature, from", "celsius"),
    "link_busy_bytes_per_second": ("PCIe traffic that counts as load, from", "bytes/second"),
    "numa_remote": ("CPU time on a far NUMA node, from", "share"),
    "network_busy": ("network link in use, from", "share"),
    "network_errors": ("network packets in error, from", "share"),
    "straggler": ("power draw, of its peers', below", "share"),
    "hang_seconds": ("lasting for at least", "seconds"),
    "hang_sm": ("SMs in use, below", "share"),
    "blocked_seconds": ("time stuck in the kernel, from", "seconds"),
    "startup_seconds": ("a start-up is slow, from", "seconds"),
}
"""Thresholds in words, with the unit of their numbers."""

LIMITS: dict[str, tuple[str, ...]] = {
    "process_blocked": ("blocked_seconds",),
    "thermal_throttle": ("slowed_share",),
    "power_brake": ("slowed_share",),
    "hw_slowdown": ("slowed_share",),
    "fan_failure": ("fan_stopped", "fan_wanted", "fan_hot_celsius"),
    "power_capped": ("power_capped_share",),
    "clocks_locked": ("clock_below_hertz",),
    "pcie_link_degraded": ("link_busy_bytes_per_second",),
    "numa_mismatch": ("numa_remote",),
    "gpu_oom_imminent": ("oom_used", "oom_seconds"),
    "gpu_memory_leak": ("leak_bytes",),
    "host_memory_leak": ("leak_bytes",),
    "swap_thrash": ("swapped_pages_per_second", "memory_pressure"),
    "gpu_memory_orphaned": ("held_bytes",),
    "collective_hang": ("hang_seconds", "hang_sm"),
    "checkpoint_stall": ("checkpoint_seconds", "stall_share", "checkpoint_bytes"),
    "periodic_stall": ("stall_seconds", "stall_share"),
    "throughput_regression": ("regression", "regression_seconds"),
    "gpu_contention": ("contention",),
    "straggler": ("straggler",),
    "pcie_copy_bound": ("lost", "explained", "copy_bytes_per_second", "copy_sm", "link_share"),
    "input_io_bound": ("lost", "explained", "blocked", "job_read_bytes_per_second", "io_pressure"),
    "input_too_few_workers": ("lost", "explained", "active_worker", "saturated_worker"),
    "input_cpu_bound": ("lost", "explained", "cores_used"),
    "cpu_oversubscribed": ("lost", "explained", "runnable_per_core", "run_wait", "cpu_pressure"),
    "cgroup_cpu_throttled": ("lost", "explained", "throttled_periods"),
    "launch_bound": ("lost", "explained", "pegged", "launch_fill", "launch_bytes_per_second"),
    "host_single_thread": ("lost", "explained", "pegged"),
    "host_wait_unattributed": ("lost",),
    "gpu_underused": ("lost", "asleep", "underused_bytes_per_second"),
    "gpu_idle_allocated": ("held_bytes", "still"),
    "thin_kernels": ("busy", "thin_sm", "thin_dram", "thin_tensor"),
    "tensor_cores_unused": ("busy", "sm_busy", "tensor_unused", "fp32_busy"),
    "slow_start": ("startup_seconds",),
    "compute_bound": ("busy", "compute_tensor", "compute_sm"),
    "memory_bandwidth_bound": ("busy", "dram_bound"),
    "network_saturated": ("network_busy", "network_errors"),
}
"""The thresholds on which each finding turns, by their names in `Thresholds`; facts of the driver have none."""
# fmt: on


class Entry(NamedTuple):
    """One finding explained."""

    id: str
    family: Family
    title: str
    means: str
    recognised: str
    severity: str
    informational: bool
    """Not yet seen on a real run, so it is told as a note and not as a finding."""
    needs: tuple[str, ...]
    """Signals without which it is not judged, in words."""
    limits: tuple[str, ...]
    """The thresholds, in words."""
    advice: tuple[Advice, ...]
    sources: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON types."""
        return {
            **self._asdict(),
            "needs": list(self.needs),
            "limits": list(self.limits),
            "advice": [advice._asdict() for advice in self.advice],
            "sources": list(self.sources),
        }


def entry(rule: Rule, thresholds: Thresholds = DEFAULTS) -> Entry:
    """What there is to say about a rule."""
    return Entry(
        id=rule.id,
        family=rule.family,
        title=rule.title,
        means=rule.means,
        recognised=rule.recognised,
        severity=rule.severity,
        informational=not rule.shown,
        needs=tuple(SIGNALS[signal] for signal in rule.needs),
        limits=tuple(_limit(name, thresholds) for name in LIMITS.get(rule.id, ())),
        advice=rule.advice,
        sources=rule.sources,
    )


def entries(rules: Sequence[Rule] = RULES) -> list[Entry]:
    """All findings, family by family."""
    return [entry(rule) for family in FAMILIES for rule in rules if rule.family == family]


def similar(name: str) -> list[str]:
    """The findings that somebody may have meant by a name that is none."""
    wanted = name.lower().replace("-", "_")
    ids = [rule.id for rule in RULES]
    within = [known for known in ids if wanted and wanted in known]
    close = difflib.get_close_matches(wanted, ids, n=3, cutoff=0.5)
    return list(dict.fromkeys([*within, *close]))[:4]


def _limit(name: str, thresholds: Thresholds) -> str:
    words, unit = _LIMITS[name]
    return f"{words} {written(getattr(thresholds, name), unit)}"
