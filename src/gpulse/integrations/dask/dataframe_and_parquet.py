"""Export records to pandas and to Parquet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpulse.errors import MissingExtraError
from gpulse.integrations.dask.csv_files import ExportFormat, LineBatch, WorkerTable, replace_files
from gpulse.integrations.dask.trackable_metrics import FIXED_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_MAX_INT64 = 1 << 63
_MAX_EXACT_FLOAT = 1 << 53

_FILE_NAME = re.compile(r"worker-(0|[1-9]\d{0,8})\.parquet")


def fit_into(numbers: Iterable[int], limit: int = _MAX_INT64) -> bool:
    """Return whether all numbers fit into 64 bits, or below a limit."""
    return all(-limit <= number < limit for number in numbers)


class ColumnType:
    """Collects the types of a column's values, batch by batch, to choose an Arrow type."""

    def __init__(self) -> None:
        self._outer: set[type] = set()
        self._inner: set[type] = set()
        self._lowest = self._highest = 0

    def add(self, values: Iterable[Any]) -> None:
        """Add the values of some lines."""
        values = [value for value in values if value is not None]
        self._outer |= set(map(type, values))
        if list in self._outer:
            values = list(chain.from_iterable(value for value in values if type(value) is list))
        elif dict in self._outer:
            values = list(chain.from_iterable(value.values() for value in values if type(value) is dict))
        self._inner |= set(map(type, values)) - {type(None)}
        if int in self._inner:
            integers = [value for value in values if type(value) is int]
            self._lowest = min(self._lowest, *integers, 0)
            self._highest = max(self._highest, *integers, 0)

    @property
    def type(self) -> pa.DataType:
        """Arrow type that fits all values; otherwise string, with the values as JSON."""
        import pyarrow as pa  # noqa: PLC0415  an extra

        inner = self._inner_type()
        if inner is None:
            return pa.string()
        if self._outer == {list}:
            return pa.list_(inner)
        if self._outer == {dict}:
            return pa.map_(pa.string(), inner)
        return pa.string() if self._outer & {list, dict} else inner

    def array(self, values: list[Any]) -> pa.Array:
        """Return values of the column as that type."""
        import pyarrow as pa  # noqa: PLC0415

        kind = self.type
        if pa.types.is_string(kind) and self._outer != {str}:
            texts = [None if value is None else json.dumps(value) for value in values]
            return pa.array(texts, kind)
        if pa.types.is_map(kind):
            values = [None if value is None else list(value.items()) for value in values]
        return pa.array(values, kind)

    def _inner_type(self) -> pa.DataType | None:
        import pyarrow as pa  # noqa: PLC0415

        limits = (self._lowest, self._highest)
        if self._inner == {int} and fit_into(limits):
            return pa.int64()
        if self._inner <= {int, float} and fit_into(limits, _MAX_EXACT_FLOAT):
            return pa.float64()
        return {frozenset({str}): pa.string(), frozenset({bool}): pa.bool_()}.get(frozenset(self._inner))


def to_pandas(tables: Mapping[int, WorkerTable]) -> pd.DataFrame:
    """Return all records as one table: a row per line, the worker's index first.

    Raises:
        MissingExtraError: pandas is not installed.
        RecordingError: A record is broken.
    """
    _import_package("pandas")
    import pandas as pd  # noqa: PLC0415  an extra

    columns: dict[str, list[Any]] = {"worker": []}
    for table in tables.values():
        columns.update({name: [] for name in (*FIXED_COLUMNS, *table.tracked) if name not in columns})
    if len(columns) == 1:
        columns.update({name: [] for name in FIXED_COLUMNS})
    for index in sorted(tables):
        for batch in tables[index].batches():
            count = len(batch.jobs)
            columns["worker"] += [index] * count
            there = dict(_batch_columns(batch))
            for name in columns.keys() - {"worker"}:
                columns[name] += there.get(name) or [None] * count
    return pd.DataFrame({name: _build_series(name, values) for name, values in columns.items()})


def to_parquet(folder: str | os.PathLike[str], tables: Mapping[int, WorkerTable]) -> list[Path]:
    """Write a Parquet file for each worker, all or none, and remove those of an earlier export.

    Returns:
        The files, in the order of the workers.

    Raises:
        MissingExtraError: pyarrow is not installed.
        ArgumentError: No files can be made there, or one there is not ours to replace.
        RecordingError: A record is broken, or the disk is full.
    """
    _import_package("pyarrow")
    writers = {f"worker-{index}.parquet": partial(_write_parquet, tables[index]) for index in sorted(tables)}
    return replace_files(Path(folder), writers, ExportFormat(_FILE_NAME, _is_record))


def _import_package(package: str) -> None:
    if find_spec(package) is None:
        raise MissingExtraError("this export", "dask")


def _batch_columns(batch: LineBatch) -> Iterator[tuple[str, list[Any]]]:
    yield from zip(FIXED_COLUMNS, (batch.jobs, batch.dags, batch.timestamps), strict=True)
    for name in batch.columns[len(FIXED_COLUMNS) :]:
        yield name, batch.values(name)


def _build_series(name: str, values: list[Any]) -> pd.Series[Any]:
    """Return numbers with NaN where one is missing; anything else as it is, with None."""
    import pandas as pd  # noqa: PLC0415

    kinds = set(map(type, values))
    if name in ("worker", "job", "dag") or (kinds == {int} and fit_into(values)):
        return pd.Series(values, dtype="int64")
    if kinds <= {int, float, type(None)}:
        return pd.Series(values, dtype="float64")
    return pd.Series(values, dtype=object)


def _write_parquet(table: WorkerTable, file: BinaryIO) -> None:
    import pyarrow as pa  # noqa: PLC0415  an extra
    from pyarrow import parquet  # noqa: PLC0415

    shapes = {name: ColumnType() for name in table.columns}
    for batch in table.batches():
        for name, values in _batch_columns(batch):
            shapes[name].add(values)
    chunks: dict[str, list[pa.Array]] = {name: [] for name in table.columns}
    for batch in table.batches():
        for name, values in _batch_columns(batch):
            chunks[name].append(shapes[name].array(values))
    arrays = [pa.chunked_array(chunks[name], shapes[name].type) for name in table.columns]
    parquet.write_table(pa.table(arrays, names=list(table.columns)), file)


def _is_record(path: Path) -> bool:
    from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415

    try:
        return tuple(parquet.read_schema(path).names[: len(FIXED_COLUMNS)]) == FIXED_COLUMNS
    except ArrowInvalid:
        return False
