"""The head: opens the store, takes agents' streams, answers questions, and keeps its house in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpulse._version import __version__
from gpulse.cluster.head.address_file import ADDRESS_FILE, AddressFile
from gpulse.cluster.head.backends import BackendConfig, Backends
from gpulse.cluster.head.clock import SteadyClock
from gpulse.cluster.head.commit import Committer
from gpulse.cluster.head.expected import MissingNodes, missing
from gpulse.cluster.head.exports import Exports
from gpulse.cluster.head.fleet import Fleet, Run
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.maintenance import Maintenance, Rules
from gpulse.cluster.head.rpc import Calls, make_server
from gpulse.cluster.head.service import Service
from gpulse.cluster.head.sessions import Sessions, interrupted, woken
from gpulse.cluster.head.settings import Settings
from gpulse.cluster.ports import who_listens
from gpulse.cluster.protocol.answers import Storage
from gpulse.cluster.protocol.interface import HeadInterface
from gpulse.cluster.security import Access, TlsFiles, server_credentials
from gpulse.diagnosis.rules.node import node_missing
from gpulse.errors import DiskError, GpulseError
from gpulse.model.finding import Finding
from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.store import Query

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_STOPPED_SECONDS = 3.0
"""A round of watching that comes this late means that the whole process was stopped, and heard nobody meanwhile."""
_GRACE_SECONDS = 0.5


class HeadConfig(NamedTuple):
    """How a head is set up."""

    data_dir: str
    output_dir: str
    host: str = "127.0.0.1"
    port: int = 8090
    interval_ms: int | None = None
    """None: as it was last time, or 500."""
    bandwidth: bool | None = None
    nvlink: bool | None = None
    rules: Rules = Rules()
    auto_resume: bool = False
    tls: TlsFiles | None = None
    local_port: bool = False
    """Also listen on a port of this machine alone, without TLS: for an agent of its own."""
    address_files: tuple[str, ...] = ()
    """Where to say, besides in the data directory, where it listens."""
    expected: Callable[[], Sequence[str]] = tuple
    """Returns the expected nodes, called now and then: those that have never reported are shown as missing."""
    token_file: str | None = None
    """Where the token of this head is."""
    backends: BackendConfig = BackendConfig()
    """What it uses besides its own disk."""


class Listening(NamedTuple):
    """Where a head can be reached."""

    grpc: str
    http: str | None
    local: str | None = None


class Frontend(Protocol):
    """Another way to reach a head, over HTTP."""

    @property
    def address(self) -> str:
        """Where it listens."""

    async def close(self) -> None:
        """Stop."""


MakeFrontend = Callable[[HeadInterface, Callable[[], float]], Awaitable[Frontend]]
"""From a head and its clock to the HTTP side."""


class Head:
    """One head. `run` does it all."""

    def __init__(self, config: HeadConfig, access: Access) -> None:
        self._config = config
        self._access = access
        self._clock = SteadyClock(time.time, time.monotonic)
        self._stop = asyncio.Event()
        self._ports: tuple[int, ...] = ()
        """The ports that gRPC is served on."""
        self._address_file = AddressFile((f"{config.data_dir}/{ADDRESS_FILE}", *config.address_files))
        self._archive: LocalStore
        self._committer: Committer

    @property
    def is_stopping(self) -> bool:
        """True once it was told to end."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End, gently; from the loop's thread."""
        self._stop.set()

    async def run(
        self, *, frontend: MakeFrontend | None, ready: Callable[[Listening], None] = lambda _: None
    ) -> None:
        """Work until `stop`.

        Args:
            frontend: Makes the HTTP side, if one is wanted.
            ready: Called once agents and people can come.

        Raises:
            GpulseError: The store cannot be opened, or a port is taken.
        """
        async with AsyncExitStack() as stack:
            self._archive = await asyncio.to_thread(LocalStore, self._config.data_dir)
            stack.push_async_callback(asyncio.to_thread, self._archive.close)
            self._usage = await asyncio.to_thread(self._archive.usage)
            self._expected = await asyncio.to_thread(self._config.expected)
            self._backends = Backends(self._archive, self._config.backends, now=self._clock.now)
            await self._backends.open(stack)
            service = self._assemble()
            stack.callback(self._committer.close)
            await self._wake_sessions()
            server = make_server(self._ingest, Calls(service, self._allowed, now=self._clock.now))
            port = self._bind(server)
            local = server.add_insecure_port("127.0.0.1:0") if self._config.local_port else None
            self._ports = (port, local) if local else (port,)
            await server.start()
            stack.push_async_callback(server.stop, None)
            made = None
            if frontend is not None:
                made = await frontend(service, self._clock.now)
                stack.push_async_callback(made.close)
            listening = Listening(
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
            for position, reason in self._archive.metadata.unreadable:
                log.error("record %d of the log cannot be read and is passed over: %s", position, reason)
                self._ingest.event("unreadable_record", None, position=position, reason=reason[:200])
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("commit", self._committer.run()),
                    ("watch", self._watch()),
                    ("measure", self._measure()),
                    ("maintenance", self._maintenance.run()),
                    *self._backends.work(),
                )
            ]
            log.info("%s", self._greeting(listening))
            await service.write_files()
            ready(listening)
            try:
                await self._until_stopped(tasks)
                await self._leave([server.stop(_GRACE_SECONDS), *([made.close()] if made else [])])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    # --- putting it together

    def _assemble(self) -> Service:
        archive, now, config = self._archive, self._clock.now, self._config
        self._settings = self._chosen_settings()
        self._sessions = Sessions(archive.sessions())
        self._fleet = Fleet(archive.nodes(), self._known_runs(), archive.layouts)
        self._fleet.restore(archive, now())
        self._missing = MissingNodes(
            {
                str(stored.finding.cause): stored.span.start
                for stored in archive.findings(Query(now(), now() + 1.0))
                if stored.node is None and stored.finding.id == "node_missing"
            }
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
        keep_seconds = config.rules.book_seconds or config.rules.keep_seconds
        store = self._backends.join(
            self._fleet, self._ingest, self._sessions, resume=config.auto_resume, keep_seconds=keep_seconds
        )
        self._exports = Exports(self._backends.whole, config.output_dir, now=now)
        return Service(
            fleet=self._fleet,
            ingest=self._ingest,
            committer=self._committer,
            store=store,
            sessions=self._sessions,
            settings=self._settings,
            exports=self._exports,
            storage=self._storage,
            backends=self._backends.status,
            keep_seconds=keep_seconds,
            expected=lambda: self._expected,
            missing_findings=self._missing_findings,
            now=now,
            stop=self.stop,
        )

    async def _allowed(
        self, peer: str, metadata: Iterable[tuple[str, str | bytes]], *, changes: bool
    ) -> str | None:
        return await self._access.grpc(peer, metadata, ports=self._ports, changes=changes)

    def _known_runs(self) -> dict[bytes, Run]:
        """The runs of agents, how far they came, and what was told of their losses."""
        runs = {name: Run(run.node or 0, run.last) for name, run in self._archive.runs().items()}
        kinds = frozenset({"run_killed", "frames_dropped"})
        for event in self._archive.events(Query(0.0, self._clock.now() + 1.0, kinds=kinds)):
            with suppress(ValueError, TypeError):  # agents could tell of these once
                run = runs.get(bytes.fromhex(event.detail["run"])) if "run" in event.detail else None
                if run is not None:
                    run.killed = run.killed or event.kind == "run_killed"
                    run.dropped += int(event.detail.get("frames", 0))
        return runs

    def _chosen_settings(self) -> Settings:
        before = self._archive.settings() or {}
        config = self._config
        interval = before.get("interval_ms", 500) if config.interval_ms is None else config.interval_ms
        return Settings(
            interval_ms=interval,
            bandwidth=bool(before.get("bandwidth") if config.bandwidth is None else config.bandwidth),
            nvlink=bool(before.get("nvlink") if config.nvlink is None else config.nvlink),
        )

    async def _wake_sessions(self) -> None:
        """Sessions that went on when the last head ended are interrupted since then."""
        entries = [Entry.of_fact("settings", time=self._clock.now(), **self._settings.to_dict())]
        for session in () if self._backends.wakes_sessions else self._sessions.all():
            left = woken(session, self._archive.newest, self._clock.now(), resume=self._config.auto_resume)
            if left != session:
                self._sessions.put(left)
                entries.append(Entry.of_fact("session", **left.to_dict()))
                log.warning(
                    "session %s was interrupted; %s",
                    left.name,
                    "it goes on" if left.is_active else f"to go on: gpulse session recover {left.name}",
                )
        await asyncio.to_thread(self._archive.commit, entries)

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self._config
        address = f"{_bracketed(config.host)}:{config.port}"
        try:
            if config.tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, server_credentials(config.tls))
        except RuntimeError:
            port = 0
        if not port:
            holder = who_listens(config.port)
            if holder:
                raise GpulseError(
                    f"cannot listen on {address}: {holder} has that port",
                    hint="stop that program, or choose another --port",
                )
            raise GpulseError(
                f"cannot listen on {address}",
                hint="is that an address of this machine? 0.0.0.0 means all of them",
            )
        return port

    def _greeting(self, listening: Listening) -> str:
        http = f", http on {listening.http}" if listening.http else ", no http"
        return f"listening for agents on {listening.grpc}{http}; data in {self._archive.directory}; {self._settings}"

    # --- while it runs

    async def _until_stopped(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait for `stop`; a task that fails ends the head, since nothing would tell otherwise."""
        stopping = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            if task is not stopping:
                task.result()

    async def _watch(self) -> None:
        """Notice nodes that fall silent or come back, and clocks that are set."""
        kinds = {"healthy": "node_back", "late": "node_late", "lost": "node_lost"}
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_SECONDS)
            if time.monotonic() - began > _WATCH_SECONDS + _STOPPED_SECONDS:
                log.warning("this process did not run for %.1f s", time.monotonic() - began - _WATCH_SECONDS)
                self._fleet.listening_since = self._clock.now()
            before_step = self._clock.now()
            step = self._clock.step()
            if step is not None:
                log.warning("this machine's clock was set by %+.1f s", step)
                self._ingest.event("head_clock_step", None, seconds=round(step, 3))
                self._ingest.clock_was_set()
                self._maintenance.hold()
                self._fleet.clock_was_set(self._clock.now() - before_step)
            now = self._clock.now()
            for member, before in self._fleet.check(now, self._settings.interval_seconds):
                level = logging.WARNING if member.state == "lost" else logging.INFO
                log.log(level, "%s is %s (was %s)", member.name, member.state, before)
                lost = {"finding": self._fleet.lost(member, now).to_dict()} if member.state == "lost" else {}
                self._ingest.event(kinds[member.state], member.stored.id, before=before, **lost)
            self._watch_missing(now)

    def _watch_missing(self, now: float) -> None:
        """Write down which expected nodes do not report, and which do by now."""
        new, found = self._missing.update(missing(self._expected, self._fleet.register.by_id.values()), now)
        for name, since in new.items():
            log.warning("%s is expected and has never reported", name)
            finding = node_missing(name, since, now).to_dict()
            self._ingest.event("node_missing", None, name=name, finding=finding)
        for name in found:
            self._ingest.event("node_found", None, name=name)

    def _missing_findings(self) -> list[Finding]:
        """Return the findings about expected nodes that have never reported, by name."""
        now, since = self._clock.now(), self._missing.since
        return [node_missing(name, since[name], now) for name in sorted(since, key=natural_key)]

    async def _measure(self) -> None:
        """Look at the disk now and then, in a thread: one that hangs must not hang the head."""
        is_told = False
        while True:
            slow = self._committer.slow_seconds
            if (slow is not None) != is_told:
                is_told = not is_told
                log.warning(
                    "the disk is %s", "too slow: nothing is acknowledged" if is_told else "fast again"
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
            error = f"the disk has been writing for {slow:.0f} s"
        elif self._archive.is_behind:
            error = "the metadata cannot follow the log"
        return Storage(
            state="ok" if error is None else "failing",
            error=error,
            hint=trouble.hint if trouble else None,
            since=trouble.since if trouble else None,
            directory=self._archive.directory,
            waiting_bytes=self._committer.waiting_bytes,
            commit_seconds=self._committer.last_seconds,
            **self._usage._asdict(),
        )

    def _committed(self, entries: Sequence[Entry]) -> None:
        """Entries are on disk: agents are told, and sessions are what the log says they are."""
        self._ingest.committed(entries)
        for entry in entries:
            if entry.fact is not None and entry.fact["fact"] == "session":
                self._sessions.put(Session.from_dict(entry.fact))
        self._backends.committed(entries)

    async def _leave(self, closing: Sequence[Awaitable[object]]) -> None:
        """Take nothing more in, have what came on disk, and leave sessions to be recovered."""
        log.info("ending")
        self._ingest.dismiss()
        await asyncio.gather(self._exports.close(), *closing)
        now = self._clock.now()
        self._ingest.event("head_stopped", None, version=__version__)
        for session in self._sessions.active():
            if self._backends.is_carried_on:
                log.info("another head goes on with session %s", session.name)
                continue
            self._ingest.note("session", **interrupted(session, now).to_dict())
            log.warning(
                "session %s is interrupted; to go on: gpulse session recover %s", session.name, session.name
            )
        with suppress(DiskError):
            await self._committer.durable()
        await self._backends.finish()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
