"""The backends of a head besides its own disk: a time-series database, and a database that it shares with other heads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.sessions import Sessions
from gpulse.cluster.protocol.answers import BackendStatus, RemoteQuery, RemoteWrite
from gpulse.store.local import LocalStore
from gpulse.store.log.records import Entry
from gpulse.store.outage import Outage
from gpulse.store.registry import Register
from gpulse.store.store import Store
from gpulse.store.tsdb.config import TsdbConfig

if TYPE_CHECKING:
    from gpulse.cluster.head.other_heads import OtherHeads
    from gpulse.cluster.head.shared_database import SharedDatabase
    from gpulse.store.federated import FederatedStore
    from gpulse.store.metadata.postgres import DatabaseConfig
    from gpulse.store.tsdb.forwarder import Forwarder
    from gpulse.store.tsdb.promql import PromqlClient

_ASK_SECONDS = 10.0


class BackendConfig(NamedTuple):
    """The backends of a head besides its own disk."""

    tsdb: TsdbConfig | None = None
    """The time-series database."""
    tsdb_limit_bytes: int = 10 << 30
    """How much of the log may wait for the time-series database."""
    database: DatabaseConfig | None = None
    """The PostgreSQL database that several heads share."""


class Backends:
    """The time-series database and the shared database of one head; either may be missing, and neither is waited for."""

    def __init__(self, archive: LocalStore, config: BackendConfig, *, now: Callable[[], float]) -> None:
        self._archive = archive
        self._config = config
        self._now = now
        self._forwarder: Forwarder | None = None
        self._client: PromqlClient | None = None
        self._joined: FederatedStore | None = None
        self._other_heads: OtherHeads | None = None
        self._shared: SharedDatabase | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Begin to send samples; what is opened is closed with the stack.

        Raises:
            GpulseError: Something that it needs is not installed.
        """
        tsdb = self._config.tsdb
        if tsdb is None:
            return
        from gpulse.store.tsdb.forwarder import Forwarder  # noqa: PLC0415  few heads have a time-series database
        from gpulse.store.tsdb.promql import PromqlClient  # noqa: PLC0415

        self._forwarder = forwarder = Forwarder(
            self._archive.directory, tsdb, limit_bytes=self._config.tsdb_limit_bytes
        )
        self._archive.forward_to(forwarder)
        stack.push_async_callback(asyncio.to_thread, forwarder.close)
        await asyncio.to_thread(forwarder.start)
        if tsdb.query_url is not None:
            self._client = PromqlClient(tsdb, timeout_seconds=_ASK_SECONDS)
            stack.callback(self._client.close)

    def join(
        self, fleet: Fleet, ingest: Ingest, sessions: Sessions, *, resume: bool, keep_seconds: float
    ) -> Store:
        """Take part in what other heads know; the store that has all of it.

        Args:
            fleet: The nodes.
            ingest: Where facts of this head are written down.
            sessions: The sessions.
            resume: Go on with sessions that no head carried on.
            keep_seconds: How long events, findings, processes and GPU time are kept.
        """
        if self._config.database is not None:
            from gpulse.cluster.head.shared_database import SharedDatabase  # noqa: PLC0415  as above

            self._shared = SharedDatabase(
                self._archive,
                self._config.database,
                fleet=fleet,
                sessions=sessions,
                notes=ingest,
                changed=ingest.changed,
                now=self._now,
                resume=resume,
                keep_seconds=keep_seconds,
            )
        if self._client is not None and self._config.tsdb is not None:
            from gpulse.cluster.head.other_heads import OtherHeads  # noqa: PLC0415  as above

            self._other_heads = OtherHeads(
                self._client, fleet, ingest, labels=self._config.tsdb.labels, now=self._now
            )
        if self._client is None and self._shared is None:
            return self._archive
        return self._join_store(fleet.register)

    def _join_store(self, register: Register) -> FederatedStore:
        from gpulse.store.federated import FederatedStore  # noqa: PLC0415  as above
        from gpulse.store.tsdb.store import TsdbStore  # noqa: PLC0415

        samples = None
        if self._client is not None and self._config.tsdb is not None:
            samples = TsdbStore(
                self._client,
                lambda: dict(register.by_id),
                labels=self._config.tsdb.labels,
                now=self._now,
            )
        self._joined = FederatedStore(
            self._archive,
            samples,
            None if self._shared is None else self._shared.store,
            now=self._now,
            register=register,
        )
        return self._joined

    @property
    def whole(self) -> Store:
        """The same store for those who must not get a part of the answer for the whole of it."""
        return self._archive if self._joined is None else self._joined.strict

    def work(self) -> list[tuple[str, Coroutine[None, None, None]]]:
        """What goes on while the head runs, by name."""
        found: list[tuple[str, Coroutine[None, None, None]]] = []
        if self._other_heads is not None:
            found.append(("other_heads", self._other_heads.run()))
        if self._shared is not None:
            found.append(("database", self._shared.run()))
        return found

    @property
    def wakes_sessions(self) -> bool:
        """Whether sessions of before are woken later, once it is known whether other heads carried them on."""
        return self._shared is not None

    @property
    def is_carried_on(self) -> bool:
        """Whether another head goes on with the sessions when this one ends."""
        return self._shared is not None and self._shared.is_carried_on

    async def finish(self) -> None:
        """Write the last news to the database; bounded."""
        if self._shared is not None:
            await self._shared.finish()

    def committed(self, entries: Sequence[Entry]) -> None:
        """Entries are on this head's disk."""
        if self._joined is not None:
            self._joined.committed(entries)
        if self._shared is not None:
            self._shared.committed(entries)

    def status(self) -> BackendStatus:
        """Return how the time-series database and the shared database are, as far as this head uses them."""
        remote, query = self._forwarder, self._client
        return BackendStatus(
            remote=UNSET if remote is None else RemoteWrite(**remote.state()._asdict()),
            remote_query=UNSET if query is None else _remote_query(query.url, self._query_trouble()),
            database=UNSET if self._shared is None else self._shared.status(),
        )

    def _query_trouble(self) -> Outage | None:
        outage = None if self._other_heads is None else self._other_heads.trouble
        return outage or (None if self._joined is None else self._joined.tsdb_outage)


def _remote_query(url: str, outage: Outage | None) -> RemoteQuery:
    return RemoteQuery(
        url=url,
        state="ok" if outage is None else "failing",
        error=None if outage is None else outage.message,
        hint=None if outage is None else outage.hint,
        since=None if outage is None else outage.since,
    )
