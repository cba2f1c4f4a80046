"""CSV: one table, a header, one row a GPU (or process, disk, interface) and look; and cells that harm nobody."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gpulse.errors import RecordingError, file_hint
from gpulse.export.tables import Table, columns, rows
from gpulse.model.frame import Frame
from gpulse.model.snapshot import Snapshot
from gpulse.model.text import plain

_FORMULA_STARTS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Characters, also as full-width forms, that make a spreadsheet take a text for a formula."""


def safe_text(text: str) -> str:
    """Foreign text as a cell of CSV, harmless in spreadsheets and terminals. Every CSV writer uses it.

    Control characters, escape sequences and direction overrides are shown as on the terminal (`^[`, `<202E>`), and
    text that a spreadsheet would take for a formula gets an apostrophe before it. Process, node and user names are
    chosen by other people.
    """
    shown = plain(text)
    return f"'{shown}" if shown.startswith(_FORMULA_STARTS) else shown


class CsvWriter:
    """Writes the rows of one table; an empty cell is an unknown value."""

    def __init__(self, stream: IO[str], table: Table = "gpu") -> None:
        self._table = table
        self._stream = stream
        self._columns = columns(table)
        self._writer = csv.DictWriter(stream, self._columns, extrasaction="ignore", lineterminator="\n")
        self._begun = False

    def write(self, snapshot: Snapshot) -> None:
        """Add the rows of one look."""
        if not self._begun:
            self._begun = True
            self._writer.writeheader()
        for row in rows(self._table, snapshot):
            self._writer.writerow(
                {name: safe_text(value) if isinstance(value, str) else value for name, value in row.items()}
            )
        self._stream.flush()


class CsvSink:
    """Frames into a CSV file: GPUs one row each, with rates since the frame before."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            RecordingError: It exists already, or cannot be created.
        """
        self._path = path
        self._stream = _created(path)
        self._writer = CsvWriter(self._stream)
        self._before: Frame | None = None

    def write(self, frame: Frame) -> None:
        """Add one frame.

        Raises:
            RecordingError: The disk is full or gone.
        """
        with self._writing():
            self._writer.write(Snapshot.of(self._before, frame))
        self._before = frame

    def close(self) -> None:
        """Close the file.

        Raises:
            RecordingError: The disk is full or gone.
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


def _created(path: Path) -> IO[str]:
    """A new file for CSV; one that exists is not touched."""
    try:
        return path.open("x", newline="", encoding="utf-8")
    except FileExistsError:
        raise RecordingError(
            f"{path} exists already", hint="choose another name, or remove it first"
        ) from None
    except OSError as error:
        raise RecordingError(f"cannot create {path}: {error.strerror}", hint=file_hint(error)) from error
