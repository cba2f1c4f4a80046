// One chart over time: lines with their spread, a legend with numbers, a table for those who want one.
/* global uPlot */
import { html, nothing, render, svg } from "../vendor/lit-html.js";
import * as format from "../core/format.js";
import { chartTable, spokenAt, summary } from "./chart-words.js";
import { gestures } from "./chart-gestures.js";
import { chartKeys } from "./chart-keys.js";
import { latest } from "./chart-lines.js";
import { columns, plotOptions } from "./chart-plot.js";
import { scaled, strokeOf } from "./chart-theme.js";

const HEIGHT = 150;
const MANY_LINES = 8;
let number = 0;

/**
 * A chart in an element. `spec` = {id, title, unit, height?, top? (highest value the axis shows at least), bottom?, fill?, why?};
 * `show` gives it {times, step, lines: [{key, title, values, lows?, highs?, isLimit?}], missing: [title]}.
 */
export class Chart {
  constructor(host, spec, board) {
    this.host = host;
    this.spec = spec;
    this.board = board;
    this.id = `chart-${(number += 1)}`;
    this.data = null;
    this.hidden = new Set();
    this.plot = null;
    this.isNear = true;
    this.hasTable = false;
    this.note = null;
    host.className = "chart card";
    host.dataset.chart = spec.id;
    this._state("loading");
    render(this._frame(), host);
    this.stage = host.querySelector(".chart-plot");
    this.legend = host.querySelector(".chart-legend");
    this.table = host.querySelector(".chart-table");
    this.stage.style.height = `${scaled(spec.height ?? HEIGHT)}px`;
    this.endKeys = chartKeys(this.stage, board, this);
  }

  format(value) {
    return format.value(this.spec.unit, value);
  }

  /** Take new data; what is out of sight is drawn when it comes near. */
  show(data) {
    this.data = data;
    this.isStale = true;
    if (this.isNear) this._draw();
  }

  /** Nothing to show, and why. */
  say(note, state = "empty") {
    this.data = null;
    this._drop();
    this._state(state);
    this.note = note;
    this.host.querySelector(".chart-note").textContent = note;
    render(nothing, this.legend);
    render(nothing, this.table);
  }

  /** Said by the board when it scrolls into or out of sight. */
  near(isNear) {
    this.isNear = isNear;
    if (isNear && this.isStale) this._draw();
  }

  /** Look at another stretch of time. */
  look({ from, to }) {
    if (!this.plot || !this.isNear) {
      this.isStale = this.data !== null;
      return;
    }
    const { min, max } = this.plot.scales.x;
    if (min !== from || max !== to) this.plot.setScale("x", { min: from, max: to });
  }

  /** The cursor stands at a time, or nowhere. */
  cursor(time) {
    if (!this.plot) return;
    const left = time === null ? -10 : this.plot.valToPos(time, "x");
    this.plot.setCursor({ left, top: time === null ? -10 : 10 }, false);
    this._values(time);
  }

  resize() {
    const width = this.board.widthOf(this.stage);
    if (this.plot && width !== this.plot.width) this.plot.setSize({ width, height: scaled(this.spec.height ?? HEIGHT) });
  }

  repaint() {
    this.plot?.redraw(false, true);
  }

  destroy() {
    this.endKeys();
    this._drop();
  }

  _state(state) {
    this.host.dataset.state = state;
    this.host.setAttribute("aria-busy", String(state === "loading"));
  }

  _frame() {
    const { title, hint } = this.spec;
    return html`
      <div class="chart-head">
        <h2 id=${`${this.id}-title`} title=${hint ?? nothing}>${title}</h2>
        <ul class="chart-legend" aria-label=${`Lines of ${title}`}></ul>
        <button type="button" class="button quiet chart-to-table" aria-expanded="false" aria-controls=${`${this.id}-table`}
          @click=${(event) => this._toggleTable(event.currentTarget)}>Table<span class="visually-hidden"> of ${title}</span></button>
      </div>
      <p class="visually-hidden" id=${`${this.id}-summary`}></p>
      <div class="chart-plot" tabindex="0" role="slider" aria-labelledby=${`${this.id}-title`}
        aria-describedby=${`${this.id}-summary`} aria-valuemin="0" aria-valuemax="0" aria-valuenow="0"
        aria-valuetext="no data yet"></div>
      <p class="chart-note"></p>
      <p class="chart-missing" hidden></p>
      <div class="chart-table" id=${`${this.id}-table`} hidden></div>`;
  }

  _draw() {
    if (!this.data) return;
    this.isStale = false;
    const { times, lines } = this.data;
    const shape = lines.map((line) => `${line.key}${line.lows ? "+" : ""}`).join("|");
    this._state("ready");
    this.host.dataset.step = this.data.step;
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      this._drop();
      this._build();
    } else {
      const { from, to } = this.board.view;
      this.plot.batch(() => {
        this.plot.setData(columns(times, lines), false);
        this.plot.setScale("x", { min: from, max: to });
      });
    }
    this._words();
  }

  _words() {
    this._legend();
    this._values(this.board.cursor);
    this.host.querySelector(`#${this.id}-summary`).textContent = summary(this);
    const missing = this.host.querySelector(".chart-missing");
    missing.hidden = !this.data.missing?.length;
    missing.textContent = this.data.missing?.length ? this.data.missing.join(" ") : "";
    if (this.hasTable) render(chartTable(this), this.table);
  }

  _build() {
    const { times, lines } = this.data;
    const options = { width: this.board.widthOf(this.stage), height: scaled(this.spec.height ?? HEIGHT), ...plotOptions(this) };
    this.plot = new uPlot(options, columns(times, lines), this.stage);
    lines.forEach((line, place) => this.hidden.has(line.key) && this._toggle(line, place));
    this.plot.over.classList.add("time-area");
    this.endGestures = gestures(this.plot.over, this.board);
  }

  _drop() {
    this.endGestures?.();
    this.endGestures = null;
    this.plot?.destroy();
    this.plot = null;
  }

  _legend() {
    render(
      this.data.lines.map((line, place) => {
        const { tone, dash } = strokeOf(line.place ?? place, line.isLimit);
        return html`<li><button type="button" class="chart-line tone-${tone}" data-line=${line.key}
          aria-pressed=${!this.hidden.has(line.key)} @click=${() => this._switch(line, place)}>
          <svg class="chart-swatch" viewBox="0 0 22 8" aria-hidden="true">${svg`<line x1="1" y1="4" x2="21" y2="4"
            stroke="currentColor" stroke-width="2.5" stroke-dasharray=${dash.join(" ") || "none"}></line>`}</svg>
          <span class="chart-name">${line.title}</span> <span class="chart-value"></span></button></li>`;
      }),
      this.legend,
    );
    this.legend.toggleAttribute("data-many", this.data.lines.length > MANY_LINES);
    this.outputs = [...this.legend.querySelectorAll(".chart-value")];
  }

  _values(time) {
    if (!this.data || !this.outputs) return;
    const at = time === null ? null : this.indexAt(time);
    this.data.lines.forEach((line, place) => {
      const text = this.format(at === null ? latest(line.values) : this._valueAt(place, at));
      if (this.outputs[place] && this.outputs[place].textContent !== text) this.outputs[place].textContent = text;
    });
    this.host.dataset.at = time === null ? "latest" : "cursor";
    this._speak(time, at);
  }

  /** What a line shows at a sample: the last value where it is sampled more rarely. */
  _valueAt(place, at) {
    const drawn = this.plot?.data[1 + place] ?? this.data.lines[place].values;
    while (at > 0 && drawn[at] === undefined) at -= 1;
    return drawn[at];
  }

  _speak(time, at) {
    const { from, to } = this.board.view;
    this.stage.setAttribute("aria-valuemin", from.toFixed(0));
    this.stage.setAttribute("aria-valuemax", to.toFixed(0));
    this.stage.setAttribute("aria-valuenow", (time ?? to).toFixed(0));
    this.stage.setAttribute("aria-valuetext", spokenAt(this, at));
  }

  /** Which sample stands nearest to a time. */
  indexAt(time) {
    const { times, step } = this.data;
    if (!times.length) return null;
    const at = Math.round((time - times[0]) / step);
    return Math.min(Math.max(at, 0), times.length - 1);
  }

  _switch(line, place) {
    if (this.hidden.has(line.key)) this.hidden.delete(line.key);
    else this.hidden.add(line.key);
    this._toggle(line, place);
    this._words();
  }

  _toggle(line, place) {
    const show = !this.hidden.has(line.key);
    const { lines } = this.data;
    this.plot.setSeries(1 + place, { show });
    const bands = lines.slice(0, place).filter((other) => other.lows).length;
    if (line.lows) [0, 1].forEach((side) => this.plot.setSeries(1 + lines.length + 2 * bands + side, { show }));
  }

  _toggleTable(button) {
    this.hasTable = !this.hasTable;
    this.table.hidden = !this.hasTable;
    button.setAttribute("aria-expanded", String(this.hasTable));
    render(this.hasTable && this.data ? chartTable(this) : nothing, this.table);
  }
}
