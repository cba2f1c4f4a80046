from __future__ import annotations

import pytest

from gpulse.cluster.head.membership import state_of
from gpulse.store.registry import Register
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

    assert state_of(silent, interval) == expected


def stored(number: int, name: str, host: str, machine: str) -> StoredNode:
    """A node that is known already."""
    return StoredNode(number, name, host, machine, 0.0, {}, {})


def test_namesakes_get_numbers() -> None:
    """Machines of one host name are told apart by their machine ids."""

    register = Register([])
    names = []
    for machine in ("a", "b", "c"):
        node = register.find("gpu01", machine) or register.new("gpu01", machine, 0.0)
        register.put(node)
        names.append(node.name)

    assert names == ["gpu01", "gpu01#2", "gpu01#3"]
    assert [node.id for node in register.by_id.values()] == [1, 2, 3]


def test_a_machine_that_comes_back_is_the_same_node() -> None:
    """After a restart of the head, too."""

    register = Register([stored(1, "gpu01", "gpu01", "a"), stored(2, "gpu01#2", "gpu01", "b")])

    found = register.find("gpu01", "b")

    assert found is not None
    assert (found.id, found.name) == (2, "gpu01#2")
    assert [node.id for node in register.namesakes(found)] == [1]
    assert register.by_name("gpu01#2") == found
