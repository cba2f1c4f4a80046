"""`gpulse`: one look, or one every few seconds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import click

from gpulse.cli import selection, shell, show
from gpulse.errors import RecordingError
from gpulse.model.snapshot import RATES_SECONDS, Snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from gpulse.model.frame import Frame
    from gpulse.sources.base import Source
    from gpulse.sources.machine import LocalMachine
    from gpulse.sources.nvml.reader import GpuReader
    from gpulse.terminal.snapshot import Parts


DIAGNOSED_SECONDS = 11.0
"""A little more than the shortest stretch that may be judged."""
_STEP_SECONDS = 0.2
_NO_JOB = "The driver reports no fault, and no process is on a GPU."
_NOTHING_YET = (
    "No fault, and no bottleneck so far; a bottleneck is reported after at least 15 seconds of watching."
)


def look(
    *,
    opened: GpuReader | None,
    parts: Parts,
    gpus: str | None,
    watch: float | None,
    as_json: bool,
    as_csv: bool,
    sqlite: Path | None,
    no_color: bool,
    demo: bool,
    replay: Path | None,
    at: float | None,
) -> None:
    """Take looks and show them in the way that was asked for.

    Args:
        opened: The GPUs of this machine, when they were opened already.
        parts: What to show; findings take about ten seconds of watching the running jobs.
        gpus: Which GPUs, as in --gpus.
        watch: Seconds between looks, None for a single one.
        as_json: Print JSON.
        as_csv: Print CSV.
        sqlite: Append to this database.
        no_color: Print without colours.
        demo: Look at the demo machine.
        replay: Look at this recording.
        at: Seconds after the recording's start.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other")
    if at is not None and (replay is None or watch is not None):
        raise click.UsageError("--at shows one moment of a recording: it goes with --replay, without --watch")
    choose = selection.parse(gpus)
    showing = show.shower(
        parts, as_json=as_json, as_csv=as_csv, sqlite=sqlite, no_color=no_color, watching=watch is not None
    )
    source = shell.other_source(demo=demo, replay=replay)
    diagnosed = parts.findings
    if watch is not None:
        from gpulse.diagnosis.live import Monitor  # noqa: PLC0415

        monitor = Monitor()
        for snapshot in _many(watch, source):
            frame = choose(snapshot.frame)
            verdict = _NOTHING_YET if frame.gpus else None
            showing(snapshot._replace(frame=frame, findings=tuple(monitor(frame)), verdict=verdict))
    elif replay is not None:
        showing(_from_recording(replay, at, choose, diagnosed=diagnosed))
    elif demo:
        showing(_demo(choose, diagnosed=diagnosed))
    else:
        whole = parts != type(parts)(findings=parts.findings) or as_json or as_csv or sqlite is not None
        showing(_one(opened, choose, whole=whole, diagnosed=diagnosed))


def _judged(snapshot: Snapshot, choose: selection.Select) -> Snapshot:
    """The look at the chosen GPUs alone, with their faults."""
    from gpulse.diagnosis.faults import faults  # noqa: PLC0415

    frame = choose(snapshot.frame)
    return snapshot._replace(frame=frame, findings=tuple(faults(frame)))


def _diagnosed(snapshot: Snapshot, frames: Iterable[Frame]) -> Snapshot:
    """A judged look with what the time before it shows, besides the faults that it shows itself."""
    from gpulse.diagnosis.engine import diagnose, rank  # noqa: PLC0415

    diagnosis = diagnose(frames)
    known = {finding.key for finding in snapshot.findings}
    more = [finding for finding in diagnosis.findings if finding.key not in known]
    return snapshot._replace(findings=tuple(rank([*snapshot.findings, *more])), verdict=diagnosis.verdict)


def _demo(choose: selection.Select, *, diagnosed: bool) -> Snapshot:
    """One look at the simulated machine, whose past need not be waited for."""
    source = shell.demo_machine(earlier_seconds=DIAGNOSED_SECONDS)
    now = time.time()
    frames = [choose(source.sample(now + step)) for step in _steps(DIAGNOSED_SECONDS)] if diagnosed else []
    snapshot = _judged(Snapshot.of(source.sample(now - RATES_SECONDS), source.sample(now)), choose)
    return _diagnosed(snapshot, frames) if diagnosed else snapshot


def _steps(seconds: float) -> Iterator[float]:
    """Moments before now, oldest first."""
    count = round(seconds / _STEP_SECONDS)
    return ((step - count) * _STEP_SECONDS for step in range(count + 1))


def _one(opened: GpuReader | None, choose: selection.Select, *, whole: bool, diagnosed: bool) -> Snapshot:
    """One look; unless the whole machine is wanted, only at what the table of GPUs shows."""
    from gpulse.diagnosis.faults import READINGS as FAULTS  # noqa: PLC0415  while the GPUs gather their first sample
    from gpulse.sampling.look import look as take  # noqa: PLC0415
    from gpulse.sampling.look import machine_for_one_look  # noqa: PLC0415
    from gpulse.terminal.gpus import READINGS  # noqa: PLC0415

    whole = whole or diagnosed
    if opened is not None and not whole:
        opened.keep(READINGS | FAULTS)
    with closing(machine_for_one_look(opened)) as machine:
        taken = take(machine, rates_seconds=RATES_SECONDS if whole else None)
        judged = _judged(taken, choose)
        if not diagnosed or not judged.frame.gpus:
            return judged
        if all(gpu.processes == () for gpu in judged.frame.gpus):  # None: whether there are any is unknown
            return judged._replace(verdict=_NO_JOB)
        frames = [choose(taken.frame), *_watched(machine, choose)]
        return _diagnosed(_judged(Snapshot.of(frames[-3], frames[-1]), choose), frames)


def _watched(machine: LocalMachine, choose: selection.Select) -> Iterator[Frame]:
    """Frames of the next ten seconds, with a word for whoever waits for them."""
    from gpulse.cli.progress import Progress  # noqa: PLC0415
    from gpulse.diagnosis.timeline import Timeline  # noqa: PLC0415

    progress, timeline = Progress(quiet=False), Timeline()
    progress.begin(DIAGNOSED_SECONDS, None)
    begun = time.monotonic()
    try:
        for step in range(1, round(DIAGNOSED_SECONDS / _STEP_SECONDS) + 1):
            time.sleep(max(0.0, begun + step * _STEP_SECONDS - time.monotonic()))
            frame = choose(machine.sample(time.time()))
            timeline.feed(frame)
            progress.watching(frame, timeline)
            yield frame
    finally:
        progress.clear()


def _from_recording(path: Path, at: float | None, choose: selection.Select, *, diagnosed: bool) -> Snapshot:
    """The look at the recording's end, or at a moment of it."""
    from gpulse.diagnosis.live import WINDOW_SECONDS  # noqa: PLC0415
    from gpulse.sources.recording import Recording  # noqa: PLC0415

    kept = WINDOW_SECONDS if diagnosed else 2 * RATES_SECONDS
    recent: deque[Frame] = deque()
    first: float | None = None
    reached = at is None
    for frame in Recording(path):
        first = frame.time if first is None else first
        if at is not None and frame.time - first >= at:
            reached = True
            if frame.time - first > at and recent:
                break
        while len(recent) > 1 and frame.time - recent[0].time > kept:
            recent.popleft()
        recent.append(frame)
    if not recent or first is None:
        raise RecordingError(
            f"{path} holds no frame", hint="it was cut off before its first frame; record again"
        )
    last = recent[-1]
    if not reached:
        raise click.UsageError(f"--at +{at:g} is after the recording's end at +{last.time - first:.1f}")
    apart = [old for old in recent if last.monotonic - old.monotonic >= RATES_SECONDS - 0.01]
    earlier = apart[-1] if apart else recent[0] if len(recent) > 1 else None
    snapshot = _judged(Snapshot.of(earlier, last), choose)
    return _diagnosed(snapshot, [choose(frame) for frame in recent]) if diagnosed else snapshot


def _many(seconds: float, source: Source | None) -> Iterator[Snapshot]:
    """Looks without end; the first one waits for rates too instead of showing gaps."""
    from gpulse.sampling.sampler import Sampler  # noqa: PLC0415

    if source is None:
        from gpulse.sources.machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
        from gpulse.sources.nvml.cadence import live  # noqa: PLC0415

        source = LocalMachine(interval_seconds=seconds, cadence=live(), threads=False)
    with closing(Sampler(source, interval_seconds=seconds)) as sampler:
        before = source.sample(time.time())
        time.sleep(RATES_SECONDS)
        for frame in sampler:
            yield Snapshot.of(before, frame)
            before = frame


def seconds_after(text: str) -> float:
    """`+12.5`, or `12.5`, as seconds after a recording's start.

    Raises:
        click.UsageError: It is not a number, or one before the start.
    """
    try:
        seconds = float(text.removeprefix("+"))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise click.UsageError(f"--at takes seconds after the recording's start, such as +12.5, not {text!r}")
    return seconds
