"""`gpulse why`: find out why GPUs are slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gpulse.charts.chart_files import check_chart_path
from gpulse.cli import common, gpu_selection
from gpulse.cli.progress import WatchProgress
from gpulse.cli.why_sources import DiagnosisSource, RecordingRange
from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis
from gpulse.errors import GpulseError, RecordingError, file_hint
from gpulse.model.finding import Diagnosis
from gpulse.sampling.sampler import check_interval
from gpulse.terminal.diagnosis_verdict import verdict_lines
from gpulse.terminal.value_format import plain

WATCH_SECONDS = 20.0
EXIT_HEALTHY, EXIT_FOUND, EXIT_FAILED, EXIT_NOT_ENOUGH_DATA = 0, 1, 2, 3
_ARGV = "gpulse.why.argv"


class _CommandWithArgv(click.Command):
    """A command that keeps the arguments after `--` apart from its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        common.exit_codes(ctx).failed = EXIT_NOT_ENOUGH_DATA  # an error must not be mistaken for a finding
        if "--" in args:
            place = args.index("--")
            ctx.meta[_ARGV] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command(cls=_CommandWithArgv)
@click.argument("recording", required=False, type=click.Path(path_type=Path))
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="BEFORE AFTER",
    help="Compare two recordings from before and after a change, and show whether the change helped.",
)
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="Diagnose only this process and its descendants: their GPUs and their CPU time.",
)
@click.option(
    "--gpus",
    metavar="LIST",
    help="Diagnose only these GPUs: indices, ranges and UUIDs (0,2-3,GPU-1f2e), or `visible`.",
)
@click.option(
    "--window",
    type=common.parse_seconds,
    metavar="SECONDS",
    show_default="until the verdict is certain, at most 20 s; for a RECORDING or COMMAND: a single window",
    help="Watch for this many seconds; for a RECORDING or COMMAND, diagnose in windows of this length.",
)
@click.option(
    "--from",
    "start",
    metavar="TIME",
    help="Recordings only: start at TIME (+SECONDS after the start of the recording, or epoch seconds).",
)
@click.option(
    "--to",
    "end",
    metavar="TIME",
    help="Recordings only: end at TIME (+SECONDS after the start of the recording, or epoch seconds).",
)
@click.option(
    "-i",
    "--interval",
    type=common.parse_seconds,
    default=0.2,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between samples of this machine.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; output of a COMMAND goes to standard error."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also plot metrics and findings over time to this file: .png, .svg, .pdf or .html; an existing file is replaced.",
)
@click.option(
    "--no-lines",
    is_flag=True,
    help="Do not look for the lines of code behind the findings (they are found by reading stacks with py-spy).",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Show every finding in full, and everything that was ruled out."
)
@click.option("-q", "--quiet", is_flag=True, help="Do not print progress.")
@click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1).")
@click.option(
    "--demo", is_flag=True, help="Use a simulated machine with eight GPUs, built from real recordings."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    recording: Path | None,
    compared: tuple[Path, Path] | None,
    pid: int | None,
    gpus: str | None,
    window: float | None,
    start: str | None,
    end: str | None,
    interval: float,
    as_json: bool,
    plot: Path | None,
    no_lines: bool,
    verbose: bool,
    quiet: bool,
    no_color: bool,
    demo: bool,
) -> int:
    """Find out why GPUs are slow: watch this machine, read a RECORDING, or run a COMMAND.

    \b
    gpulse why                          diagnose this machine now
    gpulse why --pid 4711               diagnose one process and its descendants
    gpulse why -- python train.py       diagnose a program until it ends, or until Ctrl-C
    gpulse why run.jsonl.gz --from +30  diagnose a recording from its 30th second on
    gpulse why --compare A B            compare the recordings A and B, made before and after a change
    gpulse why --demo                   try it on a simulated machine

    This machine is watched until the verdict is certain, which takes 12 to 20 seconds, or for the time given with --window.
    Ctrl-C stops watching and prints the diagnosis so far. A COMMAND gets the first Ctrl-C itself; if it keeps running,
    the second one stops watching and leaves it running.

    Exit codes: 0 nothing found, 1 findings, 2 wrong usage or output that cannot be written, 3 not enough data, 126 COMMAND
    cannot be run, 127 COMMAND was not found. With --compare: 0 better or no clear change, 1 worse or partly worse.
    """  # noqa: D301  click needs the backspace itself
    argv: list[str] | None = ctx.meta.get(_ARGV)
    part = RecordingRange(start, end)
    if compared is not None:
        return _compare(ctx, compared)
    _check_arguments(recording, argv, pid, demo=demo, part=part, no_lines=no_lines)
    check_interval(interval)
    choose = gpu_selection.parse_gpus(gpus)
    if plot is not None:
        _check_plot(plot)
    whole = recording is None and argv is None  # a machine watched for a given time is diagnosed as a whole
    progress = WatchProgress(quiet=quiet)
    watch = DiagnosisSource(
        WindowedDiagnosis(window_seconds=None if whole else window),
        choose,
        pid,
        progress,
        with_lines=not no_lines,
    )
    try:
        if recording is not None:
            watch.recording(recording, part)
        elif demo:
            watch.demo(window or WATCH_SECONDS, interval)
        elif argv is not None:
            code = watch.command(argv, interval, silent=as_json)
            if code is not None:
                return code
        else:
            watch.machine(window or WATCH_SECONDS, interval, is_maximum=window is None)
        diagnosis = watch.diagnosis()
    except RecordingError as error:
        # An unreadable recording must not be mistaken for a finding.
        if as_json:
            _print_json(Diagnosis(f"Not enough data: {error.message}."), watch)
        common.print_error("gpulse", error.message, error.hint)
        return EXIT_NOT_ENOUGH_DATA
    finally:
        progress.clear()
    code = EXIT_FOUND if diagnosis.findings else EXIT_HEALTHY if diagnosis.judged else EXIT_NOT_ENOUGH_DATA
    ending = common.exit_codes(ctx)
    ending.failed, ending.unread = EXIT_FAILED, code
    try:
        if as_json:
            _print_json(diagnosis, watch)
        else:
            _print_verdict(diagnosis, watch, no_color=no_color, verbose=verbose)
    finally:  # also when the reader closes the pipe after the first lines
        if plot is not None and not _draw_plot(diagnosis, watch, plot):
            code = ending.unread = EXIT_FAILED
    return code


def _check_comparison(ctx: click.Context) -> None:
    """Reject options that have no meaning for two recordings."""
    options = {"recording": "a RECORDING", "pid": "--pid", "interval": "--interval", "plot": "--plot"}
    options |= {"verbose": "--verbose", "demo": "--demo", "no_lines": "--no-lines"}
    given = [
        shown
        for name, shown in options.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        and ctx.params[name] is not None
    ]
    if ctx.meta.get(_ARGV) is not None:
        given.append("a COMMAND")
    if given:
        raise click.UsageError(f"--compare and {' and '.join(given)} cannot be used together")


def _compare(ctx: click.Context, paths: tuple[Path, Path]) -> int:
    from gpulse.cli.run_comparison import EXIT_CODES, compare_recordings, print_comparison  # noqa: PLC0415  loads NumPy, which a diagnosis does not need

    _check_comparison(ctx)
    given = ctx.params
    choose = gpu_selection.parse_gpus(given["gpus"])
    progress = WatchProgress(quiet=given["quiet"])
    try:
        comparison = compare_recordings(
            paths, choose, progress, start=given["start"], end=given["end"], window=given["window"]
        )
    finally:
        progress.clear()
    ending = common.exit_codes(ctx)
    ending.failed, ending.unread = EXIT_FAILED, EXIT_CODES[comparison.outcome]
    return print_comparison(comparison, as_json=given["as_json"], no_color=given["no_color"])


def _check_arguments(
    recording: Path | None,
    argv: list[str] | None,
    pid: int | None,
    *,
    demo: bool,
    part: RecordingRange,
    no_lines: bool,
) -> None:
    given = [
        name for name, there in (("a RECORDING", recording), ("a COMMAND", argv), ("--demo", demo)) if there
    ]
    if argv == []:
        raise click.UsageError("a COMMAND is missing after --")
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} cannot be used together")
    if pid is not None and argv:
        raise click.UsageError("--pid and a COMMAND cannot be used together")
    if no_lines and (recording is not None or demo):
        raise click.UsageError(f"--no-lines and {given[0]} cannot be used together")
    if not part.is_whole and recording is None:
        raise click.UsageError("--from and --to require a RECORDING")


def _check_plot(path: Path) -> None:
    """Reject a file that cannot be plotted to before watching for twenty seconds."""
    check_chart_path(path, example="why")


def _draw_plot(diagnosis: Diagnosis, watch: DiagnosisSource, path: Path) -> bool:
    from gpulse.export.diagnosis_charts import write_diagnosis_charts  # noqa: PLC0415  loads NumPy, which only pictures need

    try:
        write_diagnosis_charts(watch.timeline.seconds, diagnosis, path, watch.line_spans(diagnosis))
    except GpulseError as error:
        common.print_error("gpulse", f"cannot write the plot: {error.message}", error.hint)
    except OSError as error:
        common.print_error(
            "gpulse", f"cannot write the plot {path}: {error.strerror or error}", file_hint(error)
        )
    else:
        common.print_note(f"wrote {plain(str(path))}")
        return True
    return False


def _print_verdict(diagnosis: Diagnosis, watch: DiagnosisSource, *, no_color: bool, verbose: bool) -> None:
    paint = common.paint(no_color=no_color)
    for line in verdict_lines(
        diagnosis, common.terminal_width(), paint, verbose=verbose, hints=watch.hints(diagnosis)
    ):
        common.write(line)


def _print_json(diagnosis: Diagnosis, watch: DiagnosisSource) -> None:
    document: dict[str, Any] = diagnosis.to_dict()
    if watch.exit_code is not None:
        document["command_exit_code"] = watch.exit_code
    click.echo(json.dumps(document, indent=2, allow_nan=False))
