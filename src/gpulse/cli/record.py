"""`gpulse record`: record frames to a file, until Ctrl-C or while a command runs."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import click

from gpulse.api import open_sink
from gpulse.cli import child_process, common
from gpulse.errors import CollectionError, GpulseError, UsageError
from gpulse.model.frame import Frame
from gpulse.sampling.recorder import FrameSink
from gpulse.sampling.sampler import Sampler
from gpulse.sources.frame_source import Source
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import detailed_cadence
from gpulse.terminal import value_format as f

_FAST_GPM_SECONDS = 0.2


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="File to create: .jsonl.gz or .jsonl for a lossless recording, .csv for a table of GPUs, .sqlite for all tables (appends to an existing file).",
)
@click.option(
    "-i",
    "--interval",
    type=common.parse_seconds,
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between frames.",
)
@click.option(
    "-t",
    "--seconds",
    type=common.parse_seconds,
    metavar="SECONDS",
    help="Stop recording after this many seconds; a COMMAND continues to its end.",
)
@click.option("-q", "--quiet", is_flag=True, help="Do not print progress.")
@common.source_options
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
    """Record this machine to FILE until Ctrl-C, or while COMMAND runs.

    With a COMMAND, the exit code is the command's (126: it cannot be run, 127: it was not found). The first Ctrl-C goes
    to the command; a second one ends the recording and leaves the COMMAND running if it ignored the first.

    \b
    gpulse record -o run.jsonl.gz -- python train.py    record a program
    gpulse --replay run.jsonl.gz -a                     show the end of the recording
    gpulse why run.jsonl.gz                             find out why the program was slow
    """  # noqa: D301  click needs the backspace itself
    source = common.chosen_source(demo=demo, replay=replay)
    if source is not None and argv:
        raise UsageError(
            "--demo and --replay cannot be used with a COMMAND, which runs on this machine",
            hint="leave out the COMMAND, or --demo and --replay",
        )
    sampler = Sampler(source or _open_local_machine(interval), interval_seconds=interval)
    with closing(sampler):
        sink = open_sink(output)
        progress = _RecordProgress(output, quiet=quiet)
        with closing(sink):
            if argv:
                code = _record_command(list(argv), sampler, sink, progress, seconds)
            else:
                with child_process.stop_on_signals(sampler):
                    _record_frames(sampler, sink, progress, seconds)
                code = 0
    if progress.frames == 0:
        _remove_empty(output)
        if code == 0:
            raise CollectionError("no frame was recorded")
        return code
    progress.finish()
    return code


def _remove_empty(output: Path) -> None:
    """Remove a recording without frames, which would block the next attempt; a database may contain others."""
    if output.name.lower().endswith((".jsonl", ".jsonl.gz", ".csv")):
        output.unlink(missing_ok=True)


def _open_local_machine(interval: float) -> Source:
    cadence = detailed_cadence(max(_FAST_GPM_SECONDS, min(interval, 1.0)))
    return LocalMachine(interval_seconds=interval, cadence=cadence, threads=True)


class _RecordProgress:
    """A line on standard error with the length and size of the recording."""

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
            sys.stderr.write(f"\r\x1b[Krecording {self._text()}  (Ctrl-C stops recording)")
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
        return f"{passed}, {self.frames} {'frame' if self.frames == 1 else 'frames'}, {f.size(size)} in {f.plain(str(self._path))}"


def _record_frames(
    sampler: Sampler, sink: FrameSink, progress: _RecordProgress, seconds: float | None
) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    for frame in sampler:
        sink.write(frame)
        progress.count(frame)
        if deadline is not None and time.monotonic() + sampler.interval_seconds / 2 >= deadline:
            return


def _record_command(
    argv: list[str], sampler: Sampler, sink: FrameSink, progress: _RecordProgress, seconds: float | None
) -> int:
    """Record while a command runs; return its exit code.

    When the recording fails, for example because the disk is full, the error is printed and the command continues.
    """
    failed = False

    def write() -> None:
        nonlocal failed
        try:
            try:
                _record_frames(sampler, sink, progress, seconds)
            finally:
                progress.clear()
        except GpulseError as error:
            failed = True
            common.print_error("gpulse", f"{error.message}; the command continues", error.hint)
            with suppress(GpulseError):  # the same reason once more
                sink.close()

    return child_process.run(argv, sampler, write).code or int(failed)
