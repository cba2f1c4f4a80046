"""The questions that a store answers, as one protocol, and the records it answers with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from gpulse.errors import UsageError
from gpulse.model.finding import Finding
from gpulse.model.finding_span import FindingSpan
from gpulse.model.metric import CATALOGUE, Scope
from gpulse.model.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Statistic = Literal["mean", "min", "max", "last"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
ALWAYS = -math.inf, math.inf
"""Start and end of a query about all times."""
MIN_STEP_SECONDS, MAX_STEP_SECONDS = 1e-6, 1e10
_MIN_TIME_US, _MAX_TIME_US = -(1 << 62), 1 << 62


@dataclass(frozen=True, slots=True)
class Query:
    """One question to a store: built once from a request, and passed unchanged to whoever answers.

    A field that does not concern what is asked for is ignored: events have no step.

    Raises:
        UsageError: There is no such scope, metric or statistic, the step has no sensible length, or a time is not a
            number.
    """

    start: float
    """Epoch seconds; within the time range."""
    end: float
    """Epoch seconds; not within any more."""
    scope: Scope = "gpu"
    metrics: tuple[str, ...] = ()
    """Names of the catalogue."""
    nodes: frozenset[int] | None = None
    """Only these; None for all."""
    subjects: frozenset[str] | None = None
    """Only these, as `SeriesKey.subject` names them."""
    gpus: frozenset[str] | None = None
    """Processes only: on these GPUs, by UUID."""
    step: float | None = None
    """Seconds, at whose multiples steps begin; None for every sample."""
    statistic: Statistic = "mean"
    """What `Series.values` are of the samples of a step."""
    spread: bool = True
    """Whether `Series.lows` and `Series.highs` are needed; without them, steps of many subjects are found sooner."""
    kinds: frozenset[str] | None = None
    """Events only: of these kinds."""
    pids: frozenset[int] | None = None
    """Processes only: with these pids."""
    jobs: frozenset[str] | None = None
    """Processes only: of these jobs."""
    limit: int | None = None
    """Events and findings only: this many, the newest."""
    deadline: float | None = None
    """Monotonic seconds. A backend that has not answered by then gives up, and the answer is incomplete."""

    def __post_init__(self) -> None:
        """Refuse names that the catalogue does not have, so that no other text gets into a statement."""
        known = CATALOGUE.get(self.scope)
        if known is None:
            raise UsageError(f"there is no scope {self.scope[:40]!r}", hint=f"one of {', '.join(CATALOGUE)}")
        for metric in self.metrics:
            if metric not in known:
                raise UsageError(
                    f"there is no metric {metric[:80]!r} of scope {self.scope}", hint="see docs/metrics.md"
                )
        if self.statistic not in STATISTICS:
            raise UsageError(
                f"there is no statistic {self.statistic[:40]!r}", hint=f"one of {', '.join(STATISTICS)}"
            )
        if self.step is not None and not MIN_STEP_SECONDS <= self.step <= MAX_STEP_SECONDS:
            raise UsageError(
                f"the step must be between {MIN_STEP_SECONDS:g} and {MAX_STEP_SECONDS:g} seconds, not {self.step}"
            )
        if math.isnan(self.start) or math.isnan(self.end):
            raise UsageError("a time must be a number")

    @property
    def start_us(self) -> int:
        """The start in microseconds."""
        return microseconds(self.start)

    @property
    def end_us(self) -> int:
        """The end in microseconds."""
        return microseconds(self.end)

    @property
    def step_us(self) -> int | None:
        """The length of a step in microseconds."""
        return None if self.step is None else round(self.step * 1e6)


def microseconds(seconds: float) -> int:
    """Convert a time to microseconds; one that is too far away becomes the farthest there is."""
    if not _MIN_TIME_US < seconds * 1e6 < _MAX_TIME_US:
        return _MIN_TIME_US if seconds < 0 else _MAX_TIME_US
    return round(seconds * 1e6)


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
    finding: Finding
    """As it was reported last."""


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
    """One metric of one subject over time: one entry a step that has samples, or one a sample."""

    key: SeriesKey
    metric: str
    times: NDArray[np.float64]
    """When each step begins, or when each sample was taken."""
    values: NDArray[np.float64]
    """The statistic of each step; a mean is weighted by how many samples are known. Without steps NaN where a sample is
    unknown."""
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]
    """The extremes of each step; the values where a query does not need them."""
    ends: NDArray[np.float64]
    """When the last sample of each step was taken; NaN where that is unknown."""
    counts: NDArray[np.int64] | None = None
    """How many samples of each step are known; None without steps."""

    def only(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Series:
        """Return some of its entries."""
        return Series(
            self.key,
            self.metric,
            self.times[which],
            self.values[which],
            self.lows[which],
            self.highs[which],
            self.ends[which],
            None if self.counts is None else self.counts[which],
        )


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


class Store(Protocol):
    """Somewhere that has what nodes sent, or a part of it.

    What a store has nothing of is an empty answer, which a subclass need not write down.
    """

    def series(self, query: Query) -> list[Series]:
        """Return the metrics over time by subject; a series of which nothing is known is left out.

        With a step, there is one entry for each step in which something is known. Without one, every sample.
        """
        return []

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample, one stretch of time after the other, so that little is in memory at once."""
        return iter(())

    def gpu_time(self, query: Query) -> list[Share]:
        """Divide the time of GPUs among the processes that held them.

        Time is looked at in minutes. Within one, a process held a GPU for as many samples as it was seen there times the
        time between two of them, but never for longer than there are samples of that GPU; where a minute has only one, that
        time is the one between two samples of the GPU, and at least five seconds. A GPU is held for as long as any process
        holds it. Where several hold it at once, that time is divided by the shares in which they used its multiprocessors
        if these are known of all of them, and equally otherwise; so shares add up to the time held. A minute is idle when
        the mean utilization of the GPU in it is at most one percent.
        """
        return []

    def gpu_holders(self, query: Query) -> list[Holding]:
        """Return what processes held on which GPUs."""
        return []

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by their numbers."""
        return {}

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, by node and index."""
        return []

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return []

    def events(self, query: Query) -> list[StoredEvent]:
        """Return what happened, oldest first; of more than the limit the newest."""
        return []

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held at some time of the range, those that began first before the others.

        One that began earlier keeps its own start. Of more than the limit, those that held last. Without nodes also those
        of nodes that were expected and never reported.
        """
        return []

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that lived at some time of the range, those seen first before the others."""
        return []

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return what schedulers reported of the jobs that a word may mean, and of their ends; oldest first.

        The word may be an id with its scheduler or without, the name of an array's task, or that of the array. Of jobs that
        merely have it as their name, this is a hundred of the newest.
        """
        return []

    def job_names(self) -> list[str]:
        """Return the jobs that processes belong to, whenever they lived."""
        return []
