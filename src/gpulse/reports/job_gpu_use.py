"""How a job used its GPUs: figures of each GPU and of all together, and the gaps in the job's data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpulse.model.device import IDLE_RATIO
from gpulse.model.frame_packing import SLOW_SECONDS
from gpulse.model.intervals import subtract, total
from gpulse.model.safe_text import NaturalKey, natural_key
from gpulse.reports import gpu_process_spans
from gpulse.reports.gpu_process_spans import GpuWork, ProcessSpans, SampleIntervals, Spans, overlap_seconds
from gpulse.reports.process_report import (
    STEP_SECONDS,
    GpuKey,
    GpuTime,
    ProcessIndex,
    ProcessInfo,
    ProcessKey,
    text_or_none,
)
from gpulse.reports.report_subject import ReportSubject
from gpulse.reports.time_grid import TimeGrid
from gpulse.store.store import GpuShare, Series, StoredGpu

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
"""Metrics of a GPU in a report."""
BUSY_METRICS = ("gpu_utilization_ratio", "sm_active_ratio")
RATIO_DIGITS = 6

UseClass = Literal["used", "untouched", "unattributed"]


class MetricFigure(NamedTuple):
    """Mean and maximum of a metric over some time."""

    mean: float
    max: float
    seconds: float
    """Length of the time with known values."""


MetricFigures = Mapping[str, MetricFigure]


def measure_metric(series: Series, grid: TimeGrid, spans: Spans) -> MetricFigure | None:
    """Return the figure of a metric in some time spans; None when it has no values there."""
    weights = overlap_seconds(series.times, grid.step, spans)
    known = weights > 0
    seconds = float(weights.sum())
    if not seconds:
        return None
    mean = float((series.values * weights).sum()) / seconds
    return MetricFigure(mean, float(series.highs[known].max()), seconds)


def combine_figures(figures_of_gpus: Iterable[MetricFigures]) -> dict[str, MetricFigure]:
    """Return the figures of several GPUs together; means are weighted by the length of the known time."""
    found: dict[str, MetricFigure] = {}
    for figures in figures_of_gpus:
        for metric, one in figures.items():
            other = found.get(metric)
            if other is None:
                found[metric] = one
                continue
            seconds = one.seconds + other.seconds
            mean = (one.mean * one.seconds + other.mean * other.seconds) / seconds
            found[metric] = MetricFigure(mean, max(one.max, other.max), seconds)
    return {metric: found[metric] for metric in METRICS if metric in found}


class GpuUse(NamedTuple):
    """How the subject of a report used one GPU."""

    key: GpuKey
    gpu: StoredGpu | None
    time: GpuTime
    """GPU time of the subject's processes."""
    held: GpuWork
    """What the GPU did while the subject's processes were on it."""
    figures: MetricFigures
    granted_seconds: float | None
    """How long a scheduler granted it; None when that is unknown."""
    unused_seconds: float | None
    """How much of that time none of the subject's processes was on it; None when that is unknown."""
    unattributed_seconds: float
    """How long there are samples of the GPU, but it is unknown which processes were on it."""
    is_shared: bool
    """Whether others held it at the same time."""
    use: UseClass | None
    """None is unknown."""


def classify_use(
    figures: MetricFigures, *, is_held: bool, by_others: bool, is_known: bool
) -> UseClass | None:
    """Return how a GPU was used; None when that is unknown.

    Args:
        figures: Metrics of the GPU in the subject's time.
        is_held: Whether a process of the subject was on it.
        by_others: Whether other processes were on it.
        is_known: Whether it is known which processes were on it.
    """
    if is_held:
        return "used"
    busy = [figures[metric].mean for metric in BUSY_METRICS if metric in figures]
    if is_known and (by_others or (busy and max(busy) <= IDLE_RATIO)):
        return "untouched"
    return "unattributed" if busy and max(busy) > IDLE_RATIO else None


class SharedTime(Struct, frozen=True, kw_only=True):
    """GPU time of processes; where several held a GPU, each gets its share."""

    gpu_seconds: float
    known_seconds: float
    """Length of the time for which the GPUs' utilization is known."""
    idle_seconds: float | None
    utilization_mean: float | None
    energy_joules: float | None


class HeldTime(SharedTime, frozen=True, kw_only=True):
    """GPU time of processes, and the total time for which they held GPUs."""

    held_seconds: float
    memory_bytes_max: int | None


class ClusterTime(SharedTime, frozen=True, kw_only=True):
    """GPU time of all jobs of the cluster in the same time range."""

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


def build_held_time(time: GpuTime, held: Iterable[GpuWork]) -> HeldTimeFields:
    """Return the GPU time of processes, and what the GPUs did while they held them."""
    held = list(held)
    known = sum(work.known for work in held)
    return {
        **_build_shared_time(time),
        "held_seconds": round(sum(work.seconds for work in held), 3),
        "known_seconds": round(known, 3),
        "idle_seconds": round(sum(work.idle for work in held), 3) if known else None,
        "memory_bytes_max": None if time.memory is None else int(time.memory),
    }


def _build_shared_time(time: GpuTime) -> SharedTimeFields:
    return {
        "gpu_seconds": round(time.seconds, 3),
        "known_seconds": round(time.known, 3),
        "idle_seconds": round(time.idle, 3) if time.known else None,
        "utilization_mean": round(time.busy / time.known, RATIO_DIGITS) if time.known else None,
        "energy_joules": round_or_none(time.energy, 3),
    }


def build_cluster_time(
    shares: Iterable[GpuShare], harvested: Collection[ProcessKey], capacity: Mapping[GpuKey, float]
) -> ClusterTime:
    """Return the GPU time of all jobs of the cluster in the same time range.

    Args:
        shares: GPU shares of all processes.
        harvested: Processes of harvests, which do not count.
        capacity: How many seconds each GPU was available.
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
        power_watts_mean=round_or_none(watts),
        **_build_shared_time(time),
    )


def round_or_none(value: float | None, digits: int = RATIO_DIGITS) -> float | None:
    """Return a rounded number; None for None."""
    return None if value is None else round(value, digits)


_MIN_GAP_SECONDS = 15.0
"""In a shorter gap, frames may still be in transit."""
_MIN_MISSED_SAMPLES = 3
"""A gap is longer than this many of the sampling intervals around it."""
_MEDIAN_INTERVALS = 5
"""Intervals on either side whose median is taken."""


class NodeGap(NamedTuple):
    """A time in which there are no samples of a node."""

    node: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Length of the gap."""
        return self.end - self.start


def find_gaps(
    node: int,
    series: Iterable[Series],
    grid: TimeGrid,
    spans: Sequence[tuple[float, float]],
    interval_seconds: float,
) -> list[NodeGap]:
    """Return the gaps in the samples of a node's GPUs.

    Args:
        node: Number of the node.
        series: Series of its GPUs.
        grid: Grid of the series.
        spans: Only gaps in these time spans are returned.
        interval_seconds: Sampling interval.
    """
    last = np.full(grid.count, np.nan)
    for one in series:
        positions = grid.positions(one.times)
        inside = (positions >= 0) & (positions < grid.count)
        ends = np.where(np.isnan(one.ends), one.times + grid.step, one.ends)
        last[positions[inside]] = np.fmax(last[positions[inside]], ends[inside])
    silences = _find_silences(last, grid)
    found = []
    for place, (first, stop) in enumerate(silences):
        for begin, end in spans:
            part = NodeGap(node, max(first, begin), min(stop, end))
            min_seconds = max(_MIN_GAP_SECONDS, _MIN_MISSED_SAMPLES * interval_seconds)
            if part.seconds >= min_seconds and part.seconds > _MIN_MISSED_SAMPLES * _median_length(
                silences, place
            ):
                found.append(part)
    return found


def _find_silences(last: NDArray[np.float64], grid: TimeGrid) -> list[tuple[float, float]]:
    """Return the times between the last sample of a step and the next step with samples."""
    places = np.flatnonzero(~np.isnan(last))
    begins = [*(grid.start + places * grid.step).tolist(), np.inf]
    return list(zip([-np.inf, *last[places].tolist()], begins, strict=True))


def _median_length(silences: Sequence[tuple[float, float]], place: int) -> float:
    """Return the median length of the silences around one; 0 when there are none."""
    near = [
        *silences[max(1, place - _MEDIAN_INTERVALS) : place],
        *silences[place + 1 : place + 1 + _MEDIAN_INTERVALS],
    ]
    known = [stop - first for first, stop in near if np.isfinite(stop)]
    return float(np.median(known)) if known else 0.0


def total_gap_seconds(gaps: Iterable[NodeGap]) -> float:
    """Return how long at least one node has a gap."""
    return round(total((gap.start, gap.end) for gap in gaps), 3)


MIN_MISSING_RATIO = 0.02
"""Minimum missing part of a time to be mentioned; less may be due to the moments of the samples."""
_MAX_MISSING_SECONDS = 120.0
"""Upper limit of that part in seconds."""
_MAX_TIME_RATIO = 1.2
"""If the GPU time of processes exceeds their sampled time by more than this factor, samples are missing."""


class SampledSpans(NamedTuple):
    """When processes were on a GPU, and the intervals between its samples."""

    held: ProcessSpans
    intervals: SampleIntervals


class JobData(NamedTuple):
    """Stored data about the subject of a report."""

    subject: ReportSubject
    keys: Collection[ProcessKey]
    """Keys of the subject's own processes."""
    names: Mapping[int, str]
    """Names of nodes by number."""
    shares: Mapping[GpuKey, Sequence[GpuShare]]
    """GPU shares of all processes of the cluster, by GPU."""
    processes: ProcessIndex
    """Processes that may belong to the subject."""
    harvested: Collection[ProcessKey]
    """Keys of the processes of harvests."""
    gpus: Mapping[GpuKey, StoredGpu]
    """All known GPUs."""
    grid: TimeGrid
    """Grid of the series."""
    series: Mapping[GpuKey, Sequence[Series]]
    """Series of the subject's GPUs."""
    process_spans: Mapping[GpuKey, SampledSpans]
    """When processes were on the subject's GPUs."""

    def is_own(self, process: ProcessInfo) -> bool:
        """Return whether a process belongs to the subject; every process belongs to a session."""
        return self.subject.kind == "session" or process.key in self.keys


def find_gpus(
    subject: ReportSubject,
    shares: Mapping[GpuKey, Sequence[GpuShare]],
    processes: ProcessIndex,
    gpus: Mapping[GpuKey, StoredGpu],
) -> list[GpuKey]:
    """Return the GPUs of a report, ordered by node and index.

    A granted GPU that is split into MIG instances is replaced by the instances that were held.
    """
    keys = subject.keys
    found = {(gpu.node, gpu.uuid) for gpu in subject.gpus}
    if subject.kind != "session":
        found |= {
            key
            for key, some in shares.items()
            if any(share.pid is not None and processes.find(share).key in keys for share in some)
        }
    split = {(key[0], _parent_uuid(gpus.get(key))) for key in found}
    granted = {(grant.node, uuid) for grant in subject.grants for uuid in grant.gpus}
    return sorted(
        found | (granted - split),
        key=lambda key: (_node_order(key, gpus), _slot_order(gpus.get(key)), key[1]),
    )


def _parent_uuid(gpu: StoredGpu | None) -> str | None:
    """Return the UUID of the GPU that a MIG instance belongs to."""
    return None if gpu is None else text_or_none(gpu.device.get("parent_uuid"))


def _node_order(key: GpuKey, gpus: Mapping[GpuKey, StoredGpu]) -> tuple[bool, NaturalKey, int]:
    """Return a sort key by the node's name; unknown GPUs come last."""
    gpu = gpus.get(key)
    return gpu is None, natural_key(gpu.node_name if gpu else ""), key[0]


def _slot_order(gpu: StoredGpu | None) -> tuple[int, ...]:
    return (1 << 30,) if gpu is None else tuple(map(int, gpu.label.split(":")))


def measure_uses(data: JobData, gaps: Sequence[NodeGap]) -> list[GpuUse]:
    """Return how the subject used each of its GPUs, without the gaps."""
    return [_measure_use(data, key, [gap for gap in gaps if gap.node == key[0]]) for key in data.series]


def _measure_use(data: JobData, key: GpuKey, gaps: Sequence[NodeGap]) -> GpuUse:
    subject, gpu = data.subject, data.gpus.get(key)
    time = GpuTime()
    for share in data.shares.get(key, ()):
        if share.pid is not None and data.is_own(process := data.processes.find(share)):
            time.add(share, process)
    held, uuids = data.process_spans[key].held, {key[1], _parent_uuid(gpu)}
    granted = subject.clip(
        (grant.start, grant.end)
        for grant in subject.grants
        if grant.node == key[0] and not uuids.isdisjoint(grant.gpus)
    )
    had = granted or subject.spans(key[0])
    during = held.own if held.own and subject.kind != "session" else had
    figures = {
        series.metric: figure
        for series in data.series[key]
        if series.metric in METRICS and (figure := measure_metric(series, data.grid, during)) is not None
    }
    is_shared = held.shared_seconds(held.own or had) > SLOW_SECONDS
    unattributed = _unattributed_seconds(data, key)
    use = classify_use(
        figures,
        is_held=bool(time.processes or held.own),
        by_others=is_shared,
        is_known=2 * unattributed <= total(had),
    )
    unused = None
    if granted and use not in ("unattributed", None):
        seen = subject.clip([*held.own, *((gap.start, gap.end) for gap in gaps)])
        left = total(subtract(granted, seen))
        sampled = total(held.own)
        unsampled = 0.0 if _is_sampled(time, sampled) else time.seconds - sampled
        unused = max(0.0, left - unattributed - unsampled)
    return GpuUse(
        key,
        gpu,
        time,
        _measure_held_time(data, key, time, is_shared=is_shared),
        figures,
        total(granted) if granted else None,
        unused,
        unattributed,
        is_shared,
        use,
    )


def _measure_held_time(data: JobData, key: GpuKey, time: GpuTime, *, is_shared: bool) -> GpuWork:
    """Return what a GPU did while it was held; correct the GPU time where the subject had the GPU alone.

    Shares of GPU time are computed per minute. For a GPU that the subject had alone, the samples in its own time are
    more precise.
    """
    held, intervals = data.process_spans[key]
    work = gpu_process_spans.measure_work(data.series[key], data.grid, held, intervals)
    is_slow = intervals.median > STEP_SECONDS
    is_sampled = _is_sampled(time, work.seconds)
    if not time.processes or (is_shared and is_sampled):
        return work
    if not is_sampled or not work.seconds or (data.grid.step > STEP_SECONDS and not is_slow):
        return GpuWork(time.seconds, time.known, time.busy, time.idle, time.energy)
    time.seconds, time.known, time.busy, time.idle, time.energy = work
    return work


def _is_sampled(time: GpuTime, seconds: float) -> bool:
    """Return whether the samples of processes, which cover this many seconds, account for all of their GPU time."""
    return time.seconds <= _MAX_TIME_RATIO * seconds + STEP_SECONDS


def _unattributed_seconds(data: JobData, key: GpuKey) -> float:
    """Return how long there are samples of a GPU but none of its processes, which were dropped or are stored elsewhere."""
    subject = data.subject
    sampled = gpu_process_spans.sampled_seconds(
        data.series[key], data.grid.step, data.process_spans[key].intervals, (subject.start, subject.end)
    )
    missing = sampled - sum(share.seen_seconds for share in data.shares.get(key, ()))
    threshold = max(min(_MAX_MISSING_SECONDS, sampled / 2), MIN_MISSING_RATIO * sampled)
    return missing if missing > threshold else 0.0
