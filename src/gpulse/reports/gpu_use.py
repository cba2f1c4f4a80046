"""What the subject of a report had of each of its GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.natural import NaturalKey, natural_key
from gpulse.model.packing import SLOW_SECONDS
from gpulse.reports import efficiency, occupancy
from gpulse.reports.efficiency import GpuUse
from gpulse.reports.gaps import Gap
from gpulse.reports.gpu_time import STEP_SECONDS, GpuKey, GpuTime
from gpulse.reports.grid import Grid
from gpulse.reports.occupancy import Occupancy, Pace, Work
from gpulse.reports.process_index import ProcessIndex, ProcessInfo, ProcessKey, text
from gpulse.reports.subject import Subject
from gpulse.store.store import Series, Share, StoredGpu

MIN_MISSING_RATIO = 0.02
"""Of a time; less may be due to where samples fall."""
_MAX_MISSING_SECONDS = 120.0
"""The same in seconds, at most."""
_MAX_TIME_RATIO = 1.2
"""Processes with more GPU time than this much of their sampled time have samples of a part of it only."""


class GpuOccupancy(NamedTuple):
    """Which processes were on a GPU when, and the intervals between its samples."""

    held: Occupancy
    pace: Pace


class JobData(NamedTuple):
    """What a store has about the subject of a report."""

    subject: Subject
    keys: Collection[ProcessKey]
    """Of the subject's own processes."""
    names: Mapping[int, str]
    """Of nodes."""
    shares: Mapping[GpuKey, Sequence[Share]]
    """Of all processes of the cluster, by GPU."""
    processes: ProcessIndex
    """Those that can be the subject's."""
    harvested: Collection[ProcessKey]
    """Processes of harvests."""
    gpus: Mapping[GpuKey, StoredGpu]
    """All that are known."""
    grid: Grid
    """Of the series."""
    series: Mapping[GpuKey, Sequence[Series]]
    """Of the subject's GPUs."""
    occupancy: Mapping[GpuKey, GpuOccupancy]
    """Of the subject's GPUs."""

    def is_own(self, process: ProcessInfo) -> bool:
        """Return whether a process belongs to the subject; every process belongs to a session."""
        return self.subject.kind == "session" or process.key in self.keys


def find_gpus(
    subject: Subject,
    shares: Mapping[GpuKey, Sequence[Share]],
    processes: ProcessIndex,
    gpus: Mapping[GpuKey, StoredGpu],
) -> list[GpuKey]:
    """Return the GPUs that a report is about, by node and index.

    A GPU that was granted and is split counts as those of its instances that were held.
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
        found | (granted - split), key=lambda key: (_node_order(key, gpus), _place(gpus.get(key)), key[1])
    )


def _parent_uuid(gpu: StoredGpu | None) -> str | None:
    """Return the UUID of the GPU that an instance is a part of."""
    return None if gpu is None else text(gpu.device.get("parent_uuid"))


def _node_order(key: GpuKey, gpus: Mapping[GpuKey, StoredGpu]) -> tuple[bool, NaturalKey, int]:
    """Order by the node's name; a GPU that the store does not know comes last."""
    gpu = gpus.get(key)
    return gpu is None, natural_key(gpu.node_name if gpu else ""), key[0]


def _place(gpu: StoredGpu | None) -> tuple[int, ...]:
    return (1 << 30,) if gpu is None else tuple(map(int, gpu.label.split(":")))


def measure_uses(data: JobData, gaps: Sequence[Gap]) -> list[GpuUse]:
    """Return what the subject had of each of its GPUs, apart from the gaps."""
    return [_measure_use(data, key, [gap for gap in gaps if gap.node == key[0]]) for key in data.series]


def _measure_use(data: JobData, key: GpuKey, gaps: Sequence[Gap]) -> GpuUse:
    subject, gpu = data.subject, data.gpus.get(key)
    time = GpuTime()
    for share in data.shares.get(key, ()):
        if share.pid is not None and data.is_own(process := data.processes.find(share)):
            time.add(share, process)
    held, uuids = data.occupancy[key].held, {key[1], _parent_uuid(gpu)}
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
        if series.metric in efficiency.METRICS
        and (figure := efficiency.measure(series, data.grid, during)) is not None
    }
    is_shared = held.shared_seconds(held.own or had) > SLOW_SECONDS
    unattributed = _unattributed_seconds(data, key)
    use = efficiency.classify_use(
        figures,
        is_held=bool(time.processes or held.own),
        by_others=is_shared,
        is_known=2 * unattributed <= occupancy.total_seconds(had),
    )
    unused = None
    if granted and use not in ("unattributed", None):
        seen = subject.clip([*held.own, *((gap.start, gap.end) for gap in gaps)])
        left = occupancy.total_seconds(granted) - occupancy.total_seconds(occupancy.overlap(granted, seen))
        sampled = occupancy.total_seconds(held.own)
        unsampled = 0.0 if _is_sampled(time, sampled) else time.seconds - sampled
        unused = max(0.0, left - unattributed - unsampled)
    return GpuUse(
        key,
        gpu,
        time,
        _settle(data, key, time, is_shared=is_shared),
        figures,
        occupancy.total_seconds(granted) if granted else None,
        unused,
        unattributed,
        is_shared,
        use,
    )


def _settle(data: JobData, key: GpuKey, time: GpuTime, *, is_shared: bool) -> Work:
    """Return what a GPU did while it was held; correct the GPU time where the subject had it alone.

    GPU time is divided by the minute. What the subject had alone is known better: from the samples of the time in which
    it was there.
    """
    held, pace = data.occupancy[key]
    work = occupancy.measure_work(data.series[key], data.grid, held, pace)
    is_slow = pace.usual > STEP_SECONDS
    is_sampled = _is_sampled(time, work.seconds)
    if not time.processes or (is_shared and is_sampled):
        return work
    if not is_sampled or not work.seconds or (data.grid.step > STEP_SECONDS and not is_slow):
        return Work(time.seconds, time.known, time.busy, time.idle, time.energy)
    time.seconds, time.known, time.busy, time.idle, time.energy = work
    return work


def _is_sampled(time: GpuTime, seconds: float) -> bool:
    """Return whether there are samples of processes, which cover some seconds, for all of their GPU time."""
    return time.seconds <= _MAX_TIME_RATIO * seconds + STEP_SECONDS


def _unattributed_seconds(data: JobData, key: GpuKey) -> float:
    """Return for how long there are samples of a GPU, but none of processes: they were dropped, or are elsewhere."""
    subject = data.subject
    sampled = occupancy.sampled_seconds(
        data.series[key], data.grid.step, data.occupancy[key].pace, (subject.start, subject.end)
    )
    missing = sampled - sum(share.seen_seconds for share in data.shares.get(key, ()))
    least = max(min(_MAX_MISSING_SECONDS, sampled / 2), MIN_MISSING_RATIO * sampled)
    return missing if missing > least else 0.0
