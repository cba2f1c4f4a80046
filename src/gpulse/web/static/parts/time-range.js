// The time range of a page, kept in its address, and the bar that changes it.

import { find, formOf } from "../core/dom.js";
import { clock, dateTime, duration } from "../core/format.js";
import { setQuery } from "../core/router.js";
import { html, render } from "../vendor/lit-html.js";

/** @typedef {Dashboard.Preset} Preset */

/**
 * Lengths offered by name, in seconds.
 * @type {Array<[number, string]>}
 */
export const PRESETS = [
  [900, "15 min"],
  [3600, "1 h"],
  [7200, "2 h"],
  [21600, "6 h"],
  [86400, "24 h"],
  [604800, "7 d"],
  [2592000, "30 d"],
];
/** @type {Record<string, number>} */
const UNITS = { ms: 0.001, s: 1, m: 60, min: 60, h: 3600, d: 86400, w: 604800 };
const MIN_RANGE_SECONDS = 10;
const MAX_RANGE_SECONDS = 366 * 86400;
const MIN_EPOCH_SECONDS = Date.UTC(2000, 0) / 1000;

/**
 * Parse a length such as "90s", "1h30m" or "7d" as seconds; null when it is invalid.
 * @param {string} text
 */
export function seconds(text) {
  const parts = [...String(text).matchAll(/(\d+(?:\.\d+)?)(ms|min|s|m|h|d|w)/g)];
  if (!parts.length || parts.map((part) => part[0]).join("") !== String(text)) return null;
  return parts.reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0);
}

/**
 * Epoch seconds of a time such as "-1h", "now", an epoch or ISO 8601 as seconds; null when it is invalid.
 * @param {Dashboard.MaybeText} text
 * @param {number} now
 */
export function moment(text, now) {
  if (text === undefined || text === null || text === "") return null;
  const word = String(text);
  if (word === "now") return now;
  if (/^\d+(\.\d+)?$/.test(word)) return Number(word);
  if (word.startsWith("-")) {
    const back = seconds(word.slice(1));
    return back === null ? null : now - back;
  }
  const parsed = Date.parse(/(Z|[+-]\d\d:?\d\d)$/.test(word) || !word.includes("T") ? word : `${word}Z`);
  return Number.isNaN(parsed) ? null : parsed / 1000;
}

/**
 * A length as the address says it: "1h", "90s".
 * @param {number} length
 */
function spelled(length) {
  for (const unit of ["d", "h", "m"]) {
    if (length >= UNITS[unit] && length % UNITS[unit] === 0) return `${length / UNITS[unit]}${unit}`;
  }
  return `${Math.max(1, Math.round(length))}s`;
}

/** @param {number} length */
const bounded = (length) => Math.min(Math.max(length, MIN_RANGE_SECONDS), MAX_RANGE_SECONDS);

/** The time range: a length that ends now, or a fixed range. Fires "change". */
export class Range extends EventTarget {
  /** @param {{ now: () => number, fallback?: { length: number, end: number | null } }} options */
  constructor({ now, fallback = { length: 3600, end: null } }) {
    super();
    this.now = now;
    this.fallback = fallback;
    this.length = fallback.length;
    this.end = fallback.end;
  }

  get follows() {
    return this.end === null;
  }

  /** First and last second of it, by the head's clock. */
  bounds() {
    const to = this.end ?? this.now();
    return { from: to - this.length, to };
  }

  /** The same as the head's endpoints want it. */
  asked() {
    return this.follows ? { from: `-${spelled(this.length)}` } : this.bounds();
  }

  /**
   * Read the range from the address.
   * @param {Dashboard.Query} query
   */
  read(query) {
    const now = this.now();
    const start = moment(query.from, now);
    if (start === null) return this._take(this.fallback.length, this.fallback.end);
    const isOpen = !query.to || query.to === "now";
    const end = isOpen ? now : Math.min(moment(query.to, now) ?? 0, now);
    if (end <= start || end < MIN_EPOCH_SECONDS) return this._take(this.fallback.length, this.fallback.end);
    const isRelative = isOpen && String(query.from).startsWith("-");
    return this._take(bounded(end - start), isRelative ? null : end);
  }

  /**
   * Choose the last seconds, following now.
   * @param {number} length
   */
  last(length) {
    this._choose(bounded(length), null);
  }

  /**
   * Choose a fixed range.
   * @param {number} from
   * @param {number} to
   */
  set(from, to) {
    const length = bounded(to - from);
    const end = (from + to) / 2 + length / 2;
    this._choose(length, Math.min(end, this.now()));
  }

  /**
   * Move by a fraction of its length; at the end it follows now.
   * @param {number} share
   */
  shift(share) {
    const { to } = this.bounds();
    const end = to + share * this.length;
    const now = this.now();
    if (end >= now && this.follows) return;
    this._choose(this.length, end >= now ? (share > 0 ? null : now) : end);
  }

  /**
   * Make it shorter or longer around a moment, which stays where it is on the screen.
   * @param {number} factor
   * @param {number | null} [around]
   */
  zoom(factor, around = null) {
    const { from, to } = this.bounds();
    const length = bounded(this.length * factor);
    if (this.follows && around === null) return this._choose(length, null);
    const centre = around ?? (from + to) / 2;
    const end = centre + ((to - centre) / this.length) * length;
    return this._choose(length, end >= this.now() ? (this.follows ? null : this.now()) : end);
  }

  /** Choose the range that the page began with. */
  reset() {
    this._choose(this.fallback.length, this.fallback.end);
  }

  /**
   * Follow now, or hold still.
   * @param {boolean} wanted
   */
  follow(wanted) {
    this._choose(this.length, wanted ? null : this.now());
  }

  /**
   * @param {number} length
   * @param {number | null} end
   */
  _choose(length, end) {
    this._take(length, end);
    const words = this.follows
      ? { from: `-${spelled(this.length)}`, to: null }
      : { from: this.bounds().from.toFixed(1), to: this.bounds().to.toFixed(1) };
    setQuery(words, { replace: false });
  }

  /**
   * @param {number} length
   * @param {number | null} end
   */
  _take(length, end) {
    if (length === this.length && end === this.end) return;
    this.length = length;
    this.end = end;
    this.dispatchEvent(new Event("change"));
  }
}

/** @param {number} number */
const two = (number) => String(number).padStart(2, "0");

/** @param {number} epoch */
function localInput(epoch) {
  const at = new Date(epoch * 1000);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day}T${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/**
 * The chosen time in words.
 * @param {Dashboard.Range} range
 */
export function rangeText(range) {
  if (range.follows) return `last ${PRESETS.find(([length]) => length === range.length)?.[1] ?? duration(range.length)}`;
  const { from, to } = range.bounds();
  const isOneDay = new Date(from * 1000).toDateString() === new Date(to * 1000).toDateString();
  return `${dateTime(from)} to ${isOneDay ? clock(to) : dateTime(to)}`;
}

/**
 * Puts the bar into an element; gives back what takes it away. `presets` are lengths in seconds; `extra` gives ranges with a
 * name, which stand before the first preset that is longer than `extraAfter`.
 * @param {HTMLElement} host
 * @param {Dashboard.Range} range
 * @param {Dashboard.RangeOptions} [options]
 */
export function mountRange(host, range, { extra = [], presets = PRESETS.map(([length]) => length), extraAfter = Infinity } = {}) {
  let problem = "";
  const stop = new AbortController();
  /** @param {boolean} [isFocused] */
  const close = (isFocused = false) => {
    const own = host.querySelector("details");
    if (!own?.open) return;
    own.open = false;
    if (isFocused) find(own, "summary").focus();
  };
  /** @param {SubmitEvent} event */
  const own = (event) => {
    event.preventDefault();
    const form = formOf(event);
    const field = (/** @type {string} */ name) => find(form, `[name=${name}]`, HTMLInputElement).value;
    const from = Date.parse(field("from")) / 1000;
    const to = field("to") ? Date.parse(field("to")) / 1000 : range.now();
    problem = from < to ? "" : "The start must be before the end.";
    if (!problem) {
      close(true);
      range.set(from, to);
    }
    draw();
  };
  const draw = () => render(bar(range, { extra: typeof extra === "function" ? extra() : extra, presets, extraAfter }, own, problem), host);
  const changed = () => {
    close();
    draw();
  };
  const { signal } = stop;
  range.addEventListener("change", changed, { signal });
  host.addEventListener("range-presets", draw, { signal });
  document.addEventListener(
    "pointerdown",
    (event) => {
      if (event.target instanceof Node && !host.querySelector("details")?.contains(event.target)) close();
    },
    { signal },
  );
  document.addEventListener(
    "keydown",
    (event) => {
      if (event.key !== "Escape" || !host.querySelector("details[open]")) return;
      event.preventDefault();
      close(true);
    },
    { signal },
  );
  draw();
  return () => stop.abort();
}

/**
 * @param {Dashboard.Range} range
 * @param {number} length
 */
function preset(range, length) {
  const isOn = range.follows && range.length === length;
  const name = PRESETS.find(([known]) => known === length)?.[1] ?? duration(length);
  return html`<button type="button" class="button" aria-pressed=${isOn} data-range=${length}
    @click=${() => range.last(length)}>${name}</button>`;
}

/**
 * A range with a name; it follows now where it has no end.
 * @param {Dashboard.Range} range
 * @param {Preset} preset
 */
function named(range, [name, start, end]) {
  const { from, to } = range.bounds();
  const slack = end === null ? Math.max(60, range.length * 0.05) : 1;
  const isOn = range.follows === (end === null) && Math.abs(from - start) < slack && Math.abs(to - (end ?? range.now())) < slack;
  return html`<button type="button" class="button" data-range="extra" aria-pressed=${isOn}
    @click=${() => (end === null ? range.last(Math.ceil(range.now() - start)) : range.set(start, end))}>${name}</button>`;
}

/**
 * @param {Dashboard.Range} range
 * @param {{ extra: Preset[], presets: number[], extraAfter: number }} options
 */
function durations(range, { extra, presets, extraAfter }) {
  return html`<div class="choices range-presets" role="group" aria-label="Duration">
    ${presets.filter((length) => length <= extraAfter).map((length) => preset(range, length))}
    ${extra.map((one) => named(range, one))}
    ${presets.filter((length) => length > extraAfter).map((length) => preset(range, length))}
  </div>`;
}

/** @param {Dashboard.Range} range */
function follow(range) {
  return html`<button type="button" class="button range-follow" data-move="follow" aria-pressed=${range.follows}
    @click=${() => range.follow(!range.follows)}>Follow live</button>`;
}

/**
 * @param {Dashboard.Range} range
 * @param {{ extra: Preset[], presets: number[], extraAfter: number }} options
 * @param {(event: SubmitEvent) => void} own
 * @param {string} problem
 */
function bar(range, options, own, problem) {
  const { from, to } = range.bounds();
  return html`
    <div class="range" role="group" aria-label="Time">
      ${durations(range, options)}
      <div class="choices">
        <button type="button" class="button" data-move="earlier" aria-label="Earlier" title="Earlier"
          @click=${() => range.shift(-0.5)}><span aria-hidden="true">←</span></button>
        <button type="button" class="button" data-move="later" aria-label="Later" title="Later"
          ?disabled=${range.follows} @click=${() => range.shift(0.5)}><span aria-hidden="true">→</span></button>
      </div>
      <div class="choices">
        <button type="button" class="button" data-move="out" aria-label="Zoom out" title="Zoom out (-)"
          @click=${() => range.zoom(2)}><span aria-hidden="true">−</span><span class="range-words"> zoom out</span></button>
        <button type="button" class="button" data-move="in" aria-label="Zoom in" title="Zoom in (+)"
          @click=${() => range.zoom(0.5)}><span aria-hidden="true">+</span><span class="range-words"> zoom in</span></button>
      </div>
      ${follow(range)}
      <details class="range-own">
        <summary class="button quiet"><span class="visually-hidden">Choose a time range; current: </span>${rangeText(range)}</summary>
        <form class="card" @submit=${own}>
          <div class="range-folded">${durations(range, options)} ${follow(range)}</div>
          <label class="field">From
            <input name="from" type="datetime-local" step="1" required .value=${localInput(from)}></label>
          <label class="field">To
            <input name="to" type="datetime-local" step="1" .value=${localInput(to)}></label>
          <p class="error-note" role="alert" ?hidden=${!problem}>${problem}</p>
          <button class="button primary">Show</button>
        </form>
      </details>
    </div>`;
}
