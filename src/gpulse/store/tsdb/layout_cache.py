"""What the numbers in a log are about, as far as it is sent: layouts, nodes and versions, from facts and the book."""

from __future__ import annotations

import os
import re
import sqlite3
from collections import deque
from contextlib import closing
from typing import Any
from urllib.parse import quote

from gpulse.model.columns import Layout
from gpulse.store.log.reader import LogReader
from gpulse.store.log.records import FACT, read_fact
from gpulse.store.metadata.values import UNREADABLE, read_object
from gpulse.store.tsdb.series_labels import NodeWords, is_sent

_FORGET_SECONDS = 600.0
"""So much longer than the head a layout is remembered, since what was sent may have to be sent again."""
_MOST_RUNS = 100_000
_SCOPE = re.compile(r'\{"narrow":\[(?:\["[^"\\]*",\d+,\d+\],?)*\],"scope":"(process|cgroup)"')
"""How a layout begins of which nothing is sent: most of them, and they need not be read."""


class Known:
    """Layouts, nodes and runs that were seen so far; what was told before is looked up."""

    def __init__(self, log: LogReader, book: str) -> None:
        """Begin with nothing.

        Args:
            log: Where facts are looked for that the book does not have.
            book: The path of the book; it need not be there.
        """
        self._log = log
        self._book = book
        self._layouts: dict[int, Layout | None] = {}
        self._nodes: dict[int, NodeWords] = {}
        self._versions: dict[bytes, str] = {}
        self._forgotten: deque[tuple[float, list[int]]] = deque()
        self._is_log_read = False

    def hear(self, payload: bytes, now: float) -> set[int]:
        """Take a fact in; the nodes that are now described otherwise. One that cannot be read is passed over."""
        while self._forgotten and self._forgotten[0][0] < now - _FORGET_SECONDS:
            for layout in self._forgotten.popleft()[1]:
                self._layouts.pop(layout, None)
        try:
            return self._take(read_fact(payload), now)
        except UNREADABLE:
            return set()

    def layout(self, number: int) -> Layout | None:
        """A layout, None when nothing of it is sent.

        Raises:
            LookupError: Nobody knows it.
        """
        if number not in self._layouts:
            found = self._ask("SELECT text FROM layouts WHERE id = ?", str(number))
            if found is None:
                self._read_log()
            else:
                try:
                    self._add_layout(number, found[0])
                except ValueError as error:
                    raise LookupError(f"layout {number} cannot be read: {error}") from error
        return self._layouts[number]

    def node(self, number: int) -> NodeWords:
        """A node.

        Raises:
            LookupError: Nobody knows it.
        """
        if number not in self._nodes:
            found = self._ask("SELECT name, host, machine, facts FROM nodes WHERE id = ?", number)
            if found is not None:
                self._nodes[number] = NodeWords(found[0], found[1], found[2], read_object(found[3]))
            else:
                self._read_log()
        return self._nodes[number]

    def version(self, run: bytes) -> str:
        """The version of the agent that a run is of, empty when nobody knows it."""
        if run not in self._versions:
            found = self._ask("SELECT version FROM runs WHERE run = ?", run)
            self._add_version(run, found[0] if found is not None else None)
        return self._versions[run]

    def _take(self, fact: dict[str, Any], now: float) -> set[int]:
        match fact["fact"]:
            case "layout":
                self._add_layout(int(fact["id"]), fact["text"])
            case "node":
                number = int(fact["id"])
                words = NodeWords(
                    str(fact["name"]),
                    str(fact.get("host", "")),
                    str(fact.get("machine", "")),
                    dict(fact.get("facts") or {}),
                )
                if words != self._nodes.get(number):
                    self._nodes[number] = words
                    return {number}
            case "run":
                self._add_version(bytes.fromhex(fact["run"]), fact.get("version"))
            case "forget":
                self._forgotten.append((now, [int(layout) for layout in fact["layouts"]]))
        return set()

    def _add_layout(self, number: int, text: str) -> None:
        if number not in self._layouts:
            layout = None if _SCOPE.match(text) else Layout.from_json(text)
            self._layouts[number] = layout if layout is not None and is_sent(layout) else None

    def _add_version(self, run: bytes, version: object) -> None:
        if len(self._versions) >= _MOST_RUNS:
            self._versions.clear()
        self._versions[run] = version if isinstance(version, str) else ""

    def _ask(self, query: str, key: Any) -> tuple[Any, ...] | None:
        """One row of the book; None when it has none, or cannot be read."""
        if not os.path.exists(self._book):
            return None
        try:
            with closing(sqlite3.connect(f"file:{quote(self._book)}?mode=ro", uri=True, timeout=10)) as book:
                row: tuple[Any, ...] | None = book.execute(query, (key,)).fetchone()
                return row
        except sqlite3.Error:
            return None

    def _read_log(self) -> None:
        """The book may not have been written when the head ended; what is told later is heard."""
        if not self._is_log_read:
            self._is_log_read = True
            before = self._forgotten.copy()
            for record in self._log.read():
                if record.kind == FACT:
                    self.hear(record.payload, 0.0)
            self._forgotten = before  # what is forgotten further on may be needed until there
