"""Write a sealed segment from records of the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpulse.errors import LogError
from gpulse.model.metric import Scope
from gpulse.store.disk import disk_errors
from gpulse.store.history import share_files
from gpulse.store.history.blocks import BlockCollector, Stack
from gpulse.store.history.layouts import LayoutLookup
from gpulse.store.history.parquet import QUICK, describe, write_table
from gpulse.store.history.segments import NODES_PER_FILE, SealedFile, Segment, new_segment, write_meta
from gpulse.store.history.tables import build_table
from gpulse.store.log.record import Record
from gpulse.store.log.records import BATCH, FACT, NOTHING, Batch

if TYPE_CHECKING:
    import duckdb


class PendingSegment(NamedTuple):
    """The records that one segment is made from."""

    first: int
    last: int
    blocks: BlockCollector
    received: tuple[int, int] | None
    missing: int
    """How many records were dropped from the log before they were sealed."""
    unreadable: int
    """How many batches could not be read."""


def collect(
    records: Iterable[Record], layouts: LayoutLookup, first: int, *, max_bytes: int
) -> PendingSegment:
    """Collect records until there are enough for a segment; batches that cannot be read are counted and skipped.

    Raises:
        LogError: There is a record of a kind that only a newer version knows.
    """
    blocks = BlockCollector()
    last, missing, unreadable, received = first - 1, 0, 0, None
    for record in records:
        missing += record.position - last - 1
        last = record.position
        if record.kind == FACT:
            layouts.apply_fact(record.payload)
        elif record.kind == BATCH:
            try:
                batch = Batch.from_bytes(record.payload)
                blocks.add(batch)
            except ValueError:
                unreadable += 1
                continue
            low, high = received or (batch.received_us, batch.received_us)
            received = min(low, batch.received_us), max(high, batch.received_us)
        elif record.kind != NOTHING:
            raise LogError(
                f"the log has a record of kind {record.kind} at position {record.position}",
                hint="use the newer version that wrote it",
            )
        if blocks.size_bytes >= max_bytes:
            break
    return PendingSegment(first, last, blocks, received, missing, unreadable)


def write_segment(
    database: duckdb.DuckDBPyConnection,
    directory: str,
    log: str,
    pending: PendingSegment,
    layouts: LayoutLookup,
) -> Segment:
    """Write a segment; it is visible, and on disk, when this returns.

    Raises:
        GpulseError: It could not be written; nothing of it is left.
    """
    blocks = pending.blocks
    nodes = blocks.nodes()
    blocks.drop(layouts.look_up(blocks.layouts(), nodes))
    with new_segment(directory, pending.first, pending.last) as path:
        files: list[SealedFile] = []
        for shard in sorted({node // NODES_PER_FILE for node in nodes}):
            members = [node for node in nodes if node // NODES_PER_FILE == shard]
            stacks = blocks.take(members, layouts.layouts)
            files += [
                _write_file(database, path, f"{scope}-{shard:06d}.parquet", scope, found, layouts)
                for scope, found in sorted(stacks.items())
            ]
        files += share_files.divide(database, path, files, level=QUICK)
        segment = Segment(
            pending.first, pending.last, log, blocks.frames, pending.received, False, tuple(files)
        )
        write_meta(path, segment)
    return segment


def _write_file(
    database: duckdb.DuckDBPyConnection,
    path: str,
    name: str,
    scope: Scope,
    stacks: list[Stack],
    layouts: LayoutLookup,
) -> SealedFile:
    table = build_table(scope, stacks, layouts.names)
    with disk_errors(f"write {path}/{name}"):
        size = write_table(database, table, f"{path}/{name}")
    nodes = tuple(sorted({stack.node for stack in stacks}))
    columns = describe(database, f"{path}/{name}")
    return SealedFile(name, scope, nodes, table.rows, size, table.start, table.end, columns)
