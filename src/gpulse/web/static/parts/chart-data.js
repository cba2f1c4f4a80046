// Convert the head's answers to the lines of charts.

import { metricTitle, text } from "../core/format.js";
import { heldUntil } from "./timeline-items.js";

/** @type {Array<"values" | "lows" | "highs">} */
const COLUMNS = ["values", "lows", "highs"];

/**
 * The last value that is known, of the first `count` ones where a number is given.
 * @param {Array<number | null>} values
 * @param {number} [count]
 */
export function latest(values, count = values.length) {
  for (let at = Math.min(count, values.length) - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
}

/** @param {Array<number | null>} values */
const isKnown = (values) => values.some((value) => value !== null);
/** @param {Api.HistorySeries} series */
const keyOf = (series) => `${series.node}|${series.subject}|${series.metric}`;

/**
 * The lines that a chart's spec finds in an answer: {times, step, lines, missing}. A spec has either
 * `lines`: [{metric, title?, isLimit?, minus? (a metric to take away), level?() (what it is now, where it has no history)}], or
 * `each`: {metric or metrics, over? (a metric to divide by), name(series)}, one line a series.
 * @param {Dashboard.ChartSpec} spec
 * @param {Dashboard.History} answer
 */
export function linesOf(spec, answer) {
  const { times, step } = answer;
  const own = answer.series.filter((series) => !spec.only || spec.only(series));
  /** @type {Dashboard.Line[]} */
  const lines = spec.each ? linesOfEach(spec.each, own) : linesOfMetrics(spec.lines ?? [], own, times.length);
  const found = calmed(lines.filter((line) => isKnown(line.values)));
  const missing = spec.each ? [] : lines.filter((line) => !isKnown(line.values) && !line.isLimit).map((line) => line.title);
  const band = spec.each ? answer.bands?.find((one) => one.metric === spec.each?.metric) : undefined;
  const noun = spec.each?.noun ?? (own.some((series) => series.gpu) ? "GPUs" : "series");
  return { times, step, lines: found, missing, band, noun };
}

/**
 * Bands of several lines cover each other: where there are more than two, only the first keeps its own.
 * @param {Dashboard.Line[]} lines
 */
function calmed(lines) {
  const banded = lines.filter((line) => line.lows);
  return banded.length <= 2 ? lines : lines.map((line) => (line === banded[0] ? line : { ...line, lows: undefined }));
}

/**
 * @param {Dashboard.LineSpec[]} wanted
 * @param {Api.HistorySeries[]} all
 * @param {number} count
 * @returns {Dashboard.Line[]}
 */
function linesOfMetrics(wanted, all, count) {
  let next = 0;
  return wanted.map((want) => {
    const { metric, title, isLimit, minus } = want;
    const place = isLimit ? 0 : next++;
    const series = all.find((one) => one.metric === metric);
    const line = {
      key: minus ? `${metric}-${minus}` : metric,
      title: title ?? metricTitle(metric),
      isLimit,
      place,
      values: series?.values ?? [],
    };
    if (minus)
      return {
        ...line,
        values: difference(
          series,
          all.find((one) => one.metric === minus),
        ),
      };
    if (isLimit) return series ? line : { ...line, values: new Array(count).fill(want.level?.() ?? null) };
    return { ...line, lows: series?.lows, highs: series?.highs };
  });
}

/**
 * @param {Api.HistorySeries | undefined} from
 * @param {Api.HistorySeries | undefined} less
 */
function difference(from, less) {
  if (!from || !less) return [];
  return from.values.map((value, at) => (value === null || less.values[at] === null ? null : value - less.values[at]));
}

/**
 * @param {Dashboard.EachSpec} each
 * @param {Api.HistorySeries[]} all
 */
function linesOfEach(each, all) {
  const own = all.filter((series) => (each.metrics ?? [each.metric]).includes(series.metric) && isKnown(series.values));
  return own
    .map((series) => ({
      key: keyOf(series),
      title: text(each.name(series)),
      values: each.over ? shareOf(series, all, each.over) : series.values,
    }))
    .sort((a, b) => a.title.localeCompare(b.title, "en", { numeric: true }))
    .map((line, place) => ({ ...line, place }));
}

/**
 * @param {Api.HistorySeries} series
 * @param {Api.HistorySeries[]} all
 * @param {string} over
 */
function shareOf(series, all, over) {
  const whole = all.find((one) => one.metric === over && one.node === series.node && one.subject === series.subject);
  return series.values.map((value, at) => (value !== null && whole?.values[at] ? value / whole.values[at] : null));
}

/**
 * The values from the bottom to the top of a chart whose samples lie between two values.
 * @param {Dashboard.ChartSpec} spec
 * @param {number | null} min
 * @param {number | null} max
 * @returns {[number, number]}
 */
export function valueRange({ top, bottom = 0, unit }, min, max) {
  const low = Math.min(bottom, min ?? bottom);
  const most = Math.max(top ?? 0, max ?? 0);
  const high = unit === "ratio" ? Math.max(top ?? [0.1, 0.2, 0.5].find((step) => most <= step) ?? 1, most) : most;
  return [low, high > low ? high : low + 1];
}

/**
 * Values in which what is only sampled more rarely than the chart's steps is no gap: there `null` becomes `undefined`,
 * which a plot draws across. A gap is longer than the distance between the neighboring samples.
 * @param {Array<number | null>} values
 */
export function bridged(values) {
  const known = values.flatMap((value, at) => (value === null ? [] : [at]));
  if (known.length < 3 || known[known.length - 1] - known[0] === known.length - 1) return values;
  /** @type {Array<number | null | undefined>} */
  const drawn = [...values];
  for (let place = 0; place + 1 < known.length; place += 1) {
    const [from, to] = [known[place], known[place + 1]];
    const distance = Math.max(from - (known[place - 1] ?? from), (known[place + 2] ?? to) - to);
    if (to - from > 1 && to - from <= distance) drawn.fill(undefined, from + 1, to);
  }
  return drawn;
}

/**
 * An answer with a newer end of it taken in; null when the two do not fit together.
 * @param {Dashboard.History} answer
 * @param {Dashboard.History} tail
 * @param {number} from
 */
export function joined(answer, tail, from) {
  if (answer.step !== tail.step || !tail.times.length) return null;
  // The first step of the tail may have begun before it, and then holds only a part.
  const begin = tail.times[1] ?? tail.times[0];
  const skipped = tail.times.length > 1 ? 1 : 0;
  let keep = answer.times.findIndex((time) => time >= begin - answer.step / 2);
  if (keep < 0) keep = answer.times.length;
  if (keep && begin - answer.times[keep - 1] > answer.step * 1.5) return null;
  let drop = answer.times.findIndex((time) => time >= from - answer.step);
  if (drop < 0) drop = 0;
  /**
   * @template T
   * @param {T[]} list
   * @param {T[]} fresh
   */
  const rest = (list, fresh) => [...list.slice(drop, keep), ...fresh.slice(skipped)];
  /** @param {number} length */
  const nulls = (length) => new Array(length).fill(null);
  const fresh = new Map(tail.series.map((series) => [keyOf(series), series]));
  const old = new Map(answer.series.map((series) => [keyOf(series), series]));
  const series = [...new Set([...old.keys(), ...fresh.keys()])].map((key) => {
    const [before, after] = [old.get(key), fresh.get(key)];
    const whole = { .../** @type {Api.HistorySeries} */ (before ?? after) };
    for (const name of COLUMNS) {
      if (!before?.[name] && !after?.[name]) continue;
      whole[name] = rest(before?.[name] ?? nulls(answer.times.length), after?.[name] ?? nulls(tail.times.length));
    }
    return whole;
  });
  return { ...answer, to: tail.to, times: rest(answer.times, tail.times), series };
}

/**
 * The GPUs that processes held: [{node, gpu, word ("node:3"), spans: [[from, to]]}], by node and label.
 * @param {Api.ProcessRow[]} processes
 * @param {number} now
 */
export function heldGpus(processes, now) {
  const found = new Map();
  for (const process of processes) {
    for (const held of process.gpus) {
      const word = `${process.node}:${held.gpu}`;
      if (!found.has(word)) found.set(word, { node: process.node, gpu: held.gpu, word, spans: [] });
      found.get(word).spans.push([held.from, heldUntil(process, held, now)]);
    }
  }
  return [...found.values()].sort((a, b) => a.word.localeCompare(b.word, "en", { numeric: true }));
}

/**
 * @param {Array<[number, number]>} spans
 * @param {number} from
 * @param {number} to
 */
const isIn = (spans, from, to) => spans.some(([first, last]) => first < to && last >= from);

/**
 * An answer without what the GPUs did while they were not held.
 * @param {Dashboard.History} answer
 * @param {Dashboard.HeldGpu[]} gpus
 */
export function whileHeld(answer, gpus) {
  const spans = new Map(gpus.map((gpu) => [gpu.word, gpu.spans]));
  const { times, step } = answer;
  const series = answer.series.map((one) => {
    const own = spans.get(`${one.node}:${one.gpu}`) ?? [];
    return { ...one, values: one.values.map((value, at) => (isIn(own, times[at], times[at] + step) ? value : null)) };
  });
  if (!answer.bands) return { ...answer, series };
  const isHeld = times.map((time) => gpus.some((gpu) => isIn(gpu.spans, time, time + step)));
  /** @param {Array<number | null>} values */
  const held = (values) => values.map((value, at) => (isHeld[at] ? value : null));
  const bands = answer.bands.map((band) => ({ ...band, values: held(band.values), lows: held(band.lows), highs: held(band.highs) }));
  return { ...answer, series, bands };
}

/**
 * How many GPUs were held over time, as an answer of the head would have it.
 * @param {Dashboard.HeldGpu[]} gpus
 * @param {Dashboard.View} options
 * @param {number} points
 */
export function heldCount(gpus, { from, to }, points) {
  const step = Math.max(1, Math.ceil((to - from) / points));
  const first = Math.floor(from / step) * step;
  const times = [];
  for (let at = first; at < to; at += step) times.push(at);
  const values = times.map((at) => gpus.filter((gpu) => isIn(gpu.spans, at, at + step)).length);
  return { from, to, step, times, series: [{ node: "", subject: "", metric: "gpus_held", unit: "1", values }] };
}

/**
 * Charts of several GPUs, one line each.
 * @param {() => boolean} isOneNode
 */
export function heldSpecs(isOneNode) {
  /** @param {Api.HistorySeries} series */
  const name = (series) => (isOneNode() ? `GPU ${series.gpu}` : `${series.node} · ${series.gpu}`);
  /** @param {string} metric */
  const each = (metric) => ({ metric, name });
  return [
    { id: "utilization", title: "GPU utilization", unit: "ratio", top: 1, height: 190, each: each("gpu_utilization_ratio") },
    { id: "memory", title: "GPU memory", unit: "bytes", each: each("memory_used_bytes") },
    { id: "sm-active", title: "SM active", unit: "ratio", top: 1, why: "it requires a Hopper GPU or newer", each: each("sm_active_ratio") },
    { id: "power", title: "Power", unit: "watts", each: each("power_watts") },
  ];
}
