"""Look up column layouts and node names, from facts in the log and from a head's metadata."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, Protocol

from gpulse.model.columns import Layout
from gpulse.store.log.reader import LogReader
from gpulse.store.log.records import FACT, read_fact


class NamedNode(Protocol):
    """A node with its name."""

    @property
    def name(self) -> str:
        """How people name it."""


class KnownNodes(Protocol):
    """Layouts and nodes of which the log may not have the facts any more."""

    def layouts(self, numbers: Collection[int]) -> Mapping[int, str]:
        """Return the texts of layouts."""

    def nodes(self, numbers: Collection[int]) -> Mapping[int, NamedNode]:
        """Return nodes."""


class LayoutLookup:
    """The layouts and node names that were found so far."""

    def __init__(self, log: LogReader, metadata: KnownNodes) -> None:
        """Start with nothing.

        Args:
            log: Where facts are looked for that the metadata does not have.
            metadata: Asked first.
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
        for number, text in self._metadata.layouts(set(layouts).difference(self.layouts)).items():
            with suppress(ValueError):  # a layout that cannot be read counts as missing
                self._add_layout(number, text)
        for number, node in self._metadata.nodes(set(nodes).difference(self.names)).items():
            self.names[number] = node.name

    def _read_log(self) -> None:
        """Read all facts of the log: the metadata may not have been written when the head ended."""
        for record in self._log.read():
            if record.kind == FACT:
                self.apply_fact(record.payload)
