"""The three pictures: lines and boxes of a worker, and a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from gpulse.integrations.dask.drawing.charts import (
    Chart,
    HeatMap,
    Panel,
    Row,
    box_panel,
    has_lanes,
    lines_panel,
    map_panel,
    shortened,
    span,
)
from gpulse.integrations.dask.drawing.graphs import bands, in_turn
from gpulse.integrations.dask.drawing.selection import Measured, Selection, Stretch, check_job, select
from gpulse.integrations.dask.files import WorkerTable

_BOXES_PER_INCH = 25
_MOST_LINES = 8
"""Lines that share an axis; more become rows of colours."""
_ROWS_PER_INCH = 16
_SLACK_STEPS = 1.25
"""Workers look at different moments: graphs that overlap by no more ran one after the other."""


def lines_chart(table: WorkerTable, job: int | None, metrics: Sequence[str], height: float) -> Chart:
    """A line for each GPU of a worker."""
    selected = select(table, job, metrics)
    inches = panel_inches(height, len(metrics))
    time = span([selected])
    panels = []
    for measured in selected.metrics:
        rows = list(_rows("", selected, measured))
        is_seen = len(rows) <= _MOST_LINES or has_lanes(len(rows), inches)
        panels.append(
            lines_panel(measured.metric, rows, inches) if is_seen else map_panel(measured.metric, rows, *time)
        )
    return _of_worker(table, job, selected, panels, "")


def boxes_chart(
    table: WorkerTable, job: int | None, metrics: Sequence[str], freq: int, size: tuple[float, float]
) -> Chart:
    """Boxes of each GPU of a worker, in a picture that wide and high."""
    selected = select(table, job, metrics)
    width, inches = size[0], panel_inches(size[1], len(metrics))
    beside = [1 if has_lanes(len(found.names), inches) else len(found.names) for found in selected.metrics]
    most = max(8, int(width * _BOXES_PER_INCH / max([1, *beside])))
    records = freq * max(1, -(-len(selected.times) // (freq * most)))
    panels = [box_panel(selected, measured, records, inches) for measured in selected.metrics]
    note = f"; a box is the middle half of {_many(records, 'record')}, its strokes reach the lowest and the highest"
    return _of_worker(table, job, selected, panels, note)


def cluster_chart(
    tables: Mapping[int, WorkerTable], job: int | None, metrics: Sequence[str], folder: str, height: float
) -> Chart:
    """Lines of a few GPUs, rows of colours of more."""
    every = {
        index: select(table, job, [metric for metric in metrics if metric in table.tracked])
        for index, table in tables.items()
    }
    check_job(job, set().union(*(selected.jobs for selected in every.values())), folder)
    selections = {index: selected for index, selected in every.items() if len(selected.times)}
    step = float(np.median([selected.step for selected in selections.values()] or [1.0]))
    start, end = span(selections.values())
    inches = panel_inches(height, len(metrics))
    said = "" if job is None else f", job {job}"
    chart = Chart(
        f"{shortened(folder, 60)}: {_many(len(selections), 'worker')}{said}",
        _length(start, end),
        start,
        end,
        bands(in_turn(_together(selections.values(), step), _SLACK_STEPS * step), job is None),
        tuple(_cluster_panel(metric, selections, (start, end), inches) for metric in metrics),
    )
    return _explained(chart, step)


def panel_inches(height: float, count: int) -> float:
    """About how high each of so many panels is in a picture of that height."""
    return (height - 1.7) / max(1, count) - 0.5


def _of_worker(
    table: WorkerTable, job: int | None, selected: Selection, panels: Sequence[Panel], note: str
) -> Chart:
    check_job(job, selected.jobs, table.source)
    start, end = span([selected])
    said = "" if job is None else f", job {job}"
    every = f", one every {selected.step:.3g} s" if len(selected.times) > 1 else ""
    records = f"{_many(len(selected.times), 'record')}{every}"
    chart = Chart(
        f"{shortened(table.source.removesuffix('.csv'), 60)}{said}",
        f"{_length(start, end)}, {records}{note}",
        start,
        end,
        bands(selected.stretches, job is None),
        tuple(panels),
    )
    return _explained(chart, selected.step)


def _explained(chart: Chart, step: float) -> Chart:
    """With what a person has to know who reads it."""
    maps = [panel.content for panel in chart.panels if isinstance(panel.content, HeatMap)]
    note = chart.note
    if maps and maps[0].cell_seconds > step:
        note += f"; a cell is the highest value of {_length(0.0, maps[0].cell_seconds)}"
    if chart.more:
        note += f"; {chart.lanes} graphs are named at a time, and up to {chart.more} more at once"
    return chart._replace(note=note)


def _cluster_panel(
    metric: str, selections: Mapping[int, Selection], time: tuple[float, float], inches: float
) -> Panel:
    rows = [
        row
        for index, selected in selections.items()
        for measured in selected.metrics
        if measured.metric == metric
        for row in _rows(f"worker {index}", selected, measured)
    ]
    if len(rows) <= _MOST_LINES:
        return lines_panel(metric, rows, inches)
    if len(rows) <= inches * _ROWS_PER_INCH:
        return map_panel(metric, rows, *time)
    highest = [_highest(name, list(several)) for name, several in groupby(rows, key=lambda row: row.group)]
    remark = ", highest of each worker's GPUs" if len(highest) < len(rows) else ""
    return map_panel(metric, highest, *time)._replace(remark=remark)


def _rows(group: str, selected: Selection, measured: Measured) -> Iterator[Row]:
    for place, name in enumerate(measured.names):
        label = f"{group} {name}".strip() or measured.metric
        yield Row(label, group, selected, measured.values[:, place])


def _highest(group: str, rows: Sequence[Row]) -> Row:
    """Rows of a worker as one, where there is no room for each."""
    values = np.fmax.reduce([row.values for row in rows])
    return Row(group, group, rows[0].selected, values)


def _together(selections: Iterable[Selection], step: float) -> Iterator[Stretch]:
    """When each graph ran anywhere."""
    found: dict[tuple[int, int], list[Stretch]] = {}
    for stretch in sorted(
        (stretch for selected in selections for stretch in selected.stretches), key=lambda one: one.start
    ):
        before = found.setdefault((stretch.job, stretch.dag), [])
        if before and stretch.start <= before[-1].end + step:
            before[-1] = before[-1]._replace(end=max(before[-1].end, stretch.end))
        else:
            before.append(stretch)
    for several in found.values():
        yield from several


def _length(start: float, end: float) -> str:
    seconds = end - start
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
