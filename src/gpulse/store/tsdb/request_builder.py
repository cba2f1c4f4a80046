"""Build remote-write requests from log records, with cached layouts, labels and request templates."""

from __future__ import annotations

import re
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpulse.errors import LogError
from gpulse.model.device import Node
from gpulse.model.frame_packing import device_from_subject
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.packed_columns import ColumnLayout, split_packed_frames
from gpulse.model.series_labels import (
    GPU_INFO,
    MAX_EXPOSED_SUBJECTS,
    NODE_INFO,
    build_series_labels,
    gpu_info_labels,
    is_exposed,
    node_info_labels,
)
from gpulse.store.log.reader import LogReader
from gpulse.store.log.record_payloads import FACT, FrameBatch, clip_time_us, parse_fact
from gpulse.store.metadata.reader import MetadataLookup
from gpulse.store.metadata.value_checks import FORMAT_ERRORS
from gpulse.store.tsdb.write_request import (
    MAX_TIME_MS,
    NAME_LABEL,
    BlockTemplate,
    SeriesTemplate,
    encode_labels,
    encode_series,
    encode_time,
)


class NodeDescription(NamedTuple):
    """Name and facts of a node."""

    name: str
    host: str
    machine: str
    facts: Mapping[str, Any]


class _SubjectLabels(NamedTuple):
    """The encoded labels of a subject before and after the metric name; labels are sorted."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> _SubjectLabels:
        return cls(
            encode_labels({name: text for name, text in labels.items() if name < NAME_LABEL}),
            encode_labels({name: text for name, text in labels.items() if name > NAME_LABEL}),
        )

    def series(self, metric: str) -> bytes:
        return encode_series(self.before + encode_labels({NAME_LABEL: metric}) + self.after)


class SubjectCounter:
    """Limits the number of subjects per node, so that a node with ever new subjects cannot flood the database's index."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Scope], set[bytes]] = {}
        self.over_limit: set[tuple[int, Scope]] = set()
        """Nodes and scopes that exceeded the limit."""

    def admits(self, node: int, scope: Scope, labels: bytes) -> bool:
        """Whether a subject with these labels is within the limit of its node."""
        seen = self._seen.setdefault((node, scope), set())
        if labels not in seen:
            if len(seen) >= MAX_EXPOSED_SUBJECTS:
                self.over_limit.add((node, scope))
                return False
            seen.add(labels)
        return True

    def clear(self) -> None:
        """Restart counting."""
        self._seen.clear()
        self.over_limit.clear()


def is_sent(layout: ColumnLayout) -> bool:
    """Whether a layout has any series to send."""
    return any(is_exposed(layout.scope, subject) for subject in layout.subjects)


def build_block_template(
    layout: ColumnLayout,
    node: str,
    extra: Mapping[str, str],
    admits: Callable[[bytes], bool] = lambda _: True,
) -> BlockTemplate | None:
    """Build the request template for blocks of a node; None if the layout has no series.

    Args:
        layout: The layout of the blocks.
        node: The node's name.
        extra: Labels to add to all series.
        admits: Whether a subject with some encoded labels may be sent.
    """
    around = {}
    for place, subject in enumerate(layout.subjects):
        if is_exposed(layout.scope, subject):
            found = _SubjectLabels.of({**extra, **build_series_labels(layout.scope, node, subject)})
            if admits(found.before + found.after):
                around[found] = place  # if two have the same labels, the last one wins
    catalogue, count = CATALOG[layout.scope], len(layout.subjects)
    series, places = [], []
    for number, column in enumerate((*layout.wide, *layout.narrow)):
        metric = catalogue.get(column.name)
        if metric is not None:
            series += [labels.series(metric.prometheus) for labels in around]
            places += [number * count + place for place in around.values()]
    return BlockTemplate(layout, series, places) if series else None


class InfoTemplate:
    """Request template for info series of a node and its GPUs, which rarely change and are sent periodically."""

    def __init__(
        self,
        node: NodeDescription,
        version: str,
        gpus: ColumnLayout | None,
        extra: Mapping[str, str],
        admits: Callable[[bytes], bool] = lambda _: True,
    ) -> None:
        known = {name: value for name, value in node.facts.items() if name in Node._fields[1:]}
        labels = node_info_labels(
            Node(node.name, **known), host=node.host, machine=node.machine, version=version
        )  # the head has checked the values
        series, values = [_SubjectLabels.of({**extra, **labels}).series(NODE_INFO)], [1.0]
        columns = {column.name for column in (*gpus.wide, *gpus.narrow)} if gpus is not None else set()
        for subject in gpus.subjects if gpus is not None else ():
            device = device_from_subject(subject)
            around = _SubjectLabels.of({**extra, **build_series_labels("gpu", node.name, subject)})
            if not admits(around.before + around.after):
                continue
            series.append(_SubjectLabels.of({**extra, **gpu_info_labels(node.name, device)}).series(GPU_INFO))
            values.append(1.0)
            for name, value in device.facts.items():
                metric = CATALOG["gpu"].get(name)
                if metric is not None and name not in columns:
                    series.append(around.series(metric.prometheus))
                    values.append(float(value) * metric.prometheus_factor)
        self.samples = len(series)
        self._prepared = SeriesTemplate.of(series)
        self._prepared.put_values(np.frombuffer(struct.pack(f"<{len(values)}d", *values), np.float64))

    def request(self, time: bytes) -> bytes:
        """Return the request for a time."""
        return self._prepared.at(time)


_KEEP_LAYOUT_SECONDS = 600.0
"""How long a layout is kept after the head dropped it, since its samples may have to be sent again."""
_MAX_RUNS = 100_000
_SCOPE = re.compile(r'\{"narrow":\[(?:\["[^"\\]*",\d+,\d+\],?)*\],"scope":"(process|cgroup)"')
"""Matches layouts that are not sent, which are most of them, so that they need not be parsed."""


class LayoutCache:
    """Cache of layouts, nodes and runs. Facts before the current position are looked up."""

    def __init__(self, log: LogReader, metadata: MetadataLookup) -> None:
        """Start empty.

        Args:
            log: Searched for facts that the metadata does not have, or if it cannot be read.
            metadata: Searched first.
        """
        self._log = log
        self._metadata = metadata
        self._layouts: dict[int, ColumnLayout | None] = {}
        self._nodes: dict[int, NodeDescription] = {}
        self._versions: dict[bytes, str] = {}
        self._forgotten: deque[tuple[float, list[int]]] = deque()
        self._is_log_read = False

    def apply_fact(self, payload: bytes, now: float) -> set[int]:
        """Apply a fact; return the nodes whose description changed. An unreadable fact is skipped."""
        while self._forgotten and self._forgotten[0][0] < now - _KEEP_LAYOUT_SECONDS:
            for layout in self._forgotten.popleft()[1]:
                self._layouts.pop(layout, None)
        try:
            return self._take(parse_fact(payload), now)
        except FORMAT_ERRORS:
            return set()

    def layout(self, number: int) -> ColumnLayout | None:
        """Return a layout; None if it has no series to send.

        Raises:
            LookupError: The layout is unknown.
        """
        if number not in self._layouts:
            found: dict[int, str] = {}
            with suppress(LogError):
                found = self._metadata.layouts((number,))
            if number not in found:
                self._read_log()
            else:
                try:
                    self._add_layout(number, found[number])
                except ValueError as error:
                    raise LookupError(f"cannot read layout {number}: {error}") from error
        return self._layouts[number]

    def node(self, number: int) -> NodeDescription:
        """Return a node.

        Raises:
            LookupError: The node is unknown.
        """
        if number not in self._nodes:
            with suppress(LogError):
                for row in self._metadata.nodes((number,)).values():
                    self._nodes[number] = NodeDescription(row.name, row.host, row.machine, dict(row.facts))
            if number not in self._nodes:
                self._read_log()
        return self._nodes[number]

    def version(self, run: bytes) -> str:
        """Return the agent version of a run; empty if it is unknown."""
        if run not in self._versions:
            version = None
            with suppress(LogError):
                version = self._metadata.version(run)
            self._add_version(run, version)
        return self._versions[run]

    def _take(self, fact: dict[str, Any], now: float) -> set[int]:
        match fact["fact"]:
            case "layout":
                self._add_layout(int(fact["id"]), fact["text"])
            case "node":
                number = int(fact["id"])
                description = NodeDescription(
                    str(fact["name"]),
                    str(fact.get("host", "")),
                    str(fact.get("machine", "")),
                    dict(fact.get("facts") or {}),
                )
                if description != self._nodes.get(number):
                    self._nodes[number] = description
                    return {number}
            case "run":
                self._add_version(bytes.fromhex(fact["run"]), fact.get("version"))
            case "forget":
                self._forgotten.append((now, [int(layout) for layout in fact["layouts"]]))
        return set()

    def _add_layout(self, number: int, text: str) -> None:
        if number not in self._layouts:
            layout = None if _SCOPE.match(text) else ColumnLayout.from_json(text)
            self._layouts[number] = layout if layout is not None and is_sent(layout) else None

    def _add_version(self, run: bytes, version: object) -> None:
        if len(self._versions) >= _MAX_RUNS:
            self._versions.clear()
        self._versions[run] = version if isinstance(version, str) else ""

    def _read_log(self) -> None:
        """Read all facts of the log once, since the metadata may not have been written when the head stopped."""
        if not self._is_log_read:
            self._is_log_read = True
            before = self._forgotten.copy()
            for record in self._log.read():
                if record.kind == FACT:
                    self.apply_fact(record.payload, 0.0)
            self._forgotten = before  # layouts that are dropped later in the log may be needed before


INFO_MS = 30_000
"""Interval at which info series are sent."""
_UNUSED_SECONDS = 600.0
"""Templates unused for this long are dropped."""

_RECOUNT_SECONDS = 86_400.0
"""Interval at which the subjects of nodes are counted anew."""


class BlockSeries(NamedTuple):
    """The encoded series of one block of a frame, or the info series of a node."""

    node: int
    layout: int
    """The layout ID; 0 for info series."""
    series: bytes
    samples: int


class _CachedTemplate:
    """A template, and when it was last used."""

    __slots__ = ("template", "used")

    def __init__(self, template: BlockTemplate | None, used: float) -> None:
        self.template = template
        self.used = used


class _NodeInfo:
    """State of the info series of a node."""

    __slots__ = ("gpus", "sent_ms", "template", "version")

    def __init__(self) -> None:
        self.template: InfoTemplate | None = None
        self.gpus: int | None = None
        self.version = ""
        self.sent_ms = 0


class RequestBuilder:
    """Builds requests from log entries."""

    def __init__(self, known: LayoutCache, extra: Mapping[str, str]) -> None:
        """Start without templates.

        Args:
            known: Cache of layouts, nodes and runs.
            extra: Labels to add to all series.
        """
        self._known = known
        self._extra = extra
        self._templates: dict[tuple[int, int], _CachedTemplate] = {}
        self._infos: dict[int, _NodeInfo] = {}
        self._now = self._tidied = time.monotonic()
        self._counted = self._now
        self._counter = SubjectCounter()
        self.unreadable = 0
        """Number of blocks that could not be sent because they are unreadable or their layout is unknown."""

    def parts(self, entries: Sequence[FrameBatch | bytes]) -> Iterator[BlockSeries]:
        """Yield the series of batches; apply the facts between them."""
        self._now = time.monotonic()
        for entry in entries:
            if isinstance(entry, FrameBatch):
                yield from self._batch(entry)
            else:
                for node in self._known.apply_fact(entry, self._now):
                    self._forget(node)
        if self._now - self._tidied > _UNUSED_SECONDS:
            self._tidied = self._now
            self._drop_unused()

    @property
    def over_limit(self) -> str | None:
        """A message about a node that exceeded the limit of subjects; None if no node did."""
        if not self._counter.over_limit:
            return None
        node, scope = min(self._counter.over_limit)
        return (
            f"{self._known.node(node).name} has reported more than {MAX_EXPOSED_SUBJECTS} different items in scope {scope} "
            "today; further items are not sent to the time-series database"
        )

    def resend_info(self) -> None:
        """Send the info series again with the next frames, since the database may have lost them."""
        for info in self._infos.values():
            info.sent_ms = -INFO_MS

    def _batch(self, batch: FrameBatch) -> Iterator[BlockSeries]:
        try:
            for frame in split_packed_frames(batch.frames):
                time_ms = clip_time_us(frame.time_us + batch.shift_us) // 1000
                if time_ms > MAX_TIME_MS:
                    self.unreadable += len(frame.blocks)
                    continue
                written = encode_time(time_ms)
                for layout, numbers in frame.blocks:
                    part = self._block(batch.node, layout, numbers, written)
                    if part is not None:
                        yield part
                yield from self._info_series(batch, time_ms, written)
        except FORMAT_ERRORS:  # written by another version: only this batch is lost
            self.unreadable += 1

    def _block(self, node: int, layout: int, numbers: bytes, written: bytes) -> BlockSeries | None:
        kept = self._templates.get((node, layout))
        if kept is None:
            kept = _CachedTemplate(self._template(node, layout), self._now)
            self._templates[node, layout] = kept
        kept.used = self._now
        if kept.template is None:
            return None
        try:
            series, samples = kept.template.request(numbers, written)
        except ValueError:
            self.unreadable += 1
            return None
        return BlockSeries(node, layout, series, samples) if samples else None

    def _template(self, node: int, layout: int) -> BlockTemplate | None:
        try:
            found = self._known.layout(layout)
            if found is None:
                return None
            name = self._known.node(node).name
            return self._build_template(node, layout, found, name)
        except FORMAT_ERRORS:
            self.unreadable += 1
            return None

    def _build_template(self, node: int, layout: int, found: ColumnLayout, name: str) -> BlockTemplate | None:
        if found.scope == "gpu":
            info = self._infos.setdefault(node, _NodeInfo())
            info.gpus, info.template = layout, None
        admits = partial(self._counter.admits, node, found.scope)
        return build_block_template(found, name, self._extra, admits)

    def _info_series(self, batch: FrameBatch, time_ms: int, written: bytes) -> Iterator[BlockSeries]:
        info = self._infos.get(batch.node)
        if info is None:
            info = self._infos[batch.node] = _NodeInfo()
        if info.template is not None and 0 <= time_ms - info.sent_ms < INFO_MS:
            return
        version = self._known.version(batch.run)
        if info.template is None or version != info.version:
            try:
                gpus = None if info.gpus is None else self._known.layout(info.gpus)
                admits = partial(self._counter.admits, batch.node, "gpu")
                info.template = InfoTemplate(self._known.node(batch.node), version, gpus, self._extra, admits)
            except FORMAT_ERRORS:
                self.unreadable += 1
                return
            info.version = version
        info.sent_ms = time_ms
        yield BlockSeries(batch.node, 0, info.template.request(written), info.template.samples)

    def _forget(self, node: int) -> None:
        """Drop the templates of a node whose description changed."""
        for key in [key for key in self._templates if key[0] == node]:
            del self._templates[key]
        if node in self._infos:
            self._infos[node].template = None

    def _drop_unused(self) -> None:
        before = self._now - _UNUSED_SECONDS
        for key in [key for key, kept in self._templates.items() if kept.used < before]:
            del self._templates[key]
        if self._now - self._counted > _RECOUNT_SECONDS:
            self._counted = self._now
            self._counter.clear()
