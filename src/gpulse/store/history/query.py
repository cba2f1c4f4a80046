"""Questions to the sealed history: DuckDB in memory over the Parquet files that may hold the answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import duckdb
import numpy as np

from gpulse.errors import GpulseError, LogError
from gpulse.model.metric import Scope
from gpulse.store.history.blocks import subject_key
from gpulse.store.history.segments import SealedFile, Segment, read_segments, read_summaries, sealed_to
from gpulse.store.history.tables import quoted
from gpulse.store.store import Query, Samples, SeriesKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TRIES = 5
T = TypeVar("T")
_NO_TABLES: Mapping[str, Mapping[str, Any]] = {}


class Window(NamedTuple):
    """What is wanted of a scope."""

    scope: Scope
    start: int
    """Microseconds; within."""
    end: int
    """Microseconds; not within any more."""
    nodes: frozenset[int] | None = None
    subjects: frozenset[str] | None = None
    gpus: frozenset[str] | None = None
    """Of processes, only what they hold on these GPUs."""

    @classmethod
    def of(cls, query: Query) -> Window:
        """Return the window of a query about samples."""
        gpus = query.gpus if query.scope == "process" else None
        return cls(query.scope, query.start_us, query.end_us, query.nodes, query.subjects, gpus)

    @classmethod
    def of_processes(cls, query: Query) -> Window:
        """Return the window of a query about all processes on GPUs."""
        return cls("process", query.start_us, query.end_us, query.nodes, None, query.gpus)

    def files(self, segments: Sequence[Segment], *, seconds: int = 0) -> list[tuple[Segment, SealedFile]]:
        """The files that may hold some of it."""
        return [
            (segment, file)
            for segment in segments
            for file in segment.files
            if file.scope == self.scope and file.seconds == seconds and self.meets(file)
        ]

    def meets(self, file: SealedFile) -> bool:
        """Whether some of the nodes may be in a file at that time."""
        return (
            file.start < self.end
            and file.end >= self.start
            and (self.nodes is None or not self.nodes.isdisjoint(file.nodes))
        )

    def wants(self, subject: Mapping[str, Any]) -> bool:
        """Whether a subject of a layout is one of those asked for."""
        return (self.subjects is None or subject_key(self.scope, subject) in self.subjects) and (
            self.gpus is None or subject.get("gpu") in self.gpus
        )

    def condition(self) -> tuple[str, list[Any]]:
        """What a row must meet, and the numbers and names to bind."""
        words = ["time >= make_timestamptz(?::BIGINT) AND time < make_timestamptz(?::BIGINT)"]
        bound: list[Any] = [self.start, self.end]
        for column, wanted in (
            ("node_id", self.nodes),
            ("subject", self.subjects),
            ("gpu", self.gpus),
        ):
            if wanted is not None:
                words.append(f"{column} IN ({', '.join('?' * len(wanted)) or 'NULL'})")
                bound += sorted(wanted)
        return " AND ".join(words), bound


class _MovedError(Exception):
    """A file was merged into another, or removed, since the directory was read."""


class History:
    """The sealed samples. Safe to use from several threads."""

    def __init__(self, data_dir: str | os.PathLike[str], *, threads: int = 2, memory: str = "256MB") -> None:
        """Look at what is there.

        Args:
            data_dir: The head's directory.
            threads: How many of them one query may use.
            memory: What all queries together may use.

        Raises:
            LogError: A segment is damaged, or of a newer format.
            DiskError: The directory cannot be read.
        """
        self.path = f"{os.path.abspath(os.fspath(data_dir))}/history"
        self._refreshing = threading.Lock()
        self.segments: tuple[Segment, ...] = tuple(read_segments(self.path))
        """Replaced as a whole by `refresh`."""
        self.summaries: tuple[Segment, ...] = tuple(read_summaries(self.path))
        """So is this; they count together with their segments."""
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
        """Up to which log position everything is in here."""
        return sealed_to(self.segments)

    @property
    def size_bytes(self) -> int:
        """What the files take on disk."""
        return sum(segment.size_bytes for segment in (*self.segments, *self.summaries))

    @property
    def newest_us(self) -> int:
        """When the last of its batches came, in microseconds; 0 when there is none."""
        return max((segment.received[1] for segment in self.segments if segment.received), default=0)

    def refresh(self) -> int:
        """Look again at what is there, and give the position up to which everything is sealed.

        Raises:
            LogError: A segment is damaged, or of a newer format.
            DiskError: The directory cannot be read.
        """
        with self._refreshing:  # else one who looked earlier could put back what is no longer true
            self.segments = tuple(read_segments(self.path, self.segments))
            self.summaries = tuple(read_summaries(self.path, self.summaries))
        return self.sealed_to

    def close(self) -> None:
        """Let go of the files."""
        self._database.close()

    def settled(self, work: Callable[[], T]) -> T:
        """Do something with the segments, again when one was merged or removed meanwhile.

        Raises:
            LogError: A file is damaged.
        """
        for _ in range(_TRIES):
            try:
                return work()
            except _MovedError:
                self.refresh()
        raise GpulseError("the history is being changed all the time", hint="try again")

    def samples(self, segments: Sequence[Segment], window: Window, metrics: Sequence[str]) -> Samples | None:
        """Every sample of several metrics."""
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
        values = "".join(f", {quoted(metric)}::DOUBLE AS {quoted(metric)}" for metric in present)
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
            plain(found["place"], np.int32),
            plain(found["time"], np.int64) / 1e6,
            plain(found["run"], np.uint64),
            plain(found["sequence"], np.int64),
            {
                metric: plain(found[metric], np.float64) if metric in present else np.full(size, np.nan)
                for metric in metrics
            },
        )

    def _source(
        self, files: list[tuple[Segment, SealedFile]], columns: Sequence[str]
    ) -> tuple[str, list[Any]]:
        """Where to select from. Files whose columns differ are brought together by name, which takes longer."""
        kinds = [{file.columns.get(column) for _, file in files} for column in columns]
        union = ", union_by_name = true" if any(len(kind) > 1 for kind in kinds) else ""
        return f"read_parquet(?{union})", [self.paths(files)]

    def paths(self, files: Sequence[tuple[Segment, SealedFile]]) -> list[str]:
        """Where files are."""
        return [f"{self.path}/{segment.name}/{file.name}" for segment, file in files]

    def run(
        self,
        query: str,
        bound: list[Any],
        files: list[tuple[Segment, SealedFile]],
        tables: Mapping[str, Mapping[str, NDArray[Any]]] = _NO_TABLES,
    ) -> dict[str, NDArray[Any]]:
        """The columns of a query's answer.

        Args:
            query: In SQL.
            bound: What to put where it has question marks.
            files: Those it reads.
            tables: What it reads in memory, by name.

        Raises:
            GpulseError: It needs too much memory.
            LogError: A file is damaged.
        """
        cursor = self._database.cursor()
        try:
            for name, table in tables.items():
                cursor.register(name, dict(table))
            found: dict[str, NDArray[Any]] = cursor.execute(query, bound).fetchnumpy()
            return found
        except duckdb.OutOfMemoryException as error:
            raise GpulseError(
                "the question needs more memory than queries may use",
                hint="ask for a shorter time, or for steps",
            ) from error
        except duckdb.Error as error:
            if any(not os.path.exists(f"{self.path}/{segment.name}") for segment, _ in files):
                raise _MovedError from error
            what = str(error).strip().split("\n", 1)[0]
            raise LogError(
                f"the history in {self.path} cannot be read: {what}",
                hint="restore the file from a copy, or move its directory away to go on without it",
            ) from error
        finally:
            cursor.close()


def plain(column: NDArray[Any], kind: type[Any]) -> NDArray[Any]:
    """A column without a mask, NaN where a number is absent."""
    if isinstance(column, np.ma.MaskedArray):
        column = column.filled(np.nan if kind is np.float64 else 0)
    return np.asarray(column, kind)


def rows_of(found: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return columns as rows, None where a value is unknown."""
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
