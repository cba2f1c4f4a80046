"""Finds out why a head cannot be spoken to: what listens at a port, if anything does."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing, suppress
from typing import Literal, NamedTuple

from gpulse.cluster.client.address import AGENTS_USE, Address
from gpulse.cluster.client.link import UnansweredError, UnreachableError

CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
_SETTINGS_FRAME, _GOAWAY_FRAME = 4, 7

Speaks = Literal["http", "grpc", "unknown"]


class Found(NamedTuple):
    """What listens at a port."""

    speaks: Speaks
    tls: bool


def check_listening(address: Address, seconds: float = CONNECT_SECONDS) -> None:
    """Open and close a connection: what is wrong with it is told better by the system than by gRPC.

    Args:
        address: Where.
        seconds: How long to wait for it.

    Raises:
        UnreachableError: Nobody listens there.
    """
    try:
        socket.create_connection((address.host, address.port), seconds).close()
    except OSError as error:
        raise unreachable(address, error) from error


def unreachable(address: Address, error: OSError) -> UnreachableError:
    """The error to raise for a connection that could not be made."""
    place = address.target
    match error:
        case socket.gaierror():
            return UnreachableError(
                f"there is no machine called {address.host!r}: {error.strerror}",
                hint="check the name, or give the address of the head's machine",
            )
        case TimeoutError():
            return UnreachableError(
                f"{place} does not answer",
                hint="is that machine up, and does a firewall let this port through?",
            )
        case ConnectionRefusedError():
            return UnreachableError(f"nothing listens at {place}", hint=_is_it_running(address))
    return UnreachableError(
        f"{place} cannot be reached: {error.strerror or error}", hint=_is_it_running(address)
    )


def _is_it_running(address: Address) -> str:
    if address.is_local:
        return "start a head here with `gpulse head`, or give the address of one: HOST:8090"
    return "is the head running there, with --host 0.0.0.0 so that other machines reach it, and is the port right?"


def explained(address: Address, *, tls: bool, detail: str) -> UnansweredError:
    """Why somebody who listens was not understood.

    Args:
        address: Where.
        tls: Whether TLS was spoken.
        detail: What was seen of it.
    """
    place, found = address.target, look(address)
    if crossed := _crossed(address, found, tls=tls):
        return crossed
    if tls and found.tls and found.speaks in (address.transport, "unknown"):
        return UnansweredError(
            f"TLS with {place} failed: {detail}",
            hint="--tls-ca names who vouches for the head, --tls-cert and --tls-key are what it may want of you",
        )
    if found.speaks == "http" and address.transport == "grpc":
        return UnansweredError(
            f"{place} speaks HTTP, and this command speaks gRPC",
            hint="give the gRPC port (8090 unless the head was told otherwise), or http://HOST:PORT",
        )
    if found.speaks == "grpc" and address.transport == "http":
        return UnansweredError(
            f"{place} speaks gRPC, and this command speaks HTTP",
            hint="give the HTTP port: 8091 unless the head was told otherwise",
        )
    return UnansweredError(
        f"what listens at {place} is no gpulse head: {detail}", hint="check the address and the port"
    )


def hopeless(address: Address, *, tls: bool) -> UnansweredError | None:
    """Why an agent need not try again: what listens there does not speak as agents do. None when it might yet.

    Args:
        address: Where.
        tls: Whether TLS was spoken.

    Raises:
        UnreachableError: Nobody listens there.
    """
    check_listening(address)
    found = look(address)
    if found.speaks == "http":
        return UnansweredError(
            f"{address.target} speaks HTTP; agents use {AGENTS_USE}", hint=f"{address.host}:8090"
        )
    return _crossed(address, found, tls=tls)


def _crossed(address: Address, found: Found, *, tls: bool) -> UnansweredError | None:
    """One speaks TLS, the other does not."""
    if found.tls and not tls:
        return UnansweredError(
            f"the head at {address.target} speaks TLS", hint="add --tls, and --tls-ca CA.pem"
        )
    if tls and not found.tls and found.speaks != "unknown":
        return UnansweredError(f"the head at {address.target} speaks no TLS", hint="leave out --tls")
    return None


def look(address: Address) -> Found:
    """What listens at a port, as far as it can be told by asking."""
    speaks = _asked(address, None)
    if speaks != "unknown":
        return Found(speaks, tls=False)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # nothing is told to it, only looked at
    context.set_alpn_protocols(["h2" if address.transport == "grpc" else "http/1.1", "h2", "http/1.1"])
    with suppress(OSError), closing(_connection(address)) as plain:
        with closing(context.wrap_socket(plain, server_hostname=address.host)) as secured:
            if secured.selected_alpn_protocol() == "h2":
                return Found("grpc", tls=True)
        return Found(_asked(address, context), tls=True)
    return Found("unknown", tls=False)


def _asked(address: Address, context: ssl.SSLContext | None) -> Speaks:
    """What answers a plain question."""
    with suppress(OSError), closing(_connection(address)) as plain:
        secured = context.wrap_socket(plain, server_hostname=address.host) if context else plain
        with closing(secured):
            secured.sendall(f"GET / HTTP/1.1\r\nHost: {address.target}\r\nConnection: close\r\n\r\n".encode())
            return _speech(secured.recv(64))
    return "unknown"


def _speech(heard: bytes) -> Speaks:
    if heard.startswith(b"HTTP/1"):
        return "http"
    if len(heard) >= 9 and heard[3] in (_SETTINGS_FRAME, _GOAWAY_FRAME) and heard[0] == 0:
        return "grpc"
    return "unknown"


def _connection(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), _LOOK_SECONDS)
