"""What `gpulse why` watches: this machine, the simulated one, a recording or a command's run."""

from __future__ import annotations

import math
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpulse.cli import beside, shell
from gpulse.errors import UsageError, file_hint
from gpulse.terminal import harvested

if TYPE_CHECKING:
    from gpulse.cli import selection
    from gpulse.cli.progress import Progress
    from gpulse.diagnosis.timeline import Timeline
    from gpulse.model.finding import Diagnosis
    from gpulse.model.frame import Frame
    from gpulse.sampling.sampler import Sampler

_LONGER_SECONDS = 60.0


class Part:
    """A part of a recording: from when to when, either an epoch time or seconds after the first frame."""

    def __init__(self, start: str | None, end: str | None) -> None:
        """Take the moments as they were written.

        Raises:
            click.UsageError: One is no moment, or they stand the wrong way round.
        """
        self.is_whole = start is None and end is None
        self._start, self._end = start, end
        self._first: float | None = None
        self._last = 0.0
        self._is_empty = True
        written = [text for text in (start, end) if text is not None]
        moments = [_moment(text, 0.0) for text in written]
        if len({text.startswith("+") for text in written}) == 1 and moments != sorted(moments):
            self._refuse()

    def of(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """The frames of it.

        Raises:
            click.UsageError: The end is before the start, as the first frame shows.
        """
        begin, end = -math.inf, math.inf
        for place, frame in enumerate(frames):
            if place == 0:
                self._first = frame.time
                begin = begin if self._start is None else _moment(self._start, frame.time)
                end = end if self._end is None else _moment(self._end, frame.time)
                if end < begin:
                    self._refuse()
            self._last = frame.time
            if frame.time > end + 1.0:  # a little disorder is allowed for
                return
            if begin <= frame.time <= end:
                self._is_empty = False
                yield frame

    @property
    def missing(self) -> str | None:
        """Why there is no frame in it, None when there are some."""
        if not self._is_empty or self._first is None:
            return None
        first, last = self._first, self._last
        if self._start is not None and _moment(self._start, first) > last:
            ends = f"+{last - first:.1f}" if self._start.startswith("+") else f"{last:.1f}"
            return f"the recording ends at {ends}, before --from {self._start}"
        if self._end is not None and _moment(self._end, first) < first:
            return f"the recording begins at {first:.1f}, after --to {self._end}"
        return "the recording has no frame in that part"

    def _refuse(self) -> None:
        raise click.UsageError(f"--to {self._end} is before --from {self._start}")


class Watch:
    """Feeds a timeline with frames, from wherever they come, and knows what would help if they are too few."""

    def __init__(
        self, timeline: Timeline, choose: selection.Select, pid: int | None, progress: Progress
    ) -> None:
        self.timeline = timeline
        self.exit_code: int | None = None
        """Of the command that was watched, if it ended."""
        self._goes_on = False
        self._progress = progress
        self._choose = choose
        self._pid = pid
        self._wanted: set[str] = set()
        """UUIDs of the GPUs that the wanted process is on."""
        self._harvested: dict[str, dict[str, None]] = {}
        """By GPU the jobs of harvests that were seen on it."""
        self._who = f"process {pid}"
        self._missing: str | None = None
        """Why there is nothing to watch."""
        self._more: tuple[str, ...] = ()
        """What to do to have more to judge."""
        self._work = "start the job, and ask again while it runs"
        """What to do when nothing runs."""

    def recording(self, path: Path, part: Part) -> None:
        """Read a recording.

        Raises:
            UsageError: It is no file.
            click.UsageError: The part makes no sense.
            RecordingError: It cannot be read.
        """
        from gpulse.sources.recording import Recording  # noqa: PLC0415

        _check_file(path)
        longer = "record longer: gpulse record -o run.jsonl.gz"
        self._more = (longer if part.is_whole else f"give more of it: --from, --to; or {longer}",)
        self._work = "record while the job runs"
        for count, frame in enumerate(part.of(iter(Recording(path)))):
            self._take(frame, _descendants_in(frame))
            self._progress.reading(path, count)
        self._missing = part.missing

    def demo(self, seconds: float, interval: float) -> None:
        """Watch the simulated machine, whose time need not be waited for."""
        self._more = (f"watch longer: gpulse why --demo --window {_longer(seconds):g}",)
        now = time.time()
        machine = shell.demo_machine(earlier_seconds=seconds)
        for step in range(int(seconds / interval) + 1):
            frame = machine.sample(now - seconds + step * interval)
            self._take(frame, _descendants_in(frame))

    def machine(self, seconds: float, interval: float) -> None:
        """Watch this machine.

        Raises:
            UsageError: The wanted process is on no GPU.
        """
        self._more = (
            f"watch longer: gpulse why --window {_longer(seconds):g}",
            "is the job running? `gpulse` shows the processes on each GPU, `gpulse doctor` what can be read",
        )
        sampler = self._sampler(interval)
        related = _descendants_here()
        with closing(sampler), beside.stopping(sampler):
            self._progress.begin(seconds, None)
            deadline = time.monotonic() + seconds
            for frame in sampler:
                self._take(frame, related)
                if not frame.gpus:
                    self._note_no_gpu(frame)
                    break
                if self._pid is not None and not self._wanted:
                    self._refuse_pid(frame)
                self._progress.watching(frame, self.timeline)
                if time.monotonic() + interval / 2 >= deadline:
                    break

    def command(self, argv: list[str], interval: float, *, silent: bool) -> int | None:
        """Watch a command's run; an exit code when it could not even be started.

        Args:
            argv: The command.
            interval: Seconds between two frames.
            silent: Keep the command's output off our standard output.
        """
        self._more = (
            "let it run longer",
            "does it use the GPU? `gpulse`, while it runs, shows the processes on each",
        )
        self._who = "the command"
        self._work = "let it run until it computes on the GPU"
        sampler = self._sampler(interval)
        related = _descendants_here()

        def adopt(pid: int) -> None:
            self._pid = pid
            self._progress.begin(None, argv[0])

        def sample() -> None:
            for frame in sampler:
                self._take(frame, related)

        with closing(sampler):
            outcome = beside.run(argv, sampler, sample, adopt, sys.stderr.fileno() if silent else None)
        if outcome.pid is None:
            return outcome.code
        self._goes_on = outcome.goes_on
        self.exit_code = None if outcome.goes_on else outcome.code
        return None

    def diagnosis(self) -> Diagnosis:
        """What was seen."""
        diagnosis = self.timeline.finish(None if self._pid is None else self._wanted)
        diagnosis = diagnosis._replace(data_gaps=(*diagnosis.data_gaps, *self._notes()))
        if self._missing is not None:
            return diagnosis._replace(verdict=f"Not enough data: {self._missing}.")
        if self._pid is not None and not self._wanted:
            return diagnosis._replace(verdict=f"Not enough data: {self._who} was never seen on a GPU.")
        return diagnosis

    def hints(self, diagnosis: Diagnosis) -> tuple[str, ...]:
        """What to do when there was too little to judge, or nothing to be slow."""
        if not diagnosis.judged:
            return self._more
        if all(judged.state == "idle" for judged in diagnosis.judged):
            return (self._work,)
        return ()

    def _notes(self) -> Iterator[str]:
        """What is worth knowing about the end of the command, and about work that is nobody's own."""
        for label, jobs in self._harvested.items():
            yield f"GPU {label}: {', '.join(jobs)} ran there, which gives way as soon as somebody uses the GPU"
        if self._goes_on:
            yield f"the command (pid {self._pid}) goes on running"
        elif self.exit_code:
            killed = f" (killed by signal {self.exit_code - 128})" if self.exit_code > 128 else ""
            yield f"the command ended with exit code {self.exit_code}{killed}"

    def _take(self, frame: Frame, related: Callable[[int], set[int]]) -> None:
        frame = self._choose(frame)
        self._note_harvest(frame)
        if self._pid is not None:
            family = related(self._pid)
            self._wanted.update(
                gpu.device.uuid
                for gpu in frame.gpus
                if any(process.pid in family for process in gpu.processes or ())
            )
            # Whoever else is on these GPUs is seen there, but his CPU time is not this job's.
            frame = frame._replace(processes=tuple(p for p in frame.processes if p.pid in family))
        self.timeline.feed(frame)

    def _note_harvest(self, frame: Frame) -> None:
        jobs = harvested.jobs(frame)
        for gpu in frame.gpus if jobs else ():
            seen = {jobs[process.pid]: None for process in gpu.processes or () if process.pid in jobs}
            if seen:
                self._harvested.setdefault(gpu.device.label, {}).update(seen)

    def _note_no_gpu(self, frame: Frame) -> None:
        reasons = [entry.detail for entry in frame.health if entry.source == "nvml"]
        self._missing = reasons[0] if reasons else "there is no GPU"
        self._more = ("gpulse doctor, which says what is missing here and how to get it",)

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


def _longer(seconds: float) -> float:
    return max(_LONGER_SECONDS, 2 * seconds)


def _check_file(path: Path) -> None:
    """Only what can be read from its beginning twice, and has an end, is a recording."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "gpulse record -o run.jsonl.gz, which makes one"
        raise UsageError(f"there is no file {path}", hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=file_hint(error)) from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a file", hint="give the recording itself, not a pipe or a folder")


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
