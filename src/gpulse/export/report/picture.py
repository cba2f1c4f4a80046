"""Pictures of a session: what its GPUs did over time, where nothing is known, and how each of them fared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpulse.export.report import words
from gpulse.export.report.boxes import boxes_inches, draw_boxes
from gpulse.export.report.canvas import FOOT, TITLE, new_figure, rendered, style, write
from gpulse.export.report.model import Report
from gpulse.export.report.over_time import draw_over_time, panels_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = 0.72


def picture(report: Report, kind: str) -> bytes:
    """The whole report as one picture: the bytes of a file of that kind (`png`, `svg`, `pdf`)."""
    return rendered(whole(report), kind)


@style()
def whole(report: Report) -> Figure:
    """Everything in one figure: over time first, then the boxes."""
    if not report.quantities:
        return _empty(report)
    panels = list(panels_of(report))
    boxes = boxes_inches(report)
    height = _HEAD + sum(TITLE + panel.inches for panel in panels) + FOOT + boxes + 0.1
    figure = new_figure(height)
    write(figure, 0.3, words.headline(report), 13, bold=True)
    write(figure, 0.58, f"{words.subtitle(report)}{_legend(report)}", 9.5)
    top = draw_over_time(figure, report, panels, _HEAD)
    draw_boxes(figure, report, top)
    return figure


def _empty(report: Report) -> Figure:
    """Draw a session in which nothing was measured: an empty picture would look like a fault."""
    figure = new_figure(_HEAD + FOOT)
    write(figure, 0.3, words.headline(report), 13, bold=True)
    write(figure, 0.58, words.subtitle(report), 9.5)
    write(figure, 0.95, "No GPU delivered a measurement in this session.", 9.5)
    return figure


def _legend(report: Report) -> str:
    """What the shades mean that are there."""
    silent = "; grey where nothing is known" if report.gaps else ""
    return silent + ("; orange where the head was away" if report.absences else "")


@style()
def over_time(report: Report) -> Figure:
    """What the GPUs did, moment by moment."""
    panels = list(panels_of(report))
    figure = new_figure(sum(TITLE + panel.inches for panel in panels) + FOOT)
    draw_over_time(figure, report, panels, 0.0)
    return figure


@style()
def boxes(report: Report) -> Figure:
    """How each device fared."""
    figure = new_figure(boxes_inches(report) + 0.1)
    draw_boxes(figure, report, 0.0)
    return figure
