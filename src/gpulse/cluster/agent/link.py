"""Keeps an agent connected to a head: opens one stream after the other, and goes back to the best that answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from gpulse.cluster import wire
from gpulse.cluster.agent.backoff import MIN_SECONDS
from gpulse.cluster.agent.heads import Candidate, Heads
from gpulse.cluster.agent.stream import Side, Stream, printable
from gpulse.cluster.aside import aside
from gpulse.cluster.tls import channel_credentials
from gpulse.cluster.tokens import token_hint
from gpulse.errors import GpulseError

_QUIET_SECONDS = 600.0
"""The same failure is told again after so long."""

_FORGOTTEN_SECONDS = 16.0
"""When nobody was in this one's place for so long, the next one is somebody else."""
_PLACE_SECONDS = 15.0
"""For so long another agent in this one's place may be an earlier life of it: heads let its place be taken after ten
seconds of silence."""
_REACH_SECONDS = 2.0
"""Where there is a choice a machine that does not answer is given so long."""
_KEEP_SECONDS = 15.0
"""And a head that keeps nothing of what it gets so long."""
_MOVE_SECONDS = 2.0
"""So long the head that is left may take to say what it has kept."""
_MOST_UNCLEAR, _UNCLEAR_SECONDS = 5, 0.05
"""An attempt that came to no clear answer is made again so often, that soon."""

_REFUSALS: dict[grpc.StatusCode, str | None] = {
    grpc.StatusCode.UNAUTHENTICATED: None,
    grpc.StatusCode.PERMISSION_DENIED: "check that the token is the head's: --token-file",
    grpc.StatusCode.FAILED_PRECONDITION: "install the same version of gpulse here and at the head",
    grpc.StatusCode.INVALID_ARGUMENT: None,
    grpc.StatusCode.UNIMPLEMENTED: "something other than a head of gpulse answers there: check address and port",
}
"""What to try; None where the head's own words say it."""

_PROBE = "gpulse-probe"

_log = logging.getLogger(__name__)


class RefusedByHeadError(GpulseError):
    """The head does not want this agent."""

    why = ""
    """In the head's own words."""
    is_final = False
    """Whether no other head will want it either."""


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
    others: tuple[str, ...] = ()
    """The heads to turn to while that one does not answer, in this order."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All heads, the best first."""
        return (self.target, *self.others)


class Link:
    """Connects again and again, to the first head of its list that answers."""

    def __init__(self, config: LinkConfig, side: Side, chance: Callable[[], float]) -> None:
        """Prepare to connect.

        Args:
            config: Where to.
            side: What there is to send, and who listens.
            chance: Numbers from 0 to 1.
        """
        self._config = config
        self._side = side
        self._heads = Heads(config.targets, chance)
        self._stream: Stream | None = None
        self._next: tuple[Candidate, Stream] | None = None
        """A better head than the last one, which has welcomed this agent already."""
        self._stopping = asyncio.Event()
        self._was_welcome = False
        self._at: Candidate | None = None
        """The head that has welcomed this agent, None while none has."""
        self._welcomed_at = 0.0
        self._fault = ""
        """The last one of our own that was told in full."""
        self._displaced_at: float | None = None
        """Since when another agent has had this one's place, None while none has."""
        self._displaced_last = 0.0
        self._unclear = 0
        """How often the first answer was none."""
        self.contacted = asyncio.Event()
        """Set once an attempt has come to something, or an attempt at every head to nothing."""

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
            RefusedByHeadError: No head wants this agent, and none ever did, or it is no head that is there.
            UsageError: A certificate cannot be used, and never could.
        """
        try:
            while not self._stopping.is_set():
                await self._pause(await self._attempt())
        finally:
            if self._next is not None:
                await self._next[1].close()

    async def _attempt(self) -> float:
        """Be connected for as long as it lasts; how long to wait then. What goes wrong once may go well later."""
        self._at = None
        prepared, self._next = self._next, None
        head = prepared[0] if prepared else self._heads.next(self._side.monotonic())
        if head is None:
            return self._heads.wait(self._side.monotonic())
        try:
            stream = prepared[1] if prepared else self._open(head)
            self._stream = stream
            try:
                return await self._connection(head, stream, is_greeted=prepared is not None)
            finally:
                self._stream = None
                await stream.close()
        except RefusedByHeadError as error:
            return self._refused(head, error)
        except GpulseError as error:
            if not self._was_welcome:
                raise
            return self._failed(head, error.message)
        except Exception as error:  # noqa: BLE001  sampling and spooling do not end because sending has a fault
            why = f"a fault in gpulse: {error!r}"
            if why != self._fault:
                self._fault = why
                _log.error("sending failed, which is a fault in gpulse", exc_info=error)
            return self._failed(head, why)

    def _open(self, head: Candidate) -> Stream:
        patience = _KEEP_SECONDS if self._heads.are_several else None
        return Stream(open_channel(self._config, head.target), self._config.token, self._side, patience)

    async def _connection(self, head: Candidate, stream: Stream, *, is_greeted: bool) -> float:
        try:
            if not is_greeted:
                await self._greet(head, stream)
            await self._carry(head, stream)
        except grpc.aio.AioRpcError as error:
            code, why = error.code(), printable(error.details() or error.code().name.lower())
            if code in _REFUSALS:
                raise _refusal(head, code, why) from error
            if code is grpc.StatusCode.ALREADY_EXISTS:
                return self._displaced(head, why)
            if (
                code is grpc.StatusCode.INTERNAL
                and stream.welcomed_as is None
                and self._unclear < _MOST_UNCLEAR
            ):
                self._unclear += 1  # a refusal that came while the hello was being written gets lost in gRPC
                return _UNCLEAR_SECONDS
            if code is grpc.StatusCode.UNAVAILABLE:
                if stream.welcomed_as is None:
                    why = await self._reason(head, why)
                elif "Socket closed" in why:  # all that gRPC has to say of a head that is gone
                    why = "it broke off"
        except OSError as error:  # a timeout is one, too
            why = str(error) or "it did not answer in time"
        except RefusedByHeadError:
            raise
        except GpulseError as error:
            why = error.message
        else:
            return 0.0
        return self._failed(head, why)

    async def _greet(self, head: Candidate, stream: Stream) -> None:
        """Be welcomed; where there is a choice a machine that is away is not waited for.

        Raises:
            GpulseError: Nothing listens there.
            grpc.aio.AioRpcError: The head does not want this agent, or cannot have it now.
            OSError: It does not answer.
        """
        if self._heads.are_several:
            async with asyncio.timeout(2 * _REACH_SECONDS):  # names may take their time, too
                await aside(lambda: _listens(head.target), name=_PROBE)
        await stream.greet()

    async def _carry(self, head: Candidate, stream: Stream) -> None:
        """Be connected until that ends, or until a better head has welcomed this agent."""
        carrying = asyncio.ensure_future(stream.carry(lambda name: self._connected(head, name)))
        looking = asyncio.ensure_future(self._look(head)) if head.place else None
        tasks = [carrying, *([looking] if looking else [])]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._next is not None and not carrying.done():
                stream.move()
                await asyncio.wait({carrying}, timeout=_MOVE_SECONDS)
            else:
                await carrying
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, than: Candidate) -> None:
        """Find a better head, and be welcomed there."""
        while not self._stopping.is_set():
            await self._pause(self._heads.look_after())
            for head in self._heads.better(than, self._side.monotonic()):
                stream = await self._welcoming(head)
                if stream is not None:
                    _log.info("going back to %s", head.target)
                    self._next = (head, stream)
                    return

    async def _welcoming(self, head: Candidate) -> Stream | None:
        """A stream that was welcomed by a head, None when it was not."""
        stream: Stream | None = None
        try:
            stream = self._open(head)
            await self._greet(head, stream)
            welcomed, stream = stream, None
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in _REFUSALS:
                why = printable(error.details() or code.name.lower())
                self._refused(head, _refusal(head, code, why))
        except (OSError, GpulseError) as error:
            _log.debug("%s is not back yet: %s", head.target, error)
        except Exception as error:  # noqa: BLE001  a fault of ours in looking must not end the connection there is
            _log.debug("%s cannot be asked, which is a fault in gpulse: %r", head.target, error)
        else:
            return welcomed
        finally:
            if stream is not None:
                await stream.close()
        return None

    def _failed(self, head: Candidate, why: str) -> float:
        now = self._side.monotonic()
        lasted = None if self._at is not head else now - self._welcomed_at
        wait = self._heads.failed(head, now, lasted)
        self._say(head, why, wait, is_lost=lasted is not None)
        return wait

    def _displaced(self, head: Candidate, why: str) -> float:
        """Another agent has the place of this one, and would have it elsewhere."""
        now = self._side.monotonic()
        wait = head.backoff.failed(None)
        if not self._was_welcome:
            if self._displaced_at is None or now - self._displaced_last > _FORGOTTEN_SECONDS:
                self._displaced_at = now
            self._displaced_last = now
            left = self._displaced_at + _PLACE_SECONDS - now
            if left <= 0:
                raise _unwanted(head, why, None, is_final=True)
            wait = min(left, wait)
        wait = max(MIN_SECONDS, wait)
        self._say(head, why, wait)
        return wait

    def _connected(self, head: Candidate, name: str) -> None:
        self._was_welcome = True
        self._at, self._welcomed_at = head, self._side.monotonic()
        self._displaced_at = None
        self._heads.welcomed(head)
        self.contacted.set()
        _log.info("connected to %s%s", head.target, f" as {printable(name)}" if name else "")

    async def _reason(self, head: Candidate, said: str) -> str:
        """Why there is no connection, in better words than gRPC's.

        Raises:
            RefusedByHeadError: This is the first contact, and no later one will be better.
        """
        from gpulse.cluster.client import probe  # noqa: PLC0415  when all is well it is not needed
        from gpulse.cluster.client.address import parse_address  # noqa: PLC0415
        from gpulse.cluster.client.link import UnreachableError  # noqa: PLC0415

        address, tls = parse_address(head.target), self._config.tls is not None
        try:
            if head.was_tried:
                await aside(lambda: probe.check_listening(address), name=_PROBE)
            elif hopeless := await aside(lambda: probe.hopeless(address, tls=tls), name=_PROBE):
                raise RefusedByHeadError(hopeless.message, hint=hopeless.hint)
        except UnreachableError as error:
            return error.message
        return said

    def _refused(self, head: Candidate, error: RefusedByHeadError) -> float:
        wait = self._heads.refused(head, self._side.monotonic(), error)
        if error.is_final or (not self._was_welcome and self._heads.refuse_all):
            raise error
        why = error.why or error.message
        if self._at in (None, head):
            self._say(head, why, wait, is_lost=head is self._at)
        elif head.said[0] != why:
            _log.warning("%s is back and refuses (%s), going on without it", head.target, why)
            head.said = (why, self._side.monotonic())
        return wait

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _say(self, head: Candidate, why: str, wait: float, *, is_lost: bool = False) -> None:
        """One line for a connection that was lost, few for those that never came to be."""
        head.was_tried = True
        if all(other.was_tried for other in self._heads.all):
            self.contacted.set()
        now = self._side.monotonic()
        other = self._heads.next(now) if self._heads.are_several else None
        then = f"trying again in {wait:.1f} s" if other in (None, head) else "trying the next one"
        if is_lost:
            _log.warning("lost the connection to %s (%s), %s", head.target, why, then)
        elif head.said[0] != why or now - head.said[1] > _QUIET_SECONDS:
            _log.warning("not connected to %s (%s), %s, and so on", head.target, why, then)
            head.said = (why, now)


def _refusal(head: Candidate, code: grpc.StatusCode, why: str) -> RefusedByHeadError:
    if code is not grpc.StatusCode.UNAUTHENTICATED:
        return _unwanted(head, why, _REFUSALS[code])
    from gpulse.cluster.client.address import parse_address  # noqa: PLC0415  rarely needed

    address = parse_address(head.target)
    return _unwanted(head, why.partition("; ")[0], token_hint(address.host, is_local=address.is_local))


def _unwanted(head: Candidate, why: str, hint: str | None, *, is_final: bool = False) -> RefusedByHeadError:
    error = RefusedByHeadError(f"the head at {head.target} refuses: {why}", hint=hint)
    error.why, error.is_final = why, is_final
    return error


def _listens(target: str) -> None:
    """Do nothing if somebody listens there.

    Raises:
        UnreachableError: Nobody does.
    """
    from gpulse.cluster.client import probe  # noqa: PLC0415  only where there is a choice
    from gpulse.cluster.client.address import parse_address  # noqa: PLC0415

    probe.check_listening(parse_address(target), _REACH_SECONDS)


def open_channel(config: LinkConfig, target: str) -> grpc.aio.Channel:
    """A channel to one of the heads; nothing is sent yet.

    Raises:
        UsageError: A certificate cannot be used.
    """
    options: Any = wire.channel_options()
    if config.tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, channel_credentials(*config.tls), options=options)
