"""Segments without what can be read back from a time-series database: who held GPUs, and how their time is divided, stays.

A thin segment is written beside the whole one, with the files that both have as links, and takes its place by a rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.series import EXPOSED
from gpulse.store.disk import disk_errors
from gpulse.store.history import rollup
from gpulse.store.history.day_summaries import is_ready
from gpulse.store.history.gpu_time import OF_GPU
from gpulse.store.history.parquet import QUICK, THOROUGH, write_file
from gpulse.store.history.segments import SealedFile, Segment, new_segment, remove_segments, write_meta
from gpulse.store.history.tables import literal, quoted, words_of

if TYPE_CHECKING:
    import duckdb

SCOPES: tuple[Scope, ...] = tuple(scope for scope in CATALOGUE if scope not in EXPOSED)
"""What no time-series database takes: processes and control groups."""


def thinnable(
    segments: Sequence[Segment],
    *,
    now: float,
    whole_seconds: float,
    sent: tuple[int, int] | None = None,
) -> list[Segment]:
    """The segments that may become thin, oldest first: what is not merged and divided yet waits, as does the newest.

    Args:
        segments: All of them, oldest first.
        now: Epoch seconds.
        whole_seconds: For how long all samples are kept.
        sent: After which log position, and up to which one, the time-series database has them; None when it has all of them.
    """
    return [
        segment
        for segment in segments[:-1]
        if segment.thinned is None
        and (sent is None or sent[0] < segment.first <= segment.last <= sent[1])
        and segment.end is not None
        and segment.end / 1e6 < now - whole_seconds
        and is_ready(segment)
    ]


def thin(database: duckdb.DuckDBPyConnection, directory: str, segment: Segment) -> None:
    """Take out of a segment what a time-series database has. For the one writer of the directory.

    Raises:
        GpulseError: It could not be; everything is as it was.
    """
    source = f"{directory}/{segment.name}"
    with new_segment(directory, segment.first, segment.last, is_thin=True) as target:
        files = [file for file in segment.files if file.scope in SCOPES]
        for file in files:
            _link(f"{source}/{file.name}", f"{target}/{file.name}")
        files += minutes_of_gpus(database, source, segment.files, target, level=THOROUGH)
        write_meta(target, segment._replace(files=tuple(files), thinned=segment.end))
    remove_segments(directory, [segment.name])


def minutes_of_gpus(
    database: duckdb.DuckDBPyConnection,
    source: str,
    files: Sequence[SealedFile],
    target: str,
    *,
    level: int = QUICK,
) -> list[SealedFile]:
    """Write what GPUs did in each minute, as far as it is needed to divide their time.

    Args:
        database: Where to do it.
        source: The directory of a segment.
        files: Its files.
        target: The directory for the new ones.
        level: How hard zstd tries.

    Raises:
        GpulseError: They cannot be written.
    """
    found = [file for file in files if file.scope == "gpu"]
    minutes = [file for file in found if file.seconds == rollup.FINE]
    chosen = minutes or [file for file in found if not file.seconds]
    return [_minute_file(database, source, file, target, level) for file in chosen]


def _minute_file(
    database: duckdb.DuckDBPyConnection, source: str, file: SealedFile, target: str, level: int
) -> SealedFile:
    rows = f"read_parquet({literal(f'{source}/{file.name}')})"
    metrics = [metric for metric in OF_GPU if metric in file.columns]
    if file.seconds:
        query = f"SELECT {', '.join(map(quoted, _needed(file, metrics)))} FROM {rows}"
        name = file.name
    else:
        query = rollup.of_samples("gpu", rows, metrics)
        name = file.name.replace(".parquet", f".{rollup.FINE}s.parquet")
    made = SealedFile(name, "gpu", file.nodes, 0, 0, 0, 0, {}, rollup.FINE)
    return write_file(database, query, target, made, level=level)


def _needed(file: SealedFile, metrics: Sequence[str]) -> list[str]:
    """The columns of a file of minutes that are needed."""
    wanted = ["node", "node_id", "subject", *words_of("gpu"), "time", "samples", rollup.FIRST, rollup.LAST]
    for metric in metrics:
        wanted += [metric, f"min_{metric}", f"max_{metric}", rollup.KNOWN + metric]
    return [name for name in wanted if name in file.columns]


def _link(source: str, target: str) -> None:
    with disk_errors(f"write {target}"):
        try:
            os.link(source, target)
        except OSError:  # not every file system has links
            shutil.copyfile(source, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())
