"""Write compact Parquet files with DuckDB, in base units, for pandas, polars and DuckDB."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import duckdb

from gpulse.errors import DiskError, GpulseError
from gpulse.store.damage import file_checksum
from gpulse.store.disk_errors import disk_errors
from gpulse.store.history.parquet_columns import ParquetTable, quote_name, quote_text
from gpulse.store.history.segments import SealedFile

_ROWS_PER_GROUP = 38_400
"""Ten minutes of 64 GPUs at 1 Hz."""
_MAX_DICTIONARY_VALUES = 1024
"""A dictionary of more values takes more space than delta encoding."""
FAST_COMPRESSION, SMALL_COMPRESSION = 3, 15
"""zstd compression levels: for files that are merged within the hour, and for files that are kept for weeks. The second makes
files 6 % smaller for three times the work."""
_MEMORY_LIMIT = "128MB"


def open_database(temporary: str) -> duckdb.DuckDBPyConnection:
    """Open a database in memory for one thread that writes files.

    Args:
        temporary: A directory for data that does not fit into memory, created when needed.
    """
    return duckdb.connect(
        ":memory:",
        config={
            "threads": "1",
            "memory_limit": _MEMORY_LIMIT,
            "temp_directory": temporary,
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
        },
    )


@contextmanager
def duckdb_errors(path: str) -> Iterator[None]:
    """Raise DuckDB's errors as GpulseErrors that name the file being written."""
    try:
        yield
    except duckdb.OutOfMemoryException as error:
        raise GpulseError(
            f"cannot write {path}: {_first_line(error)}",
            hint="free some memory; until then, the data stays in the log",
        ) from error
    except (duckdb.IOException, duckdb.HTTPException) as error:
        raise DiskError(
            f"cannot write {path}: {_first_line(error)}", hint="free some disk space, or see `dmesg`"
        ) from error
    except duckdb.Error as error:
        raise GpulseError(
            f"cannot write {path}: {_first_line(error)}",
            hint="report this bug in gpulse; the data stays in the log",
        ) from error


class FileSignature(NamedTuple):
    """Size and CRC-32 of a file that was written."""

    size_bytes: int
    checksum: int


def write_table(database: duckdb.DuckDBPyConnection, table: ParquetTable, path: str) -> FileSignature:
    """Write a table to a new file, wait until it is on disk, and return its size and checksum.

    Raises:
        GpulseError: The file cannot be written.
    """
    select = ", ".join(f"{field.expression} AS {quote_name(field.name)}" for field in table.fields)
    database.register("arrays", table.arrays)
    try:
        return write_query(database, f"SELECT {select} FROM arrays", path)
    finally:
        database.unregister("arrays")


def write_query(
    database: duckdb.DuckDBPyConnection, query: str, path: str, *, level: int = FAST_COMPRESSION
) -> FileSignature:
    """Write the rows of a query to a new file, wait until it is on disk, and return its size and checksum.

    Args:
        database: The connection to use.
        query: Selects the rows in order.
        path: The new file.
        level: The compression level, up to 22.

    Raises:
        GpulseError: The file cannot be written.
    """
    with duckdb_errors(path):
        database.execute(
            f"COPY ({query}) TO {quote_text(path)} (FORMAT parquet, PARQUET_VERSION v2, COMPRESSION zstd, "
            f"COMPRESSION_LEVEL {level}, "
            f"ROW_GROUP_SIZE {_ROWS_PER_GROUP}, DICTIONARY_SIZE_LIMIT {_MAX_DICTIONARY_VALUES})"
        )
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return FileSignature(os.fstat(file.fileno()).st_size, file_checksum(path))


def write_file(
    database: duckdb.DuckDBPyConnection,
    query: str,
    target: str,
    file: SealedFile,
    *,
    level: int = SMALL_COMPRESSION,
) -> SealedFile:
    """Write the rows of a query to a file of a segment, and return its description. The rows must have a `time` column.

    Raises:
        GpulseError: The file cannot be written.
    """
    path = f"{target}/{file.name}"
    with disk_errors(f"cannot write {path}"):
        written = write_query(database, query, path, level=level)
    with duckdb_errors(path):
        found = database.execute(
            "SELECT count(*), min(epoch_us(time)), max(epoch_us(time)) FROM read_parquet(?)", [path]
        ).fetchone()
    rows, start, end = found or (0, 0, 0)
    return file._replace(
        rows=rows,
        size_bytes=written.size_bytes,
        start=start or 0,
        end=end or 0,
        columns=read_column_types(database, path),
        checksum=written.checksum,
    )


@contextmanager
def temporary_table(
    database: duckdb.DuckDBPyConnection, name: str, query: str, path: str, bound: Sequence[Any] = ()
) -> Iterator[None]:
    """Store the rows of a query in a temporary table until the block ends.

    Args:
        database: The connection to use.
        name: The name of the table.
        query: Selects the rows.
        path: The file that the rows are for.
        bound: The values of the query's parameters.

    Raises:
        GpulseError: The table cannot be created.
    """
    with duckdb_errors(path):
        database.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS {query}", list(bound))
    try:
        yield
    finally:
        database.execute(f"DROP TABLE IF EXISTS {name}")


def read_column_types(database: duckdb.DuckDBPyConnection, path: str) -> dict[str, str]:
    """Return the SQL types of a file's columns, by name.

    Raises:
        GpulseError: The file cannot be read.
    """
    with duckdb_errors(path):
        rows = database.execute("DESCRIBE SELECT * FROM read_parquet(?)", [path]).fetchall()
    return {name: kind for name, kind, *_ in rows}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
