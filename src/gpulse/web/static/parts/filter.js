// Which nodes and GPUs a reader wants to see: words, a state, a user. Nothing here touches the document.

import { byName, gpuState, isHarvested, isUnit, STATES, STATE_TITLES, usersOf } from "../core/fleet.js";

export const NO_FILTER = { q: "", state: "all", user: "", sort: "name" };

/** The states that can be asked for, and what they are called. */
export const STATE_CHOICES = [
  ["all", "All states"],
  ["free", "Free"],
  ["harvested", "Harvested"],
  ["busy", "Busy"],
  ["idle", "Held but idle"],
  ["faulty", "Faulty"],
  ["findings", "With findings"],
  ["away", "Late or lost"],
];

export const SORT_CHOICES = [["name", "By name"], ["free", "Most free first"]];

/** A filter made of the words of an address; what makes no sense is left out. */
export function fromQuery(query) {
  return {
    q: query.q ?? "",
    state: choice(STATE_CHOICES, query.state, "all"),
    user: query.user ?? "",
    sort: choice(SORT_CHOICES, query.sort, "name"),
  };
}

/** The words of an address that stand for a filter. */
export function toQuery(filter) {
  return Object.fromEntries(
    Object.entries(filter).map(([word, value]) => [word, value === NO_FILTER[word] ? null : value]),
  );
}

/** True when an address says what to show. */
export function isAsked(query) {
  return Object.keys(NO_FILTER).some((word) => word in query);
}

/** True when a filter leaves something out. */
export function isActive(filter) {
  return filter.q.trim() !== "" || filter.state !== "all" || filter.user !== "";
}

/** Decides, by node, which GPUs a filter shows. */
export class Matcher {
  constructor(filter) {
    this.filter = filter;
    this.isActive = isActive(filter);
    this._words = filter.q.toLowerCase().split(/\s+/).filter(Boolean);
  }

  /** The GPUs of a node that are shown, as a set; null when the node is not shown at all. */
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

  /** Whether a node that has never reported is shown. */
  missing(name) {
    return ["all", "away"].includes(this.filter.state) && !this.filter.user && hasAll(`${name} missing lost`.toLowerCase(), this._words);
  }

  _hasGpu(gpu) {
    const { state, user } = this.filter;
    if (user && !usersOf(gpu).includes(user)) {
      return false;
    }
    return hasState(gpu, state) && this._words.every((word) => hasWord(gpu, word));
  }

  _hasNode(node) {
    const { state, user } = this.filter;
    if (user || !["all", "away", "findings"].includes(state)) {
      return false;
    }
    if (state === "away" && node.state === "healthy") {
      return false;
    }
    if (state === "findings" && !node.details?.findings?.length) {
      return false;
    }
    return hasAll(nodeText(node), this._words);
  }
}

/** How many GPUs are in which state: `{all, free, harvested, busy, idle, faulty, unknown, lost}`. Instances count, not what they are parts of. */
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

/** `512 GPUs: 130 free, 8 harvested (yours when you use them), 340 busy, 20 held idle, 22 unknown or lost`. */
export function tallyText(counts) {
  if (counts.all === 0) {
    return "No GPUs";
  }
  const away = counts.unknown + counts.lost;
  const parts = [
    `${counts.free} free`,
    counts.harvested ? `${counts.harvested} harvested (yours when you use ${counts.harvested === 1 ? "it" : "them"})` : "",
    `${counts.busy} busy`,
    counts.idle ? `${counts.idle} held idle` : "",
    counts.faulty ? `${counts.faulty} faulty` : "",
    away ? `${away} unknown or lost` : "",
  ];
  return `${counts.all} ${counts.all === 1 ? "GPU" : "GPUs"}: ${parts.filter(Boolean).join(", ")}`;
}

/** The names of all nodes, missing ones too, in the order of a filter. */
export function order(fleet, filter) {
  const names = [...fleet.nodes.keys(), ...fleet.missing].sort(byName);
  if (filter.sort !== "free") {
    return names;
  }
  const counts = new Map(names.map((name) => [name, countsOf(fleet.nodes.get(name))]));
  const more = (a, b, state) => counts.get(b)[state] - counts.get(a)[state];
  return names.sort((a, b) => more(a, b, "free") || more(a, b, "harvested"));
}

/** Everybody who holds a GPU now. */
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

function countsOf(node) {
  return node ? tally(node.gpus) : { free: -1, harvested: -1 };
}

function hasState(gpu, state) {
  switch (state) {
    case "all":
      return true;
    case "findings":
      return gpu.findings.length > 0 || hasNodeFinding(gpu.node);
    case "away":
      return gpu.node.state !== "healthy";
    default:
      return isUnit(gpu) && gpuState(gpu) === state;
  }
}

function hasNodeFinding(node) {
  return (node.details?.findings ?? []).some((finding) => finding.gpu === null || finding.gpu === undefined);
}

function hasWord(gpu, word) {
  return gpuText(gpu).includes(word) || nodeText(gpu.node).includes(word) || stateText(gpu).includes(word);
}

function hasAll(text, words) {
  return words.every((word) => text.includes(word));
}

const texts = new WeakMap();

/** What a word may be found in, made anew when the details are others. */
function gpuText(gpu) {
  const before = texts.get(gpu);
  if (before?.processes === gpu.processes && before?.findings === gpu.findings) {
    return before.text;
  }
  const words = [gpu.label, gpu.name, gpu.uuid];
  for (const process of gpu.processes ?? []) {
    words.push(process.user, process.job, process.container, process.name, process.pid, ...(process.command ?? []));
  }
  for (const finding of gpu.findings) {
    words.push(finding.id, finding.severity);
  }
  const text = words.filter((word) => word !== null && word !== undefined).join("\n").toLowerCase();
  texts.set(gpu, { processes: gpu.processes, findings: gpu.findings, text });
  return text;
}

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

function stateText(gpu) {
  return STATE_TITLES[gpuState(gpu)];
}

function choice(choices, word, fallback) {
  return choices.some(([known]) => known === word) ? word : fallback;
}
