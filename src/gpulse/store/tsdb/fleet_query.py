"""Query the current state of all nodes from a time-series database: names, last contact and newest readings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from gpulse.model.device import Device, Node
from gpulse.model.frame import (
    DiskReading,
    FilesystemReading,
    Frame,
    GpuReading,
    HostReading,
    NetworkReading,
)
from gpulse.model.metric_catalog import CATALOG, Metric, Scope, Value, Values
from gpulse.model.series_labels import EXPOSED_SCOPES, GPU_INFO, NODE_INFO, device_from_info_labels
from gpulse.store.tsdb.promql import InstantSample, PromqlClient
from gpulse.store.tsdb.series_query import build_matchers, group_names

FRESH_SECONDS = 30
"""Older readings are not current."""
_FACT_SECONDS = 90
"""How far back a query for a fact looks: facts are sent less often than readings."""
_AHEAD_SECONDS = 60.0
"""Maximum difference between the clocks of heads."""
_NAMES_SECONDS = 60.0
"""How long the list of existing metrics is cached."""
_FEW_NODES = 50
"""Up to this many nodes are queried by name; for more, all nodes are queried."""
_HEARTBEAT_METRICS = ("gpulse_host_cpu_idle_seconds_total", "gpulse_gpu_memory_used_bytes")
"""Metrics of nearly every frame; their newest sample shows when a node last reported."""
_LABELS: dict[Scope, tuple[str, ...]] = {
    "gpu": ("gpu",),
    "host": (),
    "disk": ("disk",),
    "filesystem": ("mount_point", "device", "type"),
    "network": ("interface",),
}
"""The labels that identify the subjects of a node."""

Subject = tuple[str, ...]


class ReportedNode(NamedTuple):
    """A node as the time-series database has it."""

    labels: Mapping[str, str]
    """The labels of `gpulse_node_info`."""
    time: float
    """Time of the newest reading."""


class FleetQuery:
    """Queries the newest data of all nodes; every method blocks until the database answers."""

    def __init__(
        self,
        client: PromqlClient,
        *,
        labels: Mapping[str, str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the query.

        Args:
            client: Client of the time-series database.
            labels: Labels that every series must have.
            monotonic: A monotonic clock.
        """
        self._client = client
        self._labels = labels
        self._monotonic = monotonic
        self._metrics: tuple[float, list[Metric]] = (-math.inf, [])

    def nodes(self, now: float) -> dict[str, ReportedNode]:
        """Return the nodes that reported during the last minutes, by name; times in the future are ignored.

        Raises:
            TsdbError: The time-series database does not answer, or reports an error.
        """
        last = now + _AHEAD_SECONDS
        infos: dict[str, InstantSample] = {}
        for sample in self._client.vector(f"timestamp({NODE_INFO}{build_matchers(self._labels)})"):
            name = sample.labels.get("node", "")
            if name and sample.value <= last and (name not in infos or infos[name].value < sample.value):
                infos[name] = sample
        times = {name: sample.value for name, sample in infos.items()}
        for metric in _HEARTBEAT_METRICS:
            for sample in self._client.vector(
                f"max by (node) (timestamp({metric}{build_matchers(self._labels)}))"
            ):
                name = sample.labels.get("node", "")
                if name in times and sample.value <= last:
                    times[name] = max(times[name], sample.value)
        return {name: ReportedNode(sample.labels, times[name]) for name, sample in infos.items()}

    def gpus(self, nodes: Collection[str]) -> dict[str, tuple[Device, ...]]:
        """Return the GPUs of nodes, ordered by index.

        Raises:
            TsdbError: The time-series database does not answer, or reports an error.
        """
        found: dict[str, dict[str, tuple[float, Device]]] = {}
        for sample in self._samples_of(nodes, lambda chosen: f"timestamp({GPU_INFO}{chosen})"):
            device = device_from_info_labels(sample.labels)
            if device is None:
                continue
            known = found.setdefault(sample.labels["node"], {})
            if device.label not in known or known[device.label][0] < sample.value:
                known[device.label] = (sample.value, device)
        return {name: _present_gpus(known.values()) for name, known in found.items()}

    def frames(
        self, nodes: Mapping[str, ReportedNode], devices: Mapping[str, tuple[Device, ...]]
    ) -> dict[str, Frame]:
        """Return the newest readings of nodes, as frames.

        Args:
            nodes: The nodes to query, by name.
            devices: Their GPUs, by node name.

        Raises:
            TsdbError: The time-series database does not answer, or reports an error.
        """
        found: dict[str, dict[Scope, dict[Subject, Values]]] = {name: {} for name in nodes}
        for metric in self._present_metrics():
            names = _LABELS[metric.scope]
            for sample in self._samples_of(nodes, partial(_newest_query, metric)):
                subject = tuple(sample.labels.get(name, "") for name in names)
                if math.isfinite(sample.value):
                    scopes = found[sample.labels["node"]].setdefault(metric.scope, {})
                    scopes.setdefault(subject, {})[metric.name] = _value(metric, sample.value)
        return {
            name: _frame(name, nodes[name], devices.get(name, ()), scopes) for name, scopes in found.items()
        }

    def _samples_of(self, nodes: Collection[str], question: Callable[[str], str]) -> Iterator[InstantSample]:
        """Run a query for some nodes, and yield its samples.

        Args:
            nodes: The nodes, by name.
            question: Returns the query for the label matchers of some nodes.
        """
        parts: Iterable[Collection[str] | None] = group_names(nodes) if len(nodes) <= _FEW_NODES else (None,)
        for part in parts:
            for sample in self._client.vector(question(build_matchers(self._labels, part))):
                if sample.labels.get("node") in nodes:
                    yield sample

    def _present_metrics(self) -> list[Metric]:
        """Return the metrics that exist in the database; cached for a while."""
        asked, known = self._metrics
        now = self._monotonic()
        if now - asked < _NAMES_SECONDS and known:
            return known
        pattern = f"gpulse_({'|'.join(EXPOSED_SCOPES)})_.+"
        chosen = build_matchers({**self._labels}, None, name=pattern)
        there = {
            sample.labels.get("__name__") for sample in self._client.vector(f"count by (__name__) ({chosen})")
        }
        known = [m for scope in EXPOSED_SCOPES for m in CATALOG[scope].values() if m.prometheus in there]
        self._metrics = (now, known)
        return known


def _newest_query(metric: Metric, chosen: str) -> str:
    seconds = _FACT_SECONDS if metric.fact else FRESH_SECONDS
    labels = ", ".join(("node", *_LABELS[metric.scope]))
    return f"max by ({labels}) (last_over_time({metric.prometheus}{chosen}[{seconds}s]))"


def _value(metric: Metric, value: float) -> Value:
    """Convert a value to the unit of the catalog; metrics in whole units become integers."""
    value /= metric.prometheus_factor
    return round(value) if metric.resolution >= 1 else value


def _present_gpus(reported: Iterable[tuple[float, Device]]) -> tuple[Device, ...]:
    """Return the GPUs that were reported together with the newest one, without GPUs that were removed since."""
    known = sorted(reported, key=lambda one: one[0])
    devices = [device for at, device in known if at >= known[-1][0] - _FACT_SECONDS]
    return tuple(sorted(devices, key=lambda d: (d.index, -1 if d.mig_index is None else d.mig_index)))


def _frame(
    name: str,
    node: ReportedNode,
    devices: tuple[Device, ...],
    scopes: Mapping[Scope, Mapping[Subject, Values]],
) -> Frame:
    gpus = scopes.get("gpu", {})
    host = scopes.get("host", {}).get(())
    return Frame(
        node.time,
        node.time,
        Node(name),
        gpus=tuple(GpuReading(device, gpus.get((device.label,), {})) for device in devices),
        host=HostReading(host) if host else None,
        disks=tuple(
            DiskReading(disk, None, values) for (disk,), values in sorted(scopes.get("disk", {}).items())
        ),
        filesystems=tuple(
            FilesystemReading(mount_point, device, kind, None, None, values)
            for (mount_point, device, kind), values in sorted(scopes.get("filesystem", {}).items())
        ),
        network=tuple(
            NetworkReading(link, "infiniband" if link.startswith("ib") else "ethernet", None, values)
            for (link,), values in sorted(scopes.get("network", {}).items())
        ),
    )
