"""Summary of about one second of a GPU, its processes and the host: the diagnosis works on these."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpulse.model.counter_rates import ProcessKey
from gpulse.model.frame import GpuReading
from gpulse.model.metric_catalog import Values

SignalGroup = Literal[
    "gpm",
    "fill",
    "dram",
    "duty",
    "copies",
    "processes",
    "holders",
    "shares",
    "io",
    "pressure",
    "host",
    "memory",
    "power",
]

SIGNAL_GROUPS: dict[SignalGroup, str] = {
    "gpm": "activity of SMs, tensor cores and memory (GPM)",
    "fill": "SM activity (GPM), or power draw and PCIe traffic to estimate it",
    "dram": "memory activity (GPM), or memory utilization to estimate it",
    "duty": "GPU utilization",
    "copies": "PCIe traffic",
    "processes": "CPU use of the processes on the GPU",
    "holders": "list of processes on the GPU",
    "shares": "GPU share of each process",
    "io": "disk reads and writes of the processes",
    "pressure": "pressure stall information (PSI)",
    "host": "CPU and memory readings of the host",
    "memory": "GPU memory use",
    "power": "power draw",
}


class WeightedMean(NamedTuple):
    """A mean that can be combined with others by weight."""

    total: float
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used here

    @property
    def mean(self) -> float:
        """Total over count."""
        return self.total / self.count


class WorkerUse(NamedTuple):
    """CPU use of a descendant of a GPU process that uses no GPU itself: usually a data loader's worker."""

    key: ProcessKey
    cores: float
    """CPU use, in CPUs."""
    last_cpu: int | None = None


class SecondSummary(NamedTuple):
    """Summary of about one second of one GPU, its processes and the host."""

    start: float
    end: float
    frames: int
    reading: GpuReading
    """The last one."""
    gpu: dict[str, WeightedMean]
    """Means by metric name, plus `duty` and `copies`."""
    duties: tuple[tuple[float, float], ...]
    """Times and values of the duty samples."""
    reasons: dict[int, int]
    """Number of frames in which each bit of the clock event reasons was set."""
    holders: frozenset[ProcessKey] | None
    """The processes on the GPU; None when they could not be listed."""
    shares: dict[int, WeightedMean]
    """SM utilization of each process, by PID."""
    holder_cores: dict[ProcessKey, float]
    """CPU use of each process on the GPU, in CPUs, where it could be read."""
    cores: float | None
    """CPU use of all processes on the GPU, in CPUs; None when unknown."""
    thread_cores: float | None
    """CPU use of their busiest thread."""
    feeding_cores: float | None
    """CPU use of their two busiest threads (forward and backward pass); spinning thread pools do not count."""
    workers: tuple[WorkerUse, ...]
    blocked: float | None
    """Average number of the job's processes that waited for a disk."""
    stuck: int
    """Number of processes on the GPU that waited for a disk in every frame of this second."""
    run_wait: float | None
    """Largest fraction of the time in which one of the job's processes could run but had no CPU."""
    read_bytes: float | None
    """Bytes per second that the job read from disks."""
    written_bytes: float | None
    """Bytes per second that the processes on the GPU wrote, to disks or to the page cache, whichever is more."""
    resident_bytes: float | None
    """Host memory of the job's processes; shared pages count once per process."""
    throttled: float | None
    """Fraction of scheduling periods in which the job's cgroup reached its CPU limit."""
    cpus: float | None
    """CPUs available to the job: by affinity, cgroup, or all CPUs."""
    remote_cpus: float | None
    """Fraction of the job's CPU time on another NUMA node than the GPU's."""
    host: Values
    """Readings and rates of the host."""
    disk: Values
    """Rates of the disk with the longest queue."""
    nfs: Values
    """Rates of the network file system with the most reads in flight."""
    network: tuple[str, Values]
    """Name and rates of the busiest network interface with a known speed."""
    context_watts: float | None = None
    """Lowest power draw so far of the idle GPU at the clock of this second, without GPM; None when it was not seen idle."""

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end - self.start

    def mean(self, name: str) -> float | None:
        """Return the mean of a GPU metric."""
        entry = self.gpu.get(name)
        return None if entry is None else entry[0] / entry[1]

    @property
    def lost(self) -> float | None:
        """Fraction of the time in which no kernel ran."""
        duty = self.gpu.get("duty")
        return None if duty is None else 1.0 - duty[0] / duty[1]
