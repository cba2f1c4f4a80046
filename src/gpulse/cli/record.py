"""`gpulse record`: frames into a file, alone or beside a command."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulse.cli import shell
from gpulse.errors import CollectionError, UsageError
from gpulse.terminal import format as f

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from gpulse.sampling.recorder import Sink
    from gpulse.sampling.sampler import Sampler
    from gpulse.sources.base import Source

_FAST_GPM_SECONDS = 0.2
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


@click.command(context_settings={"ignore_unknown_options": False})
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="A new file: .jsonl.gz or .jsonl for a lossless recording, .csv or .sqlite for tables.",
)
@click.option(
    "-i",
    "--interval",
    type=float,
    default=0.1,
    show_default=True,
    metavar="SECONDS",
    help="Time between two frames.",
)
@click.option("-t", "--seconds", type=float, metavar="SECONDS", help="Stop after this time.")
@click.option("-q", "--quiet", is_flag=True, help="No progress line.")
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
    r"""Record this machine into FILE until Ctrl-C, or for as long as COMMAND runs.

    With a COMMAND the exit code is the command's.

    \b
    gpulse record -o run.jsonl.gz -- python train.py
    gpulse --replay run.jsonl.gz -a
    """
    from gpulse.api import open_sink  # noqa: PLC0415  --help needs none of it
    from gpulse.sampling.sampler import Sampler  # noqa: PLC0415

    if seconds is not None and seconds <= 0:
        raise UsageError("--seconds must be more than 0")
    source = shell.other_source(demo=demo, replay=replay)
    if source is not None and argv:
        raise UsageError("a COMMAND runs on this machine, so --demo and --replay do not go with it")
    sampler = Sampler(source or _this_machine(interval), interval_seconds=interval)
    with closing(sampler), closing(open_sink(output)) as sink:
        progress = _Progress(output, shown=not quiet and sys.stderr.isatty())
        if argv:
            code = _beside(list(argv), sampler, sink, progress, seconds)
        else:
            with _stopping(sampler):
                _write(sampler, sink, progress, seconds)
            code = 0
    progress.finish()
    if progress.frames == 0 and code == 0:
        raise CollectionError("nothing was recorded")
    return code


def _this_machine(interval: float) -> Source:
    from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
    from gpulse.sources.nvml.reader import Cadence  # noqa: PLC0415

    cadence = Cadence(gpm=max(_FAST_GPM_SECONDS, min(interval, 1.0)))
    return LocalMachine(interval_seconds=interval, cadence=cadence, threads=True)


class _Progress:
    """One line on standard error that says how far the recording is."""

    def __init__(self, path: Path, *, shown: bool) -> None:
        self.frames = 0
        self._path = path
        self._shown = shown
        self._begun = self._drawn = time.monotonic()

    def count(self) -> None:
        self.frames += 1
        now = time.monotonic()
        if self._shown and now - self._drawn >= 0.5:
            self._drawn = now
            sys.stderr.write(f"\r\x1b[Krecording {self._text()}  Ctrl-C ends it")
            sys.stderr.flush()

    def finish(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
        print(f"recorded {self._text()}", file=sys.stderr)

    def _text(self) -> str:
        size = self._path.stat().st_size if self._path.exists() else None
        passed = f.duration(time.monotonic() - self._begun)
        return f"{passed}, {self.frames} frames, {f.size(size)} in {f.plain(str(self._path))}"


def _write(sampler: Sampler, sink: Sink, progress: _Progress, seconds: float | None) -> None:
    deadline = None if seconds is None else time.monotonic() + seconds
    for frame in sampler:
        sink.write(frame)
        progress.count()
        if deadline is not None and time.monotonic() + sampler.interval_seconds / 2 >= deadline:
            return


@contextmanager
def _stopping(sampler: Sampler) -> Iterator[None]:
    """Let Ctrl-C and a polite kill end the sampling, so that the file is finished properly."""

    def stop(number: int, stack: FrameType | None) -> None:  # noqa: ARG001  the signature of handlers
        sampler.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _beside(argv: list[str], sampler: Sampler, sink: Sink, progress: _Progress, seconds: float | None) -> int:
    """Record while a command runs; its exit code, or 128 and the number of the signal that ended it.

    Ctrl-C reaches the command from the terminal as it would without us; a polite kill is passed on.
    """
    try:
        child = subprocess.Popen(argv)  # noqa: S603  running what was asked for is the point
    except FileNotFoundError:
        print(f"gpulse: {argv[0]}: command not found", file=sys.stderr)
        return _NOT_FOUND
    except OSError as error:
        print(f"gpulse: {argv[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_EXECUTABLE
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
    }
    waiter = threading.Thread(target=_stop_with, args=(child, sampler), name="gpulse-command")
    waiter.start()
    try:
        _write(sampler, sink, progress, seconds)
    except BaseException:
        child.terminate()
        raise
    finally:
        waiter.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _stop_with(child: subprocess.Popen[bytes], sampler: Sampler) -> None:
    child.wait()
    sampler.stop()
