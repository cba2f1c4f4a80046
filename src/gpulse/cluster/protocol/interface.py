"""The interface of a head behind gRPC, HTTP and the commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.answers import NodeState
from gpulse.model.device import Device
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessIdentity
from gpulse.model.xid import XidLedger
from gpulse.reports.events import EventReport
from gpulse.reports.findings import FindingReport
from gpulse.reports.history import HistoryReport, QueryReport
from gpulse.reports.job_report import JobReport
from gpulse.reports.processes import ProcessReport
from gpulse.reports.usage import UsageReport


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
    findings: Sequence[Finding]
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


class Reports(Protocol):
    """Reports of a head about what it has stored; `now` is the end where a request does not name one."""

    async def query(self, request: r.QueryMetric, now: float, /) -> QueryReport:
        """The history of one metric."""

    async def history(self, request: r.GetHistory, now: float, /) -> HistoryReport:
        """Several metrics over time, all at the same times."""

    async def processes(self, request: r.GetProcesses, now: float, /) -> ProcessReport:
        """The processes that held GPUs, newest first."""

    async def usage(self, request: r.GetUsage, now: float, /) -> UsageReport:
        """Who held GPUs, for how long, and how long those were idle."""

    async def job(self, request: r.GetJob, now: float, /) -> JobReport:
        """How well a job, a session or a process used its GPUs."""

    async def events(self, request: r.GetEvents, now: float, /) -> EventReport:
        """What happened, oldest first."""

    async def finding_spans(self, request: r.GetFindingSpans, now: float, /) -> FindingReport:
        """From when to when findings held, oldest first."""


class HeadInterface(Protocol):
    """Everything that can be done with a head. What it refuses raises RefusedError."""

    @property
    def reports(self) -> Reports:
        """Reports about what is stored."""

    def now(self) -> float:
        """Return the time of the head's clock, in epoch seconds."""

    def info(self) -> a.Info:
        """What serves here."""

    def status(self) -> a.Status:
        """How the head is, what it stores, who is connected."""

    def clients(self) -> a.Clients:
        """The connected nodes and their GPUs."""

    def latest(self) -> a.Latest:
        """The newest readings of every node that is not lost."""

    def sessions(self) -> a.Sessions:
        """All sessions."""

    async def session(self, request: r.GetSession) -> a.SessionAnswer:
        """One session, by its id or the newest of that name, and what is missing of its interruptions."""

    async def start_session(self, request: r.StartSession) -> a.OneSession:
        """Start a session, in the past when asked to."""

    async def stop_sessions(self, request: r.StopSessions) -> a.SeveralSessions:
        """Stop one session, or all that are active, and write their files."""

    async def recover_session(self, request: r.RecoverSession) -> a.OneSession:
        """Go on with a session that was interrupted."""

    async def export_session(self, request: r.GetSessionFile) -> a.SeveralSessions:
        """Write a session's file again, where the head keeps such files."""

    def download(self, request: r.GetSessionFile) -> Download:
        """A session's file, piece by piece."""

    def findings(self) -> a.Findings:
        """What is wrong now, worst first."""

    async def change_settings(self, request: r.ChangeSettings) -> a.SettingsChanged:
        """Change how agents sample; they follow at once."""

    def live(self) -> list[LiveNode]:
        """Every node with its newest frame."""

    def one_by_one(self) -> Iterator[LiveNode]:
        """The same, each taken apart when it is reached: others may get their turn in between."""

    def missing(self) -> Sequence[str]:
        """Return the expected nodes that have never reported."""

    async def wait(self, after: int, timeout_seconds: float) -> int:
        """Wait until something new came than what was there at `after`; the number to give next time."""

    def shut_down(self) -> a.Done:
        """Stop the head."""
