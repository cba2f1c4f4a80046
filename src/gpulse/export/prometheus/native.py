"""Readings under our own names: the catalogue's, with the labels that an engine gets too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, get_args

from gpulse.export.prometheus.exposed import MOST_KEPT, Exposed, Fresh, finite, known, naming
from gpulse.export.prometheus.text import SAMPLES_A_PIECE, Family, Kind, added, spelled, title, written
from gpulse.model import series
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.health import Code
from gpulse.model.metric import CATALOGUE, Metric, Scope, Value, Values
from gpulse.model.xid import Counted

_NODES_A_TURN = 25
_MOST_FINDINGS = _MOST_PROBLEMS = 64
"""Of one node: each is a series."""
_WORD = re.compile(r"[a-z0-9_]{1,64}")
_NO_WORD = re.compile(r"[^A-Za-z0-9_.-]+")
_CODES = frozenset(get_args(Code))

_Samples = Iterator[tuple[Mapping[str, str] | str, Value | None]]


class _Subject(NamedTuple):
    """A GPU, a disk, a host: its labels as they are written, and its readings."""

    labels: str
    values: Values


class _Gpu(NamedTuple):
    """A GPU with its node, and the labels of its series as they are written."""

    labels: str
    node: Exposed
    reading: GpuReading


def pieces(nodes: Sequence[Fresh], now: float) -> Iterator[str]:
    """All that is known of some nodes, in pieces (some of them empty), so that others get their turn."""
    gpus: list[_Gpu] = []
    for scope in series.EXPOSED:
        subjects: dict[str, _Subject] = {}
        names: set[str] = set()
        for count, node in enumerate(nodes, 1):
            if scope == "gpu":
                gpus += _gpus(node)
            for labels, values in _subjects(scope, node):
                subjects.setdefault(labels, _Subject(labels, finite(values)))
                names.update(values)
            if count % _NODES_A_TURN == 0:
                yield ""
        listed = list(subjects.values())
        for metric in CATALOGUE[scope].values():
            if metric.name in names:
                yield from _family(metric, listed)
    yield from written(_others(nodes, gpus, now))


def _family(metric: Metric, subjects: Sequence[_Subject]) -> Iterator[str]:
    """All samples of one metric; nothing at all when nobody has it."""
    name, key, factor = metric.prometheus, metric.name, metric.prometheus_factor
    kind: Kind = "counter" if metric.kind == "counter" else "gauge"
    head = title(name, kind, metric.help)
    for start in range(0, len(subjects), SAMPLES_A_PIECE):
        lines = [
            f"{name}{labels} {value if factor == 1 else value * factor}\n"
            for labels, values in subjects[start : start + SAMPLES_A_PIECE]
            if (value := values.get(key)) is not None
        ]
        yield head + "".join(lines) if lines else ""
        head = "" if lines else head


def _subjects(scope: Scope, fresh: Fresh) -> Iterator[tuple[str, Values]]:
    name, frame = fresh.node.name, fresh.frame
    if scope == "gpu":
        for gpu in frame.gpus:
            yield _gpu_labels(name, naming(gpu.device)), known(gpu)
        return
    if scope == "host":
        if frame.host is not None:
            yield spelled(series.labels_of(scope, name, {})), frame.host.values
        return
    readings: Mapping[Scope, Sequence[Any]] = {
        "disk": frame.disks,
        "filesystem": frame.filesystems,
        "network": frame.network,
    }
    for reading in readings[scope]:
        subject = reading._asdict()
        if series.is_exposed(scope, subject):
            yield spelled(series.labels_of(scope, name, subject)), reading.values


@lru_cache(MOST_KEPT)
def _gpu_labels(node: str, device: tuple[Any, ...]) -> str:
    return spelled(series.labels_of("gpu", node, Device(*device)._asdict()))


@lru_cache(MOST_KEPT)
def _info_labels(node: str, device: tuple[Any, ...]) -> str:
    return spelled(series.gpu_info(node, Device(*device)))


def _others(nodes: Sequence[Fresh], gpus: Sequence[_Gpu], now: float) -> Iterator[Family]:
    """What is no reading of the catalogue."""
    yield Family(series.NODE_INFO, "gauge", "What a node is; always 1", _node_infos(nodes))
    yield Family(series.GPU_INFO, "gauge", "What a GPU is; always 1", _gpu_infos(nodes))
    yield Family(
        "gpulse_gpu_processes", "gauge", "Processes that hold the GPU; absent when unknown", _processes(gpus)
    )
    yield Family(
        "gpulse_gpu_job_info",
        "gauge",
        "Who holds the GPU now: the scheduler's job (empty without one) and its user; always 1",
        _jobs(nodes),
    )
    yield Family(
        "gpulse_gpu_reading_age_seconds",
        "gauge",
        "Time since the readings of a group that has a period of its own were taken",
        _ages(gpus, now),
    )
    yield Family(
        "gpulse_gpu_xid_total",
        "counter",
        "Xid errors of the GPU, by code",
        ((labels, counted.errors) for labels, counted in _xids(nodes)),
    )
    yield Family(
        "gpulse_gpu_xid_last_seen_timestamp_seconds",
        "gauge",
        "When an Xid error of this code was last seen, in epoch seconds",
        ((labels, round(counted.time, 3)) for labels, counted in _xids(nodes)),
    )
    yield Family(
        "gpulse_finding",
        "gauge",
        "What is wrong now (gpulse explain FINDING), and how sure that is",
        _findings(nodes),
    )
    yield Family(
        "gpulse_health_problems",
        "gauge",
        "Things that could not be read, by source and reason",
        _problems(nodes),
    )


def _node_infos(nodes: Sequence[Fresh]) -> _Samples:
    for node, frame, _ in nodes:
        named: Node = frame.node._replace(name=node.name)
        yield series.node_info(named, host=node.host, machine=node.machine, version=node.version), 1


def _gpu_infos(nodes: Sequence[Fresh]) -> _Samples:
    for node, frame, _ in nodes:
        for gpu in frame.gpus:
            yield _info_labels(node.name, naming(gpu.device)), 1


def _processes(gpus: Sequence[_Gpu]) -> _Samples:
    for labels, _, gpu in gpus:
        yield labels, None if gpu.processes is None else len(gpu.processes)


def _jobs(nodes: Sequence[Fresh]) -> _Samples:
    for node, frame, held in nodes:
        for gpu in frame.gpus if held else ():
            for holder in held.get(gpu.device.uuid, ()):
                labels = {"node": node.name, "gpu": gpu.device.label, "uuid": gpu.device.uuid}
                yield {**labels, "job": holder.job or "", "user": holder.user or ""}, 1


def _ages(gpus: Sequence[_Gpu], now: float) -> _Samples:
    for labels, _, gpu in gpus:
        for group, moment in gpu.read_at.items():
            yield added(labels, group=group), round(max(0.0, now - moment), 3)


def _xids(nodes: Sequence[Fresh]) -> Iterator[tuple[str, Counted]]:
    """Also of GPUs that are not there any more: an error may have been their last word."""
    for fresh in nodes:
        ledger = fresh.node.xids
        if ledger is None:
            continue
        ledger.meet(gpu.device for gpu in fresh.frame.gpus)
        for device, codes in ledger.counted():
            labels = _gpu_labels(fresh.node.name, naming(device))
            for code, counted in sorted(codes.items()):
                yield added(labels, xid=str(code)), counted


def _gpus(fresh: Fresh) -> Iterator[_Gpu]:
    for gpu in fresh.frame.gpus:
        yield _Gpu(_gpu_labels(fresh.node.name, naming(gpu.device)), fresh.node, gpu)


def _findings(nodes: Sequence[Fresh]) -> _Samples:
    """What is wrong, each with labels of its own: the faults of one GPU differ in their cause."""
    for node, _, _ in nodes:
        seen: set[tuple[str, ...]] = set()
        for item in node.findings[:_MOST_FINDINGS]:
            if item.family is None or math.isnan(item.confidence) or not _WORD.fullmatch(item.id):
                continue  # not a finding as ours are: what an agent calls one becomes a series
            labels = {"node": node.name, "gpu": (item.label or "")[:16]}
            labels |= {"finding": item.id, "family": item.family, "severity": item.severity}
            if item.cause:
                labels["cause"] = _NO_WORD.sub("_", item.cause)[:64]
            if tuple(labels.values()) not in seen:  # a series that is there twice spoils the whole page
                seen.add(tuple(labels.values()))
                yield labels, item.confidence


def _problems(nodes: Sequence[Fresh]) -> _Samples:
    for node, frame, _ in nodes:
        for (source, code), count in islice(_counted(frame).items(), _MOST_PROBLEMS):
            yield {"node": node.name, "source": source, "code": code}, count


def _counted(frame: Frame) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for entry in frame.health:
        if entry.is_problem and entry.code in _CODES and _WORD.fullmatch(entry.source):
            key = entry.source, entry.code
            counts[key] = counts.get(key, 0) + 1
    return counts
