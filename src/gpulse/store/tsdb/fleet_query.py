"""Query the nodes of a time-series database as they are now: names, last contact and newest readings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from gpulse.model.metric import CATALOGUE, Metric, Scope, Value, Values
from gpulse.model.series import EXPOSED, GPU_INFO, NODE_INFO, device_of_info
from gpulse.store.tsdb.promql import PromqlClient, Sample
from gpulse.store.tsdb.selectors import groups, matching

FRESH_SECONDS = 30
"""What is older is no reading of now."""
_FACT_SECONDS = 90
"""What never changes is told now and then."""
_AHEAD_SECONDS = 60.0
"""Clocks of heads do not differ by more."""
_NAMES_SECONDS = 60.0
"""How long it is believed which metrics there are."""
_FEW_NODES = 50
"""Up to so many are asked for by name; of more, all are asked for."""
_PULSES = ("gpulse_host_cpu_idle_seconds_total", "gpulse_gpu_memory_used_bytes")
"""Metrics that nearly every frame has: their times say when a node was heard of."""
_FACTS = frozenset(
    {
        "memory_total_bytes",
        "power_default_limit_watts",
        "power_min_limit_watts",
        "power_max_limit_watts",
        "temperature_shutdown_celsius",
        "temperature_slowdown_celsius",
        "temperature_max_celsius",
        "memory_temperature_max_celsius",
        "sm_clock_max_hertz",
        "memory_clock_max_hertz",
        "video_clock_max_hertz",
        "pcie_link_generation_max",
        "pcie_link_width_max",
    }
)
"""Facts of GPUs, which are no readings and come less often."""
_LABELS: dict[Scope, tuple[str, ...]] = {
    "gpu": ("gpu",),
    "host": (),
    "disk": ("disk",),
    "filesystem": ("mount_point", "device", "type"),
    "network": ("interface",),
}
"""The labels that tell the subjects of a node apart."""

Subject = tuple[str, ...]


class ReportedNode(NamedTuple):
    """A node as the time-series database knows it."""

    labels: Mapping[str, str]
    """Those of `gpulse_node_info`."""
    time: float
    """Of the newest reading."""


class FleetQuery:
    """Asks a time-series database what is new; each question waits for its answer."""

    def __init__(
        self,
        client: PromqlClient,
        *,
        labels: Mapping[str, str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to ask.

        Args:
            client: The time-series database.
            labels: What every series must have.
            monotonic: A clock that nobody sets.
        """
        self._client = client
        self._labels = labels
        self._monotonic = monotonic
        self._metrics: tuple[float, list[Metric]] = (-math.inf, [])

    def nodes(self, now: float) -> dict[str, ReportedNode]:
        """The nodes that were heard of during the last minutes, by name; what is of the future is nobody's word.

        Raises:
            TsdbError: The time-series database does not answer, or refuses.
        """
        last = now + _AHEAD_SECONDS
        told: dict[str, Sample] = {}
        for sample in self._client.vector(f"timestamp({NODE_INFO}{matching(self._labels)})"):
            name = sample.labels.get("node", "")
            if name and sample.value <= last and (name not in told or told[name].value < sample.value):
                told[name] = sample
        times = {name: sample.value for name, sample in told.items()}
        for pulse in _PULSES:
            for sample in self._client.vector(f"max by (node) (timestamp({pulse}{matching(self._labels)}))"):
                name = sample.labels.get("node", "")
                if name in times and sample.value <= last:
                    times[name] = max(times[name], sample.value)
        return {name: ReportedNode(sample.labels, times[name]) for name, sample in told.items()}

    def gpus(self, nodes: Collection[str]) -> dict[str, tuple[Device, ...]]:
        """The GPUs of nodes, in the order of their indices.

        Raises:
            TsdbError: The time-series database does not answer, or refuses.
        """
        told: dict[str, dict[str, tuple[float, Device]]] = {}
        for sample in self._asked(nodes, lambda chosen: f"timestamp({GPU_INFO}{chosen})"):
            device = device_of_info(sample.labels)
            if device is None:
                continue
            known = told.setdefault(sample.labels["node"], {})
            if device.label not in known or known[device.label][0] < sample.value:
                known[device.label] = (sample.value, device)
        return {name: _present(known.values()) for name, known in told.items()}

    def frames(
        self, heard: Mapping[str, ReportedNode], devices: Mapping[str, tuple[Device, ...]]
    ) -> dict[str, Frame]:
        """The newest readings of nodes, as frames.

        Args:
            heard: The nodes that are wanted.
            devices: Their GPUs.

        Raises:
            TsdbError: The time-series database does not answer, or refuses.
        """
        found: dict[str, dict[Scope, dict[Subject, Values]]] = {name: {} for name in heard}
        for metric in self._present_metrics():
            names = _LABELS[metric.scope]
            for sample in self._asked(heard, lambda chosen, metric=metric: _newest(metric, chosen)):  # type: ignore[misc]
                subject = tuple(sample.labels.get(name, "") for name in names)
                if math.isfinite(sample.value):
                    scopes = found[sample.labels["node"]].setdefault(metric.scope, {})
                    scopes.setdefault(subject, {})[metric.name] = _value(metric, sample.value)
        return {
            name: _frame(name, heard[name], devices.get(name, ()), scopes) for name, scopes in found.items()
        }

    def _asked(self, nodes: Collection[str], question: Callable[[str], str]) -> Iterator[Sample]:
        """The samples of these nodes that answer a question about a selector."""
        parts: Iterable[Collection[str] | None] = groups(nodes) if len(nodes) <= _FEW_NODES else (None,)
        for part in parts:
            for sample in self._client.vector(question(matching(self._labels, part))):
                if sample.labels.get("node") in nodes:
                    yield sample

    def _present_metrics(self) -> list[Metric]:
        """The metrics that there are, looked up now and then."""
        asked, known = self._metrics
        now = self._monotonic()
        if now - asked < _NAMES_SECONDS and known:
            return known
        pattern = f"gpulse_({'|'.join(EXPOSED)})_.+"
        chosen = matching({**self._labels}, None, name=pattern)
        there = {
            sample.labels.get("__name__") for sample in self._client.vector(f"count by (__name__) ({chosen})")
        }
        known = [m for scope in EXPOSED for m in CATALOGUE[scope].values() if m.prometheus in there]
        self._metrics = (now, known)
        return known


def _newest(metric: Metric, chosen: str) -> str:
    seconds = _FACT_SECONDS if metric.name in _FACTS else FRESH_SECONDS
    labels = ", ".join(("node", *_LABELS[metric.scope]))
    return f"max by ({labels}) (last_over_time({metric.prometheus}{chosen}[{seconds}s]))"


def _value(metric: Metric, value: float) -> Value:
    """As it was read, in the unit of the catalogue: what is counted in whole units is whole."""
    value /= metric.prometheus_factor
    return round(value) if metric.resolution >= 1 else value


def _present(told: Iterable[tuple[float, Device]]) -> tuple[Device, ...]:
    """Those that were told of together with the newest: a GPU that was taken out is no longer told of."""
    known = sorted(told, key=lambda one: one[0])
    devices = [device for at, device in known if at >= known[-1][0] - _FACT_SECONDS]
    return tuple(sorted(devices, key=lambda d: (d.index, -1 if d.mig_index is None else d.mig_index)))


def _frame(
    name: str,
    heard: ReportedNode,
    devices: tuple[Device, ...],
    scopes: Mapping[Scope, Mapping[Subject, Values]],
) -> Frame:
    gpus = scopes.get("gpu", {})
    host = scopes.get("host", {}).get(())
    return Frame(
        heard.time,
        heard.time,
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
