"""Day summaries: rollup rows of five minutes and GPU time in few files, for questions about weeks.

A summary is a directory beside its segments, which stay as they are. It counts while all of them are there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from gpulse.model.metric import Scope
from gpulse.store.history import rollup, share_files
from gpulse.store.history.compaction import oldest_run
from gpulse.store.history.parquet import THOROUGH, duckdb_errors, temporary_table, write_file
from gpulse.store.history.relation import Files, Sources
from gpulse.store.history.segments import (
    SealedFile,
    Segment,
    new_segment,
    read_summaries,
    valid_summaries,
    write_meta,
)
from gpulse.store.history.share_files import ShareFileWriter, Span, Statement
from gpulse.store.history.tables import literal

if TYPE_CHECKING:
    import duckdb

DAY_US = 86_400_000_000
_MAX_NODES_MERGED = 8
"""This many nodes at most are summarised at once, for the sake of memory."""
_MAX_NODES_DIVIDED = 4
"""Of this many nodes at most the minutes of a day are divided at once."""


def due(segments: Sequence[Segment], summaries: Sequence[Segment]) -> list[Segment]:
    """Return the oldest adjacent segments of a day that have no summary; often none."""
    covered = {member.first for item in valid_summaries(summaries, segments) for member in item.members}
    return oldest_run(segments, DAY_US, lambda one: one.first not in covered and share_files.is_divided(one))


def summarise(
    database: duckdb.DuckDBPyConnection, directory: str, segments: Sequence[Segment]
) -> Generator[str | None, None, None]:
    """Make the summary that is due: yield None after each file, and its name at the end. Only for the one writer.

    An unfinished summary leaves nothing behind when the generator is closed.

    Raises:
        GpulseError: The summary could not be made; the directory is unchanged.
    """
    members = due(segments, read_summaries(directory))
    if not members:
        return
    first, last = members[0].first, members[-1].last
    with new_segment(directory, first, last, is_summary=True) as target:
        files = []
        for (scope, name), found in sorted(_minutes(members).items()):
            files.append(_coarse(database, directory, target, scope, name, found))
            yield None
        for nodes in share_files.shards(file for segment in members for file in segment.files):
            files.append(_shares(database, directory, target, members, nodes))
            yield None
        summary = Segment(first, last, members[-1].log, 0, None, True, tuple(files), is_summary=True)
        write_meta(target, summary)
    yield summary.name


def _minutes(members: Sequence[Segment]) -> dict[tuple[Scope, str], Files]:
    """Return the files of minutes that become one, by scope and name."""
    found: dict[tuple[Scope, str], Files] = {}
    for segment in members:
        for file in segment.files:
            if file.seconds == rollup.FINE_SECONDS:
                found.setdefault((file.scope, file.name), []).append((segment, file))
    return found


def _coarse(
    database: duckdb.DuckDBPyConnection, directory: str, target: str, scope: Scope, name: str, files: Files
) -> SealedFile:
    nodes = tuple(sorted({node for _, file in files for node in file.nodes}))
    columns = list(dict.fromkeys(column for _, file in files for column in file.columns))
    paths = ", ".join(literal(path) for path in _paths(directory, files))
    name = name.replace(f".{rollup.FINE_SECONDS}s.", f".{rollup.COARSE_SECONDS}s.")
    path = f"{target}/{name}"
    whole = f"read_parquet([{paths}], union_by_name = true)"
    empty = rollup.of_minutes(scope, f"(SELECT * FROM {whole} WHERE false)", columns)
    with temporary_table(database, "rolled", empty, path):
        at_once = 1 if scope == "gpu" else _MAX_NODES_MERGED
        for place in range(0, len(nodes), at_once):
            part = nodes[place : place + at_once]
            some = f"(SELECT * FROM {whole} WHERE node_id BETWEEN {part[0]} AND {part[-1]})"
            with duckdb_errors(path):
                database.execute(f"INSERT INTO rolled {rollup.of_minutes(scope, some, columns)}")
        file = SealedFile(name, scope, nodes, 0, 0, 0, 0, {}, rollup.COARSE_SECONDS)
        return write_file(database, "SELECT * FROM rolled", target, file)


def _paths(directory: str, files: Files) -> list[str]:
    return [f"{directory}/{segment.name}/{file.name}" for segment, file in files]


def _shares(
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
    mixed = _mixed(database, paths)
    plain = [node for node in nodes if node not in mixed]
    for place in range(0, len(plain), _MAX_NODES_MERGED):
        writer.add(*_kept(paths, plain[place : place + _MAX_NODES_MERGED]))
    if mixed:
        sources = Sources(lambda found: _paths(directory, found), members)
        for held, worked in share_files.minutes(sources, sorted(mixed), _MAX_NODES_DIVIDED):
            writer.add(held, worked)
    return writer.write(level=THOROUGH)


def _mixed(database: duckdb.DuckDBPyConnection, paths: list[str]) -> set[int]:
    """Return the nodes whose minutes are not in order from file to file."""
    with duckdb_errors(paths[0]):
        rows = database.execute(share_files.SPANS, [paths]).fetchall()
    places = {path: place for place, path in enumerate(paths)}
    found = share_files.conflicts(
        Span(node, start, stop, places[path]) for path, node, start, stop, _ in rows
    )
    return {node for nodes in found.values() for node in nodes}


def _kept(paths: list[str], nodes: list[int]) -> tuple[Statement, Statement, Statement]:
    """Return what files of shares have of some nodes: minutes of processes and of GPUs, and finished shares."""
    condition = f"node_id IN ({', '.join(map(str, nodes))})"
    bound: list[Any] = [paths]
    return (
        (share_files.open_process_minutes(condition), bound),
        (share_files.open_gpu_minutes(condition), bound),
        (share_files.finished(condition), bound),
    )
