"""Rows that stand for the samples of a minute or of five: how they are made, and what their columns are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.history.parquet import writing
from gpulse.store.history.tables import KEYS, quoted, words_of

if TYPE_CHECKING:
    import duckdb

MINUTE_US = 60_000_000
FINE, COARSE = 60, 300
"""How many seconds a row stands for: beside an hour's samples, and in what is made of a day."""
FIRST, LAST = "first_time", "last_time"
"""When the first and the last sample of a row were taken."""
KNOWN = "known_"
"""Begins the names of columns that say of how many samples a mean is; without one it is of all of the row's."""
_SIDES = ("min_", "max_", KNOWN)
_TAKEN = ("samples", FIRST, LAST)


def metrics_of(scope: Scope, columns: Collection[str]) -> list[str]:
    """The metrics among the columns of a file of samples; those that only look like something else are left out."""
    words = (*KEYS, *words_of(scope), *_TAKEN)
    return [
        column
        for column in columns
        if column in CATALOGUE[scope] or not (column in words or column.startswith(_SIDES))
    ]


def of_samples(scope: Scope, source: str, metrics: Sequence[str]) -> str:
    """The query for one row a minute, from samples."""
    select = {
        "samples": "count(*)::INTEGER",
        FIRST: "min(time)",
        LAST: "max(time)",
    }
    for metric in metrics:
        name = quoted(metric)
        select[metric] = f"avg({name})::{_kind(scope, metric)}"
        select[f"min_{metric}"] = f"min({name})"
        select[f"max_{metric}"] = f"max({name})"
        select[KNOWN + metric] = f"count({name})::INTEGER"
    return _grouped(scope, source, FINE, select)


def of_minutes(scope: Scope, source: str, columns: Collection[str]) -> str:
    """The query for one row in five minutes, from rows of minutes."""
    select = {
        "samples": "sum(samples)::INTEGER",
        FIRST: f"min({FIRST})",
        LAST: f"max({LAST})",
    }
    for metric in rolled_metrics(columns):
        name = quoted(metric)
        count = known(metric, columns)
        select[metric] = f"(sum({name} * {count}) / nullif(sum({count}), 0))::{_kind(scope, metric)}"
        select[f"min_{metric}"] = f"min({quoted(f'min_{metric}')})"
        select[f"max_{metric}"] = f"max({quoted(f'max_{metric}')})"
        select[KNOWN + metric] = f"coalesce(sum({count}), 0)::INTEGER"
    return _grouped(scope, source, COARSE, select)


def rolled_metrics(columns: Collection[str]) -> list[str]:
    """The metrics that rows of minutes have."""
    return [column for column in columns if f"min_{column}" in columns and f"max_{column}" in columns]


def known(metric: str, columns: Collection[str]) -> str:
    """Of how many samples a row's mean of a metric is, as SQL."""
    count = f"if({quoted(metric)} IS NULL, 0, samples)"
    return f"coalesce({quoted(KNOWN + metric)}, {count})" if KNOWN + metric in columns else count


def _kind(scope: Scope, metric: str) -> str:
    """Seven digits are enough for a mean, but not for that of a counter."""
    entry = CATALOGUE[scope].get(metric)
    return "FLOAT" if entry is not None and entry.kind != "counter" else "DOUBLE"


def _grouped(scope: Scope, source: str, seconds: int, select: Mapping[str, str]) -> str:
    words = words_of(scope)
    length = seconds * 1_000_000
    columns = {
        "node": "any_value(node)",
        "node_id": "node_id",
        "subject": "subject",
        **{word: f"any_value({quoted(word)})" for word in words},
        "time": f"make_timestamptz(epoch_us(time) // {length} * {length})",
        **select,
    }
    wanted = ", ".join(f"{expression} AS {quoted(name)}" for name, expression in columns.items())
    again = ", start_time" if "start_time" in words else ""  # the same pid may be another process's
    keys = f"node_id, subject, epoch_us(time) // {length}{again}"
    return f"SELECT {wanted} FROM {source} GROUP BY {keys} ORDER BY {keys}"


def needed(database: duckdb.DuckDBPyConnection, table: str, path: str) -> str:
    """A query for a table of rows without the counts that say nothing new.

    Raises:
        GpulseError: It cannot be read.
    """
    with writing(path):
        columns = [row[0] for row in database.execute(f"DESCRIBE {table}").fetchall()]
        counts = [name for name in columns if name.startswith(KNOWN) and name.removeprefix(KNOWN) in columns]
        told = ", ".join(f"bool_or({quoted(name)} NOT IN (0, samples))" for name in counts)
        found = database.execute(f"SELECT {told} FROM {table}").fetchone() if counts else ()
    idle = {name for name, is_partial in zip(counts, found or (), strict=True) if not is_partial}
    kept = ", ".join(quoted(name) for name in columns if name not in idle)
    return f"SELECT {kept} FROM {table}"
