// Colors and strokes of charts, read from the theme's custom properties.

import { contextOf } from "../core/dom.js";

/** Strokes of a chart's lines: color and dashes, so that lines differ without their colors. */
const STROKES = [
  { tone: "load", dash: [] },
  { tone: "text", dash: [5, 4] },
  { tone: "quiet", dash: [2, 3] },
  { tone: "text", dash: [9, 3, 2, 3] },
];
/** Steps between the least and the most of a heat map's colors. */
export const HEAT_STEPS = 64;
/** Height of the time axis, and of the room above plots, where findings are marked. */
export const [AXIS_PIXELS, TOP_PIXELS] = [26, 8];
const DEFAULT_FONT_PIXELS = 13;
/** Screens on which plots have less room at their sides. */
export const NARROW = "(max-width: 760px)";
const LIMIT = { tone: "quiet", dash: [2, 4] };
/** @type {Record<Dashboard.Severity, string>} */
const SEVERITIES = { critical: "--fault", high: "--high", medium: "--medium", low: "--text-2", info: "--text-3" };
/** @type {ReturnType<typeof readPalette> | null} */
let palette = null;
/** @type {number | null} */
let letters = null;

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  /** @param {string} name */
  const color = (name) => style.getPropertyValue(name).trim() || "#777";
  const severities = Object.entries(SEVERITIES).map(([name, property]) => [name, color(property)]);
  return {
    load: color("--load"),
    text: color("--text"),
    quiet: color("--text-3"),
    muted: color("--text-2"),
    line: color("--line"),
    surface: color("--surface"),
    noData: color("--no-data"),
    heat: heatRamp(style),
    severities: Object.fromEntries(severities),
    font: `${scaled(11)}px ${style.getPropertyValue("--font").trim() || "system-ui, sans-serif"}`,
  };
}

/**
 * The colors of heat maps from least to most, as red, green and blue: HEAT_STEPS + 1 of them, mixed from those of --heat.
 * @param {CSSStyleDeclaration} style
 */
export function heatRamp(style) {
  const stops = (style.getPropertyValue("--heat") || "#777").split(/,(?![^(]*\))/).map(channels);
  return Array.from({ length: HEAT_STEPS + 1 }, (_, step) => {
    const at = (step / HEAT_STEPS) * (stops.length - 1);
    const [low, high] = [stops[Math.floor(at)], stops[Math.ceil(at)]];
    return low.map((value, channel) => Math.round(value + (high[channel] - value) * (at % 1)));
  });
}

/**
 * Red, green and blue of any color that CSS knows.
 * @param {string} color
 */
function channels(color) {
  const context = contextOf(document.createElement("canvas"));
  context.fillStyle = color;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

/**
 * Pixels on a screen of usual size, as many more on a large one as its letters are larger.
 * @param {number} pixels
 */
export function scaled(pixels) {
  letters ??= parseFloat(getComputedStyle(document.documentElement).fontSize) || DEFAULT_FONT_PIXELS;
  return Math.round((pixels * letters) / DEFAULT_FONT_PIXELS);
}

/** Letters may have another size after the window got one. */
export function forgetScale() {
  letters = null;
}

/** Room left of plots for the numbers, and right of them, the same for charts and timelines. */
export function gutter() {
  return matchMedia(NARROW).matches ? { left: scaled(56), right: scaled(10) } : { left: scaled(78), right: scaled(14) };
}

/** The colors of the theme in force. */
export function colors() {
  palette ??= readPalette();
  return palette;
}

/**
 * Calls back when the theme changes; gives back what ends that.
 * @param {() => void} call
 */
export function onTheme(call) {
  const changed = () => {
    palette = null;
    call();
  };
  const observer = new MutationObserver(changed);
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "data-scheme"] });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", changed);
  };
}

/**
 * How line number `place` of a chart is drawn: blue and solid, then dashed in the color of text, then dotted and grey.
 * @param {number} place
 * @param {boolean | undefined} isLimit
 */
export function strokeOf(place, isLimit) {
  return isLimit ? LIMIT : STROKES[place % STROKES.length];
}

/**
 * The color of a stroke's tone: "load", "text" or "quiet".
 * @param {string} tone
 */
export function toneColor(tone) {
  const { load, text, quiet } = colors();
  return tone === "load" ? load : tone === "text" ? text : quiet;
}

/** @param {number} number */
const two = (number) => String(number).padStart(2, "0");
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/**
 * Words for the marks of a time axis that are `step` seconds apart.
 * @param {number[]} times
 * @param {number} step
 */
export function timeMarks(times, step) {
  let day = "";
  return times.map((time) => {
    const at = new Date(time * 1000);
    const today = at.toDateString();
    const isNewDay = day !== "" && today !== day;
    day = today;
    if (step >= 86400 || (isNewDay && step >= 3600) || (at.getHours() === 0 && at.getMinutes() === 0 && step >= 3600)) {
      return DAY.format(at);
    }
    const hour = `${two(at.getHours())}:${two(at.getMinutes())}`;
    return step < 60 ? `${hour}:${two(at.getSeconds())}` : hour;
  });
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/**
 * Marks of a time axis on round local times: {times, step}.
 * @param {number} from
 * @param {number} to
 * @param {number} most
 */
export function timeTicks(from, to, most) {
  const step = STEPS.find((length) => (to - from) / length <= most) ?? 1209600;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const times = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) times.push(at);
  return { times, step };
}
