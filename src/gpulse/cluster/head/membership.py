"""Who is here: names for nodes, and how they are by when they were heard of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpulse.cluster.api.interface import NodeState
from gpulse.model.frame import Frame
from gpulse.store.base import StoredNode

LATE_SECONDS = 5.0
LATE_INTERVALS = 5
LOST_SECONDS = 30.0
RETURN_SECONDS = 12.0
"""How long agents may take to come back to a head that was not listening: they try at least every ten seconds."""
_ENGINE_SECONDS = 10.0
"""What other heads write to an engine is found there, and noticed here, so much later."""
_UNDECIDED_SECONDS = 20.0
"""An engine that says nothing is not waited for any longer."""
_AHEAD_SECONDS = 3.0
"""A node's clock may be so much ahead: what is not newer by that may have come through this head."""


def state_of(silent_seconds: float, interval_seconds: float) -> NodeState:
    """How a node is that was silent for so long, when it should speak once an interval."""
    late = max(LATE_SECONDS, LATE_INTERVALS * interval_seconds)
    if silent_seconds >= max(LOST_SECONDS, 2 * late):
        return "lost"
    return "late" if silent_seconds >= late else "healthy"


class Abroad:
    """What is known of a node through an engine, to which other heads write as well."""

    def __init__(self) -> None:
        self.seen = 0.0
        """When another head last got something from it."""
        self.frame: Frame | None = None
        """Its newest readings."""
        self.moved = False
        """Whether its agent said that it goes on at another head."""

    def is_newer(self, seen: float) -> bool:
        """Whether another head has it, when something came from it here at `seen` last."""
        return self.moved or self.seen > seen + _AHEAD_SECONDS

    def state(self, seen: float, now: float, interval_seconds: float) -> NodeState:
        """How a node is that another head has."""
        return state_of(max(0.0, now - max(seen, self.seen) - _ENGINE_SECONDS), interval_seconds)


def is_undecided(asked: float | None, seen: float, now: float) -> bool:
    """Whether a node that left may yet turn out to be at another head.

    Args:
        asked: When the engine was asked last, None when there is none to ask.
        seen: When something came from the node here last.
        now: On the same clock.
    """
    return asked is not None and asked < seen + _ENGINE_SECONDS and now < seen + _UNDECIDED_SECONDS


class Register:
    """The nodes by machine: one that comes back gets its name again, a namesake gets one of its own."""

    def __init__(self, nodes: Iterable[StoredNode]) -> None:
        self.by_id = {node.id: node for node in nodes}
        self._by_machine = {(node.host, node.machine): node for node in self.by_id.values()}
        self._names = {node.name for node in self.by_id.values()}

    def find(self, host: str, machine: str) -> StoredNode | None:
        """The node that this machine was before."""
        return self._by_machine.get((host, machine))

    def namesakes(self, node: StoredNode) -> list[StoredNode]:
        """The other machines that go by its host name."""
        return [other for other in self.by_id.values() if other.host == node.host and other.id != node.id]

    def put(self, node: StoredNode) -> None:
        """Take a node in, or what is new about it."""
        self.by_id[node.id] = node
        self._by_machine[node.host, node.machine] = node
        self._names.add(node.name)

    def new(self, host: str, machine: str, now: float, *, name: str | None = None) -> StoredNode:
        """A node that was never seen before, under a free name; it is not taken in yet.

        Args:
            host: What it calls itself.
            machine: Tells it from others that do so.
            now: When it was seen.
            name: The name that another head gave it: it keeps it if nobody here has it.
        """
        name, number = name or host, 1
        while name in self._names:
            number += 1
            name = f"{host}#{number}"
        return StoredNode(max(self.by_id, default=0) + 1, name, host, machine, now, {}, {})

    def by_name(self, name: str) -> StoredNode | None:
        """The node of that name."""
        return next((node for node in self.by_id.values() if node.name == name), None)


def node_fact(node: StoredNode) -> dict[str, Any]:
    """The fields of the fact that a node is known."""
    fields = node._asdict()
    fields["time"] = fields.pop("first_seen")
    return fields
