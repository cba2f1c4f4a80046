"""Find expected nodes that have never reported, and since when they are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from gpulse.model.device import SSH_LABEL
from gpulse.model.safe_text import natural_key
from gpulse.store.store import StoredNode

MIN_MISSING_SECONDS = 10.0
"""An expected node that has not reported for this long is a finding; agents need a moment to connect."""


class MissingNodes:
    """Expected nodes that have never reported, and since when they are missing."""

    def __init__(self, known: Mapping[str, float] = {}) -> None:
        """Start with the nodes that were missing when the last head ended.

        Args:
            known: Since when each node is missing, by name; their events are already stored.
        """
        self._reported = dict(known)
        self._waiting: dict[str, float] = {}

    @property
    def since(self) -> Mapping[str, float]:
        """Since when each node with a finding is missing, by name."""
        return self._reported

    def update(self, names: Iterable[str], now: float) -> tuple[dict[str, float], list[str]]:
        """Set which nodes are missing now; return new findings (since when, by name) and nodes that have been found."""
        missing = set(names)
        found = [name for name in self._reported if name not in missing]
        for name in found:
            del self._reported[name]
        self._waiting = {name: self._waiting.get(name, now) for name in missing if name not in self._reported}
        new = {name: since for name, since in self._waiting.items() if now - since >= MIN_MISSING_SECONDS}
        self._reported |= new
        return new, found


def find_missing_nodes(expected: Sequence[str], nodes: Iterable[StoredNode]) -> list[str]:
    """Return the expected names that match no node, in natural order.

    A name matches the name, the host name or the ssh label of a node; either side may omit the domain. An expected
    name with a port matches by label only if others are expected at the same address.
    """
    if not expected:
        return []
    known = {name for node in nodes for name in _names(node.name, node.host, node.labels)}
    shortened = {_short_name(name) for name in known}
    wanted = {name: _normalize(name) for name in expected}
    at_address = Counter(map(_without_port, wanted.values()))
    for name, plain in wanted.items():
        if plain not in known and at_address[_without_port(plain)] == 1:
            wanted[name] = _without_port(plain)
    absent = (name for name, plain in wanted.items() if not _is_known(plain, known, shortened))
    return sorted(absent, key=natural_key)


def is_node_named(expected: str, name: str, host: str, labels: Mapping[str, str]) -> bool:
    """Return whether a node matches an expected name."""
    known = _names(name, host, labels)
    return _is_known(_normalize(expected), known, {_short_name(name) for name in known})


def _names(name: str, host: str, labels: Mapping[str, str]) -> set[str]:
    return {_normalize(text) for text in (name, host, labels.get(SSH_LABEL, "")) if text}


def _without_port(name: str) -> str:
    """Return an address without its port."""
    host, colon, port = name.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.endswith("]")):
        return name
    return host.strip("[]")


def _is_known(name: str, known: set[str], shortened: set[str]) -> bool:
    if name in known:
        return True
    return _short_name(name) in known if _short_name(name) != name else name in shortened


def _normalize(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _short_name(name: str) -> str:
    return name if ":" in name or _is_ip_address(name) else name.partition(".")[0]


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
