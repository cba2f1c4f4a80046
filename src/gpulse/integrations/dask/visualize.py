"""Pictures of what was recorded: `lines` and `boxes` of a worker, and `cluster`, which is all of them together."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpulse.errors import MissingExtraError
from gpulse.integrations.dask.files import WorkerTable, read_folder, read_table
from gpulse.integrations.dask.peaks import TASKS, check_metric
from gpulse.integrations.dask.tracking import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpulse.integrations.dask.drawing.charts import Chart

_LARGEST_INCHES = 200

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
        job: The number of the job; None is everything.
        metrics: Names of metrics that were tracked; None is all that have numbers and were ever known.
        width: In inches.
        height: In inches.
        save: A file to draw to instead of showing it; its ending says which kind: .png, .svg, .pdf and what else
            matplotlib knows, or .html for a page that needs nothing else.

    Raises:
        UsageError: There is no such file, job or metric, or the picture cannot be drawn so.
        RecordingError: The file is broken, or none of ours.
    """
    target = _checked(width, height, save)
    _check_job(job)
    table = read_table(worker_file)
    names = _asked([table], metrics)
    from gpulse.integrations.dask.drawing.views import lines_chart  # noqa: PLC0415  numpy, which may not be there

    return _drawn(lines_chart(table, job, names, height), width, height, target)


def boxes(
    worker_file: PathLike,
    job: int | None,
    metrics: Sequence[str] | None = None,
    width: float = 20,
    height: float = 10,
    save: PathLike | None = None,
    freq: int = 15,
) -> Figure:
    """Draw a job on a worker as boxes: the middle half of some records each, with strokes to the lowest and highest.

    Args:
        worker_file: A file that `Monitor.to_csv` wrote.
        job: The number of the job; None is everything.
        metrics: Names of metrics that were tracked; None is all that have numbers and were ever known.
        width: In inches.
        height: In inches.
        save: As for `lines`.
        freq: How many records a box stands for; a multiple of it where there would be more boxes than can be seen.

    Raises:
        UsageError: There is no such file, job or metric, or the picture cannot be drawn so.
        RecordingError: The file is broken, or none of ours.
    """
    target = _checked(width, height, save)
    _check_job(job)
    _check_freq(freq)
    table = read_table(worker_file)
    names = _asked([table], metrics)
    from gpulse.integrations.dask.drawing.views import boxes_chart  # noqa: PLC0415

    return _drawn(boxes_chart(table, job, names, freq, (width, height)), width, height, target)


def cluster(
    folder: PathLike,
    metrics: Sequence[str] | None = None,
    job: int | None = None,
    width: float = 20,
    height: float = 10,
    save: PathLike | None = None,
) -> Figure:
    """Draw all workers together: lines of a few GPUs, of more a row of colours for each GPU or worker.

    Args:
        folder: Where `Monitor.to_csv` wrote its files.
        metrics: Names of metrics that were tracked; None is all that have numbers and were ever known.
        job: The number of a job; None is everything.
        width: In inches.
        height: In inches.
        save: As for `lines`.

    Raises:
        UsageError: There is no such folder, job or metric, or the picture cannot be drawn so.
        RecordingError: A file is broken, or none of ours.
    """
    target = _checked(width, height, save)
    _check_job(job)
    tables: dict[int, WorkerTable] = read_folder(folder)
    names = _asked(list(tables.values()), metrics)
    from gpulse.integrations.dask.drawing.views import cluster_chart  # noqa: PLC0415

    return _drawn(
        cluster_chart(tables, job, names, Path(folder).resolve().name, height), width, height, target
    )


def _checked(width: Any, height: Any, save: PathLike | None) -> Path | None:
    """Where to draw to, after everything was looked at that can be before time is spent."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("a picture", "dask")
    for name, inches in (("width", width), ("height", height)):
        is_number = isinstance(inches, int | float) and not isinstance(inches, bool)
        if not is_number or not math.isfinite(inches) or not 1 <= inches <= _LARGEST_INCHES:
            raise ArgumentError(f"{name} is a number of inches from 1 to {_LARGEST_INCHES}, not {inches!r}")
    if save is None:
        return None
    from gpulse.integrations.dask.drawing.saving import check  # noqa: PLC0415

    return check(save)


def _check_job(job: Any) -> None:
    if job is not None and (isinstance(job, bool) or not isinstance(job, int)):
        raise ArgumentError(f"a job is a number, not {job!r}", hint="job=1, or job=None for everything")


def _check_freq(freq: Any) -> None:
    if isinstance(freq, bool) or not isinstance(freq, int) or freq < 1:
        raise ArgumentError(f"freq is the number of records in a box, from 1 on, not {freq!r}")


def _asked(tables: Sequence[WorkerTable], metrics: Any) -> list[str]:
    """The metrics to draw, each once."""
    tracked = tuple(dict.fromkeys(name for table in tables for name in table.tracked))
    if metrics is None:
        known, words = _answers(tables)
        named = [name for name in tracked if name != TASKS and name not in words]
        named = [name for name in named if name in known] or named
    else:
        named = [metrics] if isinstance(metrics, str) else list(dict.fromkeys(metrics))
    for name in named:
        check_metric(tracked, name)
    if not named:
        there = ", ".join(name for name in tracked if name != TASKS) or "nothing that has numbers"
        raise ArgumentError(f"there is no metric to draw; tracked was {there}")
    return named


def _answers(tables: Sequence[WorkerTable]) -> tuple[set[str], set[str]]:
    """The metrics that ever had a value, and those whose values are words, which nobody can draw."""
    known: set[str] = set()
    words: set[str] = set()
    for table in tables:
        waiting = set(table.tracked) - known
        for batch in table.batches():
            for name in sorted(waiting):
                first = next(
                    (part for value in batch.values(name) for part in _parts(value) if part is not None), None
                )
                if first is not None:
                    known.add(name)
                    waiting.discard(name)
                    if not isinstance(first, int | float):
                        words.add(name)
            if not waiting:
                break
    return known, words


def _parts(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,)


def _drawn(chart: Chart, width: float, height: float, target: Path | None) -> Figure:
    from gpulse.integrations.dask.drawing.saving import save, show  # noqa: PLC0415

    if target is None:
        return show(chart, width, height)
    return save(chart, width, height, target)
