"""What came since the last sealing, in memory, as the columns it came in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from gpulse.model.columns import Layout, split
from gpulse.store.history.blocks import Stack, make_stack, run_number, subject_key
from gpulse.store.history.query import Window
from gpulse.store.log.records import Batch, clipped
from gpulse.store.store import Samples, SeriesKey

_MIN_FRAMES, _MAX_FRAMES = 8, 16
"""Chunks grow, since many layouts of processes live for a few frames."""


class _Chunk:
    """Blocks of one layout and node, one after the other in memory that never moves."""

    __slots__ = ("capacity", "count", "frames", "numbers", "size")

    def __init__(self, capacity: int, size: int) -> None:
        self.capacity = capacity
        self.size = size
        self.count = 0
        self.numbers = bytearray(capacity * size)
        self.frames = np.zeros((4, capacity), np.uint64)
        """By frame its log position, time, run and sequence number."""

    def add(self, position: int, time: int, run: int, sequence: int, numbers: bytes) -> None:
        at = self.count
        self.numbers[at * self.size : (at + 1) * self.size] = numbers
        frames = self.frames
        frames[0, at], frames[1, at], frames[2, at], frames[3, at] = position, time, run, sequence
        self.count = at + 1

    @property
    def last(self) -> int:
        """The position of its last block."""
        return int(self.frames[0, self.count - 1])


class _View(NamedTuple):
    """A chunk as it was at one moment."""

    node: int
    layout: int
    chunk: _Chunk
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls here


class Recent:
    """Batches that are not sealed yet. Safe to use from several threads."""

    def __init__(self, layouts: Mapping[int, Layout]) -> None:
        """Begin with nothing.

        Args:
            layouts: Those that batches refer to, by their numbers; asked when samples are.
        """
        self._layouts = layouts
        self._lock = threading.Lock()
        self._chunks: dict[tuple[int, int], deque[_Chunk]] = {}
        self._sizes: deque[tuple[int, int]] = deque()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """How long the frames are that it holds."""
        return self._bytes

    @property
    def last(self) -> int:
        """The position of the newest batch; 0 when there is none."""
        with self._lock:
            return self._sizes[-1][0] if self._sizes else 0

    def add(self, position: int, batch: Batch) -> None:
        """Take a batch in; positions only grow.

        Raises:
            ValueError: It is not made of whole frames.
        """
        run, sequence = run_number(batch.run), batch.first
        frames = list(split(batch.frames))
        with self._lock:
            for frame in frames:
                time = clipped(frame.time_us + batch.shift_us)
                for layout, numbers in frame.blocks:
                    chunk = self._chunk(batch.node, layout, len(numbers))
                    chunk.add(position, time, run, sequence, numbers)
                sequence += 1
            self._sizes.append((position, len(batch.frames)))
            self._bytes += len(batch.frames)

    def _chunk(self, node: int, layout: int, size: int) -> _Chunk:
        """The chunk that has room for one more."""
        chunks = self._chunks.get((node, layout))
        if chunks is None:
            chunks = self._chunks[node, layout] = deque()
        if not chunks or chunks[-1].count == chunks[-1].capacity:
            capacity = min(_MAX_FRAMES, 2 * chunks[-1].capacity) if chunks else _MIN_FRAMES
            chunks.append(_Chunk(capacity, size))
        return chunks[-1]

    def drop_through(self, position: int) -> None:
        """Forget what was sealed, once whoever asks finds it in the history."""
        with self._lock:
            while self._sizes and self._sizes[0][0] <= position:
                self._bytes -= self._sizes.popleft()[1]
            for key, chunks in list(self._chunks.items()):
                while chunks and chunks[0].last <= position:
                    chunks.popleft()
                if not chunks:
                    del self._chunks[key]

    def view(self, nodes: Collection[int] | None = None) -> RecentView:
        """What is there now, perhaps of some nodes only, for several questions about the same moment."""
        with self._lock:
            views = [
                _View(node, layout, chunk, chunk.count)
                for (node, layout), chunks in self._chunks.items()
                if nodes is None or node in nodes
                for chunk in chunks
            ]
            after = self._sizes[0][0] - 1 if self._sizes else 0
        return RecentView(views, self._layouts, after)


class RecentView:
    """What was held at one moment."""

    def __init__(self, views: Sequence[_View], layouts: Mapping[int, Layout], after: int) -> None:
        self._views = views
        self._layouts = layouts
        self._after = after
        """Positions up to here are sealed and may still lie in a chunk beside others."""

    def since(self, position: int) -> RecentView:
        """Only what came after a position."""
        return RecentView(self._views, self._layouts, max(position, self._after))

    @property
    def span(self) -> tuple[int, int] | None:
        """The earliest and the latest time, in microseconds."""
        times = [view.chunk.frames[1, : view.count] for view in self._views if view.count]
        if not times:
            return None
        return min(int(part.min()) for part in times), max(int(part.max()) for part in times)

    def spans(self) -> dict[int, tuple[int, int]]:
        """The same by node, of what is not sealed."""
        found: dict[int, tuple[int, int]] = {}
        for view in self._views:
            frames = view.chunk.frames[:, : view.count]
            times = frames[1][frames[0] > self._after]
            if len(times):
                low, high = found.get(view.node, (int(times[0]), int(times[0])))
                found[view.node] = min(low, int(times.min())), max(high, int(times.max()))
        return found

    def samples(self, window: Window, metrics: Sequence[str]) -> Iterator[Samples]:
        """Yield the samples of several metrics, layout by layout."""
        for stack, kept in self.stacks(window):
            names = [subject_key(window.scope, stack.layout.subjects[place]) for place in kept]
            yield Samples(
                [SeriesKey(stack.node, name) for name in names],
                np.tile(np.arange(len(kept), dtype=np.int32), len(stack.times)),
                np.repeat(stack.times / 1e6, len(kept)),
                np.repeat(stack.runs, len(kept)),
                np.repeat(stack.sequences, len(kept)),
                {metric: stack.values(metric)[:, kept].ravel() for metric in metrics},
            )

    def stacks(self, window: Window) -> Iterator[tuple[Stack, list[int]]]:
        """Yield what lies in a window, and the places of the subjects that are wanted."""
        for (node, number), group in groupby(self._views, key=lambda view: view[:2]):
            layout = self._layouts.get(number)
            if layout is None or layout.scope != window.scope:
                continue
            if window.nodes is not None and node not in window.nodes:
                continue
            kept = [place for place, subject in enumerate(layout.subjects) if window.wants(subject)]
            views = list(group)
            frames = np.concatenate([view.chunk.frames[:, : view.count] for view in views], axis=1)
            times = frames[1].astype(np.int64)
            wanted = (times >= window.start) & (times < window.end) & (frames[0] > self._after)
            if not kept or not wanted.any():
                continue
            numbers = b"".join(
                memoryview(view.chunk.numbers)[: view.count * view.chunk.size] for view in views
            )
            stack = make_stack(node, layout, times, frames[2], frames[3].astype(np.int64), numbers)
            if not wanted.all():
                stack = Stack(node, layout, *(column[wanted] for column in stack[2:]))
            yield stack, kept
