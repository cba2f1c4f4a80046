// Types that several modules of the dashboard share: messages of the live stream, the fleet, pages, charts and timelines.

declare namespace Api {
  interface Answers {
    "/manual.json": Dashboard.Manual;
  }
}

declare namespace Live {
  interface Subscription {
    nodes: string[] | null;
    metrics: string[];
    host_metrics: string[];
    details: boolean;
    interval: number;
  }
  interface GpuRow {
    id: string;
    uuid: string;
    name: string;
  }
  interface NodeRow {
    node: string;
    state?: Dashboard.NodeState;
    connected?: boolean;
    time?: number | null;
    seen?: number;
    labels?: Record<string, string>;
    gpus?: GpuRow[];
    values?: Record<string, Array<number | null>>;
    host?: Dashboard.Values;
    details?: Details | null;
  }
  interface Message {
    type: "hello" | "update";
    time?: number;
    version?: string;
    nodes?: NodeRow[];
    missing?: string[];
  }
  interface Failure {
    type: "error";
    error: string;
    hint?: string | null;
  }
  interface Details {
    version: string;
    labels: Record<string, string>;
    facts: { driver?: string | null; cuda?: string | null; kernel?: string | null; cpu_model?: string | null };
    disks: Disk[];
    filesystems: Filesystem[];
    network: NetworkLink[];
    processes: Array<Process[] | null>;
    findings: Finding[];
    health: HealthEntry[];
  }
  interface Disk {
    name: string;
    kind: string | null;
    model: string | null;
    read_bytes_per_second: number | null;
    written_bytes_per_second: number | null;
    busy_ratio: number | null;
  }
  interface Filesystem {
    mount_point: string;
    device: string;
    type: string;
    disk: string | null;
    kind: string | null;
    size_bytes: number | null;
    used_bytes: number | null;
    available_bytes: number | null;
  }
  interface NetworkLink {
    name: string;
    kind: string | null;
    up: boolean | null;
    rx_bytes_per_second: number | null;
    tx_bytes_per_second: number | null;
    link_bits_per_second: number | null;
  }
  interface Process extends Dashboard.ProcessIdentity {
    kind: string;
    uid: number | null;
    gpu_memory_bytes: number | null;
    sm_ratio?: number | null;
    cpu_percent: number | null;
    host_memory_bytes: number | null;
  }
  interface Finding extends Dashboard.FindingIdentity {
    category?: Dashboard.FindingCategory;
    family: string | null;
    gpu: number | null;
    pids: number[];
    lost_ratio: number | null;
    start: number | null;
  }
  interface HealthEntry {
    source: string;
    code: string;
    subject: string | null;
    detail: string;
    hint: string | null;
    since: number | null;
  }
}

declare namespace Dashboard {
  type MaybeNumber = number | null | undefined;
  type MaybeText = string | null | undefined;
  type Values = Record<string, number | null>;
  type Query = Record<string, string>;
  type Words = Record<string, string | number | string[] | null | undefined>;
  type Template = import("lit-html").TemplateResult | typeof import("lit-html").nothing;
  type Content = Template | string | number | null | undefined | Content[];

  type Fleet = import("../src/gpulse/web/static/core/fleet.js").Fleet;
  type LiveStream = import("../src/gpulse/web/static/core/live.js").Live;
  type Range = import("../src/gpulse/web/static/parts/time-range.js").Range;
  type Board = import("../src/gpulse/web/static/parts/chart-board.js").Board;
  type Chart = import("../src/gpulse/web/static/parts/chart.js").Chart;
  type HistoryPage = import("../src/gpulse/web/static/parts/history-page.js").HistoryPage;
  type ApiError = import("../src/gpulse/web/static/core/api.js").ApiError;

  // The fleet

  type NodeState = "healthy" | "late" | "lost";
  type GpuState = "free" | "harvested" | "busy" | "idle" | "faulty" | "unknown" | "lost";
  type Tally = Record<GpuState | "all", number>;

  interface Node {
    name: string;
    state: NodeState;
    connected: boolean;
    time: number | null;
    seen: number | null;
    labels: Record<string, string>;
    host: Values;
    details: Live.Details | null;
    gpus: Gpu[];
    doubtUntil: number | null;
    columns?: string;
  }
  interface Gpu {
    node: Node;
    index: number;
    label: string;
    uuid: string;
    name: string;
    values: Values;
    processes: Live.Process[] | null;
    findings: Live.Finding[];
    instances: Gpu[];
    parent: Gpu | null;
    busyAt: number | null;
  }
  interface ProcessIdentity {
    pid: number;
    user: string | null;
    job: string | null;
    container: string | null;
    pod: string | null;
    name: string | null;
    command: string[];
    start_time: number | null;
  }
  interface FindingIdentity {
    id: string;
    label: string | null;
    cause: string | null;
    severity: Severity;
    summary: string;
  }
  type Severity = "critical" | "high" | "medium" | "low" | "info";
  type FindingCategory = "fault" | "slowness" | "waste";

  // Pages

  interface App {
    fleet: Fleet;
    live: LiveStream;
    prefs: typeof import("../src/gpulse/web/static/core/prefs.js");
    announce(text: string): void;
    toast(text: string, kind?: string): void;
    version?: string | null;
  }
  interface Route {
    page: string;
    parts: string[];
    query: Query;
  }
  interface PageHandle {
    subscription?: Partial<Live.Subscription>;
    leave?(): void;
    rerouted?(route: Route): void;
  }
  interface PageModule {
    title(route: Route): string;
    mount(root: HTMLElement, route: Route, app: App): PageHandle;
  }
  interface Filter {
    q: string;
    state: string;
    user: string;
    sort: string;
  }
  interface Sort {
    by: string;
    down: boolean;
  }
  interface Problem {
    message: string;
    hint?: string | null;
    status?: number;
  }

  // The manual of findings

  interface ManualEntry {
    title: string;
    means: string;
    recognised: string;
    severity: string;
    family: string;
    informational: boolean;
    limits: string[];
    needs: string[];
    advice: Api.FindingAdvice[];
  }
  interface Manual {
    families: Record<string, string>;
    findings: Record<string, ManualEntry>;
    signals: Record<string, { words: string; unit: string }>;
    statistics: Record<string, string>;
    comparisons: Record<string, string>;
    reasons: Record<string, string>;
  }
  interface CodePlace {
    file: string;
    line: number;
    function: string;
    share: number;
    stacks: number;
    role: "main" | "worker";
    doing?: string | null;
  }
  interface CodeFinding {
    where?: CodePlace[];
    where_note?: string;
  }
  /** A current finding, or a past one with its start and end. */
  interface ShownFinding extends FindingIdentity, CodeFinding {
    node: string | null;
    family: string | null;
    confidence: number | null;
    gpu: number | null;
    pids: number[];
    lost_ratio: number | null;
    start: number | null;
    end?: number | null;
    evidence: Api.FindingEvidence[];
    counter_evidence?: Api.FindingEvidence[];
    ruled_out?: string[];
    advice: Api.FindingAdvice[];
    url: string | null;
    isPast?: boolean;
  }
  interface FindingGroup {
    key: string;
    id: string;
    severity: Severity;
    family: string | null;
    members: ShownFinding[];
    lost: number | null;
    since: number | null;
    until: number | null;
  }
  /** Findings with the same cause, for a list. */
  interface CauseGroup<T> {
    group: string;
    id: string;
    category: FindingCategory;
    severity: Severity;
    members: T[];
    gpusLost: number | null;
    since: number | null;
  }
  type FindingState = Api.FindingGroups["state"];
  /** A row of the findings page: a group, or the part of it that belongs to a node or user. */
  interface FindingRow extends Api.FindingGroupRow {
    /** Its address. */
    row: string;
    /** Heading under which it stands. */
    heading: string;
    /** The member that the evidence is from, which may belong to another part of the group. */
    worst: Api.GroupedFinding;
  }
  interface FindingForm {
    kind: "acknowledge" | "silence";
    row: FindingRow;
    isBusy: boolean;
    error: Problem | null;
  }
  interface FindingDetailView {
    manual: Manual;
    now: number;
    state: FindingState;
    history: History | null;
    before: Api.FindingGroupRow[] | null;
    silences: Api.SilenceAnswer[];
    form: FindingForm | null;
    name: string;
    backHref: string;
    rowHref(row: string, state?: FindingState): string;
    open(kind: FindingForm["kind"]): void;
    cancel(): void;
    acknowledge(form: HTMLFormElement): void;
    silence(form: HTMLFormElement): void;
    endSilence(id: string): void;
    copy(): void;
  }
  interface FindingView {
    manual: Manual;
    from?: number;
    now: number;
    processesOf(finding: ShownFinding): ProcessIdentity[];
    isOpen(name: string): boolean;
    toggle(name: string, open: boolean): void;
    copy(group: FindingGroup): void;
  }

  // Charts

  interface View {
    from: number;
    to: number;
  }
  /** An answer with history, from the head or computed here in the same format. */
  interface History extends View {
    step: number;
    times: number[];
    series: Api.HistorySeries[];
    /** Percentiles over all series of a metric; `series` then has the outliers only. */
    bands?: Api.HistoryBand[];
  }
  interface LineSpec {
    metric: string;
    title?: string;
    isLimit?: boolean;
    /** A metric to subtract. */
    minus?: string;
    /** The current value of a metric without history. */
    level?(): number | null;
  }
  interface EachSpec {
    metric?: string;
    metrics?: string[];
    /** A metric to divide by. */
    over?: string;
    /** What the series are, in the plural; GPUs where they are those of GPUs. */
    noun?: string;
    name(series: Api.HistorySeries): string;
  }
  interface ChartSpec {
    id: string;
    title: string;
    unit: string;
    height?: number;
    /** The axis reaches at least this value. */
    top?: number;
    bottom?: number;
    fill?: boolean;
    hint?: string;
    why?: string;
    only?(series: Api.HistorySeries): boolean;
    lines?: LineSpec[];
    each?: EachSpec;
    /** No axes; its title chooses it. */
    isSmall?: boolean;
    choose?(): void;
    /** The page has a heat map of the same series. */
    hasRows?: boolean;
    /** Where its card is put; else with the others of its group. */
    host?: HTMLElement;
  }
  type ChartKind = "lines" | "multiples" | "band" | "many" | "map";
  interface Line {
    key: string;
    title: string;
    values: Array<number | null>;
    lows?: Array<number | null>;
    highs?: Array<number | null>;
    isLimit?: boolean;
    /** Number among the lines that are no limits. */
    place: number;
    /** Of a median: how many series it is of. */
    count?: number;
    isOutlier?: boolean;
    /** All values of an outlier, of which `values` has those that differ. */
    whole?: Array<number | null>;
  }
  /** Samples as drawn: undefined where the previous one is still valid. */
  type Drawn = Array<number | null | undefined>;
  interface ChartData {
    times: number[];
    step: number;
    lines: Line[];
    missing: string[];
    band?: Api.HistoryBand;
    noun?: string;
  }
  interface ChartGroup {
    specs: ChartSpec[];
    scope?: string;
    nodes?: string[] | (() => string[]);
    gpus?: string[] | (() => string[]);
    metrics?: string[] | (() => string[]);
    /** The lowest and highest value of each step, or percentiles over all series. */
    spread?: boolean | (() => boolean | "percentiles");
    maxPoints?(): number;
    isIdle?(): boolean;
    /** Replaces the request for history. */
    ask?(signal: AbortSignal, points: number): Promise<History>;
    /** Change an answer before it is shown. */
    shape?(answer: History): History;
    answered?(answer: History): void;
  }
  interface LoadedGroup extends ChartGroup {
    charts: Chart[];
    answer: History | null;
    isFresh?: boolean;
    askedAt?: number;
  }
  interface GpuRowsOptions {
    /** The current value of a GPU that has no history on the page. */
    live(word: string, metric: string): number | null;
    /** The severity of what is wrong with a GPU. */
    markOf(word: string): Severity | null;
    /** The time range, for the addresses of GPUs. */
    query(): Record<string, string | undefined>;
  }
  interface GpuChartsOptions extends GpuRowsOptions {
    /** All GPUs, as the head's endpoints name them. */
    gpus(): string[];
    shape?(answer: History): History;
  }
  interface HeldGpu {
    node: string;
    gpu: string | null;
    /** `node:3`, as the head's endpoints name it. */
    word: string;
    spans: Array<[number, number]>;
  }

  // Timelines

  type MarkTone = "bad" | "warn" | "good" | "muted";
  interface Bar {
    key: string;
    from: number;
    to: number;
    label: string;
    /** Text for screen readers. */
    say: string;
    tone?: number | string;
    severity?: Severity;
    href?: string;
    glyph?: undefined;
    time?: undefined;
    detail(): Template;
  }
  interface Mark {
    key: string;
    time: number;
    label: string;
    glyph: string;
    tone: MarkTone;
    say: string;
    from?: undefined;
    to?: undefined;
    href?: undefined;
    severity?: undefined;
    detail(): Template;
  }
  type Item = Bar | Mark;
  interface Lane {
    key: string;
    label: string;
    kind: string;
    empty: string;
    items: Item[];
    note?: string | null;
    rows?: number;
  }
  interface HistoryOptions {
    nodes?(): string[] | null;
    /** Render live data into the page's heading and the part below. */
    draw(page: HistoryPage): void;
    why?(spec: ChartSpec, titles: string[]): string;
    /** Whether an error means that the object does not exist. */
    isNone?(error: Error): boolean;
    fallback?: { length: number; end: number | null };
    presets?: Preset[] | (() => Preset[]);
    range?: RangeOptions;
  }
  /** A time range with a name; it follows now where it has no end. */
  type Preset = [name: string, start: number, end: number | null];
  interface RangeOptions {
    extra?: Preset[] | (() => Preset[]);
    presets?: number[];
    extraAfter?: number;
  }
  /** A part of a page on the charts' time axis. */
  interface TimeView {
    look(): void;
    cursor(time: number | null): void;
    /** Draw anew in the colors of another theme. */
    repaint?(): void;
    destroy(): void;
  }
  interface FindingSpan extends View {
    key: string;
    node: string;
    severity: Severity;
    isOlder: boolean;
    finding: Api.FindingSpanRow;
    /** The GPUs that share it. */
    places?: Set<string>;
  }
}

/** The Network Information API, in browsers that have it. */
interface Navigator {
  readonly connection?: { readonly saveData?: boolean };
}
