"""Deliver parts of requests to a time-series database: taken, refused in part, refused for good, or not now.

A request that is refused is divided until what is refused stands alone: a time-series database may refuse all of it for the sake of one
sample. What it calls too late or out of order is given up by the block of a frame, everything else by series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cramjam

from gpulse.store.tsdb.config import TsdbError
from gpulse.store.tsdb.requests import Part
from gpulse.store.tsdb.wire import series_labels, shown_labels, split_series
from gpulse.store.tsdb.write_client import Answer, Broken, Poster

MUTED_SECONDS = 60.0
"""So long a series that was refused is not tried again."""
_HOPELESS = 8
"""When so many were refused alone and nothing was taken, it is not about single series."""
_MAX_POSTS = 2000
"""With so many requests a refusal is looked into at most; what is still in doubt then is given up."""
_LATE = ("out of order", "out-of-order", "out of bounds", "duplicate sample", "too old", "too far")
_SHUT = frozenset({401, 402, 403, 404, 405, 407, 410, 415, 501})
_MAX_SHOWN = 300
_MAX_WAIT_SECONDS = 300.0


class Unavailable(TsdbError):  # noqa: N818  it is the state of the database
    """The time-series database cannot take it now: everything since some time before is sent again."""

    def __init__(
        self, message: str, *, hint: str | None, hard: bool, wait_seconds: float | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.hard = hard
        self.wait_seconds = wait_seconds


class Shut(TsdbError):  # noqa: N818  it is the state of the database
    """The time-series database refuses everything: the address or the credentials are wrong, or it is another one."""


class Refusal(NamedTuple):
    """What a time-series database did not take."""

    series: str
    reason: str
    samples: int
    is_late: bool = False
    """True when it was only too old, or out of order."""


class _Inquiry:
    """What is known so far of a request that was refused."""

    def __init__(self) -> None:
        self.posts = 0
        self.taken = 0
        self.refused: list[Refusal] = []
        self.muted: list[tuple[Part, bytes]] = []
        self.is_late = False


class Delivery:
    """Sends parts to one time-series database."""

    def __init__(self, poster: Poster, *, now: Callable[[], float] = time.monotonic) -> None:
        self._poster = poster
        self._now = now
        self._muted: dict[tuple[int, int], dict[bytes, float]] = {}
        self.most_bytes = 16 << 20
        """A request is about as long as that at most, before it is compressed."""
        self.samples_total = 0
        self.refused_total = 0
        self.refusals: list[Refusal] = []
        """What was refused since somebody last took note of it."""

    def send(self, parts: Sequence[Part], *, is_repeated: bool = False, must_move: bool = False) -> None:
        """Send a request, and return when the time-series database has what it wants of it.

        Args:
            parts: What to send.
            is_repeated: The same request was confirmed before, or may have been.
            must_move: Give up what is refused even if that is everything.

        Raises:
            Unavailable: Not now.
            Shut: Not at all.
        """
        wanted = [part for part in map(self._audible, parts) if part.samples] if self._muted else parts
        if not wanted:
            return
        answer = self._post(wanted)
        if answer is None:
            return
        if is_repeated and _is_late(answer):
            return  # a time-series database that minds has it: requests are taken as a whole
        inquiry = _Inquiry()
        self._divide(wanted, answer, inquiry, is_stubborn=must_move)
        if not inquiry.taken and not inquiry.is_late and not must_move:
            raise _shut(answer)
        self._give_up(inquiry)

    def _post(self, parts: Sequence[Part]) -> Answer | None:
        """Send parts as one request; None when they were taken, else what the time-series database has against them."""
        body = bytes(cramjam.snappy.compress_raw(b"".join(part.series for part in parts)))
        try:
            answer = self._poster.post(body)
        except Broken as error:
            raise Unavailable(error.message, hint=error.hint, hard=error.hard) from error
        if 200 <= answer.status < 300:
            self.samples_total += sum(part.samples for part in parts)
            return None
        if answer.status == 429 or (answer.status >= 500 and answer.status not in _SHUT):
            raise _unavailable(answer)
        if answer.status in _SHUT or answer.status < 400:
            raise _shut(answer)
        return answer

    def _divide(self, parts: Sequence[Part], answer: Answer, inquiry: _Inquiry, *, is_stubborn: bool) -> None:
        """Send what was refused together in two halves."""
        if answer.status == 413:
            self.most_bytes = max(64 << 10, self.most_bytes // 2)
        late = _is_late(answer)
        if len(parts) == 1 and not late:
            parts = [
                Part(parts[0].node, parts[0].layout, series, 1) for series in split_series(parts[0].series)
            ]
        if len(parts) == 1 or inquiry.posts >= _MAX_POSTS:
            self._refused(parts, answer, inquiry, late=late)
            if (
                not is_stubborn
                and not inquiry.taken
                and not inquiry.is_late
                and len(inquiry.muted) >= _HOPELESS
            ):
                raise _shut(answer)
            return
        for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            inquiry.posts += 1
            refusal = self._post(half)
            if refusal is None:
                inquiry.taken += 1
            else:
                self._divide(half, refusal, inquiry, is_stubborn=is_stubborn)

    @staticmethod
    def _refused(parts: Sequence[Part], answer: Answer, inquiry: _Inquiry, *, late: bool) -> None:
        inquiry.is_late = inquiry.is_late or late
        for part in parts:
            labels = series_labels(next(split_series(part.series)))
            inquiry.refused.append(
                Refusal(shown_labels(labels), answer.text[:_MAX_SHOWN], part.samples, late)
            )
            if not late and part.samples == 1:
                inquiry.muted.append((part, labels))

    def _give_up(self, inquiry: _Inquiry) -> None:
        until = self._now() + MUTED_SECONDS
        for part, labels in inquiry.muted:
            self._muted.setdefault((part.node, part.layout), {})[labels] = until
        self.refused_total += sum(refusal.samples for refusal in inquiry.refused)
        self.refusals += inquiry.refused[:100]

    def _audible(self, part: Part) -> Part:
        """A part without the series that are not to be tried."""
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


def _is_late(answer: Answer) -> bool:
    text = answer.text.lower()
    return any(word in text for word in _LATE)


def _unavailable(answer: Answer) -> Unavailable:
    wait = None if answer.retry_after is None else min(answer.retry_after, _MAX_WAIT_SECONDS)
    return Unavailable(
        f"the time-series database cannot take samples now: {_said(answer)}",
        hint="what it has not confirmed is sent again; its own log says more",
        hard=False,
        wait_seconds=wait,
    )


def _shut(answer: Answer) -> Shut:
    if answer.status in {401, 403, 407}:
        hint = "it wants to know who we are: --remote-headers FILE with a line such as `Authorization: Bearer ...`"
    elif answer.status < 400:
        hint = f"it is somewhere else: --remote-write {(answer.location or 'with another address')[:200]}"
    else:
        hint = "is --remote-write the address of its remote write? Often it ends in /api/v1/write or /api/v1/push"
    return Shut(f"the time-series database refuses everything: {_said(answer)}", hint=hint)


def _said(answer: Answer) -> str:
    return f"HTTP {answer.status} {answer.text[:_MAX_SHOWN]}".strip()
