"""Nodes that somebody expects: which of them were never heard of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from gpulse.model.device import SSH_LABEL
from gpulse.store.base import StoredNode


def missing(expected: Sequence[str], nodes: Iterable[StoredNode]) -> list[str]:
    """The expected names that no node goes by, in their order.

    A node goes by its name, its host name and what its label says; a domain may be left out on either side.
    """
    if not expected:
        return []
    known = {
        _plain(name)
        for node in nodes
        for name in (node.name, node.host, node.labels.get(SSH_LABEL, ""))
        if name
    }
    shortened = {_short(name) for name in known}
    return [name for name in dict.fromkeys(expected) if not _is_known(_plain(name), known, shortened)]


def _is_known(name: str, known: set[str], shortened: set[str]) -> bool:
    if name in known:
        return True
    return _short(name) in known if "." in name else name in shortened


def _plain(name: str) -> str:
    return name.strip().lower().rstrip(".")


def _short(name: str) -> str:
    return name if _is_address(name) else name.partition(".")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
