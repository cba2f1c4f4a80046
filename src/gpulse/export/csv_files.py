"""CSV files: a header, then a row per snapshot for each GPU (or process, disk, interface)."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpulse.atomic_files import open_output
from gpulse.errors import RecordingError, file_hint
from gpulse.export.snapshot_documents import TableName, build_rows, column_names
from gpulse.model.frame import Frame
from gpulse.model.safe_text import csv_cell
from gpulse.model.snapshot import Snapshot


class CsvWriter:
    """Writes the rows of one table; an empty cell is an unknown value."""

    def __init__(self, stream: IO[str], table: TableName = "gpu") -> None:
        self._table = table
        self._stream = stream
        self._columns = column_names(table)
        self._writer = csv.DictWriter(stream, self._columns, extrasaction="ignore", lineterminator="\n")
        self._begun = False

    def write(self, snapshot: Snapshot) -> None:
        """Write the rows of one snapshot."""
        if not self._begun:
            self._begun = True
            self._writer.writeheader()
        for row in build_rows(self._table, snapshot):
            self._writer.writerow(
                {name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()}
            )
        self._stream.flush()


class CsvSink:
    """Writes frames to a CSV file: a row for each GPU, with rates since the previous frame."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            RecordingError: The file exists already, or cannot be created.
        """
        self._path = path
        self._stream = _create_file(path)
        self._writer = CsvWriter(self._stream)
        self._before: Frame | None = None

    def write(self, frame: Frame) -> None:
        """Write one frame.

        Raises:
            RecordingError: The file cannot be written, for example because the disk is full.
        """
        with self._writing():
            self._writer.write(Snapshot.of(self._before, frame))
        self._before = frame

    def close(self) -> None:
        """Close the file.

        Raises:
            RecordingError: The file cannot be written, for example because the disk is full.
        """
        with self._writing():
            self._stream.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordingError(
                f"cannot write {self._path}: {error.strerror}", hint=file_hint(error)
            ) from error


def _create_file(path: Path) -> IO[str]:
    """Create a CSV file; an existing file is never overwritten."""
    try:
        descriptor = open_output(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        raise RecordingError(
            f"{path} already exists", hint="choose another file name, or remove this file first"
        ) from None
    except OSError as error:
        raise RecordingError(f"cannot create {path}: {error.strerror}", hint=file_hint(error)) from error
    return os.fdopen(descriptor, "w", newline="", encoding="utf-8")
