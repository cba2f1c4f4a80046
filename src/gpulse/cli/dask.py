"""`gpulse dask`: record GPU metrics of a Dask cluster by job, graph and task, without writing code."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from gpulse.cli import common, dask_client
from gpulse.cli.common import CommandGroup
from gpulse.cli.progress import WaitNotice
from gpulse.cli.status import NOT_RUNNING
from gpulse.errors import GpulseError, UsageError
from gpulse.integrations.dask import Monitor, visualize
from gpulse.integrations.dask.csv_files import find_worker_files, read_table
from gpulse.integrations.dask.monitor import NotAttachedError
from gpulse.integrations.dask.trackable_metrics import find_unit, list_trackable
from gpulse.integrations.dask.worker_registry import MonitorStatus
from gpulse.terminal import value_format as f
from gpulse.terminal.dask_tables import (
    WorkerPeaks,
    describe_newest_job,
    describe_workers,
    peak_lines,
    status_lines,
)

_FILE = click.Path(path_type=Path, dir_okay=False)
_MAX_NAMED = 4
_DEFAULT_TRACKING = ("mem-util", "compute-util")

_MAX_WORKERS = 100_000
_CUSTOM_HINT = "give --custom metrics.py:power, where power is a function decorated with @custom_metric(...)"


def split_names(given: tuple[str, ...]) -> list[str]:
    """Return the names in several comma-separated lists."""
    return [name.strip() for text in given for name in text.split(",") if name.strip()]


def complete_names(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last name of a list: of recorded metrics if an export was named, else of all metrics."""
    before, comma, last = incomplete.rpartition(",")
    named = set(before.split(","))
    return [
        CompletionItem(f"{before}{comma}{name}")
        for name in _recorded_names(ctx) or list_trackable()
        if name.startswith(last) and name not in named
    ]


def _recorded_names(ctx: click.Context) -> list[str]:
    """Return the metrics of the export that was named, if any."""
    # After an option that still lacks its value, click has not assigned the arguments yet.
    place = ctx.params.get("place") or ctx.params.get("scheduler") or next(iter(ctx.args), None)
    try:
        if place is None or not Path(place).exists():
            return []
        path = next(iter(find_worker_files(place).values())) if Path(place).is_dir() else Path(place)
        return list(read_table(path).tracked)
    except GpulseError:
        return []


def load_custom_metrics(given: tuple[str, ...]) -> list[Any]:
    """Load the custom metrics that `FILE.py:NAME` and `MODULE:NAME` name.

    Raises:
        UsageError: One does not exist.
        GpulseError: Its code fails.
    """
    return [_load_custom_metric(text) for text in given]


def _load_custom_metric(text: str) -> Any:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"{text[:100]!r} does not name a custom metric", hint=_CUSTOM_HINT)
    is_file = place.endswith(".py") or "/" in place
    module = _load_module(
        place, lambda: _module_from_file(Path(place)) if is_file else importlib.import_module(place)
    )
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise UsageError(f"there is no {name!r} in {place}", hint=_CUSTOM_HINT) from error


@click.group(cls=CommandGroup)
def command() -> None:
    """Record GPU metrics of a running Dask cluster by job, graph and task, without changing its programs.

    SCHEDULER is the address of the cluster's scheduler: HOST, HOST:8786, tcp://HOST:8786 or tls://HOST:8786. gpulse
    must also be installed on the machines of the scheduler and the workers.

    \b
    gpulse dask attach tcp://head:8786 --start    record GPU memory and utilization
    gpulse dask status tcp://head:8786            show what is recorded
    gpulse dask peaks  tcp://head:8786 mem-util   show the highest values by worker and job
    gpulse dask stop   tcp://head:8786            stop recording
    gpulse dask csv    tcp://head:8786 metrics    write one file per worker to the directory metrics
    gpulse dask plot   metrics -o metrics.html    plot these files
    gpulse dask detach tcp://head:8786            stop, and discard the record
    """  # noqa: D301  click needs the backspace itself


@command.command()
@dask_client.options
@click.option(
    "--track",
    multiple=True,
    metavar="NAME[,NAME...]",
    default=_DEFAULT_TRACKING,
    show_default=",".join(_DEFAULT_TRACKING),
    shell_complete=complete_names,
    help="Metrics to record: tasks, total-mem, mem-util, compute-util, or any name in docs/reference/metrics.md; repeatable.",
)
@click.option(
    "--custom",
    multiple=True,
    metavar="FILE.py:NAME",
    help="Also record this @custom_metric function: FILE.py:NAME, or MODULE:NAME of a module installed on the workers; repeatable.",
)
@click.option(
    "--interval",
    type=float,
    default=200,
    show_default=True,
    metavar="MS",
    help="Milliseconds between measurements.",
)
@click.option(
    "--job-type",
    type=click.Choice(["client", "manual"]),
    default="client",
    show_default=True,
    help="How jobs are separated: client (one job per client connection) or manual (each `new-job` begins a job).",
)
@click.option(
    "--mem-limit",
    type=int,
    metavar="N",
    show_default="no limit",
    help="Keep at most N measurements per worker in memory; write the rest to disk.",
)
@click.option(
    "--dump-loc",
    default="temp",
    show_default=True,
    metavar="DIR",
    help="With --mem-limit: directory on the scheduler's machine for measurements over the limit.",
)
@click.option("--head", metavar="HOST[:8090]", help="Also stream all measurements to this gpulse head.")
@click.option(
    "--token-file", type=_FILE, metavar="FILE", help="File with the head's token (GPULSE_TOKEN_FILE)."
)
@click.option(
    "--tls-ca",
    type=_FILE,
    metavar="PEM",
    help="Connect to the head over TLS, and verify it with these CA certificates.",
)
@click.option("--start", "at_once", is_flag=True, help="Start recording at once.")
def attach(
    *,
    track: tuple[str, ...],
    custom: tuple[str, ...],
    interval: float,
    job_type: str,
    mem_limit: int | None,
    dump_loc: str,
    head: str | None,
    token_file: Path | None,
    tls_ca: Path | None,
    at_once: bool,
    **given: Any,
) -> None:
    """Attach a monitor to the cluster at SCHEDULER.

    Recording begins with `gpulse dask start`, or immediately with --start. Workers that join later are monitored too.

    \b
    gpulse dask attach tcp://head:8786 --start
    gpulse dask attach tcp://head:8786 --track tasks,mem-util,power_watts --interval 500
    gpulse dask attach tcp://head:8786 --track mem-util --custom metrics.py:nvlink_errors
    """  # noqa: D301  click needs the backspace itself
    scheduler = dask_client.pop_scheduler(given)
    if head is None and (token_file or tls_ca):
        raise click.UsageError("--token-file and --tls-ca require --head")
    metrics = load_custom_metrics(custom)
    with dask_client.connect_to_scheduler(scheduler, "attaching to the scheduler") as monitor:
        monitor.attach(
            tracking=split_names(track),
            custom_metrics=metrics,
            job_type=job_type,
            polling_interval=interval,
            mem_limit=mem_limit,
            dump_loc=dump_loc,
            head=head,
            head_token_file=_find_token_file(token_file) if head is not None else None,
            head_ca=tls_ca,
        )
        if at_once:
            monitor.start()
        status = monitor.status()
    _print_attached(status, scheduler, at_once=at_once)


def _print_attached(status: MonitorStatus, scheduler: dask_client.SchedulerAddress, *, at_once: bool) -> None:
    here = [worker for worker in _to_document(status)["workers"] if worker["here"]]
    what = f.plain(", ".join((*status.tracking, *status.custom)))
    state = "recording" if at_once else "ready to record"
    common.write(f"{state}: {what} of {describe_workers(here)}, every {status.polling_interval:g} ms")
    verb = "stop" if at_once else "start"
    common.write(f"{verb} recording with: gpulse dask {verb} {scheduler.address}")
    for trouble in status.troubles:
        common.print_note(f"gpulse: {f.plain(trouble)}")


@command.command()
@dask_client.options
def start(**given: Any) -> None:
    """Start recording, or continue after `stop`."""
    scheduler = dask_client.pop_scheduler(given)
    with dask_client.connect_to_scheduler(scheduler) as monitor:
        monitor.start()
        status = monitor.status()
    here = sum(worker.here for worker in status.workers)
    common.write(
        f"recording metrics of {_count(here, 'worker')}; stop recording with: gpulse dask stop {scheduler.address}"
    )


@command.command()
@dask_client.options
def stop(**given: Any) -> None:
    """Stop recording; the record stays in the cluster.

    It is kept until `gpulse dask detach`, or until another monitor is attached.
    """
    scheduler = dask_client.pop_scheduler(given)
    with dask_client.connect_to_scheduler(scheduler) as monitor:
        monitor.stop()
        status = monitor.status()
    common.write(
        f"stopped: {_describe_record(status)}; fetch the record with: gpulse dask csv {scheduler.address} DIR"
    )


@command.command("status")
@dask_client.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
def show_status(*, as_json: bool, no_color: bool, **given: Any) -> int:
    """Show which metrics of which workers are recorded, and what failed.

    The exit code is 3 when no monitor is attached.
    """
    scheduler = dask_client.pop_scheduler(given)
    try:
        with dask_client.connect_to_scheduler(scheduler) as monitor:
            status = _to_document(monitor.status())
    except NotAttachedError as error:
        if as_json:
            common.write(json.dumps({"attached": False}, indent=2))
        else:
            common.print_error("gpulse", error.message, error.hint)
        return NOT_RUNNING
    if as_json:
        common.write(json.dumps({"attached": True, **status}, indent=2))
    else:
        paint = common.paint(no_color=no_color)
        common.write(
            "\n".join(status_lines(status, scheduler.address, width=common.terminal_width(), paint=paint))
        )
    return 0


@command.command("new-job")
@dask_client.options
@click.option("--job", type=int, metavar="N", show_default="the next number", help="Number of the new job.")
def new_job(*, job: int | None, **given: Any) -> None:
    """Begin a new job; requires `attach --job-type manual`."""
    scheduler = dask_client.pop_scheduler(given)
    with dask_client.connect_to_scheduler(scheduler) as monitor:
        number = monitor.new_job(job=job)
    common.write(f"job {number} started")


@command.command()
@dask_client.options
def detach(**given: Any) -> None:
    """Stop monitoring and discard the record.

    Save the record first with `gpulse dask csv` or `gpulse dask parquet`.
    """
    scheduler = dask_client.pop_scheduler(given)
    with dask_client.connect_to_scheduler(scheduler) as monitor:
        status = monitor.status()
        monitor.detach()
    common.write(f"detached; discarded: {_describe_record(status)}")


@command.command("csv")
@dask_client.options
@click.argument("folder", required=False, metavar="DIR")
def export_csv(**given: Any) -> None:
    """Write the record to DIR, one CSV file per worker.

    This also works while recording. Files of an earlier export in DIR are replaced.

    \b
    gpulse dask csv tcp://head:8786 metrics
    """  # noqa: D301  click needs the backspace itself
    scheduler = dask_client.pop_scheduler(given, "folder")
    with dask_client.connect_to_scheduler(scheduler, "fetching the record from the scheduler") as monitor:
        paths = monitor.to_csv(given["folder"])
    _print_written(paths, given["folder"])


@command.command("parquet")
@dask_client.options
@click.argument("folder", required=False, metavar="DIR")
def export_parquet(**given: Any) -> None:
    """Write the record to DIR, one Parquet file per worker.

    This also works while recording. Files of an earlier export in DIR are replaced.
    """
    scheduler = dask_client.pop_scheduler(given, "folder")
    with dask_client.connect_to_scheduler(scheduler, "fetching the record from the scheduler") as monitor:
        paths = monitor.to_parquet(given["folder"])
    _print_written(paths, given["folder"])


def _print_written(paths: Sequence[Path], folder: str) -> None:
    names = [path.name for path in paths]
    listed = ", ".join(names) if len(names) <= _MAX_NAMED else f"{names[0]} ... {names[-1]}"
    common.write(f"wrote {_count(len(names), 'file')} to {f.plain(folder)}: {listed}")


def _describe_record(status: MonitorStatus) -> str:
    measurements = sum(worker.measurements for worker in status.workers)
    workers = _count(len(status.workers), "worker")
    return f"{_count(measurements, 'measurement')} of {workers}, {describe_newest_job(status.job)}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _to_document(status: MonitorStatus) -> dict[str, Any]:
    return {**status._asdict(), "workers": [worker._asdict() for worker in status.workers]}


def _find_token_file(given: Path | None) -> Path | None:
    """Return the token file that was named, that of GPULSE_TOKEN_FILE, or this user's if it can be read."""
    named = os.environ.get("GPULSE_TOKEN_FILE")
    if given is not None or named:
        return given or Path(str(named))
    default = common.default_token_file()
    return default if os.access(default, os.R_OK) else None


@command.command()
@dask_client.options
@click.argument("metric", required=False, metavar="METRIC", shell_complete=complete_names)
@click.option(
    "--workers",
    metavar="LIST",
    show_default="all",
    help="Show only these workers: indices and ranges, such as 0,8 or 0-3.",
)
@click.option(
    "--total", is_flag=True, help="Show the peaks of the whole recording instead of those of each job."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
def peaks(*, workers: str | None, total: bool, as_json: bool, no_color: bool, **given: Any) -> None:
    """Show the highest values of METRIC by worker, job and GPU.

    Instead of SCHEDULER, you can give a directory that `gpulse dask csv` wrote.

    \b
    gpulse dask peaks tcp://head:8786 mem-util
    gpulse dask peaks metrics compute-util --workers 0,8
    """  # noqa: D301  click needs the backspace itself
    wanted = None if workers is None else _parse_indices(workers)
    folder = given["scheduler"]
    if folder is not None and given["metric"] is not None and Path(folder).is_dir():
        indices, found = _peaks_from_folder(folder, given["metric"], wanted, per_job=not total)
    else:
        with _mention_folder(folder):
            scheduler = dask_client.pop_scheduler(given, "metric")
        with (
            _mention_folder(folder),
            dask_client.connect_to_scheduler(scheduler, "waiting for the scheduler") as monitor,
        ):
            indices = wanted if wanted is not None else [worker.index for worker in monitor.status().workers]
            found = monitor.get_peaks(given["metric"], indices, per_job=not total)
    _print_peaks(given["metric"], list(_flatten_peaks(indices, found)), as_json=as_json, no_color=no_color)


@contextmanager
def _mention_folder(text: str | None) -> Iterator[None]:
    """Mention in the hint of an unreachable scheduler that no directory of that name exists either."""
    try:
        yield
    except (dask_client.AddressError, dask_client.SchedulerUnreachableError) as error:
        if text is not None:
            error.hint = f"{error.hint}; or give a directory that `gpulse dask csv` wrote ({f.plain(text[:100])!r} is not such a directory)"
        raise


def _peaks_from_folder(
    folder: str, metric: str, wanted: list[int] | None, *, per_job: bool
) -> tuple[list[int], list[Any]]:
    with dask_client.reword_errors():
        indices = wanted if wanted is not None else list(find_worker_files(folder))
        return indices, Monitor.peaks_from_csv(folder, metric, indices, per_job=per_job)


def _parse_indices(text: str) -> list[int]:
    """Parse indices of workers, such as `0,8` or `0-3`.

    Raises:
        click.UsageError: The text is not a list of indices and ranges.
    """
    found: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        first, dash, last = word.partition("-")
        numbers = (first, last) if dash else (first, first)
        is_known = all(number.isdecimal() and int(number) < _MAX_WORKERS for number in numbers)
        if not is_known or int(numbers[0]) > int(numbers[1]):
            raise click.UsageError(
                f"--workers takes indices such as 0,8 and ranges such as 0-3, not {word!r}"
            )
        found += range(int(numbers[0]), int(numbers[1]) + 1)
    return list(dict.fromkeys(found))


def _flatten_peaks(indices: Sequence[int], found: Sequence[Any]) -> Iterator[WorkerPeaks]:
    for index, peak in zip(indices, found, strict=True):
        if isinstance(peak, dict):
            yield from (WorkerPeaks(index, job, values) for job, values in peak.items())
        else:
            yield WorkerPeaks(index, None, peak)


def _print_peaks(metric: str, found: list[WorkerPeaks], *, as_json: bool, no_color: bool) -> None:
    if as_json:
        common.write(json.dumps({"metric": metric, "peaks": [peak._asdict() for peak in found]}, indent=2))
        return
    if not found:
        common.write(f"no job was recorded; --total shows the highest {f.plain(metric)} of the whole record")
        return
    paint = common.paint(no_color=no_color)
    unit = find_unit(metric)
    common.write("\n".join(peak_lines(metric, found, unit, width=common.terminal_width(), paint=paint)))


@command.command()
@click.argument("place", type=click.Path(path_type=Path), metavar="DIR|FILE.csv")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="PICTURE",
    help="File to write: .html, .png, .svg or .pdf; an existing file is replaced.",
)
@click.option("--job", type=int, metavar="N", show_default="the whole record", help="Plot only this job.")
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME[,NAME...]",
    shell_complete=complete_names,
    show_default="all numeric metrics",
    help="Plot only these metrics; repeatable.",
)
@click.option(
    "--kind",
    type=click.Choice(["lines", "boxes", "cluster"]),
    show_default="cluster for a DIR, else lines",
    help="Kind of plot: lines or boxes (one worker), or cluster (all workers).",
)
@click.option(
    "--freq",
    type=click.IntRange(1),
    default=15,
    show_default=True,
    metavar="N",
    help="With --kind boxes: number of measurements per box.",
)
@click.option(
    "--width",
    type=float,
    default=20,
    show_default=True,
    metavar="INCHES",
    help="Width of the plot in inches.",
)
@click.option(
    "--height",
    type=float,
    default=10,
    show_default=True,
    metavar="INCHES",
    help="Height of the plot in inches.",
)
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
    """Plot a DIR that `csv` wrote, or one worker's FILE.

    \b
    gpulse dask plot metrics -o metrics.html
    gpulse dask plot metrics/worker-0.csv --job 1 --metric mem-util -o worker-0.png
    """  # noqa: D301  click needs the backspace itself
    named = split_names(metrics)
    if not place.exists():
        raise UsageError(
            f"there is no file or directory {place}",
            hint="give a directory that `gpulse dask csv` wrote, or one of its files",
        )
    size: dict[str, Any] = {"width": width, "height": height, "save": output}
    with dask_client.reword_errors(), WaitNotice("drawing"):
        if (kind or ("cluster" if place.is_dir() else "lines")) == "cluster":
            visualize.cluster(_export_folder(place), named or None, job, **size)
        else:
            draw = partial(visualize.boxes, freq=freq) if kind == "boxes" else visualize.lines
            draw(_worker_file(place), job, named or None, **size)
    common.write(f"wrote {f.plain(str(output))}")


def _export_folder(place: Path) -> Path:
    if place.is_file():
        raise UsageError(
            f"--kind cluster needs a directory, but {place} is the file of one worker",
            hint=f"give the directory {place.parent}, or --kind lines",
        )
    return place


def _worker_file(place: Path) -> Path:
    """Return the file of the one worker to plot.

    Raises:
        UsageError: There are several.
    """
    if not place.is_dir():
        return place
    files = list(find_worker_files(place).values())
    if len(files) > 1:
        raise UsageError(
            f"lines and boxes show one worker, but {place} has files of {len(files)} workers",
            hint=f"give one file, such as {files[0]}, or --kind cluster",
        )
    return files[0]


def _load_module(place: str, load: Any) -> Any:
    try:
        return load()
    except GpulseError:
        raise
    except ModuleNotFoundError as error:
        hint = "use --custom FILE.py:NAME for code that is not installed" if error.name == place else None
        raise UsageError(f"cannot load {place}: {error}", hint=hint or _CUSTOM_HINT) from error
    except (Exception, SystemExit) as error:
        raise GpulseError(
            f"cannot load {place}: {type(error).__name__}: {error}",
            hint=f"run `python3 {place}` to see the traceback",
        ) from error


def _module_from_file(path: Path) -> Any:
    """Load a file as a module that is not in `sys.modules`.

    Functions of importable modules are sent to workers by name; those of this module are sent as code, because workers
    do not have the file.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint=_CUSTOM_HINT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", hint=_CUSTOM_HINT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
