"""The paper that pictures are drawn on, measured in inches, and their colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpulse.export.report.canvas import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito's palette, which people with any colour vision can tell apart, without its yellow."""
BANDS = ("#DCE6EF", "#EFE7D6", "#E3EBDC")
"""Two shades for graphs that follow each other, and one for graphs between them."""


class Paper(NamedTuple):
    """A figure measured in inches."""

    figure: Figure
    width: float
    height: float
    left: float
    right: float

    @property
    def inside(self) -> float:
        """How wide the panels are."""
        return max(0.3, self.width - self.left - self.right)

    def axes(self, down: float, inches: float) -> Axes:
        """Axes so many inches below the top."""
        box = (
            self.left / self.width,
            1 - (down + inches) / self.height,
            self.inside / self.width,
            inches / self.height,
        )
        axes = self.figure.add_axes(box)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#AAAAAA")
        axes.tick_params(length=0, colors=GREY, labelsize=10)
        axes.tick_params(axis="x", pad=7)
        return axes
