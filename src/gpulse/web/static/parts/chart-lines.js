// From the head's answers to the lines of charts.
import { metricTitle, text } from "../core/format.js";

/** Beyond so many lines of one kind a chart shows their spread, and the picked ones. */
export const MOST_LINES = 16;

/** The last value that is known. */
export function latest(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
}

const isKnown = (values) => values.some((value) => value !== null);
const keyOf = (series) => `${series.node}|${series.subject}|${series.metric}`;

/**
 * The lines that a chart's spec finds in an answer: {times, step, lines, missing}. A spec has either
 * `lines`: [{metric, title?, isLimit?, minus? (a metric to take away), level?() (what it is now, where it has no history)}], or
 * `each`: {metric or metrics, over? (a metric to divide by), name(series), picks? (Set of names), words}, one line a series.
 */
export function linesOf(spec, answer) {
  const { times, step } = answer;
  const own = answer.series.filter((series) => !spec.only || spec.only(series));
  const lines = spec.each ? linesOfEach(spec.each, own) : linesOfMetrics(spec.lines, own, times.length);
  const found = calmed(lines.filter((line) => isKnown(line.values)));
  const missing = spec.each ? [] : lines.filter((line) => !isKnown(line.values) && !line.isLimit).map((line) => line.title);
  return { times, step, lines: found, missing };
}

/** Bands of several lines cover each other: where there are more than two, only the first keeps its own. */
function calmed(lines) {
  const banded = lines.filter((line) => line.lows);
  return banded.length <= 2 ? lines : lines.map((line) => (line === banded[0] ? line : { ...line, lows: undefined }));
}

function linesOfMetrics(wanted, all, count) {
  return wanted.map((want, place) => {
    const { metric, title, isLimit, minus } = want;
    const series = all.find((one) => one.metric === metric);
    const line = { key: minus ? `${metric}-${minus}` : metric, title: title ?? metricTitle(metric), isLimit, place, values: series?.values ?? [] };
    if (minus) return { ...line, values: difference(series, all.find((one) => one.metric === minus)) };
    if (isLimit) return series ? line : { ...line, values: new Array(count).fill(want.level?.() ?? null) };
    return { ...line, lows: series?.lows, highs: series?.highs };
  });
}

function difference(from, less) {
  if (!from || !less) return [];
  return from.values.map((value, at) => (value === null || less.values[at] === null ? null : value - less.values[at]));
}

function linesOfEach(each, all) {
  const own = all.filter((series) => (each.metrics ?? [each.metric]).includes(series.metric) && isKnown(series.values));
  const named = own.map((series) => ({ key: keyOf(series), title: text(each.name(series)), values: each.over ? shareOf(series, all, each.over) : series.values }));
  named.sort((a, b) => a.title.localeCompare(b.title, "en", { numeric: true }));
  named.forEach((line, place) => Object.assign(line, { place }));
  if (named.length <= MOST_LINES) return named;
  const picked = named.filter((line) => each.picks?.has(line.title)).slice(0, MOST_LINES - 1);
  return [spreadOf(named, each.words), ...picked.map((line, place) => ({ ...line, place: place + 1 }))];
}

function shareOf(series, all, over) {
  const whole = all.find((one) => one.metric === over && one.node === series.node && one.subject === series.subject);
  return series.values.map((value, at) => (value !== null && whole?.values[at] ? value / whole.values[at] : null));
}

/** Many series as one: the median, and a band from the tenth to the ninetieth of a hundred. */
function spreadOf(lines, words) {
  const values = [];
  const lows = [];
  const highs = [];
  for (let at = 0; at < lines[0].values.length; at += 1) {
    const here = lines.map((line) => line.values[at]).filter((value) => value !== null).sort((a, b) => a - b);
    const at10 = (share) => (here.length ? here[Math.min(here.length - 1, Math.floor(share * here.length))] : null);
    values.push(at10(0.5));
    lows.push(at10(0.1));
    highs.push(at10(0.9));
  }
  return { key: "median", title: `median of ${lines.length} ${words}`, values, lows, highs, place: 0 };
}

/**
 * Values in which what is only sampled more rarely than the chart's steps is no gap: there `null` becomes `undefined`,
 * which a plot draws across. A gap is what is longer than the distance of the samples beside it.
 */
export function bridged(values) {
  const known = [];
  values.forEach((value, at) => value !== null && known.push(at));
  if (known.length < 3 || known.at(-1) - known[0] === known.length - 1) return values;
  const drawn = [...values];
  for (let place = 0; place + 1 < known.length; place += 1) {
    const [from, to] = [known[place], known[place + 1]];
    const beside = Math.max(from - (known[place - 1] ?? from), (known[place + 2] ?? to) - to);
    if (to - from > 1 && to - from <= beside) drawn.fill(undefined, from + 1, to);
  }
  return drawn;
}

/** An answer with a newer end of it taken in; null when the two do not fit together. */
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
  const rest = (list, fresh) => [...list.slice(drop, keep), ...fresh.slice(skipped)];
  const nulls = (length) => new Array(length).fill(null);
  const fresh = new Map(tail.series.map((series) => [keyOf(series), series]));
  const old = new Map(answer.series.map((series) => [keyOf(series), series]));
  const series = [...new Set([...old.keys(), ...fresh.keys()])].map((key) => {
    const [before, after] = [old.get(key), fresh.get(key)];
    const one = { ...(before ?? after) };
    for (const name of ["values", "lows", "highs"]) {
      if (!before?.[name] && !after?.[name]) continue;
      one[name] = rest(before?.[name] ?? nulls(answer.times.length), after?.[name] ?? nulls(tail.times.length));
    }
    return one;
  });
  return { ...answer, to: tail.to, times: rest(answer.times, tail.times), series };
}
