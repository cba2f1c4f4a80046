"""The older trace format (gzipped JSON lines, a header, then one line a tick) as frames."""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

from gpulse.model.device import Device, Node
from gpulse.model.frame import DiskReading, Frame, GpuReading, HostReading, NetworkReading
from gpulse.model.metric import Values
from gpulse.model.process import GpuProcess, ProcessIdentity, ProcessReading, Thread

_MIB = 1024 * 1024
_LATEST_TIME = 1e11
"""Seconds; what is later was meant in another unit."""
_LEAST_PERCENT, _MOST_PERCENT = -1.0, 110.0
"""GPM is off by a little now and then; what is further off is no share."""
_STATES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_FACTS: dict[str, tuple[str, float]] = {
    "mem_total": ("memory_total_bytes", 1),
    "max_sm_mhz": ("sm_clock_max_hertz", 1_000_000),
    "max_mem_mhz": ("memory_clock_max_hertz", 1_000_000),
    "pcie_max_gen": ("pcie_link_generation_max", 1),
    "pcie_max_width": ("pcie_link_width_max", 1),
    "power_limit_mw": ("power_limit_watts", 0.001),
    "slowdown_c": ("temperature_slowdown_celsius", 1),
}
_GPU: dict[str, tuple[str, float]] = {
    "util_gpu": ("gpu_utilization_ratio", 0.01),
    "util_mem": ("memory_utilization_ratio", 0.01),
    "mem_used": ("memory_used_bytes", 1),
    "power_mw": ("power_watts", 0.001),
    "energy_mj": ("energy_joules_total", 0.001),
    "temp_c": ("temperature_celsius", 1),
    "mem_temp_c": ("memory_temperature_celsius", 1),
    "sm_mhz": ("sm_clock_hertz", 1_000_000),
    "mem_mhz": ("memory_clock_hertz", 1_000_000),
    "clocks_event_reasons": ("clocks_event_reasons", 1),
    "pstate": ("performance_state", 1),
    "pcie_gen": ("pcie_link_generation", 1),
    "pcie_width": ("pcie_link_width", 1),
    "pcie_replays": ("pcie_replays_total", 1),
}
_GPM_RATIOS = {
    "graphics_util": "graphics_active_ratio",
    "sm_util": "sm_active_ratio",
    "sm_occupancy": "sm_occupancy_ratio",
    "integer_util": "integer_active_ratio",
    "any_tensor_util": "tensor_active_ratio",
    "dfma_tensor_util": "tensor_fp64_active_ratio",
    "hmma_tensor_util": "tensor_half_active_ratio",
    "imma_tensor_util": "tensor_integer_active_ratio",
    "dram_bw_util": "dram_active_ratio",
    "fp64_util": "fp64_active_ratio",
    "fp32_util": "fp32_active_ratio",
    "fp16_util": "fp16_active_ratio",
}
_GPM_RATES = ("pcie_tx", "pcie_rx", "nvlink_rx", "nvlink_tx")
_MEMINFO = {
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
_VMSTAT = {
    "pswpin": "swap_in_pages_total",
    "pswpout": "swap_out_pages_total",
    "pgmajfault": "major_faults_total",
    "pgscan_direct": "direct_reclaim_pages_total",
}


class TraceDecoder:
    """Turns the lines of a trace into frames."""

    def __init__(self) -> None:
        self._header: dict[str, Any] = {}
        self._node = Node(name="trace")
        self._devices: dict[int, Device] = {}
        self._boot_time: float | None = None

    def feed(self, line: str) -> Frame | None:
        """Take one line; the frame it holds, or None for the header.

        Raises:
            ValueError: The line is not one of a trace.
        """
        try:
            document = json.loads(line)
            if "trace" in document:
                self._begin(document)
                return None
            return self._frame(document)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError("it is not a line of a trace") from error

    def _begin(self, header: dict[str, Any]) -> None:
        self._header = header
        self._node = Node(name="trace", driver=header.get("driver"), ticks_per_second=header["clk_tck"])
        for gpu in header["gpus"]:
            self._devices[gpu["index"]] = _device(gpu)

    def _frame(self, tick: dict[str, Any]) -> Frame:
        time = float(tick["t"])
        if not 0 <= time < _LATEST_TIME:
            raise ValueError(f"not a time: {time}")
        if self._boot_time is None:
            self._boot_time = time - self._uptime(tick["host"])
        on_gpu = {process["pid"] for gpu in tick["gpus"] for process in gpu["processes"]}
        return Frame(
            time=time,
            monotonic=time,
            node=self._node,
            gpus=tuple(
                GpuReading(
                    self._devices[gpu["index"]], _gpu(gpu), _gpu_processes(gpu), {"gpm": time, "second": time}
                )
                for gpu in tick["gpus"]
            ),
            host=self._host(tick["host"]),
            disks=tuple(self._disk(name, numbers) for name, numbers in tick["host"]["disks"].items()),
            network=tuple(_link(name, numbers) for name, numbers in tick["host"]["net"].items()),
            processes=tuple(self._process(process, process["pid"] in on_gpu) for process in tick["procs"]),
        )

    def _uptime(self, host: dict[str, Any]) -> float:
        """All CPUs' time together is the time since boot, as often as there are CPUs."""
        return float(sum(host["cpu_ticks"]["cpu"]) / self._header["cpus"] / self._node.ticks_per_second)

    def _host(self, raw: dict[str, Any]) -> HostReading:
        hertz = self._node.ticks_per_second
        ticks = dict(raw["cpu_ticks"])
        values: Values = {
            f"cpu_{state}_seconds_total": count / hertz
            for state, count in zip(_STATES, ticks.pop("cpu"), strict=False)
        }
        values["cpus"] = self._header["cpus"]
        values.update(zip(("load1", "load5", "load15"), raw["loadavg"], strict=False))
        values["processes_running"] = raw["procs_running"]
        values["processes_blocked"] = raw["procs_blocked"]
        values["context_switches_total"] = raw["ctxt"]
        values.update(
            {
                ours: raw["meminfo_kb"][theirs] * 1024
                for theirs, ours in _MEMINFO.items()
                if theirs in raw["meminfo_kb"]
            }
        )
        values.update(
            {ours: raw["vmstat"][theirs] for theirs, ours in _VMSTAT.items() if theirs in raw["vmstat"]}
        )
        for resource, shares in raw["psi_us"].items():
            for share, microseconds in shares.items():
                values[f"pressure_{resource}_{share}_seconds_total"] = microseconds / 1e6
        return HostReading(_numbers(values), tuple(tuple(core) for core in ticks.values()))

    def _disk(self, name: str, numbers: list[int]) -> DiskReading:
        rotational = self._header.get("disk_rotational", {}).get(name)
        kind = (
            "memory"
            if name.startswith("zram")
            else "virtual"
            if name.startswith(("vd", "xvd"))
            else _kind(rotational)
        )
        (
            reads,
            _,
            sectors_read,
            read_ms,
            writes,
            _,
            sectors_written,
            write_ms,
            in_flight,
            busy_ms,
            queue_ms,
        ) = numbers[:11]
        return DiskReading(
            name,
            kind,
            {
                "read_bytes_total": sectors_read * 512,
                "written_bytes_total": sectors_written * 512,
                "reads_total": reads,
                "writes_total": writes,
                "read_seconds_total": read_ms / 1000,
                "write_seconds_total": write_ms / 1000,
                "busy_seconds_total": busy_ms / 1000,
                "queue_seconds_total": queue_ms / 1000,
                "requests_in_flight": in_flight,
            },
        )

    def _process(self, raw: dict[str, Any], on_gpu: bool) -> ProcessReading:
        hertz = self._node.ticks_per_second
        values: Values = {
            "cpu_user_seconds_total": raw["utime"] / hertz,
            "cpu_system_seconds_total": raw["stime"] / hertz,
            "block_wait_seconds_total": raw["blkio_ticks"] / hertz,
            "host_memory_bytes": raw["rss"],
            "threads": raw["threads"],
            "last_cpu": raw["cpu"],
            "major_faults_total": raw["majflt"],
        }
        counters = raw.get("io") or {}
        for theirs, ours in (
            ("rchar", "read_chars_total"),
            ("wchar", "written_chars_total"),
            ("read_bytes", "read_bytes_total"),
            ("write_bytes", "written_bytes_total"),
        ):
            if counters.get(theirs) is not None:
                values[ours] = counters[theirs]
        start = raw.get("start")
        identity = ProcessIdentity(
            pid=raw["pid"],
            parent_pid=raw["ppid"],
            start_time=None
            if start is None or self._boot_time is None
            else round(self._boot_time + start / hertz, 2),
            name=raw["comm"],
            command=tuple((raw.get("cmdline") or "").split()),
        )
        threads = tuple(
            Thread(tid, name, state, ticks / hertz) for tid, name, state, ticks in raw.get("top_threads", ())
        )
        return ProcessReading(identity, raw["state"], _numbers(values), threads, on_gpu)


def _kind(rotational: str | None) -> str | None:
    return None if rotational is None else "hdd" if rotational == "1" else "ssd"


def _device(raw: dict[str, Any]) -> Device:
    capability = raw.get("compute_capability")
    facts = _scaled(raw, _FACTS)
    if "power_limit_watts" in facts:
        facts["power_default_limit_watts"] = facts["power_limit_watts"]
    return Device(
        index=raw["index"],
        uuid=raw["uuid"],
        name=raw["name"],
        compute_capability=None if capability is None else ".".join(str(part) for part in capability),
        has_gpm=True,
        facts=facts,
    )


def _gpu(raw: dict[str, Any]) -> Values:
    values = _scaled(raw, _GPU)
    for name in ("gpu_utilization_ratio", "memory_utilization_ratio"):
        if not 0 <= values.get(name, 0.0) <= 1:
            del values[name]
    gpm = raw.get("gpm") or {}
    for theirs, ours in _GPM_RATIOS.items():
        value = gpm.get(theirs)
        if _is_number(value) and _LEAST_PERCENT <= value <= _MOST_PERCENT:
            values[ours] = min(1.0, max(0.0, round(value / 100, 5)))
    for link in _GPM_RATES:
        value = gpm.get(f"{link}_mib_s")
        if _is_number(value):
            values[f"{link}_bytes_per_second"] = round(value * _MIB)
    return values


def _scaled(raw: dict[str, Any], table: dict[str, tuple[str, float]]) -> Values:
    """The numbers of a table that are there, in our units; whole numbers that are only multiplied stay whole."""
    return {
        ours: value * scale if scale >= 1 else round(value * scale, 3)
        for theirs, (ours, scale) in table.items()
        if _is_number(value := raw.get(theirs))
    }


def _numbers(values: Values) -> Values:
    """Without what turned out to be no number."""
    return {name: value for name, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _gpu_processes(raw: dict[str, Any]) -> tuple[GpuProcess, ...]:
    shares = {
        share["pid"]: min(1.0, share["sm"] / 100)
        for share in raw.get("process_util") or ()
        if _is_number(share["sm"])
    }
    return tuple(
        GpuProcess(process["pid"], "compute", process["mem_used"], shares.get(process["pid"]))
        for process in raw["processes"]
    )


def _link(name: str, numbers: list[int]) -> NetworkReading:
    names = ("rx_bytes_total", "rx_packets_total", "tx_bytes_total", "tx_packets_total")
    kind = "loopback" if name == "lo" else "virtual" if name.startswith("ifb") else "ethernet"
    return NetworkReading(name, kind, None, _numbers(dict(zip(names, numbers, strict=False))))
