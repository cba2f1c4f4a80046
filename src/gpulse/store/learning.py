"""What was on a head's disk before it started, learnt day by day when somebody asks for it."""

from __future__ import annotations

import math
import threading

from gpulse.model.metric import Scope
from gpulse.store.coverage import MINUTE, Coverage
from gpulse.store.history.segments import Segment
from gpulse.store.local import LocalStore
from gpulse.store.store import Query, Series

_DAY = 86_400.0
_COARSE_SECONDS = 5 * MINUTE
"""Older days are looked at in such steps, of which the history has rows ready."""
_UNSEALED_SECONDS = 3600.0
"""What is only in the log is no older than this."""
_STARTING_SECONDS = 2 * MINUTE
"""Frames of before the start come in for so long after it."""
_TOLD: tuple[tuple[Scope, tuple[str, ...]], ...] = (
    ("host", ("cpu_user_seconds_total", "memory_available_bytes", "cpu_utilization_ratio")),
    ("gpu", ("power_watts", "memory_used_bytes", "gpu_utilization_ratio")),
)
"""What is in nearly every frame; the later ones count for nodes of which the earlier ones are not known."""


class Learner:
    """Tells a coverage what is on disk. Safe to use from several threads."""

    def __init__(self, local: LocalStore, coverage: Coverage, began: float) -> None:
        """Nothing is learnt yet.

        Args:
            local: What is on disk.
            coverage: Who is told.
            began: Since when frames are told to the coverage as they come.
        """
        self._local = local
        self._coverage = coverage
        self._until = began + _STARTING_SECONDS
        self._lock = threading.Lock()
        self._learnt_at: dict[int, float] = {}
        """By day, when it was looked at last; infinity when no more can come."""
        self._segments: tuple[Segment, ...] = ()

    def learn(self, start: float, end: float, now: float) -> None:
        """See that what is on disk of a stretch of time is known.

        Raises:
            GpulseError: The disk cannot be read.
        """
        with self._lock:
            self._notice_drops()
            files = [file.start for segment in self._segments for file in segment.files]
            oldest = min(files, default=math.inf) / 1e6
            begin = max(start, min(oldest, self._until - _UNSEALED_SECONDS))
            stop = min(end, self._until)
            if begin >= stop:
                return
            for day in range(math.floor(begin / _DAY), math.ceil(stop / _DAY)):
                if self._learnt_at.get(day, -math.inf) + MINUTE <= now:
                    self._learn_day(day)
                    is_complete = min((day + 1) * _DAY, self._until) <= now
                    self._learnt_at[day] = math.inf if is_complete else now

    def _notice_drops(self) -> None:
        """What is too old goes, the oldest first; of what is thin only the engine has every sample."""
        before, after = self._segments, self._local.segments
        if before is after:
            return
        kept = after[0].first if after else 0
        dropped = [segment.end for segment in before if segment.last < kept and segment.end is not None]
        thinned = [segment.thinned for segment in after if segment.thinned is not None]
        if dropped:
            self._coverage.forget_before(max(dropped) / 1e6 + MINUTE)
        if thinned:
            self._coverage.forget_samples_before(max(thinned) / 1e6 + MINUTE)
        self._segments = after

    def _learn_day(self, day: int) -> None:
        found: set[int] = set()
        for scope, metrics in _TOLD:
            others = None if not found else frozenset(self._local.nodes()) - found
            found |= self._learn_scope(day, scope, metrics, others)

    def _learn_scope(
        self, day: int, scope: Scope, metrics: tuple[str, ...], nodes: frozenset[int] | None
    ) -> set[int]:
        if nodes is not None and not nodes:
            return set()
        best: dict[int, tuple[int, Series]] = {}
        length = MINUTE if (day + 2) * _DAY > self._until else _COARSE_SECONDS
        start, end = day * _DAY - length, min((day + 1) * _DAY + length, self._until)
        for series in self._local.series(Query(start, end, scope, metrics, nodes, step=length)):
            known = 0 if series.counts is None else int(series.counts.sum())
            if known > best.get(series.key.node, (0,))[0]:
                best[series.key.node] = known, series
        for node, (_, series) in best.items():
            if series.counts is not None:
                self._coverage.learn(node, series.times, series.counts, length)
        return set(best)
