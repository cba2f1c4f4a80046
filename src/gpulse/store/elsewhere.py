"""A store that is not on this machine, asked with patience that ends."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

from gpulse.errors import GpulseError, UsageError
from gpulse.store.incomplete import left_out
from gpulse.store.outage import Outage
from gpulse.store.store import SummarySource

_PAUSE_SECONDS = 5.0
_PAUSE_FACTOR = 3.0
"""What did not answer is not asked again for so long, or so many times as long as it was waited for."""

T = TypeVar("T")


class Elsewhere:
    """Something that may not answer, and is left alone for a while then, so that nobody waits for it in vain."""

    def __init__(self, source: SummarySource | None, now: Callable[[], float]) -> None:
        self.source = source
        self._now = now
        self._pause = (-math.inf, -math.inf)
        self._trying = threading.Lock()
        self.trouble: Outage | None = None

    def asked(self, question: Callable[[SummarySource], list[T]], *, is_strict: bool) -> list[T]:
        """The answer; none when there is nobody to ask, or nobody answers.

        Raises:
            GpulseError: Nobody answers, and that was not to be left out.
        """
        if self.source is None:
            return []
        if self.trouble is None or is_strict:
            return self._answered(question, self.source, is_strict=is_strict)
        begin, end = self._pause
        if begin <= self._now() < end or not self._trying.acquire(blocking=False):
            _missing(self.trouble)
            return []
        try:
            return self._answered(question, self.source, is_strict=False)
        finally:
            self._trying.release()

    def _answered(
        self, question: Callable[[SummarySource], list[T]], source: SummarySource, *, is_strict: bool
    ) -> list[T]:
        asked_at = self._now()
        try:
            found = question(source)
        except UsageError:
            raise
        except GpulseError as error:
            failed_at, before = self._now(), self.trouble
            waited = max(0.0, failed_at - asked_at)
            self._pause = failed_at, failed_at + max(_PAUSE_SECONDS, _PAUSE_FACTOR * waited)
            self.trouble = Outage(asked_at if before is None else before.since, error.message, error.hint)
            if is_strict:
                raise
            _missing(self.trouble)
            return []
        self.trouble = None
        return found


def _missing(trouble: Outage | None) -> None:
    if trouble is not None:
        left_out(f"a part is missing: {trouble.message}")
