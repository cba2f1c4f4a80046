"""What a head can be asked and told: the one interface behind gRPC, HTTP and the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from gpulse.model.device import Device
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.metric import Scope
from gpulse.model.process import ProcessIdentity
from gpulse.model.xid import XidLedger
from gpulse.reports.document import Document
from gpulse.store.store import Statistic

if TYPE_CHECKING:  # clients need none of them
    from gpulse.reports.events import EventReport
    from gpulse.reports.findings import FindingReport
    from gpulse.reports.history import HistoryReport, QueryReport
    from gpulse.reports.job_report import JobReport
    from gpulse.reports.processes import ProcessReport
    from gpulse.reports.subject import JobKind
    from gpulse.reports.usage import Grouping, UsageReport

Format = Literal["json", "jsonl", "csv", "parquet"]
NodeState = Literal["healthy", "late", "lost"]


class LiveNode(NamedTuple):
    """A node as it was heard of last."""

    id: int
    name: str
    state: NodeState
    connected: bool
    seen: float
    """When the head last got something from it."""
    frame: Frame | None
    """The newest frame; its times are on the head's clock. None when nothing came since the head started."""
    processes: Mapping[int, ProcessIdentity]
    findings: Sequence[Finding | Mapping[str, Any]]
    labels: Mapping[str, str]
    version: str
    known: Sequence[Device] = ()
    """The GPUs that it had when it was heard of, for as long as there is no frame."""
    host: str = ""
    """What it calls itself, which may be the name of several machines."""
    machine: str = ""
    xids: XidLedger | None = None
    """The Xid errors of its GPUs by code, as far as this head was told."""
    elsewhere: bool = False
    """True when another head has it: what is known of it was read from the engine that both write to."""
    interval_seconds: float | None = None
    """From one frame to the next; None when it samples as often as the head says."""
    left: bool = False
    """True when its agent was ended in order."""

    @property
    def is_present(self) -> bool:
        """Whether its agent is connected, to this head or to another one, and was heard of lately."""
        return (self.connected or self.elsewhere) and self.state != "lost"

    @property
    def devices(self) -> Sequence[Device]:
        """Its GPUs."""
        return self.known if self.frame is None else [gpu.device for gpu in self.frame.gpus]


class Download(NamedTuple):
    """A file on its way to somebody."""

    name: str
    media_type: str
    pieces: AsyncIterator[bytes]


class HeadInterface(Protocol):
    """Everything that can be done with a head. What it refuses raises RefusedError."""

    def info(self) -> Document:
        """Who this is."""

    def status(self) -> Document:
        """How the head is, what it stores, who is connected."""

    def clients(self) -> Document:
        """The connected nodes and their GPUs."""

    def latest(self) -> Document:
        """The newest readings of every node that is not lost."""

    def sessions(self) -> Document:
        """All sessions."""

    async def session(self, name: str) -> Document:
        """One session, by its id or the newest of that name, and what is missing of its interruptions."""

    async def start_session(
        self,
        *,
        name: str | None,
        since_seconds: float | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        interval_ms: int | None = None,
    ) -> Document:
        """Begin a session, in the past when asked to."""

    async def stop_sessions(self, *, name: str | None = None, output_format: Format = "json") -> Document:
        """End one session, or all that are active, and write their files."""

    async def recover_session(self, *, name: str | None = None, session_id: str | None = None) -> Document:
        """Go on with a session that was interrupted."""

    async def export_session(self, *, name: str, output_format: Format = "json") -> Document:
        """Write a session's file again, where the head keeps such files."""

    def download(self, *, name: str, output_format: Format = "json") -> Download:
        """A session's file, piece by piece."""

    async def query(
        self,
        *,
        metric: str,
        scope: Scope = "gpu",
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        start: float | None = None,
        end: float | None = None,
        step: float | None = None,
        statistic: Statistic = "mean",
    ) -> QueryReport:
        """The history of one metric."""

    async def history(
        self,
        *,
        metrics: Sequence[str],
        scope: Scope = "gpu",
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        start: float | None = None,
        end: float | None = None,
        points: int = 600,
        spread: bool = False,
    ) -> HistoryReport:
        """Several metrics over time, all at the same moments."""

    async def processes(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        nodes: Sequence[str] = (),
        gpus: Sequence[str] = (),
        users: Sequence[str] = (),
        jobs: Sequence[str] = (),
    ) -> ProcessReport:
        """The processes that held GPUs, newest first."""

    async def usage(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        by: Grouping = "user",
        nodes: Sequence[str] = (),
        users: Sequence[str] = (),
    ) -> UsageReport:
        """Who held GPUs, for how long, and how much of that they did nothing."""

    async def job(
        self,
        *,
        job: str,
        kind: JobKind | None = None,
        node: str | None = None,
        start: float | None = None,
        end: float | None = None,
        points: int = 0,
    ) -> JobReport:
        """How well a job, a session or a process used its GPUs."""

    async def events(
        self,
        *,
        start: float | None = None,
        end: float | None = None,
        kinds: Sequence[str] = (),
        nodes: Sequence[str] = (),
    ) -> EventReport:
        """What happened."""

    def findings(self) -> Document:
        """What is wrong now, worst first."""

    async def finding_spans(
        self, *, start: float | None = None, end: float | None = None, nodes: Sequence[str] = ()
    ) -> FindingReport:
        """From when to when findings held, oldest first."""

    async def change_settings(
        self, *, interval_ms: int | None = None, bandwidth: bool | None = None, nvlink: bool | None = None
    ) -> Document:
        """Change how agents sample; they follow at once."""

    def live(self) -> list[LiveNode]:
        """Every node with its newest frame."""

    def one_by_one(self) -> Iterator[LiveNode]:
        """The same, each taken apart when it is reached: others may get their turn in between."""

    def missing(self) -> Sequence[str]:
        """Return the expected nodes that have never reported."""

    async def wait(self, after: int, timeout_seconds: float) -> int:
        """Wait until something new came than what was there at `after`; the number to give next time."""

    def shut_down(self) -> Document:
        """End the head, gently."""
