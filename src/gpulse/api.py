"""The Python interface: a handful of functions over the same path that the commands take."""

from __future__ import annotations

import time
from pathlib import Path

from gpulse.diagnosis.faults import faults
from gpulse.errors import UsageError
from gpulse.model.snapshot import RATES_SECONDS, Snapshot
from gpulse.sampling.look import look, machine_for_one_look
from gpulse.sampling.recorder import Recorder, Sink
from gpulse.sampling.sampler import Sampler
from gpulse.sources.base import Source


def snapshot(*, rates_seconds: float | None = RATES_SECONDS) -> Snapshot:
    """One look at this machine.

    Args:
        rates_seconds: The time between the two readings that rates (CPU use, disk and network traffic)
            are computed from. None takes one reading, and a second one a tenth of a second later only
            for GPUs with GPM, whose activity cannot be had faster.
    """
    machine = machine_for_one_look()
    try:
        taken = look(machine, rates_seconds=rates_seconds)
    finally:
        machine.close()
    return taken._replace(findings=tuple(faults(taken.frame)))


def record(
    path: str | Path,
    *,
    seconds: float | None = None,
    interval_seconds: float = 1.0,
    source: Source | None = None,
) -> int:
    """Record frames into a file, and return how many.

    Args:
        path: A new file: `.jsonl` or `.jsonl.gz` for a lossless recording, `.csv` or `.sqlite` for tables.
        seconds: How long to record; until interrupted or until the source ends when None.
        interval_seconds: Time from one frame to the next.
        source: What to record; this machine when None.

    Raises:
        RecordingError: The file cannot be written.
        UsageError: The file's extension is not one of those above.
    """
    sink = open_sink(Path(path))
    count = 0
    deadline = None if seconds is None else time.monotonic() + seconds
    try:
        with Sampler(source, interval_seconds=interval_seconds) as sampler:
            for frame in sampler:
                sink.write(frame)
                count += 1
                if deadline is not None and time.monotonic() + interval_seconds / 2 >= deadline:
                    break
    finally:
        sink.close()
    return count


def open_sink(path: Path) -> Sink:
    """The sink that a file's name asks for.

    Raises:
        UsageError: The extension is not known.
        RecordingError: The file cannot be created.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        return Recorder(path)
    if name.endswith((".sqlite", ".sqlite3", ".db")):
        from gpulse.export.sqlite import SqliteSink  # noqa: PLC0415  only for those who ask

        return SqliteSink(path)
    if name.endswith(".csv"):
        from gpulse.export.csv import CsvSink  # noqa: PLC0415

        return CsvSink(path)
    raise UsageError(
        f"cannot tell what to write into {path.name}",
        hint="end the name in .jsonl.gz, .jsonl, .csv or .sqlite",
    )
