"""`gpulse why`: watch, and say what holds the GPUs up."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from gpulse.cli import beside, selection, shell
from gpulse.errors import RecordingError, UsageError

if TYPE_CHECKING:
    from gpulse.diagnosis.timeline import Timeline
    from gpulse.model.finding import Diagnosis
    from gpulse.model.frame import Frame
    from gpulse.sampling.sampler import Sampler

WATCH_SECONDS = 20.0
HEALTHY, FOUND, NOT_ENOUGH = 0, 1, 3
_ARGV = "gpulse.why.argv"


class _WithCommand(click.Command):
    """A command that keeps what comes after `--` apart from its own arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            ctx.meta[_ARGV] = args[place + 1 :]
            args = args[:place]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


class _Bounds(NamedTuple):
    """From when to when; either an epoch time or seconds after the first frame."""

    start: str | None
    end: str | None

    def apply(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        first: float | None = None
        begin, end = -math.inf, math.inf
        for frame in frames:
            if first is None:
                first = frame.time
                begin = -math.inf if self.start is None else _moment(self.start, first)
                end = math.inf if self.end is None else _moment(self.end, first)
            if frame.time > end + 1.0:  # a little disorder is allowed for
                return
            if begin <= frame.time <= end:
                yield frame


@click.command(cls=_WithCommand)
@click.argument("recording", required=False, type=click.Path(path_type=Path))
@click.option(
    "--pid", type=int, metavar="PID", help="Only the GPUs that this process, or a child of it, is on."
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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

    Exit code: 0 nothing found, 1 findings, 3 not enough data, 2 wrong usage.
    """  # noqa: D301  click needs the backspace itself
    argv: list[str] | None = ctx.meta.get(_ARGV)
    _check(recording, argv, pid, start, end, demo=demo)
    from gpulse.sampling.sampler import checked_interval  # noqa: PLC0415  --help needs none of it

    checked_interval(interval)
    choose = selection.parse(gpus)
    if plot is not None:
        _check_plot(plot)
    from gpulse.diagnosis.timeline import Timeline  # noqa: PLC0415

    whole = recording is None and argv is None  # what is watched for a given time is judged as a whole
    watch = _Watch(Timeline(window_seconds=None if whole else window), choose, pid, _Progress(quiet=quiet))
    try:
        if recording is not None:
            watch.recording(recording, _Bounds(start, end))
        elif demo:
            watch.demo(window or WATCH_SECONDS, interval)
        elif argv is not None:
            code = watch.command(argv, interval)
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
        watch.progress.clear()
    if plot is not None:
        from gpulse.export.plot import plot as draw  # noqa: PLC0415  only for those who ask

        draw(watch.timeline.seconds, diagnosis, plot)
    if as_json:
        _print_json(diagnosis, watch)
    else:
        from gpulse.terminal.verdict import verdict_lines  # noqa: PLC0415

        for line in verdict_lines(diagnosis, shell.width(), shell.paint(no_color=no_color), verbose=verbose):
            shell.write(line)
    if diagnosis.findings:
        return FOUND
    return HEALTHY if diagnosis.judged else NOT_ENOUGH


class _Watch:
    """Feeds a timeline with frames, from wherever they come."""

    def __init__(
        self, timeline: Timeline, choose: selection.Select, pid: int | None, progress: _Progress
    ) -> None:
        self.timeline = timeline
        self.progress = progress
        self.exit_code: int | None = None
        """Of the command that was watched."""
        self._choose = choose
        self._pid = pid
        self._wanted: set[str] = set()
        """UUIDs of the GPUs that the wanted process is on."""
        self._missing: str | None = None
        """Why there is nothing to watch."""

    def recording(self, path: Path, bounds: _Bounds) -> None:
        """Read a recording."""
        from gpulse.sources.recording import Recording  # noqa: PLC0415

        if not path.exists():
            raise UsageError(
                f"there is no file {path}", hint="gpulse record -o run.jsonl.gz, which makes one"
            )
        for count, frame in enumerate(bounds.apply(iter(Recording(path)))):
            self._take(frame, _descendants_in(frame))
            self.progress.reading(path, count)

    def demo(self, seconds: float, interval: float) -> None:
        """Watch the simulated machine, whose time need not be waited for."""
        now = time.time()
        machine = shell.demo_machine(earlier_seconds=seconds)
        for step in range(int(seconds / interval) + 1):
            frame = machine.sample(now - seconds + step * interval)
            self._take(frame, _descendants_in(frame))

    def machine(self, seconds: float, interval: float) -> None:
        """Watch this machine."""
        sampler = self._sampler(interval)
        related = _descendants_here()
        with closing(sampler), beside.stopping(sampler):
            self.progress.begin(seconds, None)
            deadline = time.monotonic() + seconds
            for frame in sampler:
                self._take(frame, related)
                if not frame.gpus:
                    self._note_no_gpu(frame)
                    break
                if self._pid is not None and not self._wanted:
                    self._refuse_pid(frame)
                self.progress.watching(frame, self.timeline)
                if time.monotonic() + interval / 2 >= deadline:
                    break

    def command(self, argv: list[str], interval: float) -> int | None:
        """Watch a command's run; an exit code when it could not even be started."""
        sampler = self._sampler(interval)
        related = _descendants_here()
        started = False

        def adopt(pid: int) -> None:
            nonlocal started
            started = True
            self._pid = pid
            self.progress.begin(None, argv[0])

        def sample() -> None:
            for frame in sampler:
                self._take(frame, related)

        with closing(sampler):
            self.exit_code = beside.run(argv, sampler, sample, adopt)
        return None if started else self.exit_code

    def diagnosis(self) -> Diagnosis:
        """What was seen."""
        diagnosis = self.timeline.finish(None if self._pid is None else self._wanted)
        if self.exit_code:
            note = f"the command ended with exit code {self.exit_code}"
            if self.exit_code > 128:
                note += f" (killed by signal {self.exit_code - 128})"
            diagnosis = diagnosis._replace(data_gaps=(*diagnosis.data_gaps, note))
        if self._missing is not None:
            return diagnosis._replace(verdict=f"Not enough data: {self._missing}.")
        if self._pid is not None and not self._wanted:
            what = "the command" if self.exit_code is not None else f"process {self._pid}"
            return diagnosis._replace(verdict=f"Not enough data: {what} was never seen on a GPU.")
        return diagnosis

    def _take(self, frame: Frame, related: Callable[[int], set[int]]) -> None:
        frame = self._choose(frame)
        self.timeline.feed(frame)
        if self._pid is None:
            return
        family = related(self._pid)
        for gpu in frame.gpus:
            if any(process.pid in family for process in gpu.processes or ()):
                self._wanted.add(gpu.device.uuid)

    def _note_no_gpu(self, frame: Frame) -> None:
        reasons = [entry.detail for entry in frame.health if entry.source == "nvml"]
        self._missing = reasons[0] if reasons else "there is no GPU"

    def _refuse_pid(self, frame: Frame) -> None:
        pids = sorted({process.pid for gpu in frame.gpus for process in gpu.processes or ()})
        there = f"there are: {', '.join(map(str, pids))}" if pids else "no process is on any"
        raise UsageError(
            f"process {self._pid} is on no GPU; {there}", hint="gpulse, which shows who is where"
        )

    @staticmethod
    def _sampler(interval: float) -> Sampler:
        from gpulse.sampling.sampler import Sampler  # noqa: PLC0415
        from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
        from gpulse.sources.nvml.cadence import close_up  # noqa: PLC0415

        machine = LocalMachine(
            interval_seconds=interval, cadence=close_up(max(0.2, min(interval, 1.0))), threads=True
        )
        return Sampler(machine, interval_seconds=interval)


class _Progress:
    """One line on standard error that says how far it is and what is seen so far."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown = not quiet and sys.stderr.isatty()
        self._began = self._drawn = time.monotonic()
        self._seconds: float | None = None
        self._dirty = False

    def begin(self, seconds: float | None, command: str | None) -> None:
        self._seconds = seconds
        if not self._quiet and not self._shown:
            what = "this machine" if command is None else command
            long = f" for {seconds:g} s" if seconds is not None else " until it ends"
            print(f"watching {what}{long}", file=sys.stderr)

    def watching(self, frame: Frame, timeline: Timeline) -> None:
        passed = time.monotonic() - self._began
        if self._seconds is not None and self._is_due():
            done = min(1.0, passed / self._seconds)
            bar = "#" * round(20 * done)
            self._draw(f"[{bar:<20}] {passed:2.0f}/{self._seconds:.0f} s  {_seen(timeline) or _here(frame)}")

    def reading(self, path: Path, count: int) -> None:
        if count % 500 == 0 and self._is_due():
            self._draw(f"reading {path.name}: {count} frames")

    def clear(self) -> None:
        if self._dirty:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._dirty = False

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self._shown or now - self._drawn < 0.5:
            return False
        self._drawn = now
        return True

    def _draw(self, text: str) -> None:
        from gpulse.terminal.table import cut  # noqa: PLC0415

        self._dirty = True
        sys.stderr.write(f"\r\x1b[K{cut(text, shell.width() - 1)}")
        sys.stderr.flush()


def _seen(timeline: Timeline) -> str:
    """What the last second showed, GPU by GPU."""
    parts = []
    for seconds in list(timeline.seconds.values())[:4]:
        last = seconds[-1]
        if not last.holders:
            continue
        busy, filled = last.mean("duty"), last.mean("sm_active_ratio")
        text = f"GPU {last.reading.device.label}"
        text += f" busy {busy:.0%}" if busy is not None else ""
        text += f" SM {filled:.0%}" if filled is not None else ""
        if last.cores is not None:
            text += f", its program {last.cores:.1f} CPUs"
        if last.workers:
            text += f", {len(last.workers)} workers {sum(helper.cores for helper in last.workers):.1f}"
        parts.append(text)
    return "; ".join(parts)


def _here(frame: Frame) -> str:
    return f"{len(frame.gpus)} GPUs, nothing runs on them" if frame.gpus else "no GPU"


def _descendants_here() -> Callable[[int], set[int]]:
    """Who descends from a process of this machine."""
    from gpulse.sources.family import Family  # noqa: PLC0415
    from gpulse.sources.procfs import Roots  # noqa: PLC0415

    family = Family(Roots())
    return lambda pid: {pid, *family.descendants(time.monotonic(), [pid])}


def _descendants_in(frame: Frame) -> Callable[[int], set[int]]:
    """Who descends from a process, as far as a frame tells."""

    def related(pid: int) -> set[int]:
        found = {pid}
        grew = True
        while grew:
            more = {p.pid for p in frame.processes if p.identity.parent_pid in found} - found
            found |= more
            grew = bool(more)
        return found

    return related


def _check(
    recording: Path | None,
    argv: list[str] | None,
    pid: int | None,
    start: str | None,
    end: str | None,
    *,
    demo: bool,
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
    if (start is not None or end is not None) and recording is None:
        raise click.UsageError("--from and --to are moments of a RECORDING")
    for text in (start, end):
        if text is not None:
            _moment(text, 0.0)


def _moment(text: str, first: float) -> float:
    """`+12.5` after the first frame, or epoch seconds.

    Raises:
        click.UsageError: It is neither.
    """
    try:
        seconds = float(text.removeprefix("+"))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise click.UsageError(f"{text!r} is no moment: give +SECONDS after the start, or epoch seconds")
    return first + seconds if text.startswith("+") else seconds


def _check_plot(path: Path) -> None:
    """Refuse what could not be drawn before twenty seconds are spent on watching."""
    from gpulse.export.plot import check  # noqa: PLC0415

    check(path)


def _print_json(diagnosis: Diagnosis, watch: _Watch) -> None:
    document: dict[str, Any] = diagnosis.to_dict()
    if watch.exit_code is not None:
        document["command_exit_code"] = watch.exit_code
    click.echo(json.dumps(document, indent=2, allow_nan=False))
