"""Usage report: GPU-hours by user or job, and how much of that time the GPUs were idle; and which GPUs are active."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from gpulse.model.device import IDLE_RATIO
from gpulse.model.harvest_status import is_harvest_job
from gpulse.model.safe_text import natural_key
from gpulse.reports.process_report import (
    STEP_SECONDS,
    GpuTime,
    ProcessIndex,
    ProcessInfo,
    find_capacity,
    read_processes,
)
from gpulse.reports.time_grid import ReportContext
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import GpuShare, Query

Grouping = Literal["user", "job"]
ACTIVITY_METRICS = ("gpu_utilization_ratio", "sm_active_ratio")
"""Metrics that show whether a GPU computes."""


class UsageRow(Struct, frozen=True, kw_only=True):
    """GPU usage of one user or job."""

    user: str | None
    job: str | None
    program: str | None
    node: str | None
    """Node, PID and start time of the process that identifies a job without a scheduler."""
    pid: int | None
    start_time: float | None
    gpu_seconds: float
    idle_seconds: float | None
    harvested_seconds: float
    utilization_mean: float | None
    memory_bytes_max: int | None
    energy_joules: float | None
    harvested_energy_joules: float | None
    gpus: int
    nodes: list[str]
    processes: int
    first: float | None
    last: float | None


class UsageReport(Struct, frozen=True, kw_only=True):
    """GPU usage by user or job, the largest GPU time first."""

    start: float = field(name="from")
    end: float = field(name="to")
    step: float
    by: Grouping
    gpus: int
    capacity_seconds: float
    gpu_seconds: float
    idle_seconds: float | None
    harvested_seconds: float
    truncated: bool = False
    """Whether rows were left out; the sums include them."""
    rows: list[UsageRow]
    incomplete: list[str]
    """Sentences about missing data."""


def build_usage_report(
    context: ReportContext, query: Query, *, by: Grouping, users: Collection[str]
) -> UsageReport:
    """Return who held GPUs, how long, and how much of that time the GPUs were idle.

    Args:
        context: Source of the data.
        query: Time range and nodes.
        by: One row per user, or one per job.
        users: Only these users; empty for all.
    """
    groups: Sequence[_UsageGroup] = ()
    shares: list[GpuShare] = []
    with collect_missing() as incomplete:
        if query.start < query.end:
            found = context.store.gpu_time(query)
            shares = [share for share in found if share.node in context.node_names]
            pids = {share.pid for share in shares if share.pid is not None}
            processes = read_processes(context, query, pids if by == "user" else None)
            groups = _group_shares(shares, processes, by, users)
        present = find_capacity(shares, context.store.gpus())
    owned = [group.own for group in groups if group.own.processes]
    known = [own for own in owned if own.known]
    return UsageReport(
        start=query.start,
        end=query.end,
        step=STEP_SECONDS,
        by=by,
        gpus=len(present),
        capacity_seconds=round(sum(present.values()), 3),
        gpu_seconds=round(sum(own.seconds for own in owned), 3),
        idle_seconds=round(sum(own.idle for own in known), 3) if known or not owned else None,
        harvested_seconds=round(sum(group.harvested.seconds for group in groups), 3),
        rows=[group.row(by, context.node_names) for group in groups],
        incomplete=incomplete,
    )


class _UsageGroup:
    """GPU time of one user or job: their own, and that of their harvests."""

    def __init__(self, root: ProcessInfo | None) -> None:
        """Start an empty group.

        Args:
            root: Process that identifies a job without a scheduler.
        """
        self.root = root
        self.own, self.harvested = GpuTime(), GpuTime()
        self._users: dict[str | None, float] = {}
        self._jobs: dict[str | None, float] = {}

    def add(self, share: GpuShare, process: ProcessInfo) -> None:
        """Add a process's share of a GPU."""
        (self.harvested if is_harvest_job(process.job) else self.own).add(share, process)
        for seconds, name in ((self._users, process.user), (self._jobs, process.job)):
            seconds[name] = seconds.get(name, 0.0) + share.seconds

    @property
    def shown(self) -> GpuTime:
        """GPU time for means and counts: the group's own, or the harvested time if there is no other."""
        return self.own if self.own.processes else self.harvested

    def row(self, by: Grouping, names: Mapping[int, str]) -> UsageRow:
        """Return the row of this group."""
        root, own, shown = self.root, self.own, self.shown
        is_job = by == "job"
        return UsageRow(
            user=_find_largest(self._users),
            job=_find_largest(self._jobs) if is_job else None,
            program=shown.program if is_job else None,
            node=names[root.key[0]] if root else None,
            pid=root.key[1] if root else None,
            start_time=root.key[2] if root else None,
            gpu_seconds=round(own.seconds, 3),
            idle_seconds=round(own.idle, 3) if own.known else None,
            harvested_seconds=round(self.harvested.seconds, 3),
            utilization_mean=round(shown.busy / shown.known, 6) if shown.known else None,
            memory_bytes_max=None if shown.memory is None else int(shown.memory),
            energy_joules=_round_joules(own.energy),
            harvested_energy_joules=_round_joules(self.harvested.energy),
            gpus=len(shown.gpus),
            nodes=sorted({names[node] for node, _ in shown.gpus}, key=natural_key),
            processes=len(shown.processes),
            first=shown.first if math.isfinite(shown.first) else None,
            last=shown.last if math.isfinite(shown.last) else None,
        )


def _round_joules(joules: float | None) -> float | None:
    return None if joules is None else round(joules, 3)


def _find_largest(seconds: Mapping[str | None, float]) -> str | None:
    """Return the name with the most time; None only if no name is known."""
    return max(seconds, key=lambda name: (name is not None, seconds[name]))


def _group_shares(
    shares: Iterable[GpuShare], processes: ProcessIndex, by: Grouping, users: Collection[str]
) -> Sequence[_UsageGroup]:
    """Return one group per user or job, the largest first.

    A scheduler's job is one group on all its nodes. A process without a job counts for its topmost known ancestor.
    """
    found: dict[object, _UsageGroup] = {}
    for share in shares:
        if share.pid is None:
            continue
        process = processes.find(share)
        if users and process.user not in users:
            continue
        root = processes.find_root(share) if by == "job" and process.job is None else None
        key = process.user if by == "user" else _job_key(process) if root is None else root.key
        if key not in found:
            found[key] = _UsageGroup(root)
        found[key].add(share, process)
    return sorted(
        found.values(), key=lambda group: (-group.own.seconds, -group.harvested.seconds, group.shown.first)
    )


def _job_key(process: ProcessInfo) -> object:
    """Return the key that identifies a job; harvests of two users may have the same name."""
    return (process.job, process.user) if is_harvest_job(process.job) else process.job


def find_active_gpus(context: ReportContext, query: Query) -> set[str]:
    """Return the UUIDs of the GPUs with a sample of activity in the range of a query about `ACTIVITY_METRICS`."""
    with collect_missing():
        found = context.store.series(query)
    return {series.key.subject for series in found if bool((series.values > IDLE_RATIO).any())}
