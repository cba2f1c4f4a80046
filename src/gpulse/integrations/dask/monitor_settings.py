"""Settings of a monitor: the checked arguments of `Monitor.attach`, and custom metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from gpulse.integrations.dask.head_stream import HeadSettings
from gpulse.integrations.dask.job_labels import JobType
from gpulse.integrations.dask.trackable_metrics import (
    FIXED_COLUMNS,
    ArgumentError,
    TrackedColumn,
    build_columns,
    nothing_tracked_error,
)
from gpulse.model.safe_text import csv_cell
from gpulse.sampling.sampler import MIN_INTERVAL_SECONDS

MetricFunction = Callable[[Any, Any], Any]

_RESERVED_NAMES = (*FIXED_COLUMNS, "tasks", "worker")
"""Names of gpulse's own columns."""

_MIN_INTERVAL_MS = round(MIN_INTERVAL_SECONDS * 1000)
_MAX_INTERVAL_MS = 3_600_000
_MAX_MEASUREMENTS = 10**12


@dataclass(frozen=True)
class CustomMetric:
    """Function whose results become a column."""

    name: str
    function: MetricFunction
    per_device: bool = True
    """Called with one device's handle at a time, or once with the list of all."""

    def __call__(self, worker: Any, handle: Any) -> Any:
        """Return the function's result."""
        return self.function(worker, handle)


def custom_metric(name: str, *, per_device: bool = True) -> Callable[[MetricFunction], CustomMetric]:
    """Make a function a metric that `Monitor.attach(custom_metrics=[...])` takes.

        @custom_metric("power")
        def power_usage(worker, handle):
            return pynvml.nvmlDeviceGetPowerUsage(handle)

    The function gets the dask worker and an NVML handle, and is called for each GPU of the worker. With
    `per_device=False` it is called once, with the list of handles. It returns a number, a string, None, or lists
    of them.

    Args:
        name: Name of the column.
        per_device: Call it for each GPU.

    Raises:
        ArgumentError: The name is wrong, or what is decorated is not a function.
    """
    _check_name(name)

    def made(function: MetricFunction) -> CustomMetric:
        if not callable(function):
            raise ArgumentError(f"@custom_metric({name!r}) must decorate a function, not {function!r}")
        return CustomMetric(name, function, per_device)

    return made


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ArgumentError(f"a custom metric needs a name: @custom_metric('power'), not {name!r}")
    if csv_cell(name) != name:
        raise ArgumentError(
            f"a spreadsheet would read the column name {name!r} as a formula; start the name with a letter"
        )
    if name in _RESERVED_NAMES:
        raise ArgumentError(f"{name} is one of gpulse's own columns; choose another name")


def check_custom_metrics(metrics: object, tracked: Iterable[TrackedColumn]) -> tuple[CustomMetric, ...]:
    """Return the custom metrics after checking their types and that their names are unique.

    Raises:
        ArgumentError: One is not a custom metric, or its name is taken.
    """
    if metrics is not None and (isinstance(metrics, CustomMetric) or not isinstance(metrics, Iterable)):
        raise ArgumentError(f"custom_metrics must be a list, custom_metrics=[...], not {metrics!r}")
    taken = {column.name for column in tracked}
    found: list[CustomMetric] = []
    for metric in () if metrics is None else metrics:
        if not isinstance(metric, CustomMetric):
            raise ArgumentError(
                f"{metric!r} is not a custom metric; decorate the function: @custom_metric('power')"
            )
        if metric.name in taken:
            raise ArgumentError(f"duplicate metric name {metric.name!r}")
        taken.add(metric.name)
        found.append(metric)
    return tuple(found)


class MonitorSettings(NamedTuple):
    """Settings that scheduler and workers share."""

    tracked: tuple[TrackedColumn, ...]
    custom: tuple[CustomMetric, ...] = ()
    job_type: JobType = "client"
    interval_ms: float = 200
    mem_limit: int | None = None
    """Measurements of a worker that are kept in memory."""
    dump_loc: str = "temp"
    """Directory for the rest, on the scheduler's machine."""
    head: HeadSettings | None = None

    @property
    def interval_seconds(self) -> float:
        """Time from one measurement to the next."""
        return self.interval_ms / 1000


def build_settings(
    tracking: Iterable[str],
    custom_metrics: Iterable[object] | None,
    job_type: str,
    polling_interval: float,
    mem_limit: int | None,
    dump_loc: str | os.PathLike[str],
    head: HeadSettings | None = None,
) -> MonitorSettings:
    """Return the checked arguments of `attach`.

    Raises:
        ArgumentError: An argument is wrong; the message names the valid values.
    """
    tracked = build_columns(tracking)
    customs = check_custom_metrics(custom_metrics, tracked)
    if not tracked and not customs:
        raise nothing_tracked_error()
    return MonitorSettings(
        tracked,
        customs,
        _check_job_type(job_type),
        _check_interval(polling_interval),
        _check_mem_limit(mem_limit),
        _check_dump_folder(dump_loc),
        head,
    )


def _check_job_type(given: object) -> JobType:
    for known in get_args(JobType):
        if given == known:
            return known  # type: ignore[no-any-return]
    raise ArgumentError(f"job_type must be 'client' or 'manual', not {given!r}")


def _check_interval(given: object) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not _MIN_INTERVAL_MS <= given <= _MAX_INTERVAL_MS:  # type: ignore[operator]
        raise ArgumentError(
            f"polling_interval must be a number of milliseconds from {_MIN_INTERVAL_MS} to {_MAX_INTERVAL_MS:,}, not {given!r}"
        )
    return given  # type: ignore[return-value]


def _check_mem_limit(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int | float) or isinstance(given, bool) or not 1 <= given <= _MAX_MEASUREMENTS:
        raise ArgumentError(
            f"mem_limit must be a number of measurements of at least 1, or None for no limit, not {given!r:.50}"
        )
    return int(given)


def _check_dump_folder(given: object) -> str:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given) or "\0" in os.fspath(given):
        raise ArgumentError(f"dump_loc must be the path of a directory, not {given!r}")
    return os.fspath(given)
