// Which nodes and GPUs a reader wants to see, and in which order. Nothing here touches the document.

import { activityOf, byName, gpuState, isHarvested, isUnit, STATE_TITLES, STATES, shownSeverity, usersOf } from "../core/fleet.js";
import { known } from "../core/format.js";

/** @type {Dashboard.Filter} */
export const NO_FILTER = { q: "", state: "all", user: "", sort: "attention" };

/** The states that can be asked for, and what they are called. */
export const STATE_CHOICES = [
  ["all", "All"],
  ["busy", "Busy"],
  ["idle", "Held idle"],
  ["free", "Free"],
  ["harvested", "Harvested"],
  ["faulty", "Faulty"],
  ["lost", "Lost"],
  ["unknown", "Unknown"],
  ["findings", "With findings"],
];

export const SORT_CHOICES = [
  ["attention", "needs attention"],
  ["name", "name"],
  ["free", "free GPUs"],
  ["load", "load"],
  ["findings", "findings"],
  ["power", "power"],
  ["user", "user"],
];

/**
 * A filter made of the words of an address; what makes no sense is left out.
 * @param {Partial<Dashboard.Filter>} query
 * @returns {Dashboard.Filter}
 */
export function fromQuery(query) {
  return {
    q: query.q ?? "",
    state: choice(STATE_CHOICES, query.state, "all"),
    user: query.user ?? "",
    sort: choice(SORT_CHOICES, query.sort, NO_FILTER.sort),
  };
}

/**
 * The words of an address that stand for a filter.
 * @param {Dashboard.Filter} filter
 */
export function toQuery(filter) {
  const words = /** @type {Array<keyof Dashboard.Filter>} */ (Object.keys(NO_FILTER));
  return Object.fromEntries(words.map((word) => [word, filter[word] === NO_FILTER[word] ? null : filter[word]]));
}

/**
 * True when an address says what to show.
 * @param {object} query
 */
export function isAsked(query) {
  return Object.keys(NO_FILTER).some((word) => word in query);
}

/**
 * True when a filter leaves something out.
 * @param {Dashboard.Filter} filter
 */
export function isActive(filter) {
  return filter.q.trim() !== "" || filter.state !== "all" || filter.user !== "";
}

/** Decides, by node, which GPUs a filter shows. */
export class Matcher {
  /** @param {Dashboard.Filter} filter */
  constructor(filter) {
    this.filter = filter;
    this.isActive = isActive(filter);
    this._words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  }

  /**
   * The GPUs of a node that are shown, as a set; null when the node is not shown at all.
   * @param {Dashboard.Node} node
   */
  gpus(node) {
    if (!this.isActive) {
      return new Set(node.gpus);
    }
    const shown = new Set(node.gpus.filter((gpu) => this._hasGpu(gpu)));
    for (const gpu of shown) {
      if (gpu.parent) {
        shown.add(gpu.parent);
      }
    }
    return shown.size || (node.gpus.length === 0 && this._hasNode(node)) ? shown : null;
  }

  /**
   * Whether a node that has never reported is shown.
   * @param {string} name
   */
  missing(name) {
    return (
      ["all", "lost", "findings"].includes(this.filter.state) &&
      !this.filter.user &&
      hasAll(`${name} missing lost`.toLowerCase(), this._words)
    );
  }

  /** @param {Dashboard.Gpu} gpu */
  _hasGpu(gpu) {
    const { state, user } = this.filter;
    if (user && !usersOf(gpu).includes(user)) {
      return false;
    }
    return hasState(gpu, state) && this._words.every((word) => hasWord(gpu, word));
  }

  /** @param {Dashboard.Node} node */
  _hasNode(node) {
    const { state, user } = this.filter;
    if (user || !["all", "lost", "findings"].includes(state)) {
      return false;
    }
    if (state === "lost" && node.state !== "lost") {
      return false;
    }
    if (state === "findings" && !node.details?.findings?.length) {
      return false;
    }
    return hasAll(nodeText(node), this._words);
  }
}

/**
 * How many GPUs are in which state: `{all, free, harvested, busy, idle, faulty, unknown, lost}`. Instances count, not what they are parts of.
 * @param {Iterable<Dashboard.Gpu>} gpus
 */
export function tally(gpus, counts = emptyTally()) {
  for (const gpu of gpus) {
    if (isUnit(gpu)) {
      counts.all += 1;
      counts[gpuState(gpu)] += 1;
    }
  }
  return counts;
}

/** Nothing counted yet. */
export function emptyTally() {
  return Object.fromEntries([["all", 0], ...STATES.map((state) => [state, 0])]);
}

/**
 * The names of all nodes, missing ones too, in the order of a filter.
 * @param {Dashboard.Fleet} fleet
 * @param {Dashboard.Filter} filter
 */
export function order(fleet, filter) {
  const names = [...fleet.nodes.keys(), ...fleet.missing].sort(byName);
  const rank = RANKS[filter.sort];
  if (rank === undefined) {
    return names;
  }
  const ranks = new Map(names.map((name) => [name, rank(fleet.nodes.get(name))]));
  return names.sort((a, b) => compare(ranks.get(a) ?? [], ranks.get(b) ?? []));
}

/**
 * What comes first has the smaller ranks; nodes of the same ranks stay in the order of their names.
 * @type {Record<string, (node: Dashboard.Node | undefined) => Array<number | string>>}
 */
const RANKS = {
  attention: attentionOf,
  free: (node) => (node ? [-tally(node.gpus).free, -tally(node.gpus).harvested] : [1]),
  load: (node) => [-(mean(node?.gpus.filter(isUnit).map(activityOf) ?? []) ?? -1)],
  findings: (node) => [-(node ? (node.details?.findings ?? []).length : 1), ...attentionOf(node)],
  power: (node) => [-(node?.gpus ?? []).reduce((sum, gpu) => sum + (gpu.parent ? 0 : (gpu.values.power_watts ?? 0)), 0)],
  user: (node) => [node?.gpus.flatMap(usersOf).sort(byName)[0]?.toLowerCase() ?? "\uffff"],
};
const SEVERITY_RANKS = { critical: 2, high: 4, medium: 5, low: 6, info: 7 };
const CALM_RANK = 8;

/**
 * Lost, missing and faulty nodes first, then by the worst finding and how many there are of it.
 * @param {Dashboard.Node | undefined} node
 */
function attentionOf(node) {
  if (node === undefined || node.state === "lost") {
    return [node === undefined ? 1 : 0];
  }
  const ranks = (node.details?.findings ?? []).map((finding) => SEVERITY_RANKS[shownSeverity(finding)] ?? CALM_RANK);
  if (node.state === "late") {
    ranks.push(3);
  }
  const first = node.gpus.some((gpu) => gpuState(gpu) === "faulty") ? 2 : Math.min(CALM_RANK, ...ranks);
  return [first, -ranks.filter((rank) => rank === first).length];
}

/**
 * @param {Array<number | string>} a
 * @param {Array<number | string>} b
 */
function compare(a, b) {
  for (let at = 0; at < Math.min(a.length, b.length); at += 1) {
    if (a[at] !== b[at]) {
      return typeof a[at] === "string" ? byName(String(a[at]), String(b[at])) : Number(a[at]) - Number(b[at]);
    }
  }
  return 0;
}

/**
 * The mean of what is known; null when nothing is.
 * @param {Dashboard.MaybeNumber[]} numbers
 */
export function mean(numbers) {
  const some = numbers.filter(known);
  return some.length ? some.reduce((a, b) => a + b, 0) / some.length : null;
}

/**
 * Everybody who holds a GPU now.
 * @param {Dashboard.Fleet} fleet
 */
export function usersSeen(fleet) {
  const users = new Set();
  for (const gpu of fleet.gpus()) {
    for (const process of gpu.processes ?? []) {
      if (process.user && !isHarvested(process)) {
        users.add(process.user);
      }
    }
  }
  return [...users].sort(byName);
}

/**
 * @param {Dashboard.Gpu} gpu
 * @param {string} state
 */
function hasState(gpu, state) {
  switch (state) {
    case "all":
      return true;
    case "findings":
      return gpu.findings.length > 0 || hasNodeFinding(gpu.node);
    default:
      return isUnit(gpu) && gpuState(gpu) === state;
  }
}

/** @param {Dashboard.Node} node */
function hasNodeFinding(node) {
  return (node.details?.findings ?? []).some((finding) => finding.gpu === null || finding.gpu === undefined);
}

/**
 * @param {Dashboard.Gpu} gpu
 * @param {string} word
 */
function hasWord(gpu, word) {
  return gpuText(gpu).includes(word) || nodeText(gpu.node).includes(word) || stateText(gpu).includes(word);
}

/**
 * @param {string} text
 * @param {string[]} words
 */
function hasAll(text, words) {
  return words.every((word) => text.includes(word));
}

const texts = new WeakMap();

/**
 * What a word may be found in, made anew when the details are others.
 * @param {Dashboard.Gpu} gpu
 */
function gpuText(gpu) {
  const before = texts.get(gpu);
  if (before?.processes === gpu.processes && before?.findings === gpu.findings) {
    return before.text;
  }
  /** @type {Array<string | number | null>} */
  const words = [gpu.label, gpu.name, gpu.uuid];
  for (const process of gpu.processes ?? []) {
    words.push(process.user, process.job, process.container, process.name, process.pid, ...(process.command ?? []));
  }
  for (const finding of gpu.findings) {
    words.push(finding.id, finding.severity);
  }
  const text = words
    .filter((word) => word !== null && word !== undefined)
    .join("\n")
    .toLowerCase();
  texts.set(gpu, { processes: gpu.processes, findings: gpu.findings, text });
  return text;
}

/** @param {Dashboard.Node} node */
function nodeText(node) {
  const before = texts.get(node);
  if (before?.labels === node.labels && before?.state === node.state) {
    return before.text;
  }
  const labels = Object.entries(node.labels ?? {}).map(([name, value]) => `${name}=${value}`);
  const text = [node.name, node.state, ...labels].join("\n").toLowerCase();
  texts.set(node, { labels: node.labels, state: node.state, text });
  return text;
}

/** @param {Dashboard.Gpu} gpu */
function stateText(gpu) {
  return STATE_TITLES[gpuState(gpu)];
}

/**
 * @param {string[][]} choices
 * @param {string | undefined} word
 * @param {string} fallback
 */
function choice(choices, word, fallback) {
  return word !== undefined && choices.some(([known]) => known === word) ? word : fallback;
}
