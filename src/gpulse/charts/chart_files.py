"""Write charts to files: check the format and the path first, and write atomically."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from gpulse.atomic_files import replace_file, resolve_output
from gpulse.charts.chart_model import ChartPage
from gpulse.errors import MissingExtraError, UsageError

FORMATS = (".png", ".svg", ".pdf", ".html")


def check_chart_path(path: Path, option: str = "--plot", example: str = "picture") -> None:
    """Check that a chart can be written to a path, before any work is done.

    Args:
        path: The file; its extension is the format.
        option: The command-line option, for the hint.
        example: A file name without extension, for the hint.

    Raises:
        UsageError: The extension is unknown, or the file cannot be created there.
        MissingExtraError: The format needs matplotlib, which is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"cannot draw {path.name!r}: the file name must end with one of {', '.join(FORMATS)}",
            hint=f"use {option} {example}.png, or {option} {example}.html, which needs no additional packages",
        )
    if path.suffix.lower() != ".html" and find_spec("matplotlib") is None:
        raise MissingExtraError("drawing charts", "plot")
    folder = path.parent
    if not os.access(folder, os.F_OK):
        raise UsageError(
            f"directory {folder} does not exist",
            hint=f"create it with mkdir -p {folder}, or choose another file for {option}",
        )
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot create a file in {folder}: not a directory, or no permission to write to it",
            hint=f"choose another file for {option}",
        )
    try:
        resolve_output(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint=f"choose another file for {option}"
        ) from error
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise UsageError(
            f"cannot write {path}: not a regular file, or no permission to write to it",
            hint=f"choose another file for {option}",
        )


def write_chart(path: Path, picture: ChartPage, html: Callable[[], str]) -> None:
    """Write a chart page in the format of the path's extension; the caller builds HTML, because it adds its own text.

    Raises:
        OSError: The file cannot be written.
    """
    kind = path.suffix.lower()[1:]
    if kind == "html":
        replace_chart_file(path, html().encode())
        return
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs about its caches while it loads
    from gpulse.charts.matplotlib_renderer import draw_figure, render_figure  # noqa: PLC0415  matplotlib is an extra

    replace_chart_file(path, render_figure(draw_figure(picture), kind))


def replace_chart_file(path: Path, content: bytes) -> None:
    """Replace a chart file atomically: if the disk is full, the old file stays.

    Raises:
        OSError: The file cannot be written.
    """
    replace_file(resolve_output(path), content, durable=False)  # a symbolic link stays a link
