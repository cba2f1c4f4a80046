"""Sources of `gpulse why`: this machine, the simulated one, a recording, or a command while it runs."""

from __future__ import annotations

import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click

from gpulse.cli import child_process, common, gpu_selection
from gpulse.cli.progress import WatchProgress
from gpulse.diagnosis.line_search import LineSearch, LineSpan
from gpulse.diagnosis.windowed_diagnosis import EarlyVerdict, WindowedDiagnosis
from gpulse.errors import UsageError, file_hint
from gpulse.model.finding import Diagnosis
from gpulse.model.frame import Frame
from gpulse.sampling.sampler import Sampler
from gpulse.sampling.stack_collector import collect_with
from gpulse.sources.local_machine import LocalMachine
from gpulse.sources.nvml.read_timing import detailed_cadence
from gpulse.sources.procfs import ProcessDescendants, Roots
from gpulse.sources.python_stacks import StackReader, allow_reading_by, find_py_spy, yama_scope
from gpulse.sources.recording_reader import Recording
from gpulse.terminal import harvest_tables

_MIN_LONGER_SECONDS = 60.0
MIN_WORK_SECONDS = 5.0
"""Work of a job that must be seen before a cause is suspected."""
_EVERY_SECONDS = 1.0


class LineWatch:
    """Reads the stacks of jobs whose findings so far are in their code, and adds the lines to the diagnosis."""

    def __init__(self, timeline: WindowedDiagnosis) -> None:
        """Follow a diagnosis that is fed with frames; a job is not touched before a cause is suspected."""
        self.search = LineSearch()
        self._timeline = timeline
        self._collector = collect_with(StackReader(find_py_spy()))
        self._judged_at: float | None = None

    def take(self, frame: Frame) -> None:
        """Add a frame; about once a second, decide whose stacks are read."""
        self.search.feed(frame)
        if self._judged_at is not None and 0 <= frame.time - self._judged_at < _EVERY_SECONDS:
            return
        self._judged_at = frame.time
        self.search.add(self._collector.take())
        so_far = self._timeline.preliminary(MIN_WORK_SECONDS)
        if so_far is not None:
            self._collector.watch(self.search.suspect((*so_far.findings, *so_far.info), frame))

    def attach(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with the lines of its findings."""
        self.search.add(self._collector.take())
        return self.search.attach(diagnosis)

    def close(self) -> None:
        """Stop reading stacks."""
        self._collector.close()


def permit_reading() -> Callable[[], None] | None:
    """Return what a command must do before it starts, so that we can read its stacks; None when nothing is needed."""
    return allow_reading_by(os.getpid()) if yama_scope(Roots()) == 1 else None


class RecordingRange:
    """A time range of a recording, in epoch seconds or seconds after the first frame."""

    def __init__(self, start: str | None, end: str | None) -> None:
        """Parse the ends of the range.

        Raises:
            click.UsageError: One is not a time, or they are in the wrong order.
        """
        self.is_whole = start is None and end is None
        self._start, self._end = start, end
        self._first: float | None = None
        self._last = 0.0
        self._is_empty = True
        written = [text for text in (start, end) if text is not None]
        moments = [_parse_moment(text, 0.0) for text in written]
        if len({text.startswith("+") for text in written}) == 1 and moments != sorted(moments):
            self._refuse()

    def of(self, frames: Iterator[Frame]) -> Iterator[Frame]:
        """Yield the frames in the range.

        Raises:
            click.UsageError: The end is before the start, which the first frame may show.
        """
        begin, end = -math.inf, math.inf
        for place, frame in enumerate(frames):
            if place == 0:
                self._first = frame.time
                begin = begin if self._start is None else _parse_moment(self._start, frame.time)
                end = end if self._end is None else _parse_moment(self._end, frame.time)
                if end < begin:
                    self._refuse()
            self._last = frame.time
            if frame.time > end + 1.0:  # frames may be slightly out of order
                return
            if begin <= frame.time <= end:
                self._is_empty = False
                yield frame

    @property
    def missing(self) -> str | None:
        """Why the range has no frames, None when it has some."""
        if not self._is_empty or self._first is None:
            return None
        first, last = self._first, self._last
        if self._start is not None and _parse_moment(self._start, first) > last:
            ends = f"+{last - first:.1f}" if self._start.startswith("+") else f"{last:.1f}"
            return f"the recording ends at {ends}, before --from {self._start}"
        if self._end is not None and _parse_moment(self._end, first) < first:
            return f"the recording begins at {first:.1f}, after --to {self._end}"
        return "the recording has no frame in that time range"

    def _refuse(self) -> None:
        raise click.UsageError(f"--to {self._end} is before --from {self._start}")


class DiagnosisSource:
    """Feeds a timeline with frames from a source, and knows what to suggest if they are too few."""

    def __init__(
        self,
        timeline: WindowedDiagnosis,
        choose: gpu_selection.FrameFilter,
        pid: int | None,
        progress: WatchProgress,
        *,
        with_lines: bool = True,
    ) -> None:
        self.timeline = timeline
        self.lines: LineWatch | None = None
        """Collects the lines of code behind the findings, while a real machine is watched."""
        self._with_lines = with_lines
        self.exit_code: int | None = None
        """Exit code of the command, if it ended."""
        self._is_running = False
        self._progress = progress
        self._choose = choose
        self._pid = pid
        self._wanted: set[str] = set()
        """UUIDs of the GPUs that the wanted process uses."""
        self._harvested: dict[str, dict[str, None]] = {}
        """Harvest jobs that were seen, by GPU."""
        self._who = f"process {pid}"
        self._missing: str | None = None
        """Why there is nothing to diagnose."""
        self._more: tuple[str, ...] = ()
        """What to suggest when there is not enough data."""
        self._work = "start the job, and run this command again while the job runs"
        """What to suggest when all GPUs were idle."""

    def recording(self, path: Path, part: RecordingRange) -> None:
        """Read a recording.

        Raises:
            UsageError: It is not a file.
            click.UsageError: The time range is not valid.
            RecordingError: It cannot be read.
        """
        check_file(path)
        longer = "record longer: gpulse record -o run.jsonl.gz"
        self._more = (
            longer if part.is_whole else f"choose a longer range with --from and --to, or {longer}",
        )
        self._work = "record while the job runs"
        for count, frame in enumerate(part.of(iter(Recording(path)))):
            self._take(frame, _frame_descendants(frame))
            self._progress.reading(path, count)
        self._missing = part.missing

    def demo(self, seconds: float, interval: float) -> None:
        """Watch the simulated machine, without waiting for its time to pass."""
        self._more = (f"watch longer: gpulse why --demo --window {_longer_window(seconds):g}",)
        now = time.time()
        machine = common.demo_machine(earlier_seconds=seconds)
        for step in range(int(seconds / interval) + 1):
            frame = machine.sample(now - seconds + step * interval)
            self._take(frame, _frame_descendants(frame))

    def machine(self, seconds: float, interval: float, *, is_maximum: bool = False) -> None:
        """Watch this machine.

        Args:
            seconds: How long.
            interval: Seconds between two frames.
            is_maximum: End as soon as the verdict is sure.

        Raises:
            UsageError: The wanted process uses no GPU.
        """
        self._more = (
            f"watch longer: gpulse why --window {_longer_window(seconds):g}",
            "check that the job is running: `gpulse` shows the processes on each GPU, and `gpulse doctor` shows what can be read",
        )
        sampler = self._sampler(interval)
        related = _local_descendants()
        early = EarlyVerdict() if is_maximum else None
        with closing(sampler), self._collecting_lines(), child_process.stop_on_signals(sampler):
            self._progress.begin(seconds, None, is_maximum=is_maximum)
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
                if early is not None and self._is_sure(early, frame):
                    break

    def command(self, argv: list[str], interval: float, *, silent: bool) -> int | None:
        """Watch a command while it runs; return an exit code if it could not be started.

        Args:
            argv: The command.
            interval: Seconds between two frames.
            silent: Send the command's output to standard error.
        """
        self._more = (
            "let the command run longer",
            "check that the command uses a GPU: while it runs, `gpulse` shows the processes on each GPU",
        )
        self._who = "the command"
        self._work = "let the command run until it computes on the GPU"
        sampler = self._sampler(interval)
        related = _local_descendants()

        def adopt(pid: int) -> None:
            self._pid = pid
            self._progress.begin(None, argv[0])

        def sample() -> None:
            for frame in sampler:
                self._take(frame, related)

        stdout = sys.stderr.fileno() if silent else None
        permit = permit_reading() if self._with_lines else None
        with closing(sampler), self._collecting_lines():
            outcome = child_process.run(argv, sampler, sample, adopt, stdout, permit)
        if outcome.pid is None:
            return outcome.code
        self._is_running = outcome.is_running
        self.exit_code = None if outcome.is_running else outcome.code
        return None

    def _is_sure(self, early: EarlyVerdict, frame: Frame) -> bool:
        """Return whether the verdict is sure, and its first finding has its line of code or cannot have one."""
        if not early.is_due(frame.time):
            return False
        diagnosis = self.diagnosis()
        waits_for_line = self.lines is not None and any(
            finding.where == () or self.lines.search.is_collecting(finding)
            for finding in diagnosis.findings[:1]
        )
        return early.is_sure(diagnosis, self.timeline) and not waits_for_line

    def diagnosis(self) -> Diagnosis:
        """Return the diagnosis of the frames so far."""
        diagnosis = self.timeline.finish(None if self._pid is None else self._wanted)
        if self.lines is not None:
            diagnosis = self.lines.attach(diagnosis)
        diagnosis = diagnosis._replace(data_gaps=(*diagnosis.data_gaps, *self._notes()))
        if self._missing is not None:
            return diagnosis._replace(verdict=f"Not enough data: {self._missing}.")
        if self._pid is not None and not self._wanted:
            return diagnosis._replace(verdict=f"Not enough data: {self._who} was never seen on a GPU.")
        return diagnosis

    def line_spans(self, diagnosis: Diagnosis) -> dict[str, tuple[LineSpan, ...]]:
        """Return the lines of code over time, by the GPU's label."""
        return {} if self.lines is None else self.lines.search.line_spans(diagnosis.findings)

    def hints(self, diagnosis: Diagnosis) -> tuple[str, ...]:
        """Return what to do when there was not enough data, or no activity."""
        if not diagnosis.judged:
            return self._more
        if all(judged.state == "idle" for judged in diagnosis.judged):
            return (self._work,)
        return ()

    def _notes(self) -> Iterator[str]:
        """Yield notes on harvest jobs that were seen, and on how the command ended."""
        for label, jobs in self._harvested.items():
            yield f"GPU {label} was used by a harvest ({', '.join(jobs)}), which stops as soon as somebody else uses the GPU"
        if self._is_running:
            yield f"the command (pid {self._pid}) is still running"
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
            # Other processes on these GPUs stay visible there, but their CPU time is not this job's.
            frame = frame._replace(processes=tuple(p for p in frame.processes if p.pid in family))
        self.timeline.feed(frame)
        if self.lines is not None:
            self.lines.take(frame)

    @contextmanager
    def _collecting_lines(self) -> Iterator[None]:
        """Collect lines of code until the watching ends."""
        if not self._with_lines:
            yield
            return
        with closing(LineWatch(self.timeline)) as self.lines:
            yield

    def _note_harvest(self, frame: Frame) -> None:
        jobs = harvest_tables.find_harvest_jobs(frame)
        for gpu in frame.gpus if jobs else ():
            seen = {jobs[process.pid]: None for process in gpu.processes or () if process.pid in jobs}
            if seen:
                self._harvested.setdefault(gpu.device.label, {}).update(seen)

    def _note_no_gpu(self, frame: Frame) -> None:
        reasons = [entry.detail for entry in frame.health if entry.source == "nvml"]
        self._missing = reasons[0] if reasons else "there is no GPU"
        self._more = ("run `gpulse doctor` to see what is missing and how to fix it",)

    def _refuse_pid(self, frame: Frame) -> None:
        pids = sorted({process.pid for gpu in frame.gpus for process in gpu.processes or ()})
        others = (
            f"these processes do: {', '.join(map(str, pids))}" if pids else "no other process does either"
        )
        raise UsageError(
            f"process {self._pid} does not use a GPU; {others}",
            hint="list the processes that use GPUs with: gpulse -c",
        )

    @staticmethod
    def _sampler(interval: float) -> Sampler:
        machine = LocalMachine(
            interval_seconds=interval, cadence=detailed_cadence(max(0.2, min(interval, 1.0))), threads=True
        )
        return Sampler(machine, interval_seconds=interval)


def _longer_window(seconds: float) -> float:
    return max(_MIN_LONGER_SECONDS, 2 * seconds)


def check_file(path: Path) -> None:
    """Check that a path is a regular file, which can be read twice and has an end."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "write a recording with: gpulse record -o run.jsonl.gz"
        raise UsageError(f"there is no file {path}", hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=file_hint(error)) from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a file", hint="give the recording itself, not a pipe or a directory")


def _parse_moment(text: str, first: float) -> float:
    """Parse `+12.5` as seconds after the first frame, or a number as epoch seconds.

    Raises:
        click.UsageError: It is neither.
    """
    try:
        seconds = float(text.removeprefix("+"))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise click.UsageError(f"{text!r} is not a time: give +SECONDS after the start, or epoch seconds")
    return first + seconds if text.startswith("+") else seconds


def _local_descendants() -> Callable[[int], set[int]]:
    """Return the function that finds a process of this machine and its descendants."""
    family = ProcessDescendants(Roots())
    return lambda pid: {pid, *family.descendants(time.monotonic(), [pid])}


def _frame_descendants(frame: Frame) -> Callable[[int], set[int]]:
    """Return the function that finds a process and its descendants in a frame."""

    def related(pid: int) -> set[int]:
        found = {pid}
        grew = True
        while grew:
            more = {p.pid for p in frame.processes if p.identity.parent_pid in found} - found
            found |= more
            grew = bool(more)
        return found

    return related
