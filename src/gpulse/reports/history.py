"""Metrics over time: the samples of one metric, and several metrics on one grid for charts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

from gpulse.errors import RefusedError
from gpulse.model.metric import CATALOGUE, Metric, Scope
from gpulse.reports.context import Context
from gpulse.reports.grid import Grid, make_grid, sample_seconds
from gpulse.store.incomplete import noticing
from gpulse.store.store import Query, Series, Statistic

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_POINTS = 1_000_000
"""In the answer about one metric; of more, steps are longer."""
_MAX_NUMBERS = 2_000_000
"""In an answer for charts."""
_MIN_STEPS = 10
_SUBJECTS_PER_NODE = 8
"""About how many disks, interfaces or processes a node has."""
_MAX_LOOK_BACK_STEPS = 3
"""A counter's rate is measured from the last known step before, if that is at most this many steps ago."""
_RATE_DIGITS = 9
"""Enough that an event once a month is a rate above zero."""


class QuerySeries(Struct, frozen=True, kw_only=True):
    """One metric of one subject."""

    node: str
    subject: str
    gpu: str | UnsetType | None = UNSET
    """The label of a GPU; absent for other scopes."""
    times: list[float]
    values: list[float | None]


class QueryReport(Struct, frozen=True, kw_only=True):
    """The history of one metric."""

    metric: str
    scope: Scope
    unit: str
    start: float = field(name="from")
    end: float = field(name="to")
    step: float | None
    """Seconds; null for every sample."""
    statistic: Statistic | None
    series: list[QuerySeries]
    incomplete: list[str]
    """What is missing from the answer, in words."""


class HistorySeries(Struct, frozen=True, kw_only=True):
    """One metric of one subject, a value per step; null where nothing is known."""

    node: str
    subject: str
    gpu: str | UnsetType | None = UNSET
    """The label of the GPU that it is about; absent for scopes without one."""
    metric: str
    unit: str
    values: list[float | None]
    lows: list[float | None] | UnsetType = UNSET
    highs: list[float | None] | UnsetType = UNSET


class HistoryReport(Struct, frozen=True, kw_only=True):
    """Several metrics over time, all on the same grid."""

    scope: Scope
    start: float = field(name="from")
    end: float = field(name="to")
    step: float
    times: list[float]
    series: list[HistorySeries]
    incomplete: list[str]
    """What is missing from the answer, in words."""


def query_report(context: Context, query: Query) -> QueryReport:
    """Return the history of one metric, in longer steps than wanted where it has too many points."""
    (metric,) = query.metrics
    step = _bounded_step(context, query)
    found: list[Series] = []
    with noticing() as incomplete:
        if query.start < query.end:
            found = context.store.series(replace(query, step=step, spread=False))
    return QueryReport(
        metric=metric,
        scope=query.scope,
        unit=CATALOGUE[query.scope][metric].unit,
        start=query.start,
        end=query.end,
        step=step,
        statistic=query.statistic if step is not None else None,
        series=_query_series(context, query.scope, found),
        incomplete=incomplete,
    )


def _query_series(context: Context, scope: Scope, found: Sequence[Series]) -> list[QuerySeries]:
    labels = context.gpu_labels() if scope == "gpu" else {}
    return [
        QuerySeries(
            node=context.node_names[series.key.node],
            subject=series.key.subject,
            gpu=labels.get(series.key) if scope == "gpu" else UNSET,
            times=series.times.tolist(),
            values=[None if value != value else value for value in series.values.tolist()],  # noqa: PLR0124  NaN
        )
        for series in found
        if series.key.node in context.node_names
    ]


def _bounded_step(context: Context, query: Query) -> float | None:
    """Return the step that was asked for, or a longer one where the answer would have too many points."""
    series_seconds = (query.end - query.start) * max(_count_series(context, query), 1)
    step = context.interval_seconds if query.step is None else query.step
    return query.step if series_seconds <= step * _MAX_POINTS else series_seconds / _MAX_POINTS


def history_report(context: Context, query: Query, *, max_steps: int, spread: bool) -> HistoryReport:
    """Return several metrics over time, all on the same grid; counters as rates.

    Args:
        context: What the answer is computed from.
        query: Scope, metrics, time range and subjects.
        max_steps: At most this many steps, fewer where there are many series.
        spread: Also return the lowest and the highest value of each step.
    """
    series = _expected_series(context, query) * len(query.metrics) * (3 if spread else 1)
    max_steps = max(_MIN_STEPS, min(max_steps, _MAX_NUMBERS // series))
    pace = sample_seconds(query.scope, context.interval_seconds)
    grid = make_grid(query.start, query.end, max_steps, pace)
    found: list[Series] = []
    with noticing() as incomplete:
        if grid.count:
            start = grid.start - _MAX_LOOK_BACK_STEPS * grid.step
            has_counter = any(CATALOGUE[query.scope][metric].kind == "counter" for metric in query.metrics)
            found = context.store.series(
                replace(query, start=start, step=grid.step, spread=spread or has_counter)
            )
    if len(found) * grid.count * (3 if spread else 1) > 2 * _MAX_NUMBERS:
        raise RefusedError(
            400, f"the answer would have {len(found):,} series", hint="name nodes, or ask for fewer metrics"
        )
    return HistoryReport(
        scope=query.scope,
        start=query.start,
        end=query.end,
        step=grid.step,
        times=grid.times(),
        series=_history_series(context, query.scope, found, grid, spread=spread),
        incomplete=incomplete,
    )


def _expected_series(context: Context, query: Query) -> int:
    """Return about how many series of one metric an answer has."""
    per_subject = 1 if query.scope in ("gpu", "host") else _SUBJECTS_PER_NODE
    return max(1, _count_series(context, query)) * per_subject


def _count_series(context: Context, query: Query) -> int:
    if query.subjects is not None:
        return len(query.subjects)
    if query.scope == "gpu":
        return sum(query.nodes is None or gpu.node in query.nodes for gpu in context.store.gpus())
    return len(context.node_names if query.nodes is None else query.nodes)


def _history_series(
    context: Context, scope: Scope, found: Sequence[Series], grid: Grid, *, spread: bool
) -> list[HistorySeries]:
    has_gpu = scope in ("gpu", "process")
    labels = context.gpu_labels() if has_gpu else {}
    series = []
    for one in found:
        node, subject = one.key
        metric = CATALOGUE[scope][one.metric]
        columns = _columns(one, metric, grid, spread=spread) if node in context.node_names else None
        if columns is not None:
            series.append(
                HistorySeries(
                    node=context.node_names[node],
                    subject=subject,
                    gpu=labels.get((node, subject.rpartition("@")[2])) if has_gpu else UNSET,
                    metric=one.metric,
                    unit=f"{metric.unit}/second" if metric.kind == "counter" else metric.unit,
                    values=columns["values"],
                    lows=columns.get("lows", UNSET),
                    highs=columns.get("highs", UNSET),
                )
            )
    return series


def _columns(
    series: Series, metric: Metric, grid: Grid, *, spread: bool
) -> Mapping[str, list[float | None]] | None:
    """Return the values of a series on the grid; None when no step of it has one."""
    if metric.kind == "counter":
        columns = {"values": _rates(series, grid)}
    elif spread:
        columns = {"values": series.values, "lows": series.lows, "highs": series.highs}
    else:
        columns = {"values": series.values}
    positions = grid.positions(series.times)
    inside = (positions >= 0) & (positions < grid.count) & ~np.isnan(columns["values"])
    if not inside.any():
        return None
    digits = _digits(metric)
    return {
        name: _on_grid(np.round(values[inside], digits), positions[inside], grid)
        for name, values in columns.items()
    }


def _digits(metric: Metric) -> int:
    """Return the digits after the point of a mean: two more than the metric's resolution has."""
    if metric.kind == "counter":
        return _RATE_DIGITS
    return max(0, math.ceil(-math.log10(metric.resolution))) + 2


def _rates(series: Series, grid: Grid) -> NDArray[np.float64]:
    """Return how much a counter grew per second, from the last sample of one step to the last of the next.

    NaN where it went back, as after a restart: how far it had come before that is unknown.
    """
    rates = np.full(len(series.times), np.nan)
    grown, seconds = np.diff(series.highs), np.diff(series.ends)
    is_near = np.diff(grid.positions(series.times)) <= _MAX_LOOK_BACK_STEPS
    is_known = is_near & (seconds > 0) & (series.lows[1:] >= series.highs[:-1])
    rates[1:][is_known] = grown[is_known] / seconds[is_known]
    return rates


def _on_grid(values: NDArray[np.float64], positions: NDArray[np.int64], grid: Grid) -> list[float | None]:
    row: list[float | None] = [None] * grid.count
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        row[position] = value
    return row
