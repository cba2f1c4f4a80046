"""The paper that reports are drawn on: its measures, colours and letters, and the files it becomes."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpulse.export.report.model import Report
from gpulse.export.session.quantities import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 4
"""GPUs that share an axis."""
MOST_LANES = 16
"""GPUs that get a lane each; more become a heat map."""
WIDE = 12.0
LEFT, RIGHT = 1.5, 1.15
TITLE, FOOT = 0.42, 0.5
"""Inches above a panel and under the last one."""
GREY, PALE, SILENT, AWAY = "#555555", "#E4E4E4", "#D9D9D9", "#E69F00"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Okabe and Ito's palette, which people with any colour vision can tell apart."""
PERCENT_TICKS = {
    10.0: (0, 2, 4, 6, 8, 10),
    20.0: (0, 5, 10, 15, 20),
    50.0: (0, 10, 20, 30, 40, 50),
    100.0: (0, 25, 50, 75, 100),
}
"""How high percents may be drawn, and what stands beside them."""
_PATH = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")


def svg(figure: Figure) -> str:
    """A figure as SVG that can stand in a page."""
    text = rendered(figure, "svg").decode()
    # Hundredths of a point are more than anybody sees, and half of what would be written.
    return _PATH.sub(lambda path: _DIGITS.sub(r"\1", path[0]), text[text.index("<svg") :])


def rendered(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a file of that kind."""
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    picture = io.BytesIO()
    with warnings.catch_warnings(), style():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(picture, format=kind, metadata=metadata)
    return picture.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Text is text, dollars and all, and the same report makes the same file."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it has words about caches that nobody asked for
    import matplotlib as mpl  # noqa: PLC0415  half a second, and an extra

    with mpl.rc_context(
        {
            "text.parse_math": False,
            "svg.hashsalt": "gpulse",
            "svg.fonttype": "none",
        }
    ):
        yield


def new_figure(height: float) -> Figure:
    """Empty paper, so many inches high."""
    from matplotlib.figure import Figure  # noqa: PLC0415  half a second, and an extra

    return Figure(figsize=(WIDE, max(1.0, height)), dpi=100, facecolor="white")


def write(figure: Figure, down: float, text: str, size: float, *, bold: bool = False) -> None:
    """Put a line of text so many inches below the top."""
    figure.text(
        0.3 / WIDE,
        1 - down / figure.get_figheight(),
        text,
        fontsize=size,
        fontweight="bold" if bold else "normal",
        color="black" if bold else GREY,
        va="center",
    )


def axes_at(figure: Figure, left: float, down: float, width: float, height: float) -> Axes:
    """Axes at a place, in inches from the left and from the top."""
    whole = figure.get_figheight()
    axes = figure.add_axes((left / WIDE, 1 - (down + height) / whole, width / WIDE, height / whole))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")
    axes.tick_params(length=0, colors=GREY, labelsize=8.5)
    axes.tick_params(axis="x", pad=6)
    return axes


def top_of(report: Report, quantity: Quantity) -> float:
    """The highest value of a quantity, and a little more; of percents a round one.

    Utilization is drawn to a hundred, as what is missing is the point of it. A few percent of a large memory would
    look like nothing that way.
    """
    found = [gpu.statistics[quantity.name].max for gpu in report.gpus if quantity.name in gpu.statistics]
    highest = max([*found, 0.001])
    if not quantity.is_percent:
        return highest * 1.05
    if quantity.name != "gpu_memory":
        return 100.0
    return next((top for top in PERCENT_TICKS if highest <= top), 100.0)
