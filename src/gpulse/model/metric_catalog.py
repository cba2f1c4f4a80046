"""The metric catalog: name, unit, description and external names of every metric.

JSON keys, CSV and SQLite columns, terminal labels and documentation all come from these rows. A name
contains its base unit and, once released, never changes.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Value = int | float
Values = dict[str, Value]
"""Readings by metric name. A missing name means that the value is unknown, never zero."""
MAX_INTEGER = 2**63 - 1
"""Largest integer that every file format holds exactly: SQLite and Parquet have signed 64-bit integers."""

Scope = Literal["gpu", "host", "disk", "filesystem", "network", "process", "cgroup"]
MetricKind = Literal["gauge", "counter", "ratio"]


class Metric(NamedTuple):
    """One quantity."""

    name: str
    scope: Scope
    kind: MetricKind
    unit: str
    help: str
    resolution: float = 1
    """Smallest step that the source reports, so that a store can keep integers without loss."""
    derived: bool = False
    """Computed from the counters of two frames rather than read from a source."""
    dcgm: str | None = None
    otel: str | None = None
    dcgm_factor: float = 1
    """Factor from the base unit to DCGM's unit."""
    prometheus_name: str | None = None
    """Name in Prometheus, if the unit differs there."""
    prometheus_factor: float = 1
    """Factor from the base unit to Prometheus' unit: a power of two, so that the conversion back is exact."""
    fact: bool = False
    """Constant for a device, so it is sent less often than readings; a query for it looks further back."""
    title: str | None = None
    """Label in the evidence of findings; every metric that a rule uses as evidence needs one."""

    @property
    def prometheus(self) -> str:
        """Name in scrapes and in time-series databases."""
        return f"gpulse_{self.scope}_{self.prometheus_name or self.name}"


# One line per metric, however long, so that this reads as a table.
# fmt: off
_ROWS: tuple[Metric, ...] = (
    Metric("gpu_utilization_ratio", "gpu", "ratio", "1", "Fraction of time in which at least one kernel was running, however little of the GPU it used", 0.01, dcgm="DCGM_FI_DEV_GPU_UTIL", otel="hw.gpu.utilization", dcgm_factor=100, title="utilization"),
    Metric("memory_utilization_ratio", "gpu", "ratio", "1", "Fraction of time in which device memory was read or written", 0.01, dcgm="DCGM_FI_DEV_MEM_COPY_UTIL", dcgm_factor=100),
    Metric("encoder_utilization_ratio", "gpu", "ratio", "1", "Fraction of time in which the video encoder was busy", 0.01, dcgm="DCGM_FI_DEV_ENC_UTIL", dcgm_factor=100),
    Metric("decoder_utilization_ratio", "gpu", "ratio", "1", "Fraction of time in which the video decoder was busy", 0.01, dcgm="DCGM_FI_DEV_DEC_UTIL", dcgm_factor=100),
    Metric("memory_total_bytes", "gpu", "gauge", "bytes", "Total device memory of the board", dcgm="DCGM_FI_DEV_FB_TOTAL", otel="hw.gpu.memory.limit", dcgm_factor=2**-20, fact=True),
    Metric("memory_used_bytes", "gpu", "gauge", "bytes", "Device memory allocated by processes", dcgm="DCGM_FI_DEV_FB_USED", otel="hw.gpu.memory.usage", dcgm_factor=2**-20, title="GPU memory in use"),
    Metric("memory_free_bytes", "gpu", "gauge", "bytes", "Device memory not allocated", dcgm="DCGM_FI_DEV_FB_FREE", dcgm_factor=2**-20),
    Metric("memory_reserved_bytes", "gpu", "gauge", "bytes", "Device memory reserved by the driver", dcgm="DCGM_FI_DEV_FB_RESERVED", dcgm_factor=2**-20),
    Metric("power_watts", "gpu", "gauge", "watts", "Power draw, averaged by the driver", 0.001, dcgm="DCGM_FI_DEV_POWER_USAGE", otel="hw.power", title="power draw"),
    Metric("power_instant_watts", "gpu", "gauge", "watts", "Power draw at this instant", 0.001, dcgm="DCGM_FI_DEV_POWER_USAGE_INSTANT"),
    Metric("power_limit_watts", "gpu", "gauge", "watts", "Enforced power limit", 0.001, dcgm="DCGM_FI_DEV_ENFORCED_POWER_LIMIT", title="power limit"),
    Metric("power_default_limit_watts", "gpu", "gauge", "watts", "Default power limit of the board", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF", fact=True),
    Metric("power_min_limit_watts", "gpu", "gauge", "watts", "Minimum power limit that can be set", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN", fact=True),
    Metric("power_max_limit_watts", "gpu", "gauge", "watts", "Maximum power limit that can be set", 0.001, dcgm="DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX", fact=True),
    Metric("energy_joules_total", "gpu", "counter", "joules", "Energy used since the driver was loaded", 0.001, dcgm="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", otel="hw.energy", dcgm_factor=1000),
    Metric("temperature_celsius", "gpu", "gauge", "celsius", "Temperature of the GPU die", dcgm="DCGM_FI_DEV_GPU_TEMP", otel="hw.temperature", title="temperature"),
    Metric("memory_temperature_celsius", "gpu", "gauge", "celsius", "Temperature of the device memory", dcgm="DCGM_FI_DEV_MEMORY_TEMP", title="memory temperature"),
    Metric("temperature_margin_celsius", "gpu", "gauge", "celsius", "Temperature margin before the driver slows the GPU down", dcgm="DCGM_FI_DEV_GPU_TEMP_LIMIT"),
    Metric("temperature_slowdown_celsius", "gpu", "gauge", "celsius", "Temperature at which the hardware slows the GPU down", dcgm="DCGM_FI_DEV_SLOWDOWN_TEMP", fact=True),
    Metric("temperature_shutdown_celsius", "gpu", "gauge", "celsius", "Temperature at which the GPU shuts down", dcgm="DCGM_FI_DEV_SHUTDOWN_TEMP", fact=True),
    Metric("temperature_max_celsius", "gpu", "gauge", "celsius", "Maximum die temperature for full speed", dcgm="DCGM_FI_DEV_GPU_MAX_OP_TEMP", fact=True),
    Metric("memory_temperature_max_celsius", "gpu", "gauge", "celsius", "Maximum memory temperature for full speed", dcgm="DCGM_FI_DEV_MEM_MAX_OP_TEMP", fact=True),
    Metric("fan_speed_ratio", "gpu", "ratio", "1", "Fan speed relative to the maximum, averaged over the fans", 0.01, dcgm="DCGM_FI_DEV_FAN_SPEED", dcgm_factor=100, title="fan speed"),
    Metric("fan_target_ratio", "gpu", "ratio", "1", "Fan speed that the driver requests, relative to the maximum, averaged over the fans", 0.01, title="requested fan speed"),
    Metric("sm_clock_hertz", "gpu", "gauge", "hertz", "SM clock", 1_000_000, dcgm="DCGM_FI_DEV_SM_CLOCK", dcgm_factor=1e-06, title="SM clock"),
    Metric("sm_clock_max_hertz", "gpu", "gauge", "hertz", "Maximum SM clock", 1_000_000, dcgm="DCGM_FI_DEV_MAX_SM_CLOCK", dcgm_factor=1e-06, fact=True),
    Metric("sm_clock_application_hertz", "gpu", "gauge", "hertz", "SM clock requested by applications", 1_000_000, dcgm="DCGM_FI_DEV_APP_SM_CLOCK", dcgm_factor=1e-06, title="requested clock"),
    Metric("memory_clock_hertz", "gpu", "gauge", "hertz", "Device memory clock", 1_000_000, dcgm="DCGM_FI_DEV_MEM_CLOCK", dcgm_factor=1e-06),
    Metric("memory_clock_max_hertz", "gpu", "gauge", "hertz", "Maximum device memory clock", 1_000_000, dcgm="DCGM_FI_DEV_MAX_MEM_CLOCK", dcgm_factor=1e-06, fact=True),
    Metric("video_clock_hertz", "gpu", "gauge", "hertz", "Video clock", 1_000_000, dcgm="DCGM_FI_DEV_VIDEO_CLOCK", dcgm_factor=1e-06),
    Metric("video_clock_max_hertz", "gpu", "gauge", "hertz", "Maximum video clock", 1_000_000, dcgm="DCGM_FI_DEV_MAX_VIDEO_CLOCK", dcgm_factor=1e-06, fact=True),
    Metric("clocks_event_reasons", "gpu", "gauge", "bitmask", "NVML bit mask of the reasons that currently lower the clocks", dcgm="DCGM_FI_DEV_CLOCKS_EVENT_REASONS", title="reason for lowered clocks"),
    Metric("power_cap_seconds_total", "gpu", "counter", "seconds", "Time in which the power limit lowered the clocks", 1e-09, dcgm="DCGM_FI_DEV_POWER_VIOLATION", dcgm_factor=1e09),
    Metric("sync_boost_seconds_total", "gpu", "counter", "seconds", "Time in which a sync-boost group lowered the clocks", 1e-09, dcgm="DCGM_FI_DEV_SYNC_BOOST_VIOLATION", dcgm_factor=1e09),
    Metric("thermal_slowdown_seconds_total", "gpu", "counter", "seconds", "Time in which the driver lowered the clocks because of heat", 1e-09, dcgm="DCGM_FI_DEV_THERMAL_VIOLATION", dcgm_factor=1e09, title="time slowed by the driver because of heat"),
    Metric("hardware_thermal_slowdown_seconds_total", "gpu", "counter", "seconds", "Time in which the hardware lowered the clocks because of heat", 1e-09, title="time slowed by the hardware because of heat"),
    Metric("power_brake_seconds_total", "gpu", "counter", "seconds", "Time in which an external power brake lowered the clocks", 1e-09, title="time slowed by the power brake"),
    Metric("performance_state", "gpu", "gauge", "1", "Performance state (P-state): 0 is the fastest, 15 the slowest", dcgm="DCGM_FI_DEV_PSTATE"),
    Metric("pcie_link_generation", "gpu", "gauge", "1", "Current PCIe generation of the link (lower when idle)", dcgm="DCGM_FI_DEV_PCIE_LINK_GEN", title="PCIe generation"),
    Metric("pcie_link_generation_max", "gpu", "gauge", "1", "Maximum PCIe generation that the GPU and the slot support", dcgm="DCGM_FI_DEV_PCIE_MAX_LINK_GEN", fact=True),
    Metric("pcie_link_width", "gpu", "gauge", "lanes", "Current number of PCIe lanes", dcgm="DCGM_FI_DEV_PCIE_LINK_WIDTH", title="PCIe lanes"),
    Metric("pcie_link_width_max", "gpu", "gauge", "lanes", "Maximum number of PCIe lanes that the GPU and the slot support", dcgm="DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", fact=True),
    Metric("pcie_replays_total", "gpu", "counter", "1", "PCIe packets that were resent (replays)", dcgm="DCGM_FI_DEV_PCIE_REPLAY_COUNTER", title="PCIe packets resent"),
    Metric("pcie_rx_bytes_total", "gpu", "counter", "bytes", "Bytes received by the GPU over PCIe"),
    Metric("pcie_tx_bytes_total", "gpu", "counter", "bytes", "Bytes sent by the GPU over PCIe"),
    Metric("pcie_rx_bytes_per_second", "gpu", "gauge", "bytes/second", "Bytes per second received by the GPU over PCIe", 1024, dcgm="DCGM_FI_PROF_PCIE_RX_BYTES", otel="hw.gpu.io", title="PCIe traffic to the GPU"),
    Metric("pcie_tx_bytes_per_second", "gpu", "gauge", "bytes/second", "Bytes per second sent by the GPU over PCIe", 1024, dcgm="DCGM_FI_PROF_PCIE_TX_BYTES", otel="hw.gpu.io", title="PCIe traffic from the GPU"),
    Metric("nvlink_rx_bytes_total", "gpu", "counter", "bytes", "Bytes received by the GPU over all NVLinks", 1024),
    Metric("nvlink_tx_bytes_total", "gpu", "counter", "bytes", "Bytes sent by the GPU over all NVLinks", 1024),
    Metric("nvlink_rx_bytes_per_second", "gpu", "gauge", "bytes/second", "Bytes per second received by the GPU over all NVLinks", 1024, dcgm="DCGM_FI_PROF_NVLINK_RX_BYTES"),
    Metric("nvlink_tx_bytes_per_second", "gpu", "gauge", "bytes/second", "Bytes per second sent by the GPU over all NVLinks", 1024, dcgm="DCGM_FI_PROF_NVLINK_TX_BYTES"),
    Metric("nvlink_links", "gpu", "gauge", "1", "Number of NVLinks of the GPU"),
    Metric("nvlink_links_active", "gpu", "gauge", "1", "Number of NVLinks that are up"),
    Metric("nvlink_link_bytes_per_second", "gpu", "gauge", "bytes/second", "Speed of one NVLink in one direction", 1_000_000),
    Metric("nvlink_errors_total", "gpu", "counter", "1", "Replay, recovery and CRC errors on all NVLinks"),
    Metric("ecc_enabled", "gpu", "gauge", "bool", "1 when error correction (ECC) is enabled"),
    Metric("ecc_corrected_errors_total", "gpu", "counter", "1", "Memory errors corrected since the driver was loaded", dcgm="DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"),
    Metric("ecc_uncorrected_errors_total", "gpu", "counter", "1", "Uncorrectable memory errors since the driver was loaded", dcgm="DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", title="uncorrectable memory errors"),
    Metric("ecc_corrected_errors_lifetime_total", "gpu", "counter", "1", "Memory errors corrected over the lifetime of the board", dcgm="DCGM_FI_DEV_ECC_SBE_AGG_TOTAL"),
    Metric("ecc_uncorrected_errors_lifetime_total", "gpu", "counter", "1", "Uncorrectable memory errors over the lifetime of the board", dcgm="DCGM_FI_DEV_ECC_DBE_AGG_TOTAL"),
    Metric("retired_pages_corrected", "gpu", "gauge", "1", "Memory pages retired after many corrected errors", dcgm="DCGM_FI_DEV_RETIRED_SBE"),
    Metric("retired_pages_uncorrected", "gpu", "gauge", "1", "Memory pages retired after an uncorrected error", dcgm="DCGM_FI_DEV_RETIRED_DBE"),
    Metric("retired_pages_pending", "gpu", "gauge", "bool", "1 when a page will be retired at the next reset", dcgm="DCGM_FI_DEV_RETIRED_PENDING", title="memory pages to be retired"),
    Metric("remapped_rows_corrected", "gpu", "gauge", "1", "Memory rows remapped after corrected errors", dcgm="DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"),
    Metric("remapped_rows_uncorrected", "gpu", "gauge", "1", "Memory rows remapped after uncorrected errors", dcgm="DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS"),
    Metric("remapped_rows_pending", "gpu", "gauge", "bool", "1 when a row will be remapped at the next reset", title="memory rows to be remapped"),
    Metric("remapped_rows_failed", "gpu", "gauge", "bool", "1 when a row could not be remapped", dcgm="DCGM_FI_DEV_ROW_REMAP_FAILURE", title="memory rows not remapped"),
    Metric("recovery_action", "gpu", "gauge", "1", "Recovery action that the driver requests: 0 none, 1 reset, 2 reboot, 3 drain peer-to-peer traffic, 4 drain and reset", title="recovery action requested by the driver"),
    Metric("xid_errors_total", "gpu", "counter", "1", "Xid errors since sampling started", title="Xid errors"),
    Metric("xid_last_code", "gpu", "gauge", "1", "Code of the last Xid error", dcgm="DCGM_FI_DEV_XID_ERRORS"),
    Metric("xid_last_timestamp_seconds", "gpu", "gauge", "seconds", "Time of the last Xid error in epoch seconds", 0.001),
    Metric("mig_enabled", "gpu", "gauge", "bool", "1 when the GPU is split into MIG instances", dcgm="DCGM_FI_DEV_MIG_MODE"),
    Metric("compute_mode", "gpu", "gauge", "1", "Compute mode: 0 allows any number of processes, 2 none, 3 only one", dcgm="DCGM_FI_DEV_COMPUTE_MODE"),
    Metric("persistence_enabled", "gpu", "gauge", "bool", "1 when the driver stays loaded while no program uses the GPU (persistence mode)", dcgm="DCGM_FI_DEV_PERSISTENCE_MODE"),
    Metric("display_active", "gpu", "gauge", "bool", "1 when the GPU drives a display"),
    Metric("graphics_active_ratio", "gpu", "ratio", "1", "Fraction of time in which the compute or graphics engine was active", 0.0001, dcgm="DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    Metric("sm_active_ratio", "gpu", "ratio", "1", "Fraction of SMs (streaming multiprocessors) with at least one resident warp, even if it is stalled", 0.0001, dcgm="DCGM_FI_PROF_SM_ACTIVE", title="SMs in use"),
    Metric("sm_occupancy_ratio", "gpu", "ratio", "1", "Resident warps relative to the maximum", 0.0001, dcgm="DCGM_FI_PROF_SM_OCCUPANCY"),
    Metric("integer_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the integer pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_INT_ACTIVE"),
    Metric("tensor_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the tensor cores were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", title="tensor cores in use"),
    Metric("tensor_fp64_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the tensor cores computed in double precision", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE"),
    Metric("tensor_half_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the tensor cores computed with 8-bit floats, 16-bit floats or TF32", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE"),
    Metric("tensor_integer_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the tensor cores computed with integers", 0.0001, dcgm="DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE"),
    Metric("dram_active_ratio", "gpu", "ratio", "1", "Fraction of the peak device memory bandwidth in use", 0.0001, dcgm="DCGM_FI_PROF_DRAM_ACTIVE", title="GPU memory interface in use"),
    Metric("fp64_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the double-precision pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP64_ACTIVE", title="fp64 pipes in use"),
    Metric("fp32_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the single-precision pipes were busy", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP32_ACTIVE", title="fp32 pipes in use"),
    Metric("fp16_active_ratio", "gpu", "ratio", "1", "Fraction of cycles in which the half-precision pipes were busy, not counting tensor cores", 0.0001, dcgm="DCGM_FI_PROF_PIPE_FP16_ACTIVE", title="fp16 pipes in use"),
    Metric("harvest_state", "gpu", "gauge", "1", "State of the GPU in a harvest: 0 in use by people, 1 idle and waiting, 2 harvested, 3 being given back, 4 unknown; absent if no harvest is running"),
    Metric("harvested_seconds_total", "gpu", "counter", "seconds", "Time in which harvest programs ran on the GPU", 0.001),
    Metric("harvest_preemptions_total", "gpu", "counter", "1", "Number of times that a harvest program had to give back the GPU"),
    Metric("cpu_utilization_ratio", "host", "ratio", "1", "Fraction of CPU time in use, over all CPUs", 0.0001, derived=True, otel="system.cpu.utilization", title="CPUs in use"),
    Metric("cpu_iowait_ratio", "host", "ratio", "1", "Fraction of CPU time spent idle while waiting for disks, over all CPUs", 0.0001, derived=True),
    Metric("cpu_user_seconds_total", "host", "counter", "seconds", "CPU time in user mode, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_nice_seconds_total", "host", "counter", "seconds", "CPU time in user mode with lowered priority, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_system_seconds_total", "host", "counter", "seconds", "CPU time in the kernel, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_idle_seconds_total", "host", "counter", "seconds", "Idle time, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_iowait_seconds_total", "host", "counter", "seconds", "Idle time while waiting for disks, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_irq_seconds_total", "host", "counter", "seconds", "CPU time in interrupts, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_softirq_seconds_total", "host", "counter", "seconds", "CPU time in soft interrupts, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpu_steal_seconds_total", "host", "counter", "seconds", "CPU time taken by the hypervisor, over all CPUs", 0.01, otel="system.cpu.time"),
    Metric("cpus", "host", "gauge", "1", "Number of online CPUs", otel="system.cpu.logical.count"),
    Metric("load1", "host", "gauge", "1", "Load average over one minute: running and waiting tasks", 0.01),
    Metric("load5", "host", "gauge", "1", "Load average over five minutes: running and waiting tasks", 0.01),
    Metric("load15", "host", "gauge", "1", "Load average over fifteen minutes: running and waiting tasks", 0.01),
    Metric("processes_running", "host", "gauge", "1", "Tasks that are currently runnable"),
    Metric("processes_blocked", "host", "gauge", "1", "Tasks that currently wait for a disk"),
    Metric("context_switches_total", "host", "counter", "1", "Context switches"),
    Metric("context_switches_per_second", "host", "gauge", "1/second", "Context switches per second", 0.1, derived=True),
    Metric("memory_total_bytes", "host", "gauge", "bytes", "Total memory of the machine", 1024, otel="system.memory.limit", fact=True),
    Metric("memory_available_bytes", "host", "gauge", "bytes", "Memory available to programs without swapping", 1024, title="host memory available"),
    Metric("memory_free_bytes", "host", "gauge", "bytes", "Unused memory", 1024),
    Metric("memory_cached_bytes", "host", "gauge", "bytes", "Memory used by the page cache", 1024),
    Metric("memory_shared_bytes", "host", "gauge", "bytes", "Memory used by shared memory segments and tmpfs", 1024),
    Metric("memory_dirty_bytes", "host", "gauge", "bytes", "File data not yet written to disk", 1024),
    Metric("memory_writeback_bytes", "host", "gauge", "bytes", "File data being written to disk", 1024),
    Metric("swap_total_bytes", "host", "gauge", "bytes", "Total swap space", 1024),
    Metric("swap_free_bytes", "host", "gauge", "bytes", "Free swap space", 1024),
    Metric("swap_in_pages_total", "host", "counter", "1", "Pages swapped in"),
    Metric("swap_out_pages_total", "host", "counter", "1", "Pages swapped out"),
    Metric("swap_in_pages_per_second", "host", "gauge", "1/second", "Pages swapped in per second", 0.1, derived=True, title="pages swapped in per second"),
    Metric("swap_out_pages_per_second", "host", "gauge", "1/second", "Pages swapped out per second", 0.1, derived=True),
    Metric("major_faults_total", "host", "counter", "1", "Page faults that had to read from disk"),
    Metric("major_faults_per_second", "host", "gauge", "1/second", "Page faults per second that had to read from disk", 0.1, derived=True),
    Metric("direct_reclaim_pages_total", "host", "counter", "1", "Pages reclaimed directly by programs that were allocating memory"),
    Metric("refaults_total", "host", "counter", "1", "File pages that were read again soon after they were evicted from the cache"),
    Metric("oom_kills_total", "host", "counter", "1", "Processes killed because memory ran out", title="processes killed for lack of memory"),
    Metric("pressure_cpu_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for a CPU", 1e-06),
    Metric("pressure_cpu_full_seconds_total", "host", "counter", "seconds", "Time in which all non-idle tasks waited for a CPU", 1e-06),
    Metric("pressure_io_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for a disk", 1e-06),
    Metric("pressure_io_full_seconds_total", "host", "counter", "seconds", "Time in which all non-idle tasks waited for a disk", 1e-06),
    Metric("pressure_memory_some_seconds_total", "host", "counter", "seconds", "Time in which at least one task waited for memory", 1e-06),
    Metric("pressure_memory_full_seconds_total", "host", "counter", "seconds", "Time in which all non-idle tasks waited for memory", 1e-06),
    Metric("pressure_cpu_some_ratio", "host", "ratio", "1", "Fraction of time in which at least one task waited for a CPU", 0.0001, derived=True, title="some tasks waiting for a CPU (PSI)"),
    Metric("pressure_cpu_full_ratio", "host", "ratio", "1", "Fraction of time in which all non-idle tasks waited for a CPU", 0.0001, derived=True),
    Metric("pressure_io_some_ratio", "host", "ratio", "1", "Fraction of time in which at least one task waited for a disk", 0.0001, derived=True, title="some tasks waiting for I/O (PSI)"),
    Metric("pressure_io_full_ratio", "host", "ratio", "1", "Fraction of time in which all non-idle tasks waited for a disk", 0.0001, derived=True),
    Metric("pressure_memory_some_ratio", "host", "ratio", "1", "Fraction of time in which at least one task waited for memory", 0.0001, derived=True),
    Metric("pressure_memory_full_ratio", "host", "ratio", "1", "Fraction of time in which all non-idle tasks waited for memory", 0.0001, derived=True, title="all tasks stalled on memory (PSI)"),
    Metric("read_bytes_total", "disk", "counter", "bytes", "Bytes read from the disk", 512, otel="system.disk.io"),
    Metric("written_bytes_total", "disk", "counter", "bytes", "Bytes written to the disk", 512, otel="system.disk.io"),
    Metric("reads_total", "disk", "counter", "1", "Reads completed by the disk", otel="system.disk.operations"),
    Metric("writes_total", "disk", "counter", "1", "Writes completed by the disk", otel="system.disk.operations"),
    Metric("read_seconds_total", "disk", "counter", "seconds", "Time spent on reads from the disk, summed over all reads", 0.001),
    Metric("write_seconds_total", "disk", "counter", "seconds", "Time spent on writes to the disk, summed over all writes", 0.001),
    Metric("busy_seconds_total", "disk", "counter", "seconds", "Time in which at least one disk request was in flight", 0.001, otel="system.disk.io_time"),
    Metric("queue_seconds_total", "disk", "counter", "seconds", "Time that disk requests spent in flight, summed over all requests", 0.001),
    Metric("requests_in_flight", "disk", "gauge", "1", "Disk requests currently in flight"),
    Metric("read_bytes_per_second", "disk", "gauge", "bytes/second", "Bytes read from the disk per second", derived=True),
    Metric("written_bytes_per_second", "disk", "gauge", "bytes/second", "Bytes written to the disk per second", derived=True),
    Metric("reads_per_second", "disk", "gauge", "1/second", "Reads completed by the disk per second", 0.1, derived=True),
    Metric("writes_per_second", "disk", "gauge", "1/second", "Writes completed by the disk per second", 0.1, derived=True),
    Metric("read_await_seconds", "disk", "gauge", "seconds", "Mean time of a disk read, including queueing", 1e-06, derived=True),
    Metric("write_await_seconds", "disk", "gauge", "seconds", "Mean time of a disk write, including queueing", 1e-06, derived=True),
    Metric("await_seconds", "disk", "gauge", "seconds", "Mean time of a disk request, including queueing", 1e-06, derived=True),
    Metric("queue_length", "disk", "gauge", "1", "Mean number of disk requests in flight", 0.01, derived=True),
    Metric("busy_ratio", "disk", "ratio", "1", "Fraction of time with at least one disk request in flight; on an SSD, 100% does not mean saturation", 0.0001, derived=True),
    Metric("size_bytes", "filesystem", "gauge", "bytes", "Size of the file system", otel="system.filesystem.limit"),
    Metric("used_bytes", "filesystem", "gauge", "bytes", "Bytes in use on the file system", otel="system.filesystem.usage"),
    Metric("available_bytes", "filesystem", "gauge", "bytes", "Bytes of the file system available to unprivileged users"),
    Metric("nfs_reads_total", "filesystem", "counter", "1", "READ operations completed by the NFS server"),
    Metric("nfs_read_bytes_total", "filesystem", "counter", "bytes", "Bytes read from the NFS server"),
    Metric("nfs_read_round_trip_seconds_total", "filesystem", "counter", "seconds", "Round-trip time of READs to the NFS server, summed over all READs", 0.001),
    Metric("nfs_read_seconds_total", "filesystem", "counter", "seconds", "Time spent on READs from the NFS server, including queueing", 0.001),
    Metric("nfs_writes_total", "filesystem", "counter", "1", "WRITE operations completed by the NFS server"),
    Metric("nfs_written_bytes_total", "filesystem", "counter", "bytes", "Bytes written to the NFS server"),
    Metric("nfs_retransmissions_total", "filesystem", "counter", "1", "READs and WRITEs retransmitted to the NFS server"),
    Metric("nfs_reads_per_second", "filesystem", "gauge", "1/second", "READs completed by the NFS server per second", 0.1, derived=True),
    Metric("nfs_read_bytes_per_second", "filesystem", "gauge", "bytes/second", "Bytes read from the NFS server per second", derived=True),
    Metric("nfs_read_await_seconds", "filesystem", "gauge", "seconds", "Mean time of a READ from the NFS server, including queueing", 1e-06, derived=True),
    Metric("nfs_read_round_trip_seconds", "filesystem", "gauge", "seconds", "Mean round-trip time of a READ to the NFS server", 1e-06, derived=True),
    Metric("nfs_reads_in_flight", "filesystem", "gauge", "1", "Mean number of READs in flight to the NFS server", 0.01, derived=True, title="NFS reads in flight"),
    Metric("rx_bytes_total", "network", "counter", "bytes", "Bytes received on the network link", otel="system.network.io"),
    Metric("rx_bytes_per_second", "network", "gauge", "bytes/second", "Bytes received per second on the network link", 0.1, derived=True),
    Metric("tx_bytes_total", "network", "counter", "bytes", "Bytes sent on the network link", otel="system.network.io"),
    Metric("tx_bytes_per_second", "network", "gauge", "bytes/second", "Bytes sent per second on the network link", 0.1, derived=True),
    Metric("rx_packets_total", "network", "counter", "1", "Packets received", otel="system.network.packet.count"),
    Metric("rx_packets_per_second", "network", "gauge", "1/second", "Packets received per second", 0.1, derived=True),
    Metric("tx_packets_total", "network", "counter", "1", "Packets sent", otel="system.network.packet.count"),
    Metric("tx_packets_per_second", "network", "gauge", "1/second", "Packets sent per second", 0.1, derived=True),
    Metric("rx_errors_total", "network", "counter", "1", "Packets received with errors", otel="system.network.errors"),
    Metric("rx_errors_per_second", "network", "gauge", "1/second", "Packets received with errors, per second", 0.1, derived=True),
    Metric("tx_errors_total", "network", "counter", "1", "Packets that could not be sent", otel="system.network.errors"),
    Metric("tx_errors_per_second", "network", "gauge", "1/second", "Packets that could not be sent, per second", 0.1, derived=True),
    Metric("rx_drops_total", "network", "counter", "1", "Received packets that were dropped", otel="system.network.packet.dropped"),
    Metric("rx_drops_per_second", "network", "gauge", "1/second", "Received packets that were dropped, per second", 0.1, derived=True),
    Metric("tx_drops_total", "network", "counter", "1", "Packets dropped before sending", otel="system.network.packet.dropped"),
    Metric("tx_drops_per_second", "network", "gauge", "1/second", "Packets dropped before sending, per second", 0.1, derived=True),
    Metric("link_bits_per_second", "network", "gauge", "bits/second", "Speed of the network link", 1_000_000, prometheus_name="link_bytes_per_second", prometheus_factor=2**-3),
    Metric("gpu_memory_bytes", "process", "gauge", "bytes", "Device memory used by the process on this GPU"),
    Metric("sm_ratio", "process", "ratio", "1", "The process's share of the GPU: fraction of time in which its kernels ran", 0.01, title="share of the GPU"),
    Metric("cpu_percent", "process", "gauge", "percent", "CPU use of the process, in percent of one CPU", 0.1, derived=True),
    Metric("elapsed_seconds", "process", "gauge", "seconds", "Time since the process started", derived=True),
    Metric("cpu_user_seconds_total", "process", "counter", "seconds", "CPU time of the process in user mode", 0.01, otel="process.cpu.time"),
    Metric("cpu_system_seconds_total", "process", "counter", "seconds", "CPU time of the process in the kernel", 0.01, otel="process.cpu.time"),
    Metric("run_wait_seconds_total", "process", "counter", "seconds", "Time in which the process's main thread could run but no CPU was free", 1e-09),
    Metric("run_wait_ratio", "process", "ratio", "1", "Fraction of time in which the process's main thread could run but no CPU was free", 0.0001, derived=True, title="main thread waiting for a CPU"),
    Metric("block_wait_seconds_total", "process", "counter", "seconds", "Time in which the process waited for a disk", 0.01),
    Metric("host_memory_bytes", "process", "gauge", "bytes", "Resident memory of the process", 4096, otel="process.memory.usage"),
    Metric("threads", "process", "gauge", "1", "Number of threads of the process", otel="process.thread.count"),
    Metric("last_cpu", "process", "gauge", "1", "CPU on which the process's main thread last ran"),
    Metric("cpus_allowed", "process", "gauge", "1", "Number of CPUs on which the process may run"),
    Metric("major_faults_total", "process", "counter", "1", "Page faults of the process that had to read from disk"),
    Metric("read_bytes_total", "process", "counter", "bytes", "Bytes read from disks by the process", otel="process.disk.io"),
    Metric("written_bytes_total", "process", "counter", "bytes", "Bytes written to disks by the process", otel="process.disk.io"),
    Metric("read_chars_total", "process", "counter", "bytes", "Bytes read by the process, including from the page cache"),
    Metric("written_chars_total", "process", "counter", "bytes", "Bytes written by the process, including to the page cache"),
    Metric("read_bytes_per_second", "process", "gauge", "bytes/second", "Bytes per second read from disks by the process", derived=True),
    Metric("written_bytes_per_second", "process", "gauge", "bytes/second", "Bytes per second written to disks by the process", derived=True),
    Metric("cpu_limit_cores", "cgroup", "gauge", "1", "CPU limit of the cgroup, in CPUs", 0.001),
    Metric("cpu_periods_total", "cgroup", "counter", "1", "Scheduling periods in which the cgroup was runnable"),
    Metric("cpu_throttled_periods_total", "cgroup", "counter", "1", "Scheduling periods in which the cgroup used up its CPU limit"),
    Metric("cpu_throttled_seconds_total", "cgroup", "counter", "seconds", "Time in which the cgroup's tasks were throttled by its CPU limit", 1e-06),
    Metric("cpu_throttled_ratio", "cgroup", "ratio", "1", "Fraction of scheduling periods in which the cgroup used up its CPU limit", 0.0001, derived=True, title="throttled scheduling periods"),
    Metric("memory_limit_bytes", "cgroup", "gauge", "bytes", "Memory limit of the cgroup"),
    Metric("memory_used_bytes", "cgroup", "gauge", "bytes", "Memory used by the cgroup, including page cache"),
    Metric("oom_kills_total", "cgroup", "counter", "1", "Processes of the cgroup killed because its memory ran out"),
)
# fmt: on

CATALOG: dict[Scope, dict[str, Metric]] = {
    scope: {row.name: row for row in _ROWS if row.scope == scope}
    for scope in dict.fromkeys(row.scope for row in _ROWS)
}
"""Every metric, by scope and name, in the order in which views show them."""


def metric_names(scope: Scope, *, derived: bool = True) -> list[str]:
    """Return the metric names of one scope, with or without derived metrics."""
    return [metric.name for metric in CATALOG[scope].values() if derived or not metric.derived]


def is_finite(value: Value) -> bool:
    """Whether a number is finite as a float: neither NaN nor infinite, nor an integer beyond a float's range."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def to_portable(value: Value | None) -> Value | None:
    """Return the number in a form that every file format can hold.

    Non-finite numbers become None, and integers beyond signed 64 bits become floats.
    """
    if value is None or not is_finite(value):
        return None
    return value if isinstance(value, float) or -MAX_INTEGER - 1 <= value <= MAX_INTEGER else float(value)
