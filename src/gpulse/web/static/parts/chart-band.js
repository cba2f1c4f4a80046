// Many series in one chart: their median, the band from the 5th to the 95th percentile, and the few that differ.

/** With this many series a chart shows their distribution instead of a line each. */
export const MIN_BAND_SERIES = 8;
export const [LOW_SHARE, HIGH_SHARE] = [0.05, 0.95];
const MAX_OUTLIERS = 3;
/** An outlier's mean distance from the median is this many times the usual one of the series… */
const OUTLIER_FACTOR = 4;
/** … and at least this share of the height of the chart. */
const MIN_OUTLIER_SHARE = 0.05;
/** Where more than this share of the series differs, that is a group and no series is named. */
const MAX_OUTLIER_SHARE = 0.1;

/**
 * The value below which a share of sorted numbers lies, between its two neighbors.
 * @param {number[]} sorted
 * @param {number} share
 */
export function quantile(sorted, share) {
  if (!sorted.length) return null;
  const at = share * (sorted.length - 1);
  const low = sorted[Math.floor(at)];
  return low + (sorted[Math.ceil(at)] - low) * (at % 1);
}

/**
 * Median, 5th and 95th percentile of series at every step; null where no series has a value.
 * @param {Array<Array<number | null>>} rows
 * @param {number} count
 */
export function bandOf(rows, count) {
  /** @type {Array<number | null>} */
  const values = [];
  /** @type {Array<number | null>} */
  const lows = [];
  /** @type {Array<number | null>} */
  const highs = [];
  for (let at = 0; at < count; at += 1) {
    const known = [];
    for (const row of rows) {
      const value = row[at];
      if (value !== null && value !== undefined) known.push(value);
    }
    known.sort((a, b) => a - b);
    values.push(quantile(known, 0.5));
    lows.push(quantile(known, LOW_SHARE));
    highs.push(quantile(known, HIGH_SHARE));
  }
  return { values, lows, highs };
}

/**
 * Mean distance of a series from the median; null when they have no step in common.
 * @param {Array<number | null>} values
 * @param {Array<number | null>} median
 */
function distance(values, median) {
  let [sum, count] = [0, 0];
  values.forEach((value, at) => {
    const middle = median[at];
    if (value === null || middle === null || middle === undefined) return;
    sum += Math.abs(value - middle);
    count += 1;
  });
  return count ? sum / count : null;
}

/**
 * The series that differ from the median far more than the others do, the farthest first; `height` is that of the chart.
 * @param {Dashboard.Line[]} lines
 * @param {Array<number | null>} median
 * @param {number} height
 */
export function outliersOf(lines, median, height) {
  const far = lines.flatMap((line) => {
    const by = distance(line.values, median);
    return by === null ? [] : [{ line, by }];
  });
  const usual =
    quantile(
      far.map(({ by }) => by).sort((a, b) => a - b),
      0.5,
    ) ?? 0;
  const different = far.filter(({ by }) => by > usual * OUTLIER_FACTOR && by > height * MIN_OUTLIER_SHARE);
  if (different.length > Math.max(MAX_OUTLIERS, lines.length * MAX_OUTLIER_SHARE)) return [];
  return different
    .sort((a, b) => b.by - a.by)
    .slice(0, MAX_OUTLIERS)
    .map(({ line }) => line);
}

/**
 * An outlier from the first to the last moment at which it differs; before and after that it is one of the others.
 * @param {Dashboard.Line} line
 * @param {Array<number | null>} median
 * @param {number} height
 */
export function whileDifferent(line, median, height) {
  /** @param {number | null} value @param {number} at */
  const differs = (value, at) => value !== null && median[at] !== null && Math.abs(value - Number(median[at])) > height * MIN_OUTLIER_SHARE;
  const first = line.values.findIndex(differs);
  const last = line.values.findLastIndex(differs);
  return line.values.map((value, at) => (at >= first && at <= last ? value : null));
}
