"""What a store can be asked: nodes and GPUs, samples over time, events. Every home for data answers the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gpulse.model.finding_span import FindingSpan
from gpulse.model.metric import Scope
from gpulse.model.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Statistic = Literal["mean", "min", "max", "last"]
HEARSAY = "hearsay"
"""Who told of a node or GPU that is only known from labels in an engine, or was mentioned: whoever heard it speak knows more."""


class StoredNode(NamedTuple):
    """A node that the store has frames of."""

    id: int
    """Counts from 1 in the order of first joining."""
    name: str
    """How people name it: its host name, with `#2` when another machine has that name already."""
    host: str
    machine: str
    first_seen: float
    facts: Mapping[str, Any]
    """The fields of `model.device.Node`, its name aside."""
    labels: Mapping[str, str]
    via: str | None = None
    """Which head told of it as it is here, or `HEARSAY`; None when it spoke to this one itself."""


class StoredGpu(NamedTuple):
    """A GPU, or a MIG instance, that the store has samples of."""

    node: int
    node_name: str
    uuid: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls here
    label: str
    """`3`, or `3:1` for a MIG instance."""
    name: str
    """The model, such as `NVIDIA H200`."""
    device: Mapping[str, Any]
    """All fields of `model.device.Device`, as the layout had them last."""
    told: float = 0.0
    """When its node said so."""
    via: str | None = None
    """Which head told of that, or `HEARSAY`; None when its node told this one itself."""

    @property
    def key(self) -> str:
        """`host:3:NVIDIA H200`, as session files name it."""
        return f"{self.node_name}:{self.label}:{self.name}"


class StoredEvent(NamedTuple):
    """Something that happened, at one moment."""

    time: float
    kind: str
    node: int | None
    detail: Mapping[str, Any]


class StoredFinding(NamedTuple):
    """A finding, from when to when it held."""

    node: int | None
    """None for a node that was expected and never reported."""
    span: FindingSpan
    finding: Mapping[str, Any]
    """As it was reported last (`model.finding.Finding.to_dict`)."""


class StoredProcess(NamedTuple):
    """A process that held a GPU, or a descendant of one."""

    node: int
    pid: int
    start: float | None
    first_seen: float
    ended: float | None
    identity: Mapping[str, Any]
    """The fields of `model.process.ProcessIdentity`."""


class SeriesKey(NamedTuple):
    """Whose values: a GPU's, a disk's, a host's."""

    node: int
    subject: str
    """A GPU's UUID, a disk's or interface's name, a mount point, a group's path, `pid` or `pid@uuid` of a process; empty
    for a host."""


class Series(NamedTuple):
    """One metric of one subject over time."""

    key: SeriesKey
    times: NDArray[np.float64]
    values: NDArray[np.float64]
    """NaN where nothing is known."""


class Samples(NamedTuple):
    """A stretch of samples of many subjects as columns, ordered by time."""

    keys: Sequence[SeriesKey]
    series: NDArray[np.int32]
    """For each sample the index of its key."""
    times: NDArray[np.float64]
    runs: NDArray[np.uint64]
    """The first eight bytes of the run, as a number."""
    sequences: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    """By metric; NaN where nothing is known."""


class Steps(NamedTuple):
    """One metric of one subject, one entry a step that has samples of it."""

    key: SeriesKey
    metric: str
    times: NDArray[np.float64]
    """When each step begins."""
    means: NDArray[np.float64]
    """Weighted by how many samples are known."""
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]
    ends: NDArray[np.float64]
    """When the last sample of each step was taken; NaN where nobody knows."""
    counts: NDArray[np.int64] | None = None
    """Of how many samples each mean is, where that was counted."""


class Holding(NamedTuple):
    """What one process held on one GPU."""

    node: int
    pid: int
    start: float | None
    uuid: str
    first: float
    """When it was seen there first."""
    last: float
    memory_mean: float | None
    memory_max: float | None
    sm_mean: float | None


class Share(NamedTuple):
    """How much of a GPU's time one process had, and what the GPU did then."""

    node: int
    pid: int | None
    """None for a GPU while nobody holds it: only how long it was seen is told then."""
    start: float | None
    uuid: str
    first: float | None
    """When the process was seen there first."""
    last: float | None
    seconds: float
    known_seconds: float
    """How much of it the GPU's utilization is known of."""
    busy_seconds: float
    """That time multiplied with the utilization."""
    idle_seconds: float
    """How much of it the GPU did nothing."""
    energy_joules: float | None
    memory_max: float | None
    seen_seconds: float
    """Its part of the time for which there are samples of the GPU; all parts add up to that."""


class SampleSource(Protocol):
    """Samples by time."""

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
        """One metric over `[start, end)`, one point a step, or every sample without one.

        A step's point stands at the step's beginning; steps begin at multiples of their length. A step without a
        sample has no point.
        """

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
        """Every sample of `[start, end)`, one stretch of time after the other, so that little is held at once."""


class SummarySource(SampleSource, Protocol):
    """Samples by time, and what they add up to."""

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
        """Several metrics over `[start, end)` at once, one entry a step; steps begin at multiples of their length.

        Args:
            scope: Whose metrics they are.
            metrics: Names of the catalogue.
            start: Epoch seconds.
            end: Epoch seconds; not within any more.
            step: Seconds.
            nodes: Only these.
            subjects: Only these.
            gpus: Of processes, only what they hold on these GPUs, by UUID.
        """

    def holdings(
        self,
        *,
        start: float,
        end: float,
        nodes: Collection[int] | None = None,
        gpus: Collection[str] | None = None,
    ) -> list[Holding]:
        """What processes held on which GPUs in `[start, end)`."""

    def shares(self, *, start: float, end: float, nodes: Collection[int] | None = None) -> list[Share]:
        """How the time of GPUs in `[start, end)` is divided among the processes that held them.

        Time is looked at in minutes. Within one, a process held a GPU for as many samples as it was seen there times the
        time between two of them, but never for longer than there are samples of that GPU; where a minute has only one, that
        time is the one between two samples of the GPU, and at least five seconds. A GPU is held for as long as any process
        holds it. Where several hold it at once, that time is divided by the shares in which they used its multiprocessors
        if these are known of all of them, and equally otherwise; so shares add up to the time held. A minute is idle when
        the mean utilization of the GPU in it is at most one percent.
        """


class Store(SampleSource, Protocol):
    """A home for everything that nodes send."""

    def nodes(self) -> dict[int, StoredNode]:
        """All nodes, by their numbers."""

    def gpus(self) -> list[StoredGpu]:
        """All GPUs, by node and index."""

    def sessions(self) -> list[Session]:
        """All sessions, oldest first."""

    def events(
        self,
        *,
        start: float,
        end: float,
        kinds: Collection[str] | None = None,
        nodes: Collection[int] | None = None,
        most: int | None = None,
    ) -> list[StoredEvent]:
        """What happened in `[start, end)`, oldest first; only the newest of it where `most` says how many."""

    def findings(
        self, *, start: float, end: float, nodes: Collection[int] | None = None, most: int | None = None
    ) -> list[StoredFinding]:
        """Return the findings that held at some time in `[start, end)`, those that began first before the others.

        Args:
            start: Epoch seconds. A finding that began before it keeps its own start.
            end: Epoch seconds; not within any more.
            nodes: Only of these; None for all, and for nodes that were expected and never reported.
            most: Only so many, those that held last.
        """

    def processes(
        self, *, start: float, end: float, nodes: Collection[int] | None = None
    ) -> list[StoredProcess]:
        """The processes that lived in `[start, end)`."""


class HeadStore(Store, SummarySource, Protocol):
    """What a head answers from."""

    def holders(
        self, pids: Collection[int], *, start: float, end: float, nodes: Collection[int] | None = None
    ) -> list[StoredProcess]:
        """The processes of some pids that lived in `[start, end)`: most have descendants that nobody asks for."""

    def job_events(self, word: str) -> list[StoredEvent]:
        """What schedulers told of jobs that a word may mean, whenever that was; oldest first.

        It may be an id with its scheduler or without, the name of an array's task, or that of the array; of those for whom
        it is only what somebody called their job, a hundred of the newest.
        """

    def job_ends(self, name: str) -> list[StoredEvent]:
        """When a job was over, on each of its nodes; oldest first."""

    def job_names(self) -> list[str]:
        """The jobs that processes belong to, whenever they lived."""

    def of_jobs(self, names: Collection[str]) -> list[StoredProcess]:
        """The processes of some jobs, whenever they lived."""
