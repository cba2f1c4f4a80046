"""Interface of a head, which gRPC, HTTP and the commands call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpulse.cluster.protocol import answers as a
from gpulse.cluster.protocol import requests as r
from gpulse.cluster.protocol.answers import NodeState
from gpulse.model.device import Device, Node
from gpulse.model.finding import Finding
from gpulse.model.frame import Frame
from gpulse.model.process import ProcessIdentity
from gpulse.model.xid import XidCounts
from gpulse.reports.event_report import EventReport
from gpulse.reports.finding_report import FindingGroups, FindingReport
from gpulse.reports.job_report import JobReport
from gpulse.reports.metric_history import HistoryReport, QueryReport
from gpulse.reports.process_report import ProcessReport
from gpulse.reports.run_comparison import RunComparison
from gpulse.reports.usage_report import UsageReport


class LiveNode(NamedTuple):
    """Current state of a node."""

    id: int
    name: str
    state: NodeState
    connected: bool
    seen: float
    """When the head last received something from it."""
    frame: Frame | None
    """The newest frame, with times on the head's clock; None if none arrived since the head started."""
    processes: Mapping[int, ProcessIdentity]
    findings: Sequence[Finding]
    labels: Mapping[str, str]
    version: str
    last_devices: Sequence[Device] = ()
    """Its GPUs according to the metadata, used while there is no frame."""
    host: str = ""
    """Its host name, which several machines may share."""
    machine: str = ""
    xids: XidCounts | None = None
    """The Xid errors of its GPUs that were reported to this head, by code."""
    at_other_head: bool = False
    """Whether it is connected to another head; its data was read from a database that both heads write to."""
    interval_seconds: float | None = None
    """The agent's own sampling interval; None if it uses the head's."""
    was_stopped: bool = False
    """Whether its agent was stopped normally."""
    node: Node | None = None
    """The constant facts about it, also while there is no frame."""

    @property
    def is_present(self) -> bool:
        """Whether its agent is connected, to this head or another one, and not silent."""
        return (self.connected or self.at_other_head) and self.state != "lost"

    @property
    def devices(self) -> Sequence[Device]:
        """Its GPUs."""
        return self.last_devices if self.frame is None else [gpu.device for gpu in self.frame.gpus]


class Download(NamedTuple):
    """A file that is sent in pieces."""

    name: str
    media_type: str
    pieces: AsyncIterator[bytes]


class Reports(Protocol):
    """Reports of a head from its stored data; `now` is the default end of the time range."""

    async def query(self, request: r.QueryMetric, now: float, /) -> QueryReport:
        """Return the history of one metric."""

    async def history(self, request: r.GetHistory, now: float, /) -> HistoryReport:
        """Return several metrics over time, all at the same times."""

    async def processes(self, request: r.GetProcesses, now: float, /) -> ProcessReport:
        """Return the processes that held GPUs, newest first."""

    async def usage(self, request: r.GetUsage, now: float, /) -> UsageReport:
        """Return who held GPUs, for how long, and how long these GPUs were idle."""

    async def job(self, request: r.GetJob, now: float, /) -> JobReport:
        """Return how well a job, a session or a process used its GPUs."""

    async def compare_sessions(self, request: r.CompareSessions, now: float, /) -> RunComparison:
        """Compare two sessions: what changed, and whether it became better."""

    async def events(self, request: r.GetEvents, now: float, /) -> EventReport:
        """Return the events of a time range, oldest first."""

    async def finding_spans(self, request: r.GetFindingSpans, now: float, /) -> FindingReport:
        """Return the findings of a time range with their start and end, oldest first."""


class FindingOperations(Protocol):
    """Groups of findings, and what people do about them; refused operations raise RefusedError."""

    async def groups(self, request: r.GetFindingGroups, /) -> FindingGroups:
        """Return findings grouped by cause, current or past."""

    async def acknowledge(self, request: r.AcknowledgeFindings, /) -> a.AcknowledgedFindings:
        """Acknowledge findings that hold now."""

    def silences(self) -> a.Silences:
        """Return the silences that are in force."""

    async def silence(self, request: r.SilenceFindings, /) -> a.SilenceAnswer:
        """Silence findings until a time."""

    async def end_silence(self, request: r.EndSilence, /) -> a.SilenceAnswer:
        """End a silence before its time."""


class HeadInterface(Protocol):
    """All operations of a head; refused ones raise RefusedError."""

    @property
    def finding_operations(self) -> FindingOperations:
        """Groups of findings, acknowledgements and silences."""

    @property
    def reports(self) -> Reports:
        """Reports from the stored data."""

    def now(self) -> float:
        """Return the time of the head's clock, in epoch seconds."""

    def info(self) -> a.Info:
        """Return the name and version of this server."""

    def status(self) -> a.Status:
        """Return the status of the head, its storage and its nodes."""

    def clients(self) -> a.Clients:
        """Return the connected nodes and their GPUs."""

    def latest(self) -> a.Latest:
        """Return the newest readings of every node that is not lost."""

    def hardware(self, request: r.GetHardware) -> a.NodeHardware:
        """Return the hardware of a node: its GPUs and how they are connected."""

    async def gpus(self) -> a.ClusterOccupancy:
        """Return what every GPU does now, and who holds it."""

    def sessions(self) -> a.Sessions:
        """Return all sessions."""

    async def session(self, request: r.GetSession) -> a.SessionAnswer:
        """Return a session by its ID, or the newest one with a name, with the missing frames of its interruptions."""

    async def start_session(self, request: r.StartSession) -> a.OneSession:
        """Start a session, optionally with a start in the past."""

    async def stop_sessions(self, request: r.StopSessions) -> a.SeveralSessions:
        """Stop one session or all active ones, and write their files."""

    async def recover_session(self, request: r.RecoverSession) -> a.OneSession:
        """Continue an interrupted session."""

    async def export_session(self, request: r.GetSessionFile) -> a.SeveralSessions:
        """Write a session's file again, in the head's output directory."""

    def download(self, request: r.GetSessionFile, *, with_code: bool = True) -> Download:
        """Return a session's file in pieces, with or without the lines of code of its findings."""

    def findings(self) -> a.Findings:
        """Return the current findings, worst first."""

    async def fleet_trends(self) -> a.FleetTrends:
        """Return the utilization of every GPU in the last 15 minutes."""

    def fleet_totals(self) -> a.FleetTotals:
        """Return the totals of all GPUs, now and over the last 24 hours."""

    async def read_stacks(self, request: r.ReadStacks) -> a.Stacks:
        """Let agents read the stacks of processes, and return them, equal ones together."""

    async def change_settings(self, request: r.ChangeSettings) -> a.SettingsChanged:
        """Change the sampling settings; agents apply them at once."""

    def live(self) -> list[LiveNode]:
        """Return every node with its newest frame."""

    def iter_live_nodes(self) -> Iterator[LiveNode]:
        """Yield every node, each decoded when it is reached, so that other tasks can run in between."""

    def missing(self) -> Sequence[str]:
        """Return the expected nodes that have never reported."""

    async def wait(self, after: int, timeout_seconds: float) -> int:
        """Wait until the data version differs from `after`; return the current version."""

    def shut_down(self) -> a.Done:
        """Stop the head."""
