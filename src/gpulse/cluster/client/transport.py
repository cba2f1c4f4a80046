"""Transport to a head: addresses as users write them, credentials, the interface, its errors, and why connections fail."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gpulse.cluster import wire
from gpulse.errors import GpulseError, UsageError

if TYPE_CHECKING:
    import ssl

Transport = Literal["grpc", "http"]

AGENT_PORT_TEXT = f"the gRPC port (default: {wire.DEFAULT_PORT})"

_DEFAULT_PORTS: dict[Transport, int] = {"grpc": wire.DEFAULT_PORT, "http": wire.DEFAULT_HTTP_PORT}
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(\d{1,5}))?", re.ASCII)
_HOST_PORT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9.])?)(?::(\d{1,5}))?", re.ASCII)
_BARE_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?", re.ASCII)
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  replaced, not bound


class HeadAddress(NamedTuple):
    """Address of one port of a head."""

    transport: Transport
    host: str
    """Without brackets."""
    port: int
    tls: bool = False
    """Whether the address itself asks for TLS (`https://`)."""

    @property
    def target(self) -> str:
        """`host:port`, IPv6 addresses in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether the head is on this machine, where no token is needed."""
        return self.host in _LOCAL

    def reachable(self) -> HeadAddress:
        """Return the address to connect to from the same machine: `localhost` in place of 0.0.0.0."""
        return self._replace(host="localhost") if self.host in _WILDCARD_HOSTS else self


def parse_agent_address(text: str) -> HeadAddress:
    """Parse the address that an agent connects to.

    Raises:
        UsageError: The text is not an address, or is an address for HTTP.
    """
    address = parse_address(text)
    if address.transport == "http":
        raise UsageError(
            f"{text[:100]!r} is an HTTP address; agents use {AGENT_PORT_TEXT}",
            hint=f"{address.host}:8090",
        )
    return address


def parse_agent_addresses(text: str) -> tuple[HeadAddress, ...]:
    """Parse the addresses of an agent's heads, preferred head first: `a:8090,b:8090`.

    Raises:
        UsageError: One of them is not an address, is an address for HTTP, or is listed twice.
    """
    found = tuple(parse_agent_address(part) for part in _split_addresses(text))
    for place, address in enumerate(found):
        if address.target in {other.target for other in found[:place]}:
            raise UsageError(
                f"{address.target} is listed twice", hint="list each head once, the preferred one first"
            )
    return found


def parse_addresses(text: str, transport: Transport = "grpc") -> tuple[HeadAddress, ...]:
    """Parse several addresses, separated by commas.

    Raises:
        UsageError: One of them is not an address.
    """
    return tuple(parse_address(part, transport) for part in _split_addresses(text))


def _split_addresses(text: str) -> list[str]:
    """Split a list of addresses; a trailing comma is ignored."""
    parts = [part.strip() for part in text.split(",")]
    return [part for part in parts if part] or [text]


def parse_address(text: str, transport: Transport = "grpc") -> HeadAddress:
    """Parse `host`, `host:port`, `[::1]:port`, `::1`, or any of them after `http://` or `https://`.

    Args:
        text: The text that the user wrote.
        transport: The transport, if the text does not name one.

    Raises:
        UsageError: The text is not an address.
    """
    given = text.strip()
    scheme, separator, rest = given.partition("://")
    tls = False
    if separator:
        if scheme.lower() not in {"http", "https", "grpc", "grpcs"}:
            raise UsageError(
                f"{text[:100]!r} is not the address of a head", hint="use HOST:8090 or http://HOST:8091"
            )
        transport = "http" if scheme.lower().startswith("http") else "grpc"
        tls = scheme.lower().endswith("s")
        given = rest.rstrip("/")
    if _BARE_IPV6.fullmatch(given):
        return HeadAddress(transport, given, _DEFAULT_PORTS[transport], tls)
    match = _BRACKETED.fullmatch(given) or _HOST_PORT.fullmatch(given)
    port = int(match[2]) if match and match[2] else _DEFAULT_PORTS[transport]
    if match is None or not 0 < port <= 65535:
        raise UsageError(
            f"{text[:100]!r} is not the address of a head",
            hint=f"use HOST or HOST:{_DEFAULT_PORTS[transport]}; for IPv6 [::1]:{_DEFAULT_PORTS[transport]}",
        )
    return HeadAddress(transport, match[1], port, tls)


class HeadUnreachableError(GpulseError):
    """Nothing listens at the head's address."""


class HeadNotAnsweringError(GpulseError):
    """A server listens at the address, but does not answer as a head does."""


class DownloadInterruptedError(GpulseError):
    """A download ended early."""


class HeadCredentials(NamedTuple):
    """Access token and TLS files for a head."""

    token: str | None = None
    tls: bool = False
    ca: str | None = None
    """PEM file with the certificate authorities of the head; the system's when None."""
    cert: str | None = None
    """PEM file with the client certificate, if the head requires one."""
    key: str | None = None


class Reply(NamedTuple):
    """Reply of a head, not decoded yet."""

    status: int
    """HTTP status code."""
    body: bytes


class HeadTransport(Protocol):
    """Transport to a head."""

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """Call one operation.

        Raises:
            GpulseError: There was no answer.
        """

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """Download a file in pieces; a reply whose status is not 200 says why it ends.

        Raises:
            GpulseError: There was no answer.
        """

    def close(self) -> None:
        """Close the transport."""


CONNECT_SECONDS = 5.0
_PROBE_SECONDS = 1.0
_SETTINGS_FRAME, _GOAWAY_FRAME = 4, 7

SpokenProtocol = Literal["http", "grpc", "unknown"]


class PortProbe(NamedTuple):
    """Result of probing a port."""

    speaks: SpokenProtocol
    tls: bool


def check_listening(address: HeadAddress, seconds: float = CONNECT_SECONDS) -> None:
    """Open and close a connection: the system's errors are clearer than those of gRPC.

    Args:
        address: The address.
        seconds: Connect timeout.

    Raises:
        HeadUnreachableError: Nothing listens at the address.
    """
    try:
        socket.create_connection((address.host, address.port), seconds).close()
    except OSError as error:
        raise unreachable_error(address, error) from error


def unreachable_error(address: HeadAddress, error: OSError) -> HeadUnreachableError:
    """Return the error for a connection that could not be opened."""
    place = address.target
    match error:
        case socket.gaierror():
            return HeadUnreachableError(
                f"cannot resolve the host name {address.host!r}: {error.strerror}",
                hint="check the name, or give the IP address of the head's machine",
            )
        case TimeoutError():
            return HeadUnreachableError(
                f"{place} does not answer",
                hint="check that the machine is up and that no firewall blocks this port",
            )
        case ConnectionRefusedError():
            return HeadUnreachableError(f"nothing is listening at {place}", hint=_reachability_hint(address))
    return HeadUnreachableError(
        f"cannot reach {place}: {error.strerror or error}", hint=_reachability_hint(address)
    )


def _reachability_hint(address: HeadAddress) -> str:
    if address.is_local:
        return "start a head here with `gpulse head`, or give the address of another one: HOST:8090"
    return "check the port, and check that the head there was started with --host 0.0.0.0, so that other machines can reach it"


def explain_connection_failure(address: HeadAddress, *, tls: bool, detail: str) -> HeadNotAnsweringError:
    """Return the error for a server that listens but did not answer as expected.

    Args:
        address: The address.
        tls: Whether TLS was used.
        detail: Text of the original error.
    """
    place, found = address.target, probe_port(address)
    if crossed := _find_tls_mismatch(address, found, tls=tls):
        return crossed
    if tls and found.tls and found.speaks in (address.transport, "unknown"):
        return HeadNotAnsweringError(
            f"TLS with {place} failed: {detail}",
            hint="give the head's certificate authority with --tls-ca; "
            "if the head requires a client certificate, also give --tls-cert and --tls-key",
        )
    if found.speaks == "http" and address.transport == "grpc":
        return HeadNotAnsweringError(
            f"{place} is an HTTP port, but this command uses gRPC",
            hint="give the gRPC port (default: 8090), or use HTTP: http://HOST:PORT",
        )
    if found.speaks == "grpc" and address.transport == "http":
        return HeadNotAnsweringError(
            f"{place} is a gRPC port, but this command uses HTTP",
            hint="give the HTTP port (default: 8091)",
        )
    return HeadNotAnsweringError(
        f"the server at {place} is not a gpulse head: {detail}", hint="check the address and the port"
    )


def find_permanent_failure(address: HeadAddress, *, tls: bool) -> HeadNotAnsweringError | None:
    """Return the error if retrying cannot help, because the port uses another protocol; None if it may help.

    Args:
        address: The address.
        tls: Whether TLS was used.

    Raises:
        HeadUnreachableError: Nothing listens at the address.
    """
    check_listening(address)
    found = probe_port(address)
    if found.speaks == "http":
        return HeadNotAnsweringError(
            f"{address.target} is an HTTP port; agents use {AGENT_PORT_TEXT}", hint=f"{address.host}:8090"
        )
    return _find_tls_mismatch(address, found, tls=tls)


def _find_tls_mismatch(address: HeadAddress, found: PortProbe, *, tls: bool) -> HeadNotAnsweringError | None:
    """Return the error if one side uses TLS and the other does not."""
    if found.tls and not tls:
        return HeadNotAnsweringError(
            f"the head at {address.target} requires TLS", hint="add --tls, and --tls-ca CA.pem"
        )
    if tls and not found.tls and found.speaks != "unknown":
        return HeadNotAnsweringError(f"the head at {address.target} does not use TLS", hint="omit --tls")
    return None


def probe_port(address: HeadAddress) -> PortProbe:
    """Find out which protocol the server at a port uses."""
    speaks = _probe_http(address, None)
    if speaks != "unknown":
        return PortProbe(speaks, tls=False)
    import ssl  # noqa: PLC0415  loads OpenSSL, which agents do without

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # nothing secret is sent
    context.set_alpn_protocols(["h2" if address.transport == "grpc" else "http/1.1", "h2", "http/1.1"])
    with suppress(OSError), closing(_connect(address)) as plain:
        with closing(context.wrap_socket(plain, server_hostname=address.host)) as secured:
            if secured.selected_alpn_protocol() == "h2":
                return PortProbe("grpc", tls=True)
        return PortProbe(_probe_http(address, context), tls=True)
    return PortProbe("unknown", tls=False)


def _probe_http(address: HeadAddress, context: ssl.SSLContext | None) -> SpokenProtocol:
    """Send an HTTP request and return which protocol the answer uses."""
    with suppress(OSError), closing(_connect(address)) as plain:
        secured = context.wrap_socket(plain, server_hostname=address.host) if context else plain
        with closing(secured):
            secured.sendall(f"GET / HTTP/1.1\r\nHost: {address.target}\r\nConnection: close\r\n\r\n".encode())
            return _detect_protocol(secured.recv(64))
    return "unknown"


def _detect_protocol(heard: bytes) -> SpokenProtocol:
    if heard.startswith(b"HTTP/1"):
        return "http"
    if len(heard) >= 9 and heard[3] in (_SETTINGS_FRAME, _GOAWAY_FRAME) and heard[0] == 0:
        return "grpc"
    return "unknown"


def _connect(address: HeadAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), _PROBE_SECONDS)
