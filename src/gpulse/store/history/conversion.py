"""From records of the log to a sealed segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpulse.errors import LogError
from gpulse.model.metric import Scope
from gpulse.store.disk import disk_errors
from gpulse.store.history import gpu_time
from gpulse.store.history.blocks import Piles, Stack
from gpulse.store.history.layouts import Words
from gpulse.store.history.parquet import QUICK, describe, write_table
from gpulse.store.history.segments import SealedFile, Segment, new_segment, write_meta
from gpulse.store.history.tables import build_table
from gpulse.store.log.record import Record
from gpulse.store.log.records import BATCH, FACT, NOTHING, Batch

if TYPE_CHECKING:
    import duckdb

NODES_PER_FILE = 256
"""Few large files are written in two thirds of the time; merging them makes small ones of an hour."""


class Haul(NamedTuple):
    """What one segment is made from."""

    first: int
    last: int
    piles: Piles
    received: tuple[int, int] | None
    missing: int
    """How many records were dropped from the log before they were sealed."""
    unreadable: int
    """How many batches could not be read."""


def collect(records: Iterable[Record], words: Words, first: int, *, most_bytes: int) -> Haul:
    """Take records in until there are enough for a segment; batches that cannot be read are counted and left out.

    Raises:
        LogError: There is a record of a kind that only a newer version knows.
    """
    piles = Piles()
    last, missing, unreadable, received = first - 1, 0, 0, None
    for record in records:
        missing += record.position - last - 1
        last = record.position
        if record.kind == FACT:
            words.hear(record.payload)
        elif record.kind == BATCH:
            try:
                batch = Batch.from_bytes(record.payload)
                piles.add(batch)
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
        if piles.size_bytes >= most_bytes:
            break
    return Haul(first, last, piles, received, missing, unreadable)


def write_segment(
    database: duckdb.DuckDBPyConnection, directory: str, log: str, haul: Haul, words: Words
) -> Segment:
    """Seal what was collected; it is visible, and on disk, when this returns.

    Raises:
        GpulseError: It could not be; nothing of it is left.
    """
    piles = haul.piles
    nodes = piles.nodes()
    piles.drop(words.learn(piles.layouts(), nodes))
    with new_segment(directory, haul.first, haul.last) as path:
        files: list[SealedFile] = []
        for shard in sorted({node // NODES_PER_FILE for node in nodes}):
            held = [node for node in nodes if node // NODES_PER_FILE == shard]
            stacks = piles.take(held, words.layouts)
            files += [
                _write_file(database, path, f"{scope}-{shard:06d}.parquet", scope, found, words)
                for scope, found in sorted(stacks.items())
            ]
        files += gpu_time.divide(database, path, files, level=QUICK)
        segment = Segment(haul.first, haul.last, log, piles.frames, haul.received, False, tuple(files))
        write_meta(path, segment)
    return segment


def _write_file(
    database: duckdb.DuckDBPyConnection,
    path: str,
    name: str,
    scope: Scope,
    stacks: list[Stack],
    words: Words,
) -> SealedFile:
    table = build_table(scope, stacks, words.names)
    with disk_errors(f"write {path}/{name}"):
        size = write_table(database, table, f"{path}/{name}")
    nodes = tuple(sorted({stack.node for stack in stacks}))
    columns = describe(database, f"{path}/{name}")
    return SealedFile(name, scope, nodes, table.rows, size, table.start, table.end, columns)
