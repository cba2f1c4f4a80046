"""Live state of all nodes: runs, newest frames, processes, jobs, findings and health."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from gpulse.cluster.head.message_decoder import FrameShapes
from gpulse.cluster.protocol.answers import NodeState
from gpulse.cluster.protocol.head_interface import LiveNode
from gpulse.cluster.wire_pb2 import Run as WireRun
from gpulse.diagnosis.rules.faults import node_lost
from gpulse.model.device import Device, Node
from gpulse.model.finding import (
    Finding,
    FindingKey,
    FindingSpan,
    finding_from_document,
    finding_key,
    start_finding_span,
    watched_seconds_of,
)
from gpulse.model.frame import Frame
from gpulse.model.frame_packing import device_from_subject, unpack_frame
from gpulse.model.job import JOB, JOB_END, Job, job_from_document
from gpulse.model.packed_columns import ColumnLayout, PackedFrame
from gpulse.model.process import Owner, ProcessIdentity
from gpulse.model.safe_text import natural_key
from gpulse.model.source_health import Health
from gpulse.model.xid import XID_EVENT, XidCounts, xid_from_document
from gpulse.store.event_decoder import JSON_ERRORS, check_event
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import Query, Store, StoredGpu, StoredNode

LATE_SECONDS = 5.0
LATE_INTERVALS = 5
LOST_SECONDS = 30.0
RECONNECT_SECONDS = 12.0
"""How long agents may take to reconnect to a head that was away: they try at least every ten seconds."""
_TSDB_DELAY_SECONDS = 10.0
"""Delay until a node of another head becomes visible here through the time-series database."""
_MAX_UNDECIDED_SECONDS = 20.0
"""A time-series database that does not answer is not waited for any longer."""
_MAX_CLOCK_AHEAD_SECONDS = 3.0
"""A node's clock may be ahead by this much: samples that are not newer than that may have come through this head."""


def node_state(silent_seconds: float, interval_seconds: float) -> NodeState:
    """Return the state of a node by how long it has been silent, given its sampling interval."""
    late = max(LATE_SECONDS, LATE_INTERVALS * interval_seconds)
    if silent_seconds >= max(LOST_SECONDS, 2 * late):
        return "lost"
    return "late" if silent_seconds >= late else "healthy"


class OtherHeadReport:
    """What other heads know of a node, read from a database that all heads write to."""

    def __init__(self) -> None:
        self.seen = 0.0
        """When another head last received something from the node."""
        self.frame: Frame | None = None
        """Its newest readings, if requested."""
        self.moved = False
        """Whether its agent said that it moves to another head."""

    def is_newer(self, seen: float) -> bool:
        """Return whether the node is at another head now, if this head last received something at `seen`."""
        return self.moved or self.seen > seen + _MAX_CLOCK_AHEAD_SECONDS

    def state(self, seen: float, now: float, interval_seconds: float) -> NodeState:
        """Return the state of a node at another head."""
        return node_state(max(0.0, now - max(seen, self.seen) - _TSDB_DELAY_SECONDS), interval_seconds)


def may_be_at_other_head(asked: float | None, seen: float, now: float) -> bool:
    """Return whether a node that left this head may still turn out to be at another one.

    Args:
        asked: When the database was last queried; None if there is none.
        seen: When this head last received something from the node.
        now: The current time.
    """
    return asked is not None and asked < seen + _TSDB_DELAY_SECONDS and now < seen + _MAX_UNDECIDED_SECONDS


log = logging.getLogger(__name__)

_FAST_SCOPES = frozenset({"gpu", "host"})
_JOB_EVENTS = frozenset({JOB, JOB_END, "agent_started", "agent_stopping"})
_MAX_JOBS = 4096
"""Maximum per node, to limit the head's memory."""
_MAX_PROCESSES = 16_384
"""Maximum per node, to limit the head's memory."""
_MAX_JOB_SECONDS = 7 * 86_400.0
_MAX_JOB_EVENTS = 20_000
"""Maximum number of job events that are read when the head starts."""
_MAX_XID_EVENTS = 20_000
_MAX_SPANS = 20_000
"""Maximum number of finding spans that are read when the head starts, newest first."""
_MAX_FINDINGS = 4096
"""Maximum per node, including recently ended findings."""
MAX_NODE_LAYOUT_BYTES = 64 << 20
"""Maximum memory of the layouts that a node has sent and used within `wire.LAYOUT_EXPIRY_SECONDS`. A node that replaces 128
processes on its GPUs every five seconds stays below it."""
MAX_NODE_RUNS = 50_000
"""Maximum number of runs of a node's agent: two weeks of one that crashes twice a minute."""
_LAYOUT_TEXT_FACTOR, _SUBJECT_BYTES = 6, 200
"""Measured memory of a decoded layout: so many times the size of its JSON, and so many bytes per subject."""


class RestorableStore(Store, Protocol):
    """The store of the previous head, with the last state of its nodes."""

    def latest(self, kind: str) -> Mapping[int, tuple[float, dict[str, Any]]]:
        """Return the last event of a kind, by node."""

    def seen(self, node: int) -> float | None:
        """Return when a node last sent something; None if unknown."""


class AgentRun:
    """One run of an agent: how far its frames were received and stored."""

    def __init__(self, node: int, last: int = 0) -> None:
        self.node = node
        self.received = last
        """Newest received frame, on disk or not."""
        self.durable = last
        """Newest frame on disk."""
        self.dropped = 0
        """How many frames its agent reported as lost."""
        self.killed = False
        """Whether the run was reported as killed."""
        self.other_head_last = 0
        """Another head has all frames up to this one, according to the agent."""
        self.damaged: set[tuple[int, int]] = set()
        """First and last frame of the damaged parts of the spool that were reported."""
        self.refused_at = -1
        """Value of `received` when frames were last refused."""

    def count_lost_by_head(self, announced: WireRun) -> int:
        """Return how many frames are missing that this head acknowledged to the agent; 0 or less if none.

        Args:
            announced: The run in the hello message of an agent to which this head acknowledged frames last.
        """
        return announced.elsewhere - max(self.received, announced.other_head_last, self.other_head_last)

    def find_new_damage(self, announced: WireRun) -> list[dict[str, Any]]:
        """Return the damaged parts of the agent's spool that were not reported yet, as details of events.

        Args:
            announced: The run in a hello message.
        """
        found = []
        for damage in announced.damaged:
            part = damage.first, damage.last
            if part in self.damaged:
                continue
            self.damaged.add(part)
            frames = max(0, damage.last + 1 - damage.first) if damage.first else None
            times = {"start": damage.start_us / 1e6 or None, "end": damage.end_us / 1e6 or None}
            found.append({"frames": frames, "first": damage.first, "last": damage.last, **times})
        return found


class FleetMember:
    """One node while the head runs."""

    def __init__(self, stored: StoredNode, seen: float) -> None:
        self.stored = stored
        self.seen = seen
        """When the node last sent something, on the head's clock."""
        self.state: NodeState = "healthy"
        self.connected = False
        self.has_left = False
        """Whether its agent was stopped normally and has not started since."""
        self.is_silent = False
        """Whether this head has received nothing from it for too long, connected or not."""
        self.other_head = OtherHeadReport()
        self.interval_seconds: float | None = None
        """The agent's own sampling interval; None if it uses the head's."""
        self.version = ""
        self.shift_us = 0
        self.processes: dict[int, ProcessIdentity] = {}
        self.jobs: dict[str, Job] = {}
        self.xids = XidCounts()
        self.findings: Sequence[Finding] = ()
        """Findings that its agent reported last, each with its start."""
        self.spans: dict[FindingKey, FindingSpan] = {}
        """Spans of its findings, including recently ended ones."""
        self.lost_since: float | None = None
        """When it was last seen, once it is recorded as lost."""
        self.health: tuple[Health, ...] = ()
        self.last_devices: tuple[Device, ...] = ()
        """Its GPUs according to the stored metadata or another head, used while there is no frame."""
        self._newest: tuple[PackedFrame, int] | None = None
        self._slow: PackedFrame | None = None
        self._decoded: Frame | None = None

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.stored.name

    @property
    def is_at_other_head(self) -> bool:
        """Whether the node is at another head."""
        return not self.is_here and self.other_head.is_newer(self.seen)

    @property
    def is_here(self) -> bool:
        """Whether the node sends to this head; a dead connection may look open for a while, so silence counts, too."""
        return self.connected and not self.is_silent

    @property
    def knows_processes(self) -> bool:
        """Whether a frame with processes was received; before that, no process does not mean that there is none."""
        return self._slow is not None

    def clear_reports(self) -> None:
        """Clear what the agent reported to this head, because it is outdated."""
        self.processes, self.jobs, self.findings, self.health = {}, {}, (), ()

    def take(self, packed: PackedFrame, layouts: Mapping[int, ColumnLayout], shift_us: int) -> None:
        """Set the newest frame."""
        self._newest = (packed, shift_us)
        self._decoded = None
        for name, _ in packed.blocks:
            if layouts[name].scope not in _FAST_SCOPES:
                self._slow = packed
                break

    @property
    def newest(self) -> tuple[PackedFrame, int] | None:
        """The newest frame as it was received, and the microseconds to add to its time; None if there is none."""
        return self._newest

    @property
    def newest_slow(self) -> PackedFrame | None:
        """The newest frame with disks, network and processes, as it was received; None if there is none."""
        return self._slow

    def layouts(self) -> set[int]:
        """Return the layouts that its newest frame refers to."""
        newest = self._newest[0] if self._newest else None
        return {block.layout for frame in (newest, self._slow) if frame for block in frame.blocks}

    def frame(self, layouts: Mapping[int, ColumnLayout]) -> Frame | None:
        """Return the newest frame, decoded on first use."""
        if self._decoded is None and self._newest is not None:
            packed, shift_us = self._newest
            try:
                frame = unpack_frame(
                    model_node(self.stored),
                    layouts,
                    packed,
                    slow=self._slow,
                    identities=self.processes,
                    jobs=self.jobs,
                    shift_us=shift_us,
                )
            except (ValueError, LookupError, TypeError, OverflowError) as error:  # affects this node only
                log.error("cannot read the newest frame of %s: %s", self.name, error)
                self._newest = None
                return None
            self._decoded = frame._replace(health=self.health)
        return self._decoded

    def apply_events(self, events: Iterable[Mapping[str, Any]], time: float) -> None:
        """Apply the events of one frame, as decoded by `decode_events`."""
        for event in events:
            self._apply_event(event, time)

    def _apply_event(self, document: Mapping[str, Any], time: float) -> None:
        match document.get("event"):
            case "process":
                identity = process_identity(document)
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
                    job = job_from_document(document)
                    if job.id in self.jobs or len(self.jobs) < _MAX_JOBS:
                        self.jobs[job.id] = job
            case "job_end":
                self.jobs.pop(str(document.get("job")), None)
            case "xid":
                xid = xid_from_document(document)
                if xid is not None:
                    self.xids.add(xid, shift_seconds=self.shift_us / 1e6)
            case "findings":
                self._reported(document["findings"], time, watched_seconds_of(document))
            case "health":
                entries = document.get("entries")
                self.health = tuple(_parse_health(entries)) if isinstance(entries, list) else ()

    def _reported(
        self, findings: Sequence[Mapping[str, Any]], time: float, watched_seconds: float | None
    ) -> None:
        """Set the findings that an agent reports, keeping the start of those it reported before."""
        reported: dict[FindingKey, Mapping[str, Any]] = {}
        for finding in findings[:_MAX_FINDINGS]:
            reported.setdefault(finding_key(finding), finding)
        spans = {
            key: span.absent(time, watched_seconds) for key, span in self.spans.items() if key not in reported
        }
        if len(spans) > _MAX_FINDINGS:
            spans = {key: span for key, span in spans.items() if not span.is_over}
        for key, finding in reported.items():
            before = self.spans.get(key)
            spans[key] = (before and before.reported(finding, time)) or start_finding_span(finding, time)
        self.spans = spans
        kept = [
            finding
            for finding in self.findings
            if finding.key not in reported and finding.key in spans and not spans[finding.key].is_over
        ]
        self.findings = [
            *(
                finding_from_document({**finding, "start": spans[key].start})
                for key, finding in reported.items()
            ),
            *kept,
        ]


class Fleet:
    """All nodes of this head."""

    def __init__(
        self,
        nodes: Mapping[int, StoredNode],
        runs: Mapping[bytes, AgentRun],
        layouts: dict[int, ColumnLayout],
    ) -> None:
        self.register = NodeRegistry(nodes.values())
        self.members: dict[int, FleetMember] = {}
        self.runs = dict(runs)
        self.layouts = layouts
        """Shared with the store, which decodes frames with them."""
        self.shapes = FrameShapes(layouts)
        """Valid combinations of blocks in a frame."""
        self.asked: float | None = None
        """When a database was last queried for nodes of other heads, on the head's clock; None if there is none."""
        self.looked = asyncio.Event()
        """Set when a client reads the nodes."""
        self.listening_since: float | None = None
        """When this head started to listen, or resumed after it was suspended, on its clock."""
        self.run_counts = Counter(run.node for run in self.runs.values())
        """Number of runs by node."""
        self._layout_bytes = Counter[int]()
        """Memory of layouts by node."""
        self._layout_senders: dict[int, tuple[int, int]] = {}
        """The node that sent a layout first, and its memory, by layout."""
        self._used: dict[int, float] = {}
        """When a frame last referred to each layout, on the head's clock."""

    def member(self, stored: StoredNode, now: float) -> FleetMember:
        """Return the live state of a node; a new node counts as seen now."""
        self.register.put(stored)
        member = self.members.get(stored.id)
        if member is None:
            member = self.members[stored.id] = FleetMember(stored, now)
        member.stored = stored
        return member

    def has_layout_room(self, node: int, text_bytes: int, subjects: int = 0) -> bool:
        """Return whether a node may add a layout of this size."""
        size = _LAYOUT_TEXT_FACTOR * text_bytes + _SUBJECT_BYTES * subjects
        return self._layout_bytes[node] + size <= MAX_NODE_LAYOUT_BYTES

    def add_layout(self, name: int, layout: ColumnLayout, node: int, text_bytes: int) -> None:
        """Add a layout, and count its memory for the node that sent it."""
        size = _LAYOUT_TEXT_FACTOR * text_bytes + _SUBJECT_BYTES * len(layout.subjects)
        self.layouts[name] = layout
        self._layout_senders[name] = node, size
        self._layout_bytes[node] += size

    def add_run(self, name: bytes, run: AgentRun) -> None:
        """Add a run of a node's agent."""
        self.runs[name] = run
        self.run_counts[run.node] += 1

    def used(self, frames: Sequence[PackedFrame], now: float) -> None:
        """Record that frames referred to their layouts."""
        for frame in frames:
            for name, _ in frame.blocks:
                self._used[name] = now

    def forget_layouts(self, before: float, now: float) -> list[int]:
        """Drop layouts that no frame referred to since a time: every change of a node's processes creates one."""
        needed = {layout for member in self.members.values() for layout in member.layouts()}
        old = [
            layout
            for layout in self.layouts
            if layout not in needed and self._used.setdefault(layout, now) < before
        ]
        for layout in old:
            del self.layouts[layout]
            self._used.pop(layout, None)
            node, size = self._layout_senders.pop(layout, (0, 0))
            self._layout_bytes[node] -= size
        if old:
            self.shapes.clear()
        return old

    def restore(self, store: RestorableStore, now: float) -> None:
        """Restore the nodes as the previous head left them.

        A node that was not lost counts as healthy until its agent has had time to reconnect, because no head was
        listening in between.
        """
        self.listening_since = now
        spans = self._spans(store, now)
        living = store.processes(Query(now, now + 1.0))
        findings, health = store.latest("findings"), store.latest("health")
        gpus = store.gpus()
        jobs = self._jobs(store, now)
        for node in store.nodes().values():
            member = self.member(node, store.seen(node.id) or node.first_seen)
            member.apply_events(_valid_events(jobs.get(node.id, ())), now)
            member.spans = spans.get(node.id, {})
            lost = member.spans.pop(("node_lost", None, ""), None)
            member.lost_since = lost.start if lost is not None and lost.end is None else None
            member.last_devices = tuple(_latest_devices(gpu for gpu in gpus if gpu.node == node.id))
            member.state = "healthy" if member.lost_since is None else "lost"
            for process in living:
                identity = process_identity(process.identity) if process.node == node.id else None
                if identity is not None:
                    member.processes[identity.pid] = identity
            for event, latest in (("findings", findings), ("health", health)):
                if node.id in latest:
                    time, detail = latest[node.id]
                    member.apply_events(_valid_events([{**detail, "event": event}]), time)
        self._restore_xids(store, now)

    def _restore_xids(self, store: RestorableStore, now: float) -> None:
        """Count the stored Xid errors, so that counters survive restarts of agents and heads."""
        query = Query(0.0, now + 1.0, kinds=frozenset({XID_EVENT}), limit=_MAX_XID_EVENTS)
        for event in store.events(query):
            member = self.members.get(event.node or 0)
            if member is not None:
                member.apply_events(_valid_events([{**event.detail, "event": XID_EVENT}]), event.time)
        for member in self.members.values():
            member.xids.update_devices(member.last_devices)

    @staticmethod
    def _spans(store: RestorableStore, now: float) -> dict[int, dict[FindingKey, FindingSpan]]:
        """Return the newest span of each finding, by node."""
        spans: dict[int, dict[FindingKey, FindingSpan]] = {}
        for stored in store.findings(Query(0.0, now + 1.0, limit=_MAX_SPANS)):
            if stored.node is not None:
                spans.setdefault(stored.node, {})[stored.finding.key] = stored.span
        return spans

    @staticmethod
    def _jobs(store: RestorableStore, now: float) -> dict[int, list[dict[str, Any]]]:
        """Return the events about jobs and agent starts by node, oldest first."""
        reported: dict[int, list[dict[str, Any]]] = {}
        query = Query(
            now - _MAX_JOB_SECONDS,
            now + 1.0,
            nodes=frozenset(store.nodes()),
            kinds=frozenset(_JOB_EVENTS),
            limit=_MAX_JOB_EVENTS,
        )
        for event in store.events(query):
            if event.node is not None:
                reported.setdefault(event.node, []).append({**event.detail, "event": event.kind})
        return reported

    def clock_was_set(self, seconds: float) -> None:
        """Shift all times by a step of the head's clock, so that no node seems silent because of it."""
        for member in self.members.values():
            member.seen += seconds
        if self.listening_since is not None:
            self.listening_since += seconds

    def check(self, now: float, interval_seconds: float) -> list[tuple[FleetMember, NodeState]]:
        """Return the nodes whose state has changed, each with its state before.

        Args:
            now: Epoch seconds.
            interval_seconds: The head's sampling interval, for agents without their own.
        """
        changed = []
        for member in self.members.values():
            interval = member.interval_seconds or interval_seconds
            state = node_state(now - member.seen, interval)
            may_be_back = self._may_be_back(member, now)
            member.is_silent = state != "healthy" and not may_be_back
            if member.is_at_other_head:  # the other head reports its changes
                member.state = member.other_head.state(member.seen, now, interval)
                continue
            if state == member.state or (
                state != "healthy" and (may_be_back or may_be_at_other_head(self.asked, member.seen, now))
            ):
                continue
            changed.append((member, member.state))
            member.state = state
            member.lost_since = member.seen if state == "lost" else None
        return changed

    def _may_be_back(self, member: FleetMember, now: float) -> bool:
        """Return whether a node is silent only because this head was away and its agent has not reconnected yet."""
        since = self.listening_since
        return since is not None and member.seen < since and now - since < RECONNECT_SECONDS

    def lost(self, member: FleetMember, now: float) -> Finding:
        """Return the finding about a lost node."""
        seen = member.seen if member.lost_since is None else member.lost_since
        if member.is_at_other_head:
            seen = max(seen, member.other_head.seen)
        return node_lost(member.name, seen, now, was_stopped=member.has_left)

    def update_from_other_head(self, member: FleetMember, seen: float, frame: Frame | None = None) -> None:
        """Record that another head received something from a node.

        Args:
            member: The node.
            seen: When.
            frame: Its newest readings, if requested.
        """
        was_here = not member.is_at_other_head
        member.other_head.seen = max(member.other_head.seen, seen)
        if frame is not None:
            member.other_head.frame = frame._replace(node=model_node(member.stored))
        if was_here and member.is_at_other_head:
            member.clear_reports()

    def live(self) -> list[LiveNode]:
        """Return every node with its newest frame, by name."""
        return list(self.iter_live_nodes())

    def iter_live_nodes(self) -> Iterator[LiveNode]:
        """Yield every node, each decoded when it is reached, so that other tasks can run in between."""
        self.looked.set()
        for member in sorted(self.members.values(), key=lambda member: natural_key(member.name)):
            yield self.live_node(member)

    def find_node(self, name: str) -> LiveNode | None:
        """Return one node with its newest frame; None if there is no node with this name."""
        member = next((member for member in self.members.values() if member.name == name), None)
        return None if member is None else self.live_node(member)

    def live_node(self, member: FleetMember) -> LiveNode:
        """Return a node with its newest frame."""
        frame, seen = member.frame(self.layouts), member.seen
        is_at_other_head, other_head = member.is_at_other_head, member.other_head
        if is_at_other_head:
            seen = max(seen, other_head.seen)
            if other_head.frame is not None and (frame is None or frame.time < other_head.frame.time):
                frame = other_head.frame._replace(jobs=tuple(member.jobs.values()), health=member.health)
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
            member.last_devices,
            member.stored.host,
            member.stored.machine,
            member.xids,
            is_at_other_head,
            member.interval_seconds,
            member.has_left,
            model_node(member.stored),
        )


def _valid_events(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the stored events that this version accepts; an earlier version may have stored others."""
    for event in events:
        with suppress(*JSON_ERRORS):
            yield check_event(event)


def _latest_devices(stored: Iterable[StoredGpu]) -> list[Device]:
    """Return the GPUs of a node in order; of several with the same index, the newest."""
    found = {}
    for gpu in stored:
        with suppress(ValueError):
            found[gpu.label] = device_from_subject(gpu.device)
    return list(found.values())


def model_node(stored: StoredNode) -> Node:
    """Return a stored node as a `Node` of the model."""
    known = {name: stored.facts[name] for name in Node._fields[1:] if name in stored.facts}
    known["numa_cpus"] = tuple(map(str, known.get("numa_cpus", ())))
    return Node(stored.name, **known)


def process_identity(document: Mapping[str, Any]) -> ProcessIdentity | None:
    """Return the process in an event; None if there is none."""
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


def _parse_health(entries: Sequence[Any]) -> list[Health]:
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
