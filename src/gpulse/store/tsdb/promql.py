"""HTTP client for PromQL queries, limited to what all compatible time-series databases support."""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np
from numpy.typing import NDArray

from gpulse._version import __version__
from gpulse.model.safe_text import one_line, quoted
from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.deadline_http import send_request

_MAX_ANSWER_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_MAX_IDLE_CONNECTIONS = 4
_MAX_REASON_CHARS = 200
_CLOSED_ERRORS = (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest)
"""Errors of an idle connection that the server has closed."""
_COMPLETE_ANSWER = {
    "nocache": "1",
    "latency_offset": "0s",
    "deny_partial_response": "1",
    "partial_response": "false",
}
"""Ask for current and complete answers. Each parameter is for one database; others ignore it."""


class InstantSample(NamedTuple):
    """The value of a series at one time."""

    labels: Mapping[str, str]
    time: float
    value: float


class RangeSeries(NamedTuple):
    """The values of a series over time."""

    labels: Mapping[str, str]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class PromqlClient:
    """HTTP client for PromQL queries. Safe to use from several threads."""

    def __init__(self, config: TsdbConfig, *, timeout_seconds: float = 30.0) -> None:
        """Create the client; it does not connect yet.

        Args:
            config: Must have a `query_url`.
            timeout_seconds: Maximum time for a complete answer.

        Raises:
            TsdbError: The address is not an HTTP URL, or the CA file cannot be read.
        """
        url = urlsplit(config.query_url or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise TsdbError(
                f"{quoted(config.query_url or '')} is not the URL of a time-series database",
                hint="use a URL such as --remote-query http://victoria:8428",
            )
        self.url = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}"
        """Base URL of the API, without secrets."""
        self._host, self._port = url.hostname, _parse_port(url.netloc, url.scheme)
        self._path = url.path.rstrip("/")
        self._context = _tls_context(config.ca) if url.scheme == "https" else None
        self._headers = {
            "User-Agent": f"gpulse/{__version__}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
            **config.headers,
        }
        self._seconds = timeout_seconds
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def vector(self, query: str, at: float | None = None) -> list[InstantSample]:
        """Return the value of each series at a time; by default now.

        Raises:
            TsdbError: The database does not answer, or reports an error.
        """
        found = self._query("query", {"query": query, **({} if at is None else {"time": _format_time(at)})})
        with self._parsing():
            if found["resultType"] != "vector":
                raise ValueError(found["resultType"])
            return [
                InstantSample(_parse_labels(one), float(one["value"][0]), float(one["value"][1]))
                for one in found["result"]
            ]

    def matrix(self, query: str, at: float, *, deadline: float | None = None) -> list[RangeSeries]:
        """Return every sample of a range selector that ends at a time.

        Args:
            query: A PromQL range selector.
            at: Epoch seconds.
            deadline: When to give up, in monotonic seconds.

        Raises:
            TsdbError: The database does not answer, or reports an error.
        """
        return self._tracks("query", {"query": query, "time": _format_time(at)}, deadline)

    def range(
        self, query: str, *, start: float, end: float, step: float, deadline: float | None = None
    ) -> list[RangeSeries]:
        """Return the values of an expression at `start` and at every step up to `end`.

        Args:
            query: A PromQL expression.
            start: Epoch seconds.
            end: Epoch seconds.
            step: Seconds.
            deadline: When to give up, in monotonic seconds.

        Raises:
            TsdbError: The database does not answer, or reports an error.
        """
        asked = {
            "query": query,
            "start": _format_time(start),
            "end": _format_time(end),
            "step": _format_time(step),
        }
        return self._tracks("query_range", asked, deadline)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _tracks(self, what: str, asked: Mapping[str, str], deadline: float | None) -> list[RangeSeries]:
        found = self._query(what, asked, deadline)
        with self._parsing():
            if found["resultType"] != "matrix":
                raise ValueError(found["resultType"])
            return [_parse_series(one) for one in found["result"]]

    def _query(self, what: str, asked: Mapping[str, str], deadline: float | None = None) -> Any:
        """Send a query and return its data."""
        seconds = self._seconds
        if deadline is not None:
            seconds = max(0.0, min(seconds, deadline - time.monotonic()))
        timeout = {"timeout": f"{max(1, math.ceil(seconds))}s"}
        body = urlencode({**asked, **timeout, **_COMPLETE_ANSWER}).encode()
        status, content = self._send(f"{self._path}/api/v1/{what}", body, seconds)
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            if status == 200:
                raise self._protocol_error() from error
            document = None
        if status != 200 or not isinstance(document, dict) or document.get("status") != "success":
            raise self._refusal(status, document, content)
        if document.get("isPartial") is True:
            raise TsdbError(
                f"the time-series database at {self.url} returned only a partial answer",
                hint="check that all of its storage nodes are running",
            )
        return document.get("data")

    # --- the connection

    def _send(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Send a request, and return the status and the content of the response."""
        deadline = time.monotonic() + seconds
        try:
            connection, is_used = self._take_connection()
            try:
                return self._exchange(connection, path, body, deadline)
            except _CLOSED_ERRORS:
                connection.close()
                if not is_used:
                    raise
            return self._exchange(self._open_connection(), path, body, deadline)
        except TimeoutError as error:
            raise TsdbError(
                f"the time-series database at {self.url} did not answer within {seconds:.3g} s",
                hint="use a shorter time range or fewer nodes; the database may be overloaded",
            ) from error
        except ssl.SSLError as error:
            raise TsdbError(
                f"cannot verify the certificate of the time-series database at {self.url}: {one_line(getattr(error, 'verify_message', '') or str(error.reason or error), _MAX_REASON_CHARS)}",
                hint="pass the certificate of its certificate authority (CA) with --remote-ca",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise TsdbError(
                f"cannot reach the time-series database at {self.url}: {one_line(str(error) or type(error).__name__, _MAX_REASON_CHARS)}",
                hint="check that the database is running there, and check the address in --remote-query",
            ) from error

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        is_done = False
        try:
            with send_request(connection, "POST", path, body, self._headers, deadline=deadline) as response:
                content = self._read(response)
            is_done = not response.will_close
            return response.status, content
        finally:
            self._put_back(connection, is_done=is_done)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size, length = [], 0, response.length
        while length is None or size < length:
            piece = response.read1(_PIECE_BYTES)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_ANSWER_BYTES:
                raise TsdbError(
                    f"the response from the time-series database at {self.url} is larger than {_MAX_ANSWER_BYTES >> 20} MiB",
                    hint="use a shorter time range, a larger step, or fewer nodes",
                )
        if length is not None and size < length:  # http.client does not report an early end
            raise http.client.IncompleteRead(b"", length - size)
        response.read()  # nothing is left, but http.client must see the end to reuse the connection
        return b"".join(pieces)

    def _take_connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self._open_connection(), False

    def _open_connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._context)

    def _put_back(self, connection: http.client.HTTPConnection, *, is_done: bool) -> None:
        with self._lock:
            if is_done and not self._closed and len(self._idle) < _MAX_IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    # --- errors

    def _refusal(self, status: int, document: Any, content: bytes) -> TsdbError:
        reason = (
            document.get("error") if isinstance(document, dict) else content[:1000].decode("utf-8", "replace")
        )
        text = one_line(str(reason or ""), _MAX_REASON_CHARS) or http.client.responses.get(status, "")
        return TsdbError(
            f"the time-series database at {self.url} rejected a query (HTTP {status}): {text}",
            hint=_HINTS.get(status)
            or ("check the address in --remote-query" if 300 <= status < 400 else _HINT),
        )

    @contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise self._protocol_error() from error

    def _protocol_error(self) -> TsdbError:
        return TsdbError(
            f"the server at {self.url} does not support the Prometheus query API",
            hint="set --remote-query to the base URL of the API, without /api/v1/query",
        )


_HINT = "see the log of the time-series database"
_HINTS = {
    401: "give the credentials with --remote-headers: the database requires authentication",
    403: "give the credentials with --remote-headers: the database requires authentication",
    404: "set --remote-query to the base URL of the API, without /api/v1/query",
    405: "set --remote-query to the base URL of the API, without /api/v1/query",
    422: "use a shorter time range or fewer nodes",
    429: "try again later: the database is overloaded",
    503: "try again later: the database is overloaded or starting",
}


def _parse_series(found: Mapping[str, Any]) -> RangeSeries:
    pairs = found["values"]
    times = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
    values = np.fromiter((float(pair[1]) for pair in pairs), np.float64, len(pairs))
    return RangeSeries(_parse_labels(found), times, values)


def _parse_labels(found: Mapping[str, Any]) -> Mapping[str, str]:
    labels = found["metric"]
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise TypeError(labels)
    return labels


def _format_time(seconds: float) -> str:
    """Format a time with millisecond precision, which all time-series databases support."""
    return f"{seconds:.3f}"


def _parse_port(netloc: str, scheme: str) -> int:
    try:
        return urlsplit(f"//{netloc}").port or (443 if scheme == "https" else 80)
    except ValueError as error:
        raise TsdbError(
            f"the port in {quoted(netloc)} is not valid", hint="use a URL such as http://victoria:8428"
        ) from error


def _tls_context(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise TsdbError(
            f"cannot read certificate authorities from {ca}: {error}", hint="set --remote-ca to a PEM file"
        ) from error
