"""Who was running on the host while the GPU was not: each second of lost time is put down to one cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from gpulse.diagnosis.seconds import Second
from gpulse.diagnosis.stretch import Stall, Stretch
from gpulse.diagnosis.thresholds import Thresholds
from gpulse.model.finding import Evidence

Cause = Literal["throttled", "swapping", "crowded", "storage", "copies", "workers", "main", "none"]

_LANE_BYTES_PER_SECOND = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}


class Attribution(NamedTuple):
    """How the lost time of a stretch is made up."""

    lost: float
    """Share of the time in which no kernel ran, stalls left out."""
    shares: dict[Cause, float]
    """Of the lost time."""
    seconds: Sequence[Second]
    """What it was computed over."""
    causes: Sequence[Cause]
    """Of each of them."""

    def main(self, t: Thresholds) -> Cause | None:
        """The cause that explains at least half of the loss; `none` when nothing does; None without a loss."""
        if self.lost < t.lost:
            return None
        cause = max(self.shares, key=lambda name: self.shares[name], default=None)
        return cause if cause is not None and self.shares[cause] >= t.explained else "none"

    def of(self, cause: Cause) -> list[Second]:
        """The seconds whose loss was put down to this cause."""
        return [second for second, name in zip(self.seconds, self.causes, strict=True) if name == cause]

    def onset(self, cause: Cause, t: Thresholds) -> float:
        """When the loss to this cause began to last."""
        held = [
            name == cause and (second.lost or 0.0) >= t.lost
            for name, second in zip(self.causes, self.seconds, strict=True)
        ]
        for place, holds in enumerate(held):
            if holds and all(held[place : place + 3]):
                return self.seconds[place].start
        return self.seconds[0].start


def attribute(stretch: Stretch, t: Thresholds, without: Iterable[Stall] = ()) -> Attribution:
    """Put every second's lost time down to a cause."""
    stalls = list(without)
    kept = [second for second in stretch.steady if not any(_is_within(second, stall) for stall in stalls)]
    causes = [cause_of(second, stretch, t) for second in kept]
    lost: dict[Cause, float] = {}
    seen = 0.0
    for second, cause in zip(kept, causes, strict=True):
        if second.lost is not None:
            lost[cause] = lost.get(cause, 0.0) + second.lost * second.seconds
            seen += second.seconds
    total = sum(lost.values())
    return Attribution(
        lost=total / seen if seen > 0 else 0.0,
        shares={cause: part / total for cause, part in lost.items()} if total > 0 else {},
        seconds=kept,
        causes=causes,
    )


def cause_of(second: Second, stretch: Stretch, t: Thresholds) -> Cause:
    """The first that holds, in the order in which one hides the next."""
    return next((name for name, holds in _CHAIN if holds(second, stretch, t)), "none")


def link_bytes_per_second(stretch: Stretch) -> float | None:
    """What the PCIe link can carry one way, before the overhead of its packets."""
    generation = stretch.fact("pcie_link_generation_max") or stretch.fact("pcie_link_generation")
    width = stretch.fact("pcie_link_width_max") or stretch.fact("pcie_link_width")
    if generation is None or width is None:
        return None
    return _LANE_BYTES_PER_SECOND.get(int(generation), 7.563e9) * width


def _is_within(second: Second, stall: Stall) -> bool:
    return min(second.end, stall.end) - max(second.start, stall.start) >= 0.1 * second.seconds


def _never_waits(second: Second, t: Thresholds) -> bool:
    """Whether the threads that feed the GPU ran all the time: then they waited for nobody."""
    return (second.feeding_cores or 0.0) >= t.never_waits


def _throttled(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001  one signature for all
    return (second.throttled or 0.0) >= t.throttled_periods


def _swapping(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001
    swapped = second.host.get("swap_in_pages_per_second", 0.0) >= t.swapped_pages_per_second
    return swapped and second.host.get("pressure_memory_full_ratio", 0.0) >= t.memory_pressure


def _crowded(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001
    cpus = second.cpus
    if not cpus or _never_waits(second, t):
        return False
    runnable = second.host.get("processes_running", 0.0) / cpus
    pressure = second.host.get("pressure_cpu_some_ratio")
    # Where nobody counts the waiting, the queue itself says that there is some.
    is_counted = second.run_wait is not None or pressure is not None
    if is_counted and (second.run_wait or 0.0) < t.run_wait and (pressure or 0.0) < t.cpu_pressure:
        return False
    if runnable >= t.runnable_per_core_anyway:
        return True
    own = sum(helper.cores for helper in second.workers)
    return runnable >= t.runnable_per_core and own < cpus / 2


def _storage(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001
    if _never_waits(second, t):
        return False
    waits = (second.blocked or 0.0) >= t.blocked
    pressed = second.host.get("pressure_io_some_ratio", 0.0) >= t.io_pressure
    job = second.read_bytes
    from_nfs = second.nfs.get("nfs_reads_in_flight", 0.0) >= t.blocked
    if job is None:
        from_disk = second.disk.get("reads_per_second", 0.0) >= t.reads_per_second
    else:
        from_disk = job >= t.job_read_bytes_per_second
    return (waits and (from_disk or from_nfs)) or (pressed and (job or 0.0) >= t.read_bytes_per_second)


def _copies(second: Second, stretch: Stretch, t: Thresholds) -> bool:
    rate, lost = second.mean("copies") or 0.0, second.lost or 0.0
    if rate < t.copy_bytes_per_second:
        return False
    # NVML's utilization counts copies and GPM's graphics metric does not: the difference is time in which
    # there was nothing but copies.
    used, computed = second.mean("gpu_utilization_ratio"), second.mean("graphics_active_ratio")
    if used is not None and computed is not None and used - computed >= t.explained * lost:
        return True
    if (second.mean("sm_active_ratio") or 0.0) >= t.copy_sm:
        return False
    link = link_bytes_per_second(stretch)
    # At the speed of ordinary memory these copies would have taken at least half of the lost time.
    return link is None or rate / (t.pageable_share * link) >= t.explained * lost


def _workers(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001
    active = [helper.cores for helper in second.workers if helper.cores >= t.active_worker]
    if not active or (second.thread_cores or 0.0) >= t.never_waits:
        return False
    saturated = sum(cores >= t.saturated_worker for cores in active)
    if saturated >= t.saturated_share * len(active):
        return True
    return second.cpus is not None and sum(active) >= t.cores_used * second.cpus


def _main(second: Second, stretch: Stretch, t: Thresholds) -> bool:  # noqa: ARG001
    """Whether the job's own threads ran for most of the time in which the GPU did not.

    A thread that waits for the GPU spins, so a busy thread alone means nothing: it must have had no more
    rest than half of what the GPU had.
    """
    lost = second.lost or 0.0
    return (second.feeding_cores or 0.0) >= max(t.pegged, 1.0 - t.explained * lost)


_CHAIN: tuple[tuple[Cause, Callable[[Second, Stretch, Thresholds], bool]], ...] = (
    ("throttled", _throttled),
    ("swapping", _swapping),
    ("crowded", _crowded),
    ("storage", _storage),
    ("copies", _copies),
    ("workers", _workers),
    ("main", _main),
)


def saturated_workers(stretch: Stretch, seconds: Sequence[Second], t: Thresholds) -> float | None:
    """How many workers used most of a CPU, on average."""
    counts = [sum(helper.cores >= t.saturated_worker for helper in second.workers) for second in seconds]
    return sum(counts) / len(counts) if counts and "processes" in stretch.sees else None


def worker_count(seconds: Sequence[Second]) -> float:
    """How many workers there were, on average."""
    return sum(len(second.workers) for second in seconds) / len(seconds) if seconds else 0.0


def ruled_out(attribution: Attribution, stretch: Stretch, t: Thresholds) -> dict[Cause, Evidence]:
    """For each cause the measure that speaks against it, where it could be measured."""
    seconds = attribution.seconds
    measures: tuple[tuple[Cause, str, str, float | None, float], ...] = (
        ("throttled", "cpu_throttled_ratio", "mean", stretch.cpu("throttled", seconds), t.throttled_periods),
        (
            "swapping",
            "swap_in_pages_per_second",
            "mean",
            stretch.host("swap_in_pages_per_second", seconds),
            t.swapped_pages_per_second,
        ),
        ("crowded", "runnable_per_cpu", "mean", runnable(stretch, seconds), t.runnable_per_core),
        ("storage", "processes_waiting_for_disks", "mean", stretch.cpu("blocked", seconds), t.blocked),
        ("copies", "pcie_bytes_per_second", "mean", stretch.mean("copies", seconds), t.copy_bytes_per_second),
        (
            "workers",
            "saturated_workers",
            "mean",
            saturated_workers(stretch, seconds, t),
            max(1.0, t.saturated_share * worker_count(seconds)),
        ),
        (
            "main",
            "trainer_cores",
            "mean",
            stretch.cpu("cores", seconds),
            max(t.pegged, 1.0 - t.explained * attribution.lost),
        ),
    )
    return {
        cause: Evidence(signal, statistic, value, "<", threshold)
        for cause, signal, statistic, value, threshold in measures
        if value is not None and value < threshold
    }


def runnable(stretch: Stretch, seconds: Sequence[Second]) -> float | None:
    """Runnable threads for each CPU that the job may use."""
    threads, cpus = stretch.host("processes_running", seconds), stretch.cpus
    return None if threads is None or not cpus else threads / cpus
