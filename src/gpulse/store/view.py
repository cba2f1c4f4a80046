"""A store as those see it who only read: the book and the samples, behind one interface."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from gpulse.model.metric import Scope
from gpulse.model.session import Session
from gpulse.store.metadata.metadata import Metadata
from gpulse.store.store import (
    Holding,
    Samples,
    Series,
    Share,
    Statistic,
    Steps,
    StoredEvent,
    StoredFinding,
    StoredGpu,
    StoredNode,
    StoredProcess,
    SummarySource,
)


class StoreView:
    """The reading half of a store (`store.store.Store`)."""

    def __init__(self, book: Metadata, samples: SummarySource) -> None:
        self._book = book
        self._samples = samples

    def nodes(self) -> dict[int, StoredNode]:
        """All nodes, by their numbers."""
        return self._book.nodes()

    def gpus(self) -> list[StoredGpu]:
        """All GPUs, by node and index."""
        return self._book.gpus()

    def sessions(self) -> list[Session]:
        """All sessions, oldest first."""
        return self._book.sessions()

    def events(
        self,
        *,
        start: float,
        end: float,
        kinds: Collection[str] | None = None,
        nodes: Collection[int] | None = None,
        most: int | None = None,
    ) -> list[StoredEvent]:
        """What happened in `[start, end)`; see `store.store.Store`."""
        return self._book.events(start=start, end=end, kinds=kinds, nodes=nodes, most=most)

    def findings(
        self, *, start: float, end: float, nodes: Collection[int] | None = None, most: int | None = None
    ) -> list[StoredFinding]:
        """Return the findings that held in `[start, end)`; see `store.store.Store`."""
        return self._book.findings(start=start, end=end, nodes=nodes, most=most)

    def processes(
        self, *, start: float, end: float, nodes: Collection[int] | None = None
    ) -> list[StoredProcess]:
        """The processes that lived in `[start, end)`."""
        return self._book.processes(start=start, end=end, nodes=nodes)

    def holders(
        self, pids: Collection[int], *, start: float, end: float, nodes: Collection[int] | None = None
    ) -> list[StoredProcess]:
        """The processes of some pids; see `store.store.HeadStore`."""
        return self._book.processes(start=start, end=end, nodes=nodes, pids=pids)

    def job_events(self, word: str) -> list[StoredEvent]:
        """What was told of jobs that a word may mean; see `store.store.HeadStore`."""
        return self._book.job_events(word)

    def job_ends(self, name: str) -> list[StoredEvent]:
        """When a job was over, on each of its nodes; oldest first."""
        return self._book.job_ends(name)

    def job_names(self) -> list[str]:
        """The jobs that processes belong to, whenever they lived."""
        return self._book.job_names()

    def of_jobs(self, names: Collection[str]) -> list[StoredProcess]:
        """The processes of some jobs, whenever they lived."""
        return self._book.of_jobs(names)

    def query(
        self,
        scope: Scope,
        metric: str,
        *,
        start: float,
        end: float,
        step: float | None = None,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        statistic: Statistic = "mean",
    ) -> list[Series]:
        """One metric over `[start, end)`; see `store.store.SampleSource`."""
        return self._samples.query(
            scope,
            metric,
            start=start,
            end=end,
            step=step,
            nodes=nodes,
            subjects=subjects,
            statistic=statistic,
        )

    def scan(
        self,
        scope: Scope,
        metrics: Sequence[str],
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        stretch_seconds: float = 600.0,
    ) -> Iterator[Samples]:
        """Every sample of `[start, end)`; see `store.store.SampleSource`."""
        return self._samples.scan(
            scope,
            metrics,
            start=start,
            end=end,
            nodes=nodes,
            subjects=subjects,
            stretch_seconds=stretch_seconds,
        )

    def steps(
        self,
        scope: Scope,
        metrics: Sequence[str],
        *,
        start: float,
        end: float,
        step: float,
        nodes: Collection[int] | None = None,
        subjects: Collection[str] | None = None,
        gpus: Collection[str] | None = None,
    ) -> list[Steps]:
        """Several metrics over `[start, end)` at once; see `store.store.SummarySource`."""
        return self._samples.steps(
            scope, metrics, start=start, end=end, step=step, nodes=nodes, subjects=subjects, gpus=gpus
        )

    def holdings(
        self,
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        gpus: Collection[str] | None = None,
    ) -> list[Holding]:
        """What processes held on which GPUs; see `store.store.SummarySource`."""
        return self._samples.holdings(start=start, end=end, nodes=nodes, gpus=gpus)

    def shares(self, *, start: float, end: float, nodes: Collection[int] | None = None) -> list[Share]:
        """How the time of GPUs is divided among processes; see `store.store.SummarySource`."""
        return self._samples.shares(start=start, end=end, nodes=nodes)
