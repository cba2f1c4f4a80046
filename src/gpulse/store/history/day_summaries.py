"""Summaries of a day: a row in five minutes, and shares of GPUs, in few files for those who ask about weeks.

A summary stands beside its segments, which stay as they are; it counts while all of them are there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from gpulse.model.metric import Scope
from gpulse.store.history import gpu_time, rollup
from gpulse.store.history.gpu_time import Bound, Packer, Span
from gpulse.store.history.parquet import THOROUGH, temporary, write_file, writing
from gpulse.store.history.relation import Files, Sources
from gpulse.store.history.segments import (
    SealedFile,
    Segment,
    counted,
    new_segment,
    read_summaries,
    write_meta,
)
from gpulse.store.history.tables import literal

if TYPE_CHECKING:
    import duckdb

DAY_US = 86_400_000_000
_NODES_AT_ONCE = 8
_NODES_AT_ONCE_IN_FULL = 4
"""Their minutes of a day are divided at once."""


def due(segments: Sequence[Segment], summaries: Sequence[Segment]) -> list[Segment]:
    """The oldest neighbours without a summary that were received over a day or more; often none."""
    covered = {member.first for item in counted(summaries, segments) for member in item.members}
    found: list[Segment] = []
    for segment in segments:
        if segment.first in covered or not is_ready(segment):
            found = []
            continue
        if found and segment.first != found[-1].last + 1:
            found = []
        found.append(segment)
        times = [time for part in found if part.received for time in part.received]
        if len(found) > 1 and times and max(times) - min(times) >= DAY_US:
            return found
    return []


def is_ready(segment: Segment) -> bool:
    """Whether a segment has its minutes and shares; one that an earlier version merged has not."""
    minutes = [file for file in segment.files if file.seconds == rollup.FINE]
    has_shares = bool(segment.shares) or not gpu_time.shards(segment.files)
    return segment.is_compacted and has_shares and all(rollup.FIRST in file.columns for file in minutes)


def summarise(
    database: duckdb.DuckDBPyConnection, directory: str, segments: Sequence[Segment]
) -> Generator[str | None, None, None]:
    """Make the summary that is due, file by file, with None after each, and give its name. For the one writer.

    What is not finished is as if it had not been begun.

    Raises:
        GpulseError: It could not be made; everything is as it was.
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
        for nodes in gpu_time.shards(file for segment in members for file in segment.files):
            files.append(_shares(database, directory, target, members, nodes))
            yield None
        summary = Segment(first, last, members[-1].log, 0, None, True, tuple(files), is_summary=True)
        write_meta(target, summary)
    yield summary.name


def _minutes(members: Sequence[Segment]) -> dict[tuple[Scope, str], Files]:
    """The files of minutes that become one, by scope and name; none of a scope that has not minutes everywhere."""
    found: dict[tuple[Scope, str], Files] = {}
    for segment in members:
        for file in segment.files:
            scope = file.scope
            is_whole = all(part.has_minutes(scope) or not _had(part, scope) for part in members)
            if is_whole and file.seconds == rollup.FINE:
                found.setdefault((scope, file.name), []).append((segment, file))
    return found


def _had(segment: Segment, scope: Scope) -> bool:
    """Whether there were samples of a scope, perhaps."""
    return segment.has(scope) or segment.thinned is not None


def _coarse(
    database: duckdb.DuckDBPyConnection, directory: str, target: str, scope: Scope, name: str, files: Files
) -> SealedFile:
    nodes = tuple(sorted({node for _, file in files for node in file.nodes}))
    columns = list(dict.fromkeys(column for _, file in files for column in file.columns))
    paths = ", ".join(literal(path) for path in _paths(directory, files))
    name = name.replace(f".{rollup.FINE}s.", f".{rollup.COARSE}s.")
    path = f"{target}/{name}"
    whole = f"read_parquet([{paths}], union_by_name = true)"
    empty = rollup.of_minutes(scope, f"(SELECT * FROM {whole} WHERE false)", columns)
    with temporary(database, "rolled", empty, path):
        at_once = 1 if scope == "gpu" else _NODES_AT_ONCE
        for place in range(0, len(nodes), at_once):
            part = nodes[place : place + at_once]
            some = f"(SELECT * FROM {whole} WHERE node_id BETWEEN {part[0]} AND {part[-1]})"
            with writing(path):
                database.execute(f"INSERT INTO rolled {rollup.of_minutes(scope, some, columns)}")
        file = SealedFile(name, scope, nodes, 0, 0, 0, 0, {}, rollup.COARSE)
        return write_file(database, rollup.needed(database, "rolled", path), target, file)


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
    packer = Packer(database, target, nodes)
    mixed = _mixed(database, paths)
    plain = [node for node in nodes if node not in mixed]
    for place in range(0, len(plain), _NODES_AT_ONCE):
        packer.add(*_kept(paths, plain[place : place + _NODES_AT_ONCE]))
    if mixed:
        sources = Sources(lambda found: _paths(directory, found), members)
        for held, worked in gpu_time.minutes(sources, sorted(mixed), _NODES_AT_ONCE_IN_FULL):
            packer.add(held, worked)
    return packer.write(level=THOROUGH)


def _mixed(database: duckdb.DuckDBPyConnection, paths: list[str]) -> set[int]:
    """The nodes whose minutes are not in order from file to file."""
    with writing(paths[0]):
        rows = database.execute(gpu_time.SPANS, [paths]).fetchall()
    places = {path: place for place, path in enumerate(paths)}
    found = gpu_time.conflicts(Span(node, start, stop, places[path]) for path, node, start, stop, _ in rows)
    return {node for nodes in found.values() for node in nodes}


def _kept(paths: list[str], nodes: list[int]) -> tuple[Bound, Bound, Bound]:
    """What files of shares have of some nodes: minutes of processes and of GPUs, and finished shares."""
    condition = f"node_id IN ({', '.join(map(str, nodes))})"
    bound: list[Any] = [paths]
    return (
        (gpu_time.open_held(condition), bound),
        (gpu_time.open_worked(condition), bound),
        (gpu_time.finished(condition), bound),
    )
