"""Report on the events of a time range, and on the data that is missing after interruptions of a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpulse.model import time_text
from gpulse.model.intervals import Interval, shared_length
from gpulse.model.metric_catalog import Scope
from gpulse.model.safe_text import natural_key
from gpulse.model.session import Session
from gpulse.model.xid import XID_EVENT, XID_MEANINGS
from gpulse.reports.time_grid import ReportContext, make_grid
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import Query, StoredEvent

_MAX_EVENTS = 10_000


class EventRow(Struct, frozen=True, kw_only=True):
    """An event at one moment."""

    time: str
    kind: str
    node: str | None
    detail: dict[str, Any]


class EventReport(Struct, frozen=True, kw_only=True):
    """The events of a time range, oldest first."""

    truncated: bool
    events: list[EventRow]
    incomplete: list[str]
    """Sentences about missing data."""


def build_event_report(context: ReportContext, query: Query) -> EventReport:
    """Return the events of a time range, oldest first; if there are too many, only the newest ones."""
    with collect_missing() as incomplete:
        found = context.store.events(replace(query, limit=_MAX_EVENTS + 1))
    return EventReport(
        incomplete=incomplete,
        truncated=len(found) > _MAX_EVENTS,
        events=[
            EventRow(
                time=time_text.format_iso(event.time),
                kind=event.kind,
                node=None if event.node is None else context.node_names.get(event.node),
                detail=_describe(event),
            )
            for event in found[-_MAX_EVENTS:]
        ],
    )


def _describe(event: StoredEvent) -> dict[str, Any]:
    """Return the details of an event; those of an Xid error with its meaning."""
    if event.kind != XID_EVENT:
        return dict(event.detail)
    return {**event.detail, "meaning": XID_MEANINGS.get(event.detail.get("code", -1))}


_METRICS_IN_EVERY_FRAME: tuple[tuple[Scope, str], ...] = (("host", "load1"), ("gpu", "memory_used_bytes"))
"""Metrics that are in every frame; agents inside other programs send only those of the GPUs."""
_RECENT_SECONDS = 60.0
"""Nodes that sent nothing for this long before an interruption are not expected to have frames during it."""
_MIN_MISSED_FRAMES = 3
"""Minimum number of consecutive missing frames of a gap: single frames may only be late."""
_MAX_STEPS = 500
"""Maximum number of steps in which an interruption is examined."""


class MissingTime(Struct, frozen=True, kw_only=True):
    """Length of the time in which frames of a node are missing."""

    node: str
    seconds: float


class InterruptionCoverage(Struct, frozen=True, kw_only=True):
    """Which data the store has for the time of an interruption."""

    missing: list[MissingTime]
    """Nodes without missing frames are left out."""
    pending: list[str]
    """Nodes that have sent nothing since the interruption: they may still send frames."""


def find_interruption_coverage(
    context: ReportContext, session: Session, start: float, end: float
) -> InterruptionCoverage:
    """Return the missing data in the time in which a session was interrupted.

    Args:
        context: Source of the data.
        session: The session, whose nodes are examined.
        start: Start of the interruption.
        end: End of the interruption.
    """
    names = {
        number: name
        for number, name in context.node_names.items()
        if not session.nodes or name in session.nodes
    }
    step = make_grid(start, max(end, start + 1), _MAX_STEPS, context.interval_seconds).step
    times: dict[int, list[NDArray[np.float64]]] = {}
    for scope, metric in _METRICS_IN_EVERY_FRAME:
        query = Query(
            start - _RECENT_SECONDS,
            end + max(_RECENT_SECONDS, _MIN_MISSED_FRAMES * step),
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
    return _find_missing_times(
        {names[node]: np.unique(np.concatenate(found)) for node, found in times.items()}, start, end, step
    )


def _find_missing_times(
    times: Mapping[str, NDArray[np.float64]], start: float, end: float, step: float
) -> InterruptionCoverage:
    """Return the missing times of the nodes that had frames before the interruption.

    Args:
        times: Starts of the steps with frames, by node, in order; from before `start` to after `end`.
        start: Start of the interruption.
        end: End of the interruption.
        step: Length of a step in seconds.
    """
    missing, pending = [], []
    for node in sorted((node for node, found in times.items() if (found < start).any()), key=natural_key):
        found = times[node]
        if not (found + step > end).any():
            pending.append(node)
        seconds = sum(_gap_lengths(found, start, end, step))
        if seconds and node not in pending:
            missing.append(MissingTime(node=node, seconds=round(seconds, 3)))
    return InterruptionCoverage(missing=missing, pending=pending)


def _gap_lengths(times: NDArray[np.float64], start: float, end: float, step: float) -> Iterable[float]:
    """Yield the lengths of the gaps between frames within the interruption.

    A node may send frames less often than others, so gaps are measured by its own interval.
    """
    interval = max(step, float(np.median(np.diff(times)))) if len(times) > 1 else step
    for before, after in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        if after - before - step >= _MIN_MISSED_FRAMES * interval:
            yield shared_length(Interval(before + step, after), Interval(start, end))
