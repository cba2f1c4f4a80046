"""Select series over time from a relation of samples."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulse.store.history.query import plain
from gpulse.store.history.rollup import COARSE_SECONDS, FINE_SECONDS
from gpulse.store.store import Query, Series, SeriesKey, Statistic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OF_SAMPLES: Mapping[Statistic, str] = {
    "mean": "avg(m{0})",
    "min": "min(m{0})",
    "max": "max(m{0})",
    "last": "arg_max(m{0}, time)",
}
"""The value of a step whose rows are samples, for the metric of a number."""
_OF_ROWS: Mapping[Statistic, str] = {
    "mean": "sum(m{0} * n{0}) / nullif(sum(n{0}), 0)",
    "min": "min(l{0})",
    "max": "max(h{0})",
}
"""The same where a row may stand for several samples."""


def grain_of(query: Query) -> int:
    """Return how many seconds a row may stand for to answer a query exactly; 0 for every sample."""
    if query.step_us is None or query.statistic == "last":
        return 0
    return next(
        (seconds for seconds in (COARSE_SECONDS, FINE_SECONDS) if query.step_us % (seconds * 1_000_000) == 0),
        0,
    )


def select_series(relation: str, query: Query) -> str:
    """Return the statement whose columns `series_of` reads.

    Args:
        relation: A statement with the columns of `relation.Relation`.
        query: What is wanted of it.
    """
    step, places = query.step_us, range(len(query.metrics))
    if step is None:
        values = "".join(f", m{place}" for place in places)
        return f"SELECT node_id, subject, time{values} FROM ({relation}) ORDER BY node_id, subject, time"
    expressions = _OF_ROWS if grain_of(query) else _OF_SAMPLES
    count = "sum(n{0})::BIGINT" if grain_of(query) else "count(m{0})"
    wanted = [f"node_id, subject, time // {step} * {step} AS step, max(last) AS last"]
    for place in places:
        columns = {"m": expressions[query.statistic], "n": count}
        if query.spread:
            columns |= {"l": expressions["min"], "h": expressions["max"]}
        wanted += [f"{column.format(place)} AS {side}{place}" for side, column in columns.items()]
    return (
        f"SELECT {', '.join(wanted)} FROM ({relation}) GROUP BY node_id, subject, step "
        "ORDER BY node_id, subject, step"
    )


def series_of(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    """Return the series of every subject and metric of which something is known, by subject."""
    nodes, subjects = found["node_id"], found["subject"]
    is_new = np.ones(len(nodes) + 1, bool)
    is_new[1:-1] = (nodes[1:] != nodes[:-1]) | (subjects[1:] != subjects[:-1])
    parts = list(pairwise(np.flatnonzero(is_new).tolist()))
    columns = _samples(found, query) if query.step is None else _steps(found, query)
    answer = []
    for begin, end in parts:
        key = SeriesKey(int(nodes[begin]), str(subjects[begin]))
        for whole in columns:
            part = whole.only(slice(begin, end))
            known = ~np.isnan(part.values)
            if known.any():
                is_whole = query.step is None or known.all()
                answer.append((part if is_whole else part.only(known))._replace(key=key))
    return answer


_NOBODY = SeriesKey(0, "")


def _samples(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    """The columns of all subjects, one after the other, by metric."""
    times = plain(found["time"], np.int64) / 1e6
    columns = []
    for place, metric in enumerate(query.metrics):
        values = plain(found[f"m{place}"], np.float64)
        columns.append(Series(_NOBODY, metric, times, values, values, values, times))
    return columns


def _steps(found: Mapping[str, NDArray[Any]], query: Query) -> list[Series]:
    times, ends = plain(found["step"], np.int64) / 1e6, plain(found["last"], np.int64) / 1e6
    columns = []
    for place, metric in enumerate(query.metrics):
        sides = "mlh" if query.spread else "mmm"
        values, lows, highs = (plain(found[f"{side}{place}"], np.float64) for side in sides)
        counts = plain(found[f"n{place}"], np.int64)
        columns.append(Series(_NOBODY, metric, times, values, lows, highs, ends, counts))
    return columns
