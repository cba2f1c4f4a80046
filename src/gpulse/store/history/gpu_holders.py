"""Answer which processes held which GPUs."""

from __future__ import annotations

from gpulse.store.history.query import History, Window, rows_of
from gpulse.store.history.relation import Sources, relation
from gpulse.store.history.rollup import COARSE_SECONDS
from gpulse.store.history.share_files import KEY, PROCESS_METRICS
from gpulse.store.store import Holding

_HOLDINGS = f"""
SELECT {KEY}, min(first) AS first, max(last) AS last,
    sum(m0 * n0) / nullif(sum(n0), 0) AS memory_mean, max(h0) AS memory_max,
    sum(m1 * n1) / nullif(sum(n1), 0) AS sm_mean
FROM ({{0}}) WHERE gpu IS NOT NULL AND pid IS NOT NULL GROUP BY {KEY} ORDER BY first, {KEY}
"""


def gpu_holders(history: History, sources: Sources, window: Window) -> list[Holding]:
    """Return what processes held on which GPUs in a window of the scope `process`."""
    source = relation(sources, window, PROCESS_METRICS, grain=COARSE_SECONDS)
    found = history.run(_HOLDINGS.format(source.query), source.bound, source.files, source.tables)
    return [
        Holding(node, pid, start, uuid, first / 1e6, last / 1e6, *others)
        for node, pid, start, uuid, first, last, *others in rows_of(found, tuple(found))
    ]
