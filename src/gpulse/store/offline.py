"""Reads a store that nobody writes, and leaves it as it is: what is in the log alone is read into memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from typing import Self

from gpulse.errors import GpulseError
from gpulse.store.disk import disk_errors
from gpulse.store.format import check_format
from gpulse.store.history.query import History
from gpulse.store.history.recent import Recent
from gpulse.store.log.lock import writer_of
from gpulse.store.log.reader import LogReader
from gpulse.store.log.records import BATCH, Batch
from gpulse.store.metadata.metadata import METADATA_FILE, Metadata
from gpulse.store.reader import StoreReader


class OfflineStore(StoreReader):
    """A store as it was left (`store.store.Store`)."""

    def __init__(self, directory: str) -> None:
        """Open it.

        Args:
            directory: Where a head kept its data.

        Raises:
            GpulseError: There is none, it is damaged, of a newer version, or cannot be read.
        """
        self.directory = os.path.abspath(directory)
        log = LogReader(f"{self.directory}/log")
        if not os.path.isdir(log.directory):
            raise GpulseError(
                f"{self.directory} is not a head's data directory",
                hint="name the one that the head was given",
            )
        check_format(self.directory)
        with ExitStack() as stack:
            metadata = _metadata(self.directory, log, stack)
            layouts = metadata.layouts()
            recent = Recent(layouts)
            history = History(self.directory)
            stack.callback(history.close)
            super().__init__(metadata, history, recent)
            self._newest_us = history.newest_us
            for record in log.read(history.sealed_to + 1):
                if record.kind == BATCH:
                    with suppress(ValueError):  # another version wrote it
                        batch = Batch.from_bytes(record.payload)
                        recent.add(record.position, batch)
                        self._newest_us = max(self._newest_us, batch.received_us)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything."""
        self._stack.close()

    @property
    def newest(self) -> float | None:
        """When frames came last; None when there are none."""
        return self._newest_us / 1e6 if self._newest_us else None


def open_offline(directory: str) -> OfflineStore:
    """A store that nobody writes, to be read.

    Raises:
        GpulseError: There is none, it is damaged, of a newer version, or cannot be read.
    """
    return OfflineStore(directory)


def _metadata(directory: str, log: LogReader, stack: ExitStack) -> Metadata:
    """The metadata as it would be if the head had closed it.

    It is a copy: SQLite would tidy up what the head left, even for somebody who only reads.
    """
    path = f"{directory}/{METADATA_FILE}"
    copy = f"{stack.enter_context(tempfile.TemporaryDirectory(prefix='gpulse-'))}/{METADATA_FILE}"
    with disk_errors(f"copy {path}"):
        for suffix in ("", "-wal"):
            if os.path.exists(path + suffix):
                shutil.copyfile(path + suffix, copy + suffix)
    if writer_of(directory) is not None:
        raise GpulseError(f"a head has begun to write {directory}", hint="try again, it will be asked")
    metadata = stack.enter_context(Metadata(copy, shown=path))
    metadata.replay(log.read(metadata.applied + 1))
    return metadata
