"""Look up single rows of a metadata file that another process writes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

from gpulse.errors import LogError
from gpulse.store.metadata.values import read_object

_TIMEOUT_SECONDS = 10.0


class NodeRow(NamedTuple):
    """What the metadata says about a node."""

    name: str
    host: str
    machine: str
    facts: Mapping[str, Any]


class MetadataLookup:
    """Reads layouts, nodes and runs. A file that is not there has none.

    Every method raises LogError when the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def layouts(self, numbers: Collection[int]) -> dict[int, str]:
        """Return the texts of layouts; those that are not known are left out."""
        with self._opened() as database:
            found = {number: _row(database, "text FROM layouts WHERE id", str(number)) for number in numbers}
        return {number: row[0] for number, row in found.items() if row is not None}

    def nodes(self, numbers: Collection[int]) -> dict[int, NodeRow]:
        """Return nodes; those that are not known are left out."""
        columns = "name, host, machine, facts FROM nodes WHERE id"
        with self._opened() as database:
            found = {number: _row(database, columns, number) for number in numbers}
        return {
            number: NodeRow(row[0], row[1], row[2], read_object(row[3]))
            for number, row in found.items()
            if row is not None
        }

    def version(self, run: bytes) -> str | None:
        """Return the version of the agent that made a run; None when it is not known."""
        with self._opened() as database:
            row = _row(database, "version FROM runs WHERE run", run)
        return None if row is None else row[0]

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        if not os.path.exists(self._path):
            yield None
            return
        address = f"file:{quote(self._path)}?mode=ro"
        try:
            with closing(sqlite3.connect(address, uri=True, timeout=_TIMEOUT_SECONDS)) as database:
                yield database
        except sqlite3.Error as error:
            raise LogError(
                f"{self._path} cannot be read: {error}",
                hint="move it away; it is made again from the log when it is missing",
            ) from error


def _row(database: sqlite3.Connection | None, selected: str, key: object) -> tuple[Any, ...] | None:
    if database is None:
        return None
    row: tuple[Any, ...] | None = database.execute(f"SELECT {selected} = ?", (key,)).fetchone()
    return row
