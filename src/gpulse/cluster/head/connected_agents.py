"""Connected agents: the stream of each one, and its registration when it connects.

A stream has a share of the head's time, the offset of the agent's clock, and messages for the agent. Registration decodes
the hello message, finds the node, and records what the agent reports about its runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol
from urllib.parse import unquote

import grpc

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.head.fleet import MAX_NODE_RUNS, AgentRun, Fleet, FleetMember
from gpulse.cluster.head.group_commit import Committer, FactRecorder
from gpulse.cluster.head.message_decoder import CallRefusedError, decode_hello
from gpulse.cluster.protocol.load_limits import LoopShare
from gpulse.cluster.wire_pb2 import AgentMessage, Durable, HeadMessage, Hello, Settings, Welcome
from gpulse.model.session import MAX_INTERVAL_MS
from gpulse.store.node_registry import node_fact
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

_OFFSET_WINDOW_US = 300_000_000
"""Clock offsets are forgotten after one to two of these windows, because clocks drift."""
STREAM_SHARE = 0.05
"""Part of the head's time for each agent; one frame per second needs a four-hundredth of it. Those that send more are read more
slowly."""
EVENT_SECONDS = 50e-6
"""Estimated time of storing an event."""
_MESSAGE_SECONDS, _BYTE_SECONDS = 100e-6, 5e-9
"""Estimated time of receiving a message and a byte of it."""
_TAKEOVER_SECONDS = 10.0
"""An agent that has been silent for this long is replaced by another agent of its machine."""
OLDER_COPY = "older copy"
"""Reason of a gap: the head's data directory was replaced with an older copy."""
_IS_COPY = "the data directory of this head is an older copy"


def format_peer(peer: str) -> str:
    """Return the address of a caller as people write it: gRPC writes `ipv6:%5B::1%5D:4711`."""
    return unquote(peer).partition(":")[2] or peer


class CallContext(Protocol):
    """The context that gRPC passes to a handler."""

    def peer(self) -> str:
        """Return the address of the caller."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error."""

    async def write(self, message: bytes) -> None:
        """Send one message."""


class AgentStream:
    """Stream of one connected agent."""

    def __init__(self, member: FleetMember, hello: Hello, task: asyncio.Task[None]) -> None:
        self.member = member
        self.instance = hello.instance
        self.boot = hello.boot
        self.boots = {run.id: run.boot for run in hello.runs}
        self.answers_stacks = hello.stacks
        """Whether the agent answers requests for stacks; older versions ignore them."""
        self.task = task
        self.share = LoopShare(STREAM_SHARE)
        self.refused_layouts: set[int] = set()
        self.has_full_layouts = False
        """Whether it was reported that the layouts of this agent's node are too large."""
        self.refusals = 0
        """How often something from this agent was refused."""
        self.reason: tuple[grpc.StatusCode, str] | None = None
        """Why the head ends the stream."""
        self._offsets: tuple[int | None, int | None] = (None, None)
        self._window_us = 0
        self._due: dict[bytes, int] = {}
        self._messages: list[HeadMessage] = []
        self._wake = asyncio.Event()

    def charge(self, size_bytes: int, events: int = 0) -> None:
        """Count the time that a message takes."""
        self.share.charge(_MESSAGE_SECONDS + size_bytes * _BYTE_SECONDS + events * EVENT_SECONDS)

    def heard(self, now_us: int, sent_us: int) -> None:
        """Update the clock offset with a message that was sent at a time on the agent's monotonic clock."""
        before, latest = self._offsets
        if now_us - self._window_us >= _OFFSET_WINDOW_US:
            before, latest, self._window_us = latest, None, now_us
        offset = now_us - sent_us
        self._offsets = before, offset if latest is None else min(latest, offset)

    def clock_was_set(self, step_us: int) -> None:
        """Follow a step of the head's clock. To measure again would take the delay of one message for the offset."""
        before, latest = self._offsets
        self._offsets = (
            None if before is None else before + step_us,
            None if latest is None else latest + step_us,
        )
        self._window_us += step_us

    @property
    def clock_offset_us(self) -> int | None:
        """Head's time minus agent's monotonic time: the minimum of the last minutes, which had the least delay."""
        before, latest = self._offsets
        if before is None or latest is None:
            return latest if before is None else before
        return min(before, latest)

    def acknowledge(self, run: bytes, sequence: int) -> None:
        """Acknowledge the frames of a run up to a number."""
        self._due[run] = sequence
        self._wake.set()

    def send_message(self, message: HeadMessage) -> None:
        """Send another message to the agent."""
        self._messages.append(message)
        self._wake.set()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the stream."""
        self.reason = (code, reason)
        self.task.cancel()

    def sender_ended(self, sender: asyncio.Task[None]) -> None:
        """End the stream when its sending task failed."""
        if not sender.cancelled() and sender.exception() is not None:
            log.warning("cannot write to %s: %s", self.member.name, sender.exception())
            self.end(grpc.StatusCode.UNAVAILABLE, "cannot write to the connection")

    async def send(self, context: CallContext) -> None:
        """Send pending messages until cancelled."""
        acknowledgement = HeadMessage(durable=Durable())
        durable = acknowledgement.durable
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            due, self._due = self._due, {}
            for message in messages:
                await context.write(message.SerializeToString())
            for run, last in due.items():
                durable.run, durable.sequence, durable.shift_us = run, last, self.member.shift_us
                await context.write(acknowledgement.SerializeToString())


class AgentRegistration:
    """Registers agents by their hello messages."""

    def __init__(
        self,
        fleet: Fleet,
        streams: dict[int, AgentStream],
        facts: FactRecorder,
        committer: Callable[[], Committer],
        *,
        head_id: str,
        now: Callable[[], float],
        settings: Callable[[], Settings],
    ) -> None:
        """Prepare to register agents.

        Args:
            fleet: The nodes.
            streams: Gets the streams of agents, by node ID.
            facts: Writes facts and events.
            committer: Agents are refused while it fails.
            head_id: ID of this head's store.
            now: The head's clock.
            settings: Returns the sampling settings for agents.
        """
        self._fleet = fleet
        self._streams = streams
        self._facts = facts
        self._committer = committer
        self._head_id = head_id
        self._now = now
        self._settings = settings

    def greet(self, message: AgentMessage, peer: str) -> AgentStream:
        """Register the agent that sends a hello message, and return its stream.

        Raises:
            CallRefusedError: The agent is refused.
        """
        if message.WhichOneof("kind") != "hello":
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello message"
            )
        trouble = self._committer().trouble
        if trouble is not None:
            raise CallRefusedError(
                grpc.StatusCode.UNAVAILABLE, f"the head's storage is failing: {trouble.message}"
            )
        hello = message.hello
        facts = decode_hello(hello)
        now = self._now()
        stored = self._known(hello, facts, now)
        member = self._fleet.member(stored, now)
        _check_runs(self._fleet, member, hello)
        self._take_over(member, hello)
        member.seen, member.connected, member.version = now, True, hello.version
        member.is_silent = member.other_head.moved = False
        member.interval_seconds = min(hello.interval_ms, MAX_INTERVAL_MS) / 1000 or None
        if hello.HasField("shift_us"):  # frames that another head has, too, must have the same times here
            member.shift_us = hello.shift_us
        for run in hello.runs:
            self._announced(run, stored, hello, now)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  handlers run in tasks
        stream = AgentStream(member, hello, task)
        stream.heard(round(now * 1e6), hello.monotonic_us)
        self._streams[stored.id] = stream
        log.info("%s is connected (%s, gpulse %s)", member.name, peer, hello.version)
        return stream

    def _known(self, hello: Hello, facts: Mapping[str, Any], now: float) -> StoredNode:
        """Return the node that sent a hello message, registered if it is new."""
        register = self._fleet.register
        known = register.find(hello.host, hello.machine)
        node = known or register.new(hello.host, hello.machine, now)
        node = node._replace(
            host=hello.host, machine=hello.machine, facts=dict(facts), labels=dict(hello.labels)
        )
        if node != known or node.id in register.other_head_ids:
            self._facts.note("node", **node_fact(node))
            register.other_head_ids.discard(node.id)
        if known is None:
            register.put(node)
            self._facts.event("node_joined", node.id, name=node.name)
            namesakes = register.namesakes(node)
            if namesakes:
                text = f"several machines have the host name {node.host}; one of them is shown as {node.name}"
                log.warning("%s", text)
                self._facts.event("name_conflict", node.id, name=node.name, host=node.host)
                for other in namesakes:
                    if other.id in self._streams:
                        self._streams[other.id].send_message(HeadMessage(warning=text))
        return node

    def _take_over(self, member: FleetMember, hello: Hello) -> None:
        """End an earlier stream of the same machine, or refuse the new one."""
        other = self._streams.get(member.stored.id)
        if other is None:
            return
        if other.instance != hello.instance and self._now() - member.seen < _TAKEOVER_SECONDS:
            raise CallRefusedError(
                grpc.StatusCode.ALREADY_EXISTS,
                f"another agent is already connected as {member.name}; stop that agent, or start this one with another --node-name",
            )
        other.end(grpc.StatusCode.ABORTED, "the agent opened a new connection")

    def _announced(self, run: Any, node: StoredNode, hello: Hello, now: float) -> None:
        known = self._fleet.runs.get(run.id)
        if known is None:
            self._fleet.add_run(run.id, AgentRun(node.id))
            fields = {"version": hello.version, "pid": hello.pid, "boot": run.boot or hello.boot}
            self._facts.note("run", run=run.id.hex(), node=node.id, time=now, **fields)
        elif not known.node:  # the log has its frames, but the fact that it began was lost with the metadata
            known.node = node.id
            fields = {"version": hello.version, "pid": hello.pid, "boot": run.boot or hello.boot}
            self._facts.note("run", run=run.id.hex(), node=node.id, time=now, **fields)
        elif known.node != node.id:
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "this agent's state directory was copied from another node and contains that node's frames; remove the directory",
            )
        state = self._fleet.runs[run.id]
        if hello.head == self._head_id:
            missing = state.count_lost_by_head(run)
            if missing > 0:
                log.error("%s: acknowledged frames missing: %d (%s)", node.name, missing, _IS_COPY)
                detail = {"frames": missing, "before": run.elsewhere + 1, "reason": OLDER_COPY}
                self._facts.event("gap", node.id, run=run.id.hex(), **detail)
        if run.elsewhere > state.received:  # another head has the rest, and the gaps are recorded there
            state.other_head_last = max(state.other_head_last, run.elsewhere)
            state.dropped = max(state.dropped, run.dropped_elsewhere)
        if (
            run.ended_badly and not state.killed
        ):  # repeated in every hello message until the head has acknowledged it
            state.killed = True
            stored = max(0, state.durable - run.last) if run.last else 0  # here, but not in the spool
            lost_at_most = max(0, run.lost_at_most - stored)
            self._facts.event("run_killed", node.id, run=run.id.hex(), lost_at_most=lost_at_most)
        for damage in state.find_new_damage(run):
            log.warning("%s: part of the agent's spool was damaged: %s", node.name, damage)
            self._facts.event("spool_damaged", node.id, run=run.id.hex(), **damage)
        if not run.first_kept:  # otherwise the frame numbers show it exactly
            self.record_dropped(node.id, run)

    def welcome(self, stream: AgentStream, hello: Hello) -> HeadMessage:
        """Return the answer to a hello message."""
        welcome = Welcome(
            protocol=wire.PROTOCOL,
            version=__version__,
            head=self._head_id,
            node=stream.member.name,
            settings=self._settings(),
            durable=[Durable(run=run.id, sequence=self._fleet.runs[run.id].durable) for run in hello.runs],
        )
        if stream.member.name != hello.host:
            text = f"another machine also has the host name {hello.host}; this one is shown as {stream.member.name}"
            stream.send_message(HeadMessage(warning=text))
        return HeadMessage(welcome=welcome)

    def record_dropped(self, node: int, run: Any) -> None:
        """Record how many frames of a run the agent has lost in total."""
        state = self._fleet.runs.get(run.id)
        if state is not None and run.dropped > state.dropped:
            self._facts.event("frames_dropped", node, run=run.id.hex(), frames=run.dropped - state.dropped)
            state.dropped = run.dropped


def _check_runs(fleet: Fleet, member: FleetMember, hello: Hello) -> None:
    """Limit the number of runs of a node, which the head keeps in memory.

    Raises:
        CallRefusedError: There would be too many.
    """
    known = fleet.run_counts[member.stored.id]
    if known + sum(run.id not in fleet.runs for run in hello.runs) > max(known, MAX_NODE_RUNS):
        raise CallRefusedError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"agents of {member.name} have announced more than {MAX_NODE_RUNS:,} runs; "
            "find out why they restart so often, or start this one with another --node-name",
        )
