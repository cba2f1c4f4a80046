"""A metric of many GPUs as colours, drawn by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpulse.export.report.canvas import GREY, SILENT
from gpulse.integrations.dask.drawing.charts import HeatMap, Panel, shortened
from gpulse.integrations.dask.drawing.paper import Paper
from gpulse.integrations.dask.drawing.units import written

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_heat_map(paper: Paper, axes: Axes, panel: Panel, found: HeatMap) -> None:
    """Draw a row for each series, in grey where nothing is known of it, and what the colours mean."""
    import matplotlib as mpl  # noqa: PLC0415  an extra

    count = len(found.labels)
    image = axes.imshow(
        np.ma.masked_invalid(found.cells),
        aspect="auto",
        cmap=mpl.colormaps["viridis"].with_extremes(bad=SILENT),
        vmin=panel.axis.low,
        vmax=panel.axis.high,
        interpolation="none",
        extent=(found.start, found.end, count, 0),
    )
    axes.set_facecolor(SILENT)
    place = axes.get_position()
    bar = paper.figure.add_axes((place.x1 + 0.15 / paper.width, place.y0, 0.14 / paper.width, place.height))
    scale = paper.figure.colorbar(image, cax=bar, ticks=list(panel.axis.ticks))
    scale.outline.set_visible(False)
    scale.ax.set_yticklabels([written(value) for value in panel.axis.ticks])
    scale.ax.tick_params(length=0, colors=GREY, labelsize=9)
    _draw_rows(axes, found, place.height * paper.height)


def _draw_rows(axes: Axes, found: HeatMap, inches: float) -> None:
    """Who is where: each row by its name, or each worker where there is no room for that."""
    ticks = found.ticks(int(inches * 5))
    axes.set_yticks([middle for middle, _ in ticks])
    axes.set_yticklabels([shortened(name, 20) for _, name in ticks], fontsize=9)
    for edge in found.edges:
        axes.axhline(edge, color="white", linewidth=0.8)
