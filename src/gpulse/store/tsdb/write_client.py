"""HTTP client for remote write over one persistent connection; also reads when the database was started."""

from __future__ import annotations

import http.client
import re
import ssl
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from gpulse._version import __version__
from gpulse.model.safe_text import one_line
from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.deadline_http import send_request

_TIMEOUT_SECONDS = 30.0
_METRICS_SECONDS = 3.0
_IDLE_SECONDS = 20.0
"""A connection that was idle for longer is not reused, since the server may close it at any time."""
_MAX_TEXT_BYTES = 64 << 10
_MAX_METRICS_BYTES = 4 << 20
_START = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_WRITE_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}


class WriteResponse(NamedTuple):
    """Response to a remote-write request."""

    status: int
    text: str
    retry_after: float | None = None
    """Seconds after which the server asks for a retry."""
    location: str | None = None


class ConnectionFailed(TsdbError):  # noqa: N818  named after the state of the connection
    """There was no response."""

    def __init__(self, message: str, *, hint: str | None, hard: bool) -> None:
        super().__init__(message, hint=hint)
        self.hard = hard
        """True if the database may have died; False if it is only slow."""


class WriteClient:
    """Remote-write client of one database. Not safe to use from several threads."""

    def __init__(self, config: TsdbConfig) -> None:
        self._url = urlsplit(config.write_url)
        self._query = urlsplit(config.query_url) if config.query_url else None
        self._ca = config.ca
        self._headers = {"User-Agent": f"gpulse/{__version__}", **config.headers}
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def post(self, body: bytes) -> WriteResponse:
        """Send a remote-write request.

        Raises:
            ConnectionFailed: There was no response.
        """
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self.close()
        try:
            if self._connection is None:
                self._connection = self._connect(self._url)
            headers, deadline = {**_WRITE_HEADERS, **self._headers}, time.monotonic() + _TIMEOUT_SECONDS
            path = self._url.path or "/"
            with send_request(self._connection, "POST", path, body, headers, deadline=deadline) as answer:
                text = answer.read(_MAX_TEXT_BYTES)
                if answer.read(1):
                    self.close()  # do not read the rest of a long response
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _connection_error(redact_url(self._url.geturl()), error) from error
        self._used = time.monotonic()
        return WriteResponse(
            answer.status,
            one_line(text.decode("utf-8", "replace")),
            _retry_after(answer.headers.get("Retry-After")),
            one_line(answer.headers.get("Location", "")) or None,
        )

    def started(self) -> float | None:
        """Return when the database was started; None if it does not report it."""
        if self._query is None:
            return None
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._connect(self._query)
            path, deadline = f"{self._query.path.rstrip('/')}/metrics", time.monotonic() + _METRICS_SECONDS
            with send_request(connection, "GET", path, None, self._headers, deadline=deadline) as answer:
                found = _START.search(answer.read(_MAX_METRICS_BYTES))
            return float(found[1]) if found else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            if connection is not None:
                connection.close()

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        host = url.hostname or ""
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=self._ca)
            return http.client.HTTPSConnection(host, url.port, context=context)
        return http.client.HTTPConnection(host, url.port)


def redact_url(url: str) -> str:
    """Return a URL without secrets."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _connection_error(url: str, error: Exception) -> ConnectionFailed:
    if isinstance(error, TimeoutError):
        return ConnectionFailed(
            f"{url} did not answer within {_TIMEOUT_SECONDS:g} s",
            hint="check whether the time-series database is overloaded or unreachable; unconfirmed samples are sent again",
            hard=False,
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConnectionFailed(
            f"cannot verify the certificate of {url}: {error.verify_message}",
            hint="pass the certificate of its certificate authority (CA) with --remote-ca",
            hard=True,
        )
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return ConnectionFailed(
            f"{url} closed the connection without a response",
            hint="check whether the time-series database was restarted; samples that it may not have received are sent again",
            hard=True,
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConnectionFailed(
        f"cannot reach {url}: {reason or type(error).__name__}",
        hint="check that the time-series database is running at that address; no data is lost while the log has space",
        hard=True,
    )
