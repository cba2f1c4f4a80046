"""What can be tracked: the names people give, and the column that each becomes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from gpulse.errors import UsageError
from gpulse.model.metric import CATALOGUE, Scope

ALWAYS = ("job", "dag", "timestamp")
"""The columns that every record begins with."""
DEFAULT_ON_HOSTS = ("cpu_utilization_ratio", "memory_available_bytes")
"""What is tracked as well where no worker has a GPU and nothing but GPUs was asked for."""

Shape = Literal["gpus", "one", "named", "tasks"]
"""A value a GPU of the worker, one value, one by the name of a disk or interface, or keys of tasks."""

_ORDER: tuple[Scope, ...] = ("gpu", "host", "process", "cgroup", "disk", "network", "filesystem")
"""Which scope a name means that several have."""
_ON_GPUS = frozenset({"gpu_memory_bytes", "sm_ratio"})
"""Readings of a process that it has on each of its GPUs."""
_MOST_SUGGESTED = 3


class ArgumentError(UsageError, ValueError):
    """An argument that does not make sense; a ValueError too, as people expect in Python."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        if hint is not None:
            self.add_note(f"try: {hint}")


class Column(NamedTuple):
    """One tracked metric."""

    name: str
    """As it was given, and as the column is called."""
    shape: Shape
    metric: str
    """The catalogue's name, or one of dask-metrics'."""
    scope: Scope | None = None
    """None for what is not in the catalogue as it stands."""

    @property
    def is_of_gpus(self) -> bool:
        """True when it needs a GPU."""
        return self.shape == "gpus"


_OWN = {
    "tasks": Column("tasks", "tasks", "tasks"),
    "total-mem": Column("total-mem", "gpus", "total-mem"),
    "mem-util": Column("mem-util", "gpus", "mem-util"),
    "compute-util": Column("compute-util", "gpus", "compute-util"),
}
_READ_FOR = {
    "total-mem": ("memory_used_bytes",),
    "mem-util": ("memory_used_bytes", "memory_total_bytes"),
    "compute-util": ("gpu_utilization_ratio",),
}


def names() -> list[str]:
    """Everything that can be tracked, dask-metrics' own names first."""
    known = dict.fromkeys(_OWN)
    for scope in _ORDER:
        known.update(dict.fromkeys(CATALOGUE[scope]))
    return list(known)


def columns(tracking: Iterable[str]) -> tuple[Column, ...]:
    """The columns of what is to be tracked, each once.

    Raises:
        ArgumentError: Something cannot be tracked.
    """
    if isinstance(tracking, str):
        raise ArgumentError(f"tracking is a list of names: tracking=[{tracking!r}]")
    try:
        given = list(tracking)
    except TypeError:
        raise ArgumentError(f"tracking is a list of names, not {tracking!r}") from None
    return tuple(dict.fromkeys(_column(name) for name in given))


def needed(tracked: Sequence[Column]) -> frozenset[str]:
    """The readings of a GPU that these columns are made of, derived ones with what they come from."""
    wanted: set[str] = set()
    for column in tracked:
        if column.is_of_gpus:
            wanted.update(_READ_FOR.get(column.metric, (column.metric,)))
            wanted.add(column.metric.replace("_bytes_per_second", "_bytes_total"))
    return frozenset(wanted)


def _column(name: object) -> Column:
    if not isinstance(name, str):
        raise ArgumentError(f"{name!r} is no name of a metric; {_allowed()}")
    if name in _OWN:
        return _OWN[name]
    if name in ALWAYS:
        raise ArgumentError(f"{name} is always tracked and needs no mention; {_allowed()}")
    prefix, dot, rest = name.partition(".")
    for scope in _ORDER:
        metric = rest if dot and prefix == scope else name
        if metric in CATALOGUE[scope]:
            return Column(name, _shape(scope, metric), metric, scope)
    raise ArgumentError(f"there is no metric {name!r}{_nearest(name)}; {_allowed()}")


def _shape(scope: Scope, metric: str) -> Shape:
    if scope == "gpu" or (scope == "process" and metric in _ON_GPUS):
        return "gpus"
    return "named" if scope in ("disk", "network", "filesystem") else "one"


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, names(), _MOST_SUGGESTED)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _allowed() -> str:
    return (
        f"allowed are {', '.join(_OWN)} and the names of gpulse's catalogue (docs/metrics.md), such as power_watts, "
        "sm_active_ratio, tensor_active_ratio, pcie_rx_bytes_per_second, cpu_utilization_ratio"
    )


def nothing_tracked() -> ArgumentError:
    """For a list that is empty."""
    return ArgumentError(f"there is nothing to track; {_allowed()}")
