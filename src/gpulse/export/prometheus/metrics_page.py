"""Page that Prometheus scrapes: metrics of the server, then those of its nodes under gpulse's or DCGM's names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, get_args

from gpulse.export.prometheus import dcgm_metrics
from gpulse.export.prometheus.node_state import (
    MAX_CACHED_LABELS,
    FreshNode,
    HolderLimit,
    NodeState,
    count_left_out,
    device_key,
    find_fresh_nodes,
    finite_values,
    gpu_values,
)
from gpulse.export.prometheus.text_format import (
    SAMPLES_PER_CHUNK,
    Kind,
    MetricFamily,
    add_labels,
    format_families,
    format_family_header,
    format_labels,
)
from gpulse.model import series_labels
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.metric_catalog import CATALOG, Metric, Scope, Value, Values
from gpulse.model.source_health import HealthCode
from gpulse.model.xid import XidCount

_NODES_PER_CHUNK = 25
_MAX_FINDINGS = _MAX_PROBLEMS = 64
"""Maximum series per node."""
_LABEL_VALUE = re.compile(r"[a-z0-9_]{1,64}")
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.-]+")
_CODES = frozenset(get_args(HealthCode))

_Samples = Iterator[tuple[Mapping[str, str] | str, Value | None]]


class _LabeledValues(NamedTuple):
    """Formatted labels and values of a GPU, a disk or the host."""

    labels: str
    values: Values


class _LabeledGpu(NamedTuple):
    """GPU with its node and the formatted labels of its series."""

    labels: str
    node: NodeState
    reading: GpuReading


def format_metrics(
    nodes: Sequence[NodeState],
    *,
    now: float,
    interval_seconds: float,
    version: str,
    dcgm_names: bool = False,
    more: Iterable[MetricFamily] = (),
    holder_limit: HolderLimit | None = None,
) -> Iterator[str]:
    """Yield the page in chunks, some of which may be empty, so that an event loop can run other tasks between them.

    Values of a stale frame are left out, since Prometheus would take them for fresh ones.

    Args:
        nodes: The nodes with their newest frames.
        now: Epoch seconds.
        interval_seconds: Sampling interval of nodes that do not report theirs.
        version: Version of the gpulse that serves the page.
        dcgm_names: Use DCGM's names and labels instead of gpulse's.
        more: Metrics of the server itself.
        holder_limit: Limits the number of job series per GPU and day; keep it from one page to the next.
    """
    fresh = find_fresh_nodes(nodes, now=now, interval_seconds=interval_seconds, holder_limit=holder_limit)
    yield from format_families(_server_families(nodes, {node.node.name for node in fresh}, now, version))
    yield from format_families(more)
    yield from dcgm_metrics.format_dcgm_metrics(fresh) if dcgm_names else _format_readings(fresh, now)


def _server_families(
    nodes: Sequence[NodeState], fresh: set[str], now: float, version: str
) -> Iterator[MetricFamily]:
    yield MetricFamily(
        "gpulse_build_info",
        "gauge",
        "Version of gpulse that exports these metrics",
        [({"version": version}, 1)],
    )
    yield MetricFamily(
        "gpulse_up",
        "gauge",
        "1 when the newest frame of the node is recent",
        [({"node": node.name}, int(node.name in fresh)) for node in nodes],
    )
    yield MetricFamily(
        "gpulse_frame_age_seconds",
        "gauge",
        "Time since the newest frame of the node was taken",
        [
            ({"node": node.name}, round(max(0.0, now - node.frame.time), 3))
            for node in nodes
            if node.frame is not None
        ],
    )
    yield MetricFamily(
        "gpulse_subjects_left_out",
        "gauge",
        "Number of GPUs, disks, file systems or links that are not exported because the node has too many of them",
        [
            ({"node": node.name, "scope": scope}, count)
            for node in nodes
            if node.frame is not None and node.name in fresh
            for scope, count in count_left_out(node.frame).items()
        ],
    )


def _format_readings(nodes: Sequence[FreshNode], now: float) -> Iterator[str]:
    """Yield the metrics of some nodes under gpulse's names, in chunks, some of which may be empty."""
    gpus: list[_LabeledGpu] = []
    for scope in series_labels.EXPOSED_SCOPES:
        subjects: dict[str, _LabeledValues] = {}
        names: set[str] = set()
        for count, node in enumerate(nodes, 1):
            if scope == "gpu":
                gpus += _gpus(node)
            for labels, values in _labeled_values(scope, node):
                subjects.setdefault(labels, _LabeledValues(labels, finite_values(values)))
                names.update(values)
            if count % _NODES_PER_CHUNK == 0:
                yield ""
        listed = list(subjects.values())
        for metric in CATALOG[scope].values():
            if metric.name in names:
                yield from _family(metric, listed)
    yield from format_families(_other_families(nodes, gpus, now))


def _family(metric: Metric, subjects: Sequence[_LabeledValues]) -> Iterator[str]:
    """Yield all samples of one metric; nothing when no subject has it."""
    name, key, factor = metric.prometheus, metric.name, metric.prometheus_factor
    kind: Kind = "counter" if metric.kind == "counter" else "gauge"
    head = format_family_header(name, kind, metric.help)
    for start in range(0, len(subjects), SAMPLES_PER_CHUNK):
        lines = [
            f"{name}{labels} {value if factor == 1 else value * factor}\n"
            for labels, values in subjects[start : start + SAMPLES_PER_CHUNK]
            if (value := values.get(key)) is not None
        ]
        yield head + "".join(lines) if lines else ""
        head = "" if lines else head


def _labeled_values(scope: Scope, fresh: FreshNode) -> Iterator[tuple[str, Values]]:
    name, frame = fresh.node.name, fresh.frame
    if scope == "gpu":
        for gpu in frame.gpus:
            yield _gpu_labels(name, device_key(gpu.device)), gpu_values(gpu)
        return
    if scope == "host":
        if frame.host is not None:
            yield format_labels(series_labels.build_series_labels(scope, name, {})), frame.host.values
        return
    by_scope: Mapping[Scope, Sequence[Any]] = {
        "disk": frame.disks,
        "filesystem": frame.filesystems,
        "network": frame.network,
    }
    for reading in by_scope[scope]:
        subject = reading._asdict()
        if series_labels.is_exposed(scope, subject):
            yield format_labels(series_labels.build_series_labels(scope, name, subject)), reading.values


@lru_cache(MAX_CACHED_LABELS)
def _gpu_labels(node: str, device: tuple[Any, ...]) -> str:
    return format_labels(series_labels.build_series_labels("gpu", node, Device(*device)._asdict()))


@lru_cache(MAX_CACHED_LABELS)
def _info_labels(node: str, device: tuple[Any, ...]) -> str:
    return format_labels(series_labels.gpu_info_labels(node, Device(*device)))


def _other_families(
    nodes: Sequence[FreshNode], gpus: Sequence[_LabeledGpu], now: float
) -> Iterator[MetricFamily]:
    """Yield the families that are not in the catalog."""
    yield MetricFamily(
        series_labels.NODE_INFO, "gauge", "Always 1; the labels describe the node", _node_infos(nodes)
    )
    yield MetricFamily(
        series_labels.GPU_INFO, "gauge", "Always 1; the labels describe the GPU", _gpu_infos(nodes)
    )
    yield MetricFamily(
        "gpulse_gpu_processes",
        "gauge",
        "Number of processes that hold the GPU; absent when unknown",
        _processes(gpus),
    )
    yield MetricFamily(
        "gpulse_gpu_job_info",
        "gauge",
        "Always 1; the labels name the user that holds the GPU and the scheduler's job (empty if there is none)",
        _jobs(nodes),
    )
    yield MetricFamily(
        "gpulse_gpu_reading_age_seconds",
        "gauge",
        "Time since the last reading of a group of metrics that has its own sampling interval",
        _ages(gpus, now),
    )
    yield MetricFamily(
        "gpulse_gpu_xid_total",
        "counter",
        "Xid errors of the GPU, by code",
        ((labels, counted.errors) for labels, counted in _xids(nodes)),
    )
    yield MetricFamily(
        "gpulse_gpu_xid_last_seen_timestamp_seconds",
        "gauge",
        "Time of the last Xid error with this code, in epoch seconds",
        ((labels, round(counted.time, 3)) for labels, counted in _xids(nodes)),
    )
    yield MetricFamily(
        "gpulse_finding",
        "gauge",
        "Current finding (see gpulse explain FINDING); the value is its confidence",
        _findings(nodes),
    )
    yield MetricFamily(
        "gpulse_health_problems",
        "gauge",
        "Number of failed readings, by source and reason",
        _problems(nodes),
    )


def _node_infos(nodes: Sequence[FreshNode]) -> _Samples:
    for node, frame, _ in nodes:
        named: Node = frame.node._replace(name=node.name)
        yield (
            series_labels.node_info_labels(named, host=node.host, machine=node.machine, version=node.version),
            1,
        )


def _gpu_infos(nodes: Sequence[FreshNode]) -> _Samples:
    for node, frame, _ in nodes:
        for gpu in frame.gpus:
            yield _info_labels(node.name, device_key(gpu.device)), 1


def _processes(gpus: Sequence[_LabeledGpu]) -> _Samples:
    for labels, _, gpu in gpus:
        yield labels, None if gpu.processes is None else len(gpu.processes)


def _jobs(nodes: Sequence[FreshNode]) -> _Samples:
    for node, frame, held in nodes:
        for gpu in frame.gpus if held else ():
            for holder in held.get(gpu.device.uuid, ()):
                labels = {"node": node.name, "gpu": gpu.device.label, "uuid": gpu.device.uuid}
                yield {**labels, "job": holder.job or "", "user": holder.user or ""}, 1


def _ages(gpus: Sequence[_LabeledGpu], now: float) -> _Samples:
    for labels, _, gpu in gpus:
        for group, moment in gpu.read_at.items():
            yield add_labels(labels, group=group), round(max(0.0, now - moment), 3)


def _xids(nodes: Sequence[FreshNode]) -> Iterator[tuple[str, XidCount]]:
    """Yield Xid errors, also those of GPUs that have disappeared: an error may be the last thing that they reported."""
    for fresh in nodes:
        counts = fresh.node.xids
        if counts is None:
            continue
        counts.update_devices(gpu.device for gpu in fresh.frame.gpus)
        for device, codes in counts.counted():
            labels = _gpu_labels(fresh.node.name, device_key(device))
            for code, counted in sorted(codes.items()):
                yield add_labels(labels, xid=str(code)), counted


def _gpus(fresh: FreshNode) -> Iterator[_LabeledGpu]:
    for gpu in fresh.frame.gpus:
        yield _LabeledGpu(_gpu_labels(fresh.node.name, device_key(gpu.device)), fresh.node, gpu)


def _findings(nodes: Sequence[FreshNode]) -> _Samples:
    """Yield the findings; the label `cause` tells several faults of one GPU apart."""
    for node, _, _ in nodes:
        seen: set[tuple[str, ...]] = set()
        for item in node.findings[:_MAX_FINDINGS]:
            if item.family is None or math.isnan(item.confidence) or not _LABEL_VALUE.fullmatch(item.id):
                continue  # malformed: agents may send anything, and each finding becomes a series
            labels = {"node": node.name, "gpu": (item.label or "")[:16]}
            labels |= {"finding": item.id, "family": item.family, "severity": item.severity}
            if item.cause:
                labels["cause"] = _NOT_IN_LABELS.sub("_", item.cause)[:64]
            if (
                tuple(labels.values()) not in seen
            ):  # Prometheus rejects the whole page if a series occurs twice
                seen.add(tuple(labels.values()))
                yield labels, item.confidence


def _problems(nodes: Sequence[FreshNode]) -> _Samples:
    for node, frame, _ in nodes:
        for (source, code), count in islice(_count_problems(frame).items(), _MAX_PROBLEMS):
            yield {"node": node.name, "source": source, "code": code}, count


def _count_problems(frame: Frame) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for entry in frame.health:
        if entry.is_problem and entry.code in _CODES and _LABEL_VALUE.fullmatch(entry.source):
            key = entry.source, entry.code
            counts[key] = counts.get(key, 0) + 1
    return counts
