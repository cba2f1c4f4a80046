"""`gpulse job`: show how well a job, a session or a process used its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from gpulse.atomic_files import replace_file
from gpulse.cli import common, head_client, session_download
from gpulse.errors import GpulseError, RefusedError, UsageError
from gpulse.export import job_report_text as words
from gpulse.model.time_text import parse_duration, parse_time
from gpulse.reports.job_report import JobGpu, JobReport
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, truncate, wrap

_MAX_CURVE_POINTS = 240
"""Points per curve of the HTML page."""
_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_USE_STYLES = {"untouched": "notice", "unattributed": "notice"}
_MAX_GPUS = 128
_GPU_COLUMNS = (
    TableColumn("Node", right=False, least=8),
    TableColumn("GPU", right=False),
    TableColumn("Model", right=False, drop=11, least=8, optional=True),
    TableColumn("Allocated", drop=10, optional=True),
    TableColumn("Held"),
    TableColumn("Idle", drop=2),
    TableColumn("Busy", drop=1),
    TableColumn("SM", drop=4, optional=True),
    TableColumn("Tensor", drop=5, optional=True),
    TableColumn("DRAM", drop=6, optional=True),
    TableColumn("Memory", drop=3, optional=True),
    TableColumn("Power", drop=7, optional=True),
    TableColumn("Energy", drop=8, optional=True),
    TableColumn("", right=False, drop=9, optional=True),
)
_METRIC_COLUMNS = (
    TableColumn("", right=False),
    TableColumn("mean"),
    TableColumn("peak"),
    TableColumn("cluster", optional=True),
)


def _check_time(text: str) -> str:
    """Check a time and return it as written: `-2h` is relative to the head's clock.

    Raises:
        click.BadParameter: It is not a time.
    """
    try:
        parse_time(text, 0.0)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return text


def _check_duration(text: str) -> str:
    """Check a duration and return it as written.

    Raises:
        click.BadParameter: It is not a duration.
    """
    try:
        parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return text


@click.command()
@click.argument("job", required=False, callback=session_download.reject_empty_name)
@click.option(
    "--session",
    metavar="NAME",
    callback=session_download.reject_empty_name,
    help="Report on this session instead of a job.",
)
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="Report on this process and its descendants instead of a job.",
)
@click.option(
    "--node", metavar="NAME", callback=session_download.reject_empty_name, help="Report only on this node."
)
@click.option(
    "--from", "start", type=_check_time, metavar="TIME", help="Start of the time range: ISO 8601, -2h or now."
)
@click.option(
    "--to", "end", type=_check_time, metavar="TIME", help="End of the time range: ISO 8601, -2h or now."
)
@click.option(
    "--since", type=_check_duration, metavar="LENGTH", help="Report only on the last LENGTH, such as 2h."
)
@click.option("--json", "as_json", is_flag=True, help="Print the head's answer as JSON.")
@click.option("--line", "as_line", is_flag=True, help="Print a single line, for the end of a job's output.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Also write the report as an HTML page with charts; an existing file is replaced. `-` prints the page instead of the text.",
)
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@head_client.options
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
    """Show how well JOB used its GPUs.

    JOB is a scheduler's job ID, such as 4711 or slurm:4711, or the name of a session.

    \b
    gpulse job 4711                      show GPU-hours, idle time, energy and findings
    gpulse job 4711 --html report.html   also write the report as an HTML page with charts
    gpulse job $SLURM_JOB_ID --line      print one line, for an epilog
    gpulse job --session training_run    report on a session
    gpulse job --pid 1234 --node n1      report on a process and its descendants

    The exit code is 1 when there is no such job, and 2 for wrong usage.
    """  # noqa: D301  click needs the backspace itself
    if as_json and as_line:
        raise UsageError("--json and --line cannot be used together", hint="leave out one of these options")
    if since is not None and start is not None:
        raise UsageError("--since and --from cannot be used together", hint="leave out one of these options")
    word, kind = _parse_target(job, session, pid)
    asked = {
        "job": word,
        "kind": kind,
        "node": node,
        "from": f"-{since}" if since is not None else start,
        "to": end,
        "points": None if page is None else _MAX_CURVE_POINTS,
    }
    chosen = head_client.pop_target(given)
    body = {name: value for name, value in asked.items() if value is not None}
    if as_json and page is None:
        head_client.print_json(_fetch_report(chosen, dict, body))
        return
    report = _fetch_report(chosen, JobReport, body)
    if page is not None and str(page) == session_download.STDOUT:
        common.write(_render_page(report).rstrip("\n"))
        return
    if as_json:
        head_client.print_json(report)
    else:
        common.write(_format_report(report, as_line=as_line, no_color=no_color))
    if page is not None:
        _save_page(page, _render_page(report))


def _fetch_report(
    chosen: head_client.HeadTarget, answer: type[head_client.Result], body: Mapping[str, Any]
) -> head_client.Result:
    """Fetch the head's report; a request that it rejects as invalid is a usage error."""
    with head_client.connect_to_head(chosen) as head:
        try:
            return head.call("job", answer, body)
        except RefusedError as error:
            if error.status == 400:
                raise UsageError(error.message, hint=error.hint) from error
            raise


def _parse_target(job: str | None, session: str | None, pid: int | None) -> tuple[str, str | None]:
    """Return the job, session or process to report on, and its kind."""
    given = [word for word in (job, session, pid) if word is not None]
    if len(given) != 1:
        raise UsageError(
            "JOB is missing" if not given else "JOB, --session and --pid cannot be used together",
            hint="gpulse job 4711, gpulse job --session NAME, or gpulse job --pid PID",
        )
    if session is not None:
        return session, "session"
    return (str(pid), "process") if job is None else (job, None)


def _format_report(report: JobReport, *, as_line: bool, no_color: bool) -> str:
    if as_line:
        return f.plain(words.one_line_summary(report))
    return "\n".join(job_lines(report, common.terminal_width(), common.paint(no_color=no_color)))


def _render_page(report: JobReport) -> str:
    from gpulse.export.job_report_html import build_page  # noqa: PLC0415  loads NumPy, which only pages need

    return build_page(report)


def _save_page(path: Path, page: str) -> None:
    """Write a page atomically."""
    try:
        replace_file(path, page.encode(), durable=False)
    except OSError as error:
        raise GpulseError(
            f"cannot write {path}: {error.strerror or error}", hint="choose another file with --html FILE"
        ) from error
    common.print_note(f"wrote {f.plain(str(path))}")


def job_lines(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    """Yield the whole report as lines no wider than `width`."""
    yield paint("title", truncate(f.plain(words.headline(report)), width))
    yield from wrap(f.plain(words.subtitle(report)), width)
    for section in (
        _facts(report, width),
        _metrics(report, width, paint),
        _gpus(report, width, paint),
        _findings(report, width, paint),
        _data_gaps(report, width, paint),
    ):
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _facts(report: JobReport, width: int) -> Iterator[str]:
    facts = list(words.describe_facts(report))
    wide = max(len(name) for name, _ in facts) + 2
    for name, text in facts:
        yield from wrap(f"{name:<{wide}}{f.plain(text)}", width, " " * wide)


def _metrics(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    rows = [[one.title, one.mean, one.peak, one.cluster] for one in words.describe_metrics(report)]
    if rows:
        yield from render_table(_METRIC_COLUMNS, rows, width, paint)


def _gpus(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    rows = report.gpu_rows
    if rows:
        yield from render_table(_GPU_COLUMNS, (_gpu(row) for row in rows[:_MAX_GPUS]), width, paint)
    more = report.gpus - _MAX_GPUS
    if more > 0:
        yield paint("dim", f"and {f.count_noun(more, 'more GPU')}")


def _gpu(row: JobGpu) -> list[TableCell | str]:
    used, total = row.peak("memory_used_bytes"), row.memory_total_bytes
    remark = words.USE_TEXTS.get(row.use or "", "") or ("shared" if row.shared else "")
    return [
        f.plain(words.clean_text(row.node, 60)),
        f.plain(words.clean_text(row.gpu or f.UNKNOWN, 10)),
        f.plain(words.clean_text(row.model or f.UNKNOWN, 40)),
        words.span_hours(row.allocated_seconds),
        words.span_hours(row.held_seconds),
        words.span_hours(row.idle_seconds),
        f.share(row.utilization_mean),
        f.share(row.mean("sm_active_ratio")),
        f.share(row.mean("tensor_active_ratio")),
        f.share(row.mean("dram_active_ratio")),
        f.size(used) if total is None else f.sizes(used, total),
        f.watts(row.mean("power_watts")),
        f.energy(row.energy_joules),
        TableCell(remark, _USE_STYLES.get(row.use or "", "dim")),
    ]


def _findings(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    found = words.describe_findings(report)
    if found:
        yield paint("title", "Findings")
    for finding in found:
        text = f"  {finding.severity}: {finding.text} ({finding.id}; {finding.when})"
        style = _STYLES.get(finding.severity, "dim")
        yield from (paint(style, line) for line in wrap(f.plain(text), width, "    "))
        if finding.code is not None:
            yield from wrap(f.plain(f"    where: {finding.code}"), width, "      ")
        for advice in finding.advice[:1]:
            yield from wrap(f.plain(f"    try: {words.clean_text(advice.do, 300)}"), width, "      ")


def _data_gaps(report: JobReport, width: int, paint: Paint) -> Iterator[str]:
    gaps = words.describe_data_gaps(report)
    if gaps:
        yield paint("title", "Missing data")
    for gap in gaps:
        yield from wrap(f"  {f.plain(gap)}", width, "    ")
