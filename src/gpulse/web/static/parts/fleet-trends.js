// The last 15 minutes of every GPU: loaded once, then continued with live values; and how such a trend is drawn.

import { get } from "../core/api.js";
import { known } from "../core/format.js";
import { html, render } from "../vendor/lit-html.js";
import { usedOf } from "./fleet-summary.js";

const STEP_SECONDS = 15;
const LENGTH = 60;
const HEIGHT = 24;
const EMPTY = html`<svg class="spark" preserveAspectRatio="none" aria-hidden="true"><path class="spark-area"/><path class="spark-line"/></svg>`;

/** @typedef {{ values: Array<number | null>, sum: number, count: number }} Trend */

/** The trends of all GPUs. Event: "step" when every trend has a new value, or the past arrived. */
export class Trends extends EventTarget {
  /** @param {Dashboard.Fleet} fleet */
  constructor(fleet) {
    super();
    this._fleet = fleet;
    /** @type {WeakMap<Dashboard.Gpu, Trend>} */
    this._trends = new WeakMap();
    this._step = Math.floor(fleet.headTime() / STEP_SECONDS);
    /** @type {Api.FleetTrends | null} */
    this._past = null;
  }

  /**
   * Ask the head for the past; without an answer, trends begin now.
   * @param {AbortSignal} signal
   */
  async load(signal) {
    try {
      this._past = await get("/api/v1/fleet/trends", {}, { signal });
      for (const gpu of this._fleet.gpus()) {
        this._trends.set(gpu, this._begin(gpu, this._trends.get(gpu)));
      }
      this.dispatchEvent(new Event("step"));
    } catch {
      // What is shown from now on is collected here.
    }
  }

  /**
   * Take the current values of some nodes.
   * @param {Iterable<string>} names
   */
  take(names) {
    const step = Math.floor(this._fleet.headTime() / STEP_SECONDS);
    if (step !== this._step) {
      this._advance(step - this._step);
      this._step = step;
    }
    for (const name of names) {
      for (const gpu of this._fleet.nodes.get(name)?.gpus ?? []) {
        const value = usedOf(gpu);
        if (value !== null && gpu.node.state === "healthy") {
          const trend = this._of(gpu);
          trend.sum += value;
          trend.count += 1;
        }
      }
    }
  }

  /**
   * The values of a GPU, oldest first, with the one that is being collected.
   * @param {Dashboard.Gpu} gpu
   */
  of(gpu) {
    const { values, sum, count } = this._of(gpu);
    return [...values.slice(1), count ? sum / count : null];
  }

  /** @param {number} steps */
  _advance(steps) {
    for (const gpu of this._fleet.gpus()) {
      const trend = this._of(gpu);
      trend.values.push(trend.count ? trend.sum / trend.count : null);
      for (let at = 1; at < Math.min(LENGTH, steps); at += 1) {
        trend.values.push(null);
      }
      trend.values.splice(0, trend.values.length - LENGTH);
      trend.sum = 0;
      trend.count = 0;
    }
    this.dispatchEvent(new Event("step"));
  }

  /** @param {Dashboard.Gpu} gpu */
  _of(gpu) {
    let trend = this._trends.get(gpu);
    if (trend === undefined) {
      trend = this._begin(gpu);
      this._trends.set(gpu, trend);
    }
    return trend;
  }

  /**
   * A trend that begins with what the head remembers, and continues with what was collected here.
   * @param {Dashboard.Gpu} gpu
   * @param {Trend} [before]
   * @returns {Trend}
   */
  _begin(gpu, before) {
    const past = this._past?.gpus[gpu.node.name]?.[gpu.label] ?? [];
    const first = this._past === null ? 0 : this._step - LENGTH - Math.floor(this._past.start / STEP_SECONDS);
    const own = before?.values ?? [];
    return {
      values: Array.from({ length: LENGTH }, (_, at) => own[at] ?? past[at + first] ?? null),
      sum: before?.sum ?? 0,
      count: before?.count ?? 0,
    };
  }
}

/** A small chart without axes: an area with its line. Where nothing is known it has a gap. */
export class Sparkline {
  constructor() {
    const holder = document.createElement("div");
    render(EMPTY, holder);
    this.element = /** @type {Element} */ (holder.firstElementChild);
    const [area, line] = this.element.children;
    this._area = area;
    this._line = line;
    this._drawn = "";
  }

  /**
   * @param {Array<number | null>} values
   * @param {number} top
   * @param {boolean} [isStepped]
   */
  set(values, top, isStepped = false) {
    const { line, area } = shape(values, top > 0 ? top : 1, isStepped);
    if (line !== this._drawn) {
      this._drawn = line;
      this.element.setAttribute("viewBox", `0 0 ${Math.max(1, values.length - (isStepped ? 0 : 1))} ${HEIGHT}`);
      this._line.setAttribute("d", line);
      this._area.setAttribute("d", area);
    }
  }
}

/**
 * @param {Array<number | null>} values
 * @param {number} top
 * @param {boolean} isStepped
 */
function shape(values, top, isStepped) {
  let line = "";
  let area = "";
  let begin = -1;
  values.forEach((value, at) => {
    if (!known(value)) {
      begin = -1;
      return;
    }
    const y = (HEIGHT - 1 - Math.min(1, Math.max(0, value / top)) * (HEIGHT - 2)).toFixed(1);
    line += begin < 0 ? `M${at} ${y}` : isStepped ? `V${y}` : `L${at} ${y}`;
    line += isStepped ? `H${at + 1}` : "";
    area += begin < 0 ? `M${at} ${HEIGHT}V${y}` : isStepped ? `V${y}` : `L${at} ${y}`;
    area += isStepped ? `H${at + 1}` : "";
    begin = begin < 0 ? at : begin;
    if (!known(values[at + 1])) {
      area += `V${HEIGHT}H${begin}Z`;
    }
  });
  return { line, area };
}
