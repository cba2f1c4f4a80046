"""The head: opens the store, takes agents' streams, answers questions, and keeps its house in order."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.api.interface import Document, HeadInterface
from gpulse.cluster.head.clock import SteadyClock
from gpulse.cluster.head.commit import Committer
from gpulse.cluster.head.exports import Exports
from gpulse.cluster.head.fleet import Fleet, Run
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.rpc import Calls, make_server
from gpulse.cluster.head.service import Service
from gpulse.cluster.head.sessions import Sessions, interrupted, woken
from gpulse.cluster.head.settings import Settings
from gpulse.cluster.ports import who_listens
from gpulse.cluster.security import Access, TlsFiles, server_credentials
from gpulse.errors import GpulseError
from gpulse.store.archive import SEAL_BYTES, SEAL_SECONDS, Archive
from gpulse.store.entry import Entry

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_UPKEEP_SECONDS = 10.0
_TIDY_SECONDS = 600.0
ADDRESS_FILE = "head.json"
"""In the data directory, while a head runs: where it listens."""


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
    keep_seconds: float = 30 * 86_400.0
    limit_bytes: int | None = None
    seal_seconds: float = SEAL_SECONDS
    """How long frames may be in the log and in memory alone."""
    auto_resume: bool = False
    tls: TlsFiles | None = None


class Listening(NamedTuple):
    """Where a head can be reached."""

    grpc: str
    http: str | None


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
        self._archive: Archive
        self._committer: Committer
        self._sealed_at = time.monotonic()

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
            self._archive = await asyncio.to_thread(Archive, self._config.data_dir)
            stack.push_async_callback(asyncio.to_thread, self._archive.close)
            service, ingest, exports = self._assemble()
            await self._wake_sessions()
            server = make_server(ingest, Calls(service, self._allowed))
            port = self._bind(server)
            await server.start()
            stack.push_async_callback(server.stop, 1.0)
            http = None
            if frontend is not None:
                made = await frontend(service, self._clock.now)
                stack.push_async_callback(made.close)
                http = made.address
            grpc_address = f"{_bracketed(self._config.host)}:{port}"
            listening = Listening(grpc_address, http)
            self._write_address(listening)
            stack.callback(self._remove_address)
            ingest.event("head_started", None, version=__version__)
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("commit", self._committer.run()),
                    ("watch", self._watch(ingest)),
                    ("upkeep", self._upkeep()),
                )
            ]
            log.info("%s", self._greeting(listening))
            ready(listening)
            try:
                await self._until_stopped(tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave(ingest, exports)

    # --- putting it together

    def _assemble(self) -> tuple[Service, Ingest, Exports]:
        archive, now = self._archive, self._clock.now
        runs = {name: Run(run.node or 0, run.last) for name, run in archive.runs().items()}
        fleet = Fleet(archive.nodes(), runs, archive.layouts)
        fleet.restore(archive, now())
        self._settings = self._chosen_settings()
        sessions = Sessions(archive.sessions())
        ingest = Ingest(
            fleet,
            lambda: self._committer,
            head_id=archive.head_id,
            now=now,
            settings=self._settings.to_wire,
            allowed=self._allowed,
        )
        self._committer = Committer(archive, now=now, done=ingest.committed, failed=ingest.failed)
        exports = Exports(archive, self._config.output_dir, now=now)
        service = Service(
            fleet=fleet,
            ingest=ingest,
            committer=self._committer,
            store=archive,
            sessions=sessions,
            settings=self._settings,
            exports=exports,
            storage=self._storage,
            now=now,
            stop=self.stop,
        )
        self._fleet, self._sessions = fleet, sessions
        return service, ingest, exports

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
        for session in self._sessions.all():
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
            raise GpulseError(
                f"cannot listen on {address}" + (f": {holder} has that port" if holder else ""),
                hint="stop that program, or choose another --port",
            )
        return port

    def _allowed(self, peer: str, metadata: Mapping[str, str]) -> str | None:
        return self._access.grpc(peer, metadata.items())

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

    async def _watch(self, ingest: Ingest) -> None:
        """Notice nodes that fall silent or come back, and clocks that are set."""
        kinds = {"healthy": "node_back", "late": "node_late", "lost": "node_lost"}
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            step = self._clock.step()
            if step is not None:
                log.warning("this machine's clock was set by %+.1f s", step)
                ingest.event("head_clock_step", None, seconds=round(step, 3))
                ingest.clock_was_set()
            for member, before in self._fleet.check(self._clock.now(), self._settings.interval_seconds):
                level = logging.WARNING if member.state == "lost" else logging.INFO
                log.log(level, "%s is %s (was %s)", member.name, member.state, before)
                ingest.event(kinds[member.state], member.stored.id, before=before)

    async def _upkeep(self) -> None:
        """Seal, merge and drop history as time goes by."""
        tidied = time.monotonic()
        while True:
            await asyncio.sleep(min(_UPKEEP_SECONDS, self._config.seal_seconds))
            now, began = time.monotonic(), self._clock.now()
            try:
                if (
                    self._archive.unsealed_bytes >= SEAL_BYTES
                    or now - self._sealed_at >= self._config.seal_seconds
                ):
                    await asyncio.to_thread(self._archive.seal)
                    self._sealed_at = now
                    self._forget_layouts(began)
                if now - tidied >= _TIDY_SECONDS:
                    tidied = now
                    dropped = await asyncio.to_thread(
                        self._archive.tidy,
                        self._clock.now(),
                        keep_seconds=self._config.keep_seconds,
                        limit_bytes=self._config.limit_bytes,
                    )
                    if dropped:
                        log.info("dropped %d old pieces of history", len(dropped))
            except GpulseError as error:
                log.error("%s%s", error.message, f" ({error.hint})" if error.hint else "")

    def _forget_layouts(self, sealed: float) -> None:
        """Frames that came before `sealed` are history, which needs no layouts."""
        now = self._clock.now()
        before = min(sealed - _WATCH_SECONDS, now - wire.FORGET_SECONDS)
        old = self._fleet.forget_layouts(before, now)
        if old:
            self._committer.add(Entry.of_fact("forget", layouts=[str(layout) for layout in old]))

    def _storage(self) -> Document:
        trouble = self._committer.trouble
        try:
            usage = self._archive.usage()._asdict()
        except OSError:
            usage = {}
        return {
            "state": "ok" if trouble is None else "failing",
            "error": trouble.message if trouble else None,
            "hint": trouble.hint if trouble else None,
            "since": trouble.since if trouble else None,
            "directory": self._archive.directory,
            **usage,
        }

    async def _leave(self, ingest: Ingest, exports: Exports) -> None:
        log.info("ending")
        await exports.close()
        ingest.event("head_stopped", None, version=__version__)
        for session in self._sessions.active():
            left = interrupted(session, self._clock.now())
            ingest.note("session", **left.to_dict())
        await self._committer.commit()

    # --- for those who look into the data directory

    def _write_address(self, listening: Listening) -> None:
        path = f"{self._config.data_dir}/{ADDRESS_FILE}"
        document = {"pid": os.getpid(), **listening._asdict(), "tls": self._config.tls is not None}
        with suppress(OSError):
            descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(f"{path}.new", path)

    def _remove_address(self) -> None:
        with suppress(OSError):
            os.unlink(f"{self._config.data_dir}/{ADDRESS_FILE}")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
