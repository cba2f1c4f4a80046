"""What a client of the live stream wants to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from gpulse.cluster.protocol.codec import decode_request, read_body
from gpulse.cluster.protocol.requests import Request
from gpulse.cluster.protocol.values import Duration, Texts
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


class LiveRequest(Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client of the live stream sends."""

    nodes: Annotated[Texts, Meta(description="only these nodes; all when left out")] = ()
    metrics: Annotated[Texts, Meta(description="names of the catalogue's GPU metrics")] = METRICS
    host_metrics: Annotated[Texts, Meta(description="names of the catalogue's host metrics")] = ()
    interval: Annotated[Duration, Meta(description="seconds between two messages, from 0.1 to 60")] = (
        Duration(1.0)
    )
    details: Annotated[
        bool, Meta(description="processes, disks, network and findings too, when they change")
    ] = False


def read_wish(text: str) -> Wish:
    """Read what a client asks for.

    Raises:
        UsageError: It makes no sense.
    """
    body = read_body(text.encode("utf-8", "replace"))
    request = decode_request(LiveRequest, body, now=0.0, in_address=False)
    if not FASTEST_SECONDS <= request.interval <= SLOWEST_SECONDS:
        raise UsageError("interval must be from 0.1 to 60 seconds")
    return Wish(
        frozenset(request.nodes) or None,
        _known("gpu", request.metrics),
        _known("host", request.host_metrics),
        float(request.interval),
        request.details,
    )


def _known(scope: Scope, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in CATALOGUE[scope]:
            raise UsageError(f"a {scope} has no metric {name[:60]!a}", hint="docs/metrics.md lists them")
    return tuple(dict.fromkeys(names))
