"""Several metrics at once, one entry a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gpulse.store.history.query import History, Window, plain
from gpulse.store.history.relation import Sources, relation
from gpulse.store.history.rollup import COARSE, FINE
from gpulse.store.store import SeriesKey, Steps


def steps(
    history: History,
    sources: Sources,
    window: Window,
    metrics: Sequence[str],
    step_us: int,
) -> list[Steps]:
    """The steps of every subject and metric of which something is known, by subject."""
    grain = next((seconds for seconds in (COARSE, FINE) if step_us % (seconds * 1_000_000) == 0), 0)
    source = relation(sources, window, metrics, grain=grain)
    wanted = [f"node_id, subject, time // {step_us} * {step_us} AS step, max(last) AS last"]
    wanted += [
        f"sum(m{place} * n{place}) / nullif(sum(n{place}), 0) AS m{place}, "
        f"min(l{place}) AS l{place}, max(h{place}) AS h{place}, sum(n{place})::BIGINT AS n{place}"
        for place in range(len(metrics))
    ]
    found = history.run(
        f"SELECT {', '.join(wanted)} FROM ({source.query}) GROUP BY node_id, subject, step "
        "ORDER BY node_id, subject, step",
        source.bound,
        source.files,
        source.tables,
    )
    nodes, subjects = found["node_id"], found["subject"]
    times, ends = plain(found["step"], np.int64) / 1e6, plain(found["last"], np.int64) / 1e6
    columns = [
        tuple(plain(found[f"{side}{place}"], np.float64) for side in "mlh") for place in range(len(metrics))
    ]
    counts = [plain(found[f"n{place}"], np.int64) for place in range(len(metrics))]
    is_new = np.ones(len(nodes) + 1, bool)
    is_new[1:-1] = (nodes[1:] != nodes[:-1]) | (subjects[1:] != subjects[:-1])
    answer = []
    for begin, end in pairwise(np.flatnonzero(is_new).tolist()):
        key = SeriesKey(int(nodes[begin]), str(subjects[begin]))
        for metric, (means, lows, highs), of in zip(metrics, columns, counts, strict=True):
            known = np.flatnonzero(~np.isnan(means[begin:end])) + begin
            if len(known):
                told = means[known], lows[known], highs[known]
                answer.append(Steps(key, metric, times[known], *told, ends[known], of[known]))
    return answer
