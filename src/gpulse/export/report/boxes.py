"""How each device fared: boxes of all quantities side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpulse.export.report import words
from gpulse.export.report.canvas import (
    COLORS,
    FOOT,
    GREY,
    LEFT,
    MOST_LANES,
    PALE,
    RIGHT,
    TITLE,
    WIDE,
    axes_at,
    top_of,
)
from gpulse.export.report.model import Figures, Report
from gpulse.export.session.quantities import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_BOXES = 64


class _Box(NamedTuple):
    """Who a row of boxes is about."""

    name: str
    figures: Figures


def _rows(report: Report) -> list[_Box]:
    """A row for each GPU; of many GPUs one for each node, and of many nodes those that did least."""
    if len(report.gpus) <= _MOST_BOXES:
        return [_Box(gpu.short, gpu.statistics) for gpu in report.gpus]
    nodes = [_Box(node.name, node.statistics) for node in report.nodes]
    if len(nodes) <= _MOST_BOXES:
        return nodes
    nodes.sort(key=lambda box: box.figures["gpu_util"].mean if "gpu_util" in box.figures else -1.0)
    return nodes[:_MOST_BOXES]


def _row_inches(count: int) -> float:
    return 0.26 if count <= MOST_LANES else 0.165


def boxes_inches(report: Report) -> float:
    """How high they are together."""
    count = len(_rows(report))
    return TITLE + count * _row_inches(count) + FOOT + 0.2


def draw_boxes(figure: Figure, report: Report, down: float) -> None:
    """All quantities side by side, so that a row is one device all the way."""
    rows = _rows(report)
    height = len(rows) * _row_inches(len(rows))
    across = max(2, len(words.shown(report)))
    gap = 0.35
    width = (WIDE - LEFT - RIGHT - gap * (across - 1)) / across
    of = "device" if len(report.gpus) <= _MOST_BOXES else "node"
    for place, quantity in enumerate(words.shown(report)):
        axes = axes_at(figure, LEFT + place * (width + gap), down + TITLE, width, height)
        _box_plot(axes, rows, quantity, top_of(report, quantity))
        axes.set_title(f"{quantity.title} by {of}", loc="left", fontsize=10, fontweight="bold", pad=6)
        if place:
            axes.set_yticklabels([])
    figure.text(
        LEFT / WIDE,
        1 - (down + TITLE + height + 0.48) / figure.get_figheight(),
        "Boxes hold the middle half of all frames, lines go from the 5th to the 95th percentile, a stroke is the highest.",
        fontsize=8,
        color=GREY,
    )


def _box_plot(axes: Axes, rows: Sequence[_Box], quantity: Quantity, top: float) -> None:
    known = [
        (place, row.figures[quantity.name]) for place, row in enumerate(rows) if quantity.name in row.figures
    ]
    axes.bxp(
        [
            {
                "med": found.p50,
                "q1": found.p25,
                "q3": found.p75,
                "whislo": found.p5,
                "whishi": found.p95,
                "fliers": [],
            }
            for _, found in known
        ],
        positions=[place for place, _ in known],
        orientation="horizontal",
        widths=0.62,
        patch_artist=True,
        showfliers=False,
        manage_ticks=False,
        boxprops={"facecolor": "#9CC7E3", "edgecolor": COLORS[0], "linewidth": 0.8},
        medianprops={"color": "#D55E00", "linewidth": 1.8},
        whiskerprops={"color": COLORS[0], "linewidth": 0.9},
        capprops={"color": COLORS[0], "linewidth": 0.9},
    )
    axes.plot([found.max for _, found in known], [place for place, _ in known], "|", color=GREY, markersize=5)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)))
    axes.set_yticklabels(
        [words.shortened(row.name, 20) for row in rows], fontsize=8.5 if len(rows) <= MOST_LANES else 7.5
    )
    axes.set_xlim(-0.01 * top, top * 1.01)
    _box_ticks(axes, quantity, top)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _box_ticks(axes: Axes, quantity: Quantity, top: float) -> None:
    """Values under the boxes; those at the edges stay inside, where no neighbour's stand."""
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415  an extra

    found = [0.0, top / 2, top] if quantity.is_percent else MaxNLocator(3).tick_values(0, top)
    ticks = [float(value) for value in found if 0 <= value <= top]
    axes.set_xticks(ticks)
    labels = axes.set_xticklabels([words.value(quantity, value) for value in ticks])
    labels[0].set_horizontalalignment("left")
    if len(ticks) > 1 and ticks[-1] > 0.85 * top:
        labels[-1].set_horizontalalignment("right")
