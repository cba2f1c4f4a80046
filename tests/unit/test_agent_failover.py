"""How an agent that has several heads goes from one to the other and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from gpulse.cluster.agent import connection as module
from gpulse.cluster.agent import head_selection as policy
from gpulse.cluster.agent.connection import AgentConnection, ConnectionConfig, RefusedByHeadError
from gpulse.cluster.agent.frame_buffer import FrameBuffer
from gpulse.cluster.agent.frame_stream import AgentContext, FrameStream
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.client.transport import HeadUnreachableError
from gpulse.cluster.wire_pb2 import Hello
from gpulse.model.packed_columns import PackedFrame

AWAY = HeadUnreachableError("nothing listens there")


def refusal(code: grpc.StatusCode, words: str) -> grpc.aio.AioRpcError:
    """How a head says no."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=words)


WRONG_TOKEN = refusal(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
TAKEN = refusal(grpc.StatusCode.ALREADY_EXISTS, "another agent is connected already")
FULL = refusal(grpc.StatusCode.UNAVAILABLE, "the head cannot store anything")


class Heads:
    """Heads that are there or not, and a link to them."""

    def __init__(self, patch: pytest.MonkeyPatch, *targets: str) -> None:
        """Take the place of networks and streams."""
        self.wrong: dict[str, Exception | None] = dict.fromkeys(targets)
        """By head what is wrong with it."""
        self.story: list[str] = []
        self.news = asyncio.Event()
        self.open = 0
        """How many connections are."""
        self.streams: dict[str, FakeStream] = {}
        patch.setattr(module, "open_channel", lambda _, target: target)
        patch.setattr(module, "FrameStream", lambda target, *_: FakeStream(self, target))
        patch.setattr(module, "_probe_target", self._listens)
        patch.setattr(policy, "PROBE_SECONDS", 0.02)
        patch.setattr("gpulse.cluster.agent.head_selection.FIRST_DELAY_SECONDS", 0.05)
        patch.setattr("gpulse.cluster.agent.head_selection.MIN_DELAY_SECONDS", 0.01)
        buffer = FrameBuffer(b"r" * 16, "b", 1000, resend_seconds=120.0)
        side = AgentContext(
            buffer,
            SpoolReader(lambda: None),
            Hello,
            lambda _: None,
            lambda: None,
            lambda: None,
            time.monotonic,
        )
        self.link = AgentConnection(ConnectionConfig(targets[0], others=targets[1:]), side, lambda: 0.5)
        self.task = asyncio.ensure_future(self.link.run())

    def _listens(self, target: str) -> None:
        if self.wrong[target] is AWAY:
            raise AWAY

    def tell(self, words: str) -> None:
        """Something happened."""
        self.story.append(words)
        self.news.set()

    async def until(self, words: str) -> None:
        """Wait until it did."""
        async with asyncio.timeout(60.0):
            while words not in self.story:
                assert not self.task.done(), (self.story, self.task)
                self.news.clear()
                await self.news.wait()

    def lose(self, target: str, wrong: Exception | None = AWAY) -> None:
        """A head breaks off."""
        self.wrong[target] = wrong
        self.streams[target].broken.set()

    async def end(self) -> None:
        """The agent ends."""
        self.link.stop()
        await asyncio.wait({self.task}, timeout=60.0)


class FakeStream:
    """A connection to one of them."""

    announced_runs: frozenset[bytes] = frozenset()

    def __init__(self, heads: Heads, target: str) -> None:
        self._heads = heads
        self._target = target
        heads.open += 1
        self.welcomed_as: str | None = None
        self.awake = asyncio.Event()
        self.broken = asyncio.Event()
        self.ended = asyncio.Event()

    async def greet(self) -> None:
        """Say hello."""
        wrong = self._heads.wrong[self._target]
        if wrong is not None:
            self._heads.tell(f"{self._target} says no")
            raise wrong
        self.welcomed_as = "node"

    async def exchange(self, connected: Callable[[str], None]) -> None:
        """Be there until one of both ends it."""
        connected("node")
        self._heads.streams[self._target] = self
        self._heads.tell(f"at {self._target}")
        ended = asyncio.ensure_future(self.ended.wait())
        broken = asyncio.ensure_future(self.broken.wait())
        try:
            await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            broken.cancel()
        if self.broken.is_set():
            raise OSError("it broke off")

    def stop(self) -> None:
        """Say goodbye."""
        self.ended.set()

    def move(self) -> None:
        """Say goodbye, and where to."""
        self._heads.tell(f"leaves {self._target}")
        self.ended.set()

    async def close(self) -> None:
        """Let go."""
        self._heads.open -= 1
        self._heads.tell(f"closed {self._target}")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes heads."""
    made: list[Heads] = []

    def new(*targets: str) -> Heads:
        made.append(Heads(monkeypatch, *targets))
        return made[-1]

    yield new
    for heads in made:
        await heads.end()


async def test_the_second_is_used_while_the_first_is_away(
    make: Callable[..., Heads], caplog: pytest.LogCaptureFixture
) -> None:
    """And left, with a goodbye, once the first has said welcome; that it was looked for is not told."""

    heads = make("a:1", "b:2")
    heads.wrong["a:1"] = AWAY
    await heads.until("at b:2")
    told = list(caplog.messages)
    await asyncio.sleep(0.1)
    assert told == caplog.messages
    heads.wrong["a:1"] = None
    await heads.until("at a:1")
    assert ["leaves b:2", "closed b:2", "at a:1"] == heads.story[-3:]
    assert ["cannot connect to a:1 (nothing listens there); trying the next head"] == told


async def test_a_first_that_breaks_off_is_left_at_once(
    make: Callable[..., Heads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait that comes before another attempt at the same head, and come back to."""

    heads = make("a:1", "b:2")
    await heads.until("at a:1")
    monkeypatch.setattr("gpulse.cluster.agent.head_selection.FIRST_DELAY_SECONDS", 600.0)
    monkeypatch.setattr("gpulse.cluster.agent.head_selection.MIN_DELAY_SECONDS", 300.0)
    heads.lose("a:1")
    await heads.until("at b:2")
    heads.story.clear()
    heads.wrong["a:1"] = None
    await heads.until("at a:1")


async def test_the_first_must_say_welcome_before_the_second_is_left(make: Callable[..., Heads]) -> None:
    """One that listens and cannot have the agent is no better one."""

    heads = make("a:1", "b:2")
    heads.wrong["a:1"] = FULL
    await heads.until("at b:2")
    heads.story.clear()
    await heads.until("a:1 says no")
    heads.story.clear()
    await heads.until("a:1 says no")
    assert "leaves b:2" not in heads.story
    assert "closed b:2" not in heads.story


async def test_a_head_that_refuses_is_passed_over_with_one_warning(
    make: Callable[..., Heads], caplog: pytest.LogCaptureFixture
) -> None:
    """The agent works for the other one."""

    heads = make("a:1", "b:2")
    heads.wrong["a:1"] = WRONG_TOKEN
    await heads.until("at b:2")
    heads.lose("b:2", None)
    heads.story.clear()
    await heads.until("at b:2")
    assert 1 == sum("wrong token" in message for message in caplog.messages)


async def test_heads_that_all_refuse(make: Callable[..., Heads]) -> None:
    """The agent ends, with the words of the last one."""

    heads = make("a:1", "b:2")
    heads.wrong = dict.fromkeys(heads.wrong, WRONG_TOKEN)
    with pytest.raises(RefusedByHeadError, match="the head at b:2 refused this agent: wrong token"):
        await asyncio.wait_for(heads.task, 60.0)


async def test_a_place_that_is_taken_is_not_sought_elsewhere(make: Callable[..., Heads]) -> None:
    """Two agents of one node would be at two heads else."""

    heads = make("a:1", "b:2")
    heads.wrong["a:1"] = TAKEN
    await heads.until("a:1 says no")
    heads.story.clear()
    await heads.until("a:1 says no")
    assert "at b:2" not in heads.story


async def test_an_end_while_a_better_head_is_greeted(make: Callable[..., Heads]) -> None:
    """Nothing is left open."""

    heads = make("a:1", "b:2")
    heads.wrong["a:1"] = AWAY
    await heads.until("at b:2")
    heads.wrong["a:1"] = None
    await heads.until("leaves b:2")
    await heads.end()
    assert heads.task.done()
    assert 0 == heads.open


async def test_a_look_at_another_head_leaves_what_is_on_its_way_alone() -> None:
    """Frames that memory had no room for are with the present head, not lost."""

    buffer = FrameBuffer(b"r" * 16, "b", 1000, max_frames=4, resend_seconds=120.0)
    for number in range(10):
        buffer.add(PackedFrame(number, number, ()), [], float(number))
        buffer.sent(b"r" * 16, number + 1)
    nothing: Any = None
    side = AgentContext(buffer, nothing, nothing, nothing, nothing, nothing, time.monotonic)
    await FrameStream(grpc.aio.insecure_channel("localhost:1"), None, side).close()

    assert 0 == buffer.dropped
