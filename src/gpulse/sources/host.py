"""CPUs, memory and pressure of the machine, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from gpulse.model.device import Node
from gpulse.model.frame import HostReading
from gpulse.model.metric_catalog import Values
from gpulse.model.source_health import Health
from gpulse.sources.procfs import (
    KernelFile,
    Roots,
    find_counts,
    list_names,
    parse_loadavg,
    parse_pressure,
    parse_stat,
    text,
    try_read,
    unreadable_health,
)

_CPU_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_CPU_METRICS = tuple(f"cpu_{state}_seconds_total" for state in _CPU_STATES)
_LOAD_METRICS = ("load1", "load5", "load15")
MEMORY_METRICS = {
    "MemTotal": "memory_total_bytes",
    "MemAvailable": "memory_available_bytes",
    "MemFree": "memory_free_bytes",
    "Cached": "memory_cached_bytes",
    "Shmem": "memory_shared_bytes",
    "Dirty": "memory_dirty_bytes",
    "Writeback": "memory_writeback_bytes",
    "SwapTotal": "swap_total_bytes",
    "SwapFree": "swap_free_bytes",
}
"""Our metrics by the names in /proc/meminfo."""
_MEMORY_LINES = {f"{word}:".encode(): name for word, name in MEMORY_METRICS.items()}
_PAGING_LINES = {
    b"pswpin ": "swap_in_pages_total",
    b"pswpout ": "swap_out_pages_total",
    b"pgmajfault ": "major_faults_total",
    b"pgsteal_direct ": "direct_reclaim_pages_total",
    b"workingset_refault ": "refaults_total",
    b"workingset_refault_file ": "refaults_total",
    b"oom_kill ": "oom_kills_total",
}
"""Our metrics by what the lines in /proc/vmstat start with."""
_PRESSURE_METRICS = {
    # The kernel does not define "full" CPU pressure for a whole machine and writes zero.
    "cpu": {"some": "pressure_cpu_some_seconds_total"},
    "io": {"some": "pressure_io_some_seconds_total", "full": "pressure_io_full_seconds_total"},
    "memory": {"some": "pressure_memory_some_seconds_total", "full": "pressure_memory_full_seconds_total"},
}
_NUMA_NODE = re.compile(r"node(\d{1,4})", re.ASCII)


class HostReader:
    """Reads the host's CPUs, memory and pressure; a file that cannot be read loses only its own values."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._cores: tuple[tuple[int, ...], ...] = ()
        self._files: list[tuple[KernelFile, Callable[[bytes], Values], tuple[str, ...]]] = [
            (KernelFile(f"{roots.proc}/{name}"), parse, metrics)
            for name, parse, metrics in (
                ("stat", self._cpus, (*_CPU_METRICS, "cpus")),
                ("loadavg", _parse_load, _LOAD_METRICS),
                ("meminfo", _parse_memory, tuple(MEMORY_METRICS.values())),
                ("vmstat", _parse_paging, tuple(dict.fromkeys(_PAGING_LINES.values()))),
            )
        ]
        self._pressure_files = [
            (KernelFile(f"{roots.proc}/pressure/{resource}"), names)
            for resource, names in _PRESSURE_METRICS.items()
        ]

    def read(self, now: float) -> tuple[HostReading | None, list[Health]]:
        """Return a reading, None when nothing could be read; `now` is in epoch seconds."""
        values: Values = {}
        health: list[Health] = []
        self._cores = ()
        for file, parse, metrics in self._files:
            try:
                values.update(parse(file.read()))
            except OSError as error:
                health.append(unreadable_health("host", file.path, error, now, metrics))
        self._pressure(values, health, now)
        return (HostReading(values=values, cores=self._cores) if values else None), health

    def close(self) -> None:
        """Close the files."""
        for file in (*(each[0] for each in self._files), *(each[0] for each in self._pressure_files)):
            file.close()

    def _cpus(self, data: bytes) -> Values:
        stat = parse_stat(data)
        self._cores = stat.cores
        values: Values = {}
        for name, ticks in zip(_CPU_METRICS, stat.total or (), strict=False):
            values[name] = ticks / self._ticks_per_second
        if stat.cores:
            values["cpus"] = len(stat.cores)
        counts = {
            "context_switches_total": stat.context_switches,
            "processes_running": stat.processes_running,
            "processes_blocked": stat.processes_blocked,
        }
        values.update({name: count for name, count in counts.items() if count is not None})
        return values

    def _pressure(self, values: Values, health: list[Health], now: float) -> None:
        missing: list[str] = []
        for file, names in self._pressure_files:
            try:
                waited = parse_pressure(file.read_record())
            except OSError:  # booted with psi=0, the kernel may show the files but refuse to read them
                waited = {}
            for share, name in names.items():
                if share in waited:
                    values[name] = waited[share] / 1_000_000
                else:
                    missing.append(name)
        if missing:
            health.append(
                Health(
                    source="host",
                    code="not_supported",
                    detail="the kernel does not report pressure stall information",
                    since=now,
                    subject="pressure",
                    metrics=tuple(missing),
                    hint="boot the kernel with psi=1 to see how long tasks wait for CPUs, disks and memory",
                )
            )


def read_node(roots: Roots = Roots()) -> Node:  # noqa: B008  frozen
    """Return the machine's name, kernel and CPUs; the GPU driver's versions are added by the caller."""
    return Node(
        name=_read_line(f"{roots.proc}/sys/kernel/hostname") or os.uname().nodename,
        kernel=_read_line(f"{roots.proc}/sys/kernel/osrelease"),
        cpu_model=_find_cpu_model(try_read(f"{roots.proc}/cpuinfo") or b""),
        ticks_per_second=os.sysconf("SC_CLK_TCK"),
        numa_cpus=_read_numa_cpus(f"{roots.sys}/devices/system/node"),
    )


def _read_numa_cpus(folder: str) -> tuple[str, ...]:
    found = {
        int(match[1]): _read_line(f"{folder}/{name}/cpulist") or ""
        for name in list_names(folder)
        if (match := _NUMA_NODE.fullmatch(name))
    }
    # Node numbers may have gaps; the position in the tuple is the number.
    return (
        tuple(found.get(node, "") for node in range(max(found, default=-1) + 1))
        if any(found.values())
        else ()
    )


def _read_line(path: str) -> str | None:
    return text(try_read(path) or b"").strip() or None


def _find_cpu_model(cpuinfo: bytes) -> str | None:
    for line in cpuinfo.split(b"\n"):
        name, _, model = line.partition(b":")
        if name.strip() == b"model name":
            return " ".join(text(model).split()) or None
    return None


def _parse_load(data: bytes) -> Values:
    return dict(zip(_LOAD_METRICS, parse_loadavg(data) or (), strict=False))


def _parse_memory(data: bytes) -> Values:
    return {name: 1024 * count for name, count in find_counts(data, _MEMORY_LINES).items()}


def _parse_paging(data: bytes) -> Values:
    return dict(find_counts(data, _PAGING_LINES))
