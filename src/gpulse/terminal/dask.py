"""What monitors a Dask cluster, and the peaks that were seen, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.device import ranges
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, cut, render, width_of, wrapped

Document = Mapping[str, Any]
Value = float | int | None

_WORKER_COLUMNS = (
    Column("worker"),
    Column("name", right=False, least=8),
    Column("state", right=False),
    Column("GPUs", right=False, drop=2, least=6),
    Column("measurements", drop=1),
    Column("last at", drop=3),
    Column("host", right=False, drop=4, least=8),
    Column("pid", drop=5),
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
"""How values are said, by the unit that the catalogue has for their metric."""
_GAP = 2


class Peaks(NamedTuple):
    """The highest values of a worker, one a GPU."""

    worker: int
    job: int | None
    """None when all of the record counts."""
    values: Sequence[Value]


def status_lines(status: Document, place: str, *, width: int, paint: Paint) -> Iterator[str]:
    """What is recorded of a cluster, and of which workers.

    Args:
        status: What the cluster says.
        place: The scheduler's address.
        width: Columns of the terminal.
        paint: Puts on colours.
    """
    yield from wrapped(_headline(status, place), width, "  ")
    yield from wrapped(_tracking(status), width, "  ")
    workers = status["workers"]
    yield ""
    if workers:
        yield from render(_WORKER_COLUMNS, (_worker_row(worker, status) for worker in workers), width, paint)
    else:
        yield from wrapped(
            "the cluster has no workers yet; they are monitored from the moment they join", width
        )
    for number, trouble in enumerate(_troubles(status)):
        if not number:
            yield ""
        for line in _paragraph(trouble, width):
            yield paint("notice", line)


def workers_in_words(workers: Sequence[Document]) -> str:
    """How many there are and how many GPUs each sees, such as `2 workers seeing 4 GPUs each (NVIDIA H200)`.

    Workers of one machine may see the same ones, so they are not added up.
    """
    counts = sorted({len(worker["gpus"]) for worker in workers})
    said = f"{len(workers):,} worker{'' if len(workers) == 1 else 's'}"
    if not any(counts):
        return f"{said} without a GPU" if workers else said
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    gpus = f"{number} GPU{'' if counts[-1] == 1 else 's'}{'' if len(workers) == 1 else ' each'}"
    names = dict.fromkeys(f.plain(name) for worker in workers for name in worker["gpus"])
    return f"{said} seeing {gpus} ({', '.join(names)})"


def newest_job(number: int) -> str:
    """It in words; numbers may have been left out, so it does not say how many there were."""
    return f"newest job {number}" if number else "no job yet"


def peak_lines(
    metric: str, peaks: Sequence[Peaks], unit: str = "", *, width: int, paint: Paint
) -> Iterator[str]:
    """The highest values of a metric, a line a worker and job, or also a GPU where that would be too wide.

    Args:
        metric: Its name.
        peaks: What there is.
        unit: Of the values, as the catalogue calls it; `ratio` for shares of 1.
        width: Columns of the terminal. Values are never cut, which could make others of them.
        paint: Puts on colours.
    """
    most = max((len(peak.values) for peak in peaks), default=0)
    gpus = [f"GPU {number}" for number in range(most)] if most > 1 else []
    table = _wide(peaks, gpus or [f.plain(metric)], unit)
    is_tall = _width(table) > width
    if gpus or is_tall:
        yield from wrapped(f"highest {f.plain(metric)}", width)
    if is_tall:
        table = _tall(peaks, unit, gpus=bool(gpus))
    titles, *rows = table
    yield from render([*map(Column, titles)], rows, max(width, _width(table)), paint)


def value_of(value: Value, unit: str) -> str:
    """A value as people read it."""
    if value is None:
        return f.UNKNOWN
    if unit in _UNITS:
        return _UNITS[unit](value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _wide(peaks: Sequence[Peaks], titles: Sequence[str], unit: str) -> list[list[str]]:
    """A column a GPU."""
    head, whose = _whose(peaks)
    return [
        [*head, *titles],
        *(
            [*who, *_padded([value_of(value, unit) for value in peak.values], len(titles))]
            for who, peak in zip(whose, peaks, strict=True)
        ),
    ]


def _tall(peaks: Sequence[Peaks], unit: str, *, gpus: bool) -> list[list[str]]:
    """A line a GPU."""
    head, whose = _whose(peaks)
    return [
        [*head, *(["GPU"] if gpus else []), "peak"],
        *(
            [*who, *([str(number)] if gpus else []), value_of(value, unit)]
            for who, peak in zip(whose, peaks, strict=True)
            for number, value in enumerate(peak.values or [None])
        ),
    ]


def _whose(peaks: Sequence[Peaks]) -> tuple[list[str], list[list[str]]]:
    """Workers, and their jobs where these count."""
    if all(peak.job is None for peak in peaks):
        return ["worker"], [[str(peak.worker)] for peak in peaks]
    return ["worker", "job"], [[str(peak.worker), str(peak.job)] for peak in peaks]


def _width(table: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal that a table needs."""
    wide = [max(map(width_of, column)) for column in zip(*table, strict=True)]
    return sum(wide) + _GAP * (len(wide) - 1)


def _headline(status: Document, place: str) -> str:
    state = "is monitored" if status["running"] else "is not monitored now"
    if not status["started"]:
        state = "has a monitor that was not started yet"
    numbered = "by client" if status["job_type"] == "client" else "by new-job"
    dags = status["dags"]
    return (
        f"the cluster at {f.plain(place)} {state}: "
        f"{newest_job(status['job'])} ({numbered}), {dags} graph{'' if dags == 1 else 's'}"
    )


def _tracking(status: Document) -> str:
    named = [*status["tracking"], *(f"{name} (custom)" for name in status["custom"])]
    limit = f", {status['mem_limit']:,} measurements in memory" if status["mem_limit"] is not None else ""
    head = f", streamed to the head at {f.plain(str(status['head']))}" if status["head"] else ""
    return f"every {status['polling_interval']:g} ms: {f.plain(', '.join(named))}{limit}{head}"


def _worker_row(worker: Document, status: Document) -> list[Cell | str]:
    if not worker["here"]:
        state = Cell("left", "notice")
    elif worker["troubles"]:
        state = Cell("trouble", "notice")
    else:
        state = Cell("recording", "good") if status["running"] else Cell("idle")
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


def _troubles(status: Document) -> Iterator[str]:
    """What went wrong, each once, with the workers where it did."""
    yield from status["troubles"]
    where: dict[str, list[str]] = {}
    for worker in status["workers"]:
        for trouble in worker["troubles"]:
            where.setdefault(trouble, []).append(str(worker["index"]))
    for trouble, workers in where.items():
        yield f"worker{'s' if len(workers) > 1 else ''} {ranges(workers)}: {trouble}"


def _paragraph(text: str, width: int) -> Iterator[str]:
    """A trouble, which may end with a traceback of several lines."""
    first, *others = text.splitlines() or [""]
    yield from wrapped(f"! {f.plain(first)}", width, "  ")
    for line in others:
        yield cut(f"  {f.plain(line)}", width)


def _padded(cells: list[str], count: int) -> list[str]:
    return [*cells, *[f.UNKNOWN] * (count - len(cells))]
