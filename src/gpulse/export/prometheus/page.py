"""A whole page for Prometheus: who serves it, which nodes there are and how fresh, then their readings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gpulse.export.prometheus import dcgm, native
from gpulse.export.prometheus.exposed import Census, Exposed, fresh, left_out
from gpulse.export.prometheus.text import Family, written


def exposition(
    nodes: Sequence[Exposed],
    *,
    now: float,
    interval_seconds: float,
    version: str,
    dcgm_names: bool = False,
    more: Iterable[Family] = (),
    census: Census | None = None,
) -> Iterator[str]:
    """The text, in pieces of some thousand lines (or none), so that a loop can do other things between them.

    Values of a frame that is too old are left out: they would pass for fresh ones.

    Args:
        nodes: What is known.
        now: Epoch seconds.
        interval_seconds: From one frame to the next, of nodes that have no interval of their own.
        version: Of the gpulse that serves it.
        dcgm_names: Readings under DCGM's names and with its labels, not under ours.
        more: What whoever serves it has to say about itself.
        census: Counts who holds GPUs, from one page to the next.
    """
    young = fresh(nodes, now=now, interval_seconds=interval_seconds, census=census)
    yield from written(_about(nodes, {node.node.name for node in young}, now, version))
    yield from written(more)
    yield from dcgm.pieces(young) if dcgm_names else native.pieces(young, now)


def _about(nodes: Sequence[Exposed], young: set[str], now: float, version: str) -> Iterator[Family]:
    yield Family(
        "gpulse_build_info", "gauge", "The version of gpulse that serves this", [({"version": version}, 1)]
    )
    yield Family(
        "gpulse_up",
        "gauge",
        "1 when the newest frame of the node is fresh",
        [({"node": node.name}, int(node.name in young)) for node in nodes],
    )
    yield Family(
        "gpulse_frame_age_seconds",
        "gauge",
        "Time since the newest frame of the node was taken",
        [
            ({"node": node.name}, round(max(0.0, now - node.frame.time), 3))
            for node in nodes
            if node.frame is not None
        ],
    )
    yield Family(
        "gpulse_subjects_left_out",
        "gauge",
        "GPUs, disks, file systems or links of the node that are not shown because it has too many",
        [
            ({"node": node.name, "scope": scope}, count)
            for node in nodes
            if node.frame is not None and node.name in young
            for scope, count in left_out(node.frame).items()
        ],
    )
