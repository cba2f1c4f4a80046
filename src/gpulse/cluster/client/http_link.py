"""The way to a head over HTTP, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from gpulse._version import __version__
from gpulse.cluster.client.address import Address
from gpulse.cluster.client.link import BrokenOffError, Credentials, Reply, UnansweredError
from gpulse.cluster.client.probe import CONNECT_SECONDS, explained, unreachable
from gpulse.cluster.protocol.operations import BY_NAME
from gpulse.errors import GpulseError, UsageError

_PIECE_BYTES = 1 << 18


class HttpLink:
    """One connection a question (`client.Link`). Proxies of the environment are not for a machine next door."""

    def __init__(self, address: Address, credentials: Credentials, call_seconds: float) -> None:
        """Prepare to ask.

        Args:
            address: Where the head is.
            credentials: What to show it.
            call_seconds: How long an answer may take.

        Raises:
            UsageError: The files for TLS cannot be used.
        """
        self._address = address
        self._seconds = call_seconds
        self._context = _context(credentials) if credentials.tls or address.tls else None
        self._headers = {"User-Agent": f"gpulse/{__version__}", "Accept": "application/json"}
        if credentials.token:
            self._headers["Authorization"] = f"Bearer {credentials.token}"

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """One operation.

        Raises:
            GpulseError: There was no answer.
        """
        with closing(self._connection()) as connection:
            response = self._response(connection, operation, body)
            with self._told():
                return Reply(response.status, response.read())

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """A file in pieces.

        Raises:
            GpulseError: There was no answer, or it broke off.
        """
        with closing(self._connection()) as connection:
            response = self._response(connection, "download", body)
            if response.status != 200:
                with self._told():
                    yield Reply(response.status, response.read())
                return
            while piece := self._piece(response):
                yield Reply(200, piece)
            if response.length:  # the library takes an early end for the end
                raise self._broken_off()

    def close(self) -> None:
        """Nothing is held between two questions."""

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read(_PIECE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken_off() from error

    def _broken_off(self) -> BrokenOffError:
        return BrokenOffError(f"the download from {self._address.target} broke off", hint="try again")

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._context)

    def _response(
        self, connection: http.client.HTTPConnection, operation: str, body: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        method, path, content = _request(operation, body)
        headers = self._headers if content is None else {**self._headers, "Content-Type": "application/json"}
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise explained(
                self._address,
                tls=True,
                detail=getattr(error, "verify_message", "") or str(error.reason or error),
            ) from error
        except OSError as error:
            raise unreachable(self._address, error) from error
        connection.sock.settimeout(self._seconds)
        with self._told():
            connection.request(method, path, content, headers)
            return connection.getresponse()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say the errors of a connection in our words."""
        try:
            yield
        except TimeoutError as error:
            raise UnansweredError(
                f"the head at {self._address.target} did not answer within {self._seconds:g} s",
                hint="look at the head's log, and try again",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            detail = str(error) or type(error).__name__
            raise explained(self._address, tls=self._context is not None, detail=detail[:200]) from error


def _request(operation: str, body: Mapping[str, Any]) -> tuple[str, str, bytes | None]:
    """The method, the path and the body that an operation has in HTTP."""
    known = BY_NAME.get(operation)
    if known is None:
        raise GpulseError(f"there is no operation {operation!r}")
    path, rest = known.paths[-1], dict(body)
    for name in list(rest):
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", quote(str(rest.pop(name)), safe=""))
    if known.method == "POST":
        return "POST", path, json.dumps(rest).encode()
    query = {name: _word(value) for name, value in rest.items() if value is not None}
    return "GET", f"{path}?{urlencode(query)}" if query else path, None


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return json.dumps(value)


def _context(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"--tls-ca {credentials.ca} holds no certificates: {error.strerror or error}",
            hint="name a PEM file",
        ) from error
    if (credentials.cert is None) != (credentials.key is None):
        raise UsageError(
            "a certificate needs its key, and a key its certificate", hint="--tls-cert and --tls-key"
        )
    if credentials.cert is not None:
        try:
            context.load_cert_chain(credentials.cert, credentials.key, password="")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"{credentials.cert} and {credentials.key} are no certificate and its key",
                hint="--tls-cert takes a PEM certificate, --tls-key its PEM key without a password",
            ) from error
    return context
