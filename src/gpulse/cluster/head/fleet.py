"""The nodes as they are now: their runs, their newest frames, and what they said about themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from gpulse.cluster.head.decode import Shapes
from gpulse.cluster.head.membership import RETURN_SECONDS, Abroad, is_undecided, state_of
from gpulse.cluster.protocol.answers import NodeState
from gpulse.cluster.protocol.interface import LiveNode
from gpulse.diagnosis.rules.node import node_lost
from gpulse.model.columns import Layout, PackedFrame
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding, FindingKey, finding_key, from_document
from gpulse.model.finding_span import FindingSpan, new_span
from gpulse.model.frame import Frame
from gpulse.model.health import Health
from gpulse.model.job import JOB, JOB_END, Job
from gpulse.model.job import from_document as job_from
from gpulse.model.natural import natural_key
from gpulse.model.packing import device_of, unpack_frame
from gpulse.model.process import Owner, ProcessIdentity
from gpulse.model.xid import XID, XidLedger
from gpulse.model.xid import from_document as xid_from
from gpulse.store.agent_events import UNREADABLE, check_event
from gpulse.store.registry import Register
from gpulse.store.store import Query, Store, StoredGpu, StoredNode

log = logging.getLogger(__name__)

_QUICK_SCOPES = frozenset({"gpu", "host"})
_JOB_EVENTS = frozenset({JOB, JOB_END, "agent_started", "agent_stopping"})
_MAX_JOBS = 4096
"""Of one node: nobody fills the head's memory."""
_MAX_PROCESSES = 16_384
"""Of one node, likewise."""
_MAX_JOB_SECONDS = 7 * 86_400.0
_MAX_JOB_EVENTS = 20_000
"""How much of what was told of jobs is read again at a start."""
_MAX_XID_EVENTS = 20_000
_MAX_SPANS = 20_000
"""Of findings, newest first, that are read again at a start."""
_MAX_FINDINGS = 4096
"""Of one node, with those that were over lately."""


class EarlierStore(Store, Protocol):
    """The store that the head before this one left, with the last state of its nodes."""

    def latest(self, kind: str) -> Mapping[int, tuple[float, dict[str, Any]]]:
        """Return the last event of a kind, by node."""

    def seen(self, node: int) -> float | None:
        """Return when something came from a node last; None when that is unknown."""


class Run:
    """One life of an agent: how far its frames came."""

    def __init__(self, node: int, last: int = 0) -> None:
        self.node = node
        self.received = last
        """The newest frame that came, on disk or not."""
        self.durable = last
        """The newest frame on disk."""
        self.dropped = 0
        """How many its agent had to give up, as far as was told."""
        self.killed = False
        """Whether it was told that it ended badly."""
        self.elsewhere = 0
        """Up to this frame another head has it all, as far as was told."""
        self.refused_at = -1
        """The newest frame that had come when frames were refused last."""


class Member:
    """One node while the head runs."""

    def __init__(self, stored: StoredNode, seen: float) -> None:
        self.stored = stored
        self.seen = seen
        """When something came from it last, on the head's clock."""
        self.state: NodeState = "healthy"
        self.connected = False
        self.has_left = False
        """Whether its agent was ended in order, and has not started since."""
        self.is_silent = False
        """Whether nothing has come from it here for too long, connected or not."""
        self.abroad = Abroad()
        self.interval_seconds: float | None = None
        """From one frame to the next; None when its agent does as the head says."""
        self.version = ""
        self.shift_us = 0
        self.processes: dict[int, ProcessIdentity] = {}
        self.jobs: dict[str, Job] = {}
        self.xids = XidLedger()
        self.findings: Sequence[Finding] = ()
        """What its agent reported last, each with the start that it has here."""
        self.spans: dict[FindingKey, FindingSpan] = {}
        """Of its findings, also of those that were over lately."""
        self.lost_since: float | None = None
        """When it was last heard, once it is written down that it is lost."""
        self.health: tuple[Health, ...] = ()
        self.known: tuple[Device, ...] = ()
        """The GPUs it had when something was heard of it last, before the head started or from others."""
        self._newest: tuple[PackedFrame, int] | None = None
        self._slow: PackedFrame | None = None
        self._decoded: Frame | None = None

    @property
    def name(self) -> str:
        """How people name it."""
        return self.stored.name

    @property
    def is_elsewhere(self) -> bool:
        """Whether another head has it."""
        return not self.is_here and self.abroad.is_newer(self.seen)

    @property
    def is_here(self) -> bool:
        """Whether it speaks to this head; a connection that broke without a word may seem to be one for a while."""
        return self.connected and not self.is_silent

    def clear_reports(self) -> None:
        """What its agent told this head is of the past by now."""
        self.processes, self.jobs, self.findings, self.health = {}, {}, (), ()

    def take(self, packed: PackedFrame, layouts: Mapping[int, Layout], shift_us: int) -> None:
        """The newest frame came."""
        self._newest = (packed, shift_us)
        self._decoded = None
        for name, _ in packed.blocks:
            if layouts[name].scope not in _QUICK_SCOPES:
                self._slow = packed
                break

    def layouts(self) -> set[int]:
        """The layouts that its newest frame refers to."""
        newest = self._newest[0] if self._newest else None
        return {block.layout for frame in (newest, self._slow) if frame for block in frame.blocks}

    def frame(self, layouts: Mapping[int, Layout]) -> Frame | None:
        """The newest frame, taken apart when somebody asks for it."""
        if self._decoded is None and self._newest is not None:
            packed, shift_us = self._newest
            try:
                frame = unpack_frame(
                    node_of(self.stored),
                    layouts,
                    packed,
                    slow=self._slow,
                    identities=self.processes,
                    jobs=self.jobs,
                    shift_us=shift_us,
                )
            except (ValueError, LookupError, TypeError, OverflowError) as error:  # it costs this node alone
                log.error("the newest frame of %s cannot be read: %s", self.name, error)
                self._newest = None
                return None
            self._decoded = frame._replace(health=self.health)
        return self._decoded

    def happened(self, events: Iterable[Mapping[str, Any]], time: float) -> None:
        """Take in what an agent said in one frame of that time, as `decode_events` gives it."""
        for event in events:
            self._happened(event, time)

    def _happened(self, document: Mapping[str, Any], time: float) -> None:
        match document.get("event"):
            case "process":
                identity = identity_of(document)
                if identity is not None and (
                    identity.pid in self.processes or len(self.processes) < _MAX_PROCESSES
                ):
                    self.processes[identity.pid] = identity
            case "process_end":
                pid = document.get("pid")
                if isinstance(pid, int):
                    self.processes.pop(pid, None)
            case "agent_started":
                self.processes.clear()
                self.jobs.clear()
                self.health = ()
                self.has_left = False
            case "agent_stopping":
                self.has_left = True
            case "job":
                with suppress(ValueError):
                    job = job_from(document)
                    if job.id in self.jobs or len(self.jobs) < _MAX_JOBS:
                        self.jobs[job.id] = job
            case "job_end":
                self.jobs.pop(str(document.get("job")), None)
            case "xid":
                xid = xid_from(document)
                if xid is not None:
                    self.xids.add(xid, shift_seconds=self.shift_us / 1e6)
            case "findings":
                self._reported(document["findings"], time)
            case "health":
                entries = document.get("entries")
                self.health = tuple(_health_of(entries)) if isinstance(entries, list) else ()

    def _reported(self, findings: Sequence[Mapping[str, Any]], time: float) -> None:
        """Take in all findings that an agent reports at a time, and give each the start that it had before."""
        told: dict[FindingKey, Mapping[str, Any]] = {}
        for finding in findings[:_MAX_FINDINGS]:
            told.setdefault(finding_key(finding), finding)
        spans = {key: span.absent(time) for key, span in self.spans.items() if key not in told}
        if len(spans) > _MAX_FINDINGS:
            spans = {key: span for key, span in spans.items() if not span.is_over}
        for key, finding in told.items():
            before = self.spans.get(key)
            spans[key] = (before and before.reported(finding, time)) or new_span(finding, time)
        self.spans = spans
        self.findings = [
            from_document({**finding, "start": spans[key].start}) for key, finding in told.items()
        ]


class Fleet:
    """All nodes that this head knows."""

    def __init__(
        self, nodes: Mapping[int, StoredNode], runs: Mapping[bytes, Run], layouts: dict[int, Layout]
    ) -> None:
        self.register = Register(nodes.values())
        self.members: dict[int, Member] = {}
        self.runs = dict(runs)
        self.layouts = layouts
        """Shared with the store, which reads frames by them."""
        self.shapes = Shapes(layouts)
        """Which blocks belong into one frame."""
        self.asked: float | None = None
        """When a database was last asked for nodes of other heads, on the head's clock; None when there is none to ask."""
        self.looked = asyncio.Event()
        """Set when somebody looks at the nodes."""
        self.listening_since: float | None = None
        """When this head began to listen, or went on after it had stood still, on its clock."""
        self._used: dict[int, float] = {}
        """By layout when a frame last referred to it, on the head's clock."""

    def member(self, stored: StoredNode, now: float) -> Member:
        """The node as it is now, heard of this moment if it is new."""
        self.register.put(stored)
        member = self.members.get(stored.id)
        if member is None:
            member = self.members[stored.id] = Member(stored, now)
        member.stored = stored
        return member

    def used(self, frames: Sequence[PackedFrame], now: float) -> None:
        """Frames referred to their layouts."""
        for frame in frames:
            for name, _ in frame.blocks:
                self._used[name] = now

    def forget_layouts(self, before: float, now: float) -> list[int]:
        """Drop the layouts that no frame referred to since then; every change of a node's processes makes one."""
        needed = {layout for member in self.members.values() for layout in member.layouts()}
        old = [
            layout
            for layout in self.layouts
            if layout not in needed and self._used.setdefault(layout, now) < before
        ]
        for layout in old:
            del self.layouts[layout]
            self._used.pop(layout, None)
        if old:
            self.shapes.clear()
        return old

    def restore(self, store: EarlierStore, now: float) -> None:
        """Take up the nodes where the head before this one left them.

        A node that is not known to be lost counts as healthy until its agent has had the time to come back: nobody
        listened to it meanwhile.
        """
        self.listening_since = now
        spans = self._spans(store, now)
        living = store.processes(Query(now, now + 1.0))
        findings, health = store.latest("findings"), store.latest("health")
        gpus = store.gpus()
        jobs = self._jobs(store, now)
        for node in store.nodes().values():
            member = self.member(node, store.seen(node.id) or node.first_seen)
            member.happened(_checked(jobs.get(node.id, ())), now)
            member.spans = spans.get(node.id, {})
            lost = member.spans.pop(("node_lost", None, ""), None)
            member.lost_since = lost.start if lost is not None and lost.end is None else None
            member.known = tuple(_devices(gpu for gpu in gpus if gpu.node == node.id))
            member.state = "healthy" if member.lost_since is None else "lost"
            for process in living:
                identity = identity_of(process.identity) if process.node == node.id else None
                if identity is not None:
                    member.processes[identity.pid] = identity
            for event, latest in (("findings", findings), ("health", health)):
                if node.id in latest:
                    time, detail = latest[node.id]
                    member.happened(_checked([{**detail, "event": event}]), time)
        self._restore_xids(store, now)

    def _restore_xids(self, store: EarlierStore, now: float) -> None:
        """Count the Xid errors that are still known of, so that counters outlive agents and heads."""
        query = Query(0.0, now + 1.0, kinds=frozenset({XID}), limit=_MAX_XID_EVENTS)
        for event in store.events(query):
            member = self.members.get(event.node or 0)
            if member is not None:
                member.happened(_checked([{**event.detail, "event": XID}]), event.time)
        for member in self.members.values():
            member.xids.meet(member.known)

    @staticmethod
    def _spans(store: EarlierStore, now: float) -> dict[int, dict[FindingKey, FindingSpan]]:
        """By node the newest span of each finding."""
        spans: dict[int, dict[FindingKey, FindingSpan]] = {}
        for stored in store.findings(Query(0.0, now + 1.0, limit=_MAX_SPANS)):
            if stored.node is not None:
                spans.setdefault(stored.node, {})[stored.finding.key] = stored.span
        return spans

    @staticmethod
    def _jobs(store: EarlierStore, now: float) -> dict[int, list[dict[str, Any]]]:
        """By node what was told of jobs and of its agents' lives, oldest first."""
        told: dict[int, list[dict[str, Any]]] = {}
        query = Query(
            now - _MAX_JOB_SECONDS,
            now + 1.0,
            nodes=frozenset(store.nodes()),
            kinds=frozenset(_JOB_EVENTS),
            limit=_MAX_JOB_EVENTS,
        )
        for event in store.events(query):
            if event.node is not None:
                told.setdefault(event.node, []).append({**event.detail, "event": event.kind})
        return told

    def clock_was_set(self, seconds: float) -> None:
        """The head's clock went forward: nobody was silent for that long."""
        for member in self.members.values():
            member.seen += seconds
        if self.listening_since is not None:
            self.listening_since += seconds

    def check(self, now: float, interval_seconds: float) -> list[tuple[Member, NodeState]]:
        """Return the nodes whose state has changed, each with its state before.

        Args:
            now: Epoch seconds.
            interval_seconds: How often agents send a frame that do as the head says.
        """
        changed = []
        for member in self.members.values():
            interval = member.interval_seconds or interval_seconds
            state = state_of(now - member.seen, interval)
            may_be_back = self._may_be_back(member, now)
            member.is_silent = state != "healthy" and not may_be_back
            if member.is_elsewhere:  # the other head says what becomes of it
                member.state = member.abroad.state(member.seen, now, interval)
                continue
            if state == member.state or (
                state != "healthy" and (may_be_back or is_undecided(self.asked, member.seen, now))
            ):
                continue
            changed.append((member, member.state))
            member.state = state
            member.lost_since = member.seen if state == "lost" else None
        return changed

    def _may_be_back(self, member: Member, now: float) -> bool:
        """Whether a node is silent only because this head was away, and its agent had no time yet to come back."""
        since = self.listening_since
        return since is not None and member.seen < since and now - since < RETURN_SECONDS

    def lost(self, member: Member, now: float) -> Finding:
        """Return the finding about a node that is lost."""
        seen = member.seen if member.lost_since is None else member.lost_since
        if member.is_elsewhere:
            seen = max(seen, member.abroad.seen)
        return node_lost(member.name, seen, now, was_stopped=member.has_left)

    def heard_elsewhere(self, member: Member, seen: float, frame: Frame | None = None) -> None:
        """Another head has got something from a node.

        Args:
            member: The node.
            seen: When.
            frame: Its newest readings, if they were asked for.
        """
        was_here = not member.is_elsewhere
        member.abroad.seen = max(member.abroad.seen, seen)
        if frame is not None:
            member.abroad.frame = frame._replace(node=node_of(member.stored))
        if was_here and member.is_elsewhere:
            member.clear_reports()

    def live(self) -> list[LiveNode]:
        """Every node with its newest frame, by name."""
        return list(self.one_by_one())

    def one_by_one(self) -> Iterator[LiveNode]:
        """The same, each taken apart when it is reached: others may get their turn in between."""
        self.looked.set()
        for member in sorted(self.members.values(), key=lambda member: natural_key(member.name)):
            yield self._alive(member)

    def _alive(self, member: Member) -> LiveNode:
        frame, seen = member.frame(self.layouts), member.seen
        is_elsewhere, abroad = member.is_elsewhere, member.abroad
        if is_elsewhere:
            seen = max(seen, abroad.seen)
            if abroad.frame is not None and (frame is None or frame.time < abroad.frame.time):
                frame = abroad.frame._replace(jobs=tuple(member.jobs.values()), health=member.health)
        return LiveNode(
            member.stored.id,
            member.name,
            member.state,
            member.connected,
            seen,
            frame,
            member.processes,
            [self.lost(member, seen)] if member.state == "lost" else member.findings,
            member.stored.labels,
            member.version,
            member.known,
            member.stored.host,
            member.stored.machine,
            member.xids,
            is_elsewhere,
            member.interval_seconds,
            member.has_left,
        )


def _checked(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events of the metadata that this version would take from an agent; an earlier one may have taken others."""
    for event in events:
        with suppress(*UNREADABLE):
            yield check_event(event)


def _devices(stored: Iterable[StoredGpu]) -> list[Device]:
    """The GPUs of a node in its order; where one took another's place, the one that was put there later."""
    found = {}
    for gpu in stored:
        with suppress(ValueError):
            found[gpu.label] = device_of(gpu.device)
    return list(found.values())


def node_of(stored: StoredNode) -> Node:
    """The node of the model that a stored one is."""
    known = {name: stored.facts[name] for name in Node._fields[1:] if name in stored.facts}
    known["numa_cpus"] = tuple(map(str, known.get("numa_cpus", ())))
    return Node(stored.name, **known)


def identity_of(document: Mapping[str, Any]) -> ProcessIdentity | None:
    """The process that an event speaks of, None when it speaks of none."""
    pid, owner = document.get("pid"), document.get("owner")
    if not isinstance(pid, int):
        return None
    owner = owner if isinstance(owner, dict) else {}
    command = document.get("command")
    return ProcessIdentity(
        pid,
        _number(document.get("parent_pid")),
        _time(document.get("start_time")),
        _text(document.get("name")),
        tuple(map(str, command)) if isinstance(command, list) else (),
        Owner(
            _text(owner.get("user")),
            _number(owner.get("uid")),
            _text(owner.get("job")),
            _text(owner.get("container")),
            _text(owner.get("pod")),
        ),
        _text(document.get("cgroup")),
    )


def _health_of(entries: Sequence[Any]) -> list[Health]:
    known = []
    for entry in entries:
        try:
            fields = {name: entry[name] for name in Health._fields if name in entry}
            fields["metrics"] = tuple(fields.get("metrics", ()))
            known.append(Health(**fields))
        except (TypeError, KeyError):
            continue
    return known


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
