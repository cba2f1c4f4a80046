"""What a head does when it is asked: the interface behind gRPC, HTTP and the command line."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from gpulse._version import __version__
from gpulse.cluster.head import documents
from gpulse.cluster.head.commit import Committer
from gpulse.cluster.head.expected import missing
from gpulse.cluster.head.exports import Exports
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.report_runner import ReportRunner
from gpulse.cluster.head.sessions import (
    LONGEST_INTERVAL_MS,
    SHORTEST_INTERVAL_MS,
    Sessions,
    recovered,
    stopped,
)
from gpulse.cluster.head.settings import Settings
from gpulse.cluster.protocol.interface import Download, Format, LiveNode
from gpulse.errors import DiskError, RefusedError
from gpulse.model.finding import Finding
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
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.log.records import Entry
from gpulse.store.store import Statistic, Store

log = logging.getLogger(__name__)

_EXPORT_PATIENCE_SECONDS = 8.0
_LAST_FRAME_SECONDS = 1.0
"""So long a stop waits for the frames that were taken before it and are still on their way."""


class Service:
    """A head's operations (`HeadInterface`)."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        ingest: Ingest,
        committer: Committer,
        store: Store,
        sessions: Sessions,
        settings: Settings,
        exports: Exports,
        storage: Callable[[], Document],
        beyond: Callable[[], Document] = dict,
        keep_seconds: float,
        expected: Callable[[], Sequence[str]],
        missing_findings: Callable[[], Sequence[Finding]] = tuple,
        now: Callable[[], float],
        stop: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._ingest = ingest
        self._committer = committer
        self._sessions = sessions
        self._settings = settings
        self._exports = exports
        self._storage = storage
        self._beyond = beyond
        self._keep_seconds = keep_seconds
        self._expected = expected
        self._missing_findings = missing_findings
        self._now = now
        self._stop = stop
        self._store = store
        self._reports = ReportRunner(store, fleet.register, lambda: settings.interval_seconds)
        self._started = now()
        self._session_lock = asyncio.Lock()
        self._work: set[asyncio.Task[Document]] = set()
        """What goes on though nobody may wait for it any more."""

    # --- looking

    def info(self) -> Document:
        """Who this is."""
        return {
            "message": "gpulse head",
            "name": "gpulse",
            "version": __version__,
            "api": "/openapi.json",
            "endpoints": ["/status", "/clients", "/metrics/latest", "/profiling/sessions", "/metrics"],
        }

    def status(self) -> Document:
        """How the head is, what it stores, who is connected."""
        now, live, active = self._now(), self._fleet.live(), self._sessions.active()
        present = [node for node in live if node.is_present]
        newest = active[-1] if active else None
        described = [
            {**documents.session(session, now), "output_file": self._exports.path(session)}
            for session in active
        ]
        planned = self._exports.path(newest) if newest else None
        return {
            "freq": self._settings.interval_ms,
            "enable_bandwidth_profiling": self._settings.bandwidth,
            "enable_nvlink_profiling": self._settings.nvlink,
            "is_profiling": bool(active),
            "output_filename": os.path.basename(planned or ""),
            "frame_id_counter": described[-1]["frame_count"] if described else 0,
            "connected_clients": [node.name for node in present if node.connected],
            "total_gpus": sum(len(node.devices) for node in present),
            "gpu_info": {node.name: documents.node_gpus(node) for node in present},
            "active_sessions": described,
            "recoverable_sessions": [s.name for s in self._sessions.all() if s.state == "interrupted"],
            "version": __version__,
            "time": documents.iso(now),
            "uptime_seconds": round(now - self._started, 1),
            "frames_received": self._ingest.frames,
            "nodes": documents.nodes(live, now),
            "missing_nodes": self.missing(),
            "findings": documents.findings(live, self._missing_findings()),
            "storage": self._storage(),
            **self._beyond(),
        }

    def clients(self) -> Document:
        """The connected nodes and their GPUs."""
        now = self._now()
        found = [documents.client(node, now) for node in self._fleet.live() if node.is_present]
        return {"total_clients": len(found), "clients": found}

    def latest(self) -> Document:
        """The newest readings of every node that is not lost."""
        now = self._now()
        flags = {"bandwidth": self._settings.bandwidth, "nvlink": self._settings.nvlink}
        return {
            "timestamp": documents.iso(now),
            "client_data": {
                node.name: {
                    "hostname": node.name.partition("#")[0],
                    "state": node.state,
                    "time": documents.iso(node.frame.time),
                    "age_seconds": round(max(0.0, now - node.frame.time), 3),
                    "gpus": [documents.reading(node, gpu, **flags) for gpu in node.frame.gpus],
                    "host": node.frame.host.values if node.frame.host else None,
                }
                for node in self._fleet.live()
                if node.state != "lost" and node.frame is not None
            },
        }

    def sessions(self) -> Document:
        """All sessions."""
        now, known = self._now(), self._sessions.all()
        return {
            "total_sessions": len(known),
            "active_sessions": sum(session.is_active for session in known),
            "sessions": [self._described(session, now) for session in known],
        }

    async def session(self, name: str) -> Document:
        """One session, by its id or the newest of that name, and what is missing of its interruptions."""
        return await self._described_whole(self._sessions.find(name))

    def findings(self) -> Document:
        """What is wrong now, worst first."""
        return {
            "time": documents.iso(self._now()),
            "findings": documents.findings(self._fleet.live(), self._missing_findings()),
        }

    def live(self) -> list[LiveNode]:
        """Every node with its newest frame."""
        return self._fleet.live()

    def one_by_one(self) -> Iterator[LiveNode]:
        """The same, each taken apart when it is reached: others may get their turn in between."""
        return self._fleet.one_by_one()

    def missing(self) -> list[str]:
        """Return the expected nodes that have never reported."""
        return missing(self._expected(), self._fleet.register.by_id.values())

    async def wait(self, after: int, timeout_seconds: float) -> int:
        """Wait until something new came than what was there at `after`; the number to give next time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._ingest.version == after:
                    await self._ingest.news()
        except TimeoutError:
            pass
        return self._ingest.version

    # --- history

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
        """The history of one metric."""
        return await self._reports.query(
            metric=metric,
            scope=scope,
            nodes=nodes,
            gpus=gpus,
            start=start,
            end=self._now() if end is None else end,
            step=step,
            statistic=statistic,
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
        """Several metrics over time, all at the same moments."""
        return await self._reports.history(
            metrics=metrics,
            scope=scope,
            nodes=nodes,
            gpus=gpus,
            start=start,
            end=self._now() if end is None else end,
            points=points,
            spread=spread,
        )

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
        """The processes that held GPUs, newest first."""
        return await self._reports.processes(
            start=start,
            end=self._now() if end is None else end,
            nodes=nodes,
            gpus=gpus,
            users=users,
            jobs=jobs,
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
        """Who held GPUs, for how long, and how much of that they did nothing."""
        return await self._reports.usage(
            start=start, end=self._now() if end is None else end, by=by, nodes=nodes, users=users
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
        """How well a job, a session or a process used its GPUs."""
        return await self._reports.job(
            job=job, kind=kind, node=node, start=start, end=end, points=points, now=self._now()
        )

    async def events(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        kinds: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> EventReport:
        """What happened."""
        return await self._reports.events(
            start=start, end=self._now() if end is None else end, kinds=kinds, nodes=nodes
        )

    async def finding_spans(
        self, *, start: float | None = None, end: float | None = None, nodes: Sequence[str] = ()
    ) -> FindingReport:
        """From when to when findings held, oldest first."""
        return await self._reports.finding_spans(
            start=start, end=self._now() if end is None else end, nodes=nodes
        )

    # --- sessions

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
        """Begin a session, in the past when asked to."""
        if nodes or gpus:
            self._reports.node_ids(nodes)
            choose_gpus(self._store.gpus(), nodes, gpus)
        async with self._session_lock:
            session = self._sessions.begin(
                secrets.token_hex(8),
                now=self._now(),
                name=name,
                since_seconds=since_seconds,
                longest_seconds=self._keep_seconds,
                nodes=nodes,
                gpus=gpus,
                labels=labels or {},
                interval_ms=self._settings.interval_ms if interval_ms is None else interval_ms,
                bandwidth=self._settings.bandwidth,
                nvlink=self._settings.nvlink,
            )
            await self._keep(session)
            await self._exports.plan(session)
        log.info("session %s began (%s)", session.name, session.id)
        return {
            "success": True,
            "message": f"Profiling started: session {session.name}",
            "output_file": self._exports.path(session),
            "session": self._described(session, self._now()),
        }

    async def stop_sessions(self, *, name: str | None = None, output_format: Format = "json") -> Document:
        """End one session, or all that are active, and write their files.

        It goes on when whoever asked goes away.
        """
        work = asyncio.create_task(self._stop_sessions(name, output_format))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.shield(work)

    async def _stop_sessions(self, name: str | None, output_format: Format) -> Document:
        async with self._session_lock:
            chosen = self._sessions.to_stop(name)
            now = self._now()
            ended = [stopped(session, now) for session in chosen]
            for session in ended:
                await self._keep(session)
        if not ended:
            return {
                "success": False,
                "message": "no session is active",
                "output_file": None,
                "sessions": [],
            }
        await asyncio.sleep(min(_LAST_FRAME_SECONDS, self._settings.interval_ms / 1000))
        await self._durable()
        for session in ended:
            log.info("session %s ended", session.name)
            self._exports.begin(session, output_format, self._written)
        await self._exports.finished([s.id for s in ended], _EXPORT_PATIENCE_SECONDS)
        return self._outcome("Profiling stopped", ended)

    async def export_session(self, *, name: str, output_format: Format = "json") -> Document:
        """Write a session's file again, where the head keeps such files."""
        session = self._sessions.find(name)
        await self._durable()
        self._exports.begin(session, output_format, self._written)
        await self._exports.finished([session.id], _EXPORT_PATIENCE_SECONDS)
        return self._outcome("Exported", [session])

    def _outcome(self, done: str, sessions: Sequence[Session]) -> Document:
        now = self._now()
        described = [self._described(self._sessions.find(session.id), now) for session in sessions]
        failed = [item for item in described if item["export"]["state"] == "failed"]
        writing = [item for item in described if item["export"]["state"] == "writing"]
        files = [item["output_file"] for item in described if item["export"]["state"] == "done"]
        message = f"{done}: {', '.join(item['name'] for item in described)}"
        if files:
            message += f". Data saved to {', '.join(files)}"
        if writing:
            message += f". Still being written: {', '.join(item['name'] for item in writing)}"
        if failed:
            message += f". Not written: {'; '.join(item['export']['error'] for item in failed)}"
        return {
            "success": not failed,
            "message": message,
            "output_file": files[0] if files else None,
            "sessions": described,
        }

    async def recover_session(self, *, name: str | None = None, session_id: str | None = None) -> Document:
        """Go on with a session that was interrupted."""
        async with self._session_lock:
            session = recovered(self._sessions.to_recover(name, session_id), self._now())
            await self._keep(session)
            await self._exports.plan(session)
        log.info("session %s goes on", session.name)
        return {
            "success": True,
            "message": f"session {session.name} goes on",
            "output_file": self._exports.path(session),
            "session": await self._described_whole(session),
        }

    def download(self, *, name: str, output_format: Format = "json") -> Download:
        """A session's file, piece by piece."""
        return self._exports.download(self._sessions.find(name), output_format, self._now())

    async def _written(self, session: Session, path: str) -> None:
        """A session's file is there: remember where, if it is the last one it gets."""
        if session.state != "finished":
            return
        async with self._session_lock:
            with suppress(RefusedError):  # a full disk: the next head writes the file once more
                await self._keep(self._sessions.find(session.id)._replace(output=path))

    async def write_files(self) -> None:
        """Write the files of sessions that were stopped when the last head ended before it could.

        Those of sessions that are not stopped yet are planned first, so that none takes another's name.
        """
        for session in self._sessions.all():
            if session.state != "finished":
                await self._exports.plan(session)
        for session in self._sessions.all():
            if session.state == "finished" and session.output is None:
                self._exports.begin(session, "json", self._written)

    async def _keep(self, session: Session) -> None:
        """Have a session on disk; the head takes it in from there."""
        await self._durable(Entry.of_fact("session", **session.to_dict()))

    async def _durable(self, entry: Entry | None = None) -> None:
        try:
            await self._committer.durable(entry)
        except DiskError as error:
            raise RefusedError(
                503, f"the head cannot store anything: {error.message}", hint=error.hint
            ) from error

    def _described(self, session: Session, now: float) -> Document:
        return {
            **documents.session(session, now),
            "output_file": self._exports.path(session),
            "export": self._exports.state(session),
        }

    async def _described_whole(self, session: Session) -> Document:
        """The session with what is missing of its interruptions, which takes a look into the store."""
        document = self._described(session, self._now())
        if session.interruptions:
            found = await self._reports.coverage(session)
            document["interruptions"] = [
                {**told, **(msgspec.to_builtins(coverage) if coverage else {})}
                for told, coverage in zip(document["interruptions"], found, strict=True)
            ]
        return document

    # --- the head itself

    async def change_settings(
        self, *, interval_ms: int | None = None, bandwidth: bool | None = None, nvlink: bool | None = None
    ) -> Document:
        """Change how agents sample; they follow at once."""
        if interval_ms is not None and not SHORTEST_INTERVAL_MS <= interval_ms <= LONGEST_INTERVAL_MS:
            raise RefusedError(
                400,
                f"{interval_ms} ms is no interval to sample at",
                hint=f"{SHORTEST_INTERVAL_MS} to {LONGEST_INTERVAL_MS}",
            )
        wanted = self._settings.changed(interval_ms=interval_ms, bandwidth=bandwidth, nvlink=nvlink)
        await self._durable(Entry.of_fact("settings", time=self._now(), **wanted.to_dict()))
        self._settings.take(wanted)
        self._ingest.settings_changed()
        log.info("settings changed: %s", self._settings)
        return {"success": True, "settings": self._settings.to_dict()}

    def shut_down(self) -> Document:
        """End the head, gently."""
        log.info("asked to end")
        asyncio.get_running_loop().call_later(0.1, self._stop)
        return {"success": True, "message": "the head ends"}
