"""Findings and settings for tests of notifications."""

from __future__ import annotations

from typing import NamedTuple

from gpulse.cluster.notify.config import NotifyConfig, Route, Target
from gpulse.cluster.notify.secret_text import SecretText
from gpulse.model.finding import FindingCategory, Severity

NOW = 1_767_225_600.0


class Active(NamedTuple):
    """An active finding, as the head collects it."""

    key: str = "gpu_fault/n1/3/xid_79"
    group: str = "gpu_fault/xid_79"
    finding: str = "gpu_fault"
    category: FindingCategory = "fault"
    severity: Severity = "critical"
    node: str = "n1"
    label: str | None = "3"
    users: tuple[str, ...] = ("alice",)
    jobs: tuple[str, ...] = ("4711",)
    since: float = NOW - 90
    title: str = "The GPU has a fault"
    summary: str = "Xid 79: the GPU has fallen off the bus"
    evidence: tuple[str, ...] = ("Xid errors: 1",)
    advice: tuple[str, ...] = ("drain the node",)
    acknowledged: bool = False
    silenced: bool = False


def lost(node: str) -> Active:
    """The finding that a node does not report any more."""
    return Active(f"node_lost/{node}", "node_lost", "node_lost", node=node, label=None, users=(), jobs=())


def target(name: str = "admins", url: str = "json://127.0.0.1/hook", per_hour: int = 1000) -> Target:
    """A target."""
    return Target(name, url.partition(":")[0], SecretText(url), per_hour)


def settings(*routes: Route, **changed: object) -> NotifyConfig:
    """Settings that wait for nothing; by default everything goes to one target."""
    chosen = routes or (Route(("admins",), "info"),)
    targets = {name: target(name) for route in chosen for name in route.targets}
    plain = NotifyConfig(targets, chosen, group_seconds=0.0, resolve_seconds=0.0)
    return plain._replace(**changed)  # type: ignore[arg-type]
