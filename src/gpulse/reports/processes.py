"""The processes that held GPUs in a time range."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from gpulse.reports.context import Context
from gpulse.reports.process_index import ProcessIndex, ProcessInfo, ProcessKey
from gpulse.store.incomplete import noticing
from gpulse.store.store import Holding, Query

_MAX_PROCESSES = 2000
_ENDED_AFTER_SECONDS = 60.0
"""A process that the store does not know has ended when it was not seen for this long."""
_MARGIN_SECONDS = 120.0
"""Stored processes are read for this long before and after a range: they are seen on a GPU a little later."""


class ProcessGpu(Struct, frozen=True, kw_only=True):
    """What a process held of one GPU."""

    gpu: str | None
    uuid: str
    start: float = field(name="from")
    end: float = field(name="to")
    memory_bytes_mean: float | None
    memory_bytes_max: float | None
    sm_ratio_mean: float | None


class ProcessRow(Struct, frozen=True, kw_only=True):
    """A process and the GPUs that it held."""

    node: str
    pid: int
    start_time: float | None
    first_seen: float
    ended: float | None
    user: str | None
    job: str | None
    container: str | None
    pod: str | None
    name: str | None
    command: list[str]
    gpus: list[ProcessGpu]


class ProcessReport(Struct, frozen=True, kw_only=True):
    """The processes that held GPUs, newest first."""

    start: float = field(name="from")
    end: float = field(name="to")
    truncated: bool
    processes: list[ProcessRow]
    incomplete: list[str]
    """What is missing from the answer, in words."""


def process_report(
    context: Context, query: Query, *, users: Collection[str], jobs: Collection[str]
) -> ProcessReport:
    """Return the processes that held GPUs, newest first.

    Args:
        context: What the answer is computed from.
        query: Time range, nodes and GPUs.
        users: Only processes of these users; empty for all.
        jobs: Only processes of these jobs; empty for all.
    """
    found: list[_Holder] = []
    with noticing() as incomplete:
        if query.start < query.end:
            held = context.store.gpu_holders(query)
            known = (holding for holding in held if holding.node in context.node_names)
            found = _by_process(known, read_processes(context, query), users, jobs)
        labels = context.gpu_labels()
    return ProcessReport(
        start=query.start,
        end=query.end,
        truncated=len(found) > _MAX_PROCESSES,
        processes=[_row(one, query.end, context.node_names, labels) for one in found[:_MAX_PROCESSES]],
        incomplete=incomplete,
    )


def read_processes(context: Context, query: Query, pids: Collection[int] | None = None) -> ProcessIndex:
    """Return the processes that lived in a time range.

    Args:
        context: What the answer is computed from.
        query: Time range, nodes and deadline.
        pids: Only these; their ancestors are unknown then. None for all.
    """
    query = Query(
        query.start - _MARGIN_SECONDS,
        query.end + _MARGIN_SECONDS,
        nodes=query.nodes,
        pids=None if pids is None else frozenset(pids),
        deadline=query.deadline,
    )
    return ProcessIndex(context.store.processes(query))


class _Holder(NamedTuple):
    """A process and what it held."""

    process: ProcessInfo
    held: list[Holding]

    @property
    def first(self) -> float:
        """When it was first seen."""
        known = self.process.first_seen
        return min(holding.first for holding in self.held) if known is None else known

    def ended(self, end: float) -> float | None:
        """Return when it ended; None while it lives."""
        if self.process.first_seen is not None:
            return self.process.ended
        last = max(holding.last for holding in self.held)
        return last if last < end - _ENDED_AFTER_SECONDS else None


def _by_process(
    held: Iterable[Holding], processes: ProcessIndex, users: Collection[str], jobs: Collection[str]
) -> list[_Holder]:
    found: dict[ProcessKey, _Holder] = {}
    for holding in held:
        process = processes.find(holding)
        if (users and process.user not in users) or (jobs and process.job not in jobs):
            continue
        found.setdefault(process.key, _Holder(process, [])).held.append(holding)
    return sorted(found.values(), key=lambda one: (-one.first, one.process.key[:2]))


def _row(
    found: _Holder, end: float, names: Mapping[int, str], labels: Mapping[tuple[int, str], str]
) -> ProcessRow:
    process = found.process
    node, pid, start = process.key
    return ProcessRow(
        node=names[node],
        pid=pid,
        start_time=start,
        first_seen=found.first,
        ended=found.ended(end),
        user=process.user,
        job=process.job,
        container=process.container,
        pod=process.pod,
        name=process.name,
        command=list(process.command),
        gpus=[
            ProcessGpu(
                gpu=labels.get((node, holding.uuid)),
                uuid=holding.uuid,
                start=holding.first,
                end=holding.last,
                memory_bytes_mean=holding.memory_mean,
                memory_bytes_max=holding.memory_max,
                sm_ratio_mean=holding.sm_mean,
            )
            for holding in sorted(found.held, key=lambda holding: (holding.first, holding.uuid))
        ],
    )
