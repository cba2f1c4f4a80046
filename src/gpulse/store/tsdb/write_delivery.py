"""Deliver samples to a remote-write endpoint, which may accept them, reject some or all of them, or be unavailable.

A database may reject a whole request because of one sample, so a rejected request is bisected until the rejected part is
isolated. Samples that are too old or out of order are dropped per block of a frame, all others per series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import cramjam

from gpulse.store.tsdb.config import TsdbConfig, TsdbError
from gpulse.store.tsdb.request_builder import BlockSeries
from gpulse.store.tsdb.write_client import ConnectionFailed, WriteClient, WriteResponse
from gpulse.store.tsdb.write_request import format_labels, series_labels, split_series

MUTED_SECONDS = 60.0
"""How long a rejected series is not sent."""
_MAX_REFUSED_ALONE = 8
"""After this many series were rejected and none was accepted, the cause is not a single series."""
_MAX_POSTS = 2000
"""Maximum number of requests to bisect a rejected one; what is not isolated by then is dropped."""
_LATE_PHRASES = ("out of order", "out-of-order", "out of bounds", "duplicate sample", "too old", "too far")
_FATAL_STATUSES = frozenset({401, 402, 403, 404, 405, 407, 410, 415, 501})
_MAX_SHOWN_CHARS = 300
_MAX_WAIT_SECONDS = 300.0


class Unavailable(TsdbError):  # noqa: N818  named after the state of the database
    """The time-series database is temporarily unavailable: recent samples will be sent again."""

    def __init__(
        self, message: str, *, hint: str | None, hard: bool, wait_seconds: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.hard = hard
        self.wait_seconds = wait_seconds


class WriteRejected(TsdbError):  # noqa: N818  named after the state of the database
    """The time-series database rejects everything: the address or the credentials are wrong."""


class RefusedSamples(NamedTuple):
    """Samples that a time-series database rejected."""

    series: str
    reason: str
    samples: int
    is_late: bool = False
    """True if the samples were only too old or out of order."""


class _Bisection:
    """Intermediate result of bisecting a rejected request."""

    def __init__(self) -> None:
        self.posts = 0
        self.taken = 0
        self.refused: list[RefusedSamples] = []
        self.muted: list[tuple[BlockSeries, bytes]] = []
        self.is_late = False


class Delivery:
    """Sends samples to one time-series database over one connection."""

    def __init__(self, client: WriteClient, *, now: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = now
        self._muted: dict[tuple[int, int], dict[bytes, float]] = {}
        self.max_request_bytes = 16 << 20
        """Approximate maximum size of a request before compression."""
        self.samples_total = 0
        self.refused_total = 0
        self.refusals: list[RefusedSamples] = []
        """Rejected samples since `take_refusals` was last called."""

    def send(
        self, parts: Sequence[BlockSeries], *, is_repeated: bool = False, skips_refused: bool = False
    ) -> None:
        """Send a request, and return once the time-series database has everything that it accepts.

        Args:
            parts: The samples to send.
            is_repeated: Whether the same request was, or may have been, accepted before.
            skips_refused: Drop rejected samples even if all of them are rejected.

        Raises:
            Unavailable: The database is temporarily unavailable.
            WriteRejected: The database rejects everything.
        """
        wanted = [part for part in map(self._without_muted, parts) if part.samples] if self._muted else parts
        if not wanted:
            return
        answer = self._post(wanted)
        if answer is None:
            return
        if is_repeated and _is_late(answer):
            return  # a database that rejects duplicates has it: requests are accepted as a whole
        inquiry = _Bisection()
        self._divide(wanted, answer, inquiry, is_stubborn=skips_refused)
        if not inquiry.taken and not inquiry.is_late and not skips_refused:
            raise _rejected_error(answer)
        self._give_up(inquiry)

    def _post(self, parts: Sequence[BlockSeries]) -> WriteResponse | None:
        """Send samples as one request; return None if they were accepted, otherwise the response."""
        body = bytes(cramjam.snappy.compress_raw(b"".join(part.series for part in parts)))
        try:
            answer = self._client.post(body)
        except ConnectionFailed as error:
            raise Unavailable(error.message, hint=error.hint, hard=error.hard) from error
        if 200 <= answer.status < 300:
            self.samples_total += sum(part.samples for part in parts)
            return None
        if answer.status == 429 or (answer.status >= 500 and answer.status not in _FATAL_STATUSES):
            raise _unavailable_error(answer)
        if answer.status in _FATAL_STATUSES or answer.status < 400:
            raise _rejected_error(answer)
        return answer

    def _divide(
        self, parts: Sequence[BlockSeries], answer: WriteResponse, inquiry: _Bisection, *, is_stubborn: bool
    ) -> None:
        """Send the two halves of a rejected request separately."""
        if answer.status == 413:
            self.max_request_bytes = max(64 << 10, self.max_request_bytes // 2)
        late = _is_late(answer)
        if len(parts) == 1 and not late:
            parts = [
                BlockSeries(parts[0].node, parts[0].layout, series, 1)
                for series in split_series(parts[0].series)
            ]
        if len(parts) == 1 or inquiry.posts >= _MAX_POSTS:
            self._refused(parts, answer, inquiry, late=late)
            if (
                not is_stubborn
                and not inquiry.taken
                and not inquiry.is_late
                and len(inquiry.muted) >= _MAX_REFUSED_ALONE
            ):
                raise _rejected_error(answer)
            return
        for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            inquiry.posts += 1
            refusal = self._post(half)
            if refusal is None:
                inquiry.taken += 1
            else:
                self._divide(half, refusal, inquiry, is_stubborn=is_stubborn)

    @staticmethod
    def _refused(
        parts: Sequence[BlockSeries], answer: WriteResponse, inquiry: _Bisection, *, late: bool
    ) -> None:
        inquiry.is_late = inquiry.is_late or late
        for part in parts:
            labels = series_labels(next(split_series(part.series)))
            inquiry.refused.append(
                RefusedSamples(format_labels(labels), answer.text[:_MAX_SHOWN_CHARS], part.samples, late)
            )
            if not late and part.samples == 1:
                inquiry.muted.append((part, labels))

    def _give_up(self, inquiry: _Bisection) -> None:
        until = self._now() + MUTED_SECONDS
        for part, labels in inquiry.muted:
            self._muted.setdefault((part.node, part.layout), {})[labels] = until
        self.refused_total += sum(refusal.samples for refusal in inquiry.refused)
        self.refusals += inquiry.refused[:100]

    def _without_muted(self, part: BlockSeries) -> BlockSeries:
        """Remove the muted series from a part."""
        muted = self._muted.get((part.node, part.layout))
        if muted is None:
            return part
        now = self._now()
        if any(until <= now for until in muted.values()):
            muted = {labels: until for labels, until in muted.items() if until > now}
            if not muted:
                del self._muted[part.node, part.layout]
                return part
            self._muted[part.node, part.layout] = muted
        kept = [series for series in split_series(part.series) if series_labels(series) not in muted]
        self.refused_total += part.samples - len(kept)
        return part._replace(series=b"".join(kept), samples=len(kept))


def _is_late(answer: WriteResponse) -> bool:
    text = answer.text.lower()
    return any(word in text for word in _LATE_PHRASES)


def _unavailable_error(answer: WriteResponse) -> Unavailable:
    wait = None if answer.retry_after is None else min(answer.retry_after, _MAX_WAIT_SECONDS)
    return Unavailable(
        f"the time-series database is not accepting samples: {_describe(answer)}",
        hint="see the database's own log for the cause; unconfirmed samples are sent again",
        hard=False,
        wait_seconds=wait,
    )


def _rejected_error(answer: WriteResponse) -> WriteRejected:
    if answer.status in {401, 403, 407}:
        hint = "use --remote-headers FILE with a line such as `Authorization: Bearer ...`: the database requires authentication"
    elif answer.status < 400:
        hint = f"use the address to which the server redirects: --remote-write {(answer.location or 'URL')[:200]}"
    else:
        hint = "check that --remote-write is the remote-write endpoint of the database, which often ends in /api/v1/write or /api/v1/push"
    return WriteRejected(f"the time-series database rejects all samples: {_describe(answer)}", hint=hint)


def _describe(answer: WriteResponse) -> str:
    return f"HTTP {answer.status} {answer.text[:_MAX_SHOWN_CHARS]}".strip()


_PARALLEL_REQUESTS = 4


class ParallelDelivery:
    """Sends samples over several connections in parallel, divided by node."""

    def __init__(self, config: TsdbConfig) -> None:
        self._clients = [WriteClient(config) for _ in range(_PARALLEL_REQUESTS)]
        self._deliveries = [Delivery(client) for client in self._clients]
        self._threads = ThreadPoolExecutor(_PARALLEL_REQUESTS, "lane")

    @property
    def max_request_bytes(self) -> int:
        """Approximate maximum size of a request before compression."""
        return min(delivery.max_request_bytes for delivery in self._deliveries)

    @property
    def samples_total(self) -> int:
        """Number of accepted samples."""
        return sum(delivery.samples_total for delivery in self._deliveries)

    @property
    def refused_total(self) -> int:
        """Number of rejected samples."""
        return sum(delivery.refused_total for delivery in self._deliveries)

    def take_refusals(self) -> list[RefusedSamples]:
        """Return the rejected samples since the last call."""
        found: list[RefusedSamples] = []
        for delivery in self._deliveries:
            found += delivery.refusals
            delivery.refusals = []
        return found

    def send(self, parts: Sequence[BlockSeries], *, is_repeated: bool, skips_refused: bool) -> None:
        """Send samples, those of each node in order, and wait for all responses.

        Raises:
            Unavailable: The database is temporarily unavailable; some samples may have been accepted.
            WriteRejected: The database rejects everything.
        """
        lots: list[list[BlockSeries]] = [[] for _ in self._deliveries]
        for part in parts:
            lots[part.node % _PARALLEL_REQUESTS].append(part)
        waiting = [
            self._threads.submit(delivery.send, lot, is_repeated=is_repeated, skips_refused=skips_refused)
            for delivery, lot in zip(self._deliveries, lots, strict=True)
            if lot
        ]
        errors: list[TsdbError] = []
        for sent in waiting:
            try:
                sent.result()
            except TsdbError as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if isinstance(error, Unavailable)), errors[0])

    def started(self) -> float | None:
        """Return when the time-series database was started; None if it does not report it."""
        return self._clients[0].started()

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for client in self._clients:
            client.close()
