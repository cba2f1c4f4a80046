"""One quantity of many GPUs as colours: a row a GPU, time from left to right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpulse.export.report import words
from gpulse.export.report.canvas import GREY, PERCENT_TICKS, SILENT, WIDE
from gpulse.export.report.model import Report
from gpulse.export.session.quantities import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAP = "viridis"


def map_inches(count: int) -> float:
    """How high a map of so many GPUs is."""
    return min(7.0, max(1.8, 0.06 * count))


def draw_heat_map(
    figure: Figure, axes: Axes, report: Report, quantity: Quantity, top: float, inches: float
) -> None:
    """Draw a row for each GPU, in grey where nothing is known of it."""
    import matplotlib as mpl  # noqa: PLC0415  an extra

    cells = _held(report, quantity)
    colors = mpl.colormaps[_MAP].with_extremes(bad=SILENT)
    end = report.series.start + report.series.columns * report.series.width
    image = axes.imshow(
        np.ma.masked_invalid(cells),
        aspect="auto",
        cmap=colors,
        vmin=0,
        vmax=top,
        interpolation="none",
        extent=(report.series.start, end, len(report.gpus), 0),
    )
    axes.set_xlim(report.start, max(report.end, report.start + report.interval_seconds))
    axes.set_facecolor(SILENT)
    _node_ticks(axes, report, inches)
    down = axes.get_position()
    bar = figure.add_axes((down.x1 + 0.12 / WIDE, down.y0, 0.11 / WIDE, down.height))
    scale = figure.colorbar(image, cax=bar)
    scale.outline.set_visible(False)
    is_round = quantity.is_percent and top in PERCENT_TICKS
    scale.locator = mpl.ticker.FixedLocator(PERCENT_TICKS[top]) if is_round else mpl.ticker.MaxNLocator(4)
    scale.formatter = mpl.ticker.FuncFormatter(lambda value, _: words.value(quantity, value, short=True))
    scale.update_ticks()
    bar.tick_params(length=0, labelsize=8, colors=GREY)


def _held(report: Report, quantity: Quantity) -> NDArray[np.float64]:
    """The means; where a GPU only samples more slowly than the picture has columns, its last value goes on."""
    series = report.series
    cells = series.means(quantity.name, len(report.gpus))
    columns = np.arange(cells.shape[1])
    known = ~np.isnan(cells)
    last = np.maximum.accumulate(np.where(known, columns, -1), axis=1)
    held = np.where(last >= 0, np.take_along_axis(cells, np.maximum(last, 0), axis=1), np.nan)
    silent = np.zeros(cells.shape, np.bool_)
    for gap in report.gaps:
        first = int(np.ceil((gap.start - series.start) / series.width - 1e-6))
        stop = int((gap.end - series.start) / series.width + 1e-6)
        if stop <= first and gap.seconds >= series.width / 2:
            stop = first + 1
        silent[list(gap.gpus), max(0, first) : max(0, stop)] = True
    return np.where(known, cells, np.where(silent, np.nan, held))


def _node_ticks(axes: Axes, report: Report, inches: float) -> None:
    """Name nodes where their rows begin, as many as there is room for; a line between two of them."""
    begins: list[tuple[int, str]] = []
    for place, gpu in enumerate(report.gpus):
        if not begins or begins[-1][1] != gpu.node:
            begins.append((place, gpu.node))
    ends = [place for place, _ in begins[1:]] + [len(report.gpus)]
    if len(begins) * 0.12 <= inches:
        for place, _ in begins[1:]:
            axes.axhline(place, color="white", linewidth=0.8)
    step = int(np.ceil(len(begins) * 0.15 / inches))
    named = [
        ((begin + end) / 2, words.shortened(name, 20))
        for (begin, name), end in zip(begins, ends, strict=True)
    ][::step]
    axes.set_yticks([middle for middle, _ in named])
    axes.set_yticklabels([name for _, name in named])
