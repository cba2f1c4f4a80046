"""What agents send: checked, deduplicated, handed to the commit, and acknowledged when it is on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.head.commit import Committer
from gpulse.cluster.head.connection import Allowed, Stream, shown_peer
from gpulse.cluster.head.decode import (
    MAX_BATCH_FRAMES,
    MAX_TIME_US,
    DecodedBatch,
    Refused,
    check_numbers,
    check_run,
    decode_frames,
    decode_hello,
    decode_layout,
    invalid,
    read_message,
    shown,
    unknown_metrics,
    unzipped,
)
from gpulse.cluster.head.fleet import Fleet, Member, Run
from gpulse.cluster.wire_pb2 import AgentMessage, Durable, HeadMessage, Hello, Settings, Welcome
from gpulse.model.columns import Layout, PackedFrame, layout_id
from gpulse.model.session import MAX_INTERVAL_MS
from gpulse.store.log.records import Batch, Entry, FrameEvents
from gpulse.store.outage import Outage
from gpulse.store.registry import node_fact
from gpulse.store.store import StoredNode

log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_SILENT_SECONDS = 10.0
"""An agent that was silent for so long does not keep another one of its machine out."""
_SKEW_SECONDS = 2.0
"""Clocks that differ by less are taken to agree: the agent's own times are more exact than the delay of a message."""
_SKEW_CHANGE_SECONDS = 0.5
MAX_UNKNOWN_METRICS = 64
"""Of all agents: newer ones may have metrics that this version does not know."""
MAX_REFUSALS_REPORTED = 20
"""Of one connection."""
_MAX_REFUSED_LAYOUTS = 1000
"""An agent with more is not one that could be understood."""
_MAX_REASON_CHARS = 300
_MAX_FACT_BYTES = 32 << 20
"""Half of what a log takes as one record."""


class Ingest:
    """Takes agents' streams."""

    def __init__(
        self,
        fleet: Fleet,
        committer: Callable[[], Committer],
        *,
        head_id: str,
        now: Callable[[], float],
        settings: Callable[[], Settings],
        allowed: Allowed,
    ) -> None:
        """Prepare to take streams.

        Args:
            fleet: The nodes.
            committer: What makes entries durable.
            head_id: Which store this is.
            now: The head's clock.
            settings: How agents are to sample.
            allowed: Decides who may send frames.
        """
        self._fleet = fleet
        self._committer = committer
        self._head_id = head_id
        self._now = now
        self._settings = settings
        self._allowed = allowed
        self.streams: dict[int, Stream] = {}
        """By node."""
        self.frames = 0
        """How many came since the head started."""
        self.version = 0
        """Grows with every batch."""
        self._news = asyncio.Event()

    # --- the connection

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
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came")
        peer = shown_peer(context.peer())
        try:
            message = read_message(AgentMessage, first)
            stream = self._greet(message, peer)
        except Refused as refusal:
            log.warning("refused %s: %s", peer, refusal.reason)
            await context.abort(refusal.code, refusal.reason)
        sender: asyncio.Task[None] | None = None
        try:
            # One at a time: gRPC does not take a message while it writes another.
            await context.write(self._welcome(stream, message.hello).SerializeToString())
            sender = asyncio.create_task(stream.send(context))
            sender.add_done_callback(stream.sender_ended)
            await self._listen(stream, iterator)
        except Refused as refusal:
            log.warning("ended the connection of %s: %s", stream.member.name, refusal.reason)
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
                stream.member.connected = False

    def _greet(self, message: AgentMessage, peer: str) -> Stream:
        if message.WhichOneof("kind") != "hello":
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "an agent says hello first")
        trouble = self._committer().trouble
        if trouble is not None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"the head cannot store anything: {trouble.message}")
        hello = message.hello
        facts = decode_hello(hello)
        now = self._now()
        stored = self._known(hello, facts, now)
        member = self._fleet.member(stored, now)
        self._take_over(member, hello)
        member.seen, member.connected, member.version = now, True, hello.version
        member.is_silent = member.abroad.moved = False
        member.interval_seconds = min(hello.interval_ms, MAX_INTERVAL_MS) / 1000 or None
        if hello.HasField("shift_us"):  # frames that another head has as well are to have the same times here
            member.shift_us = hello.shift_us
        for run in hello.runs:
            self._announced(run, stored, hello, now)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  handlers run in tasks
        stream = Stream(member, hello, task)
        stream.heard(round(now * 1e6), hello.monotonic_us)
        self.streams[stored.id] = stream
        log.info("%s is connected (%s, gpulse %s)", member.name, peer, hello.version)
        return stream

    def _known(self, hello: Hello, facts: Mapping[str, Any], now: float) -> StoredNode:
        """The node that says hello, under the name it had or gets."""
        register = self._fleet.register
        known = register.find(hello.host, hello.machine)
        node = known or register.new(hello.host, hello.machine, now)
        node = node._replace(facts=dict(facts), labels=dict(hello.labels))
        if node != known or node.id in register.elsewhere:
            self.note("node", **node_fact(node))
            register.elsewhere.discard(node.id)
        if known is None:
            register.put(node)
            self.event("node_joined", node.id, name=node.name)
            namesakes = register.namesakes(node)
            if namesakes:
                text = f"several machines call themselves {node.host}: one is shown as {node.name}"
                log.warning("%s", text)
                self.event("name_conflict", node.id, name=node.name, host=node.host)
                for other in namesakes:
                    if other.id in self.streams:
                        self.streams[other.id].tell(HeadMessage(warning=text))
        return node

    def _take_over(self, member: Member, hello: Hello) -> None:
        """Make place for a stream where there is one of the same machine, or refuse it."""
        other = self.streams.get(member.stored.id)
        if other is None:
            return
        if other.instance != hello.instance and self._now() - member.seen < _SILENT_SECONDS:
            raise Refused(
                grpc.StatusCode.ALREADY_EXISTS,
                f"another agent of {member.name} is connected already; stop it, or give this one a --node-name",
            )
        other.end(grpc.StatusCode.ABORTED, "the agent connected anew")

    def _announced(self, run: Any, node: StoredNode, hello: Hello, now: float) -> None:
        known = self._fleet.runs.get(run.id)
        if known is None:
            self._fleet.runs[run.id] = Run(node.id)
            fields = {"version": hello.version, "pid": hello.pid, "boot": run.boot or hello.boot}
            self.note("run", run=run.id.hex(), node=node.id, time=now, **fields)
        elif known.node != node.id:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "it has frames of another node: its state directory was copied from there; remove it",
            )
        state = self._fleet.runs[run.id]
        if run.elsewhere > state.received:  # another head has the rest, and was told of what is missing there
            state.elsewhere = max(state.elsewhere, run.elsewhere)
            state.dropped = max(state.dropped, run.dropped_elsewhere)
        if (
            run.ended_badly and not state.killed
        ):  # it is told with every hello until it is certain to be known
            state.killed = True
            self.event("run_killed", node.id, run=run.id.hex(), lost_at_most=run.lost_at_most)
        if not run.first_kept:  # else the numbers of what comes tell it exactly
            self._dropped(node.id, run)

    def _welcome(self, stream: Stream, hello: Hello) -> HeadMessage:
        welcome = Welcome(
            protocol=wire.PROTOCOL,
            version=__version__,
            head=self._head_id,
            node=stream.member.name,
            settings=self._settings(),
            durable=[Durable(run=run.id, sequence=self._fleet.runs[run.id].durable) for run in hello.runs],
        )
        if stream.member.name != hello.host:
            text = f"another machine is called {hello.host} too: this one is shown as {stream.member.name}"
            stream.tell(HeadMessage(warning=text))
        return HeadMessage(welcome=welcome)

    async def _listen(self, stream: Stream, messages: AsyncIterator[bytes]) -> None:
        committer = self._committer()
        async for data in messages:
            message = read_message(AgentMessage, data)
            stream.member.seen = self._now()
            match message.WhichOneof("kind"):
                case "batch":
                    self._batch(stream, message.batch)
                    await committer.room()
                case "layout":
                    self._layout(stream, message.layout.text)
                case "dropped":
                    check_run(message.dropped)
                    self._dropped(stream.member.stored.id, message.dropped)
                case "goodbye":
                    stream.member.abroad.moved = message.goodbye.moved
                    log.info(
                        "%s %s",
                        stream.member.name,
                        "goes on at another head" if message.goodbye.moved else "says goodbye",
                    )
                    return

    def _dropped(self, node: int, run: Any) -> None:
        """An agent says how many frames of a run it has given up in all."""
        state = self._fleet.runs.get(run.id)
        if state is not None and run.dropped > state.dropped:
            self.event("frames_dropped", node, run=run.id.hex(), frames=run.dropped - state.dropped)
            state.dropped = run.dropped

    # --- what comes over it

    def _layout(self, stream: Stream, text: bytes) -> None:
        """Take a layout in; one that is refused costs the readings that it is about, not the connection."""
        try:
            self._told_layout(stream.member.stored.id, text)
        except Refused as refusal:
            if len(stream.refused_layouts) >= _MAX_REFUSED_LAYOUTS:
                raise
            stream.refused_layouts.add(layout_id(text))
            what = f"{refusal.reason}; the readings that it is about are not stored"
            self._refuse(stream, "layout_refused", what, reason=refusal.reason)

    def _told_layout(self, node: int, text: bytes) -> None:
        name = layout_id(text)
        layout = self._fleet.layouts.get(name)
        if layout is None:
            layout = decode_layout(text)
            self._check_metrics(layout)
            self.note("layout", id=str(name), text=layout.to_json().decode())
            self._fleet.layouts[name] = layout
        if layout.scope == "gpu":
            self.note("devices", node=node, layout=str(name), time=self._now())

    def _check_metrics(self, layout: Layout) -> None:
        """See that the names of metrics that this version does not know stay few: each of them is a column of the history.

        Raises:
            Refused: They would be too many, in all layouts together.
        """
        new = unknown_metrics(layout)
        if not new:
            return
        known = set().union(*map(unknown_metrics, self._fleet.layouts.values()))
        if len(known | new) > MAX_UNKNOWN_METRICS:
            raise invalid(
                f"a layout has metrics that this head does not know, such as {min(new)}, and all agents together have "
                f"more than {MAX_UNKNOWN_METRICS} of them; install the same gpulse on both"
            )

    def _refuse(self, stream: Stream, kind: str, what: str, **detail: Any) -> None:
        """Say that something of an agent is left out: to people, in the log, and to the agent; not without end."""
        stream.refusals += 1
        if stream.refusals > MAX_REFUSALS_REPORTED:
            return
        if stream.refusals == MAX_REFUSALS_REPORTED:
            what = f"{what}; what else is refused until it connects again is not reported"
        log.warning("%s: %s", stream.member.name, what)
        self.event(kind, stream.member.stored.id, **detail)
        stream.tell(HeadMessage(warning=what))

    def _batch(self, stream: Stream, message: Any) -> None:
        run = self._fleet.runs.get(message.run)
        if run is None or run.node != stream.member.stored.id:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "frames of a run that was not announced")
        first, sent_us = message.first, message.sent_monotonic_us
        check_numbers(first, message.count, sent_us)
        now_us = round(self._now() * 1e6)
        stream.heard(now_us, sent_us)
        decoded = self._decoded(stream, run, message, now_us)
        frames, data = decoded.frames, decoded.data
        repeated = max(0, run.received - first + 1)
        if repeated:
            frames = frames[repeated:]
            data = b"".join(frame.to_bytes() for frame in frames)
            first += repeated
        if not frames:
            if run.received <= run.durable:
                stream.acknowledge(message.run, run.durable)
            return
        missing = first - 1 - max(run.received, run.elsewhere)
        if missing > 0:
            self.event("gap", run.node, run=message.run.hex(), frames=missing, before=first)
        if decoded.refused or decoded.problems:
            self._left_out(stream, message, decoded, repeated)
        shift_us = self._shift(stream, message.run, frames)
        batch = Batch(message.run, run.node, first, len(frames), now_us, shift_us, data)
        member, happened = stream.member, []
        for place, events in decoded.happened.items():
            if place >= repeated:
                frame = decoded.frames[place]
                moment = (frame.time_us + shift_us) / 1e6
                number = first + place - repeated
                happened.append(FrameEvents(run.node, batch.run, number, moment, frame.events))
                member.happened(events, moment)
        self._committer().add(Entry.of_batch(batch, tuple(happened)))
        run.received = batch.last
        if len(frames) > 1:
            slow = next((f for f in reversed(frames[:-1]) if len(f.blocks) > 2), None)
            if slow is not None:
                member.take(slow, self._fleet.layouts, shift_us)
        member.take(frames[-1], self._fleet.layouts, shift_us)
        self._fleet.used(frames, now_us / 1e6)
        self.frames += len(frames)
        self.changed()

    def _decoded(self, stream: Stream, run: Run, message: Any, now_us: int) -> DecodedBatch:
        """The frames of a batch; those that are refused a second time are replaced by empty ones.

        An agent that is refused comes again with the same frames, and tells their layouts anew. When that does not help,
        nothing will: it must be able to go on with the frames behind them.

        Raises:
            Refused: Some are wrong, and it is the first time.
        """
        is_again = run.refused_at == run.received
        try:
            data = unzipped(message.frames) if message.zipped else message.frames
            decoded = decode_frames(
                data, message.count, self._fleet.shapes, stream.refused_layouts, now_us=now_us
            )
            if decoded.refused and not is_again:
                place, why = next(iter(decoded.refused.items()))
                raise invalid(f"frame {message.first + place} is wrong: {why}")
        except Refused as refusal:
            if not is_again or not 0 < message.count <= MAX_BATCH_FRAMES:
                run.refused_at = run.received
                raise
            empty = [PackedFrame(now_us, 0, ())] * message.count
            data = b"".join(frame.to_bytes() for frame in empty)
            decoded = DecodedBatch(empty, data, {}, [], dict.fromkeys(range(message.count), refusal.reason))
        return decoded

    def _left_out(self, stream: Stream, message: Any, decoded: DecodedBatch, repeated: int) -> None:
        """Say what of a batch is not stored."""
        about = {"run": message.run.hex(), "first": message.first}
        refused = {place: why for place, why in decoded.refused.items() if place >= repeated}
        if refused:
            why = next(iter(refused.values()))
            what = f"{len(refused)} frames are not stored: {why}"
            self._refuse(stream, "frames_refused", what, **about, frames=len(refused), reason=why)
        if decoded.problems:
            count, why = len(decoded.problems), shown(decoded.problems[0], _MAX_REASON_CHARS)
            what = f"{count} events of its frames are not stored: {why}"
            self._refuse(stream, "events_refused", what, **about, events=count, reason=why)

    def _shift(self, stream: Stream, run: bytes, frames: Sequence[PackedFrame]) -> int:
        """What to add to the times of these frames to have them on the head's clock."""
        member = stream.member
        offset_us, shift_us = stream.clock_offset_us, member.shift_us
        frame = frames[-1]
        if offset_us is not None and frame.blocks and (stream.boots.get(run) or stream.boot) == stream.boot:
            off = frame.monotonic_us + offset_us - frame.time_us
            shift_us = off if abs(off) > _SKEW_SECONDS * 1e6 else 0
            if abs(shift_us - member.shift_us) <= _SKEW_CHANGE_SECONDS * 1e6:
                shift_us = member.shift_us
        if shift_us and not all(0 <= frame.time_us + shift_us < MAX_TIME_US for frame in frames):
            return 0  # clocks that tell of such times are believed in nothing
        if shift_us != member.shift_us:
            member.shift_us = shift_us
            seconds = round(-shift_us / 1e6, 3)
            self.event("clock_skew", member.stored.id, seconds=seconds)
            log.warning("the clock of %s differs by %+.1f s from the head's", member.name, seconds)
        return shift_us

    # --- what is written down

    def note(self, fact: str, **fields: Any) -> None:
        """Write a fact to the log with the next commit; one that no log takes costs itself alone."""
        entry = Entry.of_fact(fact, **fields)
        if len(entry.payload) > _MAX_FACT_BYTES:
            log.error("a fact of %d bytes is not written down: %s", len(entry.payload), fact)
            detail = {"fact": fact, "bytes": len(entry.payload)}
            entry = Entry.of_fact("event", time=self._now(), kind="fact_too_large", node=None, detail=detail)
        self._committer().add(entry)

    def event(self, kind: str, node: int | None, **detail: Any) -> None:
        """Write down that something happened."""
        self.note("event", time=self._now(), kind=kind, node=node, detail=detail)

    def committed(self, entries: Sequence[Entry]) -> None:
        """Acknowledge what is on disk by now."""
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

    def failed(self, trouble: Outage) -> None:
        """Forget what could not be written, and send the agents away: they keep it and come back."""
        for run in self._fleet.runs.values():
            run.received = run.durable
        for stream in list(self.streams.values()):
            stream.end(grpc.StatusCode.UNAVAILABLE, f"the head cannot store anything: {trouble.message}")

    def dismiss(self) -> None:
        """The head ends: send every agent away, in words."""
        for stream in list(self.streams.values()):
            stream.end(grpc.StatusCode.UNAVAILABLE, "the head ends")

    def changed(self) -> None:
        """There is something new to see."""
        self.version += 1
        self._news.set()

    async def news(self) -> None:
        """Wait until the next batch comes."""
        self._news.clear()
        await self._news.wait()

    def clock_was_set(self) -> None:
        """Find out anew how the agents' clocks differ from the head's."""
        for stream in self.streams.values():
            stream.clock_was_set()

    def settings_changed(self) -> None:
        """Tell every agent how to sample from now on."""
        for stream in self.streams.values():
            stream.tell(HeadMessage(settings=self._settings()))
