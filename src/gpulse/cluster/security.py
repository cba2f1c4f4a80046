"""Who may talk to a head: the token, requests from the head's own machine, and pages of other origins."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from gpulse.cluster.tls import TlsFiles, channel_credentials, server_credentials
from gpulse.cluster.tokens import load_or_make_token, read_token

__all__ = [
    "COOKIE",
    "COOKIE_SECONDS",
    "Access",
    "HttpRequest",
    "Refusal",
    "TlsFiles",
    "channel_credentials",
    "is_loopback",
    "load_or_make_token",
    "read_token",
    "server_credentials",
]

COOKIE = "gpulse_login"
COOKIE_SECONDS = 30 * 86400
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


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


class Access:
    """The rules, the same for gRPC, HTTP and WebSocket.

    With the token everything may be read and written from anywhere. Without it only requests from the head's own
    machine are served, if they are addressed to it by a name of its own (a page elsewhere can make its own name
    point here) and do not come from a page of another origin. Nothing is served to pages of other origins unless
    these are allowed.
    """

    def __init__(
        self,
        token: str | None,
        allowed_origins: Collection[str] = (),
        *,
        names: Collection[str] = (),
        insecure: bool = False,
        clock: Callable[[], float] = time.time,
        who: str = "head",
    ) -> None:
        """Set the rules.

        Args:
            token: What others must know; None when nobody beyond this machine may ask anything.
            allowed_origins: Of pages elsewhere that may ask, such as `https://panel.example`.
            names: Under which the head is reached from its own machine, besides localhost.
            insecure: Serve everybody without a token.
            clock: Epoch seconds, to end logins.
            who: What is asked, in refusals.
        """
        self._token = token
        self.allowed_origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)
        self._names = _LOCAL_NAMES | {name.lower().rstrip(".") for name in names}
        self._insecure = insecure
        self._clock = clock
        self._who_is_asked = who
        where = "the file gpulse/token in the configuration directory of whoever started it"
        self._how = f"give the token of the {who}: {where}"

    def grpc(self, peer: str, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """None when a call may go on, else why it may not."""
        if self._insecure or is_loopback(peer):
            return None
        for name, value in metadata:
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            if name.lower() == "authorization" and self._has_token(text):
                return None
        return f"this head needs a token from other machines; {self._how}"

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

    def _who(self, request: HttpRequest) -> Refusal | None:
        if self._has_token(request.authorization) or self._has_login(request.cookie):
            return None
        if request.client_host is None or not is_loopback(request.client_host) or request.forwarded:
            if self._insecure:
                return None
            if request.authorization is not None:
                return Refusal(401, f"the token is not the one of this {self._who_is_asked}", self._how)
            return Refusal(
                401,
                f"this {self._who_is_asked} needs a token from other machines",
                f"{self._how}; Authorization: Bearer TOKEN",
            )
        name = _host_name(request.host)
        if name is None or name not in self._names:
            return Refusal(
                403,
                f"the request is addressed to a name that is not this {self._who_is_asked}'s",
                "without a token use http://localhost and the port",
            )
        return None

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
