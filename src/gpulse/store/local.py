"""Everything a head keeps in one directory: the log, and what is derived from it."""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, Self

from gpulse.errors import DiskError, GpulseError, LogError
from gpulse.model.columns import Layout
from gpulse.store.format import prepare_format
from gpulse.store.history.query import History
from gpulse.store.history.recent import Recent
from gpulse.store.history.segments import Segment
from gpulse.store.log.log import Log
from gpulse.store.log.record import Record
from gpulse.store.log.records import BATCH, NOTHING, Batch, Entry
from gpulse.store.metadata.metadata import METADATA_FILE, Metadata, StoredRun
from gpulse.store.metadata.step import Step, entry_of, step_of
from gpulse.store.reader import StoreReader
from gpulse.store.seal_client import SealClient, SealResult
from gpulse.store.store import StoredGpu

log = logging.getLogger(__name__)

SEAL_SECONDS = 600.0
SEAL_BYTES = 128 << 20
"""Sealing begins when either is reached: the older frames are in memory until then."""
_SEGMENT_BYTES = 256 << 20
_RECORD_BYTES = 16 << 20
"""So much is written at once."""


class Usage(NamedTuple):
    """What a store takes of its disk, and how it is."""

    log_bytes: int
    history_bytes: int
    book_bytes: int
    free_bytes: int
    unsealed_bytes: int
    is_behind: bool
    """True while the disk does not let the metadata follow the log: what is new is not found yet."""


class Follower(Protocol):
    """Whoever needs every record of the log."""

    @property
    def confirmed(self) -> int:
        """Up to which position it needs the log no more."""

    @property
    def limit_bytes(self) -> int:
        """How much of the log may wait for it."""

    @property
    def waiting_bytes(self) -> int:
        """How much of the log waits for it."""

    def committed(self, first: int, step: Step) -> None:
        """Take in what was committed from a position on; it must not wait for anything."""


class Forwarder(Protocol):
    """The sender of all samples to a time-series database."""

    limit_bytes: int
    """How much of the log may wait for it."""

    @property
    def confirmed(self) -> int:
        """Up to which position it needs the log no more."""

    @property
    def begun(self) -> int:
        """The first position that it sent."""

    @property
    def waiting_bytes(self) -> int:
        """How much of the log waits for it."""

    def wake(self, position: int) -> None:
        """Say up to which position the log is on disk."""


class LocalStore(StoreReader):
    """The one writer of a directory; readers' methods may be called from any thread.

    A commit is durable when the log is synced. The metadata and the frames in memory follow at once, the history later;
    each knows up to which position of the log it is complete, so that nothing is counted twice or left out.
    """

    def __init__(self, directory: str, *, layouts: dict[int, Layout] | None = None) -> None:
        """Open a store, or begin one.

        Args:
            directory: Made when it is not there.
            layouts: Filled with the layouts that are known, and asked for those that come later.

        Raises:
            LogError: It is damaged, of another version, or another process writes it.
            DiskError: The disk is full, read-only or broken.
        """
        self.directory = os.path.abspath(directory)
        self.layouts: dict[int, Layout] = {} if layouts is None else layouts
        prepare_format(self.directory)
        self._log = Log(f"{self.directory}/log", segment_bytes=_SEGMENT_BYTES)
        try:
            self.metadata = Metadata(f"{self.directory}/{METADATA_FILE}")
            self._history = History(self.directory)
            self._check_log()
            self.metadata.replay(self._log.read(self.metadata.applied + 1))
            self.layouts.update(self.metadata.layouts())
            self._recent = Recent(self.layouts)
            super().__init__(self.metadata, self._history, self._recent)
            self._sealer = SealClient(self.directory)
            self._seen_us: dict[int, int] = {}
            self._newest_us = self._history.newest_us
            for record in self._log.read(self._history.sealed_to + 1):
                if record.kind == BATCH:
                    self._remember(record)
        except BaseException:
            self._log.close()
            raise
        self._accepted = self._log.last
        """Up to which position entries were taken in; one that failed to sync may be on disk behind it."""
        self._behind = False
        self._follower: Follower | None = None
        self._forwarder: Forwarder | None = None
        self._gpus_version = 0
        self._gpus: list[StoredGpu] | None = None
        """Asked for with every query, and hardly ever another list."""
        self._lock = threading.Lock()
        """For the log: commits, repairs and drops come from different threads."""
        self._metadata_lock = threading.Lock()
        """For steps of the metadata: each must begin where the last one ended. Taken after the other one."""

    def _check_log(self) -> None:
        """See that the log is the one that metadata and history were made from.

        Raises:
            LogError: It is another one: what it takes would be taken for known already.
        """
        known = max(self.metadata.applied, self._history.sealed_to)
        if self._log.last < known:
            raise LogError(
                f"the log in {self._log.directory} ends at record {self._log.last}, but {known} were read from it before",
                hint="put the log back that belongs there, or use another --data-dir",
            )

    @property
    def accepted(self) -> int:
        """Up to which position of the log everything is on disk, and known here."""
        return self._accepted

    @property
    def is_behind(self) -> bool:
        """True while the disk does not let the metadata follow the log."""
        return self._behind

    def _gpus_changed(self) -> None:
        self._gpus_version += 1
        self._gpus = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- writing

    def commit(self, entries: Sequence[Entry]) -> None:
        """Write entries, and return when they are on disk.

        Raises:
            DiskError: It is not certain that they are.
        """
        with self._lock:
            position = self._log.last + 1
            for piece in _pieces(entries):
                self._log.append_many((entry.kind, entry.payload) for entry in piece)
            self._log.sync()
            self._accept(position, entries)

    def repair(self, probe_bytes: int = 0) -> list[Entry]:
        """Make it usable again after a failure; the entries that turn out to be on disk after all.

        Args:
            probe_bytes: So much must fit for it to count as usable.

        Raises:
            GpulseError: It is not usable yet.
        """
        with self._lock:
            accepted = self._accepted
            with suppress(GpulseError):  # what it could not sync is looked for below
                self._log.close()
            self._log = Log(f"{self.directory}/log", segment_bytes=_SEGMENT_BYTES)
            self._log.append(NOTHING, bytes(probe_bytes))
            self._log.sync()
            found = [entry_of(record) for record in self._log.read(accepted + 1)]
            self._accept(accepted + 1, found)
            return found

    def _accept(self, position: int, entries: Sequence[Entry]) -> None:
        """Take in what is on disk from a position on."""
        self._accepted = position + len(entries) - 1
        for place, entry in enumerate(entries):
            if entry.batch is not None:
                self._take(position + place, entry.batch)
        step = step_of(self._accepted, entries)
        try:
            if self._behind:
                self.settle()
                return
            with self._metadata_lock:
                self.metadata.apply(step)
            if any(entry.fact is not None and entry.fact["fact"] in _ABOUT_GPUS for entry in entries):
                self._gpus_changed()
        except DiskError as error:
            if not self._behind:
                log.error("the metadata cannot follow the log: %s", error.message)
            self._behind = True  # from now on it catches up from the log
        finally:
            if self._forwarder is not None:
                self._forwarder.wake(self._accepted)
            if self._follower is not None:
                self._follower.committed(position, step)

    def forward_to(self, forwarder: Forwarder) -> None:
        """Tell somebody of every commit, and keep the log until it was sent on."""
        with self._lock:
            self._forwarder = forwarder
            forwarder.wake(self._accepted)

    def follow_with(self, follower: Follower) -> None:
        """Hand every commit to somebody, and keep the log until it was confirmed."""
        with self._lock:
            self._follower = follower

    def _remember(self, record: Record) -> None:
        """Take in a batch of the log; one that cannot be read is told of by the metadata, and left out of the history."""
        with suppress(ValueError):
            self._take(record.position, Batch.from_bytes(record.payload))

    def _take(self, position: int, batch: Batch) -> None:
        self._recent.add(position, batch)
        self._seen_us[batch.node] = batch.received_us
        self._newest_us = max(self._newest_us, batch.received_us)

    def settle(self) -> None:
        """Bring the metadata up to date, if the disk did not let it follow.

        Raises:
            DiskError: It still does not.
        """
        if self._behind:
            with self._metadata_lock:
                durable = self._accepted  # what is not synced yet is none of the metadata's business
                records = self._log.read(self.metadata.applied + 1)
                self.metadata.replay(takewhile(lambda record: record.position <= durable, records))
            self._gpus_changed()
            self._behind = False
            log.warning("the metadata follows the log again")

    def seal(self) -> SealResult:
        """Move what is only in the log into the history, and shorten the log; nothing should be missing or unreadable.

        Raises:
            GpulseError: It could not be done; nothing is lost, and it can be tried again.
        """
        self.settle()
        target = self.metadata.applied
        sealed = SealResult(self._history.sealed_to, ())
        if target > self._history.sealed_to:
            sealed = self._sealer.seal(target)
            self._history.refresh()
            self._recent.drop_through(self._history.sealed_to)
        kept = min(self.metadata.checkpoint(), self._history.sealed_to)
        with self._lock:
            self._shorten_log(kept)
        return sealed

    def _shorten_log(self, kept: int) -> None:
        """Drop what is elsewhere up to a position, unless somebody waits for it."""
        readers = [reader for reader in (self._forwarder, self._follower) if reader is not None]
        if readers:
            self._log.shorten(max(reader.limit_bytes for reader in readers), kept + 1)
            kept = min(kept, *(reader.confirmed for reader in readers))
        self._log.drop_before(kept + 1)

    def needed_since(self) -> float:
        """When the oldest frames came that somebody has yet to read from the log; infinite when there are none.

        Raises:
            GpulseError: The log cannot be read.
        """
        readers = [reader.confirmed for reader in (self._forwarder, self._follower) if reader is not None]
        if readers:
            for record in self._log.read(min(readers) + 1):
                if record.kind == BATCH:
                    with suppress(ValueError):
                        return Batch.from_bytes(record.payload).received_us / 1e6
        return math.inf

    def relieve(self) -> None:
        """Forget the older half of what is in memory: it is in the log, and will be found again once it is sealed."""
        self._recent.drop_through((self._history.sealed_to + self._recent.last) // 2)

    def tidy(
        self, now: float, *, keep_seconds: float, limit_bytes: int | None, book_seconds: float | None = None
    ) -> list[str]:
        """Merge small pieces of history and drop what is too old or too much; what was dropped.

        Args:
            now: Epoch seconds.
            keep_seconds: How long samples are kept; for ever when infinite, and then everything is. Where that is less than
                `book_seconds`, those that the time-series database did not get stay as long as the rest.
            limit_bytes: How much all of it may take.
            book_seconds: How long is kept what no time-series database takes: processes, and everything that is not a sample; as long as
                samples when None.

        Raises:
            GpulseError: It could not be done; nothing is lost, and it can be tried again.
        """
        while self._sealer.compact():
            self._history.refresh()
        if limit_bytes is not None:
            limit_bytes = max(0, limit_bytes - self._own_log_bytes() - self.metadata.size_bytes)
        longest = keep_seconds if book_seconds is None else max(keep_seconds, book_seconds)
        whole_seconds = keep_seconds if keep_seconds < longest else None
        forever = math.isinf(longest)
        sent = None
        if self._forwarder is not None:
            confirmed = self._forwarder.confirmed  # first: where it begins is known before that
            sent = self._forwarder.begun, confirmed
        dropped = self._sealer.retain(now, None if forever else longest, limit_bytes, whole_seconds, sent)
        self._history.refresh()
        if not forever:
            self.metadata.drop_before(now - longest)
        return list(dropped)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The sealed pieces of history, oldest first; another object when they have changed."""
        return self._history.segments

    def _own_log_bytes(self) -> int:
        """How long the log is, without what waits for one of the databases: that has a limit of its own."""
        readers = [reader for reader in (self._forwarder, self._follower) if reader is not None]
        waiting = max((reader.waiting_bytes for reader in readers), default=0)
        return max(0, self._log.size_bytes - waiting)

    @property
    def unsealed_bytes(self) -> int:
        """How much is in memory because it is not sealed yet."""
        return self._recent.bytes

    def usage(self) -> Usage:
        """What it takes of its disk."""
        return Usage(
            self._log.size_bytes,
            self._history.size_bytes,
            self.metadata.size_bytes,
            shutil.disk_usage(self.directory).free,
            self._recent.bytes,
            self._behind,
        )

    def close(self) -> None:
        """Let go of everything."""
        self._sealer.close()
        self._history.close()
        self.metadata.close()
        self._log.close()

    # --- reading

    @property
    def head_id(self) -> str:
        """Which store it is."""
        return self.metadata.head_id

    def runs(self) -> Mapping[bytes, StoredRun]:
        """How far the frames of every agent's runs are here."""
        return self.metadata.runs()

    def settings(self) -> Mapping[str, Any] | None:
        """How agents were told to sample last."""
        return self.metadata.settings()

    def seen(self, node: int) -> float | None:
        """When frames of a node came last, None when that is longer ago than its frames are in memory."""
        return self._seen_us[node] / 1e6 if node in self._seen_us else None

    @property
    def newest(self) -> float | None:
        """When frames came last at all."""
        return self._newest_us / 1e6 if self._newest_us else None

    @property
    def oldest(self) -> float | None:
        """When the oldest samples were taken."""
        starts = [file.start for segment in self._history.segments for file in segment.files]
        recent = self._recent.view().span
        if recent is not None:
            starts.append(recent[0])
        return min(starts) / 1e6 if starts else None

    def latest(self, kind: str) -> Mapping[int, tuple[float, dict[str, Any]]]:
        """The last event of a kind, by node."""
        return self.metadata.latest(kind)

    def gpus(self) -> list[StoredGpu]:
        """All GPUs, by node and index."""
        known, version = self._gpus, self._gpus_version
        if known is None:
            known = super().gpus()
            if version == self._gpus_version:  # else others came while this was read
                self._gpus = known
        return list(known)


_ABOUT_GPUS = frozenset({"devices", "node"})


def _pieces(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    piece: list[Entry] = []
    size = 0
    for entry in entries:
        if piece and size + len(entry.payload) > _RECORD_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += len(entry.payload)
    if piece:
        yield piece
