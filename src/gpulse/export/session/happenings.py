"""What happened in a session: findings as stretches of time, everything else as it came."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from gpulse.model.finding import SEVERITIES
from gpulse.store.base import Store, StoredEvent, StoredGpu

MOST_EVENTS = 10_000
LOOK_BACK_SECONDS = 86_400.0
"""Findings are told when they change, so what held at the start was told before it; no longer before than this."""
_FINDINGS = "findings"
_LONGEST_DOUBT_SECONDS = 120.0
"""A finding that says to hold for longer before it was told has another clock."""
_SILENCING = frozenset({"agent_started", "agent_stopping", "node_lost"})
"""After these nobody knows whether what was found still holds."""
_ELSEWHERE = frozenset({_FINDINGS, "process", "process_end"})
_KINDS = {"findings", *_SILENCING}


def iso(moment: float) -> str:
    """A time as session files write it: ISO 8601 in UTC, to the millisecond."""
    whole = datetime.fromtimestamp(round(moment * 1000) / 1000, UTC)
    return f"{whole:%Y-%m-%dT%H:%M:%S}.{whole.microsecond // 1000:03}Z"


class _Held(NamedTuple):
    """A finding and for how long it has held."""

    first: float
    last: float
    seconds: float
    times: int
    since: float | None
    """When it came up the last time; None while it does not hold."""
    detail: Mapping[str, Any]


_Key = tuple[int, str, str | None]


def findings(
    store: Store, gpus: Sequence[StoredGpu], names: Mapping[int, str], start: float, end: float
) -> list[dict[str, Any]]:
    """The findings about these GPUs and their nodes that held in a session, worst first."""
    heard = store.events(start=start - LOOK_BACK_SECONDS, end=end, kinds=_KINDS, nodes=set(names))
    places = {(gpu.node, gpu.label) for gpu in gpus}
    held: dict[_Key, _Held] = {}
    for event in heard:
        if event.node is not None and event.node in names:
            _hear(held, event._replace(time=max(event.time, start)), places, start)
    for key in list(held):
        _end(held, key, end)
    found = [_told(key, entry, names[key[0]]) for key, entry in held.items() if entry.last > entry.first]
    return sorted(found, key=lambda item: (-_rank(item), item["first_time"], item["id"]))


def _hear(
    held: dict[_Key, _Held], event: StoredEvent, places: Collection[tuple[int, str]], start: float
) -> None:
    node = event.node or 0
    now: dict[_Key, Mapping[str, Any]] = {}
    if event.kind == _FINDINGS:
        for detail in _listed(event.detail.get("findings")):
            label = detail.get("label")
            if label is None or (node, str(label)) in places:
                now[node, str(detail.get("id")), None if label is None else str(label)] = detail
    for key in held:
        if key[0] == node and key not in now:
            _end(held, key, event.time)
    for key, detail in now.items():
        before = held.get(key)
        if before is None or (before.since is None and before.last == before.first):
            began = _began(detail, event.time, start)
            held[key] = _Held(began, began, 0.0, 1, began, detail)
        elif before.since is None:
            held[key] = before._replace(times=before.times + 1, since=event.time, detail=detail)
        else:
            held[key] = before._replace(detail=detail)


def _began(detail: Mapping[str, Any], told: float, start: float) -> float:
    """Since when a finding holds that was told only when it was certain, as far as it is in the session."""
    since = detail.get("start")
    if isinstance(since, int | float) and 0 <= told - since <= _LONGEST_DOUBT_SECONDS:
        return max(start, float(since))
    return told


def _end(held: dict[_Key, _Held], key: _Key, moment: float) -> None:
    entry = held[key]
    if entry.since is not None:
        held[key] = entry._replace(
            last=moment, seconds=entry.seconds + max(0.0, moment - entry.since), since=None
        )


def _listed(raw: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(raw, Iterable):
        yield from (item for item in raw if isinstance(item, Mapping))


def _told(key: _Key, entry: _Held, node: str) -> dict[str, Any]:
    told = {
        "id": key[1],
        "node": node,
        "gpu": entry.detail.get("gpu"),
        "label": key[2],
        "first_time": iso(entry.first),
        "last_time": iso(entry.last),
        "active_seconds": round(entry.seconds, 3),
        "times": entry.times,
    }
    return told | {name: value for name, value in entry.detail.items() if name not in told}


def _rank(item: Mapping[str, Any]) -> int:
    severity = item.get("severity")
    return SEVERITIES.index(severity) if severity in SEVERITIES else -1


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
    for event in store.events(start=start, end=end):
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
