"""A head without a store: a demo machine or two, sessions in a list, and failures on demand."""

# ruff: noqa: D102  the interface says what its methods do
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from gpulse.cluster.head import answer_builder
from gpulse.cluster.head.active_findings import collect_active_findings
from gpulse.cluster.head.finding_operations import FindingResponses, FindingService
from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.head_interface import Download, LiveNode
from gpulse.errors import RefusedError
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.session import Session
from gpulse.model.time_text import format_iso
from gpulse.reports.event_report import EventReport
from gpulse.reports.finding_report import FindingReport, FindingSpanRow, finding_fields
from gpulse.reports.job_report import JobFinding, JobReport
from gpulse.reports.metric_history import HistoryReport, QueryReport
from gpulse.reports.process_report import ProcessReport
from gpulse.reports.run_comparison import RunComparison, compare_runs
from gpulse.reports.run_figures import Measure, RunFigures
from gpulse.reports.time_grid import ReportContext
from gpulse.reports.usage_report import UsageReport
from gpulse.sources.demo_machine import DemoMachine
from gpulse.store.store import Query, Store
from gpulse.web.access import CLIENT_USER
from tests.unit.job_documents import job_document

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as AsgiScope

NOW = 1_767_225_600.0
TOKEN = "a-token-of-some-length-1234567890"


class _EmptyStore(Store):
    """Has nothing."""


class FakeHead:
    """Answers as a head does."""

    def __init__(self, now: float = NOW, *, gpus: int = 2) -> None:
        self.time = now
        machine = DemoMachine(now - 60, gpus=gpus)
        frame = machine.sample(now)
        self.nodes = [
            self._node(1, "alpha", frame),
            self._node(2, "beta", frame._replace(gpus=frame.gpus[:1])),
        ]
        machine.close()
        self.sequence = 1
        self.news = asyncio.Condition()
        self.stored: list[Session] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.storage = a.Storage(
            state="ok",
            error=None,
            hint=None,
            since=None,
            directory="/var/lib/gpulse",
            waiting_bytes=0,
            commit_seconds=0.001,
            log_bytes=1,
            history_bytes=1,
            metadata_bytes=1,
            free_bytes=1,
            unsealed_bytes=1,
            is_behind=False,
        )
        self.failure: Exception | None = None
        self.was_ended = False
        self.absent: list[str] = []
        self.responses = FindingResponses()
        self.finding_operations = FindingService(
            nodes=lambda: [self.nodes[0]._replace(findings=() if self.finding is None else (self.finding,))],
            missing=tuple,
            responses=self.responses,
            read=lambda request, now: (
                ReportContext(_EmptyStore(), {}, 1.0, None),
                Query(float(request.start or now - 3600), float(request.end or now)),
            ),
            write_event=self._write_event,
            now=self.now,
        )
        self.finding: Finding | None = None
        """A finding of GPU 0 of alpha, which every answer about findings contains."""

    @staticmethod
    def _node(number: int, name: str, frame: Frame | None) -> LiveNode:
        return LiveNode(
            number,
            name,
            "healthy",
            connected=True,
            seen=NOW,
            frame=frame,
            processes={},
            findings=(),
            labels={},
            version="1",
        )

    async def advance(self, seconds: float = 1.0) -> None:
        """Let every node send a frame."""
        self.time += seconds
        self.nodes = [
            node if node.frame is None else node._replace(frame=node.frame._replace(time=self.time))
            for node in self.nodes
        ]
        self.sequence += 1
        async with self.news:
            self.news.notify_all()

    async def _write_event(self, kind: str, time: float, detail: dict[str, Any]) -> None:
        self._heard(kind)
        self.responses.apply(kind, time, detail)

    @property
    def reports(self) -> Self:
        return self

    def now(self) -> float:
        return self.time

    def info(self) -> a.Info:
        self._heard("info")
        return a.Info(message="gpulse head", name="gpulse", version="1", api="/", endpoints=["/status"])

    def status(self) -> a.Status:
        active = [session for session in self.stored if session.is_active]
        return a.Status(
            freq=1000,
            enable_bandwidth_profiling=False,
            enable_nvlink_profiling=False,
            is_profiling=bool(active),
            output_filename=f"{active[-1].name}.json" if active else "",
            frame_id_counter=self.sequence,
            connected_clients=[node.name for node in self.nodes],
            total_gpus=sum(len(node.devices) for node in self.nodes),
            gpu_info={},
            active_sessions=[self._session(session) for session in active],
            recoverable_sessions=[],
            version="1",
            time=format_iso(self.time),
            uptime_seconds=1.5,
            frames_received=self.sequence,
            nodes=[answer_builder.build_node_status(node, self.time) for node in self.nodes],
            missing_nodes=self.absent,
            findings=self._current_findings(),
            storage=self.storage,
            free_gpus=answer_builder.find_free_gpus(self.nodes),
        )

    def clients(self) -> a.Clients:
        clients = [answer_builder.build_client(node, self.time) for node in self.nodes]
        return a.Clients(total_clients=len(clients), clients=clients)

    def hardware(self, request: r.GetHardware) -> a.NodeHardware:
        node = next((node for node in self.nodes if node.name == request.name), None)
        if node is None:
            raise RefusedError(404, f"there is no node {request.name!r}")
        return answer_builder.build_hardware(node)

    def latest(self) -> a.Latest:
        return a.Latest(
            timestamp=format_iso(self.time),
            client_data={
                node.name: a.NodeValues(
                    hostname=node.name,
                    state=node.state,
                    time=format_iso(self.time),
                    age_seconds=0.0,
                    gpus=[
                        a.GpuValues(
                            gpu_id=f"{node.name}:0:GPU",
                            physical_idx=0,
                            name="GPU",
                            gpu_util=97.0,
                            gpu_memory=float("nan"),
                            values={},
                        )
                    ],
                    host=None,
                )
                for node in self.nodes
            },
        )

    async def fleet_trends(self) -> a.FleetTrends:
        return a.FleetTrends(
            start=self.time - 885,
            step_seconds=15.0,
            metric="gpu_utilization_ratio",
            gpus={
                node.name: {device.label: [None, *[0.97] * 59] for device in node.devices}
                for node in self.nodes
            },
        )

    def fleet_totals(self) -> a.FleetTotals:
        counts = ("gpus", "busy", "held_idle", "free", "harvested", "faulty", "lost", "missing_nodes")
        hours = ("wasted_gpu_hours_today", "held_gpu_hours_today", "wasted_gpu_hours_yesterday")
        now = {
            **dict.fromkeys(counts, 1),
            **dict.fromkeys(hours, 0.5),
            "power_watts": 412.0,
            "longest_idle_seconds": None,
            "idle_users": 0,
        }
        series = ("busy", "held_idle", "free", "faulty", "power_watts", "wasted_gpu_hours")
        day = {"start": NOW, "step_seconds": 900.0, **{name: [None, *[1.0] * 95] for name in series}}
        return msgspec.convert({"at": self.time, "now": now, "day": day}, a.FleetTotals)

    async def gpus(self) -> a.ClusterOccupancy:
        nodes = [
            answer_builder.build_node_occupancy(node, answer_builder.assess_node(node)) for node in self.nodes
        ]
        return answer_builder.build_cluster_occupancy(nodes, self.absent, self.time)

    def sessions(self) -> a.Sessions:
        return a.Sessions(
            total_sessions=len(self.stored),
            active_sessions=sum(session.is_active for session in self.stored),
            sessions=[self._session(session) for session in self.stored],
        )

    async def session(self, request: r.GetSession) -> a.SessionAnswer:
        return self._session(self._found(request.name))

    async def start_session(self, request: r.StartSession) -> a.OneSession:
        self._heard("start", request)
        name = request.name
        if any(session.name == name and session.is_active for session in self.stored):
            raise RefusedError(
                409, f"there is already a session {name}, which is active", hint="choose another name"
            )
        number = len(self.stored) + 1
        session = Session(
            f"s{number}",
            name or f"session-{number}",
            self.time - (request.since or 0),
            self.time,
            request.interval_ms or 1000,
        )
        self.stored.append(session)
        return a.OneSession(
            success=True,
            message="started",
            output_file=f"{session.name}.json",
            session=self._session(session),
        )

    async def stop_sessions(self, request: r.StopSessions) -> a.SeveralSessions:
        self._heard("stop", request)
        if request.name:
            self._found(request.name)
        stopped = [s for s in self.stored if s.is_active and request.name in {"", s.name}]
        self.stored = [
            s._replace(state="finished", end=self.time) if s in stopped else s for s in self.stored
        ]
        return a.SeveralSessions(
            success=True,
            message=f"{len(stopped)} stopped",
            output_file=None,
            sessions=[self._session(s) for s in stopped],
        )

    async def recover_session(self, request: r.RecoverSession) -> a.OneSession:
        self._heard("recover", request)
        session = self._session(self._found(request.session_id or request.name or ""))
        return a.OneSession(success=True, message="goes on", output_file=None, session=session)

    async def export_session(self, request: r.GetSessionFile) -> a.SeveralSessions:
        self._heard("export", request)
        session = self._session(self._found(request.name))
        file = f"{session.name}.{request.format}"
        return a.SeveralSessions(success=True, message="exported", output_file=file, sessions=[session])

    def download(self, request: r.GetSessionFile, *, with_code: bool = True) -> Download:
        session = self._found(request.name)

        async def pieces() -> AsyncIterator[bytes]:
            yield b'{"session_name":'
            yield f'"{session.name}"'.encode()
            if with_code and self.finding is not None:
                yield b',"findings":[' + msgspec.json.encode(self.finding.to_dict()) + b"]"
            yield b"}"

        kinds = {
            "json": "application/json",
            "jsonl": "application/x-ndjson",
            "csv": "text/csv",
            "parquet": "application/vnd.apache.parquet",
        }
        return Download(f"{session.name}.{request.format}", kinds[request.format], pieces())

    async def query(self, request: r.QueryMetric, _now: float) -> QueryReport:
        self._heard("query", request)
        series = {"node": "alpha", "subject": "GPU-0", "gpu": "0", "times": [NOW], "values": [0.5]}
        told: dict[str, Any] = {
            "metric": request.metric,
            "scope": request.scope,
            "incomplete": [],
            "series": [series],
        }
        told |= {"unit": "1", "from": NOW, "to": NOW, "step": None, "statistic": request.statistic}
        return msgspec.convert(told, QueryReport)

    async def history(self, request: r.GetHistory, _now: float) -> HistoryReport:
        self._heard("history", request)
        series = [
            {"node": "alpha", "subject": "GPU-0", "gpu": "0", "metric": metric, "unit": "1", "values": [None]}
            for metric in request.metrics
        ]
        span = {"from": NOW - 1, "to": NOW, "step": 1.0, "times": [NOW - 1]}
        return msgspec.convert(
            {"scope": request.scope, **span, "incomplete": [], "series": series}, HistoryReport
        )

    async def processes(self, request: r.GetProcesses, _now: float) -> ProcessReport:
        self._heard("processes", request)
        return msgspec.convert(
            {"from": NOW - 3600, "to": NOW, "truncated": False, "incomplete": [], "processes": []},
            ProcessReport,
        )

    async def usage(self, request: r.GetUsage, _now: float) -> UsageReport:
        self._heard("usage", request)
        row = {
            **dict.fromkeys(("job", "program", "node", "pid", "start_time", "energy_joules")),
            "harvested_energy_joules": None,
            "user": "=ada",
            "gpu_seconds": 60.0,
            "idle_seconds": 0.0,
            "harvested_seconds": 0.0,
            "utilization_mean": 0.5,
            "memory_bytes_max": 1024,
            "gpus": 1,
            "nodes": ["alpha"],
            "processes": 1,
            "first": NOW - 60,
            "last": NOW,
        }
        told = {
            "from": NOW - 3600,
            "to": NOW,
            "step": 60.0,
            "by": request.by,
            "gpus": 3,
            "capacity_seconds": 10_800.0,
            "gpu_seconds": 60.0,
            "idle_seconds": 0.0,
            "harvested_seconds": 0.0,
            "truncated": False,
            "incomplete": [],
            "rows": [row],
        }
        return msgspec.convert(told, UsageReport)

    async def job(self, request: r.GetJob, _now: float) -> JobReport:
        self._heard("job", request)
        report = msgspec.convert({**job_document(), "job": request.job}, JobReport)
        if self.finding is not None:
            fields = finding_fields(self.finding)
            report.findings.append(
                JobFinding(node="alpha", start=NOW - 60, end=None, times=1, active_seconds=60.0, **fields)
            )
        return report

    async def compare_sessions(self, request: r.CompareSessions, _now: float) -> RunComparison:
        self._heard("compare", request)
        busy = RunFigures(request.before, NOW, 60.0, 60.0, ("NVIDIA H200",), utilization=Measure(0.9))
        return compare_runs(busy._replace(utilization=Measure(0.4)), busy._replace(name=request.after))

    async def events(self, request: r.GetEvents, _now: float) -> EventReport:
        self._heard("events", request)
        events = [{"time": format_iso(NOW), "kind": "node_joined", "node": "alpha", "detail": {}}]
        if self.finding is not None:
            detail = {"findings": [self.finding.to_dict()], "verdict": None}
            events.append({"time": format_iso(NOW), "kind": "findings", "node": "alpha", "detail": detail})
        return msgspec.convert({"truncated": False, "events": events, "incomplete": []}, EventReport)

    def findings(self) -> a.Findings:
        return a.Findings(time=format_iso(self.time), findings=self._current_findings())

    def _current_findings(self) -> list[a.NodeFinding]:
        found = () if self.finding is None else (self.finding,)
        nodes = [self.nodes[0]._replace(findings=found)]
        return answer_builder.build_findings(collect_active_findings(nodes, (), self.time))

    async def finding_spans(self, request: r.GetFindingSpans, _now: float) -> FindingReport:
        self._heard("finding_spans", request)
        span = {
            **dict.fromkeys(("family", "cause", "lost_ratio", "confidence", "to", "url")),
            "node": "alpha",
            "gpu": 0,
            "label": "0",
            "id": "gpu_fault",
            "severity": "high",
            "summary": "",
            "pids": [1],
            "from": NOW - 60,
            "evidence": [],
            "advice": [],
        }
        report = msgspec.convert(
            {"from": NOW - 3600, "to": NOW, "truncated": False, "spans": [span], "incomplete": []},
            FindingReport,
        )
        if self.finding is not None:
            fields = finding_fields(self.finding)
            report.spans.append(FindingSpanRow(node="alpha", start=NOW - 60, end=None, **fields))
        return report

    async def read_stacks(self, request: r.ReadStacks) -> a.Stacks:
        self._heard("stacks", request)
        return a.Stacks(time=format_iso(self.time), groups=[], problems=[], unanswered=[])

    async def change_settings(self, request: r.ChangeSettings) -> a.SettingsChanged:
        self._heard("settings", request)
        settings = a.AgentSettings(interval_ms=request.interval_ms or 1000, bandwidth=False, nvlink=False)
        return a.SettingsChanged(success=True, settings=settings)

    def live(self) -> list[LiveNode]:
        return self.nodes

    def iter_live_nodes(self) -> Iterator[LiveNode]:
        return iter(self.nodes)

    def missing(self) -> Sequence[str]:
        return self.absent

    async def wait(self, after: int, timeout_seconds: float) -> int:
        if self.sequence <= after:
            try:
                async with asyncio.timeout(timeout_seconds), self.news:
                    await self.news.wait()
            except TimeoutError:
                pass
        return self.sequence

    def shut_down(self) -> a.Done:
        self.was_ended = True
        return a.Done(success=True, message="the head is stopping")

    def _heard(self, operation: str, request: r.Request | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.asked.append((operation, {} if request is None else msgspec.structs.asdict(request)))

    def _found(self, name: str) -> Session:
        for session in reversed(self.stored):
            if name in {session.name, session.id}:
                return session
        raise RefusedError(404, f"there is no session {name}", hint="GET /profiling/sessions lists them")

    def _session(self, session: Session) -> a.SessionAnswer:
        return answer_builder.build_session(session, self.time, output_file=session.output)


def seen_as(app: ASGIApp, user: int) -> ASGIApp:
    """The application as a process of this user reaches it over a real connection."""

    async def asked(scope: AsgiScope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[CLIENT_USER] = user
        await app(scope, receive, send)

    return asked
