"""Speaks HTTP to a time-series database: one connection that is kept, requests of remote write, and when the time-series database was started."""

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
from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.deadline_http import answered

_TIMEOUT_SECONDS = 30.0
_METRICS_SECONDS = 3.0
_IDLE_SECONDS = 20.0
"""A connection that was idle for longer is not trusted: a server may close it at any moment."""
_MAX_TEXT = 64 << 10
_MAX_METRICS = 4 << 20
_START = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)
_WRITE_HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}


class Answer(NamedTuple):
    """What a time-series database said."""

    status: int
    text: str
    retry_after: float | None = None
    """In so many seconds it wants to be asked again."""
    location: str | None = None


class Broken(TsdbError):  # noqa: N818  it says what became of the connection
    """No answer came."""

    def __init__(self, message: str, *, hint: str | None, hard: bool) -> None:
        super().__init__(message, hint=hint)
        self.hard = hard
        """True when the time-series database may have died, False when it is only slow."""


class Poster:
    """One time-series database; not for several threads."""

    def __init__(self, config: TsdbConfig) -> None:
        self._url = urlsplit(config.write_url)
        self._query = urlsplit(config.query_url) if config.query_url else None
        self._ca = config.ca
        self._headers = {"User-Agent": f"gpulse/{__version__}", **config.headers}
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def post(self, body: bytes) -> Answer:
        """Send a request of remote write.

        Raises:
            Broken: No answer came.
        """
        if time.monotonic() - self._used > _IDLE_SECONDS:
            self.close()
        try:
            if self._connection is None:
                self._connection = self._connect(self._url)
            headers, deadline = {**_WRITE_HEADERS, **self._headers}, time.monotonic() + _TIMEOUT_SECONDS
            path = self._url.path or "/"
            with answered(self._connection, "POST", path, body, headers, deadline=deadline) as answer:
                text = answer.read(_MAX_TEXT)
                if answer.read(1):
                    self.close()  # the rest of a long answer is not worth reading
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _broken(shown_url(self._url.geturl()), error) from error
        self._used = time.monotonic()
        return Answer(
            answer.status,
            _plain(text.decode("utf-8", "replace")),
            _retry_after(answer.headers.get("Retry-After")),
            _plain(answer.headers.get("Location", "")) or None,
        )

    def started(self) -> float | None:
        """When the time-series database was started, None when it does not say."""
        if self._query is None:
            return None
        connection: http.client.HTTPConnection | None = None
        try:
            connection = self._connect(self._query)
            path, deadline = f"{self._query.path.rstrip('/')}/metrics", time.monotonic() + _METRICS_SECONDS
            with answered(connection, "GET", path, None, self._headers, deadline=deadline) as answer:
                found = _START.search(answer.read(_MAX_METRICS))
            return float(found[1]) if found else None
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            if connection is not None:
                connection.close()

    def close(self) -> None:
        """Let go of the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        host = url.hostname or ""
        if url.scheme == "https":
            context = ssl.create_default_context(cafile=self._ca)
            return http.client.HTTPSConnection(host, url.port, context=context)
        return http.client.HTTPConnection(host, url.port)


def shown_url(url: str) -> str:
    """A URL as it may be shown: without secrets."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


def _plain(text: str) -> str:
    """What a time-series database says, on one line and harmless for terminals."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _broken(url: str, error: Exception) -> Broken:
    if isinstance(error, TimeoutError):
        return Broken(
            f"{url} did not answer within {_TIMEOUT_SECONDS:g} s",
            hint="the time-series database is too slow or cannot be reached; what it has not confirmed is sent again",
            hard=False,
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return Broken(
            f"{url} is not who it should be: {error.verify_message}",
            hint="--remote-ca names the authority that vouches for it",
            hard=True,
        )
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return Broken(
            f"{url} closed the connection without an answer",
            hint="the time-series database may have been restarted; what it may have lost is sent again",
            hard=True,
        )
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Broken(
        f"{url} cannot be reached: {reason or type(error).__name__}",
        hint="is the time-series database running, and is that its address? Nothing is lost while the log has room",
        hard=True,
    )
