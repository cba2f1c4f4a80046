"""Asks a head, over gRPC or HTTP: the same questions, the same answers, and errors that say what to try next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

from gpulse._version import __version__
from gpulse.cluster.client.address import Address
from gpulse.cluster.tokens import token_hint
from gpulse.errors import GpulseError, RefusedError
from gpulse.model.session import Format
from gpulse.reports.document import Document

CALL_SECONDS = 60.0
"""A head that needs longer for an answer is not well; writing long files is not waited for by it."""


class UnreachableError(GpulseError):
    """Nothing listens there."""


class UnansweredError(GpulseError):
    """Something listens there, but gives no answer that a head would give."""


class BrokenOffError(GpulseError):
    """A download ended before the file did."""


class Credentials(NamedTuple):
    """What to show a head, and how to know it."""

    token: str | None = None
    tls: bool = False
    ca: str | None = None
    """PEM file of who vouches for the head; the system's authorities when None."""
    cert: str | None = None
    """PEM file of a certificate of our own, if the head wants one."""
    key: str | None = None


class Answer(NamedTuple):
    """What a head said."""

    status: int
    """As in HTTP."""
    body: bytes


class Link(Protocol):
    """A way to a head."""

    def ask(self, operation: str, body: Mapping[str, Any]) -> Answer:
        """One operation.

        Raises:
            GpulseError: There was no answer.
        """

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Answer]:
        """A file in pieces; an answer whose status is not 200 says why there are no more.

        Raises:
            GpulseError: There was no answer.
        """

    def close(self) -> None:
        """Let go."""


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

    def call(self, operation: str, body: Mapping[str, Any] | None = None) -> Document:
        """Carry out one operation of the head (`cluster.operations`) and give its answer.

        Raises:
            UnreachableError: Nothing listens there.
            UnansweredError: What listens there is no head, or another one than was expected.
            RefusedError: It will not do that.
        """
        answer = self._link.ask(operation, body or {})
        document = _document(answer)
        if answer.status == 200 and document is not None:
            return document
        if answer.status == 404 and document is not None and "no operation" in str(document.get("error")):
            raise self._other_version(operation)
        raise self._refused(answer.status, document)

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
                raise self._refused(piece.status, _document(piece))
            file.write(piece.body)
            size += len(piece.body)
            progress(size)
        return size

    def _refused(self, status: int, document: Document | None) -> GpulseError:
        if document is None or "error" not in document:
            return GpulseError(
                f"what answers at {self.address.target} is no gpulse head (status {status})",
                hint="check the address and the port",
            )
        hint = document.get("hint")
        if status == 401:
            hint = token_hint(self.address.host, is_local=self.address.is_local)
        return RefusedError(status, str(document["error"]), hint=None if hint is None else str(hint))

    def _other_version(self, operation: str) -> GpulseError:
        version = self.call("info").get("version", "unknown") if operation != "info" else "unknown"
        return GpulseError(
            f"the head at {self.address.target} does not know {operation!r}: it runs gpulse {version}, this is {__version__}",
            hint="install the same version here and there",
        )


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


def _document(answer: Answer) -> Document | None:
    try:
        document = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
