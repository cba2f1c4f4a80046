"""Where a head is: how people write it, and how the two transports need it."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from gpulse.cluster import wire
from gpulse.errors import UsageError

Transport = Literal["grpc", "http"]

AGENTS_USE = f"the gRPC port ({wire.DEFAULT_PORT} unless the head was told otherwise)"

_DEFAULT_PORTS: dict[Transport, int] = {"grpc": wire.DEFAULT_PORT, "http": wire.DEFAULT_HTTP_PORT}
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(\d{1,5}))?", re.ASCII)
_NAMED = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?)(?::(\d{1,5}))?", re.ASCII)
_BARE = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?", re.ASCII)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_EVERYWHERE = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  replaced, not bound


class Address(NamedTuple):
    """One port of a head."""

    transport: Transport
    host: str
    """Without brackets."""
    port: int
    tls: bool = False
    """True when the address itself says so (`https://`)."""

    @property
    def target(self) -> str:
        """`host:port`, IPv6 addresses in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, where no token is needed."""
        return self.host in _LOCAL

    def reachable(self) -> Address:
        """The address for somebody who connects from the same machine: nobody is at 0.0.0.0."""
        return self._replace(host="localhost") if self.host in _EVERYWHERE else self


def agent_address(text: str) -> Address:
    """Where an agent connects to, of what somebody wrote.

    Raises:
        UsageError: It is no address, or one where HTTP is spoken.
    """
    address = parse_address(text)
    if address.transport == "http":
        raise UsageError(
            f"{text[:100]!r} is an address for HTTP; agents use {AGENTS_USE}", hint=f"{address.host}:8090"
        )
    return address


def agent_addresses(text: str) -> tuple[Address, ...]:
    """Where an agent connects to, the best head first, of what somebody wrote: `a:8090,b:8090`.

    Raises:
        UsageError: One of them is no address, or one where HTTP is spoken, or there are two of the same.
    """
    found = tuple(agent_address(part) for part in _parts(text))
    for place, address in enumerate(found):
        if address.target in {other.target for other in found[:place]}:
            raise UsageError(
                f"{address.target} is in the list twice", hint="name each head once, the best first"
            )
    return found


def parse_addresses(text: str, transport: Transport = "grpc") -> tuple[Address, ...]:
    """Read several addresses, separated by commas.

    Raises:
        UsageError: One of them is no address.
    """
    return tuple(parse_address(part, transport) for part in _parts(text))


def _parts(text: str) -> list[str]:
    """The addresses of a list; a comma at its end is nothing."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part] or [text]


def parse_address(text: str, transport: Transport = "grpc") -> Address:
    """Read `host`, `host:port`, `[::1]:port`, `::1`, or any of them after `http://` or `https://`.

    Args:
        text: What somebody wrote.
        transport: What is spoken there, unless the text says so itself.

    Raises:
        UsageError: It is no address.
    """
    given = text.strip()
    scheme, separator, rest = given.partition("://")
    tls = False
    if separator:
        if scheme.lower() not in {"http", "https", "grpc", "grpcs"}:
            raise UsageError(f"{text[:100]!r} is no address of a head", hint="HOST:8090 or http://HOST:8091")
        transport = "http" if scheme.lower().startswith("http") else "grpc"
        tls = scheme.lower().endswith("s")
        given = rest.rstrip("/")
    if _BARE.fullmatch(given):
        return Address(transport, given, _DEFAULT_PORTS[transport], tls)
    match = _BRACKETED.fullmatch(given) or _NAMED.fullmatch(given)
    port = int(match[2]) if match and match[2] else _DEFAULT_PORTS[transport]
    if match is None or not 0 < port <= 65535:
        raise UsageError(
            f"{text[:100]!r} is no address of a head",
            hint=f"HOST or HOST:{_DEFAULT_PORTS[transport]}; IPv6 addresses as [::1]:{_DEFAULT_PORTS[transport]}",
        )
    return Address(transport, match[1], port, tls)
