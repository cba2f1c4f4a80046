// Groups of findings: the same finding on many GPUs is one card.

import { isOpened } from "../core/dom.js";
import { byName, isFault, severityWord, shownSeverity } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { codeLines, lineText } from "./code-lines.js";
import { adviceList, confidenceWord, describeEvidence, familyName, findingTitle, titleOf } from "./findings-manual.js";
import { severityGlyph } from "./glyphs.js";

/** Severities, worst first. */
export const SEVERITIES = ["critical", "high", "medium", "low", "info"];
const MAX_PLACES = 12;
const MAX_USERS = 6;
const DAY_SECONDS = 86400;

/**
 * How bad a severity is: 0 for the worst.
 * @param {string} severity
 */
export function rank(severity) {
  const place = SEVERITIES.indexOf(severity);
  return place < 0 ? SEVERITIES.length : place;
}

/**
 * The severity of a finding as a shape and a word.
 * @param {{ id?: string, category?: string, family?: string | null, severity: Dashboard.Severity }} finding
 */
export function severityMark(finding) {
  const severity = shownSeverity(finding);
  const known = SEVERITIES.includes(severity) ? severity : "info";
  return html`<span class="severity">${severityGlyph(known)} ${severityWord(known)}</span>`;
}

/**
 * The key by which two reports of a node are the same finding.
 * @param {{ id: string, label: string | null, cause: string | null }} options
 */
export function findingKey({ id, label, cause }) {
  return `${id}\n${label ?? ""}\n${cause ?? ""}`;
}

/**
 * Groups of one finding at one severity, worst first; faults of several causes are several: {key, id, severity, family, members, lost, since, until}.
 * @param {Dashboard.ShownFinding[]} findings
 */
export function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    const key = `${finding.severity} ${finding.id}${finding.id === "gpu_fault" ? ` ${finding.cause ?? finding.summary}` : ""}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(finding);
  }
  return [...groups].map(([key, members]) => group(key, members)).sort(worse);
}

/** Categories of findings, in the order in which they are shown. */
export const CATEGORIES = /** @type {const} */ (["fault", "slowness", "waste"]);

/**
 * What a finding is about: a fault, slowness or waste.
 * @param {{ id?: string, category?: Dashboard.FindingCategory, family?: string | null }} finding
 */
export function categoryOf(finding) {
  return finding.category ?? (isFault(finding) ? "fault" : "slowness");
}

/**
 * Findings grouped by cause: faults first, then slowness and waste, each by severity and by GPUs lost (the sum of the lost
 * shares). Works with findings of the live stream and of the API.
 * @template {{ id: string, cause?: string | null, severity: Dashboard.Severity, category?: Dashboard.FindingCategory,
 *   family?: string | null, lost_ratio?: number | null, start?: number | null }} T
 * @param {T[]} findings
 * @returns {Dashboard.CauseGroup<T>[]}
 */
export function groupFindings(findings) {
  /** @type {Map<string, T[]>} */
  const causes = new Map();
  for (const finding of findings) {
    const cause = finding.id === "gpu_fault" && finding.cause ? `${finding.id}/${finding.cause}` : finding.id;
    causes.set(cause, [...(causes.get(cause) ?? []), finding]);
  }
  return [...causes].map(([cause, members]) => causeGroup(cause, members)).sort(moreUrgent);
}

/**
 * @template {{ id: string, severity: Dashboard.Severity, category?: Dashboard.FindingCategory, family?: string | null,
 *   lost_ratio?: number | null, start?: number | null }} T
 * @param {string} cause
 * @param {T[]} found
 * @returns {Dashboard.CauseGroup<T>}
 */
function causeGroup(cause, found) {
  const members = [...found].sort((a, b) => rank(a.severity) - rank(b.severity) || (b.lost_ratio ?? 0) - (a.lost_ratio ?? 0));
  const lost = members.map((finding) => finding.lost_ratio).filter((ratio) => typeof ratio === "number");
  const starts = members.map((finding) => finding.start).filter((start) => typeof start === "number");
  return {
    group: cause,
    id: members[0].id,
    category: categoryOf(members[0]),
    severity: members[0].severity,
    members,
    gpusLost: lost.length ? lost.reduce((sum, ratio) => sum + ratio, 0) : null,
    since: starts.length ? Math.min(...starts) : null,
  };
}

/**
 * @param {Dashboard.CauseGroup<unknown>} a
 * @param {Dashboard.CauseGroup<unknown>} b
 */
function moreUrgent(a, b) {
  return (
    CATEGORIES.indexOf(a.category) - CATEGORIES.indexOf(b.category) ||
    rank(a.severity) - rank(b.severity) ||
    (b.gpusLost ?? 0) - (a.gpusLost ?? 0) ||
    (a.since ?? 0) - (b.since ?? 0)
  );
}

/**
 * @param {string} key
 * @param {Dashboard.ShownFinding[]} members
 */
function group(key, members) {
  const sorted = [...members].sort((a, b) => (b.lost_ratio ?? -1) - (a.lost_ratio ?? -1));
  const starts = members.map((finding) => finding.start).filter((start) => typeof start === "number");
  const { id, severity, family } = sorted[0];
  const isOver = members.every((finding) => finding.isPast && typeof finding.end === "number");
  return {
    key,
    id,
    severity,
    family,
    members: sorted,
    lost: sorted[0].lost_ratio,
    since: starts.length ? Math.min(...starts) : null,
    until: isOver ? Math.max(...members.map((finding) => finding.end ?? 0)) : null,
  };
}

/**
 * @param {Dashboard.FindingGroup} a
 * @param {Dashboard.FindingGroup} b
 */
function worse(a, b) {
  const faults = Number(isFault(b)) - Number(isFault(a));
  return faults || rank(a.severity) - rank(b.severity) || (b.lost ?? -1) - (a.lost ?? -1) || b.members.length - a.members.length;
}

/**
 * Link to the GPU or node of a finding.
 * @param {Dashboard.ShownFinding} finding
 */
export function placeLink(finding) {
  if (finding.id === "node_missing") return html`<bdi>${format.text(finding.node)}</bdi>`;
  if (finding.label === null || finding.label === undefined) {
    return html`<a href=${href("node", finding.node)}><bdi>${format.text(finding.node)}</bdi></a>`;
  }
  return html`<a href=${href("gpu", finding.node, finding.label)}><bdi>${format.text(finding.node)}</bdi> GPU ${format.text(finding.label)}</a>`;
}

/**
 * "on 14 GPUs of 3 nodes".
 * @param {Dashboard.ShownFinding[]} members
 */
export function spread(members) {
  const gpus = new Set(
    members
      .filter((finding) => finding.label !== null && finding.label !== undefined)
      .map((finding) => `${finding.node}\n${finding.label}`),
  ).size;
  const nodes = new Set(members.map((finding) => finding.node)).size;
  if (!gpus) return nodes === 1 ? "on 1 node" : `on ${nodes} nodes`;
  const where = gpus === 1 ? "on 1 GPU" : `on ${gpus} GPUs`;
  return nodes > 1 ? `${where} of ${nodes} nodes` : where;
}

/**
 * One group as a card. `view` = {manual, now, processesOf, isOpen(name), toggle(name, open), copy(group), explain(id)}.
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
export function findingCard(entry, view) {
  const [worst] = entry.members;
  const severity = shownSeverity(entry);
  const title = titleOf(view.manual, worst);
  return html`<article class="card finding severity-${severity}" aria-label=${`${severityWord(severity)}: ${title}`}>
    <header class="card-head finding-head">
      ${severityMark(entry)}
      <h2>${title}</h2>
      <span class="badge muted">${spread(entry.members)}</span>
      <span class="finding-tools">${meaning(worst, view)}
        <button type="button" class="button quiet" @click=${() => view.copy(entry)}>Copy as text</button></span>
    </header>
    <p class="finding-summary">${format.text(worst.summary)}${entry.members.length > 1 ? html` <span class="muted">(worst: <bdi>${format.text(worst.node)}</bdi>)</span>` : nothing}</p>
    ${codeLines(withLine(entry))}
    ${facts(entry, view)} ${places(entry, view)}
    <div class="disclosures">
      ${disclosure("evidence", "Evidence", evidence(worst, view), entry, view)}
      ${worst.advice?.length ? disclosure("advice", "What to do", adviceList(worst.advice), entry, view) : nothing}
    </div>
  </article>`;
}

/**
 * The worst member that names lines of code; else the worst one.
 * @param {Dashboard.FindingGroup} entry
 */
function withLine({ members }) {
  return members.find((finding) => finding.where?.length) ?? members[0];
}

/**
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
function facts(entry, view) {
  const [worst] = entry.members;
  const sure = [...new Set(entry.members.map((finding) => confidenceWord(finding.confidence)))].join(", ");
  return html`<dl class="facts">
    <div><dt>Lost time</dt><dd>${lost(entry)}</dd></div>
    <div><dt>Confidence</dt><dd>${sure}</dd></div>
    <div><dt>${entry.until === null ? "Since" : "From"}</dt><dd>${since(entry, view)}</dd></div>
    ${entry.until === null ? nothing : html`<div><dt>Until</dt><dd>${moment(entry.until, view.now)}</dd></div>`}
    <div><dt>Category</dt><dd>${familyName(worst.family)}</dd></div>
    ${held(entry, view)}
  </dl>`;
}

/**
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
function since(entry, view) {
  if (entry.since === null) return "–";
  const before = typeof view.from === "number" && entry.since < view.from ? ", before the time range" : "";
  const length = format.duration(Math.max(0, (entry.until ?? view.now) - entry.since));
  return html`${moment(entry.since, view.now)} <span class="muted">(${length}${before})</span>`;
}

/**
 * A time of day, with its day when that is not within the last one.
 * @param {number} time
 * @param {number} now
 */
function moment(time, now) {
  return now - time < DAY_SECONDS ? format.clock(time) : format.dateTime(time);
}

/** @param {Dashboard.FindingGroup} entry */
function lost(entry) {
  const known = entry.members.map((finding) => finding.lost_ratio).filter((ratio) => typeof ratio === "number");
  if (!known.length) return "–";
  const [least, most] = [format.percent(Math.min(...known)), format.percent(Math.max(...known))];
  return least === most ? most : `${least} to ${most}`;
}

/**
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
function held(entry, view) {
  const users = new Set(entry.members.flatMap((finding) => view.processesOf(finding).map((process) => process.user)).filter(Boolean));
  if (!users.size) return nothing;
  const shown = [...users].slice(0, MAX_USERS);
  return html`<div><dt>Users</dt><dd>${shown.map((user, place) => html`${place ? ", " : ""}<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>`)}${users.size > shown.length ? `, and ${users.size - shown.length} more` : ""}</dd></div>`;
}

/**
 * Every GPU or node once, sorted by name, with its number of findings.
 * @param {Dashboard.ShownFinding[]} members
 */
function inOrder(members) {
  const found = new Map();
  for (const finding of members) {
    const key = `${finding.node}\n${finding.label ?? ""}`;
    found.set(key, { finding: found.get(key)?.finding ?? finding, times: (found.get(key)?.times ?? 0) + 1 });
  }
  return [...found].sort(([a], [b]) => byName(a, b)).map(([, one]) => one);
}

/**
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
function places(entry, view) {
  const all = view.isOpen(`${entry.key} places`);
  const where = inOrder(entry.members);
  const shown = all ? where : where.slice(0, MAX_PLACES);
  const more = where.length - shown.length;
  return html`<ul class="chips" aria-label="Where">
    ${shown.map(({ finding, times }) => html`<li>${placeLink(finding)}${times > 1 ? html` <span class="muted">${times} times</span>` : nothing}${where.length > 1 && typeof finding.lost_ratio === "number" ? html` <span class="muted">${format.percent(finding.lost_ratio)}</span>` : nothing}</li>`)}
    ${more > 0 ? html`<li><button type="button" class="button quiet" @click=${() => view.toggle(`${entry.key} places`, true)}>and ${more} more</button></li>` : nothing}
  </ul>`;
}

/**
 * @param {string} name
 * @param {string} words
 * @param {Dashboard.Content} body
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.FindingView} view
 */
function disclosure(name, words, body, entry, view) {
  const key = `${entry.key} ${name}`;
  return html`<details class="disclosure" ?open=${view.isOpen(key)} @toggle=${(/** @type {Event} */ event) => view.toggle(key, isOpened(event))}>
    <summary>${words}</summary>${body}</details>`;
}

/**
 * @param {Dashboard.ShownFinding} finding
 * @param {Dashboard.FindingView} view
 */
function evidence(finding, view) {
  const rows = finding.evidence ?? [];
  const against = finding.counter_evidence ?? [];
  return html`${rows.length ? measures(`Measured ${where(finding)}`, rows, view) : html`<p class="muted">No measurements: the driver or system reported this.</p>`}
    ${against.length ? measures("Evidence against it", against, view) : nothing}
    ${finding.ruled_out?.length ? ruledOut(finding.ruled_out, view) : nothing}`;
}

/**
 * @param {string[]} items
 * @param {Dashboard.FindingView} view
 */
function ruledOut(items, view) {
  return html`<p class="ruled-out-title">Ruled out</p><ul class="ruled-out">${items.map((item) => html`<li>${inWords(item, view)}</li>`)}</ul>`;
}

/**
 * `swap_thrash: pages a second from swap 0`, with the names of findings as their titles.
 * @param {string} item
 * @param {Dashboard.FindingView} view
 */
function inWords(item, view) {
  const [, names, reason] = String(item).match(/^([a-z0-9_, ]+): (.*)$/s) ?? [];
  if (!names) return item;
  return html`${names
    .split(", ")
    .map((id) => findingTitle(view.manual, id))
    .join("; ")}: <span class="muted">${reason}</span>`;
}

/** @param {Dashboard.ShownFinding} finding */
function where(finding) {
  const node = format.text(finding.node);
  return finding.label === null || finding.label === undefined ? `on ${node}` : `on ${node} GPU ${format.text(finding.label)}`;
}

/**
 * @param {string} caption
 * @param {Api.FindingEvidence[]} rows
 * @param {Dashboard.FindingView} view
 */
function measures(caption, rows, view) {
  return html`<table class="table evidence"><caption>${caption}</caption>
    <thead><tr><th scope="col">Signal</th><th scope="col" class="num">Value</th><th scope="col">Threshold</th></tr></thead>
    <tbody>${rows.map((row) => measure(row, view))}</tbody></table>`;
}

/**
 * @param {Api.FindingEvidence} row
 * @param {Dashboard.FindingView} view
 */
function measure(row, view) {
  const said = describeEvidence(view.manual, row);
  return html`<tr><th scope="row" title=${`${row.signal}, ${row.statistic}`}>${said.words}</th><td class="num">${said.value}</td><td>${said.against || "–"}</td></tr>`;
}

/**
 * @param {Dashboard.ShownFinding} finding
 * @param {Dashboard.FindingView} view
 */
function meaning(finding, view) {
  if (/^https?:\/\//i.test(finding.url ?? "")) {
    return html`<a class="button quiet" href=${finding.url} rel="noreferrer noopener">What it means</a>`;
  }
  if (!view.manual.findings[finding.id]) return nothing;
  return html`<a class="button quiet" href=${meaningHref(finding.id)}>What it means</a>`;
}

/**
 * Link to the explanation of a finding; on the findings page the filter is kept.
 * @param {string} id
 */
export function meaningHref(id) {
  const { page, query } = current();
  return href("findings", { ...(page === "findings" ? query : {}), explain: id });
}

/**
 * A group as plain text, for a message to a colleague.
 * @param {Dashboard.FindingGroup} entry
 * @param {Dashboard.Manual} manual
 */
export function asText(entry, manual) {
  const [worst] = entry.members;
  const lines = [
    `${severityWord(shownSeverity(entry)).toUpperCase()} ${titleOf(manual, worst)} (${spread(entry.members)})`,
    worst.summary,
    "",
  ];
  lines.push(`Where: ${entry.members.map((finding) => where(finding).slice(3)).join("; ")}`);
  const code = lineText(withLine(entry));
  if (code) lines.push(`Code: ${code}`);
  lines.push(`Lost time: ${lost(entry)}; confidence: ${confidenceWord(worst.confidence)}; since: ${format.dateTime(entry.since)}`, "");
  for (const row of worst.evidence ?? []) lines.push(`- ${measureText(manual, row)}`);
  for (const row of worst.counter_evidence ?? []) lines.push(`- against it: ${measureText(manual, row)}`);
  if (worst.ruled_out?.length) lines.push(`- ruled out: ${worst.ruled_out.join("; ")}`);
  for (const [place, item] of (worst.advice ?? []).entries()) lines.push(`${place + 1}. ${item.do} (${item.why})`);
  return lines.join("\n");
}

/**
 * @param {Dashboard.Manual} manual
 * @param {Api.FindingEvidence} row
 */
function measureText(manual, row) {
  const said = describeEvidence(manual, row);
  return `${said.words} ${said.value}${said.against ? `, threshold: ${said.against}` : ""}`;
}
