"""Draws a report into a file: PNG, SVG, PDF or HTML."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gpulse.errors import MissingExtraError, UsageError
from gpulse.export import plot as pictures
from gpulse.export.report.model import Report


def check(path: Path) -> None:
    """See to it that a picture can be drawn there, before any time is spent.

    Raises:
        UsageError: The name ends with nothing that can be drawn, or no file can be made there.
        MissingExtraError: Matplotlib is not installed.
    """
    if path.suffix.lower() not in pictures.FORMATS:
        raise UsageError(
            f"cannot draw {path.name!r}: the name must end with one of {', '.join(pictures.FORMATS)}",
            hint=f"--plot {path.stem or 'report'}.pdf, or .html, a page that needs nothing else",
        )
    pictures.check(path)
    if find_spec("matplotlib") is None:
        raise MissingExtraError("a picture", "plot")


def plot(report: Report, path: Path) -> None:
    """Draw a report; a file that is there is replaced, or stays whole.

    Raises:
        UsageError: The name ends with nothing that can be drawn, or no file can be made there.
        MissingExtraError: Matplotlib is not installed.
        OSError: The file cannot be written.
    """
    check(path)
    from gpulse.export.report.page import page  # noqa: PLC0415  matplotlib, which may not be there
    from gpulse.export.report.picture import picture  # noqa: PLC0415

    kind = path.suffix.lower()[1:]
    pictures.replace_file(path, page(report).encode() if kind == "html" else picture(report, kind))
