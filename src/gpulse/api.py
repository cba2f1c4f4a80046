"""The Python API: functions that do the same as the commands."""

from __future__ import annotations

import time
from pathlib import Path

from gpulse.diagnosis.rules.faults import find_faults
from gpulse.errors import UsageError
from gpulse.export.csv_files import CsvSink
from gpulse.export.sqlite_database import SqliteSink
from gpulse.model.snapshot import RATES_SECONDS, Snapshot
from gpulse.sampling.recorder import FrameSink, Recorder
from gpulse.sampling.sampler import Sampler, open_machine_for_snapshot, take_snapshot
from gpulse.sources.frame_source import Source


def snapshot(*, rates_seconds: float | None = RATES_SECONDS) -> Snapshot:
    """Take a snapshot of this machine.

    Args:
        rates_seconds: Time between the two readings from which rates (CPU use, disk and network traffic) are
            computed. None takes one reading; only GPUs with GPM are read again a tenth of a second later, because
            their activity cannot be measured faster.
    """
    machine = open_machine_for_snapshot()
    try:
        taken = take_snapshot(machine, rates_seconds=rates_seconds)
    finally:
        machine.close()
    return taken._replace(findings=tuple(find_faults(taken.frame)))


def record(
    path: str | Path,
    *,
    seconds: float | None = None,
    interval_seconds: float = 1.0,
    source: Source | None = None,
) -> int:
    """Record frames to a file, and return their number.

    Args:
        path: Name of a new file: `.jsonl` or `.jsonl.gz` for a lossless recording, `.csv` or `.sqlite` for tables.
        seconds: Duration; None records until interrupted or until the source ends.
        interval_seconds: Time between two frames.
        source: Source of the frames; this machine when None.

    Raises:
        RecordingError: The file cannot be written.
        UsageError: The file's extension is none of the above.
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


def open_sink(path: Path) -> FrameSink:
    """Open the sink for a file, by its extension.

    Raises:
        UsageError: The extension is unknown.
        RecordingError: The file cannot be created.
    """
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        return Recorder(path)
    if name.endswith((".sqlite", ".sqlite3", ".db")):
        return SqliteSink(path)
    if name.endswith(".csv"):
        return CsvSink(path)
    raise UsageError(
        f"cannot tell the format of {path.name} from its extension",
        hint="use .jsonl.gz, .jsonl, .csv or .sqlite",
    )
