"""Thresholds of all rules, in one place: an argument of the diagnosis engine, not constants in it."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.model.formatting import Unit


class Thresholds(NamedTuple):
    """Thresholds of the rules.

    They follow from how each effect works and are checked on recordings of real runs, with a margin on both sides.
    """

    min_seconds: float = 10.0
    """A window shorter than this is not judged."""
    min_frames: int = 8
    coverage: float = 0.6
    """Share of the window that must have been seen."""
    startup_seconds: float = 300.0
    """A process that has not used its GPU yet counts as starting for this long."""

    lost: float = 0.10
    """Share of the GPU's time that must be lost before the loss is explained."""
    lost_medium: float = 0.20
    lost_high: float = 0.40
    explained: float = 0.50
    """Share of the lost time that a cause must explain to be named."""
    explained_surely: float = 0.75

    throttled_periods: float = 0.25
    """Scheduling periods in which the cgroup reached its CPU limit."""
    memory_pressure: float = 0.05
    swapped_pages_per_second: float = 256.0
    runnable_per_core: float = 1.5
    """Runnable threads per CPU from which threads wait, unless the job's own workers are the reason."""
    runnable_per_core_always: float = 2.5
    run_wait: float = 0.30
    run_wait_some: float = 0.10
    """Wait of the job itself that must go with a high CPU pressure, which may concern other jobs alone."""
    cpu_pressure: float = 0.40
    blocked: float = 0.35
    """Average number of the job's processes that wait for a disk."""
    io_pressure: float = 0.20
    job_read_bytes_per_second: float = 1e6
    read_bytes_per_second: float = 20e6
    reads_per_second: float = 100.0
    copy_bytes_per_second: float = float(2**30)
    copy_sm: float = 0.50
    pageable_share: float = 0.13
    """Speed of a copy from pageable memory relative to the link."""
    link_share: float = 0.70
    slow_copy_share: float = 0.50
    active_worker: float = 0.15
    saturated_worker: float = 0.80
    saturated_share: float = 0.60
    cores_used: float = 0.80
    """Use of the CPUs available to the job from which none counts as free."""
    host_full: float = 0.90
    """Use of the machine's CPU time from which none counts as free."""
    never_waits: float = 0.95
    busy_thread_cores: float = 0.60
    sleeping_cores: float = 0.50
    many_threads_cores: float = 3.0
    """CPU use of the processes on the GPU above which more than the threads of both passes compute."""
    input_bytes_per_second: float = 100e6
    """PCIe traffic to the GPU that launches of large kernels do not reach: batches of data are copied."""
    input_over_output: float = 3.0
    """Traffic to the GPU relative to that from it; weights and gradients of an optimizer go both ways."""

    launch_fill: float = 0.50
    launch_fill_surely: float = 0.25
    estimated_fill: float = 0.35
    """Part of the GPU in use while kernels run, estimated from power, below which they are small."""
    estimated_full: float = 0.80
    launch_bytes_per_second: float = 40e6
    """PCIe traffic of thousands of kernel launches per second."""
    underused_bytes_per_second: float = 20e6
    busy: float = 0.90
    thin_sm: float = 0.35
    thin_dram: float = 0.30
    thin_tensor: float = 0.15
    stalled_activity: float = 0.10
    stalled_sm: float = 0.70
    tensor_unused: float = 0.03
    fp32_busy: float = 0.20
    fp64_busy: float = 0.10
    sm_busy: float = 0.60
    compute_tensor: float = 0.40
    compute_sm: float = 0.80
    dram_bound: float = 0.60
    idle_duty: float = 0.005
    """Activity below which a GPU does nothing."""
    low_power: float = 0.35
    """Power relative to the limit below which a busy GPU does little work."""
    rare_duty: float = 0.02
    idle_cores: float = 0.10
    """CPU use, in CPUs, below which a job does nothing."""
    allocated_bytes: float = float(2**30)
    contention: float = 0.10
    contention_duty: float = 0.50
    turns_tolerance: float = 0.15
    """How far the summed duty of GPUs that take turns may be from one."""

    stall_seconds: float = 1.2
    checkpoint_seconds: float = 0.5
    """Minimum length of a pause in which a checkpoint is written, or which recurs in a rhythm."""
    rhythmic_pauses: int = 3
    """Number of shorter pauses of equal length and spacing that count as a rhythm."""
    ending_seconds: float = 2.5
    """A busy job that is idle for at most this long at the end of a window may be about to end."""
    stall_duty: float = 0.10
    between_stalls_duty: float = 0.50
    stall_power: float = 0.80
    """Power in a stall relative to power at work, below which the GPU was really idle."""
    clear_power: float = 0.30
    """Power at work relative to the limit from which an idle GPU draws clearly less."""
    stall_share: float = 0.05
    checkpoint_bytes: float = 200e6
    regular_spacing: float = 0.25
    throughput_drop: float = 0.15
    regression_seconds: float = 6.0

    leak_bytes: float = float(2**30)
    oom_used: float = 0.92
    oom_seconds: float = 600.0

    slowed_share: float = 0.02
    """Fraction of the time in which heat or a power brake lowered the clocks."""
    power_capped_share: float = 0.50
    clock_below_hertz: float = 75e6
    locked_clock: float = 0.75
    """Clock relative to the maximum below which a busy GPU runs only for a reason; boost clocks are higher."""
    locked_clock_spread: float = 0.02
    lowered_limit: float = 0.70
    """Power limit relative to the board's maximum below which it is not a default."""
    fan_stopped: float = 0.10
    fan_requested: float = 0.30
    fan_hot_celsius: float = 60.0
    link_busy_bytes_per_second: float = float(2**30)
    numa_remote: float = 0.80
    network_busy: float = 0.85
    network_errors: float = 0.01
    straggler: float = 0.75
    hang_seconds: float = 10.0
    hang_activity: float = 0.001
    """Use of memory and arithmetic pipes by a kernel that only polls: below this."""
    hang_spread: float = 0.001
    """Change of the SM activity, relative to it, that a single kernel does not exceed."""
    hang_power_drop: float = 0.75
    """Power in a hang relative to the power at work before it."""
    blocked_seconds: float = 300.0


DEFAULTS = Thresholds()

# fmt: off
THRESHOLD_TEXTS: dict[str, tuple[str, Unit]] = {
    "lost": ("lost GPU time: at least {}", "share"),
    "explained": ("part of the lost GPU time that the cause explains: at least {}", "share"),
    "throttled_periods": ("throttled scheduling periods: at least {}", "share"),
    "memory_pressure": ("time with all tasks stalled on memory (PSI): at least {}", "share"),
    "swapped_pages_per_second": ("pages swapped in per second: at least {}", "number"),
    "runnable_per_core": ("runnable threads per CPU: at least {}", "number"),
    "run_wait": ("time with the main thread waiting for a CPU: at least {}", "share"),
    "run_wait_some": ("time with the main thread waiting for a CPU under high CPU pressure: at least {}", "share"),
    "cpu_pressure": ("time with some tasks waiting for a CPU (PSI): at least {}", "share"),
    "blocked": ("average number of processes waiting for disks: at least {}", "number"),
    "io_pressure": ("time with some tasks waiting for I/O (PSI): at least {}", "share"),
    "job_read_bytes_per_second": ("data read by the job: at least {}", "bytes/second"),
    "copy_bytes_per_second": ("PCIe traffic: at least {}", "bytes/second"),
    "copy_sm": ("SMs in use while copying: below {}", "share"),
    "link_share": ("PCIe link utilization: at least {}", "share"),
    "active_worker": ("CPU use of an active worker: at least {}", "share"),
    "saturated_worker": ("CPU use of a fully busy worker: at least {}", "share"),
    "cores_used": ("part of the job's CPUs in use: at least {}", "share"),
    "busy_thread_cores": ("CPUs used by the program: at least {}", "number"),
    "sleeping_cores": ("CPUs used by the program: below {}", "number"),
    "many_threads_cores": ("CPUs used by the program: at least {}", "number"),
    "input_bytes_per_second": ("PCIe traffic to the GPU: at least {}", "bytes/second"),
    "launch_fill": ("SMs in use while kernels run: below {}", "share"),
    "estimated_fill": ("part of the GPU in use (estimated from the power draw if GPM is unavailable): below {}", "share"),
    "estimated_full": ("part of the GPU in use (estimated from the power draw if GPM is unavailable): at least {}", "share"),
    "launch_bytes_per_second": ("PCIe traffic of kernel launches: at least {}", "bytes/second"),
    "underused_bytes_per_second": ("PCIe traffic to the GPU: below {}", "bytes/second"),
    "busy": ("time with kernels running: at least {}", "share"),
    "thin_sm": ("SMs in use: below {}", "share"),
    "thin_dram": ("GPU memory interface in use: below {}", "share"),
    "thin_tensor": ("tensor cores in use: below {}", "share"),
    "tensor_unused": ("tensor cores in use: below {}", "share"),
    "fp32_busy": ("fp32 pipes in use: at least {}", "share"),
    "sm_busy": ("SMs in use: at least {}", "share"),
    "compute_tensor": ("tensor cores in use: at least {}", "share"),
    "compute_sm": ("or SMs in use: at least {}", "share"),
    "dram_bound": ("GPU memory interface in use: at least {}", "share"),
    "idle_duty": ("time with kernels running: below {}", "share"),
    "allocated_bytes": ("GPU memory in use: at least {}", "bytes"),
    "contention": ("GPU share of each process: at least {}", "share"),
    "stall_seconds": ("length of each pause: at least {}", "seconds"),
    "checkpoint_seconds": ("length of each pause: at least {}", "seconds"),
    "stall_share": ("time spent in pauses: at least {}", "share"),
    "checkpoint_bytes": ("data written in each pause: at least {}", "bytes"),
    "throughput_drop": ("decrease in utilization: at least {}", "share"),
    "regression_seconds": ("steady time before and after the decrease: at least {}", "seconds"),
    "leak_bytes": ("increase in memory use: at least {}", "bytes"),
    "oom_used": ("GPU memory in use: at least {}", "share"),
    "oom_seconds": ("time until memory is full: below {}", "seconds"),
    "slowed_share": ("time with lowered clocks: at least {}", "share"),
    "power_capped_share": ("time with an active power cap: at least {}", "share"),
    "clock_below_hertz": ("requested clock: at least {} below the maximum", "hertz"),
    "locked_clock": ("clock relative to the maximum, if no reason is reported: below {}", "share"),
    "lowered_limit": ("power limit relative to the maximum, if the default is unknown: below {}", "share"),
    "fan_stopped": ("fan speed: below {}", "share"),
    "fan_requested": ("requested fan speed: at least {}", "share"),
    "fan_hot_celsius": ("temperature: at least {}", "celsius"),
    "link_busy_bytes_per_second": ("PCIe traffic that counts as load: at least {}", "bytes/second"),
    "numa_remote": ("CPU time on a remote NUMA node: at least {}", "share"),
    "network_busy": ("use of the network link: at least {}", "share"),
    "network_errors": ("network packets with errors: at least {}", "share"),
    "straggler": ("power draw relative to the median of the job's GPUs: below {}", "share"),
    "hang_seconds": ("time without progress: at least {}", "seconds"),
    "hang_activity": ("GPU memory interface and arithmetic pipes in use: below {}", "share"),
    "hang_power_drop": ("power draw relative to the preceding period (if GPM is unavailable): below {}", "share"),
    "blocked_seconds": ("time stuck in the Linux kernel: at least {}", "seconds"),
    "startup_seconds": ("time since the job started: at least {}", "seconds"),
}
"""Descriptions (with a placeholder for the value) and units of the thresholds that rules list as their `limits`, for the findings manual."""
# fmt: on
