"""`gpulse dask peaks` and `plot`: what was recorded of a Dask cluster, from the cluster or from exported files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import dask_client, scheduler, shell, tracked
from gpulse.cli.remote import Waiting
from gpulse.errors import UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.terminal.dask import Peaks

_MOST_WORKERS = 100_000


@click.command()
@scheduler.options
@click.argument("metric", required=False, metavar="METRIC", shell_complete=tracked.complete_names)
@click.option(
    "--workers", metavar="LIST", help="Only these: indices and ranges, such as 0,8 or 0-3; all when left out."
)
@click.option("--total", is_flag=True, help="Over all of the record, not job by job.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
def peaks(*, workers: str | None, total: bool, as_json: bool, no_color: bool, **given: Any) -> None:
    """Show the highest values of METRIC by worker, job and GPU.

    Instead of SCHEDULER there can be a folder that `gpulse dask csv` wrote.

    \b
    gpulse dask peaks tcp://head:8786 mem-util
    gpulse dask peaks metrics compute-util --workers 0,8
    """  # noqa: D301  click needs the backspace itself
    asked = None if workers is None else _indices(workers)
    folder = given["scheduler"]
    if folder is not None and given["metric"] is not None and Path(folder).is_dir():
        indices, found = _of_folder(folder, given["metric"], asked, per_job=not total)
    else:
        with _folders_too(folder):
            place = scheduler.taken(given, "metric")
        with _folders_too(folder), dask_client.asking(place, "asking the scheduler") as monitor:
            indices = asked if asked is not None else [worker.index for worker in monitor.status().workers]
            found = monitor.get_peaks(given["metric"], indices, per_job=not total)
    _show(given["metric"], list(_each(indices, found)), as_json=as_json, no_color=no_color)


@contextmanager
def _folders_too(text: str | None) -> Iterator[None]:
    """When there is no such scheduler, say that there is no such folder either: that may be what was meant."""
    try:
        yield
    except (scheduler.AddressError, dask_client.UnreachableError) as error:
        if text is not None:
            error.hint = f"{error.hint}; or a folder that `gpulse dask csv` wrote: there is none {f.plain(text[:100])!r}"
        raise


def _of_folder(
    folder: str, metric: str, asked: list[int] | None, *, per_job: bool
) -> tuple[list[int], list[Any]]:
    from gpulse.integrations.dask.files import worker_files  # noqa: PLC0415  --help needs none of it
    from gpulse.integrations.dask.monitor import Monitor  # noqa: PLC0415

    with dask_client.reworded():
        indices = asked if asked is not None else list(worker_files(folder))
        return indices, Monitor.peaks_from_csv(folder, metric, indices, per_job=per_job)


def _indices(text: str) -> list[int]:
    """The workers that `0,8` or `0-3` names.

    Raises:
        click.UsageError: It names none.
    """
    found: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        first, dash, last = word.partition("-")
        numbers = (first, last) if dash else (first, first)
        is_known = all(number.isdecimal() and int(number) < _MOST_WORKERS for number in numbers)
        if not is_known or int(numbers[0]) > int(numbers[1]):
            raise click.UsageError(
                f"--workers takes indices such as 0,8 and ranges such as 0-3, not {word!r}"
            )
        found += range(int(numbers[0]), int(numbers[1]) + 1)
    return list(dict.fromkeys(found))


def _each(indices: Sequence[int], found: Sequence[Any]) -> Iterator[Peaks]:
    from gpulse.terminal.dask import Peaks  # noqa: PLC0415  as above

    for index, peak in zip(indices, found, strict=True):
        if isinstance(peak, dict):
            yield from (Peaks(index, job, values) for job, values in peak.items())
        else:
            yield Peaks(index, None, peak)


def _show(metric: str, found: list[Peaks], *, as_json: bool, no_color: bool) -> None:
    if as_json:
        shell.write(json.dumps({"metric": metric, "peaks": [peak._asdict() for peak in found]}, indent=2))
        return
    if not found:
        shell.write(f"no job was recorded; the highest {f.plain(metric)} of all of it: --total")
        return
    from gpulse.terminal.dask import peak_lines  # noqa: PLC0415  as above

    paint = shell.paint(no_color=no_color)
    unit = tracked.unit_of(metric)
    shell.write("\n".join(peak_lines(metric, found, unit, width=shell.width(), paint=paint)))


@click.command()
@click.argument("place", type=click.Path(path_type=Path), metavar="FOLDER|FILE.csv")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="PICTURE",
    help="What to draw into: .html, .png, .svg or .pdf; an existing file is replaced.",
)
@click.option("--job", type=int, metavar="N", help="Only this job; all of the record when left out.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME[,NAME...]",
    shell_complete=tracked.complete_names,
    help="Only this metric; can be given again. All that have numbers when left out.",
)
@click.option(
    "--kind",
    type=click.Choice(["lines", "boxes", "cluster"]),
    help="Lines or boxes of one worker, or all workers together; what fits FOLDER or FILE when left out.",
)
@click.option(
    "--freq", type=click.IntRange(1), default=15, show_default=True, metavar="N", help="Records in each box."
)
@click.option("--width", type=float, default=20, show_default=True, metavar="INCHES", help="Of the picture.")
@click.option("--height", type=float, default=10, show_default=True, metavar="INCHES", help="Of the picture.")
def plot(
    *,
    place: Path,
    output: Path,
    job: int | None,
    metrics: tuple[str, ...],
    kind: str | None,
    freq: int,
    width: float,
    height: float,
) -> None:
    """Draw what `csv` wrote: a FOLDER, or one worker's FILE.

    \b
    gpulse dask plot metrics -o metrics.html
    gpulse dask plot metrics/worker-0.csv --job 1 --metric mem-util -o worker-0.png
    """  # noqa: D301  click needs the backspace itself
    from gpulse.integrations.dask import visualize  # noqa: PLC0415  --help needs none of it

    named = tracked.split(metrics)
    if not place.exists():
        raise UsageError(
            f"there is no file or folder {place}",
            hint="a folder that `gpulse dask csv` wrote, or one of the files in it",
        )
    size: dict[str, Any] = {"width": width, "height": height, "save": output}
    with dask_client.reworded(), Waiting("drawing"):
        if (kind or ("cluster" if place.is_dir() else "lines")) == "cluster":
            visualize.cluster(_folder(place), named or None, job, **size)
        else:
            draw = partial(visualize.boxes, freq=freq) if kind == "boxes" else visualize.lines
            draw(_file(place), job, named or None, **size)
    shell.write(f"drawn: {f.plain(str(output))}")


def _folder(place: Path) -> Path:
    if place.is_file():
        raise UsageError(f"{place} is one worker's file", hint=f"the folder, {place.parent}, or --kind lines")
    return place


def _file(place: Path) -> Path:
    """The file of the one worker that is drawn.

    Raises:
        UsageError: There are several.
    """
    from gpulse.integrations.dask.files import worker_files  # noqa: PLC0415  as above

    if not place.is_dir():
        return place
    files = list(worker_files(place).values())
    if len(files) > 1:
        raise UsageError(
            f"lines and boxes are of one worker, and there are {len(files)} in {place}",
            hint=f"{files[0]}, or --kind cluster",
        )
    return files[0]
