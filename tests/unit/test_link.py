"""How an agent goes on after what keeps it from its head, or does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from gpulse.cluster.agent import link as module
from gpulse.cluster.agent.buffer import Buffer
from gpulse.cluster.agent.link import Link, LinkConfig, RefusedByHeadError
from gpulse.cluster.agent.spool import SpoolReader
from gpulse.cluster.agent.stream import Side
from gpulse.cluster.wire_pb2 import Hello
from gpulse.errors import GpulseError, UsageError

Step = Exception | None


def refusal(code: grpc.StatusCode, why: str) -> grpc.aio.AioRpcError:
    """What a head that does not want an agent answers."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=why)


class World:
    """A head that does what it is told with each attempt, and a clock that only waiting moves."""

    def __init__(self, patch: pytest.MonkeyPatch, steps: Iterator[Step]) -> None:
        """Take the place of channels, streams and pauses; None in `steps` is a welcome, after which it is lost."""
        self.now = 0.0
        self.attempts: list[float] = []
        self.missing = False
        self._steps = steps
        patch.setattr(module, "open_channel", self._open)
        patch.setattr(module, "Stream", lambda *_: self)
        buffer = Buffer(b"r" * 16, "b", 1000)
        side = Side(
            buffer,
            SpoolReader(lambda: None),
            Hello,
            lambda _: None,
            lambda: None,
            lambda: None,
            lambda: self.now,
        )
        self.link = Link(LinkConfig("head:1"), side, lambda: 1.0)
        patch.setattr(self.link, "_pause", self._pause)

    def _open(self, _: LinkConfig) -> Any:
        step = next(self._steps, self.link)
        self.attempts.append(self.now)
        if step is self.link:
            self.link.stop()
        self._step: Any = step
        if isinstance(step, UsageError):
            raise step

    async def _pause(self, seconds: float) -> None:
        self.now += seconds

    async def run(self, connected: Callable[[str], None]) -> None:
        """One connection."""
        if self._step is None:
            connected("node")
            self.now += 1.0
            raise OSError("lost")
        if isinstance(self._step, Exception):
            raise self._step

    def stop(self) -> None:
        """Nothing is left to send."""

    async def close(self) -> None:
        """Nothing is held."""


def run(patch: pytest.MonkeyPatch, *steps: Step, rest: Step = None) -> World:
    """Go through these attempts; all later ones come to the same when `rest` is given."""

    def attempts() -> Iterator[Step]:
        yield from steps
        while rest is not None:
            yield rest

    async def go() -> World:
        world = World(patch, attempts())
        failures: list[GpulseError] = []
        try:
            await world.link.run()
        except GpulseError as error:
            failures.append(error)
        world.failure = failures[0] if failures else None  # type: ignore[attr-defined]
        return world

    return asyncio.run(go())
