"""Keep an agent connected: reconnect, fail over to other heads, and return to the preferred one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from gpulse.background_call import await_background_call
from gpulse.cluster import wire
from gpulse.cluster.agent.frame_stream import MAX_REASON_CHARACTERS, AgentContext, FrameStream
from gpulse.cluster.agent.head_selection import MIN_DELAY_SECONDS, HeadCandidate, HeadSelection
from gpulse.cluster.client.transport import (
    HeadUnreachableError,
    check_listening,
    find_permanent_failure,
    parse_address,
)
from gpulse.cluster.credentials import token_hint
from gpulse.errors import GpulseError
from gpulse.model.safe_text import printable

_WARNING_REPEAT_SECONDS = 600.0
"""An unchanged failure is logged again after this long."""

_DISPLACED_RESET_SECONDS = 16.0
"""After this long without a conflict, another agent under this node's name counts as a new conflict."""
_MAX_DISPLACED_SECONDS = 15.0
"""For this long, another agent under this node's name may be an earlier run of this one: heads drop a silent agent
after ten seconds."""
_PROBE_CONNECT_SECONDS = 2.0
"""Connect timeout when there are several heads."""
_MAX_UNACKNOWLEDGED_SECONDS = 15.0
"""With several heads, one that acknowledges nothing for this long is left."""
_GOODBYE_SECONDS = 2.0
"""How long the head that is left may take for its last acknowledgements."""
_MAX_UNCLEAR_RETRIES, _UNCLEAR_RETRY_SECONDS = 5, 0.05
"""An attempt without a clear result is repeated this often, after this delay."""

_REFUSAL_HINTS: dict[grpc.StatusCode, str | None] = {
    grpc.StatusCode.UNAUTHENTICATED: None,
    grpc.StatusCode.PERMISSION_DENIED: "check that --token-file holds this head's token",
    grpc.StatusCode.FAILED_PRECONDITION: "install the same version of gpulse here and on the head",
    grpc.StatusCode.INVALID_ARGUMENT: None,
    grpc.StatusCode.UNIMPLEMENTED: "check the address and the port: the server there is not a gpulse head",
}
"""Hint by status code; None where the head's message says what to do."""

_PROBE = "gpulse-probe"

_log = logging.getLogger(__name__)


class RefusedByHeadError(GpulseError):
    """The head refuses this agent."""

    why = ""
    """The head's message."""
    is_final = False
    """Whether every other head would refuse it, too."""


class ClientTls(NamedTuple):
    """TLS files of a client, in PEM format."""

    ca: str | None = None
    """Certificate authorities of the head; the system's when None."""
    cert: str | None = None
    key: str | None = None


class ConnectionConfig(NamedTuple):
    """Addresses of the heads, and the credentials for them."""

    target: str
    """`host:port`, IPv6 addresses in brackets."""
    token: str | None = None
    tls: ClientTls | None = None
    others: tuple[str, ...] = ()
    """Heads to fail over to, in order of preference."""

    @property
    def targets(self) -> tuple[str, ...]:
        """All heads in order of preference."""
        return (self.target, *self.others)


class AgentConnection:
    """Connection to the first head of a list that answers, reopened after every failure."""

    def __init__(self, config: ConnectionConfig, side: AgentContext, chance: Callable[[], float]) -> None:
        """Prepare to connect.

        Args:
            config: The heads and credentials.
            side: The agent.
            chance: Returns random numbers from 0 to 1.
        """
        self._config = config
        self._side = side
        self._heads = HeadSelection(config.targets, chance)
        self._stream: FrameStream | None = None
        self._next: tuple[HeadCandidate, FrameStream] | None = None
        """A preferred head that has already welcomed this agent."""
        self._stopping = asyncio.Event()
        self._was_welcome = False
        self._current_head: HeadCandidate | None = None
        """The head that welcomed this agent; None while disconnected."""
        self._welcomed_at = 0.0
        self._fault = ""
        """The last internal error that was logged with its traceback."""
        self._displaced_at: float | None = None
        """Since when another agent is connected under this node's name; None while none is."""
        self._displaced_last = 0.0
        self._unclear = 0
        """Number of attempts without a clear result."""
        self.contacted = asyncio.Event()
        """Set once connected, or once every head was tried."""

    def wake(self) -> None:
        """Send new frames."""
        if self._stream is not None:
            self._stream.awake.set()

    def announce(self) -> None:
        """Reconnect if there are runs that the last hello message did not announce."""
        stream = self._stream
        if (
            stream is not None
            and not {run.note.id for run in self._side.buffer.runs()} <= stream.announced_runs
        ):
            stream.end()

    def reconnect(self) -> None:
        """Reconnect, so that the head gets a new hello message."""
        if self._stream is not None:
            self._stream.end()

    def stop(self) -> None:
        """Send the remaining frames, say goodbye, and end `run`."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.stop()

    async def run(self) -> None:
        """Stay connected until `stop`.

        Raises:
            RefusedByHeadError: All heads refuse this agent and none ever welcomed it, or the server is not a head.
            UsageError: A certificate cannot be used.
        """
        try:
            while not self._stopping.is_set():
                await self._pause(await self._attempt())
        finally:
            if self._next is not None:
                await self._next[1].close()

    async def _attempt(self) -> float:
        """Connect and stay connected as long as possible; return the seconds to wait before the next attempt."""
        self._current_head = None
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
        except Exception as error:  # noqa: BLE001  a bug in sending must not end sampling and spooling
            why = f"a bug in gpulse: {error!r}"
            if why != self._fault:
                self._fault = why
                _log.error("sending failed because of a bug in gpulse", exc_info=error)
            return self._failed(head, why)

    def _open(self, head: HeadCandidate) -> FrameStream:
        patience = _MAX_UNACKNOWLEDGED_SECONDS if self._heads.has_several else None
        return FrameStream(open_channel(self._config, head.target), self._config.token, self._side, patience)

    async def _connection(self, head: HeadCandidate, stream: FrameStream, *, is_greeted: bool) -> float:
        try:
            if not is_greeted:
                await self._greet(head, stream)
            await self._exchange(head, stream)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            why = printable(error.details() or code.name.lower(), MAX_REASON_CHARACTERS)
            if code in _REFUSAL_HINTS:
                raise _refusal_for_code(head, code, why) from error
            if code is grpc.StatusCode.ALREADY_EXISTS:
                return self._displaced(head, why)
            if (
                code is grpc.StatusCode.INTERNAL
                and stream.welcomed_as is None
                and self._unclear < _MAX_UNCLEAR_RETRIES
            ):
                self._unclear += (
                    1  # gRPC loses a refusal that arrives while the hello message is being written
                )
                return _UNCLEAR_RETRY_SECONDS
            if code is grpc.StatusCode.UNAVAILABLE:
                if stream.welcomed_as is None:
                    why = await self._reason(head, why)
                elif "Socket closed" in why:  # gRPC's text when the head is gone
                    why = "connection closed"
        except OSError as error:  # includes timeouts
            why = str(error) or "the head did not answer in time"
        except RefusedByHeadError:
            raise
        except GpulseError as error:
            why = error.message
        else:
            return 0.0
        return self._failed(head, why)

    async def _greet(self, head: HeadCandidate, stream: FrameStream) -> None:
        """Say hello and wait for the welcome; with several heads, skip a machine that is down.

        Raises:
            GpulseError: Nothing listens at the address.
            grpc.aio.AioRpcError: The head refuses this agent or cannot accept it now.
            OSError: The head does not answer.
        """
        if self._heads.has_several:
            async with asyncio.timeout(2 * _PROBE_CONNECT_SECONDS):  # resolving the name may take time, too
                await await_background_call(lambda: _probe_target(head.target), name=_PROBE)
        await stream.greet()

    async def _exchange(self, head: HeadCandidate, stream: FrameStream) -> None:
        """Send and receive until the connection ends or a preferred head has welcomed this agent."""
        exchanging = asyncio.ensure_future(stream.exchange(lambda name: self._connected(head, name)))
        seeking = asyncio.ensure_future(self._seek_preferred(head)) if head.place else None
        tasks = [exchanging, *([seeking] if seeking else [])]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._next is not None and not exchanging.done():
                stream.move()
                await asyncio.wait({exchanging}, timeout=_GOODBYE_SECONDS)
            else:
                await exchanging
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _seek_preferred(self, than: HeadCandidate) -> None:
        """Wait for a preferred head and connect to it."""
        while not self._stopping.is_set():
            await self._pause(self._heads.probe_delay())
            for head in self._heads.better(than, self._side.monotonic()):
                stream = await self._try_head(head)
                if stream is not None:
                    _log.info("returning to the preferred head %s", head.target)
                    self._next = (head, stream)
                    return

    async def _try_head(self, head: HeadCandidate) -> FrameStream | None:
        """Return a stream that a head welcomed; None if it did not."""
        stream: FrameStream | None = None
        try:
            stream = self._open(head)
            await self._greet(head, stream)
            welcomed, stream = stream, None
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in _REFUSAL_HINTS:
                why = printable(error.details() or code.name.lower(), MAX_REASON_CHARACTERS)
                self._refused(head, _refusal_for_code(head, code, why))
        except (OSError, GpulseError) as error:
            _log.debug("the preferred head %s is not available yet: %s", head.target, error)
        except Exception as error:  # noqa: BLE001  a bug here must not end the existing connection
            _log.debug(
                "cannot probe the preferred head %s because of a bug in gpulse: %r", head.target, error
            )
        else:
            return welcomed
        finally:
            if stream is not None:
                await stream.close()
        return None

    def _failed(self, head: HeadCandidate, why: str) -> float:
        now = self._side.monotonic()
        lasted = None if self._current_head is not head else now - self._welcomed_at
        wait = self._heads.failed(head, now, lasted)
        self._log_failure(head, why, wait, is_lost=lasted is not None)
        return wait

    def _displaced(self, head: HeadCandidate, why: str) -> float:
        """Wait while another agent is connected under this node's name; another head would refuse it, too."""
        now = self._side.monotonic()
        wait = head.backoff.failed(None)
        if not self._was_welcome:
            if self._displaced_at is None or now - self._displaced_last > _DISPLACED_RESET_SECONDS:
                self._displaced_at = now
            self._displaced_last = now
            left = self._displaced_at + _MAX_DISPLACED_SECONDS - now
            if left <= 0:
                raise _refusal_error(head, why, None, is_final=True)
            wait = min(left, wait)
        wait = max(MIN_DELAY_SECONDS, wait)
        self._log_failure(head, why, wait)
        return wait

    def _connected(self, head: HeadCandidate, name: str) -> None:
        self._was_welcome = True
        self._current_head, self._welcomed_at = head, self._side.monotonic()
        self._displaced_at = None
        self._heads.welcomed(head)
        self.contacted.set()
        _log.info("connected to %s%s", head.target, f" as {printable(name)}" if name else "")

    async def _reason(self, head: HeadCandidate, said: str) -> str:
        """Return why there is no connection, in clearer words than gRPC's.

        Raises:
            RefusedByHeadError: This is the first attempt, and no later one can succeed.
        """
        address, tls = parse_address(head.target), self._config.tls is not None
        try:
            if head.was_tried:
                await await_background_call(lambda: check_listening(address), name=_PROBE)
            elif refusal := await await_background_call(
                lambda: find_permanent_failure(address, tls=tls), name=_PROBE
            ):
                raise RefusedByHeadError(refusal.message, hint=refusal.hint)
        except HeadUnreachableError as error:
            return error.message
        return said

    def _refused(self, head: HeadCandidate, error: RefusedByHeadError) -> float:
        wait = self._heads.refused(head, self._side.monotonic(), error)
        if error.is_final or (not self._was_welcome and self._heads.all_refused):
            raise error
        why = error.why or error.message
        if self._current_head in (None, head):
            self._log_failure(head, why, wait, is_lost=head is self._current_head)
        elif head.said[0] != why:
            _log.warning(
                "the preferred head %s is available again but refuses this agent (%s); staying with the current head",
                head.target,
                why,
            )
            head.said = (why, self._side.monotonic())
        return wait

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _log_failure(self, head: HeadCandidate, why: str, wait: float, *, is_lost: bool = False) -> None:
        """Log each lost connection once, and repeated failures to connect only now and then."""
        head.was_tried = True
        if all(other.was_tried for other in self._heads.all):
            self.contacted.set()
        now = self._side.monotonic()
        other = self._heads.next(now) if self._heads.has_several else None
        then = f"trying again in {wait:.1f} s" if other in (None, head) else "trying the next head"
        if is_lost:
            _log.warning("lost the connection to %s (%s); %s", head.target, why, then)
        elif head.said[0] != why or now - head.said[1] > _WARNING_REPEAT_SECONDS:
            _log.warning("cannot connect to %s (%s); %s", head.target, why, then)
            head.said = (why, now)


def _refusal_for_code(head: HeadCandidate, code: grpc.StatusCode, why: str) -> RefusedByHeadError:
    if code is not grpc.StatusCode.UNAUTHENTICATED:
        return _refusal_error(head, why, _REFUSAL_HINTS[code])
    address = parse_address(head.target)
    return _refusal_error(head, why.partition("; ")[0], token_hint(address.host, is_local=address.is_local))


def _refusal_error(
    head: HeadCandidate, why: str, hint: str | None, *, is_final: bool = False
) -> RefusedByHeadError:
    error = RefusedByHeadError(f"the head at {head.target} refused this agent: {why}", hint=hint)
    error.why, error.is_final = why, is_final
    return error


def _probe_target(target: str) -> None:
    """Check that something listens at a `host:port`.

    Raises:
        HeadUnreachableError: Nothing does.
    """
    check_listening(parse_address(target), _PROBE_CONNECT_SECONDS)


def open_channel(config: ConnectionConfig, target: str) -> grpc.aio.Channel:
    """Return a channel to one of the heads; nothing is sent yet.

    Raises:
        UsageError: A certificate cannot be used.
    """
    # Heads send little to an agent, and measuring the bandwidth for it would cost a ping for each message.
    options: Any = [*wire.channel_options(), ("grpc.http2.bdp_probe", 0)]
    if config.tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    from gpulse.cluster.tls_files import load_channel_credentials  # noqa: PLC0415  loads OpenSSL

    return grpc.aio.secure_channel(target, load_channel_credentials(*config.tls), options=options)
