"""What a page says about the moment under the pointer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from gpulse.export.curves import printable
from gpulse.integrations.dask.drawing.charts import Boxes, BoxRow, Chart, Curve, HeatMap, Panel, shortened
from gpulse.integrations.dask.drawing.marks import LEFT, Place, right_edge

_REACH_PIXELS = 12
_MOST_SERIES = 40


def told(chart: Chart, places: Sequence[Place]) -> dict[str, Any]:
    """Everything that can be said, as JSON."""
    return {
        "start": chart.start,
        "end": chart.end,
        "left": LEFT,
        "right": right_edge(chart),
        "bands": [[_time(band.start), _time(band.end), band.words] for band in chart.bands],
        "panels": [_panel(chart, panel, place) for panel, place in zip(chart.panels, places, strict=True)],
    }


def _panel(chart: Chart, panel: Panel, place: Place) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": shortened(panel.metric, 60),
        "unit": panel.axis.unit,
        "top": round(place.top, 1),
        "bottom": round(place.bottom, 1),
    }
    content = panel.content
    if isinstance(content, HeatMap):
        rows = [[_number(value) for value in row] for row in content.cells.tolist()]
        return {**said, "labels": list(map(printable, content.labels)), "rows": rows}
    if isinstance(content, Boxes):
        series = [_box_series(row) for row in content.rows[:_MOST_SERIES]]
    else:
        series = [_series(curve) for curve in content.curves[:_MOST_SERIES]]
    pixel = (chart.end - chart.start) / (right_edge(chart) - LEFT)
    reach = max([_REACH_PIXELS * pixel, *(0.75 * _spacing(one["t"]) for one in series)])
    return {**said, "series": series, "reach": reach}


def _series(curve: Curve) -> dict[str, Any]:
    points = [
        (moment, low, mean, high)
        for piece in curve.pieces
        for moment, low, mean, high in zip(*(array.tolist() for array in piece), strict=True)
    ]
    return {
        "name": curve.label,
        "t": [_time(moment) for moment, _, _, _ in points],
        "v": [_number(mean) for _, _, mean, _ in points],
        "w": [_range(low, high) if low != high else "" for _, low, _, high in points],
    }


def _box_series(row: BoxRow) -> dict[str, Any]:
    return {
        "name": row.label,
        "t": [_time((box.start + box.end) / 2) for box in row.boxes],
        "v": [_number(box.median) for box in row.boxes],
        "w": [f"half {_range(box.q1, box.q3)}, all {_range(box.low, box.high)}" for box in row.boxes],
    }


def _range(low: float, high: float) -> str:
    return f"{low:.4g} to {high:.4g}"


def _spacing(times: Sequence[float]) -> float:
    """The usual distance of two points."""
    distances = sorted(_distances(times))
    return distances[len(distances) // 2] if distances else 0.0


def _distances(times: Iterable[float]) -> Iterator[float]:
    yield from (later - sooner for sooner, later in pairwise(times))


def _time(moment: float) -> float:
    return round(moment, 3)


def _number(value: float) -> float | int | None:
    """Four digits are enough to read."""
    if math.isnan(value):
        return None
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short
