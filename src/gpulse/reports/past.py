"""Questions about the past, in the words of the API: metrics over time, and who held which GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gpulse.errors import RefusedError
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.reports import chart, processes, usage
from gpulse.reports.document import Document
from gpulse.reports.owners import People
from gpulse.reports.usage import Grouping
from gpulse.store.incomplete import noticing
from gpulse.store.registry import Register
from gpulse.store.store import Query, Series, Share, Statistic, Store, StoredGpu

_DEFAULT_QUERY_SECONDS = 600.0
_MOST_POINTS = 1_000_000
_DEFAULT_CHART_SECONDS = 3600.0
_MOST_NUMBERS = 2_000_000
"""So many numbers at most are in the answer to one question for charts."""
_SUBJECTS_A_NODE = 8
"""About how many disks, interfaces or processes a node has."""
_FEWEST_POINTS = 10
_MOST_PROCESSES = 2000
_DEFAULT_USAGE_SECONDS = 86_400.0
_KNOWN_BEFORE_SECONDS = 120.0
"""Processes are looked for that ended so long before: they are seen on a GPU a little later than the book knows."""


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
            subjects = frozenset(gpu.uuid for gpu in chosen)
            wanted = frozenset(gpu.node for gpu in chosen)
        step = self._bounded_step(step, end - start, self._count(scope, wanted, subjects))

        def ask() -> Document:
            found: list[Series] = []
            if start < end:
                found = self._store.series(
                    Query(
                        start,
                        end,
                        scope,
                        (metric,),
                        nodes=wanted,
                        subjects=subjects,
                        step=step,
                        statistic=statistic,
                    )
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
            **await _told(ask),
        }

    async def history(
        self,
        *,
        metrics: Sequence[str],
        scope: Scope,
        nodes: Sequence[str],
        gpus: Sequence[str],
        start: float | None,
        end: float,
        points: int,
        spread: bool,
    ) -> Document:
        """Several metrics over time, all at the same moments."""
        start = end - _DEFAULT_CHART_SECONDS if start is None else start
        chosen = self._choose(nodes, gpus) if gpus else None
        wanted = self.node_ids(nodes) if chosen is None else frozenset(gpu.node for gpu in chosen)
        uuids = None if chosen is None else frozenset(gpu.uuid for gpu in chosen)
        expected = self._expected(scope, wanted, uuids) * len(metrics) * (3 if spread else 1)
        points = max(_FEWEST_POINTS, min(points, _MOST_NUMBERS // expected))
        moments = chart.grid(start, end, points, chart.pace_of(scope, self._interval_seconds()))

        def ask() -> Document:
            if not moments.count:
                return {"series": []}
            found = self._store.series(
                Query(
                    moments.start - chart.LOOK_BACK * moments.step,
                    end,
                    scope,
                    tuple(metrics),
                    nodes=wanted,
                    subjects=uuids if scope == "gpu" else None,
                    gpus=uuids if scope == "process" else None,
                    step=moments.step,
                )
            )
            if chart.size(found, moments, spread=spread) > 2 * _MOST_NUMBERS:
                raise RefusedError(
                    400, f"that is {len(found):,} series", hint="name nodes, or ask for fewer metrics"
                )
            return {"series": self._charted(scope, found, moments, spread=spread)}

        return {
            "scope": scope,
            "from": start,
            "to": end,
            "step": moments.step,
            "times": moments.times(),
            **await _told(ask),
        }

    def _expected(self, scope: Scope, nodes: frozenset[int] | None, uuids: frozenset[str] | None) -> int:
        """About how many series of one metric an answer has."""
        if scope in ("gpu", "host"):
            return max(1, self._count(scope, nodes, uuids if scope == "gpu" else None))
        return max(1, self._count(scope, nodes, None)) * _SUBJECTS_A_NODE

    def _charted(
        self, scope: Scope, found: Sequence[Series], moments: chart.Grid, *, spread: bool
    ) -> list[Document]:
        names = self._register.by_id
        labels = self._labels() if scope in ("gpu", "process") else {}
        series = []
        for steps in found:
            columns = chart.drawn(steps, scope, moments, spread=spread) if steps.key.node in names else None
            if columns is not None:
                node, subject = steps.key
                told = {} if not labels else {"gpu": labels.get((node, subject.rpartition("@")[2]))}
                series.append(
                    {
                        "node": names[node].name,
                        "subject": subject,
                        **told,
                        "metric": steps.metric,
                        "unit": chart.unit_of(CATALOGUE[scope][steps.metric]),
                        **columns,
                    }
                )
        return series

    async def processes(
        self,
        *,
        start: float | None,
        end: float,
        nodes: Sequence[str],
        gpus: Sequence[str],
        users: Sequence[str],
        jobs: Sequence[str],
    ) -> Document:
        """The processes that held GPUs, newest first."""
        start = end - _DEFAULT_CHART_SECONDS if start is None else start
        chosen = self._choose(nodes, gpus) if gpus else None
        wanted = self.node_ids(nodes) if chosen is None else frozenset(gpu.node for gpu in chosen)
        uuids = None if chosen is None else frozenset(gpu.uuid for gpu in chosen)

        def ask() -> Document:
            names = self._names()
            found: list[processes.Found] = []
            if start < end:
                held = self._store.gpu_holders(Query(start, end, nodes=wanted, gpus=uuids))
                found = processes.gathered(
                    (holding for holding in held if holding.node in names),
                    self._people(start, end, wanted),
                    users,
                    jobs,
                )
            labels = self._labels()
            return {
                "truncated": len(found) > _MOST_PROCESSES,
                "processes": [
                    processes.described(one, end, names, labels) for one in found[:_MOST_PROCESSES]
                ],
            }

        return {"from": start, "to": end, **await _told(ask)}

    async def usage(
        self, *, start: float | None, end: float, by: Grouping, nodes: Sequence[str], users: Sequence[str]
    ) -> Document:
        """Who held GPUs, for how long, and how much of that they did nothing."""
        start = end - _DEFAULT_USAGE_SECONDS if start is None else start
        wanted = self.node_ids(nodes)

        def ask() -> Document:
            names = self._names()
            rows: list[usage.Row] = []
            shares: list[Share] = []
            if start < end:
                found = self._store.gpu_time(Query(start, end, nodes=wanted))
                shares = [share for share in found if share.node in names]
                pids = frozenset(share.pid for share in shares if share.pid is not None)
                people = self._people(start, end, wanted, pids if by == "user" else None)
                rows = usage.rows(shares, people, by, users)
            capacity = usage.capacity(shares, self._store.gpus())
            return {
                "gpus": len(capacity),
                "capacity_seconds": round(sum(capacity.values()), 3),
                **usage.totals(rows),
                "rows": [row.document(by, names) for row in rows],
            }

        return {
            "from": start,
            "to": end,
            "step": usage.STEP_SECONDS,
            "by": by,
            **await _told(ask),
        }

    def _people(
        self, start: float, end: float, nodes: frozenset[int] | None, pids: frozenset[int] | None = None
    ) -> People:
        """Whose processes are; of some pids only where nobody asks for those they descend from."""
        first, last = start - _KNOWN_BEFORE_SECONDS, end + _KNOWN_BEFORE_SECONDS
        return People(self._store.processes(Query(first, last, nodes=nodes, pids=pids)))

    def _names(self) -> dict[int, str]:
        return {number: node.name for number, node in self._register.by_id.items()}

    def _labels(self) -> dict[tuple[int, str], str]:
        return {(gpu.node, gpu.uuid): gpu.label for gpu in self._store.gpus()}

    def _count(self, scope: Scope, nodes: frozenset[int] | None, subjects: frozenset[str] | None) -> int:
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
        labels = self._labels() if scope == "gpu" else {}
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

    def node_ids(self, names: Sequence[str]) -> frozenset[int] | None:
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
        return frozenset(found)


async def _told(ask: Callable[[], Document]) -> Document:
    """The answer of a store, from a thread of its own, and what had to be left out of it."""

    def answer() -> Document:
        with noticing() as incomplete:
            return {**ask(), "incomplete": incomplete}

    return await asyncio.to_thread(answer)
