"""One connection of an agent to its head, from hello to its end."""

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
from gpulse.cluster.agent.buffer import Announced, Buffer, Kept
from gpulse.cluster.agent.ledger import Piece
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.wire_pb2 import (
    AgentMessage,
    Batch,
    Goodbye,
    HeadMessage,
    Hello,
    Layout,
    Run,
    Settings,
    Welcome,
)
from gpulse.errors import LogError

WELCOME_SECONDS = 10.0
MOST_RUNS = 1000
"""So many runs are brought home over one connection, the oldest first; heads take no more than ten times as many."""
_BATCH_FRAMES = 500
_BATCH_BYTES = 1 << 20
_IN_FLIGHT_BYTES = 4 << 20
_MOST_TOLD = 512
"""With more layouts than that the old ones are gone through."""
_ZIP_FRAMES = 8
"""Batches of more frames than this are compressed: they are no longer live."""
_STEP_US = 1_000_000
_FAREWELL_SECONDS = 0.25
_ATTEMPTS = 20

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from google.protobuf.message import Message

    Call = grpc.aio.StreamStreamCall[Message, HeadMessage]


class Side(NamedTuple):
    """What a connection needs of the agent."""

    buffer: Buffer
    reader: SpoolReader
    """Reads what of the buffer is in the spool."""
    hello: Callable[[], Hello]
    """Makes the first message, its runs aside."""
    settings: Callable[[Settings], None]
    """Told how the head wants to have it."""
    note: Callable[[], None]
    """Writes down what is known of the runs."""
    again: Callable[[], None]
    """Has the next frame tell everything, since the head lacks frames that told it."""
    monotonic: Callable[[], float]
    """The clock of the frames."""
    answered: Callable[[], None] = lambda: None
    """Told whenever the head says welcome, or that it keeps what it got."""


class _Sent(NamedTuple):
    run: bytes
    last: int
    size: int
    read: Sequence[Kept] = ()
    """The frames themselves, when they were read back from the spool."""
    texts: Mapping[int, bytes] = {}
    """Their layouts."""


class Stream:
    """One connection, from hello to its end."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        token: str | None,
        side: Side,
        patience_seconds: float | None = None,
    ) -> None:
        """Prepare to connect.

        Args:
            channel: To the head; closed with the stream.
            token: What to show the head.
            side: What there is to send, and who listens.
            patience_seconds: When the head keeps nothing of what it gets for so long the connection is given up;
                never when None.
        """
        self._channel = channel
        self._token = token
        self._side = side
        self._buffer = side.buffer
        self._patience_seconds = patience_seconds
        self._call: Call | None = None
        self._greeting: Welcome | None = None
        """What the head said to our hello."""
        self._carries = False
        self.awake = asyncio.Event()
        self.welcomed_as: str | None = None
        """The name that the head gave this node, None before it did."""
        self.stopping = False
        self._moves = False
        """Whether another head is to get the rest."""
        self.told_runs: set[bytes] = set()
        """The runs that hello named."""
        self._earlier: list[bytes] = []
        """Those of them that may be forgotten once the head is certain to have kept what hello said."""
        self._has_more = False
        """Whether there are runs that hello did not name, to keep it short."""
        self._ended = asyncio.Event()
        self._sent: dict[bytes, int] = {}
        self._told: dict[int, float] = {}
        """When a layout that the head was told was used last."""
        self._in_flight: deque[_Sent] = deque()
        self._in_flight_bytes = 0
        self._kept_at = 0.0
        """When the head last kept something, or began to owe us that."""
        self._dropped: dict[bytes, int] = {}
        self._losses = 0
        self._backfilled = 0

    def stop(self) -> None:
        """Send what there is and say goodbye."""
        self.stopping = True
        self.awake.set()

    def move(self) -> None:
        """Say goodbye at once: another head has welcomed this agent, and gets what there is."""
        self._moves = True
        self.stop()

    def end(self) -> None:
        """Give this connection up."""
        self._ended.set()

    async def close(self) -> None:
        """Let go of it."""
        if self._carries:  # else it may be another one that does
            self._buffer.disconnected()
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def greet(self) -> None:
        """Say hello and hear the head's welcome, which changes nothing yet.

        Raises:
            grpc.aio.AioRpcError: The head, or the way to it, ended the connection.
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

    async def carry(self, connected: Callable[[str], None]) -> None:
        """Take the welcome up, then send and listen until one of both ends.

        Args:
            connected: Told the name that the head gave this node.

        Raises:
            grpc.aio.AioRpcError: The head, or the way to it, ended the connection.
            OSError: It ended otherwise.
            DiskError: The spool cannot be read.
        """
        call, greeting = self._call, self._greeting
        assert call is not None and greeting is not None, "nobody said hello"  # noqa: PT018, S101
        self._carries = True
        self._welcome(greeting)
        connected(greeting.node)
        tasks = [
            asyncio.ensure_future(self._listen(call)),
            asyncio.ensure_future(self._send(call)),
            asyncio.ensure_future(self._ended.wait()),
        ]
        if self._patience_seconds is not None:
            tasks.append(asyncio.ensure_future(self._mind(self._patience_seconds)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] in done and self.stopping and tasks[1].exception() is None:
                with suppress(TimeoutError):  # the head closes after a goodbye
                    await asyncio.wait_for(asyncio.shield(tasks[0]), _FAREWELL_SECONDS)
                return
            # The listener knows why a connection ended; the sender only that it did.
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
        runs = [*earlier[: MOST_RUNS - 1], own]
        self.told_runs = {run.note.id for run in runs}
        self._has_more = len(runs) <= len(earlier)
        self._earlier = [run.note.id for run in runs[:-1]]
        self._losses = self._buffer.losses
        self._dropped = {run.note.id: run.dropped for run in runs}
        hello = self._side.hello()
        hello.runs.extend(_as_run(run) for run in runs)
        if self._buffer.shift_us is not None:
            hello.shift_us = self._buffer.shift_us
        with suppress(asyncio.InvalidStateError):  # the call has ended; reading tells why
            await call.write(AgentMessage(hello=hello))
        message = await call.read()
        if not isinstance(message, HeadMessage) or message.WhichOneof("kind") != "welcome":
            await self._explain(call)
            raise TimeoutError("it did not say welcome")
        return message.welcome

    def _welcome(self, welcome: Welcome) -> None:
        now = self._side.monotonic()
        durable = {told.run: told.sequence for told in welcome.durable}
        for run, sequence in durable.items():
            self._buffer.acknowledge(run, sequence, now)
        if self._buffer.head and welcome.head != self._buffer.head:
            if not self._buffer.serves_several:
                _log.warning(
                    "this head has another store than the last one: what that one acknowledged is there, not here"
                )
            if self._buffer.acked:
                self._side.again()
        self._buffer.head = welcome.head
        begin = self._buffer.resume(durable, now)
        self._sent = {run: sent for run, sent in begin.items() if run in self.told_runs}
        self._side.answered()
        if welcome.HasField("settings"):
            self._side.settings(welcome.settings)

    async def _explain(self, call: Call) -> None:
        """Raise what the head ended the call with, if it was an error."""
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
                case "warning":
                    _log.warning("the head says: %s", printable(message.warning))
                case _:
                    pass  # of a newer version
        await self._explain(call)
        if not self.stopping:
            raise OSError("the head closed it")

    async def _mind(self, patience_seconds: float) -> None:
        """Give up on a head that takes what it gets and keeps nothing of it."""
        while True:
            await asyncio.sleep(min(1.0, patience_seconds / 2))
            if self._in_flight and self._side.monotonic() - self._kept_at > patience_seconds:
                raise OSError(f"it has kept nothing for {patience_seconds:g} s")

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
            # The head keeps things in order: it has also kept what hello said about earlier runs.
            settled = self._buffer.settle(self._earlier)
            left = {known.note.id for known in self._buffer.runs()} if self._buffer.serves_several else set()
            self._earlier = [earlier for earlier in self._earlier if earlier in left]
            if settled and self._has_more:
                self.end()  # the next hello names the next ones
        self.awake.set()

    async def _send(self, call: Call) -> None:
        try:
            while True:
                self.awake.clear()
                stopping = self.stopping
                for run in list(self._sent):
                    await self._send_run(call, run)
                await self._send_losses(call)
                if stopping:
                    await call.write(AgentMessage(goodbye=Goodbye(moved=self._moves)))
                    await call.done_writing()
                    return
                await self.awake.wait()
        except asyncio.InvalidStateError:
            raise OSError("the connection has ended") from None

    async def _send_run(self, call: Call, run: bytes) -> None:
        """Send what there is of a run, as fast as the head takes it."""
        while True:
            while self._in_flight_bytes >= _IN_FLIGHT_BYTES and not self.stopping:
                self.awake.clear()
                await self.awake.wait()
            if self._moves:
                return
            frames, texts = await self._next(run)
            if not frames:
                return
            await self._write(call, run, frames, texts)

    async def _next(self, run: bytes) -> tuple[Sequence[Kept], Mapping[int, bytes]]:
        for _ in range(_ATTEMPTS):
            ready = self._buffer.ready(run, self._sent[run], _BATCH_FRAMES, _BATCH_BYTES)
            if ready is None:
                return (), {}
            if not isinstance(ready, Piece):
                texts = self._buffer.texts(layout for frame in ready for layout in frame.layouts)
                return ready, texts
            try:
                frames = await asyncio.to_thread(self._side.reader.read, ready, _BATCH_FRAMES, _BATCH_BYTES)
            except LogError as error:
                _log.error("giving up %d frames: %s", ready.count, error.message)
                self._buffer.give_up(ready)
                continue
            if frames:
                return frames, self._side.reader.texts
            await asyncio.sleep(0.1)  # dropped from the spool this moment, or not readable for now
        raise OSError("the spool cannot be read")

    async def _write(
        self,
        call: Call,
        run: bytes,
        frames: Sequence[Kept],
        texts: Mapping[int, bytes],
    ) -> None:
        frames = _of_one_clock(frames)
        first, last = frames[0].sequence, frames[-1].sequence
        self._buffer.sent(run, last)  # in hand from now on: what the spool drops of them is not lost
        if first > self._sent[run] + 1:
            self._buffer.pass_over(run, self._sent[run], first)
            if run == self._buffer.run:
                self._side.again()
            # Before the head can have what follows: it would then seem to have these, too.
            await asyncio.to_thread(self._side.note)
            await self._send_losses(call)
        now = self._side.monotonic()
        for layout in dict.fromkeys(layout for frame in frames for layout in frame.layouts):
            is_known = now - self._told.get(layout, -wire.RETELL_SECONDS) < wire.RETELL_SECONDS
            if not is_known and layout in texts:
                await call.write(AgentMessage(layout=Layout(text=texts[layout])))
                is_known = True
            if is_known:
                self._told[layout] = now
        if len(self._told) > _MOST_TOLD:
            self._told = {name: used for name, used in self._told.items() if now - used < wire.RETELL_SECONDS}
        data = b"".join(frame.data for frame in frames)
        zipped = len(frames) > _ZIP_FRAMES
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
        self._in_flight.append(_Sent(run, last, len(data), *self._read(frames, texts)))
        self._in_flight_bytes += len(data)
        self._count(run, len(frames))

    def _read(
        self, frames: Sequence[Kept], texts: Mapping[int, bytes]
    ) -> tuple[Sequence[Kept], Mapping[int, bytes]]:
        """What was read back from the spool for this head and may be wanted by another one."""
        if not self._buffer.serves_several or texts is not self._side.reader.texts:
            return (), {}
        used = {layout for frame in frames for layout in frame.layouts}
        return frames, {layout: texts[layout] for layout in used if layout in texts}

    def _count(self, run: bytes, frames: int) -> None:
        """Say how much was sent that had been kept, once it was all sent."""
        if run != self._buffer.run or frames > 1:
            self._backfilled += frames
        if run == self._buffer.run and self._sent[run] >= self._buffer.last:
            if self._backfilled > _ZIP_FRAMES:
                _log.info("sent %d kept frames", self._backfilled)
            self._backfilled = 0

    async def _send_losses(self, call: Call) -> None:
        if self._losses == self._buffer.losses:
            return
        self._losses = self._buffer.losses
        for run in self._buffer.runs():
            if run.note.id in self.told_runs and run.dropped > self._dropped.get(run.note.id, 0):
                self._dropped[run.note.id] = run.dropped
                await call.write(AgentMessage(dropped=_as_run(run)))


def _of_one_clock(frames: Sequence[Kept]) -> Sequence[Kept]:
    """The first of them, up to a step of the wall clock: a batch has one relation between both clocks."""
    offset = frames[0].offset_us
    for place, frame in enumerate(frames):
        if abs(frame.offset_us - offset) > _STEP_US:
            return frames[:place]
    return frames


def _as_run(run: Announced) -> Run:
    return Run(
        id=run.note.id,
        first_kept=run.first_kept,
        dropped=run.dropped,
        boot=run.note.boot,
        ended_badly=run.ended_badly,
        lost_at_most=run.note.lost_at_most if run.ended_badly else 0,
        elsewhere=run.note.acked,
        dropped_elsewhere=run.note.given_up,
    )


def printable(text: str) -> str:
    """Text of another machine without anything that a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text[:500])
