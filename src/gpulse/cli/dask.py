"""`gpulse dask`: GPU metrics of a Dask cluster by job, graph and task, without writing code."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import dask_client, scheduler, service, shell, tracked
from gpulse.cli.dask_record import peaks, plot
from gpulse.cli.status import NOT_RUNNING
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.integrations.dask.status import Status

_FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_NAMED = 4
_DEFAULT_TRACKING = ("mem-util", "compute-util")


@click.group()
def command() -> None:
    """Metrics of a Dask cluster's GPUs by job, graph and task, while it runs and without changing what runs on it.

    SCHEDULER is where the cluster's scheduler is: HOST, HOST:8786, tcp://HOST:8786, tls://HOST:8786. gpulse must be
    installed on the scheduler's and the workers' machines too.

    \b
    gpulse dask attach tcp://head:8786 --start    record GPU memory and use of every worker
    gpulse dask status tcp://head:8786            what is recorded, and of whom
    gpulse dask peaks  tcp://head:8786 mem-util   highest values, by worker and job
    gpulse dask stop   tcp://head:8786
    gpulse dask csv    tcp://head:8786 metrics    a file a worker into the folder metrics
    gpulse dask plot   metrics -o metrics.html
    gpulse dask detach tcp://head:8786            end it, and drop the record
    """  # noqa: D301  click needs the backspace itself


@command.command()
@scheduler.options
@click.option(
    "--track",
    multiple=True,
    metavar="NAME[,NAME...]",
    default=_DEFAULT_TRACKING,
    shell_complete=tracked.complete_names,
    help="What to track: tasks, total-mem, mem-util, compute-util, or any name of docs/metrics.md; can be given again."
    f" {','.join(_DEFAULT_TRACKING)} when left out.",
)
@click.option(
    "--custom",
    multiple=True,
    metavar="FILE.py:NAME",
    help="A function under @custom_metric, of a file or (MODULE:NAME) of a module that workers have too.",
)
@click.option(
    "--interval",
    type=float,
    default=200,
    show_default=True,
    metavar="MS",
    help="Milliseconds between two measurements.",
)
@click.option(
    "--job-type",
    type=click.Choice(["client", "manual"]),
    default="client",
    show_default=True,
    help="Each connection that submits work is a job, or `new-job` says when one begins.",
)
@click.option(
    "--mem-limit",
    type=int,
    metavar="N",
    help="Keep so many measurements of a worker in memory, the others on disk.",
)
@click.option(
    "--dump-loc",
    default="temp",
    show_default=True,
    metavar="DIR",
    help="Where on the scheduler's machine those go.",
)
@click.option("--head", metavar="HOST[:8090]", help="A gpulse head that gets everything too.")
@click.option("--token-file", type=_FILE, metavar="FILE", help="The head's token (GPULSE_TOKEN_FILE).")
@click.option("--tls-ca", type=_FILE, metavar="PEM", help="Speak TLS with the head; who vouches for it.")
@click.option("--start", "at_once", is_flag=True, help="Start to record at once.")
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

    `gpulse dask start` makes it record, or --start at once. Workers that join later are monitored from the moment they join.

    \b
    gpulse dask attach tcp://head:8786 --start
    gpulse dask attach tcp://head:8786 --track tasks,mem-util,power_watts --interval 500
    gpulse dask attach tcp://head:8786 --track mem-util --custom metrics.py:nvlink_errors
    """  # noqa: D301  click needs the backspace itself
    place = scheduler.taken(given)
    if head is None and (token_file or tls_ca):
        raise click.UsageError("--token-file and --tls-ca are for --head")
    metrics = tracked.custom_metrics(custom)
    with dask_client.asking(place, "attaching to the scheduler") as monitor:
        monitor.attach(
            tracking=tracked.split(track),
            custom_metrics=metrics,
            job_type=job_type,
            polling_interval=interval,
            mem_limit=mem_limit,
            dump_loc=dump_loc,
            head=head,
            head_token_file=_token_file(token_file) if head is not None else None,
            head_ca=tls_ca,
        )
        if at_once:
            monitor.start()
        status = monitor.status()
    _say_attached(status, place, at_once=at_once)


def _say_attached(status: Status, place: scheduler.Place, *, at_once: bool) -> None:
    from gpulse.terminal.dask import workers_in_words  # noqa: PLC0415  --help needs none of it

    here = [worker for worker in _document(status)["workers"] if worker["here"]]
    what = f.plain(", ".join((*status.tracking, *status.custom)))
    state = "recording" if at_once else "ready to record"
    shell.write(f"{state}: {what} of {workers_in_words(here)}, every {status.polling_interval:g} ms")
    shell.write(
        f"{'end it' if at_once else 'begin'} with: gpulse dask {'stop' if at_once else 'start'} {place.address}"
    )
    for trouble in status.troubles:
        shell.remark(f"gpulse: {f.plain(trouble)}")


@command.command()
@scheduler.options
def start(**given: Any) -> None:
    """Start to record, or go on after `stop`."""
    place = scheduler.taken(given)
    with dask_client.asking(place) as monitor:
        monitor.start()
        status = monitor.status()
    here = sum(worker.here for worker in status.workers)
    shell.write(f"recording {_count(here, 'worker')}; end it with: gpulse dask stop {place.address}")


@command.command()
@scheduler.options
def stop(**given: Any) -> None:
    """Stop to record; the record stays in the cluster.

    It stays until `gpulse dask detach`, or until another monitor is attached.
    """
    place = scheduler.taken(given)
    with dask_client.asking(place) as monitor:
        monitor.stop()
        status = monitor.status()
    shell.write(f"stopped: {_recorded(status)}; fetch it with: gpulse dask csv {place.address} FOLDER")


@command.command("status")
@scheduler.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
def show_status(*, as_json: bool, no_color: bool, **given: Any) -> int:
    """Show what is recorded, of which workers, and what went wrong.

    The exit code is 3 when no monitor is attached.
    """
    from gpulse.integrations.dask.monitor import NotAttachedError  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.dask import status_lines  # noqa: PLC0415

    place = scheduler.taken(given)
    try:
        with dask_client.asking(place) as monitor:
            status = _document(monitor.status())
    except NotAttachedError as error:
        if as_json:
            shell.write(json.dumps({"attached": False}, indent=2))
        else:
            shell.complain("gpulse", error.message, error.hint)
        return NOT_RUNNING
    if as_json:
        shell.write(json.dumps({"attached": True, **status}, indent=2))
    else:
        paint = shell.paint(no_color=no_color)
        shell.write("\n".join(status_lines(status, place.address, width=shell.width(), paint=paint)))
    return 0


@command.command("new-job")
@scheduler.options
@click.option("--job", type=int, metavar="N", help="This number instead of the next.")
def new_job(*, job: int | None, **given: Any) -> None:
    """Begin a new job, where jobs are counted by hand.

    They are after `gpulse dask attach --job-type manual`.
    """
    place = scheduler.taken(given)
    with dask_client.asking(place) as monitor:
        number = monitor.new_job(job=job)
    shell.write(f"job {number} begins")


@command.command()
@scheduler.options
def detach(**given: Any) -> None:
    """End the monitoring and drop the record.

    `gpulse dask csv` or `parquet` fetches the record before.
    """
    place = scheduler.taken(given)
    with dask_client.asking(place) as monitor:
        status = monitor.status()
        monitor.detach()
    shell.write(f"detached; dropped: {_recorded(status)}")


@command.command("csv")
@scheduler.options
@click.argument("folder", required=False, metavar="FOLDER")
def export_csv(**given: Any) -> None:
    """Write the record into FOLDER, a CSV file a worker.

    It can be written while it goes on; files of an earlier export there are replaced.

    \b
    gpulse dask csv tcp://head:8786 metrics
    """  # noqa: D301  click needs the backspace itself
    place = scheduler.taken(given, "folder")
    with dask_client.asking(place, "fetching the record from the scheduler") as monitor:
        paths = monitor.to_csv(given["folder"])
    _say_written(paths, given["folder"])


@command.command("parquet")
@scheduler.options
@click.argument("folder", required=False, metavar="FOLDER")
def export_parquet(**given: Any) -> None:
    """Write the record into FOLDER, a Parquet file a worker.

    It can be written while it goes on; files of an earlier export there are replaced.
    """
    place = scheduler.taken(given, "folder")
    with dask_client.asking(place, "fetching the record from the scheduler") as monitor:
        paths = monitor.to_parquet(given["folder"])
    _say_written(paths, given["folder"])


command.add_command(peaks)
command.add_command(plot)


def _say_written(paths: Sequence[Path], folder: str) -> None:
    names = [path.name for path in paths]
    listed = ", ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} ... {names[-1]}"
    shell.write(f"wrote {_count(len(names), 'file')} into {f.plain(folder)}: {listed}")


def _recorded(status: Status) -> str:
    from gpulse.terminal.dask import newest_job  # noqa: PLC0415  --help needs none of it

    measurements = sum(worker.measurements for worker in status.workers)
    workers = _count(len(status.workers), "worker")
    return f"{_count(measurements, 'measurement')} of {workers}, {newest_job(status.job)}"


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _document(status: Status) -> dict[str, Any]:
    return {**status._asdict(), "workers": [worker._asdict() for worker in status.workers]}


def _token_file(given: Path | None) -> Path | None:
    """The file that was named, that of the environment, or this user's when there is one."""
    named = os.environ.get("GPULSE_TOKEN_FILE")
    if given is not None or named:
        return given or Path(str(named))
    default = service.default_token_file()
    return default if os.access(default, os.R_OK) else None
