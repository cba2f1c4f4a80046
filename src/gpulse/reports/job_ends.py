"""When jobs and processes ended on nodes that stopped reporting."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from gpulse.reports.context import Context
from gpulse.reports.grants import STARTED
from gpulse.reports.subject import Subject
from gpulse.store.store import Query

AHEAD_SECONDS = 3600.0
"""A node's clock may be ahead by this much."""
_PRESENCE_METRICS = ("gpu_utilization_ratio", "power_watts", "memory_used_bytes")
"""One of them is known of every GPU that is there."""
_MIN_SILENCE_SECONDS = 60.0
"""A node that is silent for less is starting its agent again, or late."""
_MIN_MISSED_SAMPLES = 4
_FIRST_SEARCH_SECONDS = 120.0
_MAX_STEPS = 720


class JobEnds(NamedTuple):
    """A subject whose parts end when its nodes were last heard."""

    subject: Subject
    last: float
    """When its nodes were last heard; the present where that is later."""
    lost: Mapping[int, float]
    """The nodes on which it had not ended when they were last heard, and when that was."""
    is_open: bool
    """Whether it still runs somewhere."""


def find_ends(context: Context, subject: Subject, now: float) -> JobEnds:
    """Return a subject, all of whose parts end when their node was last heard, if that was long before.

    An agent that starts ends what it does not find any more; if it was away for long, the end was some time before.
    """
    parts = [
        *((one.node, one.start, one.end) for one in subject.grants),
        *((one.node, one.first_seen, one.ended) for one in subject.processes),
    ]
    first = min(start for _, start, _ in parts)
    pace = context.interval_seconds
    silence = max(_MIN_SILENCE_SECONDS, _MIN_MISSED_SAMPLES * pace)
    agent_starts = _agent_starts(context, {node for node, _, _ in parts}, first, now)
    late: dict[tuple[int, float], float] = {}
    for moment, nodes in _nodes_by_end(parts, agent_starts).items():
        for node, heard in _last_heard(context, nodes, first, moment).items():
            if moment - heard > silence:
                late[node, moment] = heard + pace
    open_nodes = {node for node, _, end in parts if end is None}
    last_heard = _last_heard(context, open_nodes, min(first, now), now + AHEAD_SECONDS, AHEAD_SECONDS)
    lost = {node: heard + pace for node, heard in last_heard.items() if now - heard > silence}

    def ended(node: int, start: float, end: float | None) -> float | None:
        over = lost.get(node) if end is None else late.get((node, end), end)
        return None if over is None else max(start, over)

    subject = subject._replace(
        grants=[one._replace(end=ended(one.node, one.start, one.end)) for one in subject.grants],
        processes=[
            one._replace(ended=ended(one.node, one.first_seen, one.ended)) for one in subject.processes
        ],
    )
    last = max([now, *(heard for node, heard in last_heard.items() if node not in lost)])
    return JobEnds(subject, last, lost, bool(open_nodes - lost.keys()))


def _agent_starts(
    context: Context, nodes: Collection[int], first: float, now: float
) -> set[tuple[int, float]]:
    """Return node and time of each start of an agent."""
    query = Query(
        first,
        now + AHEAD_SECONDS,
        nodes=frozenset(nodes),
        kinds=frozenset({STARTED}),
        deadline=context.deadline,
    )
    events = context.store.events(query)
    return {(event.node, event.time) for event in events if event.node is not None}


def _last_heard(
    context: Context, nodes: Collection[int], first: float, end: float, more_seconds: float = 0.0
) -> dict[int, float]:
    """Return when nodes were last heard before a moment; nodes that were silent since `first` are left out.

    The near past is searched first, then four times as far each time.
    """
    found: dict[int, float] = {}
    left, stop, length = set(nodes), end, _FIRST_SEARCH_SECONDS + more_seconds
    while left and stop > first:
        begin = max(first, stop - length)
        step = float(max(5, 60 * int((stop - begin) / _MAX_STEPS / 60)))
        query = Query(
            begin,
            stop,
            "gpu",
            _PRESENCE_METRICS,
            nodes=frozenset(left),
            step=step,
            spread=False,
            deadline=context.deadline,
        )
        for one in context.store.series(query):
            ends = np.where(np.isnan(one.ends), one.times + step, one.ends)
            node = one.key.node
            found[node] = max(found.get(node, 0.0), float(ends.max()))
        left -= found.keys()
        stop, length = begin, 4 * length
    return found


def _nodes_by_end(
    parts: Iterable[tuple[int, float, float | None]], agent_starts: Collection[tuple[int, float]]
) -> dict[float, set[int]]:
    """Return the nodes of parts that ended when an agent started, by that moment."""
    found: dict[float, set[int]] = {}
    for node, _, end in parts:
        if end is not None and (node, end) in agent_starts:
            found.setdefault(end, set()).add(node)
    return found
