"""Transport to a head over gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gpulse._version import __version__
from gpulse.cluster import wire
from gpulse.cluster.client.transport import (
    DownloadInterruptedError,
    HeadAddress,
    HeadCredentials,
    HeadNotAnsweringError,
    Reply,
    check_listening,
    explain_connection_failure,
)
from gpulse.cluster.credentials import token_hint
from gpulse.cluster.tls_files import load_channel_credentials
from gpulse.errors import GpulseError, RefusedError

try:
    import grpc

    from gpulse.cluster.wire_pb2 import Reply as WireReply
    from gpulse.cluster.wire_pb2 import Request
except ImportError as error:
    raise GpulseError(
        f"gRPC is not available here: {error}",
        hint="pip install grpcio protobuf, or use the HTTP port: --head http://HOST:8091",
    ) from error


class GrpcTransport:
    """One gRPC channel (`HeadTransport`)."""

    def __init__(self, address: HeadAddress, credentials: HeadCredentials, call_seconds: float) -> None:
        """Open the channel.

        Args:
            address: Address of the head.
            credentials: Credentials for the head.
            call_seconds: Timeout of a call.

        Raises:
            HeadUnreachableError: Nothing listens at the address.
            UsageError: The TLS files cannot be used.
        """
        self._address = address
        self._tls = credentials.tls or address.tls
        self._seconds = call_seconds
        self._metadata = ((wire.TOKEN_KEY, f"Bearer {credentials.token}"),) if credentials.token else ()
        check_listening(address)
        if self._tls:
            secret = load_channel_credentials(credentials.ca, credentials.cert, credentials.key)
            self._channel = grpc.secure_channel(address.target, secret, wire.channel_options())
        else:
            self._channel = grpc.insecure_channel(address.target, wire.channel_options())

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """Call one operation.

        Raises:
            GpulseError: There was no answer.
        """
        call: Any = self._channel.unary_unary(wire.CALL)
        request = Request(operation=operation, body=json.dumps(body).encode()).SerializeToString()
        with self._translate_errors():
            return _parse_reply(call(request, timeout=self._seconds, metadata=self._metadata))

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """Download a file in pieces.

        Raises:
            GpulseError: There was no answer, or the download was interrupted.
        """
        call: Any = self._channel.unary_stream(wire.DOWNLOAD)
        request = Request(operation="download", body=json.dumps(body).encode()).SerializeToString()
        started = False
        with self._translate_errors():
            replies = call(request, metadata=self._metadata)
            try:
                for reply in replies:
                    answer = _parse_reply(reply)
                    if started or answer.status != 200:  # the first reply only describes the file
                        yield answer
                    started = True
            except grpc.RpcError as error:
                if not started:
                    raise
                raise DownloadInterruptedError(
                    f"the download from {self._address.target} was interrupted: {_error_details(error)}",
                    hint="try again",
                ) from error
            finally:
                replies.cancel()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate gRPC errors into gpulse errors."""
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
                    _error_details(error).partition("; ")[0],
                    hint=token_hint(self._address.host, is_local=self._address.is_local),
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return HeadNotAnsweringError(
                    f"the head at {place} did not answer within {self._seconds:g} s",
                    hint="see the head's log, then try again",
                )
            case grpc.StatusCode.UNIMPLEMENTED:
                return GpulseError(
                    f"the server at {place} does not support this call (this is gpulse {__version__})",
                    hint="check the address, and install the same version here and on the head",
                )
            case grpc.StatusCode.UNAVAILABLE:
                check_listening(self._address)
                return explain_connection_failure(self._address, tls=self._tls, detail=_error_details(error))
        return GpulseError(
            f"the head at {place} failed: {_error_details(error)} ({code.name.lower()})",
            hint="see the head's log",
        )


def _error_details(error: grpc.RpcError) -> str:
    said = " ".join(str(error.details() or "no reason given").split())
    return said if len(said) <= 200 else f"{said[:200]}…"


def _parse_reply(reply: bytes) -> Reply:
    message = WireReply.FromString(reply)
    return Reply(message.status, message.body)
