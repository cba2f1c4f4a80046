"""From the records of a log to the series of requests, with templates that are made once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from gpulse.model.columns import Layout, split
from gpulse.model.series import MOST_SUBJECTS
from gpulse.store.log.records import Batch, clipped
from gpulse.store.metadata.values import UNREADABLE
from gpulse.store.tsdb.layout_cache import LayoutCache
from gpulse.store.tsdb.series_labels import Census, InfoTemplate, block_template
from gpulse.store.tsdb.template import BlockTemplate
from gpulse.store.tsdb.wire import LATEST_MS, time_bytes

INFO_MS = 30_000
"""How often that which hardly changes is sent."""
_UNUSED_SECONDS = 600.0
"""Templates that nobody needed for so long are dropped."""

_COUNT_SECONDS = 86_400.0
"""So often the subjects of nodes are counted anew."""


class Part(NamedTuple):
    """The series of one block of one frame."""

    node: int
    layout: int
    """0 for what is known of the node itself."""
    series: bytes
    samples: int


class _Kept:
    """A template and when it was used last."""

    __slots__ = ("template", "used")

    def __init__(self, template: BlockTemplate | None, used: float) -> None:
        self.template = template
        self.used = used


class _Info:
    """What is sent now and then of a node."""

    __slots__ = ("gpus", "sent_ms", "template", "version")

    def __init__(self) -> None:
        self.template: InfoTemplate | None = None
        self.gpus: int | None = None
        self.version = ""
        self.sent_ms = 0


class Requests:
    """Makes requests of what is in the log, and remembers what the numbers in it mean."""

    def __init__(self, known: LayoutCache, extra: Mapping[str, str]) -> None:
        """Begin with nothing.

        Args:
            known: What the log is about.
            extra: Labels of all series.
        """
        self._known = known
        self._extra = extra
        self._templates: dict[tuple[int, int], _Kept] = {}
        self._infos: dict[int, _Info] = {}
        self._now = self._tidied = time.monotonic()
        self._counted = self._now
        self._census = Census()
        self.unreadable = 0
        """How many blocks could not be sent because nobody knows what they mean."""

    def parts(self, entries: Sequence[Batch | bytes]) -> Iterator[Part]:
        """The series of batches, while facts between them are heard."""
        self._now = time.monotonic()
        for entry in entries:
            if isinstance(entry, Batch):
                yield from self._batch(entry)
            else:
                for node in self._known.hear(entry, self._now):
                    self._forget(node)
        if self._now - self._tidied > _UNUSED_SECONDS:
            self._tidied = self._now
            self._drop_unused()

    @property
    def crowded(self) -> str | None:
        """Whose subjects are too many, in words; None when nobody's are."""
        if not self._census.crowded:
            return None
        node, scope = min(self._census.crowded)
        return (
            f"{self._known.node(node).name} had more than {MOST_SUBJECTS} different subjects of the kind {scope} "
            "today: the others are not sent"
        )

    def begin_again(self) -> None:
        """What was sent may be forgotten: tell everything once more."""
        for info in self._infos.values():
            info.sent_ms = -INFO_MS

    def _batch(self, batch: Batch) -> Iterator[Part]:
        try:
            for frame in split(batch.frames):
                time_ms = clipped(frame.time_us + batch.shift_us) // 1000
                if time_ms > LATEST_MS:
                    self.unreadable += len(frame.blocks)
                    continue
                written = time_bytes(time_ms)
                for layout, numbers in frame.blocks:
                    part = self._block(batch.node, layout, numbers, written)
                    if part is not None:
                        yield part
                yield from self._about(batch, time_ms, written)
        except UNREADABLE:  # another version wrote it: it costs this batch, and nobody else's
            self.unreadable += 1

    def _block(self, node: int, layout: int, numbers: bytes, written: bytes) -> Part | None:
        kept = self._templates.get((node, layout))
        if kept is None:
            kept = _Kept(self._template(node, layout), self._now)
            self._templates[node, layout] = kept
        kept.used = self._now
        if kept.template is None:
            return None
        try:
            series, samples = kept.template.request(numbers, written)
        except ValueError:
            self.unreadable += 1
            return None
        return Part(node, layout, series, samples) if samples else None

    def _template(self, node: int, layout: int) -> BlockTemplate | None:
        try:
            words = self._known.layout(layout)
            if words is None:
                return None
            name = self._known.node(node).name
            return self._made(node, layout, words, name)
        except UNREADABLE:
            self.unreadable += 1
            return None

    def _made(self, node: int, layout: int, words: Layout, name: str) -> BlockTemplate | None:
        if words.scope == "gpu":
            info = self._infos.setdefault(node, _Info())
            info.gpus, info.template = layout, None
        admits = partial(self._census.admits, node, words.scope)
        return block_template(words, name, self._extra, admits)

    def _about(self, batch: Batch, time_ms: int, written: bytes) -> Iterator[Part]:
        info = self._infos.get(batch.node)
        if info is None:
            info = self._infos[batch.node] = _Info()
        if info.template is not None and 0 <= time_ms - info.sent_ms < INFO_MS:
            return
        version = self._known.version(batch.run)
        if info.template is None or version != info.version:
            try:
                gpus = None if info.gpus is None else self._known.layout(info.gpus)
                admits = partial(self._census.admits, batch.node, "gpu")
                info.template = InfoTemplate(self._known.node(batch.node), version, gpus, self._extra, admits)
            except UNREADABLE:
                self.unreadable += 1
                return
            info.version = version
        info.sent_ms = time_ms
        yield Part(batch.node, 0, info.template.request(written), info.template.samples)

    def _forget(self, node: int) -> None:
        """A node is described otherwise."""
        for key in [key for key in self._templates if key[0] == node]:
            del self._templates[key]
        if node in self._infos:
            self._infos[node].template = None

    def _drop_unused(self) -> None:
        before = self._now - _UNUSED_SECONDS
        for key in [key for key, kept in self._templates.items() if kept.used < before]:
            del self._templates[key]
        if self._now - self._counted > _COUNT_SECONDS:
            self._counted = self._now
            self._census.clear()
