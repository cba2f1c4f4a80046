"""Query the sealed history with DuckDB over its Parquet files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple, TypeVar

import duckdb
import numpy as np
from numpy.typing import NDArray

from gpulse.errors import GpulseError, LogError
from gpulse.model.metric_catalog import Scope
from gpulse.store.damage import DamageList
from gpulse.store.history.frame_blocks import subject_key
from gpulse.store.history.parquet_columns import quote_name
from gpulse.store.history.segments import (
    SealedFile,
    Segment,
    check_file,
    describe_damaged_file,
    newest_us,
    read_segments,
    read_summaries,
    sealed_to,
    set_file_aside,
)
from gpulse.store.store import Query, Samples, SeriesKey

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 5
T = TypeVar("T")
_NO_TABLES: Mapping[str, Mapping[str, Any]] = {}


class SampleWindow(NamedTuple):
    """Selection of samples: a scope, a time range, and optionally nodes, subjects and GPUs."""

    scope: Scope
    start: int
    """Microseconds, inclusive."""
    end: int
    """Microseconds, exclusive."""
    nodes: frozenset[int] | None = None
    subjects: frozenset[str] | None = None
    gpus: frozenset[str] | None = None
    """For processes: only those on these GPUs."""

    @classmethod
    def of(cls, query: Query) -> SampleWindow:
        """Return the window of a query about samples."""
        gpus = query.gpus if query.scope == "process" else None
        return cls(query.scope, query.start_us, query.end_us, query.nodes, query.subjects, gpus)

    @classmethod
    def of_processes(cls, query: Query) -> SampleWindow:
        """Return the window of a query about all processes on GPUs."""
        return cls("process", query.start_us, query.end_us, query.nodes, None, query.gpus)

    def files(self, segments: Sequence[Segment], *, seconds: int = 0) -> list[tuple[Segment, SealedFile]]:
        """Return the files that may contain matching rows."""
        return [
            (segment, file)
            for segment in segments
            for file in segment.files
            if file.scope == self.scope and file.seconds == seconds and self.meets(file)
        ]

    def meets(self, file: SealedFile) -> bool:
        """Whether a file may contain matching rows, by its nodes and time range."""
        return (
            file.start < self.end
            and file.end >= self.start
            and (self.nodes is None or not self.nodes.isdisjoint(file.nodes))
        )

    def wants(self, subject: Mapping[str, Any]) -> bool:
        """Whether a subject of a layout matches."""
        return (self.subjects is None or subject_key(self.scope, subject) in self.subjects) and (
            self.gpus is None or subject.get("gpu") in self.gpus
        )

    def condition(self) -> tuple[str, list[Any]]:
        """Return the SQL condition for matching rows, and the values to bind."""
        conditions = ["time >= make_timestamptz(?::BIGINT) AND time < make_timestamptz(?::BIGINT)"]
        bound: list[Any] = [self.start, self.end]
        for column, wanted in (
            ("node_id", self.nodes),
            ("subject", self.subjects),
            ("gpu", self.gpus),
        ):
            if wanted is not None:
                conditions.append(f"{column} IN ({', '.join('?' * len(wanted)) or 'NULL'})")
                bound += sorted(wanted)
        return " AND ".join(conditions), bound


class _MovedError(Exception):
    """A file was merged or removed since the directory was read."""


class _LeftOutError(_MovedError):
    """A file is damaged, and is left out from now on."""


class _FileState(NamedTuple):
    """What changes when somebody writes to a file or replaces it."""

    inode: int
    size_bytes: int
    modified_ns: int


def _file_state(path: str) -> _FileState | None:
    """Return the state of a file; None if it cannot be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return _FileState(found.st_ino, found.st_size, found.st_mtime_ns)


class SealedHistory:
    """The sealed segments of a data directory. Safe to use from several threads."""

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        threads: int = 2,
        memory: str = "256MB",
        damage: DamageList | None = None,
        moves_damage: bool = False,
    ) -> None:
        """Read the list of segments.

        Args:
            data_dir: The head's data directory.
            damage: Gets the damaged files that queries find; later queries leave them out.
            moves_damage: Move damaged files aside; only for the writer of the data directory.
            threads: Maximum number of threads of one query.
            memory: Maximum memory of all queries together.

        Raises:
            LogError: A segment has a newer format.
            DiskError: The directory cannot be read.
        """
        self._damage = DamageList() if damage is None else damage
        self._moves_damage = moves_damage
        self._checked: dict[tuple[str, str], _FileState | None] = {}
        """State of each file, by segment and name, when its checksum was right; a file that has changed is checked again."""
        self._warned_unprotected = False
        self._left_out: set[str] = set()
        """Names of damaged summaries that could not be moved aside."""
        self.path = f"{os.path.abspath(os.fspath(data_dir))}/history"
        self._refreshing = threading.Lock()
        self.segments: tuple[Segment, ...] = tuple(read_segments(self.path))
        """Replaced as a whole by `refresh`."""
        self.summaries: tuple[Segment, ...] = tuple(read_summaries(self.path))
        """Replaced as a whole by `refresh`; summaries are valid only together with their segments."""
        self._database = duckdb.connect(
            ":memory:",
            config={
                "threads": str(threads),
                "memory_limit": memory,
                "temp_directory": "",
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
            },
        )
        self._database.execute("SET allowed_directories = [?]", [self.path])
        for setting in (
            "parquet_metadata_cache = true",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._database.execute(f"SET {setting}")

    @property
    def sealed_to(self) -> int:
        """The log position up to which everything is sealed."""
        return sealed_to(self.segments)

    @property
    def size_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(segment.size_bytes for segment in (*self.segments, *self.summaries))

    @property
    def newest_us(self) -> int:
        """When the newest sealed batch was received, in microseconds; 0 if there is none."""
        return newest_us(self.segments)

    def refresh(self) -> int:
        """Read the list of segments again, and return the log position up to which everything is sealed.

        Raises:
            LogError: A segment has a newer format.
            DiskError: The directory cannot be read.
        """
        with self._refreshing:  # otherwise a slower thread could restore an older list
            self.segments = tuple(read_segments(self.path, self.segments))
            self.summaries = tuple(
                one for one in read_summaries(self.path, self.summaries) if one.name not in self._left_out
            )
        return self.sealed_to

    def node_names(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the newest names of nodes, by number, from as few files as possible, however long the history is.

        Raises:
            LogError: A file cannot be read.
        """

        def ask() -> dict[int, str]:
            found: dict[int, str] = {}
            left = set(nodes)
            for segment in reversed(self.segments):
                for file in sorted(segment.samples, key=lambda one: one.size_bytes):
                    if left.isdisjoint(file.nodes):
                        continue
                    rows = self.run(
                        "SELECT node_id, any_value(node) AS node FROM read_parquet(?) GROUP BY node_id",
                        [self.paths([(segment, file)])],
                        [(segment, file)],
                    )
                    names = to_rows(rows, ("node_id", "node"))
                    found |= {node: name for node, name in names if node in left}
                    left.difference_update(found)
                    log.info("node names restored from the history: %d of %d", len(found), len(nodes))
            return found

        return self.retry_if_moved(ask)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def retry_if_moved(self, work: Callable[[], T]) -> T:
        """Run a query over the segments; repeat it if a segment was merged or removed meanwhile.

        Raises:
            LogError: A file is damaged.
        """
        attempts = 0
        while attempts < _MAX_ATTEMPTS:
            try:
                return work()
            except _LeftOutError:  # fewer files are left after each of these
                self.refresh()
            except _MovedError:
                attempts += 1
                self.refresh()
        raise GpulseError(
            "cannot read the history: its files changed during every attempt", hint="try again in a moment"
        )

    def samples(
        self, segments: Sequence[Segment], window: SampleWindow, metrics: Sequence[str]
    ) -> Samples | None:
        """Return every sample of several metrics; None if no file matches."""
        files = window.files(segments)
        if not files:
            return None
        present = [metric for metric in metrics if any(metric in file.columns for _, file in files)]
        source, bound = self._source(files, metrics)
        condition, more = window.condition()
        rows = self.run(
            f"SELECT DISTINCT node_id, subject FROM {source} WHERE {condition}", bound + more, files
        )
        keys = sorted(map(SeriesKey, rows["node_id"].tolist(), rows["subject"].tolist()))
        places = "SELECT unnest(?::INTEGER[]) AS node_id, unnest(?::VARCHAR[]) AS subject, unnest(?::INTEGER[]) AS place"
        values = "".join(f", {quote_name(metric)}::DOUBLE AS {quote_name(metric)}" for metric in present)
        found = self.run(
            f"SELECT place, epoch_us(time) AS time, run, sequence{values} FROM {source} "
            f"JOIN ({places}) USING (node_id, subject) WHERE {condition}",
            [
                *bound,
                [key.node for key in keys],
                [key.subject for key in keys],
                list(range(len(keys))),
                *more,
            ],
            files,
        )
        size = len(found["place"])
        return Samples(
            keys,
            fill_mask(found["place"], np.int32),
            fill_mask(found["time"], np.int64) / 1e6,
            fill_mask(found["run"], np.uint64),
            fill_mask(found["sequence"], np.int64),
            {
                metric: fill_mask(found[metric], np.float64) if metric in present else np.full(size, np.nan)
                for metric in metrics
            },
        )

    def _source(
        self, files: list[tuple[Segment, SealedFile]], columns: Sequence[str]
    ) -> tuple[str, list[Any]]:
        """Return the SQL source for files. If their columns differ, they are matched by name, which takes longer."""
        kinds = [{file.columns.get(column) for _, file in files} for column in columns]
        union = ", union_by_name = true" if any(len(kind) > 1 for kind in kinds) else ""
        return f"read_parquet(?{union})", [self.paths(files)]

    def paths(self, files: Sequence[tuple[Segment, SealedFile]]) -> list[str]:
        """Return the paths of files."""
        return [f"{self.path}/{segment.name}/{file.name}" for segment, file in files]

    def run(
        self,
        query: str,
        bound: list[Any],
        files: list[tuple[Segment, SealedFile]],
        tables: Mapping[str, Mapping[str, NDArray[Any]]] = _NO_TABLES,
    ) -> dict[str, NDArray[Any]]:
        """Run a query, and return the columns of its result.

        Args:
            query: SQL with `?` parameters.
            bound: The values of the parameters.
            files: The files that the query reads.
            tables: The tables in memory that the query reads, by name.

        Raises:
            GpulseError: The query needs too much memory.
        """
        self._check_files(files)
        cursor = self._database.cursor()
        try:
            for name, table in tables.items():
                cursor.register(name, dict(table))
            found: dict[str, NDArray[Any]] = cursor.execute(query, bound).fetchnumpy()
            return found
        except duckdb.OutOfMemoryException as error:
            raise GpulseError(
                "the query needs more memory than queries may use",
                hint="use a shorter time range, or a larger step",
            ) from error
        except duckdb.Error as error:
            if any(not os.path.exists(f"{self.path}/{segment.name}") for segment, _ in files):
                raise _MovedError from error
            what = str(error).strip().split("\n", 1)[0]
            if self._drop_unreadable(cursor, files):
                raise _LeftOutError from error
            raise LogError(
                f"cannot read the history in {self.path}: {what}",
                hint="restore the file from a backup, or move its directory away to continue without it",
            ) from error
        finally:
            cursor.close()

    def _check_files(self, files: Sequence[tuple[Segment, SealedFile]]) -> None:
        """Check the files that no query has read before.

        Raises:
            _LeftOutError: Some are damaged, and are left out from now on.
        """
        damaged: list[tuple[Segment, SealedFile, str]] = []
        for segment, file in files:
            key = segment.name, file.name
            state = _file_state(f"{self.path}/{segment.name}/{file.name}")
            if state is not None and self._checked.get(key) == state:
                continue
            try:
                reason = check_file(self.path, segment, file)
            except FileNotFoundError as error:
                raise _MovedError from error
            if reason is not None:
                damaged.append((segment, file, reason))
                continue
            self._checked[key] = state
            if file.checksum is None and not self._warned_unprotected:
                self._warned_unprotected = True
                log.warning(
                    "history files written by an earlier version of gpulse, such as %s/%s/%s, have no checksum: "
                    "damage to their values cannot be detected",
                    self.path,
                    *key,
                )
        if damaged:
            self._leave_out(damaged)
            raise _LeftOutError

    def check_files(self, max_bytes: float = inf) -> None:
        """Check files that no query has read yet, the newest first, until this many bytes were read."""
        for segment in sorted((*self.segments, *self.summaries), key=lambda one: one.last, reverse=True):
            for file in segment.files:
                if max_bytes <= 0:
                    return
                if (segment.name, file.name) not in self._checked:
                    max_bytes -= file.size_bytes
                    with suppress(_MovedError):  # a damaged file is left out, or the segment was merged
                        self._check_files([(segment, file)])

    def _drop_unreadable(
        self, cursor: duckdb.DuckDBPyConnection, files: Sequence[tuple[Segment, SealedFile]]
    ) -> bool:
        """Leave out the files without a checksum that cannot be read; return whether there are any."""
        damaged = []
        for segment, file in files:
            if file.checksum is None:
                try:
                    cursor.execute(
                        "SELECT count(COLUMNS(*)) FROM read_parquet(?)", self.paths([(segment, file)])
                    )
                except duckdb.Error as error:
                    damaged.append((segment, file, str(error).strip().split("\n", 1)[0]))
        if damaged:
            self._leave_out(damaged)
        return bool(damaged)

    def _leave_out(self, damaged: Sequence[tuple[Segment, SealedFile, str]]) -> None:
        """Leave damaged files out of all further queries, move them aside if permitted, and report them."""
        reports = []
        with self._refreshing:
            for segment, file, reason in damaged:
                lost = {file.name: reason}
                self.segments = tuple(
                    one.without_files(lost) if one.name == segment.name else one for one in self.segments
                )
                self.summaries = tuple(one for one in self.summaries if one.name != segment.name)
                moved = set_file_aside(self.path, segment, file.name) if self._moves_damage else None
                if moved is None and segment.is_summary:
                    self._left_out.add(segment.name)
                whole = next((one for one in self.segments if one.name == segment.name), None)
                left_out = (whole or segment.without_files(lost)).damaged
                reports += [
                    describe_damaged_file(f"{self.path}/{segment.name}", one, moved)
                    for one in left_out
                    if one.name == file.name
                ]
        for report in reports:
            self._damage.add(report)


def fill_mask(column: NDArray[Any], kind: type[Any]) -> NDArray[Any]:
    """Convert a masked column to a plain array; missing values become NaN, or 0 for integers."""
    if isinstance(column, np.ma.MaskedArray):
        column = column.filled(np.nan if kind is np.float64 else 0)
    return np.asarray(column, kind)


def to_rows(found: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Convert columns to rows; masked values become None."""
    columns = []
    for name in names:
        column = found[name]
        if isinstance(column, np.ma.MaskedArray):
            known = ~np.ma.getmaskarray(column)
            columns.append(
                [
                    value if is_known else None
                    for value, is_known in zip(column.data.tolist(), known.tolist(), strict=True)
                ]
            )
        else:
            columns.append(column.tolist())
    return list(zip(*columns, strict=True))
