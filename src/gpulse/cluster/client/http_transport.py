"""Transport to a head over HTTP, with the standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, urlencode

from gpulse._version import __version__
from gpulse.cluster.client.transport import (
    CONNECT_SECONDS,
    DownloadInterruptedError,
    HeadAddress,
    HeadCredentials,
    HeadNotAnsweringError,
    Reply,
    explain_connection_failure,
    unreachable_error,
)
from gpulse.cluster.credentials import check_key_permissions
from gpulse.cluster.protocol.operations import OPERATIONS_BY_NAME
from gpulse.errors import GpulseError, UsageError

_CHUNK_BYTES = 1 << 18


class HttpTransport:
    """One HTTP connection per request (`HeadTransport`); proxy settings of the environment are ignored."""

    def __init__(self, address: HeadAddress, credentials: HeadCredentials, call_seconds: float) -> None:
        """Prepare for requests.

        Args:
            address: Address of the head.
            credentials: Credentials for the head.
            call_seconds: Timeout of a call.

        Raises:
            UsageError: The TLS files cannot be used.
        """
        self._address = address
        self._seconds = call_seconds
        self._context = _make_tls_context(credentials) if credentials.tls or address.tls else None
        self._headers = {"User-Agent": f"gpulse/{__version__}", "Accept": "application/json"}
        if credentials.token:
            self._headers["Authorization"] = f"Bearer {credentials.token}"

    def ask(self, operation: str, body: Mapping[str, Any]) -> Reply:
        """Call one operation.

        Raises:
            GpulseError: There was no answer.
        """
        with closing(self._connection()) as connection:
            response = self._response(connection, operation, body)
            with self._translate_errors():
                return Reply(response.status, response.read())

    def fetch(self, body: Mapping[str, Any]) -> Iterator[Reply]:
        """Download a file in pieces.

        Raises:
            GpulseError: There was no answer, or the download was interrupted.
        """
        with closing(self._connection()) as connection:
            response = self._response(connection, "download", body)
            if response.status != 200:
                with self._translate_errors():
                    yield Reply(response.status, response.read())
                return
            while piece := self._piece(response):
                yield Reply(200, piece)
            if response.length:  # the library does not report an early end
                raise self._broken_off()

    def close(self) -> None:
        """Do nothing: no connection is kept between requests."""

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read(_CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise self._broken_off() from error

    def _broken_off(self) -> DownloadInterruptedError:
        return DownloadInterruptedError(
            f"the download from {self._address.target} was interrupted", hint="try again"
        )

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._context is None:
            return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._context)

    def _response(
        self, connection: http.client.HTTPConnection, operation: str, body: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        method, path, content = _build_request(operation, body)
        headers = self._headers if content is None else {**self._headers, "Content-Type": "application/json"}
        try:
            connection.connect()
        except ssl.SSLError as error:
            raise explain_connection_failure(
                self._address,
                tls=True,
                detail=getattr(error, "verify_message", "") or str(error.reason or error),
            ) from error
        except OSError as error:
            raise unreachable_error(self._address, error) from error
        connection.sock.settimeout(self._seconds)
        with self._translate_errors():
            connection.request(method, path, content, headers)
            return connection.getresponse()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translate connection errors into gpulse errors."""
        try:
            yield
        except TimeoutError as error:
            raise HeadNotAnsweringError(
                f"the head at {self._address.target} did not answer within {self._seconds:g} s",
                hint="see the head's log, then try again",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            detail = str(error) or type(error).__name__
            raise explain_connection_failure(
                self._address, tls=self._context is not None, detail=detail[:200]
            ) from error


def _build_request(operation: str, body: Mapping[str, Any]) -> tuple[str, str, bytes | None]:
    """Return the HTTP method, path and body of an operation."""
    known = OPERATIONS_BY_NAME.get(operation)
    if known is None:
        raise GpulseError(f"there is no operation {operation!r}")
    path, rest = known.paths[-1], dict(body)
    for name in list(rest):
        if f"{{{name}}}" in path:
            path = path.replace(f"{{{name}}}", quote(str(rest.pop(name)), safe=""))
    if known.method == "POST":
        return "POST", path, json.dumps(rest).encode()
    query = {name: _query_text(value) for name, value in rest.items() if value is not None}
    return "GET", f"{path}?{urlencode(query)}" if query else path, None


def _query_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return json.dumps(value)


def _make_tls_context(credentials: HeadCredentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"cannot read certificates from --tls-ca {credentials.ca}: {error.strerror or error}",
            hint="give a PEM file with certificates",
        ) from error
    if (credentials.cert is None) != (credentials.key is None):
        raise UsageError("--tls-cert and --tls-key must be used together", hint="give both, or neither")
    if credentials.cert is not None and credentials.key is not None:
        try:
            context.load_cert_chain(credentials.cert, credentials.key, password="")
            check_key_permissions(credentials.key)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"{credentials.cert} and {credentials.key} are not a matching certificate and key",
                hint="give a PEM certificate with --tls-cert, and its PEM key without a passphrase with --tls-key",
            ) from error
    return context
