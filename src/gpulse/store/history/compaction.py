"""Compaction: merge segments of minutes into segments of hours, and summarize whole days, including GPU time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import duckdb

from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.store.history import gpu_share_files, rollup
from gpulse.store.history.gpu_share_files import FileMinutes, ShareFileWriter, Statement
from gpulse.store.history.parquet import SMALL_COMPRESSION, duckdb_errors, temporary_table, write_file
from gpulse.store.history.parquet_columns import label_columns, quote_name, quote_text
from gpulse.store.history.sample_relation import SampleSources, SegmentFiles
from gpulse.store.history.segments import (
    NODES_PER_FILE,
    SealedFile,
    Segment,
    check_segment,
    new_segment,
    read_summaries,
    remove_segments,
    valid_summaries,
    write_meta,
)

HOUR_US = 3_600_000_000
_NODES_PER_FILE: dict[Scope, int] = {"gpu": 8}
"""One hour of 64 GPUs can be sorted in little memory, and a query for one GPU reads small files."""


def find_oldest_adjacent(
    segments: Sequence[Segment], length_us: int, is_candidate: Callable[[Segment], bool]
) -> list[Segment]:
    """Return the oldest adjacent candidates that were received over at least a length of time; often none."""
    run: list[Segment] = []
    for segment in segments:
        if run and segment.first != run[-1].last + 1:
            run = []
        run = [*run, segment] if is_candidate(segment) else []
        span = _received_range(run)
        if len(run) > 1 and span is not None and span[1] - span[0] >= length_us:
            return run
    return []


def _received_range(segments: Sequence[Segment]) -> tuple[int, int] | None:
    times = [time for segment in segments if segment.received for time in segment.received]
    return (min(times), max(times)) if times else None


def compact(database: duckdb.DuckDBPyConnection, directory: str, segments: Sequence[Segment]) -> list[str]:
    """Merge the segments of the oldest whole hour and return their names. Only for the writer of the directory.

    Raises:
        GpulseError: The merge failed; the directory is unchanged.
    """
    parts = find_oldest_adjacent(segments, HOUR_US, lambda segment: not segment.is_compacted)
    if not parts:
        return []
    first, last = parts[0].first, parts[-1].last
    parts = [check_segment(directory, part) for part in parts]  # damage must not get a new checksum
    with new_segment(directory, first, last) as target:
        files: list[SealedFile] = []
        for scope, nodes in _group_nodes_by_file(parts):
            files += _merge_files(database, directory, target, parts, scope, nodes)
        files += gpu_share_files.write_share_files(database, target, files, level=SMALL_COMPRESSION)
        frames = sum(part.frames for part in parts)
        damaged = tuple(file for part in parts for file in part.damaged if file.is_lost)
        merged = Segment(
            first,
            last,
            parts[-1].log,
            frames,
            _received_range(parts),
            True,
            tuple(files),
            damaged=damaged,
        )
        write_meta(target, merged)
    names = [part.name for part in parts]
    remove_segments(directory, names)
    return names


def _group_nodes_by_file(parts: Sequence[Segment]) -> list[tuple[Scope, tuple[int, ...]]]:
    """Return the scope and the nodes of each file to write."""
    found: dict[tuple[Scope, int], set[int]] = {}
    for part in parts:
        for file in part.samples:
            for node in file.nodes:
                found.setdefault((file.scope, node // _nodes_per_file(file.scope)), set()).add(node)
    return [(scope, tuple(sorted(nodes))) for (scope, _), nodes in sorted(found.items())]


def _nodes_per_file(scope: Scope) -> int:
    return _NODES_PER_FILE.get(scope, NODES_PER_FILE)


def _merge_files(
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
    columns = _order_columns(scope, present)
    source = ", ".join(quote_text(path) for path, _ in inputs)
    query = (
        f"SELECT {', '.join(map(quote_name, columns))} FROM read_parquet([{source}], union_by_name = true) "
        f"WHERE node_id BETWEEN {nodes[0]} AND {nodes[-1]} ORDER BY node_id, subject, time, sequence"
    )
    name = f"{scope}-{nodes[0] // _nodes_per_file(scope):06d}.parquet"
    whole = write_file(database, query, target, SealedFile(name, scope, nodes, 0, 0, 0, 0, {}))
    query = rollup.minute_query(
        scope, f"read_parquet({quote_text(f'{target}/{name}')})", rollup.find_metrics(scope, columns)
    )
    name = name.replace(".parquet", f".{rollup.FINE_SECONDS}s.parquet")
    minutes = SealedFile(name, scope, nodes, 0, 0, 0, 0, {}, rollup.FINE_SECONDS)
    return [whole, write_file(database, query, target, minutes)]


def _order_columns(scope: Scope, present: set[str]) -> tuple[str, ...]:
    """Sort columns in the order in which sealing writes them."""
    known = [
        "node",
        "node_id",
        "subject",
        *label_columns(scope),
        "time",
        "run",
        "sequence",
        *CATALOG[scope],
    ]
    rest = sorted(present.difference(known))
    return tuple(column for column in (*known, *rest) if column in present)


DAY_US = 86_400_000_000
_MAX_NODES_MERGED = 8
"""Maximum number of nodes to summarize at once, to limit memory use."""
_MAX_NODES_DIVIDED = 4
"""Maximum number of nodes for which the GPU time of a day is divided at once."""


def find_due_day(segments: Sequence[Segment], summaries: Sequence[Segment]) -> list[Segment]:
    """Return the oldest adjacent segments that cover a day and have no summary; often none."""
    covered = {member.first for item in valid_summaries(summaries, segments) for member in item.members}
    return find_oldest_adjacent(
        segments,
        DAY_US,
        lambda one: one.first not in covered and not one.damaged and gpu_share_files.has_shares(one),
    )


def summarize_day(
    database: duckdb.DuckDBPyConnection, directory: str, segments: Sequence[Segment]
) -> Generator[str | None, None, None]:
    """Summarize the oldest day that has no summary. Only for the writer of the directory.

    Yields None after each file, and finally the name of the summary. If the generator is closed early, it removes its files.

    Raises:
        GpulseError: The summary could not be written; the directory is unchanged.
    """
    members = find_due_day(segments, read_summaries(directory))
    if not members or any(check_segment(directory, member).damaged for member in members):
        return
    first, last = members[0].first, members[-1].last
    with new_segment(directory, first, last, is_summary=True) as target:
        files = []
        for (scope, name), found in sorted(_group_minute_files(members).items()):
            files.append(_write_coarse_file(database, directory, target, scope, name, found))
            yield None
        for nodes in gpu_share_files.group_nodes_by_file(
            file for segment in members for file in segment.files
        ):
            files.append(_write_share_file(database, directory, target, members, nodes))
            yield None
        summary = Segment(first, last, members[-1].log, 0, None, True, tuple(files), is_summary=True)
        write_meta(target, summary)
    yield summary.name


def _group_minute_files(members: Sequence[Segment]) -> dict[tuple[Scope, str], SegmentFiles]:
    """Group the files of minutes by scope and name; each group becomes one file."""
    found: dict[tuple[Scope, str], SegmentFiles] = {}
    for segment in members:
        for file in segment.files:
            if file.seconds == rollup.FINE_SECONDS:
                found.setdefault((file.scope, file.name), []).append((segment, file))
    return found


def _write_coarse_file(
    database: duckdb.DuckDBPyConnection,
    directory: str,
    target: str,
    scope: Scope,
    name: str,
    files: SegmentFiles,
) -> SealedFile:
    nodes = tuple(sorted({node for _, file in files for node in file.nodes}))
    columns = list(dict.fromkeys(column for _, file in files for column in file.columns))
    paths = ", ".join(quote_text(path) for path in _paths(directory, files))
    name = name.replace(f".{rollup.FINE_SECONDS}s.", f".{rollup.COARSE_SECONDS}s.")
    path = f"{target}/{name}"
    whole = f"read_parquet([{paths}], union_by_name = true)"
    empty = rollup.five_minute_query(scope, f"(SELECT * FROM {whole} WHERE false)", columns)
    with temporary_table(database, "rolled", empty, path):
        at_once = 1 if scope == "gpu" else _MAX_NODES_MERGED
        for place in range(0, len(nodes), at_once):
            part = nodes[place : place + at_once]
            some = f"(SELECT * FROM {whole} WHERE node_id BETWEEN {part[0]} AND {part[-1]})"
            with duckdb_errors(path):
                database.execute(f"INSERT INTO rolled {rollup.five_minute_query(scope, some, columns)}")
        file = SealedFile(name, scope, nodes, 0, 0, 0, 0, {}, rollup.COARSE_SECONDS)
        return write_file(database, "SELECT * FROM rolled", target, file)


def _paths(directory: str, files: SegmentFiles) -> list[str]:
    return [f"{directory}/{segment.name}/{file.name}" for segment, file in files]


def _write_share_file(
    database: duckdb.DuckDBPyConnection,
    directory: str,
    target: str,
    members: Sequence[Segment],
    nodes: tuple[int, ...],
) -> SealedFile:
    files = [
        (segment, file)
        for segment in members
        for file in segment.shares
        if not set(nodes).isdisjoint(file.nodes)
    ]
    paths = _paths(directory, files)
    writer = ShareFileWriter(database, target, nodes)
    mixed = _find_overlapping_nodes(database, paths)
    plain = [node for node in nodes if node not in mixed]
    for place in range(0, len(plain), _MAX_NODES_MERGED):
        writer.add(*_share_statements(paths, plain[place : place + _MAX_NODES_MERGED]))
    if mixed:
        sources = SampleSources(lambda found: _paths(directory, found), members)
        for held, worked in gpu_share_files.minute_statements(sources, sorted(mixed), _MAX_NODES_DIVIDED):
            writer.add(held, worked)
    return writer.write(level=SMALL_COMPRESSION)


def _find_overlapping_nodes(database: duckdb.DuckDBPyConnection, paths: list[str]) -> set[int]:
    """Return the nodes whose minutes overlap between files."""
    with duckdb_errors(paths[0]):
        rows = database.execute(gpu_share_files.SPANS_QUERY, [paths]).fetchall()
    places = {path: place for place, path in enumerate(paths)}
    found = gpu_share_files.find_overlaps(
        FileMinutes(node, start, stop, places[path]) for path, node, start, stop, _ in rows
    )
    return {node for nodes in found.values() for node in nodes}


def _share_statements(paths: list[str], nodes: list[int]) -> tuple[Statement, Statement, Statement]:
    """Return statements for the content of share files: minutes of processes, minutes of GPUs, and finished shares."""
    condition = f"node_id IN ({', '.join(map(str, nodes))})"
    bound: list[Any] = [paths]
    return (
        (gpu_share_files.open_process_minutes_query(condition), bound),
        (gpu_share_files.open_gpu_minutes_query(condition), bound),
        (gpu_share_files.finished_query(condition), bound),
    )
