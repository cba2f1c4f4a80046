"""PromQL client over HTTP, within what all time-series databases of the kind understand."""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from gpulse._version import __version__
from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.deadline_http import answered

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_MAX_IDLE = 4
_MAX_TOLD = 200
_BROKEN = (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest)
"""What a connection ends with that the time-series database closed while nobody asked."""
_WHOLE = {
    "nocache": "1",
    "latency_offset": "0s",
    "deny_partial_response": "1",
    "partial_response": "false",
}
"""Answers of now, and whole or none: each is some database's word for it, and the others pass it over."""


class Sample(NamedTuple):
    """A value of a series at one moment."""

    labels: Mapping[str, str]
    time: float
    value: float


class Track(NamedTuple):
    """The values of a series over time."""

    labels: Mapping[str, str]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class PromqlClient:
    """HTTP client for PromQL. Safe to use from several threads."""

    def __init__(self, config: TsdbConfig, *, timeout_seconds: float = 30.0) -> None:
        """Prepare to ask; nothing is sent yet.

        Args:
            config: Must have a `query_url`.
            timeout_seconds: The longest time to wait for a whole answer.

        Raises:
            TsdbError: Its address is no address of HTTP, or the file of authorities cannot be read.
        """
        url = urlsplit(config.query_url or "")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise TsdbError(
                f"{_plain(config.query_url or '')!r} is no address of a time-series database",
                hint="--remote-query takes a URL such as http://victoria:8428",
            )
        self.url = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path.rstrip('/')}"
        """The base of the API, without anything secret."""
        self._host, self._port = url.hostname, _port(url.netloc, url.scheme)
        self._path = url.path.rstrip("/")
        self._context = _context(config.ca) if url.scheme == "https" else None
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

    def vector(self, query: str, at: float | None = None) -> list[Sample]:
        """The value of each series at one moment, now when none is named.

        Raises:
            TsdbError: It does not answer, or refuses.
        """
        found = self._asked("query", {"query": query, **({} if at is None else {"time": _moment(at)})})
        with self._understood():
            if found["resultType"] != "vector":
                raise ValueError(found["resultType"])
            return [
                Sample(_labels(one), float(one["value"][0]), float(one["value"][1]))
                for one in found["result"]
            ]

    def matrix(self, query: str, at: float, *, deadline: float | None = None) -> list[Track]:
        """Return every sample of a selector with a range that ends at a moment.

        Args:
            query: In PromQL.
            at: Epoch seconds.
            deadline: When to give up at the latest, in monotonic seconds.

        Raises:
            TsdbError: It does not answer, or refuses.
        """
        return self._tracks("query", {"query": query, "time": _moment(at)}, deadline)

    def range(
        self, query: str, *, start: float, end: float, step: float, deadline: float | None = None
    ) -> list[Track]:
        """Return the values of an expression at `start` and every step after it up to `end`.

        Args:
            query: In PromQL.
            start: Epoch seconds.
            end: Epoch seconds.
            step: Seconds.
            deadline: When to give up at the latest, in monotonic seconds.

        Raises:
            TsdbError: It does not answer, or refuses.
        """
        asked = {"query": query, "start": _moment(start), "end": _moment(end), "step": _moment(step)}
        return self._tracks("query_range", asked, deadline)

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _tracks(self, what: str, asked: Mapping[str, str], deadline: float | None) -> list[Track]:
        found = self._asked(what, asked, deadline)
        with self._understood():
            if found["resultType"] != "matrix":
                raise ValueError(found["resultType"])
            return [_track(one) for one in found["result"]]

    def _asked(self, what: str, asked: Mapping[str, str], deadline: float | None = None) -> Any:
        """What the time-series database found."""
        seconds = self._seconds
        if deadline is not None:
            seconds = max(0.0, min(seconds, deadline - time.monotonic()))
        told = {"timeout": f"{max(1, math.ceil(seconds))}s"}
        body = urlencode({**asked, **told, **_WHOLE}).encode()
        status, content = self._exchanged(f"{self._path}/api/v1/{what}", body, seconds)
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            if status == 200:
                raise self._nonsense() from error
            document = None
        if status != 200 or not isinstance(document, dict) or document.get("status") != "success":
            raise self._refusal(status, document, content)
        if document.get("isPartial") is True:
            raise TsdbError(
                f"the time-series database at {self.url} has only a part of the answer",
                hint="are all of its storage nodes running?",
            )
        return document.get("data")

    # --- the connection

    def _exchanged(self, path: str, body: bytes, seconds: float) -> tuple[int, bytes]:
        """Return the status and the content of an answer."""
        deadline = time.monotonic() + seconds
        try:
            connection, is_used = self._taken()
            try:
                return self._exchange(connection, path, body, deadline)
            except _BROKEN:
                connection.close()
                if not is_used:
                    raise
            return self._exchange(self._fresh(), path, body, deadline)
        except TimeoutError as error:
            raise TsdbError(
                f"the time-series database at {self.url} did not answer within {seconds:.3g} s",
                hint="is it overloaded? ask for a shorter time or fewer nodes",
            ) from error
        except ssl.SSLError as error:
            raise TsdbError(
                f"the time-series database at {self.url} is not trusted: {_plain(getattr(error, 'verify_message', '') or str(error.reason or error))}",
                hint="name who vouches for it with --remote-ca",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise TsdbError(
                f"the time-series database at {self.url} cannot be reached: {_plain(str(error) or type(error).__name__)}",
                hint="is it running there? see --remote-query",
            ) from error

    def _exchange(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        is_done = False
        try:
            with answered(connection, "POST", path, body, self._headers, deadline=deadline) as response:
                content = self._read(response)
            is_done = not response.will_close
            return response.status, content
        finally:
            self._put_back(connection, is_done=is_done)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        pieces, size, told = [], 0, response.length
        while told is None or size < told:
            piece = response.read1(_PIECE_BYTES)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > _MAX_BYTES:
                raise TsdbError(
                    f"the answer of the time-series database at {self.url} is larger than {_MAX_BYTES >> 20} MiB",
                    hint="ask for a shorter time, for steps, or for fewer nodes",
                )
        if told is not None and size < told:  # the library takes an early end for the end
            raise http.client.IncompleteRead(b"", told - size)
        response.read()  # there is nothing left, and the library has to notice that
        return b"".join(pieces)

    def _taken(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), True
        return self._fresh(), False

    def _fresh(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port)
        return http.client.HTTPSConnection(self._host, self._port, context=self._context)

    def _put_back(self, connection: http.client.HTTPConnection, *, is_done: bool) -> None:
        with self._lock:
            if is_done and not self._closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    # --- what it says

    def _refusal(self, status: int, document: Any, content: bytes) -> TsdbError:
        told = (
            document.get("error") if isinstance(document, dict) else content[:1000].decode("utf-8", "replace")
        )
        words = _plain(str(told or "")) or http.client.responses.get(status, "")
        return TsdbError(
            f"the time-series database at {self.url} refused a question ({status}): {words}",
            hint=_HINTS.get(status) or ("see --remote-query" if 300 <= status < 400 else _HINT),
        )

    @contextmanager
    def _understood(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise self._nonsense() from error

    def _nonsense(self) -> TsdbError:
        return TsdbError(
            f"what answers at {self.url} does not speak Prometheus' query API",
            hint="--remote-query takes the address below which /api/v1/query is",
        )


_HINT = "see the time-series database's log"
_HINTS = {
    401: "it wants to know who asks: see --remote-headers",
    403: "it wants to know who asks: see --remote-headers",
    404: "--remote-query takes the address below which /api/v1/query is",
    405: "--remote-query takes the address below which /api/v1/query is",
    422: "ask for a shorter time or fewer nodes",
    429: "it is overloaded: try again later",
    503: "it is overloaded or starting: try again later",
}


def _track(found: Mapping[str, Any]) -> Track:
    import numpy as np  # noqa: PLC0415

    pairs = found["values"]
    times = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
    values = np.fromiter((float(pair[1]) for pair in pairs), np.float64, len(pairs))
    return Track(_labels(found), times, values)


def _labels(found: Mapping[str, Any]) -> Mapping[str, str]:
    labels = found["metric"]
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise TypeError(labels)
    return labels


def _moment(seconds: float) -> str:
    """A time as all time-series databases read it: no finer than a millisecond."""
    return f"{seconds:.3f}"


def _port(netloc: str, scheme: str) -> int:
    try:
        return urlsplit(f"//{netloc}").port or (443 if scheme == "https" else 80)
    except ValueError as error:
        raise TsdbError(
            f"{_plain(netloc)!r} has no port that makes sense", hint="such as http://victoria:8428"
        ) from error


def _context(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise TsdbError(
            f"{ca} cannot be used as authorities: {error}", hint="--remote-ca takes a PEM file"
        ) from error


def _plain(text: str) -> str:
    """Foreign text, short and without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_TOLD])
