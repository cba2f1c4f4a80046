"""The one metric catalogue: every number gpulse knows, its unit, its meaning and its names elsewhere.

JSON keys, CSV and SQLite columns, terminal labels and documentation all come from these rows. A name
holds its base unit and, once shipped, never changes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Value = int | float
Values = dict[str, Value]
"""Readings by catalogue name. A name that is absent was not had: unknown, never zero."""

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

    @property
    def prometheus(self) -> str:
        """The name in Prometheus' exposition."""
        return f"gpulse_{self.scope}_{self.name}"


# fmt: off  a table reads as a table
def _gpu() -> list[Metric]:
    def row(
        name: str,
        kind: Kind,
        unit: str,
        text: str,
        resolution: float = 1,
        dcgm: str | None = None,
        otel: str | None = None,
        *,
        derived: bool = False,
    ) -> Metric:
        return Metric(name, "gpu", kind, unit, text, resolution, derived, dcgm, otel)

    def prof(name: str, text: str, dcgm: str | None = None) -> Metric:
        return row(name, "ratio", "1", text, 0.00001, dcgm)

    return [
        row(
            "gpu_utilization_ratio",
            "ratio",
            "1",
            "Share of time in which at least one kernel was resident; says nothing about how much of the GPU it used",
            0.01,
            "DCGM_FI_DEV_GPU_UTIL",
            "hw.gpu.utilization",
        ),
        row(
            "memory_utilization_ratio",
            "ratio",
            "1",
            "Share of time in which device memory was read or written",
            0.01,
            "DCGM_FI_DEV_MEM_COPY_UTIL",
        ),
        row(
            "encoder_utilization_ratio",
            "ratio",
            "1",
            "Share of time in which the video encoder was busy",
            0.01,
            "DCGM_FI_DEV_ENC_UTIL",
        ),
        row(
            "decoder_utilization_ratio",
            "ratio",
            "1",
            "Share of time in which the video decoder was busy",
            0.01,
            "DCGM_FI_DEV_DEC_UTIL",
        ),
        row(
            "memory_total_bytes",
            "gauge",
            "bytes",
            "Device memory on the board",
            1,
            "DCGM_FI_DEV_FB_TOTAL",
            "hw.gpu.memory.limit",
        ),
        row(
            "memory_used_bytes",
            "gauge",
            "bytes",
            "Device memory allocated by processes",
            1,
            "DCGM_FI_DEV_FB_USED",
            "hw.gpu.memory.usage",
        ),
        row("memory_free_bytes", "gauge", "bytes", "Device memory not allocated", 1, "DCGM_FI_DEV_FB_FREE"),
        row(
            "memory_reserved_bytes",
            "gauge",
            "bytes",
            "Device memory that the driver keeps for itself",
            1,
            "DCGM_FI_DEV_FB_RESERVED",
        ),
        row(
            "power_watts",
            "gauge",
            "watts",
            "Power draw, averaged by the driver",
            0.001,
            "DCGM_FI_DEV_POWER_USAGE",
            "hw.power",
        ),
        row(
            "power_instant_watts",
            "gauge",
            "watts",
            "Power draw at this instant",
            0.001,
            "DCGM_FI_DEV_POWER_USAGE_INSTANT",
        ),
        row(
            "power_limit_watts",
            "gauge",
            "watts",
            "Power limit in force",
            0.001,
            "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
        ),
        row(
            "power_default_limit_watts",
            "gauge",
            "watts",
            "Power limit the board ships with",
            0.001,
            "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF",
        ),
        row(
            "power_min_limit_watts",
            "gauge",
            "watts",
            "Lowest power limit that can be set",
            0.001,
            "DCGM_FI_DEV_POWER_MGMT_LIMIT_MIN",
        ),
        row(
            "power_max_limit_watts",
            "gauge",
            "watts",
            "Highest power limit that can be set",
            0.001,
            "DCGM_FI_DEV_POWER_MGMT_LIMIT_MAX",
        ),
        row(
            "energy_joules_total",
            "counter",
            "joules",
            "Energy used since the driver was loaded",
            0.001,
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            "hw.energy",
        ),
        row(
            "temperature_celsius",
            "gauge",
            "celsius",
            "Temperature of the GPU die",
            1,
            "DCGM_FI_DEV_GPU_TEMP",
            "hw.temperature",
        ),
        row(
            "memory_temperature_celsius",
            "gauge",
            "celsius",
            "Temperature of the device memory",
            1,
            "DCGM_FI_DEV_MEMORY_TEMP",
        ),
        row(
            "temperature_margin_celsius",
            "gauge",
            "celsius",
            "Degrees left before the driver slows the GPU down",
            1,
            "DCGM_FI_DEV_GPU_TEMP_LIMIT",
        ),
        row(
            "temperature_slowdown_celsius",
            "gauge",
            "celsius",
            "Temperature at which the hardware slows the GPU down",
            1,
            "DCGM_FI_DEV_SLOWDOWN_TEMP",
        ),
        row(
            "temperature_shutdown_celsius",
            "gauge",
            "celsius",
            "Temperature at which the GPU switches itself off",
            1,
            "DCGM_FI_DEV_SHUTDOWN_TEMP",
        ),
        row(
            "temperature_max_celsius",
            "gauge",
            "celsius",
            "Highest temperature of the die at which it may run at full speed",
            1,
            "DCGM_FI_DEV_GPU_MAX_OP_TEMP",
        ),
        row(
            "memory_temperature_max_celsius",
            "gauge",
            "celsius",
            "Highest temperature of the memory at which it may run at full speed",
            1,
            "DCGM_FI_DEV_MEM_MAX_OP_TEMP",
        ),
        row(
            "fan_speed_ratio",
            "ratio",
            "1",
            "Fan speed over its maximum, averaged over the fans",
            0.01,
            "DCGM_FI_DEV_FAN_SPEED",
        ),
        row(
            "sm_clock_hertz",
            "gauge",
            "hertz",
            "Clock of the multiprocessors",
            1_000_000,
            "DCGM_FI_DEV_SM_CLOCK",
        ),
        row(
            "sm_clock_max_hertz",
            "gauge",
            "hertz",
            "Highest clock of the multiprocessors",
            1_000_000,
            "DCGM_FI_DEV_MAX_SM_CLOCK",
        ),
        row(
            "sm_clock_application_hertz",
            "gauge",
            "hertz",
            "Clock of the multiprocessors that applications ask for",
            1_000_000,
            "DCGM_FI_DEV_APP_SM_CLOCK",
        ),
        row(
            "memory_clock_hertz",
            "gauge",
            "hertz",
            "Clock of the device memory",
            1_000_000,
            "DCGM_FI_DEV_MEM_CLOCK",
        ),
        row(
            "memory_clock_max_hertz",
            "gauge",
            "hertz",
            "Highest clock of the device memory",
            1_000_000,
            "DCGM_FI_DEV_MAX_MEM_CLOCK",
        ),
        row(
            "video_clock_hertz",
            "gauge",
            "hertz",
            "Clock of the video engines",
            1_000_000,
            "DCGM_FI_DEV_VIDEO_CLOCK",
        ),
        row(
            "video_clock_max_hertz",
            "gauge",
            "hertz",
            "Highest clock of the video engines",
            1_000_000,
            "DCGM_FI_DEV_MAX_VIDEO_CLOCK",
        ),
        row(
            "clocks_event_reasons",
            "gauge",
            "bitmask",
            "NVML's bit mask of what holds the clocks down now",
            1,
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
        ),
        row(
            "power_cap_seconds_total",
            "counter",
            "seconds",
            "Time in which the power limit held the clocks down",
            1e-9,
            "DCGM_FI_DEV_POWER_VIOLATION",
        ),
        row(
            "sync_boost_seconds_total",
            "counter",
            "seconds",
            "Time in which a sync-boost group held the clocks down",
            1e-9,
            "DCGM_FI_DEV_SYNC_BOOST_VIOLATION",
        ),
        row(
            "thermal_slowdown_seconds_total",
            "counter",
            "seconds",
            "Time in which the driver held the clocks down because of heat",
            1e-9,
            "DCGM_FI_DEV_THERMAL_VIOLATION",
        ),
        row(
            "hardware_thermal_slowdown_seconds_total",
            "counter",
            "seconds",
            "Time in which the hardware held the clocks down because of heat",
            1e-9,
        ),
        row(
            "power_brake_seconds_total",
            "counter",
            "seconds",
            "Time in which an external power brake held the clocks down",
            1e-9,
        ),
        row(
            "performance_state",
            "gauge",
            "1",
            "P-state: 0 is the fastest, 15 the slowest",
            1,
            "DCGM_FI_DEV_PSTATE",
        ),
        row(
            "pcie_link_generation",
            "gauge",
            "1",
            "PCIe generation of the link now (falls when idle)",
            1,
            "DCGM_FI_DEV_PCIE_LINK_GEN",
        ),
        row(
            "pcie_link_generation_max",
            "gauge",
            "1",
            "Highest PCIe generation of GPU and slot together",
            1,
            "DCGM_FI_DEV_PCIE_MAX_LINK_GEN",
        ),
        row(
            "pcie_link_width",
            "gauge",
            "lanes",
            "PCIe lanes of the link now",
            1,
            "DCGM_FI_DEV_PCIE_LINK_WIDTH",
        ),
        row(
            "pcie_link_width_max",
            "gauge",
            "lanes",
            "PCIe lanes of GPU and slot together at most",
            1,
            "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH",
        ),
        row(
            "pcie_replays_total",
            "counter",
            "1",
            "PCIe packets that had to be sent again",
            1,
            "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        ),
        row("pcie_rx_bytes_total", "counter", "bytes", "Bytes that reached the GPU over PCIe", 1),
        row("pcie_tx_bytes_total", "counter", "bytes", "Bytes that left the GPU over PCIe", 1),
        row(
            "pcie_rx_bytes_per_second",
            "gauge",
            "bytes/second",
            "Rate of bytes that reach the GPU over PCIe",
            1024,
            "DCGM_FI_PROF_PCIE_RX_BYTES",
            "hw.gpu.io",
        ),
        row(
            "pcie_tx_bytes_per_second",
            "gauge",
            "bytes/second",
            "Rate of bytes that leave the GPU over PCIe",
            1024,
            "DCGM_FI_PROF_PCIE_TX_BYTES",
            "hw.gpu.io",
        ),
        row("nvlink_rx_bytes_total", "counter", "bytes", "Bytes that reached the GPU over all NVLinks", 1024),
        row("nvlink_tx_bytes_total", "counter", "bytes", "Bytes that left the GPU over all NVLinks", 1024),
        row(
            "nvlink_rx_bytes_per_second",
            "gauge",
            "bytes/second",
            "Rate of bytes that reach the GPU over all NVLinks",
            1024,
            "DCGM_FI_PROF_NVLINK_RX_BYTES",
        ),
        row(
            "nvlink_tx_bytes_per_second",
            "gauge",
            "bytes/second",
            "Rate of bytes that leave the GPU over all NVLinks",
            1024,
            "DCGM_FI_PROF_NVLINK_TX_BYTES",
        ),
        row("nvlink_links", "gauge", "1", "NVLinks that the GPU has"),
        row("nvlink_links_active", "gauge", "1", "NVLinks that are up"),
        row(
            "nvlink_errors_total",
            "counter",
            "1",
            "Errors counted on all NVLinks: replays, recoveries, CRC",
            1,
        ),
        row("ecc_enabled", "gauge", "bool", "1 when error correction is on"),
        row(
            "ecc_corrected_errors_total",
            "counter",
            "1",
            "Memory errors corrected since the driver was loaded",
            1,
            "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
        ),
        row(
            "ecc_uncorrected_errors_total",
            "counter",
            "1",
            "Memory errors that could not be corrected since the driver was loaded",
            1,
            "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        ),
        row(
            "ecc_corrected_errors_lifetime_total",
            "counter",
            "1",
            "Memory errors corrected in the board's life",
            1,
            "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL",
        ),
        row(
            "ecc_uncorrected_errors_lifetime_total",
            "counter",
            "1",
            "Memory errors that could not be corrected in the board's life",
            1,
            "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL",
        ),
        row(
            "retired_pages_corrected",
            "gauge",
            "1",
            "Memory pages retired after many corrected errors",
            1,
            "DCGM_FI_DEV_RETIRED_SBE",
        ),
        row(
            "retired_pages_uncorrected",
            "gauge",
            "1",
            "Memory pages retired after an uncorrected error",
            1,
            "DCGM_FI_DEV_RETIRED_DBE",
        ),
        row(
            "retired_pages_pending",
            "gauge",
            "bool",
            "1 when a page waits for a reset to be retired",
            1,
            "DCGM_FI_DEV_RETIRED_PENDING",
        ),
        row(
            "remapped_rows_corrected",
            "gauge",
            "1",
            "Memory rows remapped after corrected errors",
            1,
            "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        ),
        row(
            "remapped_rows_uncorrected",
            "gauge",
            "1",
            "Memory rows remapped after uncorrected errors",
            1,
            "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        ),
        row("remapped_rows_pending", "gauge", "bool", "1 when a row waits for a reset to be remapped"),
        row(
            "remapped_rows_failed",
            "gauge",
            "bool",
            "1 when a row could not be remapped",
            1,
            "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        ),
        row(
            "recovery_action",
            "gauge",
            "1",
            "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain peers, 4 drain and reset",
        ),
        row("xid_errors_total", "counter", "1", "Xid errors seen since sampling began"),
        row("xid_last_code", "gauge", "1", "Code of the last Xid error seen", 1, "DCGM_FI_DEV_XID_ERRORS"),
        row(
            "xid_last_timestamp_seconds",
            "gauge",
            "seconds",
            "When the last Xid error was seen, in epoch seconds",
            0.001,
        ),
        row(
            "mig_enabled",
            "gauge",
            "bool",
            "1 when the GPU is split into MIG instances",
            1,
            "DCGM_FI_DEV_MIG_MODE",
        ),
        row(
            "compute_mode",
            "gauge",
            "1",
            "Who may use the GPU: 0 anybody, 2 nobody, 3 one process",
            1,
            "DCGM_FI_DEV_COMPUTE_MODE",
        ),
        row(
            "persistence_enabled",
            "gauge",
            "bool",
            "1 when the driver stays loaded without a client",
            1,
            "DCGM_FI_DEV_PERSISTENCE_MODE",
        ),
        row("display_active", "gauge", "bool", "1 when a display is driven by the GPU"),
        prof(
            "graphics_active_ratio",
            "Share of time in which the compute or graphics engine was active",
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
        ),
        prof(
            "sm_active_ratio",
            "Share of multiprocessors with at least one warp, stalled ones included",
            "DCGM_FI_PROF_SM_ACTIVE",
        ),
        prof("sm_occupancy_ratio", "Resident warps over the most that fit", "DCGM_FI_PROF_SM_OCCUPANCY"),
        prof(
            "integer_active_ratio",
            "Share of cycles in which the integer pipes were busy",
            "DCGM_FI_PROF_PIPE_INT_ACTIVE",
        ),
        prof(
            "tensor_active_ratio",
            "Share of cycles in which the tensor cores were busy",
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        ),
        prof(
            "tensor_fp64_active_ratio",
            "Share of cycles of the tensor cores on double precision",
            "DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE",
        ),
        prof(
            "tensor_half_active_ratio",
            "Share of cycles of the tensor cores on 16-bit and 8-bit floats and TF32",
            "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE",
        ),
        prof(
            "tensor_integer_active_ratio",
            "Share of cycles of the tensor cores on integers",
            "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE",
        ),
        prof(
            "dram_active_ratio",
            "Share of the device memory's peak bandwidth in use",
            "DCGM_FI_PROF_DRAM_ACTIVE",
        ),
        prof(
            "fp64_active_ratio",
            "Share of cycles in which the double-precision pipes were busy",
            "DCGM_FI_PROF_PIPE_FP64_ACTIVE",
        ),
        prof(
            "fp32_active_ratio",
            "Share of cycles in which the single-precision pipes were busy",
            "DCGM_FI_PROF_PIPE_FP32_ACTIVE",
        ),
        prof(
            "fp16_active_ratio",
            "Share of cycles in which the half-precision pipes, tensor cores aside, were busy",
            "DCGM_FI_PROF_PIPE_FP16_ACTIVE",
        ),
    ]


def _host() -> list[Metric]:
    def row(
        name: str,
        kind: Kind,
        unit: str,
        text: str,
        resolution: float = 1,
        otel: str | None = None,
        *,
        derived: bool = False,
    ) -> Metric:
        return Metric(name, "host", kind, unit, text, resolution, derived, None, otel)

    states = {
        "user": "in programs",
        "nice": "in programs of lowered priority",
        "system": "in the kernel",
        "idle": "with nothing to do",
        "iowait": "with nothing to do but disks to wait for",
        "irq": "in interrupts",
        "softirq": "in soft interrupts",
        "steal": "taken by the hypervisor",
    }
    return [
        row(
            "cpu_utilization_ratio",
            "ratio",
            "1",
            "Share of all CPUs' time spent working",
            0.0001,
            "system.cpu.utilization",
            derived=True,
        ),
        row(
            "cpu_iowait_ratio",
            "ratio",
            "1",
            "Share of all CPUs' time spent idle while a disk was waited for",
            0.0001,
            derived=True,
        ),
        *(
            row(
                f"cpu_{state}_seconds_total",
                "counter",
                "seconds",
                f"Time of all CPUs {text}",
                0.01,
                "system.cpu.time",
            )
            for state, text in states.items()
        ),
        row("cpus", "gauge", "1", "CPUs online", 1, "system.cpu.logical.count"),
        row("load1", "gauge", "1", "Tasks running or waiting, averaged over one minute", 0.01),
        row("load5", "gauge", "1", "Tasks running or waiting, averaged over five minutes", 0.01),
        row("load15", "gauge", "1", "Tasks running or waiting, averaged over fifteen minutes", 0.01),
        row("processes_running", "gauge", "1", "Tasks that can run now"),
        row("processes_blocked", "gauge", "1", "Tasks that wait for a disk now"),
        row("context_switches_total", "counter", "1", "Switches from one task to another"),
        row(
            "context_switches_per_second",
            "gauge",
            "1/second",
            "Rate of switches from one task to another",
            0.1,
            derived=True,
        ),
        row("memory_total_bytes", "gauge", "bytes", "Memory of the machine", 1024, "system.memory.limit"),
        row(
            "memory_available_bytes",
            "gauge",
            "bytes",
            "Memory that programs can still have without swapping",
            1024,
        ),
        row("memory_free_bytes", "gauge", "bytes", "Memory used for nothing at all", 1024),
        row("memory_cached_bytes", "gauge", "bytes", "Memory that holds file contents", 1024),
        row("memory_shared_bytes", "gauge", "bytes", "Memory in shared segments and tmpfs", 1024),
        row("memory_dirty_bytes", "gauge", "bytes", "File contents not yet on disk", 1024),
        row("memory_writeback_bytes", "gauge", "bytes", "File contents on their way to disk", 1024),
        row("swap_total_bytes", "gauge", "bytes", "Swap space", 1024),
        row("swap_free_bytes", "gauge", "bytes", "Swap space not in use", 1024),
        row("swap_in_pages_total", "counter", "1", "Pages read back from swap"),
        row("swap_out_pages_total", "counter", "1", "Pages written to swap"),
        row(
            "swap_in_pages_per_second",
            "gauge",
            "1/second",
            "Rate of pages read back from swap",
            0.1,
            derived=True,
        ),
        row(
            "swap_out_pages_per_second",
            "gauge",
            "1/second",
            "Rate of pages written to swap",
            0.1,
            derived=True,
        ),
        row("major_faults_total", "counter", "1", "Page faults that had to read from disk"),
        row(
            "major_faults_per_second",
            "gauge",
            "1/second",
            "Rate of page faults that had to read from disk",
            0.1,
            derived=True,
        ),
        row("direct_reclaim_pages_total", "counter", "1", "Pages that programs had to reclaim themselves"),
        row(
            "refaults_total",
            "counter",
            "1",
            "File pages read again soon after they were dropped from the cache",
        ),
        row("oom_kills_total", "counter", "1", "Processes killed because memory ran out"),
        *(
            row(
                f"pressure_{resource}_{share}_seconds_total",
                "counter",
                "seconds",
                f"Time in which {who} waited for {what}",
                1e-6,
            )
            for resource, what in (("cpu", "a CPU"), ("io", "a disk"), ("memory", "memory"))
            for share, who in (("some", "at least one task"), ("full", "every task that was not idle"))
        ),
        *(
            row(
                f"pressure_{resource}_{share}_ratio",
                "ratio",
                "1",
                f"Share of time in which {who} waited for {what}",
                0.0001,
                derived=True,
            )
            for resource, what in (("cpu", "a CPU"), ("io", "a disk"), ("memory", "memory"))
            for share, who in (("some", "at least one task"), ("full", "every task that was not idle"))
        ),
    ]


def _disk() -> list[Metric]:
    def row(
        name: str,
        kind: Kind,
        unit: str,
        text: str,
        resolution: float = 1,
        otel: str | None = None,
        *,
        derived: bool = False,
    ) -> Metric:
        return Metric(name, "disk", kind, unit, text, resolution, derived, None, otel)

    return [
        row("read_bytes_total", "counter", "bytes", "Bytes read from the disk", 512, "system.disk.io"),
        row("written_bytes_total", "counter", "bytes", "Bytes written to the disk", 512, "system.disk.io"),
        row("reads_total", "counter", "1", "Reads completed", 1, "system.disk.operations"),
        row("writes_total", "counter", "1", "Writes completed", 1, "system.disk.operations"),
        row("read_seconds_total", "counter", "seconds", "Time that reads took, added up", 0.001),
        row("write_seconds_total", "counter", "seconds", "Time that writes took, added up", 0.001),
        row(
            "busy_seconds_total",
            "counter",
            "seconds",
            "Time in which at least one request was under way",
            0.001,
            "system.disk.io_time",
        ),
        row(
            "queue_seconds_total", "counter", "seconds", "Time that requests were under way, added up", 0.001
        ),
        row("requests_in_flight", "gauge", "1", "Requests under way now"),
        row("read_bytes_per_second", "gauge", "bytes/second", "Rate of bytes read", derived=True),
        row("written_bytes_per_second", "gauge", "bytes/second", "Rate of bytes written", derived=True),
        row("reads_per_second", "gauge", "1/second", "Reads completed a second", 0.1, derived=True),
        row("writes_per_second", "gauge", "1/second", "Writes completed a second", 0.1, derived=True),
        row(
            "read_await_seconds",
            "gauge",
            "seconds",
            "Mean time of a read, queueing included",
            1e-6,
            derived=True,
        ),
        row(
            "write_await_seconds",
            "gauge",
            "seconds",
            "Mean time of a write, queueing included",
            1e-6,
            derived=True,
        ),
        row(
            "await_seconds",
            "gauge",
            "seconds",
            "Mean time of a request, queueing included",
            1e-6,
            derived=True,
        ),
        row("queue_length", "gauge", "1", "Mean number of requests under way", 0.01, derived=True),
        row(
            "busy_ratio",
            "ratio",
            "1",
            "Share of time with at least one request under way; no measure of saturation on an SSD",
            0.0001,
            derived=True,
        ),
    ]


def _filesystem() -> list[Metric]:
    def row(name: str, text: str, otel: str | None = None) -> Metric:
        return Metric(name, "filesystem", "gauge", "bytes", text, 1, otel=otel)

    return [
        row("size_bytes", "Size of the file system", "system.filesystem.limit"),
        row("used_bytes", "Bytes in use", "system.filesystem.usage"),
        row("available_bytes", "Bytes that a user without privileges can still write"),
    ]


def _network() -> list[Metric]:
    def pair(name: str, unit: str, text: str, otel: str | None = None) -> list[Metric]:
        rate = name.removesuffix("_total") + "_per_second"
        return [
            Metric(name, "network", "counter", unit, text, otel=otel),
            Metric(
                rate,
                "network",
                "gauge",
                f"{unit}/second",
                f"Rate of: {text[0].lower()}{text[1:]}",
                0.1,
                derived=True,
            ),
        ]

    return [
        *pair("rx_bytes_total", "bytes", "Bytes received", "system.network.io"),
        *pair("tx_bytes_total", "bytes", "Bytes sent", "system.network.io"),
        *pair("rx_packets_total", "1", "Packets received", "system.network.packet.count"),
        *pair("tx_packets_total", "1", "Packets sent", "system.network.packet.count"),
        *pair("rx_errors_total", "1", "Packets received broken", "system.network.errors"),
        *pair("tx_errors_total", "1", "Packets that could not be sent", "system.network.errors"),
        *pair("rx_drops_total", "1", "Packets received and dropped", "system.network.packet.dropped"),
        *pair(
            "tx_drops_total", "1", "Packets dropped before they were sent", "system.network.packet.dropped"
        ),
        Metric("link_bits_per_second", "network", "gauge", "bits/second", "Speed of the link", 1_000_000),
    ]


def _process() -> list[Metric]:
    def row(
        name: str,
        kind: Kind,
        unit: str,
        text: str,
        resolution: float = 1,
        otel: str | None = None,
        *,
        derived: bool = False,
    ) -> Metric:
        return Metric(name, "process", kind, unit, text, resolution, derived, None, otel)

    return [
        row("gpu_memory_bytes", "gauge", "bytes", "Device memory that the process holds on this GPU"),
        row(
            "sm_ratio",
            "ratio",
            "1",
            "Share of time in which the process ran on the GPU's multiprocessors",
            0.01,
        ),
        row("cpu_percent", "gauge", "percent", "CPU use; 100 is one CPU", 0.1, derived=True),
        row("elapsed_seconds", "gauge", "seconds", "Time since the process started", derived=True),
        row(
            "cpu_user_seconds_total",
            "counter",
            "seconds",
            "CPU time in the program",
            0.01,
            "process.cpu.time",
        ),
        row(
            "cpu_system_seconds_total",
            "counter",
            "seconds",
            "CPU time in the kernel",
            0.01,
            "process.cpu.time",
        ),
        row(
            "run_wait_seconds_total",
            "counter",
            "seconds",
            "Time in which the main thread could run but no CPU was free",
            1e-9,
        ),
        row(
            "run_wait_ratio",
            "ratio",
            "1",
            "Share of time in which the main thread could run but no CPU was free",
            0.0001,
            derived=True,
        ),
        row(
            "block_wait_seconds_total",
            "counter",
            "seconds",
            "Time in which the process waited for a disk",
            0.01,
        ),
        row("host_memory_bytes", "gauge", "bytes", "Resident memory", 4096, "process.memory.usage"),
        row("threads", "gauge", "1", "Threads", 1, "process.thread.count"),
        row("last_cpu", "gauge", "1", "CPU on which the main thread last ran"),
        row("cpus_allowed", "gauge", "1", "CPUs on which the process may run"),
        row("major_faults_total", "counter", "1", "Page faults that had to read from disk"),
        row(
            "read_bytes_total",
            "counter",
            "bytes",
            "Bytes the process caused to be read from disks",
            1,
            "process.disk.io",
        ),
        row(
            "written_bytes_total",
            "counter",
            "bytes",
            "Bytes the process caused to be written to disks",
            1,
            "process.disk.io",
        ),
        row(
            "read_chars_total", "counter", "bytes", "Bytes the process read, from the page cache or elsewhere"
        ),
        row(
            "written_chars_total",
            "counter",
            "bytes",
            "Bytes the process wrote, to the page cache or elsewhere",
        ),
        row("read_bytes_per_second", "gauge", "bytes/second", "Rate of bytes read from disks", derived=True),
        row(
            "written_bytes_per_second",
            "gauge",
            "bytes/second",
            "Rate of bytes written to disks",
            derived=True,
        ),
    ]


def _cgroup() -> list[Metric]:
    def row(
        name: str, kind: Kind, unit: str, text: str, resolution: float = 1, *, derived: bool = False
    ) -> Metric:
        return Metric(name, "cgroup", kind, unit, text, resolution, derived)

    return [
        row("cpu_limit_cores", "gauge", "1", "CPUs' worth of time that the group may use", 0.001),
        row("cpu_periods_total", "counter", "1", "Scheduling periods in which the group wanted to run"),
        row(
            "cpu_throttled_periods_total",
            "counter",
            "1",
            "Scheduling periods in which the group ran out of its CPU limit",
        ),
        row(
            "cpu_throttled_seconds_total",
            "counter",
            "seconds",
            "Time in which the group's tasks were held back by its CPU limit",
            1e-6,
        ),
        row(
            "cpu_throttled_ratio",
            "ratio",
            "1",
            "Share of scheduling periods that ran out of the CPU limit",
            0.0001,
            derived=True,
        ),
        row("memory_limit_bytes", "gauge", "bytes", "Memory that the group may use"),
        row("memory_used_bytes", "gauge", "bytes", "Memory that the group uses, page cache included"),
        row("oom_kills_total", "counter", "1", "Processes of the group killed because its memory ran out"),
    ]


# fmt: on


def _catalogue() -> dict[Scope, dict[str, Metric]]:
    scopes: dict[Scope, list[Metric]] = {
        "gpu": _gpu(),
        "host": _host(),
        "disk": _disk(),
        "filesystem": _filesystem(),
        "network": _network(),
        "process": _process(),
        "cgroup": _cgroup(),
    }
    return {scope: {metric.name: metric for metric in metrics} for scope, metrics in scopes.items()}


CATALOGUE: dict[Scope, dict[str, Metric]] = _catalogue()
"""Every metric, by scope and name, in the order in which views show them."""


def names(scope: Scope, *, derived: bool = True) -> list[str]:
    """The catalogue's names of one scope, with or without the derived ones."""
    return [metric.name for metric in CATALOGUE[scope].values() if derived or not metric.derived]
