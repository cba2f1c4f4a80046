"""Frames received since the last sealing, in memory, in their packed form."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.packed_columns import ColumnLayout, PackedFrame, split_packed_frames
from gpulse.store.history.duckdb_query import SampleWindow
from gpulse.store.history.frame_blocks import BlockStack, build_stack, run_number, subject_key
from gpulse.store.log.record_payloads import FrameBatch, clip_time_us
from gpulse.store.store import Samples, SeriesKey

_FIELDS = 4
"""Number of fields of `_RecentBlocks.fields` per block."""


class _RecentBlocks:
    """The blocks of one layout and node, oldest first. The numbers are those that were received, and are not copied."""

    __slots__ = ("fields", "numbers")

    def __init__(self) -> None:
        self.fields = array("Q")
        """For each block: log position, time, run and sequence number."""
        self.numbers: list[bytes] = []

    def drop_through(self, position: int) -> None:
        """Drop the blocks up to a log position."""
        count = bisect_right(self.fields[::_FIELDS], position)
        del self.fields[: count * _FIELDS]
        del self.numbers[:count]


class _RecentBlocksView(NamedTuple):
    """The blocks of one layout and node at a point in time."""

    node: int
    layout: int
    fields: array[int]
    numbers: list[bytes]

    @property
    def columns(self) -> NDArray[np.uint64]:
        """Log positions, times, runs and sequence numbers: a row of each."""
        return np.frombuffer(self.fields, np.uint64).reshape(-1, _FIELDS).T

    @property
    def times(self) -> NDArray[np.uint64]:
        """The times in microseconds."""
        return np.frombuffer(self.fields, np.uint64)[1::_FIELDS]


class RecentFrames:
    """Frames that are not sealed yet. Safe to use from several threads."""

    def __init__(self, layouts: Mapping[int, ColumnLayout]) -> None:
        """Start empty.

        Args:
            layouts: The layouts of the batches, by ID; read when samples are queried.
        """
        self._layouts = layouts
        self._lock = threading.Lock()
        self._blocks: dict[tuple[int, int], _RecentBlocks] = {}
        self._sizes: deque[tuple[int, int]] = deque()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Total size of the frames."""
        return self._bytes

    @property
    def last(self) -> int:
        """The log position of the newest batch; 0 if there is none."""
        with self._lock:
            return self._sizes[-1][0] if self._sizes else 0

    def add(self, position: int, batch: FrameBatch, frames: Sequence[PackedFrame] | None = None) -> None:
        """Add a batch; positions must increase.

        Args:
            position: Its position in the log.
            batch: The batch.
            frames: Its frames, if they are decoded already.

        Raises:
            ValueError: The batch has an incomplete frame.
        """
        run, sequence = run_number(batch.run), batch.first
        if frames is None:
            frames = list(split_packed_frames(batch.frames))
        with self._lock:
            for frame in frames:
                time = clip_time_us(frame.time_us + batch.shift_us)
                fields = (position, time, run, sequence)
                for layout, numbers in frame.blocks:
                    blocks = self._blocks.get((batch.node, layout))
                    if blocks is None:
                        blocks = self._blocks[batch.node, layout] = _RecentBlocks()
                    blocks.fields.extend(fields)
                    blocks.numbers.append(numbers)
                sequence += 1
            self._sizes.append((position, len(batch.frames)))
            self._bytes += len(batch.frames)

    def drop_through(self, position: int) -> None:
        """Drop sealed frames up to a position. Call this after queries can find them in the history."""
        with self._lock:
            while self._sizes and self._sizes[0][0] <= position:
                self._bytes -= self._sizes.popleft()[1]
            for key, blocks in list(self._blocks.items()):
                blocks.drop_through(position)
                if not blocks.numbers:
                    del self._blocks[key]

    def view(self, nodes: Collection[int] | None = None) -> RecentFramesView:
        """Return a snapshot, optionally of some nodes only."""
        with self._lock:
            views = [
                _RecentBlocksView(node, layout, blocks.fields[:], blocks.numbers[:])
                for (node, layout), blocks in self._blocks.items()
                if nodes is None or node in nodes
            ]
            after = self._sizes[0][0] - 1 if self._sizes else 0
        return RecentFramesView(views, self._layouts, after)


class RecentFramesView:
    """A snapshot of recent frames."""

    def __init__(
        self, views: Sequence[_RecentBlocksView], layouts: Mapping[int, ColumnLayout], after: int
    ) -> None:
        self._views = views
        self._layouts = layouts
        self._after = after
        """Frames up to this position are sealed."""

    def since(self, position: int) -> RecentFramesView:
        """Return the snapshot without the frames up to a position."""
        return RecentFramesView(self._views, self._layouts, max(position, self._after))

    @property
    def span(self) -> tuple[int, int] | None:
        """The earliest and the latest time in microseconds; None if there are no frames."""
        times = [view.times for view in self._views]
        if not times:
            return None
        return min(int(part.min()) for part in times), max(int(part.max()) for part in times)

    @property
    def unreadable_span(self) -> tuple[int, int] | None:
        """The earliest and the latest time of frames whose layout is unknown; None if there are none."""
        unknown = [view for view in self._views if view.layout not in self._layouts]
        return RecentFramesView(unknown, self._layouts, self._after).span

    def spans(self) -> dict[int, tuple[int, int]]:
        """Return the earliest and the latest time by node, of frames that are not sealed."""
        found: dict[int, tuple[int, int]] = {}
        for view in self._views:
            columns = view.columns
            times = columns[1][columns[0] > self._after]
            if len(times):
                low, high = found.get(view.node, (int(times[0]), int(times[0])))
                found[view.node] = min(low, int(times.min())), max(high, int(times.max()))
        return found

    def samples(self, window: SampleWindow, metrics: Sequence[str]) -> Iterator[Samples]:
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

    def stacks(self, window: SampleWindow) -> Iterator[tuple[BlockStack, list[int]]]:
        """Yield stacks of the frames in a window, each with the indices of the matching subjects."""
        for view in self._views:
            layout = self._layouts.get(view.layout)
            if layout is None or layout.scope != window.scope:
                continue
            if window.nodes is not None and view.node not in window.nodes:
                continue
            kept = [place for place, subject in enumerate(layout.subjects) if window.wants(subject)]
            positions, clipped, runs, sequences = view.columns
            times = clipped.astype(np.int64)
            wanted = (times >= window.start) & (times < window.end) & (positions > self._after)
            if not kept or not wanted.any():
                continue
            numbers = b"".join(view.numbers)
            stack = build_stack(view.node, layout, times, runs, sequences.astype(np.int64), numbers)
            if not wanted.all():
                stack = BlockStack(view.node, layout, *(column[wanted] for column in stack[2:]))
            yield stack, kept
