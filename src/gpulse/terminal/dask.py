"""What monitors a Dask cluster, and the peaks that were seen, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpulse.model.device import ranges
from gpulse.terminal import format as f
from gpulse.terminal.table import Cell, Column, Paint, cut, render, wrapped

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
_UNITS: tuple[tuple[str, Callable[[Value], str]], ...] = (
    ("_bytes_per_second", f.rate),
    ("_bytes", f.size),
    ("total-mem", f.size),
    ("-util", lambda value: f.UNKNOWN if value is None else f"{value:g}%"),
    ("_ratio", f.share),
    ("_watts", f.watts),
    ("_celsius", f.celsius),
    ("_hertz", f.megahertz),
    ("_seconds", f.seconds),
)
"""How values of a metric are said, by how its name ends."""


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


def gpus_of(workers: Iterable[Document]) -> str:
    """The GPUs of some workers in words, such as `4 GPUs (NVIDIA H200)`."""
    names = Counter(name for worker in workers for name in worker["gpus"])
    count = names.total()
    if not count:
        return "no GPU"
    return f"{count} GPU{'s' if count > 1 else ''} ({', '.join(map(f.plain, names))})"


def peak_lines(metric: str, peaks: Sequence[Peaks], *, width: int, paint: Paint) -> Iterator[str]:
    """The highest values of a metric, a line a worker and job.

    Args:
        metric: Its name.
        peaks: What there is.
        width: Columns of the terminal.
        paint: Puts on colours.
    """
    most = max((len(peak.values) for peak in peaks), default=0)
    titles = [f.plain(metric)] if most < 2 else [f"GPU {number}" for number in range(most)]
    columns = [Column("worker"), Column("job", optional=True), *map(Column, titles)]
    if most > 1:
        yield from wrapped(f"highest {f.plain(metric)}", width)
    rows = [
        [
            str(peak.worker),
            f.UNKNOWN if peak.job is None else str(peak.job),
            *_padded([value_of(metric, value) for value in peak.values], len(titles)),
        ]
        for peak in peaks
    ]
    yield from render(columns, rows, width, paint)


def value_of(metric: str, value: Value) -> str:
    """A value as people read it, in the unit that the name of its metric says."""
    for ending, said in _UNITS:
        if metric.endswith(ending):
            return said(value)
    return f.UNKNOWN if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _headline(status: Document, place: str) -> str:
    state = "is monitored" if status["running"] else "is not monitored now"
    if not status["started"]:
        state = "has a monitor that was not started yet"
    numbered = "by client" if status["job_type"] == "client" else "by new-job"
    jobs, dags = status["jobs"], status["dags"]
    return (
        f"the cluster at {f.plain(place)} {state}: "
        f"{jobs} job{'' if jobs == 1 else 's'} ({numbered}), {dags} graph{'' if dags == 1 else 's'}"
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
