// One chart over time: lines, small multiples, a band or a heat map by the number of its series; a legend with values, a summary and a table in words.

import { find } from "../core/dom.js";
import * as format from "../core/format.js";
import { clock, dateTime } from "../core/format.js";
import { html, nothing, render } from "../vendor/lit-html.js";
import { MIN_BAND_SERIES } from "./chart-band.js";
import { latest } from "./chart-data.js";
import { followRows, mapHeight, reading, rowAtCursor } from "./chart-heatmap.js";
import { chartKeys, gestures } from "./chart-input.js";
import { drawnLines, kindOf } from "./chart-kinds.js";
import { legend, legendValues } from "./chart-legend.js";
import { columns, plotOptions } from "./chart-plot.js";
import { AXIS_PIXELS, gutter, scaled, TOP_PIXELS } from "./chart-theme.js";

/* global uPlot */

const HEIGHT = 150;
const SMALL_HEIGHT = 48;
const LANE_HEIGHT = 34;
const DAY_SECONDS = 86400;
/** Up to this length of its time range a chart shows seconds. */
const SHORT_SECONDS = 7200;
let number = 0;
/** @type {Dashboard.ChartData} */
const NO_DATA = { times: [], step: 1, lines: [], missing: [] };

/**
 * A chart in an element. `spec` = {id, title, unit, height?, top? (highest value the axis shows at least), bottom?, fill?, why?,
 * isSmall? (no axes; `choose` makes it the large one), hasRows? (a heat map of the same series is on the page)};
 * `show` gives it {times, step, lines: [{key, title, values, lows?, highs?, isLimit?}], missing: [title]}.
 */
export class Chart {
  /**
   * @param {HTMLElement} host
   * @param {Dashboard.ChartSpec} spec
   * @param {Dashboard.Board} board
   */
  constructor(host, spec, board) {
    this.host = host;
    this.spec = spec;
    this.board = board;
    number += 1;
    this.id = `chart-${number}`;
    this.data = NO_DATA;
    /** @type {Dashboard.Line[]} The lines that are drawn. */
    this.drawn = [];
    /** How many series are shown: "band", "lines" or "map". */
    this.choice = "band";
    this.isStale = false;
    /** @type {Set<string>} */
    this.hidden = new Set();
    /** @type {uPlot | null} */
    this.plot = null;
    this.shape = "";
    this.isNear = true;
    this.hasTable = false;
    host.className = spec.isSmall ? "chart chart-small card" : "chart card";
    host.dataset.chart = spec.id;
    this._state("loading");
    render(this._frame(), host);
    this.plotArea = find(host, ".chart-plot");
    this.legend = find(host, ".chart-legend");
    this.table = find(host, ".chart-table");
    this.views = find(host, ".chart-views");
    this.stamp = document.createElement("div");
    this.stamp.className = "chart-time";
    this.stamp.hidden = true;
    this.lanes = document.createElement("ul");
    this.lanes.className = "chart-lanes";
    /** @type {Element[]} */
    this.outputs = [];
    /** @type {(() => void) | null} */
    this.endGestures = null;
    this.markRow = (/** @type {number} */ _row) => {};
    this.plotArea.style.height = `${this.height}px`;
    this.endKeys = spec.isSmall ? () => {} : chartKeys(this.plotArea, board, this);
    this._showViews();
  }

  /** Whether there is something to draw. */
  get hasData() {
    return this.data !== NO_DATA;
  }

  /** How the series are drawn. */
  get kind() {
    return kindOf(this.data, this.spec.isSmall ? "small" : this.choice);
  }

  /** Whether each series is the row of a heat map. */
  get isMap() {
    return this.kind === "map";
  }

  get height() {
    if (this.spec.isSmall) return scaled(SMALL_HEIGHT);
    const around = scaled(AXIS_PIXELS) + TOP_PIXELS;
    if (this.isMap) return mapHeight(this.data.lines.length) + around;
    const lanes = this.kind === "multiples" ? this.data.lines.length * scaled(LANE_HEIGHT) + around : 0;
    return Math.max(scaled(this.spec.height ?? HEIGHT), lanes);
  }

  /** @param {Dashboard.MaybeNumber} value */
  format(value) {
    return format.value(this.spec.unit, value);
  }

  /**
   * Show new data; an invisible chart is drawn when it becomes visible.
   * @param {Dashboard.ChartData} data
   */
  show(data) {
    this.data = data;
    this.isStale = true;
    if (this.host.hidden) this._state("ready");
    if (this.isNear && !this.host.hidden) this._draw();
  }

  /**
   * Show a note instead of data.
   * @param {string} note
   * @param {string} [state]
   */
  say(note, state = "empty") {
    this.data = NO_DATA;
    this._drop();
    this._state(state);
    find(this.host, ".chart-note").textContent = note;
    render(nothing, this.legend);
    render(nothing, this.table);
  }

  /**
   * Called by the board when it becomes visible or invisible.
   * @param {boolean} isNear
   */
  near(isNear) {
    this.isNear = isNear;
    if (isNear && this.isStale) this._draw();
    else if (isNear) this.resize();
  }

  /**
   * Show another time range.
   * @param {Dashboard.View} options
   */
  look({ from, to }) {
    if (!this.plot || !this.isNear) {
      this.isStale = this.hasData;
      return;
    }
    const { min, max } = this.plot.scales.x;
    if (min !== from || max !== to) this.plot.setScale("x", { min: from, max: to });
    this.cursor(this.board.cursor);
  }

  /**
   * Move the cursor to a time, or hide it.
   * @param {number | null} time
   */
  cursor(time) {
    if (!this.plot) return;
    const left = time === null ? -10 : this.plot.valToPos(time, "x");
    this.plot.setCursor({ left, top: time === null ? -10 : 10 }, false);
    this._stamp(time, left);
    this._values(time);
  }

  resize() {
    const width = this.board.widthOf(this.plotArea);
    if (this.plot && width !== this.plot.width) this.plot.setSize({ width, height: this.height });
  }

  repaint() {
    this.plot?.redraw(false, true);
  }

  destroy() {
    this.endKeys();
    this._drop();
  }

  /**
   * Show the series as a band, as lines or as a heat map.
   * @param {string} choice
   */
  choose(choice) {
    this.choice = choice;
    this._setTable(false);
    this._draw();
  }

  /** @param {string} state */
  _state(state) {
    this.host.dataset.state = state;
    this.host.setAttribute("aria-busy", String(state === "loading"));
  }

  _frame() {
    const { title, hint, isSmall, choose } = this.spec;
    const name = isSmall
      ? html`<button type="button" class="chart-choose" title="Enlarge this chart" @click=${() => choose?.()}>${title}</button>`
      : title;
    const plot = isSmall
      ? html`<div class="chart-plot" aria-hidden="true"></div>`
      : html`<div class="chart-plot" tabindex="0" role="slider" aria-labelledby=${`${this.id}-title`}
        aria-describedby=${`${this.id}-summary`} aria-valuemin="0" aria-valuemax="0" aria-valuenow="0"
        aria-valuetext="no data yet"></div>`;
    return html`
      <div class="chart-head">
        <h2 id=${`${this.id}-title`} title=${hint ?? nothing}>${name}</h2>
        <span class="chart-at muted"></span>
        <ul class="chart-legend" aria-label=${`Legend of ${title}`}></ul>
        <div class="chart-views" ?hidden=${Boolean(isSmall)}></div>
      </div>
      <p class="visually-hidden" id=${`${this.id}-summary`}></p>
      ${plot}
      <p class="chart-note"></p>
      <p class="chart-missing" hidden></p>
      <div class="chart-table" id=${`${this.id}-table`} hidden></div>`;
  }

  /** The buttons that choose how the series are shown. */
  _showViews() {
    const isMany = !this.data.band && this.data.lines.filter((line) => !line.isLimit).length >= MIN_BAND_SERIES;
    const choices = [
      ["band", "Band"],
      ["lines", "Lines"],
      ["map", "Map"],
    ].filter(([name]) => name !== "map" || !this.spec.hasRows);
    /** @param {string} words @param {boolean} isOn @param {() => void} choose */
    const button = (words, isOn, choose) => html`<button type="button" class="button quiet chart-view" aria-pressed=${isOn}
      @click=${choose}>${words}<span class="visually-hidden"> of ${this.spec.title}</span></button>`;
    render(
      html`${isMany ? choices.map(([name, words]) => button(words, !this.hasTable && this.choice === name, () => this.choose(name))) : nothing}
        ${button("Table", this.hasTable, () => this._setTable(!this.hasTable))}`,
      this.views,
    );
  }

  _draw() {
    if (!this.hasData) return;
    this.isStale = false;
    const { kind } = this;
    this.drawn = drawnLines(this.spec, this.data, kind);
    const { times } = this.data;
    const shape = `${kind} ${this.drawn.map((line) => `${line.key}${line.lows ? "+" : ""}`).join("|")}`;
    this._state("ready");
    this.host.dataset.step = String(this.data.step);
    this.host.dataset.kind = kind;
    const { plot } = this;
    if (!plot || shape !== this.shape) {
      this.shape = shape;
      this._drop();
      this._build();
    } else {
      const { from, to } = this.board.view;
      plot.batch(() => {
        plot.setData(columns(times, this.drawn), false);
        plot.setScale("x", { min: from, max: to });
      });
    }
    this._words();
  }

  _words() {
    this._legend();
    this._showViews();
    this.cursor(this.board.cursor);
    find(this.host, `#${this.id}-summary`).textContent = summary(this);
    const missing = find(this.host, ".chart-missing");
    missing.hidden = !this.data.missing.length;
    missing.textContent = this.data.missing.join(" ");
    if (this.hasTable) render(chartTable(this), this.table);
  }

  _build() {
    const { kind, drawn } = this;
    const options = { width: this.board.widthOf(this.plotArea), height: this.height, ...plotOptions(this) };
    this.plotArea.style.height = `${this.height}px`;
    this.plot = new uPlot(options, columns(this.data.times, drawn), this.plotArea);
    this.plotArea.append(this.lanes, this.stamp);
    if (kind === "map" || kind === "many") {
      this.hidden.clear();
      this.markRow = followRows(this.plot.over, this);
    }
    drawn.forEach((line, place) => this.hidden.has(line.key) && this._toggle(line, place));
    this.plot.over.classList.add("time-area");
    this.endGestures = gestures(this.plot.over, this.board);
  }

  _drop() {
    this.endGestures?.();
    this.endGestures = null;
    this.plot?.destroy();
    this.plot = null;
    this.stamp.remove();
    this.lanes.remove();
  }

  _legend() {
    render(legend(this), this.legend);
    const isLanes = this.kind === "multiples";
    const height = (this.height - scaled(AXIS_PIXELS) - TOP_PIXELS) / Math.max(this.drawn.length, 1);
    render(
      isLanes
        ? this.drawn.map(
            (line) => html`<li data-line=${line.key}><span class="chart-name">${line.title}</span> <span class="chart-value"></span></li>`,
          )
        : nothing,
      this.lanes,
    );
    if (isLanes) {
      this.lanes.style.insetInline = `${gutter().left + 4}px ${gutter().right}px`;
      this.lanes.style.top = `${TOP_PIXELS}px`;
      for (const lane of this.lanes.children) if (lane instanceof HTMLElement) lane.style.height = `${height}px`;
    }
    this.outputs = [...(isLanes ? this.lanes : this.legend).querySelectorAll(".chart-value")];
  }

  /**
   * The cursor's time, on the axis.
   * @param {number | null} time
   * @param {number} left
   */
  _stamp(time, left) {
    this.stamp.hidden = time === null || !this.plot || Boolean(this.spec.isSmall);
    if (time === null || !this.plot || this.stamp.hidden) return;
    const text = this.timeText(time);
    if (this.stamp.textContent !== text) this.stamp.textContent = text;
    const { offsetLeft, clientWidth } = this.plot.over;
    const half = this.stamp.offsetWidth / 2;
    this.stamp.style.left = `${Math.min(Math.max(offsetLeft + left, half), offsetLeft + clientWidth + gutter().right - half)}px`;
  }

  /**
   * A time as exactly as the chart shows it: with its day, or with its seconds.
   * @param {number} time
   */
  timeText(time) {
    const shown = this.board.view.to - this.board.view.from;
    if (shown > DAY_SECONDS) return dateTime(time).slice(0, 16);
    return shown > SHORT_SECONDS ? clock(time).slice(0, 5) : clock(time);
  }

  /** How many samples are not later than what is shown. */
  visibleCount() {
    const { times, step } = this.data;
    const { to } = this.board.view;
    const count = times.length ? Math.floor((to - times[0]) / step) + 1 : 0;
    return count > 0 ? Math.min(count, times.length) : times.length;
  }

  /** @param {number | null} time */
  _values(time) {
    if (!this.hasData) return;
    const at = time === null ? null : this.indexAt(time);
    legendValues(this, at).forEach((text, place) => {
      if (this.outputs[place] && this.outputs[place].textContent !== text) this.outputs[place].textContent = text;
    });
    const when = time === null || this.spec.isSmall || this.isMap ? "" : `at ${this.timeText(time)}`;
    const spot = find(this.host, ".chart-at");
    if (spot.textContent !== when) spot.textContent = when;
    if (this.isMap || this.kind === "many") this.markRow(rowAtCursor(this));
    this.host.dataset.at = time === null ? "latest" : "cursor";
    this._speak(time, at);
  }

  /**
   * What a line shows at a sample, or the last of what it shows.
   * @param {number} place
   * @param {number | null} at
   */
  shownAt(place, at) {
    return at === null ? latest(this.drawn[place].values, this.visibleCount()) : this.valueAt(place, at);
  }

  /**
   * What a line shows at a sample: the last value where it is sampled more rarely, and that of a neighbor at the edge of a gap.
   * @param {number} place
   * @param {number} at
   */
  valueAt(place, at) {
    const values = this.plot?.data[1 + place] ?? this.drawn[place].values;
    while (at > 0 && values[at] === undefined) at -= 1;
    return values[at] ?? null;
  }

  /**
   * @param {number | null} time
   * @param {number | null} at
   */
  _speak(time, at) {
    if (this.spec.isSmall) return;
    const { from, to } = this.board.view;
    this.plotArea.setAttribute("aria-valuemin", from.toFixed(0));
    this.plotArea.setAttribute("aria-valuemax", to.toFixed(0));
    this.plotArea.setAttribute("aria-valuenow", (time ?? to).toFixed(0));
    this.plotArea.setAttribute("aria-valuetext", spokenAt(this, at));
  }

  /**
   * Which sample stands nearest to a time.
   * @param {number} time
   */
  indexAt(time) {
    const { times, step } = this.data;
    if (!times.length) return 0;
    const at = Math.round((time - times[0]) / step);
    return Math.min(Math.max(at, 0), times.length - 1);
  }

  /**
   * Hide a line, or show it again.
   * @param {Dashboard.Line} line
   * @param {number} place
   */
  toggle(line, place) {
    if (this.hidden.has(line.key)) this.hidden.delete(line.key);
    else this.hidden.add(line.key);
    this._toggle(line, place);
    this._words();
  }

  /**
   * @param {Dashboard.Line} line
   * @param {number} place
   */
  _toggle(line, place) {
    const show = !this.hidden.has(line.key);
    const lines = this.drawn;
    this.plot?.setSeries(1 + place, { show });
    const bands = lines.slice(0, place).filter((other) => other.lows).length;
    if (line.lows) [0, 1].forEach((side) => this.plot?.setSeries(1 + lines.length + 2 * bands + side, { show }));
  }

  /** @param {boolean} isShown */
  _setTable(isShown) {
    this.hasTable = isShown;
    this.table.hidden = !isShown;
    this.host.toggleAttribute("data-table", isShown);
    render(isShown && this.hasData ? chartTable(this) : nothing, this.table);
    this._showViews();
  }
}

const MAX_ROWS = 60;

/** @param {Dashboard.Chart} chart */
const shown = (chart) => chart.drawn.filter((line) => !chart.hidden.has(line.key));

/**
 * Summarize the lines of a chart for screen readers.
 * @param {Dashboard.Chart} chart
 */
export function summary(chart) {
  const { times } = chart.data;
  if (!times.length) return "No samples.";
  const { lines } = chart.data;
  const all = () =>
    distribution(
      chart,
      lines.flatMap((line) => line.values),
    );
  const parts = chart.isMap
    ? [`Heat map of ${lines.length} rows; the up and down arrow keys select one: ${all()}`]
    : chart.kind === "many"
      ? [`${lines.length} lines; the up and down arrow keys select one: ${all()}`]
      : shown(chart).map((line) => `${line.title}: latest ${chart.format(latest(line.values))}, ${distribution(chart, line.values)}`);
  return `From ${dateTime(times[0])} to ${dateTime(times.at(-1))}. ${parts.join(". ")}.`;
}

/**
 * @param {Dashboard.Chart} chart
 * @param {Array<number | null>} samples
 */
function distribution(chart, samples) {
  const values = samples.filter((value) => value !== null);
  if (!values.length) return "no samples";
  const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return `mean ${chart.format(mean)}, from ${chart.format(low)} to ${chart.format(high)}`;
}

/**
 * The values of one sample in a sentence; the latest ones without a cursor.
 * @param {Dashboard.Chart} chart
 * @param {number | null} at
 */
export function spokenAt(chart, at) {
  if (!chart.data.times.length) return "no data";
  if (chart.isMap) return reading(chart, at);
  const when = at === null ? "latest" : clock(chart.data.times[at]);
  if (chart.kind === "many") return `${when}: ${legendValues(chart, at)[0]}`;
  const values = shown(chart).map((line) => {
    const own = line.whole ?? line.values;
    return `${line.title} ${chart.format(at === null ? latest(own, chart.visibleCount()) : own[at])}`;
  });
  return `${when}: ${values.join(", ")}`;
}

/**
 * The samples as a table, thinned out where there are many.
 * @param {Dashboard.Chart} chart
 */
export function chartTable(chart) {
  const { times } = chart.data;
  const lines = chart.data.band ? chart.drawn : chart.data.lines.filter((line) => !chart.hidden.has(line.key));
  const stride = Math.max(1, Math.ceil(times.length / MAX_ROWS));
  const rows = [];
  for (let at = times.length - 1; at >= 0; at -= stride) rows.push(at);
  const note = stride > 1 ? `, only one of every ${stride} samples` : "";
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${`${chart.spec.title} as a table`}>
    <table class="table">
      <caption>${chart.spec.title}, newest first${note}</caption>
      <thead><tr><th scope="col">Time</th>${lines.map((line) => html`<th scope="col" class="num">${line.title}</th>`)}</tr></thead>
      <tbody>${rows.map(
        (at) => html`<tr><th scope="row">${dateTime(times[at])}</th>
        ${lines.map((line) => html`<td class="num">${chart.format(line.values[at])}</td>`)}</tr>`,
      )}</tbody>
    </table></div>`;
}
