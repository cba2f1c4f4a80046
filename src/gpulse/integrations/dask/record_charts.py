"""Charts of records: build lines and boxes of a worker or a whole cluster, and draw them to a file, the screen or a notebook."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from gpulse.charts.chart_files import FORMATS, replace_chart_file
from gpulse.charts.chart_model import (
    MAX_COLUMNS,
    MAX_LANES,
    MAX_LINES,
    Array,
    Axis,
    Box,
    Boxes,
    BoxRow,
    Chart,
    ChartGap,
    ChartPage,
    ChartPanel,
    HeatMap,
    arrange_lines,
    make_axis,
    make_line,
    runs_between_gaps,
)
from gpulse.charts.html_page import page
from gpulse.charts.matplotlib_renderer import draw_figure, render_figure
from gpulse.charts.style import panel_height
from gpulse.errors import RecordingError
from gpulse.integrations.dask import record_selection
from gpulse.integrations.dask.csv_files import WorkerTable
from gpulse.integrations.dask.record_selection import (
    GraphTime,
    MetricValues,
    RecordSelection,
    build_graph_spans,
    check_job,
    merge_worker_times,
    remove_short_overlaps,
    select_record,
)
from gpulse.integrations.dask.trackable_metrics import ArgumentError, find_unit
from gpulse.model.formatting import short_duration
from gpulse.model.safe_text import printable

_BOXES_PER_INCH = 25
_LANE_INCHES = 0.2
_ROWS_PER_INCH = 16
_SLACK_STEPS = 1.25
"""Workers measure at different times: graphs that overlap by no more ran one after the other."""
_MAX_TITLE_LENGTH = 60
_PAGE_PIXELS, _MAX_PANEL_PIXELS = 1340, 560
"""Width of the panels of a page on a common screen, and the height of a panel that fits on it."""

Size = tuple[float, float]
"""Width and height of a picture in inches."""


class _PanelRow(NamedTuple):
    """One series of a panel."""

    label: str
    group: str
    selected: RecordSelection
    values: Array


def build_lines_picture(table: WorkerTable, job: int | None, metrics: Sequence[str], size: Size) -> ChartPage:
    """Return a line for each GPU of a worker."""
    selected = select_record(table, job, metrics)
    inches = _panel_inches(size, len(metrics))
    time = _find_time_range([selected])
    panels = [
        _build_panel(found.metric, list(_build_rows("", selected, found)), time, inches)
        for found in selected.metrics
    ]
    return _build_worker_picture(table, job, selected, panels, "", size)


def build_boxes_picture(
    table: WorkerTable, job: int | None, metrics: Sequence[str], freq: int, size: Size
) -> ChartPage:
    """Return boxes of each GPU of a worker, each for some records."""
    selected = select_record(table, job, metrics)
    inches = _panel_inches(size, len(metrics))
    box_columns = [
        1 if _has_lanes(len(found.names), inches) else len(found.names) for found in selected.metrics
    ]
    most = max(8, int(size[0] * _BOXES_PER_INCH / max([1, *box_columns])))
    records = freq * max(1, -(-len(selected.times) // (freq * most)))
    panels = [_build_box_panel(selected, found, records, inches) for found in selected.metrics]
    note = f"; each box shows the interquartile range of {_format_count(records, 'record')}, and its whiskers reach the lowest and highest values"
    return _build_worker_picture(table, job, selected, panels, note, size)


def build_cluster_picture(
    tables: Mapping[int, WorkerTable], job: int | None, metrics: Sequence[str], folder: str, size: Size
) -> ChartPage:
    """Return all workers together: lines of a few GPUs, a heat map of more."""
    every = {
        index: select_record(table, job, [metric for metric in metrics if metric in table.tracked])
        for index, table in tables.items()
    }
    check_job(job, set().union(*(selected.jobs for selected in every.values())), folder)
    selections = {index: selected for index, selected in every.items() if len(selected.times)}
    step = float(np.median([selected.step for selected in selections.values()] or [1.0]))
    time = _find_time_range(list(selections.values()))
    inches = _panel_inches(size, len(metrics))
    graphs = merge_worker_times((time for selected in selections.values() for time in selected.graphs), step)
    return _build_picture(
        f"{printable(folder, _MAX_TITLE_LENGTH)}: {_format_count(len(selections), 'worker')}",
        _format_duration(time[1] - time[0]),
        job,
        time,
        remove_short_overlaps(graphs, _SLACK_STEPS * step),
        [_build_cluster_panel(metric, selections, time, inches) for metric in metrics],
        step,
        size,
    )


def _build_worker_picture(
    table: WorkerTable,
    job: int | None,
    selected: RecordSelection,
    panels: Sequence[ChartPanel],
    note: str,
    size: Size,
) -> ChartPage:
    check_job(job, selected.jobs, table.source)
    start, end = _find_time_range([selected])
    every = f", one every {selected.step:.3g} s" if len(selected.times) > 1 else ""
    return _build_picture(
        printable(table.source.removesuffix(".csv"), _MAX_TITLE_LENGTH),
        f"{_format_duration(end - start)}, {_format_count(len(selected.times), 'record')}{every}{note}",
        job,
        (start, end),
        selected.graphs,
        panels,
        selected.step,
        size,
    )


def _build_picture(
    title: str,
    note: str,
    job: int | None,
    time: tuple[float, float],
    graphs: Sequence[GraphTime],
    panels: Sequence[ChartPanel],
    step: float,
    size: Size,
) -> ChartPage:
    found = build_graph_spans(graphs, with_jobs=job is None)
    cell_seconds = (time[1] - time[0]) / MAX_COLUMNS
    if cell_seconds > step and any(isinstance(panel.content, HeatMap) for panel in panels):
        note += f"; each cell shows the maximum over {_format_duration(cell_seconds)}"
    if found.unlabelled:
        note += f"; at most {record_selection.MAX_LANES} graphs are labeled at a time; up to {found.unlabelled} more ran at the same time"
    chart = Chart(
        *time,
        tuple(_with_page_height(panel, size, len(panels)) for panel in panels),
        spans=found.spans,
        spans_title="job.graph" if job is None else "graph",
        marks=found.marks,
        clock="elapsed",
        time_title="time since monitoring started",
    )
    return ChartPage(title if job is None else f"{title}, job {job}", note, (chart,))


def _find_time_range(selections: Sequence[RecordSelection]) -> tuple[float, float]:
    """Return start and end of the chart: of the first and the last record."""
    known = [selected for selected in selections if len(selected.times)]
    if not known:
        return 0.0, 1.0
    ends = [float(selected.times[-1]) + selected.step for selected in known]
    return min(float(selected.times[0]) for selected in known), max(ends)


def _panel_inches(size: Size, count: int) -> float:
    """Return the approximate height of each of `count` panels in a chart of that size."""
    return (size[1] - 1.7) / max(1, count) - 0.5


def _with_page_height(panel: ChartPanel, size: Size, count: int) -> ChartPanel:
    """Return a panel with the same proportions on a page as in a chart of that size, unless it needs more height."""
    pixels = _panel_inches(size, count) * _PAGE_PIXELS / size[0]
    return replace(panel, height=max(panel_height(panel), min(_MAX_PANEL_PIXELS, pixels)))


def _has_lanes(count: int, inches: float) -> bool:
    """Return whether `count` rows get a lane each in a panel of this height."""
    return count > MAX_LINES and inches >= _LANE_INCHES * count


def _build_cluster_panel(
    metric: str, selections: Mapping[int, RecordSelection], time: tuple[float, float], inches: float
) -> ChartPanel:
    rows = [
        row
        for index, selected in selections.items()
        for found in selected.metrics
        if found.metric == metric
        for row in _build_rows(f"worker {index}", selected, found)
    ]
    if len(rows) <= max(MAX_LINES, inches * _ROWS_PER_INCH):
        return _build_panel(metric, rows, time, inches)
    highest = [_merge_rows(name, list(several)) for name, several in groupby(rows, key=lambda row: row.group)]
    remark = ", maximum over each worker's GPUs" if len(highest) < len(rows) else ""
    return _build_panel(metric, highest, time, inches, remark)


def _build_rows(group: str, selected: RecordSelection, found: MetricValues) -> Iterator[_PanelRow]:
    for place, name in enumerate(found.names):
        label = f"{group} {name}".strip() or printable(found.metric, _MAX_TITLE_LENGTH)
        yield _PanelRow(label, group, selected, found.values[:, place])


def _merge_rows(group: str, rows: Sequence[_PanelRow]) -> _PanelRow:
    """Merge the rows of a worker into one, when there is no room for each."""
    return _PanelRow(group, group, rows[0].selected, np.fmax.reduce([row.values for row in rows]))


def _build_panel(
    metric: str, rows: Sequence[_PanelRow], time: tuple[float, float], inches: float, remark: str = ""
) -> ChartPanel:
    """Return a metric as lines, lanes or a heat map, whichever has room."""
    axis = _build_axis(metric, [row.values for row in rows])
    title = printable(metric, _MAX_TITLE_LENGTH)
    if len(rows) <= MAX_LINES or (len(rows) <= MAX_LANES and _has_lanes(len(rows), inches)):
        lines = [make_line(row.label, row.selected.times, row.values, row.selected.gap) for row in rows]
        gaps = _find_gaps([row.selected for row in rows], *time)
        return ChartPanel(title, arrange_lines(lines, *time), axis, gaps, remark)
    cells = np.array([_compute_heat_map_cells(row, *time) for row in rows])
    labels, groups = tuple(row.label for row in rows), tuple(row.group for row in rows)
    return ChartPanel(title, HeatMap(labels, *time, cells, groups), axis, remark=remark)


def _build_box_panel(selected: RecordSelection, found: MetricValues, freq: int, inches: float) -> ChartPanel:
    """Return a panel of one worker's metric, with a box per `freq` records of each GPU."""
    rows = tuple(
        BoxRow(row.label, tuple(_build_boxes(selected, row.values, freq)))
        for row in _build_rows("", selected, found)
    )
    content = Boxes(rows, _has_lanes(len(rows), inches))
    axis, gaps = (
        _build_axis(found.metric, [found.values]),
        _find_gaps([selected], *_find_time_range([selected])),
    )
    return ChartPanel(printable(found.metric, _MAX_TITLE_LENGTH), content, axis, gaps)


def _find_gaps(selections: Sequence[RecordSelection], start: float, end: float) -> tuple[ChartGap, ...]:
    """Return the times without records, with the lines that lack them."""
    job = next((selected.job for selected in selections), None)
    reason = "not measured" if job is None else f"no records of job {job}"
    lacking: dict[tuple[float, float], list[int]] = {}
    for row, selected in enumerate(selections):
        times = selected.times
        ends = [float(times[run.stop - 1]) + selected.step for run in runs_between_gaps(times, selected.gap)]
        begins = [float(times[run.start]) for run in runs_between_gaps(times, selected.gap)]
        for gap in zip([start, *ends], [*begins, end], strict=True):
            if gap[1] - gap[0] > selected.gap:
                lacking.setdefault(gap, []).append(row)
    return tuple(
        ChartGap(*gap, reason, () if len(rows) == len(selections) else tuple(rows))
        for gap, rows in sorted(lacking.items())
    )


def _build_axis(metric: str, values: Sequence[Array]) -> Axis:
    """Return the axis of a metric: utilization is drawn up to 100 %, and counters need not begin at zero."""
    unit = find_unit(metric)
    return make_axis(
        unit or "1",
        *values,
        is_whole=metric == "compute-util" or "utilization" in metric,
        from_zero=bool(unit) and not metric.endswith("_total"),
    )


def _build_boxes(selected: RecordSelection, values: Array, freq: int) -> Iterator[Box]:
    times = selected.times
    for run in runs_between_gaps(times, selected.gap):
        for begin in range(run.start, run.stop, freq):
            part = slice(begin, min(begin + freq, run.stop))
            known = values[part][~np.isnan(values[part])]
            if len(known):
                low, q1, median, q3, high = np.percentile(known, (0, 25, 50, 75, 100)).tolist()
                after = float(times[part.stop]) if part.stop < len(times) else math.inf
                end = min(float(times[part.stop - 1]) + selected.step, after)
                yield Box(float(times[begin]), end, low, q1, median, q3, high, len(known))


def _compute_heat_map_cells(row: _PanelRow, start: float, end: float) -> Array:
    """Return the highest values of the columns of a heat map; a value holds until the next, up to a gap."""
    width = (end - start) / MAX_COLUMNS
    places = np.clip(((row.selected.times - start) / width).astype(np.int64), 0, MAX_COLUMNS - 1)
    cells = np.full(MAX_COLUMNS, np.nan)
    np.fmax.at(cells, places, row.values)
    seen = np.zeros(MAX_COLUMNS, np.bool_)
    seen[places] = True
    columns = np.arange(MAX_COLUMNS)
    newest = np.maximum.accumulate(np.where(seen, columns, -1))
    is_held = ~seen & (newest >= 0) & (columns - newest < math.ceil(row.selected.gap / width))
    return np.asarray(np.where(is_held, cells[np.maximum(newest, 0)], cells), np.float64)


def _format_duration(seconds: float) -> str:
    """Format a duration so that it cannot be mistaken for a time of day: `45 s`, `2:00 min`, `2:13:05 h`."""
    unit = "" if seconds < 60 or seconds >= 86400 else " min" if seconds < 3600 else " h"
    return f"{short_duration(seconds)}{unit}"


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


_SILENT_BACKENDS = frozenset(("agg", "cairo", "pdf", "pgf", "ps", "svg", "template"))


def check_chart_path(path: str | os.PathLike[str]) -> Path:
    """Check that a chart can be drawn to a path, before any time is spent.

    Raises:
        ArgumentError: The extension is not supported, or no file can be created there.
    """
    found = Path(path)
    kind = found.suffix.lower()
    if kind != ".html" and kind[1:] not in FigureCanvasBase.get_supported_filetypes():
        raise ArgumentError(
            f"cannot draw {found.name!r}: the name must end with one of {', '.join(FORMATS)}",
            hint=f"save={f'{found.stem}.png'!r}",
        )
    if not found.parent.is_dir():
        raise ArgumentError(
            f"there is no directory {found.parent}", hint="create the directory first, or choose another file"
        )
    if not os.access(found.parent, os.W_OK | os.X_OK) or found.is_dir():
        raise ArgumentError(
            f"cannot write to {found}: it is a directory, or you have no permission to write there",
            hint="choose another file",
        )
    return found


def save_chart(picture: ChartPage, size: tuple[float, float], path: Path) -> Figure:
    """Draw to a file, which is replaced once the new one is complete.

    Raises:
        ArgumentError: Such a file cannot be drawn here.
        RecordingError: The file cannot be written.
    """
    figure = _draw_figure(picture, size)
    kind = path.suffix.lower()[1:]
    if kind == "html":
        content = page(picture.title, picture.note, picture.charts).encode()
    else:
        try:
            content = render_figure(figure, kind)
        except (OSError, RuntimeError, ValueError) as error:  # kinds that need other programs
            hint = f"use one of {', '.join(FORMATS)}"
            raise ArgumentError(f"cannot draw a .{kind} file: {error}", hint=hint) from error
    try:
        replace_chart_file(path, content)
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {error.strerror}", hint="choose another file") from error
    return figure


def show_chart(picture: ChartPage, size: tuple[float, float]) -> Figure:
    """Draw into a window or a notebook's cell, and nowhere when there is neither."""
    backend = mpl.get_backend().lower()
    if backend in _SILENT_BACKENDS:
        return _draw_figure(picture, size)
    if "inline" in backend:
        return _display_figure(_draw_figure(picture, size))
    from matplotlib import pyplot as plt  # noqa: PLC0415  chooses a window system, which files need not

    figure = draw_figure(picture, plt.figure(figsize=size, dpi=100, facecolor="white"))
    plt.show()
    if not mpl.is_interactive():
        plt.close(figure)
    return figure


def _draw_figure(picture: ChartPage, size: tuple[float, float]) -> Figure:
    return draw_figure(picture, Figure(figsize=size, dpi=100, facecolor="white"))


def _display_figure(figure: Figure) -> Figure:
    """Show a figure in a notebook now, and not a second time as the result of the same cell."""
    import_module("IPython.display").display(figure)
    vars(figure)["_ipython_display_"] = partial(_display_in_other_cells, _current_cell())
    return figure


def _display_in_other_cells(cell: int) -> None:
    """Do nothing in the cell that showed the figure already; leave others to IPython."""
    if _current_cell() != cell:
        raise NotImplementedError


def _current_cell() -> int:
    """Return the number of the notebook's cell that runs."""
    return int(import_module("IPython").get_ipython().execution_count)
