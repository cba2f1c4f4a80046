"""Look up column layouts and node names, from facts in the log and from the metadata database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Any
from urllib.parse import quote

from gpulse.errors import LogError
from gpulse.model.columns import Layout
from gpulse.store.log.reader import LogReader
from gpulse.store.log.records import FACT, read_fact


class LayoutLookup:
    """The layouts and node names that were found so far."""

    def __init__(self, log: LogReader, metadata: str) -> None:
        """Start with nothing.

        Args:
            log: Where facts are looked for that the metadata does not have.
            metadata: The path of the metadata's SQLite file, which may be missing.
        """
        self.names: dict[int, str] = {}
        self.layouts: dict[int, Layout] = {}
        self._log = log
        self._metadata = metadata

    def apply_fact(self, payload: bytes) -> None:
        """Remember a layout or a node; skip a fact that cannot be read, which the metadata reports."""
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            fact = read_fact(payload)
            if fact["fact"] == "layout":
                self._add_layout(fact["id"], fact["text"])
            elif fact["fact"] == "node":
                self.names[int(fact["id"])] = str(fact["name"])

    def look_up(self, layouts: Collection[int], nodes: Collection[int]) -> set[int]:
        """Look up what is not known yet and return the layouts that were not found.

        Raises:
            LogError: The metadata or the log cannot be read.
        """
        if self._unknown(layouts, nodes):
            self._read_metadata(layouts, nodes)
        if self._unknown(layouts, nodes):
            self._read_log()
        return set(layouts).difference(self.layouts)

    def _unknown(self, layouts: Collection[int], nodes: Collection[int]) -> bool:
        return bool(set(layouts).difference(self.layouts) or set(nodes).difference(self.names))

    def _add_layout(self, number: Any, text: str) -> None:
        key = int(number)
        if key not in self.layouts:
            self.layouts[key] = Layout.from_json(text)

    def _read_metadata(self, layouts: Collection[int], nodes: Collection[int]) -> None:
        path = self._metadata
        if not os.path.exists(path):
            return
        try:
            with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=10)) as database:
                for number in set(layouts).difference(self.layouts):
                    row = database.execute("SELECT text FROM layouts WHERE id = ?", (str(number),)).fetchone()
                    if row is not None:
                        with suppress(ValueError):  # a layout that cannot be read counts as missing
                            self._add_layout(number, row[0])
                for number in set(nodes).difference(self.names):
                    row = database.execute("SELECT name FROM nodes WHERE id = ?", (number,)).fetchone()
                    if row is not None:
                        self.names[number] = row[0]
        except (sqlite3.Error, ValueError) as error:
            raise LogError(
                f"{path} cannot be read: {error}",
                hint="move it away; it is made again from the log when it is missing",
            ) from error

    def _read_log(self) -> None:
        """Read all facts of the log: the metadata may not have been written when the head ended."""
        for record in self._log.read():
            if record.kind == FACT:
                self.apply_fact(record.payload)
