"""What a head shares with other heads: the backends of its store, and the nodes of the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET

from gpulse.background_call import await_background_call
from gpulse.cluster.head.finding_operations import FindingResponses
from gpulse.cluster.head.fleet import Fleet, FleetMember
from gpulse.cluster.head.ingest import Ingest
from gpulse.cluster.head.session_lifecycle import SessionRegistry
from gpulse.cluster.protocol.answers import BackendStatus, RemoteQuery, RemoteWrite
from gpulse.errors import GpulseError
from gpulse.model.device import Device
from gpulse.model.series_labels import node_facts_from_info_labels
from gpulse.store.federated import FederatedStore
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.local import LocalStore
from gpulse.store.log.record_payloads import LogEntry
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import Store, StoredNode
from gpulse.store.tsdb.config import TsdbConfig
from gpulse.store.tsdb.fleet_query import FRESH_SECONDS, FleetQuery, ReportedNode
from gpulse.store.tsdb.promql import PromqlClient
from gpulse.store.tsdb.send_supervisor import TsdbForwarder
from gpulse.store.tsdb.store import TsdbStore

if TYPE_CHECKING:
    from gpulse.cluster.head.shared_database import SharedDatabase
    from gpulse.store.metadata.postgres_connection import DatabaseConfig

log = logging.getLogger(__name__)

POLL_SECONDS = 5.0
_REST_FACTOR = 4.0
"""The pause after a query is at least this many times its duration, so that a large fleet is queried less often."""
_DEVICES_SECONDS = 60.0
"""How often the GPUs of known nodes are queried again."""
_THREAD = "gpulse-other-heads"
_MAX_NODES = 100_000
_MAX_CHARACTERS = {"node": 300, "host": 253, "machine": 200, "version": 100}
"""Maximum lengths of the labels that agents report."""


class OtherHeadsPoller:
    """Repeatedly queries the time-series database for the nodes of other heads."""

    def __init__(
        self,
        client: PromqlClient,
        fleet: Fleet,
        notes: Ingest,
        *,
        labels: Mapping[str, str],
        now: Callable[[], float],
    ) -> None:
        """Prepare to query.

        Args:
            client: Client of the time-series database.
            fleet: The nodes of this head.
            notes: Notified of changes.
            labels: Labels that every series must have.
            now: The head's clock.
        """
        self._newest = FleetQuery(client, labels=labels)
        self._fleet = fleet
        self._notes = notes
        self._now = now
        self._nodes: dict[str, ReportedNode] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        """Both by the name of the node in the time-series database."""
        self._devices_at = 0.0
        self._outages: dict[str, BackendOutage] = {}
        """Current failures, by query."""

    async def run(self) -> None:
        """Query until cancelled; failed queries are repeated, and nothing else waits for them."""
        await asyncio.gather(self._poll_nodes(), self._poll_readings())

    @property
    def trouble(self) -> BackendOutage | None:
        """Why queries to the time-series database currently fail; None if they do not."""
        return next(iter(self._outages.values()), None)

    async def _poll_nodes(self) -> None:
        """Keep the list of nodes up to date."""
        while True:
            rest_seconds = await self._run_query(self._update_nodes)
            await asyncio.sleep(rest_seconds)

    async def _poll_readings(self) -> None:
        """Keep the newest readings up to date while clients read them; the first read triggers a query at once."""
        while True:
            await self._fleet.looked.wait()
            self._fleet.looked.clear()
            await asyncio.sleep(await self._run_query(self._update_readings))

    async def _run_query(self, step: Callable[[], Awaitable[None]]) -> float:
        """Run one query; return the seconds to wait before the next."""
        began = time.monotonic()
        what = step.__name__
        try:
            await step()
            if self._outages.pop(what, None) is not None:
                log.info("the time-series database is available again; nodes of other heads are up to date")
        except GpulseError as error:
            self._failed(what, error)
        except Exception:  # an unexpected answer must not end the head
            log.exception("cannot update the nodes of other heads because of a bug in gpulse; trying again")
        return max(POLL_SECONDS, _REST_FACTOR * (time.monotonic() - began))

    async def _update_nodes(self) -> None:
        """Merge the nodes in the time-series database into the fleet."""
        asked = self._now()
        here = {member.name for member in self._fleet.members.values() if member.is_here}
        self._nodes, self._devices = await await_background_call(
            lambda: self._query_nodes(here), name=_THREAD
        )
        for name, reported in self._nodes.items():
            member = self._member(name, reported)
            if member.is_here:
                continue
            self._learn_devices(member, self._devices.get(name, ()))
            member.version = reported.labels.get("version", "") or member.version
            self._fleet.update_from_other_head(member, reported.time)
        self._fleet.asked = asked
        if self._nodes:
            self._notes.changed()

    async def _update_readings(self) -> None:
        """Read the newest readings of the nodes of other heads."""
        since = self._now() - FRESH_SECONDS
        reported = {name: node for name, node in self._nodes.items() if node.time > since}
        if not reported:
            return
        devices = self._devices
        frames = await await_background_call(lambda: self._newest.frames(reported, devices), name=_THREAD)
        for name, frame in frames.items():
            self._fleet.update_from_other_head(self._member(name, reported[name]), frame.time, frame)
        self._notes.changed()

    def _query_nodes(self, here: set[str]) -> tuple[dict[str, ReportedNode], dict[str, tuple[Device, ...]]]:
        """Return the nodes that are not at this head, and their GPUs; blocks until the answers arrive."""
        reported = {
            name: node
            for name, node in self._newest.nodes(self._now()).items()
            if name not in here
            and all(_is_valid_label(label, node.labels.get(label, "")) for label in _MAX_CHARACTERS)
        }
        if len(reported) > _MAX_NODES:
            raise GpulseError(
                f"the time-series database has {len(reported):,} nodes, more than the {_MAX_NODES:,} that a head can show"
            )
        devices = {name: self._devices[name] for name in reported if name in self._devices}
        wanted = reported.keys() - devices.keys()
        if time.monotonic() - self._devices_at > _DEVICES_SECONDS:
            wanted, self._devices_at = set(reported), time.monotonic()
        return reported, devices | (self._newest.gpus(wanted) if wanted else {})

    def _member(self, name: str, reported: ReportedNode) -> FleetMember:
        """Return the fleet member for a node in the time-series database."""
        known = self._fleet.register.find(reported.labels.get("host", ""), reported.labels.get("machine", ""))
        stored = known or self._new(name, reported)
        return self._fleet.members.get(stored.id) or self._fleet.member(stored, 0.0)

    def _new(self, name: str, reported: ReportedNode) -> StoredNode:
        labels = reported.labels
        return self._fleet.register.add_from_other_head(
            labels.get("host") or name,
            labels.get("machine", ""),
            self._now(),
            name=name,
            facts=node_facts_from_info_labels(labels),
            labels={},
        )

    def _learn_devices(self, member: FleetMember, devices: Sequence[Device]) -> None:
        """Add GPUs that this head does not know; for known ones this head has more details than the database."""
        frame = member.frame(self._fleet.layouts)
        before = {_device_key(device): device for device in member.last_devices}
        known = before | {
            _device_key(gpu.device): gpu.device for gpu in (frame.gpus if frame is not None else ())
        }
        if devices:
            member.last_devices = tuple(known.get(_device_key(device), device) for device in devices)
            self._fleet.register.set_other_head_gpus(member.stored, member.last_devices)

    def _failed(self, what: str, error: GpulseError) -> None:
        before = self._outages.get(what)
        if before is None:
            log.warning("cannot update the nodes of other heads: %s", error.message)
        since = self._now() if before is None else before.since
        self._outages[what] = BackendOutage(since, error.message, error.hint)


def _device_key(device: Device) -> tuple[str, str]:
    return device.label, device.uuid


def _is_valid_label(label: str, text: str) -> bool:
    return len(text) <= _MAX_CHARACTERS[label] and text.isprintable()


_QUERY_SECONDS = 10.0


class BackendConfig(NamedTuple):
    """The backends of a head besides its own disk."""

    tsdb: TsdbConfig | None = None
    """The time-series database."""
    tsdb_limit_bytes: int = 10 << 30
    """Maximum size of the log that waits to be sent to the time-series database."""
    database: DatabaseConfig | None = None
    """The PostgreSQL database that several heads share."""


class Backends:
    """The time-series database and the shared database of one head; both are optional, and the head waits for neither."""

    def __init__(self, archive: LocalStore, config: BackendConfig, *, now: Callable[[], float]) -> None:
        self._archive = archive
        self._config = config
        self._now = now
        self._forwarder: TsdbForwarder | None = None
        self._client: PromqlClient | None = None
        self._joined: FederatedStore | None = None
        self._other_heads: OtherHeadsPoller | None = None
        self._shared: SharedDatabase | None = None

    async def open(self, stack: AsyncExitStack) -> None:
        """Start to send samples; everything opened is closed with the stack.

        Raises:
            GpulseError: A required package is not installed.
        """
        tsdb = self._config.tsdb
        if tsdb is None:
            return
        self._forwarder = forwarder = TsdbForwarder(
            self._archive.directory, tsdb, limit_bytes=self._config.tsdb_limit_bytes
        )
        self._archive.forward_to(forwarder)
        stack.push_async_callback(asyncio.to_thread, forwarder.close)
        await asyncio.to_thread(forwarder.start)
        if tsdb.query_url is not None:
            self._client = PromqlClient(tsdb, timeout_seconds=_QUERY_SECONDS)
            stack.callback(self._client.close)

    def join(
        self,
        fleet: Fleet,
        ingest: Ingest,
        sessions: SessionRegistry,
        responses: FindingResponses,
        *,
        resume: bool,
        keep_seconds: float,
    ) -> Store:
        """Connect to the databases that other heads use; return the store that reads from all of them.

        Args:
            fleet: The nodes.
            ingest: Writes facts to the log of this head.
            sessions: The sessions.
            responses: What people have acknowledged and silenced.
            resume: Continue sessions that no other head continued.
            keep_seconds: Retention of events, findings, processes and GPU time.
        """
        if self._config.database is not None:
            from gpulse.cluster.head.shared_database import SharedDatabase  # noqa: PLC0415  needs psycopg

            self._shared = SharedDatabase(
                self._archive,
                self._config.database,
                fleet=fleet,
                sessions=sessions,
                responses=responses,
                notes=ingest,
                changed=ingest.changed,
                now=self._now,
                resume=resume,
                keep_seconds=keep_seconds,
            )
        if self._client is not None and self._config.tsdb is not None:
            self._other_heads = OtherHeadsPoller(
                self._client, fleet, ingest, labels=self._config.tsdb.labels, now=self._now
            )
        if self._client is None and self._shared is None:
            return self._archive
        return self._join_store(fleet.register)

    def _join_store(self, register: NodeRegistry) -> FederatedStore:
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
        """The same store, but it raises an error instead of returning an incomplete answer."""
        return self._archive if self._joined is None else self._joined.strict

    def work(self) -> list[tuple[str, Coroutine[None, None, None]]]:
        """Return the tasks that run while the head runs, by name."""
        found: list[tuple[str, Coroutine[None, None, None]]] = []
        if self._other_heads is not None:
            found.append(("other_heads", self._other_heads.run()))
        if self._shared is not None:
            found.append(("database", self._shared.run()))
        return found

    @property
    def restores_sessions(self) -> bool:
        """Whether earlier sessions are restored later, once it is known whether other heads continued them."""
        return self._shared is not None

    @property
    def has_live_peer(self) -> bool:
        """Whether another head continues the sessions when this one ends."""
        return self._shared is not None and self._shared.has_live_peer

    async def finish(self) -> None:
        """Write the last changes to the shared database, with a time limit."""
        if self._shared is not None:
            await self._shared.finish()

    def committed(self, entries: Sequence[LogEntry]) -> None:
        """Process entries that are now on this head's disk."""
        if self._joined is not None:
            self._joined.committed(entries)
        if self._shared is not None:
            self._shared.committed(entries)

    def status(self) -> BackendStatus:
        """Return the status of the databases that this head uses."""
        remote, query = self._forwarder, self._client
        return BackendStatus(
            remote=UNSET if remote is None else RemoteWrite(**remote.state()._asdict()),
            remote_query=UNSET if query is None else _remote_query(query.url, self._query_trouble()),
            database=UNSET if self._shared is None else self._shared.status(),
        )

    def _query_trouble(self) -> BackendOutage | None:
        outage = None if self._other_heads is None else self._other_heads.trouble
        return outage or (None if self._joined is None else self._joined.tsdb_outage)


def _remote_query(url: str, outage: BackendOutage | None) -> RemoteQuery:
    return RemoteQuery(
        url=url,
        state="ok" if outage is None else "failing",
        error=None if outage is None else outage.message,
        hint=None if outage is None else outage.hint,
        since=None if outage is None else outage.since,
    )
