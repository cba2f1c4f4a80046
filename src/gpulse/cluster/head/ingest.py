"""Serve the streams of agents: from hello to goodbye, and acknowledgements once frames are on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc

from gpulse.cluster.head.connected_agents import AgentRegistration, AgentStream, format_peer
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.frame_receiver import FrameReceiver
from gpulse.cluster.head.group_commit import Committer, FactRecorder
from gpulse.cluster.head.message_decoder import CallRefusedError, check_run, decode_message
from gpulse.cluster.head.stack_requests import StackRequests
from gpulse.cluster.wire_pb2 import AgentMessage, HeadMessage, Settings
from gpulse.store.incomplete_answers import BackendOutage
from gpulse.store.log.record_payloads import LogEntry

log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_MAX_PAUSE_SECONDS = 1.0


class AccessCheck(Protocol):
    """Decides whether a call is allowed."""

    async def __call__(
        self, peer: str, metadata: Iterable[tuple[str, str | bytes]], *, changes: bool
    ) -> str | None:
        """Return why a call is refused; None if it is allowed.

        Args:
            peer: Address of the caller as gRPC writes it.
            metadata: Metadata of the call.
            changes: Whether the call changes anything, or only reads.
        """


class Ingest:
    """Serves the streams of agents."""

    def __init__(
        self,
        fleet: Fleet,
        committer: Callable[[], Committer],
        *,
        head_id: str,
        now: Callable[[], float],
        settings: Callable[[], Settings],
        allowed: AccessCheck,
    ) -> None:
        """Prepare to serve streams.

        Args:
            fleet: The nodes.
            committer: Makes entries durable.
            head_id: ID of this head's store.
            now: The head's clock.
            settings: Returns the sampling settings for agents.
            allowed: Decides who may send frames.
        """
        self._fleet = fleet
        self._committer = committer
        self._now = now
        self._settings = settings
        self._allowed = allowed
        self.streams: dict[int, AgentStream] = {}
        """Streams by node ID."""
        self._facts = FactRecorder(committer, now)
        self._registration = AgentRegistration(
            fleet, self.streams, self._facts, committer, head_id=head_id, now=now, settings=settings
        )
        self._receiver = FrameReceiver(fleet, self._facts, committer, now=now)
        self.stack_requests = StackRequests(lambda: self.streams)
        """Requests to agents for stacks of their processes."""
        self.version = 0
        """Grows with every batch."""
        self._change = asyncio.Event()

    @property
    def frames(self) -> int:
        """Number of frames received since the head started."""
        return self._receiver.frames

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Handle one agent from hello to goodbye."""
        refused = await self._allowed(context.peer(), context.invocation_metadata() or (), changes=True)
        if refused is not None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refused)
        iterator = aiter(requests)
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                first = await anext(iterator)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the agent sent no hello message")
        peer = format_peer(context.peer())
        try:
            message = decode_message(AgentMessage, first)
            stream = self._registration.greet(message, peer)
        except CallRefusedError as refusal:
            log.warning("refused %s: %s", peer, refusal.reason)
            await context.abort(refusal.code, refusal.reason)
        sender: asyncio.Task[None] | None = None
        try:
            # One at a time: gRPC does not accept a message while it writes another.
            await context.write(self._registration.welcome(stream, message.hello).SerializeToString())
            sender = asyncio.create_task(stream.send(context))
            sender.add_done_callback(stream.sender_ended)
            await self._listen(stream, iterator)
        except CallRefusedError as refusal:
            log.warning("closed the connection to %s: %s", stream.member.name, refusal.reason)
            await context.abort(refusal.code, refusal.reason)
        except asyncio.CancelledError:
            if stream.reason is None:
                raise
            await context.abort(*stream.reason)
        finally:
            if sender is not None:
                sender.cancel()
            if self.streams.get(stream.member.stored.id) is stream:
                del self.streams[stream.member.stored.id]
                self.stack_requests.disconnected(stream.member.stored.id)
                stream.member.connected = False

    async def _listen(self, stream: AgentStream, messages: AsyncIterator[bytes]) -> None:
        committer = self._committer()
        async for data in messages:
            message = decode_message(AgentMessage, data)
            stream.member.seen = self._now()
            stream.charge(len(data))
            match message.WhichOneof("kind"):
                case "batch":
                    before = self._receiver.frames
                    self._receiver.receive_batch(stream, message.batch)
                    if self._receiver.frames != before:
                        self.changed()
                case "layout":
                    self._receiver.receive_layout(stream, message.layout.text)
                case "dropped":
                    check_run(message.dropped)
                    self._registration.record_dropped(stream.member.stored.id, message.dropped)
                case "stacks":
                    self.stack_requests.answered(stream.member.stored.id, message.stacks)
                case "goodbye":
                    stream.member.other_head.moved = message.goodbye.moved
                    log.info(
                        "%s %s",
                        stream.member.name,
                        "moved to another head"
                        if message.goodbye.moved
                        else "disconnected (its agent stopped)",
                    )
                    return
            await committer.room()
            while wait := stream.share.wait_seconds():  # its agent waits, too, because the connection is full
                await asyncio.sleep(min(wait, _MAX_PAUSE_SECONDS))
                stream.member.seen = self._now()  # it is not late: the head does not read

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact to the log with the next commit."""
        self._facts.note(fact, **fields)

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write an event to the log."""
        self._facts.event(kind, node, **detail)

    def committed(self, entries: Sequence[LogEntry]) -> None:
        """Acknowledge the frames that are on disk."""
        reached: dict[bytes, int] = {}
        for entry in entries:
            if entry.batch is not None:
                reached[entry.batch.run] = entry.batch.last
        for name, last in reached.items():
            run = self._fleet.runs[name]
            run.durable = max(run.durable, last)
            run.received = max(run.received, last)
            stream = self.streams.get(run.node)
            if stream is not None:
                stream.acknowledge(name, run.durable)

    def failed(self, trouble: BackendOutage) -> None:
        """Forget frames that could not be written, and disconnect the agents, which keep them and reconnect."""
        for run in self._fleet.runs.values():
            run.received = run.durable
        for stream in list(self.streams.values()):
            stream.end(grpc.StatusCode.UNAVAILABLE, f"the head's storage is failing: {trouble.message}")

    def disconnect_all(self) -> None:
        """Disconnect every agent because the head stops."""
        for stream in list(self.streams.values()):
            stream.end(grpc.StatusCode.UNAVAILABLE, "the head is stopping")

    def changed(self) -> None:
        """Notify waiting clients of a change."""
        self.version += 1
        self._change.set()

    async def wait_for_change(self) -> None:
        """Wait until the next change."""
        self._change.clear()
        await self._change.wait()

    def clock_was_set(self, seconds: float) -> None:
        """Add a step of the head's clock to the clock offsets of all agents."""
        for stream in self.streams.values():
            stream.clock_was_set(round(seconds * 1e6))

    def settings_changed(self) -> None:
        """Send the sampling settings to every agent."""
        for stream in self.streams.values():
            stream.send_message(HeadMessage(settings=self._settings()))
