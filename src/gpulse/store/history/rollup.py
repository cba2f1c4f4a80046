"""Rollup rows: one row for the samples of a minute or of five minutes, with mean, minimum, maximum and count per metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.history.tables import KEYS, label_columns, quoted

MINUTE_US = 60_000_000
FINE_SECONDS, COARSE_SECONDS = 60, 300
"""How much time one row covers: beside the samples of an hour, and in the summary of a day."""
FIRST, LAST = "first_time", "last_time"
"""Columns with the times of the first and the last sample of a row."""
KNOWN = "known_"
"""Prefix of the columns that count the samples in which a metric was known, which its mean is of."""
_SIDES = ("min_", "max_", KNOWN)
_TAKEN = ("samples", FIRST, LAST)


def metrics_of(scope: Scope, columns: Collection[str]) -> list[str]:
    """Return the metrics among the columns of a file of samples, without keys and names that rollup columns have."""
    labels = (*KEYS, *label_columns(scope), *_TAKEN)
    return [
        column
        for column in columns
        if column in CATALOGUE[scope] or not (column in labels or column.startswith(_SIDES))
    ]


def of_samples(scope: Scope, source: str, metrics: Sequence[str]) -> str:
    """Return the query for one row per minute, from samples."""
    select = {
        "samples": "count(*)::INTEGER",
        FIRST: "min(time)",
        LAST: "max(time)",
    }
    for metric in metrics:
        name = quoted(metric)
        select[metric] = f"avg({name})::{_mean_type(scope, metric)}"
        select[f"min_{metric}"] = f"min({name})"
        select[f"max_{metric}"] = f"max({name})"
        select[KNOWN + metric] = f"count({name})::INTEGER"
    return _grouped(scope, source, FINE_SECONDS, select)


def of_minutes(scope: Scope, source: str, columns: Collection[str]) -> str:
    """Return the query for one row per five minutes, from rows of minutes."""
    select = {
        "samples": "sum(samples)::INTEGER",
        FIRST: f"min({FIRST})",
        LAST: f"max({LAST})",
    }
    for metric in (column for column in columns if KNOWN + column in columns):
        name, count = quoted(metric), quoted(KNOWN + metric)
        select[metric] = f"(sum({name} * {count}) / nullif(sum({count}), 0))::{_mean_type(scope, metric)}"
        select[f"min_{metric}"] = f"min({quoted(f'min_{metric}')})"
        select[f"max_{metric}"] = f"max({quoted(f'max_{metric}')})"
        select[KNOWN + metric] = f"coalesce(sum({count}), 0)::INTEGER"
    return _grouped(scope, source, COARSE_SECONDS, select)


def columns_of(scope: Scope, metrics: Sequence[str]) -> list[str]:
    """Return the columns that rollup rows of some metrics have."""
    names = ["node", "node_id", "subject", *label_columns(scope), "time", *_TAKEN]
    return [*names, *(side + metric for metric in metrics for side in ("", *_SIDES))]


def _mean_type(scope: Scope, metric: str) -> str:
    """Return the SQL type of a mean: seven digits are enough, except for counters."""
    entry = CATALOGUE[scope].get(metric)
    return "FLOAT" if entry is not None and entry.kind != "counter" else "DOUBLE"


def _grouped(scope: Scope, source: str, seconds: int, select: Mapping[str, str]) -> str:
    labels = label_columns(scope)
    length = seconds * 1_000_000
    columns = {
        "node": "any_value(node)",
        "node_id": "node_id",
        "subject": "subject",
        **{label: f"any_value({quoted(label)})" for label in labels},
        "time": f"make_timestamptz(epoch_us(time) // {length} * {length})",
        **select,
    }
    wanted = ", ".join(f"{expression} AS {quoted(name)}" for name, expression in columns.items())
    again = ", start_time" if "start_time" in labels else ""  # a pid may be used again by another process
    keys = f"node_id, subject, epoch_us(time) // {length}{again}"
    return f"SELECT {wanted} FROM {source} GROUP BY {keys} ORDER BY {keys}"
