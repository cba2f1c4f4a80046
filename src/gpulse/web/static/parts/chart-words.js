// A chart in words: a summary, the values at the cursor, a table.
import { html } from "../vendor/lit-html.js";
import { clock, dateTime } from "../core/format.js";
import { latest } from "./chart-lines.js";

const MOST_ROWS = 60;

const shown = (chart) => chart.data.lines.filter((line) => !chart.hidden.has(line.key));

/** What the lines of a chart did, for those who do not see them. */
export function summary(chart) {
  const { times } = chart.data;
  if (!times.length) return "No samples.";
  const parts = shown(chart).map((line) => {
    const values = line.values.filter((value) => value !== null);
    if (!values.length) return `${line.title}: no samples`;
    const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return `${line.title}: latest ${chart.format(latest(line.values))}, mean ${chart.format(mean)}, from ${chart.format(low)} to ${chart.format(high)}`;
  });
  return `From ${dateTime(times[0])} to ${dateTime(times.at(-1))}. ${parts.join(". ")}.`;
}

/** The values of one sample in a sentence; the latest ones without a cursor. */
export function spokenAt(chart, at) {
  if (!chart.data?.times.length) return "no data";
  const when = at === null ? "latest" : clock(chart.data.times[at]);
  const values = shown(chart).map((line) => `${line.title} ${chart.format(at === null ? latest(line.values) : line.values[at])}`);
  return `${when}: ${values.join(", ")}`;
}

/** The samples as a table, thinned out where there are many. */
export function chartTable(chart) {
  const { times } = chart.data;
  const lines = shown(chart);
  const stride = Math.max(1, Math.ceil(times.length / MOST_ROWS));
  const rows = [];
  for (let at = times.length - 1; at >= 0; at -= stride) rows.push(at);
  const note = stride > 1 ? `, every ${stride}. sample` : "";
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${`${chart.spec.title} as a table`}>
    <table class="table">
      <caption>${chart.spec.title}, newest first${note}</caption>
      <thead><tr><th scope="col">Time</th>${lines.map((line) => html`<th scope="col" class="num">${line.title}</th>`)}</tr></thead>
      <tbody>${rows.map((at) => html`<tr><th scope="row">${dateTime(times[at])}</th>
        ${lines.map((line) => html`<td class="num">${chart.format(line.values[at])}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}
