"""Active findings for notifications: collected again when a node reports, answered with what people have acknowledged."""

from __future__ import annotations

from typing import Any

from gpulse.cluster.head.active_findings import ActiveFinding
from gpulse.cluster.head.fleet import Fleet, FleetMember
from gpulse.cluster.head.notifications import ActiveFindingCache
from gpulse.diagnosis.rules.faults import node_missing
from gpulse.model.finding import Finding
from gpulse.store.store import StoredNode

NOW = 1_767_225_600.0


class Silenced:
    """Everything on one node is silenced."""

    def __init__(self, node: str) -> None:
        self._node = node

    def is_acknowledged(self, _finding: ActiveFinding) -> bool:
        """Nothing is acknowledged."""
        return False

    def is_silenced(self, finding: ActiveFinding, _now: float) -> bool:
        """Whether it is on this node."""
        return finding.node == self._node


def reported(member: FleetMember, *labels: str, at: float = NOW) -> None:
    """Let the agent of a node report faults of these GPUs."""
    findings = [
        Finding("gpu_fault", "fault", "high", 1.0, "broken", int(label), label, start=NOW, end=NOW).to_dict()
        for label in labels
    ]
    event: dict[str, Any] = {"event": "findings", "findings": findings}
    member.apply_events([event], at)


def fleet(*names: str) -> tuple[Fleet, list[FleetMember]]:
    """A fleet with nodes that have sent no frame yet."""
    made = Fleet({}, {}, {})
    nodes = [StoredNode(number, name, name, name, NOW, {}, {}) for number, name in enumerate(names, 1)]
    return made, [made.member(node, NOW) for node in nodes]


async def test_findings_are_those_that_the_nodes_reported_last() -> None:
    """With lost and missing nodes; nodes at other heads are left to those."""
    made, (first, second, third) = fleet("n1", "n2", "n3")
    cache = ActiveFindingCache(made)
    reported(first, "0", "1")
    reported(third, "0")
    third.other_head.moved = True

    async def keys() -> set[str]:
        missing = [node_missing("n4", NOW, NOW)]
        return {one.key for one in await cache.collect(missing, NOW, None)}

    assert {"gpu_fault/n1/0", "gpu_fault/n1/1", "node_missing/n4"} == await keys()
    reported(first, "1", at=NOW + 60)
    second.state = "lost"
    assert {"gpu_fault/n1/1", "node_lost/n2", "node_missing/n4"} == await keys()
    first.state = "lost"
    second.state = "healthy"
    assert {"node_lost/n1", "node_missing/n4"} == await keys()


async def test_a_silence_counts_at_once_and_ends_at_once() -> None:
    """Also when the node has reported nothing since."""
    made, (first, second) = fleet("n1", "n2")
    cache = ActiveFindingCache(made)
    reported(first, "0")
    reported(second, "0")

    async def silenced(responses: Silenced | None) -> set[str]:
        return {one.node for one in await cache.collect((), NOW, responses) if one.silenced}

    assert [set(), {"n1"}, set()] == [await silenced(one) for one in (None, Silenced("n1"), None)]
