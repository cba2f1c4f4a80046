"""Questions about the past: one metric over time, and what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpulse.cluster.api.interface import Document, RefusedError
from gpulse.cluster.head import describe
from gpulse.cluster.head.membership import Register
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.base import Series, Statistic, Store, StoredGpu

_DEFAULT_QUERY_SECONDS = 600.0
_DEFAULT_EVENTS_SECONDS = 86_400.0
_MOST_POINTS = 1_000_000
_MOST_EVENTS = 10_000


class Past:
    """A store, asked in the words of the API."""

    def __init__(
        self,
        store: Store,
        register: Register,
        choose: Callable[[Sequence[str], Sequence[str]], list[StoredGpu]],
        interval_seconds: Callable[[], float],
    ) -> None:
        """Prepare to answer.

        Args:
            store: Where the answers are.
            register: The nodes by name.
            choose: Finds GPUs by nodes and words such as `node:3`.
            interval_seconds: How often agents sample.
        """
        self._store = store
        self._register = register
        self._choose = choose
        self._interval_seconds = interval_seconds

    async def query(
        self,
        *,
        metric: str,
        scope: Scope,
        nodes: Sequence[str],
        gpus: Sequence[str],
        start: float | None,
        end: float,
        step: float | None,
        statistic: Statistic,
    ) -> Document:
        """The history of one metric."""
        known = CATALOGUE.get(scope, {}).get(metric)
        if known is None:
            raise RefusedError(
                400, f"there is no metric {metric[:100]!r} of a {scope}", hint="docs/metrics.md lists them"
            )
        start = end - _DEFAULT_QUERY_SECONDS if start is None else start
        wanted = self.node_ids(nodes)
        subjects = None
        if gpus:
            chosen = self._choose(nodes, gpus)
            subjects, wanted = {gpu.uuid for gpu in chosen}, {gpu.node for gpu in chosen}
        step = self._bounded_step(step, end - start, self._count(scope, wanted, subjects))

        def ask() -> Document:
            found: list[Series] = []
            if start < end:
                found = self._store.query(
                    scope,
                    metric,
                    start=start,
                    end=end,
                    step=step,
                    nodes=wanted,
                    subjects=subjects,
                    statistic=statistic,
                )
            return {"series": self._spelled(scope, found)}

        return {
            "metric": metric,
            "scope": scope,
            "unit": known.unit,
            "from": start,
            "to": end,
            "step": step,
            "statistic": statistic if step is not None else None,
            **await asyncio.to_thread(ask),
        }

    def _count(self, scope: Scope, nodes: set[int] | None, subjects: set[str] | None) -> int:
        """About how many series an answer has."""
        if subjects is not None:
            return len(subjects)
        if scope == "gpu":
            return sum(nodes is None or gpu.node in nodes for gpu in self._store.gpus())
        return len(self._register.by_id if nodes is None else nodes)

    def _bounded_step(self, step: float | None, seconds: float, series: int) -> float | None:
        """The step, or a longer one where the answer would have too many points; the answer says which it has."""
        pace = self._interval_seconds() if step is None else step
        if seconds * max(series, 1) <= pace * _MOST_POINTS:
            return step
        return seconds * max(series, 1) / _MOST_POINTS

    def _spelled(self, scope: Scope, found: Sequence[Series]) -> list[Document]:
        names = self._register.by_id
        labels = {(gpu.node, gpu.uuid): gpu.label for gpu in self._store.gpus()} if scope == "gpu" else {}
        return [
            {
                "node": names[series.key.node].name,
                "subject": series.key.subject,
                **({"gpu": labels.get((series.key.node, series.key.subject))} if scope == "gpu" else {}),
                "times": series.times.tolist(),
                "values": [None if value != value else value for value in series.values.tolist()],  # noqa: PLR0124  NaN
            }
            for series in found
            if series.key.node in names
        ]

    async def events(
        self,
        *,
        start: float | None,
        end: float,
        kinds: Sequence[str],
        nodes: Sequence[str],
    ) -> Document:
        """What happened."""
        start = end - _DEFAULT_EVENTS_SECONDS if start is None else start
        found = await asyncio.to_thread(
            self._store.events, start=start, end=end, kinds=set(kinds) or None, nodes=self.node_ids(nodes)
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

    def node_ids(self, names: Sequence[str]) -> set[int] | None:
        """The numbers of nodes; None for all of them.

        Raises:
            RefusedError: There is none of that name.
        """
        if not names:
            return None
        found = set()
        for name in names:
            node = self._register.by_name(name)
            if node is None:
                raise RefusedError(404, f"there is no node {name[:100]!r}", hint="/clients lists them")
            found.add(node.id)
        return found
