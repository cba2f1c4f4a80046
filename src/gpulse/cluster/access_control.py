"""Access control: decide by token, user, machine and origin who may read from a head or change something."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import pwd
import socket
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from gpulse.cluster.credentials import load_or_create_token, read_token
from gpulse.cluster.socket_owner import find_connection_owner, find_port_owner

__all__ = [
    "LOGIN_COOKIE",
    "LOGIN_SECONDS",
    "AccessPolicy",
    "AccessRefusal",
    "HttpRequest",
    "find_client_user",
    "is_loopback",
    "load_or_create_token",
    "read_token",
]

LOGIN_COOKIE = "gpulse_login"
LOGIN_SECONDS = 30 * 86400
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ROOT = 0
_SETTLE_SECONDS = 0.05
"""Delay of a call that is allowed because of its user. gRPC reports only the address and port of a caller, not its
connection. If that connection has ended and another user's now has the same port, the call is cancelled within this time."""


class AccessRefusal(NamedTuple):
    """Why a request is refused."""

    status: int
    message: str
    hint: str


class HttpRequest(NamedTuple):
    """The parts of an HTTP request that decide whether it is served."""

    client_host: str | None
    """The client's address according to the connection, never according to a header."""
    host: str | None = None
    """The header of this name; so are the following fields."""
    origin: str | None = None
    authorization: str | None = None
    cookie: str | None = None
    method: str = "GET"
    content_type: str | None = None
    has_body: bool = False
    forwarded: bool = False
    """Whether a header says that a proxy forwarded the request, which may then come from anywhere."""
    fetch_site: str | None = None
    fetch_mode: str | None = None
    user: int | None = None
    """User ID of the client's process if it is on this machine; None if unknown."""


class AccessPolicy:
    """The access rules, the same for gRPC, HTTP and WebSocket.

    With the token, everything may be read and changed from anywhere. Without it, on the head's own machine, the user of
    the head and root may read and change everything, and other users may read. Other machines may do nothing. `private`
    also denies reading to other users; `public_read` allows it to other machines.

    Without the token, a request must be addressed to a name of the head, because a website can make its own name point
    here (DNS rebinding). Pages of other origins are refused unless their origin is allowed.
    """

    def __init__(
        self,
        token: str | None,
        allowed_origins: Collection[str] = (),
        *,
        names: Collection[str] = (),
        insecure: bool = False,
        private: bool = False,
        public_read: bool = False,
        clock: Callable[[], float] = time.time,
        who: str = "head",
    ) -> None:
        """Set the rules.

        Args:
            token: The access token; None if others may only read.
            allowed_origins: Origins of other websites that may send requests, such as `https://panel.example`.
            names: Names of the head besides localhost.
            insecure: Serve everyone without a token.
            private: Other users of this machine need the token to read, too.
            public_read: Other machines may read without a token.
            clock: Returns epoch seconds, to expire logins.
            who: What the messages call this server.
        """
        self._token = token
        self.allowed_origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        self._names = _LOCAL_NAMES | {name.lower().rstrip(".") for name in names}
        self._insecure = insecure
        self._private = private
        self._public_read = public_read
        self._owner = os.geteuid()
        self._clock = clock
        self._server_name = who

    async def check_grpc(
        self,
        peer: str,
        metadata: Iterable[tuple[str, str | bytes]],
        *,
        ports: Collection[int],
        changes: bool,
    ) -> str | None:
        """Return why a call is refused; None if it is allowed.

        Args:
            peer: Address of the caller as gRPC writes it.
            metadata: Metadata of the call.
            ports: The ports that the server listens on.
            changes: Whether the call changes anything, or only reads.
        """
        given = [
            value.decode("latin-1") if isinstance(value, bytes) else value
            for name, value in metadata
            if name.lower() == "authorization"
        ]
        if self._insecure or any(map(self._has_token, given)):
            return None
        is_local = is_loopback(peer)
        if not changes and self._may_read(is_local=is_local):
            return None
        client = _parse_peer(peer)
        if is_local and client is not None:
            user = await asyncio.to_thread(find_port_owner, client, ports)
            if self._is_trusted(user):
                await asyncio.sleep(_SETTLE_SECONDS)
                return None
        message, hint = self._explain_refusal(is_local=is_local, has_tried=bool(given), changes=changes)
        return f"{message}; {hint}"

    def check_http(self, request: HttpRequest) -> AccessRefusal | None:
        """Return why a request is refused; None if it is allowed."""
        return self._check_caller(request) or self._check_page(request) or _check_content_type(request)

    def may_change(self, request: HttpRequest) -> bool:
        """Return whether the sender of a request could also change something, and so may see code of programs."""
        change = request._replace(method="POST", content_type="application/json")
        return self.check_http(change) is None

    def check_origin(self, request: HttpRequest) -> AccessRefusal | None:
        """Check only the origin of a request, which is enough for login and logout."""
        return self._check_page(request)

    def allows_origin(self, origin: str | None) -> bool:
        """Return whether pages of an origin may read the answers."""
        return origin is not None and origin.lower() in self.allowed_origins

    def is_token(self, given: str) -> bool:
        """Return whether a text is the token."""
        return self._token is not None and _equals_secret(given, self._token)

    def make_login_cookie(self) -> str:
        """Return the value of a login cookie: derived from the token, which it does not reveal."""
        return self._signed(int(self._clock()) + LOGIN_SECONDS)

    def _may_read(self, *, is_local: bool) -> bool:
        """Return whether everyone may read, from this machine or from another one."""
        return not self._private if is_local else self._public_read

    def _is_trusted(self, user: int | None) -> bool:
        return user is not None and user in {self._owner, _ROOT}

    def _explain_refusal(self, *, is_local: bool, has_tried: bool, changes: bool) -> tuple[str, str]:
        """Return why a caller without the token is refused, and a hint."""
        asked = self._server_name
        if has_tried:
            why = f"wrong token for this {asked}"
        elif not is_local:
            what = "changes" if self._public_read and changes else "requests"
            why = f"this {asked} requires a token for {what} from other machines"
        else:
            others = (
                "users other than root"
                if self._owner == _ROOT
                else f"users other than {_user_name(self._owner)} and root"
            )
            what = "requests" if self._private else "changes"
            why = f"this {asked} requires a token for {what} by {others}"
        return (
            why,
            f"ask the user who started the {asked} to run `gpulse token`, which prints the path of the token file and how to copy it",
        )

    def _check_caller(self, request: HttpRequest) -> AccessRefusal | None:
        if self._has_token(request.authorization) or self._has_login(request.cookie):
            return None
        is_local = (
            request.client_host is not None and is_loopback(request.client_host) and not request.forwarded
        )
        if self._insecure and not is_local:
            return None
        changes = request.method not in _SAFE_METHODS
        is_allowed = self._insecure or (is_local and self._is_trusted(request.user))
        if not is_allowed and (changes or not self._may_read(is_local=is_local)):
            why, hint = self._explain_refusal(
                is_local=is_local, has_tried=request.authorization is not None, changes=changes
            )
            return AccessRefusal(401, why, f"{hint}; send it as Authorization: Bearer TOKEN")
        name = _parse_host_name(request.host)
        if name is not None and (name in self._names or (not is_local and _is_ip_address(name))):
            return None
        return AccessRefusal(
            403,
            f"the request's Host header does not name this {self._server_name}",
            "to connect without a token, use http://localhost:PORT"
            if is_local
            else "to connect without a token, use the IP address of that machine, or the name that `hostname` prints there",
        )

    def _check_page(self, request: HttpRequest) -> AccessRefusal | None:
        if request.origin is not None:
            is_strange = not (
                self.allows_origin(request.origin) or _is_same_origin(request.origin, request.host)
            )
        else:
            is_visit = request.fetch_mode == "navigate" and request.method in _SAFE_METHODS
            is_strange = request.fetch_site in {"cross-site", "same-site"} and not is_visit
        if not is_strange:
            return None
        hint = "send the request from a program, as Prometheus does, not from a web page"
        if self._server_name == "head":
            hint = "to allow this website, start the head with --cors-origin and the origin of the website"
        return AccessRefusal(403, f"this {self._server_name} refuses requests from other websites", hint)

    def _has_token(self, authorization: str | None) -> bool:
        if authorization is None:
            return False
        scheme, _, given = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(given.strip())

    def _has_login(self, cookie: str | None) -> bool:
        if cookie is None or self._token is None:
            return False
        for part in cookie.split(";"):
            name, _, value = part.strip().partition("=")
            if name == LOGIN_COOKIE and self._is_login(value):
                return True
        return False

    def _is_login(self, value: str) -> bool:
        expires = value.partition(".")[0]
        if not (expires.isascii() and expires.isdecimal() and len(expires) <= 12):
            return False
        return _equals_secret(value, self._signed(int(expires))) and self._clock() < int(expires)

    def _signed(self, expires: int) -> str:
        key = (self._token or "").encode()
        return f"{expires}.{hmac.new(key, f'gpulse login {expires}'.encode(), hashlib.sha256).hexdigest()}"


def find_client_user(accepted: socket.socket | None) -> int | None:
    """Return the user ID of a client's process; None if it is on another machine or cannot be found.

    Args:
        accepted: The server's socket of a connection that was just accepted; None if unknown.
    """
    if accepted is None:
        return None
    try:
        client = accepted.getpeername()[:2]
        if not is_loopback(client[0]):
            return None
        user = find_connection_owner(client, accepted.getsockname()[:2])
        accepted.getpeername()  # fails if the connection has ended: another user's may have its port now
    except OSError:
        return None
    return user


def is_loopback(peer: str) -> bool:
    """Return whether a peer is on this machine.

    Takes an address, or a peer as gRPC writes it: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`, `unix:`.
    """
    kind, _, rest = peer.partition(":")
    if kind in {"unix", "unix-abstract"}:
        return True
    if kind in {"ipv4", "ipv6"}:
        peer = unquote(rest).rpartition(":")[0]
    if peer.startswith("[") and peer.endswith("]"):
        peer = peer[1:-1]
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _parse_peer(peer: str) -> tuple[str, int] | None:
    """Return address and port of a peer as gRPC writes it; None if it has none."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not (port.isascii() and port.isdecimal()):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_ip_address(name: str) -> bool:
    """Return whether a name is an IP address, which cannot be rebound."""
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _user_name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _check_content_type(request: HttpRequest) -> AccessRefusal | None:
    """Refuse bodies that are not JSON: forms of other websites can send anything else."""
    if request.method in _SAFE_METHODS:
        return None
    kind = (request.content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (not kind and not request.has_body):
        return None
    return AccessRefusal(
        415,
        f"the Content-Type of the request must be application/json, but is {kind[:60] or 'missing'}",
        "add the header Content-Type: application/json (curl: -H 'Content-Type: application/json')",
    )


def _is_same_origin(origin: str, host: str | None) -> bool:
    """Return whether a page was served under the host name of the request."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in {"http", "https"} or host is None or parts.hostname is None:
        return False
    usual = 443 if parts.scheme == "https" else 80
    return _parse_host_name(host) == parts.hostname.rstrip(".") and (_parse_port(host) or usual) == (
        port or usual
    )


def _parse_host_name(host: str | None) -> str | None:
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname if host else None
        return name.rstrip(".") if name else None
    return None


def _parse_port(host: str) -> int | None:
    with suppress(ValueError):
        return urlsplit(f"//{host}").port
    return None


def _equals_secret(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
