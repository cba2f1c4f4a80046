"""One gRPC stream of an agent to a head, from hello to goodbye."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from gpulse.cluster import wire
from gpulse.cluster.agent.frame_buffer import AnnouncedRun, BufferedFrame, FrameBuffer
from gpulse.cluster.agent.run_index import SpoolRange
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.wire_pb2 import (
    AgentMessage,
    Batch,
    Damage,
    Goodbye,
    HeadMessage,
    Hello,
    Layout,
    Run,
    Settings,
    StackAnswer,
    StackRequest,
    Welcome,
)
from gpulse.errors import LogError
from gpulse.model.safe_text import printable

MAX_REASON_CHARACTERS = 500
"""Maximum length of a message from a head."""
WELCOME_SECONDS = 10.0
MAX_ANNOUNCED_RUNS = 1000
"""Maximum number of runs that one hello message announces, oldest first; heads accept ten times as many."""
_MAX_BATCH_FRAMES = 500
_MAX_BATCH_BYTES = 1 << 20
_MAX_IN_FLIGHT_BYTES = 4 << 20
_MAX_SENT_LAYOUTS = 512
"""Beyond this many sent layouts, unused ones are forgotten."""
_MAX_LIVE_FRAMES = 8
"""Larger batches are not live and are compressed."""
_MIN_CLOCK_STEP_US = 1_000_000
_GOODBYE_SECONDS = 0.25
_MAX_READ_ATTEMPTS = 20
_MAX_LOST = (1 << 32) - 1
_MAX_DAMAGED_RANGES = 100

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from google.protobuf.message import Message

    Call = grpc.aio.StreamStreamCall[Message, HeadMessage]


class AgentContext(NamedTuple):
    """What a stream needs from the agent."""

    buffer: FrameBuffer
    reader: SpoolReader
    """Reads frames from the spool."""
    hello: Callable[[], Hello]
    """Returns the hello message without its runs."""
    settings: Callable[[Settings], None]
    """Called with the head's settings."""
    note: Callable[[], None]
    """Writes the run states to the spool."""
    again: Callable[[], None]
    """Makes the next frame report everything again, because the head lacks earlier frames."""
    monotonic: Callable[[], float]
    """The monotonic clock of the frames."""
    answered: Callable[[], None] = lambda: None
    """Called whenever the head welcomes the agent or acknowledges frames."""
    stacks: Callable[[StackRequest, Callable[[StackAnswer], None]], None] = lambda _request, _reply: None
    """Called with a request for stacks, and with the function that sends the answer."""
    repair: Callable[[LogError], bool] = lambda _: False
    """Sets damaged parts of the spool aside; returns whether the rest can be read."""


class _SentBatch(NamedTuple):
    run: bytes
    last: int
    size: int
    read: Sequence[BufferedFrame] = ()
    """The frames, if they were read from the spool."""
    texts: Mapping[int, bytes] = {}
    """Their layouts."""


class FrameStream:
    """One stream to a head, from hello to goodbye."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        token: str | None,
        side: AgentContext,
        patience_seconds: float | None = None,
    ) -> None:
        """Prepare to connect.

        Args:
            channel: Channel to the head; closed with the stream.
            token: Access token for the head.
            side: The agent.
            patience_seconds: Close the stream if the head acknowledges nothing for this long; None for no limit.
        """
        self._channel = channel
        self._token = token
        self._side = side
        self._buffer = side.buffer
        self._patience_seconds = patience_seconds
        self._call: Call | None = None
        self._greeting: Welcome | None = None
        """The head's answer to the hello message."""
        self._is_active = False
        self.awake = asyncio.Event()
        """Set when there may be something to send."""
        self._acked = asyncio.Event()
        """Set when the head has acknowledged frames, so that more may be in flight."""
        self.welcomed_as: str | None = None
        """The name that the head gave this node; None before the welcome."""
        self.stopping = False
        self._is_moving = False
        """Whether the agent moves to another head, which gets the remaining frames."""
        self.announced_runs: set[bytes] = set()
        """The runs that the hello message announced."""
        self._earlier: list[bytes] = []
        """Those of them that may be forgotten once the head has stored the hello message."""
        self._has_more = False
        """Whether there are more runs than the hello message could announce."""
        self._ended = asyncio.Event()
        self._sent: dict[bytes, int] = {}
        self._sent_layouts: dict[int, float] = {}
        """When each layout that was sent to the head was last used."""
        self._in_flight: deque[_SentBatch] = deque()
        self._in_flight_bytes = 0
        self._kept_at = 0.0
        """When the head last acknowledged frames, or when the first unacknowledged ones were sent."""
        self._dropped: dict[bytes, int] = {}
        self._losses = 0
        self._backfilled = 0
        self._answers: deque[StackAnswer] = deque()
        """Answers to requests of the head that are not sent yet."""

    def stop(self) -> None:
        """Send the remaining frames and say goodbye."""
        self.stopping = True
        self.awake.set()
        self._acked.set()

    def move(self) -> None:
        """Say goodbye at once: another head has welcomed this agent and gets the remaining frames."""
        self._is_moving = True
        self.stop()

    def end(self) -> None:
        """End the stream without goodbye."""
        self._ended.set()

    async def close(self) -> None:
        """Close the stream and its channel."""
        if self._is_active:  # otherwise another stream may be active
            self._buffer.disconnected()
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def greet(self) -> None:
        """Say hello and wait for the head's welcome, without acting on it yet.

        Raises:
            grpc.aio.AioRpcError: The head or the network ended the connection.
            OSError: The head did not answer in time.
        """
        metadata = []
        if self._token:
            metadata.append((wire.TOKEN_KEY, f"Bearer {self._token}"))
        call = self._channel.stream_stream(
            wire.STREAM,
            request_serializer=AgentMessage.SerializeToString,
            response_deserializer=HeadMessage.FromString,
        )(metadata=metadata)
        self._call = call
        async with asyncio.timeout(WELCOME_SECONDS):
            self._greeting = await self._say_hello(call)
        self.welcomed_as = self._greeting.node

    async def exchange(self, connected: Callable[[str], None]) -> None:
        """Apply the welcome, then send and receive until the stream ends.

        Args:
            connected: Called with the name that the head gave this node.

        Raises:
            grpc.aio.AioRpcError: The head or the network ended the connection.
            OSError: The connection ended for another reason.
            DiskError: The spool cannot be read.
        """
        call, greeting = self._call, self._greeting
        assert call is not None and greeting is not None, "call greet() before exchange()"  # noqa: PT018, S101
        self._is_active = True
        self._welcome(greeting)
        connected(greeting.node)
        tasks = [
            asyncio.ensure_future(self._listen(call)),
            asyncio.ensure_future(self._send(call)),
            asyncio.ensure_future(self._ended.wait()),
        ]
        if self._patience_seconds is not None:
            tasks.append(asyncio.ensure_future(self._watch_acknowledgements(self._patience_seconds)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] in done and self.stopping and tasks[1].exception() is None:
                with suppress(TimeoutError):  # the head closes the stream after a goodbye
                    await asyncio.wait_for(asyncio.shield(tasks[0]), _GOODBYE_SECONDS)
                return
            # Only the receiving task knows why the connection ended.
            if tasks[1] in done and tasks[0] not in done:
                await asyncio.wait(tasks[:1], timeout=1.0)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _say_hello(self, call: Call) -> Welcome:
        *earlier, own = self._buffer.runs()
        runs = [*earlier[: MAX_ANNOUNCED_RUNS - 1], own]
        self.announced_runs = {run.note.id for run in runs}
        self._has_more = len(runs) <= len(earlier)
        self._earlier = [run.note.id for run in runs[:-1]]
        self._losses = self._buffer.losses
        self._dropped = {run.note.id: run.dropped for run in runs}
        hello = self._side.hello()
        hello.runs.extend(_run_message(run) for run in runs)
        hello.head = self._buffer.head
        if self._buffer.shift_us is not None:
            hello.shift_us = self._buffer.shift_us
        with suppress(asyncio.InvalidStateError):  # the call has ended; reading returns the reason
            await call.write(AgentMessage(hello=hello))
        message = await call.read()
        if not isinstance(message, HeadMessage) or message.WhichOneof("kind") != "welcome":
            await self._explain(call)
            raise TimeoutError("the head did not answer the agent's hello message")
        return message.welcome

    def _welcome(self, welcome: Welcome) -> None:
        now = self._side.monotonic()
        durable = {entry.run: entry.sequence for entry in welcome.durable}
        for run, sequence in durable.items():
            self._buffer.acknowledge(run, sequence, now)
        if self._buffer.head and welcome.head != self._buffer.head:
            if not self._buffer.has_several_heads:
                _log.warning(
                    "this head does not use the data directory of the previous head; "
                    "frames that the previous head acknowledged are stored only there"
                )
            if self._buffer.acked:
                self._side.again()
        elif any(durable.get(run.note.id, 0) < run.note.acked for run in self._buffer.runs()):
            if not self._buffer.has_several_heads:
                _log.error(
                    "the head has lost frames that it had acknowledged: its data directory is an older copy"
                )
            self._side.again()
        self._buffer.head = welcome.head
        begin = self._buffer.resume(durable, now)
        self._sent = {run: sent for run, sent in begin.items() if run in self.announced_runs}
        self._side.answered()
        if welcome.HasField("settings"):
            self._side.settings(welcome.settings)

    async def _explain(self, call: Call) -> None:
        """Raise the error with which the head ended the call, if it was one."""
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=await call.details()
            )

    async def _listen(self, call: Call) -> None:
        while isinstance(message := await call.read(), HeadMessage):
            match message.WhichOneof("kind"):
                case "durable":
                    self._buffer.shift_us = message.durable.shift_us
                    self._acknowledged(message.durable.run, message.durable.sequence)
                case "settings":
                    self._side.settings(message.settings)
                case "stacks":
                    self._side.stacks(message.stacks, self._answer)
                case "warning":
                    _log.warning(
                        "warning from the head: %s", printable(message.warning, MAX_REASON_CHARACTERS)
                    )
                case _:
                    pass  # from a newer version
        await self._explain(call)
        if not self.stopping:
            raise OSError("the head closed the connection")

    def _answer(self, answer: StackAnswer) -> None:
        self._answers.append(answer)
        self.awake.set()

    async def _watch_acknowledgements(self, patience_seconds: float) -> None:
        """End the stream if the head accepts frames but acknowledges nothing."""
        while True:
            await asyncio.sleep(min(1.0, patience_seconds / 2))
            if self._in_flight and self._side.monotonic() - self._kept_at > patience_seconds:
                raise OSError(f"the head has not acknowledged any frame for {patience_seconds:g} s")

    def _acknowledged(self, run: bytes, sequence: int) -> None:
        now = self._side.monotonic()
        self._kept_at = now
        while self._in_flight and self._in_flight[0].run == run and self._in_flight[0].last <= sequence:
            sent = self._in_flight.popleft()
            self._in_flight_bytes -= sent.size
            if sent.read:
                self._buffer.remember(run, sent.read, sent.texts, now)
        self._buffer.acknowledge(run, sequence, now)
        self._side.answered()
        if run == self._buffer.run and self._earlier:
            # The head stores messages in order, so it has also stored what hello said about earlier runs.
            settled = self._buffer.forget_finished_runs(self._earlier)
            left = (
                {known.note.id for known in self._buffer.runs()} if self._buffer.has_several_heads else set()
            )
            self._earlier = [earlier for earlier in self._earlier if earlier in left]
            if settled and self._has_more:
                self.end()  # the next hello message announces the next runs
        self._acked.set()

    async def _send(self, call: Call) -> None:
        try:
            while True:
                self.awake.clear()
                stopping = self.stopping
                for run in list(self._sent):
                    await self._send_run(call, run)
                await self._send_losses(call)
                while self._answers:
                    await call.write(AgentMessage(stacks=self._answers.popleft()))
                if stopping:
                    await call.write(AgentMessage(goodbye=Goodbye(moved=self._is_moving)))
                    await call.done_writing()
                    return
                await self.awake.wait()
        except asyncio.InvalidStateError:
            raise OSError("the connection has ended") from None

    async def _send_run(self, call: Call, run: bytes) -> None:
        """Send the frames of a run as fast as the head accepts them."""
        while True:
            while self._in_flight_bytes >= _MAX_IN_FLIGHT_BYTES and not self.stopping:
                self._acked.clear()
                await self._acked.wait()
            if self._is_moving:
                return
            frames, texts = await self._next(run)
            if not frames:
                return
            await self._write(call, run, frames, texts)

    async def _next(self, run: bytes) -> tuple[Sequence[BufferedFrame], Mapping[int, bytes]]:
        for _ in range(_MAX_READ_ATTEMPTS):
            ready = self._buffer.ready(run, self._sent[run], _MAX_BATCH_FRAMES, _MAX_BATCH_BYTES)
            if ready is None:
                return (), {}
            if not isinstance(ready, SpoolRange):
                texts = self._buffer.texts(layout for frame in ready for layout in frame.layouts)
                return ready, texts
            try:
                frames = await asyncio.to_thread(
                    self._side.reader.read, ready, _MAX_BATCH_FRAMES, _MAX_BATCH_BYTES
                )
            except LogError as error:
                if await asyncio.to_thread(self._side.repair, error):
                    continue
                _log.error("cannot read the spool; frames lost: %d (%s)", ready.count, error.message)
                self._buffer.give_up(ready)
                continue
            if frames:
                return frames, self._side.reader.texts
            await asyncio.sleep(0.1)  # just dropped from the spool, or not readable at the moment
        raise OSError("cannot read the spool")

    async def _write(
        self,
        call: Call,
        run: bytes,
        frames: Sequence[BufferedFrame],
        texts: Mapping[int, bytes],
    ) -> None:
        frames = _until_clock_step(frames)
        first, last = frames[0].sequence, frames[-1].sequence
        self._buffer.sent(run, last)  # from now on they are not lost if the spool drops them
        if first > self._sent[run] + 1:
            self._buffer.record_gap(run, self._sent[run], first)
            if run == self._buffer.run:
                self._side.again()
            # First record the gap: an acknowledgement of later frames would seem to cover these, too.
            await asyncio.to_thread(self._side.note)
            await self._send_losses(call)
        now = self._side.monotonic()
        for layout in dict.fromkeys(layout for frame in frames for layout in frame.layouts):
            is_known = (
                now - self._sent_layouts.get(layout, -wire.LAYOUT_RESEND_SECONDS) < wire.LAYOUT_RESEND_SECONDS
            )
            if not is_known and layout in texts:
                await call.write(AgentMessage(layout=Layout(text=texts[layout])))
                is_known = True
            if is_known:
                self._sent_layouts[layout] = now
        if len(self._sent_layouts) > _MAX_SENT_LAYOUTS:
            self._sent_layouts = {
                name: used
                for name, used in self._sent_layouts.items()
                if now - used < wire.LAYOUT_RESEND_SECONDS
            }
        data = b"".join(frame.data for frame in frames)
        zipped = len(frames) > _MAX_LIVE_FRAMES
        if zipped:
            data = await asyncio.to_thread(zlib.compress, data, 1)
        batch = Batch(
            run=run,
            first=first,
            count=len(frames),
            sent_monotonic_us=round(self._side.monotonic() * 1e6),
            frames=data,
            zipped=zipped,
        )
        await call.write(AgentMessage(batch=batch))
        self._sent[run] = last
        if not self._in_flight:
            self._kept_at = self._side.monotonic()
        self._in_flight.append(_SentBatch(run, last, len(data), *self._read(frames, texts)))
        self._in_flight_bytes += len(data)
        self._count(run, len(frames))

    def _read(
        self, frames: Sequence[BufferedFrame], texts: Mapping[int, bytes]
    ) -> tuple[Sequence[BufferedFrame], Mapping[int, bytes]]:
        """Return frames that were read from the spool and may be needed by another head, with their layouts."""
        if not self._buffer.has_several_heads or texts is not self._side.reader.texts:
            return (), {}
        used = {layout for frame in frames for layout in frame.layouts}
        return frames, {layout: texts[layout] for layout in used if layout in texts}

    def _count(self, run: bytes, frames: int) -> None:
        """Log how many stored frames were sent, once all were sent."""
        if run != self._buffer.run or frames > 1:
            self._backfilled += frames
        if run == self._buffer.run and self._sent[run] >= self._buffer.last:
            if self._backfilled > _MAX_LIVE_FRAMES:
                _log.info("sent %d frames from the spool", self._backfilled)
            self._backfilled = 0

    async def _send_losses(self, call: Call) -> None:
        if self._losses == self._buffer.losses:
            return
        self._losses = self._buffer.losses
        for run in self._buffer.runs():
            if run.note.id in self.announced_runs and run.dropped > self._dropped.get(run.note.id, 0):
                self._dropped[run.note.id] = run.dropped
                await call.write(AgentMessage(dropped=_run_message(run)))


def _until_clock_step(frames: Sequence[BufferedFrame]) -> Sequence[BufferedFrame]:
    """Return the frames up to a step of the wall clock: all frames of a batch share one clock offset."""
    offset = frames[0].offset_us
    for place, frame in enumerate(frames):
        if abs(frame.offset_us - offset) > _MIN_CLOCK_STEP_US:
            return frames[:place]
    return frames


def _run_message(run: AnnouncedRun) -> Run:
    return Run(
        id=run.note.id,
        first_kept=run.first_kept,
        dropped=run.dropped,
        boot=run.note.boot,
        ended_badly=run.ended_badly,
        lost_at_most=min(run.lost_at_most, _MAX_LOST) if run.ended_badly else 0,
        elsewhere=run.note.acked,
        dropped_elsewhere=run.note.given_up,
        last=run.note.last if run.ended_badly else 0,
        other_head_last=run.note.other_head_last,
        damaged=[Damage(**one._asdict()) for one in run.note.damaged[:_MAX_DAMAGED_RANGES]],
    )
