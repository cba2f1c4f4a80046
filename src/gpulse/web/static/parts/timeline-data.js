// What lies on timelines, made from the head's answers: processes, findings over time, events.
import { html, nothing } from "../vendor/lit-html.js";
import { isHarvested, jobKey } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { findingKey, severityMark } from "./findings.js";
import { findingTitle, told } from "./manual.js";
import { toneOf } from "./chart-theme.js";
import { programWords } from "./program.js";

/** What lives and was seen holding a GPU so short a time ago still holds it. */
const STILL_SECONDS = 120;

const EVENTS = {
  node_late: ["late", "…", "warn", "late, no samples for a while"],
  node_lost: ["lost", "✕", "bad", "lost, not heard of"],
  node_back: ["back", "↩", "good", "heard of again"],
  node_missing: ["missing", "✕", "bad", "an expected node has never reported"],
  node_found: ["found", "+", "good", "an expected node has reported"],
  node_joined: ["joined", "+", "good", "heard of for the first time"],
  agent_started: ["agent started", "▸", "muted", "its agent started"],
  run_killed: ["agent killed", "✕", "warn", "its agent was ended before it could say so"],
  frames_dropped: ["samples dropped", "∅", "warn", "samples were dropped before they could be sent"],
  gap: ["gap", "∅", "warn", "samples are missing"],
  clock_step: ["clock set", "◷", "warn", "its clock was set"],
  clock_skew: ["clock off", "◷", "warn", "its clock differs from the head's"],
  name_conflict: ["name taken", "!", "warn", "another node has the same name"],
  head_started: ["head started", "▸", "muted", "the head started"],
  head_stopped: ["head stopped", "■", "muted", "the head stopped"],
  head_clock_step: ["head's clock set", "◷", "warn", "the clock of the head was set"],
  records_lost: ["records lost", "∅", "bad", "the head lost records"],
  unreadable_event: ["unreadable", "!", "warn", "what its agent said could not be read"],
};
/** Kinds of events to ask the head for, besides findings. */
export const EVENT_KINDS = [...Object.keys(EVENTS), "health"];
const GPU_TROUBLE = { gpu_lost: "lost", not_answering: "not answering" };

const epoch = (time) => (typeof time === "number" ? time : Date.parse(time) / 1000);

const MOST_WORDS = 3;
const MOST_LETTERS = 48;

/** What a process runs, in a few words: `train.py --lr 0.1`. */
export function programOf(process) {
  const words = programWords(process).slice(0, MOST_WORDS).join(" ");
  return format.text(words.length > MOST_LETTERS ? `${words.slice(0, MOST_LETTERS)}…` : words);
}

/** What a process is called on a bar: whose it is and what it runs. */
export function processLabel(process) {
  return `${format.text(process.user ?? "?")} · ${programOf(process)}`;
}

/** The address of the page about a process's job. */
export function jobHref(node, process, query = {}) {
  const job = process.job;
  if (job) return href("job", job, query);
  const [, key] = jobKey("", process).split("/");
  return href("job", node, key, query);
}

/** Bars of the processes that held GPUs, one for each GPU that a process held; of one node or one GPU where they are given. */
export function processBars(processes, { node = null, gpu = null, now }) {
  const bars = [];
  for (const process of processes) {
    if (node !== null && process.node !== node) continue;
    process.gpus.forEach((held, place) => {
      if (gpu === null || held.gpu === gpu) bars.push(processBar(process, held, place, now));
    });
  }
  return bars;
}

/** What an answer about processes does not have, in words; null when it has everything. */
export function processNote(answer) {
  const cut = answer?.truncated ? ["Not all processes are shown: choose a shorter time."] : [];
  const lacks = (answer?.incomplete ?? []).map((text) => `Not all is known: ${format.text(text)}.`);
  return [...cut, ...lacks].join(" ") || null;
}

/** Until when a process held a GPU: until now where it still does. */
export function heldUntil(process, held, now) {
  return process.ended === null && held.to > now - STILL_SECONDS ? Math.max(held.to, now) : held.to;
}

function processBar(process, held, place, now) {
  const until = heldUntil(process, held, now);
  const label = processLabel(process);
  const length = format.duration(until - held.from);
  return {
    key: `${process.node}/${process.pid}@${process.start_time}/${held.gpu}/${place}`,
    from: held.from,
    to: until,
    label: `${label}${process.job ? ` · ${format.text(process.job)}` : ""}`,
    say: `${label}, pid ${process.pid}, GPU ${held.gpu}, ${length} from ${format.dateTime(held.from)}`,
    tone: isHarvested(process) ? "harvested" : toneOf(process.user ?? process.pid),
    href: jobHref(process.node, process),
    detail: () => processDetail(process, held, until),
  };
}

function processDetail(process, held, until) {
  const rows = [
    ["User", process.user],
    ["Program", process.command?.length ? process.command.join(" ") : process.name],
    ["Where", `${process.node}, GPU ${held.gpu}, pid ${process.pid}`],
    ["Job", process.job],
    ["Container", process.container],
    ["Held", `${format.dateTime(held.from)} – ${process.ended === null ? "now" : format.dateTime(until)} (${format.duration(until - held.from)})`],
    ["GPU memory", `${format.bytes(held.memory_bytes_mean)} mean, ${format.bytes(held.memory_bytes_max)} at most`],
    ["SM share", format.known(held.sm_ratio_mean) ? format.percent(held.sm_ratio_mean) : null],
  ];
  return facts(rows);
}

/** Pairs of words as a list; pairs without a value are left out. */
export function facts(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="pairs">${known.map(([name, value]) => html`<div><dt>${name}</dt><dd>${typeof value === "string" ? html`<bdi>${format.text(value)}</bdi>` : value}</dd></div>`)}</dl>`;
}

/** Stretches in which findings held, from the head's answer; what still holds lasts until `to`. */
export function findingSpans(answer, to) {
  return answer.spans.map((finding) => {
    const { node, from, severity } = finding;
    const isOlder = from < answer.from;
    return { key: `${node}|${findingKey(finding)}|${from}`, node, from, to: Math.max(from + 1, finding.to ?? to), severity, isOlder, finding };
  });
}

/** Findings as bars. */
export function findingBars(spans, book, { withPlace = false } = {}) {
  return spans.map((span) => {
    const { finding } = span;
    const place = finding.label === null || finding.label === undefined ? span.node : `GPU ${finding.label}`;
    const title = findingTitle(book, finding.id);
    const label = `${finding.severity}: ${title}${withPlace ? ` · ${place}` : ""}`;
    return {
      ...span,
      label,
      say: `${label}, ${format.duration(span.to - span.from)} from ${format.dateTime(span.from)}. ${finding.summary}`,
      detail: () => findingDetail(span, place, book),
    };
  });
}

function findingDetail(span, place, book) {
  const { finding } = span;
  const begin = `${format.dateTime(span.from)}${span.isOlder ? " (before the time shown)" : ""}`;
  const end = finding.to === null ? "now" : format.dateTime(span.to);
  const length = format.duration(span.to - span.from);
  return html`<div class="tl-finding">
    <p>${severityMark(finding.severity)} <strong>${findingTitle(book, finding.id)}</strong> <span class="muted">${place}</span></p>
    <p>${format.text(finding.summary)}</p>
    <p class="muted">${begin} – ${end} (${length})</p>
    ${finding.evidence?.length ? html`<ul class="tl-evidence">${finding.evidence.map((one) => evidence(one, book))}</ul>` : nothing}
    ${finding.advice?.length ? html`<p><strong>Try:</strong> ${format.text(finding.advice[0].do)}</p>` : nothing}
    <p><a href=${href("findings", { explain: finding.id })}>What it means</a></p>
  </div>`;
}

function evidence(one, book) {
  const { words, value, against } = told(book, one);
  return html`<li>${words}: <strong>${value}</strong>${against ? html` <span class="muted">(counts ${against})</span>` : nothing}</li>`;
}

/** What happened, as marks: the head's events, GPUs that went and came back by their health, and Xid errors. */
export function eventMarks(events, { gpu = null } = {}) {
  const marks = [];
  const troubled = new Map();
  events.forEach((event, place) => {
    const time = epoch(event.time);
    if (event.kind === "health") marks.push(...healthMarks(event, time, troubled, gpu));
    const known = EVENTS[event.kind];
    if (!known) return;
    const [label, glyph, tone, words] = known;
    const subject = event.node ? `${event.node}: ${words}` : words;
    marks.push(mark(`${event.kind} ${time} ${place}`, time, { label, glyph, tone, subject, rows: detailRows(event.detail) }));
  });
  return marks;
}

function healthMarks(event, time, troubled, gpu) {
  const before = troubled.get(event.node) ?? new Map();
  const now = new Map();
  for (const entry of event.detail.entries ?? []) {
    const words = GPU_TROUBLE[entry.code];
    if (words && (gpu === null || isAbout(entry.subject, gpu))) now.set(`${entry.subject} ${words}`, entry);
  }
  troubled.set(event.node, now);
  const came = [...now].filter(([key]) => !before.has(key)).map(([key, entry]) =>
    mark(`health ${time} ${key}`, time, { label: key, glyph: "✕", tone: "bad", subject: `${event.node}: ${key}`, rows: [["Why", entry.detail], ["Try", entry.hint]] }));
  const went = [...before].filter(([key]) => !now.has(key)).map(([key, entry]) =>
    mark(`health ${time} ${key} over`, time, { label: `${entry.subject} recovered`, glyph: "↩", tone: "good", subject: `${event.node}: ${entry.subject} recovered`, rows: [] }));
  return [...came, ...went];
}

/** Whether a health note's subject, `gpu 3` or `gpu 0-3,5`, speaks of a GPU. */
export function isAbout(subject, label) {
  if (!subject?.startsWith("gpu ")) return false;
  return subject.slice(4).split(/,\s*/).some((part) => {
    const [first, last] = part.split("-").map(Number);
    return part === label || (last !== undefined && Number(label) >= first && Number(label) <= last);
  });
}

/** What `xidMarks` is made of. */
export const XIDS = ["xid_last_timestamp_seconds", "xid_last_code"];

/** Xid errors, at the moments that the driver reported them. */
export function xidMarks(answer, { withGpu = false } = {}) {
  const marks = [];
  for (const moments of answer?.series.filter((series) => series.metric === XIDS[0]) ?? []) {
    const codes = answer.series.find((series) => series.metric === XIDS[1] && series.subject === moments.subject);
    let last = null;
    moments.values.forEach((value, at) => {
      if (!format.known(value) || (last !== null && value - last < 1)) return;
      // Within its own step a new moment is mixed with the one before it; the next step has it alone.
      const settled = last !== null && format.known(moments.values[at + 1]) ? at + 1 : at;
      last = moments.values[settled];
      if (last < answer.from || last > answer.to) return;
      const code = codes?.values[settled];
      const label = `Xid${format.known(code) ? ` ${Math.round(code)}` : ""}${withGpu ? ` · GPU ${moments.gpu}` : ""}`;
      marks.push(mark(`xid ${moments.subject} ${Math.round(last)}`, last, {
        label, glyph: "!", tone: "bad", subject: `${label}: the driver reported an error of GPU ${moments.gpu} of ${moments.node}`, rows: [],
      }));
    });
  }
  return marks;
}

function mark(key, time, { label, glyph, tone, subject, rows }) {
  return {
    key, time, label, glyph, tone,
    say: `${subject}, ${format.dateTime(time)}`,
    detail: () => html`<div><p><strong>${format.text(subject)}</strong></p><p class="muted">${format.dateTime(time)}</p>${facts(rows)}</div>`,
  };
}

function detailRows(detail) {
  return Object.entries(detail ?? {})
    .filter(([name, value]) => name !== "run" && typeof value !== "object" && value !== "")
    .map(([name, value]) => [name.replaceAll("_", " "), name === "seconds" ? `${value} s` : String(value)]);
}
