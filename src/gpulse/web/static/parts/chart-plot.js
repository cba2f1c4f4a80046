// How a chart is drawn: the options of uPlot, in the theme's colours.
import { bridged } from "./chart-lines.js";
import { colours, gutter, scaled, strokeOf, timeMarks, toneColour } from "./chart-theme.js";

const BINARY = Array.from({ length: 60 }, (_, power) => 2 ** power);
const NICE = [1, 2, 2.5, 5].flatMap((digit) => Array.from({ length: 24 }, (_, power) => digit * 10 ** (power - 6))).sort((a, b) => a - b);
const POINT_PIXELS = 7;
const QUIET = () => null;

/** What uPlot draws: times, lines, then the edges of their bands. */
export function columns(times, lines) {
  const edges = lines.flatMap((line) => (line.lows ? [line.lows, line.highs] : []));
  return [times, ...lines.map((line) => line.values), ...edges].map((values, place) => (place ? bridged(values) : values));
}

const faint = (colour, share) => `color-mix(in srgb, ${colour} ${share}%, transparent)`;

/** Everything uPlot has to know of a chart. */
export function plotOptions(chart) {
  const { lines } = chart.data;
  const series = lines.map((line, place) => lineOptions(chart, line, place));
  const edges = [];
  const bands = [];
  lines.forEach((line, place) => {
    if (!line.lows) return;
    const low = 1 + lines.length + edges.length;
    const { tone } = strokeOf(line.place ?? place, line.isLimit);
    edges.push({ scale: "y", points: { show: false }, width: 0 }, { scale: "y", points: { show: false }, width: 0 });
    bands.push({ series: [low + 1, low], fill: () => faint(toneColour(tone), 18) });
  });
  const { from, to } = chart.board.view;
  return {
    legend: { show: false },
    padding: [6, gutter().right, 0, 0],
    cursor: {
      y: false,
      points: { show: (_, place) => (place <= lines.length ? point() : null), size: POINT_PIXELS, width: 2 },
      drag: { x: false, y: false, setScale: false },
      bind: Object.fromEntries(["mousedown", "mouseup", "mousemove", "mouseleave", "mouseenter", "dblclick", "click"].map((type) => [type, QUIET])),
    },
    scales: {
      x: { time: true, auto: false, min: from, max: to, range: (_, min, max) => [min, max] },
      y: { range: (_, min, max) => extent(chart.spec, min, max) },
    },
    axes: [timeAxis(), valueAxis(chart)],
    series: [{}, ...series, ...edges],
    bands,
    hooks: { draw: [(plot) => annotate(plot, chart.board)] },
  };
}

function point() {
  const element = document.createElement("div");
  element.style.width = element.style.height = `${POINT_PIXELS}px`;
  element.style.margin = `${-POINT_PIXELS / 2}px 0 0 ${-POINT_PIXELS / 2}px`;
  return element;
}

function lineOptions(chart, line, place) {
  const { tone, dash } = strokeOf(line.place ?? place, line.isLimit);
  const isFilled = chart.spec.fill && place === 0 && !line.lows;
  return {
    scale: "y",
    width: line.isLimit ? 1.25 : 1.75,
    dash,
    stroke: () => toneColour(tone),
    fill: isFilled ? () => faint(toneColour(tone), 12) : undefined,
    points: { show: false, size: 4, filter: lonely },
  };
}

/** Samples without a neighbour, which no line would show. */
function lonely(plot, series) {
  const values = plot.data[series];
  const found = [];
  for (let at = 0; at < values.length; at += 1) {
    const isAlone = (at === 0 || values[at - 1] === null) && (at === values.length - 1 || values[at + 1] === null);
    if (isAlone && typeof values[at] === "number") found.push(at);
  }
  return found.length ? found : null;
}

function extent({ top, bottom = 0, unit }, min, max) {
  const low = Math.min(bottom, min ?? bottom);
  let high = Math.max(top ?? 0, max ?? 0);
  if (unit === "ratio") {
    high = top ?? [0.1, 0.2, 0.5].find((most) => high <= most) ?? 1;
    return [low, Math.max(high, max ?? 0) * 1.02];
  }
  if (high <= low) high = low + 1;
  return [low, low + (high - low) * 1.06];
}

function timeAxis() {
  return {
    stroke: () => colours().muted,
    font: colours().font,
    size: scaled(26),
    gap: 4,
    space: scaled(64),
    grid: { stroke: () => faint(colours().line, 70), width: 1 },
    ticks: { stroke: () => colours().line, width: 1, size: 4 },
    values: (_, splits, __, ___, step) => timeMarks(splits, step),
  };
}

function valueAxis(chart) {
  const isBinary = chart.spec.unit === "bytes";
  return {
    stroke: () => colours().muted,
    font: colours().font,
    size: gutter().left,
    gap: 6,
    space: scaled(30),
    incrs: isBinary ? BINARY : NICE,
    grid: { stroke: () => faint(colours().line, 70), width: 1 },
    ticks: { show: false },
    values: (_, splits) => splits.map((value) => (value === null ? "" : chart.format(value))),
  };
}

/** Findings as a strip along the top, events as thin lines. */
function annotate(plot, board) {
  const { ctx, bbox } = plot;
  const { spans, marks } = board.annotations;
  if (!spans.length && !marks.length) return;
  const ratio = devicePixelRatio;
  const place = (time) => Math.min(Math.max(plot.valToPos(time, "x", true), bbox.left), bbox.left + bbox.width);
  ctx.save();
  for (const span of spans) {
    const [left, right] = [place(span.from), place(span.to)];
    if (right <= left) continue;
    ctx.fillStyle = colours().severities[span.severity] ?? colours().muted;
    ctx.fillRect(left, bbox.top - 4 * ratio, right - left, 3 * ratio);
  }
  ctx.setLineDash([3 * ratio, 3 * ratio]);
  ctx.lineWidth = ratio;
  for (const mark of marks) {
    if (mark.time < board.view.from || mark.time > board.view.to) continue;
    ctx.strokeStyle = faint(mark.tone === "bad" ? colours().severities.high : colours().muted, 60);
    ctx.beginPath();
    ctx.moveTo(place(mark.time), bbox.top);
    ctx.lineTo(place(mark.time), bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}
