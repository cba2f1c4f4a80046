"""Who is here: names for nodes, and how they are by when they were heard of."""

from __future__ import annotations

from collections.abc import Iterable

from gpulse.cluster.api.interface import NodeState
from gpulse.store.base import StoredNode

LATE_SECONDS = 5.0
LATE_INTERVALS = 5
LOST_SECONDS = 30.0


def state_of(silent_seconds: float, interval_seconds: float) -> NodeState:
    """How a node is that was silent for so long, when it should speak once an interval."""
    late = max(LATE_SECONDS, LATE_INTERVALS * interval_seconds)
    if silent_seconds >= max(LOST_SECONDS, 2 * late):
        return "lost"
    return "late" if silent_seconds >= late else "healthy"


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

    def new(self, host: str, machine: str, now: float) -> StoredNode:
        """A node that was never seen before, under a free name; it is not taken in yet."""
        name, number = host, 1
        while name in self._names:
            number += 1
            name = f"{host}#{number}"
        return StoredNode(max(self.by_id, default=0) + 1, name, host, machine, now, {}, {})

    def by_name(self, name: str) -> StoredNode | None:
        """The node of that name."""
        return next((node for node in self.by_id.values() if node.name == name), None)
