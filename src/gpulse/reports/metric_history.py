"""History of metrics: the samples of one metric, or several metrics on one grid for charts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field
from numpy.typing import NDArray

from gpulse.errors import RefusedError
from gpulse.model.metric_catalog import CATALOG, Metric, Scope
from gpulse.reports.time_grid import ReportContext, TimeGrid, make_grid, sampling_seconds
from gpulse.store.incomplete_answers import collect_missing
from gpulse.store.store import Query, Series, Statistic

_MAX_POINTS = 1_000_000
"""Maximum points in an answer about one metric; for more, the steps become longer."""
_MAX_VALUES = 2_000_000
"""Maximum values in an answer for charts."""
_MIN_STEPS = 10
_SUBJECTS_PER_NODE = 8
"""Typical number of disks, interfaces or processes of a node."""
_MAX_LOOK_BACK_STEPS = 3
"""A counter's rate is measured from the previous known step, which may be at most this many steps earlier."""
_RATE_DIGITS = 9
"""Enough digits for one event per month to be a rate above zero."""
_BAND_DIGITS = 9
_PERCENTILES = (5, 50, 95)
_MAX_OUTLIERS = 3
_OUTLIER_FACTOR = 4.0
"""An outlier's mean distance from the median is this many times the usual one of the series…"""
_MIN_OUTLIER_RATIO = 0.05
"""… and at least this part of the range of values."""
_MAX_OUTLIER_RATIO = 0.1
"""If more than this part of the series differs, they are a group, and none is an outlier."""

Spread = bool | Literal["percentiles"]


class QuerySeries(Struct, frozen=True, kw_only=True):
    """One metric of one subject."""

    node: str
    subject: str
    gpu: str | UnsetType | None = UNSET
    """Label of the GPU; absent for other scopes."""
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
    """Sentences about missing data."""


class HistorySeries(Struct, frozen=True, kw_only=True):
    """One metric of one subject, with a value per step; null is unknown."""

    node: str
    subject: str
    gpu: str | UnsetType | None = UNSET
    """Label of the GPU; absent for scopes without GPUs."""
    metric: str
    unit: str
    values: list[float | None]
    lows: list[float | None] | UnsetType = UNSET
    highs: list[float | None] | UnsetType = UNSET


class HistoryBand(Struct, frozen=True, kw_only=True):
    """Distribution of one metric over all subjects at each step; null where no subject has a value."""

    metric: str
    unit: str
    count: int
    """Number of series without the outliers, which are not part of the distribution."""
    values: list[float | None]
    """Medians."""
    lows: list[float | None]
    """5th percentiles."""
    highs: list[float | None]
    """95th percentiles."""


class HistoryReport(Struct, frozen=True, kw_only=True):
    """Several metrics over time, all on the same grid."""

    scope: Scope
    start: float = field(name="from")
    end: float = field(name="to")
    step: float
    times: list[float]
    series: list[HistorySeries]
    """With percentiles, only the outliers of each metric."""
    bands: list[HistoryBand] | UnsetType = UNSET
    """With percentiles, one for each metric."""
    incomplete: list[str]
    """Sentences about missing data."""


def build_query_report(context: ReportContext, query: Query) -> QueryReport:
    """Return the history of one metric, with longer steps than requested if there are too many points."""
    (metric,) = query.metrics
    step = _limit_step(context, query)
    found: list[Series] = []
    with collect_missing() as incomplete:
        if query.start < query.end:
            found = context.store.series(replace(query, step=step, spread=False))
    return QueryReport(
        metric=metric,
        scope=query.scope,
        unit=CATALOG[query.scope][metric].unit,
        start=query.start,
        end=query.end,
        step=step,
        statistic=query.statistic if step is not None else None,
        series=_query_series(context, query.scope, found),
        incomplete=incomplete,
    )


def _query_series(context: ReportContext, scope: Scope, found: Sequence[Series]) -> list[QuerySeries]:
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


def _limit_step(context: ReportContext, query: Query) -> float | None:
    """Return the requested step, or a longer one if the answer would have too many points."""
    series_seconds = (query.end - query.start) * max(_count_series(context, query), 1)
    step = context.interval_seconds if query.step is None else query.step
    return query.step if series_seconds <= step * _MAX_POINTS else series_seconds / _MAX_POINTS


def build_history_report(
    context: ReportContext, query: Query, *, max_steps: int, spread: Spread
) -> HistoryReport:
    """Return several metrics over time, all on the same grid; counters as rates.

    Args:
        context: Source of the data.
        query: Scope, metrics, time range and subjects.
        max_steps: Maximum number of steps; if there are many series, there are fewer.
        spread: Also return the lowest and the highest value of each step; or instead of all series the percentiles over
            them at each step, and the outliers.
    """
    has_percentiles, spread = spread == "percentiles", spread is True
    series = _estimate_series(context, query) * len(query.metrics) * (3 if spread else 1)
    max_steps = max(_MIN_STEPS, min(max_steps, _MAX_VALUES // series))
    interval = sampling_seconds(query.scope, context.interval_seconds)
    grid = make_grid(query.start, query.end, max_steps, interval)
    found: list[Series] = []
    with collect_missing() as incomplete:
        if grid.count:
            start = grid.start - _MAX_LOOK_BACK_STEPS * grid.step
            has_counter = any(CATALOG[query.scope][metric].kind == "counter" for metric in query.metrics)
            found = context.store.series(
                replace(query, start=start, step=grid.step, spread=spread or has_counter)
            )
    if len(found) * grid.count * (3 if spread else 1) > 2 * _MAX_VALUES:
        raise RefusedError(
            400,
            f"the answer would be too large: {len(found):,} series",
            hint="select fewer nodes, or request fewer metrics",
        )
    history = _history_series(context, query.scope, found, grid, spread=spread)
    bands: list[HistoryBand] | UnsetType = UNSET
    if has_percentiles:
        bands, history = _distributions(history)
    return HistoryReport(
        scope=query.scope,
        start=query.start,
        end=query.end,
        step=grid.step,
        times=grid.times(),
        series=history,
        bands=bands,
        incomplete=incomplete,
    )


def _distributions(series: Sequence[HistorySeries]) -> tuple[list[HistoryBand], list[HistorySeries]]:
    """Return the outliers among the series of each metric, and the percentiles over the other ones."""
    bands, outliers = [], []
    for metric in dict.fromkeys(one.metric for one in series):
        own = [one for one in series if one.metric == metric]
        rows = np.array([one.values for one in own], np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # steps without any value
            places = _outliers(rows, np.nanmean(np.abs(rows - np.nanmedian(rows, axis=0)), axis=1))
            others = np.delete(rows, places, axis=0)
            low, median, high = np.nanpercentile(others, _PERCENTILES, axis=0)
        bands.append(
            HistoryBand(
                metric=metric,
                unit=own[0].unit,
                count=len(others),
                values=_known(median),
                lows=_known(low),
                highs=_known(high),
            )
        )
        outliers += [own[place] for place in places]
    return bands, outliers


def _outliers(rows: NDArray[np.float64], distances: NDArray[np.float64]) -> list[int]:
    """Return the rows whose mean distance from the median is far above the usual one, the farthest first."""
    usual = np.nanmedian(distances)
    height = max(np.nanmax(rows), 0.0) - min(np.nanmin(rows), 0.0)
    is_far = (distances > usual * _OUTLIER_FACTOR) & (distances > height * _MIN_OUTLIER_RATIO)
    if is_far.sum() > max(_MAX_OUTLIERS, len(rows) * _MAX_OUTLIER_RATIO):
        return []
    places = [int(place) for place in np.argsort(-np.nan_to_num(distances)) if is_far[place]]
    return places[:_MAX_OUTLIERS]


def _known(values: NDArray[np.float64]) -> list[float | None]:
    return [None if value != value else round(value, _BAND_DIGITS) for value in values.tolist()]  # noqa: PLR0124  NaN


def _estimate_series(context: ReportContext, query: Query) -> int:
    """Estimate the number of series of one metric in an answer."""
    per_subject = 1 if query.scope in ("gpu", "host") else _SUBJECTS_PER_NODE
    return max(1, _count_series(context, query)) * per_subject


def _count_series(context: ReportContext, query: Query) -> int:
    if query.subjects is not None:
        return len(query.subjects)
    if query.scope == "gpu":
        return sum(query.nodes is None or gpu.node in query.nodes for gpu in context.store.gpus())
    return len(context.node_names if query.nodes is None else query.nodes)


def _history_series(
    context: ReportContext, scope: Scope, found: Sequence[Series], grid: TimeGrid, *, spread: bool
) -> list[HistorySeries]:
    has_gpu = scope in ("gpu", "process")
    labels = context.gpu_labels() if has_gpu else {}
    series = []
    for one in found:
        node, subject = one.key
        metric = CATALOG[scope][one.metric]
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
    series: Series, metric: Metric, grid: TimeGrid, *, spread: bool
) -> Mapping[str, list[float | None]] | None:
    """Return the values of a series on the grid; None when no step has a value."""
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
        name: _place_on_grid(np.round(values[inside], digits), positions[inside], grid)
        for name, values in columns.items()
    }


def _digits(metric: Metric) -> int:
    """Return the number of decimals of a mean: two more than the metric's resolution."""
    if metric.kind == "counter":
        return _RATE_DIGITS
    return max(0, math.ceil(-math.log10(metric.resolution))) + 2


def _rates(series: Series, grid: TimeGrid) -> NDArray[np.float64]:
    """Return the rate of a counter per second, from the last sample of one step to the last sample of the next.

    It is NaN where the counter decreased, for example after a restart, because its growth before that is unknown.
    """
    rates = np.full(len(series.times), np.nan)
    grown, seconds = np.diff(series.highs), np.diff(series.ends)
    is_near = np.diff(grid.positions(series.times)) <= _MAX_LOOK_BACK_STEPS
    is_known = is_near & (seconds > 0) & (series.lows[1:] >= series.highs[:-1])
    rates[1:][is_known] = grown[is_known] / seconds[is_known]
    return rates


def _place_on_grid(
    values: NDArray[np.float64], positions: NDArray[np.int64], grid: TimeGrid
) -> list[float | None]:
    row: list[float | None] = [None] * grid.count
    for position, value in zip(positions.tolist(), values.tolist(), strict=True):
        row[position] = value
    return row
