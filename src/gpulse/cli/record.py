"""`gpulse record`: frames into a file, alone or beside a command."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulse.cli import beside, shell
from gpulse.errors import CollectionError, GpulseError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from gpulse.model.frame import Frame
    from gpulse.sampling.recorder import Sink
    from gpulse.sampling.sampler import Sampler
    from gpulse.sources.base import Source

_FAST_GPM_SECONDS = 0.2


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="A new file: .jsonl.gz or .jsonl for a lossless recording, .csv for a table of GPUs; or .sqlite for all tables, appended to.",
)
@click.option(
    "-i",
    "--interval",
    type=shell.seconds,
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option(
    "-t",
    "--seconds",
    type=shell.seconds,
    metavar="SECONDS",
    help="Stop recording after this time; a COMMAND goes on to its end.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing about the recording.")
@shell.source_options
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def command(
    *,
    output: Path,
    interval: float,
    seconds: float | None,
    quiet: bool,
    demo: bool,
    replay: Path | None,
    argv: tuple[str, ...],
) -> int:
    """Record this machine into FILE until Ctrl-C, or for as long as COMMAND runs.

    With a COMMAND the exit code is the command's (126 and 127: it cannot be run, it is not there), and so is
    Ctrl-C; pressed again it ends the recording alone, and a COMMAND that ignores it goes on.

    \b
    gpulse record -o run.jsonl.gz -- python train.py
    gpulse --replay run.jsonl.gz -a
    """  # noqa: D301  click needs the backspace itself
    from gpulse.api import open_sink  # noqa: PLC0415  --help needs none of it
    from gpulse.sampling.sampler import Sampler  # noqa: PLC0415

    source = shell.other_source(demo=demo, replay=replay)
    if source is not None and argv:
        raise UsageError(
            "a COMMAND runs on this machine, so --demo and --replay do not go with it",
            hint="leave out one or the other",
        )
    sampler = Sampler(source or _this_machine(interval), interval_seconds=interval)
    with closing(sampler):
        sink = open_sink(output)
        progress = _Progress(output, quiet=quiet)
        with closing(sink):
            if argv:
                code = _beside(list(argv), sampler, sink, progress, seconds)
            else:
                with beside.stopping(sampler):
                    _write(sampler, sink, progress, seconds)
                code = 0
    if progress.frames == 0:
        _remove_empty(output)
        if code == 0:
            raise CollectionError("nothing was recorded")
        return code
    progress.finish()
    return code


def _remove_empty(output: Path) -> None:
    """A recording without a frame only stands in the way of the next attempt; a database may hold others."""
    if output.name.lower().endswith((".jsonl", ".jsonl.gz", ".csv")):
        output.unlink(missing_ok=True)


def _this_machine(interval: float) -> Source:
    from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
    from gpulse.sources.nvml.cadence import close_up  # noqa: PLC0415

    cadence = close_up(max(_FAST_GPM_SECONDS, min(interval, 1.0)))
    return LocalMachine(interval_seconds=interval, cadence=cadence, threads=True)


class _Progress:
    """One line on standard error that says how far the recording is."""

    def __init__(self, path: Path, *, quiet: bool) -> None:
        self.frames = 0
        self._first = self._last = 0.0
        self._path = path
        self._quiet = quiet
        self._shown = not quiet and sys.stderr.isatty()
        self._drawn = time.monotonic()

    def count(self, frame: Frame) -> None:
        self._first = self._first if self.frames else frame.monotonic
        self._last = frame.monotonic
        self.frames += 1
        now = time.monotonic()
        if self._shown and now - self._drawn >= 0.5:
            self._drawn = now
            sys.stderr.write(f"\r\x1b[Krecording {self._text()}  Ctrl-C ends it")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def finish(self) -> None:
        self.clear()
        if not self._quiet:
            print(f"recorded {self._text()}", file=sys.stderr)

    def _text(self) -> str:
        size = self._path.stat().st_size if self._path.exists() else None
        seconds = self._last - self._first
        passed = f"{seconds:.1f}s" if seconds < 60 else f.duration(seconds)
        return f"{passed}, {self.frames} frames, {f.size(size)} in {f.plain(str(self._path))}"


def _write(sampler: Sampler, sink: Sink, progress: _Progress, seconds: float | None) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    for frame in sampler:
        sink.write(frame)
        progress.count(frame)
        if deadline is not None and time.monotonic() + sampler.interval_seconds / 2 >= deadline:
            return


def _beside(argv: list[str], sampler: Sampler, sink: Sink, progress: _Progress, seconds: float | None) -> int:
    """Record while a command runs; its exit code.

    A recording that fails (a full disk) says so and lets the command go on: it is worth more.
    """
    failed = False

    def write() -> None:
        nonlocal failed
        try:
            try:
                _write(sampler, sink, progress, seconds)
            finally:
                progress.clear()
        except GpulseError as error:
            failed = True
            shell.complain("gpulse", f"{error.message}; the command goes on", error.hint)
            with suppress(GpulseError):  # the same reason once more
                sink.close()

    return beside.run(argv, sampler, write).code or int(failed)
