"""SQL relations over the samples of one scope: sample files, rollup files and frames in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.store.history.duckdb_query import SampleWindow
from gpulse.store.history.frame_blocks import subject_key
from gpulse.store.history.parquet_columns import label_columns, label_value, quote_name, text_column
from gpulse.store.history.recent_frames import RecentFramesView
from gpulse.store.history.rollup import COARSE_SECONDS, COUNT_PREFIX, FINE_SECONDS, FIRST_TIME, LAST_TIME
from gpulse.store.history.segments import DaySummary, SealedFile, Segment

SegmentFiles = list[tuple[Segment, SealedFile]]


class SampleSources(NamedTuple):
    """The places of samples at a point in time; each sample is in exactly one of them."""

    paths: Callable[[SegmentFiles], list[str]]
    """Returns the paths of files."""
    segments: Sequence[Segment]
    recent: RecentFramesView | None = None
    summaries: Sequence[DaySummary] = ()
    """Summaries of some of the segments, with the same data in coarser rows."""


class SampleRelation(NamedTuple):
    """A SELECT statement with its parameters, files and tables.

    A row covers one sample or the samples of one step. Its columns are `node_id`, `subject`, the label columns of the scope,
    `samples`, the times `time` (start of the step), `first` and `last` in microseconds, and for each metric, by its index, the
    mean `m0`, the number of known samples `n0`, the minimum `l0` and the maximum `h0`.
    """

    query: str
    bound: list[Any]
    files: SegmentFiles
    tables: dict[str, dict[str, NDArray[Any]]]


def build_relation(
    sources: SampleSources,
    window: SampleWindow,
    metrics: Sequence[str],
    *,
    grain: int,
    name: str = "held",
    nearly: bool = False,
) -> SampleRelation:
    """Build the relation of all samples in a window.

    Args:
        sources: Where the samples are.
        window: The samples to select.
        metrics: Metric names from the catalog.
        grain: How many seconds a row may cover: 0 for every sample, otherwise `rollup.FINE_SECONDS` or
            `rollup.COARSE_SECONDS`; rows start at multiples of it.
        name: Prefix of the tables in memory; must be unique within a query.
        nearly: If samples of a minute were removed but its rollup row was not, use a part of the row for a part of the minute.
    """
    parts: list[str] = []
    bound: list[Any] = []
    used: SegmentFiles = []
    for part, files, seconds in _select_files(sources, window, grain, nearly=nearly):
        whole = _outer_window(part, seconds) if seconds else part
        condition, values = whole.condition()
        for columns, group in _group_by_columns(files, metrics, is_rolled=seconds > 0):
            select = (_rollup_columns if seconds else _sample_columns)(window, metrics, columns)
            query = f"SELECT {select} FROM read_parquet(?) WHERE {condition}"
            parts.append(query if whole == part else _cut_rows(query, part, seconds))
            bound += [sources.paths(group), *values]
            used += group
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    recent = None if sources.recent is None else _recent_tables(sources.recent, window, metrics)
    if recent is not None:
        tables = {f"{name}_rows": recent[0], f"{name}_keys": recent[1]}
        parts.append(_recent_select(window, metrics, name))
    if not parts:
        parts.append(f"SELECT {_empty_columns(window, metrics)} WHERE false")
    return SampleRelation(" UNION ALL ".join(parts), bound, used, tables)


def _cut_rows(query: str, window: SampleWindow, seconds: int) -> str:
    """Cut rollup rows at the edges of a window, and scale their sample counts."""
    length = seconds * 1_000_000
    share = f"(least(time + {length}, {window.end}) - greatest(time, {window.start})) / {length}.0"
    return (
        f"SELECT * REPLACE (greatest(first, {window.start}) AS first, least(last, {window.end - 1}) AS last, "
        f"greatest(1, round(samples * {share}))::INTEGER AS samples) "
        f"FROM ({query}) WHERE first < {window.end} AND last >= {window.start}"
    )


def _select_files(
    sources: SampleSources, window: SampleWindow, grain: int, *, nearly: bool
) -> Iterator[tuple[SampleWindow, SegmentFiles, int]]:
    """Yield parts of the window with the files to read for them and the seconds that their rows cover."""
    summaries = [item for item in sources.summaries if item.segment.has(window.scope, COARSE_SECONDS)]
    inner = _inner_window(window, COARSE_SECONDS)
    if grain < COARSE_SECONDS or not summaries or inner.start >= inner.end:
        yield from _select_finer_files(sources.segments, window, grain, nearly=nearly)
        return
    yield inner, inner.files([item.segment for item in summaries], seconds=COARSE_SECONDS), COARSE_SECONDS
    members = [segment for item in summaries for segment in item.members]
    for edge in window_edges(window, inner):
        yield from _select_finer_files(members, edge, FINE_SECONDS, nearly=nearly)
    covered = {segment.first for segment in members}
    rest = [segment for segment in sources.segments if segment.first not in covered]
    yield from _select_finer_files(rest, window, FINE_SECONDS, nearly=nearly)


def _select_finer_files(
    segments: Sequence[Segment], window: SampleWindow, grain: int, *, nearly: bool
) -> Iterator[tuple[SampleWindow, SegmentFiles, int]]:
    inner = _inner_window(window, FINE_SECONDS)
    rolled = [segment for segment in segments if segment.is_compacted]
    bare = [segment for segment in rolled if nearly and not segment.has(window.scope)]
    if not grain or inner.start >= inner.end:
        yield window, window.files(segments), 0
        yield window, _outer_window(window, FINE_SECONDS).files(bare, seconds=FINE_SECONDS), FINE_SECONDS
        return
    whole = [segment for segment in segments if not segment.is_compacted]
    yield inner, inner.files(rolled, seconds=FINE_SECONDS), FINE_SECONDS
    yield window, window.files(whole), 0
    for edge in window_edges(window, inner):
        yield edge, edge.files(rolled), 0
        yield edge, _outer_window(edge, FINE_SECONDS).files(bare, seconds=FINE_SECONDS), FINE_SECONDS


def _inner_window(window: SampleWindow, seconds: int) -> SampleWindow:
    """Shrink a window to multiples of a length of time."""
    length = seconds * 1_000_000
    return window._replace(start=-(-window.start // length) * length, end=window.end // length * length)


def _outer_window(window: SampleWindow, seconds: int) -> SampleWindow:
    """Widen a window to multiples of a length of time."""
    length = seconds * 1_000_000
    return window._replace(start=window.start // length * length, end=-(-window.end // length) * length)


def window_edges(window: SampleWindow, inner: SampleWindow) -> list[SampleWindow]:
    """Return the parts of a window before and after an inner window."""
    edges = window._replace(end=inner.start), window._replace(start=inner.end)
    return [edge for edge in edges if edge.start < edge.end]


def _group_by_columns(
    files: SegmentFiles, metrics: Sequence[str], *, is_rolled: bool
) -> list[tuple[set[str], SegmentFiles]]:
    """Group files that have the same wanted columns with the same types."""
    names = list(metrics)
    if is_rolled:
        names += [side + metric for side in ("min_", "max_") for metric in metrics]
    found: dict[tuple[str | None, ...], SegmentFiles] = {}
    for item in files:
        found.setdefault(tuple(item[1].columns.get(name) for name in names), []).append(item)
    return [
        ({name for name, kind in zip(names, kinds, strict=True) if kind is not None}, group)
        for kinds, group in found.items()
    ]


def _label_names(window: SampleWindow) -> tuple[str, ...]:
    return label_columns(window.scope) if window.scope == "process" else ()


def _key_names(window: SampleWindow) -> list[str]:
    return ["node_id", "subject", *_label_names(window)]


def _sample_columns(window: SampleWindow, metrics: Sequence[str], columns: set[str]) -> str:
    time = "epoch_us(time)"
    select = [*_key_names(window), f"1 AS samples, {time} AS time, {time} AS first, {time} AS last"]
    for place, metric in enumerate(metrics):
        value = f"{quote_name(metric)}::DOUBLE" if metric in columns else "NULL::DOUBLE"
        select.append(_metric_columns(place, value, f"({value} IS NOT NULL)::BIGINT", value, value))
    return ", ".join(select)


def _rollup_columns(window: SampleWindow, metrics: Sequence[str], columns: set[str]) -> str:
    time = "epoch_us(time)"
    select = [
        *_key_names(window),
        f"samples, {time} AS time, epoch_us({FIRST_TIME}) AS first, epoch_us({LAST_TIME}) AS last",
    ]
    for place, metric in enumerate(metrics):
        value, low, high = (
            f"{quote_name(side + metric)}::DOUBLE" if metric in columns else "NULL::DOUBLE"
            for side in ("", "min_", "max_")
        )
        count = f"{quote_name(COUNT_PREFIX + metric)}::BIGINT" if metric in columns else "0::BIGINT"
        select.append(_metric_columns(place, value, count, low, high))
    return ", ".join(select)


def _metric_columns(place: int, value: str, count: str, low: str, high: str) -> str:
    return f"{value} AS m{place}, {count} AS n{place}, {low} AS l{place}, {high} AS h{place}"


def _empty_columns(window: SampleWindow, metrics: Sequence[str]) -> str:
    kinds = {"pid": "BIGINT", "start_time": "DOUBLE"}
    labels = [f"NULL::{kinds.get(label, 'VARCHAR')} AS {label}" for label in _label_names(window)]
    select = [
        "0 AS node_id",
        "'' AS subject",
        *labels,
        "0 AS samples, 0::BIGINT AS time, 0::BIGINT AS first, 0::BIGINT AS last",
    ]
    none = "NULL::DOUBLE"
    return ", ".join(
        [*select, *(_metric_columns(place, none, "0::BIGINT", none, none) for place in range(len(metrics)))]
    )


def _recent_select(window: SampleWindow, metrics: Sequence[str], name: str) -> str:
    labels = {
        "pid": "if(isnan(pid), NULL, pid)::BIGINT AS pid",
        "start_time": "if(isnan(start_time), NULL, start_time) AS start_time",
    }
    select = [
        "node_id",
        "subject",
        *(labels.get(label, label) for label in _label_names(window)),
        "1 AS samples, time, time AS first, time AS last",
    ]
    for place in range(len(metrics)):
        known = f"isnan(v{place})"
        value = f"if({known}, NULL, v{place})"
        select.append(_metric_columns(place, value, f"(NOT {known})::BIGINT", value, value))
    return f"SELECT {', '.join(select)} FROM {name}_rows JOIN {name}_keys USING (place)"


def _recent_tables(
    view: RecentFramesView, window: SampleWindow, metrics: Sequence[str]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] | None:
    """Return tables of the samples in memory and of their keys; None if there are no samples."""
    keys: list[tuple[Any, ...]] = []
    places: list[NDArray[np.int32]] = []
    times: list[NDArray[np.int64]] = []
    values: list[list[NDArray[np.float64]]] = []
    for stack, chosen in view.stacks(window):
        subjects = stack.layout.subjects
        places.append(
            np.tile(np.arange(len(keys), len(keys) + len(chosen), dtype=np.int32), len(stack.times))
        )
        keys += [
            (
                stack.node,
                subject_key(window.scope, subjects[place]),
                *(label_value(label, subjects[place]) for label in _label_names(window)),
            )
            for place in chosen
        ]
        times.append(np.repeat(stack.times, len(chosen)))
        values.append([stack.values(metric)[:, chosen].ravel() for metric in metrics])
    if not keys:
        return None
    rows: dict[str, NDArray[Any]] = {"place": np.concatenate(places), "time": np.concatenate(times)}
    for place in range(len(metrics)):
        rows[f"v{place}"] = np.concatenate([columns[place] for columns in values])
    columns = list(zip(*keys, strict=True))
    table = {
        "place": np.arange(len(keys), dtype=np.int32),
        "node_id": np.array(columns[0], np.int32),
        "subject": text_column(columns[1]),
    }
    for label, column in zip(_label_names(window), columns[2:], strict=True):
        table[label] = text_column(column) if label == "gpu" else np.array(column, np.float64)
    return rows, table
