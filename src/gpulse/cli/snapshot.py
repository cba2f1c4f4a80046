"""`gpulse` without a command: one snapshot, or one every few seconds, as a table, JSON, CSV or SQLite rows."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click

from gpulse.cli import common, gpu_selection
from gpulse.diagnosis.rules.faults import FAULT_READINGS as FAULTS
from gpulse.diagnosis.rules.faults import find_faults
from gpulse.errors import RecordingError
from gpulse.export.snapshot_documents import TableName, build_document
from gpulse.model.snapshot import RATES_SECONDS, Snapshot
from gpulse.terminal.snapshot_tables import READINGS, SnapshotSections, snapshot_lines

if TYPE_CHECKING:
    from gpulse.model.frame import Frame, GpuReading
    from gpulse.sources.frame_source import Source
    from gpulse.sources.local_machine import LocalMachine
    from gpulse.sources.nvml.gpu_reader import GpuReader

PARTS = {"bottleneck": "findings", "cpu": "cpu", "disk": "disk", "net": "network"}
"""Flags of the parts that a snapshot can have, with the parts' names."""
_OPTIONS: tuple[Callable[[common.Command], common.Command], ...] = (
    click.option(
        "-b",
        "--bottleneck",
        is_flag=True,
        help="Show faults, and diagnose what slows down running jobs (takes about ten seconds).",
    ),
    click.option(
        "-c",
        "--cpu",
        is_flag=True,
        help="Show CPUs, memory, resource pressure (PSI), and every process that uses a GPU.",
    ),
    click.option(
        "-d", "--disk", is_flag=True, help="Show disks with their rates, and file systems with their sizes."
    ),
    click.option("-n", "--net", is_flag=True, help="Show network interfaces with their rates and errors."),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        help="Show more: clocks, links, every child process, and which values cannot be read.",
    ),
    click.option(
        "-w",
        "--watch",
        type=common.parse_seconds,
        is_flag=False,
        flag_value=2.0,
        metavar="[SECONDS]",
        help="Update every SECONDS (2 without a value) until Ctrl-C.",
    ),
    click.option(
        "--gpus",
        metavar="LIST",
        help="Show only these GPUs: indices, ranges and UUIDs (0,2-3,GPU-1f2e), or `visible` for CUDA_VISIBLE_DEVICES.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one document per line."),
    click.option(
        "--csv",
        "as_csv",
        is_flag=True,
        help="Print one table as CSV, with one row per GPU (-b: per finding, -c: per process, -d: per disk, -n: per interface).",
    ),
    click.option(
        "--sqlite",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Append all tables to a SQLite database.",
    ),
    click.option("--no-color", is_flag=True, help="Do not use colors (same as NO_COLOR=1)."),
    common.source_options,
    click.option(
        "--at",
        metavar="+SECONDS",
        show_default="the end of the recording",
        help="With --replay: show this moment of the recording, in seconds after its start.",
    ),
)


def snapshot_options(command: common.Command) -> common.Command:
    """Add the options of a snapshot to a command, in the order of the help."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def run_snapshot(options: dict[str, Any], *, always: Collection[str] = (), opened: GpuReader | None) -> None:
    """Take and print snapshots as the options of `snapshot_options` say.

    Args:
        options: Their values by parameter name.
        always: Parts to show even without their flag: `bottleneck`, `cpu`, `disk`, `net`.
        opened: The GPUs of this machine, if they were opened already.
    """
    rest = dict(options)
    wanted = {part: rest.pop(flag) or flag in always for flag, part in PARTS.items()}
    at = rest.pop("at")
    parts = SnapshotSections(**wanted, verbose=rest.pop("verbose"))
    take_snapshots(opened=opened, parts=parts, at=None if at is None else parse_offset(at), **rest)


DIAGNOSIS_SECONDS = 11.0
"""A little more than the shortest time that can be diagnosed."""
_STEP_SECONDS = 0.2
_UNUSED_RATIO = 0.02
_UNUSED_BYTES = 2.0**30
"""A GPU that is less busy and has less memory in use needs no diagnosis when no process is listed."""
_NO_JOB = "The driver reports no fault, and no process uses a GPU."
_NO_BOTTLENECK_YET = (
    "No fault, and no bottleneck so far; bottlenecks are reported after 15 seconds at the earliest."
)


def take_snapshots(
    *,
    opened: GpuReader | None,
    parts: SnapshotSections,
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
    """Take snapshots and print them in the chosen format.

    Args:
        opened: The GPUs of this machine, if they were opened already.
        parts: What to show; findings take about ten seconds of watching the running jobs.
        gpus: Which GPUs, as in --gpus.
        watch: Seconds between snapshots, None for a single one.
        as_json: Print JSON.
        as_csv: Print CSV.
        sqlite: Append to this database.
        no_color: Print without colors.
        demo: Use the simulated machine.
        replay: Use this recording.
        at: Seconds after the recording's start.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv cannot be used together")
    if at is not None and (replay is None or watch is not None):
        raise click.UsageError(
            "--at shows one moment of a recording: use it with --replay and without --watch"
        )
    gpu_filter = gpu_selection.parse_gpus(gpus)
    print_snapshot = make_printer(
        parts, as_json=as_json, as_csv=as_csv, sqlite=sqlite, no_color=no_color, watching=watch is not None
    )
    source = common.chosen_source(demo=demo, replay=replay)
    diagnosed = parts.findings
    if watch is not None:
        from gpulse.diagnosis.live_diagnosis import LiveDiagnosis  # noqa: PLC0415  all rules; a single snapshot needs only those of faults

        monitor = LiveDiagnosis()
        for snapshot in _repeated_snapshots(watch, source):
            frame = gpu_filter(snapshot.frame)
            verdict = _NO_BOTTLENECK_YET if frame.gpus else None
            print_snapshot(snapshot._replace(frame=frame, findings=tuple(monitor(frame)), verdict=verdict))
    elif replay is not None:
        print_snapshot(_recorded_snapshot(replay, at, gpu_filter, diagnosed=diagnosed))
    elif demo:
        print_snapshot(_demo_snapshot(gpu_filter, diagnosed=diagnosed))
    else:
        whole = parts != type(parts)(findings=parts.findings) or as_json or as_csv or sqlite is not None
        print_snapshot(_local_snapshot(opened, gpu_filter, whole=whole, diagnosed=diagnosed))


def _with_faults(snapshot: Snapshot, gpu_filter: gpu_selection.FrameFilter) -> Snapshot:
    """Return the snapshot of the chosen GPUs alone, with their faults."""
    frame = gpu_filter(snapshot.frame)
    return snapshot._replace(frame=frame, findings=tuple(find_faults(frame)))


def _with_diagnosis(snapshot: Snapshot, frames: Iterable[Frame]) -> Snapshot:
    """Add the findings of the time before a snapshot to the faults that it has already."""
    from gpulse.diagnosis.engine import diagnose, rank_findings  # noqa: PLC0415  all rules, as above

    diagnosis = diagnose(frames)
    known = {finding.key for finding in snapshot.findings}
    more = [finding for finding in diagnosis.findings if finding.key not in known]
    return snapshot._replace(
        findings=tuple(rank_findings([*snapshot.findings, *more])), verdict=diagnosis.verdict
    )


def _demo_snapshot(gpu_filter: gpu_selection.FrameFilter, *, diagnosed: bool) -> Snapshot:
    """Return a snapshot of the simulated machine, whose past can be computed without waiting."""
    source = common.demo_machine(earlier_seconds=DIAGNOSIS_SECONDS)
    now = time.time()
    frames = (
        [gpu_filter(source.sample(now + step)) for step in _sample_offsets(DIAGNOSIS_SECONDS)]
        if diagnosed
        else []
    )
    snapshot = _with_faults(Snapshot.of(source.sample(now - RATES_SECONDS), source.sample(now)), gpu_filter)
    return _with_diagnosis(snapshot, frames) if diagnosed else snapshot


def _sample_offsets(seconds: float) -> Iterator[float]:
    """Yield sampling times relative to now, oldest first."""
    count = round(seconds / _STEP_SECONDS)
    return ((step - count) * _STEP_SECONDS for step in range(count + 1))


def _local_snapshot(
    opened: GpuReader | None, gpu_filter: gpu_selection.FrameFilter, *, whole: bool, diagnosed: bool
) -> Snapshot:
    """Return a snapshot of this machine; unless `whole`, only with what the table of GPUs shows."""
    from gpulse.sampling import sampler  # noqa: PLC0415  loads the driver's binding

    whole = whole or diagnosed
    if opened is not None and not whole:
        opened.keep(READINGS | FAULTS)
    with closing(sampler.open_machine_for_snapshot(opened)) as machine:
        taken = sampler.take_snapshot(machine, rates_seconds=RATES_SECONDS if whole else None)
        judged = _with_faults(taken, gpu_filter)
        if not diagnosed or not judged.frame.gpus:
            return judged
        if all(map(_is_unused, judged.frame.gpus)):
            return judged._replace(verdict=_NO_JOB)
        frames = [gpu_filter(taken.frame), *_watch_frames(machine, gpu_filter)]
        return _with_diagnosis(_with_faults(Snapshot.of(frames[-3], frames[-1]), gpu_filter), frames)


def _is_unused(gpu: GpuReading) -> bool:
    """Return whether no process is on a GPU; in many containers the list is empty although some are."""
    if gpu.processes != ():  # None: unknown
        return False
    return (gpu.get("gpu_utilization_ratio") or 0.0) < _UNUSED_RATIO and (
        gpu.get("memory_used_bytes") or 0.0
    ) < _UNUSED_BYTES


def _watch_frames(machine: LocalMachine, gpu_filter: gpu_selection.FrameFilter) -> Iterator[Frame]:
    """Yield the frames of the next ten seconds, and show progress meanwhile."""
    from gpulse.cli.progress import WatchProgress  # noqa: PLC0415  for a diagnosis alone
    from gpulse.diagnosis.windowed_diagnosis import WindowedDiagnosis  # noqa: PLC0415

    progress, timeline = WatchProgress(quiet=False), WindowedDiagnosis()
    progress.begin(DIAGNOSIS_SECONDS, None)
    begun = time.monotonic()
    try:
        for step in range(1, round(DIAGNOSIS_SECONDS / _STEP_SECONDS) + 1):
            time.sleep(max(0.0, begun + step * _STEP_SECONDS - time.monotonic()))
            frame = gpu_filter(machine.sample(time.time()))
            timeline.feed(frame)
            progress.watching(frame, timeline)
            yield frame
    finally:
        progress.clear()


def _recorded_snapshot(
    path: Path, at: float | None, gpu_filter: gpu_selection.FrameFilter, *, diagnosed: bool
) -> Snapshot:
    """Return a snapshot of a recording's end, or of one of its moments."""
    from gpulse.diagnosis.live_diagnosis import WINDOW_SECONDS  # noqa: PLC0415  for recordings alone
    from gpulse.sources.recording_reader import Recording  # noqa: PLC0415

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
            f"{path} contains no frames: the recording was cut off before the first frame",
            hint="record again",
        )
    last = recent[-1]
    if not reached:
        raise click.UsageError(
            f"--at +{at:g} is after the end of the recording, which is at +{last.time - first:.1f}"
        )
    apart = [old for old in recent if last.monotonic - old.monotonic >= RATES_SECONDS - 0.01]
    earlier = apart[-1] if apart else recent[0] if len(recent) > 1 else None
    snapshot = _with_faults(Snapshot.of(earlier, last), gpu_filter)
    return _with_diagnosis(snapshot, [gpu_filter(frame) for frame in recent]) if diagnosed else snapshot


def _repeated_snapshots(seconds: float, source: Source | None) -> Iterator[Snapshot]:
    """Yield snapshots without end; the first one waits until rates are known."""
    from gpulse.sampling.sampler import Sampler  # noqa: PLC0415  loads the driver's binding

    if source is None:
        from gpulse.sources.local_machine import LocalMachine  # noqa: PLC0415  loads the driver's binding
        from gpulse.sources.nvml.read_timing import live_cadence  # noqa: PLC0415

        source = LocalMachine(interval_seconds=seconds, cadence=live_cadence(), threads=False)
    with closing(Sampler(source, interval_seconds=seconds)) as sampler:
        before = source.sample(time.time())
        time.sleep(RATES_SECONDS)
        for frame in sampler:
            yield Snapshot.of(before, frame)
            before = frame


def parse_offset(text: str) -> float:
    """Parse `+12.5`, or `12.5`, as seconds after a recording's start.

    Raises:
        click.UsageError: It is not a number, or it is negative.
    """
    try:
        seconds = float(text.removeprefix("+"))
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise click.UsageError(f"--at takes seconds after the recording's start, such as +12.5, not {text!r}")
    return seconds


Printer = Callable[[Snapshot], None]

_HOME = "\x1b[H"
_TO_END_OF_LINE = "\x1b[K"
_TO_END_OF_SCREEN = "\x1b[J"
_CLEAR_SCREEN = "\x1b[2J"


def make_printer(
    parts: SnapshotSections,
    *,
    as_json: bool,
    as_csv: bool,
    sqlite: Path | None,
    no_color: bool,
    watching: bool,
) -> Printer:
    """Return the function that prints a snapshot in the chosen format."""
    if as_csv:
        show = _csv_printer(parts)
    elif as_json:
        show = _json_printer(watching=watching)
    elif sqlite is not None and not watching:
        return _sqlite_printer(sqlite, None)
    else:
        show = _text_printer(parts, no_color=no_color, watching=watching)
    return show if sqlite is None else _sqlite_printer(sqlite, show)


def _text_printer(parts: SnapshotSections, *, no_color: bool, watching: bool) -> Printer:

    in_place = watching and common.is_capable_terminal()
    if in_place:
        click.echo(_CLEAR_SCREEN, nl=False)

    def show(snapshot: Snapshot) -> None:
        lines = list(
            snapshot_lines(snapshot, parts, common.terminal_width(), common.paint(no_color=no_color))
        )
        if in_place:
            common.write(_redraw_in_place(lines, common.terminal_height()))
        else:
            common.write("\n".join([*lines, ""] if watching else lines))
        sys.stdout.flush()

    return show


def _redraw_in_place(lines: list[str], height: int) -> str:
    """Return the lines with escape codes that overwrite the previous snapshot, without flicker and scrolling."""
    room = max(1, height - 2)
    if len(lines) > room + 1:
        lines = [*lines[:room], f"+ {len(lines) - room} more lines; enlarge the window to see them"]
    return _HOME + "\n".join(f"{line}{_TO_END_OF_LINE}" for line in lines) + _TO_END_OF_SCREEN


def _json_printer(*, watching: bool) -> Printer:
    import json  # noqa: PLC0415  for --json alone

    def show(snapshot: Snapshot) -> None:
        click.echo(json.dumps(build_document(snapshot), indent=None if watching else 2, allow_nan=False))
        sys.stdout.flush()

    return show


def _csv_printer(parts: SnapshotSections) -> Printer:
    from gpulse.export.csv_files import CsvWriter  # noqa: PLC0415  for --csv alone

    asked: Iterable[tuple[bool, TableName]] = (
        (parts.findings, "finding"),
        (parts.cpu, "process"),
        (parts.disk, "disk"),
        (parts.network, "network"),
    )
    tables = [table for wanted, table in asked if wanted]
    if len(tables) > 1:
        raise click.UsageError(
            "CSV output holds only one table: give one of -b, -c, -d and -n, or use --json or --sqlite for all tables"
        )
    return CsvWriter(cast("IO[str]", _Utf8Stdout()), tables[0] if tables else "gpu").write


class _Utf8Stdout:
    """Standard output as UTF-8, whatever the locale."""

    def write(self, text: str) -> int:
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        sys.stdout.buffer.flush()


def _sqlite_printer(path: Path, also: Printer | None) -> Printer:
    from gpulse.export.sqlite_database import SqliteSink  # noqa: PLC0415  for --sqlite alone

    def show(snapshot: Snapshot) -> None:
        with closing(SqliteSink(path)) as sink:
            sink.append(snapshot)
        if also is not None:
            also(snapshot)
        else:
            count = len(snapshot.frame.gpus)
            click.echo(
                f"appended a snapshot of {count} {'GPU' if count == 1 else 'GPUs'} to {path}", err=True
            )

    return show
