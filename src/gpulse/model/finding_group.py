"""Groups of findings: what several GPUs have, or one GPU has again and again, is said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gpulse.model.device import ranges
from gpulse.model.finding import SEVERAL_CAUSES, SEVERITIES, Finding, finding_key
from gpulse.model.natural import natural_key

_Item = TypeVar("_Item")
Kind = tuple[str, str, str]
"""Severity, id and cause."""


class FindingGroup(NamedTuple):
    """All findings of one kind."""

    severity: str
    id: str
    members: tuple[Mapping[str, Any], ...]
    """As JSON documents, the one that cost most first, then the one that held for longest."""
    places: tuple[str, ...]
    """`n1:0-3`, `n2:1`: the GPUs by node, or the node alone for what is about it."""
    times: int
    """How often it came up, on all of them together."""
    seconds: float | None
    """For how long it held on the GPU that had it for longest; None where nobody says."""

    @property
    def worst(self) -> Mapping[str, Any]:
        """The one that says it for all."""
        return self.members[0]


def kind_of(finding: Finding | Mapping[str, Any]) -> Kind:
    """Return what findings have in common that are said once."""
    if isinstance(finding, Finding):
        severity, (name, _, cause) = str(finding.severity), finding.key
    else:
        severity, (name, _, cause) = str(finding.get("severity") or "info"), finding_key(finding)
    severity = severity if severity in SEVERITIES else "info"
    return severity, name, cause if name == SEVERAL_CAUSES else ""


def by_kind(
    items: Iterable[_Item], finding_of: Callable[[_Item], Finding | Mapping[str, Any]]
) -> list[list[_Item]]:
    """Return the items in groups of one kind each, the worst kinds first; within those the order stays."""
    kinds: dict[Kind, list[_Item]] = {}
    for item in items:
        kinds.setdefault(kind_of(finding_of(item)), []).append(item)
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: -SEVERITIES.index(kind[0]))]


def grouped(findings: Iterable[Mapping[str, Any]]) -> list[FindingGroup]:
    """Return findings of any number of nodes in groups, worst first.

    Args:
        findings: As JSON documents with their node, and with how often and for how long each held where that is known
            (`times`, `active_seconds`).
    """
    return [_group(found) for found in by_kind(findings, lambda finding: finding)]


def places_of(findings: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return where findings are: the GPUs of each node as ranges, or the node alone, in natural order."""
    by_node: dict[str, set[str]] = {}
    for finding in findings:
        node, label = finding.get("node"), finding.get("label")
        if node is not None:
            by_node.setdefault(str(node), set()).update(() if label is None else (str(label),))
    return tuple(
        f"{node}:{ranges(sorted(by_node[node], key=natural_key))}" if by_node[node] else node
        for node in sorted(by_node, key=natural_key)
    )


def _group(found: Sequence[Mapping[str, Any]]) -> FindingGroup:
    severity, name, _ = kind_of(found[0])
    seconds: dict[tuple[str, str], float] = {}
    for one in found:
        if (active := _number(one.get("active_seconds"))) is not None:
            place = str(one.get("node")), str(one.get("label"))
            seconds[place] = seconds.get(place, 0.0) + active
    return FindingGroup(
        severity,
        name,
        tuple(sorted(found, key=_cost, reverse=True)),
        places_of(found),
        sum(times if isinstance(times := one.get("times"), int) and times > 0 else 1 for one in found),
        max(seconds.values(), default=None),
    )


def _cost(finding: Mapping[str, Any]) -> tuple[float, float]:
    return _number(finding.get("lost_ratio")) or 0.0, _number(finding.get("active_seconds")) or 0.0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
