// The charts and timelines of a page: their common time axis and cursor, and the requests for their data.

import { ApiError, asError, get } from "../core/api.js";
import { Chart } from "./chart.js";
import { joined, linesOf } from "./chart-data.js";
import { forgetScale, onTheme } from "./chart-theme.js";

const MIN_REFRESH_SECONDS = 2;
const MAX_REFRESH_SECONDS = 30;
const RETRY_SECONDS = 5;
const NO_SUCH_THING = 404;
const SIDE_SECONDS = 15;
const TAIL_STEPS = 20;
const SLOW_MS = 150;
const PIXELS_A_POINT = 1.6;
const DEFAULT_WIDTH_PIXELS = 600;

/**
 * Width available to a plot: its own if it is visible, else the inside of its card.
 * @param {HTMLElement} plotArea
 */
function roomFor(plotArea) {
  const card = plotArea.parentElement;
  if (plotArea.clientWidth || !card) return plotArea.clientWidth;
  const { paddingLeft, paddingRight } = getComputedStyle(card);
  return Math.max(0, Math.floor(card.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)));
}

/** The charts and timelines of a page. */
export class Board {
  /**
   * `why(spec, line titles)` returns why data is missing; `failed(error or null)` is called after each request.
   * @param {{ range: Dashboard.Range, host: HTMLElement, why: (spec: Dashboard.ChartSpec, titles: string[]) => string, failed?: (error: Error | null) => void }} options
   */
  constructor({ range, host, why, failed = () => {} }) {
    this.range = range;
    this.host = host;
    this.why = why;
    this.failed = failed;
    this.view = range.bounds();
    /** @type {number | null} */
    this.cursor = null;
    /** @type {string | null} The row of heat maps that the cursor is in, by its title. */
    this.row = null;
    /** @type {{ spans: Dashboard.FindingSpan[], marks: Dashboard.Mark[] }} */
    this.annotations = { spans: [], marks: [] };
    /** @type {Dashboard.LoadedGroup[]} */
    this.groups = [];
    /** @type {Dashboard.TimeView[]} Timelines and other parts on the same time axis. */
    this.timelines = [];
    /**
     * Further requests, in addition to those of the charts.
     * @type {Array<(signal: AbortSignal) => Promise<void>>}
     */
    this.sides = [];
    this.sidesAt = 0;
    /** @type {AbortController | null} */
    this.request = null;
    this.timer = 0;
    /** @type {Map<Element | null, number>} Widths of plots, by what their cards are in. */
    this.widths = new Map();
    /** @type {Map<string, number>} */
    this.due = new Map();
    this.changed = () => this.load();
    range.addEventListener("change", this.changed);
    this.sizes = new ResizeObserver(() => this._resize());
    this.sizes.observe(host);
    this.visibility = new IntersectionObserver((seen) => seen.forEach((one) => this._seen(one)), { rootMargin: "300px" });
    this.endTheme = onTheme(() => {
      this.charts().forEach((chart) => chart.repaint());
      this.timelines.forEach((timeline) => timeline.repaint?.());
    });
  }

  charts() {
    return this.groups.flatMap((group) => group.charts);
  }

  /**
   * Charts that one question answers: {scope, nodes?, gpus? (or a function), metrics, spread?, specs}; they go into `host`. Optional:
   * isIdle() (nothing to ask), ask(signal, points) instead of the question, shape(answer) before it is shown, answered(answer).
   * @param {HTMLElement} host
   * @param {Dashboard.ChartGroup} group
   */
  add(host, group) {
    const charts = group.specs.map((spec) => {
      const section = document.createElement("section");
      section.setAttribute("aria-label", spec.title);
      (spec.host ?? host).append(section);
      const chart = new Chart(section, spec, this);
      this.visibility.observe(section);
      return chart;
    });
    const whole = { ...group, charts, answer: null };
    this.groups.push(whole);
    return whole;
  }

  /** Request everything again: the first charts, then the other charts and the timelines. */
  async load() {
    this.request?.abort();
    clearTimeout(this.timer);
    const request = new AbortController();
    this.request = request;
    this.host.dataset.loading = "true";
    for (const group of this.groups) group.isFresh = false;
    const [first] = this.groups;
    if (first?.ask) this._look(this.range.bounds());
    const slow = setTimeout(() => this._look(this.range.bounds()), SLOW_MS);
    request.signal.addEventListener("abort", () => clearTimeout(slow));
    try {
      if (first) await this._ask(first, request.signal);
      clearTimeout(slow);
      const sides = this._sides(request.signal);
      for (const group of this.groups.slice(1)) await this._ask(group, request.signal);
      await sides;
      this.failed(null);
    } catch (error) {
      if (request.signal.aborted) return;
      this.host.dataset.loading = "false";
      this._failed(asError(error));
      return;
    }
    if (request.signal.aborted) return;
    this.host.dataset.loading = "false";
    this._rest(request.signal);
    this._plan(request.signal);
  }

  /**
   * Draw charts that are not visible, one after the other, when the browser is idle.
   * @param {AbortSignal} signal
   */
  _rest(signal) {
    const chart = this.charts().find((one) => one.isStale && !one.isNear && !one.plot && !one.host.hidden);
    if (!chart || signal.aborted) return;
    const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
    idle(() => {
      if (signal.aborted) return;
      chart.near(true);
      chart.isNear = false;
      this._rest(signal);
    });
  }

  /**
   * Draw a group's charts again, with what is known already.
   * @param {Dashboard.LoadedGroup} group
   */
  redraw(group) {
    if (group.answer) this._show(group, group.answer);
  }

  /** Place the timelines' items before the next frame. */
  placeItems() {
    this._soon("items", () => this.timelines.forEach((timeline) => timeline.look()));
  }

  /**
   * Width of a plot, measured once per frame for all cards of the same grid: its columns have the same width.
   * @param {HTMLElement} plotArea
   */
  widthOf(plotArea) {
    const grid = plotArea.parentElement?.parentElement ?? null;
    const width = this.widths.get(grid) || roomFor(plotArea);
    if (width) this.widths.set(grid, width);
    this._soon("width", () => this.widths.clear());
    return width || DEFAULT_WIDTH_PIXELS;
  }

  /** @param {number | null} time */
  setCursor(time) {
    const { from, to } = this.view;
    this.cursor = time === null || time < from || time > to ? null : time;
    if (this.cursor === null) this.row = null;
    this._soon("cursor", () => {
      this.charts().forEach((chart) => chart.cursor(this.cursor));
      this.timelines.forEach((timeline) => timeline.cursor(this.cursor));
    });
  }

  /**
   * Show a time range without requesting its data yet.
   * @param {number} from
   * @param {number} to
   */
  preview(from, to) {
    this._look({ from, to });
  }

  /** Choose the time range that is shown. */
  settle() {
    const { from, to } = this.view;
    if (to >= this.range.now() && this.range.follows) return this.range.last(Math.round(to - from));
    return this.range.set(from, to);
  }

  /**
   * @param {number} from
   * @param {number} to
   */
  zoom(from, to) {
    this._look({ from, to });
    this.range.set(from, to);
  }

  zoomIn() {
    this.range.zoom(0.5, this.cursor);
  }

  zoomOut() {
    this.range.zoom(2);
  }

  /**
   * Marks to draw on every chart.
   * @param {{ spans: Dashboard.FindingSpan[], marks: Dashboard.Mark[] }} annotations
   */
  annotate(annotations) {
    this.annotations = annotations;
    this.charts().forEach((chart) => chart.isNear && chart.repaint());
  }

  destroy() {
    this.request?.abort();
    clearTimeout(this.timer);
    this.range.removeEventListener("change", this.changed);
    this.sizes.disconnect();
    this.visibility.disconnect();
    this.endTheme();
    this.charts().forEach((chart) => chart.destroy());
    this.timelines.forEach((timeline) => timeline.destroy());
  }

  /**
   * @param {Dashboard.LoadedGroup} group
   * @param {Dashboard.Words} times
   * @param {number} points
   */
  _question(group, times, points) {
    const { scope, nodes, gpus, metrics } = group;
    const chosen = typeof gpus === "function" ? gpus() : gpus;
    const spread = typeof group.spread === "function" ? group.spread() : group.spread;
    return {
      scope,
      nodes: typeof nodes === "function" ? nodes() : nodes,
      gpus: chosen,
      metrics: typeof metrics === "function" ? metrics() : metrics,
      ...times,
      points,
      spread: spread ? String(spread) : undefined,
    };
  }

  /**
   * @param {Dashboard.LoadedGroup} group
   * @param {AbortSignal} signal
   */
  async _ask(group, signal) {
    if (group.isIdle?.()) {
      group.isFresh = true;
      if (group.charts.length) this._look(this.range.bounds());
      return group.charts.forEach((chart) => chart.say(this.why(chart.spec, [])));
    }
    const width = group.charts[0] ? this.widthOf(group.charts[0].plotArea) : 800;
    const points = Math.round(Math.min(Math.max(width / PIXELS_A_POINT, 150), group.maxPoints?.() ?? 1000));
    /** @type {Dashboard.History} */
    let answer;
    try {
      answer = await (group.ask?.(signal, points) ?? get("/api/v1/history", this._question(group, this.range.asked(), points), { signal }));
    } catch (error) {
      if (!signal.aborted) group.charts.forEach((chart) => chart.hasData || chart.say(asError(error).message, "error"));
      throw error;
    }
    if (signal.aborted) return undefined;
    group.answer = answer;
    group.askedAt = performance.now();
    group.isFresh = true;
    if (!group.ask) this._look(this.range.follows ? { from: answer.from, to: answer.to } : this.range.bounds());
    group.answered?.(answer);
    return this._show(group, answer);
  }

  /**
   * @param {Dashboard.LoadedGroup} group
   * @param {Dashboard.History} whole
   */
  _show(group, whole) {
    const answer = group.shape?.(whole) ?? whole;
    for (const chart of group.charts) {
      const found = linesOf(chart.spec, answer);
      if (!found.lines.length && !found.band) chart.say(this.why(chart.spec, []));
      else chart.show({ ...found, missing: found.missing.length ? [this.why(chart.spec, found.missing)] : [] });
    }
  }

  /** @param {AbortSignal} signal */
  async _sides(signal) {
    this.sidesAt = performance.now();
    await Promise.all(this.sides.map((side) => side(signal).catch((error) => !signal.aborted && this.failed(error))));
  }

  /**
   * @param {AbortSignal} signal
   * @param {number | null} [seconds]
   */
  _plan(signal, seconds = null) {
    if (!this.range.follows) return;
    const step = this.groups[0]?.answer?.step ?? MIN_REFRESH_SECONDS;
    const wait = seconds ?? Math.min(Math.max(step, MIN_REFRESH_SECONDS), MAX_REFRESH_SECONDS);
    this.timer = setTimeout(() => this._follow(signal), wait * 1000);
  }

  /** @param {AbortSignal} signal */
  async _follow(signal) {
    if (document.hidden) return this._plan(signal);
    try {
      for (const group of this.groups) if (!(await this._grow(group, signal))) return this.load();
      if (performance.now() - this.sidesAt > SIDE_SECONDS * 1000) await this._sides(signal);
      this.failed(null);
    } catch (error) {
      if (signal.aborted) return undefined;
      this.failed(asError(error));
      return this._plan(signal, RETRY_SECONDS);
    }
    return signal.aborted ? undefined : this._plan(signal);
  }

  /**
   * Request only the newest data of a group; false when everything must be requested again.
   * @param {Dashboard.LoadedGroup} group
   * @param {AbortSignal} signal
   */
  async _grow(group, signal) {
    if (group.isIdle?.()) return true;
    if (!group.answer) return false;
    // Which series are outliers depends on the whole range, so percentiles are requested anew.
    if (group.ask || group.answer.bands) {
      if (performance.now() - (group.askedAt ?? 0) > SIDE_SECONDS * 1000) await this._ask(group, signal);
      return true;
    }
    const { step } = group.answer;
    const times = { from: `-${((TAIL_STEPS - 1.5) * step).toFixed(1)}s` };
    const tail = await get("/api/v1/history", this._question(group, times, TAIL_STEPS), { signal });
    if (signal.aborted) return true;
    const whole = joined(group.answer, tail, tail.to - this.range.length);
    if (!whole) return false;
    group.answer = whole;
    if (group === this.groups[0]) this._look({ from: tail.to - this.range.length, to: tail.to });
    group.answered?.(whole);
    this._show(group, whole);
    return true;
  }

  /** @param {Error} error */
  _failed(error) {
    this.failed(error);
    if (!(error instanceof ApiError && error.status === NO_SUCH_THING)) this.timer = setTimeout(() => this.load(), RETRY_SECONDS * 1000);
  }

  /** @param {Dashboard.View} view */
  _look(view) {
    this.view = view;
    if (this.cursor !== null && (this.cursor < view.from || this.cursor > view.to)) this.setCursor(null);
    // A chart that waits for an answer keeps its old state and is drawn once, with the new data.
    this._soon("look", () => {
      const isLoading = this.groups.some((group) => group.isFresh) && this.groups.some((group) => !group.isFresh);
      for (const group of this.groups) if (group.isFresh || !isLoading) group.charts.forEach((chart) => chart.look(this.view));
      this.timelines.forEach((timeline) => timeline.look());
    });
  }

  /**
   * @param {string} name
   * @param {() => void} work
   */
  _soon(name, work) {
    if (this.due.has(name)) return;
    this.due.set(
      name,
      requestAnimationFrame(() => {
        this.due.delete(name);
        work();
      }),
    );
  }

  _resize() {
    this.widths.clear();
    forgetScale();
    this.charts().forEach((chart) => chart.resize());
    this.timelines.forEach((timeline) => timeline.look());
  }

  /** @param {IntersectionObserverEntry} options */
  _seen({ target, isIntersecting }) {
    this.charts()
      .find((chart) => chart.host === target)
      ?.near(isIntersecting);
  }
}
