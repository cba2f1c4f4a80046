"""About one second of a GPU, of its processes and of the host: the unit of time of the diagnosis."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.model.frame import GpuReading
from gpulse.model.metric import Values
from gpulse.model.rates import ProcessKey

_FRESH_SECONDS = 2.5
"""The graphics metric is not believed when it was read this much earlier than the rest of GPM."""

MEANS = (
    "gpu_utilization_ratio",
    "memory_used_bytes",
    "power_watts",
    "sm_clock_hertz",
    "graphics_active_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "fp64_active_ratio",
    "fp32_active_ratio",
    "fp16_active_ratio",
    "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
    "nvlink_rx_bytes_per_second",
    "nvlink_tx_bytes_per_second",
)
"""The readings whose means over time the rules look at."""

Signal = Literal[
    "gpm", "duty", "copies", "processes", "holders", "shares", "io", "pressure", "host", "memory", "power"
]

SIGNALS: dict[Signal, str] = {
    "gpm": "activity of SMs, tensor cores and memory (GPM)",
    "duty": "the GPU's utilization",
    "copies": "PCIe traffic",
    "processes": "CPU use of the processes on the GPU",
    "holders": "the list of processes on the GPU",
    "shares": "each process' share of the GPU",
    "io": "what the processes read and write",
    "pressure": "pressure stall information (PSI)",
    "host": "the host's own readings",
    "memory": "the GPU's memory use",
    "power": "power draw",
}


class Sum(NamedTuple):
    """A mean that can be joined with others without losing its weight."""

    total: float
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a sum

    @property
    def mean(self) -> float:
        """Total over count."""
        return self.total / self.count


class Helper(NamedTuple):
    """A descendant of a process on the GPU that is on no GPU itself: a data loader's worker, mostly."""

    key: ProcessKey
    cores: float
    """CPUs' worth of time that it used."""
    last_cpu: int | None = None


class Second(NamedTuple):
    """About one second of one GPU, of the processes on it and of the host."""

    start: float
    end: float
    frames: int
    reading: GpuReading
    """The last one."""
    gpu: dict[str, Sum]
    """By catalogue name, and `duty` and `copies`."""
    duties: tuple[tuple[float, float], ...]
    """Times and values of the duty samples."""
    reasons: dict[int, int]
    """In how many frames each bit of the clocks event reasons was set."""
    holders: frozenset[ProcessKey] | None
    """The processes on the GPU; None when nobody could say."""
    shares: dict[int, Sum]
    """Each holder's share of the multiprocessors, by pid."""
    holder_cores: dict[ProcessKey, float]
    """CPUs' worth of time that each of them used, where it could be read."""
    cores: float | None
    """CPUs' worth of time that the holders used together; None when that could not be read."""
    thread_cores: float | None
    """The same of the busiest single thread among them."""
    feeding_cores: float | None
    """The same of the two busiest threads, forward and backward: pools of threads that spin do not count."""
    workers: tuple[Helper, ...]
    blocked: float | None
    """How many processes of the job waited for a disk at any one time, on average."""
    stuck: int
    """How many holders waited for a disk in every frame of this second."""
    run_wait: float | None
    """Largest share of the time in which one of the job's processes could run but had no CPU."""
    read_bytes: float | None
    """Bytes a second that the job read from disks."""
    written_bytes: float | None
    """Bytes a second that the holders wrote, to disks or to the page cache, whichever is more."""
    resident_bytes: float | None
    """Memory of the job's processes; pages that they share are counted for each."""
    throttled: float | None
    """Share of scheduling periods in which the job's control group ran into its CPU limit."""
    cpus: float | None
    """CPUs that the job may use: affinity, control group, or all there are."""
    remote_cpus: float | None
    """Share of the job's CPU time on CPUs that are not near the GPU."""
    host: Values
    """Readings and rates of the host."""
    disk: Values
    """Rates of the disk with the longest queue."""
    nfs: Values
    """Rates of the network file system with the most reads outstanding."""
    network: tuple[str, Values]
    """The busiest network interface that says how fast it is, with its rates."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.start

    def mean(self, name: str) -> float | None:
        """The mean of one reading of the GPU."""
        entry = self.gpu.get(name)
        return None if entry is None else entry.mean

    @property
    def lost(self) -> float | None:
        """Share of the time in which no kernel ran."""
        duty = self.gpu.get("duty")
        return None if duty is None else 1.0 - duty.mean


def duty(reading: GpuReading) -> float | None:
    """Share of the time in which kernels ran.

    GPM's word where there is a fresh one; it is costly, and may be held for long. NVML's utilization
    counts copies as work, so while much is copied the activity of the multiprocessors, which cannot be
    more than the duty, says it better.
    """
    values = reading.values
    active = values.get("graphics_active_ratio")
    read_at = reading.read_at
    held = read_at.get("gpm", 0.0) - read_at["graphics"] if "graphics" in read_at else 0.0
    if active is not None and active >= 0 and held <= _FRESH_SECONDS:
        return active
    used, filled = values.get("gpu_utilization_ratio"), values.get("sm_active_ratio")
    if filled is not None and (copies(reading) or 0.0) >= 2**30 and filled < 0.2:
        return filled
    return used


def copies(reading: GpuReading) -> float | None:
    """Bytes a second over PCIe, both ways."""
    parts = [reading.values.get(f"pcie_{way}_bytes_per_second") for way in ("rx", "tx")]
    known = [part for part in parts if part is not None]
    return float(sum(known)) if known else None
