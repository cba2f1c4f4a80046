"""The store protocol: its query, its methods, and the records that it returns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from gpulse.errors import UsageError
from gpulse.model.finding import Finding, FindingSpan
from gpulse.model.metric_catalog import CATALOG, Scope
from gpulse.model.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Statistic = Literal["mean", "min", "max", "last"]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
ALL_TIME = -math.inf, math.inf
"""Start and end of a query without time limits."""
MIN_STEP_SECONDS, MAX_STEP_SECONDS = 1e-6, 1e10
_MIN_TIME_US, _MAX_TIME_US = -(1 << 62), 1 << 62


@dataclass(frozen=True, slots=True)
class Query:
    """One query to a store: built once from a request, and passed unchanged through all stores.

    Fields that do not apply to a method are ignored: events, for example, have no step.

    Raises:
        UsageError: The scope, metric or statistic does not exist, the step is out of range, or a time is not a number.
    """

    start: float
    """Epoch seconds, inclusive."""
    end: float
    """Epoch seconds, exclusive."""
    scope: Scope = "gpu"
    metrics: tuple[str, ...] = ()
    """Metric names from the catalog."""
    nodes: frozenset[int] | None = None
    """Only these nodes; None for all."""
    subjects: frozenset[str] | None = None
    """Only these subjects, named as in `SeriesKey.subject`; None for all."""
    gpus: frozenset[str] | None = None
    """For processes: only those on these GPUs, by UUID."""
    step: float | None = None
    """Step in seconds; steps start at multiples of it. None returns every sample."""
    statistic: Statistic = "mean"
    """The statistic of each step in `Series.values`."""
    spread: bool = True
    """Whether `Series.lows` and `Series.highs` are needed; queries over many subjects are faster without them."""
    kinds: frozenset[str] | None = None
    """For events: only these kinds."""
    pids: frozenset[int] | None = None
    """For processes: only these PIDs."""
    jobs: frozenset[str] | None = None
    """For processes: only those of these jobs."""
    limit: int | None = None
    """For events and findings: at most this many, the newest ones."""
    deadline: float | None = None
    """Monotonic seconds. A backend that takes longer is given up, and the answer is incomplete."""

    def __post_init__(self) -> None:
        """Reject names that are not in the catalog, so that no other text gets into a statement."""
        known = CATALOG.get(self.scope)
        if known is None:
            raise UsageError(f"unknown scope {self.scope[:40]!r}", hint=f"use one of: {', '.join(CATALOG)}")
        for metric in self.metrics:
            if metric not in known:
                raise UsageError(
                    f"unknown metric {metric[:80]!r} in scope {self.scope}",
                    hint="see docs/reference/metrics.md",
                )
        if self.statistic not in STATISTICS:
            raise UsageError(
                f"unknown statistic {self.statistic[:40]!r}", hint=f"use one of: {', '.join(STATISTICS)}"
            )
        if self.step is not None and not MIN_STEP_SECONDS <= self.step <= MAX_STEP_SECONDS:
            raise UsageError(
                f"the step must be between {MIN_STEP_SECONDS:g} and {MAX_STEP_SECONDS:g} seconds, not {self.step}"
            )
        if math.isnan(self.start) or math.isnan(self.end):
            raise UsageError("a time must be a number of seconds since 1970")

    @property
    def start_us(self) -> int:
        """The start in microseconds."""
        return to_microseconds(self.start)

    @property
    def end_us(self) -> int:
        """The end in microseconds."""
        return to_microseconds(self.end)

    @property
    def step_us(self) -> int | None:
        """The length of a step in microseconds."""
        return None if self.step is None else round(self.step * 1e6)


def to_microseconds(seconds: float) -> int:
    """Convert a time to microseconds, clipped to the supported range."""
    if not _MIN_TIME_US < seconds * 1e6 < _MAX_TIME_US:
        return _MIN_TIME_US if seconds < 0 else _MAX_TIME_US
    return round(seconds * 1e6)


class StoredNode(NamedTuple):
    """A node that has sent frames."""

    id: int
    """Numbered from 1 in the order of first contact."""
    name: str
    """Display name: the host name, with `#2` if another machine already has it."""
    host: str
    machine: str
    first_seen: float
    facts: Mapping[str, Any]
    """The fields of `model.device.Node` except its name."""
    labels: Mapping[str, str]


class StoredGpu(NamedTuple):
    """A GPU or MIG instance that the store has samples of."""

    node: int
    node_name: str
    uuid: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here
    label: str
    """`3`, or `3:1` for a MIG instance."""
    name: str
    """The model, such as `NVIDIA H200`."""
    device: Mapping[str, Any]
    """All fields of `model.device.Device`, from the newest layout."""

    @property
    def key(self) -> str:
        """The name in session files, such as `host:3:NVIDIA H200`."""
        return f"{self.node_name}:{self.label}:{self.name}"


class StoredEvent(NamedTuple):
    """Something that happened at a point in time."""

    time: float
    kind: str
    node: int | None
    detail: Mapping[str, Any]


class StoredFinding(NamedTuple):
    """A finding and the time during which it held."""

    node: int | None
    """None for an expected node that never reported."""
    span: FindingSpan
    finding: Finding
    """The finding as last reported."""


class StoredProcess(NamedTuple):
    """A process that used a GPU, or a descendant of such a process."""

    node: int
    pid: int
    start: float | None
    first_seen: float
    ended: float | None
    identity: Mapping[str, Any]
    """The fields of `model.process.ProcessIdentity`."""


class SeriesKey(NamedTuple):
    """The subject of a series: a GPU, a disk, a host, and so on."""

    node: int
    subject: str
    """A GPU's UUID, a disk or interface name, a mount point, a cgroup path, or `pid` or `pid@uuid` of a process; empty for
    a host."""


class Series(NamedTuple):
    """One metric of one subject over time, with one entry per step that has samples, or per sample."""

    key: SeriesKey
    metric: str
    times: NDArray[np.float64]
    """Start time of each step, or time of each sample."""
    values: NDArray[np.float64]
    """The statistic of each step; means are weighted by the number of known samples. Without steps, NaN where a value is
    unknown."""
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]
    """Minimum and maximum of each step; equal to the values if the query does not need them."""
    ends: NDArray[np.float64]
    """Time of the last sample of each step; NaN where unknown."""
    counts: NDArray[np.int64] | None = None
    """Number of known samples in each step; None without steps."""

    def only(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Series:
        """Return a series with only some of the entries."""
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
    """Samples of many subjects within a time range, as columns sorted by time."""

    keys: Sequence[SeriesKey]
    series: NDArray[np.int32]
    """The index in `keys` for each sample."""
    times: NDArray[np.float64]
    runs: NDArray[np.uint64]
    """The first eight bytes of the run ID, as a number."""
    sequences: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    """By metric; NaN where unknown."""


class GpuHolding(NamedTuple):
    """Use of one GPU by one process: when, memory, and SM utilization."""

    node: int
    pid: int
    start: float | None
    uuid: str
    first: float
    """When the process was first seen on the GPU."""
    last: float
    memory_mean: float | None
    memory_max: float | None
    sm_mean: float | None


class GpuShare(NamedTuple):
    """The share of a GPU's time that one process had, and the GPU's activity during it."""

    node: int
    pid: int | None
    """None for time in which no process used the GPU; then only `seen_seconds` is set."""
    start: float | None
    uuid: str
    first: float | None
    """When the process was first seen on the GPU."""
    last: float | None
    seconds: float
    known_seconds: float
    """Time for which the GPU's utilization is known."""
    busy_seconds: float
    """That time multiplied by the utilization."""
    idle_seconds: float
    """Time in which the GPU was idle."""
    energy_joules: float | None
    memory_max: float | None
    seen_seconds: float
    """Its part of the time for which the GPU has samples; the parts of all processes add up to that time."""


class Store(Protocol):
    """A source of the data that nodes sent, or of a part of it.

    The default of every method is an empty answer, so that a subclass implements only the data that it has.
    """

    def series(self, query: Query) -> list[Series]:
        """Return metrics over time, one series per subject and metric; series without known values are omitted.

        With a step, there is one entry for each step that has known samples. Without a step, there is one per sample.
        """
        return []

    def scan(self, query: Query) -> Iterator[Samples]:
        """Yield every sample, one time range after the other, to limit memory use."""
        return iter(())

    def gpu_time(self, query: Query) -> list[GpuShare]:
        """Divide the time of GPUs among the processes that used them.

        The calculation is done per minute. Within a minute, a process used a GPU for the number of samples in which it was
        seen there, multiplied by the sampling interval, but never for longer than the GPU has samples. If the process has
        only one sample in a minute, the interval is that of the GPU's samples, and at least five seconds. A GPU is in use
        while any process uses it. When several processes use it at once, the time is divided in proportion to their SM
        utilization if it is known for all of them, and equally otherwise, so that the shares add up to the time in use. A
        minute is idle if the GPU's mean utilization in it is at most one percent.
        """
        return []

    def gpu_holders(self, query: Query) -> list[GpuHolding]:
        """Return which processes used which GPUs, and how."""
        return []

    def nodes(self) -> dict[int, StoredNode]:
        """Return all nodes, by number."""
        return {}

    def gpus(self) -> list[StoredGpu]:
        """Return all GPUs, ordered by node and index."""
        return []

    def sessions(self) -> list[Session]:
        """Return all sessions, oldest first."""
        return []

    def events(self, query: Query) -> list[StoredEvent]:
        """Return events, oldest first; if there are more than the limit, the newest ones."""
        return []

    def findings(self, query: Query) -> list[StoredFinding]:
        """Return the findings that held at any time within the range, ordered by start.

        A finding that started before the range keeps its start. If there are more than the limit, those that held last are
        returned. Without a choice of nodes, findings about expected nodes that never reported are included.
        """
        return []

    def processes(self, query: Query) -> list[StoredProcess]:
        """Return the processes that ran at any time within the range, ordered by when they were first seen."""
        return []

    def job_events(self, word: str) -> list[StoredEvent]:
        """Return the scheduler events, oldest first, of all jobs that a word may refer to: starts and ends.

        The word may be a job ID with or without its scheduler, an array task, an array, or a job name. For a job name, only
        the newest hundred jobs are included.
        """
        return []

    def job_names(self) -> list[str]:
        """Return the jobs of all processes that were ever seen."""
        return []
