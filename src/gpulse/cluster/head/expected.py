"""Nodes that somebody expects: which of them have never reported, and since when they are missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from gpulse.model.device import SSH_LABEL
from gpulse.model.natural import natural_key
from gpulse.store.store import StoredNode

MISSING_SECONDS = 10.0
"""An expected node that has not reported for this long is a finding; agents need a moment to connect."""


class MissingNodes:
    """The expected nodes that have never reported, and since when they are missed."""

    def __init__(self, known: Mapping[str, float] = {}) -> None:
        """Start with the names that were missed when the last head ended.

        Args:
            known: By name since when; it is written down that they are missing.
        """
        self._reported = dict(known)
        self._waiting: dict[str, float] = {}

    @property
    def since(self) -> Mapping[str, float]:
        """By name since when a node is missed for which that is a finding."""
        return self._reported

    def update(self, names: Iterable[str], now: float) -> tuple[dict[str, float], list[str]]:
        """Take in who is missing now; return who became a finding, by name since when, and who is not one any more."""
        missing = set(names)
        found = [name for name in self._reported if name not in missing]
        for name in found:
            del self._reported[name]
        self._waiting = {name: self._waiting.get(name, now) for name in missing if name not in self._reported}
        new = {name: since for name, since in self._waiting.items() if now - since >= MISSING_SECONDS}
        self._reported |= new
        return new, found


def missing(expected: Sequence[str], nodes: Iterable[StoredNode]) -> list[str]:
    """The expected names that no node goes by, in natural order.

    A node goes by its name, its host name and what its label says; a domain may be left out on either side. What is
    expected at a port of its own goes by its label alone where others are expected at the same address.
    """
    if not expected:
        return []
    known = {name for node in nodes for name in _names(node.name, node.host, node.labels)}
    shortened = {_short(name) for name in known}
    wanted = {name: _plain(name) for name in expected}
    at_address = Counter(map(_address, wanted.values()))
    for name, plain in wanted.items():
        if plain not in known and at_address[_address(plain)] == 1:
            wanted[name] = _address(plain)
    absent = (name for name, plain in wanted.items() if not _is_known(plain, known, shortened))
    return sorted(absent, key=natural_key)


def is_known(expected: str, name: str, host: str, labels: Mapping[str, str]) -> bool:
    """Whether one node goes by an expected name."""
    known = _names(name, host, labels)
    return _is_known(_plain(expected), known, {_short(name) for name in known})


def _names(name: str, host: str, labels: Mapping[str, str]) -> set[str]:
    return {_plain(text) for text in (name, host, labels.get(SSH_LABEL, "")) if text}


def _address(name: str) -> str:
    """Without the port."""
    host, colon, port = name.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.endswith("]")):
        return name
    return host.strip("[]")


def _is_known(name: str, known: set[str], shortened: set[str]) -> bool:
    if name in known:
        return True
    return _short(name) in known if _short(name) != name else name in shortened


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _short(name: str) -> str:
    return name if ":" in name or _is_address(name) else name.partition(".")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
