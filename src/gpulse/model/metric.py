"""The one metric catalogue: every number gpulse knows, its unit, its meaning and its names elsewhere.

JSON keys, CSV and SQLite columns, terminal labels and documentation all come from these rows. A name
holds its base unit and, once shipped, never changes.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Value = int | float
Values = dict[str, Value]
"""Readings by catalogue name. A name that is absent was not had: unknown, never zero."""
MAX_INTEGER = 2**63 - 1
"""The largest integer that every file format holds exactly; SQLite and Parquet have signed 64-bit integers."""

Scope = Literal["gpu", "host", "disk", "filesystem", "network", "process", "cgroup"]
Kind = Literal["gauge", "counter", "ratio"]


class Metric(NamedTuple):
    """One quantity."""

    name: str
    scope: Scope
    kind: Kind
    unit: str
    help: str
    resolution: float = 1
    """The smallest step the source reports, so that a store can keep integers without loss."""
    derived: bool = False
    """Computed from the counters of two frames rather than read from a source."""
    dcgm: str | None = None
    otel: str | None = None
    dcgm_factor: float = 1
    """What a value is multiplied by to be in DCGM's unit."""
    prometheus_name: str | None = None
    """What it is called in Prometheus, where our unit is none of Prometheus'."""
    prometheus_factor: float = 1
    """What a value is multiplied by to be in Prometheus' unit: a power of two, so that nothing is lost on the way back."""

    @property
    def prometheus(self) -> str:
        """The name in scrapes and in engines."""
        return f"gpulse_{self.scope}_{self.prometheus_name or self.name}"


# One row a metric, however long: a table reads as a table.
# fmt: off
_ROWS: tuple[Metric, ...] = (
    Metric("gpu_utilization_ratio", "gpu", "ratio", "1", "Share of time in which at least one kernel was resident; says nothing about how much of the GPU it used", 0.01, dcgm="DCGM_FI_DEV_GPU_UTIL", otel="hw.gpu.utilization", dcgm_factor=100),
    Metric("memory_utilization_ratio", "gpu", "ratio", "1", "Share of time in which device memory was read or written", 0.01, dcgm="DCGM_FI_DEV_MEM_COPY_UTIL", dcgm_factor=100),
    Metric("encoder_utilization_ratio", "gpu", "ratio", "1", "Share of time in which the video encoder was busy", 0.01, dcgm="DCGM_FI_DEV_ENC_UTIL", dcgm_factor=100),
    Metric("decoder_utilization_ratio", "gpu", "ratio", "1", "Share of time in which the video decoder was busy", 0.01, dcgm="DCGM_FI_DEV_DEC_UTIL", dcgm_factor=100),
    Metric("memory_total_bytes", "gpu", "gauge", "bytes", "Device memory on the board", dcgm="DCGM_FI_DEV_FB_TOTAL", otel="hw.gpu.memory.limit", dcgm_factor=2**-20),
    Metric("memory_used_bytes", "gpu", "gauge", "bytes", "Device memory allocated by processes", dcgm="DCGM_FI_DEV_FB_USED", otel="hw.gpu.memory.usage", dcgm_factor=2**-20),
    Metric("memory_free_bytes", "gpu", "gauge", "bytes", "Device memory not allocated", dcgm="DCGM_FI_DEV_FB_FREE", dcgm_factor=2**-20),
    Metric("memory_reserved_bytes", "gpu", "gauge", "bytes", "Device memory that the driver keeps for itself", dcgm="DCGM_FI_DEV_FB_RESERVED", dcgm_factor=2**-20),
    Metric("power_watts", "gpu", "gauge", "watts", "Power draw, averaged by the driver", 0.001, dcgm="DCGM_FI_DEV_POWER_USAGE", otel="hw.power"),
    Metric("power_instant_watts", "gpu", "gauge", "watts", "Power draw at this instant", 0.001, dcgm="DCGM_FI_DEV_POWER_USAGE_INSTANT"),
    Metric("power_limit_watts", "gpu", "gauge", "watts", "Power limit in force", 0.001, dcgm="DCGM_FI_DEV_ENFORCED_POWER_LIMIT"),
    Metric("power_default_limit_watts", "gpu", "gauge", "watts", "Power limit the board ships with", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF"),
    Metric("power_min_limit_watts", "gpu", "gauge", "watts", "Lowest power limit that can be set", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN"),
    Metric("power_max_limit_watts", "gpu", "gauge", "watts", "Highest power limit that can be set", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX"),
    Metric("energy_joules_total", "gpu", "counter", "joules", "Energy used since the driver was loaded", 0.001, dcgm="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", otel="hw.energy", dcgm_factor=1000),
    Metric("temperature_celsius", "gpu", "gauge", "celsius", "Temperature of the GPU die", dcgm="DCGM_FI_DEV_GPU_TEMP", otel="hw.temperature"),
    Metric("memory_temperature_celsius", "gpu", "gauge", "celsius", "Temperature of the device memory", dcgm="DCGM_FI_DEV_MEMORY_TEMP"),
    Metric("temperature_margin_celsius", "gpu", "gauge", "celsius", "Degrees left before the driver slows the GPU down", dcgm="DCGM_FI_DEV_GPU_TEMP_LIMIT"),
    Metric("temperature_slowdown_celsius", "gpu", "gauge", "celsius", "Temperature at which the hardware slows the GPU down", dcgm="DCGM_FI_DEV_SLOWDOWN_TEMP"),
    Metric("temperature_shutdown_celsius", "gpu", "gauge", "celsius", "Temperature at which the GPU switches itself off", dcgm="DCGM_FI_DEV_SHUTDOWN_TEMP"),
    Metric("temperature_max_celsius", "gpu", "gauge", "celsius", "Highest temperature of the die at which it may run at full speed", dcgm="DCGM_FI_DEV_GPU_MAX_OP_TEMP"),
    Metric("memory_temperature_max_celsius", "gpu", "gauge", "celsius", "Highest temperature of the memory at which it may run at full speed", dcgm="DCGM_FI_DEV_MEM_MAX_OP_TEMP"),
    Metric("fan_speed_ratio", "gpu", "ratio", "1", "Fan speed over its maximum, averaged over the fans", 0.01, dcgm="DCGM_FI_DEV_FAN_SPEED", dcgm_factor=100),
    Metric("fan_target_ratio", "gpu", "ratio", "1", "Fan speed that the driver asks for over its maximum, averaged over the fans", 0.01),
    Metric("sm_clock_hertz", "gpu", "gauge", "hertz", "Clock of the multiprocessors", 1_000_000, dcgm="DCGM_FI_DEV_SM_CLOCK", dcgm_factor=1e-06),
    Metric("sm_clock_max_hertz", "gpu", "gauge", "hertz", "Highest clock of the multiprocessors", 1_000_000, dcgm="DCGM_FI_DEV_MAX_SM_CLOCK", dcgm_factor=1e-06),
    Metric("sm_clock_application_hertz", "gpu", "gauge", "hertz", "Clock of the multiprocessors that applications ask for", 1_000_000, dcgm="DCGM_FI_DEV_APP_SM_CLOCK", dcgm_factor=1e-06),
    Metric("memory_clock_hertz", "gpu", "gauge", "hertz", "Clock of the device memory", 1_000_000, dcgm="DCGM_FI_DEV_MEM_CLOCK", dcgm_factor=1e-06),
    Metric("memory_clock_max_hertz", "gpu", "gauge", "hertz", "Highest clock of the device memory", 1_000_000, dcgm="DCGM_FI_DEV_MAX_MEM_CLOCK", dcgm_factor=1e-06),
    Metric("video_clock_hertz", "gpu", "gauge", "hertz", "Clock of the video engines", 1_000_000, dcgm="DCGM_FI_DEV_VIDEO_CLOCK", dcgm_factor=1e-06),
    Metric("video_clock_max_hertz", "gpu", "gauge", "hertz", "Highest clock of the video engines", 1_000_000, dcgm="DCGM_FI_DEV_MAX_VIDEO_CLOCK", dcgm_factor=1e-06),
    Metric("clocks_event_reasons", "gpu", "gauge", "bitmask", "NVML's bit mask of what holds the clocks down now", dcgm="DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
    Metric("power_cap_seconds_total", "gpu", "counter", "seconds", "Time in which the power limit held the clocks down", 1e-09, dcgm="DCGM_FI_DEV_POWER_VIOLATION", dcgm_factor=1e09),
    Metric("sync_boost_seconds_total", "gpu", "counter", "seconds", "Time in which a sync-boost group held the clocks down", 1e-09, dcgm="DCGM_FI_DEV_SYNC_BOOST_VIOLATION", dcgm_factor=1e09),
    Metric("thermal_slowdown_seconds_total", "gpu", "counter", "seconds", "Time in which the driver held the clocks down because of heat", 1e-09, dcgm="DCGM_FI_DEV_THERMAL_VIOLATION", dcgm_factor=1e09),
    Metric("hardware_thermal_slowdown_seconds_total", "gpu", "counter", "seconds", "Time in which the hardware held the clocks down because of heat", 1e-09),
    Metric("power_brake_seconds_total", "gpu", "counter", "seconds", "Time in which an external power brake held the clocks down", 1e-09),
    Metric("performance_state", "gpu", "gauge", "1", "P-state: 0 is the fastest, 15 the slowest", dcgm="DCGM_FI_DEV_PSTATE"),
    Metric("pcie_link_generation", "gpu", "gauge", "1", "PCIe generation of the link now (falls when idle)", dcgm="DCGM_FI_DEV_PCIE_LINK_GEN"),
    Metric("pcie_link_generation_max", "gpu", "gauge", "1", "Highest PCIe generation of GPU and slot together", dcgm="DCGM_FI_DEV_PCIE_MAX_LINK_GEN"),
    Metric("pcie_link_width", "gpu", "gauge", "lanes", "PCIe lanes of the link now", dcgm="DCGM_FI_DEV_PCIE_LINK_WIDTH"),
    Metric("pcie_link_width_max", "gpu", "gauge", "lanes", "PCIe lanes of GPU and slot together at most", dcgm="DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH"),
    Metric("pcie_replays_total", "gpu", "counter", "1", "PCIe packets that had to be sent again", dcgm="DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),
    Metric("pcie_rx_bytes_total", "gpu", "counter", "bytes", "Bytes that reached the GPU over PCIe"),
    Metric("pcie_tx_bytes_total", "gpu", "counter", "bytes", "Bytes that left the GPU over PCIe"),
    Metric("pcie_rx_bytes_per_second", "gpu", "gauge", "bytes/second", "Rate of bytes that reach the GPU over PCIe", 1024, dcgm="DCGM_FI_PROF_PCIE_RX_BYTES", otel="hw.gpu.io"),
    Metric("pcie_tx_bytes_per_second", "gpu", "gauge", "bytes/second", "Rate of bytes that leave the GPU over PCIe", 1024, dcgm="DCGM_FI_PROF_PCIE_TX_BYTES", otel="hw.gpu.io"),
    Metric("nvlink_rx_bytes_total", "gpu", "counter", "bytes", "Bytes that reached the GPU over all NVLinks", 1024),
    Metric("nvlink_tx_bytes_total", "gpu", "counter", "bytes", "Bytes that left the GPU over all NVLinks", 1024),
    Metric("nvlink_rx_bytes_per_second", "gpu", "gauge", "bytes/second", "Rate of bytes that reach the GPU over all NVLinks", 1024, dcgm="DCGM_FI_PROF_NVLINK_RX_BYTES"),
    Metric("nvlink_tx_bytes_per_second", "gpu", "gauge", "bytes/second", "Rate of bytes that leave the GPU over all NVLinks", 1024, dcgm="DCGM_FI_PROF_NVLINK_TX_BYTES"),
    Metric("nvlink_links", "gpu", "gauge", "1", "NVLinks that the GPU has"),
    Metric("nvlink_links_active", "gpu", "gauge", "1", "NVLinks that are up"),
    Metric("nvlink_errors_total", "gpu", "counter", "1", "Errors counted on all NVLinks: replays, recoveries, CRC"),
    Metric("ecc_enabled", "gpu", "gauge", "bool", "1 when error correction is on"),
    Metric("ecc_corrected_errors_total", "gpu", "counter", "1", "Memory errors corrected since the driver was loaded", dcgm="DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),
    Metric("ecc_uncorrected_errors_total", "gpu", "counter", "1", "Memory errors that could not be corrected since the driver was loaded", dcgm="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),
    Metric("ecc_corrected_errors_lifetime_total", "gpu", "counter", "1", "Memory errors corrected in the board's life", dcgm="DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"),
    Metric("ecc_uncorrected_errors_lifetime_total", "gpu", "counter", "1", "Memory errors that could not be corrected in the board's life", dcgm="DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"),
    Metric("retired_pages_corrected", "gpu", "gauge", "1", "Memory pages retired after many corrected errors", dcgm="DCGM_FI_DEV_RETIRED_SBE"),
    Metric("retired_pages_uncorrected", "gpu", "gauge", "1", "Memory pages retired after an uncorrected error", dcgm="DCGM_FI_DEV_RETIRED_DBE"),
    Metric("retired_pages_pending", "gpu", "gauge", "bool", "1 when a page waits for a reset to be retired", dcgm="DCGM_FI_DEV_RETIRED_PENDING"),
    Metric("remapped_rows_corrected", "gpu", "gauge", "1", "Memory rows remapped after corrected errors", dcgm="DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"),
    Metric("remapped_rows_uncorrected", "gpu", "gauge", "1", "Memory rows remapped after uncorrected errors", dcgm="DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
    Metric("remapped_rows_pending", "gpu", "gauge", "bool", "1 when a row waits for a reset to be remapped"),
    Metric("remapped_rows_failed", "gpu", "gauge", "bool", "1 when a row could not be remapped", dcgm="DCGM_FI_DEV_ROW_REMAP_FAILURE"),
    Metric("recovery_action", "gpu", "gauge", "1", "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peers, 4 drain and reset"),
    Metric("xid_errors_total", "gpu", "counter", "1", "Xid errors seen since sampling began"),
    Metric("xid_last_code", "gpu", "gauge", "1", "Code of the last Xid error seen", dcgm="DCGM_FI_DEV_XID_ERRORS"),
    Metric("xid_last_timestamp_seconds", "gpu", "gauge", "seconds", "When the last Xid error was seen, in epoch seconds", 0.001),
    Metric("mig_enabled", "gpu", "gauge", "bool", "1 when the GPU is split into MIG instances", dcgm="DCGM_FI_DEV_MIG_MODE"),
    Metric("compute_mode", "gpu", "gauge", "1", "Who may use the GPU: 0 anybody, 2 nobody, 3 one process", dcgm="DCGM_FI_DEV_COMPUTE_MODE"),
    Metric("persistence_enabled", "gpu", "gauge", "bool", "1 when the driver stays loaded without a client", dcgm="DCGM_FI_DEV_PERSISTENCE_MODE"),
    Metric("display_active", "gpu", "gauge", "bool", "1 when a display is driven by the GPU"),
    Metric("graphics_active_ratio", "gpu", "ratio", "1", "Share of time in which the compute or graphics engine was active", 0.0001, dcgm="DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    Metric("sm_active_ratio", "gpu", "ratio", "1", "Share of multiprocessors with at least one warp, stalled ones included", 0.0001, dcgm="DCGM_FI_PROF_SM_ACTIVE"),
    Metric("sm_occupancy_ratio", "gpu", "ratio", "1", "Resident warps over the most that fit", 0.0001, dcgm="DCGM_FI_PROF_SM_OCCUPANCY"),
    Metric("integer_active_ratio", "gpu", "ratio", "1", "Share of cycles in which the integer pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_INT_ACTIVE"),
    Metric("tensor_active_ratio", "gpu", "ratio", "1", "Share of cycles in which the tensor cores were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
    Metric("tensor_fp64_active_ratio", "gpu", "ratio", "1", "Share of cycles of the tensor cores on double precision", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE"),
    Metric("tensor_half_active_ratio", "gpu", "ratio", "1", "Share of cycles of the tensor cores on 16-bit and 8-bit floats and TF32", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE"),
    Metric("tensor_integer_active_ratio", "gpu", "ratio", "1", "Share of cycles of the tensor cores on integers", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE"),
    Metric("dram_active_ratio", "gpu", "ratio", "1", "Share of the device memory's peak bandwidth in use", 0.0001, dcgm="DCGM_FI_PROF_DRAM_ACTIVE"),
    Metric("fp64_active_ratio", "gpu", "ratio", "1", "Share of cycles in which the double-precision pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP64_ACTIVE"),
    Metric("fp32_active_ratio", "gpu", "ratio", "1", "Share of cycles in which the single-precision pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP32_ACTIVE"),
    Metric("fp16_active_ratio", "gpu", "ratio", "1", "Share of cycles in which the half-precision pipes, tensor cores aside, were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP16_ACTIVE"),
    Metric("harvest_state", "gpu", "gauge", "1", "What a harvest makes of the GPU: 0 people use it, 1 idle and waited for, 2 harvested, 3 being given back, 4 not known; absent where nothing harvests"),
    Metric("harvested_seconds_total", "gpu", "counter", "seconds", "Time in which programs of a harvest ran on the GPU", 0.001),
    Metric("harvest_preemptions_total", "gpu", "counter", "1", "Times that a program of a harvest had to give the GPU back"),
    Metric("cpu_utilization_ratio", "host", "ratio", "1", "Share of all CPUs' time spent working", 0.0001, derived=True, otel="system.cpu.utilization"),
    Metric("cpu_iowait_ratio", "host", "ratio", "1", "Share of all CPUs' time spent idle while a disk was waited for", 0.0001, derived=True),
    Metric("cpu_user_seconds_total", "host", "counter", "seconds", "Time of all CPUs in programs", 0.01, otel="system.cpu.time"),
    Metric("cpu_nice_seconds_total", "host", "counter", "seconds", "Time of all CPUs in programs of lowered priority", 0.01, otel="system.cpu.time"),
    Metric("cpu_system_seconds_total", "host", "counter", "seconds", "Time of all CPUs in the kernel", 0.01, otel="system.cpu.time"),
    Metric("cpu_idle_seconds_total", "host", "counter", "seconds", "Time of all CPUs with nothing to do", 0.01, otel="system.cpu.time"),
    Metric("cpu_iowait_seconds_total", "host", "counter", "seconds", "Time of all CPUs with nothing to do but disks to wait for", 0.01, otel="system.cpu.time"),
    Metric("cpu_irq_seconds_total", "host", "counter", "seconds", "Time of all CPUs in interrupts", 0.01, otel="system.cpu.time"),
    Metric("cpu_softirq_seconds_total", "host", "counter", "seconds", "Time of all CPUs in soft interrupts", 0.01, otel="system.cpu.time"),
    Metric("cpu_steal_seconds_total", "host", "counter", "seconds", "Time of all CPUs taken by the hypervisor", 0.01, otel="system.cpu.time"),
    Metric("cpus", "host", "gauge", "1", "CPUs online", otel="system.cpu.logical.count"),
    Metric("load1", "host", "gauge", "1", "Tasks running or waiting, averaged over one minute", 0.01),
    Metric("load5", "host", "gauge", "1", "Tasks running or waiting, averaged over five minutes", 0.01),
    Metric("load15", "host", "gauge", "1", "Tasks running or waiting, averaged over fifteen minutes", 0.01),
    Metric("processes_running", "host", "gauge", "1", "Tasks that can run now"),
    Metric("processes_blocked", "host", "gauge", "1", "Tasks that wait for a disk now"),
    Metric("context_switches_total", "host", "counter", "1", "Switches from one task to another"),
    Metric("context_switches_per_second", "host", "gauge", "1/second", "Rate of switches from one task to another", 0.1, derived=True),
    Metric("memory_total_bytes", "host", "gauge", "bytes", "Memory of the machine", 1024, otel="system.memory.limit"),
    Metric("memory_available_bytes", "host", "gauge", "bytes", "Memory that programs can still have without swapping", 1024),
    Metric("memory_free_bytes", "host", "gauge", "bytes", "Memory used for nothing at all", 1024),
    Metric("memory_cached_bytes", "host", "gauge", "bytes", "Memory that holds file contents", 1024),
    Metric("memory_shared_bytes", "host", "gauge", "bytes", "Memory in shared segments and tmpfs", 1024),
    Metric("memory_dirty_bytes", "host", "gauge", "bytes", "File contents not yet on disk", 1024),
    Metric("memory_writeback_bytes", "host", "gauge", "bytes", "File contents on their way to disk", 1024),
    Metric("swap_total_bytes", "host", "gauge", "bytes", "Swap space", 1024),
    Metric("swap_free_bytes", "host", "gauge", "bytes", "Swap space not in use", 1024),
    Metric("swap_in_pages_total", "host", "counter", "1", "Pages read back from swap"),
    Metric("swap_out_pages_total", "host", "counter", "1", "Pages written to swap"),
    Metric("swap_in_pages_per_second", "host", "gauge", "1/second", "Rate of pages read back from swap", 0.1, derived=True),
    Metric("swap_out_pages_per_second", "host", "gauge", "1/second", "Rate of pages written to swap", 0.1, derived=True),
    Metric("major_faults_total", "host", "counter", "1", "Page faults that had to read from disk"),
    Metric("major_faults_per_second", "host", "gauge", "1/second", "Rate of page faults that had to read from disk", 0.1, derived=True),
    Metric("direct_reclaim_pages_total", "host", "counter", "1", "Pages that programs had to reclaim themselves"),
    Metric("refaults_total", "host", "counter", "1", "File pages read again soon after they were dropped from the cache"),
    Metric("oom_kills_total", "host", "counter", "1", "Processes killed because memory ran out"),
    Metric("pressure_cpu_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for a CPU", 1e-06),
    Metric("pressure_cpu_full_seconds_total", "host", "counter", "seconds", "Time in which every task that was not idle waited for a CPU", 1e-06),
    Metric("pressure_io_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for a disk", 1e-06),
    Metric("pressure_io_full_seconds_total", "host", "counter", "seconds", "Time in which every task that was not idle waited for a disk", 1e-06),
    Metric("pressure_memory_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for memory", 1e-06),
    Metric("pressure_memory_full_seconds_total", "host", "counter", "seconds", "Time in which every task that was not idle waited for memory", 1e-06),
    Metric("pressure_cpu_some_ratio", "host", "ratio", "1", "Share of time in which at least one task waited for a CPU", 0.0001, derived=True),
    Metric("pressure_cpu_full_ratio", "host", "ratio", "1", "Share of time in which every task that was not idle waited for a CPU", 0.0001, derived=True),
    Metric("pressure_io_some_ratio", "host", "ratio", "1", "Share of time in which at least one task waited for a disk", 0.0001, derived=True),
    Metric("pressure_io_full_ratio", "host", "ratio", "1", "Share of time in which every task that was not idle waited for a disk", 0.0001, derived=True),
    Metric("pressure_memory_some_ratio", "host", "ratio", "1", "Share of time in which at least one task waited for memory", 0.0001, derived=True),
    Metric("pressure_memory_full_ratio", "host", "ratio", "1", "Share of time in which every task that was not idle waited for memory", 0.0001, derived=True),
    Metric("read_bytes_total", "disk", "counter", "bytes", "Bytes read from the disk", 512, otel="system.disk.io"),
    Metric("written_bytes_total", "disk", "counter", "bytes", "Bytes written to the disk", 512, otel="system.disk.io"),
    Metric("reads_total", "disk", "counter", "1", "Reads completed", otel="system.disk.operations"),
    Metric("writes_total", "disk", "counter", "1", "Writes completed", otel="system.disk.operations"),
    Metric("read_seconds_total", "disk", "counter", "seconds", "Time that reads took, added up", 0.001),
    Metric("write_seconds_total", "disk", "counter", "seconds", "Time that writes took, added up", 0.001),
    Metric("busy_seconds_total", "disk", "counter", "seconds", "Time in which at least one request was under way", 0.001, otel="system.disk.io_time"),
    Metric("queue_seconds_total", "disk", "counter", "seconds", "Time that requests were under way, added up", 0.001),
    Metric("requests_in_flight", "disk", "gauge", "1", "Requests under way now"),
    Metric("read_bytes_per_second", "disk", "gauge", "bytes/second", "Rate of bytes read", derived=True),
    Metric("written_bytes_per_second", "disk", "gauge", "bytes/second", "Rate of bytes written", derived=True),
    Metric("reads_per_second", "disk", "gauge", "1/second", "Reads completed a second", 0.1, derived=True),
    Metric("writes_per_second", "disk", "gauge", "1/second", "Writes completed a second", 0.1, derived=True),
    Metric("read_await_seconds", "disk", "gauge", "seconds", "Mean time of a read, queueing included", 1e-06, derived=True),
    Metric("write_await_seconds", "disk", "gauge", "seconds", "Mean time of a write, queueing included", 1e-06, derived=True),
    Metric("await_seconds", "disk", "gauge", "seconds", "Mean time of a request, queueing included", 1e-06, derived=True),
    Metric("queue_length", "disk", "gauge", "1", "Mean number of requests under way", 0.01, derived=True),
    Metric("busy_ratio", "disk", "ratio", "1", "Share of time with at least one request under way; no measure of saturation on an SSD", 0.0001, derived=True),
    Metric("size_bytes", "filesystem", "gauge", "bytes", "Size of the file system", otel="system.filesystem.limit"),
    Metric("used_bytes", "filesystem", "gauge", "bytes", "Bytes in use", otel="system.filesystem.usage"),
    Metric("available_bytes", "filesystem", "gauge", "bytes", "Bytes that a user without privileges can still write"),
    Metric("nfs_reads_total", "filesystem", "counter", "1", "READ operations that the NFS server has answered"),
    Metric("nfs_read_bytes_total", "filesystem", "counter", "bytes", "Bytes read from the NFS server"),
    Metric("nfs_read_round_trip_seconds_total", "filesystem", "counter", "seconds", "Time from sending READs to the NFS server to its replies, added up", 0.001),
    Metric("nfs_read_seconds_total", "filesystem", "counter", "seconds", "Time that READs of the NFS server took, queueing included, added up", 0.001),
    Metric("nfs_writes_total", "filesystem", "counter", "1", "WRITE operations that the NFS server has answered"),
    Metric("nfs_written_bytes_total", "filesystem", "counter", "bytes", "Bytes written to the NFS server"),
    Metric("nfs_retransmissions_total", "filesystem", "counter", "1", "READs and WRITEs that had to be sent to the NFS server again"),
    Metric("nfs_reads_per_second", "filesystem", "gauge", "1/second", "READs answered by the NFS server a second", 0.1, derived=True),
    Metric("nfs_read_bytes_per_second", "filesystem", "gauge", "bytes/second", "Rate of bytes read from the NFS server", derived=True),
    Metric("nfs_read_await_seconds", "filesystem", "gauge", "seconds", "Mean time of a READ of the NFS server, queueing included", 1e-06, derived=True),
    Metric("nfs_read_round_trip_seconds", "filesystem", "gauge", "seconds", "Mean time from sending a READ to the NFS server to its reply", 1e-06, derived=True),
    Metric("nfs_reads_in_flight", "filesystem", "gauge", "1", "Mean number of READs under way to the NFS server", 0.01, derived=True),
    Metric("rx_bytes_total", "network", "counter", "bytes", "Bytes received", otel="system.network.io"),
    Metric("rx_bytes_per_second", "network", "gauge", "bytes/second", "Rate of: bytes received", 0.1, derived=True),
    Metric("tx_bytes_total", "network", "counter", "bytes", "Bytes sent", otel="system.network.io"),
    Metric("tx_bytes_per_second", "network", "gauge", "bytes/second", "Rate of: bytes sent", 0.1, derived=True),
    Metric("rx_packets_total", "network", "counter", "1", "Packets received", otel="system.network.packet.count"),
    Metric("rx_packets_per_second", "network", "gauge", "1/second", "Rate of: packets received", 0.1, derived=True),
    Metric("tx_packets_total", "network", "counter", "1", "Packets sent", otel="system.network.packet.count"),
    Metric("tx_packets_per_second", "network", "gauge", "1/second", "Rate of: packets sent", 0.1, derived=True),
    Metric("rx_errors_total", "network", "counter", "1", "Packets received broken", otel="system.network.errors"),
    Metric("rx_errors_per_second", "network", "gauge", "1/second", "Rate of: packets received broken", 0.1, derived=True),
    Metric("tx_errors_total", "network", "counter", "1", "Packets that could not be sent", otel="system.network.errors"),
    Metric("tx_errors_per_second", "network", "gauge", "1/second", "Rate of: packets that could not be sent", 0.1, derived=True),
    Metric("rx_drops_total", "network", "counter", "1", "Packets received and dropped", otel="system.network.packet.dropped"),
    Metric("rx_drops_per_second", "network", "gauge", "1/second", "Rate of: packets received and dropped", 0.1, derived=True),
    Metric("tx_drops_total", "network", "counter", "1", "Packets dropped before they were sent", otel="system.network.packet.dropped"),
    Metric("tx_drops_per_second", "network", "gauge", "1/second", "Rate of: packets dropped before they were sent", 0.1, derived=True),
    Metric("link_bits_per_second", "network", "gauge", "bits/second", "Speed of the link", 1_000_000, prometheus_name="link_bytes_per_second", prometheus_factor=2**-3),
    Metric("gpu_memory_bytes", "process", "gauge", "bytes", "Device memory that the process holds on this GPU"),
    Metric("sm_ratio", "process", "ratio", "1", "Share of time in which the process ran on the GPU's multiprocessors", 0.01),
    Metric("cpu_percent", "process", "gauge", "percent", "CPU use; 100 is one CPU", 0.1, derived=True),
    Metric("elapsed_seconds", "process", "gauge", "seconds", "Time since the process started", derived=True),
    Metric("cpu_user_seconds_total", "process", "counter", "seconds", "CPU time in the program", 0.01, otel="process.cpu.time"),
    Metric("cpu_system_seconds_total", "process", "counter", "seconds", "CPU time in the kernel", 0.01, otel="process.cpu.time"),
    Metric("run_wait_seconds_total", "process", "counter", "seconds", "Time in which the main thread could run but no CPU was free", 1e-09),
    Metric("run_wait_ratio", "process", "ratio", "1", "Share of time in which the main thread could run but no CPU was free", 0.0001, derived=True),
    Metric("block_wait_seconds_total", "process", "counter", "seconds", "Time in which the process waited for a disk", 0.01),
    Metric("host_memory_bytes", "process", "gauge", "bytes", "Resident memory", 4096, otel="process.memory.usage"),
    Metric("threads", "process", "gauge", "1", "Threads", otel="process.thread.count"),
    Metric("last_cpu", "process", "gauge", "1", "CPU on which the main thread last ran"),
    Metric("cpus_allowed", "process", "gauge", "1", "CPUs on which the process may run"),
    Metric("major_faults_total", "process", "counter", "1", "Page faults that had to read from disk"),
    Metric("read_bytes_total", "process", "counter", "bytes", "Bytes the process caused to be read from disks", otel="process.disk.io"),
    Metric("written_bytes_total", "process", "counter", "bytes", "Bytes the process caused to be written to disks", otel="process.disk.io"),
    Metric("read_chars_total", "process", "counter", "bytes", "Bytes the process read, from the page cache or elsewhere"),
    Metric("written_chars_total", "process", "counter", "bytes", "Bytes the process wrote, to the page cache or elsewhere"),
    Metric("read_bytes_per_second", "process", "gauge", "bytes/second", "Rate of bytes read from disks", derived=True),
    Metric("written_bytes_per_second", "process", "gauge", "bytes/second", "Rate of bytes written to disks", derived=True),
    Metric("cpu_limit_cores", "cgroup", "gauge", "1", "CPUs' worth of time that the group may use", 0.001),
    Metric("cpu_periods_total", "cgroup", "counter", "1", "Scheduling periods in which the group wanted to run"),
    Metric("cpu_throttled_periods_total", "cgroup", "counter", "1", "Scheduling periods in which the group ran out of its CPU limit"),
    Metric("cpu_throttled_seconds_total", "cgroup", "counter", "seconds", "Time in which the group's tasks were held back by its CPU limit", 1e-06),
    Metric("cpu_throttled_ratio", "cgroup", "ratio", "1", "Share of scheduling periods that ran out of the CPU limit", 0.0001, derived=True),
    Metric("memory_limit_bytes", "cgroup", "gauge", "bytes", "Memory that the group may use"),
    Metric("memory_used_bytes", "cgroup", "gauge", "bytes", "Memory that the group uses, page cache included"),
    Metric("oom_kills_total", "cgroup", "counter", "1", "Processes of the group killed because its memory ran out"),
)
# fmt: on

CATALOGUE: dict[Scope, dict[str, Metric]] = {
    scope: {row.name: row for row in _ROWS if row.scope == scope}
    for scope in dict.fromkeys(row.scope for row in _ROWS)
}
"""Every metric, by scope and name, in the order in which views show them."""


def names(scope: Scope, *, derived: bool = True) -> list[str]:
    """The catalogue's names of one scope, with or without the derived ones."""
    return [metric.name for metric in CATALOGUE[scope].values() if derived or not metric.derived]


def is_finite(value: Value) -> bool:
    """Whether a number is finite as a float: neither NaN nor infinite, nor an integer beyond a float's range."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def portable(value: Value | None) -> Value | None:
    """The number as every file format can hold it.

    None for what is not finite, a float for an integer beyond 64 bits with sign, and any other as it is.
    """
    if value is None or not is_finite(value):
        return None
    return value if isinstance(value, float) or -MAX_INTEGER - 1 <= value <= MAX_INTEGER else float(value)
