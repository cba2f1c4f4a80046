"""What the numbers in a log are about: layouts and names of nodes, from its facts and from the book."""

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


class Words:
    """The layouts and nodes that were seen so far."""

    def __init__(self, log: LogReader, book: str) -> None:
        """Begin with nothing.

        Args:
            log: Where facts are looked for that the book does not have.
            book: The path of the book; it need not be there.
        """
        self.names: dict[int, str] = {}
        self.layouts: dict[int, Layout] = {}
        self._log = log
        self._book = book

    def hear(self, payload: bytes) -> None:
        """Take a fact in; one that cannot be read is passed over, as the book does, which tells of it."""
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            fact = read_fact(payload)
            if fact["fact"] == "layout":
                self._add_layout(fact["id"], fact["text"])
            elif fact["fact"] == "node":
                self.names[int(fact["id"])] = str(fact["name"])

    def learn(self, layouts: Collection[int], nodes: Collection[int]) -> set[int]:
        """Look up what is not known yet; the layouts that are nowhere to be found.

        Raises:
            LogError: The book or the log cannot be read.
        """
        if self._unknown(layouts, nodes):
            self._ask_book(layouts, nodes)
        if self._unknown(layouts, nodes):
            self._ask_log()
        return set(layouts).difference(self.layouts)

    def _unknown(self, layouts: Collection[int], nodes: Collection[int]) -> bool:
        return bool(set(layouts).difference(self.layouts) or set(nodes).difference(self.names))

    def _add_layout(self, number: Any, text: str) -> None:
        key = int(number)
        if key not in self.layouts:
            self.layouts[key] = Layout.from_json(text)

    def _ask_book(self, layouts: Collection[int], nodes: Collection[int]) -> None:
        if not os.path.exists(self._book):
            return
        try:
            with closing(sqlite3.connect(f"file:{quote(self._book)}?mode=ro", uri=True, timeout=10)) as book:
                for number in set(layouts).difference(self.layouts):
                    row = book.execute("SELECT text FROM layouts WHERE id = ?", (str(number),)).fetchone()
                    if row is not None:
                        with suppress(ValueError):  # it counts as one that is not there
                            self._add_layout(number, row[0])
                for number in set(nodes).difference(self.names):
                    row = book.execute("SELECT name FROM nodes WHERE id = ?", (number,)).fetchone()
                    if row is not None:
                        self.names[number] = row[0]
        except (sqlite3.Error, ValueError) as error:
            raise LogError(
                f"{self._book} cannot be read: {error}",
                hint="it is made anew from the log when it is missing",
            ) from error

    def _ask_log(self) -> None:
        """The book may not have been written when the head ended."""
        for record in self._log.read():
            if record.kind == FACT:
                self.hear(record.payload)
