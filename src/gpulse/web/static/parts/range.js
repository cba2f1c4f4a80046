// Which time the page looks at, kept in the address, and the bar to choose it with.
import { html, render } from "../vendor/lit-html.js";
import { setQuery } from "../core/router.js";
import { clock, dateTime, duration } from "../core/format.js";

/** Lengths offered by name, in seconds. */
export const PRESETS = [
  [300, "5 min"],
  [900, "15 min"],
  [3600, "1 h"],
  [21600, "6 h"],
  [86400, "24 h"],
  [604800, "7 d"],
  [2592000, "30 d"],
];
const UNITS = { ms: 0.001, s: 1, m: 60, min: 60, h: 3600, d: 86400, w: 604800 };
const SHORTEST = 10;
const LONGEST = 366 * 86400;
const EARLIEST = Date.UTC(2000, 0) / 1000;

/** Seconds of a length such as "90s", "1h30m" or "7d"; null when it is none. */
export function seconds(text) {
  const parts = [...String(text).matchAll(/(\d+(?:\.\d+)?)(ms|min|s|m|h|d|w)/g)];
  if (!parts.length || parts.map((part) => part[0]).join("") !== String(text)) return null;
  return parts.reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0);
}

/** Epoch seconds of a time such as "-1h", "now", an epoch or ISO 8601; null when it is none. */
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

/** A length as the address says it: "1h", "90s". */
function spelled(length) {
  for (const unit of ["d", "h", "m"]) {
    if (length >= UNITS[unit] && length % UNITS[unit] === 0) return `${length / UNITS[unit]}${unit}`;
  }
  return `${Math.max(1, Math.round(length))}s`;
}

const bounded = (length) => Math.min(Math.max(length, SHORTEST), LONGEST);

/** The chosen time: a length that ends now, or a fixed stretch. Fires "change". */
export class Range extends EventTarget {
  constructor({ now, fallback = { length: 3600, end: null } }) {
    super();
    this.now = now;
    this.fallback = fallback;
    Object.assign(this, fallback);
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

  /** Take what the address says. */
  read(query) {
    const now = this.now();
    const start = moment(query.from, now);
    if (start === null) return this._take(this.fallback.length, this.fallback.end);
    const isOpen = !query.to || query.to === "now";
    const end = isOpen ? now : Math.min(moment(query.to, now) ?? 0, now);
    if (end <= start || end < EARLIEST) return this._take(this.fallback.length, this.fallback.end);
    const isRelative = isOpen && String(query.from).startsWith("-");
    return this._take(bounded(end - start), isRelative ? null : end);
  }

  /** The last so many seconds, following now. */
  last(length) {
    this._choose(bounded(length), null);
  }

  /** A fixed stretch. */
  set(from, to) {
    const length = bounded(to - from);
    const end = (from + to) / 2 + length / 2;
    this._choose(length, Math.min(end, this.now()));
  }

  /** Move by a share of its length; beyond now it follows. */
  shift(share) {
    const { to } = this.bounds();
    const end = to + share * this.length;
    const now = this.now();
    if (end >= now && this.follows) return;
    this._choose(this.length, end >= now ? (share > 0 ? null : now) : end);
  }

  /** Make it shorter or longer around a moment, which stays where it is on the screen. */
  zoom(factor, around = null) {
    const { from, to } = this.bounds();
    const length = bounded(this.length * factor);
    if (this.follows && around === null) return this._choose(length, null);
    const centre = around ?? (from + to) / 2;
    const end = centre + ((to - centre) / this.length) * length;
    return this._choose(length, end >= this.now() ? (this.follows ? null : this.now()) : end);
  }

  /** Follow now, or hold still. */
  follow(wanted) {
    this._choose(this.length, wanted ? null : this.now());
  }

  _choose(length, end) {
    this._take(length, end);
    const words = this.follows
      ? { from: `-${spelled(this.length)}`, to: null }
      : { from: this.bounds().from.toFixed(1), to: this.end.toFixed(1) };
    setQuery(words, { replace: false });
  }

  _take(length, end) {
    if (length === this.length && end === this.end) return;
    this.length = length;
    this.end = end;
    this.dispatchEvent(new Event("change"));
  }
}

const two = (number) => String(number).padStart(2, "0");

function localInput(epoch) {
  const at = new Date(epoch * 1000);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day}T${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** The chosen time in words. */
export function rangeText(range) {
  if (range.follows) return `last ${PRESETS.find(([length]) => length === range.length)?.[1] ?? duration(range.length)}`;
  const { from, to } = range.bounds();
  const isOneDay = new Date(from * 1000).toDateString() === new Date(to * 1000).toDateString();
  return `${dateTime(from)} – ${isOneDay ? clock(to) : dateTime(to)}`;
}

/** Puts the bar into an element; gives back what takes it away. */
export function mountRange(host, range, { extra = [] } = {}) {
  let problem = "";
  const own = (event) => {
    event.preventDefault();
    const form = event.target;
    const from = Date.parse(form.elements.from.value) / 1000;
    const to = form.elements.to.value ? Date.parse(form.elements.to.value) / 1000 : range.now();
    problem = from < to ? "" : "The first time must be before the second.";
    if (!problem) {
      form.closest("details").open = false;
      range.set(from, to);
    }
    draw();
  };
  const draw = () => render(bar(range, extra, own, problem), host);
  range.addEventListener("change", draw);
  draw();
  return () => range.removeEventListener("change", draw);
}

function preset(range, length, name) {
  const isOn = range.follows && range.length === length;
  return html`<button type="button" class="button quiet" aria-pressed=${isOn} data-range=${length}
    @click=${() => range.last(length)}>${name}</button>`;
}

function bar(range, extra, own, problem) {
  const { from, to } = range.bounds();
  return html`
    <div class="range" role="group" aria-label="Time">
      <div class="range-presets" role="group" aria-label="Length of time">
        ${PRESETS.map(([length, name]) => preset(range, length, name))}
        ${extra.map(
          ([name, start, end]) => html`<button type="button" class="button quiet" data-range="extra"
            aria-pressed=${!range.follows && Math.abs(from - start) < 1 && Math.abs(to - end) < 1}
            @click=${() => range.set(start, end)}>${name}</button>`,
        )}
      </div>
      <div class="range-moves">
        <button type="button" class="button quiet" data-move="earlier" aria-label="Earlier" title="Earlier"
          @click=${() => range.shift(-0.5)}><span aria-hidden="true">←</span></button>
        <button type="button" class="button quiet" data-move="later" aria-label="Later" title="Later"
          ?disabled=${range.follows} @click=${() => range.shift(0.5)}><span aria-hidden="true">→</span></button>
        <button type="button" class="button quiet" data-move="out" aria-label="Zoom out" title="Zoom out"
          @click=${() => range.zoom(2)}><span aria-hidden="true">−</span></button>
        <button type="button" class="button quiet range-follow" data-move="follow" aria-pressed=${range.follows}
          @click=${() => range.follow(!range.follows)}>
          <span class="range-dot" aria-hidden="true"></span>Follow now</button>
      </div>
      <details class="range-own">
        <summary class="button quiet"><span class="visually-hidden">Own time, now: </span>${rangeText(range)}</summary>
        <form class="card" @submit=${own}>
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
