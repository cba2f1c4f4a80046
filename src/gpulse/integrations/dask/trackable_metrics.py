"""Metrics that can be tracked: their names, and the column that each becomes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from gpulse.errors import UsageError
from gpulse.model.metric_catalog import CATALOG, Scope

FIXED_COLUMNS = ("job", "dag", "timestamp")
"""Columns that every record begins with."""
DEFAULT_ON_HOSTS = ("cpu_utilization_ratio", "memory_available_bytes")
"""Metrics that are also tracked where no worker has a GPU and only GPU metrics were requested."""

ColumnShape = Literal["gpus", "one", "named", "tasks"]
"""One value per GPU of the worker, a single value, values by name of a disk or interface, or keys of tasks."""

_SCOPE_ORDER: tuple[Scope, ...] = ("gpu", "host", "process", "cgroup", "disk", "network", "filesystem")
"""Scopes in order of preference, for names that several have."""
_PER_GPU_METRICS = frozenset({"gpu_memory_bytes", "sm_ratio"})
"""Process metrics with one value per GPU."""
_MAX_SUGGESTED = 3


class ArgumentError(UsageError, ValueError):
    """A wrong argument; also a ValueError, as Python users expect."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        if hint is not None:
            self.add_note(f"try: {hint}")


class TrackedColumn(NamedTuple):
    """One tracked metric."""

    name: str
    """As it was given, and as the column is called."""
    shape: ColumnShape
    metric: str
    """The name in the catalog, or one of dask-metrics'."""
    scope: Scope | None = None
    """None for metrics that are not in the catalog."""

    @property
    def is_of_gpus(self) -> bool:
        """True when it needs a GPU."""
        return self.shape == "gpus"


_OWN_COLUMNS = {
    "tasks": TrackedColumn("tasks", "tasks", "tasks"),
    "total-mem": TrackedColumn("total-mem", "gpus", "total-mem"),
    "mem-util": TrackedColumn("mem-util", "gpus", "mem-util"),
    "compute-util": TrackedColumn("compute-util", "gpus", "compute-util"),
}
_OWN_UNITS = {"total-mem": "bytes", "mem-util": "percent", "compute-util": "percent"}
_READ_FOR = {
    "total-mem": ("memory_used_bytes",),
    "mem-util": ("memory_used_bytes", "memory_total_bytes"),
    "compute-util": ("gpu_utilization_ratio",),
}


def list_trackable() -> list[str]:
    """Return all names that can be tracked, those of dask-metrics first."""
    known = dict.fromkeys(_OWN_COLUMNS)
    for scope in _SCOPE_ORDER:
        known.update(dict.fromkeys(CATALOG[scope]))
    return list(known)


def build_columns(tracking: Iterable[str]) -> tuple[TrackedColumn, ...]:
    """Return the columns of metrics, each once.

    Raises:
        ArgumentError: Something cannot be tracked.
    """
    if isinstance(tracking, str):
        raise ArgumentError(f"tracking must be a list of names: tracking=[{tracking!r}]")
    try:
        given = list(tracking)
    except TypeError:
        raise ArgumentError(f"tracking must be a list of names, not {tracking!r}") from None
    return tuple(dict.fromkeys(_find_column(name) for name in given))


def find_unit(metric: str) -> str:
    """Return the unit of a tracked metric: `ratio` for ratios, and an empty string for custom metrics."""
    try:
        (column,) = build_columns([metric])
    except ArgumentError:
        return ""
    if column.scope is None:
        return _OWN_UNITS.get(metric, "")
    found = CATALOG[column.scope][column.metric]
    return "ratio" if found.kind == "ratio" else found.unit


def find_needed_readings(tracked: Sequence[TrackedColumn]) -> frozenset[str]:
    """Return the GPU readings that these columns need, derived ones with what they are computed from."""
    wanted: set[str] = set()
    for column in tracked:
        if column.is_of_gpus:
            wanted.update(_READ_FOR.get(column.metric, (column.metric,)))
            wanted.add(column.metric.replace("_bytes_per_second", "_bytes_total"))
    return frozenset(wanted)


def _find_column(name: object) -> TrackedColumn:
    if not isinstance(name, str):
        raise ArgumentError(f"{name!r} is not a metric name; {_describe_allowed()}")
    if name in _OWN_COLUMNS:
        return _OWN_COLUMNS[name]
    if name in FIXED_COLUMNS:
        raise ArgumentError(f"{name} is always tracked; remove it from the list; {_describe_allowed()}")
    prefix, dot, rest = name.partition(".")
    for scope in _SCOPE_ORDER:
        metric = rest if dot and prefix == scope else name
        if metric in CATALOG[scope]:
            return TrackedColumn(name, _find_shape(scope, metric), metric, scope)
    raise ArgumentError(f"there is no metric {name!r}{_find_similar(name)}; {_describe_allowed()}")


def _find_shape(scope: Scope, metric: str) -> ColumnShape:
    if scope == "gpu" or (scope == "process" and metric in _PER_GPU_METRICS):
        return "gpus"
    return "named" if scope in ("disk", "network", "filesystem") else "one"


def _find_similar(name: str) -> str:
    near = difflib.get_close_matches(name, list_trackable(), _MAX_SUGGESTED)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _describe_allowed() -> str:
    return (
        f"valid: {', '.join(_OWN_COLUMNS)} and the metrics in docs/reference/metrics.md, such as power_watts, "
        "sm_active_ratio, tensor_active_ratio, pcie_rx_bytes_per_second, cpu_utilization_ratio"
    )


def nothing_tracked_error() -> ArgumentError:
    """Return the error for an empty list of metrics."""
    return ArgumentError(f"no metric to track; {_describe_allowed()}")
