"""`gpulse job`: how well a job, a session or a process used its GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import remote, shell, target
from gpulse.errors import GpulseError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.reports.job_report import JobReport

_POINTS = 240
"""Moments of the page's curves."""


def _time(text: str) -> str:
    """A time for the head, as it was written; the head's clock is what `-2h` counts from.

    Raises:
        click.BadParameter: It is none.
    """
    from gpulse.model.time_text import parse_time  # noqa: PLC0415  --help needs none of it

    try:
        parse_time(text, 0.0)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return text


def _length(text: str) -> str:
    """A length of time, as it was written.

    Raises:
        click.BadParameter: It is none.
    """
    from gpulse.model.time_text import parse_duration  # noqa: PLC0415  as above

    try:
        parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return text


@click.command()
@click.argument("job", required=False, callback=remote.not_empty)
@click.option("--session", metavar="NAME", callback=remote.not_empty, help="A session instead of a job.")
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="A process and all that descend from it instead of a job.",
)
@click.option("--node", metavar="NAME", callback=remote.not_empty, help="Only what was on this node.")
@click.option("--from", "start", type=_time, metavar="TIME", help="Only from then on: ISO 8601, -2h, now.")
@click.option("--to", "end", type=_time, metavar="TIME", help="Only until then.")
@click.option("--since", type=_length, metavar="LENGTH", help="Only the last while, such as 2h.")
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--line", "as_line", is_flag=True, help="Print one line, for the end of a job's output.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Also write a page with curves, - for standard output alone; an existing file is replaced.",
)
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@target.options
def command(
    *,
    job: str | None,
    session: str | None,
    pid: int | None,
    node: str | None,
    start: str | None,
    end: str | None,
    since: str | None,
    as_json: bool,
    as_line: bool,
    page: Path | None,
    no_color: bool,
    **given: Any,
) -> None:
    """Say how well JOB used its GPUs: a scheduler's number, slurm:4711, or a session's name.

    \b
    gpulse job 4711                      GPU-hours, idle time, energy, findings, every GPU
    gpulse job 4711 --html report.html   the same with curves, in one file
    gpulse job $SLURM_JOB_ID --line      one line, for an epilog
    gpulse job --session training_run
    gpulse job --pid 1234 --node n1      a process and all below it

    The exit code is 1 when there is no such job, and 2 when the command makes no sense.
    """  # noqa: D301  click needs the backspace itself
    if as_json and as_line:
        raise UsageError("--json and --line are two answers", hint="leave out one of them")
    if since is not None and start is not None:
        raise UsageError("--since and --from both say when it begins", hint="leave out one of them")
    word, kind = _meant(job, session, pid)
    asked = {
        "job": word,
        "kind": kind,
        "node": node,
        "from": f"-{since}" if since is not None else start,
        "to": end,
        "points": None if page is None else _POINTS,
    }
    from gpulse.reports.job_report import JobReport  # noqa: PLC0415  --help needs none of it

    chosen = target.taken(given)
    body = {name: value for name, value in asked.items() if value is not None}
    if as_json and page is None:
        remote.print_json(_asked(chosen, dict, body))
        return
    report = _asked(chosen, JobReport, body)
    if page is not None and str(page) == remote.STDOUT:
        shell.write(_page(report).rstrip("\n"))
        return
    if as_json:
        remote.print_json(report)
    else:
        shell.write(_text(report, as_line=as_line, no_color=no_color))
    if page is not None:
        _save(page, _page(report))


def _asked(chosen: target.Target, answer: type[remote.Result], body: Mapping[str, Any]) -> remote.Result:
    """The head's report; what makes no sense to it is a wrong command."""
    from gpulse.errors import RefusedError  # noqa: PLC0415  --help needs none of it

    with remote.asking(chosen) as head:
        try:
            return head.call("job", answer, body)
        except RefusedError as error:
            if error.status == 400:
                raise UsageError(error.message, hint=error.hint) from error
            raise


def _meant(job: str | None, session: str | None, pid: int | None) -> tuple[str, str | None]:
    """The word to ask for, and what it is."""
    given = [word for word in (job, session, pid) if word is not None]
    if len(given) != 1:
        raise UsageError(
            "say which job" if not given else "JOB, --session and --pid mean one thing each",
            hint="gpulse job 4711, gpulse job --session NAME, or gpulse job --pid PID",
        )
    if session is not None:
        return session, "session"
    return (str(pid), "process") if job is None else (job, None)


def _text(report: JobReport, *, as_line: bool, no_color: bool) -> str:
    from gpulse.export.job_words import line  # noqa: PLC0415  --help needs none of it
    from gpulse.terminal.job import job_lines  # noqa: PLC0415

    if as_line:
        return f.plain(line(report))
    return "\n".join(job_lines(report, shell.width(), shell.paint(no_color=no_color)))


def _page(report: JobReport) -> str:
    from gpulse.export.job_page import page  # noqa: PLC0415  only pages need it

    return page(report)


def _save(path: Path, page: str) -> None:
    """Write a page, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise GpulseError(
            f"cannot write {path}: {error.strerror or error}", hint="another --html FILE"
        ) from error
    shell.remark(f"written: {f.plain(str(path))}")
