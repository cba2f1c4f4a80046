"""The head process: opens the store, serves agents and clients, and runs maintenance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, Protocol

import grpc

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.access_control import AccessPolicy
from gpulse.cluster.head.address_file import ADDRESS_FILE, AddressFile
from gpulse.cluster.head.backends import BackendConfig, Backends
from gpulse.cluster.head.connected_agents import OLDER_COPY
from gpulse.cluster.head.expected_nodes import MissingNodes, find_missing_nodes
from gpulse.cluster.head.finding_operations import FindingResponses
from gpulse.cluster.head.fleet import AgentRun, Fleet
from gpulse.cluster.head.fleet_monitor import FleetMonitor
from gpulse.cluster.head.group_commit import Committer
from gpulse.cluster.head.ingest import AccessCheck, Ingest
from gpulse.cluster.head.maintenance import (
    LAST_TIME,
    MAX_BEHIND_SECONDS,
    MIN_CLOCK_STEP_SECONDS,
    Maintenance,
    RetentionRules,
    find_last_clock,
)
from gpulse.cluster.head.message_decoder import CallRefusedError, decode_message
from gpulse.cluster.head.notifications import HeadNotifications
from gpulse.cluster.head.operations import HeadService, SamplingSettings
from gpulse.cluster.head.session_exports import ExportQueue
from gpulse.cluster.head.session_lifecycle import SessionRegistry, interrupt_session, restore_session
from gpulse.cluster.notify.config import NotifyConfig
from gpulse.cluster.protocol.answers import Storage
from gpulse.cluster.protocol.codec import answer_for_exception, encode, read_body
from gpulse.cluster.protocol.head_interface import HeadInterface
from gpulse.cluster.protocol.load_limits import BusyError, LoopShare, ReportLimit, SharedResults
from gpulse.cluster.protocol.operations import (
    OPERATIONS_BY_NAME,
    call_operation,
    hides_from_readers,
    is_write_operation,
    open_download,
)
from gpulse.cluster.socket_owner import describe_listener
from gpulse.cluster.tls_files import TlsFiles, load_server_credentials
from gpulse.cluster.wire_pb2 import Reply, Request
from gpulse.diagnosis.rules.faults import node_missing
from gpulse.errors import DiskError, GpulseError
from gpulse.model.finding import Finding
from gpulse.model.finding_acknowledgement import RESPONSE_EVENTS
from gpulse.model.safe_text import natural_key
from gpulse.model.session import Session
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.store import Query

log = logging.getLogger(__name__)

_MAX_STREAMS = 20_000
_MAX_CALLS_SHARE = 0.2
"""Part of the event loop's time for calls of clients; agents have the rest."""


class GrpcCalls:
    """The head's operations over gRPC."""

    def __init__(self, head: HeadInterface, allowed: AccessCheck, *, now: Callable[[], float]) -> None:
        """Prepare to answer.

        Args:
            head: The head.
            allowed: Decides who may call.
            now: The head's clock.
        """
        self._head = head
        self._allowed = allowed
        self._now = now
        self._share = LoopShare(_MAX_CALLS_SHARE)
        self._results = SharedResults(self._share)
        self._reports = ReportLimit()

    async def call(self, data: bytes, context: Any) -> bytes:
        """Handle a call of one operation."""
        request = await self._request(data, context)
        try:
            body = read_body(request.body)
        except GpulseError as error:
            return _reply(*answer_for_exception(error))
        is_trusted = await self._is_trusted(request.operation, context)

        async def compute() -> bytes:
            return _reply(
                *await call_operation(
                    self._head, request.operation, body, now=self._now(), is_trusted=is_trusted
                )
            )

        operation = OPERATIONS_BY_NAME.get(request.operation)
        try:
            if operation is None or operation.writes:
                return await compute()
            await self._share.admit()
            if operation.is_shared and not body:
                return await self._results.get((operation.name, is_trusted), compute)
            async with self._reports.slot():
                return await compute()
        except BusyError as error:
            return _reply(*answer_for_exception(error))
        finally:
            if operation is not None and operation.writes:
                self._results.clear()

    async def download(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        """Handle a download: the first reply describes the file, the others are its pieces."""
        request = await self._request(data, context)
        is_trusted = await self._is_trusted(request.operation, context)
        try:
            file = await open_download(
                self._head,
                request.operation,
                read_body(request.body),
                now=self._now(),
                is_trusted=is_trusted,
            )
            first = {"name": file.name, "media_type": file.media_type}
            yield _reply(200, first)
            async for piece in file.pieces:
                yield Reply(status=200, body=piece).SerializeToString()
        except GpulseError as error:
            yield _reply(*answer_for_exception(error))

    async def _request(self, data: bytes, context: Any) -> Request:
        await self._check(context, changes=False)
        try:
            request = decode_message(Request, data)
        except CallRefusedError as refusal:
            await context.abort(refusal.code, refusal.reason)
            raise AssertionError from None  # abort never returns
        if is_write_operation(request.operation):
            await self._check(context, changes=True)
        return request

    async def _check(self, context: Any, *, changes: bool) -> None:
        refused = await self._find_refusal(context, changes=changes)
        if refused is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refused)

    async def _is_trusted(self, operation: str, context: Any) -> bool:
        """Return whether a caller gets the whole answer; looked up only where it matters, because it takes a moment."""
        return hides_from_readers(operation) and await self._find_refusal(context, changes=True) is None

    async def _find_refusal(self, context: Any, *, changes: bool) -> str | None:
        metadata = context.invocation_metadata() or ()
        return await self._allowed(context.peer(), metadata, changes=changes)


def _reply(status: int, answer: object) -> bytes:
    return Reply(status=status, body=encode(answer)).SerializeToString()


def make_server(ingest: Ingest, calls: GrpcCalls) -> grpc.aio.Server:
    """Return the gRPC server, without a port yet."""
    server = grpc.aio.server(options=wire.server_options(), maximum_concurrent_rpcs=_MAX_STREAMS)
    handlers: dict[str, Any] = {
        "Stream": grpc.stream_stream_rpc_method_handler(ingest.stream),
        "Call": grpc.unary_unary_rpc_method_handler(calls.call),
        "Download": grpc.unary_stream_rpc_method_handler(calls.download),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
    return server


async def stop(server: grpc.aio.Server) -> None:
    """Stop the server within a second."""
    await server.stop(grace=1.0)
    await asyncio.sleep(0)


class SteadyClock:
    """Clock in epoch seconds that follows the machine's clock, but only forward.

    Sessions are intervals on this clock, and all stored times are on it. If the machine's clock is set back, this clock
    continues unchanged, also in the next head if that starts before the machine's clock has caught up; if it is set
    forward, this clock follows.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """Start at the machine's time.

        Args:
            wall: The machine's wall clock.
            monotonic: The monotonic clock.
        """
        self._wall = wall
        self._monotonic = monotonic
        self._offset = self._seen = wall() - monotonic()

    def now(self) -> float:
        """Return epoch seconds."""
        return self._monotonic() + self._offset

    @property
    def ahead_seconds(self) -> float:
        """How far this clock is ahead of the machine's."""
        return self._offset - self._seen

    def continue_from(self, last: float, ahead_seconds: float = 0.0) -> float:
        """Continue the clock of an earlier head; return how far the machine's clock is behind it, in seconds.

        A clock that is behind by more than `MAX_BEHIND_SECONDS` was wrong for that head, and is not continued.

        Args:
            last: The last time that the earlier head used.
            ahead_seconds: How far its clock was ahead of the machine's.
        """
        behind = max(0.0, last - self.now())
        if 0.0 < behind <= MAX_BEHIND_SECONDS:
            behind = max(behind, min(ahead_seconds, MAX_BEHIND_SECONDS))
            self._offset += behind
        return behind

    def step(self) -> float | None:
        """Return by how many seconds the machine's clock was set since the last call; None if it was not."""
        offset = self._wall() - self._monotonic()
        moved = offset - self._seen
        self._seen = offset
        if abs(moved) < MIN_CLOCK_STEP_SECONDS:
            # Slewing: follow small differences, unless a step back is being ignored.
            if abs(offset - self._offset) < MIN_CLOCK_STEP_SECONDS:
                self._offset = max(offset, self._offset - abs(moved))
            return None
        self._offset = max(self._offset, offset)
        return moved


_WATCH_SECONDS = 1.0
_MAX_WATCH_DELAY_SECONDS = 3.0
"""If a round of watching is later than this, the whole process was suspended and received nothing in between."""
_GRACE_SECONDS = 0.5
_MAX_RESPONSE_EVENTS = 20_000
"""Maximum number of events about acknowledgements and silences that are read at the start, the newest ones."""


class HeadConfig(NamedTuple):
    """Configuration of a head."""

    data_dir: str
    output_dir: str
    host: str = "127.0.0.1"
    port: int = 8090
    interval_ms: int | None = None
    """Sampling interval of agents; None: the last setting, or 500."""
    bandwidth: bool | None = None
    nvlink: bool | None = None
    rules: RetentionRules = RetentionRules()
    auto_resume: bool = False
    tls: TlsFiles | None = None
    local_port: bool = False
    """Also listen on a local port without TLS, for an agent on the same machine."""
    address_files: tuple[str, ...] = ()
    """Further files to write the head's addresses to, besides the one in the data directory."""
    expected: Callable[[], Sequence[str]] = tuple
    """Returns the expected nodes; called repeatedly. Nodes that have never reported are shown as missing."""
    token_file: str | None = None
    """File with the token of this head."""
    backends: BackendConfig = BackendConfig()
    """Databases besides the head's own disk."""
    notify: NotifyConfig | None = None
    """Notifications; None for none."""


class ListenAddresses(NamedTuple):
    """Addresses at which a head listens."""

    grpc: str
    http: str | None
    local: str | None = None


class Frontend(Protocol):
    """HTTP server of a head."""

    @property
    def address(self) -> str:
        """Address that it listens on."""

    async def close(self) -> None:
        """Stop the server."""


FrontendFactory = Callable[[HeadInterface, Callable[[], float]], Awaitable[Frontend]]
"""Starts the HTTP server of a head, given the head and its clock."""


class Head:
    """A head; `run` runs it."""

    def __init__(self, config: HeadConfig, access: AccessPolicy) -> None:
        self._config = config
        self._access = access
        self._clock = SteadyClock(time.time, time.monotonic)
        self._stop = asyncio.Event()
        self._ports: tuple[int, ...] = ()
        """The gRPC ports."""
        self._address_file = AddressFile((f"{config.data_dir}/{ADDRESS_FILE}", *config.address_files))
        self._archive: LocalStore
        self._committer: Committer

    @property
    def is_stopping(self) -> bool:
        """Whether the head was asked to stop."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the head to stop; call it from the event loop's thread."""
        self._stop.set()

    async def run(
        self, *, frontend: FrontendFactory | None, ready: Callable[[ListenAddresses], None] = lambda _: None
    ) -> None:
        """Run until `stop`.

        Args:
            frontend: Starts the HTTP server; None for a head without one.
            ready: Called once agents and clients can connect.

        Raises:
            GpulseError: The store cannot be opened, or a port is in use.
        """
        async with AsyncExitStack() as stack:
            self._archive = await asyncio.to_thread(LocalStore, self._config.data_dir)
            stack.push_async_callback(asyncio.to_thread, self._archive.close)
            self._usage = await asyncio.to_thread(self._archive.usage)
            self._expected = await asyncio.to_thread(self._config.expected)
            self._backends = Backends(self._archive, self._config.backends, now=self._clock.now)
            await self._backends.open(stack)
            self._notifications = HeadNotifications(
                self._config.notify, self._archive.directory, now=self._clock.now
            )
            await self._notifications.open(stack)
            behind_seconds = self._clock.continue_from(
                *await asyncio.to_thread(find_last_clock, self._archive)
            )
            service = self._assemble()
            stack.callback(self._committer.close)
            await asyncio.to_thread(self._monitor.open)
            await self._restore_sessions()
            server = make_server(self._ingest, GrpcCalls(service, self._allowed, now=self._clock.now))
            port = self._bind(server)
            local = server.add_insecure_port("127.0.0.1:0") if self._config.local_port else None
            self._ports = (port, local) if local else (port,)
            await server.start()
            self._fleet.listening_since = self._clock.now()
            stack.push_async_callback(server.stop, None)
            made = None
            if frontend is not None:
                made = await frontend(service, self._clock.now)
                stack.push_async_callback(made.close)
            listening = ListenAddresses(
                f"{_bracketed(self._config.host)}:{port}",
                made.address if made else None,
                f"127.0.0.1:{local}" if local else None,
            )
            self._address_file.write(
                {
                    **listening._asdict(),
                    "tls": self._config.tls is not None,
                    "token_file": self._config.token_file,
                }
            )
            stack.callback(self._address_file.remove)
            self._ingest.event("head_started", None, version=__version__)
            self._maintenance.check_clock(behind_seconds, self._clock.ahead_seconds)
            for position, reason in self._archive.metadata.unreadable:
                log.error("skipped record %d of the log, which cannot be read: %s", position, reason)
                self._ingest.event("unreadable_record", None, position=position, reason=reason[:200])
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("commit", self._committer.run()),
                    ("watch", self._watch()),
                    ("fleet monitor", self._monitor.run()),
                    ("measure", self._measure()),
                    ("maintenance", self._maintenance.run()),
                    *self._backends.work(),
                    *self._notifications.work(
                        self._fleet,
                        self._missing_findings,
                        self._ingest,
                        lambda: self._settings.interval_seconds,
                    ),
                )
            ]
            log.info("%s", self._startup_message(listening))
            await service.write_files()
            ready(listening)
            try:
                await self._until_stopped(tasks)
                await self._shut_down([server.stop(_GRACE_SECONDS), *([made.close()] if made else [])])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- setup

    def _assemble(self) -> HeadService:
        archive, now, config = self._archive, self._clock.now, self._config
        self._settings = self._initial_settings()
        self._sessions = SessionRegistry(archive.sessions())
        self._fleet = Fleet(archive.nodes(), self._restore_runs(), archive.layouts)
        self._fleet.restore(archive, now())
        self._missing = MissingNodes(
            {
                str(stored.finding.cause): stored.span.start
                for stored in archive.findings(Query(now(), now() + 1.0))
                if stored.node is None and stored.finding.id == "node_missing"
            }
        )
        self._responses = FindingResponses()
        self._notifications.use_responses(self._responses)
        self._responses.restore(
            archive.events(Query(0.0, LAST_TIME, kinds=RESPONSE_EVENTS, limit=_MAX_RESPONSE_EVENTS))
        )
        self._ingest = Ingest(
            self._fleet,
            lambda: self._committer,
            head_id=archive.head_id,
            now=now,
            settings=self._settings.to_wire,
            allowed=self._allowed,
        )
        self._committer = Committer(archive, now=now, done=self._committed, failed=self._ingest.failed)
        self._maintenance = Maintenance(archive, self._fleet, self._ingest, config.rules, now=now)
        keep_seconds = config.rules.metadata_seconds or config.rules.keep_seconds
        store = self._backends.join(
            self._fleet,
            self._ingest,
            self._sessions,
            self._responses,
            resume=config.auto_resume,
            keep_seconds=keep_seconds,
        )
        self._exports = ExportQueue(self._backends.whole, config.output_dir, now=now)
        self._monitor = FleetMonitor(
            self._fleet, archive, archive.directory, missing=lambda: len(self._find_missing()), now=now
        )
        return HeadService(
            fleet=self._fleet,
            monitor=self._monitor,
            ingest=self._ingest,
            committer=self._committer,
            store=store,
            sessions=self._sessions,
            settings=self._settings,
            exports=self._exports,
            storage=self._storage,
            backends=self._backends.status,
            notifications=self._notifications.status,
            keep_seconds=keep_seconds,
            expected=lambda: self._expected,
            missing_findings=self._missing_findings,
            responses=self._responses,
            now=now,
            stop=self.stop,
        )

    async def _allowed(
        self, peer: str, metadata: Iterable[tuple[str, str | bytes]], *, changes: bool
    ) -> str | None:
        return await self._access.check_grpc(peer, metadata, ports=self._ports, changes=changes)

    def _restore_runs(self) -> dict[bytes, AgentRun]:
        """Return the runs of agents, how far they are stored, and their reported losses."""
        runs = {name: AgentRun(run.node or 0, run.last) for name, run in self._archive.runs().items()}
        kinds = frozenset({"run_killed", "frames_dropped", "spool_damaged", "gap"})
        for event in self._archive.events(Query(0.0, LAST_TIME, kinds=kinds)):
            with suppress(ValueError, TypeError):  # earlier versions accepted such events from agents
                run = runs.get(bytes.fromhex(event.detail["run"])) if "run" in event.detail else None
                if run is not None:
                    _restore_loss(run, event.kind, event.detail)
        return runs

    def _initial_settings(self) -> SamplingSettings:
        before = self._archive.settings() or {}
        config = self._config
        interval = before.get("interval_ms", 500) if config.interval_ms is None else config.interval_ms
        return SamplingSettings(
            interval_ms=interval,
            bandwidth=bool(before.get("bandwidth") if config.bandwidth is None else config.bandwidth),
            nvlink=bool(before.get("nvlink") if config.nvlink is None else config.nvlink),
        )

    async def _restore_sessions(self) -> None:
        """Restore the sessions that were active when the last head ended."""
        entries = [LogEntry.of_fact("settings", time=self._clock.now(), **self._settings.to_dict())]
        for session in () if self._backends.restores_sessions else self._sessions.all():
            left = restore_session(
                session, self._archive.newest, self._clock.now(), resume=self._config.auto_resume
            )
            if left != session:
                self._sessions.put(left)
                entries.append(LogEntry.of_fact("session", **left.to_dict()))
                log.warning(
                    "session %s was interrupted; %s",
                    left.name,
                    "resuming it" if left.is_active else f"to resume it: gpulse session recover {left.name}",
                )
        await asyncio.to_thread(self._archive.commit, entries)

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self._config
        address = f"{_bracketed(config.host)}:{config.port}"
        try:
            if config.tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, load_server_credentials(config.tls))
        except RuntimeError:
            port = 0
        if not port:
            holder = describe_listener(config.port)
            if holder:
                raise GpulseError(
                    f"cannot listen on {address}: {holder} is using this port",
                    hint="stop that program, or choose another --port",
                )
            raise GpulseError(
                f"cannot listen on {address}",
                hint="use an address of this machine, or 0.0.0.0 for all of its addresses",
            )
        return port

    def _startup_message(self, listening: ListenAddresses) -> str:
        http = f", HTTP on {listening.http}" if listening.http else ", no HTTP"
        return f"listening for agents on {listening.grpc}{http}; data directory: {self._archive.directory}; {self._settings}"

    # --- while it runs

    async def _until_stopped(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for `stop`; a failed task ends the head, because its failure would go unnoticed otherwise."""
        stopping = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            if task is not stopping:
                task.result()

    async def _watch(self) -> None:
        """Detect nodes that fall silent or return, and steps of the clock."""
        kinds = {"healthy": "node_back", "late": "node_late", "lost": "node_lost"}
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            if time.monotonic() - began > _WATCH_SECONDS + _MAX_WATCH_DELAY_SECONDS:
                log.warning(
                    "this process was suspended for %.1f s", time.monotonic() - began - _WATCH_SECONDS
                )
                self._fleet.listening_since = self._clock.now()
            before_step = self._clock.now()
            step = self._clock.step()
            if step is not None:
                log.warning("this machine's clock was changed by %+.1f s", step)
                self._maintenance.clock_was_set(step, self._clock.ahead_seconds)
                followed = self._clock.now() - before_step
                self._ingest.clock_was_set(followed)
                self._fleet.clock_was_set(followed)
            now = self._clock.now()
            for member, before in self._fleet.check(now, self._settings.interval_seconds):
                level = logging.WARNING if member.state == "lost" else logging.INFO
                log.log(level, "%s is %s (was %s)", member.name, member.state, before)
                lost = {"finding": self._fleet.lost(member, now).to_dict()} if member.state == "lost" else {}
                self._ingest.event(kinds[member.state], member.stored.id, before=before, **lost)
            self._watch_missing(now)

    def _watch_missing(self, now: float) -> None:
        """Record which expected nodes are missing and which have been found."""
        new, found = self._missing.update(self._find_missing(), now)
        for name, since in new.items():
            log.warning("expected node %s has never reported", name)
            finding = node_missing(name, since, now).to_dict()
            self._ingest.event("node_missing", None, name=name, finding=finding)
        for name in found:
            self._ingest.event("node_found", None, name=name)

    def _find_missing(self) -> list[str]:
        """Return the expected nodes that have never reported."""
        return find_missing_nodes(self._expected, self._fleet.register.by_id.values())

    def _missing_findings(self) -> list[Finding]:
        """Return the findings about expected nodes that have never reported, by name."""
        now, since = self._clock.now(), self._missing.since
        return [node_missing(name, since[name], now) for name in sorted(since, key=natural_key)]

    async def _measure(self) -> None:
        """Measure the disk usage now and then, in a thread, so that a hanging disk does not block the head."""
        is_slow = False
        while True:
            slow = self._committer.slow_seconds
            if (slow is not None) != is_slow:
                is_slow = not is_slow
                log.warning(
                    "the disk is too slow: frames are not acknowledged for now"
                    if is_slow
                    else "the disk is fast enough again: frames are acknowledged"
                )
            with suppress(OSError):
                self._usage = await asyncio.to_thread(self._archive.usage)
            self._expected = await asyncio.to_thread(self._config.expected)
            await asyncio.sleep(_WATCH_SECONDS)

    def _storage(self) -> Storage:
        trouble, slow = self._committer.trouble or self._maintenance.trouble, self._committer.slow_seconds
        error = None
        if trouble is not None:
            error = trouble.message
        elif slow is not None:
            error = f"the disk is slow: the current write has taken {slow:.0f} s so far"
        elif self._archive.is_behind:
            error = "the metadata lags behind the log"
        return Storage(
            state="ok" if error is None else "failing",
            error=error,
            hint=trouble.hint if trouble else None,
            since=trouble.since if trouble else None,
            directory=self._archive.directory,
            waiting_bytes=self._committer.waiting_bytes,
            commit_seconds=self._committer.last_seconds,
            damage=self._archive.damage.sentences(),
            **self._usage._asdict(),
        )

    def _committed(self, entries: Sequence[LogEntry]) -> None:
        """Process entries that are on disk: acknowledge frames, update the sessions and what people did about findings."""
        self._ingest.committed(entries)
        for entry in entries:
            fact = entry.fact
            if fact is None:
                continue
            if fact["fact"] == "session":
                self._sessions.put(Session.from_dict(fact))
            elif fact["fact"] == "event" and fact["kind"] in RESPONSE_EVENTS:
                self._responses.apply(fact["kind"], fact["time"], fact["detail"])
        self._backends.committed(entries)

    async def _shut_down(self, closing: Sequence[Awaitable[object]]) -> None:
        """Disconnect the agents, write everything to disk, and mark the active sessions as interrupted."""
        log.info("stopping")
        self._ingest.disconnect_all()
        await asyncio.gather(self._exports.close(), *closing)
        now = self._clock.now()
        self._ingest.event("head_stopped", None, version=__version__)
        for session in self._sessions.active():
            if self._backends.has_live_peer:
                log.info("another head has resumed session %s", session.name)
                continue
            self._ingest.note("session", **interrupt_session(session, now).to_dict())
            log.warning(
                "session %s is interrupted; to resume it: gpulse session recover %s",
                session.name,
                session.name,
            )
        with suppress(DiskError):
            await self._committer.durable()
        await self._monitor.save()
        await self._backends.finish()


def _restore_loss(run: AgentRun, kind: str, detail: Mapping[str, Any]) -> None:
    """Apply an event about lost frames of a run.

    Raises:
        ValueError: The event has other fields than this version writes.
        TypeError: Or fields of other types.
    """
    match kind:
        case "run_killed":
            run.killed = True
        case "frames_dropped":
            run.dropped += int(detail.get("frames", 0))
        case "spool_damaged":
            run.damaged.add((int(detail.get("first", 0)), int(detail.get("last", 0))))
        case "gap" if detail.get("reason") == OLDER_COPY:
            run.other_head_last = max(run.other_head_last, int(detail.get("before", 1)) - 1)
        case _:
            pass


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
