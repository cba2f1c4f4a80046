"""Learn of the nodes of other heads from the time-series database that all of them write to."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from gpulse.cluster.aside import aside
from gpulse.cluster.head.fleet import Fleet, Member
from gpulse.cluster.head.ingest import Ingest
from gpulse.errors import GpulseError
from gpulse.model.device import Device
from gpulse.model.series import facts_of_info
from gpulse.store.outage import Outage
from gpulse.store.store import StoredNode
from gpulse.store.tsdb.fleet_query import FRESH_SECONDS, FleetQuery, ReportedNode
from gpulse.store.tsdb.promql import PromqlClient

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
_SHARE = 4.0
"""After a look it rests so many times as long as that took: a large fleet is looked at less often."""
_DEVICES_SECONDS = 60.0
"""How often GPUs are asked for that are known."""
_THREAD = "gpulse-other-heads"
_MAX_NODES = 100_000
_MAX_CHARACTERS = {"node": 300, "host": 253, "machine": 200, "version": 100}
"""What agents may say of themselves, and what comes out of it, is no longer."""


class OtherHeads:
    """Asks the time-series database for the nodes of other heads, again and again."""

    def __init__(
        self,
        client: PromqlClient,
        fleet: Fleet,
        notes: Ingest,
        *,
        labels: Mapping[str, str],
        now: Callable[[], float],
    ) -> None:
        """Prepare to look.

        Args:
            client: The time-series database.
            fleet: The nodes of this head.
            notes: Told when there is something new to see.
            labels: What every series must have.
            now: The head's clock.
        """
        self._newest = FleetQuery(client, labels=labels)
        self._fleet = fleet
        self._notes = notes
        self._now = now
        self._heard: dict[str, ReportedNode] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        """Both by the name that the time-series database knows a node by."""
        self._devices_at = 0.0
        self._troubles: dict[str, Outage] = {}
        """By question why the time-series database does not answer it at the moment."""

    async def run(self) -> None:
        """Ask until cancelled; a time-series database that does not answer is asked again, and nobody waits for it."""
        await asyncio.gather(self._follow(), self._watch())

    @property
    def trouble(self) -> Outage | None:
        """Why the time-series database cannot be asked at the moment."""
        return next(iter(self._troubles.values()), None)

    async def _follow(self) -> None:
        """Know all the time which nodes there are."""
        while True:
            rest_seconds = await self._asked(self._look)
            await asyncio.sleep(rest_seconds)

    async def _watch(self) -> None:
        """Have the readings of now while somebody looks at them: who looks first does not wait for a next round."""
        while True:
            await self._fleet.looked.wait()
            self._fleet.looked.clear()
            await asyncio.sleep(await self._asked(self._read))

    async def _asked(self, step: Callable[[], Awaitable[None]]) -> float:
        """Ask the time-series database something; return how long to rest then."""
        began = time.monotonic()
        what = step.__name__
        try:
            await step()
            if self._troubles.pop(what, None) is not None:
                log.info("the time-series database answers again about other heads' nodes")
        except GpulseError as error:
            self._failed(what, error)
        except Exception:  # the guard: a strange answer must not end the head
            log.exception("a fault in gpulse; other heads' nodes are not seen for now")
        return max(LOOK_SECONDS, _SHARE * (time.monotonic() - began))

    async def _look(self) -> None:
        """Bring what the time-series database says of nodes together with what this head knows itself."""
        asked = self._now()
        here = {member.name for member in self._fleet.members.values() if member.is_here}
        self._heard, self._devices = await aside(lambda: self._ask(here), name=_THREAD)
        for name, heard in self._heard.items():
            member = self._member(name, heard)
            if member.is_here:
                continue
            self._learn_devices(member, self._devices.get(name, ()))
            member.version = heard.labels.get("version", "") or member.version
            self._fleet.heard_elsewhere(member, heard.time)
        self._fleet.asked = asked
        if self._heard:
            self._notes.changed()

    async def _read(self) -> None:
        """Bring the newest readings of other heads' nodes here."""
        since = self._now() - FRESH_SECONDS
        heard = {name: node for name, node in self._heard.items() if node.time > since}
        if not heard:
            return
        devices = self._devices
        frames = await aside(lambda: self._newest.frames(heard, devices), name=_THREAD)
        for name, frame in frames.items():
            self._fleet.heard_elsewhere(self._member(name, heard[name]), frame.time, frame)
        self._notes.changed()

    def _ask(self, here: set[str]) -> tuple[dict[str, ReportedNode], dict[str, tuple[Device, ...]]]:
        """The nodes that are not here, and their GPUs; it waits for the answers."""
        heard = {
            name: node
            for name, node in self._newest.nodes(self._now()).items()
            if name not in here
            and all(_is_word(label, node.labels.get(label, "")) for label in _MAX_CHARACTERS)
        }
        if len(heard) > _MAX_NODES:
            raise GpulseError(
                f"the time-series database knows {len(heard):,} nodes, which is more than a head can show"
            )
        devices = {name: self._devices[name] for name in heard if name in self._devices}
        wanted = heard.keys() - devices.keys()
        if time.monotonic() - self._devices_at > _DEVICES_SECONDS:
            wanted, self._devices_at = set(heard), time.monotonic()
        return heard, devices | (self._newest.gpus(wanted) if wanted else {})

    def _member(self, name: str, heard: ReportedNode) -> Member:
        """Return the node that the time-series database knows by a name."""
        known = self._fleet.register.find(heard.labels.get("host", ""), heard.labels.get("machine", ""))
        stored = known or self._new(name, heard)
        return self._fleet.members.get(stored.id) or self._fleet.member(stored, 0.0)

    def _new(self, name: str, heard: ReportedNode) -> StoredNode:
        labels = heard.labels
        return self._fleet.register.learn(
            labels.get("host") or name,
            labels.get("machine", ""),
            self._now(),
            name=name,
            facts=facts_of_info(labels),
            labels={},
        )

    def _learn_devices(self, member: Member, devices: Sequence[Device]) -> None:
        """Take in GPUs that this head did not know of: the time-series database knows less of them than their node."""
        frame = member.frame(self._fleet.layouts)
        before = {_who(device): device for device in member.known}
        known = before | {_who(gpu.device): gpu.device for gpu in (frame.gpus if frame is not None else ())}
        if devices:
            member.known = tuple(known.get(_who(device), device) for device in devices)
            self._fleet.register.learn_gpus(member.stored, member.known)

    def _failed(self, what: str, error: GpulseError) -> None:
        before = self._troubles.get(what)
        if before is None:
            log.warning("other heads' nodes are not seen for now: %s", error.message)
        since = self._now() if before is None else before.since
        self._troubles[what] = Outage(since, error.message, error.hint)


def _who(device: Device) -> tuple[str, str]:
    return device.label, device.uuid


def _is_word(label: str, text: str) -> bool:
    return len(text) <= _MAX_CHARACTERS[label] and text.isprintable()
