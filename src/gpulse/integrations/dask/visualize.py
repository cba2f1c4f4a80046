"""Charts of a record: `lines` and `boxes` of one worker, and `cluster` for all workers."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulse.errors import MissingExtraError
from gpulse.integrations.dask.csv_files import WorkerTable, read_folder, read_table
from gpulse.integrations.dask.metric_peaks import TASKS, check_metric
from gpulse.integrations.dask.trackable_metrics import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulse.charts.chart_model import ChartPage

_MAX_INCHES = 200

PathLike = str | os.PathLike[str]


def lines(
    worker_file: PathLike,
    job: int | None,
    metrics: Sequence[str] | None = None,
    width: float = 20,
    height: float = 10,
    save: PathLike | None = None,
) -> Figure:
    """Draw a job on a worker: a panel for each metric, a line for each GPU, and when its graphs ran.

    Args:
        worker_file: A file that `Monitor.to_csv` wrote.
        job: Number of the job; None for all jobs.
        metrics: Names of tracked metrics; None for all numeric metrics that have values.
        width: Width in inches.
        height: Height in inches.
        save: A file to draw to instead of showing it; its extension selects the format: .png, .svg, .pdf and others
            that matplotlib supports, or .html for a self-contained page.

    Raises:
        UsageError: There is no such file, job or metric, or the chart cannot be drawn as requested.
        RecordingError: The file is damaged or was not written by `to_csv`.
    """
    target = _check_arguments(width, height, save)
    _check_job(job)
    table = read_table(worker_file)
    names = _select_metrics([table], metrics)
    from gpulse.integrations.dask.record_charts import build_lines_picture  # noqa: PLC0415  loads numpy

    return _draw(build_lines_picture(table, job, names, (width, height)), width, height, target)


def boxes(
    worker_file: PathLike,
    job: int | None,
    metrics: Sequence[str] | None = None,
    width: float = 20,
    height: float = 10,
    save: PathLike | None = None,
    freq: int = 15,
) -> Figure:
    """Draw a job on a worker as box plots: each box is the interquartile range of some records, whiskers reach the extremes.

    Args:
        worker_file: A file that `Monitor.to_csv` wrote.
        job: Number of the job; None for all jobs.
        metrics: Names of tracked metrics; None for all numeric metrics that have values.
        width: Width in inches.
        height: Height in inches.
        save: As for `lines`.
        freq: Number of records per box; a multiple of it is used if there would be too many boxes to see.

    Raises:
        UsageError: There is no such file, job or metric, or the chart cannot be drawn as requested.
        RecordingError: The file is damaged or was not written by `to_csv`.
    """
    target = _check_arguments(width, height, save)
    _check_job(job)
    _check_freq(freq)
    table = read_table(worker_file)
    names = _select_metrics([table], metrics)
    from gpulse.integrations.dask.record_charts import build_boxes_picture  # noqa: PLC0415

    return _draw(build_boxes_picture(table, job, names, freq, (width, height)), width, height, target)


def cluster(
    folder: PathLike,
    metrics: Sequence[str] | None = None,
    job: int | None = None,
    width: float = 20,
    height: float = 10,
    save: PathLike | None = None,
) -> Figure:
    """Draw all workers together: lines for a few GPUs, a heat map with a row per GPU or worker for more.

    Args:
        folder: Where `Monitor.to_csv` wrote its files.
        metrics: Names of tracked metrics; None for all numeric metrics that have values.
        job: Number of a job; None for all jobs.
        width: Width in inches.
        height: Height in inches.
        save: As for `lines`.

    Raises:
        UsageError: There is no such directory, job or metric, or the chart cannot be drawn as requested.
        RecordingError: A file is damaged or was not written by `to_csv`.
    """
    target = _check_arguments(width, height, save)
    _check_job(job)
    tables: dict[int, WorkerTable] = read_folder(folder)
    names = _select_metrics(list(tables.values()), metrics)
    from gpulse.integrations.dask.record_charts import build_cluster_picture  # noqa: PLC0415

    return _draw(
        build_cluster_picture(tables, job, names, Path(folder).resolve().name, (width, height)),
        width,
        height,
        target,
    )


def _check_arguments(width: Any, height: Any, save: PathLike | None) -> Path | None:
    """Check the arguments before any time is spent; return the output path."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing charts", "dask")
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it reports on its caches while it is loaded
    for name, inches in (("width", width), ("height", height)):
        is_number = isinstance(inches, int | float) and not isinstance(inches, bool)
        if not is_number or not math.isfinite(inches) or not 1 <= inches <= _MAX_INCHES:
            raise ArgumentError(f"{name} must be a number of inches from 1 to {_MAX_INCHES}, not {inches!r}")
    if save is None:
        return None
    from gpulse.integrations.dask.record_charts import check_chart_path  # noqa: PLC0415

    return check_chart_path(save)


def _check_job(job: Any) -> None:
    if job is not None and (isinstance(job, bool) or not isinstance(job, int)):
        raise ArgumentError(f"job must be a number, not {job!r}", hint="use job=1, or job=None for all jobs")


def _check_freq(freq: Any) -> None:
    if isinstance(freq, bool) or not isinstance(freq, int) or freq < 1:
        raise ArgumentError(f"freq must be the number of records per box, at least 1, not {freq!r}")


def _select_metrics(tables: Sequence[WorkerTable], metrics: Any) -> list[str]:
    """Return the metrics to draw, each once."""
    tracked = tuple(dict.fromkeys(name for table in tables for name in table.tracked))
    if metrics is None:
        known, words = _find_drawable_metrics(tables)
        named = [name for name in tracked if name != TASKS and name not in words]
        named = [name for name in named if name in known] or named
    else:
        named = [metrics] if isinstance(metrics, str) else list(dict.fromkeys(metrics))
    for name in named:
        check_metric(tracked, name)
    if not named:
        there = ", ".join(name for name in tracked if name != TASKS) or "no numeric metric"
        raise ArgumentError(f"no metric to draw; tracked metrics: {there}")
    return named


def _find_drawable_metrics(tables: Sequence[WorkerTable]) -> tuple[set[str], set[str]]:
    """Return the metrics that have values, and those whose values are text and cannot be drawn."""
    known: set[str] = set()
    words: set[str] = set()
    for table in tables:
        waiting = set(table.tracked) - known
        for batch in table.batches():
            for name in sorted(waiting):
                first = next(
                    (
                        part
                        for value in batch.values(name)
                        for part in _split_value(value)
                        if part is not None
                    ),
                    None,
                )
                if first is not None:
                    known.add(name)
                    waiting.discard(name)
                    if not isinstance(first, int | float):
                        words.add(name)
            if not waiting:
                break
    return known, words


def _split_value(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)


def _draw(picture: ChartPage, width: float, height: float, target: Path | None) -> Figure:
    from gpulse.integrations.dask.record_charts import save_chart, show_chart  # noqa: PLC0415  loads numpy

    size = (width, height)
    return show_chart(picture, size) if target is None else save_chart(picture, size, target)
