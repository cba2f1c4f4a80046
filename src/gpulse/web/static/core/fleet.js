// The current state of all nodes and GPUs, from the live stream: values, users and activity.

import { clock, dateTime, duration, known } from "./format.js";

const CLOCK_JUMP_SECONDS = 2;
/** @type {Dashboard.Severity[]} */
const SEVERITIES = ["info", "low", "medium", "high", "critical"];

/** All nodes. Events: "structure", "values" and "details" (detail: the names of the nodes), "hello" when the list of all nodes arrived. */
export class Fleet extends EventTarget {
  constructor(now = () => Date.now() / 1000) {
    super();
    /** @type {Map<string, Dashboard.Node>} */
    this.nodes = new Map();
    /** @type {string[]} */
    this.missing = [];
    /** @type {string | null} */
    this.version = null;
    this.known = false;
    this._now = now;
    /** @type {number | null} */
    this._offset = null;
  }

  /**
   * Call back with the names of the nodes that an event is about.
   * @param {"structure" | "values" | "details"} type
   * @param {(names: Set<string>) => void} call
   * @param {AddEventListenerOptions} options
   */
  on(type, call, options) {
    this.addEventListener(type, (event) => call(/** @type {CustomEvent<Set<string>>} */ (event).detail), options);
  }

  /** Now, in epoch seconds on the head's clock. */
  headTime() {
    return this._now() + (this._offset ?? 0);
  }

  /** All GPUs of all nodes, in order. */
  *gpus() {
    for (const node of this.nodes.values()) {
      yield* node.gpus;
    }
  }

  /** Recent activity is unknown: until it is fetched, or observed long enough, held GPUs are not called idle. */
  doubt() {
    const until = this.headTime() + STAYS_BUSY_SECONDS;
    for (const node of this.nodes.values()) {
      node.doubtUntil = until;
    }
  }

  /** The metrics that show whether GPUs are active. */
  activityMetrics() {
    const metrics = new Set();
    for (const { values } of this.gpus()) {
      if (known(values.gpu_utilization_ratio)) {
        metrics.add("gpu_utilization_ratio");
      } else if (known(values.sm_active_ratio)) {
        metrics.add("sm_active_ratio");
      }
    }
    return [...metrics];
  }

  /**
   * Take recent activity of GPUs from the head's history.
   * @param {Api.QueryReport[]} answers
   */
  recall(answers) {
    for (const { series, step, to } of answers) {
      for (const { node, subject, times, values } of series) {
        const gpu = this.nodes.get(node)?.gpus.find((one) => one.uuid === subject);
        const last = values.findLastIndex((value) => value !== null && value > BUSY_RATIO);
        if (gpu && last >= 0) {
          gpu.busyAt = Math.max(gpu.busyAt ?? 0, Math.min(times[last] + (step ?? 0), to));
        }
      }
    }
    for (const node of this.nodes.values()) {
      node.doubtUntil = null;
    }
    this._tell("values", new Set(this.nodes.keys()));
  }

  /**
   * Take a message of the live stream.
   * @param {Live.Message} message
   */
  take(message) {
    if (known(message.time)) {
      this._setClock(message.time);
    }
    if (message.type === "hello") {
      this._hello(message);
    } else if (message.type === "update") {
      this._update(message);
    }
  }

  /** @param {Live.Message} message */
  _hello(message) {
    this.version = message.version ?? this.version;
    this.known = true;
    const reported = new Set();
    for (const row of message.nodes ?? []) {
      reported.add(row.node);
      const node = this._node(row.node);
      node.state = row.state ?? node.state;
      node.labels = row.labels ?? node.labels;
      if (row.gpus) {
        setGpus(node, row.gpus);
      }
    }
    for (const name of [...this.nodes.keys()]) {
      if (!reported.has(name)) {
        this.nodes.delete(name);
      }
    }
    this._sortNodes();
    this._setMissing(message.missing ?? []);
    this.doubt();
    this._tell("structure", reported);
    this._tell("hello", reported);
  }

  /** @param {Live.Message} message */
  _update(message) {
    const values = new Set();
    const details = new Set();
    let isNew = false;
    for (const row of message.nodes ?? []) {
      isNew = this._take(row) || isNew;
      values.add(row.node);
      if (row.details !== undefined) {
        details.add(row.node);
      }
    }
    if (message.missing) {
      isNew = this._setMissing(message.missing) || isNew;
    }
    if (isNew) {
      this._sortNodes();
      this._tell("structure", values);
    }
    if (details.size) {
      this._tell("details", details);
    }
    if (values.size) {
      this._tell("values", values);
    }
  }

  /**
   * One node of an update; true when it, or one of its GPUs, was not there before.
   * @param {Live.NodeRow} row
   */
  _take(row) {
    const isNew = !this.nodes.has(row.node);
    const node = this._node(row.node);
    node.state = row.state ?? node.state;
    node.connected = row.connected ?? false;
    node.time = row.time ?? null;
    node.seen = row.seen ?? node.time;
    const hasOthers = row.gpus !== undefined && setGpus(node, row.gpus);
    if (row.host) {
      node.host = row.host;
    }
    if (row.details !== undefined) {
      setDetails(node, row.details);
    }
    setValues(node, row.values ?? {}, node.time ?? this.headTime());
    return isNew || hasOthers;
  }

  /** @param {string} name */
  _node(name) {
    let node = this.nodes.get(name);
    if (node === undefined) {
      node = {
        name,
        state: "healthy",
        connected: false,
        time: null,
        seen: null,
        labels: {},
        host: {},
        details: null,
        gpus: [],
        doubtUntil: null,
      };
      this.nodes.set(name, node);
    }
    return node;
  }

  /** Sort the nodes by name. */
  _sortNodes() {
    this.nodes = new Map([...this.nodes].sort(([a], [b]) => byName(a, b)));
  }

  /** @param {string[]} names */
  _setMissing(names) {
    const missing = names.filter((name) => !this.nodes.has(name));
    const differs = missing.join("\n") !== this.missing.join("\n");
    this.missing = missing;
    return differs;
  }

  /**
   * Messages arrive late; the one with the smallest delay is the most accurate.
   * @param {number} time
   */
  _setClock(time) {
    const offset = time - this._now();
    const before = this._offset;
    if (before === null || offset > before || before - offset > CLOCK_JUMP_SECONDS) {
      this._offset = offset;
    } else {
      this._offset = before + (offset - before) * 0.02;
    }
  }

  /**
   * @param {string} type
   * @param {Set<string>} names
   */
  _tell(type, names) {
    this.dispatchEvent(new CustomEvent(type, { detail: names }));
  }
}

/**
 * The job of a process as an address names it: the scheduler's or the harvest's, or the process itself.
 * @param {string} nodeName
 * @param {{ pid: number | null, start_time: number | null, job: string | null }} process
 */
export function jobKey(nodeName, process) {
  if (process.job) {
    return process.job;
  }
  const start = known(process.start_time) ? String(Math.round(process.start_time * 1000) / 1000) : "-";
  return `${nodeName}/${process.pid}@${start}`;
}

/** Findings that are faults although their family is another one. */
const FAULTS_OF_OTHER_FAMILIES = ["power_brake", "hw_slowdown", "fan_failure", "memory_overtemperature"];

/**
 * Whether a finding is a fault; the live stream and the history name its family, other answers its category.
 * @param {{ id?: string, category?: string, family?: string | null }} finding
 */
export function isFault({ id = "", category, family }) {
  return category === undefined ? family === "fault" || FAULTS_OF_OTHER_FAMILIES.includes(id) : category === "fault";
}

/**
 * The severity that a finding is shown with, the same on every page: each fault is critical, and nothing else is.
 * @param {{ id?: string, category?: string, family?: string | null, severity: Dashboard.Severity }} finding
 * @returns {Dashboard.Severity}
 */
export function shownSeverity(finding) {
  if (isFault(finding)) {
    return "critical";
  }
  return finding.severity === "critical" ? "high" : finding.severity;
}

/**
 * The word for a severity that is shown.
 * @param {string} severity
 */
export function severityWord(severity) {
  return severity === "critical" ? "fault" : severity;
}

/**
 * How bad the worst of some findings is; null without any.
 * @param {Array<{ id?: string, category?: string, family?: string | null, severity: Dashboard.Severity }>} findings
 */
export function worst(findings) {
  let most = -1;
  for (const finding of findings) {
    most = Math.max(most, SEVERITIES.indexOf(shownSeverity(finding)));
  }
  return most < 0 ? null : SEVERITIES[most];
}

const NAMES = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/**
 * Order of names, so that gpu-2 comes before gpu-10.
 * @param {string} a
 * @param {string} b
 */
export function byName(a, b) {
  return NAMES.compare(a, b) || (a < b ? -1 : a > b ? 1 : 0);
}

/**
 * Take a node's list of GPUs; true when it differs from before. Those that stay keep their object.
 * @param {Dashboard.Node} node
 * @param {Live.GpuRow[]} rows
 */
function setGpus(node, rows) {
  if (rows.length === node.gpus.length && rows.every((row, at) => isSame(node.gpus[at], row))) {
    return false;
  }
  const before = new Map(node.gpus.map((gpu) => [gpu.uuid, gpu]));
  node.gpus = rows.map((row, index) => {
    const gpu = before.get(row.uuid) ?? makeGpu(node, row);
    gpu.index = index;
    gpu.label = row.id;
    gpu.name = row.name;
    gpu.instances = [];
    return gpu;
  });
  for (const gpu of node.gpus) {
    gpu.parent = gpu.label.includes(":") ? (node.gpus.find((other) => other.label === gpu.label.split(":")[0]) ?? null) : null;
    gpu.parent?.instances.push(gpu);
  }
  spreadDetails(node);
  return true;
}

/**
 * @param {Dashboard.Gpu} gpu
 * @param {Live.GpuRow} row
 */
function isSame(gpu, row) {
  return gpu.uuid === row.uuid && gpu.label === row.id && gpu.name === row.name;
}

/**
 * @param {Dashboard.Node} node
 * @param {Live.GpuRow} row
 */
function makeGpu(node, row) {
  return {
    node,
    index: 0,
    label: row.id,
    uuid: row.uuid,
    name: row.name,
    values: {},
    processes: null,
    findings: [],
    instances: [],
    parent: null,
    busyAt: null,
  };
}

/**
 * @param {Dashboard.Node} node
 * @param {Record<string, Array<number | null>>} columns
 * @param {number} time
 */
function setValues(node, columns, time) {
  const names = Object.keys(columns);
  const isOther = names.join() !== node.columns;
  if (isOther) {
    node.columns = names.join();
  }
  for (const gpu of node.gpus) {
    if (isOther) {
      gpu.values = {};
    }
    for (const name of names) {
      gpu.values[name] = columns[name][gpu.index] ?? null;
    }
    if ((activityOf(gpu) ?? 0) > BUSY_RATIO) {
      gpu.busyAt = time;
    }
  }
}

/**
 * @param {Dashboard.Node} node
 * @param {Live.Details | null} details
 */
function setDetails(node, details) {
  node.details = details;
  node.labels = details?.labels ?? node.labels;
  spreadDetails(node);
}

/** @param {Dashboard.Node} node */
function spreadDetails(node) {
  const details = node.details;
  for (const gpu of node.gpus) {
    gpu.processes = details?.processes?.[gpu.index] ?? null;
    gpu.findings = (details?.findings ?? []).filter((finding) => finding.gpu !== null && concerns(finding, gpu));
  }
}

/**
 * @param {Live.Finding} finding
 * @param {Dashboard.Gpu} gpu
 */
function concerns(finding, gpu) {
  return finding.label ? finding.label === gpu.label : String(finding.gpu) === gpu.label;
}

/** A GPU with a lower utilization is idle. */
export const BUSY_RATIO = 0.01;
/** How long after its last activity a held GPU counts as busy. */
export const STAYS_BUSY_SECONDS = 30;
const HELD_BYTES = 2 ** 30;
const DAY = 86400;
/** What the agents' `harvest_state` is while a program of a harvest is on a GPU, or is being ended there. */
const AT_WORK = [2, 3];

/** @type {Dashboard.GpuState[]} */
export const STATES = ["free", "harvested", "busy", "idle", "faulty", "unknown", "lost"];

/** Titles of GPU states. */
export const STATE_TITLES = {
  free: "free",
  harvested: "harvested",
  busy: "busy",
  idle: "held idle",
  faulty: "faulty",
  unknown: "unknown",
  lost: "lost",
};

/** A shape for every state, so that color is not the only signal. */
export const STATE_GLYPHS = { free: "○", harvested: "◇", busy: "●", idle: "◐", faulty: "⊘", unknown: "?", lost: "✕" };

/** Texts for values of `harvest_state`. */
export const HARVEST_WORDS = ["in use by a user", "idle; harvesting starts soon", "harvested", "being freed", "unknown"];

/** Explains "harvested" to people who look for a GPU. */
export const HARVESTED = "harvested; freed as soon as you use it";

/**
 * True for a process of a program that a harvest runs while nobody else needs the GPU.
 * @param {{ job: string | null }} process
 */
export function isHarvested(process) {
  return process.job?.startsWith("harvest:") ?? false;
}

/**
 * What a GPU is doing: "busy", "idle" (held, does nothing), "free", "harvested" (by a program that gives way at once), "faulty" (nobody should take it), "unknown" or "lost".
 * @param {Dashboard.Gpu} gpu
 * @returns {Dashboard.GpuState}
 */
export function gpuState(gpu) {
  if (gpu.node.state === "lost") {
    return "lost";
  }
  const state = stateOf(gpu);
  return (state === "free" || state === "unknown") && hasFault(gpu) ? "faulty" : state;
}

/**
 * @param {Dashboard.Gpu} gpu
 * @returns {Dashboard.GpuState}
 */
function stateOf(gpu) {
  if (gpu.instances.length) {
    return together(gpu.instances.map(gpuState));
  }
  if (isLent(gpu)) {
    return "harvested";
  }
  const activity = activityOf(gpu);
  if (activity !== null && gpu.busyAt !== null && (gpu.node.time ?? 0) - gpu.busyAt < STAYS_BUSY_SECONDS) {
    return isHeld(gpu) || activity > BUSY_RATIO ? "busy" : "free";
  }
  if (isHeld(gpu)) {
    return activity === null || (gpu.node.time ?? 0) < (gpu.node.doubtUntil ?? 0) ? "busy" : "idle";
  }
  return activity === null && gpu.processes === null && !known(gpu.values.memory_used_bytes) ? "unknown" : "free";
}

/**
 * True for a unit that can be allocated: a GPU without MIG instances, or a MIG instance.
 * @param {Dashboard.Gpu} gpu
 */
export function isUnit(gpu) {
  return gpu.instances.length === 0;
}

/**
 * True when only a harvest uses a GPU: nobody else is known to be on it.
 * @param {Dashboard.Gpu} gpu
 */
function isLent(gpu) {
  const processes = gpu.processes ?? [];
  if (processes.some((process) => process.user && !isHarvested(process))) {
    return false;
  }
  return processes.some(isHarvested) || AT_WORK.includes(gpu.values.harvest_state ?? -1);
}

/**
 * Users of a GPU, each once, without users of a harvest.
 * @param {Dashboard.Gpu} gpu
 */
export function usersOf(gpu) {
  const users = new Set();
  for (const process of gpu.processes ?? []) {
    if (process.user && !isHarvested(process)) {
      users.add(process.user);
    }
  }
  for (const instance of gpu.instances) {
    for (const user of usersOf(instance)) {
      users.add(user);
    }
  }
  return [...users];
}

/**
 * The time until which a node's data is valid: now, unless it is silent.
 * @param {Dashboard.Node} node
 * @param {number} now
 */
export function lastHeard(node, now) {
  return node.state === "healthy" ? now : Math.min(now, node.seen ?? now);
}

/**
 * @param {Dashboard.Gpu} gpu
 * @returns {boolean}
 */
export function hasFault(gpu) {
  return gpu.findings.some((finding) => finding.id === "gpu_fault") || (gpu.parent !== null && hasFault(gpu.parent));
}

/** @type {Dashboard.GpuState[]} */
const TOGETHER = ["busy", "idle", "harvested", "free", "faulty"];

/** @param {Dashboard.GpuState[]} states */
function together(states) {
  return TOGETHER.find((state) => states.includes(state)) ?? "unknown";
}

/**
 * Activity of a GPU from 0 to 1; null when it is unknown.
 * @param {Dashboard.Gpu} gpu
 */
export function activityOf(gpu) {
  const { gpu_utilization_ratio: used, sm_active_ratio: active } = gpu.values;
  if (known(used)) {
    return known(active) ? Math.max(used, active) : used;
  }
  return known(active) ? active : null;
}

/** @param {Dashboard.Gpu} gpu */
function isHeld(gpu) {
  if (gpu.processes?.length) {
    return true;
  }
  const { memory_used_bytes: used, memory_total_bytes: total } = gpu.values;
  return known(used) && used > Math.max(HELD_BYTES, known(total) ? total * 0.02 : 0);
}

/**
 * Describe since when a node has been silent; empty for a healthy node.
 * @param {Dashboard.Node} node
 * @param {number} now
 */
export function silence(node, now) {
  if (node.state === "healthy") {
    return node.connected ? "" : "not connected";
  }
  const since = node.seen ?? node.time;
  if (!known(since)) {
    return node.state;
  }
  const when = now - since < DAY ? clock(since) : dateTime(since);
  const stale = node.time === null ? "" : "; the values are from that time";
  return `${node.state} since ${when} (${duration(now - since)})${stale}`;
}
