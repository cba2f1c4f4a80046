"""Frames of a session file: the quantities in them, and the grid that assigns samples of many nodes, each with its clock, to time steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.errors import UsageError
from gpulse.model.session import Session

Array = NDArray[np.float64]

BYTES_PER_GB = 1e9
"""Bandwidths in files are in 10⁹ bytes per second."""


class FrameQuantity(NamedTuple):
    """Quantity of each GPU, which is one array in every frame."""

    name: str
    digits: int
    is_percent: bool
    title: str


UTIL = FrameQuantity("gpu_util", 2, is_percent=True, title="Utilization")
MEMORY = FrameQuantity("gpu_memory", 2, is_percent=True, title="Memory")
DRAM = FrameQuantity("dram_bandwidth", 4, is_percent=False, title="PCIe")
DRAM_RX = FrameQuantity("dram_bandwidth_rx", 4, is_percent=False, title="PCIe traffic to the GPU")
DRAM_TX = FrameQuantity("dram_bandwidth_tx", 4, is_percent=False, title="PCIe traffic from the GPU")
NVLINK = FrameQuantity("gpu_bandwidth", 4, is_percent=False, title="NVLink")
QUANTITIES = (UTIL, MEMORY, DRAM, DRAM_RX, DRAM_TX, NVLINK)

_PCIE = ("pcie_rx_bytes_per_second", "pcie_tx_bytes_per_second")
_NVLINK = ("nvlink_rx_bytes_per_second", "nvlink_tx_bytes_per_second")
ENERGY, POWER = "energy_joules_total", "power_watts"


def session_quantities(session: Session) -> tuple[FrameQuantity, ...]:
    """Return the quantities in the frames of a session."""
    return (
        UTIL,
        MEMORY,
        *((DRAM, DRAM_RX, DRAM_TX) if session.bandwidth else ()),
        *((NVLINK,) if session.nvlink else ()),
    )


def session_metrics(session: Session) -> list[str]:
    """Return the metrics that the quantities of a session and its energy need."""
    return [
        "gpu_utilization_ratio",
        "memory_used_bytes",
        "memory_total_bytes",
        POWER,
        ENERGY,
        *(_PCIE if session.bandwidth else ()),
        *(_NVLINK if session.nvlink else ()),
    ]


def compute_quantities(session: Session, values: Mapping[str, Array], known_total: Array) -> dict[str, Array]:
    """Compute the quantities of samples.

    Args:
        session: Decides which quantities are computed.
        values: Metrics of the samples.
        known_total: For each sample, the total memory of its GPU, for sources that report it only once.
    """
    total = np.where(np.isnan(values["memory_total_bytes"]), known_total, values["memory_total_bytes"])
    with np.errstate(divide="ignore", invalid="ignore"):
        memory = np.where(total > 0, 100 * values["memory_used_bytes"] / total, np.nan)
    found = {UTIL.name: 100 * values["gpu_utilization_ratio"], MEMORY.name: memory}
    if session.bandwidth:
        rx, tx = (values[name] / BYTES_PER_GB for name in _PCIE)
        found |= {DRAM.name: rx + tx, DRAM_RX.name: rx, DRAM_TX.name: tx}
    if session.nvlink:
        found[NVLINK.name] = (values[_NVLINK[0]] + values[_NVLINK[1]]) / BYTES_PER_GB
    return {
        quantity.name: np.round(found[quantity.name], quantity.digits)
        for quantity in session_quantities(session)
    }


Indexes = NDArray[np.int64]

MAX_STEPS = 60_000_000
"""A month at 50 ms has 52 million steps; more is probably a mistake that would fill the disk."""
_MAX_PACE_DIFFERENCE = 0.05
"""How far a node's sampling interval may be from the session's, relative to it, to count as equal."""
_LAG_FRAMES = 10
_ROUNDING_SECONDS = 1e-6
"""Times are rounded to microseconds: a sample at the very start of a step must not count for the step before."""
_MAX_CELLS = 65_536
"""Cells (frames times GPUs) that are yielded at once."""
_NO_STEP = -1


def count_steps(start: float, end: float, interval_ms: int) -> int:
    """Return the number of frames of a session between two times.

    An incomplete last step counts if it has at least half an interval: in a shorter one many nodes have no sample, and
    the session would seem to end with a gap.
    """
    # Rounded, so that a few microseconds of the clock do not count as a step.
    intervals = round((end - start) * 1000 / interval_ms, 3)
    return max(0, math.floor(intervals + 0.5))


def count_steps_checked(session: Session, end: float) -> int:
    """Return the number of frames of a session that ends at this time.

    Raises:
        UsageError: There are more frames than a file can hold.
    """
    count = count_steps(session.start, end, session.interval_ms)
    if count > MAX_STEPS:
        raise UsageError(
            f"session {session.name} would have {count:,} frames of {session.interval_ms} ms, "
            f"but a file can hold at most {MAX_STEPS:,}",
            hint="use a longer interval (--freq 1000: one frame per second), or a later start",
        )
    return count


class SampleTable(NamedTuple):
    """Samples in the order of time."""

    columns: Indexes
    """Indexes of the GPUs in the session."""
    times: Array
    values: Mapping[str, Array]

    def until(self, end: float) -> SampleTable:
        """Return the samples before a time."""
        count = int(np.searchsorted(self.times, end))
        if count == len(self.times):
            return self
        values = {name: found[:count] for name, found in self.values.items()}
        return SampleTable(self.columns[:count], self.times[:count], values)


class FrameRows(NamedTuple):
    """Complete steps, one row each."""

    first: int
    """Number of the first step, counting from 0."""
    values: Mapping[str, Array]
    """For each quantity, a column for each GPU; NaN is unknown."""
    delivered: NDArray[np.bool_]
    """A column for each node: whether it sent any sample."""

    @property
    def length(self) -> int:
        """Number of steps."""
        return len(self.delivered)


class StepAssigner:
    """Assigns the frames of one node to steps.

    A frame belongs to the step in which it was taken. But when a node samples at the session's interval, and close to
    the boundaries of the steps, jitter would leave some steps empty and give others two frames. So such a node stays
    aligned: the frame after one interval gets the next step, even if it is up to half an interval early or late. No
    frame is used for two steps, and a missing frame leaves its step empty.
    """

    def __init__(self) -> None:
        self._last = _NO_STEP
        self._before = math.nan
        self._recent: Array = np.empty(0)
        """Newest positions, enough of them to measure the interval."""
        self._even = False

    def steps(self, positions: Array) -> Indexes:
        """Return the steps of frames at these times, given in intervals since the session's start."""
        moments: list[float] = positions.tolist()
        known = np.concatenate((self._recent, positions))
        self._recent = known[-2 * _LAG_FRAMES :]
        if len(known) > 1:
            self._even = _is_even(known)
        if not self._even:
            natural = np.floor(positions).astype(np.int64)
            if moments:
                self._last, self._before = max(self._last, int(natural[-1])), moments[-1]
            return natural
        return np.fromiter(map(self._next, moments), np.int64, len(moments))

    def _next(self, position: float) -> int:
        step = math.floor(position)
        if self._last != _NO_STEP:
            passed = math.floor(position - self._before + 0.5)
            wanted = self._last + passed
            edge = math.floor(position + 0.5)
            if passed and edge - 1 <= wanted <= edge:
                step = wanted
        self._last, self._before = max(step, self._last), position
        return self._last


def _is_even(positions: Array) -> bool:
    """Return whether there is one frame per interval.

    Measured over several frames, jitter hardly matters; measured over two, gaps do not.
    """
    lags = {1, min(_LAG_FRAMES, len(positions) - 1)}
    paces = [float(np.median(positions[lag:] - positions[:-lag])) / lag for lag in lags]
    return any(abs(pace - 1.0) <= _MAX_PACE_DIFFERENCE for pace in paces)


class FrameGrid:
    """Collects samples, and yields steps as soon as they are complete."""

    def __init__(
        self,
        *,
        start: float,
        interval_seconds: float,
        steps: int,
        nodes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """Start a session.

        Args:
            start: Start of the first step, in epoch seconds.
            interval_seconds: Length of a step.
            steps: Number of steps.
            nodes: Index of the node of each GPU.
            names: The quantities.
        """
        self._start = start
        self._interval = interval_seconds
        self._steps = steps
        self._nodes = np.asarray(nodes, np.int64)
        self._names = tuple(names)
        self._assigners = [StepAssigner() for _ in range(max(nodes, default=-1) + 1)]
        self._done = 0
        self._max_rows = max(16, _MAX_CELLS // max(1, len(nodes)))
        self._waiting = _SteppedSamples(
            np.empty(0, np.int64), np.empty(0, np.int64), {name: np.empty(0) for name in self._names}
        )

    def add(self, table: SampleTable) -> Iterator[FrameRows]:
        """Add samples, which must not be older than earlier ones, and yield the steps that are complete."""
        if not len(table.times):
            return
        positions = (table.times - self._start + _ROUNDING_SECONDS) / self._interval
        steps = np.empty(len(positions), np.int64)
        nodes = self._nodes[table.columns]
        order = np.argsort(nodes, kind="stable")
        for of_node in np.split(order, np.flatnonzero(np.diff(nodes[order])) + 1):
            moments, which = np.unique(positions[of_node], return_inverse=True)
            steps[of_node] = self._assigners[nodes[of_node[0]]].steps(moments)[which]
        self._waiting = self._waiting.append(_SteppedSamples(steps, table.columns, table.values))
        # Later samples are not older than the newest of these, and at most one step late.
        yield from self._complete_rows(min(self._steps, int(positions[-1]) - 1))

    def finish(self) -> Iterator[FrameRows]:
        """Yield the remaining steps."""
        yield from self._complete_rows(self._steps)

    def _complete_rows(self, end: int) -> Iterator[FrameRows]:
        if end <= self._done:
            return
        complete, self._waiting = self._waiting.split(end)
        while self._done < end:
            stop = min(end, self._done + self._max_rows)
            part, complete = complete.split(stop)
            yield self._rows(part, stop)
            self._done = stop

    def _rows(self, part: _SteppedSamples, stop: int) -> FrameRows:
        count, first = stop - self._done, self._done
        kept = part.steps >= first
        rows, columns = part.steps[kept] - first, part.columns[kept]
        delivered = np.zeros((count, len(self._assigners)), np.bool_)
        delivered[rows, self._nodes[columns]] = True
        values = {}
        for name in self._names:
            matrix = np.full((count, len(self._nodes)), np.nan)
            found = part.values[name][kept]
            known = ~np.isnan(found)
            matrix[rows[known], columns[known]] = found[known]  # the last one wins, which is the newest
            values[name] = matrix
        return FrameRows(first, values, delivered)


class _SteppedSamples(NamedTuple):
    """Samples with their steps, in the order of time."""

    steps: Indexes
    columns: Indexes
    values: Mapping[str, Array]

    def append(self, later: _SteppedSamples) -> _SteppedSamples:
        if not len(self.steps):
            return later
        return _SteppedSamples(
            np.concatenate((self.steps, later.steps)),
            np.concatenate((self.columns, later.columns)),
            {name: np.concatenate((found, later.values[name])) for name, found in self.values.items()},
        )

    def split(self, step: int) -> tuple[_SteppedSamples, _SteppedSamples]:
        """Return the samples before a step, and the rest."""
        before = self.steps < step
        if before.all():
            return self, self._only(~before)
        return self._only(before), self._only(~before)

    def _only(self, which: NDArray[np.bool_]) -> _SteppedSamples:
        return _SteppedSamples(
            self.steps[which],
            self.columns[which],
            {name: found[which] for name, found in self.values.items()},
        )
