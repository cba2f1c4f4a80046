"""CPUs, memory and pressure of the machine, from /proc."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from gpulse.model.device import Node
from gpulse.model.frame import HostReading
from gpulse.model.health import Health
from gpulse.model.metric import Values
from gpulse.sources.procfs import (
    Roots,
    list_names,
    parse_loadavg,
    parse_meminfo,
    parse_pressure,
    parse_stat,
    parse_vmstat,
    read_bytes,
    text,
    try_read,
    unreadable,
)

_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_CPU = tuple(f"cpu_{state}_seconds_total" for state in _STATES)
_LOAD = ("load1", "load5", "load15")
_MEMORY = {
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
_PAGING = {
    "pswpin": "swap_in_pages_total",
    "pswpout": "swap_out_pages_total",
    "pgmajfault": "major_faults_total",
    "pgsteal_direct": "direct_reclaim_pages_total",
    "workingset_refault": "refaults_total",
    "workingset_refault_file": "refaults_total",
    "oom_kill": "oom_kills_total",
}
_PRESSURE = {
    # The kernel defines no `full` of the CPU for a whole machine and writes a zero there.
    "cpu": {"some": "pressure_cpu_some_seconds_total"},
    "io": {"some": "pressure_io_some_seconds_total", "full": "pressure_io_full_seconds_total"},
    "memory": {"some": "pressure_memory_some_seconds_total", "full": "pressure_memory_full_seconds_total"},
}
_NUMA_NODE = re.compile(r"node(\d{1,4})", re.ASCII)


class HostReader:
    """Reads the machine as a whole; a file that cannot be read costs only its own values."""

    def __init__(self, roots: Roots = Roots()) -> None:  # noqa: B008  frozen
        self._proc = roots.proc
        self._ticks_per_second = os.sysconf("SC_CLK_TCK")
        self._cores: tuple[tuple[int, ...], ...] = ()
        self._files: dict[str, tuple[Callable[[bytes], Values], tuple[str, ...]]] = {
            "stat": (self._cpus, (*_CPU, "cpus")),
            "loadavg": (_load, _LOAD),
            "meminfo": (_memory, tuple(_MEMORY.values())),
            "vmstat": (_paging, tuple(dict.fromkeys(_PAGING.values()))),
        }

    def read(self, now: float) -> tuple[HostReading | None, list[Health]]:
        """One reading, None when nothing at all could be read; `now` is in epoch seconds."""
        values: Values = {}
        health: list[Health] = []
        self._cores = ()
        for name, (parse, metrics) in self._files.items():
            path = f"{self._proc}/{name}"
            try:
                values.update(parse(read_bytes(path)))
            except OSError as error:
                health.append(unreadable("host", path, error, now, metrics))
        self._pressure(values, health, now)
        return (HostReading(values=values, cores=self._cores) if values else None), health

    def _cpus(self, data: bytes) -> Values:
        stat = parse_stat(data)
        self._cores = stat.cores
        values: Values = {}
        for name, ticks in zip(_CPU, stat.total or (), strict=False):
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
        for resource, names in _PRESSURE.items():
            # Booted with psi=0, the kernel may show the files and refuse to read them.
            waited = parse_pressure(try_read(f"{self._proc}/pressure/{resource}") or b"")
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
                    hint="boot with psi=1 to see how long tasks wait for CPUs, disks and memory",
                )
            )


def read_node(roots: Roots = Roots()) -> Node:  # noqa: B008  frozen
    """The machine's name, kernel and CPUs; the GPU driver's part is filled in elsewhere."""
    return Node(
        name=_line(f"{roots.proc}/sys/kernel/hostname") or os.uname().nodename,
        kernel=_line(f"{roots.proc}/sys/kernel/osrelease"),
        cpu_model=_cpu_model(try_read(f"{roots.proc}/cpuinfo") or b""),
        ticks_per_second=os.sysconf("SC_CLK_TCK"),
        numa_cpus=_numa_cpus(f"{roots.sys}/devices/system/node"),
    )


def _numa_cpus(folder: str) -> tuple[str, ...]:
    found = {
        int(match[1]): _line(f"{folder}/{name}/cpulist") or ""
        for name in list_names(folder)
        if (match := _NUMA_NODE.fullmatch(name))
    }
    # Numbers may have gaps, and the place in the tuple is the number.
    return (
        tuple(found.get(node, "") for node in range(max(found, default=-1) + 1))
        if any(found.values())
        else ()
    )


def _line(path: str) -> str | None:
    return text(try_read(path) or b"").strip() or None


def _cpu_model(cpuinfo: bytes) -> str | None:
    for line in cpuinfo.split(b"\n"):
        name, _, model = line.partition(b":")
        if name.strip() == b"model name":
            return " ".join(text(model).split()) or None
    return None


def _load(data: bytes) -> Values:
    return dict(zip(_LOAD, parse_loadavg(data) or (), strict=False))


def _memory(data: bytes) -> Values:
    return _renamed(parse_meminfo(data), _MEMORY)


def _paging(data: bytes) -> Values:
    return _renamed(parse_vmstat(data), _PAGING)


def _renamed(counts: dict[str, int], names: dict[str, str]) -> Values:
    return {name: counts[word] for word, name in names.items() if word in counts}
