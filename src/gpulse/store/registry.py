"""Nodes by machine, by number and by name: those of this head, and those that only other heads have."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from gpulse.model.codec import plain
from gpulse.model.device import Device
from gpulse.model.natural import natural_key
from gpulse.store.store import StoredGpu, StoredNode

log = logging.getLogger(__name__)


class Register:
    """The nodes by machine: one that comes back gets its name again, a namesake gets one of its own."""

    def __init__(self, nodes: Iterable[StoredNode]) -> None:
        self.by_id = {node.id: node for node in nodes}
        self._by_machine = {(node.host, node.machine): node for node in self.by_id.values()}
        self._names = {node.name for node in self.by_id.values()}
        self.elsewhere: set[int] = set()
        """Nodes that never connected to this head; their numbers are in no log, and hold until the head ends."""
        self._devices: dict[int, tuple[Device, ...]] = {}

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

    def learn(
        self,
        host: str,
        machine: str,
        now: float,
        *,
        name: str,
        facts: Mapping[str, Any],
        labels: Mapping[str, str],
    ) -> StoredNode:
        """Return the node of a machine; one that only another head has is taken in until this head ends.

        Args:
            host: What it calls itself.
            machine: Tells it from others that do so.
            now: When it was seen.
            name: The name that another head gave it.
            facts: The fields of `model.device.Node` that are known.
            labels: Its labels.
        """
        known = self.find(host, machine)
        if known is not None:
            return known
        node = self.new(host, machine, now, name=name)._replace(facts=dict(facts), labels=dict(labels))
        if node.name != name:
            log.warning(
                "another head's %s is shown as %s: there is another machine of that name", name, node.name
            )
        self.elsewhere.add(node.id)
        self.put(node)
        return node

    def learn_gpus(self, node: StoredNode, devices: Iterable[Device]) -> None:
        """Take in the GPUs that a node has at another head."""
        self._devices[node.id] = tuple(devices)

    def devices_elsewhere(self, number: int) -> tuple[Device, ...]:
        """Return the GPUs that a node has at another head, as far as they are known."""
        return self._devices.get(number, ())

    def gpus_elsewhere(self, known: Iterable[StoredGpu]) -> list[StoredGpu]:
        """Return the GPUs that nodes have at other heads, without those that are known here."""
        uuids = {(gpu.node, gpu.uuid) for gpu in known}
        found = [
            StoredGpu(
                number,
                self.by_id[number].name,
                device.uuid,
                device.index,
                device.label,
                device.name,
                plain(device),
            )
            for number, devices in list(self._devices.items())
            for device in devices
            if (number, device.uuid) not in uuids
        ]
        return sorted(found, key=lambda gpu: (natural_key(gpu.node_name), gpu.index, gpu.label))

    def by_name(self, name: str) -> StoredNode | None:
        """The node of that name."""
        return next((node for node in self.by_id.values() if node.name == name), None)


def node_fact(node: StoredNode) -> dict[str, Any]:
    """The fields of the fact that a node is known."""
    fields = node._asdict()
    fields["time"] = fields.pop("first_seen")
    return fields
