"""Decide who may read from a head and who may change something: token, user, machine, and origin of a page."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import pwd
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from gpulse.cluster.socket_owner import connection_owner, port_owner
from gpulse.cluster.tls import TlsFiles, channel_credentials, server_credentials
from gpulse.cluster.tokens import load_or_make_token, read_token

if TYPE_CHECKING:
    import socket

__all__ = [
    "COOKIE",
    "COOKIE_SECONDS",
    "Access",
    "HttpRequest",
    "Refusal",
    "TlsFiles",
    "channel_credentials",
    "client_user",
    "is_loopback",
    "load_or_make_token",
    "read_token",
    "server_credentials",
]

COOKIE = "gpulse_login"
COOKIE_SECONDS = 30 * 86400
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ROOT = 0
_SETTLE_SECONDS = 0.05
"""How long a call waits that is allowed for its user's sake. gRPC does not say which connection a call came from, only its
address and port. If that connection is gone and another user's has the same port now, the call is cancelled meanwhile."""


class Refusal(NamedTuple):
    """Why a request is not served."""

    status: int
    message: str
    hint: str


class HttpRequest(NamedTuple):
    """What decides whether an HTTP request is served."""

    client_host: str | None
    """The address at the other end of the connection; never what a header claims."""
    host: str | None = None
    """The header of that name, as are the following."""
    origin: str | None = None
    authorization: str | None = None
    cookie: str | None = None
    method: str = "GET"
    content_type: str | None = None
    has_body: bool = False
    forwarded: bool = False
    """True when a header says that a proxy passed it on: it may come from anywhere then."""
    fetch_site: str | None = None
    fetch_mode: str | None = None
    user: int | None = None
    """User id of the process at the other end, if that is on this machine; None when it is unknown."""


class Access:
    """The rules, the same for gRPC, HTTP and WebSocket.

    With the token everything may be read and changed from anywhere. Without it, on the head's own machine, its own user
    and root may read and change everything, and other users may read. Other machines may do nothing. `private` closes
    reading to other users as well, `public_read` opens it to other machines.

    Without the token a request must be addressed to a name of the head, because a page elsewhere can make its own name
    point here. Nothing is served to pages of other origins unless these are allowed.
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
            token: What others must present; None when nobody else may do more than read.
            allowed_origins: Origins of pages elsewhere that may ask, such as `https://panel.example`.
            names: Names of the head, besides localhost.
            insecure: Serve everybody without a token.
            private: Other users of this machine need the token to read, too.
            public_read: Other machines may read without a token.
            clock: Epoch seconds, to end logins.
            who: What is asked, in refusals.
        """
        self._token = token
        self.allowed_origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        self._names = _LOCAL_NAMES | {name.lower().rstrip(".") for name in names}
        self._insecure = insecure
        self._private = private
        self._public_read = public_read
        self._owner = os.geteuid()
        self._clock = clock
        self._who_is_asked = who

    async def grpc(
        self,
        peer: str,
        metadata: Iterable[tuple[str, str | bytes]],
        *,
        ports: Collection[int],
        changes: bool,
    ) -> str | None:
        """Return None when a call may go on, else why it may not.

        Args:
            peer: Who calls, as gRPC writes it.
            metadata: What came with the call.
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
        client = _address(peer)
        if is_local and client is not None:
            user = await asyncio.to_thread(port_owner, client, ports)
            if self._is_trusted(user):
                await asyncio.sleep(_SETTLE_SECONDS)
                return None
        message, hint = self._unknown(is_local=is_local, has_tried=bool(given), changes=changes)
        return f"{message}; {hint}"

    def http(self, request: HttpRequest) -> Refusal | None:
        """None when a request may go on, else why it may not."""
        return self._who(request) or self._where(request) or _what(request)

    def page(self, request: HttpRequest) -> Refusal | None:
        """Whether a request comes from a page of another origin: all that logging in and out asks."""
        return self._where(request)

    def may_share(self, origin: str | None) -> bool:
        """Whether pages of this origin may read what is answered."""
        return origin is not None and origin.lower() in self.allowed_origins

    def is_token(self, given: str) -> bool:
        """Whether it is the token."""
        return self._token is not None and _same(given, self._token)

    def login(self) -> str:
        """The value of a cookie that stands for the token: made from it, and useless to find it."""
        return self._signed(int(self._clock()) + COOKIE_SECONDS)

    def _may_read(self, *, is_local: bool) -> bool:
        """Whether anybody may read, from this machine or from another one."""
        return not self._private if is_local else self._public_read

    def _is_trusted(self, user: int | None) -> bool:
        return user is not None and user in {self._owner, _ROOT}

    def _unknown(self, *, is_local: bool, has_tried: bool, changes: bool) -> tuple[str, str]:
        """Say why somebody without the token is refused, and what helps."""
        asked = self._who_is_asked
        if has_tried:
            why = f"the token is not the one of this {asked}"
        elif not is_local:
            why = f"this {asked} needs a token from other machines"
            why += " to change anything" if self._public_read and changes else ""
        else:
            others = (
                "users other than root"
                if self._owner == _ROOT
                else f"users other than {_user_name(self._owner)} and root"
            )
            why = f"this {asked} needs a token from {others}"
            why += "" if self._private else " to change anything"
        return (
            why,
            f"the user who started the {asked} can run: gpulse token (it prints where the token is and how to copy it)",
        )

    def _who(self, request: HttpRequest) -> Refusal | None:
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
            why, hint = self._unknown(
                is_local=is_local, has_tried=request.authorization is not None, changes=changes
            )
            return Refusal(401, why, f"{hint}; send it as Authorization: Bearer TOKEN")
        name = _host_name(request.host)
        if name is not None and (name in self._names or (not is_local and _is_address(name))):
            return None
        return Refusal(
            403,
            f"the request is addressed to a name that is not this {self._who_is_asked}'s",
            "without a token use http://localhost and the port"
            if is_local
            else "without a token use the address of its machine, or the name that `hostname` prints there",
        )

    def _where(self, request: HttpRequest) -> Refusal | None:
        if request.origin is not None:
            is_strange = not (self.may_share(request.origin) or _is_own(request.origin, request.host))
        else:
            is_visit = request.fetch_mode == "navigate" and request.method in _SAFE_METHODS
            is_strange = request.fetch_site in {"cross-site", "same-site"} and not is_visit
        if not is_strange:
            return None
        hint = "ask from a program, as Prometheus does"
        if self._who_is_asked == "head":
            hint = "start the head with --cors-origin and that origin if its pages may ask"
        return Refusal(403, f"pages of another origin may not ask this {self._who_is_asked} anything", hint)

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
            if name == COOKIE and self._is_login(value):
                return True
        return False

    def _is_login(self, value: str) -> bool:
        expires = value.partition(".")[0]
        if not (expires.isascii() and expires.isdecimal() and len(expires) <= 12):
            return False
        return _same(value, self._signed(int(expires))) and self._clock() < int(expires)

    def _signed(self, expires: int) -> str:
        key = (self._token or "").encode()
        return f"{expires}.{hmac.new(key, f'gpulse login {expires}'.encode(), hashlib.sha256).hexdigest()}"


def client_user(accepted: socket.socket | None) -> int | None:
    """Return the user id of a client's process; None when it is on another machine or cannot be found.

    Args:
        accepted: This side of a connection that was just accepted; None when it is unknown.
    """
    if accepted is None:
        return None
    try:
        client = accepted.getpeername()[:2]
        if not is_loopback(client[0]):
            return None
        user = connection_owner(client, accepted.getsockname()[:2])
        accepted.getpeername()  # fails once the connection is gone: another user's may have its port by now
    except OSError:
        return None
    return user


def is_loopback(peer: str) -> bool:
    """Whether the other end is on this machine.

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


def _address(peer: str) -> tuple[str, int] | None:
    """Read address and port of a peer as gRPC writes it; None where it has none."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in {"ipv4", "ipv6"} or not (port.isascii() and port.isdecimal()):
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_address(name: str) -> bool:
    """Whether it is an IP address: nobody can make one point elsewhere."""
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _user_name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def _what(request: HttpRequest) -> Refusal | None:
    """A form of another site can send anything but JSON."""
    if request.method in _SAFE_METHODS:
        return None
    kind = (request.content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or (not kind and not request.has_body):
        return None
    return Refusal(
        415,
        f"the body is {kind[:60] or 'of no stated type'}, not application/json",
        "add the header Content-Type: application/json (curl: -H 'Content-Type: application/json')",
    )


def _is_own(origin: str, host: str | None) -> bool:
    """Whether a page was served under the name that the request is addressed to."""
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in {"http", "https"} or host is None or parts.hostname is None:
        return False
    usual = 443 if parts.scheme == "https" else 80
    return _host_name(host) == parts.hostname.rstrip(".") and (_port(host) or usual) == (port or usual)


def _host_name(host: str | None) -> str | None:
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname if host else None
        return name.rstrip(".") if name else None
    return None


def _port(host: str) -> int | None:
    with suppress(ValueError):
        return urlsplit(f"//{host}").port
    return None


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
