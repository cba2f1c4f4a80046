"""Read one data directory: its metadata, its history, and the frames that are not sealed yet."""

from __future__ import annotations

from gpulse.model.session import Session
from gpulse.store.history.query import History
from gpulse.store.history.reader import HistoryReader
from gpulse.store.history.recent import Recent
from gpulse.store.metadata.metadata import Metadata
from gpulse.store.store import Query, Store, StoredEvent, StoredFinding, StoredGpu, StoredNode, StoredProcess


class StoreReader(HistoryReader, Store):
    """The reading half of the store in a data directory (`store.store.Store`)."""

    def __init__(self, metadata: Metadata, history: History, recent: Recent) -> None:
        super().__init__(history, recent)
        self._metadata = metadata

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by their numbers."""
        return self._metadata.nodes()

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, by node and index."""
        return self._metadata.gpus()

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return self._metadata.sessions()

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened; see `store.store.Store`."""
        return self._metadata.events(query)

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held; see `store.store.Store`."""
        return self._metadata.findings(query)

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived; see `store.store.Store`."""
        return self._metadata.processes(query)

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what was reported of the jobs that a word may mean; see `store.store.Store`."""
        return self._metadata.job_events(word)

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return self._metadata.job_names()
