"""What a head has yet to tell the others: from its commits while they are in memory, from its log otherwise."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, takewhile

from gpulse.errors import GpulseError
from gpulse.model.columns import Layout
from gpulse.store.archive import Archive
from gpulse.store.base import StoredNode
from gpulse.store.book.past import Newest
from gpulse.store.book.values import UNREADABLE
from gpulse.store.entry import Entry
from gpulse.store.log.reader import LogReader
from gpulse.store.shared.facts import Told, told_at_first, told_of, told_of_past
from gpulse.store.shared.folder import Folder, lines_of

log = logging.getLogger(__name__)

_MOST_WAITING_BYTES = 32 << 20
"""With more in memory the rest is found in the log when it is its turn."""


class Outbox:
    """The writing side of a head's folder. `committed` never waits for the file server; everything else may."""

    def __init__(self, archive: Archive, directory: str, head: str, *, now: Callable[[], float]) -> None:
        """Prepare to tell; nothing is read or written yet.

        Args:
            archive: The head's store.
            directory: The one that is shared.
            head: Whose folder it is.
            now: The head's clock.
        """
        self._archive = archive
        self._now = now
        self._folder = Folder(directory, head)
        self._log = LogReader(f"{archive.directory}/log")
        self._told: int | None = None
        """Up to which position everything is told; None before that is known."""
        self.durable = 0
        """Up to which position the folder says so: what comes after it may have to be read from the log again."""
        self.lost = 0
        """How many records the log dropped before they could be told."""
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, list[Told]]] = deque()
        self._waiting_bytes = 0
        self._past: Newest = archive.book.newest()
        """What is in the book by now, which is told where this head never told of anything."""
        self._from = self._to = archive.accepted
        """What waits covers the positions after the first, up to the second."""

    @property
    def told(self) -> int:
        """Up to which position everything is told."""
        return self._told or 0

    @property
    def behind(self) -> int:
        """How many records are not told yet."""
        return self._to - self._told if self._told is not None else 0

    def committed(self, entries: Sequence[Entry], nodes: Mapping[int, StoredNode]) -> None:
        """Take in what is on disk by now: the last entries of the log."""
        last = self._archive.accepted
        first = last - len(entries) + 1
        told, size = [], 0
        for position, entry in enumerate(entries, first):
            if position <= self._to:
                continue
            found = told_of(position, entry, nodes, self._archive.layouts)
            if found:
                told.append((position, found))
                size += (
                    len(entry.payload) if entry.batch is None else sum(len(e.events) for e in entry.events)
                )
        with self._lock:
            if first > self._to + 1:
                self._forget(first - 1)
            self._to = max(self._to, last)
            self._waiting += told
            self._waiting_bytes += size
            if self._waiting_bytes > _MOST_WAITING_BYTES:
                self._forget(last)

    def _forget(self, position: int) -> None:
        """Leave everything up to a position to the log."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self._from = position

    def write(self) -> None:
        """Tell everything that is committed.

        Raises:
            OSError: It cannot be written; it is tried again from where it ended.
            GpulseError: The log cannot be read.
        """
        if not self._folder.is_there:
            log.warning("%s is not the folder that it was: it is begun anew", self._folder.path)
            self._folder.close()
            self._told, self._past = None, self._archive.book.newest()
        if self._told is None:
            self._told = self.durable = self._begun()
            if self._folder.is_new:
                self._tell_past()
        with self._lock:
            begin, end, waiting = self._from, self._to, list(self._waiting)
        if self._told < begin:
            self._tell(self._logged(self._told, begin), begin)
        self._tell(((place, facts) for place, facts in waiting if place > self.told), end)
        with self._lock:
            while self._waiting and self._waiting[0][0] <= self._told:
                self._waiting.popleft()
            if not self._waiting:
                self._waiting_bytes = 0
            self._from = max(self._from, min(self._told, self._to))

    def _begun(self) -> int:
        told, accepted = self._folder.reached(), self._archive.accepted
        if told > accepted:
            raise GpulseError(
                f"{self._folder.path} tells of {told} records, but the log of this head ends at {accepted}",
                hint="the data directory is older than that folder: put the newer one back, or begin with an empty one",
            )
        return told

    def _tell(self, told: Iterator[tuple[int, list[Told]]], last: int) -> None:
        for position, line in lines_of(told, last):
            if not self._folder.is_begun:
                self._begin()
            self._folder.append(line)
            self._told = self.durable = position
        self._told = max(self.told, last)

    def _begin(self) -> None:
        archive, told = self._archive, self.told
        first = (
            (told, [fact]) for fact in told_at_first(archive.nodes(), archive.gpus(), archive.sessions())
        )
        self._folder.begin((line for _, line in lines_of(first, told)), self._now())

    def _tell_past(self) -> None:
        """Tell what was before, all of it at once or nothing."""
        archive, (event, process, last) = self._archive, self._past
        nodes = archive.nodes()
        facts = chain(
            told_at_first(nodes, archive.gpus(), archive.sessions()),
            told_of_past(nodes, archive.book.past_events(event), archive.book.past_processes(process)),
        )
        lines = lines_of(((last, [fact]) for fact in facts), last)
        self._folder.begin((line for _, line in lines), self._now())
        self._told = self.durable = last

    def _logged(self, after: int, last: int) -> Iterator[tuple[int, list[Told]]]:
        """What the log has between two positions; what it has dropped is counted."""
        nodes, layouts = self._archive.nodes(), dict(self._archive.layouts)
        reached = after
        for record in takewhile(lambda record: record.position <= last, self._log.read(after + 1)):
            self._missed(record.position - reached - 1)
            reached = record.position
            with suppress(*UNREADABLE):  # what cannot be read here means nothing to others
                entry = Entry.of_record(record)
                _learn(layouts, entry)
                yield record.position, told_of(record.position, entry, nodes, layouts)
        self._missed(last - reached)

    def _missed(self, count: int) -> None:
        if count and self.told:  # else it begins anew, in another directory
            self.lost += count
            log.error("%d records of the log were gone before other heads could be told", count)

    def drop_before(self, time: float) -> None:
        """Remove files that are older.

        Raises:
            OSError: They cannot be removed.
        """
        self._folder.drop_before(time)

    def close(self) -> None:
        """Let go of the file."""
        self._folder.close()


def _learn(layouts: dict[int, Layout], entry: Entry) -> None:
    if entry.fact is not None and entry.fact["fact"] == "layout":
        layouts[int(entry.fact["id"])] = Layout.from_json(entry.fact["text"])
