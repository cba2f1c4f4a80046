"""How well GPUs were used: figures of each GPU, and of all of them together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple, TypedDict

from msgspec import Struct

from gpulse.model.idleness import IDLE_RATIO
from gpulse.reports.gpu_time import GpuKey, GpuTime
from gpulse.reports.grid import Grid
from gpulse.reports.occupancy import Spans, Work, overlap_seconds
from gpulse.reports.process_index import ProcessInfo, ProcessKey
from gpulse.store.store import Series, Share, StoredGpu

METRICS = (
    "gpu_utilization_ratio",
    "sm_active_ratio",
    "tensor_active_ratio",
    "dram_active_ratio",
    "memory_used_bytes",
    "power_watts",
    "pcie_rx_bytes_per_second",
    "pcie_tx_bytes_per_second",
)
"""The metrics of a GPU that a report has."""
BUSY_METRICS = ("gpu_utilization_ratio", "sm_active_ratio")
DIGITS = 6

Use = Literal["used", "untouched", "unattributed"]


class Figure(NamedTuple):
    """A metric over some time."""

    mean: float
    max: float
    seconds: float
    """For how long it is known."""


Figures = Mapping[str, Figure]


def measure(series: Series, grid: Grid, spans: Spans) -> Figure | None:
    """Return the figure of a metric in some time spans; None when it is not known there."""
    weights = overlap_seconds(series.times, grid.step, spans)
    known = weights > 0
    seconds = float(weights.sum())
    if not seconds:
        return None
    mean = float((series.values * weights).sum()) / seconds
    return Figure(mean, float(series.highs[known].max()), seconds)


def combine(figures_of_gpus: Iterable[Figures]) -> dict[str, Figure]:
    """Return the figures of several GPUs as those of one: means weighted by how long each is known."""
    found: dict[str, Figure] = {}
    for figures in figures_of_gpus:
        for metric, one in figures.items():
            other = found.get(metric)
            if other is None:
                found[metric] = one
                continue
            seconds = one.seconds + other.seconds
            mean = (one.mean * one.seconds + other.mean * other.seconds) / seconds
            found[metric] = Figure(mean, max(one.max, other.max), seconds)
    return {metric: found[metric] for metric in METRICS if metric in found}


class GpuUse(NamedTuple):
    """What the subject of a report had of one GPU."""

    key: GpuKey
    gpu: StoredGpu | None
    time: GpuTime
    """Of its own processes."""
    held: Work
    """What the GPU did while they were on it."""
    figures: Figures
    granted_seconds: float | None
    """For how long a scheduler granted it; None when that is unknown."""
    unused_seconds: float | None
    """For how much of that none of its processes was on it; None when that is unknown."""
    unattributed_seconds: float
    """For how long there are samples of the GPU, but it is unknown which processes were on it."""
    is_shared: bool
    """Whether others held it at the same time."""
    use: Use | None
    """None when it is unknown."""


def classify_use(figures: Figures, *, is_held: bool, by_others: bool, is_known: bool) -> Use | None:
    """Return how a GPU was used; None when that is unknown.

    Args:
        figures: What it did in the subject's time.
        is_held: Whether a process of the subject was on it.
        by_others: Whether processes of others were.
        is_known: Whether it is known which processes were on it.
    """
    if is_held:
        return "used"
    busy = [figures[metric].mean for metric in BUSY_METRICS if metric in figures]
    if is_known and (by_others or (busy and max(busy) <= IDLE_RATIO)):
        return "untouched"
    return "unattributed" if busy and max(busy) > IDLE_RATIO else None


class SharedTime(Struct, frozen=True, kw_only=True):
    """GPU time of processes, divided where several held a GPU."""

    gpu_seconds: float
    known_seconds: float
    """For how much of the time the GPUs' utilization is known."""
    idle_seconds: float | None
    utilization_mean: float | None
    energy_joules: float | None


class HeldTime(SharedTime, frozen=True, kw_only=True):
    """GPU time of processes, and the whole time for which they held GPUs."""

    held_seconds: float
    memory_bytes_max: int | None


class ClusterTime(SharedTime, frozen=True, kw_only=True):
    """What all jobs of the cluster had in the same time."""

    gpus: int
    capacity_seconds: float
    gpus_held: int
    power_watts_mean: float | None


class SharedTimeFields(TypedDict):
    """The fields of `SharedTime`."""

    gpu_seconds: float
    known_seconds: float
    idle_seconds: float | None
    utilization_mean: float | None
    energy_joules: float | None


class HeldTimeFields(SharedTimeFields):
    """The fields of `HeldTime`."""

    held_seconds: float
    memory_bytes_max: int | None


def held_time(time: GpuTime, held: Iterable[Work]) -> HeldTimeFields:
    """Return the GPU time of processes, and what the GPUs did while they held them."""
    held = list(held)
    known = sum(work.known for work in held)
    return {
        **_shared_time(time),
        "held_seconds": round(sum(work.seconds for work in held), 3),
        "known_seconds": round(known, 3),
        "idle_seconds": round(sum(work.idle for work in held), 3) if known else None,
        "memory_bytes_max": None if time.memory is None else int(time.memory),
    }


def _shared_time(time: GpuTime) -> SharedTimeFields:
    return {
        "gpu_seconds": round(time.seconds, 3),
        "known_seconds": round(time.known, 3),
        "idle_seconds": round(time.idle, 3) if time.known else None,
        "utilization_mean": round(time.busy / time.known, DIGITS) if time.known else None,
        "energy_joules": rounded(time.energy, 3),
    }


def cluster_time(
    shares: Iterable[Share], harvested: Collection[ProcessKey], capacity: Mapping[GpuKey, float]
) -> ClusterTime:
    """Return what all jobs had in the same time.

    Args:
        shares: Of all processes.
        harvested: Processes of harvests, which do not count.
        capacity: For how many seconds each GPU was there.
    """
    time, anybody = GpuTime(), ProcessInfo((0, 0, None))
    for share in shares:
        if share.pid is not None and (share.node, share.pid, share.start) not in harvested:
            time.add(share, anybody)
    watts = time.energy / time.seconds if time.energy is not None and time.seconds else None
    return ClusterTime(
        gpus=len(capacity),
        capacity_seconds=round(sum(capacity.values()), 3),
        gpus_held=len(time.gpus),
        power_watts_mean=rounded(watts),
        **_shared_time(time),
    )


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """Return a number with fewer digits; None for None."""
    return None if value is None else round(value, digits)
