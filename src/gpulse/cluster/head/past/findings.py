"""Findings over time: from when to when each of them held, made from events that each tell all findings of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from gpulse.cluster.api.interface import Document
from gpulse.store.base import StoredEvent

_TELLING = "findings"
_SILENCING = frozenset({"agent_started", "agent_stopping", "node_lost"})
"""After these nobody knows whether what was found before still holds."""
KINDS = (_TELLING, *sorted(_SILENCING))
"""The events that spans are made from."""

_Key = tuple[str | None, str]
_Kind = TypeVar("_Kind")


class Span(NamedTuple):
    """One finding for as long as it was told again and again."""

    node: int
    first: float
    """When it was told first, the beginning of the time asked for when it was there before."""
    last: float | None
    """When it was over; None when it was not by the end of the time asked for."""
    finding: Mapping[str, Any]
    """As it was told last."""


def spans(events: Iterable[StoredEvent], start: float) -> list[Span]:
    """From when to when findings held, those that began first before the others.

    Args:
        events: Of `KINDS`, in any order; also those before the start that say what was there by then.
        start: What was over by then is left out.
    """
    held: dict[int, dict[_Key, Span]] = {}
    done: list[Span] = []
    for event in sorted(events, key=_order):
        if event.node is None:
            continue
        before, now = held.get(event.node, {}), max(event.time, start)
        told = _told(event) if event.kind == _TELLING else {}
        done += [span._replace(last=now) for key, span in before.items() if key not in told]
        held[event.node] = {
            key: Span(event.node, before[key].first if key in before else now, None, finding)
            for key, finding in told.items()
        }
    done += [span for own in held.values() for span in own.values()]
    return sorted((span for span in done if span.last is None or span.last > start), key=_place)


def _order(event: StoredEvent) -> tuple[float, bool]:
    """An agent's start comes before what it found in the same frame."""
    return event.time, event.kind == _TELLING


def _place(span: Span) -> tuple[float, int, str, str]:
    return span.first, span.node, str(span.finding.get("label") or ""), str(span.finding["id"])


def _told(event: StoredEvent) -> dict[_Key, Mapping[str, Any]]:
    """What an event tells, by GPU and kind of finding; what is no finding is passed over."""
    listed = event.detail.get("findings")
    found: dict[_Key, Mapping[str, Any]] = {}
    for finding in listed if isinstance(listed, list) else ():
        if isinstance(finding, dict) and isinstance(finding.get("id"), str):
            found.setdefault((_as(str, finding.get("label")), finding["id"]), finding)
    return found


def newest(found: list[Span], most: int) -> list[Span]:
    """The spans that lasted until last, in the order they had."""
    if len(found) <= most:
        return found
    kept = sorted(found, key=lambda span: (span.last is None, span.last or 0.0, span.first))[-most:]
    return sorted(kept, key=_place)


def described(span: Span, name: str, end: float | None) -> Document:
    """A span as the API tells of it.

    Args:
        span: The span.
        name: The node's.
        end: What to call the end of what was not over, None for what still holds now.
    """
    told = span.finding
    return {
        "node": name,
        "gpu": _as(int, told.get("gpu")),
        "label": _as(str, told.get("label")),
        "id": told["id"],
        "family": _as(str, told.get("family")),
        "severity": _as(str, told.get("severity")) or "info",
        "summary": _as(str, told.get("summary")) or "",
        "lost_ratio": _number(told.get("lost_ratio")),
        "confidence": _number(told.get("confidence")),
        "pids": [pid for pid in _as(list, told.get("pids")) or [] if _as(int, pid) is not None],
        "from": span.first,
        "to": end if span.last is None else span.last,
        "evidence": [item for item in _as(list, told.get("evidence")) or [] if isinstance(item, dict)],
        "advice": [item for item in _as(list, told.get("advice")) or [] if isinstance(item, dict)],
        "url": _as(str, told.get("url")),
    }


def _as(kind: type[_Kind], value: Any) -> _Kind | None:
    """A value of that kind, None for any other: agents of other versions may tell other things."""
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    return _as(float, value) if isinstance(value, float) else _as(int, value)
