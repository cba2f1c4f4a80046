// The legend of a chart: one line of names with their values, those at the cursor or else the last ones.

import { html, nothing, svg } from "../vendor/lit-html.js";
import { latest } from "./chart-data.js";
import { mapLegend, reading } from "./chart-heatmap.js";
import { strokeOf } from "./chart-theme.js";

/**
 * What the legend shows of a line: a key for its stroke, its name, and a place for its value.
 * @param {Dashboard.Chart} chart
 */
export function legend(chart) {
  switch (chart.kind) {
    case "map":
      return mapLegend(chart);
    case "many":
      return html`<li class="chart-reading"><span class="chart-value"></span></li>`;
    case "multiples":
      return nothing;
    case "band":
      return bandKeys(chart);
    default:
      return lineKeys(chart);
  }
}

/**
 * @param {Dashboard.Line} line
 */
function swatch(line) {
  const { dash } = strokeOf(line.place, line.isLimit);
  return html`<svg class="chart-swatch" viewBox="0 0 16 8" aria-hidden="true">${svg`<line x1="1" y1="4" x2="15" y2="4"
    stroke="currentColor" stroke-width="2" stroke-dasharray=${dash.join(" ") || "none"}></line>`}</svg>`;
}

/** @param {Dashboard.Chart} chart */
function lineKeys(chart) {
  const isOnly = chart.drawn.length === 1;
  return chart.drawn.map((line, place) => {
    const { tone } = strokeOf(line.place, line.isLimit);
    return html`<li><button type="button" class="chart-line" data-tone=${tone} data-line=${line.key} ?disabled=${isOnly}
        aria-pressed=${isOnly ? nothing : !chart.hidden.has(line.key)} @click=${() => chart.toggle(line, place)}>
        ${isOnly ? nothing : swatch(line)}
        <span class="chart-name">${line.title}</span> <span class="chart-value"></span></button></li>`;
  });
}

/** @param {Dashboard.Chart} chart */
function bandKeys(chart) {
  const [median, ...others] = chart.drawn;
  return html`<li class="chart-key" data-tone="load">${swatch(median)}<span class="chart-name">median</span> <span class="chart-value"></span></li>
    <li class="chart-key chart-key-band"><span class="chart-band" aria-hidden="true"></span>
      <span class="chart-name">5th to 95th percentile<span class="chart-count"> of ${median.count} ${chart.data.noun ?? "series"}</span></span> <span class="chart-value"></span></li>
    ${others.map(
      (line) => html`<li class="chart-key" data-tone=${strokeOf(line.place, line.isLimit).tone}>${swatch(line)}
        <span class="chart-name">${line.isOutlier ? html`<span class="chart-word">outlier </span>${line.title}` : line.title}</span> <span class="chart-value"></span></li>`,
    )}`;
}

/**
 * The values of the legend, in its order, at a sample; without one the last ones.
 * @param {Dashboard.Chart} chart
 * @param {number | null} at
 */
export function legendValues(chart, at) {
  switch (chart.kind) {
    case "map":
      return [reading(chart, at)];
    case "many":
      return [manyReading(chart, at)];
    case "band":
      return bandValues(chart, at);
    default:
      return chart.drawn.map((_, place) => chart.format(chart.shownAt(place, at)));
  }
}

/**
 * @param {Dashboard.Chart} chart
 * @param {number | null} at
 */
function bandValues(chart, at) {
  const [median, ...others] = chart.drawn;
  const place = at ?? lastKnown(median.values, chart.visibleCount());
  const [low, high] = [median.lows, median.highs].map((edge) => chart.format(edge?.[place] ?? null));
  return [
    chart.format(median.values[place] ?? null),
    low === high ? low : `${withoutUnit(low, high)} to ${high}`,
    ...others.map((line) =>
      chart.format(at === null ? latest(line.whole ?? line.values, chart.visibleCount()) : (line.whole ?? line.values)[at]),
    ),
  ];
}

/**
 * The first of two values without its unit, where both have the same.
 * @param {string} low
 * @param {string} high
 */
function withoutUnit(low, high) {
  const [, number, unit] = /^([\d.,]+)(.*)$/.exec(low) ?? [];
  return number !== undefined && high.endsWith(unit) ? number : low;
}

/**
 * @param {Array<number | null>} values
 * @param {number} count
 */
function lastKnown(values, count) {
  for (let at = Math.min(count, values.length) - 1; at >= 0; at -= 1) if (values[at] !== null) return at;
  return 0;
}

/**
 * Of all lines: the one at the pointer, or else the lowest and the highest.
 * @param {Dashboard.Chart} chart
 * @param {number | null} at
 */
function manyReading(chart, at) {
  const own = chart.drawn.flatMap((line, place) => {
    const value = chart.shownAt(place, at);
    return line.isLimit || value === null || value === undefined ? [] : [{ title: line.title, value }];
  });
  if (!own.length) return "no data";
  const chosen = own.find(({ title }) => title === chart.board.row);
  if (chosen) return `${chosen.title} ${chart.format(chosen.value)}`;
  own.sort((a, b) => a.value - b.value);
  const [least, most] = [own[0], own[own.length - 1]];
  return `lowest ${least.title} ${chart.format(least.value)}, highest ${most.title} ${chart.format(most.value)}`;
}
