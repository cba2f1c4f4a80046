"""A connection to a head, and how it fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from gpulse.errors import GpulseError


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


class Reply(NamedTuple):
    """The reply of a head, not decoded yet."""

    status: int
    """As in HTTP."""
    body: bytes


class Link(Protocol):
    """A way to a head."""

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """One operation.

        Raises:
            GpulseError: There was no answer.
        """

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """A file in pieces; an answer whose status is not 200 says why there are no more.

        Raises:
            GpulseError: There was no answer.
        """

    def close(self) -> None:
        """Let go."""
