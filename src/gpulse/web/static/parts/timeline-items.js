// Timeline items from the head's answers: processes, findings and events.

import { isHarvested, severityWord, shownSeverity } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { codeLines } from "./code-lines.js";
import { findingKey, severityMark } from "./findings.js";
import { describeEvidence, titleOf } from "./findings-manual.js";
import { jobHref, processLabel, startOf } from "./processes.js";

/** A running process that was last seen on a GPU this recently still holds it. */
const STILL_SECONDS = 120;

/** @type {Record<string, [label: string, glyph: string, tone: Dashboard.MarkTone, words: string]>} */
const EVENTS = {
  node_late: ["late", "…", "warn", "late: no recent samples"],
  node_lost: ["lost", "✕", "bad", "lost: the node stopped reporting"],
  node_back: ["back", "↩", "good", "reporting again"],
  node_missing: ["missing", "✕", "bad", "an expected node has never reported"],
  node_found: ["found", "+", "good", "an expected node reported for the first time"],
  node_joined: ["joined", "+", "good", "reported for the first time"],
  agent_started: ["agent started", "▸", "muted", "the agent started"],
  run_killed: ["agent killed", "✕", "warn", "the agent was killed"],
  frames_dropped: ["samples dropped", "∅", "warn", "samples were dropped before they could be sent"],
  spool_damaged: ["spool damaged", "∅", "warn", "part of the agent's spool was damaged"],
  gap: ["gap", "∅", "warn", "samples are missing"],
  clock_step: ["clock changed", "◷", "warn", "the clock was changed"],
  clock_skew: ["clock differs", "◷", "warn", "the clock differs from the head's"],
  name_conflict: ["name taken", "!", "warn", "another node has the same name"],
  head_started: ["head started", "▸", "muted", "the head started"],
  head_stopped: ["head stopped", "■", "muted", "the head stopped"],
  head_clock_step: ["head's clock changed", "◷", "warn", "the head's clock was changed"],
  records_lost: ["records lost", "∅", "bad", "the head lost records"],
  idle_warning: ["idle GPUs", "◐", "warn", "the holder of idle GPUs was warned"],
  idle_second_warning: ["idle GPUs", "◐", "warn", "the holder of idle GPUs was warned again"],
  idle_hook_started: ["hook", "▸", "warn", "the hook for idle GPUs was started"],
  idle_hook_ended: ["hook ended", "■", "muted", "the hook for idle GPUs has ended"],
  idle_dry_run: ["idle GPUs", "◐", "muted", "idle GPUs (dry run: no action was taken)"],
  idle_resolved: ["no longer idle", "●", "good", "GPUs are no longer held idle"],
  unreadable_event: ["unreadable", "!", "warn", "a message from the agent could not be read"],
};
/** Kinds of events to request, in addition to findings. */
export const EVENT_KINDS = [...Object.keys(EVENTS), "health"];
/** @type {Record<string, string>} */
const GPU_TROUBLE = { gpu_lost: "lost", not_answering: "not answering" };

/** @param {string | number} time */
const epoch = (time) => (typeof time === "number" ? time : Date.parse(time) / 1000);

/**
 * Bars of the processes that held GPUs, one for each GPU that a process held; of one node or one GPU where they are given.
 * @param {Api.ProcessRow[]} processes
 * @param {{ node?: string | null, gpu?: string | null, from: number, now: number }} options
 */
export function processBars(processes, { node = null, gpu = null, from, now }) {
  /** @type {Dashboard.Bar[]} */
  const bars = [];
  for (const process of processes) {
    if (node !== null && process.node !== node) continue;
    process.gpus.forEach((held, place) => {
      if (gpu === null || held.gpu === gpu) bars.push(processBar(process, held, place, { from, now }));
    });
  }
  return bars;
}

/**
 * Describe what is missing in an answer about processes; null when it is complete.
 * @param {Api.ProcessReport | null} answer
 */
export function processNote(answer) {
  const cut = answer?.truncated ? ["Not all processes are shown; choose a shorter time range."] : [];
  const lacks = (answer?.incomplete ?? []).map((text) => `Incomplete: ${format.text(text)}.`);
  return [...cut, ...lacks].join(" ") || null;
}

/**
 * The time until which a process held a GPU; now if it still does.
 * @param {Api.ProcessRow} process
 * @param {Api.ProcessGpu} held
 * @param {number} now
 */
export function heldUntil(process, held, now) {
  return process.ended === null && held.to > now - STILL_SECONDS ? Math.max(held.to, now) : held.to;
}

/**
 * The time since which a process has held a GPU: since its own start, where it held it when it was first seen, or when the
 * time range begins. What is known of the GPU begins only with the first sample of the range.
 * @param {Api.ProcessRow} process
 * @param {Api.ProcessGpu} held
 * @param {number} from
 */
export function heldSince(process, held, from) {
  return held.from - Math.max(process.first_seen, from) < STILL_SECONDS ? Math.min(held.from, startOf(process)) : held.from;
}

/**
 * @param {Api.ProcessRow} process
 * @param {Api.ProcessGpu} held
 * @param {number} place
 * @param {{ from: number, now: number }} view
 */
function processBar(process, held, place, { from, now }) {
  const since = heldSince(process, held, from);
  const until = heldUntil(process, held, now);
  const label = processLabel(process);
  const length = format.duration(until - since);
  return {
    key: `${process.node}/${process.pid}@${process.start_time}/${held.gpu}/${place}`,
    from: since,
    to: until,
    label: `${label}${process.job ? ` · ${format.text(process.job)}` : ""}`,
    say: `${label}, pid ${process.pid}, GPU ${held.gpu}, ${length} from ${format.dateTime(since)}`,
    tone: isHarvested(process) ? "harvested" : "process",
    href: jobHref(process.node, process),
    detail: () => processDetail(process, held, { since, until, from }),
  };
}

/**
 * @param {Api.ProcessRow} process
 * @param {Api.ProcessGpu} held
 * @param {{ since: number, until: number, from: number }} times
 */
function processDetail(process, held, { since, until, from }) {
  /** @type {Array<[string, Dashboard.Content]>} */
  const rows = [
    ["User", process.user],
    ["Program", process.command?.length ? process.command.join(" ") : process.name],
    ["Location", `${process.node} GPU ${held.gpu}, pid ${process.pid}`],
    ["Job", process.job],
    ["Container", process.container],
    [
      "Held",
      `${format.dateTime(since)}${since < from ? " (before the time range)" : ""} – ${process.ended === null ? "now" : format.dateTime(until)} (${format.duration(until - since)})`,
    ],
    ["GPU memory", `${format.bytes(held.memory_bytes_mean)} mean, ${format.bytes(held.memory_bytes_max)} peak`],
    ["SM share", format.known(held.sm_ratio_mean) ? format.percent(held.sm_ratio_mean) : null],
  ];
  return facts(rows);
}

/**
 * Pairs of words as a list; pairs without a value are left out.
 * @param {Array<[string, Dashboard.Content]>} rows
 */
export function facts(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return html`<dl class="pairs">${known.map(([name, value]) => html`<div><dt>${name}</dt><dd>${typeof value === "string" ? html`<bdi>${format.text(value)}</bdi>` : value}</dd></div>`)}</dl>`;
}

/**
 * Time spans of findings from the head's answer; current ones end at `to`.
 * @param {Api.FindingReport} answer
 * @param {number} to
 */
export function findingSpans(answer, to) {
  return answer.spans.map((finding) => {
    const { node, from } = finding;
    const isOlder = from < answer.from;
    return {
      key: `${node}|${findingKey(finding)}|${from}`,
      node,
      from,
      to: Math.max(from + 1, finding.to ?? to),
      severity: shownSeverity(finding),
      isOlder,
      finding,
    };
  });
}

/**
 * Spans in which the same finding of several GPUs, while it holds without a break, is one.
 * @param {Dashboard.FindingSpan[]} spans
 */
export function mergedSpans(spans) {
  /** @type {Dashboard.FindingSpan[]} */
  const merged = [];
  for (const span of [...spans].sort((a, b) => a.from - b.from)) {
    const same = merged.find(
      (one) =>
        one.finding.id === span.finding.id &&
        one.finding.cause === span.finding.cause &&
        one.severity === span.severity &&
        one.to >= span.from,
    );
    const place = `${span.node} · ${span.finding.label ?? ""}`;
    if (!same) merged.push({ ...span, places: new Set([place]) });
    else {
      same.to = Math.max(same.to, span.to);
      same.places?.add(place);
    }
  }
  return merged;
}

/** @type {Record<Dashboard.Severity, string>} */
const MARKS = { critical: "⬣", high: "▲", medium: "◭", low: "△", info: "△" };

/**
 * Findings as bars.
 * @param {Dashboard.FindingSpan[]} spans
 * @param {Dashboard.Manual} manual
 * @param {{ withPlace?: boolean }} [options]
 */
export function findingBars(spans, manual, { withPlace = false } = {}) {
  return spans.map((span) => {
    const { finding } = span;
    const own = finding.label === null || finding.label === undefined ? span.node : `GPU ${finding.label}`;
    const place = span.places && span.places.size > 1 ? `${span.places.size} GPUs` : own;
    const title = `${titleOf(manual, finding)}${withPlace ? ` · ${place}` : ""}`;
    return {
      ...span,
      label: `${MARKS[span.severity]} ${title}`,
      say: `${severityWord(span.severity)}: ${title}, ${format.duration(span.to - span.from)} from ${format.dateTime(span.from)}. ${finding.summary}`,
      detail: () => findingDetail(span, place, manual),
    };
  });
}

/**
 * @param {Dashboard.FindingSpan} span
 * @param {string} place
 * @param {Dashboard.Manual} manual
 */
function findingDetail(span, place, manual) {
  const { finding } = span;
  const begin = `${format.dateTime(span.from)}${span.isOlder ? " (before the time range)" : ""}`;
  const end = finding.to === null ? "now" : format.dateTime(span.to);
  const length = format.duration(span.to - span.from);
  return html`<div class="tl-finding">
    <p>${severityMark(finding)} <strong>${titleOf(manual, finding)}</strong> <span class="muted">${place}</span></p>
    <p>${format.text(finding.summary)}</p>
    <p class="muted">${begin} – ${end} (${length})</p>
    ${codeLines(finding)}
    ${finding.evidence?.length ? html`<ul class="tl-evidence">${finding.evidence.map((one) => evidence(one, manual))}</ul>` : nothing}
    ${finding.advice?.length ? html`<p><strong>Try:</strong> ${format.text(finding.advice[0].do)}</p>` : nothing}
    <p><a href=${href("findings", { explain: finding.id })}>What it means</a></p>
  </div>`;
}

/**
 * @param {Api.FindingEvidence} one
 * @param {Dashboard.Manual} manual
 */
function evidence(one, manual) {
  const { words, value, against } = describeEvidence(manual, one);
  return html`<li>${words}: <strong>${value}</strong>${against ? html` <span class="muted">(threshold: ${against})</span>` : nothing}</li>`;
}

/**
 * Marks of events: the head's events, and GPUs that were lost and recovered.
 * @param {Api.EventRow[]} events
 * @param {{ gpu?: string | null }} [options]
 */
export function eventMarks(events, { gpu = null } = {}) {
  /** @type {Dashboard.Mark[]} */
  const marks = [];
  /** @type {Map<string | null, Map<string, Live.HealthEntry>>} */
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

/**
 * @param {Api.EventRow} event
 * @param {number} time
 * @param {Map<string | null, Map<string, Live.HealthEntry>>} troubled
 * @param {string | null} gpu
 */
function healthMarks(event, time, troubled, gpu) {
  const before = troubled.get(event.node) ?? new Map();
  const now = new Map();
  for (const entry of /** @type {Live.HealthEntry[]} */ (event.detail.entries ?? [])) {
    const words = GPU_TROUBLE[entry.code];
    if (words && (gpu === null || isAbout(entry.subject, gpu))) now.set(`${entry.subject} ${words}`, entry);
  }
  troubled.set(event.node, now);
  const came = [...now]
    .filter(([key]) => !before.has(key))
    .map(([key, entry]) =>
      mark(`health ${time} ${key}`, time, {
        label: key,
        glyph: "✕",
        tone: "bad",
        subject: `${event.node}: ${key}`,
        rows: [
          ["Why", entry.detail],
          ["Try", entry.hint],
        ],
      }),
    );
  const went = [...before]
    .filter(([key]) => !now.has(key))
    .map(([key, entry]) =>
      mark(`health ${time} ${key} over`, time, {
        label: `${entry.subject} recovered`,
        glyph: "↩",
        tone: "good",
        subject: `${event.node}: ${entry.subject} recovered`,
        rows: [],
      }),
    );
  return [...came, ...went];
}

/**
 * Whether a health note's subject, `gpu 3` or `gpu 0-3,5`, speaks of a GPU.
 * @param {Dashboard.MaybeText} subject
 * @param {string} label
 */
export function isAbout(subject, label) {
  if (!subject?.startsWith("gpu ")) return false;
  return subject
    .slice(4)
    .split(/,\s*/)
    .some((part) => {
      const [first, last] = part.split("-").map(Number);
      return part === label || (last !== undefined && Number(label) >= first && Number(label) <= last);
    });
}

/** What `xidMarks` is made of. */
export const XIDS = ["xid_last_timestamp_seconds", "xid_last_code"];

/**
 * Xid errors, at the moments that the driver reported them.
 * @param {Dashboard.History | null} answer
 * @param {{ withGpu?: boolean }} [options]
 */
export function xidMarks(answer, { withGpu = false } = {}) {
  /** @type {Dashboard.Mark[]} */
  const marks = [];
  if (answer === null) return marks;
  for (const moments of answer.series.filter((series) => series.metric === XIDS[0])) {
    const codes = answer.series.find((series) => series.metric === XIDS[1] && series.subject === moments.subject);
    /** @type {number | null} */
    let last = null;
    moments.values.forEach((value, at) => {
      if (!format.known(value) || (last !== null && value - last < 1)) return;
      // Within its own step a new moment is mixed with the one before it; the next step has it alone.
      const settled = last !== null && format.known(moments.values[at + 1]) ? at + 1 : at;
      const time = moments.values[settled] ?? value;
      last = time;
      if (time < answer.from || time > answer.to) return;
      const code = codes?.values[settled];
      const label = `Xid${format.known(code) ? ` ${Math.round(code)}` : ""}${withGpu ? ` · GPU ${moments.gpu}` : ""}`;
      marks.push(
        mark(`xid ${moments.subject} ${Math.round(time)}`, time, {
          label,
          glyph: "!",
          tone: "bad",
          subject: `${label}: the driver reported an error on ${moments.node} GPU ${moments.gpu}`,
          rows: [],
        }),
      );
    });
  }
  return marks;
}

/**
 * @param {string} key
 * @param {number} time
 * @param {{ label: string, glyph: string, tone: Dashboard.MarkTone, subject: string, rows: Array<[string, Dashboard.Content]> }} options
 */
function mark(key, time, { label, glyph, tone, subject, rows }) {
  return {
    key,
    time,
    label,
    glyph,
    tone,
    say: `${subject}, ${format.dateTime(time)}`,
    detail: () =>
      html`<div><p><strong>${format.text(subject)}</strong></p><p class="muted">${format.dateTime(time)}</p>${facts(rows)}</div>`,
  };
}

/**
 * @param {Record<string, unknown>} detail
 * @returns {Array<[string, string]>}
 */
function detailRows(detail) {
  return Object.entries(detail ?? {})
    .filter(([name, value]) => name !== "run" && typeof value !== "object" && value !== "")
    .map(([name, value]) => [name.replaceAll("_", " "), name === "seconds" ? `${value} s` : String(value)]);
}
