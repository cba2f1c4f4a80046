// The manual of findings: titles, texts of evidence, explanations and advice.

import { get } from "../core/api.js";
import * as format from "../core/format.js";
import { html, nothing } from "../vendor/lit-html.js";
import { faultTitle, shortTitle } from "./finding-titles.js";

/** @type {Dashboard.Manual} */
const NOTHING = { families: {}, findings: {}, signals: {}, statistics: {}, comparisons: {}, reasons: {} };
const OF_A_PID = "mean of pid ";
/** @type {Record<string, string>} */
const SHORT_FAMILIES = {
  input: "input",
  host: "host",
  copy: "copies",
  stall: "pauses",
  gpu_use: "GPU use",
  contention: "contention",
  memory: "memory",
  clocks: "clocks",
  link: "links",
  network: "network",
  fault: "faults",
};
/** @type {Promise<Dashboard.Manual> | null} */
let asked = null;

/** The manual, asked for once; an empty one when the head has none. */
export function loadManual() {
  asked ??= get("/manual.json").catch(() => {
    asked = null;
    return NOTHING;
  });
  return asked;
}

/** A manual without entries, until the real one is there. */
export const emptyManual = NOTHING;

/**
 * What a finding is called: its title, or a short one while the manual is not loaded.
 * @param {Dashboard.Manual} manual
 * @param {string} id
 */
export function findingTitle(manual, id) {
  return manual.findings[id]?.title ?? shortTitle(id);
}

/**
 * What one finding is called: a fault by its cause, others by their title.
 * @param {Dashboard.Manual} manual
 * @param {{ id: string, label?: string | null, summary?: string }} finding
 */
export function titleOf(manual, finding) {
  return faultTitle(finding) ?? findingTitle(manual, finding.id);
}

/**
 * A family in a word or two.
 * @param {string | null} family
 */
export function familyName(family) {
  return SHORT_FAMILIES[family ?? ""] ?? String(family ?? "–");
}

/**
 * How sure a finding is, in a word.
 * @param {number | null} confidence
 */
export function confidenceWord(confidence) {
  if (typeof confidence !== "number") return "–";
  return confidence >= 0.85 ? "sure" : confidence >= 0.6 ? "likely" : "possible";
}

/**
 * One piece of evidence as {words, value, against}; `against` is empty for what is only worth knowing.
 * @param {Dashboard.Manual} manual
 * @param {Api.FindingEvidence} evidence
 */
export function describeEvidence(manual, evidence) {
  const known = manual.signals[evidence.signal] ?? { words: String(evidence.signal).replaceAll("_", " "), unit: "number" };
  if (evidence.comparison === "has bit") {
    return { words: known.words, value: manual.reasons[String(evidence.threshold)] ?? hexadecimal(evidence.threshold), against: "" };
  }
  const unit = unitOf(known.unit, evidence.statistic);
  return {
    words: known.words + statistic(manual, evidence, known.unit),
    value: written(evidence.value, unit),
    against: against(manual, evidence, unit),
  };
}

/**
 * A number of the evidence in people's units.
 * @param {Dashboard.MaybeNumber} value
 * @param {string} unit
 */
export function written(value, unit) {
  if (typeof value !== "number") return "–";
  switch (unit) {
    case "share":
      return share(value);
    case "bytes":
      return format.bytes(value);
    case "bytes/second":
      return format.rate(value);
    case "cpus":
      return value.toFixed(1);
    case "seconds":
      return value < 60 ? `${short(value, 1)} s` : format.duration(value);
    case "celsius":
      return format.celsius(value);
    case "watts":
      return format.watts(value);
    case "hertz":
      return format.hertz(value);
    case "bits":
      return hexadecimal(value);
    case "time":
      return format.dateTime(value);
    default:
      return short(value, Math.abs(value) < 0.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0);
  }
}

/** @param {number} value */
function share(value) {
  const hundredths = value * 100;
  if (hundredths !== 0 && Math.abs(hundredths) < 0.05) return "<0.1%";
  return `${short(hundredths, Math.abs(hundredths) >= 9.95 ? 0 : 1)}%`;
}

/**
 * @param {number} value
 * @param {number} digits
 */
function short(value, digits) {
  return String(Number(value.toFixed(digits)));
}

/** @param {Dashboard.MaybeNumber} value */
function hexadecimal(value) {
  return `0x${Math.trunc(Number(value) || 0).toString(16)}`;
}

/**
 * @param {string} unit
 * @param {string} statisticName
 */
function unitOf(unit, statisticName) {
  if (statisticName === "slope" && unit === "bytes") return "bytes/second";
  if (statisticName === "rate" && unit === "seconds") return "share";
  return unit;
}

/**
 * @param {Dashboard.Manual} manual
 * @param {Api.FindingEvidence} evidence
 * @param {string} unit
 */
function statistic(manual, evidence, unit) {
  const name = String(evidence.statistic ?? "");
  if (name.startsWith(OF_A_PID)) return ` of pid ${name.slice(OF_A_PID.length)}`;
  if (name === "last" && (unit !== "bytes" || evidence.threshold !== 0)) return "";
  return manual.statistics[name] ?? "";
}

/**
 * @param {Dashboard.Manual} manual
 * @param {Api.FindingEvidence} evidence
 * @param {string} unit
 */
function against(manual, evidence, unit) {
  if ((evidence.comparison === ">=" || evidence.comparison === ">") && evidence.threshold === 0) return "";
  return `${manual.comparisons[evidence.comparison] ?? evidence.comparison} ${written(evidence.threshold, unit)}`;
}

/**
 * An entry of the manual.
 * @param {Dashboard.ManualEntry} entry
 * @param {string} id
 */
export function explanation(entry, id) {
  return html`<h2 id="explained-title" tabindex="-1">${entry.title}</h2>
    <p>${spelled(entry.means)}</p>
    <dl class="explained-facts">
      <dt>Detection</dt><dd>${spelled(entry.recognised)}</dd>
      ${listed("Thresholds", entry.limits)}
      <dt>Severity</dt><dd>${spelled(entry.severity)}${entry.informational ? " Shown as a note because it has not been confirmed on a real workload yet." : nothing}</dd>
      ${listed("Needs", entry.needs)}
    </dl>
    ${entry.advice.length ? html`<h3>What to do</h3>${adviceList(entry.advice)}` : nothing}
    <p class="muted">In a terminal: <code>gpulse explain ${id}</code></p>`;
}

/**
 * What to do, why, and how to see whether it was right.
 * @param {Api.FindingAdvice[]} items
 */
export function adviceList(items) {
  return html`<ol class="advice">${items.map(
    (item) => html`<li><strong>${spelled(item.do)}</strong>
    ${item.why ? html`<br><span class="muted">Why:</span> ${spelled(item.why)}` : nothing}
    ${item.confirm ? html`<br><span class="muted">To check:</span> ${spelled(item.confirm)}` : nothing}</li>`,
  )}</ol>`;
}

/**
 * @param {string} words
 * @param {string[]} items
 */
function listed(words, items) {
  return items.length ? html`<dt>${words}</dt><dd><ul>${items.map((item) => html`<li>${item}</li>`)}</ul></dd>` : nothing;
}

/**
 * Text in which `backticks` stand for code.
 * @param {string} text
 */
export function spelled(text) {
  return String(text ?? "")
    .split("`")
    .map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));
}
