"""The newest readings of many nodes in Prometheus' text format, every name and help from the catalogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpulse.model.frame import Frame
from gpulse.model.metric import CATALOGUE, Metric, Scope, Value

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STALE_SECONDS = 10.0
_STALE_INTERVALS = 5
_LINES_A_PIECE = 2000
_SCOPES: tuple[Scope, ...] = ("gpu", "host", "disk", "filesystem", "network", "cgroup")
"""Processes are left out: they come and go, and each would be a series for good."""

Get = Callable[[str], Value | None]


class Exposed(NamedTuple):
    """One node and the newest frame of it, if any came."""

    name: str
    frame: Frame | None


class _Subject(NamedTuple):
    """A GPU, a disk, a host: its labels as they are written, and its readings."""

    labels: str
    get: Get


def stale_after(interval_seconds: float) -> float:
    """How old a frame may be whose values are still served."""
    return max(STALE_SECONDS, _STALE_INTERVALS * interval_seconds)


def exposition(
    nodes: Sequence[Exposed], *, now: float, interval_seconds: float, version: str
) -> Iterator[str]:
    """The text, in pieces of some thousand lines (or none), so that a loop can do other things between them.

    Values of a frame that is too old are left out: they would pass for fresh ones.
    """
    limit = stale_after(interval_seconds)
    fresh = [node for node in nodes if node.frame is not None and now - node.frame.time <= limit]
    yield from _own(nodes, {node.name for node in fresh}, now, version)
    for scope in _SCOPES:
        subjects: list[_Subject] = []
        for count, node in enumerate(fresh):
            subjects.extend(_subjects(scope, node))
            if count % 100 == 99:
                yield ""
        if subjects:
            for metric in CATALOGUE[scope].values():
                yield from _family(metric, subjects)


def _own(nodes: Sequence[Exposed], fresh: set[str], now: float, version: str) -> Iterator[str]:
    build = f'gpulse_build_info{{version="{_escaped(version)}"}} 1\n'
    yield f"{_title('gpulse_build_info', 'gauge', 'The version of gpulse that serves this')}{build}"
    up = [f'gpulse_up{{node="{_escaped(node.name)}"}} {int(node.name in fresh)}\n' for node in nodes]
    if up:
        yield f"{_title('gpulse_up', 'gauge', '1 when the newest frame of the node is fresh')}{''.join(up)}"
    ages = [
        f'gpulse_frame_age_seconds{{node="{_escaped(node.name)}"}} {max(0.0, now - node.frame.time):.3f}\n'
        for node in nodes
        if node.frame is not None
    ]
    if ages:
        yield f"{_title('gpulse_frame_age_seconds', 'gauge', 'Time since the newest frame of the node was taken')}{''.join(ages)}"


def _family(metric: Metric, subjects: Sequence[_Subject]) -> Iterator[str]:
    """All samples of one metric; nothing at all when nobody has it."""
    name, key = metric.prometheus, metric.name
    lines: list[str] = []
    title = _title(name, "counter" if metric.kind == "counter" else "gauge", metric.help)
    for count, subject in enumerate(subjects, 1):
        value = subject.get(key)
        if value is not None and math.isfinite(value):
            lines.append(f"{name}{subject.labels} {value}\n")
        if count % _LINES_A_PIECE == 0:
            yield title + "".join(lines) if lines else ""
            title = "" if lines else title
            lines.clear()
    yield title + "".join(lines) if lines else ""


def _subjects(scope: Scope, node: Exposed) -> Iterator[_Subject]:
    frame = node.frame
    if frame is None:
        return
    if scope == "gpu":
        for gpu in frame.gpus:
            device = gpu.device
            labels = _labels(node=node.name, gpu=device.label, uuid=device.uuid, name=device.name)
            yield _Subject(labels, gpu.get)
    elif scope == "host":
        if frame.host is not None:
            yield _Subject(_labels(node=node.name), frame.host.values.get)
    elif scope == "disk":
        for disk in frame.disks:
            yield _Subject(_labels(node=node.name, disk=disk.name), disk.values.get)
    elif scope == "filesystem":
        for item in frame.filesystems:
            labels = _labels(node=node.name, mount_point=item.mount_point, device=item.device, type=item.type)
            yield _Subject(labels, item.values.get)
    elif scope == "network":
        for link in frame.network:
            yield _Subject(_labels(node=node.name, interface=link.name), link.values.get)
    elif scope == "cgroup":
        for group in frame.cgroups:
            yield _Subject(_labels(node=node.name, path=group.path), group.values.get)


def _title(name: str, kind: str, help_text: str) -> str:
    escaped = help_text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def _labels(**labels: str) -> str:
    return _written(labels)


def _written(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    """As Prometheus wants it; what UTF-8 cannot hold becomes a question mark."""
    clean = value.encode("utf-8", "replace").decode()
    return clean.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
