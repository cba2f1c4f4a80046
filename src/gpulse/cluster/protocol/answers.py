"""Answers of a head. Unknown values are null; fields whose type includes `UnsetType` are omitted if they do not apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gpulse.model.device import PcieLevel
from gpulse.model.finding import CodeRole, Family, FindingCategory, Severity
from gpulse.model.gpu_state import GpuState
from gpulse.model.metric_catalog import Value
from gpulse.model.python_stack import StackProblemCode
from gpulse.model.session import SessionState

NodeState = Literal["healthy", "late", "lost"]


class Answer(Struct, frozen=True):
    """Base class of all answers."""


class Error(Answer, frozen=True, kw_only=True):
    """Why a request was not carried out, and what to do about it."""

    error: str
    hint: str | None = None
    detail: str = ""
    """Same text as `error`, for clients that read the field `detail`."""


class Info(Answer, frozen=True, kw_only=True):
    """Name and version of the server, and its endpoints."""

    message: str
    name: str
    version: str
    api: str
    endpoints: Sequence[str]


class ExportState(Answer, frozen=True, kw_only=True):
    """State of writing a session's file."""

    state: Literal["none", "writing", "done", "failed"]
    path: str | None = None
    error: str | None = None


class MissingFrames(Answer, frozen=True, kw_only=True):
    """How many seconds of a node's frames are missing."""

    node: str
    seconds: float


class SessionInterruption(Answer, frozen=True, kw_only=True):
    """A time in which no head recorded a session."""

    start_time: str
    end_time: str | None
    missing: Sequence[MissingFrames] | UnsetType = UNSET
    """Missing frames by node; omitted if not looked up."""
    pending: Sequence[str] | UnsetType = UNSET
    """Nodes that may still send missing frames."""


class SessionAnswer(Answer, frozen=True, kw_only=True):
    """A session."""

    name: str
    session_id: str
    is_active: bool
    state: SessionState
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
    """A session that was started or recovered."""

    success: bool
    message: str
    output_file: str | None
    session: SessionAnswer


class SeveralSessions(Answer, frozen=True, kw_only=True):
    """Sessions that were stopped or exported."""

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
    at_other_head: bool
    last_seen: str
    silent_seconds: float
    version: str
    labels: Mapping[str, str]


class Clients(Answer, frozen=True, kw_only=True):
    """The connected nodes."""

    total_clients: int
    clients: Sequence[Client]


class GpuHardware(Answer, frozen=True, kw_only=True):
    """Identity of a GPU or a MIG instance, as its agent last reported it."""

    id: str
    """Its label: the index, or `3:1` for a MIG instance."""
    uuid: str
    name: str
    bus_id: str | None
    serial: str | None
    vbios: str | None
    board_part_number: str | None
    architecture: str | None
    compute_capability: str | None
    numa_node: int | None
    cpu_affinity: str | None
    """The CPUs nearest to it, such as `0-31,64-95`."""
    switch_links: int | None
    """Number of its NVLinks that lead to an NVSwitch."""
    facts: Mapping[str, Value]
    """Constant metrics by their names in the metric catalog."""


class HardwarePath(Answer, frozen=True, kw_only=True):
    """How two devices of a node are connected."""

    between: Sequence[str]
    """UUIDs of two GPUs, or the UUID of a GPU and the name of a network adapter."""
    pcie: PcieLevel | None
    """What the path over PCIe crosses, as in `nvidia-smi topo -m`."""
    nvlinks: int | None
    """Number of NVLinks, direct or through switches; null if unknown."""
    switched: bool
    """Whether the NVLinks lead through NVSwitches."""


class NodeHardware(Answer, frozen=True, kw_only=True):
    """Hardware of a node, as its agent last reported it; also of a node that is lost."""

    name: str
    driver: str | None
    cuda: str | None
    """Newest CUDA version that the driver supports."""
    kernel: str | None
    cpu_model: str | None
    numa_cpus: Sequence[str]
    """The CPUs of each NUMA node; empty if unknown."""
    gpus: Sequence[GpuHardware]
    adapters: Sequence[str]
    """Network adapters on its PCIe buses."""
    paths: Sequence[HardwarePath]


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
    """PCIe traffic in GB/s; only while sessions record it."""
    dram_bandwidth_rx: float | UnsetType | None = UNSET
    dram_bandwidth_tx: float | UnsetType | None = UNSET
    gpu_bandwidth: float | UnsetType | None = UNSET
    """NVLink traffic in GB/s; only while sessions record it."""
    values: Mapping[str, Value]
    """All readings by their names in the metric catalog."""


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


class GpuHolderAnswer(Answer, frozen=True, kw_only=True):
    """A process on a GPU."""

    pid: int
    user: str | None
    job: str | None
    """The scheduler's job, such as `slurm:4711`, or the harvest's, such as `harvest:fold`."""
    name: str | None
    """The program, such as `python3`."""
    command: str | None
    """Its command line, shortened; null when it is hidden."""
    gpu_memory_bytes: int | None
    start_time: float | None
    """Epoch seconds."""


class GpuOccupancy(Answer, frozen=True, kw_only=True):
    """What one GPU, or one MIG instance, does now, and who holds it."""

    label: str
    """`3`, or `3:1` for a MIG instance."""
    uuid: str
    name: str
    state: GpuState
    """idle: held by a process that has computed nothing for 30 s. harvested: used by a program that gives way at once."""
    utilization_ratio: Value | None
    memory_used_bytes: Value | None
    memory_total_bytes: Value | None
    power_watts: Value | None
    temperature_celsius: Value | None
    users: Sequence[str]
    """Without those of a harvest."""
    holders: Sequence[GpuHolderAnswer] | None
    """Its processes, largest memory first; null when they could not be listed."""


class NodeOccupancy(Answer, frozen=True, kw_only=True):
    """The GPUs of one node."""

    node: str
    state: NodeState
    connected: bool
    """Whether its agent is connected, to this head or another one."""
    seen: float
    """When a head last received something from it, in epoch seconds."""
    time: float | None
    """Time of the readings, in epoch seconds; null if none arrived since the head started."""
    gpus: Sequence[GpuOccupancy]


class ClusterOccupancy(Answer, frozen=True, kw_only=True):
    """What every GPU of the cluster does now, and who holds it."""

    time: float
    """Epoch seconds on the head's clock."""
    counts: Mapping[GpuState, int]
    """Number of GPUs in each state; states without a GPU are 0."""
    nodes: Sequence[NodeOccupancy]
    missing_nodes: Sequence[str]
    """Expected nodes that have never reported."""


class FindingEvidence(Answer, frozen=True, kw_only=True):
    """A measured value and the threshold it is compared with."""

    signal: str
    statistic: str
    value: float | None
    comparison: str
    threshold: float | None


class FindingAdvice(Answer, frozen=True, kw_only=True):
    """One recommended action, the reason for it, and a cheap way to check whether it helps."""

    do: str
    why: str
    confirm: str


class FindingLocation(Answer, frozen=True, kw_only=True):
    """A line of code that held a GPU up, and its share of the stacks that were taken while the GPU was idle."""

    pid: int
    role: CodeRole
    """`main` for a process on the GPU, `worker` for one that prepares data for it."""
    file: str
    line: int
    function: str
    share: float
    stacks: int
    """Number of stacks that the share refers to."""
    doing: str | None
    """The innermost call, where it is not this line itself."""


class NodeFinding(Answer, frozen=True, kw_only=True):
    """A current finding and its node."""

    key: str
    """Stays the same while the finding holds, over restarts of agents and heads."""
    node: str | None
    id: str
    category: FindingCategory
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
    inferred: bool
    """Whether it rests on estimates, because the GPU does not measure what it is about."""
    users: Sequence[str]
    jobs: Sequence[str]
    acknowledged: bool
    silenced: bool
    where: Sequence[FindingLocation] | UnsetType = UNSET
    """Lines of code, the most frequent first; empty if no line stands out; omitted if no stacks were taken, and for
    callers who may only read."""
    where_note: str | UnsetType = UNSET
    """Why there is no line; omitted like `where`."""


class AcknowledgedFindings(Answer, frozen=True, kw_only=True):
    """Findings that were acknowledged."""

    success: bool
    message: str
    keys: Sequence[str]


class SilenceAnswer(Answer, frozen=True, kw_only=True):
    """A silence: what it is about, until when, and why."""

    id: str
    start: float
    until: float
    reason: str
    by: str
    findings: Sequence[str]
    nodes: Sequence[str]
    gpus: Sequence[str]
    users: Sequence[str]
    jobs: Sequence[str]
    matches: int
    """Number of findings that it silences now."""


class Silences(Answer, frozen=True, kw_only=True):
    """The silences that are in force, those that end first first."""

    time: float
    silences: Sequence[SilenceAnswer]


class Findings(Answer, frozen=True, kw_only=True):
    """Current findings: faults first, then slowness and waste, each by severity and lost time."""

    time: str
    findings: Sequence[NodeFinding]


class NodeStatus(Answer, frozen=True, kw_only=True):
    """Status of a node."""

    name: str
    gpu_count: int | None
    gpu_models: Mapping[str, int]
    state: NodeState
    connected: bool
    at_other_head: bool
    last_seen: str
    silent_seconds: float
    version: str
    labels: Mapping[str, str]


class Storage(Answer, frozen=True, kw_only=True):
    """Status and size of the head's own storage."""

    state: Literal["ok", "failing"]
    error: str | None
    hint: str | None
    since: float | None
    directory: str
    waiting_bytes: int
    commit_seconds: float | None
    log_bytes: int
    history_bytes: int
    metadata_bytes: int
    free_bytes: int
    unsealed_bytes: int
    is_behind: bool
    damaged_files: int = 0
    damage: list[str] = []


class RemoteWrite(Answer, frozen=True, kw_only=True):
    """Status of sending samples to the time-series database."""

    state: Literal["ok", "behind", "failing", "refused"]
    url: str
    error: str | None
    hint: str | None
    since: float | None
    waiting_bytes: int
    waiting_records: int | None = None
    waiting_seconds: float
    samples_total: int
    refused_total: int
    lost_total: int
    resent_total: int


class RemoteQuery(Answer, frozen=True, kw_only=True):
    """Status of queries to the time-series database."""

    url: str
    state: Literal["ok", "failing"]
    error: str | None
    hint: str | None
    since: float | None


class OtherHead(Answer, frozen=True, kw_only=True):
    """Another head that uses the shared database."""

    id: str
    host: str
    alive: bool
    newest: float | None
    """When it last received frames, in epoch seconds."""


class SharedDatabaseStatus(Answer, frozen=True, kw_only=True):
    """Status of sharing metadata with other heads through PostgreSQL."""

    state: Literal["ok", "failing"]
    database: str
    """Host, port and name, without a password."""
    error: str | None
    hint: str | None
    since: float | None
    waiting_records: int | None = None
    """Log records that are not in PostgreSQL yet."""
    heads: Sequence[OtherHead]
    """The other heads."""


class BackendStatus(Answer, frozen=True, kw_only=True):
    """Status of the databases that a head uses besides its own disk; unused ones are omitted."""

    remote: RemoteWrite | UnsetType = UNSET
    remote_query: RemoteQuery | UnsetType = UNSET
    database: SharedDatabaseStatus | UnsetType = UNSET


class NotificationTarget(Answer, frozen=True, kw_only=True):
    """Status of notifications to one target."""

    name: str
    kind: str
    """Kind of its URL, such as `mailto`; the rest of the URL is secret."""
    state: Literal["ok", "failing"]
    error: str | None
    """Why the last attempt failed."""
    since: float | None
    """Since when attempts fail, in epoch seconds."""
    waiting: int
    """Changes and messages that are not delivered yet."""
    sent_total: int
    failed_total: int
    """Attempts that failed."""
    given_up_total: int
    """Messages that were never delivered."""


class Status(BackendStatus, frozen=True, kw_only=True):
    """Status of the head, its storage, its nodes and its sessions."""

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
    free_gpus: Mapping[str, Sequence[str]] | UnsetType = UNSET
    """Labels of the free GPUs by node, without harvested ones; omitted by older heads."""
    notifications: Sequence[NotificationTarget] | UnsetType = UNSET
    """Omitted for a head without notifications."""


class FleetTrends(Answer, frozen=True, kw_only=True):
    """Utilization of every GPU in the last 15 minutes."""

    start: float
    """Start of the first step, in epoch seconds; the last step is not over yet."""
    step_seconds: float
    metric: str
    """Name of the metric; for a GPU that does not report it, such as a MIG instance, the values are `sm_active_ratio`."""
    gpus: Mapping[str, Mapping[str, Sequence[float | None]]]
    """Mean of each step by node and GPU, rounded to hundredths; null where it is unknown."""


class FleetNow(Answer, frozen=True, kw_only=True):
    """How many GPUs are in which state now, and the GPU-hours of today. A MIG instance counts as a GPU."""

    gpus: int
    """All GPUs; those in none of the following states are in an unknown one."""
    busy: int
    held_idle: int
    """GPUs that somebody holds, but has not used for half a minute."""
    free: int
    harvested: int
    faulty: int
    lost: int
    """GPUs of lost nodes."""
    missing_nodes: int
    """Expected nodes that have never reported."""
    power_watts: float | None
    """Sum over the GPUs of nodes that are not lost."""
    wasted_gpu_hours_today: float | None
    """Time in which GPUs were held and idle, since the head's local midnight."""
    held_gpu_hours_today: float | None
    """Time in which somebody held GPUs, idle or not, since the head's local midnight."""
    wasted_gpu_hours_yesterday: float | None
    longest_idle_seconds: float | None
    """How long the GPU that has been held and idle for the longest time has been so; null if there is none."""
    idle_users: int
    """Number of users who hold idle GPUs."""


class FleetDay(Answer, frozen=True, kw_only=True):
    """The last 24 hours in steps of 15 minutes; null where the head was not running."""

    start: float
    """Start of the first step, in epoch seconds; the last step is not over yet."""
    step_seconds: float
    busy: Sequence[float | None]
    """Mean number of GPUs in each step; the same for the other states."""
    held_idle: Sequence[float | None]
    free: Sequence[float | None]
    faulty: Sequence[float | None]
    power_watts: Sequence[float | None]
    """Mean of each step."""
    wasted_gpu_hours: Sequence[float | None]
    """GPU-hours that were held and idle within each step."""


class FleetTotals(Answer, frozen=True, kw_only=True):
    """Totals of all GPUs: now, and over the last 24 hours."""

    at: float
    """When the GPUs were last counted, in epoch seconds."""
    now: FleetNow
    day: FleetDay


class StackProcessAnswer(Answer, frozen=True, kw_only=True):
    """A process whose stacks were wanted."""

    node: str | None
    pid: int
    role: CodeRole
    """`main` for a process on a GPU, `worker` for one that prepares data for it."""
    name: str | None
    gpus: Sequence[str]


class StackFrameAnswer(Answer, frozen=True, kw_only=True):
    """One function call on a thread's stack."""

    file: str
    short_file: str
    """Path from its package on; empty if unknown."""
    line: int
    function: str


class ThreadStackAnswer(Answer, frozen=True, kw_only=True):
    """The stack of one thread, innermost call first."""

    name: str
    active: bool
    """Whether it was running, not waiting."""
    frames: Sequence[StackFrameAnswer]


class StackGroupAnswer(Answer, frozen=True, kw_only=True):
    """Processes of one role that are at the same lines of their own code, and the threads of the first of them."""

    processes: Sequence[StackProcessAnswer]
    threads: Sequence[ThreadStackAnswer]


class StackProblemAnswer(StackProcessAnswer, frozen=True, kw_only=True):
    """A process whose stacks could not be read, and why."""

    code: StackProblemCode
    reason: str


class UnansweredNode(Answer, frozen=True, kw_only=True):
    """A node without stacks, and why."""

    node: str
    reason: str


class Stacks(Answer, frozen=True, kw_only=True):
    """Stacks of Python processes: equal ones together, those that differ from the others first."""

    time: str
    groups: Sequence[StackGroupAnswer]
    problems: Sequence[StackProblemAnswer]
    unanswered: Sequence[UnansweredNode]


class AgentSettings(Answer, frozen=True, kw_only=True):
    """Sampling settings of agents."""

    interval_ms: int
    bandwidth: bool
    nvlink: bool


class SettingsChanged(Answer, frozen=True, kw_only=True):
    """The new sampling settings of agents."""

    success: bool
    settings: AgentSettings


class Done(Answer, frozen=True, kw_only=True):
    """Confirmation of an action."""

    success: bool
    message: str
