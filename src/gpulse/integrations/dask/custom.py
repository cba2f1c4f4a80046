"""Metrics of people's own: functions that run in every worker at every measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gpulse.export.csv import safe_text
from gpulse.integrations.dask.tracking import ALWAYS, ArgumentError, Column

Function = Callable[[Any, Any], Any]

_TAKEN = (*ALWAYS, "tasks", "worker")
"""What columns of our own are called."""


@dataclass(frozen=True)
class CustomMetric:
    """A function under the name of the column that its answers become."""

    name: str
    function: Function
    per_device: bool = True
    """Called with one device's handle at a time, or once with the list of all."""

    def __call__(self, worker: Any, handle: Any) -> Any:
        """What the function says."""
        return self.function(worker, handle)


def custom_metric(name: str, *, per_device: bool = True) -> Callable[[Function], CustomMetric]:
    """Make a function a metric that `Monitor.attach(custom_metrics=[...])` takes.

        @custom_metric("power")
        def power_usage(worker, handle):
            return pynvml.nvmlDeviceGetPowerUsage(handle)

    The function gets the dask worker and an NVML handle, and is called for each GPU of the worker. With
    `per_device=False` it is called once, with the list of handles. It answers with a number, text, None, or lists
    of them.

    Args:
        name: Of the column.
        per_device: Call it for each GPU.

    Raises:
        ArgumentError: That is no name, or what is decorated is no function.
    """
    _check_name(name)

    def made(function: Function) -> CustomMetric:
        if not callable(function):
            raise ArgumentError(f"@custom_metric({name!r}) decorates a function, not {function!r}")
        return CustomMetric(name, function, per_device)

    return made


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise ArgumentError(f"a custom metric needs a name: @custom_metric('power'), not {name!r}")
    if safe_text(name) != name:
        raise ArgumentError(
            f"a spreadsheet would take the column {name!r} for a formula; begin its name with a letter"
        )
    if name in _TAKEN:
        raise ArgumentError(f"{name} is a column of gpulse's own; call the metric something else")


def checked(metrics: object, tracked: Iterable[Column]) -> tuple[CustomMetric, ...]:
    """The metrics, if all of them are some and no two have one name.

    Raises:
        ArgumentError: One is none, or its name is taken.
    """
    if metrics is not None and (isinstance(metrics, CustomMetric) or not isinstance(metrics, Iterable)):
        raise ArgumentError(f"custom_metrics is a list: custom_metrics=[...], not {metrics!r}")
    taken = {column.name for column in tracked}
    found: list[CustomMetric] = []
    for metric in () if metrics is None else metrics:
        if not isinstance(metric, CustomMetric):
            raise ArgumentError(
                f"{metric!r} is no custom metric; decorate the function: @custom_metric('power')"
            )
        if metric.name in taken:
            raise ArgumentError(f"there are two metrics called {metric.name!r}")
        taken.add(metric.name)
        found.append(metric)
    return tuple(found)
