// What is known of each node at a glance, made once for every update: states, power, host, users and findings.

import { gpuState, isHarvested, isUnit, usersOf, worst } from "../core/fleet.js";
import { known } from "../core/format.js";
import { emptyTally } from "./filter.js";

const GIGABYTE = 1e9;
/** A file system that fuller than this asks for a person. */
export const ALMOST_FULL = 0.9;

/** One node at a glance. */
export class NodeSummary {
  /** @param {Dashboard.Node} node */
  constructor(node) {
    this.node = node;
    /** @type {Dashboard.GpuState[]} */
    this.states = [];
    this.counts = emptyTally();
    /** @type {number | null} */
    this.power = null;
    /** @type {number | null} */
    this.powerLimit = null;
    this.load = 0;
    /** How many GPUs the load is of. */
    this.loaded = 0;
    /** @type {Dashboard.Severity | null} */
    this.severity = null;
    this.findings = 0;
    /** @type {Dashboard.Severity | null} */
    this._worst = null;
    this._count = 0;
    this._hasLostFinding = false;
    /** @type {number | null} */
    this.disk = null;
    /** @type {number | null} */
    this.network = null;
    /** @type {Live.Details | null | undefined} */
    this._details = undefined;
  }

  /** Take what the node says now. */
  update() {
    const { node } = this;
    if (node.details !== this._details) {
      this._details = node.details;
      this._setDetails();
    }
    const isLost = node.state === "lost";
    this.severity = isLost ? "critical" : this._worst;
    this.findings = this._count + (isLost && !this._hasLostFinding ? 1 : 0);
    const counts = emptyTally();
    let power = 0;
    let hasPower = false;
    let limit = 0;
    this.load = 0;
    this.loaded = 0;
    this.states.length = node.gpus.length;
    for (let at = 0; at < node.gpus.length; at += 1) {
      const gpu = node.gpus[at];
      const state = gpuState(gpu);
      this.states[at] = state;
      if (isUnit(gpu)) {
        counts.all += 1;
        counts[state] += 1;
      }
      if (gpu.parent === null && node.state !== "lost") {
        const { power_watts: watts, power_limit_watts: most } = gpu.values;
        if (known(watts)) {
          power += watts;
          hasPower = true;
        }
        limit += known(most) ? most : 0;
        const load = usedOf(gpu);
        if (load !== null) {
          this.load += load;
          this.loaded += 1;
        }
      }
    }
    this.counts = counts;
    this.power = hasPower ? power : null;
    this.powerLimit = limit || null;
  }

  _setDetails() {
    const details = this._details;
    const findings = details?.findings ?? [];
    this._worst = worst(findings);
    this._count = findings.length;
    this._hasLostFinding = findings.some((finding) => finding.id === "node_lost");
    const full = (details?.filesystems ?? []).filter(isWorthShowing).flatMap(({ used_bytes: used, size_bytes: size }) => {
      return known(used) && known(size) && size > 0 ? [used / size] : [];
    });
    this.disk = full.length ? Math.max(...full) : null;
    const links = (details?.network ?? []).filter((row) => row.kind !== "loopback" && row.kind !== "virtual" && row.up !== false);
    const rates = links.flatMap((row) => [row.rx_bytes_per_second, row.tx_bytes_per_second]).filter(known);
    this.network = rates.length ? rates.reduce((a, b) => a + b, 0) / GIGABYTE : null;
  }
}

/** All nodes at a glance. */
export class FleetSummary {
  /** @param {Dashboard.Fleet} fleet */
  constructor(fleet) {
    this._fleet = fleet;
    /** @type {Map<string, NodeSummary>} */
    this.nodes = new Map();
    /** @type {ReturnType<FleetSummary["_sum"]> | null} */
    this._total = null;
  }

  /** Nodes or GPUs came or went. */
  structure() {
    for (const [name, summary] of this.nodes) {
      if (this._fleet.nodes.get(name) !== summary.node) {
        this.nodes.delete(name);
      }
    }
    this._total = null;
    this.update(this._fleet.nodes.keys());
  }

  /**
   * Bring some nodes up to date.
   * @param {Iterable<string>} names
   */
  update(names) {
    this._total = null;
    for (const name of names) {
      const node = this._fleet.nodes.get(name);
      if (node) {
        let summary = this.nodes.get(name);
        if (summary === undefined) {
          summary = new NodeSummary(node);
          this.nodes.set(name, summary);
        }
        summary.update();
      }
    }
  }

  /** The whole fleet: `{counts, power, powerLimit}`. */
  total() {
    this._total ??= this._sum();
    return this._total;
  }

  _sum() {
    const counts = emptyTally();
    let power = 0;
    let powerLimit = 0;
    let hasPower = false;
    for (const summary of this.nodes.values()) {
      for (const state of Object.keys(counts)) {
        counts[state] += summary.counts[state];
      }
      hasPower = hasPower || summary.power !== null;
      power += summary.power ?? 0;
      powerLimit += summary.powerLimit ?? 0;
    }
    return { counts, power: hasPower ? power : null, powerLimit: powerLimit || null };
  }

  /**
   * Who holds idle GPUs, and since when the longest of them has been idle.
   * @returns {{ users: Set<string>, since: number | null }}
   */
  idle() {
    const users = new Set();
    let since = null;
    for (const { node, states, counts } of this.nodes.values()) {
      if (counts.idle) {
        for (const gpu of node.gpus.filter((one) => states[one.index] === "idle")) {
          for (const user of usersOf(gpu)) {
            users.add(user);
          }
          const start = idleSince(gpu);
          since = start === null ? since : Math.min(start, since ?? start);
        }
      }
    }
    return { users, since };
  }
}

/**
 * Since when a held GPU has been idle: as a finding says, or since it was last seen busy; null when it is unknown.
 * @param {Dashboard.Gpu} gpu
 */
export function idleSince(gpu) {
  const start = gpu.findings.find((finding) => finding.id === "gpu_idle_allocated")?.start;
  return known(start) ? start : gpu.busyAt;
}

/**
 * A file system that can become full.
 * @param {Live.Filesystem} row
 */
export function isWorthShowing(row) {
  return row.kind !== "memory" && !row.mount_point.startsWith("/boot") && !row.mount_point.startsWith("/snap");
}

/**
 * Who is on a GPU, as short as a cell needs it: `ada 4711`, `2 users`, `fold` of a harvest; empty when nobody is known.
 * @param {Dashboard.Gpu} gpu
 */
export function ownerOf(gpu) {
  const users = usersOf(gpu);
  if (users.length > 1) {
    return `${users.length} users`;
  }
  const process = (gpu.processes ?? []).find((one) => (users.length ? one.user === users[0] : isHarvested(one)));
  const job = process?.job?.split(":").at(-1) ?? "";
  return [users[0] ?? "", users.length && !/^[\d_]+$/.test(job) ? "" : job].filter(Boolean).join(" ");
}

/**
 * How much a GPU is used, from 0 to 1; null when it is unknown.
 * @param {Dashboard.Gpu} gpu
 */
export function usedOf({ values }) {
  const { gpu_utilization_ratio: used, sm_active_ratio: active } = values;
  return known(used) ? used : known(active) ? active : null;
}

/**
 * Short names: without a domain that only repeats, unless two nodes would be called the same.
 * @param {string[]} names
 * @returns {Map<string, string>}
 */
export function shortNames(names) {
  const short = names.map((name) => (/^[\d.:]+$/.test(name) ? name : name.split(".")[0] || name));
  const isUnique = new Set(short).size === names.length;
  return new Map(names.map((name, at) => [name, isUnique ? short[at] : name]));
}

/**
 * `H200`: what a node's GPUs are called, without the vendor.
 * @param {Dashboard.Node} node
 */
export function modelOf(node) {
  const names = new Set(node.gpus.filter((gpu) => gpu.parent === null).map((gpu) => gpu.name));
  return [...names].map((name) => name.replace(/^NVIDIA (GeForce )?/, "").replace(/(-| )(SXM|PCIe|HBM).*$/i, "")).join(", ");
}
