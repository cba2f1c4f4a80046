"""Samples of one scope as something to select from: files of samples, files of minutes, and what is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.store.history.blocks import subject_key
from gpulse.store.history.query import Window
from gpulse.store.history.recent import RecentView
from gpulse.store.history.rollup import COARSE_SECONDS, FINE_SECONDS, FIRST, KNOWN, LAST
from gpulse.store.history.segments import SealedFile, Segment, Summary
from gpulse.store.history.tables import label_columns, label_of, quoted, text_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

Files = list[tuple[Segment, SealedFile]]


class Sources(NamedTuple):
    """Where samples are at one moment, each in one of them."""

    paths: Callable[[Files], list[str]]
    """Where the files of segments are."""
    segments: Sequence[Segment]
    recent: RecentView | None = None
    summaries: Sequence[Summary] = ()
    """Of some of the segments; they say the same."""


class Relation(NamedTuple):
    """A query, and what belongs to it.

    A row covers one sample or those of one step: `node_id`, `subject`, the label columns of the scope, `samples`, the
    microseconds `time` (at which the row's step begins), `first` and `last`, and for each metric, by its number, the mean
    `m0`, how many samples that is of `n0`, the least `l0` and the largest `h0`.
    """

    query: str
    bound: list[Any]
    files: Files
    tables: dict[str, dict[str, NDArray[Any]]]


def relation(
    sources: Sources,
    window: Window,
    metrics: Sequence[str],
    *,
    grain: int,
    name: str = "held",
    nearly: bool = False,
) -> Relation:
    """Everything there is of a window.

    Args:
        sources: Where to look.
        window: What is wanted.
        metrics: Names of the catalogue.
        grain: How many seconds a row may cover where there are such rows: 0 for every sample, else `rollup.FINE_SECONDS` or
            `rollup.COARSE_SECONDS`, and rows begin at multiples of it.
        name: What the tables in memory are called; another one for each relation of a query.
        nearly: Where samples were removed and rows of minutes were not, use a part of such a row for a part of its minute.
    """
    parts: list[str] = []
    bound: list[Any] = []
    used: Files = []
    for part, files, seconds in _pieces(sources, window, grain, nearly=nearly):
        whole = _covering(part, seconds) if seconds else part
        condition, values = whole.condition()
        for columns, group in _alike(files, metrics, is_rolled=seconds > 0):
            select = (_rolled if seconds else _samples)(window, metrics, columns)
            query = f"SELECT {select} FROM read_parquet(?) WHERE {condition}"
            parts.append(query if whole == part else _cut(query, part, seconds))
            bound += [sources.paths(group), *values]
            used += group
    tables: dict[str, dict[str, NDArray[Any]]] = {}
    recent = None if sources.recent is None else _recent(sources.recent, window, metrics)
    if recent is not None:
        tables = {f"{name}_rows": recent[0], f"{name}_keys": recent[1]}
        parts.append(_remembered(window, metrics, name))
    if not parts:
        parts.append(f"SELECT {_nothing(window, metrics)} WHERE false")
    return Relation(" UNION ALL ".join(parts), bound, used, tables)


def _cut(query: str, window: Window, seconds: int) -> str:
    """Rows of minutes, as far as these lie in a window."""
    length = seconds * 1_000_000
    share = f"(least(time + {length}, {window.end}) - greatest(time, {window.start})) / {length}.0"
    return (
        f"SELECT * REPLACE (greatest(first, {window.start}) AS first, least(last, {window.end - 1}) AS last, "
        f"greatest(1, round(samples * {share}))::INTEGER AS samples) "
        f"FROM ({query}) WHERE first < {window.end} AND last >= {window.start}"
    )


def _pieces(
    sources: Sources, window: Window, grain: int, *, nearly: bool
) -> Iterator[tuple[Window, Files, int]]:
    """Which files answer for which part of the window, and for how many seconds their rows stand."""
    summaries = [item for item in sources.summaries if item.segment.has(window.scope, COARSE_SECONDS)]
    inner = _aligned(window, COARSE_SECONDS)
    if grain < COARSE_SECONDS or not summaries or inner.start >= inner.end:
        yield from _finer(sources.segments, window, grain, nearly=nearly)
        return
    yield inner, inner.files([item.segment for item in summaries], seconds=COARSE_SECONDS), COARSE_SECONDS
    members = [segment for item in summaries for segment in item.members]
    for edge in edges_of(window, inner):
        yield from _finer(members, edge, FINE_SECONDS, nearly=nearly)
    covered = {segment.first for segment in members}
    rest = [segment for segment in sources.segments if segment.first not in covered]
    yield from _finer(rest, window, FINE_SECONDS, nearly=nearly)


def _finer(
    segments: Sequence[Segment], window: Window, grain: int, *, nearly: bool
) -> Iterator[tuple[Window, Files, int]]:
    inner = _aligned(window, FINE_SECONDS)
    rolled = [segment for segment in segments if segment.is_compacted]
    bare = [segment for segment in rolled if nearly and not segment.has(window.scope)]
    if not grain or inner.start >= inner.end:
        yield window, window.files(segments), 0
        yield window, _covering(window, FINE_SECONDS).files(bare, seconds=FINE_SECONDS), FINE_SECONDS
        return
    whole = [segment for segment in segments if not segment.is_compacted]
    yield inner, inner.files(rolled, seconds=FINE_SECONDS), FINE_SECONDS
    yield window, window.files(whole), 0
    for edge in edges_of(window, inner):
        yield edge, edge.files(rolled), 0
        yield edge, _covering(edge, FINE_SECONDS).files(bare, seconds=FINE_SECONDS), FINE_SECONDS


def _aligned(window: Window, seconds: int) -> Window:
    """The part of a window between multiples of a length of time."""
    length = seconds * 1_000_000
    return window._replace(start=-(-window.start // length) * length, end=window.end // length * length)


def _covering(window: Window, seconds: int) -> Window:
    """The least window between multiples of a length of time that a window lies within."""
    length = seconds * 1_000_000
    return window._replace(start=window.start // length * length, end=-(-window.end // length) * length)


def edges_of(window: Window, inner: Window) -> list[Window]:
    """What is left of a window on both sides."""
    edges = window._replace(end=inner.start), window._replace(start=inner.end)
    return [edge for edge in edges if edge.start < edge.end]


def _alike(files: Files, metrics: Sequence[str], *, is_rolled: bool) -> list[tuple[set[str], Files]]:
    """Files that have the same of the wanted columns, in the same types, together."""
    names = list(metrics)
    if is_rolled:
        names += [side + metric for side in ("min_", "max_") for metric in metrics]
    found: dict[tuple[str | None, ...], Files] = {}
    for item in files:
        found.setdefault(tuple(item[1].columns.get(name) for name in names), []).append(item)
    return [
        ({name for name, kind in zip(names, kinds, strict=True) if kind is not None}, group)
        for kinds, group in found.items()
    ]


def _labels(window: Window) -> tuple[str, ...]:
    return label_columns(window.scope) if window.scope == "process" else ()


def _keys(window: Window) -> list[str]:
    return ["node_id", "subject", *_labels(window)]


def _samples(window: Window, metrics: Sequence[str], columns: set[str]) -> str:
    time = "epoch_us(time)"
    select = [*_keys(window), f"1 AS samples, {time} AS time, {time} AS first, {time} AS last"]
    for place, metric in enumerate(metrics):
        value = f"{quoted(metric)}::DOUBLE" if metric in columns else "NULL::DOUBLE"
        select.append(_metric(place, value, f"({value} IS NOT NULL)::BIGINT", value, value))
    return ", ".join(select)


def _rolled(window: Window, metrics: Sequence[str], columns: set[str]) -> str:
    time = "epoch_us(time)"
    select = [
        *_keys(window),
        f"samples, {time} AS time, epoch_us({FIRST}) AS first, epoch_us({LAST}) AS last",
    ]
    for place, metric in enumerate(metrics):
        value, low, high = (
            f"{quoted(side + metric)}::DOUBLE" if metric in columns else "NULL::DOUBLE"
            for side in ("", "min_", "max_")
        )
        count = f"{quoted(KNOWN + metric)}::BIGINT" if metric in columns else "0::BIGINT"
        select.append(_metric(place, value, count, low, high))
    return ", ".join(select)


def _metric(place: int, value: str, count: str, low: str, high: str) -> str:
    return f"{value} AS m{place}, {count} AS n{place}, {low} AS l{place}, {high} AS h{place}"


def _nothing(window: Window, metrics: Sequence[str]) -> str:
    kinds = {"pid": "BIGINT", "start_time": "DOUBLE"}
    labels = [f"NULL::{kinds.get(label, 'VARCHAR')} AS {label}" for label in _labels(window)]
    select = [
        "0 AS node_id",
        "'' AS subject",
        *labels,
        "0 AS samples, 0::BIGINT AS time, 0::BIGINT AS first, 0::BIGINT AS last",
    ]
    none = "NULL::DOUBLE"
    return ", ".join(
        [*select, *(_metric(place, none, "0::BIGINT", none, none) for place in range(len(metrics)))]
    )


def _remembered(window: Window, metrics: Sequence[str], name: str) -> str:
    labels = {
        "pid": "if(isnan(pid), NULL, pid)::BIGINT AS pid",
        "start_time": "if(isnan(start_time), NULL, start_time) AS start_time",
    }
    select = [
        "node_id",
        "subject",
        *(labels.get(label, label) for label in _labels(window)),
        "1 AS samples, time, time AS first, time AS last",
    ]
    for place in range(len(metrics)):
        known = f"isnan(v{place})"
        value = f"if({known}, NULL, v{place})"
        select.append(_metric(place, value, f"(NOT {known})::BIGINT", value, value))
    return f"SELECT {', '.join(select)} FROM {name}_rows JOIN {name}_keys USING (place)"


def _recent(
    view: RecentView, window: Window, metrics: Sequence[str]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]] | None:
    """The samples in memory, and whose they are; None when there are none."""
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
                *(label_of(label, subjects[place]) for label in _labels(window)),
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
    for label, column in zip(_labels(window), columns[2:], strict=True):
        table[label] = text_column(column) if label == "gpu" else np.array(column, np.float64)
    return rows, table
