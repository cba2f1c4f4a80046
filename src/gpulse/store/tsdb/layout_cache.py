"""What the numbers in a log are about, as far as it is sent: layouts, nodes and versions, from facts and the metadata."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from typing import Any

from gpulse.errors import LogError
from gpulse.model.columns import Layout
from gpulse.store.log.reader import LogReader
from gpulse.store.log.records import FACT, read_fact
from gpulse.store.metadata.lookup import MetadataLookup
from gpulse.store.metadata.values import UNREADABLE
from gpulse.store.tsdb.series_labels import NodeWords, is_sent

_FORGET_SECONDS = 600.0
"""So much longer than the head a layout is remembered, since what was sent may have to be sent again."""
_MAX_RUNS = 100_000
_SCOPE = re.compile(r'\{"narrow":\[(?:\["[^"\\]*",\d+,\d+\],?)*\],"scope":"(process|cgroup)"')
"""How a layout begins of which nothing is sent: most of them, and they need not be read."""


class LayoutCache:
    """Layouts, nodes and runs that were seen so far; what was told before is looked up."""

    def __init__(self, log: LogReader, metadata: MetadataLookup) -> None:
        """Begin with nothing.

        Args:
            log: Where facts are looked for that the metadata does not have, or that cannot be read there.
            metadata: Asked first.
        """
        self._log = log
        self._metadata = metadata
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
            found: dict[int, str] = {}
            with suppress(LogError):
                found = self._metadata.layouts((number,))
            if number not in found:
                self._read_log()
            else:
                try:
                    self._add_layout(number, found[number])
                except ValueError as error:
                    raise LookupError(f"layout {number} cannot be read: {error}") from error
        return self._layouts[number]

    def node(self, number: int) -> NodeWords:
        """A node.

        Raises:
            LookupError: Nobody knows it.
        """
        if number not in self._nodes:
            with suppress(LogError):
                for row in self._metadata.nodes((number,)).values():
                    self._nodes[number] = NodeWords(row.name, row.host, row.machine, dict(row.facts))
            if number not in self._nodes:
                self._read_log()
        return self._nodes[number]

    def version(self, run: bytes) -> str:
        """The version of the agent that a run is of, empty when nobody knows it."""
        if run not in self._versions:
            version = None
            with suppress(LogError):
                version = self._metadata.version(run)
            self._add_version(run, version)
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
        if len(self._versions) >= _MAX_RUNS:
            self._versions.clear()
        self._versions[run] = version if isinstance(version, str) else ""

    def _read_log(self) -> None:
        """The metadata may not have been written when the head ended; what is told later is heard."""
        if not self._is_log_read:
            self._is_log_read = True
            before = self._forgotten.copy()
            for record in self._log.read():
                if record.kind == FACT:
                    self.hear(record.payload, 0.0)
            self._forgotten = before  # what is forgotten further on may be needed until there
