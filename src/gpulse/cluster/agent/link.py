"""Keeps an agent connected to its head: opens one stream after the other, and waits between them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from gpulse.cluster import wire
from gpulse.cluster.agent.backoff import SHORTEST_SECONDS, Backoff
from gpulse.cluster.agent.stream import Side, Stream, printable
from gpulse.cluster.tls import channel_credentials
from gpulse.errors import GpulseError

_QUIET_SECONDS = 600.0
"""The same failure is told again after so long."""

_FORGOTTEN_SECONDS = 16.0
"""When nobody was in this one's place for so long, the next one is somebody else."""
_PLACE_SECONDS = 15.0
"""For so long another agent in this one's place may be an earlier life of it: heads let its place be taken after ten
seconds of silence."""
_MOST_UNCLEAR, _UNCLEAR_SECONDS = 5, 0.05
"""An attempt that came to no clear answer is made again so often, that soon."""

_REFUSALS: dict[grpc.StatusCode, str | None] = {
    grpc.StatusCode.UNAUTHENTICATED: "copy the head's token file to this machine and name it with --token-file",
    grpc.StatusCode.PERMISSION_DENIED: "check that the token is the head's: --token-file",
    grpc.StatusCode.FAILED_PRECONDITION: "install the same version of gpulse here and at the head",
    grpc.StatusCode.INVALID_ARGUMENT: None,
    grpc.StatusCode.UNIMPLEMENTED: "something else than a gpulse head answers there: check address and port",
}
"""What to try; None where the head's own words say it."""

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class RefusedByHeadError(GpulseError):
    """The head does not want this agent."""


class Tls(NamedTuple):
    """How to speak TLS, as PEM files."""

    ca: str | None = None
    """Who vouches for the head; the system's when None."""
    cert: str | None = None
    key: str | None = None


class LinkConfig(NamedTuple):
    """Where the head is, and what to show it."""

    target: str
    """`host:port`, IPv6 addresses in brackets."""
    token: str | None = None
    tls: Tls | None = None


class Link:
    """Connects again and again."""

    def __init__(self, config: LinkConfig, side: Side, chance: Callable[[], float]) -> None:
        """Prepare to connect.

        Args:
            config: Where to.
            side: What there is to send, and who listens.
            chance: Numbers from 0 to 1.
        """
        self._config = config
        self._side = side
        self._backoff = Backoff(chance)
        self._stream: Stream | None = None
        self._stopping = asyncio.Event()
        self._was_welcome = False
        self._welcomed_at: float | None = None
        self._said: tuple[str, float] = ("", 0.0)
        self._fault = ""
        """The last one of our own that was told in full."""
        self._displaced_at: float | None = None
        """Since when another agent has had this one's place, None while none has."""
        self._displaced_last = 0.0
        self._unclear = 0
        """How often the first answer was none."""
        self.contacted = asyncio.Event()
        """Set once the first attempt has come to something, or to nothing."""

    def wake(self) -> None:
        """There is something new to send."""
        if self._stream is not None:
            self._stream.awake.set()

    def announce(self) -> None:
        """There are runs that the head has not been told of: say hello again."""
        stream = self._stream
        if stream is not None and not {run.note.id for run in self._side.buffer.runs()} <= stream.told_runs:
            stream.end()

    def stop(self) -> None:
        """Send what there is, say goodbye, and end `run`."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.stop()

    async def run(self) -> None:
        """Stay connected until `stop`.

        Raises:
            RefusedByHeadError: The head does not want this agent, and never did, or it is no head that is there.
            UsageError: A certificate cannot be used, and never could.
        """
        while not self._stopping.is_set():
            await self._pause(await self._attempt())

    async def _attempt(self) -> float:
        """Be connected for as long as it lasts; how long to wait then. What goes wrong once may go well later."""
        self._welcomed_at = None
        try:
            stream = Stream(open_channel(self._config), self._config.token, self._side)
            self._stream = stream
            try:
                return await self._connection(stream)
            finally:
                self._stream = None
                await stream.close()
        except GpulseError as error:
            if not self._was_welcome:
                raise
            return self._failed(error.message)
        except Exception as error:  # noqa: BLE001  sampling and spooling do not end because sending has a fault
            why = f"a fault in gpulse: {error!r}"
            if why != self._fault:
                self._fault = why
                _log.error("sending failed, which is a fault in gpulse", exc_info=error)
            return self._failed(why)

    async def _connection(self, stream: Stream) -> float:
        try:
            await stream.run(self._connected)
        except grpc.aio.AioRpcError as error:
            code, why = error.code(), printable(error.details() or error.code().name.lower())
            if code in _REFUSALS:
                return self._refused(why, _REFUSALS[code])
            if code is grpc.StatusCode.ALREADY_EXISTS and not self._was_welcome:
                return self._displaced(why)
            if (
                code is grpc.StatusCode.INTERNAL
                and stream.welcomed_as is None
                and self._unclear < _MOST_UNCLEAR
            ):
                self._unclear += 1  # a refusal that came while the hello was being written gets lost in gRPC
                return _UNCLEAR_SECONDS
            if code is grpc.StatusCode.UNAVAILABLE:
                if stream.welcomed_as is None:
                    why = await self._reason(why)
                elif "Socket closed" in why:  # all that gRPC has to say of a head that is gone
                    why = "it broke off"
        except OSError as error:  # a timeout is one, too
            why = str(error) or "it did not answer in time"
        except GpulseError as error:
            why = error.message
        else:
            return 0.0
        return self._failed(why)

    def _failed(self, why: str) -> float:
        wait = self._backoff.failed(self._lasted())
        self._say(why, wait)
        return wait

    def _displaced(self, why: str) -> float:
        """Another agent has the place of this one, which has not been welcome yet."""
        now = self._side.monotonic()
        if self._displaced_at is None or now - self._displaced_last > _FORGOTTEN_SECONDS:
            self._displaced_at = now
        self._displaced_last = now
        left = self._displaced_at + _PLACE_SECONDS - now
        if left <= 0:
            raise self._unwanted(why, None)
        wait = max(SHORTEST_SECONDS, min(left, self._backoff.failed(0.0)))
        self._say(why, wait)
        return wait

    def _lasted(self) -> float:
        """For how long the head has welcomed this agent."""
        return 0.0 if self._welcomed_at is None else self._side.monotonic() - self._welcomed_at

    def _connected(self, name: str) -> None:
        self._was_welcome = True
        self._welcomed_at = self._side.monotonic()
        self._displaced_at = None
        self.contacted.set()
        self._said = ("", 0.0)
        _log.info("connected to %s%s", self._config.target, f" as {printable(name)}" if name else "")

    async def _reason(self, said: str) -> str:
        """Why there is no connection, in better words than gRPC's.

        Raises:
            RefusedByHeadError: This is the first contact, and no later one will be better.
        """
        from gpulse.cluster.client import probe  # noqa: PLC0415  when all is well it is not needed
        from gpulse.cluster.client.address import parse_address  # noqa: PLC0415
        from gpulse.cluster.client.client import UnreachableError  # noqa: PLC0415

        address, tls = parse_address(self._config.target), self._config.tls is not None
        try:
            if self.contacted.is_set():
                await _aside(lambda: probe.check_listening(address))
            elif hopeless := await _aside(lambda: probe.hopeless(address, tls=tls)):
                raise RefusedByHeadError(hopeless.message, hint=hopeless.hint)
        except UnreachableError as error:
            return error.message
        return said

    def _unwanted(self, why: str, hint: str | None) -> RefusedByHeadError:
        return RefusedByHeadError(f"the head at {self._config.target} refuses: {why}", hint=hint)

    def _refused(self, why: str, hint: str | None) -> float:
        if not self._was_welcome:
            raise self._unwanted(why, hint)
        wait = self._backoff.refused()
        self._say(why, wait)
        return wait

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _say(self, why: str, wait: float) -> None:
        """One line for a connection that was lost, few for those that never came to be."""
        self.contacted.set()
        now = self._side.monotonic()
        target = self._config.target
        if self._welcomed_at is not None:
            _log.warning("lost the connection to %s (%s), trying again in %.1f s", target, why, wait)
        elif self._said[0] != why or now - self._said[1] > _QUIET_SECONDS:
            _log.warning("not connected to %s (%s), trying again in %.1f s, and so on", target, why, wait)
            self._said = (why, now)


def open_channel(config: LinkConfig) -> grpc.aio.Channel:
    """A channel to the head; nothing is sent yet.

    Raises:
        UsageError: A certificate cannot be used.
    """
    options: Any = wire.channel_options()
    if config.tls is None:
        return grpc.aio.insecure_channel(config.target, options=options)
    return grpc.aio.secure_channel(config.target, channel_credentials(*config.tls), options=options)


async def _aside(step: Callable[[], Result]) -> Result:
    """Do something that waits, in a thread that nobody waits for at the end of the program."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Result] = loop.create_future()

    def told(set_outcome: Callable[[], None]) -> None:
        if not outcome.done():
            set_outcome()

    def run() -> None:
        try:
            result = step()
        except Exception as error:  # noqa: BLE001  raised again where it is waited for
            failure = error
            tell = lambda: outcome.set_exception(failure)  # noqa: E731
        else:
            tell = lambda: outcome.set_result(result)  # noqa: E731
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(told, tell)

    threading.Thread(target=run, name="gpulse-probe", daemon=True).start()
    return await outcome
