"""Compaction: merge segments of minutes into one of an hour, with a rollup row per minute and GPU time beside the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpulse.model.metric import CATALOGUE, Scope
from gpulse.store.history import rollup, share_files
from gpulse.store.history.parquet import THOROUGH, write_file
from gpulse.store.history.segments import (
    NODES_PER_FILE,
    SealedFile,
    Segment,
    new_segment,
    remove_segments,
    write_meta,
)
from gpulse.store.history.tables import label_columns, literal, quoted

if TYPE_CHECKING:
    import duckdb

HOUR_US = 3_600_000_000
_NODES_PER_FILE: dict[Scope, int] = {"gpu": 8}
"""An hour of 64 GPUs can be sorted within little memory, and a question about one GPU reads small files."""


def oldest_run(
    segments: Sequence[Segment], length_us: int, is_candidate: Callable[[Segment], bool]
) -> list[Segment]:
    """Return the oldest adjacent candidates that were received over a length of time or more; often none."""
    run: list[Segment] = []
    for segment in segments:
        if run and segment.first != run[-1].last + 1:
            run = []
        run = [*run, segment] if is_candidate(segment) else []
        span = _received(run)
        if len(run) > 1 and span is not None and span[1] - span[0] >= length_us:
            return run
    return []


def _received(segments: Sequence[Segment]) -> tuple[int, int] | None:
    times = [time for segment in segments if segment.received for time in segment.received]
    return (min(times), max(times)) if times else None


def compact(database: duckdb.DuckDBPyConnection, directory: str, segments: Sequence[Segment]) -> list[str]:
    """Merge what is due and return the names of the merged segments. Only for the one writer of the directory.

    Raises:
        GpulseError: The merge failed; the directory is unchanged.
    """
    parts = oldest_run(segments, HOUR_US, lambda segment: not segment.is_compacted)
    if not parts:
        return []
    first, last = parts[0].first, parts[-1].last
    with new_segment(directory, first, last) as target:
        files: list[SealedFile] = []
        for scope, nodes in _shards(parts):
            files += _merge(database, directory, target, parts, scope, nodes)
        files += share_files.divide(database, target, files, level=THOROUGH)
        frames = sum(part.frames for part in parts)
        merged = Segment(first, last, parts[-1].log, frames, _received(parts), True, tuple(files))
        write_meta(target, merged)
    names = [part.name for part in parts]
    remove_segments(directory, names)
    return names


def _shards(parts: Sequence[Segment]) -> list[tuple[Scope, tuple[int, ...]]]:
    """Return the nodes of each file, with its scope."""
    found: dict[tuple[Scope, int], set[int]] = {}
    for part in parts:
        for file in part.samples:
            for node in file.nodes:
                found.setdefault((file.scope, node // _nodes_per_file(file.scope)), set()).add(node)
    return [(scope, tuple(sorted(nodes))) for (scope, _), nodes in sorted(found.items())]


def _nodes_per_file(scope: Scope) -> int:
    return _NODES_PER_FILE.get(scope, NODES_PER_FILE)


def _merge(
    database: duckdb.DuckDBPyConnection,
    directory: str,
    target: str,
    parts: Sequence[Segment],
    scope: Scope,
    nodes: tuple[int, ...],
) -> list[SealedFile]:
    inputs = [
        (f"{directory}/{part.name}/{file.name}", file)
        for part in parts
        for file in part.samples
        if file.scope == scope and not set(nodes).isdisjoint(file.nodes)
    ]
    present = {column for _, file in inputs for column in file.columns}
    columns = _ordered(scope, present)
    source = ", ".join(literal(path) for path, _ in inputs)
    query = (
        f"SELECT {', '.join(map(quoted, columns))} FROM read_parquet([{source}], union_by_name = true) "
        f"WHERE node_id BETWEEN {nodes[0]} AND {nodes[-1]} ORDER BY node_id, subject, time, sequence"
    )
    name = f"{scope}-{nodes[0] // _nodes_per_file(scope):06d}.parquet"
    whole = write_file(database, query, target, SealedFile(name, scope, nodes, 0, 0, 0, 0, {}))
    query = rollup.of_samples(
        scope, f"read_parquet({literal(f'{target}/{name}')})", rollup.metrics_of(scope, columns)
    )
    name = name.replace(".parquet", f".{rollup.FINE_SECONDS}s.parquet")
    minutes = SealedFile(name, scope, nodes, 0, 0, 0, 0, {}, rollup.FINE_SECONDS)
    return [whole, write_file(database, query, target, minutes)]


def _ordered(scope: Scope, present: set[str]) -> tuple[str, ...]:
    """Return columns in the order in which sealing writes them."""
    known = [
        "node",
        "node_id",
        "subject",
        *label_columns(scope),
        "time",
        "run",
        "sequence",
        *CATALOGUE[scope],
    ]
    rest = sorted(present.difference(known))
    return tuple(column for column in (*known, *rest) if column in present)
