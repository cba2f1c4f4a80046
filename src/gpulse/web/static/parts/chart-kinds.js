// How a chart shows its series, by their number: lines, small multiples, a band with outliers, all lines, or a heat map.

import { bandOf, MIN_BAND_SERIES, outliersOf, whileDifferent } from "./chart-band.js";
import { valueRange } from "./chart-data.js";

/** Series that share a plot as lines; more have a lane each. */
export const MAX_LINES = 3;

/** @param {Dashboard.Line[]} lines */
const own = (lines) => lines.filter((line) => !line.isLimit);

/**
 * The kind of a chart with these lines, and with what its reader chose.
 * @param {Dashboard.ChartData} data
 * @param {string} choice
 * @returns {Dashboard.ChartKind}
 */
export function kindOf(data, choice) {
  if (data.band) return "band";
  const count = own(data.lines).length;
  if (choice === "small") return count > MAX_LINES ? "band" : "lines";
  if (count < MIN_BAND_SERIES) return count > MAX_LINES ? "multiples" : "lines";
  return choice === "lines" ? "many" : choice === "map" ? "map" : "band";
}

/**
 * The lines that are drawn.
 * @param {Dashboard.ChartSpec} spec
 * @param {Dashboard.ChartData} data
 * @param {Dashboard.ChartKind} kind
 * @returns {Dashboard.Line[]}
 */
export function drawnLines(spec, data, kind) {
  return kind === "band" ? bandLines(spec, data) : data.lines;
}

/**
 * The median with its band, then the outliers, then the limits.
 * @param {Dashboard.ChartSpec} spec
 * @param {Dashboard.ChartData} data
 * @returns {Dashboard.Line[]}
 */
function bandLines(spec, data) {
  const lines = own(data.lines);
  const rows = lines.map((line) => line.values);
  const all = data.band ?? bandOf(rows, data.times.length);
  const known = [...(data.band ? [all.lows, all.highs] : rows)].flat().filter((value) => value !== null);
  const most = known.reduce((high, value) => Math.max(high, value), -Infinity);
  const least = known.reduce((low, value) => Math.min(low, value), Infinity);
  const [low, high] = known.length ? valueRange(spec, least, most) : [0, 1];
  const outliers = data.band ? lines : outliersOf(lines, all.values, high - low);
  // What has a name of its own is not in the band, which says how alike the others are.
  const others = lines.filter((line) => !outliers.includes(line)).map((line) => line.values);
  const band = data.band ?? { ...(outliers.length ? bandOf(others, data.times.length) : all), count: others.length };
  return [
    { key: "median", title: "median", place: 0, values: band.values, lows: band.lows, highs: band.highs, count: band.count },
    ...outliers.map((line, at) => ({
      ...line,
      place: at + 1,
      isOutlier: true,
      whole: line.values,
      values: whileDifferent(line, band.values, high - low),
    })),
    ...data.lines.filter((line) => line.isLimit),
  ];
}
