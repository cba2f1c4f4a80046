"""What `attach` takes, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from gpulse.integrations.dask.monitor_settings import (
    CustomMetric,
    MonitorSettings,
    build_settings,
    custom_metric,
)
from gpulse.integrations.dask.trackable_metrics import (
    ArgumentError,
    build_columns,
    find_needed_readings,
    list_trackable,
)
from gpulse.model.metric_catalog import CATALOG


def made(**given: Any) -> MonitorSettings:
    """Settings with one argument changed."""
    usual: dict[str, Any] = {
        "tracking": ["mem-util"],
        "custom_metrics": (),
        "job_type": "client",
        "polling_interval": 200,
        "mem_limit": None,
        "dump_loc": "temp",
    }
    return build_settings(**{**usual, **given})


def test_everything_in_the_catalogue_can_be_tracked() -> None:
    """By its name alone, and by its scope and name."""
    found = build_columns(list_trackable())

    assert list_trackable() == [column.name for column in found]
    for scope, metrics in CATALOG.items():
        assert [scope] * len(metrics) == [
            column.scope for column in build_columns(f"{scope}.{name}" for name in metrics)
        ]


@pytest.mark.parametrize(
    ("name", "scope", "shape"),
    [
        ("memory_total_bytes", "gpu", "gpus"),
        ("host.memory_total_bytes", "host", "one"),
        ("gpu_memory_bytes", "process", "gpus"),
        ("sm_ratio", "process", "gpus"),
        ("host_memory_bytes", "process", "one"),
        ("disk.read_bytes_total", "disk", "named"),
        ("cpu_limit_cores", "cgroup", "one"),
        ("rx_bytes_per_second", "network", "named"),
    ],
)
def test_a_name_means_the_nearest_thing(name: str, scope: str, shape: str) -> None:
    """GPUs first; a scope before it says otherwise."""
    (column,) = build_columns([name])

    assert (name, scope, shape) == (column.name, column.scope, column.shape)


def test_a_name_given_twice_is_one_column() -> None:
    """In the order in which they came."""
    assert ["tasks", "mem-util"] == [c.name for c in build_columns(["tasks", "mem-util", "tasks"])]


def test_gpus_are_asked_for_no_more_than_the_columns_need() -> None:
    """Rates may have to come from counters."""
    found = find_needed_readings(
        build_columns(["mem-util", "pcie_rx_bytes_per_second", "cpu_utilization_ratio", "tasks"])
    )

    assert {
        "memory_used_bytes",
        "memory_total_bytes",
        "pcie_rx_bytes_per_second",
        "pcie_rx_bytes_total",
    } <= found
    assert "power_watts" not in found
    assert "cpu_utilization_ratio" not in found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tracking": []}, "no metric to track; valid: tasks, total-mem, mem-util, compute-util"),
        ({"tracking": ["mem_util"]}, "'mem_util' .did you mean mem-util"),
        ({"tracking": ["nonsense"]}, "valid: tasks, total-mem"),
        ({"tracking": ["gpu.load1"]}, "no metric 'gpu.load1'"),
        ({"tracking": ["job"]}, "always tracked"),
        ({"tracking": "mem-util"}, r"tracking=\['mem-util'\]"),
        ({"tracking": None}, "a list of names"),
        ({"tracking": [7]}, "7 is not a metric name"),
        ({"polling_interval": -200}, "from 50 to"),
        ({"polling_interval": 0}, "from 50 to"),
        ({"polling_interval": float("nan")}, "milliseconds"),
        ({"polling_interval": "200"}, "milliseconds"),
        ({"polling_interval": True}, "milliseconds"),
        ({"job_type": "auto"}, "'client' or 'manual'"),
        ({"mem_limit": 0}, "at least 1"),
        ({"mem_limit": -5}, "at least 1"),
        ({"mem_limit": "many"}, "at least 1"),
        ({"dump_loc": ""}, "path of a directory"),
        ({"dump_loc": None}, "path of a directory"),
        ({"custom_metrics": [print]}, "@custom_metric"),
        ({"custom_metrics": 5}, "must be a list"),
        ({"custom_metrics": CustomMetric("power", max)}, "must be a list"),
        ({"mem_limit": 10**400}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_allowed(given: dict[str, Any], words: str) -> None:
    """As a ValueError, which Python's users catch."""
    with pytest.raises(ValueError, match=words) as caught:
        made(**given)

    assert isinstance(caught.value, ArgumentError)


def test_custom_metrics_alone_are_enough() -> None:
    """Their names must be free."""

    @custom_metric("power")
    def power(worker: object, handle: object) -> int:  # noqa: ARG001
        return 5

    @custom_metric("mem-util", per_device=False)
    def other(worker: object, handles: object) -> int:  # noqa: ARG001
        return 6

    assert (power,) == made(tracking=[], custom_metrics=[power]).custom
    assert 5 == power(None, None)
    assert (True, False) == (power.per_device, other.per_device)
    for twice in ({"custom_metrics": [power, power]}, {"custom_metrics": [other]}):
        with pytest.raises(ArgumentError, match="duplicate metric name"):
            made(**twice)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "timestamp", "tasks", "worker", 5, print])
def test_a_custom_metric_has_a_name(name: Any) -> None:
    """Also when somebody forgets the parentheses."""
    with pytest.raises(ArgumentError):
        custom_metric(name)


def test_a_custom_metric_decorates_a_function() -> None:
    """And nothing else."""
    with pytest.raises(ArgumentError, match="must decorate a function"):
        custom_metric("power")(7)  # type: ignore[arg-type]


def test_custom_metrics_travel() -> None:
    """With the function, wherever that was written."""
    base = 40
    metric = custom_metric("sum")(lambda worker, handle: base + worker + handle)

    there = cloudpickle.loads(cloudpickle.dumps(metric))

    assert isinstance(there, CustomMetric)
    assert 42 == there(1, 1)
