"""Nodes by machine, by number and by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpulse.store.store import StoredNode


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
