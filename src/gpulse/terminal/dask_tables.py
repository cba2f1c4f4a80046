"""Tables about a Dask cluster: its monitored workers, and the peaks of a metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.device import format_ranges
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, display_width, render_table, truncate, wrap

Document = Mapping[str, Any]
Value = float | int | None

_WORKER_COLUMNS = (
    TableColumn("worker"),
    TableColumn("name", right=False, least=8),
    TableColumn("state", right=False),
    TableColumn("GPUs", right=False, drop=2, least=6),
    TableColumn("measurements", drop=1),
    TableColumn("until", drop=3),
    TableColumn("host", right=False, drop=4, least=8),
    TableColumn("pid", drop=5),
)
_UNITS: Mapping[str, Callable[[float], str]] = {
    "bytes": f.size,
    "bytes/second": f.rate,
    "bits/second": f.bits,
    "ratio": f.share,
    "percent": lambda value: f"{round(value, 2):g}%",
    "watts": f.watts,
    "joules": lambda value: f"{f.count(value)}J",
    "celsius": f.celsius,
    "hertz": f.megahertz,
    "seconds": f.seconds,
    "1/second": lambda value: f"{f.count(value)}/s",
}
"""Formats of values by the unit that the catalog has for their metric."""
_GAP = 2


class WorkerPeaks(NamedTuple):
    """The highest values of a worker, one per GPU."""

    worker: int
    job: int | None
    """None for the whole record."""
    values: Sequence[Value]


def status_lines(status: Document, place: str, *, width: int, paint: Paint) -> Iterator[str]:
    """Yield lines about what is recorded of a cluster, and a table of its workers.

    Args:
        status: The cluster's answer.
        place: The scheduler's address.
        width: Columns of the terminal.
        paint: Adds colors.
    """
    yield from wrap(_headline(status, place), width, "  ")
    yield from wrap(_tracking(status), width, "  ")
    workers = status["workers"]
    yield ""
    if workers:
        yield from render_table(
            _WORKER_COLUMNS, (_worker_row(worker, status) for worker in workers), width, paint
        )
    else:
        yield from wrap("the cluster has no workers yet; each is monitored as soon as it joins", width)
    for number, trouble in enumerate(_error_lines(status)):
        if not number:
            yield ""
        for line in _paragraph(trouble, width):
            yield paint("notice", line)


def describe_workers(workers: Sequence[Document]) -> str:
    """Return the number of workers and the GPUs of each: `2 workers with 4 GPUs each (NVIDIA H200)`.

    Workers of one machine may see the same GPUs, so these are not added up.
    """
    counts = sorted({len(worker["gpus"]) for worker in workers})
    text = f"{len(workers):,} worker{'' if len(workers) == 1 else 's'}"
    if not any(counts):
        return f"{text} without GPUs" if workers else text
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    gpus = f"{number} GPU{'' if counts[-1] == 1 else 's'}{'' if len(workers) == 1 else ' each'}"
    names = dict.fromkeys(f.plain(name) for worker in workers for name in worker["gpus"])
    return f"{text} with {gpus} ({', '.join(names)})"


def describe_newest_job(number: int) -> str:
    """Return the number of the newest job as text; numbers can be skipped, so it is not a count of jobs."""
    return f"newest job {number}" if number else "no jobs yet"


def peak_lines(
    metric: str, peaks: Sequence[WorkerPeaks], unit: str = "", *, width: int, paint: Paint
) -> Iterator[str]:
    """Yield the highest values of a metric: a line per worker and job, or per GPU where that is too wide.

    Args:
        metric: Name of the metric.
        peaks: Highest values of all workers.
        unit: Unit of the values in the catalog; `ratio` for values from 0 to 1.
        width: Columns of the terminal. Values are never cut, because a cut number is a wrong number.
        paint: Adds colors.
    """
    most = max((len(peak.values) for peak in peaks), default=0)
    gpus = [f"GPU {number}" for number in range(most)] if most > 1 else []
    table = _rows_per_worker(peaks, gpus or [f.plain(metric)], unit)
    is_tall = _width(table) > width
    if gpus or is_tall:
        yield from wrap(f"highest {f.plain(metric)}", width)
    if is_tall:
        table = _rows_per_gpu(peaks, unit, gpus=bool(gpus))
    titles, *rows = table
    yield from render_table([*map(TableColumn, titles)], rows, max(width, _width(table)), paint)


def format_value(value: Value, unit: str) -> str:
    """Format a value with its unit."""
    if value is None:
        return f.UNKNOWN
    if unit in _UNITS:
        return _UNITS[unit](value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _rows_per_worker(peaks: Sequence[WorkerPeaks], titles: Sequence[str], unit: str) -> list[list[str]]:
    """Return rows with a column per GPU."""
    head, workers = _worker_cells(peaks)
    return [
        [*head, *titles],
        *(
            [*worker, *_padded([format_value(value, unit) for value in peak.values], len(titles))]
            for worker, peak in zip(workers, peaks, strict=True)
        ),
    ]


def _rows_per_gpu(peaks: Sequence[WorkerPeaks], unit: str, *, gpus: bool) -> list[list[str]]:
    """Return a row per GPU."""
    head, workers = _worker_cells(peaks)
    return [
        [*head, *(["GPU"] if gpus else []), "peak"],
        *(
            [*worker, *([str(number)] if gpus else []), format_value(value, unit)]
            for worker, peak in zip(workers, peaks, strict=True)
            for number, value in enumerate(peak.values or [None])
        ),
    ]


def _worker_cells(peaks: Sequence[WorkerPeaks]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and cells for the workers, with their jobs unless the peaks are of the whole record."""
    if all(peak.job is None for peak in peaks):
        return ["worker"], [[str(peak.worker)] for peak in peaks]
    return ["worker", "job"], [[str(peak.worker), str(peak.job)] for peak in peaks]


def _width(table: Sequence[Sequence[str]]) -> int:
    """Return the columns of the terminal that a table needs."""
    wide = [max(map(display_width, column)) for column in zip(*table, strict=True)]
    return sum(wide) + _GAP * (len(wide) - 1)


def _headline(status: Document, place: str) -> str:
    state = "is being monitored" if status["running"] else "is not being monitored now"
    if not status["started"]:
        state = "has a monitor that has not been started yet"
    numbered = "one job per client" if status["job_type"] == "client" else "each new-job begins a job"
    dags = status["dags"]
    return (
        f"the cluster at {f.plain(place)} {state}: "
        f"{describe_newest_job(status['job'])} ({numbered}), {dags} graph{'' if dags == 1 else 's'}"
    )


def _tracking(status: Document) -> str:
    named = [*status["tracking"], *(f"{name} (custom)" for name in status["custom"])]
    limit = (
        f", at most {status['mem_limit']:,} measurements in memory" if status["mem_limit"] is not None else ""
    )
    head = f", streamed to the head at {f.plain(str(status['head']))}" if status["head"] else ""
    return f"every {status['polling_interval']:g} ms: {f.plain(', '.join(named))}{limit}{head}"


def _worker_row(worker: Document, status: Document) -> list[TableCell | str]:
    if not worker["here"]:
        state = TableCell("left", "notice")
    elif worker["troubles"]:
        state = TableCell("error", "notice")
    else:
        state = TableCell("recording", "good") if status["running"] else TableCell("idle")
    names: Counter[str] = Counter(worker["gpus"])
    return [
        str(worker["index"]),
        f.plain(str(worker["name"])),
        state,
        ", ".join(f"{count} {f.plain(name)}" for name, count in names.items()) or "none",
        f"{worker['measurements']:,}",
        f.UNKNOWN if worker["last"] is None else f.duration(worker["last"]),
        f.plain(worker["host"]),
        f.UNKNOWN if worker["pid"] is None else str(worker["pid"]),
    ]


def _error_lines(status: Document) -> Iterator[str]:
    """Yield each error once, with the workers that had it."""
    yield from status["troubles"]
    where: dict[str, list[str]] = {}
    for worker in status["workers"]:
        for trouble in worker["troubles"]:
            where.setdefault(trouble, []).append(str(worker["index"]))
    for trouble, workers in where.items():
        yield f"worker{'s' if len(workers) > 1 else ''} {format_ranges(workers)}: {trouble}"


def _paragraph(text: str, width: int) -> Iterator[str]:
    """Yield an error, which may end with a traceback of several lines."""
    first, *others = text.splitlines() or [""]
    yield from wrap(f"! {f.plain(first)}", width, "  ")
    for line in others:
        yield truncate(f"  {f.plain(line)}", width)


def _padded(cells: list[str], count: int) -> list[str]:
    return [*cells, *[f.UNKNOWN] * (count - len(cells))]
