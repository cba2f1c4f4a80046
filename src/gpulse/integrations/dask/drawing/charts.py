"""What a picture shows: panels under each other that share the time, and the graphs above them. No drawing in here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulse.export.curves import printable
from gpulse.integrations.dask.drawing.graphs import Band
from gpulse.integrations.dask.drawing.pieces import Piece, pieces, runs
from gpulse.integrations.dask.drawing.selection import Measured, Selection
from gpulse.integrations.dask.drawing.units import Axis, axis_of, written

Array = NDArray[np.float64]

_MOST_POINTS = 1500
_MOST_TOGETHER = 4
_LANE_INCHES = 0.2
_MAP_COLUMNS = 600


class Curve(NamedTuple):
    """One line."""

    label: str
    pieces: tuple[Piece, ...]


class Lines(NamedTuple):
    """Curves that share an axis."""

    curves: tuple[Curve, ...]
    apart: bool
    """Whether each has a lane of its own: more than a few on top of each other cannot be followed."""


class Box(NamedTuple):
    """Some records of one GPU: from the lowest value to the highest, and the middle half of them."""

    start: float
    end: float
    low: float
    q1: float
    median: float
    q3: float
    high: float
    records: int


class BoxRow(NamedTuple):
    """The boxes of one GPU."""

    label: str
    boxes: tuple[Box, ...]


class Boxes(NamedTuple):
    """Boxes that share an axis."""

    rows: tuple[BoxRow, ...]
    apart: bool


class HeatMap(NamedTuple):
    """A row a GPU or a worker, as colours."""

    labels: tuple[str, ...]
    groups: tuple[tuple[str, int], ...]
    """Rows that belong together: what they are called, and how many."""
    start: float
    end: float
    cells: Array
    """The highest value in each; NaN where nothing is known."""

    @property
    def cell_seconds(self) -> float:
        """For how long a cell stands."""
        return (self.end - self.start) / _MAP_COLUMNS

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Names of rows with their middles; those of groups where there is no room for each, and of those some."""
        found = [(place + 0.5, label) for place, label in enumerate(self.labels)]
        if len(found) > most and len(self.groups) > 1:
            ends = list(accumulate(count for _, count in self.groups))
            found = [(end - count / 2, name) for end, (name, count) in zip(ends, self.groups, strict=True)]
        return found[:: -(-len(found) // max(1, most)) or 1]

    @property
    def edges(self) -> list[int]:
        """Where a group of several rows ends and another begins."""
        ends = list(accumulate(count for _, count in self.groups))
        return ends[:-1] if len(ends) < len(self.labels) else []


Content = Lines | Boxes | HeatMap


class Panel(NamedTuple):
    """One metric."""

    metric: str
    axis: Axis
    content: Content
    remark: str = ""

    @property
    def title(self) -> str:
        """The metric with its unit."""
        unit = f" ({self.axis.unit})" if self.axis.unit else ""
        return f"{shortened(self.metric, 60)}{unit}{self.remark}"

    @property
    def range_words(self) -> str:
        """From where to where its axis goes."""
        return f"{written(self.axis.low)} to {written(self.axis.high)} {self.axis.unit}".strip()

    @property
    def has_lanes(self) -> bool:
        """Whether each of its curves or boxes has a lane of its own."""
        return not isinstance(self.content, HeatMap) and self.content.apart

    @property
    def labels(self) -> tuple[str, ...]:
        """What its curves, boxes or rows are called."""
        match self.content:
            case Lines(curves):
                return tuple(curve.label for curve in curves)
            case Boxes(rows):
                return tuple(row.label for row in rows)
            case HeatMap(labels):
                return labels


class Chart(NamedTuple):
    """A whole picture."""

    title: str
    note: str
    start: float
    end: float
    bands: tuple[Band, ...]
    panels: tuple[Panel, ...]

    @property
    def lanes(self) -> int:
        """How many graphs ran at the same time, as far as they are drawn apart."""
        return max((band.lane + 1 for band in self.bands), default=0)

    @property
    def more(self) -> int:
        """How many more ran at the same time than are drawn apart."""
        return max((band.more for band in self.bands), default=0)


def shortened(text: str, most: int) -> str:
    """Foreign text, harmless and no longer than that."""
    clean = printable(text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def span(selections: Iterable[Selection]) -> tuple[float, float]:
    """From when to when a picture goes: until nothing more is known."""
    known = [
        (float(found.times[0]), float(found.times[-1]) + found.step)
        for found in selections
        if len(found.times)
    ]
    if not known:
        return 0.0, 1.0
    return min(start for start, _ in known), max(end for _, end in known)


class Row(NamedTuple):
    """One series."""

    label: str
    group: str
    selected: Selection
    values: Array


def lines_panel(metric: str, rows: Sequence[Row], inches: float) -> Panel:
    """A metric as lines, in a panel about so high."""
    axis = _axis(metric, [row.values for row in rows])
    curves = [
        Curve(
            shortened(row.label, 40),
            tuple(pieces(row.selected.times, row.values / axis.factor, row.selected.gap, _MOST_POINTS)),
        )
        for row in rows
    ]
    return Panel(metric, axis, Lines(tuple(curves), has_lanes(len(curves), inches)))


def has_lanes(count: int, inches: float) -> bool:
    """Whether so many curves get a lane each in a panel about so high."""
    return count > _MOST_TOGETHER and inches >= _LANE_INCHES * count


def box_panel(selected: Selection, measured: Measured, freq: int, inches: float) -> Panel:
    """A metric of one worker, a box for so many records of each GPU."""
    axis = _axis(measured.metric, [measured.values])
    rows = [
        BoxRow(shortened(name, 40), tuple(_boxes(selected, measured.values[:, place] / axis.factor, freq)))
        for place, name in enumerate(measured.names)
    ]
    return Panel(measured.metric, axis, Boxes(tuple(rows), has_lanes(len(rows), inches)))


def map_panel(metric: str, rows: Sequence[Row], start: float, end: float) -> Panel:
    """A metric as colours."""
    axis = _axis(metric, [row.values for row in rows])
    cells = np.full((len(rows), _MAP_COLUMNS), np.nan)
    for place, row in enumerate(rows):
        cells[place] = _cells(row.selected, row.values / axis.factor, start, end)
    groups = tuple((name, len(list(several))) for name, several in groupby(rows, key=lambda row: row.group))
    return Panel(metric, axis, HeatMap(tuple(row.label for row in rows), groups, start, end, cells))


def _axis(metric: str, values: Sequence[Array]) -> Axis:
    known = [found[~np.isnan(found)] for found in values]
    known = [found for found in known if len(found)]
    if not known:
        return axis_of(metric, 0.0, 0.0)
    return axis_of(
        metric, min(float(found.min()) for found in known), max(float(found.max()) for found in known)
    )


def _boxes(selected: Selection, values: Array, freq: int) -> Iterator[Box]:
    for run in runs(selected.times, selected.gap):
        for begin in range(run.start, run.stop, freq):
            part = slice(begin, min(begin + freq, run.stop))
            known = values[part][~np.isnan(values[part])]
            if len(known):
                low, q1, median, q3, high = (
                    float(found) for found in np.percentile(known, (0, 25, 50, 75, 100))
                )
                start, last = float(selected.times[part.start]), float(selected.times[part.stop - 1])
                after = float(selected.times[part.stop]) if part.stop < len(selected.times) else math.inf
                yield Box(start, min(last + selected.step, after), low, q1, median, q3, high, len(known))


def _cells(selected: Selection, values: Array, start: float, end: float) -> Array:
    """The highest values of the columns of a map; a moment holds until the next one."""
    width = (end - start) / _MAP_COLUMNS
    places = np.clip(((selected.times - start) / width).astype(np.int64), 0, _MAP_COLUMNS - 1)
    cells = np.full(_MAP_COLUMNS, np.nan)
    np.fmax.at(cells, places, values)
    return _held(cells, places, int(np.ceil(selected.gap / width)))


def _held(cells: Array, places: NDArray[np.int64], most: int) -> Array:
    """The same, with empty columns between two moments filled from the one before, as far as that holds."""
    if most <= 1 or not len(places):
        return cells
    seen = np.zeros(len(cells), np.bool_)
    seen[places] = True
    newest = np.maximum.accumulate(np.where(seen, np.arange(len(cells)), -1))
    is_held = ~seen & (newest >= 0) & (np.arange(len(cells)) - newest < most)
    held = np.where(is_held, cells[np.maximum(newest, 0)], cells)
    return np.asarray(held, np.float64)
