"""`gpulse report`: statistics and plots of a session's file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gpulse.cli import common
from gpulse.errors import GpulseError
from gpulse.export.session_report import session_charts, session_figures
from gpulse.export.session_report.file_reader import read_report
from gpulse.export.session_report.session_figures import GpuFigures, NodeFigures, SessionReport
from gpulse.export.session_report.session_json_reader import find_newer_file, find_session_file
from gpulse.model.formatting import energy
from gpulse.terminal import value_format as f
from gpulse.terminal.table import Paint, TableCell, TableColumn, render_table, truncate, wrap

_MAX_GAPS = 20
_STATISTICS = (("mean", 0), ("p50", 3), ("p95", 1), ("max", 2))
"""Statistics of every quantity, and the order in which they are dropped in a narrow window."""
_STYLES = {"critical": "warn", "high": "warn", "medium": "notice", "low": "notice"}
_LOW_AVAILABILITY_RATIO = 0.99


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE|NAME")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PICTURE",
    help="Also plot to this file: .pdf, .png, .svg or .html; an existing file is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
def command(*, file: Path, plot: Path | None, as_json: bool, no_color: bool) -> int:
    """Show statistics of a session from its FILE (.json or .jsonl), or from the newest file of the session NAME.

    If a second session has the same name, its file is training_run_1-2.json, and NAME selects that file.

    \b
    gpulse report training_run_1
    gpulse report training_run_1.json
    gpulse report training_run_1.json --plot training_run_1.pdf
    """  # noqa: D301  click needs the backspace itself
    return show(file, plot, as_json=as_json, no_color=no_color)


def show(file: Path, plot: Path | None, *, as_json: bool = False, no_color: bool = False) -> int:
    """Print the report of a file, plot it if asked, and return the exit code."""
    if plot is not None:
        session_charts.check_output_path(plot)
    found = find_session_file(file)
    if found != file:
        common.print_note(f"reading {f.plain(str(found))}")
    elif (newer := find_newer_file(file)) is not None:
        common.print_note(f"{f.plain(str(newer))} is from a newer session with the same name")
    report = read_report(found)
    try:
        if as_json:
            common.write(json.dumps(report.to_dict(), indent=2))
        else:
            common.write(
                "\n".join(report_lines(report, common.terminal_width(), common.paint(no_color=no_color)))
            )
    finally:  # also when the reader closes the pipe after the first lines
        if plot is not None:
            try:
                session_charts.write_charts(report, plot)
            except OSError as error:
                raise GpulseError(
                    f"cannot write {plot}: {error.strerror or error}", hint="choose another file with --plot"
                ) from error
            common.print_note(f"wrote {f.plain(str(plot))}")
    return 0


def report_lines(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    """Yield the whole report as lines no wider than `width`."""
    yield paint("title", truncate(f.plain(session_figures.headline(report)), width))
    yield from wrap(f.plain(session_figures.subtitle(report)), width)
    if report.labels:
        labels = ", ".join(f"{name}: {value}" for name, value in report.labels.items())
        yield from (paint("dim", line) for line in wrap(f.plain(labels), width))
    for section in (
        _gpus(report, width, paint),
        _nodes(report, width, paint) if len(report.nodes) > 1 else iter(()),
        _outages(report, width, paint),
        _gaps(report, width, paint),
        _findings(report, width, paint),
        _notes(report, width, paint),
    ):
        lines = list(section)
        if lines:
            yield ""
            yield from lines


def _gpus(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    columns = [
        TableColumn("Node", right=False, least=8),
        TableColumn("GPU", right=False, optional=True),
        TableColumn("Model", right=False, drop=30, least=8, optional=True),
    ]
    rows: list[list[TableCell | str]] = [
        [f.plain(gpu.node if gpu.label else gpu.id), gpu.label, f.plain(gpu.model), *_cells(report, gpu)]
        for gpu in report.gpus
    ]
    yield from render_table([*columns, *_columns(report)], rows, width, paint)


def _nodes(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    columns = [TableColumn("Node", right=False, least=8), TableColumn("GPUs")]
    rows: list[list[TableCell | str]] = [
        [f.plain(node.name), str(len(node.gpus)), *_cells(report, node)] for node in report.nodes
    ]
    yield from render_table([*columns, *_columns(report)], rows, width, paint)


def _columns(report: SessionReport) -> list[TableColumn]:
    columns = []
    for place, quantity in enumerate(session_figures.shown_quantities(report)):
        short = {"Utilization": "Util", "Memory": "Mem"}.get(quantity.title, quantity.title)
        columns += [
            TableColumn(
                f"{short} {part}" if part == "mean" else part, drop=10 + 4 * place + drop if drop else 0
            )
            for part, drop in _STATISTICS
        ]
    return [*columns, TableColumn("Energy", drop=8, optional=True), TableColumn("Data", drop=5)]


def _cells(report: SessionReport, row: GpuFigures | NodeFigures) -> Iterator[TableCell]:
    for quantity in session_figures.shown_quantities(report):
        found = row.statistics.get(quantity.name)
        for part, _ in _STATISTICS:
            yield TableCell(
                session_figures.format_value(quantity, None if found is None else getattr(found, part))
            )
    yield TableCell(energy(row.energy_joules))
    ratio = row.availability_ratio
    yield TableCell(
        session_figures.format_availability(ratio), "notice" if ratio < _LOW_AVAILABILITY_RATIO else ""
    )


def _outages(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    if not report.outages:
        return
    yield paint("title", "Interruptions")
    for outage in report.outages[:_MAX_GAPS]:
        yield from wrap(f"  {session_figures.describe_outage(report, outage)}", width, "    ")
    if len(report.outages) > _MAX_GAPS:
        yield paint("dim", f"  and {len(report.outages) - _MAX_GAPS} more")


def _gaps(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    if not report.gaps:
        return
    longest = sorted(report.gaps, key=lambda gap: -gap.seconds)[:_MAX_GAPS]
    yield paint("title", "Gaps")
    for gap in sorted(longest):
        yield from wrap(f"  {f.plain(session_figures.describe_gap(report, gap))}", width, "    ")
    if len(report.gaps) > _MAX_GAPS:
        yield paint("dim", f"  and {f.count_noun(len(report.gaps) - _MAX_GAPS, 'shorter gap')}")


def _findings(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    if not report.findings:
        return
    yield paint("title", session_figures.findings_title(report))
    for finding in session_figures.describe_findings(report):
        text = f"  {finding.severity}: {finding.text}  {finding.when}"
        lines: Sequence[str] = list(wrap(f.plain(text), width, "    "))
        style = _STYLES.get(finding.severity, "dim")
        yield from (paint(style, line) for line in lines)
        if finding.code is not None:
            yield from wrap(f.plain(f"    where: {finding.code}"), width, "      ")


def _notes(report: SessionReport, width: int, paint: Paint) -> Iterator[str]:
    if report.strange_values:
        is_one = report.strange_values == 1
        note = (
            f"{f.count_noun(report.strange_values, 'value')} in the file {'is not a number' if is_one else 'are not numbers'} "
            f"and {'counts' if is_one else 'count'} as unknown"
        )
        yield from (paint("dim", line) for line in wrap(note, width))
