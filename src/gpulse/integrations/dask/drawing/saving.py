"""Where a picture goes: into a file, onto the screen, into a notebook."""

from __future__ import annotations

import io
import os
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulse.errors import RecordingError
from gpulse.export.plot import replace_file
from gpulse.export.report.canvas import style
from gpulse.integrations.dask.drawing.charts import Chart
from gpulse.integrations.dask.tracking import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SILENT_BACKENDS = frozenset(("agg", "cairo", "pdf", "pgf", "ps", "svg", "template"))
_COMMON = (".png", ".svg", ".pdf", ".html")


def check(path: str | os.PathLike[str]) -> Path:
    """See to it that a picture can be drawn there, before any time is spent.

    Raises:
        ArgumentError: The name ends with nothing that can be drawn, or no file can be made there.
    """
    found = Path(path)
    kind = found.suffix.lower()
    if kind != ".html" and kind[1:] not in _kinds():
        raise ArgumentError(
            f"cannot draw {found.name!r}: the name must end with one of {', '.join(_COMMON)}",
            hint=f"save={f'{found.stem}.png'!r}",
        )
    if not found.parent.is_dir():
        raise ArgumentError(f"there is no folder {found.parent}", hint="make it first, or another file")
    if not os.access(found.parent, os.W_OK | os.X_OK) or found.is_dir():
        raise ArgumentError(f"no file can be made at {found}", hint="another file")
    return found


def save(chart: Chart, width: float, height: float, path: Path) -> Figure:
    """Draw to a file; one that is there is replaced, or stays whole.

    Raises:
        ArgumentError: Such a file cannot be drawn here.
        RecordingError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  half a second, and an extra

    figure = _drawn(Figure(figsize=(width, height), dpi=100, facecolor="white"), chart)
    kind = path.suffix.lower()[1:]
    if kind == "html":
        from gpulse.integrations.dask.drawing.page import page  # noqa: PLC0415  for pages alone

        content = page(chart, height / width).encode()
    else:
        content = _rendered(figure, kind)
    try:
        replace_file(path, content)
    except OSError as error:
        raise RecordingError(f"cannot write {path}: {error.strerror}", hint="another file") from error
    return figure


def show(chart: Chart, width: float, height: float) -> Figure:
    """Draw to the screen: a window or a notebook's cell, and nowhere when there is neither."""
    import matplotlib as mpl  # noqa: PLC0415  half a second, and an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    backend = mpl.get_backend().lower()
    if backend in _SILENT_BACKENDS:
        return _drawn(Figure(figsize=(width, height), dpi=100, facecolor="white"), chart)
    if "inline" in backend:
        return _display(_drawn(Figure(figsize=(width, height), dpi=100, facecolor="white"), chart))
    from matplotlib import pyplot as plt  # noqa: PLC0415  for windows alone

    figure = _drawn(plt.figure(figsize=(width, height), dpi=100, facecolor="white"), chart)
    plt.show()
    if not mpl.is_interactive():
        plt.close(figure)
    return figure


def _drawn(figure: Figure, chart: Chart) -> Figure:
    from gpulse.integrations.dask.drawing.picture import draw  # noqa: PLC0415

    with style():
        draw(figure, chart)
    return figure


def _rendered(figure: Figure, kind: str) -> bytes:
    """The bytes of a file of that kind, the same for the same picture."""
    metadata: dict[str, Any] | None = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    picture = io.BytesIO()
    with warnings.catch_warnings(), style():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        try:
            figure.savefig(picture, format=kind, metadata=metadata)
        except (OSError, RuntimeError, ValueError) as error:  # kinds that need other programs
            raise ArgumentError(
                f"cannot draw .{kind} here: {error}", hint=f"one of {', '.join(_COMMON)}"
            ) from error
    return picture.getvalue()


def _kinds() -> set[str]:
    from matplotlib.backend_bases import FigureCanvasBase  # noqa: PLC0415  half a second, and an extra

    return set(FigureCanvasBase.get_supported_filetypes())


def _display(figure: Figure) -> Figure:
    """Show a figure in a notebook now, and not a second time as the result of the same cell."""
    import_module("IPython.display").display(figure)
    vars(figure)["_ipython_display_"] = partial(_shown_again, _cell())
    return figure


def _shown_again(cell: int) -> None:
    """Nothing in the cell that showed it already; in others whatever IPython would do."""
    if _cell() != cell:
        raise NotImplementedError


def _cell() -> int:
    """The number of the notebook's cell that runs."""
    return int(import_module("IPython").get_ipython().execution_count)
