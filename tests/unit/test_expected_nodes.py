"""Nodes that should be there: which of them were never heard of."""

from __future__ import annotations

import pytest

from gpulse.cluster.head.expected_nodes import find_missing_nodes
from gpulse.store.store import StoredNode


def node(name: str, host: str | None = None, **labels: str) -> StoredNode:
    """A node that was heard of."""
    return StoredNode(1, name, host or name, "m", 0.0, {}, labels)


@pytest.mark.parametrize(
    ("expected", "known", "left"),
    [
        ((), [node("a")], []),
        (("a", "b", "c"), [node("b")], ["a", "c"]),
        (("a", "a"), [], ["a"]),
        (("GPU-1",), [node("gpu-1")], []),
        (("gpu-1.lab.example",), [node("gpu-1")], []),
        (("gpu-1",), [node("gpu-1.lab.example.")], []),
        (("gpu-1.lab.example",), [node("gpu-1.lab.other")], ["gpu-1.lab.example"]),
        (("gpu-1",), [node("gpu-1#2", "gpu-1")], []),
        (("10.0.0.7", "10.0.0.8"), [node("gpu-7", ssh="10.0.0.7")], ["10.0.0.8"]),
        (("10",), [node("x", ssh="10.0.0.7")], ["10"]),
        (("front",), [node("gpu-1", ssh="front")], []),
        (("a",), [node("b", ssh="")], ["a"]),
        (("door.lab:1", "door.lab:2"), [node("x", ssh="door.lab:1"), node("door")], ["door.lab:2"]),
        (("gpu-1:2222",), [node("gpu-1")], []),
        (("gpu-1.lab:2222", "gpu-2:2222"), [node("gpu-1")], ["gpu-2:2222"]),
        (("[fe80::1]:22", "[fe80::1]:23"), [node("x", ssh="[fe80::1]:23")], ["[fe80::1]:22"]),
        (("fe80::1",), [node("x", ssh="fe80::1")], []),
    ],
)
def test_who_is_missing(expected: tuple[str, ...], known: list[StoredNode], left: list[str]) -> None:
    """Names with and without domains, addresses, and names that only the list knows."""
    assert left == find_missing_nodes(expected, known)
