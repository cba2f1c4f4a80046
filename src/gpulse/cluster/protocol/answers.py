"""Answers of a head. Unknown values are null; a field whose type has `UnsetType` is left out where it does not apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gpulse.model.finding import Family, Severity
from gpulse.model.metric import Value
from gpulse.model.session import State

NodeState = Literal["healthy", "late", "lost"]


class Answer(Struct, frozen=True):
    """An answer."""


class Error(Answer, frozen=True, kw_only=True):
    """Why a request was not carried out, and what to do about it."""

    error: str
    hint: str | None = None
    detail: str = ""
    """The same as `error`, under the name that clients of other programs read."""


class Info(Answer, frozen=True, kw_only=True):
    """What serves here."""

    message: str
    name: str
    version: str
    api: str
    endpoints: Sequence[str]


class ExportState(Answer, frozen=True, kw_only=True):
    """How far the file of a session is."""

    state: Literal["none", "writing", "done", "failed"]
    path: str | None = None
    error: str | None = None


class MissingFrames(Answer, frozen=True, kw_only=True):
    """For how long the frames of a node are missing."""

    node: str
    seconds: float


class SessionInterruption(Answer, frozen=True, kw_only=True):
    """A time in which the head was not there to keep a session."""

    start_time: str
    end_time: str | None
    missing: Sequence[MissingFrames] | UnsetType = UNSET
    """By node what is missing, where that was looked up."""
    pending: Sequence[str] | UnsetType = UNSET
    """Nodes that may still send what they have."""


class SessionAnswer(Answer, frozen=True, kw_only=True):
    """A session."""

    name: str
    session_id: str
    is_active: bool
    state: State
    recoverable: bool
    start_time: str
    end_time: str | None
    frame_count: int
    interval_ms: int
    output_file: str | None
    labels: Mapping[str, str]
    nodes: Sequence[str]
    gpus: Sequence[str]
    enable_bandwidth_profiling: bool
    enable_nvlink_profiling: bool
    interruptions: Sequence[SessionInterruption]
    export: ExportState | UnsetType = UNSET


class Sessions(Answer, frozen=True, kw_only=True):
    """All sessions, oldest first."""

    total_sessions: int
    active_sessions: int
    sessions: Sequence[SessionAnswer]


class OneSession(Answer, frozen=True, kw_only=True):
    """A session that was started or goes on."""

    success: bool
    message: str
    output_file: str | None
    session: SessionAnswer


class SeveralSessions(Answer, frozen=True, kw_only=True):
    """Sessions that were stopped or written."""

    success: bool
    message: str
    output_file: str | None
    sessions: Sequence[SessionAnswer]


class Gpu(Answer, frozen=True, kw_only=True):
    """A GPU of a node."""

    id: str
    name: str
    physical_idx: int
    uuid: str


class Client(Answer, frozen=True, kw_only=True):
    """A connected node and its GPUs."""

    client_id: str
    hostname: str
    gpu_count: int
    gpus: Sequence[Gpu]
    state: NodeState
    connected: bool
    elsewhere: bool
    last_seen: str
    silent_seconds: float
    version: str
    labels: Mapping[str, str]


class Clients(Answer, frozen=True, kw_only=True):
    """The connected nodes."""

    total_clients: int
    clients: Sequence[Client]


class GpuValues(Answer, frozen=True, kw_only=True):
    """The newest readings of a GPU."""

    gpu_id: str
    physical_idx: int
    name: str
    gpu_util: float | None
    """Percent."""
    gpu_memory: float | None
    """Percent."""
    dram_bandwidth: float | UnsetType | None = UNSET
    """PCIe traffic in GB/s, while sessions hold it."""
    dram_bandwidth_rx: float | UnsetType | None = UNSET
    dram_bandwidth_tx: float | UnsetType | None = UNSET
    gpu_bandwidth: float | UnsetType | None = UNSET
    """NVLink traffic in GB/s, while sessions hold it."""
    values: Mapping[str, Value]
    """All readings under their catalogue names."""


class NodeValues(Answer, frozen=True, kw_only=True):
    """The newest readings of a node."""

    hostname: str
    state: NodeState
    time: str
    age_seconds: float
    gpus: Sequence[GpuValues]
    host: Mapping[str, Value] | None


class Latest(Answer, frozen=True, kw_only=True):
    """The newest readings of all nodes, by name."""

    timestamp: str
    client_data: Mapping[str, NodeValues]


class FindingEvidence(Answer, frozen=True, kw_only=True):
    """One number against its threshold."""

    signal: str
    statistic: str
    value: float | None
    comparison: str
    threshold: float | None


class FindingAdvice(Answer, frozen=True, kw_only=True):
    """One thing to do, why, and a cheap way to see whether it was right."""

    do: str
    why: str
    confirm: str


class NodeFinding(Answer, frozen=True, kw_only=True):
    """A finding that holds now, and the node that it is about."""

    node: str | None
    id: str
    family: Family | None
    severity: Severity
    confidence: float | None
    summary: str
    gpu: int | None
    label: str | None
    pids: Sequence[int]
    lost_ratio: float | None
    start: float | None
    end: float | None
    evidence: Sequence[FindingEvidence]
    counter_evidence: Sequence[FindingEvidence]
    ruled_out: Sequence[str]
    advice: Sequence[FindingAdvice]
    url: str | None
    cause: str | None


class Findings(Answer, frozen=True, kw_only=True):
    """What is wrong now, worst first."""

    time: str
    findings: Sequence[NodeFinding]


class NodeStatus(Answer, frozen=True, kw_only=True):
    """How a node is."""

    name: str
    gpu_count: int | None
    gpu_models: Mapping[str, int]
    state: NodeState
    connected: bool
    elsewhere: bool
    last_seen: str
    silent_seconds: float
    version: str
    labels: Mapping[str, str]


class Storage(Answer, frozen=True, kw_only=True):
    """How the head's own disk is, and what it takes of it."""

    state: Literal["ok", "failing"]
    error: str | None
    hint: str | None
    since: float | None
    directory: str
    waiting_bytes: int
    commit_seconds: float | None
    log_bytes: int
    history_bytes: int
    book_bytes: int
    free_bytes: int
    unsealed_bytes: int
    is_behind: bool


class RemoteWrite(Answer, frozen=True, kw_only=True):
    """How sending samples to the time-series database stands."""

    state: Literal["ok", "behind", "failing", "refused"]
    url: str
    error: str | None
    hint: str | None
    since: float | None
    waiting_bytes: int
    waiting_seconds: float
    samples_total: int
    refused_total: int
    lost_total: int
    resent_total: int


class RemoteQuery(Answer, frozen=True, kw_only=True):
    """Whether the time-series database answers queries."""

    url: str
    state: Literal["ok", "failing"]
    error: str | None
    hint: str | None
    since: float | None


class OtherHead(Answer, frozen=True, kw_only=True):
    """Another head of the shared database."""

    id: str
    host: str
    alive: bool
    newest: float | None
    """When it last received frames, in epoch seconds."""


class SharedDatabaseStatus(Answer, frozen=True, kw_only=True):
    """How sharing metadata with other heads in PostgreSQL stands."""

    state: Literal["ok", "failing"]
    database: str
    """Host, port and name, without a password."""
    error: str | None
    hint: str | None
    since: float | None
    waiting_records: int
    """Records of the log that PostgreSQL does not have yet."""
    heads: Sequence[OtherHead]
    """The other heads."""


class BackendStatus(Answer, frozen=True, kw_only=True):
    """How the databases are that a head uses besides its own disk; those that it does not use are left out."""

    remote: RemoteWrite | UnsetType = UNSET
    remote_query: RemoteQuery | UnsetType = UNSET
    database: SharedDatabaseStatus | UnsetType = UNSET


class Status(BackendStatus, frozen=True, kw_only=True):
    """How the head is, what it stores, who is connected."""

    freq: int
    """Milliseconds between two frames."""
    enable_bandwidth_profiling: bool
    enable_nvlink_profiling: bool
    is_profiling: bool
    output_filename: str
    frame_id_counter: int
    connected_clients: Sequence[str]
    total_gpus: int
    gpu_info: Mapping[str, Sequence[Gpu]]
    active_sessions: Sequence[SessionAnswer]
    recoverable_sessions: Sequence[str]
    version: str
    time: str
    uptime_seconds: float
    frames_received: int
    nodes: Sequence[NodeStatus]
    missing_nodes: Sequence[str]
    findings: Sequence[NodeFinding]
    storage: Storage


class AgentSettings(Answer, frozen=True, kw_only=True):
    """How agents sample."""

    interval_ms: int
    bandwidth: bool
    nvlink: bool


class SettingsChanged(Answer, frozen=True, kw_only=True):
    """How agents sample from now on."""

    success: bool
    settings: AgentSettings


class Done(Answer, frozen=True, kw_only=True):
    """That something was done."""

    success: bool
    message: str
