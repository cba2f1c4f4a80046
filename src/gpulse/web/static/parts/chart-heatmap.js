// A chart of many series as a heat map: a row per series, time from left to right, values as colors.

import { contextOf } from "../core/dom.js";
import { known } from "../core/format.js";
import { html } from "../vendor/lit-html.js";
import { latest, valueRange } from "./chart-data.js";
import { colors, gutter, HEAT_STEPS, scaled } from "./chart-theme.js";

const MAX_LARGE_ROWS = 32;
const [LARGE_ROW_PIXELS, SMALL_ROW_PIXELS] = [16, 6];
const [MIN_PIXELS, MAX_PIXELS] = [110, 560];
const MIN_EDGED_PIXELS = 10;
const LABEL_PIXELS = 13;
const LABEL_GAP_PIXELS = 6;

/**
 * Height of a heat map with this many rows, in pixels.
 * @param {number} rows
 */
export function mapHeight(rows) {
  const pixels = rows * (rows <= MAX_LARGE_ROWS ? LARGE_ROW_PIXELS : SMALL_ROW_PIXELS);
  return scaled(Math.min(Math.max(pixels, MIN_PIXELS), MAX_PIXELS));
}

/**
 * The axis with the names of the rows, of as many as there is room for.
 * @param {Dashboard.Chart} chart
 * @returns {uPlot.Axis}
 */
export function rowAxis(chart) {
  const { lines } = chart.data;
  const stride = Math.ceil((lines.length * scaled(LABEL_PIXELS)) / mapHeight(lines.length));
  return {
    stroke: () => colors().muted,
    font: colors().font,
    size: gutter().left,
    gap: LABEL_GAP_PIXELS,
    grid: { show: false },
    ticks: { show: false },
    splits: () => lines.flatMap((_, row) => (row % stride === 0 ? [row + 0.5] : [])),
    values: (plot, middles) =>
      middles.map((middle) => fitting(plot.ctx, lines[Math.floor(middle)].title, gutter().left - LABEL_GAP_PIXELS)),
  };
}

/**
 * As much of a name as fits: its end, in which the names of rows differ.
 * @param {CanvasRenderingContext2D} context
 * @param {string} name
 * @param {number} width
 */
function fitting(context, name, width) {
  context.save();
  context.font = colors().font;
  let shown = name;
  for (let cut = 1; cut < name.length && context.measureText(shown).width > width; cut += 1) shown = `…${name.slice(cut)}`;
  context.restore();
  return shown;
}

/**
 * The values that the ends of a heat map's colors stand for.
 * @param {Dashboard.Chart} chart
 */
function scaleOf({ spec, data }) {
  const known = data.lines.flatMap((line) => line.values).filter((value) => value !== null);
  const [low, high] = known.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  return known.length ? valueRange(spec, low, high) : valueRange(spec, null, null);
}

/**
 * Paint the cells, each from half a step before its sample to half a step after it; what is not known keeps the color of missing data.
 * @param {uPlot} plot
 * @param {Dashboard.Chart} chart
 */
export function paintMap({ ctx, bbox, data, valToPos }, chart) {
  const { times, step } = chart.data;
  const image = mapImage(/** @type {Dashboard.Drawn[]} */ (data.slice(1)), times.length, scaleOf(chart));
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.fillStyle = colors().noData;
  ctx.fillRect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.imageSmoothingEnabled = image.height > bbox.height; // else rows would be missing
  const left = valToPos(times[0] - step / 2, "x", true);
  ctx.drawImage(image, left, bbox.top, valToPos(times[times.length - 1] + step / 2, "x", true) - left, bbox.height);
  const pixels = bbox.height / image.height;
  ctx.fillStyle = colors().surface;
  if (pixels >= MIN_EDGED_PIXELS * devicePixelRatio) {
    for (let row = 1; row < image.height; row += 1) ctx.fillRect(bbox.left, Math.round(bbox.top + row * pixels), bbox.width, 1);
  }
  ctx.restore();
}

/**
 * A picture with a pixel per cell.
 * @param {Dashboard.Drawn[]} rows
 * @param {number} width
 * @param {[number, number]} scale
 */
export function mapImage(rows, width, [low, high]) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = rows.length;
  const context = contextOf(canvas);
  const image = context.createImageData(width, rows.length);
  const ramp = colors().heat;
  rows.forEach((values, row) => {
    let value = values[0];
    for (let at = 0; at < width; at += 1) {
      if (values[at] !== undefined) value = values[at];
      if (!known(value)) continue;
      const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
      image.data.set([...ramp[Math.round(share * HEAT_STEPS)], 255], (row * width + at) * 4);
    }
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/**
 * What the colors mean, and a place for what is at the cursor.
 * @param {Dashboard.Chart} chart
 */
export function mapLegend(chart) {
  const [low, high] = scaleOf(chart).map((value) => chart.format(value));
  return html`<li class="chart-key">${low}<span class="legend-ramp" role="img" aria-label="to"></span>${high}</li>
    <li class="chart-key"><span class="key" data-tone="no-data"></span>no data</li>
    <li class="chart-reading"><span class="chart-value"></span></li>`;
}

/**
 * What a heat map shows at a sample, or at the latest one of each row: the row at the cursor, or the range of all.
 * @param {Dashboard.Chart} chart
 * @param {number | null} at
 */
export function reading(chart, at) {
  const { times, lines } = chart.data;
  const row = rowAtCursor(chart);
  const when = at === null ? "latest" : chart.timeText(times[at]);
  const values = lines.map((line, place) => (at === null ? latest(line.values, chart.visibleCount()) : chart.valueAt(place, at)));
  if (row >= 0) return `${when}, ${lines[row].title}: ${known(values[row]) ? chart.format(values[row]) : "no data"}`;
  const found = values.filter(known).sort((a, b) => a - b);
  if (!found.length) return `${when}: no data`;
  const ends = [...new Set([found[0], found[found.length - 1]].map((value) => chart.format(value)))];
  return `${when}: ${ends.join(" to ")}${found.length < lines.length ? `, ${found.length} of ${lines.length} rows` : ""}`;
}

/**
 * Which row the cursor is in; -1 for none.
 * @param {Dashboard.Chart} chart
 */
export function rowAtCursor({ board, data }) {
  return board.cursor === null ? -1 : data.lines.findIndex((line) => line.title === board.row);
}

/**
 * Which line is nearest to a place of a plot: a share of its width, and pixels from its top.
 * @param {Dashboard.Chart} chart
 * @param {number} across
 * @param {number} down
 */
function nearestLine({ plot, board, data }, across, down) {
  const value = plot?.posToVal(down, "y") ?? 0;
  const { from, to } = board.view;
  const at = Math.round((from + across * (to - from) - data.times[0]) / data.step);
  const distances = data.lines.map((line) => {
    const own = line.values[Math.min(Math.max(at, 0), data.times.length - 1)];
    return own === null || own === undefined ? Infinity : Math.abs(own - value);
  });
  return distances.indexOf(Math.min(...distances));
}

/**
 * Let the pointer choose a row, and gives back what shows which one it is.
 * @param {HTMLElement} area
 * @param {Dashboard.Chart} chart
 */
export function followRows(area, chart) {
  /** @param {PointerEvent} event */
  const choose = (event) => {
    const { top, height, left, width } = area.getBoundingClientRect();
    const { lines } = chart.data;
    const row = chart.isMap
      ? Math.floor(((event.clientY - top) / height) * lines.length)
      : nearestLine(chart, (event.clientX - left) / width, event.clientY - top);
    chart.board.row = lines[Math.min(Math.max(row, 0), lines.length - 1)].title;
  };
  area.addEventListener("pointerdown", choose);
  area.addEventListener("pointermove", choose);
  const mark = document.createElement("div");
  mark.className = "chart-row";
  mark.hidden = true;
  area.append(mark);
  let focused = -1;
  return (/** @type {number} */ row) => {
    if (!chart.isMap && row !== focused) {
      focused = row;
      chart.plot?.setSeries(row < 0 ? null : 1 + row, { focus: true });
    }
    mark.hidden = row < 0 || !chart.isMap;
    mark.style.top = `${(row / chart.data.lines.length) * 100}%`;
    mark.style.height = `${100 / chart.data.lines.length}%`;
  };
}
