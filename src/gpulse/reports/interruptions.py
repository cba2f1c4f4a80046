"""Find out which frames a session lacks for the time in which its head was away.

Agents go on sampling while there is no head, and send those frames when one is back. So an interruption is a gap only
where no frame covers it, and that is known of a node once it has sent frames from after the interruption: frames of a
run arrive in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpulse.model.metric import Scope
from gpulse.model.natural import natural_key
from gpulse.model.session import Interruption, Session
from gpulse.reports import chart
from gpulse.store.registry import Register
from gpulse.store.store import Query, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EVERY_FRAME: tuple[tuple[Scope, str], ...] = (("host", "load1"), ("gpu", "memory_used_bytes"))
"""Metrics that are in every frame; agents inside other programs send the GPUs' alone."""
_BEFORE_SECONDS = 60.0
"""Nodes that sent nothing for this long before an interruption are not expected to have frames of it."""
_MISSED = 3
"""This many frames in a row must be missing to make a gap: single ones are late, not lost."""
_MAX_STEPS = 500
"""Long interruptions are looked at in this many steps."""
_MAX_INTERRUPTIONS = 10
"""Only this many interruptions of a session are looked at, the newest ones."""
_MAX_CACHED = 1000


class Coverage(NamedTuple):
    """What the store has of an interruption."""

    missing: Mapping[str, float]
    """For how many seconds frames are missing, by node; nodes that lack nothing are left out."""
    pending: Sequence[str]
    """Nodes that have not sent anything from after the interruption: what they still have is unknown."""

    def to_dict(self) -> dict[str, object]:
        """The coverage as JSON types."""
        missing = [{"node": node, "seconds": round(seconds, 3)} for node, seconds in self.missing.items()]
        return {"missing": missing, "pending": list(self.pending)}


class Interruptions:
    """What is missing of sessions' interruptions; what is settled is remembered."""

    def __init__(self, store: Store, register: Register, interval_seconds: Callable[[], float]) -> None:
        self._store = store
        self._register = register
        self._interval_seconds = interval_seconds
        self._settled: dict[tuple[str, Interruption], Coverage] = {}

    def coverage(self, session: Session) -> list[Coverage | None]:
        """Return what is missing of each interruption, None for one that goes on or is not looked at.

        The store is asked: not to be called in a loop that others wait for.
        """
        first = len(session.interruptions) - _MAX_INTERRUPTIONS
        return [
            self._of(session, part) if place >= first else None
            for place, part in enumerate(session.interruptions)
        ]

    def _of(self, session: Session, part: Interruption) -> Coverage | None:
        if part.end is None:
            return None
        key = (session.id, part)
        if key not in self._settled:
            found = self._looked_up(session, part.start, part.end)
            if found.pending:
                return found
            if len(self._settled) >= _MAX_CACHED:
                self._settled.clear()
            self._settled[key] = found
        return self._settled[key]

    def _looked_up(self, session: Session, start: float, end: float) -> Coverage:
        known = {number: node.name for number, node in list(self._register.by_id.items())}
        names = {number: name for number, name in known.items() if not session.nodes or name in session.nodes}
        step = chart.grid(start, max(end, start + 1), _MAX_STEPS, self._interval_seconds()).step
        times: dict[int, list[NDArray[np.float64]]] = {}
        for scope, metric in _EVERY_FRAME:
            query = Query(
                start - _BEFORE_SECONDS,
                end + max(_BEFORE_SECONDS, _MISSED * step),
                scope,
                (metric,),
                nodes=frozenset(names),
                step=step,
                statistic="last",
            )
            for series in self._store.series(query):
                times.setdefault(series.key.node, []).append(series.times)
        return covered(
            {names[node]: np.unique(np.concatenate(found)) for node, found in times.items()}, start, end, step
        )


def covered(times: Mapping[str, NDArray[np.float64]], start: float, end: float, step: float) -> Coverage:
    """Return what is missing of a time for those nodes that were there before it.

    Args:
        times: When the steps begin that have frames, by node, in order; from some time before `start` to some after `end`.
        start: When the interruption began.
        end: When it ended.
        step: How long a step is, in seconds.
    """
    missing, pending = {}, []
    for node in sorted((node for node, found in times.items() if (found < start).any()), key=natural_key):
        found = times[node]
        if not (found + step > end).any():
            pending.append(node)
        seconds = sum(_holes(found, start, end, step))
        if seconds and node not in pending:
            missing[node] = seconds
    return Coverage(missing, tuple(pending))


def _holes(times: NDArray[np.float64], start: float, end: float, step: float) -> Iterable[float]:
    """Yield the lengths of the stretches without a frame, as far as they are in the time.

    A node may send frames less often than others: what is missing is measured by its own pace.
    """
    pace = max(step, float(np.median(np.diff(times)))) if len(times) > 1 else step
    for before, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        if after - before - step >= _MISSED * pace:
            yield max(0.0, min(after, end) - max(before + step, start))
