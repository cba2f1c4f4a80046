"""What happened in a session: findings as stretches of time, everything else as it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.finding import SEVERITIES, FindingKey
from gpulse.model.iso_time import iso
from gpulse.model.natural import natural_key
from gpulse.store.store import Query, Store, StoredFinding, StoredGpu

MOST_EVENTS = 10_000
_ELSEWHERE = frozenset({"findings", "process", "process_end"})


def findings(
    store: Store, gpus: Sequence[StoredGpu], names: Mapping[int, str], start: float, end: float
) -> list[dict[str, Any]]:
    """Return the findings about these GPUs and their nodes that held in a session, worst first.

    One that came and went several times is listed once, with how often and for how long it held in the session.
    """
    places = {(gpu.node, gpu.label) for gpu in gpus}
    found: dict[tuple[int, FindingKey], dict[str, Any]] = {}
    for stored in store.findings(Query(start, end, nodes=frozenset(names))):
        if stored.node is None or stored.node not in names:
            continue
        label = stored.finding.label
        if label is not None and (stored.node, label) not in places:
            continue
        key = stored.node, stored.finding.key
        found[key] = _told(stored, names[stored.node], start, end, found.get(key))
    return sorted(
        found.values(),
        key=lambda item: (-_rank(item), item["first_time"], item["id"], natural_key(item["node"])),
    )


def _told(
    stored: StoredFinding, node: str, start: float, end: float, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    span, finding = stored.span, stored.finding
    until = end if span.end is None else min(span.end, end)
    seconds = max(0.0, until - max(span.start, start))
    told = {
        "id": finding.id,
        "node": node,
        "gpu": finding.gpu,
        "label": finding.label,
        "first_time": before["first_time"] if before else iso(span.start),
        "last_time": iso(until),
        "is_ongoing": span.end is None or span.end > end,
        "active_seconds": round((before["active_seconds"] if before else 0.0) + seconds, 3),
        "times": 1 + (before["times"] if before else 0),
        "start": span.start,
        "end": until,
    }
    return told | {name: value for name, value in finding.to_dict().items() if name not in told}


def _rank(item: Mapping[str, Any]) -> int:
    return SEVERITIES.index(item["severity"])


class Events(NamedTuple):
    """What happened apart from findings."""

    told: list[dict[str, Any]]
    left_out: int
    """How many more there were."""
    clock_steps: dict[int, list[dict[str, Any]]]
    """By node."""


def events(store: Store, names: Mapping[int, str], start: float, end: float) -> Events:
    """What the head noticed and these nodes told, oldest first."""
    told: list[dict[str, Any]] = []
    steps: dict[int, list[dict[str, Any]]] = {}
    left_out = 0
    for event in store.events(Query(start, end)):
        if event.kind in _ELSEWHERE or (event.node is not None and event.node not in names):
            continue
        if event.kind == "clock_step" and event.node is not None:
            step = {"time": iso(event.time), "seconds": event.detail.get("seconds")}
            steps.setdefault(event.node, []).append(step)
        if len(told) == MOST_EVENTS:
            left_out += 1
            continue
        told.append(
            {
                "time": iso(event.time),
                "kind": event.kind,
                "node": None if event.node is None else names[event.node],
                "detail": dict(event.detail),
            }
        )
    return Events(told, left_out, steps)
