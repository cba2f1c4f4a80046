// The list of findings: rows grouped by cause, node or user, under headings, and their words.

import { byName } from "../core/fleet.js";
import * as format from "../core/format.js";
import { html, nothing, svg } from "../vendor/lit-html.js";
import { rank } from "./findings.js";
import { severityGlyph } from "./glyphs.js";

const HEADINGS = { fault: "Faults", slowness: "Slowness", waste: "Waste" };
const MAX_NAMES = 3;
const TIME = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** How the list can be grouped. */
export const GROUPINGS = [
  ["cause", "cause"],
  ["node", "node"],
  ["user", "user"],
];

/**
 * The time of day, `12:22`; with the day where that is another one, `7 Nov 10:02`.
 * @param {Dashboard.MaybeNumber} time
 * @param {number} now
 */
export function shortTime(time, now) {
  if (!format.known(time)) return format.UNKNOWN;
  const [moment, today] = [new Date(time * 1000), new Date(now * 1000)];
  const clock = TIME.format(moment);
  return moment.toDateString() === today.toDateString() ? clock : `${DAY.format(moment)} ${clock}`;
}

/**
 * `11:20 – 11:52`, `7 Nov 23:50 – 8 Nov 00:10`.
 * @param {number} from
 * @param {number | null} to
 * @param {number} now
 */
export function shortSpan(from, to, now) {
  if (to === null) return `since ${shortTime(from, now)}`;
  const sameDay = new Date(from * 1000).toDateString() === new Date(to * 1000).toDateString();
  return `${shortTime(from, now)} – ${sameDay ? TIME.format(new Date(to * 1000)) : shortTime(to, now)}`;
}

/**
 * A few names, and how many more there are.
 * @param {string[]} names
 */
export function someNames(names, most = MAX_NAMES) {
  const shown = names.slice(0, most).map((name) => format.text(name));
  return `${shown.join(", ")}${names.length > most ? ` and ${names.length - most} more` : ""}`;
}

/**
 * Where findings are: `gpu-03 · 5`, `5 GPUs on 2 nodes`, `gpu-09`.
 * @param {Api.GroupedFinding[]} members
 */
export function placeWords(members) {
  const nodes = [...new Set(members.map((member) => member.node))].sort(byName);
  const labels = [...new Set(members.filter((member) => member.label !== null).map((member) => `${member.node}:${member.label}`))];
  if (!labels.length) return someNames(nodes);
  if (labels.length === 1) return `${format.text(members[0].node)} · ${format.text(members[0].label)}`;
  return nodes.length === 1 ? `${labels.length} GPUs on ${format.text(nodes[0])}` : `${labels.length} GPUs on ${nodes.length} nodes`;
}

/**
 * Mean share of time lost: `98 %`; empty where it is unknown.
 * @param {Api.GroupedFinding[]} members
 */
export function lostWords(members) {
  const known = members.map((member) => member.lost_ratio).filter((ratio) => ratio !== null);
  return known.length ? format.percent(known.reduce((sum, ratio) => sum + ratio, 0) / known.length) : "";
}

/**
 * The rows of the list, most urgent first: groups as they are, or split by node or user.
 * @param {Api.FindingGroupRow[]} groups
 * @param {string} by
 * @param {{ whose?: string, node?: string, severity?: string }} [filter]
 * @returns {Dashboard.FindingRow[]}
 */
export function findingRows(groups, by, { whose = "", node = "", severity = "" } = {}) {
  const rows = groups.flatMap((group) => {
    const members = group.members.filter(
      (member) => (!whose || member.users.includes(whose)) && (!node || member.node === node) && isSeverity(group, severity),
    );
    if (!members.length) return [];
    if (by === "cause") return [part(group, members, group.key, HEADINGS[group.category])];
    return split(members, by).map(([name, some]) => part(group, some, `${group.key}~${name}`, name || "No user"));
  });
  const headings = [...new Set(rows.map((row) => row.heading))];
  return rows.sort((a, b) => headings.indexOf(a.heading) - headings.indexOf(b.heading));
}

/**
 * Whether a group has a severity of the header's counts, where faults are one of their own.
 * @param {{ category: string, severity: string }} group
 * @param {string} wanted
 */
function isSeverity({ category, severity }, wanted) {
  if (!wanted) return true;
  return wanted === "fault" ? category === "fault" : category !== "fault" && severityWord(severity) === wanted;
}

/**
 * The word for a severity outside faults; the worst one is shown as high.
 * @param {string} severity
 */
function severityWord(severity) {
  return severity === "critical" ? "high" : severity === "info" ? "low" : severity;
}

/**
 * Numbers of groups by severity, faults apart.
 * @param {Api.FindingGroupRow[]} groups
 * @returns {Array<[name: string, glyph: Dashboard.Severity, count: number]>}
 */
export function severityCounts(groups) {
  /** @type {Array<[string, Dashboard.Severity]>} */
  const names = [
    ["fault", "critical"],
    ["high", "high"],
    ["medium", "medium"],
    ["low", "low"],
  ];
  return names.map(([name, glyph]) => [name, glyph, groups.filter((group) => isSeverity(group, name)).length]);
}

/**
 * @param {Api.GroupedFinding[]} members
 * @param {string} by
 */
function split(members, by) {
  /** @type {Map<string, Api.GroupedFinding[]>} */
  const parts = new Map();
  for (const member of members) {
    const names = by === "node" ? [member.node] : member.users.length ? member.users : [""];
    for (const name of names) parts.set(name, [...(parts.get(name) ?? []), member]);
  }
  return [...parts];
}

/**
 * @param {Api.FindingGroupRow} group
 * @param {Api.GroupedFinding[]} members
 * @param {string} row
 * @param {string} heading
 * @returns {Dashboard.FindingRow}
 */
function part(group, members, row, heading) {
  const [worst] = group.members;
  if (members.length === group.members.length) return { ...group, row, heading, worst };
  const ends = members.map((member) => member.to);
  return {
    ...group,
    row,
    heading,
    worst,
    members,
    summary: members[0].summary,
    severity: [...members].sort((a, b) => rank(a.severity) - rank(b.severity))[0].severity,
    from: Math.min(...members.map((member) => member.from)),
    to: ends.includes(null) ? null : Math.max(...ends.map((end) => end ?? 0)),
    gpus_lost: total(members.map((member) => member.lost_ratio)),
    gpu_hours: total(members.map((member) => member.gpu_hours)),
    users: [...new Set(members.flatMap((member) => member.users))].sort(byName),
    jobs: [...new Set(members.flatMap((member) => member.jobs))].sort(byName),
    is_acknowledged: members.every((member) => member.acknowledged !== null),
  };
}

/** @param {Array<number | null>} values */
function total(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
}

/**
 * The glyph of a group: an octagon for every fault.
 * @param {{ category: string, severity: Dashboard.Severity }} group
 */
export function groupGlyph({ category, severity }) {
  return severityGlyph(category === "fault" ? "critical" : severity === "critical" ? "high" : severity);
}

/**
 * The rows under their headings.
 * @param {Dashboard.FindingRow[]} rows
 * @param {{ chosen: string, now: number, address: (row: string) => string }} view
 */
export function findingSections(rows, view) {
  /** @type {Map<string, Dashboard.FindingRow[]>} */
  const sections = new Map();
  for (const row of rows) sections.set(row.heading, [...(sections.get(row.heading) ?? []), row]);
  const most = Math.max(...rows.map((row) => row.gpus_lost ?? 0), 0);
  return [...sections].map(
    ([heading, some], place) => html`<section class="finding-section" aria-label=${format.text(heading)}>
      <header><h2>${format.text(heading)} <span class="muted">${some.length}</span></h2>
        ${place ? nothing : html`<span class="muted finding-lost-head">GPUs lost</span><span class="muted">for</span>`}</header>
      <ul>${some.map((row) => html`<li>${findingRow(row, most, view)}</li>`)}</ul>
    </section>`,
  );
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {number} most
 * @param {{ chosen: string, now: number, address: (row: string) => string }} view
 */
function findingRow(row, most, view) {
  const words = [placeWords(row.members), someNames(row.users), lostWords(row.members)].filter(Boolean);
  return html`<a class="finding-row" href=${view.address(row.row)} aria-current=${row.row === view.chosen ? "true" : nothing}>
    ${groupGlyph(row)}<span class="visually-hidden">${row.category === "fault" ? "fault" : row.severity}:</span>
    <span class="finding-name"><strong>${format.text(row.title)}</strong>${row.is_acknowledged ? html` <span class="badge muted">acknowledged</span>` : nothing}
      <span class="muted">${words.join(" · ")}</span></span>
    <span class="finding-lost">${row.gpus_lost === null ? nothing : meter(row.gpus_lost, most)}</span>
    <span class="num">${row.gpus_lost === null ? format.UNKNOWN : html`<strong>${row.gpus_lost.toFixed(1)}</strong>`}<span class="visually-hidden"> GPUs lost</span></span>
    <span class="num">${format.duration((row.to ?? view.now) - row.from)}</span>
  </a>`;
}

/**
 * A grey bar, with a mark at a limit.
 * @param {number} value
 * @param {number} whole
 * @param {number | null} [limit]
 */
export function meter(value, whole, limit = null) {
  const width = whole > 0 ? Math.max(0, Math.min(100, (100 * value) / whole)) : 0;
  const mark = limit === null || whole <= 0 ? null : Math.max(0, Math.min(99, (100 * limit) / whole));
  return html`<svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true" focusable="false">
    <rect class="meter-track" y="2" width="100" height="6" rx="1"/><rect class="meter-fill" y="2" width=${width.toFixed(1)} height="6" rx="1"/>
    ${mark === null ? nothing : svg`<rect class="meter-mark" x=${mark.toFixed(1)} width="1.500" height="10"/>`}</svg>`;
}

/**
 * Findings that are over, newest first.
 * @param {Dashboard.FindingRow[]} rows
 * @param {{ chosen: string, now: number, heading: Dashboard.Content, address: (row: string) => string }} view
 */
export function pastSection(rows, view) {
  return html`<section class="finding-section finding-past" aria-label="Past findings">
    <header><h2>${view.heading}</h2><span class="muted">from – to</span></header>
    <ul>${rows.map(
      (row) => html`<li><a class="finding-row" href=${view.address(row.row)} aria-current=${row.row === view.chosen ? "true" : nothing}>
        ${groupGlyph(row)}<span class="visually-hidden">${row.category === "fault" ? "fault" : row.severity}:</span>
        <span class="finding-name"><strong>${format.text(row.title)}</strong> <span class="muted">${[placeWords(row.members), someNames(row.users)].filter(Boolean).join(" · ")}</span></span>
        <span class="num">${shortSpan(row.from, row.to, view.now)}</span></a></li>`,
    )}</ul></section>`;
}
