"""Retention of history by age and size, oldest first, and of samples that a time-series database also has.

A segment whose samples were removed is called thin. It is written beside the whole one, with links to the files that both
have, and replaces it by a rename.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.series import EXPOSED
from gpulse.store.disk import disk_errors
from gpulse.store.history import rollup, share_files
from gpulse.store.history.parquet import write_file
from gpulse.store.history.segments import (
    SealedFile,
    Segment,
    Summary,
    new_segment,
    read_segments,
    read_summaries,
    remove_segments,
    remove_stale_summaries,
    valid_summaries,
    write_meta,
)
from gpulse.store.history.tables import literal, quoted

if TYPE_CHECKING:
    import duckdb

LOCAL_SCOPES: tuple[Scope, ...] = tuple(scope for scope in CATALOGUE if scope not in EXPOSED)
"""Scopes that no time-series database gets: processes and control groups."""


def outdated(
    segments: list[Segment],
    *,
    now: float,
    keep_seconds: float | None,
    limit_bytes: int | None,
    summaries: Sequence[Summary] = (),
) -> list[Segment]:
    """Return the segments to remove. The newest always stays: its name says up to where the log is sealed.

    Args:
        segments: All of them, oldest first.
        now: Epoch seconds.
        keep_seconds: Remove what is older; None to keep everything.
        limit_bytes: The most bytes that may stay; None for no limit.
        summaries: Those that count; each is removed with the first of its segments.
    """
    lost = {item.members[0].first: item.segment.size_bytes for item in summaries}
    size = sum(segment.size_bytes for segment in segments) + sum(lost.values())
    gone: list[Segment] = []
    for segment in segments[:-1]:
        is_old = keep_seconds is not None and (segment.end is None or segment.end / 1e6 < now - keep_seconds)
        if not is_old and (limit_bytes is None or size <= limit_bytes):
            break
        size -= segment.size_bytes + lost.get(segment.first, 0)
        gone.append(segment)
    return gone


def apply_retention(
    directory: str, *, now: float, keep_seconds: float | None, limit_bytes: int | None
) -> list[str]:
    """Remove the oldest segments and return their names. Only for the one writer of the directory.

    Raises:
        LogError: A segment is damaged.
        DiskError: A segment cannot be removed.
    """
    segments = read_segments(directory)
    gone = outdated(
        segments,
        now=now,
        keep_seconds=keep_seconds,
        limit_bytes=limit_bytes,
        summaries=valid_summaries(read_summaries(directory), segments),
    )
    names = [segment.name for segment in gone]
    if names:
        remove_segments(directory, names)
        remove_stale_summaries(directory)
    return names


def thinnable(
    segments: Sequence[Segment],
    *,
    now: float,
    whole_seconds: float,
    sent: tuple[int, int] | None = None,
) -> list[Segment]:
    """Return the segments that may become thin, oldest first: never the newest, and none without its GPU time.

    Args:
        segments: All of them, oldest first.
        now: Epoch seconds.
        whole_seconds: How long all samples are kept.
        sent: After which log position, and up to which one, the time-series database has the samples; None when it has
            all of them.
    """
    return [
        segment
        for segment in segments[:-1]
        if segment.thinned is None
        and (sent is None or sent[0] < segment.first <= segment.last <= sent[1])
        and segment.end is not None
        and segment.end / 1e6 < now - whole_seconds
        and share_files.is_divided(segment)
    ]


def thin(database: duckdb.DuckDBPyConnection, directory: str, segment: Segment) -> None:
    """Remove from a segment what a time-series database has. Only for the one writer of the directory.

    Processes, GPU time, and what divides the time of GPUs in each minute stay.

    Raises:
        GpulseError: The thin segment could not be written; the directory is unchanged.
    """
    source = f"{directory}/{segment.name}"
    with new_segment(directory, segment.first, segment.last, is_thin=True) as target:
        files = [file for file in segment.files if file.scope in LOCAL_SCOPES]
        for file in files:
            _link(f"{source}/{file.name}", f"{target}/{file.name}")
        files += [
            _narrowed(database, source, file, target)
            for file in segment.files
            if file.scope == "gpu" and file.seconds == rollup.FINE_SECONDS
        ]
        write_meta(target, segment._replace(files=tuple(files), thinned=segment.end))
    remove_segments(directory, [segment.name])


def _narrowed(database: duckdb.DuckDBPyConnection, source: str, file: SealedFile, target: str) -> SealedFile:
    """Write minutes of GPUs with only the metrics that GPU time needs: a fifth of the bytes."""
    columns = [name for name in rollup.columns_of("gpu", share_files.GPU_METRICS) if name in file.columns]
    rows = f"read_parquet({literal(f'{source}/{file.name}')})"
    query = f"SELECT {', '.join(map(quoted, columns))} FROM {rows}"
    return write_file(database, query, target, file)


def _link(source: str, target: str) -> None:
    with disk_errors(f"write {target}"):
        try:
            os.link(source, target)
        except OSError:  # not every file system has links
            shutil.copyfile(source, target)
            with open(target, "rb") as file:
                os.fsync(file.fileno())
