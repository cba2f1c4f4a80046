"""Packed frames as arrays: the blocks of one layout and node, stacked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.model.metric_catalog import Scope
from gpulse.model.packed_columns import (
    MISSING_NARROW,
    MISSING_WIDE,
    ColumnLayout,
    LayoutColumn,
    split_packed_frames,
)
from gpulse.model.safe_text import replace_surrogates
from gpulse.store.log.record_payloads import FrameBatch, clip_time_us

_KEYS: dict[Scope, Callable[[Mapping[str, Any]], str]] = {
    "gpu": lambda subject: str(subject.get("uuid", "")),
    "host": lambda _: "",
    "disk": lambda subject: str(subject.get("name", "")),
    "filesystem": lambda subject: str(subject.get("mount_point", "")),
    "network": lambda subject: str(subject.get("name", "")),
    "cgroup": lambda subject: str(subject.get("path", "")),
    "process": lambda subject: (
        f"{subject.get('pid')}@{subject['gpu']}" if "gpu" in subject else str(subject.get("pid"))
    ),
}


class BlockStack(NamedTuple):
    """The blocks of one layout and node as arrays, one block per frame."""

    node: int
    layout: ColumnLayout
    times: NDArray[np.int64]
    """Microseconds since the epoch, by the head's clock."""
    runs: NDArray[np.uint64]
    sequences: NDArray[np.int64]
    wide: NDArray[np.int64]
    """Indexed by frame, column and subject."""
    narrow: NDArray[np.int32]

    def column(self, name: str) -> tuple[LayoutColumn, NDArray[np.int64] | NDArray[np.int32], int] | None:
        """Return a metric's column, its numbers by frame and subject, and the number that stands for a missing value."""
        for place, column in enumerate(self.layout.wide):
            if column.name == name:
                return column, self.wide[:, place], MISSING_WIDE
        for place, column in enumerate(self.layout.narrow):
            if column.name == name:
                return column, self.narrow[:, place], MISSING_NARROW
        return None

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a metric in its base unit by frame and subject; NaN where unknown."""
        found = self.column(name)
        if found is None:
            return np.full((len(self.times), len(self.layout.subjects)), np.nan)
        column, numbers, missing = found
        values = numbers.astype(np.float64)
        values = values / column.steps if column.steps > 1 else values * column.size
        values[numbers == missing] = np.nan
        return values


def subject_key(scope: Scope, subject: Mapping[str, Any]) -> str:
    """Return the key of a subject, unique within its scope and node."""
    return replace_surrogates(_KEYS[scope](subject))


def run_number(run: bytes) -> int:
    """Return the first eight bytes of a run ID as a number."""
    return int.from_bytes(run[:8], "big")


def build_stack(
    node: int,
    layout: ColumnLayout,
    times: Sequence[int] | NDArray[np.int64],
    runs: Sequence[int] | NDArray[np.uint64],
    sequences: Sequence[int] | NDArray[np.int64],
    numbers: bytes | memoryview,
) -> BlockStack:
    """View blocks that are adjacent in memory as arrays, without copying.

    Raises:
        ValueError: The size of the blocks does not match the layout.
    """
    frames, subjects, size = len(times), len(layout.subjects), layout.block_bytes
    if len(numbers) != frames * size:
        raise ValueError(f"expected {frames} blocks of {size} bytes, but got {len(numbers)} bytes")
    rows = np.frombuffer(numbers, np.uint8).reshape(frames, size)
    cut = subjects * 8 * len(layout.wide)
    return BlockStack(
        node,
        layout,
        np.asarray(times, np.int64),
        np.asarray(runs, np.uint64),
        np.asarray(sequences, np.int64),
        rows[:, :cut].view("<i8").reshape(frames, len(layout.wide), subjects),
        rows[:, cut:].view("<i4").reshape(frames, len(layout.narrow), subjects),
    )


class BlockGroup(NamedTuple):
    """Blocks of several nodes with the same columns and number of subjects, one node after the other.

    A large fleet has thousands of nodes and few kinds of nodes: array operations on a group cost the same as on a node.
    """

    stack: BlockStack
    """All blocks; its node and the subjects of its layout are those of the first member."""
    nodes: list[int]
    """The node of each member."""
    layouts: list[ColumnLayout]
    """The layout of each member."""
    counts: list[int]
    """The number of blocks of each member."""


class _Blocks(NamedTuple):
    """The blocks of one layout and node."""

    times: list[int]
    runs: list[int]
    sequences: list[int]
    numbers: list[bytes]


class BlockCollector:
    """Collects the blocks of batches, and returns them as stacks."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Blocks] = {}
        self.size_bytes = 0
        self.frames = 0
        self.unreadable = 0
        """Number of blocks skipped because their layout is missing or does not match."""

    def add(self, batch: FrameBatch) -> None:
        """Add the blocks of a batch.

        Raises:
            ValueError: A frame is incomplete, or the number of frames is wrong.
        """
        run, sequence = run_number(batch.run), batch.first
        frames = list(split_packed_frames(batch.frames))
        if len(frames) != batch.count:
            raise ValueError(f"expected {batch.count} frames, but got {len(frames)}")
        for frame in frames:
            time = clip_time_us(frame.time_us + batch.shift_us)
            for layout, numbers in frame.blocks:
                blocks = self._blocks.get((batch.node, layout))
                if blocks is None:
                    blocks = self._blocks[batch.node, layout] = _Blocks([], [], [], [])
                blocks.times.append(time)
                blocks.runs.append(run)
                blocks.sequences.append(sequence)
                blocks.numbers.append(numbers)
            sequence += 1
        self.size_bytes += len(batch.frames)
        self.frames += batch.count

    def layouts(self) -> set[int]:
        """Return the IDs of the layouts of all blocks."""
        return {layout for _, layout in self._blocks}

    def drop(self, layouts: Collection[int]) -> None:
        """Skip the blocks of layouts that were not found."""
        for key in [key for key in self._blocks if key[1] in layouts]:
            self.unreadable += len(self._blocks.pop(key).times)

    def nodes(self) -> list[int]:
        """Return the nodes of all blocks, sorted."""
        return sorted({node for node, _ in self._blocks})

    def take(
        self, nodes: Iterable[int], layouts: Mapping[int, ColumnLayout]
    ) -> dict[Scope, list[BlockGroup]]:
        """Remove the blocks of some nodes and return them in groups by scope, without blocks that do not match their layout."""
        wanted = set(nodes)
        members: dict[tuple[Any, ...], list[tuple[int, ColumnLayout, _Blocks]]] = {}
        for node, layout_id in sorted(key for key in self._blocks if key[0] in wanted):
            blocks, layout = self._blocks.pop((node, layout_id)), layouts[layout_id]
            size = layout.block_bytes
            wrong = [place for place, block in enumerate(blocks.numbers) if len(block) != size]
            self.unreadable += len(wrong)
            for place in reversed(wrong):
                for column in blocks:
                    del column[place]
            if layout.subjects and blocks.times:
                shape = layout.scope, len(layout.subjects), layout.wide, layout.narrow
                members.setdefault(shape, []).append((node, layout, blocks))
        found: dict[Scope, list[BlockGroup]] = {}
        for group in members.values():
            found.setdefault(group[0][1].scope, []).append(_join_blocks(group))
        return found


def _join_blocks(members: list[tuple[int, ColumnLayout, _Blocks]]) -> BlockGroup:
    node, layout, _ = members[0]
    all_blocks = [blocks for _, _, blocks in members]
    stack = build_stack(
        node,
        layout,
        list(chain.from_iterable(blocks.times for blocks in all_blocks)),
        list(chain.from_iterable(blocks.runs for blocks in all_blocks)),
        list(chain.from_iterable(blocks.sequences for blocks in all_blocks)),
        b"".join(chain.from_iterable(blocks.numbers for blocks in all_blocks)),
    )
    return BlockGroup(
        stack,
        [node for node, _, _ in members],
        [layout for _, layout, _ in members],
        [len(blocks.times) for blocks in all_blocks],
    )
