"""`gpulse report`: figures and pictures of a session's file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gpulse.cli import shell
from gpulse.errors import GpulseError
from gpulse.terminal import format as f


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE|NAME")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PICTURE",
    help="Also draw it: .pdf, .png, .svg or .html; an existing file is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
def command(*, file: Path, plot: Path | None, as_json: bool, no_color: bool) -> int:
    """Say what the GPUs of a session did: FILE is what the session was written to, as .json or .jsonl.

    Of a session's NAME the newest file is read: training_run_1-2.json rather than training_run_1.json when a second
    session of that name was written.

    \b
    gpulse report training_run_1
    gpulse report training_run_1.json
    gpulse report training_run_1.json --plot training_run_1.pdf
    """  # noqa: D301  click needs the backspace itself
    return show(file, plot, as_json=as_json, no_color=no_color)


def show(file: Path, plot: Path | None, *, as_json: bool = False, no_color: bool = False) -> int:
    """Print the report of a file, and draw it when asked to; the exit code."""
    from gpulse.export.report import plot as drawing  # noqa: PLC0415  --help needs none of it
    from gpulse.export.report.lookup import find_file, newer_run  # noqa: PLC0415
    from gpulse.export.report.reading import read_report  # noqa: PLC0415
    from gpulse.terminal.report import report_lines  # noqa: PLC0415

    if plot is not None:
        drawing.check(plot)
    found = find_file(file)
    if found != file:
        shell.remark(f"reading {f.plain(str(found))}")
    elif (newer := newer_run(file)) is not None:
        shell.remark(f"{f.plain(str(newer))} is a newer run of the same name")
    report = read_report(found)
    try:
        if as_json:
            shell.write(json.dumps(report.to_dict(), indent=2))
        else:
            shell.write("\n".join(report_lines(report, shell.width(), shell.paint(no_color=no_color))))
    finally:  # whoever reads only the first lines wants the picture too
        if plot is not None:
            try:
                drawing.plot(report, plot)
            except OSError as error:
                raise GpulseError(
                    f"cannot write {plot}: {error.strerror or error}", hint="another --plot FILE"
                ) from error
            shell.remark(f"drawn: {f.plain(str(plot))}")
    return 0
