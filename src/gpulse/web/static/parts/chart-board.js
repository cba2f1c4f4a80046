// What holds a page's charts and timelines together: one time axis, one cursor, one way to ask the head.
import { get } from "../core/api.js";
import { Chart } from "./chart.js";
import { joined, linesOf } from "./chart-lines.js";
import { forgetScale, onTheme } from "./chart-theme.js";

const FASTEST_SECONDS = 2;
const SLOWEST_SECONDS = 30;
const RETRY_SECONDS = 5;
const NO_SUCH_THING = 404;
const SIDE_SECONDS = 15;
const TAIL_STEPS = 20;
const SLOW_MS = 150;
const PIXELS_A_POINT = 1.6;
const USUAL_WIDTH = 600;

/** How much room a plot has: its own where it is shown, else what its card has inside. */
function roomFor(stage) {
  if (stage.clientWidth) return stage.clientWidth;
  const card = stage.parentElement;
  const { paddingLeft, paddingRight } = getComputedStyle(card);
  return Math.max(0, Math.floor(card.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)));
}

/** The charts and timelines of a page. */
export class Board {
  /** `why(spec, line titles)` says why something is not known; `failed(error or null)` is told how asking went. */
  constructor({ range, host, why, failed = () => {} }) {
    Object.assign(this, { range, host, why, failed });
    this.view = range.bounds();
    this.cursor = null;
    this.annotations = { spans: [], marks: [] };
    this.groups = [];
    this.timelines = [];
    this.sides = [];
    this.asking = null;
    this.timer = null;
    this.changed = () => this.load();
    range.addEventListener("change", this.changed);
    this.sizes = new ResizeObserver(() => this._resize());
    this.sizes.observe(host);
    this.sights = new IntersectionObserver((seen) => seen.forEach((one) => this._seen(one)), { rootMargin: "300px" });
    this.endTheme = onTheme(() => this.charts().forEach((chart) => chart.repaint()));
  }

  charts() {
    return this.groups.flatMap((group) => group.charts);
  }

  /**
   * Charts that one question answers: {scope, nodes?, gpus? (or a function), metrics, spread?, specs}; they go into `host`. Optional:
   * isIdle() (nothing to ask), ask(signal, points) instead of the question, shape(answer) before it is shown, answered(answer).
   */
  add(host, group) {
    const charts = group.specs.map((spec) => {
      const section = document.createElement("section");
      section.setAttribute("aria-label", spec.title);
      host.append(section);
      const chart = new Chart(section, spec, this);
      this.sights.observe(section);
      return chart;
    });
    const whole = { ...group, charts, answer: null };
    this.groups.push(whole);
    return whole;
  }

  /** Ask for everything anew: the first charts first, then the rest beside what is on the timelines. */
  async load() {
    this.asking?.abort();
    clearTimeout(this.timer);
    const asking = (this.asking = new AbortController());
    this.host.dataset.loading = "true";
    for (const group of this.groups) group.isFresh = false;
    const [first] = this.groups;
    if (first?.ask) this._look(this.range.bounds());
    const slow = setTimeout(() => this._look(this.range.bounds()), SLOW_MS);
    asking.signal.addEventListener("abort", () => clearTimeout(slow));
    try {
      if (first) await this._ask(first, asking.signal);
      clearTimeout(slow);
      const sides = this._sides(asking.signal);
      for (const group of this.groups.slice(1)) await this._ask(group, asking.signal);
      await sides;
      this.failed(null);
    } catch (error) {
      if (asking.signal.aborted) return;
      this.host.dataset.loading = "false";
      this._failed(error);
      return;
    }
    if (asking.signal.aborted) return;
    this.host.dataset.loading = "false";
    this._rest(asking.signal);
    this._plan(asking.signal);
  }

  /** Charts out of sight are drawn when there is nothing else to do, one after the other. */
  _rest(signal) {
    const chart = this.charts().find((one) => one.isStale && !one.isNear && !one.plot);
    if (!chart || signal.aborted) return;
    const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
    idle(() => {
      if (signal.aborted) return;
      chart.near(true);
      chart.isNear = false;
      this._rest(signal);
    });
  }

  /** Draw a group's charts again, with what is known already. */
  redraw(group) {
    if (group.answer) this._show(group);
  }

  /** Put the timelines' items in their places, once before the next picture. */
  placeItems() {
    this._soon("items", () => this.timelines.forEach((timeline) => timeline.look()));
  }

  /** How wide a plot is, measured once a picture: all columns are as wide. */
  widthOf(stage) {
    this.width ||= roomFor(stage);
    this._soon("width", () => (this.width = null));
    return this.width || USUAL_WIDTH;
  }

  setCursor(time) {
    const { from, to } = this.view;
    this.cursor = time === null || time < from || time > to ? null : time;
    this._soon("cursor", () => {
      this.charts().forEach((chart) => chart.cursor(this.cursor));
      this.timelines.forEach((timeline) => timeline.cursor(this.cursor));
    });
  }

  /** Look at a stretch without asking for it yet. */
  preview(from, to) {
    this._look({ from, to });
  }

  /** What is looked at is what was meant. */
  settle() {
    const { from, to } = this.view;
    if (to >= this.range.now() && this.range.follows) return this.range.last(Math.round(to - from));
    return this.range.set(from, to);
  }

  zoom(from, to) {
    this._look({ from, to });
    this.range.set(from, to);
  }

  zoomOut() {
    this.range.zoom(2);
  }

  /** Marks to draw on every chart. */
  annotate(annotations) {
    this.annotations = annotations;
    this.charts().forEach((chart) => chart.isNear && chart.repaint());
  }

  destroy() {
    this.asking?.abort();
    clearTimeout(this.timer);
    this.range.removeEventListener("change", this.changed);
    this.sizes.disconnect();
    this.sights.disconnect();
    this.endTheme();
    this.charts().forEach((chart) => chart.destroy());
    this.timelines.forEach((timeline) => timeline.destroy());
  }

  _question(group, times, points) {
    const { scope, nodes, gpus, metrics, spread } = group;
    const chosen = typeof gpus === "function" ? gpus() : gpus;
    return { scope, nodes, gpus: chosen, metrics, ...times, points, spread: spread ? "true" : undefined };
  }

  async _ask(group, signal) {
    if (group.isIdle?.()) {
      group.isFresh = true;
      this._look(this.range.bounds());
      return group.charts.forEach((chart) => chart.say(this.why(chart.spec, [])));
    }
    const width = group.charts[0] ? this.widthOf(group.charts[0].stage) : 800;
    const points = Math.round(Math.min(Math.max(width / PIXELS_A_POINT, 150), 1000));
    try {
      group.answer = await (group.ask?.(signal, points) ?? get("/api/v1/history", this._question(group, this.range.asked(), points), { signal }));
    } catch (error) {
      if (!signal.aborted) group.charts.forEach((chart) => !chart.data && chart.say(error.message, "error"));
      throw error;
    }
    if (signal.aborted) return undefined;
    group.askedAt = performance.now();
    group.isFresh = true;
    if (!group.ask) this._look(this.range.follows ? { from: group.answer.from, to: group.answer.to } : this.range.bounds());
    group.answered?.(group.answer);
    return this._show(group);
  }

  _show(group) {
    const answer = group.shape?.(group.answer) ?? group.answer;
    for (const chart of group.charts) {
      const found = linesOf(chart.spec, answer);
      if (!found.lines.length) chart.say(this.why(chart.spec, []));
      else chart.show({ ...found, missing: found.missing.length ? [this.why(chart.spec, found.missing)] : [] });
    }
  }

  async _sides(signal) {
    this.sidesAt = performance.now();
    await Promise.all(this.sides.map((side) => side(signal).catch((error) => !signal.aborted && this.failed(error))));
  }

  _plan(signal, seconds = null) {
    if (!this.range.follows) return;
    const step = this.groups[0]?.answer?.step ?? FASTEST_SECONDS;
    const wait = seconds ?? Math.min(Math.max(step, FASTEST_SECONDS), SLOWEST_SECONDS);
    this.timer = setTimeout(() => this._follow(signal), wait * 1000);
  }

  async _follow(signal) {
    if (document.hidden) return this._plan(signal);
    try {
      for (const group of this.groups) if (!(await this._grow(group, signal))) return this.load();
      if (performance.now() - this.sidesAt > SIDE_SECONDS * 1000) await this._sides(signal);
      this.failed(null);
    } catch (error) {
      if (signal.aborted) return undefined;
      this.failed(error);
      return this._plan(signal, RETRY_SECONDS);
    }
    return signal.aborted ? undefined : this._plan(signal);
  }

  /** Ask for the newest end of a group's answer alone; false when everything has to be asked anew. */
  async _grow(group, signal) {
    if (group.isIdle?.()) return true;
    if (!group.answer) return false;
    if (group.ask) {
      if (performance.now() - group.askedAt > SIDE_SECONDS * 1000) await this._ask(group, signal);
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
    group.answered?.(group.answer);
    this._show(group);
    return true;
  }

  _failed(error) {
    this.failed(error);
    if (error.status !== NO_SUCH_THING) this.timer = setTimeout(() => this.load(), RETRY_SECONDS * 1000);
  }

  _look(view) {
    this.view = view;
    // What waits for an answer keeps its old picture: it is drawn once, with the new one.
    this._soon("look", () => {
      const isLoading = this.groups.some((group) => group.isFresh) && this.groups.some((group) => !group.isFresh);
      for (const group of this.groups) if (group.isFresh || !isLoading) group.charts.forEach((chart) => chart.look(this.view));
      this.timelines.forEach((timeline) => timeline.look());
    });
  }

  _soon(name, work) {
    this.due ??= {};
    if (this.due[name]) return;
    this.due[name] = requestAnimationFrame(() => {
      this.due[name] = null;
      work();
    });
  }

  _resize() {
    this.width = null;
    forgetScale();
    this.charts().forEach((chart) => chart.resize());
    this.timelines.forEach((timeline) => timeline.look());
  }

  _seen({ target, isIntersecting }) {
    this.charts().find((chart) => chart.host === target)?.near(isIntersecting);
  }
}
