// Findings in groups: the same one on many GPUs is said once.

import { html, nothing } from "../vendor/lit-html.js";
import { byName } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, href } from "../core/router.js";
import { adviceList } from "./explanation.js";
import { confidenceWord, familyName, findingTitle, told } from "./manual.js";

/** Severities, worst first. */
export const SEVERITIES = ["critical", "high", "medium", "low", "info"];
const SHAPES = { critical: "⬣", high: "▲", medium: "◆", low: "●", info: "○" };
const MOST_PLACES = 12;
const MOST_USERS = 6;
const DAY_SECONDS = 86400;

/** How bad a severity is: 0 for the worst. */
export function rank(severity) {
  const place = SEVERITIES.indexOf(severity);
  return place < 0 ? SEVERITIES.length : place;
}

/** A severity as a shape and a word. */
export function severityMark(severity) {
  const known = SEVERITIES.includes(severity) ? severity : "info";
  return html`<span class="severity severity-${known}"><span class="severity-shape" aria-hidden="true">${SHAPES[known]}</span> ${known}</span>`;
}

/** What makes two reports reports of the same finding of a node. */
export function findingKey({ id, label, cause }) {
  return `${id}\n${label ?? ""}\n${cause ?? ""}`;
}

/** Groups of one finding at one severity, worst first; faults of several causes are several: {key, id, severity, family, members, lost, since, until}. */
export function grouped(findings) {
  const groups = new Map();
  for (const finding of findings) {
    const key = `${finding.severity} ${finding.id}${finding.id === "gpu_fault" ? ` ${finding.cause ?? finding.summary}` : ""}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(finding);
  }
  return [...groups].map(([key, members]) => group(key, members)).sort(worse);
}

function group(key, members) {
  const sorted = [...members].sort((a, b) => (b.lost_ratio ?? -1) - (a.lost_ratio ?? -1));
  const starts = members.map((finding) => finding.start).filter((start) => typeof start === "number");
  const { id, severity, family } = sorted[0];
  const isOver = members.every((finding) => finding.isPast && typeof finding.end === "number");
  return {
    key, id, severity, family, members: sorted, lost: sorted[0].lost_ratio,
    since: starts.length ? Math.min(...starts) : null,
    until: isOver ? Math.max(...members.map((finding) => finding.end)) : null,
  };
}

function worse(a, b) {
  return rank(a.severity) - rank(b.severity) || (b.lost ?? -1) - (a.lost ?? -1) || b.members.length - a.members.length;
}

/** Where a finding is: a link to its GPU, or to its node where that has a page. */
export function placeLink(finding) {
  if (finding.id === "node_missing") return html`<bdi>${format.text(finding.node)}</bdi>`;
  if (finding.label === null || finding.label === undefined) {
    return html`<a href=${href("node", finding.node)}><bdi>${format.text(finding.node)}</bdi></a>`;
  }
  return html`<a href=${href("gpu", finding.node, finding.label)}><bdi>${format.text(finding.node)}</bdi> · GPU ${format.text(finding.label)}</a>`;
}

/** "on 14 GPUs of 3 nodes". */
export function spread(members) {
  const gpus = new Set(members.filter((finding) => finding.label !== null && finding.label !== undefined).map((finding) => `${finding.node}\n${finding.label}`)).size;
  const nodes = new Set(members.map((finding) => finding.node)).size;
  if (!gpus) return nodes === 1 ? "on 1 node" : `on ${nodes} nodes`;
  const where = gpus === 1 ? "on 1 GPU" : `on ${gpus} GPUs`;
  return nodes > 1 ? `${where} of ${nodes} nodes` : where;
}

/** One group as a card. `view` = {book, now, processesOf, isOpen(name), toggle(name, open), copy(group), explain(id)}. */
export function findingCard(entry, view) {
  const [worst] = entry.members;
  return html`<article class="card finding" aria-label=${`${entry.severity}: ${findingTitle(view.book, entry.id)}`}>
    <header class="card-head finding-head">
      ${severityMark(entry.severity)}
      <h2>${findingTitle(view.book, entry.id)}</h2>
      <span class="badge muted">${spread(entry.members)}</span>
      <span class="finding-tools">${meaning(worst, view)}
        <button type="button" class="button quiet" @click=${() => view.copy(entry)}>Copy as text</button></span>
    </header>
    <p class="finding-summary">${format.text(worst.summary)}${entry.members.length > 1 ? html` <span class="muted">(the worst: <bdi>${format.text(worst.node)}</bdi>)</span>` : nothing}</p>
    ${facts(entry, view)} ${places(entry, view)}
    <div class="disclosures">
      ${disclosure("evidence", "Evidence", evidence(worst, view), entry, view)}
      ${worst.advice?.length ? disclosure("advice", "What to do", adviceList(worst.advice), entry, view) : nothing}
    </div>
  </article>`;
}

function facts(entry, view) {
  const [worst] = entry.members;
  const sure = [...new Set(entry.members.map((finding) => confidenceWord(finding.confidence)))].join(", ");
  return html`<dl class="facts">
    <div><dt>Lost time</dt><dd>${lost(entry)}</dd></div>
    <div><dt>How sure</dt><dd>${sure}</dd></div>
    <div><dt>${entry.until === null ? "Since" : "From"}</dt><dd>${since(entry, view)}</dd></div>
    ${entry.until === null ? nothing : html`<div><dt>Until</dt><dd>${moment(entry.until, view.now)}</dd></div>`}
    <div><dt>About</dt><dd>${familyName(worst.family)}</dd></div>
    ${held(entry, view)}
  </dl>`;
}

function since(entry, view) {
  if (entry.since === null) return "–";
  const before = typeof view.from === "number" && entry.since < view.from ? ", before the time shown" : "";
  const length = format.duration(Math.max(0, (entry.until ?? view.now) - entry.since));
  return html`${moment(entry.since, view.now)} <span class="muted">(${length}${before})</span>`;
}

/** A time of day, with its day when that is not within the last one. */
function moment(time, now) {
  return now - time < DAY_SECONDS ? format.clock(time) : format.dateTime(time);
}

function lost(entry) {
  const known = entry.members.map((finding) => finding.lost_ratio).filter((ratio) => typeof ratio === "number");
  if (!known.length) return "–";
  const [least, most] = [format.percent(Math.min(...known)), format.percent(Math.max(...known))];
  return least === most ? most : `${least} to ${most}`;
}

function held(entry, view) {
  const users = new Set(entry.members.flatMap((finding) => view.processesOf(finding).map((process) => process.user)).filter(Boolean));
  if (!users.size) return nothing;
  const shown = [...users].slice(0, MOST_USERS);
  return html`<div><dt>Whose</dt><dd>${shown.map((user, place) => html`${place ? ", " : ""}<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>`)}${users.size > shown.length ? `, and ${users.size - shown.length} more` : ""}</dd></div>`;
}

/** Each place once, by name, with how often it had the finding. */
function inOrder(members) {
  const found = new Map();
  for (const finding of members) {
    const key = `${finding.node}\n${finding.label ?? ""}`;
    found.set(key, { finding: found.get(key)?.finding ?? finding, times: (found.get(key)?.times ?? 0) + 1 });
  }
  return [...found].sort(([a], [b]) => byName(a, b)).map(([, one]) => one);
}

function places(entry, view) {
  const all = view.isOpen(`${entry.key} places`);
  const where = inOrder(entry.members);
  const shown = all ? where : where.slice(0, MOST_PLACES);
  const more = where.length - shown.length;
  return html`<ul class="chips" aria-label="Where">
    ${shown.map(({ finding, times }) => html`<li>${placeLink(finding)}${times > 1 ? html` <span class="muted">${times} times</span>` : nothing}${where.length > 1 && typeof finding.lost_ratio === "number" ? html` <span class="muted">${format.percent(finding.lost_ratio)}</span>` : nothing}</li>`)}
    ${more > 0 ? html`<li><button type="button" class="button quiet" @click=${() => view.toggle(`${entry.key} places`, true)}>and ${more} more</button></li>` : nothing}
  </ul>`;
}

function disclosure(name, words, body, entry, view) {
  const key = `${entry.key} ${name}`;
  return html`<details class="disclosure" ?open=${view.isOpen(key)} @toggle=${(event) => view.toggle(key, event.target.open)}>
    <summary>${words}</summary>${body}</details>`;
}

function evidence(finding, view) {
  const rows = finding.evidence ?? [];
  const against = finding.counter_evidence ?? [];
  return html`${rows.length ? measures(`Measured ${where(finding)}`, rows, view) : html`<p class="muted">No numbers: this is a fact that was reported.</p>`}
    ${against.length ? measures("What speaks against it", against, view) : nothing}
    ${finding.ruled_out?.length ? ruledOut(finding.ruled_out, view) : nothing}`;
}

function ruledOut(items, view) {
  return html`<p class="ruled-out-title">Ruled out</p><ul class="ruled-out">${items.map((item) => html`<li>${inWords(item, view)}</li>`)}</ul>`;
}

/** `swap_thrash: pages a second from swap 0`, with the names of findings as their titles. */
function inWords(item, view) {
  const [, names, reason] = String(item).match(/^([a-z0-9_, ]+): (.*)$/s) ?? [];
  if (!names) return item;
  return html`${names.split(", ").map((id) => findingTitle(view.book, id)).join("; ")}: <span class="muted">${reason}</span>`;
}

function where(finding) {
  const node = format.text(finding.node);
  return finding.label === null || finding.label === undefined ? `on ${node}` : `on ${node}, GPU ${format.text(finding.label)}`;
}

function measures(caption, rows, view) {
  return html`<table class="table evidence"><caption>${caption}</caption>
    <thead><tr><th scope="col">What</th><th scope="col" class="num">Value</th><th scope="col">Counts when</th></tr></thead>
    <tbody>${rows.map((row) => measure(row, view))}</tbody></table>`;
}

function measure(row, view) {
  const said = told(view.book, row);
  return html`<tr><th scope="row" title=${`${row.signal}, ${row.statistic}`}>${said.words}</th><td class="num">${said.value}</td><td>${said.against || "–"}</td></tr>`;
}

function meaning(finding, view) {
  if (/^https?:\/\//i.test(finding.url ?? "")) {
    return html`<a class="button quiet" href=${finding.url} rel="noreferrer noopener">What it means</a>`;
  }
  if (!view.book.findings[finding.id]) return nothing;
  return html`<a class="button quiet" href=${meaningHref(finding.id)}>What it means</a>`;
}

/** Where it is told what a finding means; on the page of findings its filter stays. */
export function meaningHref(id) {
  const { page, query } = current();
  return href("findings", { ...(page === "findings" ? query : {}), explain: id });
}

/** A group as plain text, for a message to a colleague. */
export function asText(entry, book) {
  const [worst] = entry.members;
  const lines = [`${entry.severity.toUpperCase()} ${findingTitle(book, entry.id)} (${spread(entry.members)})`, worst.summary, ""];
  lines.push(`Where: ${entry.members.map((finding) => where(finding).slice(3)).join("; ")}`);
  lines.push(`Lost time: ${lost(entry)}; how sure: ${confidenceWord(worst.confidence)}; since: ${format.dateTime(entry.since)}`, "");
  for (const row of worst.evidence ?? []) lines.push(`- ${measureText(book, row)}`);
  for (const row of worst.counter_evidence ?? []) lines.push(`- against it: ${measureText(book, row)}`);
  if (worst.ruled_out?.length) lines.push(`- ruled out: ${worst.ruled_out.join("; ")}`);
  for (const [place, item] of (worst.advice ?? []).entries()) lines.push(`${place + 1}. ${item.do} (${item.why})`);
  return lines.join("\n");
}

function measureText(book, row) {
  const said = told(book, row);
  return `${said.words} ${said.value}${said.against ? `, counts ${said.against}` : ""}`;
}
