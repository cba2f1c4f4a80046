"""`gpulse why`: watch, and say what holds the GPUs up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpulse.cli import selection, shell
from gpulse.cli.progress import Progress
from gpulse.cli.watch import Part, Watch
from gpulse.errors import GpulseError, RecordingError, file_hint

if TYPE_CHECKING:
    from gpulse.model.finding import Diagnosis

WATCH_SECONDS = 20.0
HEALTHY, FOUND, NOT_TOLD, NOT_ENOUGH = 0, 1, 2, 3
_ARGV = "gpulse.why.argv"


class _WithCommand(click.Command):
    """A command that keeps what comes after `--` apart from its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        shell.ending(ctx).failed = NOT_ENOUGH  # whatever goes wrong must not be taken for a finding
        if "--" in args:
            place = args.index("--")
            ctx.meta[_ARGV] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command(cls=_WithCommand)
@click.argument("recording", required=False, type=click.Path(path_type=Path))
@click.option(
    "--pid",
    type=click.IntRange(min=1),
    metavar="PID",
    help="Only this process with its children: the GPUs they are on, and their CPU time alone.",
)
@click.option(
    "--gpus", metavar="LIST", help="Only these GPUs: indices, ranges, UUIDs (0,2-3,GPU-1f2e), or `visible`."
)
@click.option(
    "--window",
    type=shell.seconds,
    metavar="SECONDS",
    help="How long to watch (20 when not given); of a recording or a COMMAND, how much to judge at a time.",
)
@click.option(
    "--from",
    "start",
    metavar="TIME",
    help="Of a recording: from this moment on, +SECONDS after its start or epoch seconds.",
)
@click.option(
    "--to",
    "end",
    metavar="TIME",
    help="Of a recording: up to this moment, +SECONDS after its start or epoch seconds.",
)
@click.option(
    "-i",
    "--interval",
    type=shell.seconds,
    default=0.2,
    show_default=True,
    metavar="SECONDS",
    help="Time between two readings of this machine.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; what a COMMAND prints goes to standard error."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw the window with the findings marked: .png, .svg, .pdf or .html; an existing file is replaced.",
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Every finding in full, and everything that was ruled out."
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing while watching.")
@click.option("--no-color", is_flag=True, help="No colours (as NO_COLOR=1).")
@click.option("--demo", is_flag=True, help="A simulated machine with eight GPUs, made of real recordings.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    recording: Path | None,
    pid: int | None,
    gpus: str | None,
    window: float | None,
    start: str | None,
    end: str | None,
    interval: float,
    as_json: bool,
    plot: Path | None,
    verbose: bool,
    quiet: bool,
    no_color: bool,
    demo: bool,
) -> int:
    """Say what holds the GPUs up: watch this machine for 20 seconds, or judge a RECORDING or a COMMAND's run.

    \b
    gpulse why                          what is slow here now
    gpulse why --pid 4711               what holds this job up
    gpulse why -- python train.py       judged when it ends, or at Ctrl-C
    gpulse why run.jsonl.gz --from +30  a recording, from its 30th second on
    gpulse why --demo                   a simulated machine

    Ctrl-C ends the watching, and what was seen is judged. A COMMAND gets the first Ctrl-C itself; if it goes
    on, the second one ends the watching and leaves it running.

    Exit code: 0 nothing found, 1 findings, 3 not enough data, 2 wrong usage or the answer could not be written;
    126 the COMMAND cannot be run, 127 it is not there.
    """  # noqa: D301  click needs the backspace itself
    argv: list[str] | None = ctx.meta.get(_ARGV)
    part = Part(start, end)
    _check(recording, argv, pid, demo=demo, part=part)
    from gpulse.sampling.sampler import checked_interval  # noqa: PLC0415  --help needs none of it

    checked_interval(interval)
    choose = selection.parse(gpus)
    if plot is not None:
        _check_plot(plot)
    from gpulse.diagnosis.timeline import Timeline  # noqa: PLC0415

    whole = recording is None and argv is None  # what is watched for a given time is judged as a whole
    progress = Progress(quiet=quiet)
    watch = Watch(Timeline(window_seconds=None if whole else window), choose, pid, progress)
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
            watch.machine(window or WATCH_SECONDS, interval)
        diagnosis = watch.diagnosis()
    except RecordingError as error:
        # What cannot be read cannot be judged, and must not be taken for a finding.
        if as_json:
            from gpulse.model.finding import Diagnosis  # noqa: PLC0415

            _print_json(Diagnosis(f"Not enough data: {error.message}."), watch)
        shell.complain("gpulse", error.message, error.hint)
        return NOT_ENOUGH
    finally:
        progress.clear()
    code = FOUND if diagnosis.findings else HEALTHY if diagnosis.judged else NOT_ENOUGH
    ending = shell.ending(ctx)
    ending.failed, ending.unread = NOT_TOLD, code
    try:
        if as_json:
            _print_json(diagnosis, watch)
        else:
            _print_verdict(diagnosis, watch, no_color=no_color, verbose=verbose)
    finally:  # whoever reads only the first lines wants the picture too
        if plot is not None and not _is_drawn(diagnosis, watch, plot):
            code = ending.unread = NOT_TOLD
    return code


def _check(
    recording: Path | None,
    argv: list[str] | None,
    pid: int | None,
    *,
    demo: bool,
    part: Part,
) -> None:
    given = [
        name for name, there in (("a RECORDING", recording), ("a COMMAND", argv), ("--demo", demo)) if there
    ]
    if argv == []:
        raise click.UsageError("there is no COMMAND after --")
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other")
    if pid is not None and argv:
        raise click.UsageError("--pid and a COMMAND exclude each other")
    if not part.is_whole and recording is None:
        raise click.UsageError("--from and --to are moments of a RECORDING")


def _check_plot(path: Path) -> None:
    """Refuse what could not be drawn before twenty seconds are spent on watching."""
    from gpulse.export.plot import check  # noqa: PLC0415

    check(path)


def _is_drawn(diagnosis: Diagnosis, watch: Watch, path: Path) -> bool:
    from gpulse.export.plot import plot  # noqa: PLC0415  only for those who ask

    try:
        plot(watch.timeline.seconds, diagnosis, path)
    except GpulseError as error:
        shell.complain("gpulse", f"the picture could not be written: {error.message}", error.hint)
    except OSError as error:
        shell.complain(
            "gpulse", f"the picture could not be written: {path}: {error.strerror or error}", file_hint(error)
        )
    else:
        return True
    return False


def _print_verdict(diagnosis: Diagnosis, watch: Watch, *, no_color: bool, verbose: bool) -> None:
    from gpulse.terminal.verdict import verdict_lines  # noqa: PLC0415

    paint = shell.paint(no_color=no_color)
    for line in verdict_lines(diagnosis, shell.width(), paint, verbose=verbose, hints=watch.hints(diagnosis)):
        shell.write(line)


def _print_json(diagnosis: Diagnosis, watch: Watch) -> None:
    document: dict[str, Any] = diagnosis.to_dict()
    if watch.exit_code is not None:
        document["command_exit_code"] = watch.exit_code
    click.echo(json.dumps(document, indent=2, allow_nan=False))
