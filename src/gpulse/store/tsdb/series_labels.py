"""Names and labels of the numbers of a log in a time-series database: from layouts and nodes to prepared requests."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gpulse.model.columns import Layout
from gpulse.model.device import Node
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.packing import device_of
from gpulse.model.series import (
    GPU_INFO,
    MOST_SUBJECTS,
    NODE_INFO,
    gpu_info,
    is_exposed,
    labels_of,
    node_info,
)
from gpulse.store.tsdb.template import BlockTemplate, Prepared
from gpulse.store.tsdb.wire import NAME_LABEL, labels_bytes, series_bytes


class NodeWords(NamedTuple):
    """What is known of a node."""

    name: str
    host: str
    machine: str
    facts: Mapping[str, Any]


class _Around(NamedTuple):
    """The labels of a subject, as they stand before and after the name of a metric."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> _Around:
        return cls(
            labels_bytes({name: text for name, text in labels.items() if name < NAME_LABEL}),
            labels_bytes({name: text for name, text in labels.items() if name > NAME_LABEL}),
        )

    def series(self, metric: str) -> bytes:
        return series_bytes(self.before + labels_bytes({NAME_LABEL: metric}) + self.after)


class Census:
    """Counts the subjects of each node: one that makes up new ones without end must not fill a time-series database's index."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Scope], set[bytes]] = {}
        self.crowded: set[tuple[int, Scope]] = set()
        """Nodes that had too many of a scope."""

    def admits(self, node: int, scope: Scope, labels: bytes) -> bool:
        """Whether a subject of these labels is one of the first that a node had."""
        seen = self._seen.setdefault((node, scope), set())
        if labels not in seen:
            if len(seen) >= MOST_SUBJECTS:
                self.crowded.add((node, scope))
                return False
            seen.add(labels)
        return True

    def clear(self) -> None:
        """Begin to count anew."""
        self._seen.clear()
        self.crowded.clear()


def is_sent(layout: Layout) -> bool:
    """Whether anything of a layout becomes series."""
    return any(is_exposed(layout.scope, subject) for subject in layout.subjects)


def block_template(
    layout: Layout,
    node: str,
    extra: Mapping[str, str],
    admits: Callable[[bytes], bool] = lambda _: True,
) -> BlockTemplate | None:
    """The request for blocks of a layout of a node; None when it has no series.

    Args:
        layout: What the numbers are.
        node: The node's name.
        extra: Labels of all series.
        admits: Whether a subject of some labels, as they are sent, may have series.
    """
    around = {}
    for place, subject in enumerate(layout.subjects):
        if is_exposed(layout.scope, subject):
            found = _Around.of({**extra, **labels_of(layout.scope, node, subject)})
            if admits(found.before + found.after):
                around[found] = place  # of two that are called the same, the last one counts
    catalogue, count = CATALOGUE[layout.scope], len(layout.subjects)
    series, places = [], []
    for number, column in enumerate((*layout.wide, *layout.narrow)):
        metric = catalogue.get(column.name)
        if metric is not None:
            series += [words.series(metric.prometheus) for words in around]
            places += [number * count + place for place in around.values()]
    return BlockTemplate(layout, series, places) if series else None


class InfoTemplate:
    """What hardly changes of a node and its GPUs: it is sent now and then."""

    def __init__(
        self,
        node: NodeWords,
        version: str,
        gpus: Layout | None,
        extra: Mapping[str, str],
        admits: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        known = {name: value for name, value in node.facts.items() if name in Node._fields[1:]}
        words = node_info(
            Node(node.name, **known), host=node.host, machine=node.machine, version=version
        )  # values come from the head, which checked them
        series, values = [_Around.of({**extra, **words}).series(NODE_INFO)], [1.0]
        columns = {column.name for column in (*gpus.wide, *gpus.narrow)} if gpus is not None else set()
        for subject in gpus.subjects if gpus is not None else ():
            device = device_of(subject)
            around = _Around.of({**extra, **labels_of("gpu", node.name, subject)})
            if not admits(around.before + around.after):
                continue
            series.append(_Around.of({**extra, **gpu_info(node.name, device)}).series(GPU_INFO))
            values.append(1.0)
            for name, value in device.facts.items():
                metric = CATALOGUE["gpu"].get(name)
                if metric is not None and name not in columns:
                    series.append(around.series(metric.prometheus))
                    values.append(float(value) * metric.prometheus_factor)
        self.samples = len(series)
        self._prepared = Prepared.of(series)
        self._prepared.put_values(np.frombuffer(struct.pack(f"<{len(values)}d", *values), np.float64))

    def request(self, time: bytes) -> bytes:
        """The request at a time."""
        return self._prepared.at(time)
