"""The head's implementation of the operations in `HeadInterface`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from gpulse._version import __version__
from gpulse.cluster import wire_pb2 as pb
from gpulse.cluster.head import answer_builder
from gpulse.cluster.head.active_findings import ActiveFinding
from gpulse.cluster.head.expected_nodes import find_missing_nodes
from gpulse.cluster.head.finding_operations import FindingResponses, FindingService
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.fleet_monitor import FleetMonitor
from gpulse.cluster.head.group_commit import Committer
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.session_exports import ExportQueue
from gpulse.cluster.head.session_lifecycle import SessionRegistry, recover_session, stop_session
from gpulse.cluster.head.stack_requests import find_nodes_to_ask
from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.head_interface import Download, LiveNode
from gpulse.errors import DiskError, RefusedError
from gpulse.model import time_text
from gpulse.model.finding import Finding
from gpulse.model.gpu_state import STAYS_BUSY_SECONDS
from gpulse.model.metric_catalog import Scope
from gpulse.model.session import Interruption, Session, SessionFormat
from gpulse.reports.event_report import (
    EventReport,
    InterruptionCoverage,
    build_event_report,
    find_interruption_coverage,
)
from gpulse.reports.finding_report import FindingReport, build_finding_report
from gpulse.reports.job_lookup import JobRequest
from gpulse.reports.job_report import JobReport
from gpulse.reports.job_report_builder import build_job_report
from gpulse.reports.metric_history import HistoryReport, QueryReport, build_history_report, build_query_report
from gpulse.reports.process_report import ProcessReport, build_process_report
from gpulse.reports.run_comparison import RunComparison
from gpulse.reports.session_run import build_session_comparison
from gpulse.reports.time_grid import ReportContext
from gpulse.reports.usage_report import ACTIVITY_METRICS, UsageReport, build_usage_report, find_active_gpus
from gpulse.store.gpu_selection import select_gpus
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import Query, Store

_MAX_ANSWER_SECONDS = 60.0
"""Data that a backend has not delivered by then is missing from the answer."""
_QUERY_SECONDS = 600.0
"""Default length of the time range if a request does not say when it starts."""
_CHART_SECONDS = 3600.0
_DAY_SECONDS = 86_400.0
_MAX_INTERRUPTIONS = 10
"""Only this many interruptions of a session are examined, newest first."""
_MAX_CACHED_COVERAGE = 1000


_RangeRequest = (
    r.QueryMetric
    | r.GetHistory
    | r.GetProcesses
    | r.GetUsage
    | r.GetEvents
    | r.GetFindingSpans
    | r.GetFindingGroups
)


class ReportRunner:
    """Computes reports from a head's store."""

    def __init__(self, store: Store, register: NodeRegistry, interval_seconds: Callable[[], float]) -> None:
        """Prepare to answer.

        Args:
            store: The store to read from.
            register: The nodes by name.
            interval_seconds: Returns the sampling interval of agents.
        """
        self._store = store
        self._register = register
        self._interval_seconds = interval_seconds
        self._coverage: dict[tuple[str, Interruption], InterruptionCoverage] = {}
        """Missing frames of interruptions, cached once they no longer change."""

    async def query(self, request: r.QueryMetric, now: float) -> QueryReport:
        """Return the history of one metric."""
        query = replace(
            self._query(request, now, _QUERY_SECONDS, gpus=request.gpus, scope=request.scope or "gpu"),
            metrics=(request.metric,),
            step=_as_float(request.step),
            statistic=request.statistic,
        )
        return await asyncio.to_thread(build_query_report, self._context(), query)

    async def history(self, request: r.GetHistory, now: float) -> HistoryReport:
        """Return several metrics over time, all on the same grid."""
        query = self._query(request, now, _CHART_SECONDS, gpus=request.gpus, scope=request.scope)
        query = replace(query, metrics=request.metrics)
        return await asyncio.to_thread(
            build_history_report, self._context(), query, max_steps=request.points, spread=request.spread
        )

    async def processes(self, request: r.GetProcesses, now: float) -> ProcessReport:
        """Return the processes that held GPUs, newest first."""
        query = self._query(request, now, _CHART_SECONDS, gpus=request.gpus, scope="process")
        return await asyncio.to_thread(
            build_process_report, self._context(), query, users=request.users, jobs=request.jobs
        )

    async def recently_active(self, gpus: Collection[str], now: float) -> set[str]:
        """Return those of these GPUs, by UUID, that were active within the last seconds."""
        if not gpus:
            return set()
        query = Query(
            start=now - STAYS_BUSY_SECONDS,
            end=now,
            metrics=ACTIVITY_METRICS,
            subjects=frozenset(gpus),
            spread=False,
            deadline=time.monotonic() + _MAX_ANSWER_SECONDS,
        )
        return await asyncio.to_thread(find_active_gpus, self._context(), query)

    async def usage(self, request: r.GetUsage, now: float) -> UsageReport:
        """Return who held GPUs, for how long, and how long these GPUs were idle."""
        query = self._query(request, now, _DAY_SECONDS)
        return await asyncio.to_thread(
            build_usage_report, self._context(), query, by=request.by, users=request.users
        )

    async def job(self, request: r.GetJob, now: float) -> JobReport:
        """Return how well a job, a session or a process used its GPUs."""
        nodes = self.node_ids(() if request.node is None else (request.node,))
        wanted = JobRequest(
            request.job, request.kind, nodes, (_as_float(request.start), _as_float(request.end))
        )
        return await asyncio.to_thread(
            build_job_report, self._context(), wanted, max_steps=request.points, now=now
        )

    async def compare_sessions(self, request: r.CompareSessions, now: float) -> RunComparison:
        """Compare two sessions: what changed, and whether it became better."""
        return await asyncio.to_thread(
            build_session_comparison, self._context(), request.before, request.after, now=now
        )

    async def events(self, request: r.GetEvents, now: float) -> EventReport:
        """Return the events of a time range, oldest first."""
        query = self._query(request, now, _DAY_SECONDS)
        query = replace(query, kinds=frozenset(request.kinds) or None)
        return await asyncio.to_thread(build_event_report, self._context(), query)

    async def finding_spans(self, request: r.GetFindingSpans, now: float) -> FindingReport:
        """Return the findings that held at some time of a range, oldest first."""
        query = self._query(request, now, _DAY_SECONDS)
        return await asyncio.to_thread(build_finding_report, self._context(), query)

    def past_findings(self, request: r.GetFindingGroups, now: float) -> tuple[ReportContext, Query]:
        """Return the store and the query for a request about past findings."""
        return self._context(), self._query(request, now, _DAY_SECONDS)

    async def coverage(self, session: Session) -> list[InterruptionCoverage | None]:
        """Return the missing frames of each interruption of a session.

        None stands for an interruption that has not ended, and for those before the newest ten.
        """
        return await asyncio.to_thread(self._read_coverage, session)

    def _read_coverage(self, session: Session) -> list[InterruptionCoverage | None]:
        context, skipped = self._context(), len(session.interruptions) - _MAX_INTERRUPTIONS
        found: list[InterruptionCoverage | None] = []
        for place, part in enumerate(session.interruptions):
            key = session.id, part
            coverage = self._coverage.get(key)
            if coverage is None and place >= skipped and part.end is not None:
                with collect_missing() as incomplete:
                    coverage = find_interruption_coverage(context, session, part.start, part.end)
                if not coverage.pending and not incomplete:
                    if len(self._coverage) >= _MAX_CACHED_COVERAGE:
                        self._coverage.clear()
                    self._coverage[key] = coverage
            found.append(coverage)
        return found

    def _context(self) -> ReportContext:
        names = {number: node.name for number, node in self._register.by_id.items()}
        deadline = time.monotonic() + _MAX_ANSWER_SECONDS
        return ReportContext(self._store, names, self._interval_seconds(), deadline)

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
        start, end = _as_float(request.start), _as_float(request.end)
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
        chosen = select_gpus(self._store.gpus(), request.nodes, gpus)
        uuids = frozenset(gpu.uuid for gpu in chosen)
        return replace(
            query,
            nodes=frozenset(gpu.node for gpu in chosen),
            subjects=uuids if scope == "gpu" else None,
            gpus=uuids if scope == "process" else None,
        )

    def node_ids(self, names: Sequence[str]) -> frozenset[int] | None:
        """Return the IDs of nodes; None for all nodes.

        Raises:
            RefusedError: There is no node with such a name.
        """
        if not names:
            return None
        found = set()
        for name in names:
            node = self._register.by_name(name)
            if node is None:
                raise RefusedError(
                    404, f"there is no node {name[:100]!r}", hint="list the nodes with GET /clients"
                )
            found.add(node.id)
        return frozenset(found)


def _as_float(given: float | None) -> float | None:
    """Return a time or duration of a request as a plain float, which can be encoded."""
    return None if given is None else float(given)


class SamplingSettings:
    """Sampling settings of agents, which can change while the head runs."""

    def __init__(self, *, interval_ms: int, bandwidth: bool, nvlink: bool) -> None:
        self.interval_ms = interval_ms
        self.bandwidth = bandwidth
        self.nvlink = nvlink

    def __str__(self) -> str:
        extras = [name for name in ("bandwidth", "nvlink") if getattr(self, name)]
        return ", ".join([f"sampling every {self.interval_ms} ms", *extras])

    @property
    def interval_seconds(self) -> float:
        """Sampling interval."""
        return self.interval_ms / 1000

    def changed(
        self, *, interval_ms: int | None, bandwidth: bool | None, nvlink: bool | None
    ) -> SamplingSettings:
        """Return a copy with the given changes."""
        return SamplingSettings(
            interval_ms=self.interval_ms if interval_ms is None else interval_ms,
            bandwidth=self.bandwidth if bandwidth is None else bandwidth,
            nvlink=self.nvlink if nvlink is None else nvlink,
        )

    def take(self, other: SamplingSettings) -> None:
        """Copy the values of other settings."""
        self.interval_ms, self.bandwidth, self.nvlink = other.interval_ms, other.bandwidth, other.nvlink

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a JSON object."""
        return {"interval_ms": self.interval_ms, "bandwidth": self.bandwidth, "nvlink": self.nvlink}

    def to_wire(self) -> pb.Settings:
        """Return the settings as a protobuf message for agents."""
        return pb.Settings(interval_ms=self.interval_ms, bandwidth=self.bandwidth, nvlink=self.nvlink)


log = logging.getLogger(__name__)

_EXPORT_WAIT_SECONDS = 8.0
_LAST_FRAME_SECONDS = 1.0
"""A stop waits this long for frames that were sampled before it and have not arrived yet."""


class HeadService:
    """The operations of a head (`HeadInterface`)."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        monitor: FleetMonitor,
        ingest: Ingest,
        committer: Committer,
        store: Store,
        sessions: SessionRegistry,
        settings: SamplingSettings,
        exports: ExportQueue,
        storage: Callable[[], a.Storage],
        backends: Callable[[], a.BackendStatus] = a.BackendStatus,
        notifications: Callable[[], Sequence[a.NotificationTarget] | msgspec.UnsetType] = lambda: (
            msgspec.UNSET
        ),
        keep_seconds: float,
        expected: Callable[[], Sequence[str]],
        missing_findings: Callable[[], Sequence[Finding]] = tuple,
        responses: FindingResponses | None = None,
        now: Callable[[], float],
        stop: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._monitor = monitor
        self._ingest = ingest
        self._committer = committer
        self._sessions = sessions
        self._settings = settings
        self._exports = exports
        self._storage = storage
        self._backends = backends
        self._notifications = notifications
        self._keep_seconds = keep_seconds
        self._expected = expected
        self._missing_findings = missing_findings
        self.now = now
        self._stop = stop
        self._store = store
        self.reports = ReportRunner(store, fleet.register, lambda: settings.interval_seconds)
        self.finding_operations = FindingService(
            nodes=fleet.iter_live_nodes,
            missing=missing_findings,
            responses=FindingResponses() if responses is None else responses,
            read=self.reports.past_findings,
            write_event=self._write_event,
            now=now,
        )
        self._started = now()
        self._session_lock = asyncio.Lock()
        self._work: set[asyncio.Task[a.SeveralSessions]] = set()
        """Running tasks that continue even if their caller has gone."""

    # --- reading

    def info(self) -> a.Info:
        """Return the name and version of this server."""
        return a.Info(
            message="gpulse head",
            name="gpulse",
            version=__version__,
            api="/openapi.json",
            endpoints=["/status", "/clients", "/metrics/latest", "/profiling/sessions", "/metrics"],
        )

    def status(self) -> a.Status:
        """Return the status of the head, its storage and its nodes."""
        now, live, active = self.now(), self._fleet.live(), self._sessions.active()
        present = [node for node in live if node.is_present]
        described = [
            answer_builder.build_session(session, now, output_file=self._exports.path(session))
            for session in active
        ]
        newest = described[-1] if described else None
        return a.Status(
            freq=self._settings.interval_ms,
            enable_bandwidth_profiling=self._settings.bandwidth,
            enable_nvlink_profiling=self._settings.nvlink,
            is_profiling=bool(active),
            output_filename=os.path.basename(newest.output_file or "") if newest else "",
            frame_id_counter=newest.frame_count if newest else 0,
            connected_clients=[node.name for node in present if node.connected],
            total_gpus=sum(len(node.devices) for node in present),
            gpu_info={node.name: answer_builder.build_node_gpus(node) for node in present},
            active_sessions=described,
            recoverable_sessions=[s.name for s in self._sessions.all() if s.state == "interrupted"],
            version=__version__,
            time=time_text.format_iso(now),
            uptime_seconds=round(now - self._started, 1),
            frames_received=self._ingest.frames,
            nodes=[answer_builder.build_node_status(node, now) for node in live],
            missing_nodes=self.missing(),
            findings=answer_builder.build_findings(self.active_findings()),
            storage=self._storage(),
            free_gpus=answer_builder.find_free_gpus(live),
            notifications=self._notifications(),
            **msgspec.structs.asdict(self._backends()),
        )

    def clients(self) -> a.Clients:
        """Return the connected nodes and their GPUs."""
        now = self.now()
        found = [answer_builder.build_client(node, now) for node in self._fleet.live() if node.is_present]
        return a.Clients(total_clients=len(found), clients=found)

    def hardware(self, request: r.GetHardware) -> a.NodeHardware:
        """Return the hardware of a node: its GPUs and how they are connected."""
        node = self._fleet.find_node(request.name)
        if node is None:
            raise RefusedError(
                404, f"there is no node {request.name[:100]!r}", hint="list the nodes with GET /status"
            )
        return answer_builder.build_hardware(node)

    def latest(self) -> a.Latest:
        """Return the newest readings of every node that is not lost."""
        now, settings = self.now(), self._settings
        return a.Latest(
            timestamp=time_text.format_iso(now),
            client_data={
                node.name: answer_builder.build_node_values(
                    node, node.frame, now, bandwidth=settings.bandwidth, nvlink=settings.nvlink
                )
                for node in self._fleet.live()
                if node.state != "lost" and node.frame is not None
            },
        )

    async def gpus(self) -> a.ClusterOccupancy:
        """Return what every GPU does now, and who holds it."""
        now, nodes = self.now(), []
        uses = []
        for node in self._fleet.iter_live_nodes():
            uses.append((node, answer_builder.assess_node(node)))
            await asyncio.sleep(0)  # a large cluster must not keep agents waiting
        resting = {use.reading.device.uuid for _, gpus in uses for use in gpus if use.state == "idle"}
        active = await self.reports.recently_active(resting, now)
        for node, gpus in uses:
            nodes.append(answer_builder.build_node_occupancy(node, gpus, active))
            await asyncio.sleep(0)
        return answer_builder.build_cluster_occupancy(nodes, self.missing(), now)

    def sessions(self) -> a.Sessions:
        """Return all sessions."""
        known = self._sessions.all()
        return a.Sessions(
            total_sessions=len(known),
            active_sessions=sum(session.is_active for session in known),
            sessions=[self._describe_session(session) for session in known],
        )

    async def session(self, request: r.GetSession) -> a.SessionAnswer:
        """Return a session by its ID, or the newest one with a name, with the missing frames of its interruptions."""
        return await self._describe_with_coverage(self._sessions.find(request.name))

    def findings(self) -> a.Findings:
        """Return the current findings, worst first."""
        return a.Findings(
            time=time_text.format_iso(self.now()),
            findings=answer_builder.build_findings(self.active_findings()),
        )

    async def fleet_trends(self) -> a.FleetTrends:
        """Return the utilization of every GPU in the last 15 minutes."""
        return await self._monitor.trends()

    def fleet_totals(self) -> a.FleetTotals:
        """Return the totals of all GPUs, now and over the last 24 hours."""
        return self._monitor.totals()

    def active_findings(self) -> list[ActiveFinding]:
        """Return all findings that hold now, faults first."""
        return self.finding_operations.active()

    def live(self) -> list[LiveNode]:
        """Return every node with its newest frame."""
        return self._fleet.live()

    def iter_live_nodes(self) -> Iterator[LiveNode]:
        """Yield every node, each decoded when it is reached, so that other tasks can run in between."""
        return self._fleet.iter_live_nodes()

    def missing(self) -> list[str]:
        """Return the expected nodes that have never reported."""
        return find_missing_nodes(self._expected(), self._fleet.register.by_id.values())

    async def wait(self, after: int, timeout_seconds: float) -> int:
        """Wait until the data version differs from `after`; return the current version."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._ingest.version == after:
                    await self._ingest.wait_for_change()
        except TimeoutError:
            pass
        return self._ingest.version

    # --- sessions

    async def start_session(self, request: r.StartSession) -> a.OneSession:
        """Start a session, optionally with a start in the past."""
        if request.nodes or request.gpus:
            self.reports.node_ids(request.nodes)
            await self._durable()  # so that the store has the GPUs of a node that has just joined
            select_gpus(self._store.gpus(), request.nodes, request.gpus)
        async with self._session_lock:
            session = self._sessions.begin(
                secrets.token_hex(8),
                now=self.now(),
                name=request.name or None,
                since_seconds=request.since,
                max_seconds=self._keep_seconds,
                nodes=request.nodes,
                gpus=request.gpus,
                labels=request.labels,
                interval_ms=request.interval_ms or self._settings.interval_ms,
                bandwidth=self._settings.bandwidth,
                nvlink=self._settings.nvlink,
            )
            await self._store_session(session)
            await self._exports.plan(session)
        log.info("session %s started (%s)", session.name, session.id)
        return a.OneSession(
            success=True,
            message=f"Profiling started: session {session.name}",
            output_file=self._exports.path(session),
            session=self._describe_session(session),
        )

    async def stop_sessions(self, request: r.StopSessions) -> a.SeveralSessions:
        """Stop one session or all active ones, and write their files.

        The work continues even if the caller goes away.
        """
        work = asyncio.create_task(self._stop_sessions(request.name or None, request.format))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.shield(work)

    async def _stop_sessions(self, name: str | None, output_format: SessionFormat) -> a.SeveralSessions:
        async with self._session_lock:
            chosen = self._sessions.to_stop(name)
            now = self.now()
            ended = [stop_session(session, now) for session in chosen]
            for session in ended:
                await self._store_session(session)
        if not ended:
            return a.SeveralSessions(
                success=False, message="no session is active", output_file=None, sessions=[]
            )
        await asyncio.sleep(min(_LAST_FRAME_SECONDS, self._settings.interval_ms / 1000))
        await self._durable()
        for session in ended:
            log.info("session %s stopped", session.name)
            self._exports.begin(session, output_format, self._written)
        await self._exports.finished([s.id for s in ended], _EXPORT_WAIT_SECONDS)
        return self._outcome("Profiling stopped", ended)

    async def export_session(self, request: r.GetSessionFile) -> a.SeveralSessions:
        """Write a session's file again, in the head's output directory."""
        session = self._sessions.find(request.name)
        await self._durable()
        self._exports.begin(session, request.format, self._written)
        await self._exports.finished([session.id], _EXPORT_WAIT_SECONDS)
        return self._outcome("Exported", [session])

    def _outcome(self, done: str, sessions: Sequence[Session]) -> a.SeveralSessions:
        known = [self._sessions.find(session.id) for session in sessions]
        by_state: dict[str, list[tuple[Session, a.ExportState]]] = {}
        for session in known:
            export = self._exports.state(session)
            by_state.setdefault(export.state, []).append((session, export))
        failed, writing = by_state.get("failed", ()), by_state.get("writing", ())
        files = [path for session, _ in by_state.get("done", ()) if (path := self._exports.path(session))]
        message = f"{done}: {', '.join(session.name for session in known)}"
        if files:
            message += f". Data saved to {', '.join(files)}"
        if writing:
            message += f". Still being written: {', '.join(session.name for session, _ in writing)}"
        if failed:
            message += f". Not written: {'; '.join(str(export.error) for _, export in failed)}"
        return a.SeveralSessions(
            success=not failed,
            message=message,
            output_file=files[0] if files else None,
            sessions=[self._describe_session(session) for session in known],
        )

    async def recover_session(self, request: r.RecoverSession) -> a.OneSession:
        """Continue an interrupted session."""
        async with self._session_lock:
            chosen = self._sessions.to_recover(request.name, request.session_id)
            session = recover_session(chosen, self.now())
            await self._store_session(session)
            await self._exports.plan(session)
        log.info("session %s resumed", session.name)
        return a.OneSession(
            success=True,
            message=f"session {session.name} resumed",
            output_file=self._exports.path(session),
            session=await self._describe_with_coverage(session),
        )

    def download(self, request: r.GetSessionFile, *, with_code: bool = True) -> Download:
        """Return a session's file in pieces, with or without the lines of code of its findings."""
        session = self._sessions.find(request.name)
        return self._exports.download(session, request.format, self.now(), with_code=with_code)

    async def _written(self, session: Session, path: str) -> None:
        """Record the path of a finished session's file."""
        if session.state != "finished":
            return
        async with self._session_lock:
            with suppress(RefusedError):  # a full disk: the next head writes the file again
                await self._store_session(self._sessions.find(session.id)._replace(output=path))

    async def write_files(self) -> None:
        """Write the files of stopped sessions that the last head did not finish.

        The files of sessions that are not stopped yet are planned first, so that none takes another's name.
        """
        for session in self._sessions.all():
            if session.state != "finished":
                await self._exports.plan(session)
        for session in self._sessions.all():
            if session.state == "finished" and session.output is None:
                self._exports.begin(session, "json", self._written)

    async def _store_session(self, session: Session) -> None:
        """Write a session to the log; the head updates its sessions from there."""
        await self._durable(LogEntry.of_fact("session", **session.to_dict()))

    async def _write_event(self, kind: str, time: float, detail: dict[str, Any]) -> None:
        """Write an event of the head to the log, and wait until it is on disk."""
        await self._durable(LogEntry.of_fact("event", time=time, kind=kind, node=None, detail=detail))
        self._ingest.changed()

    async def _durable(self, entry: LogEntry | None = None) -> None:
        try:
            await self._committer.durable(entry)
        except DiskError as error:
            raise RefusedError(
                503, f"the head's storage is failing: {error.message}", hint=error.hint
            ) from error

    def _describe_session(
        self, session: Session, coverage: Sequence[InterruptionCoverage | None] = ()
    ) -> a.SessionAnswer:
        return answer_builder.build_session(
            session,
            self.now(),
            output_file=self._exports.path(session),
            export=self._exports.state(session),
            coverage=coverage,
        )

    async def _describe_with_coverage(self, session: Session) -> a.SessionAnswer:
        """Return a session with the missing frames of its interruptions, which must be read from the store."""
        if not session.interruptions:
            return self._describe_session(session)
        return self._describe_session(session, await self.reports.coverage(session))

    # --- agents

    async def read_stacks(self, request: r.ReadStacks) -> a.Stacks:
        """Let agents read the stacks of processes, and return them, equal ones together.

        Raises:
            RefusedError: Another request is being answered, no node reports the job, or the nodes are too many.
        """
        nodes = find_nodes_to_ask(self._fleet, self.reports.node_ids(request.nodes), request.job)
        return await self._ingest.stack_requests.read(nodes, request.job, self.now)

    # --- the head itself

    async def change_settings(self, request: r.ChangeSettings) -> a.SettingsChanged:
        """Change the sampling settings; agents apply them at once."""
        wanted = self._settings.changed(
            interval_ms=request.interval_ms, bandwidth=request.bandwidth, nvlink=request.nvlink
        )
        await self._durable(LogEntry.of_fact("settings", time=self.now(), **wanted.to_dict()))
        self._settings.take(wanted)
        self._ingest.settings_changed()
        log.info("settings changed: %s", self._settings)
        return a.SettingsChanged(success=True, settings=a.AgentSettings(**self._settings.to_dict()))

    def shut_down(self) -> a.Done:
        """Stop the head."""
        log.info("stop requested")
        asyncio.get_running_loop().call_later(0.1, self._stop)
        return a.Done(success=True, message="the head is stopping")
