"""Rollup rows: one row for the samples of a minute or of five minutes, with mean, minimum, maximum and count per metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.store.history.parquet_columns import KEY_COLUMNS, label_columns, quote_name

MINUTE_US = 60_000_000
FINE_SECONDS, COARSE_SECONDS = 60, 300
"""Time that a row covers in compacted segments, and in summaries of a day."""
FIRST_TIME, LAST_TIME = "first_time", "last_time"
"""Columns with the times of a row's first and last sample."""
COUNT_PREFIX = "known_"
"""Prefix of the columns with the number of samples in which a metric was known; its mean is over these."""
_STATISTIC_PREFIXES = ("min_", "max_", COUNT_PREFIX)
_RESERVED_COLUMNS = ("samples", FIRST_TIME, LAST_TIME)


def find_metrics(scope: Scope, columns: Collection[str]) -> list[str]:
    """Return the metrics among the columns of a sample file, without keys and names reserved for rollup columns."""
    labels = (*KEY_COLUMNS, *label_columns(scope), *_RESERVED_COLUMNS)
    return [
        column
        for column in columns
        if column in CATALOG[scope] or not (column in labels or column.startswith(_STATISTIC_PREFIXES))
    ]


def minute_query(scope: Scope, source: str, metrics: Sequence[str]) -> str:
    """Return the query for one row per minute, from samples."""
    select = {
        "samples": "count(*)::INTEGER",
        FIRST_TIME: "min(time)",
        LAST_TIME: "max(time)",
    }
    for metric in metrics:
        name = quote_name(metric)
        select[metric] = f"avg({name})::{_mean_type(scope, metric)}"
        select[f"min_{metric}"] = f"min({name})"
        select[f"max_{metric}"] = f"max({name})"
        select[COUNT_PREFIX + metric] = f"count({name})::INTEGER"
    return _group_query(scope, source, FINE_SECONDS, select)


def five_minute_query(scope: Scope, source: str, columns: Collection[str]) -> str:
    """Return the query for one row per five minutes, from one-minute rows."""
    select = {
        "samples": "sum(samples)::INTEGER",
        FIRST_TIME: f"min({FIRST_TIME})",
        LAST_TIME: f"max({LAST_TIME})",
    }
    for metric in (column for column in columns if COUNT_PREFIX + column in columns):
        name, count = quote_name(metric), quote_name(COUNT_PREFIX + metric)
        select[metric] = f"(sum({name} * {count}) / nullif(sum({count}), 0))::{_mean_type(scope, metric)}"
        select[f"min_{metric}"] = f"min({quote_name(f'min_{metric}')})"
        select[f"max_{metric}"] = f"max({quote_name(f'max_{metric}')})"
        select[COUNT_PREFIX + metric] = f"coalesce(sum({count}), 0)::INTEGER"
    return _group_query(scope, source, COARSE_SECONDS, select)


def rollup_columns(scope: Scope, metrics: Sequence[str]) -> list[str]:
    """Return the columns of rollup rows for some metrics."""
    names = ["node", "node_id", "subject", *label_columns(scope), "time", *_RESERVED_COLUMNS]
    return [*names, *(side + metric for metric in metrics for side in ("", *_STATISTIC_PREFIXES))]


def _mean_type(scope: Scope, metric: str) -> str:
    """Return the SQL type of a mean: seven digits are sufficient except for counters."""
    entry = CATALOG[scope].get(metric)
    return "FLOAT" if entry is not None and entry.kind != "counter" else "DOUBLE"


def _group_query(scope: Scope, source: str, seconds: int, select: Mapping[str, str]) -> str:
    labels = label_columns(scope)
    length = seconds * 1_000_000
    columns = {
        "node": "any_value(node)",
        "node_id": "node_id",
        "subject": "subject",
        **{label: f"any_value({quote_name(label)})" for label in labels},
        "time": f"make_timestamptz(epoch_us(time) // {length} * {length})",
        **select,
    }
    wanted = ", ".join(f"{expression} AS {quote_name(name)}" for name, expression in columns.items())
    again = ", start_time" if "start_time" in labels else ""  # a PID may be reused by another process
    keys = f"node_id, subject, epoch_us(time) // {length}{again}"
    return f"SELECT {wanted} FROM {source} GROUP BY {keys} ORDER BY {keys}"
