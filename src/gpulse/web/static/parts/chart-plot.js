// How a chart is drawn: the options of uPlot, in the theme's colors.

import { bridged, valueRange } from "./chart-data.js";
import { paintMap, rowAxis } from "./chart-heatmap.js";
import { AXIS_PIXELS, colors, gutter, scaled, strokeOf, TOP_PIXELS, timeMarks, toneColor } from "./chart-theme.js";

/** Share of a lane's height that is left free above its line. */
const LANE_GAP = 0.3;

const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);
const NICE = [1, 2, 2.5, 5].flatMap((digit) => Array.from({ length: 24 }, (_, power) => digit * 10 ** (power - 6))).sort((a, b) => a - b);
const POINT_PIXELS = 7;
const QUIET = () => null;

/**
 * What uPlot draws: times, lines, then the edges of their bands.
 * @param {number[]} times
 * @param {Dashboard.Line[]} lines
 * @returns {uPlot.AlignedData}
 */
export function columns(times, lines) {
  const edges = lines.flatMap((line) => (line.lows && line.highs ? [line.lows, line.highs] : []));
  return [times, ...[...lines.map((line) => line.values), ...edges].map(bridged)];
}

/**
 * @param {string} color
 * @param {number} share
 */
const faint = (color, share) => `color-mix(in srgb, ${color} ${share}%, transparent)`;

/**
 * Everything uPlot has to know of a chart.
 * @param {Dashboard.Chart} chart
 * @returns {Omit<uPlot.Options, "width" | "height">}
 */
export function plotOptions(chart) {
  const { kind, drawn: lines } = chart;
  const isMap = kind === "map";
  const isLanes = kind === "multiples";
  const series = lines.map((line, place) => (isMap ? { scale: "y", show: false } : lineOptions(chart, line, place)));
  /** @type {uPlot.Series[]} */
  const edges = [];
  /** @type {uPlot.Band[]} */
  const bands = [];
  lines.forEach((line, place) => {
    if (!line.lows || isMap) return;
    const low = 1 + lines.length + edges.length;
    const edge = { scale: isLanes ? `y${place}` : "y", points: { show: false }, width: 0 };
    edges.push(edge, { ...edge });
    bands.push({ series: [low + 1, low], fill: () => faint(colors().load, kind === "band" ? 34 : 18) });
  });
  const { from, to } = chart.board.view;
  const isSmall = Boolean(chart.spec.isSmall);
  return {
    legend: { show: false },
    padding: isSmall ? [TOP_PIXELS, 2, 2, 2] : [TOP_PIXELS, gutter().right, 0, 0],
    focus: { alpha: 0.25 },
    cursor: {
      y: false,
      points: { show: pointsOf(isMap || isSmall || kind === "many" ? 0 : lines.length), size: POINT_PIXELS, width: 2 },
      drag: { x: false, y: false, setScale: false },
      bind: Object.fromEntries(
        ["mousedown", "mouseup", "mousemove", "mouseleave", "mouseenter", "dblclick", "click"].map((type) => [type, QUIET]),
      ),
    },
    scales: {
      x: { time: true, auto: false, min: from, max: to, range: (_, min, max) => [min, max] },
      ...(isMap ? { y: { dir: -1, range: [0, lines.length] } } : isLanes ? laneScales(chart) : { y: valueScale(chart) }),
    },
    axes: isSmall
      ? [{ show: false }, { show: false }]
      : [
          timeAxis(),
          isMap
            ? rowAxis(chart)
            : isLanes
              ? { ...valueAxis(chart), scale: "y0", splits: () => laneRange(chart), grid: { show: false } }
              : valueAxis(chart),
        ],
    series: [{}, ...series, ...edges],
    bands,
    hooks: {
      drawClear: [(plot) => isLanes && laneLines(plot, lines.length)],
      draw: [(plot) => isMap && paintMap(plot, chart), (plot) => annotate(plot, chart.board)],
    },
  };
}

/**
 * @param {Dashboard.Chart} chart
 * @returns {uPlot.Scale}
 */
function valueScale(chart) {
  return { range: (_, min, max) => extent(chart.spec, min, max) };
}

/**
 * The values at the bottom and at the top of every lane.
 * @param {Dashboard.Chart} chart
 */
function laneRange({ drawn, spec }) {
  const known = drawn.flatMap((line) => line.values).filter((value) => value !== null);
  const [least, most] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  return valueRange(spec, known.length ? least : null, known.length ? most : null);
}

/**
 * A scale for each lane: the values of all lines fill the height of one lane, and each scale shows them in its own.
 * @param {Dashboard.Chart} chart
 */
function laneScales(chart) {
  const { drawn } = chart;
  /** @type {Record<string, uPlot.Scale>} */
  const scales = {};
  drawn.forEach((_, place) => {
    scales[`y${place}`] = {
      range: () => {
        const [low, high] = laneRange(chart);
        const lane = (high - low) / (1 - LANE_GAP);
        return [low - lane * (drawn.length - 1 - place), low + lane * (place + 1)];
      },
    };
  });
  return scales;
}

/**
 * Lines between the lanes.
 * @param {uPlot} plot
 * @param {number} lanes
 */
function laneLines({ ctx, bbox }, lanes) {
  ctx.save();
  ctx.fillStyle = colors().line;
  for (let lane = 1; lane <= lanes; lane += 1) {
    ctx.fillRect(bbox.left, Math.round(bbox.top + (bbox.height * lane) / lanes) - 1, bbox.width, 1);
  }
  ctx.restore();
}

/**
 * Points on lines alone: uPlot draws none where it gets null, which its types leave out.
 * @param {number} lines
 */
function pointsOf(lines) {
  const show = (/** @type {uPlot} */ _plot, /** @type {number} */ place) => (place <= lines ? point() : null);
  return /** @type {uPlot.Cursor.Points.Show} */ (show);
}

function point() {
  const element = document.createElement("div");
  element.style.width = element.style.height = `${POINT_PIXELS}px`;
  element.style.margin = `${-POINT_PIXELS / 2}px 0 0 ${-POINT_PIXELS / 2}px`;
  return element;
}

/**
 * @param {Dashboard.Chart} chart
 * @param {Dashboard.Line} line
 * @param {number} place
 */
function lineOptions({ kind, spec, drawn }, line, place) {
  const isLane = kind === "multiples";
  const { tone, dash } = strokeOf(isLane || kind === "many" ? 0 : line.place, line.isLimit);
  const isOnly = drawn.filter((one) => !one.isLimit).length === 1;
  const isFilled =
    kind !== "many" && !line.isLimit && !line.lows && (isLane || (line.place === 0 && (isOnly || spec.fill))) && !spec.bottom;
  return {
    scale: isLane ? `y${place}` : "y",
    width: line.isLimit || kind === "many" ? 1 : 1.5,
    dash,
    stroke: () => (kind === "many" ? faint(toneColor(tone), 70) : toneColor(tone)),
    fill: isFilled ? () => faint(toneColor(tone), 14) : undefined,
    points: { show: false, size: 4, filter: lonely },
  };
}

/**
 * Samples without a neighbor, which no line would show.
 * @param {uPlot} plot
 * @param {number} series
 */
function lonely(plot, series) {
  const values = plot.data[series];
  const found = [];
  for (let at = 0; at < values.length; at += 1) {
    const isAlone = (at === 0 || values[at - 1] === null) && (at === values.length - 1 || values[at + 1] === null);
    if (isAlone && typeof values[at] === "number") found.push(at);
  }
  return found.length ? found : null;
}

/**
 * @param {Dashboard.ChartSpec} spec
 * @param {number | null} min
 * @param {number | null} max
 * @returns {uPlot.Range.MinMax}
 */
function extent(spec, min, max) {
  const [low, high] = valueRange(spec, min, max);
  return [low, low + (high - low) * (spec.unit === "ratio" ? 1.02 : 1.06)];
}

/** @returns {uPlot.Axis} */
function timeAxis() {
  return {
    stroke: () => colors().muted,
    font: colors().font,
    size: scaled(AXIS_PIXELS),
    gap: 7,
    space: scaled(64),
    grid: { stroke: () => colors().line, width: 1 },
    ticks: { show: false },
    values: (_, splits, __, ___, step) => timeMarks(splits, step),
  };
}

/**
 * @param {Dashboard.Chart} chart
 * @returns {uPlot.Axis}
 */
function valueAxis(chart) {
  const isBinary = chart.spec.unit === "bytes";
  return {
    stroke: () => colors().muted,
    font: colors().font,
    size: gutter().left,
    gap: 6,
    space: scaled(30),
    incrs: isBinary ? BINARY : NICE,
    grid: { stroke: () => colors().line, width: 1 },
    ticks: { show: false },
    values: (_, splits) => splits.map((value) => (value === null ? "" : chart.format(value))),
  };
}

/**
 * Findings as a strip along the top, events as thin lines.
 * @param {uPlot} plot
 * @param {Dashboard.Board} board
 */
function annotate(plot, board) {
  const { ctx, bbox } = plot;
  const { spans, marks } = board.annotations;
  if (!spans.length && !marks.length) return;
  const ratio = devicePixelRatio;
  /** @param {number} time */
  const place = (time) => Math.min(Math.max(plot.valToPos(time, "x", true), bbox.left), bbox.left + bbox.width);
  ctx.save();
  for (const span of spans) {
    const [left, right] = [place(span.from), place(span.to)];
    if (right <= left) continue;
    ctx.fillStyle = colors().severities[span.severity] ?? colors().muted;
    ctx.fillRect(left, bbox.top - 6 * ratio, right - left, 3 * ratio);
  }
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  ctx.lineWidth = ratio;
  for (const mark of marks) {
    if (mark.time < board.view.from || mark.time > board.view.to) continue;
    ctx.strokeStyle = faint(mark.tone === "bad" ? colors().severities.high : colors().muted, 60);
    ctx.beginPath();
    ctx.moveTo(place(mark.time), bbox.top);
    ctx.lineTo(place(mark.time), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
