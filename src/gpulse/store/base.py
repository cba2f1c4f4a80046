"""What a store can be asked: nodes and GPUs, samples over time, events. Every home for data answers the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gpulse.model.metric import Scope
from gpulse.model.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Statistic = Literal["mean", "min", "max", "last"]


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
    ) -> list[StoredEvent]:
        """What happened in `[start, end)`, oldest first."""

    def processes(
        self, *, start: float, end: float, nodes: Collection[int] | None = None
    ) -> list[StoredProcess]:
        """The processes that lived in `[start, end)`."""
