// The nodes as they are now: what the live stream told, in the form in which pages look at it.

import { known } from "./format.js";
import { activityOf, BUSY_RATIO, STAYS_BUSY_SECONDS } from "./state.js";

export { gpuState, HARVEST_WORDS, HARVESTED, isHarvested, isUnit, lastHeard, STATE_GLYPHS, STATE_TITLES, STATES, usersOf } from "./state.js";

const CLOCK_JUMP_SECONDS = 2;
const SEVERITIES = ["info", "low", "medium", "high", "critical"];

/** All nodes. Events: "structure", "values" and "details" (detail: the names of the nodes), "hello" when the head told of all of them. */
export class Fleet extends EventTarget {
  constructor(now = () => Date.now() / 1000) {
    super();
    this.nodes = new Map();
    this.missing = [];
    this.version = null;
    this.known = false;
    this._now = now;
    this._offset = null;
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

  /** What GPUs did just now was not seen: until it is remembered, or seen for long enough, who holds one is not called idle. */
  doubt() {
    const until = this.headTime() + STAYS_BUSY_SECONDS;
    for (const node of this.nodes.values()) {
      node.doubtUntil = until;
    }
  }

  /** Which metrics say what the GPUs do. */
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

  /** Take what GPUs did just now from the head's answers about their past. */
  recall(answers) {
    for (const { series, step, to } of answers) {
      for (const { node, subject, times, values } of series) {
        const gpu = this.nodes.get(node)?.gpus.find((one) => one.uuid === subject);
        const last = values.findLastIndex((value) => value > BUSY_RATIO);
        if (gpu && last >= 0) {
          gpu.busyAt = Math.max(gpu.busyAt ?? 0, Math.min(times[last] + step, to));
        }
      }
    }
    for (const node of this.nodes.values()) {
      node.doubtUntil = null;
    }
    this._tell("values", new Set(this.nodes.keys()));
  }

  /** Take a message of the live stream. */
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

  _hello(message) {
    this.version = message.version ?? this.version;
    this.known = true;
    const told = new Set();
    for (const row of message.nodes ?? []) {
      told.add(row.node);
      const node = this._node(row.node);
      node.state = row.state ?? node.state;
      node.labels = row.labels ?? node.labels;
      if (row.gpus) {
        setGpus(node, row.gpus);
      }
    }
    for (const name of [...this.nodes.keys()]) {
      if (!told.has(name)) {
        this.nodes.delete(name);
      }
    }
    this._sortNodes();
    this._setMissing(message.missing ?? []);
    this.doubt();
    this._tell("structure", told);
    this._tell("hello", told);
  }

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

  /** One node of an update; true when it, or one of its GPUs, was not there before. */
  _take(row) {
    const isNew = !this.nodes.has(row.node);
    const node = this._node(row.node);
    node.state = row.state ?? node.state;
    node.connected = row.connected ?? false;
    node.time = row.time ?? null;
    node.seen = row.seen ?? node.time;
    const hasOthers = Boolean(row.gpus) && setGpus(node, row.gpus);
    if (row.host) {
      node.host = row.host;
    }
    if (row.details !== undefined) {
      setDetails(node, row.details);
    }
    setValues(node, row.values ?? {}, node.time ?? this.headTime());
    return isNew || hasOthers;
  }

  _node(name) {
    let node = this.nodes.get(name);
    if (node === undefined) {
      node = {
        name, state: "healthy", connected: false, time: null, seen: null, labels: {}, host: {}, details: null, gpus: [],
        doubtUntil: null,
      };
      this.nodes.set(name, node);
    }
    return node;
  }

  /** Nodes are in the order of their names, whoever came first. */
  _sortNodes() {
    this.nodes = new Map([...this.nodes].sort(([a], [b]) => byName(a, b)));
  }

  _setMissing(names) {
    const missing = names.filter((name) => !this.nodes.has(name));
    const differs = missing.join("\n") !== this.missing.join("\n");
    this.missing = missing;
    return differs;
  }

  /** Messages are late by what they took to come, so the one that came soonest says most. */
  _setClock(time) {
    const offset = time - this._now();
    const before = this._offset;
    if (before === null || offset > before || before - offset > CLOCK_JUMP_SECONDS) {
      this._offset = offset;
    } else {
      this._offset = before + (offset - before) * 0.02;
    }
  }

  _tell(type, names) {
    this.dispatchEvent(new CustomEvent(type, { detail: names }));
  }
}

/** The job of a process as an address names it: the scheduler's or the harvest's, or the process itself. */
export function jobKey(nodeName, process) {
  if (process.job) {
    return process.job;
  }
  const start = known(process.start_time) ? String(Math.round(process.start_time * 1000) / 1000) : "-";
  return `${nodeName}/${process.pid}@${start}`;
}

/** How bad the worst of some findings is; null without any. */
export function worst(findings) {
  let most = -1;
  for (const finding of findings) {
    most = Math.max(most, SEVERITIES.indexOf(finding.severity));
  }
  return most < 0 ? null : SEVERITIES[most];
}

const NAMES = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

/** Order of names, so that gpu-2 comes before gpu-10. */
export function byName(a, b) {
  return NAMES.compare(a, b) || (a < b ? -1 : a > b ? 1 : 0);
}

/** Take a node's list of GPUs; true when it differs from before. Those that stay keep their object. */
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
    gpu.parent = gpu.label.includes(":")
      ? node.gpus.find((other) => other.label === gpu.label.split(":")[0]) ?? null
      : null;
    gpu.parent?.instances.push(gpu);
  }
  spreadDetails(node);
  return true;
}

function isSame(gpu, row) {
  return gpu.uuid === row.uuid && gpu.label === row.id && gpu.name === row.name;
}

function makeGpu(node, row) {
  return {
    node, index: 0, label: row.id, uuid: row.uuid, name: row.name, values: {}, processes: null, findings: [],
    instances: [], parent: null, busyAt: null,
  };
}

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
    if (activityOf(gpu) > BUSY_RATIO) {
      gpu.busyAt = time;
    }
  }
}

function setDetails(node, details) {
  node.details = details;
  node.labels = details?.labels ?? node.labels;
  spreadDetails(node);
}

function spreadDetails(node) {
  const details = node.details;
  for (const gpu of node.gpus) {
    gpu.processes = details?.processes?.[gpu.index] ?? null;
    gpu.findings = (details?.findings ?? []).filter((finding) => finding.gpu !== null && concerns(finding, gpu));
  }
}

function concerns(finding, gpu) {
  return finding.label ? finding.label === gpu.label : String(finding.gpu) === gpu.label;
}
