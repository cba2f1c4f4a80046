// What a GPU is doing, and for whom: made of what is known of it, never guessed.

import { clock, dateTime, duration, known } from "./format.js";

/** A GPU that does no more than this does nothing. */
export const BUSY_RATIO = 0.01;
/** For so long after it did something, a GPU that is held is busy. */
export const STAYS_BUSY_SECONDS = 30;
const HELD_BYTES = 2 ** 30;
const DAY = 86400;
/** What the agents' `harvest_state` is while a program of a harvest is on a GPU, or is being ended there. */
const AT_WORK = [2, 3];

export const STATES = ["free", "harvested", "busy", "idle", "faulty", "unknown", "lost"];

/** What a GPU's state is called. */
export const STATE_TITLES = {
  free: "free",
  harvested: "harvested",
  busy: "busy",
  idle: "held, idle",
  faulty: "faulty",
  unknown: "unknown",
  lost: "lost",
};

/** A shape for every state, so that colour is not the only signal. */
export const STATE_GLYPHS = { free: "○", harvested: "◇", busy: "●", idle: "◐", faulty: "▲", unknown: "?", lost: "✕" };

/** What a harvest makes of a GPU, by its `harvest_state`. */
export const HARVEST_WORDS = ["used by people", "waits until it stays idle", "harvested", "being given back", "not known"];

/** What "harvested" means to who looks for a GPU. */
export const HARVESTED = "harvested: yours as soon as you use it";

/** True for a process of a program that a harvest runs while nobody else needs the GPU. */
export function isHarvested(process) {
  return process.job?.startsWith("harvest:") ?? false;
}

/** What a GPU is doing: "busy", "idle" (held, does nothing), "free", "harvested" (by a program that gives way at once), "faulty" (nobody should take it), "unknown" or "lost". */
export function gpuState(gpu) {
  if (gpu.node.state === "lost") {
    return "lost";
  }
  const state = stateOf(gpu);
  return (state === "free" || state === "unknown") && hasFault(gpu) ? "faulty" : state;
}

function stateOf(gpu) {
  if (gpu.instances.length) {
    return together(gpu.instances.map(gpuState));
  }
  if (isLent(gpu)) {
    return "harvested";
  }
  const activity = activityOf(gpu);
  if (activity !== null && gpu.busyAt !== null && gpu.node.time - gpu.busyAt < STAYS_BUSY_SECONDS) {
    return isHeld(gpu) || activity > BUSY_RATIO ? "busy" : "free";
  }
  if (isHeld(gpu)) {
    return activity === null || gpu.node.time < gpu.node.doubtUntil ? "busy" : "idle";
  }
  return activity === null && gpu.processes === null && !known(gpu.values.memory_used_bytes) ? "unknown" : "free";
}

/** True for what somebody can have: a GPU that is not divided, or an instance of one that is. */
export function isUnit(gpu) {
  return gpu.instances.length === 0;
}

/** True when only a harvest uses a GPU: nobody else is known to be on it. */
function isLent(gpu) {
  const processes = gpu.processes ?? [];
  if (processes.some((process) => process.user && !isHarvested(process))) {
    return false;
  }
  return processes.some(isHarvested) || AT_WORK.includes(gpu.values.harvest_state);
}

/** Who holds a GPU, each once; what a harvest runs for somebody is not held by them. */
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

/** Until when what a node told can be counted on: now, unless it is silent. */
export function lastHeard(node, now) {
  return node.state === "healthy" ? now : Math.min(now, node.seen ?? now);
}

function hasFault(gpu) {
  return gpu.findings.some((finding) => finding.id === "gpu_fault") || (gpu.parent !== null && hasFault(gpu.parent));
}

function together(states) {
  for (const state of ["busy", "idle", "harvested", "free", "faulty"]) {
    if (states.includes(state)) {
      return state;
    }
  }
  return "unknown";
}

/** How much a GPU does, from 0 to 1; null when nobody knows. */
export function activityOf(gpu) {
  const { gpu_utilization_ratio: used, sm_active_ratio: active } = gpu.values;
  if (known(used)) {
    return known(active) ? Math.max(used, active) : used;
  }
  return known(active) ? active : null;
}

function isHeld(gpu) {
  if (gpu.processes?.length) {
    return true;
  }
  const { memory_used_bytes: used, memory_total_bytes: total } = gpu.values;
  return known(used) && used > Math.max(HELD_BYTES, known(total) ? total * 0.02 : 0);
}

/** Since when nothing came from a node, in words; empty while all is well. */
export function silence(node, now) {
  if (node.state === "healthy") {
    return node.connected ? "" : "not connected";
  }
  const since = node.seen ?? node.time;
  if (!known(since)) {
    return node.state;
  }
  const when = now - since < DAY ? clock(since) : dateTime(since);
  const stale = node.time === null ? "" : ", values are as they were then";
  return `${node.state} since ${when} (${duration(now - since)})${stale}`;
}
