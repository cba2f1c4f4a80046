"""Samples of many nodes, each with a clock of its own, put into the steps of one session."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.int64]

_EVEN = 0.05
"""How far a node's pace may be from the session's to count as the same."""
_LAG_FRAMES = 10
_ROUNDING_SECONDS = 1e-6
"""Times are kept to the microsecond: a sample taken on the dot must not count as one of the step before."""
_MOST_CELLS = 65_536
"""Frames that are written at once take this many GPUs together."""
_NOWHERE = -1


class Table(NamedTuple):
    """Samples, ordered by time."""

    columns: Places
    """Whose: the GPU's place in the session."""
    times: Array
    values: Mapping[str, Array]

    def until(self, end: float) -> Table:
        """Those before a moment."""
        count = int(np.searchsorted(self.times, end))
        if count == len(self.times):
            return self
        values = {name: found[:count] for name, found in self.values.items()}
        return Table(self.columns[:count], self.times[:count], values)


class Rows(NamedTuple):
    """Steps that are complete, one row each."""

    first: int
    """The number of the first of them, counting from 0."""
    values: Mapping[str, Array]
    """By quantity a column for each GPU; NaN where nothing is known."""
    delivered: NDArray[np.bool_]
    """A column for each node: whether it was heard of."""

    @property
    def length(self) -> int:
        """How many steps."""
        return len(self.delivered)


class Beat:
    """Which step each frame of one node belongs to.

    A frame belongs to the step it was taken in. Only when the node samples as often as the session has steps, and its
    moments fall close to where one step ends and the next begins, that would leave steps empty and give others two
    frames, by chance. So a node in step stays in step: the frame after one interval gets the next step, up to half an
    interval early or late. No frame serves two steps, and a frame that was never taken leaves its step empty.
    """

    def __init__(self) -> None:
        self._last = _NOWHERE
        self._before = math.nan
        self._recent: Array = np.empty(0)
        """The newest positions, since a short stretch says little about the pace."""
        self._even = False

    def steps(self, positions: Array) -> Places:
        """The steps of frames at these places in time, counted in intervals since the session's start."""
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
        if self._last != _NOWHERE:
            passed = math.floor(position - self._before + 0.5)
            wanted = self._last + passed
            edge = math.floor(position + 0.5)
            if passed and edge - 1 <= wanted <= edge:
                step = wanted
        self._last, self._before = max(step, self._last), position
        return self._last


def _is_even(positions: Array) -> bool:
    """Whether frames come once an interval; over several frames jitter hardly counts, from one to the next gaps do not."""
    lags = {1, min(_LAG_FRAMES, len(positions) - 1)}
    paces = [float(np.median(positions[lag:] - positions[:-lag])) / lag for lag in lags]
    return any(abs(pace - 1.0) <= _EVEN for pace in paces)


class Grid:
    """Collects samples and gives whole steps as soon as nothing can come for them any more."""

    def __init__(
        self,
        *,
        start: float,
        interval_seconds: float,
        steps: int,
        nodes: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """Begin a session.

        Args:
            start: When its first step begins, in epoch seconds.
            interval_seconds: How long a step is.
            steps: How many there are.
            nodes: For each GPU the place of its node.
            names: The quantities.
        """
        self._start = start
        self._interval = interval_seconds
        self._steps = steps
        self._nodes = np.asarray(nodes, np.int64)
        self._names = tuple(names)
        self._beats = [Beat() for _ in range(max(nodes, default=-1) + 1)]
        self._done = 0
        self._most_rows = max(16, _MOST_CELLS // max(1, len(nodes)))
        self._waiting = _Placed(
            np.empty(0, np.int64), np.empty(0, np.int64), {name: np.empty(0) for name in self._names}
        )

    def add(self, table: Table) -> Iterator[Rows]:
        """Take samples that are no older than those before, and give the steps that are complete."""
        if not len(table.times):
            return
        positions = (table.times - self._start + _ROUNDING_SECONDS) / self._interval
        steps = np.empty(len(positions), np.int64)
        nodes = self._nodes[table.columns]
        order = np.argsort(nodes, kind="stable")
        for of_node in np.split(order, np.flatnonzero(np.diff(nodes[order])) + 1):
            moments, which = np.unique(positions[of_node], return_inverse=True)
            steps[of_node] = self._beats[nodes[of_node[0]]].steps(moments)[which]
        self._waiting = self._waiting.and_then(_Placed(steps, table.columns, table.values))
        # What comes next was taken no earlier than the newest of these, and is at most one step late.
        yield from self._give(min(self._steps, int(positions[-1]) - 1))

    def finish(self) -> Iterator[Rows]:
        """Give the rest."""
        yield from self._give(self._steps)

    def _give(self, end: int) -> Iterator[Rows]:
        if end <= self._done:
            return
        complete, self._waiting = self._waiting.split(end)
        while self._done < end:
            stop = min(end, self._done + self._most_rows)
            part, complete = complete.split(stop)
            yield self._rows(part, stop)
            self._done = stop

    def _rows(self, part: _Placed, stop: int) -> Rows:
        count, first = stop - self._done, self._done
        kept = part.steps >= first
        rows, columns = part.steps[kept] - first, part.columns[kept]
        delivered = np.zeros((count, len(self._beats)), np.bool_)
        delivered[rows, self._nodes[columns]] = True
        values = {}
        for name in self._names:
            matrix = np.full((count, len(self._nodes)), np.nan)
            found = part.values[name][kept]
            known = ~np.isnan(found)
            matrix[rows[known], columns[known]] = found[known]  # of several the newest, which is the last
            values[name] = matrix
        return Rows(first, values, delivered)


class _Placed(NamedTuple):
    """Samples with their steps, ordered by time."""

    steps: Places
    columns: Places
    values: Mapping[str, Array]

    def and_then(self, later: _Placed) -> _Placed:
        if not len(self.steps):
            return later
        return _Placed(
            np.concatenate((self.steps, later.steps)),
            np.concatenate((self.columns, later.columns)),
            {name: np.concatenate((found, later.values[name])) for name, found in self.values.items()},
        )

    def split(self, step: int) -> tuple[_Placed, _Placed]:
        """Those of steps before one, and the others."""
        before = self.steps < step
        if before.all():
            return self, self._only(~before)
        return self._only(before), self._only(~before)

    def _only(self, which: NDArray[np.bool_]) -> _Placed:
        return _Placed(
            self.steps[which],
            self.columns[which],
            {name: found[which] for name, found in self.values.items()},
        )
