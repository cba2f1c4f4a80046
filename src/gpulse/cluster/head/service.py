"""The operations of a head (`HeadInterface`)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
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
from gpulse.cluster.head.sessions import Sessions, recovered, stopped
from gpulse.cluster.head.settings import Settings
from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.interface import Download, LiveNode
from gpulse.errors import DiskError, RefusedError
from gpulse.model import iso_time
from gpulse.model.finding import Finding
from gpulse.model.session import Format, Session
from gpulse.reports.interruptions import Coverage
from gpulse.store.gpu_choice import choose_gpus
from gpulse.store.log.records import Entry
from gpulse.store.store import Store

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
        storage: Callable[[], a.Storage],
        backends: Callable[[], a.BackendStatus] = a.BackendStatus,
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
        self._backends = backends
        self._keep_seconds = keep_seconds
        self._expected = expected
        self._missing_findings = missing_findings
        self.now = now
        self._stop = stop
        self._store = store
        self.reports = ReportRunner(store, fleet.register, lambda: settings.interval_seconds)
        self._started = now()
        self._session_lock = asyncio.Lock()
        self._work: set[asyncio.Task[a.SeveralSessions]] = set()
        """What goes on though nobody may wait for it any more."""

    # --- looking

    def info(self) -> a.Info:
        """What serves here."""
        return a.Info(
            message="gpulse head",
            name="gpulse",
            version=__version__,
            api="/openapi.json",
            endpoints=["/status", "/clients", "/metrics/latest", "/profiling/sessions", "/metrics"],
        )

    def status(self) -> a.Status:
        """How the head is, what it stores, who is connected."""
        now, live, active = self.now(), self._fleet.live(), self._sessions.active()
        present = [node for node in live if node.is_present]
        described = [
            documents.session(session, now, output_file=self._exports.path(session)) for session in active
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
            gpu_info={node.name: documents.node_gpus(node) for node in present},
            active_sessions=described,
            recoverable_sessions=[s.name for s in self._sessions.all() if s.state == "interrupted"],
            version=__version__,
            time=iso_time.iso(now),
            uptime_seconds=round(now - self._started, 1),
            frames_received=self._ingest.frames,
            nodes=[documents.node_status(node, now) for node in live],
            missing_nodes=self.missing(),
            findings=documents.findings(live, self._missing_findings()),
            storage=self._storage(),
            **msgspec.structs.asdict(self._backends()),
        )

    def clients(self) -> a.Clients:
        """The connected nodes and their GPUs."""
        now = self.now()
        found = [documents.client(node, now) for node in self._fleet.live() if node.is_present]
        return a.Clients(total_clients=len(found), clients=found)

    def latest(self) -> a.Latest:
        """The newest readings of every node that is not lost."""
        now, settings = self.now(), self._settings
        return a.Latest(
            timestamp=iso_time.iso(now),
            client_data={
                node.name: documents.node_values(
                    node, node.frame, now, bandwidth=settings.bandwidth, nvlink=settings.nvlink
                )
                for node in self._fleet.live()
                if node.state != "lost" and node.frame is not None
            },
        )

    def sessions(self) -> a.Sessions:
        """All sessions."""
        known = self._sessions.all()
        return a.Sessions(
            total_sessions=len(known),
            active_sessions=sum(session.is_active for session in known),
            sessions=[self._described(session) for session in known],
        )

    async def session(self, request: r.GetSession) -> a.SessionAnswer:
        """One session, by its id or the newest of that name, and what is missing of its interruptions."""
        return await self._described_whole(self._sessions.find(request.name))

    def findings(self) -> a.Findings:
        """What is wrong now, worst first."""
        return a.Findings(
            time=iso_time.iso(self.now()),
            findings=documents.findings(self._fleet.live(), self._missing_findings()),
        )

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

    # --- sessions

    async def start_session(self, request: r.StartSession) -> a.OneSession:
        """Start a session, in the past when asked to."""
        if request.nodes or request.gpus:
            self.reports.node_ids(request.nodes)
            await self._durable()  # the GPUs of a node that has just joined are in the store then
            choose_gpus(self._store.gpus(), request.nodes, request.gpus)
        async with self._session_lock:
            session = self._sessions.begin(
                secrets.token_hex(8),
                now=self.now(),
                name=request.name or None,
                since_seconds=request.since,
                longest_seconds=self._keep_seconds,
                nodes=request.nodes,
                gpus=request.gpus,
                labels=request.labels,
                interval_ms=request.interval_ms or self._settings.interval_ms,
                bandwidth=self._settings.bandwidth,
                nvlink=self._settings.nvlink,
            )
            await self._keep(session)
            await self._exports.plan(session)
        log.info("session %s began (%s)", session.name, session.id)
        return a.OneSession(
            success=True,
            message=f"Profiling started: session {session.name}",
            output_file=self._exports.path(session),
            session=self._described(session),
        )

    async def stop_sessions(self, request: r.StopSessions) -> a.SeveralSessions:
        """Stop one session, or all that are active, and write their files.

        It goes on when whoever asked goes away.
        """
        work = asyncio.create_task(self._stop_sessions(request.name or None, request.format))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.shield(work)

    async def _stop_sessions(self, name: str | None, output_format: Format) -> a.SeveralSessions:
        async with self._session_lock:
            chosen = self._sessions.to_stop(name)
            now = self.now()
            ended = [stopped(session, now) for session in chosen]
            for session in ended:
                await self._keep(session)
        if not ended:
            return a.SeveralSessions(
                success=False, message="no session is active", output_file=None, sessions=[]
            )
        await asyncio.sleep(min(_LAST_FRAME_SECONDS, self._settings.interval_ms / 1000))
        await self._durable()
        for session in ended:
            log.info("session %s ended", session.name)
            self._exports.begin(session, output_format, self._written)
        await self._exports.finished([s.id for s in ended], _EXPORT_PATIENCE_SECONDS)
        return self._outcome("Profiling stopped", ended)

    async def export_session(self, request: r.GetSessionFile) -> a.SeveralSessions:
        """Write a session's file again, where the head keeps such files."""
        session = self._sessions.find(request.name)
        await self._durable()
        self._exports.begin(session, request.format, self._written)
        await self._exports.finished([session.id], _EXPORT_PATIENCE_SECONDS)
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
            sessions=[self._described(session) for session in known],
        )

    async def recover_session(self, request: r.RecoverSession) -> a.OneSession:
        """Go on with a session that was interrupted."""
        async with self._session_lock:
            chosen = self._sessions.to_recover(request.name, request.session_id)
            session = recovered(chosen, self.now())
            await self._keep(session)
            await self._exports.plan(session)
        log.info("session %s goes on", session.name)
        return a.OneSession(
            success=True,
            message=f"session {session.name} goes on",
            output_file=self._exports.path(session),
            session=await self._described_whole(session),
        )

    def download(self, request: r.GetSessionFile) -> Download:
        """A session's file, piece by piece."""
        return self._exports.download(self._sessions.find(request.name), request.format, self.now())

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

    def _described(self, session: Session, coverage: Sequence[Coverage | None] = ()) -> a.SessionAnswer:
        return documents.session(
            session,
            self.now(),
            output_file=self._exports.path(session),
            export=self._exports.state(session),
            coverage=coverage,
        )

    async def _described_whole(self, session: Session) -> a.SessionAnswer:
        """The session with what is missing of its interruptions, which takes a look into the store."""
        if not session.interruptions:
            return self._described(session)
        return self._described(session, await self.reports.coverage(session))

    # --- the head itself

    async def change_settings(self, request: r.ChangeSettings) -> a.SettingsChanged:
        """Change how agents sample; they follow at once."""
        wanted = self._settings.changed(
            interval_ms=request.interval_ms, bandwidth=request.bandwidth, nvlink=request.nvlink
        )
        await self._durable(Entry.of_fact("settings", time=self.now(), **wanted.to_dict()))
        self._settings.take(wanted)
        self._ingest.settings_changed()
        log.info("settings changed: %s", self._settings)
        return a.SettingsChanged(success=True, settings=a.AgentSettings(**self._settings.to_dict()))

    def shut_down(self) -> a.Done:
        """Stop the head."""
        log.info("asked to end")
        asyncio.get_running_loop().call_later(0.1, self._stop)
        return a.Done(success=True, message="the head ends")
