"""Document of a session file: the header, which is known before samples are read, and the summary with statistics, findings and events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.export.session_file import frame_grid
from gpulse.export.session_file.frame_grid import FrameQuantity, FrameRows, count_steps_checked
from gpulse.export.session_file.gpu_statistics import ColumnStatistics, Distribution, EnergyMeter
from gpulse.model.finding import CODE_FIELDS, SEVERITIES, FindingKey, without_code
from gpulse.model.safe_text import natural_key
from gpulse.model.session import Session
from gpulse.model.time_text import format_iso
from gpulse.store.gpu_selection import select_gpus
from gpulse.store.store import Query, Store, StoredFinding, StoredGpu, StoredNode

Document = dict[str, Any]
FORMAT = {"name": "gpulse-session", "version": 1}


class SessionHeader(NamedTuple):
    """Session with its GPUs, nodes, time steps and quantities."""

    session: Session
    end: float
    steps: int
    gpus: tuple[StoredGpu, ...]
    ids: tuple[str, ...]
    """IDs of the GPUs in the file."""
    nodes: tuple[int, ...]
    """Numbers of the nodes in the session."""
    node_of_gpu: tuple[int, ...]
    """Index of the node of each GPU."""
    quantities: tuple[FrameQuantity, ...]
    stored: Mapping[int, StoredNode]

    @property
    def interval_seconds(self) -> float:
        """Length of a step."""
        return self.session.interval_ms / 1000

    @property
    def node_names(self) -> list[str]:
        """Names of the nodes."""
        known = {gpu.node: gpu.node_name for gpu in self.gpus}
        return [known[node] for node in self.nodes]

    def time(self, step: int) -> float:
        """Return the start of a step."""
        return self.session.start + step * self.session.interval_ms / 1000

    def to_document(self) -> Document:
        """Return the members of the file before the frames."""
        session = self.session
        return {
            "session_name": session.name,
            "start_time": format_iso(session.start),
            "end_time": format_iso(self.end),
            "format": FORMAT,
            "session_id": session.id,
            "labels": dict(session.labels),
            "interval_ms": session.interval_ms,
            "interruptions": [
                {
                    "start_time": format_iso(part.start),
                    "end_time": None if part.end is None else format_iso(part.end),
                }
                for part in session.interruptions
            ],
        }


def read_header(store: Store, session: Session, *, now: float | None = None) -> SessionHeader:
    """Return the GPUs, nodes, steps and quantities of a session.

    Raises:
        UsageError: The session has more steps than a file can hold.
    """
    end = max(session.start, _find_end(session, now))
    steps = count_steps_checked(session, end)
    gpus = _find_gpus(store, session, end)
    names = {gpu.node: natural_key(gpu.node_name) for gpu in gpus}
    nodes = sorted(names, key=lambda node: names[node])
    place_of = {node: place for place, node in enumerate(nodes)}
    gpus.sort(key=lambda gpu: (place_of[gpu.node], *_label_order(gpu)))
    return SessionHeader(
        session,
        end,
        steps,
        tuple(gpus),
        tuple(_unique_ids(gpus)),
        tuple(nodes),
        tuple(place_of[gpu.node] for gpu in gpus),
        frame_grid.session_quantities(session),
        store.nodes(),
    )


def _find_gpus(store: Store, session: Session, end: float) -> list[StoredGpu]:
    chosen = select_gpus(store.gpus(), session.nodes, session.gpus, strict=False)
    if end <= session.start or not chosen:
        return []
    query = Query(
        session.start,
        end,
        "gpu",
        ("gpu_utilization_ratio", "memory_used_bytes"),
        nodes=frozenset(gpu.node for gpu in chosen),
        step=max(1.0, end - session.start),
        statistic="last",
        spread=False,
    )
    delivered = {(series.key.node, series.key.subject) for series in store.series(query)}
    return _present_gpus(chosen, session, delivered)


def _find_end(session: Session, now: float | None) -> float:
    """Return the end of a session: when it was stopped, when the head went down during it, or now."""
    if session.end is not None:
        return session.end
    open_ends = [part.start for part in session.interruptions if part.end is None]
    if open_ends:
        return open_ends[-1]
    if now is None:
        raise ValueError("`now` is required for an active session")
    return now


def _label_order(gpu: StoredGpu) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu.label.split(":") if part.isdigit())


def _unique_ids(gpus: Iterable[StoredGpu]) -> list[str]:
    """Return the ID of each GPU in the file; a second board in the same slot gets `#2`."""
    taken: dict[str, int] = {}
    names = []
    for gpu in gpus:
        count = taken[gpu.key] = taken.get(gpu.key, 0) + 1
        names.append(gpu.key if count == 1 else f"{gpu.key}#{count}")
    return names


def _present_gpus(
    chosen: Iterable[StoredGpu], session: Session, delivered: Collection[tuple[int, str]]
) -> list[StoredGpu]:
    """Return the GPUs with samples, and those that should have some: the other GPUs of the session's nodes.

    A board that was replaced before the session has no samples, and another board is in its slot; it is left out.
    """
    chosen = list(chosen)
    nodes = {node for node, _ in delivered}
    places = {(gpu.node, gpu.label) for gpu in chosen if (gpu.node, gpu.uuid) in delivered}
    found = []
    for gpu in chosen:
        takes_part = gpu.node in nodes or gpu.node_name in session.nodes
        if (gpu.node, gpu.uuid) in delivered or (takes_part and (gpu.node, gpu.label) not in places):
            places.add((gpu.node, gpu.label))
            found.append(gpu)
    return found


Counts = NDArray[np.int64]

MAX_EVENTS = 10_000
_EXCLUDED_EVENT_KINDS = frozenset({"findings", "process", "process_end"})
"""Kinds of events that are not listed in `events`."""
_PERCENTILES = ("p50", "p90", "p95", "p99")


class FileSummary:
    """Accumulates the statistics of frames for the end of the file."""

    def __init__(self, header: SessionHeader, energy: EnergyMeter) -> None:
        self._header = header
        self._energy = energy
        self._known: Counts = np.zeros(len(header.gpus), np.int64)
        self._delivered: Counts = np.zeros(len(header.nodes), np.int64)
        self._distributions = {
            quantity.name: Distribution(is_percent=quantity.is_percent) for quantity in header.quantities
        }
        self.frames = 0
        self.samples = 0

    def add(self, rows: FrameRows) -> None:
        """Add complete steps."""
        any_known = np.zeros((rows.length, len(self._header.gpus)), np.bool_)
        for name, distribution in self._distributions.items():
            distribution.add(rows.values[name])
            any_known |= ~np.isnan(rows.values[name])
        self._known += any_known.sum(axis=0)
        self._delivered += rows.delivered.sum(axis=0)
        self.frames += rows.length
        self.samples += int(any_known.sum())

    def members(self, store: Store, *, with_code: bool = True) -> Document:
        """Return the members of the file after the frames, with or without the lines of code of findings."""
        header = self._header
        names = dict(zip(header.nodes, header.node_names, strict=True))
        events = _events(store, names, header.session.start, header.end)
        findings = _findings(store, header)
        if not with_code:
            findings = [without_code(finding) for finding in findings]
        tail: Document = {
            "nodes": self._nodes(events),
            "findings": findings,
            "events": events.listed,
        }
        if events.left_out:
            tail["events_left_out"] = events.left_out
        return tail | {"summary_by_device": self.by_device()}

    def by_device(self) -> dict[str, Document]:
        """Return the statistics of every GPU."""
        return {name: self._device(place) for place, name in enumerate(self._header.ids)}

    def _device(self, place: int) -> Document:
        gpu = self._header.gpus[place]
        joules = self._energy.joules(place)
        summary: Document = {
            "node": gpu.node_name,
            "uuid": gpu.uuid,
            "samples": int(self._known[place]),
            "availability_ratio": _ratio(self._known[place], self.frames),
            "energy_joules": None if joules is None else round(joules, 1),
        }
        for quantity in self._header.quantities:
            summary |= statistics_by_name(quantity, self._distributions[quantity.name].of(place))
        return summary

    def _nodes(self, events: _SessionEvents) -> list[Document]:
        header = self._header
        return [
            self._node(place, node, name, events.clock_steps.get(node, []))
            for place, (node, name) in enumerate(zip(header.nodes, header.node_names, strict=True))
        ]

    def _node(self, place: int, node: int, name: str, clock_steps: Sequence[Document]) -> Document:
        header = self._header
        stored = header.stored.get(node)
        return {
            "name": name,
            "host": stored.host if stored else None,
            "driver": stored.facts.get("driver") if stored else None,
            "labels": dict(stored.labels) if stored else {},
            "gpus": [header.ids[at] for at, of in enumerate(header.node_of_gpu) if of == place],
            "frames": int(self._delivered[place]),
            "availability_ratio": _ratio(self._delivered[place], self.frames),
            "clock_steps": list(clock_steps),
        }


def statistics_by_name(quantity: FrameQuantity, found: ColumnStatistics | None) -> Document:
    """Return the statistics of one quantity under names such as `avg_gpu_util`; unknown ones are None."""

    def rounded(value: float) -> float:
        return round(value, quantity.digits)

    named = {
        "avg": None if found is None else rounded(found.mean),
        "min": None if found is None else rounded(found.min),
        "max": None if found is None else rounded(found.max),
    }
    named |= {name: None if found is None else rounded(getattr(found, name)) for name in _PERCENTILES}
    return {f"{name}_{quantity.name}": value for name, value in named.items()}


def _ratio(part: int, whole: int) -> float | None:
    return round(int(part) / whole, 6) if whole else None


def names_code(store: Store, header: SessionHeader) -> bool:
    """Return whether a finding of a session has lines of code."""
    return any(not CODE_FIELDS.isdisjoint(finding) for finding in _findings(store, header))


def _findings(store: Store, header: SessionHeader) -> list[dict[str, Any]]:
    """Return the findings about the GPUs of a session and their nodes that held in it, worst first.

    A finding that came and went several times is listed once, with how often and for how long it held in the session.
    """
    start, end = header.session.start, header.end
    names = dict(zip(header.nodes, header.node_names, strict=True))
    places = {(gpu.node, gpu.label) for gpu in header.gpus}
    found: dict[tuple[int, FindingKey], dict[str, Any]] = {}
    for stored in store.findings(Query(start, end, nodes=frozenset(names))):
        if stored.node is None or stored.node not in names:
            continue
        label = stored.finding.label
        if label is not None and (stored.node, label) not in places:
            continue
        key = stored.node, stored.finding.key
        found[key] = _finding(stored, names[stored.node], start, end, found.get(key))
    return sorted(
        found.values(),
        key=lambda item: (-_severity_rank(item), item["first_time"], item["id"], natural_key(item["node"])),
    )


def _finding(
    stored: StoredFinding, node: str, start: float, end: float, before: Mapping[str, Any] | None
) -> dict[str, Any]:
    span, finding = stored.span, stored.finding
    until = end if span.end is None else min(span.end, end)
    seconds = max(0.0, until - max(span.start, start))
    listed = {
        "id": finding.id,
        "node": node,
        "gpu": finding.gpu,
        "label": finding.label,
        "first_time": before["first_time"] if before else format_iso(span.start),
        "last_time": format_iso(until),
        "is_ongoing": span.end is None or span.end > end,
        "active_seconds": round((before["active_seconds"] if before else 0.0) + seconds, 3),
        "times": 1 + (before["times"] if before else 0),
        "start": span.start,
        "end": until,
    }
    return listed | {name: value for name, value in finding.to_dict().items() if name not in listed}


def _severity_rank(item: Mapping[str, Any]) -> int:
    return SEVERITIES.index(item["severity"])


class _SessionEvents(NamedTuple):
    """Events other than findings."""

    listed: list[dict[str, Any]]
    left_out: int
    """Number of further events."""
    clock_steps: dict[int, list[dict[str, Any]]]
    """Clock steps by node."""


def _events(store: Store, names: Mapping[int, str], start: float, end: float) -> _SessionEvents:
    """Return the events of the head and of these nodes, oldest first."""
    listed: list[dict[str, Any]] = []
    steps: dict[int, list[dict[str, Any]]] = {}
    left_out = 0
    for event in store.events(Query(start, end)):
        if event.kind in _EXCLUDED_EVENT_KINDS or (event.node is not None and event.node not in names):
            continue
        if event.kind == "clock_step" and event.node is not None:
            step = {"time": format_iso(event.time), "seconds": event.detail.get("seconds")}
            steps.setdefault(event.node, []).append(step)
        if len(listed) == MAX_EVENTS:
            left_out += 1
            continue
        listed.append(
            {
                "time": format_iso(event.time),
                "kind": event.kind,
                "node": None if event.node is None else names[event.node],
                "detail": dict(event.detail),
            }
        )
    return _SessionEvents(listed, left_out, steps)
