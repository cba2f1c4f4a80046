"""What a session file says beside its frames: the head of it before them, statistics and happenings after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.export.session.energy import Energy
from gpulse.export.session.grid import Rows
from gpulse.export.session.happenings import Events, events, findings
from gpulse.export.session.quantities import Quantity
from gpulse.export.session.statistics import Distribution, Statistics
from gpulse.model.iso_time import iso
from gpulse.model.session import Session
from gpulse.store.store import Store, StoredGpu, StoredNode

if TYPE_CHECKING:
    from numpy.typing import NDArray

Document = dict[str, Any]
FORMAT = {"name": "gpulse-session", "version": 1}
_TOLD = ("p50", "p90", "p95", "p99")


class Plan(NamedTuple):
    """A session with everything that is known about it before its samples are read."""

    session: Session
    end: float
    steps: int
    gpus: tuple[StoredGpu, ...]
    ids: tuple[str, ...]
    """What the file calls each of them."""
    nodes: tuple[int, ...]
    """The nodes that take part."""
    places: tuple[int, ...]
    """For each GPU the place of its node."""
    quantities: tuple[Quantity, ...]
    stored: Mapping[int, StoredNode]

    @property
    def interval_seconds(self) -> float:
        """How long a step is."""
        return self.session.interval_ms / 1000

    @property
    def node_names(self) -> list[str]:
        """What people call the nodes."""
        known = {gpu.node: gpu.node_name for gpu in self.gpus}
        return [known[node] for node in self.nodes]

    def time(self, step: int) -> float:
        """When a step begins."""
        return self.session.start + step * self.session.interval_ms / 1000

    def head(self) -> Document:
        """What stands before the frames."""
        session = self.session
        return {
            "session_name": session.name,
            "start_time": iso(session.start),
            "end_time": iso(self.end),
            "format": FORMAT,
            "session_id": session.id,
            "labels": dict(session.labels),
            "interval_ms": session.interval_ms,
            "interruptions": [
                {"start_time": iso(part.start), "end_time": None if part.end is None else iso(part.end)}
                for part in session.interruptions
            ],
        }


class Tally:
    """Counts while frames go by, for what stands after them."""

    def __init__(self, plan: Plan, energy: Energy) -> None:
        self._plan = plan
        self._energy = energy
        self._known: NDArray[np.int64] = np.zeros(len(plan.gpus), np.int64)
        self._delivered: NDArray[np.int64] = np.zeros(len(plan.nodes), np.int64)
        self._of = {
            quantity.name: Distribution(is_percent=quantity.is_percent) for quantity in plan.quantities
        }
        self.frames = 0
        self.samples = 0

    def add(self, rows: Rows) -> None:
        """Count complete steps."""
        any_known = np.zeros((rows.length, len(self._plan.gpus)), np.bool_)
        for name, distribution in self._of.items():
            distribution.add(rows.values[name])
            any_known |= ~np.isnan(rows.values[name])
        self._known += any_known.sum(axis=0)
        self._delivered += rows.delivered.sum(axis=0)
        self.frames += rows.length
        self.samples += int(any_known.sum())

    def tail(self, store: Store) -> Document:
        """What stands after the frames."""
        plan = self._plan
        names = dict(zip(plan.nodes, plan.node_names, strict=True))
        happened = events(store, names, plan.session.start, plan.end)
        tail: Document = {
            "nodes": self._nodes(happened),
            "findings": findings(store, plan.gpus, names, plan.session.start, plan.end),
            "events": happened.told,
        }
        if happened.left_out:
            tail["events_left_out"] = happened.left_out
        return tail | {"summary_by_device": self.by_device()}

    def by_device(self) -> dict[str, Document]:
        """The statistics of every GPU."""
        return {name: self._device(place) for place, name in enumerate(self._plan.ids)}

    def _device(self, place: int) -> Document:
        gpu = self._plan.gpus[place]
        joules = self._energy.joules(place)
        summary: Document = {
            "node": gpu.node_name,
            "uuid": gpu.uuid,
            "samples": int(self._known[place]),
            "availability_ratio": _share(self._known[place], self.frames),
            "energy_joules": None if joules is None else round(joules, 1),
        }
        for quantity in self._plan.quantities:
            summary |= statistics_by_name(quantity, self._of[quantity.name].of(place))
        return summary

    def _nodes(self, happened: Events) -> list[Document]:
        plan = self._plan
        return [
            self._node(place, node, name, happened.clock_steps.get(node, []))
            for place, (node, name) in enumerate(zip(plan.nodes, plan.node_names, strict=True))
        ]

    def _node(self, place: int, node: int, name: str, clock_steps: Sequence[Document]) -> Document:
        plan = self._plan
        stored = plan.stored.get(node)
        return {
            "name": name,
            "host": stored.host if stored else None,
            "driver": stored.facts.get("driver") if stored else None,
            "labels": dict(stored.labels) if stored else {},
            "gpus": [plan.ids[at] for at, of in enumerate(plan.places) if of == place],
            "frames": int(self._delivered[place]),
            "availability_ratio": _share(self._delivered[place], self.frames),
            "clock_steps": list(clock_steps),
        }


def statistics_by_name(quantity: Quantity, found: Statistics | None) -> Document:
    """The statistics of one quantity, as `avg_gpu_util`; null when nothing is known."""

    def told(value: float) -> float:
        return round(value, quantity.digits)

    named = {
        "avg": None if found is None else told(found.mean),
        "min": None if found is None else told(found.min),
        "max": None if found is None else told(found.max),
    }
    named |= {name: None if found is None else told(getattr(found, name)) for name in _TOLD}
    return {f"{name}_{quantity.name}": value for name, value in named.items()}


def _share(part: int, whole: int) -> float | None:
    return round(int(part) / whole, 6) if whole else None
