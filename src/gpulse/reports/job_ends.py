"""Until when jobs and processes are known to have been there, on nodes that were not heard of any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from gpulse.reports.grants import STARTED
from gpulse.reports.subject import Subject
from gpulse.store.store import Query, Store

AHEAD_SECONDS = 3600.0
"""A node's clock may be ahead a little."""
_PRESENT = ("gpu_utilization_ratio", "power_watts", "memory_used_bytes")
"""One of them is known of every GPU that is there."""
_SILENT_SECONDS = 60.0
"""A node that is silent for no longer is starting its agent again, or late."""
_MISSED = 4
_NEAR_SECONDS = 120.0
_MOST_STEPS = 720


class Ends(NamedTuple):
    """A subject whose ends are as late as something was heard of it."""

    subject: Subject
    last: float
    """When its nodes were heard of last; the present where that is later."""
    lost: Mapping[int, float]
    """The nodes on which it was not over when they were heard of last, and when that was."""
    is_open: bool
    """Whether it still is somewhere."""


class Lasting:
    """A store, asked until when somebody was there."""

    def __init__(self, store: Store, interval_seconds: Callable[[], float]) -> None:
        """Prepare to look.

        Args:
            store: Where samples and events are.
            interval_seconds: How often agents sample.
        """
        self._store = store
        self._interval_seconds = interval_seconds

    def ends(self, subject: Subject, now: float) -> Ends:
        """A subject, all of whose parts end when their node was heard of last, if that was long before.

        An agent that starts ends what it does not find any more; where it was away for long, that says only that it was
        over by then.
        """
        whole = [
            *((one.node, one.start, one.end) for one in subject.grants),
            *((one.node, one.first_seen, one.ended) for one in subject.processes),
        ]
        first = min(start for _, start, _ in whole)
        pace = self._interval_seconds()
        silent = max(_SILENT_SECONDS, _MISSED * pace)
        begun = self._starts({node for node, _, _ in whole}, first, now)
        late: dict[tuple[int, float], float] = {}
        for moment, nodes in _by_end(whole, begun).items():
            for node, heard in self._heard(nodes, first, moment).items():
                if moment - heard > silent:
                    late[node, moment] = heard + pace
        open_nodes = {node for node, _, end in whole if end is None}
        heard_of = self._heard(open_nodes, min(first, now), now + AHEAD_SECONDS, AHEAD_SECONDS)
        lost = {node: heard + pace for node, heard in heard_of.items() if now - heard > silent}

        def ended(node: int, start: float, end: float | None) -> float | None:
            over = lost.get(node) if end is None else late.get((node, end), end)
            return None if over is None else max(start, over)

        subject = subject._replace(
            grants=[one._replace(end=ended(one.node, one.start, one.end)) for one in subject.grants],
            processes=[
                one._replace(ended=ended(one.node, one.first_seen, one.ended)) for one in subject.processes
            ],
        )
        last = max([now, *(heard for node, heard in heard_of.items() if node not in lost)])
        return Ends(subject, last, lost, bool(open_nodes - lost.keys()))

    def _starts(self, nodes: Collection[int], first: float, now: float) -> set[tuple[int, float]]:
        """When agents started, by node."""
        events = self._store.events(
            Query(first, now + AHEAD_SECONDS, nodes=frozenset(nodes), kinds=frozenset({STARTED}))
        )
        return {(event.node, event.time) for event in events if event.node is not None}

    def _heard(self, nodes: Collection[int], first: float, end: float, more: float = 0.0) -> dict[int, float]:
        """When nodes were heard of last before a moment, the near past first; not those that were silent all the time."""
        found: dict[int, float] = {}
        left, stop, length = set(nodes), end, _NEAR_SECONDS + more
        while left and stop > first:
            begin = max(first, stop - length)
            step = float(max(5, 60 * int((stop - begin) / _MOST_STEPS / 60)))
            query = Query(begin, stop, "gpu", _PRESENT, nodes=frozenset(left), step=step)
            for one in self._store.series(query):
                ends = np.where(np.isnan(one.ends), one.times + step, one.ends)
                node = one.key.node
                found[node] = max(found.get(node, 0.0), float(ends.max()))
            left -= found.keys()
            stop, length = begin, 4 * length
        return found


def _by_end(
    whole: Iterable[tuple[int, float, float | None]], begun: Collection[tuple[int, float]]
) -> dict[float, set[int]]:
    """The nodes of what ended when an agent started, by that moment."""
    found: dict[float, set[int]] = {}
    for node, _, end in whole:
        if end is not None and (node, end) in begun:
            found.setdefault(end, set()).add(node)
    return found
