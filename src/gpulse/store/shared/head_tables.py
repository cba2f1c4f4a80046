"""The tables that one head shares, under the numbers that nodes have elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpulse.store.base import StoredNode
from gpulse.store.disk import disk_errors
from gpulse.store.history.query import History, Window
from gpulse.store.history.recent import Recent
from gpulse.store.history.rollup import FINE
from gpulse.store.history.samples import StoredSamples
from gpulse.store.shared.copying import read_names
from gpulse.store.shared.division import Minutes, Span
from gpulse.store.shared.life import Life, read_life

_LATE_SECONDS = 5.0
"""Frames come so long after they were taken, at most."""
_MINUTES = """
SELECT node_id, minute, max(samples) AS samples FROM (
    SELECT node_id, subject, epoch_us(time) AS minute, sum(samples) AS samples FROM read_parquet(?)
    WHERE {condition} GROUP BY node_id, subject, minute
) GROUP BY node_id, minute
"""
"""A minute may lie in several segments."""


class HeadTables:
    """The tables of one head. Its methods read the shared directory."""

    def __init__(self, directory: str, head: str) -> None:
        """Prepare to read.

        Args:
            directory: The one that heads share.
            head: Which head it is.
        """
        self._directory = directory
        self._head = head
        self._folder = folder = f"{directory}/{head}"
        self._life: Life | None = None
        self.history = History(folder)
        self.samples = StoredSamples(self.history, Recent({}))
        self._numbers: dict[tuple[str, str], int] = {}

    def refresh(self) -> None:
        """Look again at what is there."""
        self.history.refresh()
        with disk_errors(f"read {self._folder}"):
            names = read_names(self._folder)
            self._life = read_life(self._directory, self._head)
        self._numbers = {(name.host, name.machine): number for number, name in names.items()}

    def untold_since(self, start: float, end: float) -> float | None:
        """Since when it got frames that are not in its tables; None when that is not so within a time."""
        life = self._life
        if life is None or life.newest is None:
            return None
        sealed = [segment.received[1] / 1e6 for segment in self.history.segments if segment.received]
        since = max(sealed, default=life.started)
        return since if max(start, since + _LATE_SECONDS) < min(end, life.newest) else None

    def numbers(self, nodes: Mapping[int, StoredNode]) -> dict[int, int]:
        """By the numbers that nodes have here those that they have in the tables."""
        found = {}
        for number, node in nodes.items():
            there = self._numbers.get((node.host, node.machine))
            if there is not None:
                found[number] = there
        return found

    def spans(self, start: int, end: int, here: Mapping[int, int]) -> list[Span]:
        """From when to when it may have samples of which nodes, by the numbers that these have here.

        Args:
            start: Microseconds.
            end: Microseconds.
            here: By the numbers in the tables those that the nodes have here.
        """
        found = []
        for segment in self.history.segments:
            files = [file for file in segment.files if file.start < end and file.end >= start]
            nodes = frozenset(here[node] for file in files for node in file.nodes if node in here)
            if nodes:
                found.append(Span(min(one.start for one in files), max(one.end for one in files), nodes))
        return found

    def minutes(self, spans: Collection[Span], there: Mapping[int, int]) -> Minutes:
        """How many samples it has of disputed minutes, by the numbers that nodes have here."""
        return self.history.settled(lambda: self._minutes(spans, there))

    def _minutes(self, spans: Collection[Span], there: Mapping[int, int]) -> Minutes:
        here = {number: node for node, number in there.items()}
        found: dict[tuple[int, int], int] = {}
        for span in spans:
            nodes = frozenset(there[node] for node in span.nodes if node in there)
            window = Window("gpu", span.start, span.end, nodes)
            files = window.files(self.history.segments, seconds=FINE)
            if not files or not nodes:
                continue
            condition, bound = window.condition()
            query = _MINUTES.format(condition=condition)
            rows = self.history.run(query, [self.history.paths(files), *bound], files)
            columns = (rows[name].tolist() for name in ("node_id", "minute", "samples"))
            for node, minute, samples in zip(*columns, strict=True):
                found[here[node], minute] = int(samples)
        return found

    def close(self) -> None:
        """Let go of the files."""
        self.history.close()
