"""One agent's connection, as the head sees it: what is to be told to it, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NoReturn, Protocol
from urllib.parse import unquote

import grpc

from gpulse.cluster.head.fleet import Member
from gpulse.cluster.wire_pb2 import Durable, HeadMessage, Hello

log = logging.getLogger(__name__)

_WINDOW_US = 300_000_000
"""Clocks drift, so what they differed by is forgotten after one to two of these."""


class Allowed(Protocol):
    """Decides whether a call may go on."""

    async def __call__(
        self, peer: str, metadata: Iterable[tuple[str, str | bytes]], *, changes: bool
    ) -> str | None:
        """Return why a call is refused, or None when it may go on.

        Args:
            peer: Who calls, as gRPC writes it.
            metadata: What came with the call.
            changes: Whether the call changes anything, or only reads.
        """


def shown_peer(peer: str) -> str:
    """Who calls, as people write addresses: gRPC writes `ipv6:%5B::1%5D:4711`."""
    return unquote(peer).partition(":")[2] or peer


class Context(Protocol):
    """What gRPC gives a handler."""

    def peer(self) -> str:
        """Who calls."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error."""

    async def write(self, message: bytes) -> None:
        """Send one message."""


class Stream:
    """One agent's connection."""

    def __init__(self, member: Member, hello: Hello, task: asyncio.Task[None]) -> None:
        self.member = member
        self.instance = hello.instance
        self.boot = hello.boot
        self.boots = {run.id: run.boot for run in hello.runs}
        self.task = task
        self.refused_layouts: set[int] = set()
        self.refusals = 0
        """How often something of it was left out."""
        """Layouts of this agent whose blocks are left out."""
        self.reason: tuple[grpc.StatusCode, str] | None = None
        """Why it is being ended by the head."""
        self._offsets: tuple[int | None, int | None] = (None, None)
        self._window_us = 0
        self._due: dict[bytes, int] = {}
        self._messages: list[HeadMessage] = []
        self._wake = asyncio.Event()

    def heard(self, now_us: int, sent_us: int) -> None:
        """A message came that was sent at this time of the agent's monotonic clock."""
        before, latest = self._offsets
        if now_us - self._window_us >= _WINDOW_US:
            before, latest, self._window_us = latest, None, now_us
        offset = now_us - sent_us
        self._offsets = before, offset if latest is None else min(latest, offset)

    def clock_was_set(self) -> None:
        """What is known of the agent's clock holds no more."""
        self._offsets = (None, None)

    @property
    def clock_offset_us(self) -> int | None:
        """Head's time less agent's monotonic time: the least of the last minutes, which had the least delay in it."""
        return min((offset for offset in self._offsets if offset is not None), default=None)

    def acknowledge(self, run: bytes, sequence: int) -> None:
        """Tell the agent how far its frames are on disk."""
        self._due[run] = sequence
        self._wake.set()

    def tell(self, message: HeadMessage) -> None:
        """Send the agent something else."""
        self._messages.append(message)
        self._wake.set()

    def end(self, code: grpc.StatusCode, reason: str) -> None:
        """End the connection."""
        self.reason = (code, reason)
        self.task.cancel()

    def sender_ended(self, sender: asyncio.Task[None]) -> None:
        """Without its sender a connection is worth nothing."""
        if not sender.cancelled() and sender.exception() is not None:
            log.warning("cannot write to %s: %s", self.member.name, sender.exception())
            self.end(grpc.StatusCode.UNAVAILABLE, "the connection cannot be written to")

    async def send(self, context: Context) -> None:
        """Send what there is to send until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            messages, self._messages = self._messages, []
            due, self._due = self._due, {}
            shift_us = self.member.shift_us
            messages += [
                HeadMessage(durable=Durable(run=run, sequence=last, shift_us=shift_us))
                for run, last in due.items()
            ]
            for message in messages:
                await context.write(message.SerializeToString())
