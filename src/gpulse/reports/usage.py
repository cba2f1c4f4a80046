"""GPU-hours by user or job: who held GPUs, for how long, and how much of that they were idle."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from gpulse.model.harvest import is_harvested
from gpulse.model.natural import natural_key
from gpulse.reports.context import Context
from gpulse.reports.gpu_time import STEP_SECONDS, GpuTime, capacity
from gpulse.reports.process_index import ProcessIndex, ProcessInfo
from gpulse.reports.processes import read_processes
from gpulse.store.incomplete import noticing
from gpulse.store.store import Query, Share

Grouping = Literal["user", "job"]


class UsageRow(Struct, frozen=True, kw_only=True):
    """What one user or job had of the GPUs."""

    user: str | None
    job: str | None
    program: str | None
    node: str | None
    """Node, pid and start time of the process that a job without a scheduler is known by."""
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
    """Who held GPUs, the one with the most GPU time first."""

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
    """Whether rows were left out; the sums are of all."""
    rows: list[UsageRow]
    incomplete: list[str]
    """What is missing from the answer, in words."""


def usage_report(context: Context, query: Query, *, by: Grouping, users: Collection[str]) -> UsageReport:
    """Return who held GPUs, for how long, and how much of that they were idle.

    Args:
        context: What the answer is computed from.
        query: Time range and nodes.
        by: One row per user, or one per job.
        users: Only what these users held; empty for all.
    """
    groups: Sequence[_Group] = ()
    shares: list[Share] = []
    with noticing() as incomplete:
        if query.start < query.end:
            found = context.store.gpu_time(query)
            shares = [share for share in found if share.node in context.node_names]
            pids = {share.pid for share in shares if share.pid is not None}
            processes = read_processes(context, query, pids if by == "user" else None)
            groups = _groups(shares, processes, by, users)
        present = capacity(shares, context.store.gpus())
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


class _Group:
    """The GPU time of one user or job: their own, and what their harvests won from idle GPUs."""

    def __init__(self, root: ProcessInfo | None) -> None:
        """Begin with nothing.

        Args:
            root: The process that a job without a scheduler is known by.
        """
        self.root = root
        self.own, self.harvested = GpuTime(), GpuTime()
        self._users: dict[str | None, float] = {}
        self._jobs: dict[str | None, float] = {}

    def add(self, share: Share, process: ProcessInfo) -> None:
        """Add a process's share of a GPU."""
        (self.harvested if is_harvested(process.job) else self.own).add(share, process)
        for seconds, name in ((self._users, process.user), (self._jobs, process.job)):
            seconds[name] = seconds.get(name, 0.0) + share.seconds

    @property
    def shown(self) -> GpuTime:
        """The time that means and counts are of: the harvested time only where there is no other."""
        return self.own if self.own.processes else self.harvested

    def row(self, by: Grouping, names: Mapping[int, str]) -> UsageRow:
        """Return the row of an answer."""
        root, own, shown = self.root, self.own, self.shown
        is_job = by == "job"
        return UsageRow(
            user=_largest(self._users),
            job=_largest(self._jobs) if is_job else None,
            program=shown.program if is_job else None,
            node=names[root.key[0]] if root else None,
            pid=root.key[1] if root else None,
            start_time=root.key[2] if root else None,
            gpu_seconds=round(own.seconds, 3),
            idle_seconds=round(own.idle, 3) if own.known else None,
            harvested_seconds=round(self.harvested.seconds, 3),
            utilization_mean=round(shown.busy / shown.known, 6) if shown.known else None,
            memory_bytes_max=None if shown.memory is None else int(shown.memory),
            energy_joules=_rounded(own.energy),
            harvested_energy_joules=_rounded(self.harvested.energy),
            gpus=len(shown.gpus),
            nodes=sorted({names[node] for node, _ in shown.gpus}, key=natural_key),
            processes=len(shown.processes),
            first=shown.first if math.isfinite(shown.first) else None,
            last=shown.last if math.isfinite(shown.last) else None,
        )


def _rounded(joules: float | None) -> float | None:
    return None if joules is None else round(joules, 3)


def _largest(seconds: Mapping[str | None, float]) -> str | None:
    """Return the name with the most time; None only where no name is known."""
    return max(seconds, key=lambda name: (name is not None, seconds[name]))


def _groups(
    shares: Iterable[Share], processes: ProcessIndex, by: Grouping, users: Collection[str]
) -> Sequence[_Group]:
    """Return one group per user or job, the largest first.

    A scheduler's job is one on all its nodes. A process without a job counts with its topmost known ancestor.
    """
    found: dict[object, _Group] = {}
    for share in shares:
        if share.pid is None:
            continue
        process = processes.find(share)
        if users and process.user not in users:
            continue
        root = processes.find_root(share) if by == "job" and process.job is None else None
        key = process.user if by == "user" else _job_key(process) if root is None else root.key
        if key not in found:
            found[key] = _Group(root)
        found[key].add(share, process)
    return sorted(
        found.values(), key=lambda group: (-group.own.seconds, -group.harvested.seconds, group.shown.first)
    )


def _job_key(process: ProcessInfo) -> object:
    """Return what tells jobs apart; harvests of two users may have the same name."""
    return (process.job, process.user) if is_harvested(process.job) else process.job
