"""The metadata: what the log's facts and the events inside frames add up to, and how far in the log that reaches.

The log is the only truth. The metadata can lag behind it, never run ahead of it: every step is one transaction together
with the position it ends at, so that replaying the log from there gives the same metadata whatever happened in between.
Facts and frames change different tables, or commute, so it does not matter how the log is cut into steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Self

from gpulse.errors import LogError
from gpulse.model.columns import Layout
from gpulse.store.log.record import Record
from gpulse.store.metadata.database import Database
from gpulse.store.metadata.facts import apply_fact
from gpulse.store.metadata.file import MetadataFile
from gpulse.store.metadata.frames import apply_frame
from gpulse.store.metadata.reader import MetadataReader
from gpulse.store.metadata.step import Step, Unreadable, steps_of

__all__ = ("Metadata", "Step", "StoredRun")

_RECORDS_AT_ONCE = 5_000
_ROWS_AT_ONCE = 10_000
_WATERMARK = """
INSERT INTO runs (run, last) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET
    last = greatest(runs.last, excluded.last)
"""

DROP_BEFORE = (
    "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE time < ? LIMIT ?)",
    'DELETE FROM findings WHERE id IN (SELECT id FROM findings WHERE "end" < ? LIMIT ?)',
    "DELETE FROM processes WHERE id IN (SELECT id FROM processes WHERE ended < ? LIMIT ?)",
)
"""Delete at most this many rows that were over before a time."""


class StoredRun(NamedTuple):
    """One run of an agent."""

    node: int | None
    """None when the log has frames of a run that it never introduced."""
    last: int
    """The sequence number of its last frame; 0 when there is none."""
    time: float | None
    """When the head first heard of it."""
    version: str | None
    pid: int | None
    boot: str | None


METADATA_FILE = "metadata.sqlite"
"""Name of the file in a data directory."""


class Metadata(MetadataReader):
    """The metadata of one head; one process writes it, any number read it. Safe to use from several threads."""

    def __init__(self, path: str, *, read_only: bool = False, shown: str | None = None) -> None:
        """Open the metadata, or begin one.

        Args:
            path: The file, made together with its directory when it is not there.
            read_only: Never change it; then it has to be there.
            shown: What errors call it, when it is a copy of that.

        Raises:
            LogError: It is damaged, of a newer version, or another program's.
            DiskError: The disk is full, read-only or broken, or there is no such file to read.
        """
        self._file = MetadataFile(os.path.abspath(path), read_only=read_only, shown=shown)
        super().__init__(self._file.rows)
        try:
            self.head_id = str(self._meta("head_id"))
            """Made at random when the metadata was begun."""
            self.unreadable: list[Unreadable] = []
            """Records of the log that a replay passed over."""
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def file(self) -> MetadataFile:
        """The file, for whoever copies all of it."""
        return self._file

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._file.path

    @property
    def size_bytes(self) -> int:
        """What the file takes on disk, with what SQLite keeps beside it."""
        total = 0
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(OSError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    @property
    def applied(self) -> int:
        """Up to which position of the log the metadata is complete; 0 at first."""
        return int(self._meta("applied"))

    def apply(self, step: Step) -> bool:
        """Take a step in, whole or not at all; False when the metadata had come that far already.

        Raises:
            DiskError: It could not be written, and nothing of it is left. It can be tried again.
            LogError: The file is damaged.
        """
        with self._file.writing() as database:
            if step.position <= _applied(database):
                return False
            for fact in step.facts:
                apply_fact(database, fact)
            database.executemany(_WATERMARK, step.watermarks.items())
            for frame in step.events:
                apply_frame(database, frame)
            database.execute("UPDATE meta SET value = ? WHERE key = 'applied'", (step.position,))
        return True

    def replay(self, records: Iterable[Record], *, at_once: int = _RECORDS_AT_ONCE) -> int:
        """Take in what is new among records of the log, and give how many of them were.

        Args:
            records: In the order of the log, from the first that is not applied or any earlier one on.
            at_once: So many are one transaction.

        Raises:
            DiskError: Some could not be written; those before them are. It can be tried again.
            LogError: Records are missing, or the file is damaged.
        """
        count = 0
        for step, length in steps_of(_after(records, self.applied, self._file.shown), at_once):
            self.apply(step)
            self.unreadable.extend(step.unreadable)
            count += length
        return count

    def checkpoint(self) -> int:
        """Wait until all steps are on disk; gives the position up to which the log is no longer needed for the metadata.

        Raises:
            DiskError: It is not certain what is on disk.
        """
        position = self.applied
        self._file.sync()
        return position

    def drop_before(self, time: float) -> None:
        """Forget the events before a time, and the findings and processes that had ended by then.

        Raises:
            DiskError: It could not be written. It can be tried again.
        """
        for query in DROP_BEFORE:
            removed = _ROWS_AT_ONCE
            while removed == _ROWS_AT_ONCE:  # in pieces, so that steps need not wait for all of it
                with self._file.writing() as database:
                    removed = database.execute(query, (time, _ROWS_AT_ONCE)).rowcount

    def close(self) -> None:
        """Let go; the metadata cannot be used afterwards."""
        self._file.close()

    def runs(self) -> dict[bytes, StoredRun]:
        """All runs of agents."""
        rows = self._file.rows("SELECT run, node, last, time, version, pid, boot FROM runs")
        return {row[0]: StoredRun(*row[1:]) for row in rows}

    def layouts(self, ids: Collection[int] | None = None) -> dict[int, Layout]:
        """All layouts, or those asked for; what only a newer version can read is left out."""
        query, values = "SELECT id, text FROM layouts", []
        if ids is not None:
            query += " WHERE id = ANY(?)"
            values.append([str(layout) for layout in ids])
        found: dict[int, Layout] = {}
        for layout, text in self._file.rows(query, values):
            with suppress(ValueError):
                found[int(layout)] = Layout.from_json(text)
        return found

    def settings(self) -> dict[str, Any] | None:
        """The last settings, and since when; None when there were none."""
        document = self._meta("settings")
        if document is None:
            return None
        settings: dict[str, Any] = json.loads(document)
        return settings

    def _meta(self, key: str) -> Any:
        return self._file.rows("SELECT value FROM meta WHERE key = ?", (key,))[0][0]


def _after(records: Iterable[Record], applied: int, path: str) -> Iterator[Record]:
    """The records that are not applied yet."""
    expected = applied + 1
    for record in records:
        if record.position > expected:
            raise LogError(
                f"the log goes on at position {record.position}, but {path} only reaches {expected - 1}",
                hint="restore the file from a copy, or move the whole data directory away to begin a new one",
            )
        if record.position == expected:
            expected += 1
            yield record


def _applied(database: Database) -> int:
    return int(database.execute("SELECT value FROM meta WHERE key = 'applied'").fetchone()[0])
