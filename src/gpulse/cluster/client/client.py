"""Client of a head over gRPC or HTTP, with errors that say what to try next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Self, TypeVar

import msgspec

from gpulse._version import __version__
from gpulse.cluster.client.address import Address
from gpulse.cluster.client.link import (
    Credentials,
    Link,
    Reply,
    UnansweredError,
)
from gpulse.cluster.protocol.answers import Error
from gpulse.cluster.tokens import token_hint
from gpulse.errors import GpulseError, RefusedError
from gpulse.model.session import Format

CALL_SECONDS = 60.0
"""A head that needs longer for an answer is not well; writing long files is not waited for by it."""


Result = TypeVar("Result")


class HeadClient:
    """A head to ask."""

    def __init__(self, link: Link, address: Address) -> None:
        """Ask over a link.

        Args:
            link: The way there; closed together with this.
            address: Where that is.
        """
        self.address = address
        self._link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._link.close()

    def call(self, operation: str, answer: type[Result], body: Mapping[str, Any] | None = None) -> Result:
        """Carry out one operation of the head (`protocol.operations`) and return its answer.

        Args:
            operation: Its name.
            answer: The type of its answer.
            body: The fields of the request; times may be as people write them, for the head's clock counts.

        Raises:
            UnreachableError: Nothing listens there.
            UnansweredError: What listens there is no head, or one of another version.
            RefusedError: It will not do that.
        """
        reply = self._link.ask(operation, body or {})
        if reply.status == 200:
            return self._decoded(operation, answer, reply)
        error = _error(reply)
        if reply.status == 404 and error is not None and "no operation" in error.error:
            raise self._other_version(operation)
        raise self._refused(reply.status, error)

    def _decoded(self, operation: str, answer: type[Result], reply: Reply) -> Result:
        try:
            return msgspec.json.decode(reply.body, type=answer)
        except msgspec.ValidationError as error:
            raise UnansweredError(
                f"the answer of the head at {self.address.target} to {operation!r} cannot be read: {error}",
                hint="install the same version of gpulse here and there",
            ) from error
        except (ValueError, RecursionError):
            raise self._refused(reply.status, None) from None

    def download(
        self,
        name: str,
        output_format: Format,
        file: BinaryIO,
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Write a session's file; how many bytes it has.

        Args:
            name: The session's name or id.
            output_format: The kind of file.
            file: Where it goes.
            progress: Told how many bytes there are so far.

        Raises:
            RefusedError: There is no such session, or the head cannot make its file.
            BrokenOffError: Only a part of it came; the file holds that part.
        """
        size = 0
        pieces = self._link.fetch({"name": name, "format": output_format})
        for piece in pieces:
            if piece.status != 200:
                raise self._refused(piece.status, _error(piece))
            file.write(piece.body)
            size += len(piece.body)
            progress(size)
        return size

    def _refused(self, status: int, error: Error | None) -> GpulseError:
        if error is None:
            return GpulseError(
                f"what answers at {self.address.target} is not a gpulse head (status {status})",
                hint="check the address and the port",
            )
        hint = error.hint
        if status == 401:
            hint = token_hint(self.address.host, is_local=self.address.is_local)
        return RefusedError(status, error.error, hint=hint)

    def _other_version(self, operation: str) -> GpulseError:
        version = "unknown" if operation == "info" else self.call("info", _Version).version
        return GpulseError(
            f"the head at {self.address.target} does not know {operation!r}: it runs gpulse {version}, this is {__version__}",
            hint="install the same version here and there",
        )


class _Version(msgspec.Struct):
    """What every version of a head says about itself."""

    version: str = "unknown"


def connect(address: Address, credentials: Credentials, *, call_seconds: float = CALL_SECONDS) -> HeadClient:
    """A client for the head at an address.

    Raises:
        UnreachableError: Nothing listens there.
        UsageError: The files for TLS cannot be used.
    """
    if address.transport == "http":
        from gpulse.cluster.client.http_link import HttpLink  # noqa: PLC0415  one of the two is enough

        return HeadClient(HttpLink(address, credentials, call_seconds), address)
    from gpulse.cluster.client.grpc_link import GrpcLink  # noqa: PLC0415  loads gRPC

    return HeadClient(GrpcLink(address, credentials, call_seconds), address)


def _error(reply: Reply) -> Error | None:
    """Return the error in a reply; None when it has none, as when something else than a head answers."""
    try:
        return msgspec.json.decode(reply.body, type=Error)
    except (ValueError, RecursionError):
        return None
