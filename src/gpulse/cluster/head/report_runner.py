"""Compute reports for requests: resolve names of nodes and GPUs, and ask the store in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

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
from gpulse.reports.subject import JobKind
from gpulse.reports.usage import Grouping, UsageReport, usage_report
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.registry import Register
from gpulse.store.store import Query, Statistic, Store

_QUERY_SECONDS = 600.0
"""The time before the end that an answer is about where the request does not say when it starts."""
_CHART_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0
_MAX_INTERRUPTIONS = 10
"""Only this many interruptions of a session are looked at, the newest ones."""
_MAX_CACHED = 1000


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

    async def query(
        self,
        *,
        metric: str,
        scope: Scope,
        nodes: Sequence[str],
        gpus: Sequence[str],
        start: float | None,
        end: float,
        step: float | None,
        statistic: Statistic,
    ) -> QueryReport:
        """Return the history of one metric."""
        query = self._query((start, end), _QUERY_SECONDS, nodes, gpus, scope=scope)
        query = replace(query, metrics=(metric,), step=step, statistic=statistic)
        return await asyncio.to_thread(query_report, self._context(), query)

    async def history(
        self,
        *,
        metrics: Sequence[str],
        scope: Scope,
        nodes: Sequence[str],
        gpus: Sequence[str],
        start: float | None,
        end: float,
        points: int,
        spread: bool,
    ) -> HistoryReport:
        """Return several metrics over time, all on the same grid."""
        query = self._query((start, end), _CHART_SECONDS, nodes, gpus, scope=scope)
        query = replace(query, metrics=tuple(metrics))
        return await asyncio.to_thread(
            history_report, self._context(), query, max_steps=points, spread=spread
        )

    async def processes(
        self,
        *,
        start: float | None,
        end: float,
        nodes: Sequence[str],
        gpus: Sequence[str],
        users: Sequence[str],
        jobs: Sequence[str],
    ) -> ProcessReport:
        """Return the processes that held GPUs, newest first."""
        query = self._query((start, end), _CHART_SECONDS, nodes, gpus, scope="process")
        return await asyncio.to_thread(process_report, self._context(), query, users=users, jobs=jobs)

    async def usage(
        self, *, start: float | None, end: float, by: Grouping, nodes: Sequence[str], users: Sequence[str]
    ) -> UsageReport:
        """Return who held GPUs, for how long, and how much of that they were idle."""
        query = self._query((start, end), _DAY_SECONDS, nodes)
        return await asyncio.to_thread(usage_report, self._context(), query, by=by, users=users)

    async def job(
        self,
        *,
        job: str,
        kind: JobKind | None,
        node: str | None,
        start: float | None,
        end: float | None,
        points: int,
        now: float,
    ) -> JobReport:
        """Return how well a job, a session or a process used its GPUs."""
        request = JobRequest(job, kind, self.node_ids(() if node is None else (node,)), (start, end))
        return await asyncio.to_thread(job_report, self._context(), request, max_steps=points, now=now)

    async def events(
        self, *, start: float | None, end: float, kinds: Sequence[str], nodes: Sequence[str]
    ) -> EventReport:
        """Return the events of a time range, oldest first."""
        query = self._query((start, end), _DAY_SECONDS, nodes)
        query = replace(query, kinds=frozenset(kinds) or None)
        return await asyncio.to_thread(event_report, self._context(), query)

    async def finding_spans(self, *, start: float | None, end: float, nodes: Sequence[str]) -> FindingReport:
        """Return the findings that held at some time of a range, oldest first."""
        query = self._query((start, end), _DAY_SECONDS, nodes)
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
                coverage = interruption_coverage(context, session, part.start, part.end)
                if not coverage.pending:
                    if len(self._coverage) >= _MAX_CACHED:
                        self._coverage.clear()
                    self._coverage[key] = coverage
            found.append(coverage)
        return found

    def _context(self) -> Context:
        names = {number: node.name for number, node in self._register.by_id.items()}
        return Context(self._store, names, self._interval_seconds())

    def _query(
        self,
        wanted: tuple[float | None, float],
        default_seconds: float,
        nodes: Sequence[str],
        gpus: Sequence[str] = (),
        *,
        scope: Scope = "gpu",
    ) -> Query:
        """Return the query for a time range, nodes and GPUs; GPUs also choose their nodes."""
        start, end = wanted
        query = Query(
            start=end - default_seconds if start is None else start,
            end=end,
            scope=scope,
            nodes=self.node_ids(nodes),
        )
        if not gpus:
            return query
        chosen = choose_gpus(self._store.gpus(), nodes, gpus)
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
