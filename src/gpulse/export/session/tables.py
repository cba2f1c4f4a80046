"""Session files as tables, one row for each frame and GPU: CSV, and Parquet by DuckDB."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from gpulse.errors import MissingExtraError
from gpulse.export.csv import safe_text
from gpulse.export.session.grid import Rows
from gpulse.export.session.outline import Document, Plan
from gpulse.model.iso_time import iso

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROWS_A_GROUP = 30_720
"""All rows of a group are in memory until it is written."""
_PIECE_BYTES = 1 << 20
_GPU_COLUMNS = ("gpu_id", "node", "index", "uuid", "name")


def csv_pieces(plan: Plan, steps: Iterable[Rows]) -> Iterator[bytes]:
    """RFC 4180: a header, then a row for each frame and GPU. Names are quoted; an empty cell is unknown."""
    names = [quantity.name for quantity in plan.quantities]
    yield ",".join(("frame_id", "time", *_GPU_COLUMNS, *names)).encode() + b"\r\n"
    gpus = [
        ",".join(_quoted(text) for text in (plan.ids[place], gpu.node_name, gpu.label, gpu.uuid, gpu.name))
        for place, gpu in enumerate(plan.gpus)
    ]
    for rows in steps:
        cells = [_texts(rows.values[name]) for name in names]
        lines = []
        for place in range(rows.length):
            step = rows.first + place
            frame = f"{step + 1},{iso(plan.time(step))}"
            of_gpus = zip(gpus, *(column[place] for column in cells), strict=True)
            lines += [f"{frame},{','.join(of_gpu)}\r\n" for of_gpu in of_gpus]
        yield "".join(lines).encode()


def _quoted(text: str) -> str:
    return '"' + safe_text(text).replace('"', '""') + '"'


def _texts(matrix: NDArray[np.float64]) -> list[list[str]]:
    return [["" if value != value else repr(value) for value in row] for row in matrix.tolist()]  # noqa: PLR0124  NaN


def parquet_pieces(plan: Plan, steps: Iterable[Rows], tail: Iterable[Document]) -> Iterator[bytes]:
    """The table as Parquet; the head and what comes after frames are JSON under the key `gpulse_session`.

    Such a file is only whole when its last row is known, so that it is written to a temporary place first.

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
            _fill(connection, plan, steps)
            about = plan.head()
            for document in tail:
                about |= document
            _copy(connection, path, json.dumps(about, allow_nan=False))
        finally:
            connection.close()
        with open(path, "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


def _fill(connection: Any, plan: Plan, steps: Iterable[Rows]) -> None:
    names = [quantity.name for quantity in plan.quantities]
    connection.execute(
        'CREATE TABLE gpus (place INTEGER, gpu_id VARCHAR, node VARCHAR, "index" VARCHAR, uuid VARCHAR, name VARCHAR)'
    )
    if plan.gpus:
        connection.executemany(
            "INSERT INTO gpus VALUES (?, ?, ?, ?, ?, ?)",
            [
                (place, plan.ids[place], gpu.node_name, gpu.label, gpu.uuid, gpu.name)
                for place, gpu in enumerate(plan.gpus)
            ],
        )
    columns = ", ".join(f"{name} DOUBLE" for name in names)
    texts = ", ".join(f'"{name}" VARCHAR' for name in _GPU_COLUMNS)
    connection.execute(f"CREATE TABLE cells (frame_id INTEGER, time TIMESTAMPTZ, {texts}, {columns})")
    of_gpu = ", ".join(f'gpus."{name}"' for name in _GPU_COLUMNS)
    wanted = ", ".join(f"CASE WHEN isnan({name}) THEN NULL ELSE {name} END" for name in names)
    for rows in steps:
        frames = np.arange(rows.first, rows.first + rows.length)
        count = len(plan.gpus)
        moments = (plan.session.start * 1e6 + frames * (plan.session.interval_ms * 1000.0)).round()
        piece = {
            "frame_id": np.repeat(frames + 1, count).astype(np.int32),
            "moment": np.repeat(moments, count).astype(np.int64),
            "place": np.tile(np.arange(count, dtype=np.int32), rows.length),
            **{name: rows.values[name].ravel() for name in names},
        }
        connection.register("piece", piece)
        connection.execute(
            f"INSERT INTO cells SELECT frame_id, make_timestamptz(moment), {of_gpu}, {wanted} "  # noqa: S608  our own names
            "FROM piece JOIN gpus USING (place) ORDER BY frame_id, place"
        )
        connection.unregister("piece")


def _copy(connection: Any, path: str, about: str) -> None:
    def literal(text: str) -> str:
        return "'" + text.replace("'", "''") + "'"

    connection.execute(
        f"COPY cells TO {literal(path)} "
        f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROWS_A_GROUP}, "
        f"KV_METADATA {{gpulse_session: {literal(about)}}})"
    )
