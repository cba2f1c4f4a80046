"""How an agent goes on after what keeps it from its head, or does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any

import grpc
import grpc.aio
import pytest

from gpulse.cluster.agent import connection as module
from gpulse.cluster.agent.connection import AgentConnection, ConnectionConfig, RefusedByHeadError
from gpulse.cluster.agent.frame_buffer import FrameBuffer
from gpulse.cluster.agent.frame_stream import AgentContext
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.wire_pb2 import Hello
from gpulse.errors import UsageError

TAKEN = grpc.aio.AioRpcError(
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.aio.Metadata(),
    grpc.aio.Metadata(),
    details="another agent is connected already",
)
UNCLEAR, REFUSED = (
    grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=words)
    for code, words in (
        (grpc.StatusCode.INTERNAL, "Internal error from Core"),
        (grpc.StatusCode.UNAUTHENTICATED, "wrong token"),
    )
)
AWAY = UsageError("cannot read the certificate")


class World:
    """A head that does as it is told with each attempt, and a clock that only waiting moves."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of channels, streams and pauses."""
        self.now = 0.0
        self.attempts: list[float] = []
        self._steps: Iterator[Exception | None] = iter(())
        self._step: Exception | None = None
        patch.setattr(module, "open_channel", self._open)
        patch.setattr(module, "FrameStream", lambda *_: self)
        side = AgentContext(
            FrameBuffer(b"r" * 16, "b", 1000),
            SpoolReader(lambda: None),
            Hello,
            lambda _: None,
            lambda: None,
            lambda: None,
            lambda: self.now,
        )
        self._link = AgentConnection(ConnectionConfig("head:1"), side, lambda: 1.0)
        patch.setattr(self._link, "_pause", self._pause)

    async def go(self, steps: Iterable[Exception | None]) -> None:
        """Connect so often: with each attempt something is raised, or a welcome is followed by a loss."""
        self._steps = iter(steps)
        await self._link.run()

    def _open(self, _: ConnectionConfig, __: str) -> None:
        self.attempts.append(self.now)
        try:
            self._step = next(self._steps)
        except StopIteration:
            self._step = None
            self._link.stop()
        if self._step is AWAY:
            raise AWAY

    async def _pause(self, seconds: float) -> None:
        self.now += seconds

    async def greet(self) -> None:
        """Say hello."""
        if self._step is not None:
            raise self._step

    async def exchange(self, connected: Callable[[str], None]) -> None:
        """Be welcome, and lost."""
        connected("node")
        raise OSError("lost")

    def stop(self) -> None:
        """Nothing is left to send."""

    async def close(self) -> None:
        """Nothing is held."""

    @property
    def welcomed_as(self) -> str | None:
        """By which name the head knows it."""
        return None

    @property
    def was_contacted(self) -> bool:
        """Whether somebody would have been told that the agent is up."""
        return self._link.contacted.is_set()


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A head to be."""
    return World(monkeypatch)


async def test_a_fault_of_ours_is_one_more_failure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Sending is tried again, less and less often, and where it went wrong is told once."""

    await world.go([ValueError("negative"), None, ValueError("negative"), ValueError("negative")])
    assert 5 == len(world.attempts)
    assert world.attempts == sorted(set(world.attempts))
    assert 1 == sum(record.exc_info is not None for record in caplog.records)
    assert "a bug in gpulse: ValueError('negative')" in caplog.text


async def test_a_certificate_that_is_away_for_a_moment(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that was welcome once waits for it to come back."""

    await world.go([None, AWAY, AWAY, None])
    assert 5 == len(world.attempts)
    assert "cannot connect to head:1 (cannot read the certificate)" in caplog.text


async def test_a_certificate_that_never_was_there(world: World) -> None:
    """An agent that never was welcome ends and says so."""

    with pytest.raises(UsageError, match="cannot read the certificate"):
        await world.go([AWAY])


async def test_a_place_that_stays_taken(world: World) -> None:
    """The agent ends with the head's words, but not before its own earlier life would have been given up."""

    with pytest.raises(RefusedByHeadError, match="refused this agent: another agent is connected already"):
        await world.go(repeat(TAKEN))
    assert 15.0 <= world.now <= 16.0
    assert sum(moment > 10.0 for moment in world.attempts)


async def test_a_place_that_gets_free(world: World) -> None:
    """The agent takes it; and what it waited before says nothing about another time."""

    await world.go([TAKEN, TAKEN, TAKEN, TAKEN, OSError("away"), TAKEN, None, *repeat(TAKEN, 8), None])
    assert 17 == len(world.attempts)
    assert world.now > 60.0


async def test_a_refusal_that_got_lost(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An answer that says nothing is none: nobody hears of it before the head has said what it means."""

    with pytest.raises(RefusedByHeadError, match="wrong token"):
        await world.go([UNCLEAR, UNCLEAR, REFUSED])
    assert not world.was_contacted
    assert [] == caplog.messages


async def test_a_head_that_never_says_anything_clear(world: World) -> None:
    """After a few attempts it is a failure as any other."""

    await world.go([*repeat(UNCLEAR, 8), None])
    assert world.was_contacted
    assert world.now > 1.0
