"""Registry of nodes by number, machine and name: those of this head, and those that only other heads have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from gpulse.model.device import Device
from gpulse.model.recording_codec import to_sparse_dict
from gpulse.model.safe_text import natural_key
from gpulse.store.store import StoredGpu, StoredNode

log = logging.getLogger(__name__)


class NodeRegistry:
    """All known nodes. A machine that returns keeps its name; another machine with the same host name gets a new one."""

    def __init__(self, nodes: Iterable[StoredNode]) -> None:
        self.by_id = {node.id: node for node in nodes}
        self._by_machine = {(node.host, node.machine): node for node in self.by_id.values()}
        self._names = {node.name for node in self.by_id.values()}
        self._restored = {node.id for node in self.by_id.values() if not node.machine}
        """Numbers of nodes that were restored from the history after damage, and have not connected since."""
        self.other_head_ids: set[int] = set()
        """Numbers of nodes that never connected to this head. They are not logged, and are valid until the head stops."""
        self._devices: dict[int, tuple[Device, ...]] = {}

    def find(self, host: str, machine: str) -> StoredNode | None:
        """Return the node of a machine; None if it is new.

        A node that was restored from the history has no machine ID, and is recognized by its name. If several were
        restored for one host name, none is: the history does not say which machine each of them was.
        """
        known = self._by_machine.get((host, machine))
        if known is None:
            restored = [
                node for number in self._restored if host in ((node := self.by_id[number]).host, node.name)
            ]
            known = restored[0] if len(restored) == 1 else None
        return known

    def namesakes(self, node: StoredNode) -> list[StoredNode]:
        """Return the other nodes with the same host name."""
        return [other for other in self.by_id.values() if other.host == node.host and other.id != node.id]

    def put(self, node: StoredNode) -> None:
        """Add a node, or replace it."""
        self.by_id[node.id] = node
        self._by_machine[node.host, node.machine] = node
        if node.machine:
            self._restored.discard(node.id)
        self._names.add(node.name)

    def new(self, host: str, machine: str, now: float, *, name: str | None = None) -> StoredNode:
        """Return a new node with an unused name; it is not added yet.

        Args:
            host: Its host name.
            machine: Its machine ID, which distinguishes it from others with the same host name.
            now: When it was first seen.
            name: The name that another head gave it, used if it is free here.
        """
        name, number = name or host, 1
        while name in self._names:
            number += 1
            name = f"{host}#{number}"
        return StoredNode(max(self.by_id, default=0) + 1, name, host, machine, now, {}, {})

    def add_from_other_head(
        self,
        host: str,
        machine: str,
        now: float,
        *,
        name: str,
        facts: Mapping[str, Any],
        labels: Mapping[str, str],
    ) -> StoredNode:
        """Return the node of a machine; if only another head has it, add it until this head stops.

        Args:
            host: Its host name.
            machine: Its machine ID.
            now: When it was first seen.
            name: The name that another head gave it.
            facts: The known fields of `model.device.Node`.
            labels: Its labels.
        """
        known = self.find(host, machine)
        if known is not None:
            return known
        node = self.new(host, machine, now, name=name)._replace(facts=dict(facts), labels=dict(labels))
        if node.name != name:
            log.warning(
                "node %s of another head is shown as %s because another machine already has its name",
                name,
                node.name,
            )
        self.other_head_ids.add(node.id)
        self.put(node)
        return node

    def set_other_head_gpus(self, node: StoredNode, devices: Iterable[Device]) -> None:
        """Set the GPUs of a node, as another head reported them."""
        self._devices[node.id] = tuple(devices)

    def other_head_devices(self, number: int) -> tuple[Device, ...]:
        """Return the GPUs of a node as another head reported them; empty if it has not."""
        return self._devices.get(number, ())

    def other_head_gpus(self, known: Iterable[StoredGpu]) -> list[StoredGpu]:
        """Return the GPUs that other heads reported, without those already known here."""
        uuids = {(gpu.node, gpu.uuid) for gpu in known}
        found = [
            StoredGpu(
                number,
                self.by_id[number].name,
                device.uuid,
                device.index,
                device.label,
                device.name,
                to_sparse_dict(device),
            )
            for number, devices in list(self._devices.items())
            for device in devices
            if (number, device.uuid) not in uuids
        ]
        return sorted(found, key=lambda gpu: (natural_key(gpu.node_name), gpu.index, gpu.label))

    def by_name(self, name: str) -> StoredNode | None:
        """Return the node with this name; None if there is none."""
        return next((node for node in self.by_id.values() if node.name == name), None)


def node_fact(node: StoredNode) -> dict[str, Any]:
    """Return the fields of the log fact that describes a node."""
    fields = node._asdict()
    fields["time"] = fields.pop("first_seen")
    return fields
