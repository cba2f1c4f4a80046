"""Records as tables of other programs: pandas, and Parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpulse.errors import MissingExtraError
from gpulse.integrations.dask.files import Batch, WorkerTable
from gpulse.integrations.dask.publishing import Kind, publish
from gpulse.integrations.dask.shapes import Shape, fits
from gpulse.integrations.dask.tracking import ALWAYS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_NAME = re.compile(r"worker-(0|[1-9]\d{0,8})\.parquet")


def to_pandas(tables: Mapping[int, WorkerTable]) -> pd.DataFrame:
    """All records as one table: a row a line, the index of its worker first.

    Raises:
        MissingExtraError: pandas is not installed.
        RecordingError: A record is broken.
    """
    _need("pandas")
    import pandas as pd  # noqa: PLC0415  an extra

    columns: dict[str, list[Any]] = {"worker": []}
    for table in tables.values():
        columns.update({name: [] for name in (*ALWAYS, *table.tracked) if name not in columns})
    if len(columns) == 1:
        columns.update({name: [] for name in ALWAYS})
    for index in sorted(tables):
        for batch in tables[index].batches():
            count = len(batch.jobs)
            columns["worker"] += [index] * count
            there = dict(_columns(batch))
            for name in columns.keys() - {"worker"}:
                columns[name] += there.get(name) or [None] * count
    return pd.DataFrame({name: _series(name, values) for name, values in columns.items()})


def to_parquet(folder: str | os.PathLike[str], tables: Mapping[int, WorkerTable]) -> list[Path]:
    """Write a Parquet file for each worker: all files or none, and none of an earlier export stays beside them.

    Returns:
        The files, in the order of the workers.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ArgumentError: No files can be made there, or one there is not ours to replace.
        RecordingError: A record is broken, or the disk is full.
    """
    _need("pyarrow")
    writers = {f"worker-{index}.parquet": partial(_write, tables[index]) for index in sorted(tables)}
    return publish(Path(folder), writers, Kind(_NAME, _is_record))


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtraError("this export", "dask")


def _columns(batch: Batch) -> Iterator[tuple[str, list[Any]]]:
    yield from zip(ALWAYS, (batch.jobs, batch.dags, batch.timestamps), strict=True)
    for name in batch.columns[len(ALWAYS) :]:
        yield name, batch.values(name)


def _series(name: str, values: list[Any]) -> pd.Series[Any]:
    """Numbers as numbers, NaN where one is missing; anything else as it is, None where it is missing."""
    import pandas as pd  # noqa: PLC0415

    kinds = set(map(type, values))
    if name in ("worker", "job", "dag") or (kinds == {int} and fits(values)):
        return pd.Series(values, dtype="int64")
    if kinds <= {int, float, type(None)}:
        return pd.Series(values, dtype="float64")
    return pd.Series(values, dtype=object)


def _write(table: WorkerTable, file: BinaryIO) -> None:
    import pyarrow as pa  # noqa: PLC0415  an extra
    from pyarrow import parquet  # noqa: PLC0415

    shapes = {name: Shape() for name in table.columns}
    for batch in table.batches():
        for name, values in _columns(batch):
            shapes[name].add(values)
    chunks: dict[str, list[pa.Array]] = {name: [] for name in table.columns}
    for batch in table.batches():
        for name, values in _columns(batch):
            chunks[name].append(shapes[name].array(values))
    arrays = [pa.chunked_array(chunks[name], shapes[name].type) for name in table.columns]
    parquet.write_table(pa.table(arrays, names=list(table.columns)), file)


def _is_record(path: Path) -> bool:
    from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415

    try:
        return tuple(parquet.read_schema(path).names[: len(ALWAYS)]) == ALWAYS
    except ArrowInvalid:
        return False
