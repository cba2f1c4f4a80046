"""The live stream: what is new at the nodes, over a WebSocket, as often as the client wants and can take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import asdict
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpulse._version import __version__
from gpulse.cluster.protocol.codec import encode, failure
from gpulse.cluster.protocol.interface import HeadInterface
from gpulse.cluster.security import Refusal
from gpulse.errors import GpulseError, UsageError
from gpulse.web.access import deny
from gpulse.web.answer import without_holding
from gpulse.web.news import News, gpus_of
from gpulse.web.rounds import Rounds
from gpulse.web.wish import FASTEST_SECONDS, METRICS, Wish, read_wish

MOST_CONNECTIONS = 256
_FIRST_WISH_SECONDS = 0.2
"""So long a client has to say what it wants before it gets the usual."""


class Live:
    """All live streams of a head."""

    def __init__(
        self, head: HeadInterface, clock: Callable[[], float], *, most_connections: int = MOST_CONNECTIONS
    ) -> None:
        self._head = head
        self._clock = clock
        self._most = most_connections
        self._open = 0
        self._news = News(head)
        self._rounds: dict[Wish, Rounds] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """One client, from its first to its last message."""
        if self._open >= self._most:
            await deny(
                websocket, Refusal(503, f"{self._most} live streams are open already", "close one of them")
            )
            return
        self._open += 1
        try:
            with suppress(WebSocketDisconnect):
                await websocket.accept()
                await self._talk(websocket)
        finally:
            self._open -= 1
            if not self._open:
                self._news.clear()

    async def _talk(self, websocket: WebSocket) -> None:
        client = _Client(websocket)
        listening = asyncio.create_task(client.listen())
        telling = asyncio.create_task(self._tell(client))
        try:
            await asyncio.wait((listening, telling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (listening, telling):
                task.cancel()
            results = await asyncio.gather(listening, telling, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _tell(self, client: _Client) -> None:
        """Send who is there, then everything that the client wants, and what is new of it, until it wants other things."""
        await client.send(await self._hello())
        await client.wishes(_FIRST_WISH_SECONDS)
        while True:
            wanted = client.wish
            rounds = self._rounds.setdefault(wanted, Rounds(self._head, self._news, wanted, self._clock))
            try:
                with rounds.listening(client.stirred):
                    await self._follow(client, rounds, wanted)
            finally:
                if rounds.is_empty:
                    self._rounds.pop(wanted, None)
            await asyncio.sleep(FASTEST_SECONDS)  # however often it changes its mind

    async def _follow(self, client: _Client, rounds: Rounds, wanted: Wish) -> None:
        """Send round after round; to a client that has not the one before, everything as it is by then."""
        has = 0  # the first round of all says everything
        while client.wish is wanted:
            client.stirred.clear()
            rounds.check()
            before, has = has, rounds.number
            if before == has:
                await client.stirred.wait()
            else:
                await client.send(rounds.text if before + 1 == has else await rounds.whole())

    async def _hello(self) -> str:
        nodes = (
            encode(
                {"node": node.name, "state": node.state, "labels": dict(node.labels), "gpus": gpus_of(node)}
            ).decode()
            for node in self._head.live()
        )
        parts = [part async for part in without_holding(nodes)]
        start = encode(
            {
                "type": "hello",
                "version": __version__,
                "sequence": await self._head.wait(-1, 0.0),
                "time": self._clock(),
                "interval_ms": self._head.status().freq,
                "metrics": list(METRICS),
                "missing": list(self._head.missing()),
            }
        ).decode()
        return f'{start[:-1]},"nodes":[{",".join(parts)}]}}'


class _Client:
    """The other end of a stream."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.wish = Wish()
        self.stirred = asyncio.Event()
        """Set when there is something to do: a round to send, or another wish."""

    async def listen(self) -> None:
        """Take wishes until the client leaves."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                if message.get("text") is None:
                    raise UsageError("a wish is text, not bytes", hint="send JSON as a text message")
                self.wish = read_wish(message["text"])
                self.stirred.set()
            except GpulseError as error:
                await self.send(encode({"type": "error", **asdict(failure(error)[1])}).decode())

    async def wishes(self, seconds: float) -> None:
        """Wait for so long, or until the client wants something."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stirred.wait()

    async def send(self, text: str) -> None:
        """Send a message, once those before it are on their way."""
        await self._websocket.send_text(text)
