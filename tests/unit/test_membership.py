from __future__ import annotations

import pytest

from gpulse.cluster.head.fleet import node_state
from gpulse.store.node_registry import NodeRegistry
from gpulse.store.store import StoredNode


@pytest.mark.parametrize(
    ("silent", "interval", "expected"),
    [
        (0.0, 0.5, "healthy"),
        (4.9, 0.5, "healthy"),
        (5.0, 0.5, "late"),
        (29.9, 0.5, "late"),
        (30.0, 0.5, "lost"),
        (40.0, 10.0, "healthy"),
        (60.0, 10.0, "late"),
        (100.0, 10.0, "lost"),
    ],
)
def test_a_node_is_late_after_five_intervals_and_lost_after_thirty_seconds(
    silent: float, interval: float, expected: str
) -> None:
    """One that samples rarely gets more time."""

    assert node_state(silent, interval) == expected


def stored(number: int, name: str, host: str, machine: str) -> StoredNode:
    """A node that is known already."""
    return StoredNode(number, name, host, machine, 0.0, {}, {})


def test_namesakes_get_numbers() -> None:
    """Machines of one host name are told apart by their machine ids."""

    register = NodeRegistry([])
    names = []
    for machine in ("a", "b", "c"):
        node = register.find("gpu01", machine) or register.new("gpu01", machine, 0.0)
        register.put(node)
        names.append(node.name)

    assert names == ["gpu01", "gpu01#2", "gpu01#3"]
    assert [node.id for node in register.by_id.values()] == [1, 2, 3]


def test_a_machine_that_comes_back_is_the_same_node() -> None:
    """After a restart of the head, too."""

    register = NodeRegistry([stored(1, "gpu01", "gpu01", "a"), stored(2, "gpu01#2", "gpu01", "b")])

    found = register.find("gpu01", "b")

    assert found is not None
    assert (found.id, found.name) == (2, "gpu01#2")
    assert [node.id for node in register.namesakes(found)] == [1]
    assert register.by_name("gpu01#2") == found


def test_a_restored_namesake_is_recognized() -> None:
    """It has a number in its name, but not in its host name; a host whose own name has one is recognized, too."""

    register = NodeRegistry(
        [
            stored(1, "gpu01", "gpu01", "a"),
            stored(2, "gpu01#2", "gpu01", ""),
            stored(3, "rack#7", "rack#7", ""),
        ]
    )

    found = register.find("gpu01", "b")
    assert found is not None
    assert (2, "gpu01#2") == (found.id, found.name)
    register.put(found._replace(machine="b"))
    assert register.find("gpu01", "c") is None
    other = register.find("rack#7", "d")
    assert other is not None
    assert 3 == other.id


def test_restored_namesakes_are_not_mixed_up() -> None:
    """Nothing says which machine was which, so both get new names, and the history keeps the old ones."""

    register = NodeRegistry([stored(1, "gpu01", "gpu01", ""), stored(2, "gpu01#2", "gpu01", "")])

    names = []
    for machine in ("b", "a"):
        assert register.find("gpu01", machine) is None
        node = register.new("gpu01", machine, 0.0)
        register.put(node)
        names.append((node.id, node.name))

    assert [(3, "gpu01#3"), (4, "gpu01#4")] == names
