"""The chart model: charts with panels that share a time axis; units, scales, round ticks and texts of times.

Renderers draw it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gpulse.model.formatting import local_offset_seconds

Clock = Literal["local", "elapsed"]

MAX_LINES = 4
"""Maximum number of lines that share an axis; more lines get a lane each."""
MAX_LANES = 16
"""Maximum number of lanes; more lines become a heat map."""
MAX_POINTS = 1500
"""Points of one line: about one per pixel of a screen."""
MAX_COLUMNS = 600
"""Columns of a heat map."""
Array = NDArray[np.float64]

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "ratio": ((0.01, "%"),),
    "percent": ((1.0, "%"),),
    "bytes": ((1024.0**4, "TiB"), (1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "bytes")),
    "bytes/second": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "bits/second": ((1e9, "Gb/s"), (1e6, "Mb/s"), (1.0, "b/s")),
    "hertz": ((1e6, "MHz"),),
    "watts": ((1.0, "W"),),
    "joules": ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J")),
    "celsius": ((1.0, "°C"),),
    "seconds": ((1.0, "s"), (1e-3, "ms")),
    "1/second": ((1e6, "millions/s"), (1.0, "1/s")),
    "1": ((1e9, "billions"), (1e6, "millions"), (1.0, "")),
}
"""Factors and names of each unit of the metric catalog, largest first."""
_ROUND_PERCENTS = {10.0: 5, 20.0: 4, 50.0: 5, 100.0: 4}
"""Upper ends of a percent axis, and the number of steps of each."""
_MAX_VALUE = 1e300
"""Larger numbers count as unknown, because their differences may overflow."""
_MIN_RANGE, _MIN_RELATIVE_RANGE = 1e-300, 1e-9
"""Values that differ by less are drawn as equal."""
_HEADROOM = 0.03
_OFFSET_STEP_SECONDS = 7 * 86400.0
"""Time changes (daylight saving) are further apart than this."""
_TIME_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400),
)


@dataclass(frozen=True)
class Axis:
    """Axis of values: unit, factor, range and ticks."""

    unit: str = ""
    factor: float = 1.0
    low: float = 0.0
    high: float = 1.0
    ticks: tuple[float, ...] = (0.0, 1.0)

    def drawn(self, values: Array) -> Array:
        """Return values in the unit of the axis; values that are too large to draw become NaN."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(np.abs(values) <= _MAX_VALUE, values, np.nan) / self.factor

    def share(self, drawn: float) -> float:
        """Return the position of a value on the axis: 0 at its lower end, 1 at its upper end."""
        return min(1.0, max(0.0, (drawn - self.low) / (self.high - self.low)))

    @property
    def top(self) -> float:
        """Upper end of a panel: slightly above the axis, so that a line at its end is fully visible; but exactly at 100%."""
        is_whole = self.unit == "%" and self.high == 100
        return self.high if is_whole else self.high + _HEADROOM * (self.high - self.low)

    @property
    def range_text(self) -> str:
        """Text such as `0 to 100 %`."""
        return f"{number_text(self.low)} to {number_text(self.high)} {self.unit}".strip()


def make_axis(
    unit: str,
    *values: Array,
    is_whole: bool = False,
    from_zero: bool = True,
    min_top: float = 0.0,
) -> Axis:
    """Build the axis for values of a unit.

    Args:
        unit: Unit of the metric catalog, `ratio` for ratios; any other text is used as the unit's name.
        values: All values on the axis.
        is_whole: Extend ratios and percents to 100%, because the distance to it matters.
        from_zero: Start at zero even if all values are far from it.
        min_top: Minimum of the upper end.
    """
    known = [part[np.isfinite(part) & (np.abs(part) <= _MAX_VALUE)] for part in values]
    known = [part for part in known if len(part)]
    lowest = min((float(part.min()) for part in known), default=0.0)
    highest = max(max((float(part.max()) for part in known), default=0.0), min_top)
    if unit in ("ratio", "percent") and lowest >= 0:
        factor = _SCALES[unit][0][0]
        top = highest / factor
        end = 100.0 if is_whole and top <= 100 else next((end for end in _ROUND_PERCENTS if top <= end), 0.0)
        if end:
            steps = _ROUND_PERCENTS[end]
            return Axis("%", factor, 0.0, end, tuple(end * step / steps for step in range(steps + 1)))
    scales = _SCALES.get(unit, ((1.0, unit),))
    most = max(abs(lowest), abs(highest))
    factor, name = next(((factor, name) for factor, name in scales if most >= factor), scales[-1])
    low = lowest if lowest < 0 or (not from_zero and lowest > 0.6 * highest) else 0.0
    return _round_axis(name, factor, low / factor, highest / factor)


def _round_axis(unit: str, factor: float, low: float, high: float) -> Axis:
    if high - low <= max(_MIN_RANGE, abs(low) * _MIN_RELATIVE_RANGE):
        high = low + max(1.0, abs(low) * 0.1)
    step = _round_step((high - low) / 4)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(unit, factor, low, high, _ticks(low, high, 5))


def _ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    step = _round_step((high - low) / most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(place * step for place in range(first, last + 1))


def _round_step(step: float) -> float:
    """Return the next round number: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= step * 0.999)


def number_text(value: float) -> str:
    """Format a number for an axis."""
    return f"{value:.10g}" if abs(value) < 1e15 else f"{value:.3g}"


def value_text(value: float, unit: str) -> str:
    """Format a value for a tooltip: `12.5 GB/s`."""
    short = float(f"{value:.4g}")
    return f"{number_text(short)} {unit}".strip()


def end_ticks(axis: Axis) -> list[tuple[float, str, str]]:
    """Return a few ticks of a horizontal axis with their texts and anchors, so that the texts do not overlap."""
    first, last = axis.ticks[0], axis.ticks[-1]
    ticks = axis.ticks if len(axis.ticks) <= 3 else (first, (first + last) / 2, last)
    anchors = ["start", *["middle"] * (len(ticks) - 2), "end"]
    return [
        (value, f"{number_text(value)} {axis.unit}".strip(), anchor)
        for value, anchor in zip(ticks, anchors, strict=False)
    ]


def time_ticks(start: float, end: float, clock: str, most: int = 8) -> list[tuple[float, str]]:
    """Return round times with their texts: local times, or seconds since a start."""
    step = next((step for step in _TIME_STEPS if (end - start) / step <= most), None)
    step = step or 86400.0 * math.ceil((end - start) / 86400 / most)
    offset = local_offset_seconds(start) if clock == "local" else 0.0
    first = math.ceil((start + offset) / step - 1e-9)
    last = math.floor((end + offset) / step + 1e-9)
    moments = [place * step - offset for place in range(first, last + 1)]
    if clock == "local":  # daylight saving may have changed in between
        moved = [moment + offset - local_offset_seconds(moment) for moment in moments]
        moments = [moment for moment in moved if start - 1e-6 <= moment <= end + 1e-6]
    return [(moment, time_text(moment, clock, start, end, step)) for moment in moments]


def time_text(moment: float, clock: str, start: float, end: float, step: float = 0.0) -> str:
    """Format a time on an axis from start to end; `step` is the distance of its ticks."""
    if clock == "elapsed":
        return _elapsed_text(moment, end, step)
    digits = _fraction_digits(step)
    moment = round(moment, digits)
    pattern = "%m-%d %H:%M" if end - start >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    try:
        text = time.strftime(pattern, time.localtime(moment))
    except (OverflowError, ValueError, OSError):
        return number_text(moment)
    return text + f"{moment % 1:.{digits}f}"[1:]


def local_offsets(start: float, end: float) -> list[tuple[float, int]]:
    """Return the UTC offsets of local time between two times, each with the time from which it applies."""
    found = [(start, local_offset_seconds(start))]
    moment = start
    while moment < end:
        after = min(moment + _OFFSET_STEP_SECONDS, end)
        if local_offset_seconds(after) != found[-1][1]:
            low, high = moment, after
            while high - low > 1:
                middle = (low + high) / 2
                low, high = (middle, high) if local_offset_seconds(middle) == found[-1][1] else (low, middle)
            found.append((float(round(high)), local_offset_seconds(after)))
        moment = after
    return found


def elapsed_unit(end: float) -> str:
    """Return the unit for elapsed times up to `end`."""
    return "s" if end < 120 else "min:s" if end < 3600 else "h:min"


def _elapsed_text(moment: float, end: float, step: float) -> str:
    digits = _fraction_digits(step)
    moment = round(moment, digits)
    whole, fraction = int(moment), f"{moment % 1:.{digits}f}"[1:]
    if end < 120:
        return f"{whole}{fraction}"
    if end < 3600:
        return f"{whole // 60}:{whole % 60:02}{fraction}"
    return f"{whole // 3600}:{whole // 60 % 60:02}" + (f":{whole % 60:02}{fraction}" if step < 60 else "")


def _fraction_digits(step: float) -> int:
    """Return the number of decimals that distinguish times one step apart, at most three."""
    return min(3, math.ceil(-math.log10(step) - 1e-9)) if 0 < step < 1 else 0


@dataclass(frozen=True, eq=False)
class ChartLine:
    """One quantity over time; NaN marks unknown values and breaks the line."""

    label: str
    times: Array
    values: Array
    low: Array | None = None
    """Lowest value that each point represents; None when a point is a single value."""
    high: Array | None = None
    color: str = ""
    """Name in `style.COLORS`; empty for the color of the line's position."""
    note: str = ""
    """Short text to the right of its lane, such as the range of its values."""

    def segments(self) -> Iterator[slice]:
        """Yield the parts of the line without unknown values."""
        known = np.isfinite(self.values)
        edges = np.flatnonzero(np.diff(np.concatenate(([False], known, [False]))))
        yield from (slice(int(start), int(end)) for start, end in edges.reshape(-1, 2))

    @property
    def is_empty(self) -> bool:
        """Whether there is no data."""
        return not np.isfinite(self.values).any()


@dataclass(frozen=True)
class Lines:
    """Lines that share an axis, or have a lane each with the same scale."""

    lines: tuple[ChartLine, ...]
    has_lanes: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the lines."""
        return tuple(line.label for line in self.lines)

    @property
    def is_empty(self) -> bool:
        """Whether there is no data."""
        return all(line.is_empty for line in self.lines)

    @property
    def has_notes(self) -> bool:
        """Whether any lane has a note beside it."""
        return self.has_lanes and any(line.note for line in self.lines)


@dataclass(frozen=True)
class Box:
    """Distribution of the values in a time interval: range, quartiles and median."""

    start: float
    end: float
    low: float
    q1: float
    median: float
    q3: float
    high: float
    count: int


@dataclass(frozen=True)
class BoxRow:
    """Boxes of one GPU or worker over time."""

    label: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Boxes:
    """Box plots over time that share an axis, or have a lane each with the same scale."""

    rows: tuple[BoxRow, ...]
    has_lanes: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the rows."""
        return tuple(row.label for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is no data."""
        return not any(row.boxes for row in self.rows)


@dataclass(frozen=True, eq=False)
class HeatMap:
    """One quantity of many GPUs or workers: one row each, time from left to right, values as colors."""

    labels: tuple[str, ...]
    start: float
    end: float
    cells: Array
    """One row per label, one column per time interval; NaN for unknown values."""
    groups: tuple[str, ...] = ()
    """Group of each row, such as its node; empty without groups."""

    def __post_init__(self) -> None:
        if self.cells.ndim != 2 or len(self.cells) != len(self.labels):
            raise ValueError(
                f"{len(self.labels)} labels do not match the shape of the cells, {self.cells.shape}"
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is no data."""
        return not np.isfinite(self.cells).any()

    @property
    def _group_sizes(self) -> list[tuple[str, int]]:
        return [(name, len(list(rows))) for name, rows in groupby(self.groups)]

    def row_ticks(self, most: int) -> list[tuple[float, str]]:
        """Return the centers and names of rows; names of groups when there is no room for every row."""
        found = [(place + 0.5, label) for place, label in enumerate(self.labels)]
        sizes = self._group_sizes
        if len(found) > most and len(sizes) > 1:
            ends = accumulate(size for _, size in sizes)
            found = [(end - size / 2, name) for end, (name, size) in zip(ends, sizes, strict=True)]
        return found[:: -(-len(found) // max(1, most)) or 1]

    @property
    def group_edges(self) -> list[int]:
        """Rows at which a new group begins; empty when every row is its own group."""
        ends = list(accumulate(size for _, size in self._group_sizes))
        return ends[:-1] if len(ends) < len(self.labels) else []


@dataclass(frozen=True)
class Quartiles:
    """Distribution of the values of one device."""

    low: float
    q1: float
    median: float
    q3: float
    high: float
    highest: float
    """Maximum, marked with a line; whiskers end at `low` and `high`."""


@dataclass(frozen=True)
class QuartileColumn:
    """One quantity of all devices."""

    title: str
    axis: Axis
    boxes: tuple[Quartiles | None, ...]
    """One per row; None without data."""


@dataclass(frozen=True)
class QuartileTable:
    """Box plots without a time axis: one row per device, quantities side by side."""

    labels: tuple[str, ...]
    columns: tuple[QuartileColumn, ...]
    note: str = ""
    """Explanation under the boxes."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no data."""
        return not any(box for column in self.columns for box in column.boxes)


PanelContent = Lines | Boxes | HeatMap | QuartileTable


@dataclass(frozen=True)
class ChartGap:
    """A time interval without data."""

    start: float
    end: float
    reason: str = ""
    rows: tuple[int, ...] = ()
    """Positions of the affected lines; empty for all."""
    color: str = "gap"
    """`gap`, or `away` when the recorder itself was not running."""


@dataclass(frozen=True)
class ChartPanel:
    """One quantity, or several with the same unit."""

    title: str
    content: PanelContent
    axis: Axis = field(default_factory=Axis)
    gaps: tuple[ChartGap, ...] = ()
    remark: str = ""
    height: float | None = None
    """Height in pixels; None for the default of its content."""

    @property
    def heading(self) -> str:
        """Title with the unit."""
        unit = f" ({self.axis.unit})" if self.axis.unit else ""
        return f"{self.title}{unit}{self.remark}"

    @property
    def has_lanes(self) -> bool:
        """Whether each of its lines or box rows has a lane."""
        return isinstance(self.content, Lines | Boxes) and self.content.has_lanes

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its lines, rows or devices."""
        return self.content.labels


@dataclass(frozen=True)
class ChartSpan:
    """A named time interval: a finding, a task graph."""

    start: float
    end: float
    label: str
    text: str = ""
    """Tooltip; empty for the label."""
    color: str = "band0"
    """Name in `style.COLORS`."""
    lane: int = 0
    is_shaded: bool = True
    """Whether the panels are tinted in this interval."""
    number: int = 0
    """Position among its kind: when there is no room for all labels, those of round numbers stay."""

    @property
    def middle(self) -> float:
        """The middle of the interval."""
        return (self.start + self.end) / 2


@dataclass(frozen=True)
class TimeMark:
    """A point in time: a vertical line through all panels."""

    time: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """Panels that share a time axis, with spans above them."""

    start: float
    end: float
    panels: tuple[ChartPanel, ...]
    title: str = ""
    spans: tuple[ChartSpan, ...] = ()
    spans_title: str = ""
    """Title of the spans; empty for self-explanatory spans, whose labels may be wider than the spans."""
    marks: tuple[TimeMark, ...] = ()
    clock: Clock = "local"
    """Whether times are epoch seconds, shown as local time, or seconds since a start."""
    time_title: str = ""

    def __post_init__(self) -> None:
        if not self.end > self.start:
            raise ValueError(f"the end of a chart ({self.end}) must be after its start ({self.start})")

    @property
    def lanes(self) -> int:
        """Number of lanes for the spans."""
        return max((span.lane + 1 for span in self.spans), default=0)

    @property
    def has_time(self) -> bool:
        """Whether any panel has a time axis."""
        return any(not isinstance(panel.content, QuartileTable) for panel in self.panels)


@dataclass(frozen=True)
class ChartPage:
    """A page of charts with a title: one file."""

    title: str
    note: str
    charts: tuple[Chart, ...]


def make_line(
    label: str, times: Array, values: Array, gap_seconds: float, *, color: str = "", most: int = MAX_POINTS
) -> ChartLine:
    """Return a line of at most about `most` points, broken at unknown values.

    Args:
        label: Name of the line.
        times: Time of each value, in order.
        values: The values; NaN when unknown.
        gap_seconds: Two values further apart than this have a gap between them.
        color: Name in `style.COLORS`.
        most: Maximum number of points.
    """
    parts = [
        _downsample(times[run], values[run], max(1, round(most * (run.stop - run.start) / len(times))))
        for run in runs_between_gaps(times, gap_seconds)
    ]
    if not parts:
        return ChartLine(label, np.empty(0), np.empty(0), color=color)
    joined = [_with_breaks([part[place] for part in parts]) for place in range(4)]
    moments, low, mean, high = joined
    for place in np.flatnonzero(np.isnan(moments)):
        moments[place] = (moments[place - 1] + moments[place + 1]) / 2
    is_range = bool((low[np.isfinite(low)] != high[np.isfinite(low)]).any())
    return ChartLine(label, moments, mean, low if is_range else None, high if is_range else None, color)


def arrange_lines(
    lines: Sequence[ChartLine], start: float, end: float, groups: Sequence[str] = ()
) -> Lines | HeatMap:
    """Arrange the lines of one quantity legibly: on one axis, with a lane each, or as a heat map.

    Args:
        lines: One per GPU or worker.
        start: Start of the chart.
        end: End of the chart.
        groups: Group of each line, such as its node.
    """
    if len(lines) <= MAX_LANES:
        return Lines(tuple(lines), has_lanes=len(lines) > MAX_LINES)
    cells = np.array([_cells(line, start, end) for line in lines])
    return HeatMap(tuple(line.label for line in lines), start, end, cells, tuple(groups))


def _cells(line: ChartLine, start: float, end: float) -> Array:
    """Return the column means of a heat map row; a value holds until the next one or a break."""
    width = (end - start) / MAX_COLUMNS
    inside = (line.times >= start) & (line.times <= end)
    places = np.clip(((line.times[inside] - start) / width).astype(np.int64), 0, MAX_COLUMNS - 1)
    values = line.values[inside]
    known = np.isfinite(values)
    counts = np.bincount(places[known], minlength=MAX_COLUMNS)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        cells = np.bincount(places[known], values[known], MAX_COLUMNS) / counts
    columns = np.arange(MAX_COLUMNS)
    seen, ends_known = np.zeros(MAX_COLUMNS, np.bool_), np.zeros(MAX_COLUMNS, np.bool_)
    seen[places] = True
    ends_known[places] = known  # the last point of a column decides whether its value holds
    newest = np.maximum.accumulate(np.where(seen, columns, -1))
    last = int(places.max(initial=-1))
    is_held = (newest >= 0) & (columns <= last) & ((newest == columns) | ends_known[newest])
    return np.where(is_held, cells[np.maximum(newest, 0)], np.nan)


def runs_between_gaps(times: Array, gap_seconds: float) -> Iterator[slice]:
    """Yield the runs of times between gaps."""
    if len(times):
        cuts = np.flatnonzero(np.diff(times) > gap_seconds) + 1
        yield from (slice(start, end) for start, end in pairwise([0, *map(int, cuts), len(times)]))


def _with_breaks(parts: Sequence[Array]) -> Array:
    """Join arrays with NaN in between."""
    spaced = [piece for part in parts for piece in (part, np.array([np.nan]))]
    return np.concatenate(spaced[:-1])


def _downsample(times: Array, values: Array, count: int) -> tuple[Array, Array, Array, Array]:
    """Return times, lowest values, means and highest values of about `count` points."""
    values = np.where(np.isfinite(values), values, np.nan)
    if len(times) <= count:
        return times, values, values, values
    edges = np.linspace(0, len(times), count, endpoint=False).astype(np.int64)
    known = ~np.isnan(values)
    counts = np.add.reduceat(known, edges, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), edges) / counts
    return (
        np.add.reduceat(times, edges) / np.diff(np.append(edges, len(times))),
        np.fmin.reduceat(values, edges),
        np.where(counts > 0, mean, np.nan),
        np.fmax.reduceat(values, edges),
    )


def visible_labels(spans: Sequence[ChartSpan], room: float) -> list[ChartSpan]:
    """Return the spans whose labels are shown: all, or only round numbers when there is no room for all.

    Args:
        spans: Spans of any lane, in any order.
        room: Width of the longest label in seconds.
    """
    lanes = sorted((span for span in spans if span.label), key=lambda span: (span.lane, span.start))
    return [
        span
        for _, in_lane in groupby(lanes, key=lambda span: span.lane)
        for span in _visible_in_lane(list(in_lane), room)
    ]


def _visible_in_lane(spans: Sequence[ChartSpan], room: float) -> list[ChartSpan]:
    wide = [span for span in spans if span.end - span.start >= room]
    narrow = [span for span in spans if span.end - span.start < room]
    some = next(some for some in _thinned(narrow) if _are_apart([span.middle for span in some], room))
    middles = np.array([span.middle for span in wide])
    return wide + [span for span in some if not (np.abs(middles - span.middle) < room).any()]


def _thinned(spans: Sequence[ChartSpan]) -> Iterator[list[ChartSpan]]:
    """Yield all spans, then every second, every fifth, every tenth and so on, and at last none."""
    for power in range(7):
        for times in (1, 2, 5):
            yield [span for span in spans if span.number % (times * 10**power) == 0]
    yield []


def _are_apart(middles: Sequence[float], room: float) -> bool:
    return all(later - sooner >= room for sooner, later in pairwise(middles))
