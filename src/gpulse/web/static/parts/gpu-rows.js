// The GPUs of a job or session as rows: name, heat map over time on the charts' axis, and numbers at the cursor or the last ones.

import { find } from "../core/dom.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing, render } from "../vendor/lit-html.js";
import { quantile } from "./chart-band.js";
import { bridged, latest, valueRange } from "./chart-data.js";
import { mapImage } from "./chart-heatmap.js";
import { gestures } from "./chart-input.js";
import { gutter } from "./chart-theme.js";
import { severityGlyph } from "./glyphs.js";

/** With more GPUs than this, the rows are thin and the numbers are those of nodes. */
const MAX_LARGE_ROWS = 48;
const MAX_THIN_ROWS = 96;
const [THIN_ROW_PIXELS, MIN_ROW_PIXELS] = [6, 3];
const GIB = 2 ** 30;
/** Screens on which the numbers are cards below the rows. */
const CARDS = "(max-width: 900px)";

/**
 * Columns of numbers: metric, title, what a value is divided by, and decimals.
 * @type {Array<[metric: string, title: string, unit: number, places: number]>}
 */
const COLUMNS = [
  ["gpu_utilization_ratio", "Util %", 0.01, 0],
  ["sm_active_ratio", "SM %", 0.01, 0],
  ["tensor_active_ratio", "Tensor %", 0.01, 0],
  ["sm_clock_hertz", "GHz", 1e9, 2],
  ["memory_used_bytes", "GiB", GIB, 1],
  ["power_watts", "W", 1, 0],
  ["temperature_celsius", "°C", 1, 0],
];
/** Columns that a phone has room for. */
const PHONE_COLUMNS = ["sm_active_ratio", "sm_clock_hertz", "power_watts", "temperature_celsius"];

/** Metrics that the rows show. */
export const ROW_METRICS = COLUMNS.map(([metric]) => metric);

/** @typedef {{ word: string, node: string, gpu: string, title: string, values: Map<string, Array<number | null>> }} Row */

/** The rows in their element. */
export class GpuRows {
  /**
   * `live(word, metric)` is a value that has no history here; `markOf(word)` the severity of what is wrong with a GPU.
   * @param {HTMLElement} host
   * @param {Dashboard.Board} board
   * @param {Dashboard.GpuRowsOptions} options
   */
  constructor(host, board, { live, markOf, query }) {
    this.host = host;
    this.board = board;
    this.live = live;
    this.markOf = markOf;
    this.query = query;
    /** @type {Row[]} */
    this.rows = [];
    /** @type {Dashboard.History | null} */
    this.answer = null;
    /** @type {Dashboard.ChartSpec | null} */
    this.spec = null;
    this.isOneNode = false;
    this.marks = "";
    host.classList.add("gpu-rows", "card");
    host.hidden = true;
    render(
      html`<div class="gr-head"></div><div class="gr-body"></div>
      <div class="gr-area time-area"><div class="tl-cursor" hidden></div></div><div class="gr-cards"></div>`,
      host,
    );
    this.head = find(host, ".gr-head");
    this.body = find(host, ".gr-body");
    this.area = find(host, ".gr-area");
    this.cards = find(host, ".gr-cards");
    this.line = find(host, ".tl-cursor");
    this.endGestures = gestures(this.area, board);
    this.area.addEventListener("pointermove", (event) => this._choose(event));
    board.timelines.push(this);
  }

  /** Whether the rows are thin, with numbers of nodes. */
  get isDense() {
    return this.rows.length > MAX_LARGE_ROWS;
  }

  /**
   * Show an answer; `spec` is the chart whose metric the colors stand for.
   * @param {Dashboard.History} answer
   * @param {Dashboard.ChartSpec} spec
   * @param {string[]} words all GPUs, also those without samples
   */
  show(answer, spec, words) {
    this.answer = answer;
    this.spec = spec;
    /** @type {Map<string, Row>} */
    const rows = new Map();
    this.isOneNode = new Set(words.map((word) => word.slice(0, word.indexOf(":")))).size <= 1;
    for (const word of words) {
      const at = word.indexOf(":");
      const [node, gpu] = [word.slice(0, at), word.slice(at + 1)];
      rows.set(word, { word, node, gpu, title: this.isOneNode ? `GPU ${gpu}` : `${node} · ${gpu}`, values: new Map() });
    }
    for (const series of answer.series) rows.get(`${series.node}:${series.gpu}`)?.values.set(series.metric, series.values);
    this.rows = [...rows.values()];
    this.host.hidden = !this.rows.length;
    this._draw();
  }

  /** Show what changed outside of the answer: marks, live values. */
  refresh() {
    if (!this.answer) return;
    const marks = this.rows.map((row) => this.markOf(row.word)).join();
    if (marks === this.marks) this._numbers(this.board.cursor);
    else this._draw();
  }

  /** Draw everything anew, in other colors. */
  repaint() {
    this._draw();
  }

  look() {
    const { answer, board } = this;
    if (!answer?.times.length) return;
    const { from, to } = board.view;
    const { times, step } = answer;
    const scale = 100 / (to - from);
    const left = (times[0] - step / 2 - from) * scale;
    const width = times.length * step * scale;
    for (const canvas of this.body.querySelectorAll("canvas")) {
      canvas.style.left = `${left}%`;
      canvas.style.width = `${width}%`;
    }
    this.cursor(board.cursor);
  }

  /** @param {number | null} time */
  cursor(time) {
    const { from, to } = this.board.view;
    this.line.hidden = time === null;
    if (time !== null) this.line.style.left = `${((time - from) / (to - from)) * 100}%`;
    this._numbers(time);
    for (const row of this.body.querySelectorAll(".gr-row")) {
      row.toggleAttribute("data-on", time !== null && row.getAttribute("data-title") === this.board.row);
    }
  }

  destroy() {
    this.endGestures();
  }

  /** Rows that share a line of numbers: one GPU each, or the GPUs of a node. */
  _groups() {
    if (!this.isDense) return this.rows.map((row) => [row]);
    /** @type {Map<string, Row[]>} */
    const nodes = new Map();
    for (const row of this.rows) nodes.set(row.node, [...(nodes.get(row.node) ?? []), row]);
    return [...nodes.values()];
  }

  _draw() {
    const { spec } = this;
    if (!spec) return;
    this.marks = this.rows.map((row) => this.markOf(row.word)).join();
    const groups = this._groups();
    const [low, high] = this._scale(spec);
    render(this._head(low, high), this.head);
    render(
      groups.map((group, place) => this._row(group, place > 0 && groups[place - 1][0].node !== group[0].node)),
      this.body,
    );
    const thin = this.rows.length > MAX_THIN_ROWS ? MIN_ROW_PIXELS : THIN_ROW_PIXELS;
    /** @type {NodeListOf<HTMLElement>} */ (this.body.querySelectorAll(".gr-strip")).forEach((strip, place) => {
      strip.style.setProperty("--strip-height", `${groups[place].length * thin}px`);
      strip.replaceChildren(this._picture(groups[place], spec, [low, high]));
    });
    // Where all have a finding, none stands out.
    this.host.toggleAttribute(
      "data-all-marked",
      groups.every((group) => group.some((row) => this.markOf(row.word))),
    );
    const { left, right } = gutter();
    this.host.style.setProperty("--gutter-left", `${left}px`);
    this.host.style.setProperty("--gutter-right", `${right}px`);
    this.area.style.top = `${this.body.offsetTop}px`;
    this.area.style.height = `${this.body.offsetHeight}px`;
    this.look();
  }

  /** @param {Dashboard.ChartSpec} spec */
  _scale(spec) {
    const metric = spec.each?.metric ?? "";
    const known = this.rows.flatMap((row) => row.values.get(metric) ?? []).filter((value) => value !== null);
    const ends = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return known.length ? valueRange(spec, ends[0], ends[1]) : valueRange(spec, null, null);
  }

  /**
   * @param {number} low
   * @param {number} high
   */
  _head(low, high) {
    const { spec } = this;
    const unit = spec?.unit ?? "";
    return html`<h2 class="visually-hidden">GPUs</h2>
      <p class="gr-legend">heat: ${spec?.title} <span>${format.value(unit, low)}</span><span class="legend-ramp" role="img" aria-label="to"></span><span>${format.value(unit, high)}</span></p>
      <div class="gr-titles" aria-hidden="true">${COLUMNS.map(([, title]) => html`<span>${title}</span>`)}<span></span></div>`;
  }

  /**
   * @param {Row[]} group
   * @param {boolean} isApart
   */
  _row(group, isApart) {
    const [first] = group;
    const marks = group.map((row) => this.markOf(row.word)).filter((mark) => mark !== null);
    const isNode = group.length > 1 || this.isDense;
    const address = isNode ? href("node", first.node, this.query()) : href("gpu", first.node, first.gpu, this.query());
    return html`<div class=${`gr-row${isApart ? " is-apart" : ""}`} data-title=${isNode ? "" : first.title} ?data-dense=${isNode}
        data-severity=${marks[0] ?? nothing}>
      <a class="gr-name" href=${address} title=${isNode ? `${format.text(first.node)}, ${group.length} GPUs` : nothing}><bdi class="gr-long">${format.text(isNode ? first.node : first.title)}</bdi><span class="gr-short" aria-hidden="true">${format.text(this._short(first.node))}</span></a>
      <div class="gr-strip" aria-hidden="true"></div>
      <div class="gr-numbers">${COLUMNS.map(([metric, title]) => html`<span title=${title}><span class="visually-hidden">${title} </span><span data-metric=${metric}></span></span>`)}
        <span class="gr-mark">${marks[0] ? severityGlyph(marks[0]) : nothing}</span></div>
    </div>`;
  }

  /**
   * What tells a node's name from the others: `02` of gpu-02.
   * @param {string} node
   */
  _short(node) {
    if (this.isOneNode) return node;
    const nodes = this.rows.map((row) => row.node);
    let shared = 0;
    while (shared < node.length && nodes.every((other) => other[shared] === node[shared])) shared += 1;
    while (shared > 0 && /\d/.test(node[shared - 1])) shared -= 1;
    return node.slice(shared) || node;
  }

  /**
   * @param {Row[]} group
   * @param {Dashboard.ChartSpec} spec
   * @param {[number, number]} scale
   */
  _picture(group, spec, scale) {
    const count = this.answer?.times.length ?? 0;
    const metric = spec.each?.metric ?? "";
    return mapImage(
      group.map((row) => bridged(row.values.get(metric) ?? new Array(count).fill(null))),
      Math.max(count, 1),
      scale,
    );
  }

  /**
   * A number of a group: that of its GPU, or the median of its GPUs.
   * @param {Row[]} group
   * @param {string} metric
   * @param {number | null} at
   */
  _value(group, metric, at) {
    const known = group
      .map((row) => {
        const values = row.values.get(metric);
        if (!values) return at === null ? this.live(row.word, metric) : null;
        return at === null ? latest(values) : values[at];
      })
      .filter(format.known);
    return quantile(
      known.sort((a, b) => a - b),
      0.5,
    );
  }

  /** @param {number | null} time */
  _numbers(time) {
    const { answer } = this;
    if (!answer) return;
    const at = time === null ? null : Math.min(Math.max(Math.round((time - answer.times[0]) / answer.step), 0), answer.times.length - 1);
    const rows = [...this.body.querySelectorAll(".gr-row")];
    this._groups().forEach((group, place) => {
      for (const [metric, , unit, places] of COLUMNS) {
        const value = this._value(group, metric, at);
        const words = value === null ? format.UNKNOWN : (value / unit).toFixed(places);
        const cell = rows[place]?.querySelector(`[data-metric=${metric}]`);
        if (cell && cell.textContent !== words) cell.textContent = words;
      }
    });
    if (matchMedia(CARDS).matches) render(this._cards(at), this.cards);
  }

  /**
   * The numbers on a phone: GPUs with findings first, the others folded.
   * @param {number | null} at
   */
  _cards(at) {
    const marked = this.rows.filter((row) => this.markOf(row.word) !== null);
    const others = this.rows.filter((row) => this.markOf(row.word) === null);
    const columns = COLUMNS.filter(([metric]) => PHONE_COLUMNS.includes(metric));
    /** @param {Row[]} rows */
    const numbers = (rows) =>
      html`<dl>${columns.map(([metric, title, unit, places]) => {
        const known = rows
          .map((row) => this._value([row], metric, at))
          .filter((value) => value !== null)
          .map((value) => (value / unit).toFixed(places));
        known.sort((a, b) => Number(a) - Number(b));
        const [low, high] = [known[0], known[known.length - 1]];
        return html`<div><dt>${title}</dt><dd>${known.length ? (low === high ? low : `${low}–${high}`) : format.UNKNOWN}</dd></div>`;
      })}</dl>`;
    /** @param {Row} row */
    const card = (row) => {
      const mark = this.markOf(row.word);
      return html`<li><span class="gr-mark">${mark ? severityGlyph(mark) : nothing}</span>
        <a href=${href("gpu", row.node, row.gpu, this.query())}><bdi>${format.text(row.title)}</bdi></a>${numbers([row])}</li>`;
    };
    const fold = marked.length > 0 || others.length > 4;
    return html`<ul>${[...marked, ...(fold ? [] : others)].map(card)}</ul>
      ${fold && others.length ? html`<details><summary><span class="gr-fold">${others.length} ${marked.length ? "others" : "GPUs"}</span>${numbers(others)}</summary><ul>${others.map(card)}</ul></details>` : nothing}`;
  }

  /** @param {PointerEvent} event */
  _choose(event) {
    const row = [...this.body.querySelectorAll(".gr-row")].find((one) => {
      const { top, bottom } = one.getBoundingClientRect();
      return event.clientY >= top && event.clientY < bottom;
    });
    this.board.row = row?.getAttribute("data-title") || null;
  }
}
