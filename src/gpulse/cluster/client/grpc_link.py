"""The way to a head over gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.client.address import Address
from gpulse.cluster.client.link import BrokenOffError, Credentials, Reply, UnansweredError
from gpulse.cluster.client.probe import check_listening, explained
from gpulse.cluster.tokens import token_hint
from gpulse.errors import GpulseError, RefusedError

try:
    import grpc

    from gpulse.cluster.wire_pb2 import Reply as WireReply
    from gpulse.cluster.wire_pb2 import Request
except ImportError as error:
    raise GpulseError(
        f"gRPC cannot be used here: {error}",
        hint="pip install grpcio protobuf, or use the HTTP port: --head http://HOST:8091",
    ) from error


class GrpcLink:
    """One channel (`client.Link`)."""

    def __init__(self, address: Address, credentials: Credentials, call_seconds: float) -> None:
        """Open it.

        Args:
            address: Where the head is.
            credentials: What to show it.
            call_seconds: How long an answer may take.

        Raises:
            UnreachableError: Nothing listens there.
            UsageError: The files for TLS cannot be used.
        """
        self._address = address
        self._tls = credentials.tls or address.tls
        self._seconds = call_seconds
        self._metadata = ((wire.TOKEN_KEY, f"Bearer {credentials.token}"),) if credentials.token else ()
        check_listening(address)
        if self._tls:
            from gpulse.cluster.tls import channel_credentials  # noqa: PLC0415  most heads have none

            secret = channel_credentials(credentials.ca, credentials.cert, credentials.key)
            self._channel = grpc.secure_channel(address.target, secret, wire.channel_options())
        else:
            self._channel = grpc.insecure_channel(address.target, wire.channel_options())

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """One operation.

        Raises:
            GpulseError: There was no answer.
        """
        call: Any = self._channel.unary_unary(wire.CALL)
        request = Request(operation=operation, body=json.dumps(body).encode()).SerializeToString()
        with self._told():
            return _reply(call(request, timeout=self._seconds, metadata=self._metadata))

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """A file in pieces.

        Raises:
            GpulseError: There was no answer, or it broke off.
        """
        call: Any = self._channel.unary_stream(wire.DOWNLOAD)
        request = Request(operation="download", body=json.dumps(body).encode()).SerializeToString()
        started = False
        with self._told():
            replies = call(request, metadata=self._metadata)
            try:
                for reply in replies:
                    answer = _reply(reply)
                    if started or answer.status != 200:  # the first one says what comes
                        yield answer
                    started = True
            except grpc.RpcError as error:
                if not started:
                    raise
                raise BrokenOffError(
                    f"the download from {self._address.target} broke off: {_details(error)}", hint="try again"
                ) from error
            finally:
                replies.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say gRPC's errors in our words."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._error(error) from error

    def _error(self, error: grpc.RpcError) -> GpulseError:
        code, place = error.code(), self._address.target
        match code:
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return RefusedError(
                    401,
                    _details(error).partition("; ")[0],
                    hint=token_hint(self._address.host, is_local=self._address.is_local),
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return UnansweredError(
                    f"the head at {place} did not answer within {self._seconds:g} s",
                    hint="look at the head's log, and try again",
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return GpulseError(
                    f"what answers at {place} does not know this call (this is gpulse {__version__})",
                    hint="check the address, and install the same version here and at the head",
                )
            case grpc.StatusCode.UNAVAILABLE:
                check_listening(self._address)
                return explained(self._address, tls=self._tls, detail=_details(error))
        return GpulseError(
            f"the head at {place} failed: {_details(error)} ({code.name.lower()})",
            hint="look at the head's log",
        )


def _details(error: grpc.RpcError) -> str:
    said = " ".join(str(error.details() or "no reason given").split())
    return said if len(said) <= 200 else f"{said[:200]}…"


def _reply(reply: bytes) -> Reply:
    message = WireReply.FromString(reply)
    return Reply(message.status, message.body)
