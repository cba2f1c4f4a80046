// Types of the head's answers. Made from its OpenAPI document by `make types`: change the Python types instead.
declare namespace Api {
  interface AcknowledgedFindings {
    success: boolean;
    message: string;
    keys: Array<string>;
  }

  interface AcknowledgementRow {
    time: number;
    by: string;
    note: string | null;
  }

  interface AdvicePayload {
    do: string;
    why: string;
    confirm: string;
  }

  interface AgentSettings {
    interval_ms: number;
    bandwidth: boolean;
    nvlink: boolean;
  }

  interface Client {
    client_id: string;
    hostname: string;
    gpu_count: number;
    gpus: Array<Gpu>;
    state: "healthy" | "late" | "lost";
    connected: boolean;
    at_other_head: boolean;
    last_seen: string;
    silent_seconds: number;
    version: string;
    labels: Record<string, string>;
  }

  interface Clients {
    total_clients: number;
    clients: Array<Client>;
  }

  interface ClusterOccupancy {
    time: number;
    counts: Record<string, number>;
    nodes: Array<NodeOccupancy>;
    missing_nodes: Array<string>;
  }

  interface ClusterTime {
    gpu_seconds: number;
    known_seconds: number;
    idle_seconds: number | null;
    utilization_mean: number | null;
    energy_joules: number | null;
    gpus: number;
    capacity_seconds: number;
    gpus_held: number;
    power_watts_mean: number | null;
  }

  interface CodeLocationPayload {
    pid: number;
    role: "main" | "worker";
    file: string;
    line: number;
    function: string;
    share: number;
    stacks: number;
    doing?: string | null;
  }

  interface ComparedFinding {
    id: string;
    change: "gone" | "new" | "stayed";
    severity: "critical" | "high" | "info" | "low" | "medium";
    summary: string;
    before_lost_ratio: number | null;
    after_lost_ratio: number | null;
    change_text: string;
    loss_text: string;
  }

  interface ComparedQuantity {
    name: string;
    title: string;
    unit: string;
    before: number | null;
    after: number | null;
    difference: number | null;
    noise: number | null;
    change: "fell" | "no_clear_change" | "not_compared" | "rose" | "unknown";
    effect: "better" | "none" | "worse";
    before_text: string;
    after_text: string;
    change_text: string;
  }

  interface ComparedRun {
    name: string;
    from: number | null;
    recorded_seconds: number;
    compared_seconds: number;
    gpus: number;
    models: Array<string>;
    programs: Array<string> | null;
    step_confidence: number | null;
  }

  interface Done {
    success: boolean;
    message: string;
  }

  interface Error {
    error: string;
    hint?: string | null;
    detail?: string;
  }

  interface EventReport {
    truncated: boolean;
    events: Array<EventRow>;
    incomplete: Array<string>;
  }

  interface EventRow {
    time: string;
    kind: string;
    node: string | null;
    detail: Record<string, unknown>;
  }

  interface EvidencePayload {
    signal: string;
    statistic: string;
    value: number | null;
    comparison: string;
    threshold: number | null;
  }

  interface ExportState {
    state: "done" | "failed" | "none" | "writing";
    path?: string | null;
    error?: string | null;
  }

  interface FindingAdvice {
    do: string;
    why: string;
    confirm: string;
  }

  interface FindingCounts {
    now: number;
    past: number;
    acknowledged: number;
    silenced: number;
  }

  interface FindingEvidence {
    signal: string;
    statistic: string;
    value: number | null;
    comparison: string;
    threshold: number | null;
  }

  interface FindingGroupRow {
    key: string;
    group: string;
    id: string;
    category: "fault" | "slowness" | "waste";
    severity: "critical" | "high" | "info" | "low" | "medium";
    family: string | null;
    title: string;
    summary: string;
    confidence: number | null;
    from: number;
    to: number | null;
    gpus_lost: number | null;
    gpu_hours: number | null;
    users: Array<string>;
    jobs: Array<string>;
    is_acknowledged: boolean;
    members: Array<GroupedFinding>;
    evidence: Array<EvidencePayload>;
    counter_evidence: Array<EvidencePayload>;
    ruled_out: Array<string>;
    advice: Array<AdvicePayload>;
    url: string | null;
    where?: Array<CodeLocationPayload>;
    where_note?: string;
  }

  interface FindingGroups {
    time: number;
    state: "acknowledged" | "now" | "past" | "silenced";
    from: number;
    to: number;
    counts: FindingCounts;
    groups: Array<FindingGroupRow>;
    truncated: boolean;
    incomplete: Array<string>;
  }

  interface FindingLocation {
    pid: number;
    role: "main" | "worker";
    file: string;
    line: number;
    function: string;
    share: number;
    stacks: number;
    doing: string | null;
  }

  interface FindingReport {
    from: number;
    to: number;
    truncated: boolean;
    spans: Array<FindingSpanRow>;
    incomplete: Array<string>;
  }

  interface FindingSpanRow {
    gpu: number | null;
    label: string | null;
    id: string;
    cause: string | null;
    family: string | null;
    severity: "critical" | "high" | "info" | "low" | "medium";
    summary: string;
    lost_ratio: number | null;
    confidence: number | null;
    pids: Array<number>;
    from: number;
    to: number | null;
    evidence: Array<EvidencePayload>;
    advice: Array<AdvicePayload>;
    url: string | null;
    where?: Array<CodeLocationPayload>;
    where_note?: string;
    node: string;
  }

  interface Findings {
    time: string;
    findings: Array<NodeFinding>;
  }

  interface FleetDay {
    start: number;
    step_seconds: number;
    busy: Array<number | null>;
    held_idle: Array<number | null>;
    free: Array<number | null>;
    faulty: Array<number | null>;
    power_watts: Array<number | null>;
    wasted_gpu_hours: Array<number | null>;
  }

  interface FleetNow {
    gpus: number;
    busy: number;
    held_idle: number;
    free: number;
    harvested: number;
    faulty: number;
    lost: number;
    missing_nodes: number;
    power_watts: number | null;
    wasted_gpu_hours_today: number | null;
    held_gpu_hours_today: number | null;
    wasted_gpu_hours_yesterday: number | null;
    longest_idle_seconds: number | null;
    idle_users: number;
  }

  interface FleetTotals {
    at: number;
    now: FleetNow;
    day: FleetDay;
  }

  interface FleetTrends {
    start: number;
    step_seconds: number;
    metric: string;
    gpus: Record<string, Record<string, Array<number | null>>>;
  }

  interface Gpu {
    id: string;
    name: string;
    physical_idx: number;
    uuid: string;
  }

  interface GpuHardware {
    id: string;
    uuid: string;
    name: string;
    bus_id: string | null;
    serial: string | null;
    vbios: string | null;
    board_part_number: string | null;
    architecture: string | null;
    compute_capability: string | null;
    numa_node: number | null;
    cpu_affinity: string | null;
    switch_links: number | null;
    facts: Record<string, number>;
  }

  interface GpuHolderAnswer {
    pid: number;
    user: string | null;
    job: string | null;
    name: string | null;
    command: string | null;
    gpu_memory_bytes: number | null;
    start_time: number | null;
  }

  interface GpuOccupancy {
    label: string;
    uuid: string;
    name: string;
    state: "busy" | "faulty" | "free" | "harvested" | "idle" | "lost" | "unknown";
    utilization_ratio: number | null;
    memory_used_bytes: number | null;
    memory_total_bytes: number | null;
    power_watts: number | null;
    temperature_celsius: number | null;
    users: Array<string>;
    holders: Array<GpuHolderAnswer> | null;
  }

  interface GpuValues {
    gpu_id: string;
    physical_idx: number;
    name: string;
    gpu_util: number | null;
    gpu_memory: number | null;
    dram_bandwidth?: number | null;
    dram_bandwidth_rx?: number | null;
    dram_bandwidth_tx?: number | null;
    gpu_bandwidth?: number | null;
    values: Record<string, number>;
  }

  interface GroupedFinding {
    key: string;
    node: string;
    gpu: number | null;
    label: string | null;
    severity: "critical" | "high" | "info" | "low" | "medium";
    summary: string;
    users: Array<string>;
    jobs: Array<string>;
    lost_ratio: number | null;
    from: number;
    to: number | null;
    gpu_hours: number | null;
    ending: "not_reporting" | "processes_ended" | "recovered" | null;
    acknowledged: AcknowledgementRow | null;
    silence: string | null;
  }

  interface HardwarePath {
    between: Array<string>;
    pcie: "NODE" | "PHB" | "PIX" | "PXB" | "SYS" | null;
    nvlinks: number | null;
    switched: boolean;
  }

  interface HistoryBand {
    metric: string;
    unit: string;
    count: number;
    values: Array<number | null>;
    lows: Array<number | null>;
    highs: Array<number | null>;
  }

  interface HistoryReport {
    scope: "cgroup" | "disk" | "filesystem" | "gpu" | "host" | "network" | "process";
    from: number;
    to: number;
    step: number;
    times: Array<number>;
    series: Array<HistorySeries>;
    bands?: Array<HistoryBand>;
    incomplete: Array<string>;
  }

  interface HistorySeries {
    node: string;
    subject: string;
    gpu?: string | null;
    metric: string;
    unit: string;
    values: Array<number | null>;
    lows?: Array<number | null>;
    highs?: Array<number | null>;
  }

  interface Info {
    message: string;
    name: string;
    version: string;
    api: string;
    endpoints: Array<string>;
  }

  interface JobFinding {
    gpu: number | null;
    label: string | null;
    id: string;
    cause: string | null;
    family: string | null;
    severity: "critical" | "high" | "info" | "low" | "medium";
    summary: string;
    lost_ratio: number | null;
    confidence: number | null;
    pids: Array<number>;
    from: number;
    to: number | null;
    evidence: Array<EvidencePayload>;
    advice: Array<AdvicePayload>;
    url: string | null;
    where?: Array<CodeLocationPayload>;
    where_note?: string;
    node: string | null;
    times: number;
    active_seconds: number;
  }

  interface JobGap {
    node: string;
    from: number;
    to: number;
  }

  interface JobGpu {
    gpu_seconds: number;
    known_seconds: number;
    idle_seconds: number | null;
    utilization_mean: number | null;
    energy_joules: number | null;
    held_seconds: number;
    memory_bytes_max: number | null;
    node: string;
    gpu: string | null;
    uuid: string;
    model: string | null;
    use: "unattributed" | "untouched" | "used" | null;
    shared: boolean;
    memory_total_bytes: number | null;
    allocated_seconds: number | null;
    unused_seconds: number | null;
    metrics: Record<string, JobMetric>;
  }

  interface JobGpuSeries {
    node: string;
    gpu: string | null;
    uuid: string;
    values: Array<number | null>;
  }

  interface JobMetric {
    unit: string;
    mean: number;
    max: number;
  }

  interface JobReport {
    gpu_seconds: number;
    known_seconds: number;
    idle_seconds: number | null;
    utilization_mean: number | null;
    energy_joules: number | null;
    held_seconds: number;
    memory_bytes_max: number | null;
    job: string;
    kind: "job" | "process" | "session";
    state: "ended" | "lost" | "running";
    name: string | null;
    array: string | null;
    user: string | null;
    partition: string | null;
    account: string | null;
    program: string | null;
    from: number;
    to: number;
    to_now: boolean;
    step: number;
    nodes: Array<string>;
    gpus: number;
    processes: number;
    allocated_seconds: number | null;
    unused_seconds: number | null;
    untouched_gpus: number | null;
    metrics: Record<string, JobMetric>;
    cluster: ClusterTime;
    findings: Array<JobFinding>;
    truncated: boolean;
    gpu_rows: Array<JobGpu>;
    missing_seconds: number;
    missing: Array<JobGap>;
    data_gaps: Array<string>;
    series: JobSeries | null;
  }

  interface JobSeries {
    step: number;
    times: Array<number>;
    metrics: Record<string, Array<number | null>>;
    gpus: Array<JobGpuSeries>;
  }

  interface Latest {
    timestamp: string;
    client_data: Record<string, NodeValues>;
  }

  interface MissingFrames {
    node: string;
    seconds: number;
  }

  interface NodeFinding {
    key: string;
    node: string | null;
    id: string;
    category: "fault" | "slowness" | "waste";
    family: "clocks" | "contention" | "copy" | "fault" | "gpu_use" | "host" | "input" | "link" | "memory" | "network" | "stall" | null;
    severity: "critical" | "high" | "info" | "low" | "medium";
    confidence: number | null;
    summary: string;
    gpu: number | null;
    label: string | null;
    pids: Array<number>;
    lost_ratio: number | null;
    start: number | null;
    end: number | null;
    evidence: Array<FindingEvidence>;
    counter_evidence: Array<FindingEvidence>;
    ruled_out: Array<string>;
    advice: Array<FindingAdvice>;
    url: string | null;
    cause: string | null;
    inferred: boolean;
    users: Array<string>;
    jobs: Array<string>;
    acknowledged: boolean;
    silenced: boolean;
    where?: Array<FindingLocation>;
    where_note?: string;
  }

  interface NodeHardware {
    name: string;
    driver: string | null;
    cuda: string | null;
    kernel: string | null;
    cpu_model: string | null;
    numa_cpus: Array<string>;
    gpus: Array<GpuHardware>;
    adapters: Array<string>;
    paths: Array<HardwarePath>;
  }

  interface NodeOccupancy {
    node: string;
    state: "healthy" | "late" | "lost";
    connected: boolean;
    seen: number;
    time: number | null;
    gpus: Array<GpuOccupancy>;
  }

  interface NodeStatus {
    name: string;
    gpu_count: number | null;
    gpu_models: Record<string, number>;
    state: "healthy" | "late" | "lost";
    connected: boolean;
    at_other_head: boolean;
    last_seen: string;
    silent_seconds: number;
    version: string;
    labels: Record<string, string>;
  }

  interface NodeValues {
    hostname: string;
    state: "healthy" | "late" | "lost";
    time: string;
    age_seconds: number;
    gpus: Array<GpuValues>;
    host: Record<string, number> | null;
  }

  interface NotificationTarget {
    name: string;
    kind: string;
    state: "failing" | "ok";
    error: string | null;
    since: number | null;
    waiting: number;
    sent_total: number;
    failed_total: number;
    given_up_total: number;
  }

  interface OneSession {
    success: boolean;
    message: string;
    output_file: string | null;
    session: SessionAnswer;
  }

  interface OtherHead {
    id: string;
    host: string;
    alive: boolean;
    newest: number | null;
  }

  interface ProcessGpu {
    gpu: string | null;
    uuid: string;
    from: number;
    to: number;
    memory_bytes_mean: number | null;
    memory_bytes_max: number | null;
    sm_ratio_mean: number | null;
  }

  interface ProcessReport {
    from: number;
    to: number;
    truncated: boolean;
    processes: Array<ProcessRow>;
    incomplete: Array<string>;
  }

  interface ProcessRow {
    node: string;
    pid: number;
    start_time: number | null;
    first_seen: number;
    ended: number | null;
    user: string | null;
    job: string | null;
    container: string | null;
    pod: string | null;
    name: string | null;
    command: Array<string>;
    gpus: Array<ProcessGpu>;
  }

  interface QueryReport {
    metric: string;
    scope: "cgroup" | "disk" | "filesystem" | "gpu" | "host" | "network" | "process";
    unit: string;
    from: number;
    to: number;
    step: number | null;
    statistic: "last" | "max" | "mean" | "min" | null;
    series: Array<QuerySeries>;
    incomplete: Array<string>;
  }

  interface QuerySeries {
    node: string;
    subject: string;
    gpu?: string | null;
    times: Array<number>;
    values: Array<number | null>;
  }

  interface RemoteQuery {
    url: string;
    state: "failing" | "ok";
    error: string | null;
    hint: string | null;
    since: number | null;
  }

  interface RemoteWrite {
    state: "behind" | "failing" | "ok" | "refused";
    url: string;
    error: string | null;
    hint: string | null;
    since: number | null;
    waiting_bytes: number;
    waiting_records?: number | null;
    waiting_seconds: number;
    samples_total: number;
    refused_total: number;
    lost_total: number;
    resent_total: number;
  }

  interface RunComparison {
    outcome: "better" | "mixed" | "no_clear_change" | "unknown" | "worse";
    title: string;
    verdict: string;
    before: ComparedRun;
    after: ComparedRun;
    quantities: Array<ComparedQuantity>;
    lost_time: Array<ComparedQuantity>;
    findings: Array<ComparedFinding>;
    notes: Array<string>;
  }

  interface SessionAnswer {
    name: string;
    session_id: string;
    is_active: boolean;
    state: "active" | "finished" | "interrupted";
    recoverable: boolean;
    start_time: string;
    end_time: string | null;
    frame_count: number;
    interval_ms: number;
    output_file: string | null;
    labels: Record<string, string>;
    nodes: Array<string>;
    gpus: Array<string>;
    enable_bandwidth_profiling: boolean;
    enable_nvlink_profiling: boolean;
    interruptions: Array<SessionInterruption>;
    export?: ExportState;
  }

  interface SessionInterruption {
    start_time: string;
    end_time: string | null;
    missing?: Array<MissingFrames>;
    pending?: Array<string>;
  }

  interface Sessions {
    total_sessions: number;
    active_sessions: number;
    sessions: Array<SessionAnswer>;
  }

  interface SettingsChanged {
    success: boolean;
    settings: AgentSettings;
  }

  interface SeveralSessions {
    success: boolean;
    message: string;
    output_file: string | null;
    sessions: Array<SessionAnswer>;
  }

  interface SharedDatabaseStatus {
    state: "failing" | "ok";
    database: string;
    error: string | null;
    hint: string | null;
    since: number | null;
    waiting_records?: number | null;
    heads: Array<OtherHead>;
  }

  interface SilenceAnswer {
    id: string;
    start: number;
    until: number;
    reason: string;
    by: string;
    findings: Array<string>;
    nodes: Array<string>;
    gpus: Array<string>;
    users: Array<string>;
    jobs: Array<string>;
    matches: number;
  }

  interface Silences {
    time: number;
    silences: Array<SilenceAnswer>;
  }

  interface StackFrameAnswer {
    file: string;
    short_file: string;
    line: number;
    function: string;
  }

  interface StackGroupAnswer {
    processes: Array<StackProcessAnswer>;
    threads: Array<ThreadStackAnswer>;
  }

  interface StackProblemAnswer {
    node: string | null;
    pid: number;
    role: "main" | "worker";
    name: string | null;
    gpus: Array<string>;
    code: "failed" | "gone" | "no_py_spy" | "not_permitted" | "not_python";
    reason: string;
  }

  interface StackProcessAnswer {
    node: string | null;
    pid: number;
    role: "main" | "worker";
    name: string | null;
    gpus: Array<string>;
  }

  interface Stacks {
    time: string;
    groups: Array<StackGroupAnswer>;
    problems: Array<StackProblemAnswer>;
    unanswered: Array<UnansweredNode>;
  }

  interface Status {
    remote?: RemoteWrite;
    remote_query?: RemoteQuery;
    database?: SharedDatabaseStatus;
    freq: number;
    enable_bandwidth_profiling: boolean;
    enable_nvlink_profiling: boolean;
    is_profiling: boolean;
    output_filename: string;
    frame_id_counter: number;
    connected_clients: Array<string>;
    total_gpus: number;
    gpu_info: Record<string, Array<Gpu>>;
    active_sessions: Array<SessionAnswer>;
    recoverable_sessions: Array<string>;
    version: string;
    time: string;
    uptime_seconds: number;
    frames_received: number;
    nodes: Array<NodeStatus>;
    missing_nodes: Array<string>;
    findings: Array<NodeFinding>;
    storage: Storage;
    free_gpus?: Record<string, Array<string>>;
    notifications?: Array<NotificationTarget>;
  }

  interface Storage {
    state: "failing" | "ok";
    error: string | null;
    hint: string | null;
    since: number | null;
    directory: string;
    waiting_bytes: number;
    commit_seconds: number | null;
    log_bytes: number;
    history_bytes: number;
    metadata_bytes: number;
    free_bytes: number;
    unsealed_bytes: number;
    is_behind: boolean;
    damaged_files?: number;
    damage?: Array<string>;
  }

  interface ThreadStackAnswer {
    name: string;
    active: boolean;
    frames: Array<StackFrameAnswer>;
  }

  interface UnansweredNode {
    node: string;
    reason: string;
  }

  interface UsageReport {
    from: number;
    to: number;
    step: number;
    by: "job" | "user";
    gpus: number;
    capacity_seconds: number;
    gpu_seconds: number;
    idle_seconds: number | null;
    harvested_seconds: number;
    truncated?: boolean;
    rows: Array<UsageRow>;
    incomplete: Array<string>;
  }

  interface UsageRow {
    user: string | null;
    job: string | null;
    program: string | null;
    node: string | null;
    pid: number | null;
    start_time: number | null;
    gpu_seconds: number;
    idle_seconds: number | null;
    harvested_seconds: number;
    utilization_mean: number | null;
    memory_bytes_max: number | null;
    energy_joules: number | null;
    harvested_energy_joules: number | null;
    gpus: number;
    nodes: Array<string>;
    processes: number;
    first: number | null;
    last: number | null;
  }

  interface Answers {
    "/": Info;
    "/api/v1/events": EventReport;
    "/api/v1/findings": Findings;
    "/api/v1/findings/groups": FindingGroups;
    "/api/v1/findings/history": FindingReport;
    "/api/v1/fleet/totals": FleetTotals;
    "/api/v1/fleet/trends": FleetTrends;
    "/api/v1/gpus": ClusterOccupancy;
    "/api/v1/history": HistoryReport;
    "/api/v1/processes": ProcessReport;
    "/api/v1/query": QueryReport;
    "/api/v1/sessions": Sessions;
    "/api/v1/silences": Silences;
    "/api/v1/usage": UsageReport;
    "/clients": Clients;
    "/metrics/latest": Latest;
    "/profiling/sessions": Sessions;
    "/status": Status;
  }
}
