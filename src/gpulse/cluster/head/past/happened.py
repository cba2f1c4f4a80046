"""Questions about what happened, in the words of the API: events, and findings over time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpulse.cluster.api.interface import Document
from gpulse.cluster.head import describe
from gpulse.cluster.head.membership import Register
from gpulse.cluster.head.past import chart, findings
from gpulse.store.base import HeadStore

_DEFAULT_SECONDS = 86_400.0
_MOST_EVENTS = 10_000
_MOST_SPANS = 2000
_TOLD_SECONDS = 30.0
"""How often agents tell findings whose numbers alone have changed."""
_NOW_SECONDS = 1.0
"""A time that ended so short a while ago ends now."""
_MOST_TELLINGS = 6000
"""About so many events at most are read for findings over time."""
_FEWEST_STEPS, _MOST_STEPS = 60, 600


class Happened:
    """A store, asked what happened."""

    def __init__(
        self, store: HeadStore, register: Register, node_ids: Callable[[Sequence[str]], set[int] | None]
    ) -> None:
        """Prepare to answer.

        Args:
            store: Where the answers are.
            register: The nodes by number.
            node_ids: The numbers of nodes by name; None for all of them.
        """
        self._store = store
        self._register = register
        self._node_ids = node_ids

    async def events(
        self, *, start: float | None, end: float, kinds: Sequence[str], nodes: Sequence[str]
    ) -> Document:
        """What happened, the newest of it when it is much."""
        start = end - _DEFAULT_SECONDS if start is None else start
        found = await asyncio.to_thread(
            self._store.events,
            start=start,
            end=end,
            kinds=set(kinds) or None,
            nodes=self._node_ids(nodes),
            most=_MOST_EVENTS + 1,
        )
        names = self._register.by_id
        return {
            "truncated": len(found) > _MOST_EVENTS,
            "events": [
                {
                    "time": describe.iso(event.time),
                    "kind": event.kind,
                    "node": names[event.node].name if event.node in names else None,
                    "detail": dict(event.detail),
                }
                for event in found[-_MOST_EVENTS:]
            ],
        }

    async def finding_spans(
        self, *, start: float | None, end: float | None, nodes: Sequence[str], now: float
    ) -> Document:
        """From when to when findings held, oldest first.

        Of a long time only one telling a step is read, so that what came and went within one is not seen.
        """
        until = now if end is None else end
        begin = until - _DEFAULT_SECONDS if start is None else start
        wanted = self._node_ids(nodes)
        names = {
            number: node.name
            for number, node in self._register.by_id.items()
            if wanted is None or number in wanted
        }
        steps = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_TELLINGS // max(1, len(names))))
        step = chart.grid(begin, until, steps, _TOLD_SECONDS).step

        def ask() -> Document:
            found: list[findings.Span] = []
            if begin < until:
                told = self._store.last_events(
                    start=begin, end=until, every=step, kinds=findings.KINDS, nodes=names
                )
                found = findings.spans(told, begin)
            return {
                "truncated": len(found) > _MOST_SPANS,
                "spans": [
                    findings.described(span, names[span.node], None if until > now - _NOW_SECONDS else until)
                    for span in findings.newest(found, _MOST_SPANS)
                ],
            }

        return {"from": begin, "to": until, "step": step, **await asyncio.to_thread(ask)}
