// What findings mean and how their evidence is said, in the words of `gpulse explain`.

import { get } from "../core/api.js";
import * as format from "../core/format.js";

const NOTHING = { families: {}, findings: {}, signals: {}, statistics: {}, comparisons: {}, reasons: {} };
const OF_A_PID = "mean of pid ";
const SHORT_FAMILIES = {
  input: "input", host: "host", copy: "copies", stall: "pauses", gpu_use: "GPU use", contention: "contention",
  memory: "memory", clocks: "clocks", link: "links", network: "network", fault: "faults",
};
let asked = null;

/** The manual, asked for once; an empty one when the head has none. */
export function manual() {
  asked ??= get("/manual.json").catch(() => {
    asked = null;
    return NOTHING;
  });
  return asked;
}

/** A manual without entries, until the real one is there. */
export const emptyManual = NOTHING;

/** What a finding is called: its title, or its id in words. */
export function findingTitle(book, id) {
  return book.findings[id]?.title ?? sentence(String(id ?? "unknown").replaceAll("_", " "));
}

/** A family in a word or two. */
export function familyName(family) {
  return SHORT_FAMILIES[family] ?? String(family ?? "–");
}

/** How sure a finding is, in a word. */
export function confidenceWord(confidence) {
  if (typeof confidence !== "number") return "–";
  return confidence >= 0.85 ? "sure" : confidence >= 0.6 ? "likely" : "possible";
}

/** One piece of evidence as {words, value, against}; `against` is empty for what is only worth knowing. */
export function told(book, evidence) {
  const known = book.signals[evidence.signal] ?? { words: String(evidence.signal).replaceAll("_", " "), unit: "number" };
  if (evidence.comparison === "has bit") {
    return { words: known.words, value: book.reasons[evidence.threshold] ?? hexadecimal(evidence.threshold), against: "" };
  }
  const unit = unitOf(known.unit, evidence.statistic);
  return {
    words: known.words + statistic(book, evidence, known.unit),
    value: written(evidence.value, unit),
    against: against(book, evidence, unit),
  };
}

/** A number of the evidence in people's units. */
export function written(value, unit) {
  if (typeof value !== "number") return "–";
  switch (unit) {
    case "share": return share(value);
    case "bytes": return format.bytes(value);
    case "bytes/second": return format.rate(value);
    case "cpus": return value.toFixed(1);
    case "seconds": return value < 60 ? `${short(value, 1)} s` : format.duration(value);
    case "celsius": return format.celsius(value);
    case "watts": return format.watts(value);
    case "hertz": return format.hertz(value);
    case "bits": return hexadecimal(value);
    case "time": return format.dateTime(value);
    default: return short(value, Math.abs(value) < 0.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0);
  }
}

function share(value) {
  const hundredths = value * 100;
  if (hundredths !== 0 && Math.abs(hundredths) < 0.05) return "< 0.1 %";
  return `${short(hundredths, Math.abs(hundredths) >= 9.95 ? 0 : 1)} %`;
}

function short(value, digits) {
  return String(Number(value.toFixed(digits)));
}

function hexadecimal(value) {
  return `0x${Math.trunc(Number(value) || 0).toString(16)}`;
}

function unitOf(unit, statisticName) {
  if (statisticName === "slope" && unit === "bytes") return "bytes/second";
  if (statisticName === "rate" && unit === "seconds") return "share";
  return unit;
}

function statistic(book, evidence, unit) {
  const name = String(evidence.statistic ?? "");
  if (name.startsWith(OF_A_PID)) return ` of pid ${name.slice(OF_A_PID.length)}`;
  if (name === "last" && (unit !== "bytes" || evidence.threshold !== 0)) return "";
  return book.statistics[name] ?? "";
}

function against(book, evidence, unit) {
  if ((evidence.comparison === ">=" || evidence.comparison === ">") && evidence.threshold === 0) return "";
  return `${book.comparisons[evidence.comparison] ?? evidence.comparison} ${written(evidence.threshold, unit)}`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
