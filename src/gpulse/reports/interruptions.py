"""Find out which frames a session lacks for the time in which its head was away.

Agents go on sampling while there is no head, and send those frames when one is back. So an interruption is a gap only
where no frame covers it, and that is known of a node once it has sent frames from after the interruption: frames of a
run arrive in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from gpulse.model.metric import Scope
from gpulse.model.natural import natural_key
from gpulse.model.session import Session
from gpulse.reports.context import Context
from gpulse.reports.grid import make_grid
from gpulse.store.store import Query

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EVERY_FRAME: tuple[tuple[Scope, str], ...] = (("host", "load1"), ("gpu", "memory_used_bytes"))
"""Metrics that are in every frame; agents inside other programs send the GPUs' alone."""
_BEFORE_SECONDS = 60.0
"""Nodes that sent nothing for this long before an interruption are not expected to have frames of it."""
_MIN_MISSED_FRAMES = 3
"""This many frames in a row must be missing to make a gap: single ones are late, not lost."""
_MAX_STEPS = 500
"""Long interruptions are looked at in this many steps."""


class MissingTime(Struct, frozen=True, kw_only=True):
    """For how long frames of a node are missing."""

    node: str
    seconds: float


class Coverage(Struct, frozen=True, kw_only=True):
    """What the store has of an interruption."""

    missing: list[MissingTime]
    """Nodes that lack nothing are left out."""
    pending: list[str]
    """Nodes that have not sent anything from after the interruption: what they still have is unknown."""


def interruption_coverage(context: Context, session: Session, start: float, end: float) -> Coverage:
    """Return what is missing of the time in which a session was interrupted.

    Args:
        context: What the answer is computed from.
        session: Its nodes are looked at.
        start: When the interruption began.
        end: When it ended.
    """
    names = {
        number: name
        for number, name in context.node_names.items()
        if not session.nodes or name in session.nodes
    }
    step = make_grid(start, max(end, start + 1), _MAX_STEPS, context.interval_seconds).step
    times: dict[int, list[NDArray[np.float64]]] = {}
    for scope, metric in _EVERY_FRAME:
        query = Query(
            start - _BEFORE_SECONDS,
            end + max(_BEFORE_SECONDS, _MIN_MISSED_FRAMES * step),
            scope,
            (metric,),
            nodes=frozenset(names),
            step=step,
            statistic="last",
            spread=False,
            deadline=context.deadline,
        )
        for series in context.store.series(query):
            times.setdefault(series.key.node, []).append(series.times)
    return _coverage(
        {names[node]: np.unique(np.concatenate(found)) for node, found in times.items()}, start, end, step
    )


def _coverage(times: Mapping[str, NDArray[np.float64]], start: float, end: float, step: float) -> Coverage:
    """Return what is missing for those nodes that had frames before the interruption.

    Args:
        times: When the steps begin that have frames, by node, in order; from some time before `start` to some after `end`.
        start: When the interruption began.
        end: When it ended.
        step: Length of a step in seconds.
    """
    missing, pending = [], []
    for node in sorted((node for node, found in times.items() if (found < start).any()), key=natural_key):
        found = times[node]
        if not (found + step > end).any():
            pending.append(node)
        seconds = sum(_gaps(found, start, end, step))
        if seconds and node not in pending:
            missing.append(MissingTime(node=node, seconds=round(seconds, 3)))
    return Coverage(missing=missing, pending=pending)


def _gaps(times: NDArray[np.float64], start: float, end: float, step: float) -> Iterable[float]:
    """Yield the lengths of the gaps between frames, as far as they are within the interruption.

    A node may send frames less often than others: what is missing is measured by its own pace.
    """
    pace = max(step, float(np.median(np.diff(times)))) if len(times) > 1 else step
    for before, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        if after - before - step >= _MIN_MISSED_FRAMES * pace:
            yield max(0.0, min(after, end) - max(before + step, start))
