"""Pictures of a diagnosis: PNG, SVG and PDF by matplotlib, HTML by ourselves."""

from __future__ import annotations

import io
import logging
import os
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulse.diagnosis.seconds import Second
from gpulse.errors import MissingExtraError, UsageError
from gpulse.export.curves import Chart, Mark, Panel, charts, printable, time_ticks, window_words
from gpulse.export.page import html
from gpulse.model.finding import Diagnosis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf", ".html")
_INCHES_WIDE = 12.0
_PANEL_INCHES = 1.35
_LANE_INCHES = 0.24
_TITLE_INCHES = 0.45
_GAP_INCHES = 0.3
_FOOT_INCHES = 0.45
_LEFT_INCHES = 0.95
_RIGHT_INCHES = 0.45
_GREY = "#555555"


def check(path: Path) -> None:
    """See to it that the path names a kind of picture that can be drawn there, before any time is spent.

    Raises:
        UsageError: It names none, or a place where no file can be made.
        MissingExtraError: It needs matplotlib, which is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"cannot draw {path.name!r}: the name must end with one of {', '.join(FORMATS)}",
            hint="--plot why.png, or --plot why.html, which needs nothing else installed",
        )
    if path.suffix.lower() != ".html" and find_spec("matplotlib") is None:
        raise MissingExtraError("a picture", "plot")
    folder = path.parent
    if not os.access(folder, os.F_OK):
        raise UsageError(f"there is no folder {folder}", hint=f"mkdir -p {folder}, or another --plot FILE")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"no file can be made in {folder}", hint="another --plot FILE")
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise UsageError(f"{path} cannot be written to", hint="another --plot FILE")


def plot(seconds: Mapping[str, Sequence[Second]], diagnosis: Diagnosis, path: Path) -> None:
    """Draw what was judged, with the findings where they lie; a file that is there is replaced, or stays whole.

    Args:
        seconds: Of each GPU, by its UUID, in order.
        diagnosis: What was found in them.
        path: Where to; its ending says which kind of picture.

    Raises:
        UsageError: The ending is none that can be drawn, or no file can be made there.
        MissingExtraError: It needs matplotlib, which is not installed.
        OSError: The file cannot be written.
    """
    check(path)
    kind = path.suffix.lower()
    drawn = charts(seconds, diagnosis)
    if kind == ".html":
        replace_file(path, html(drawn, diagnosis).encode())
        return
    figure = _figure(drawn, diagnosis)
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind, {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        picture = io.BytesIO()
        figure.savefig(picture, format=kind[1:], metadata=metadata)
    replace_file(path, picture.getvalue())


def replace_file(path: Path, content: bytes) -> None:
    """Write under another name first, so that a full disk neither cuts a picture off nor costs the one before."""
    path = path.resolve()  # a link stays one
    draft = path.with_name(f".gpulse-{os.getpid()}{path.suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _new_figure(width: float, height: float) -> Figure:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it has words about caches that nobody asked for
    from matplotlib.figure import Figure  # noqa: PLC0415  half a second, and an extra

    return Figure(figsize=(width, height), dpi=100, facecolor="white")


def _figure(drawn: Sequence[Chart], diagnosis: Diagnosis) -> Figure:
    verdict = textwrap.wrap(printable(diagnosis.verdict), 118) or [""]
    head = 0.5 + 0.21 * len(verdict)
    height = head + sum(map(_chart_inches, drawn)) + 0.1
    figure = _new_figure(_INCHES_WIDE, max(height, 1.0))
    whole = figure.get_figheight()
    figure.text(
        0.25 / _INCHES_WIDE,
        1 - 0.2 / whole,
        "\n".join(verdict),
        fontsize=11,
        fontweight="bold",
        va="top",
        linespacing=1.3,
        parse_math=False,
    )
    figure.text(
        0.25 / _INCHES_WIDE,
        1 - (head - 0.1) / whole,
        window_words(diagnosis),
        fontsize=9,
        color=_GREY,
        parse_math=False,
    )
    top = whole - head
    for chart in drawn:
        _draw(figure, chart, top)
        top -= _chart_inches(chart)
    return figure


def _chart_inches(chart: Chart) -> float:
    lanes = len(chart.marks) * _LANE_INCHES
    panels = len(chart.panels) * (_PANEL_INCHES + _GAP_INCHES)
    return _TITLE_INCHES + lanes + panels + _FOOT_INCHES


def _draw(figure: Figure, chart: Chart, top: float) -> None:
    whole = figure.get_figheight()
    figure.text(0.25 / _INCHES_WIDE, (top - 0.3) / whole, chart.title, fontsize=10.5, parse_math=False)
    top -= _TITLE_INCHES
    ticks = time_ticks(chart.start, chart.end)
    if chart.marks:
        top -= len(chart.marks) * _LANE_INCHES
        lanes = _axes(figure, top, len(chart.marks) * _LANE_INCHES, chart)
        _draw_marks(lanes, chart)
    for place, panel in enumerate(chart.panels):
        top -= _PANEL_INCHES + _GAP_INCHES
        axes = _axes(figure, top, _PANEL_INCHES, chart)
        _draw_panel(axes, panel, chart.marks)
        axes.set_xticks([moment for moment, _ in ticks])
        is_last = place == len(chart.panels) - 1
        axes.set_xticklabels([words if is_last else "" for _, words in ticks], fontsize=8.5)


def _axes(figure: Figure, bottom: float, height: float, chart: Chart) -> Axes:
    whole = figure.get_figheight()
    inside = _INCHES_WIDE - _LEFT_INCHES - _RIGHT_INCHES
    axes = figure.add_axes(
        (_LEFT_INCHES / _INCHES_WIDE, bottom / whole, inside / _INCHES_WIDE, height / whole)
    )
    axes.set_xlim(chart.start, chart.end)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")
    axes.tick_params(length=0, colors=_GREY, labelsize=8.5)
    return axes


def _draw_marks(axes: Axes, chart: Chart) -> None:
    """One lane for each finding, so that no two names meet."""
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_ylim(len(chart.marks), 0)
    length = chart.end - chart.start
    for place, mark in enumerate(chart.marks):
        seen = max(mark.end - mark.start, 0.003 * length)  # an instant is a stroke
        axes.barh(place + 0.5, seen, left=min(mark.start, chart.end - seen), height=0.72, color=mark.color)
        late = mark.start - chart.start > 0.75 * length
        axes.text(
            mark.start - 0.004 * length if late else mark.start + 0.004 * length,
            place + 0.5,
            mark.name,
            fontsize=8.5,
            va="center_baseline",
            ha="right" if late else "left",
            color="black",
            parse_math=False,
        )


def _draw_panel(axes: Axes, panel: Panel, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if mark.shaded and mark.end > mark.start:
            axes.axvspan(mark.start, mark.end, color=mark.color, alpha=0.1, linewidth=0)
    for curve in panel.curves:
        for place, run in enumerate(curve.runs):
            axes.plot(
                [moment for moment, _ in run],
                [value for _, value in run],
                color=curve.color,
                linewidth=1.6,
                marker="o" if len(run) == 1 else None,
                markersize=3,
                label=curve.label if place == 0 else None,
                solid_capstyle="round",
                clip_on=False,
            )
    axes.set_ylim(0, panel.top)
    axes.set_yticks(panel.ticks)
    axes.set_yticklabels([panel.written(value) for value in panel.ticks])
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(panel.title, loc="left", fontsize=9.5, fontweight="bold", pad=5)
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 0.98),
        ncols=len(panel.curves),
        fontsize=8.5,
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.4,
        columnspacing=1.4,
    )
