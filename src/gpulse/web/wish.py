"""What a client of the live stream wants to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpulse.cluster.protocol import fields as f
from gpulse.cluster.protocol.answers import read_body
from gpulse.errors import UsageError
from gpulse.model.metric import CATALOGUE, Scope

METRICS = (
    "gpu_utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "power_watts",
    "temperature_celsius",
)
"""What a client gets that asks for nothing."""
SLOWEST_SECONDS = 60.0
FASTEST_SECONDS = 0.1


class Wish(NamedTuple):
    """What a client wants to see, and how often."""

    nodes: frozenset[str] | None = None
    metrics: tuple[str, ...] = METRICS
    host_metrics: tuple[str, ...] = ()
    interval_seconds: float = 1.0
    details: bool = False


_FIELDS = (
    f.Field("nodes", f.TEXTS, "only these nodes; all when left out"),
    f.Field("metrics", f.TEXTS, "names of the catalogue's GPU metrics"),
    f.Field("host_metrics", f.TEXTS, "names of the catalogue's host metrics"),
    f.Field("interval", f.DURATION, "seconds between two messages, from 0.1 to 60"),
    f.Field("details", f.FLAG, "processes, disks, network and findings too, when they change"),
)


def read_wish(text: str) -> Wish:
    """Read what a client asks for.

    Raises:
        UsageError: It makes no sense.
    """
    given = f.parse(_FIELDS, read_body(text.encode("utf-8", "replace")), 0.0)
    interval = given.get("interval", 1.0)
    if not FASTEST_SECONDS <= interval <= SLOWEST_SECONDS:
        raise UsageError("interval: it is from 0.1 to 60 seconds")
    return Wish(
        frozenset(given["nodes"]) if given.get("nodes") else None,
        _known("gpu", given.get("metrics", METRICS)),
        _known("host", given.get("host_metrics", ())),
        interval,
        bool(given.get("details", False)),
    )


def _known(scope: Scope, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in CATALOGUE[scope]:
            raise UsageError(f"a {scope} has no metric {name[:60]!a}", hint="docs/metrics.md lists them")
    return tuple(dict.fromkeys(names))
