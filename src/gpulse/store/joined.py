"""What is on this head's disk and what is elsewhere, as one store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpulse.model.columns import time_span
from gpulse.store.coverage import Coverage
from gpulse.store.entry import Entry
from gpulse.store.joining import FederatedSamples
from gpulse.store.local import LocalStore
from gpulse.store.outage import Outage
from gpulse.store.store import StoredGpu, SummarySource
from gpulse.store.tsdb.samples import TsdbSamples
from gpulse.store.view import StoreView


class FederatedStore(StoreView):
    """What a head answers from that has an engine, or shares a directory with other heads.

    What is on its own disk comes from there. Of what is not, or may not be whole, the samples that are series come from
    the engine, and those of processes from the tables that heads share. The book is the head's own.
    """

    def __init__(
        self,
        local: LocalStore,
        engine: TsdbSamples | None,
        tables: SummarySource | None,
        *,
        now: Callable[[], float],
    ) -> None:
        """Put them together.

        Args:
            local: What is on this head's disk.
            engine: Where all samples are that are series.
            tables: Where those of processes are that other heads had, or that this one had once; of shares of GPUs, all.
            now: The time in epoch seconds.
        """
        self._local = local
        self._coverage = Coverage()
        self._joined = FederatedSamples(local, engine, tables, self._coverage, now=now)
        super().__init__(local.book, self._joined)

    @property
    def trouble(self) -> Outage | None:
        """Why what is not on this head's disk is missing from answers; None when it is not."""
        return self._joined.trouble

    @property
    def engine_trouble(self) -> Outage | None:
        """The same of what the engine has."""
        return self._joined.engine_trouble

    @property
    def tables_trouble(self) -> Outage | None:
        """The same of what heads share."""
        return self._joined.tables_trouble

    @property
    def whole(self) -> StoreView:
        """The same store for what must not have a hole: what cannot be had is an error there."""
        return StoreView(self._local.book, self._joined.strict())

    def committed(self, entries: Iterable[Entry]) -> None:
        """Entries are on disk."""
        for entry in entries:
            batch = entry.batch
            if batch is not None and batch.frames:
                first, last = (time + batch.shift_us for time in time_span(batch.frames))
                numbers = range(batch.first, batch.last + 1)
                self._coverage.saw(batch.node, batch.run, numbers, first / 1e6, last / 1e6)

    def gpus(self) -> list[StoredGpu]:
        """All GPUs, by node and index."""
        return self._local.gpus()
