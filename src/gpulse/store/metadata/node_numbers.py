"""The numbers that one head gave to nodes, by the ids that these have in PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping


class NodeNumbers:
    """A mapping between PostgreSQL's ids of nodes and one head's numbers. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[int, int] = {}
        self._ids: dict[int, int] = {}

    def add(self, numbers: Mapping[int, int]) -> None:
        """Add numbers, by PostgreSQL's ids."""
        with self._lock:
            for node, number in numbers.items():
                self._numbers[node] = number
                self._ids[number] = node

    def number(self, node: int) -> int | None:
        """Return the number of a node, None when it is not known."""
        with self._lock:
            return self._numbers.get(node)

    def by_id(self, ids: Iterable[int]) -> dict[int, int]:
        """Return the numbers of some nodes by their ids, as far as they are known."""
        with self._lock:
            return {node: self._numbers[node] for node in ids if node in self._numbers}

    def by_number(self, numbers: Iterable[int]) -> dict[int, int]:
        """Return the ids of some nodes by their numbers, as far as they are known."""
        with self._lock:
            return {number: self._ids[number] for number in numbers if number in self._ids}
