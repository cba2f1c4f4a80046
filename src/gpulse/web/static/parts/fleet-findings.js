// The findings of the fleet in groups, from the live stream: up to six above the fleet, and their number in the header.

import { get } from "../core/api.js";
import { find, h, setAttribute, setHidden } from "../core/dom.js";
import { byName, isFault, worst } from "../core/fleet.js";
import { duration, known, percent, text } from "../core/format.js";
import { href } from "../core/router.js";
import { shortTitle } from "./finding-titles.js";
import { shortNames } from "./fleet-summary.js";
import { glyphElement } from "./glyphs.js";

/**
 * One finding of one GPU or node, as far as a group needs it.
 * @typedef {{ id: string, node: string, label: string | null, cause: string | null, severity: Dashboard.Severity, summary: string, family: string | null, lost_ratio: number | null, start: number | null }} Member
 */
/** @typedef {{ key: string, id: string, family: string | null, severity: Dashboard.Severity, members: Member[], gpus: number }} Group */

const MAX_SHOWN = 6;
const BADGE_MS = 60_000;
const MIN_BADGE_MS = 30_000;
const SETTLE_MS = 1_000;
const NOT_REPORTING = "not_reporting";
const SILENT = ["node_lost", "node_missing"];
const FAULT = "gpu_fault";
/** @type {Record<string, number>} */
const RANKS = { critical: 0, high: 1, medium: 2, low: 3, info: 4 };
/**
 * All findings of a fleet's nodes.
 * @param {Dashboard.Fleet} fleet
 * @returns {Member[]}
 */
export function findingsOf(fleet) {
  const found = [...fleet.nodes.values()].flatMap((node) =>
    (node.details?.findings ?? []).map((finding) => ({ ...finding, node: node.name })),
  );
  for (const node of fleet.nodes.values()) {
    if (node.state === "lost" && !found.some((finding) => finding.node === node.name && finding.id === "node_lost")) {
      found.push(silent("node_lost", node.name, node.seen));
    }
  }
  return [...found, ...fleet.missing.map((name) => silent("node_missing", name, null))];
}

/**
 * @param {string} id
 * @param {string} node
 * @param {number | null} start
 */
function silent(id, node, start) {
  return {
    id,
    node,
    label: null,
    cause: null,
    severity: /** @type {Dashboard.Severity} */ ("critical"),
    summary: "",
    family: "fault",
    lost_ratio: null,
    start,
    gpu: null,
    pids: [],
  };
}

/**
 * Findings with the same cause in groups: faults first, then by severity and by how many GPUs' worth is lost. What is only worth knowing is left out.
 * @param {Member[]} findings
 * @returns {Group[]}
 */
export function groupFindings(findings) {
  /** @type {Map<string, Member[]>} */
  const groups = new Map();
  for (const finding of findings) {
    if (finding.severity !== "info") {
      const key = keyOf(finding);
      const members = groups.get(key);
      if (members) {
        members.push(finding);
      } else {
        groups.set(key, [finding]);
      }
    }
  }
  return [...groups]
    .map(([key, members]) => ({
      key,
      id: key === NOT_REPORTING ? NOT_REPORTING : members[0].id,
      family: isFault(members[0]) ? "fault" : members[0].family,
      severity: worst(members) ?? "info",
      members,
      gpus: new Set(members.map((finding) => `${finding.node}\n${finding.label ?? ""}`)).size,
    }))
    .sort((a, b) => rankOf(a) - rankOf(b) || lostOf(b) - lostOf(a) || b.members.length - a.members.length || byName(a.id, b.id));
}

/**
 * What the findings of one card share. A broken GPU often has several faults; they are one card.
 * @param {Member} finding
 */
function keyOf({ id }) {
  return SILENT.includes(id) ? NOT_REPORTING : id;
}

/** @param {Group} group */
function rankOf(group) {
  return group.id === NOT_REPORTING ? -2 : group.severity === "critical" ? -1 : (RANKS[group.severity] ?? 4);
}

/** @param {Group} group */
function lostOf({ members }) {
  return members.reduce((sum, finding) => sum + (finding.lost_ratio ?? 0), 0);
}

/** The groups above the fleet. */
export class FindingStrip {
  /** @param {Dashboard.App} app */
  constructor(app) {
    this._app = app;
    this._key = "";
    this.element = h("nav", { class: "finding-strip", "aria-label": "Findings", hidden: true });
  }

  /** Show what is found now; the times change once a minute. */
  update() {
    const { fleet } = this._app;
    const groups = groupFindings(findingsOf(fleet));
    const minute = Math.floor(fleet.headTime() / 60);
    const key = `${minute}\n${groups.map((group) => `${group.key} ${group.severity} ${group.members.map((one) => `${one.node} ${one.label} ${one.lost_ratio}`).join()}`).join("\n")}`;
    if (key === this._key) {
      return;
    }
    this._key = key;
    const hasMore = groups.length > MAX_SHOWN;
    const shown = hasMore ? groups.slice(0, MAX_SHOWN - 1) : groups;
    setHidden(this.element, groups.length === 0);
    this.element.replaceChildren(...shown.map((group) => this._card(group)), ...(hasMore ? [moreCard(groups.slice(MAX_SHOWN - 1))] : []));
  }

  /** @param {Group} group */
  _card(group) {
    const { fleet } = this._app;
    const starts = group.members.map((finding) => finding.start).filter(known);
    const length = starts.length ? duration(fleet.headTime() - Math.min(...starts)) : "";
    return h(
      "a",
      { class: "finding-card", "data-severity": group.severity, href: groupHref(group) },
      h("strong", { class: "finding-card-title" }, glyphElement("severity", group.severity), h("span", {}, groupTitle(group))),
      h("span", { class: "finding-where" }, ...where(group, fleet)),
      h("span", { class: "finding-cost" }, [lostText(group), extent(group, fleet), length].filter(Boolean).join(", ")),
      h("span", { class: "finding-length" }, length),
    );
  }
}

/**
 * What leads to the rest.
 * @param {Group[]} groups
 */
function moreCard(groups) {
  const severity = worst(groups) ?? "low";
  const counts = ["critical", "high", "medium", "low"].flatMap((name) => {
    const count = groups.filter((group) => group.severity === name).length;
    return count ? [`${count} ${name === "critical" ? (count === 1 ? "fault" : "faults") : name}`] : [];
  });
  return h(
    "a",
    { class: "finding-card finding-others", "data-severity": severity, href: href("findings") },
    h("strong", { class: "finding-card-title" }, h("span", {}, `${groups.length} more findings`)),
    h("span", { class: "finding-where" }, counts.join(", ")),
    h("span", { class: "finding-cost" }, `${groupTitle(groups[0])} and others`),
  );
}

/** @param {Group} group */
function groupHref({ members: [{ id, cause }] }) {
  return href("findings", { open: id === FAULT && cause ? `${id}/${cause}` : id });
}

/** @param {Group} group */
function groupTitle(group) {
  if (group.id === FAULT && group.gpus > 1) {
    return `${group.gpus} GPUs with faults`;
  }
  if (group.id !== NOT_REPORTING) {
    return shortTitle(group.id);
  }
  return group.members.length === 1 ? "1 node is not reporting" : `${group.members.length} nodes are not reporting`;
}

/**
 * The place of a single finding, or how many GPUs there are of whom.
 * @param {Group} group
 * @param {Dashboard.Fleet} fleet
 */
function where(group, fleet) {
  const { members } = group;
  const short = shortNames([...fleet.nodes.keys(), ...fleet.missing]);
  const nameOf = (/** @type {Member} */ finding) => text(short.get(finding.node) ?? finding.node);
  if (group.id === NOT_REPORTING) {
    const names = members.map((finding) => `${nameOf(finding)} ${finding.id === "node_lost" ? "lost" : "missing"}`);
    return [names.length > 2 ? `${names.slice(0, 2).join(", ")}, ${names.length - 2} more` : names.join(", ")];
  }
  const users = [...new Set(members.flatMap((finding) => usersIn(finding, fleet)))].sort(byName).map(text);
  const who = users.length > 2 ? `${users.slice(0, 2).join(", ")}, ${users.length - 2} more` : users.join(", ");
  const [first] = members;
  const place =
    group.gpus > 1
      ? `${group.gpus} ${first.label === null ? "nodes" : "GPUs"}`
      : first.label === null
        ? nameOf(first)
        : `${nameOf(first)} · ${text(first.label)}`;
  return [h("b", {}, place), who ? `, ${who}` : ""];
}

/**
 * Users of what a finding is about.
 * @param {Member} finding
 * @param {Dashboard.Fleet} fleet
 */
function usersIn(finding, fleet) {
  const gpus = fleet.nodes.get(finding.node)?.gpus ?? [];
  return gpus
    .filter((gpu) => finding.label !== null && gpu.label === finding.label)
    .flatMap((gpu) => (gpu.processes ?? []).map((process) => process.user ?? ""))
    .filter(Boolean);
}

/** @param {Group} group */
function lostText({ members }) {
  const ratios = members
    .map((finding) => finding.lost_ratio)
    .filter(known)
    .map((ratio) => Math.min(1, ratio));
  if (!ratios.length) {
    return "";
  }
  const [least, most] = [percent(Math.min(...ratios)), percent(Math.max(...ratios))];
  return `${least === most ? most : `${least.replace("%", "")} to ${most}`} lost`;
}

/**
 * How many GPUs went with the nodes that do not report.
 * @param {Group} group
 * @param {Dashboard.Fleet} fleet
 */
function extent(group, fleet) {
  if (group.id !== NOT_REPORTING) {
    return "";
  }
  const gpus = group.members.reduce(
    (sum, finding) => sum + (fleet.nodes.get(finding.node)?.gpus.filter((gpu) => gpu.parent === null).length ?? 0),
    0,
  );
  return gpus ? `${gpus} ${gpus === 1 ? "GPU" : "GPUs"}` : "";
}

/** The number of groups next to "Findings" in the header: as many as the findings page lists. */
export class FindingBadge {
  /** @param {Dashboard.App} app */
  constructor(app) {
    this._app = app;
    this._badge = find(document, "#findings-count");
    this._key = "";
    this._asked = Number.NEGATIVE_INFINITY;
    this._soon = 0;
    app.fleet.addEventListener("details", () => this._later());
    app.fleet.addEventListener("structure", () => this._later());
    setInterval(() => this._later(), BADGE_MS);
  }

  /** Another page is shown. */
  rerouted() {
    this._later();
  }

  /** Ask soon; changes that come together are one, and the head is not asked too often. */
  _later() {
    const wait = Math.max(SETTLE_MS, this._asked + MIN_BADGE_MS - performance.now());
    this._soon ||= setTimeout(() => this._ask(), wait);
  }

  async _ask() {
    this._soon = 0;
    if (document.hidden || this._app.live.state === "lost") {
      return;
    }
    this._asked = performance.now();
    try {
      const { counts, groups } = await get("/api/v1/findings/groups", { state: "now" });
      this._show(counts.now, worst(groups) ?? "low");
    } catch {
      // The number stays as it was.
    }
  }

  /**
   * @param {number} count
   * @param {Dashboard.Severity} severity
   */
  _show(count, severity) {
    const key = `${count} ${severity}`;
    if (key !== this._key) {
      this._key = key;
      setHidden(this._badge, count === 0);
      this._badge.textContent = String(count);
      setAttribute(this._badge, "data-severity", severity);
    }
  }
}
