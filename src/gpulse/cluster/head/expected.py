"""Nodes that somebody expects: which of them were never heard of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address

from gpulse.model.device import SSH_LABEL
from gpulse.store.base import StoredNode


def missing(expected: Sequence[str], nodes: Iterable[StoredNode]) -> list[str]:
    """The expected names that no node goes by, in their order.

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
    return [name for name, plain in wanted.items() if not _is_known(plain, known, shortened)]


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
