"""A head without a store: a demo machine or two, sessions in a list, and failures on demand."""

# ruff: noqa: D102  the interface says what its methods do
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpulse.cluster.protocol.interface import Download, Format, LiveNode
from gpulse.errors import RefusedError
from gpulse.model.frame import Frame
from gpulse.model.iso_time import iso
from gpulse.model.metric import Scope
from gpulse.model.session import Session
from gpulse.reports.document import Document
from gpulse.reports.events import EventReport
from gpulse.reports.findings import FindingReport
from gpulse.reports.history import HistoryReport, QueryReport
from gpulse.reports.job_report import JobReport
from gpulse.reports.processes import ProcessReport
from gpulse.reports.subject import JobKind
from gpulse.reports.usage import Grouping, UsageReport
from gpulse.sources.simulated import DemoMachine
from gpulse.store.store import Statistic
from gpulse.web.access import CLIENT_USER
from tests.unit.job_documents import job_document

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as AsgiScope

NOW = 1_767_225_600.0
TOKEN = "a-token-of-some-length-1234567890"


class FakeHead:
    """Answers as a head does."""

    def __init__(self, now: float = NOW, *, gpus: int = 2) -> None:
        self.now = now
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
        self.storage: Document = {"state": "ok", "error": None}
        self.failure: Exception | None = None
        self.was_ended = False
        self.absent: list[str] = []

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
        self.now += seconds
        self.nodes = [
            node if node.frame is None else node._replace(frame=node.frame._replace(time=self.now))
            for node in self.nodes
        ]
        self.sequence += 1
        async with self.news:
            self.news.notify_all()

    def info(self) -> Document:
        self._heard("info")
        return {"name": "gpulse head", "version": "1", "endpoints": ["/status"]}

    def status(self) -> Document:
        active = [session for session in self.stored if session.is_active]
        return {
            "freq": 1000,
            "enable_bandwidth_profiling": False,
            "enable_nvlink_profiling": False,
            "is_profiling": bool(active),
            "output_filename": f"{active[-1].name}.json" if active else None,
            "frame_id_counter": self.sequence,
            "connected_clients": [node.name for node in self.nodes],
            "total_gpus": sum(len(node.frame.gpus) for node in self.nodes if node.frame),
            "gpu_info": {},
            "active_sessions": [session.name for session in active],
            "version": "1",
            "uptime_seconds": 1.5,
            "storage": self.storage,
            "nodes": [{"name": node.name, "state": node.state, "since": NOW} for node in self.nodes],
        }

    def clients(self) -> Document:
        clients = [
            {
                "client_id": node.name,
                "hostname": node.name,
                "gpu_count": len(node.frame.gpus) if node.frame else 0,
                "gpus": [
                    {
                        "id": f"{node.name}:{gpu.device.label}",
                        "name": gpu.device.name,
                        "physical_idx": gpu.device.index,
                    }
                    for gpu in (node.frame.gpus if node.frame else ())
                ],
                "state": node.state,
            }
            for node in self.nodes
        ]
        return {"total_clients": len(clients), "clients": clients}

    def latest(self) -> Document:
        return {
            "timestamp": self.now,
            "client_data": {
                node.name: {
                    "gpus": [{"gpu_id": f"{node.name}:0:GPU", "gpu_util": 97.0, "gpu_memory": float("nan")}],
                    "time": self.now,
                    "age_seconds": 0.0,
                }
                for node in self.nodes
            },
        }

    def sessions(self) -> Document:
        return {
            "total_sessions": len(self.stored),
            "active_sessions": sum(session.is_active for session in self.stored),
            "sessions": [self._session(session) for session in self.stored],
        }

    async def session(self, name: str) -> Document:
        return self._session(self._found(name))

    async def start_session(
        self,
        *,
        name: str | None,
        since_seconds: float | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        interval_ms: int | None = None,
    ) -> Document:
        self._heard(
            "start",
            name=name,
            since_seconds=since_seconds,
            nodes=nodes,
            gpus=gpus,
            labels=labels,
            interval_ms=interval_ms,
        )
        if any(session.name == name and session.is_active for session in self.stored):
            raise RefusedError(409, f"a session called {name} is active already", hint="choose another name")
        number = len(self.stored) + 1
        session = Session(
            f"s{number}",
            name or f"session-{number}",
            self.now - (since_seconds or 0),
            self.now,
            interval_ms or 1000,
        )
        self.stored.append(session)
        return {
            "success": True,
            "message": "started",
            "output_file": f"{session.name}.json",
            "session": self._session(session),
        }

    async def stop_sessions(self, *, name: str | None = None, output_format: Format = "json") -> Document:
        self._heard("stop", name=name, output_format=output_format)
        if name is not None:
            self._found(name)
        stopped = [s for s in self.stored if s.is_active and name in {None, s.name}]
        self.stored = [s._replace(state="finished", end=self.now) if s in stopped else s for s in self.stored]
        return {
            "success": True,
            "message": f"{len(stopped)} stopped",
            "output_file": None,
            "sessions": [s.name for s in stopped],
        }

    async def recover_session(self, *, name: str | None = None, session_id: str | None = None) -> Document:
        self._heard("recover", name=name, session_id=session_id)
        return {"success": True, "session": self._session(self._found(session_id or name or ""))}

    async def export_session(self, *, name: str, output_format: Format = "json") -> Document:
        self._heard("export", name=name, output_format=output_format)
        return {"success": True, "output_file": f"{self._found(name).name}.{output_format}"}

    def download(self, *, name: str, output_format: Format = "json") -> Download:
        session = self._found(name)

        async def pieces() -> AsyncIterator[bytes]:
            yield b'{"session_name":'
            yield f'"{session.name}"}}'.encode()

        kinds = {
            "json": "application/json",
            "jsonl": "application/x-ndjson",
            "csv": "text/csv",
            "parquet": "application/vnd.apache.parquet",
        }
        return Download(f"{session.name}.{output_format}", kinds[output_format], pieces())

    async def query(
        self,
        *,
        metric: str,
        scope: Scope = "gpu",
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        start: float | None = None,
        end: float | None = None,
        step: float | None = None,
        statistic: Statistic = "mean",
    ) -> QueryReport:
        self._heard(
            "query",
            metric=metric,
            scope=scope,
            nodes=nodes,
            gpus=gpus,
            start=start,
            end=end,
            step=step,
            statistic=statistic,
        )
        return msgspec.convert(
            {
                "metric": metric,
                "scope": scope,
                "incomplete": [],
                "series": [
                    {"node": "alpha", "subject": "GPU-0", "gpu": "0", "times": [NOW], "values": [0.5]}
                ],
                "unit": "1",
                "from": NOW,
                "to": NOW,
                "step": step,
                "statistic": statistic,
            },
            QueryReport,
        )

    async def history(
        self,
        *,
        metrics: Sequence[str],
        scope: Scope = "gpu",
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        start: float | None = None,
        end: float | None = None,
        points: int = 600,
        spread: bool = False,
    ) -> HistoryReport:
        self._heard(
            "history",
            metrics=metrics,
            scope=scope,
            nodes=nodes,
            gpus=gpus,
            start=start,
            end=end,
            points=points,
            spread=spread,
        )
        series = [
            {"node": "alpha", "subject": "GPU-0", "gpu": "0", "metric": metric, "unit": "1", "values": [None]}
            for metric in metrics
        ]
        span = {"from": NOW - 1, "to": NOW, "step": 1.0, "times": [NOW - 1]}
        return msgspec.convert({"scope": scope, **span, "incomplete": [], "series": series}, HistoryReport)

    async def processes(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        users: Sequence[str] = (),
        jobs: Sequence[str] = (),
    ) -> ProcessReport:
        self._heard("processes", start=start, end=end, nodes=nodes, gpus=gpus, users=users, jobs=jobs)
        return msgspec.convert(
            {"from": NOW - 3600, "to": NOW, "truncated": False, "incomplete": [], "processes": []},
            ProcessReport,
        )

    async def usage(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        by: Grouping = "user",
        nodes: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> UsageReport:
        self._heard("usage", start=start, end=end, by=by, nodes=nodes, users=users)
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
        return msgspec.convert(
            {
                "from": NOW - 3600,
                "to": NOW,
                "step": 60.0,
                "by": by,
                "gpus": 3,
                "capacity_seconds": 10_800.0,
                "gpu_seconds": 60.0,
                "idle_seconds": 0.0,
                "harvested_seconds": 0.0,
                "truncated": False,
                "incomplete": [],
                "rows": [row],
            },
            UsageReport,
        )

    async def job(
        self,
        *,
        job: str,
        kind: JobKind | None = None,
        node: str | None = None,
        start: float | None = None,
        end: float | None = None,
        points: int = 0,
    ) -> JobReport:
        self._heard("job", job=job, kind=kind, node=node, start=start, end=end, points=points)
        return msgspec.convert({**job_document(), "job": job}, JobReport)

    async def events(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        kinds: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> EventReport:
        self._heard("events", start=start, end=end, kinds=kinds, nodes=nodes)
        return msgspec.convert(
            {
                "truncated": False,
                "events": [{"time": iso(NOW), "kind": "node_joined", "node": "alpha", "detail": {}}],
            },
            EventReport,
        )

    def findings(self) -> Document:
        return {"findings": []}

    async def finding_spans(
        self, *, start: float | None = None, end: float | None = None, nodes: Sequence[str] = ()
    ) -> FindingReport:
        self._heard("finding_spans", start=start, end=end, nodes=nodes)
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
        return msgspec.convert(
            {"from": NOW - 3600, "to": NOW, "step": 30.0, "truncated": False, "spans": [span]}, FindingReport
        )

    async def change_settings(
        self, *, interval_ms: int | None = None, bandwidth: bool | None = None, nvlink: bool | None = None
    ) -> Document:
        self._heard("settings", interval_ms=interval_ms, bandwidth=bandwidth, nvlink=nvlink)
        return {"success": True, "freq": interval_ms or 1000}

    def live(self) -> list[LiveNode]:
        return self.nodes

    def one_by_one(self) -> Iterator[LiveNode]:
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

    def shut_down(self) -> Document:
        self.was_ended = True
        return {"success": True, "message": "the head ends"}

    def _heard(self, operation: str, **given: Any) -> None:
        if self.failure is not None:
            raise self.failure
        self.asked.append((operation, given))

    def _found(self, name: str) -> Session:
        for session in reversed(self.stored):
            if name in {session.name, session.id}:
                return session
        raise RefusedError(404, f"there is no session {name}", hint="GET /profiling/sessions lists them")

    def _session(self, session: Session) -> Document:
        return {
            "name": session.name,
            "session_id": session.id,
            "state": session.state,
            "is_active": session.is_active,
            "start_time": "2026-01-01T00:00:00Z",
            "end_time": None,
            "frame_count": 0,
            "output_file": session.output,
            "labels": dict(session.labels),
            "nodes": list(session.nodes),
            "gpus": list(session.gpus),
            "recoverable": False,
            "interruptions": [],
        }


def seen_as(app: ASGIApp, user: int) -> ASGIApp:
    """The application as a process of this user reaches it over a real connection."""

    async def asked(scope: AsgiScope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[CLIENT_USER] = user
        await app(scope, receive, send)

    return asked
