// Colours and strokes of charts, read from the theme's custom properties.

/** Dash patterns, so that lines differ without their colours. */
export const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [4, 2], [12, 4], [2, 6], [6, 2, 2, 2, 2, 2]];
const USUAL_LETTERS = 14;
const LIMIT_DASH = [3, 5];
const SEVERITIES = { critical: "--bad", high: "--bad", medium: "--warn", low: "--info", info: "--muted" };
let palette = null;
let letters = null;

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim() || "#777";
  const severities = Object.entries(SEVERITIES).map(([name, property]) => [name, colour(property)]);
  return {
    lines: [1, 2, 3, 4, 5, 6, 7, 8].map((number) => colour(`--chart-${number}`)),
    text: colour("--text"),
    muted: colour("--muted"),
    line: colour("--line"),
    surface: colour("--surface"),
    severities: Object.fromEntries(severities),
    font: `${scaled(11)}px ${style.getPropertyValue("--font").trim() || "system-ui, sans-serif"}`,
  };
}

/** Pixels on a screen of usual size, as many more on a large one as its letters are larger. */
export function scaled(pixels) {
  letters ??= parseFloat(getComputedStyle(document.documentElement).fontSize) || USUAL_LETTERS;
  return Math.round((pixels * letters) / USUAL_LETTERS);
}

/** Letters may have another size after the window got one. */
export function forgetScale() {
  letters = null;
}

/** Room left of plots for the numbers, and right of them, the same for charts and timelines. */
export function gutter() {
  return { left: scaled(68), right: scaled(14) };
}

/** The colours of the theme in force. */
export function colours() {
  palette ??= readPalette();
  return palette;
}

/** Calls back when the theme changes; gives back what ends that. */
export function onTheme(call) {
  const changed = () => {
    palette = null;
    call();
  };
  const observer = new MutationObserver(changed);
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    dark.removeEventListener("change", changed);
  };
}

/** How line number `place` of a chart is drawn: {tone: 1…8, or 0 for a limit, dash}. */
export function strokeOf(place, isLimit) {
  if (isLimit) return { tone: 0, dash: LIMIT_DASH };
  return { tone: (place % 8) + 1, dash: DASHES[(place + Math.floor(place / 8) * 3) % DASHES.length] };
}

/** The colour of a tone. */
export function toneColour(tone) {
  return tone === 0 ? colours().muted : colours().lines[tone - 1];
}

/** Without the fourth, which is red: that is what findings are. */
const CALM_TONES = [1, 2, 3, 5, 6, 7, 8];

/** A tone for a name, the same wherever it is met. */
export function toneOf(name) {
  let hash = 7;
  for (const letter of String(name ?? "")) hash = (hash * 31 + letter.codePointAt(0)) % 9973;
  return CALM_TONES[hash % CALM_TONES.length];
}

const two = (number) => String(number).padStart(2, "0");
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/** Words for the marks of a time axis that are `step` seconds apart. */
export function timeMarks(times, step) {
  let day = null;
  return times.map((time) => {
    const at = new Date(time * 1000);
    const today = at.toDateString();
    const isNewDay = day !== null && today !== day;
    day = today;
    if (step >= 86400 || (isNewDay && step >= 3600) || (at.getHours() === 0 && at.getMinutes() === 0 && step >= 3600)) {
      return DAY.format(at);
    }
    const hour = `${two(at.getHours())}:${two(at.getMinutes())}`;
    return step < 60 ? `${hour}:${two(at.getSeconds())}` : hour;
  });
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

/** Marks of a time axis on round local times: {times, step}. */
export function timeTicks(from, to, most) {
  const step = STEPS.find((length) => (to - from) / length <= most) ?? 1209600;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const times = [];
  for (let at = Math.ceil((from - shift) / step) * step + shift; at <= to; at += step) times.push(at);
  return { times, step };
}
