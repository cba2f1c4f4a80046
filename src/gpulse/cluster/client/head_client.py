"""Client for a head's operations over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

import msgspec

from gpulse._version import __version__
from gpulse.cluster.client.transport import (
    HeadAddress,
    HeadCredentials,
    HeadNotAnsweringError,
    HeadTransport,
    Reply,
)
from gpulse.cluster.credentials import token_hint
from gpulse.cluster.protocol.answers import Error
from gpulse.errors import GpulseError, RefusedError
from gpulse.model.session import SessionFormat

DEFAULT_CALL_SECONDS = 60.0
"""Default timeout of a call; downloads are not limited by it."""


Result = TypeVar("Result")


class SupportsWrite(Protocol):
    """Something that bytes can be written to."""

    def write(self, data: bytes, /) -> int:
        """Write some bytes; return how many."""


class HeadClient:
    """Client of one head."""

    def __init__(self, link: HeadTransport, address: HeadAddress) -> None:
        """Use an open transport.

        Args:
            link: Transport to the head; closed together with the client.
            address: Address of the head.
        """
        self.address = address
        self._link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def call(self, operation: str, answer: type[Result], body: Mapping[str, Any] | None = None) -> Result:
        """Carry out one operation of the head (`protocol.operations`) and return its answer.

        Args:
            operation: Name of the operation.
            answer: Type of its answer.
            body: Fields of the request; times may be texts such as `-10m`, which the head resolves with its clock.

        Raises:
            HeadUnreachableError: Nothing listens at the address.
            HeadNotAnsweringError: The server is not a head, or a head of another version.
            RefusedError: The head refuses the request.
        """
        reply = self._link.ask(operation, body or {})
        if reply.status == 200:
            return self._decoded(operation, answer, reply)
        error = _parse_error(reply)
        if reply.status == 404 and error is not None and "no operation" in error.error:
            raise self._other_version(operation)
        raise self._refused(reply.status, error)

    def _decoded(self, operation: str, answer: type[Result], reply: Reply) -> Result:
        try:
            return msgspec.json.decode(reply.body, type=answer)
        except msgspec.ValidationError as error:
            raise HeadNotAnsweringError(
                f"cannot decode the answer of the head at {self.address.target} to {operation!r}: {error}",
                hint="install the same version of gpulse here and on the head",
            ) from error
        except (ValueError, RecursionError):
            raise self._refused(reply.status, None) from None

    def download(
        self,
        name: str,
        output_format: SessionFormat,
        file: SupportsWrite,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Download a session's file; return its size in bytes.

        Args:
            name: Name or ID of the session.
            output_format: File format.
            file: The file to write to.
            progress: Called with the number of bytes written so far.

        Raises:
            RefusedError: There is no such session, or the head cannot write its file.
            DownloadInterruptedError: Only a part arrived; the file holds this part.
        """
        size = 0
        pieces = self._link.fetch({"name": name, "format": output_format})
        for piece in pieces:
            if piece.status != 200:
                raise self._refused(piece.status, _parse_error(piece))
            file.write(piece.body)
            size += len(piece.body)
            progress(size)
        return size

    def _refused(self, status: int, error: Error | None) -> GpulseError:
        if error is None:
            return GpulseError(
                f"the server at {self.address.target} is not a gpulse head (HTTP status {status})",
                hint="check the address and the port",
            )
        hint = error.hint
        if status == 401:
            hint = token_hint(self.address.host, is_local=self.address.is_local)
        return RefusedError(status, error.error, hint=hint)

    def _other_version(self, operation: str) -> GpulseError:
        version = "unknown" if operation == "info" else self.call("info", _HeadVersion).version
        return GpulseError(
            f"the head at {self.address.target} does not support {operation!r}: it runs gpulse {version}, but this is gpulse {__version__}",
            hint="install the same version here and on the head",
        )


class _HeadVersion(msgspec.Struct):
    """The part of `info` that every version of a head answers."""

    version: str = "unknown"


def connect(
    address: HeadAddress, credentials: HeadCredentials, *, call_seconds: float = DEFAULT_CALL_SECONDS
) -> HeadClient:
    """Connect to the head at an address.

    Raises:
        HeadUnreachableError: Nothing listens at the address.
        UsageError: The TLS files cannot be used.
    """
    if address.transport == "http":
        from gpulse.cluster.client.http_transport import HttpTransport  # noqa: PLC0415  only one of the two is needed

        return HeadClient(HttpTransport(address, credentials, call_seconds), address)
    from gpulse.cluster.client.grpc_transport import GrpcTransport  # noqa: PLC0415  loads gRPC

    return HeadClient(GrpcTransport(address, credentials, call_seconds), address)


def _parse_error(reply: Reply) -> Error | None:
    """Return the error in a reply; None if it has none, as when the server is not a head."""
    try:
        return msgspec.json.decode(reply.body, type=Error)
    except (ValueError, RecursionError):
        return None
