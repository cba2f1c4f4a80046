"""Events of a time range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import Struct

from gpulse.model import iso_time
from gpulse.reports.context import Context
from gpulse.store.incomplete import noticing
from gpulse.store.store import Query

_MAX_EVENTS = 10_000


class EventRow(Struct, frozen=True, kw_only=True):
    """Something that happened at one moment."""

    time: str
    kind: str
    node: str | None
    detail: dict[str, Any]


class EventReport(Struct, frozen=True, kw_only=True):
    """The events of a time range, oldest first."""

    truncated: bool
    events: list[EventRow]
    incomplete: list[str]
    """What is missing, in words."""


def event_report(context: Context, query: Query) -> EventReport:
    """Return the events of a time range, oldest first; the newest of them when there are many."""
    with noticing() as incomplete:
        found = context.store.events(replace(query, limit=_MAX_EVENTS + 1))
    return EventReport(
        incomplete=incomplete,
        truncated=len(found) > _MAX_EVENTS,
        events=[
            EventRow(
                time=iso_time.iso(event.time),
                kind=event.kind,
                node=None if event.node is None else context.node_names.get(event.node),
                detail=dict(event.detail),
            )
            for event in found[-_MAX_EVENTS:]
        ],
    )
