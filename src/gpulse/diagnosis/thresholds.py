"""The numbers that decide what is named, in one place: an argument of the engine, not constants in it."""

from __future__ import annotations

from typing import NamedTuple


class Thresholds(NamedTuple):
    """Chosen by mechanism, checked on recordings of real runs, and kept away from both sides of each gap."""

    shortest_seconds: float = 10.0
    """A stretch shorter than this is not judged."""
    fewest_frames: int = 8
    coverage: float = 0.6
    """Share of the stretch that must have been seen."""
    startup_seconds: float = 300.0
    """A process that has not used its GPU yet is starting for so long."""

    lost: float = 0.10
    """Share of the GPU's time that must be lost before the loss is explained."""
    lost_medium: float = 0.20
    lost_high: float = 0.40
    explained: float = 0.50
    """Share of the lost time that a cause must explain to be named."""
    explained_surely: float = 0.75

    throttled_periods: float = 0.25
    """Scheduling periods in which the control group ran into its CPU limit."""
    memory_pressure: float = 0.05
    swapped_pages_per_second: float = 256.0
    runnable_per_core: float = 1.5
    """Runnable threads a CPU, from which on somebody waits, when the job's own workers are not the reason."""
    runnable_per_core_anyway: float = 2.5
    run_wait: float = 0.30
    cpu_pressure: float = 0.40
    blocked: float = 0.35
    """Processes of the job that wait for a disk at any one time, on average."""
    io_pressure: float = 0.20
    job_read_bytes_per_second: float = 1e6
    read_bytes_per_second: float = 20e6
    reads_per_second: float = 100.0
    copy_bytes_per_second: float = float(2**30)
    copy_sm: float = 0.50
    pageable_share: float = 0.13
    """Speed of a copy from ordinary memory over that of the link."""
    link_share: float = 0.70
    slow_copy_share: float = 0.50
    active_worker: float = 0.15
    saturated_worker: float = 0.80
    saturated_share: float = 0.60
    cores_used: float = 0.80
    """Share of the CPUs that the job may use, from which on it has none left."""
    host_full: float = 0.90
    """Share of the machine's CPU time in use, from which on none is left for anybody."""
    never_waits: float = 0.95
    pegged: float = 0.60
    asleep: float = 0.50

    launch_fill: float = 0.50
    launch_fill_surely: float = 0.25
    launch_bytes_per_second: float = 40e6
    """What thousands of kernel launches a second move over PCIe."""
    underused_bytes_per_second: float = 20e6
    busy: float = 0.90
    thin_sm: float = 0.35
    thin_dram: float = 0.30
    thin_tensor: float = 0.15
    hollow: float = 0.10
    hollow_sm: float = 0.70
    tensor_unused: float = 0.03
    fp32_busy: float = 0.20
    fp64_busy: float = 0.10
    sm_busy: float = 0.60
    compute_tensor: float = 0.40
    compute_sm: float = 0.80
    dram_bound: float = 0.60
    still: float = 0.005
    """Activity below which a GPU does nothing."""
    hollow_power: float = 0.35
    """Power over its limit, below which a busy GPU does little."""
    seldom: float = 0.02
    idle_cores: float = 0.10
    """CPUs' worth of time below which a job does nothing."""
    held_bytes: float = float(2**30)
    contention: float = 0.10
    contention_duty: float = 0.50
    turns: float = 0.15
    """How far the duties of GPUs that take turns may add up to more or less than one."""

    stall_seconds: float = 1.2
    checkpoint_seconds: float = 0.5
    """A pause in which a checkpoint is written may be this short."""
    leaving_seconds: float = 2.5
    """A busy job that is idle for no longer than this at the end of a stretch may be about to leave."""
    stall_duty: float = 0.10
    between_stalls_duty: float = 0.50
    stall_power: float = 0.80
    """Power in a stall over that at work, below which the GPU really stood still."""
    telling_power: float = 0.30
    """Power at work over the limit, from which on an idle GPU draws clearly less."""
    stall_share: float = 0.05
    checkpoint_bytes: float = 200e6
    regular_spacing: float = 0.25
    regression: float = 0.15
    regression_seconds: float = 6.0

    leak_bytes: float = float(2**30)
    oom_used: float = 0.92
    oom_seconds: float = 600.0

    slowed_share: float = 0.02
    """Share of the time in which heat or a power brake held the clocks down."""
    power_capped_share: float = 0.50
    clock_below_hertz: float = 75e6
    fan_stopped: float = 0.10
    fan_wanted: float = 0.30
    fan_hot_celsius: float = 60.0
    link_busy_bytes_per_second: float = float(2**30)
    numa_remote: float = 0.80
    network_busy: float = 0.85
    network_errors: float = 0.01
    straggler: float = 0.75
    hang_seconds: float = 120.0
    hang_sm: float = 0.20
    blocked_seconds: float = 300.0


DEFAULTS = Thresholds()
