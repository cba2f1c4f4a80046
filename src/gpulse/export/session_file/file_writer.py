"""Write a session file as JSON, JSON lines, CSV or Parquet, in chunks, from a store that may exceed memory."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any, BinaryIO, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from gpulse.errors import ExportCancelledError, MissingExtraError, UsageError
from gpulse.export.session_file import frame_grid
from gpulse.export.session_file.file_document import (
    Document,
    FileSummary,
    SessionHeader,
    names_code,
    read_header,
)
from gpulse.export.session_file.frame_grid import FrameGrid, FrameRows, SampleTable
from gpulse.export.session_file.gpu_statistics import EnergyMeter
from gpulse.model.safe_text import csv_cell
from gpulse.model.session import Session, SessionFormat
from gpulse.model.time_text import format_iso
from gpulse.store.store import Query, Samples, Store, StoredGpu

Matrix = NDArray[np.float64]

FORMATS: tuple[SessionFormat, ...] = get_args(SessionFormat)
MEDIA_TYPES: Mapping[SessionFormat, str] = {
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "csv": "text/csv; charset=utf-8",
    "parquet": "application/vnd.apache.parquet",
}
_MAX_POWER_GAP_SECONDS = 10.0
_ROW_GROUP_SIZE = 30_720
"""Rows of a Parquet row group, which are in memory until it is written."""
_CHUNK_BYTES = 1 << 20
_GPU_COLUMNS = ("gpu_id", "node", "index", "uuid", "name")
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


class WrittenFile(NamedTuple):
    """Size and statistics of a written file."""

    frames: int
    gpus: int
    nodes: int
    samples: int
    """Cells of frames and GPUs with a value."""
    bytes: int
    by_device: Mapping[str, Document]
    """Same as `summary_by_device` in the file."""


class SessionExport:
    """Export of one session; iterating once yields the chunks of its file."""

    def __init__(
        self,
        store: Store,
        session: Session,
        output_format: SessionFormat = "json",
        *,
        now: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        with_code: bool = True,
    ) -> None:
        """Look up the session's GPUs.

        Args:
            store: Store with its samples.
            session: The session.
            output_format: Format of the file.
            now: End of the file if the session is active.
            cancelled: Called repeatedly; True cancels the export.
            with_code: Whether findings have their lines of code.

        Raises:
            UsageError: The format is unknown, or the session is too long for one file.
        """
        if output_format not in FORMATS:
            raise UsageError(
                f"cannot write a session as {output_format!r}", hint=f"use one of {', '.join(FORMATS)}"
            )
        self._store = store
        self._format: SessionFormat = output_format
        self._cancelled = cancelled
        self._with_code = with_code
        self.header = read_header(store, session, now=now)
        self.summary: WrittenFile | None = None
        """Set after the last chunk."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the chunks of the file.

        Raises:
            ExportCancelledError: `cancelled` returned True.
        """
        energy = EnergyMeter(
            len(self.header.gpus),
            max_gap_seconds=max(_MAX_POWER_GAP_SECONDS, 3 * self.header.interval_seconds),
        )
        summary = FileSummary(self.header, energy)
        size = 0
        for chunk in self._chunks(summary, self._steps(summary, energy)):
            size += len(chunk)
            self._check_cancelled()
            yield chunk
        self.summary = WrittenFile(
            summary.frames,
            len(self.header.gpus),
            len(self.header.nodes),
            summary.samples,
            size,
            summary.by_device(),
        )

    def decide_on_code(self) -> bool:
        """Decide whether findings in the file have lines of code: only if one of the session has some now."""
        self._with_code = self._with_code and self._format != "csv" and names_code(self._store, self.header)
        return self._with_code

    def _chunks(self, summary: FileSummary, steps: Iterator[FrameRows]) -> Iterator[bytes]:
        def tail() -> Iterator[Document]:
            yield summary.members(self._store, with_code=self._with_code)

        match self._format:
            case "json":
                return _json_chunks(self.header, steps, tail())
            case "jsonl":
                return _jsonl_chunks(self.header, steps, tail())
            case "csv":
                return _csv_chunks(self.header, steps)
            case "parquet":
                return _parquet_chunks(self.header, steps, tail())

    def _steps(self, summary: FileSummary, energy: EnergyMeter) -> Iterator[FrameRows]:
        header = self.header
        grid = FrameGrid(
            start=header.session.start,
            interval_seconds=header.interval_seconds,
            steps=header.steps,
            nodes=header.node_of_gpu,
            names=[quantity.name for quantity in header.quantities],
        )
        for samples in self._scan():
            self._check_cancelled()
            table = self._table(samples)
            energy.add(table.until(header.end))
            for rows in grid.add(self._converted(table)):
                self._check_cancelled()
                summary.add(rows)
                yield rows
        for rows in grid.finish():
            self._check_cancelled()
            summary.add(rows)
            yield rows

    def _check_cancelled(self) -> None:
        if self._cancelled():
            raise ExportCancelledError(
                f"the export of session {self.header.session.name} was canceled before it finished",
                hint="export the session again",
            )

    def _scan(self) -> Iterator[Samples]:
        header = self.header
        if not header.gpus or not header.steps:
            return
        yield from self._store.scan(
            Query(
                header.session.start,
                header.end + header.interval_seconds / 2,  # includes late samples of the last step
                "gpu",
                tuple(frame_grid.session_metrics(header.session)),
                nodes=frozenset(header.nodes),
                subjects=frozenset(gpu.uuid for gpu in header.gpus),
            )
        )

    def _table(self, samples: Samples) -> SampleTable:
        """Return the samples of the session's GPUs."""
        places = {(gpu.node, gpu.uuid): place for place, gpu in enumerate(self.header.gpus)}
        of_key = np.array([places.get((key.node, key.subject), -1) for key in samples.keys], np.int64)
        columns = of_key[samples.series] if len(of_key) else np.empty(0, np.int64)
        kept = columns >= 0
        unknown = np.full(len(columns), np.nan)
        values = {
            name: samples.values.get(name, unknown)[kept]
            for name in frame_grid.session_metrics(self.header.session)
        }
        return SampleTable(columns[kept], samples.times[kept], values)

    def _converted(self, table: SampleTable) -> SampleTable:
        totals = np.array([_total_memory(gpu) for gpu in self.header.gpus], np.float64)
        values = frame_grid.compute_quantities(self.header.session, table.values, totals[table.columns])
        return table._replace(values=values)


def write_session(
    store: Store,
    session: Session,
    file: BinaryIO,
    output_format: SessionFormat = "json",
    *,
    now: float | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    make_private: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Write a session file; that of an active session ends at `now`.

    `make_private` is called before anything is written to a file with lines of code.

    Raises:
        UsageError: The format is unknown, or the session is too long for one file.
        ExportCancelledError: `cancelled` returned True; the file is incomplete.
        OSError: The file cannot be written.
    """
    export = SessionExport(store, session, output_format, now=now, cancelled=cancelled)
    if export.decide_on_code():
        make_private()
    file.writelines(export)
    if export.summary is None:
        raise RuntimeError("the session file was written without a summary")
    return export.summary


def _total_memory(gpu: StoredGpu) -> float:
    total = (gpu.device.get("facts") or {}).get("memory_total_bytes")
    return float(total) if isinstance(total, int | float) else math.nan


def _encode(value: object) -> bytes:
    """Return a value as JSON on one line."""
    return _ENCODER.encode(value).encode("ascii")


class _JsonFrames:
    """Writes complete steps as frames, one JSON object each."""

    def __init__(self, header: SessionHeader) -> None:
        self._header = header
        self._ids = _encode(header.ids).decode()
        self._names = header.node_names
        self._clients: dict[bytes, str] = {}

    def encode(self, rows: FrameRows) -> Iterator[bytes]:
        """Yield the frames."""
        names = [quantity.name for quantity in self._header.quantities]
        arrays = [_with_nulls(rows.values[name]) for name in names]
        keys = [f',"{name}":' for name in names]
        for place in range(rows.length):
            step = rows.first + place
            pieces = [
                f'{{"frame_id":{step + 1},"time":"{format_iso(self._header.time(step))}","gpu_id":{self._ids}'
            ]
            for key, array in zip(keys, arrays, strict=True):
                pieces += (key, _ENCODER.encode(array[place]))
            pieces.append(self._clients_of(rows.delivered[place]))
            yield "".join(pieces).encode("ascii")

    def _clients_of(self, delivered: NDArray[np.bool_]) -> str:
        """Return the nodes that sent samples and those that did not; cached, because they rarely change."""
        pattern = delivered.tobytes()
        if pattern not in self._clients:
            if len(self._clients) > 1024:
                self._clients.clear()
            there = [name for name, is_there in zip(self._names, delivered, strict=True) if is_there]
            missing = [name for name, is_there in zip(self._names, delivered, strict=True) if not is_there]
            self._clients[pattern] = (
                f',"available_clients":{_ENCODER.encode(there)},"missing_clients":{_ENCODER.encode(missing)}}}'
            )
        return self._clients[pattern]


def _with_nulls(matrix: Matrix) -> list[list[float | None]]:
    found: NDArray[np.object_] = matrix.astype(object)
    found[np.isnan(matrix)] = None
    listed: list[list[Any]] = found.tolist()
    return listed


def _json_chunks(
    header: SessionHeader, steps: Iterable[FrameRows], tail: Iterable[Document]
) -> Iterator[bytes]:
    """Yield the document in the layout of gswarm-profiler; `tail` is read after the frames."""
    yield _encode(header.to_document())[:-1] + b',\n"frames":['
    frames = _JsonFrames(header)
    before = b"\n"
    for rows in steps:
        if rows.length:
            yield before + b",\n".join(frames.encode(rows))
            before = b",\n"
    for document in tail:
        yield b"\n],\n" + _encode(document)[1:] + b"\n"


def _jsonl_chunks(
    header: SessionHeader, steps: Iterable[FrameRows], tail: Iterable[Document]
) -> Iterator[bytes]:
    """Yield a line for the header, a line for each frame, and a line for the summary."""
    yield _encode(header.to_document() | {"gpu_id": header.ids}) + b"\n"
    frames = _JsonFrames(header)
    for rows in steps:
        if rows.length:
            yield b"\n".join(frames.encode(rows)) + b"\n"
    for document in tail:
        yield _encode(document) + b"\n"


def _csv_chunks(header: SessionHeader, steps: Iterable[FrameRows]) -> Iterator[bytes]:
    """Yield CSV (RFC 4180): a header, then a row for each frame and GPU. Names are quoted; an empty cell is unknown."""
    names = [quantity.name for quantity in header.quantities]
    yield ",".join(("frame_id", "time", *_GPU_COLUMNS, *names)).encode() + b"\r\n"
    gpus = [
        ",".join(_quote(text) for text in (header.ids[place], gpu.node_name, gpu.label, gpu.uuid, gpu.name))
        for place, gpu in enumerate(header.gpus)
    ]
    for rows in steps:
        cells = [_format_cells(rows.values[name]) for name in names]
        lines = []
        for place in range(rows.length):
            step = rows.first + place
            frame = f"{step + 1},{format_iso(header.time(step))}"
            of_gpus = zip(gpus, *(column[place] for column in cells), strict=True)
            lines += [f"{frame},{','.join(of_gpu)}\r\n" for of_gpu in of_gpus]
        yield "".join(lines).encode()


def _quote(text: str) -> str:
    return '"' + csv_cell(text).replace('"', '""') + '"'


def _format_cells(matrix: Matrix) -> list[list[str]]:
    return [["" if value != value else repr(value) for value in row] for row in matrix.tolist()]  # noqa: PLR0124  NaN


def _parquet_chunks(
    header: SessionHeader, steps: Iterable[FrameRows], tail: Iterable[Document]
) -> Iterator[bytes]:
    """Yield the table as Parquet; header and summary are JSON metadata under the key `gpulse_session`.

    A Parquet file is complete only with its last row, so it is written to a temporary directory first.

    Raises:
        MissingExtraError: DuckDB is not installed.
    """
    if find_spec("duckdb") is None:
        raise MissingExtraError("Parquet", "head")
    import duckdb  # noqa: PLC0415  heavy, and an extra

    with tempfile.TemporaryDirectory(prefix="gpulse-") as folder:
        path = os.path.join(folder, "session.parquet")
        connection = duckdb.connect(os.path.join(folder, "session.duckdb"))
        try:
            connection.execute("SET threads = 1")
            connection.execute("SET memory_limit = '64MB'")
            connection.execute("SET preserve_insertion_order = true")
            _fill_table(connection, header, steps)
            about = header.to_document()
            for document in tail:
                about |= document
            _copy_to_parquet(connection, path, json.dumps(about, allow_nan=False))
        finally:
            connection.close()
        with open(path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk


def _fill_table(connection: Any, header: SessionHeader, steps: Iterable[FrameRows]) -> None:
    names = [quantity.name for quantity in header.quantities]
    connection.execute(
        'CREATE TABLE gpus (place INTEGER, gpu_id VARCHAR, node VARCHAR, "index" VARCHAR, uuid VARCHAR, name VARCHAR)'
    )
    if header.gpus:
        connection.executemany(
            "INSERT INTO gpus VALUES (?, ?, ?, ?, ?, ?)",
            [
                (place, header.ids[place], gpu.node_name, gpu.label, gpu.uuid, gpu.name)
                for place, gpu in enumerate(header.gpus)
            ],
        )
    columns = ", ".join(f"{name} DOUBLE" for name in names)
    texts = ", ".join(f'"{name}" VARCHAR' for name in _GPU_COLUMNS)
    connection.execute(f"CREATE TABLE cells (frame_id INTEGER, time TIMESTAMPTZ, {texts}, {columns})")
    of_gpu = ", ".join(f'gpus."{name}"' for name in _GPU_COLUMNS)
    wanted = ", ".join(f"CASE WHEN isnan({name}) THEN NULL ELSE {name} END" for name in names)
    for rows in steps:
        frames = np.arange(rows.first, rows.first + rows.length)
        count = len(header.gpus)
        moments = (header.session.start * 1e6 + frames * (header.session.interval_ms * 1000.0)).round()
        chunk = {
            "frame_id": np.repeat(frames + 1, count).astype(np.int32),
            "moment": np.repeat(moments, count).astype(np.int64),
            "place": np.tile(np.arange(count, dtype=np.int32), rows.length),
            **{name: rows.values[name].ravel() for name in names},
        }
        connection.register("chunk", chunk)
        connection.execute(
            f"INSERT INTO cells SELECT frame_id, make_timestamptz(moment), {of_gpu}, {wanted} "  # noqa: S608  the names are constants
            "FROM chunk JOIN gpus USING (place) ORDER BY frame_id, place"
        )
        connection.unregister("chunk")


def _copy_to_parquet(connection: Any, path: str, about: str) -> None:
    def literal(text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    connection.execute(
        f"COPY cells TO {literal(path)} "
        f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP_SIZE}, "
        f"KV_METADATA {{gpulse_session: {literal(about)}}})"
    )
