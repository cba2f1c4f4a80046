"""Packed frames as arrays: all blocks of one layout and node, stacked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpulse.model.columns import MISSING_NARROW, MISSING_WIDE, Column, Layout, split
from gpulse.model.metric import Scope
from gpulse.store.log.records import Batch, clipped

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


class Stack(NamedTuple):
    """Blocks of one layout and node, one per frame."""

    node: int
    layout: Layout
    times: NDArray[np.int64]
    """Microseconds since the epoch, on the head's clock."""
    runs: NDArray[np.uint64]
    sequences: NDArray[np.int64]
    wide: NDArray[np.int64]
    """By frame, column and subject."""
    narrow: NDArray[np.int32]

    def column(self, name: str) -> tuple[Column, NDArray[np.int64] | NDArray[np.int32], int] | None:
        """Return a metric's column, its numbers by frame and subject, and the number that means absent."""
        for place, column in enumerate(self.layout.wide):
            if column.name == name:
                return column, self.wide[:, place], MISSING_WIDE
        for place, column in enumerate(self.layout.narrow):
            if column.name == name:
                return column, self.narrow[:, place], MISSING_NARROW
        return None

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a metric in its base unit by frame and subject, NaN where it is unknown."""
        found = self.column(name)
        if found is None:
            return np.full((len(self.times), len(self.layout.subjects)), np.nan)
        column, numbers, missing = found
        values = numbers.astype(np.float64)
        values = values / column.steps if column.steps > 1 else values * column.size
        values[numbers == missing] = np.nan
        return values


def subject_key(scope: Scope, subject: Mapping[str, Any]) -> str:
    """Return the name of a subject among those of its scope and node."""
    return plain(_KEYS[scope](subject))


def plain(text: str) -> str:
    """Replace the characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def run_number(run: bytes) -> int:
    """Return the first eight bytes of a run as a number, whose hexadecimal digits begin those of the run."""
    return int.from_bytes(run[:8], "big")


def make_stack(
    node: int,
    layout: Layout,
    times: Sequence[int] | NDArray[np.int64],
    runs: Sequence[int] | NDArray[np.uint64],
    sequences: Sequence[int] | NDArray[np.int64],
    numbers: bytes | memoryview,
) -> Stack:
    """View blocks that are adjacent in memory as arrays, without a copy.

    Raises:
        ValueError: The blocks are not as long as the layout says.
    """
    frames, subjects, size = len(times), len(layout.subjects), layout.block_bytes
    if len(numbers) != frames * size:
        raise ValueError(f"{len(numbers)} bytes instead of {frames} blocks of {size} bytes")
    rows = np.frombuffer(numbers, np.uint8).reshape(frames, size)
    cut = subjects * 8 * len(layout.wide)
    return Stack(
        node,
        layout,
        np.asarray(times, np.int64),
        np.asarray(runs, np.uint64),
        np.asarray(sequences, np.int64),
        rows[:, :cut].view("<i8").reshape(frames, len(layout.wide), subjects),
        rows[:, cut:].view("<i4").reshape(frames, len(layout.narrow), subjects),
    )


class _Blocks(NamedTuple):
    """The blocks that become one stack."""

    times: list[int]
    runs: list[int]
    sequences: list[int]
    numbers: list[bytes]


class BlockCollector:
    """Collects the blocks of batches until they are taken as stacks."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], _Blocks] = {}
        self.size_bytes = 0
        self.frames = 0
        self.unreadable = 0
        """How many blocks were skipped because their layout is missing or does not fit."""

    def add(self, batch: Batch) -> None:
        """Add the blocks of a batch.

        Raises:
            ValueError: The batch has a frame that is not whole, or not as many frames as it says.
        """
        run, sequence = run_number(batch.run), batch.first
        frames = list(split(batch.frames))
        if len(frames) != batch.count:
            raise ValueError(f"{len(frames)} frames instead of {batch.count}")
        for frame in frames:
            time = clipped(frame.time_us + batch.shift_us)
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
        """Return the nodes of all blocks, in order."""
        return sorted({node for node, _ in self._blocks})

    def take(self, nodes: Iterable[int], layouts: Mapping[int, Layout]) -> dict[Scope, list[Stack]]:
        """Remove the blocks of some nodes and return them as stacks by scope, without those that do not fit their layout."""
        wanted = set(nodes)
        found: dict[Scope, list[Stack]] = {}
        for node, layout_id in sorted(key for key in self._blocks if key[0] in wanted):
            times, runs, sequences, numbers = self._blocks.pop((node, layout_id))
            layout = layouts[layout_id]
            wrong = [place for place, block in enumerate(numbers) if len(block) != layout.block_bytes]
            self.unreadable += len(wrong)
            for place in reversed(wrong):
                for column in (times, runs, sequences, numbers):
                    del column[place]
            if layout.subjects and times:
                stack = make_stack(node, layout, times, runs, sequences, b"".join(numbers))
                found.setdefault(layout.scope, []).append(stack)
        return found
