"""Compute reports for requests: resolve names of nodes and GPUs, and ask the store in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gpulse.cluster.protocol import requests as r
from gpulse.errors import RefusedError
from gpulse.model.metric import Scope
from gpulse.model.session import Interruption, Session
from gpulse.reports.context import Context
from gpulse.reports.events import EventReport, event_report
from gpulse.reports.findings import FindingReport, finding_report
from gpulse.reports.history import HistoryReport, QueryReport, history_report, query_report
from gpulse.reports.interruptions import Coverage, interruption_coverage
from gpulse.reports.job import job_report
from gpulse.reports.job_report import JobReport
from gpulse.reports.processes import ProcessReport, process_report
from gpulse.reports.resolve import JobRequest
from gpulse.reports.usage import UsageReport, usage_report
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.incomplete import noticing
from gpulse.store.registry import Register
from gpulse.store.store import Query, Store

_MAX_ANSWER_SECONDS = 60.0
"""What a backend has not delivered by then is missing from an answer."""
_QUERY_SECONDS = 600.0
"""The time before the end that an answer is about where the request does not say when it starts."""
_CHART_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0
_MAX_INTERRUPTIONS = 10
"""Only this many interruptions of a session are looked at, the newest ones."""
_MAX_CACHED = 1000


_RangeRequest = r.QueryMetric | r.GetHistory | r.GetProcesses | r.GetUsage | r.GetEvents | r.GetFindingSpans


class ReportRunner:
    """Computes reports from a head's store."""

    def __init__(self, store: Store, register: Register, interval_seconds: Callable[[], float]) -> None:
        """Prepare to answer.

        Args:
            store: What reports are computed from.
            register: The nodes by name.
            interval_seconds: Returns the interval of agents.
        """
        self._store = store
        self._register = register
        self._interval_seconds = interval_seconds
        self._coverage: dict[tuple[str, Interruption], Coverage] = {}
        """What is missing of interruptions, once that does not change any more."""

    async def query(self, request: r.QueryMetric, now: float) -> QueryReport:
        """Return the history of one metric."""
        query = replace(
            self._query(request, now, _QUERY_SECONDS, gpus=request.gpus, scope=request.scope or "gpu"),
            metrics=(request.metric,),
            step=_seconds(request.step),
            statistic=request.statistic,
        )
        return await asyncio.to_thread(query_report, self._context(), query)

    async def history(self, request: r.GetHistory, now: float) -> HistoryReport:
        """Return several metrics over time, all on the same grid."""
        query = self._query(request, now, _CHART_SECONDS, gpus=request.gpus, scope=request.scope)
        query = replace(query, metrics=request.metrics)
        return await asyncio.to_thread(
            history_report, self._context(), query, max_steps=request.points, spread=request.spread
        )

    async def processes(self, request: r.GetProcesses, now: float) -> ProcessReport:
        """Return the processes that held GPUs, newest first."""
        query = self._query(request, now, _CHART_SECONDS, gpus=request.gpus, scope="process")
        return await asyncio.to_thread(
            process_report, self._context(), query, users=request.users, jobs=request.jobs
        )

    async def usage(self, request: r.GetUsage, now: float) -> UsageReport:
        """Return who held GPUs, for how long, and how much of that they were idle."""
        query = self._query(request, now, _DAY_SECONDS)
        return await asyncio.to_thread(
            usage_report, self._context(), query, by=request.by, users=request.users
        )

    async def job(self, request: r.GetJob, now: float) -> JobReport:
        """Return how well a job, a session or a process used its GPUs."""
        nodes = self.node_ids(() if request.node is None else (request.node,))
        wanted = JobRequest(
            request.job, request.kind, nodes, (_seconds(request.start), _seconds(request.end))
        )
        return await asyncio.to_thread(job_report, self._context(), wanted, max_steps=request.points, now=now)

    async def events(self, request: r.GetEvents, now: float) -> EventReport:
        """Return the events of a time range, oldest first."""
        query = self._query(request, now, _DAY_SECONDS)
        query = replace(query, kinds=frozenset(request.kinds) or None)
        return await asyncio.to_thread(event_report, self._context(), query)

    async def finding_spans(self, request: r.GetFindingSpans, now: float) -> FindingReport:
        """Return the findings that held at some time of a range, oldest first."""
        query = self._query(request, now, _DAY_SECONDS)
        return await asyncio.to_thread(finding_report, self._context(), query)

    async def coverage(self, session: Session) -> list[Coverage | None]:
        """Return what is missing of each interruption of a session.

        None stands for an interruption that goes on, and for one of those before the newest ten.
        """
        return await asyncio.to_thread(self._read_coverage, session)

    def _read_coverage(self, session: Session) -> list[Coverage | None]:
        context, skipped = self._context(), len(session.interruptions) - _MAX_INTERRUPTIONS
        found: list[Coverage | None] = []
        for place, part in enumerate(session.interruptions):
            key = session.id, part
            coverage = self._coverage.get(key)
            if coverage is None and place >= skipped and part.end is not None:
                with noticing() as incomplete:
                    coverage = interruption_coverage(context, session, part.start, part.end)
                if not coverage.pending and not incomplete:
                    if len(self._coverage) >= _MAX_CACHED:
                        self._coverage.clear()
                    self._coverage[key] = coverage
            found.append(coverage)
        return found

    def _context(self) -> Context:
        names = {number: node.name for number, node in self._register.by_id.items()}
        deadline = time.monotonic() + _MAX_ANSWER_SECONDS
        return Context(self._store, names, self._interval_seconds(), deadline)

    def _query(
        self,
        request: _RangeRequest,
        now: float,
        default_seconds: float,
        *,
        gpus: Sequence[str] = (),
        scope: Scope = "gpu",
    ) -> Query:
        """Return the query for a time range, nodes and GPUs; GPUs also choose their nodes."""
        start, end = _seconds(request.start), _seconds(request.end)
        end = now if end is None else end
        query = Query(
            start=end - default_seconds if start is None else start,
            end=end,
            scope=scope,
            nodes=self.node_ids(request.nodes),
            deadline=time.monotonic() + _MAX_ANSWER_SECONDS,
        )
        if not gpus:
            return query
        chosen = choose_gpus(self._store.gpus(), request.nodes, gpus)
        uuids = frozenset(gpu.uuid for gpu in chosen)
        return replace(
            query,
            nodes=frozenset(gpu.node for gpu in chosen),
            subjects=uuids if scope == "gpu" else None,
            gpus=uuids if scope == "process" else None,
        )

    def node_ids(self, names: Sequence[str]) -> frozenset[int] | None:
        """Return the numbers of nodes; None for all of them.

        Raises:
            RefusedError: No node has such a name.
        """
        if not names:
            return None
        found = set()
        for name in names:
            node = self._register.by_name(name)
            if node is None:
                raise RefusedError(404, f"there is no node {name[:100]!r}", hint="/clients lists them")
            found.add(node.id)
        return frozenset(found)


def _seconds(given: float | None) -> float | None:
    """Return a time or a length of a request as a plain number, which can be encoded."""
    return None if given is None else float(given)
