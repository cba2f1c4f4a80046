// The charts of many GPUs: one large, the others small, and the GPUs as rows below.

import { find } from "../core/dom.js";
import { current, setQuery } from "../core/router.js";
import { html, render } from "../vendor/lit-html.js";
import { GpuRows, ROW_METRICS } from "./gpu-rows.js";

/** With more GPUs than this, the head computes the percentiles. */
const MAX_PAGE_GPUS = 64;
/** Steps of an answer with many series. */
const [MANY_GPUS, MAX_MANY_POINTS, MAX_ROW_POINTS] = [16, 400, 240];
const LARGE_HEIGHT = 190;

/** @type {Array<Omit<Dashboard.ChartSpec, "each"> & { metric: string }>} */
const CHARTS = [
  { id: "sm-active", metric: "sm_active_ratio", title: "SM active", unit: "ratio", top: 1, why: "it requires a Hopper GPU or newer" },
  { id: "utilization", metric: "gpu_utilization_ratio", title: "GPU utilization", unit: "ratio", top: 1 },
  { id: "power", metric: "power_watts", title: "Power", unit: "watts" },
  { id: "clock", metric: "sm_clock_hertz", title: "SM clock", unit: "hertz" },
  { id: "memory", metric: "memory_used_bytes", title: "GPU memory", unit: "bytes" },
  { id: "temperature", metric: "temperature_celsius", title: "Temperature", unit: "celsius", top: 90, bottom: 20 },
];

/** The charts of a page, with one chosen. */
export class GpuCharts {
  /**
   * @param {Dashboard.Board} board
   * @param {{ lead: HTMLElement, rows: HTMLElement }} hosts
   * @param {Dashboard.GpuChartsOptions} options
   */
  constructor(board, hosts, options) {
    this.board = board;
    this.options = options;
    this.chosen = current().query.metric ?? "";
    render(
      html`<div class="lead-large"></div><aside class="lead-side" aria-label="Worst finding"></aside><div class="lead-small"></div>`,
      hosts.lead,
    );
    this.side = find(hosts.lead, ".lead-side");
    const [large, small] = [find(hosts.lead, ".lead-large"), find(hosts.lead, ".lead-small")];
    const isOneNode = () => new Set(options.gpus().map((word) => word.slice(0, word.indexOf(":")))).size <= 1;
    /** @param {Api.HistorySeries} series */
    const name = (series) => (isOneNode() ? `GPU ${series.gpu}` : `${series.node} · ${series.gpu}`);
    this.rows = new GpuRows(hosts.rows, board, options);
    const specs = CHARTS.map(({ metric, ...spec }) => ({ ...spec, each: { metric, name, noun: "GPUs" } }));
    const isIdle = () => !options.gpus().length;
    /** @type {Dashboard.LoadedGroup} */
    this.group = board.add(hosts.lead, {
      scope: "gpu",
      isIdle,
      gpus: options.gpus,
      metrics: ROW_METRICS,
      spread: () => (this.isLarge ? "percentiles" : false),
      maxPoints: () => (options.gpus().length > MANY_GPUS ? MAX_MANY_POINTS : 1000),
      shape: options.shape,
      answered: (answer) => this._answered(answer),
      specs: [
        ...specs.map((spec) => ({ ...spec, host: large, height: LARGE_HEIGHT, hasRows: true })),
        ...specs.map((spec) => ({ ...spec, host: small, isSmall: true, choose: () => this.choose(spec.id) })),
      ],
    });
    this.mapGroup = board.add(hosts.lead, {
      scope: "gpu",
      specs: [],
      isIdle: () => isIdle() || !this.isLarge,
      gpus: options.gpus,
      metrics: () => [this._spec().each?.metric ?? ROW_METRICS[0]],
      maxPoints: () => MAX_ROW_POINTS,
      answered: (answer) => this._showRows(answer),
    });
    this._arrange();
  }

  /** Whether there are too many GPUs for an answer with each of them. */
  get isLarge() {
    return this.options.gpus().length > MAX_PAGE_GPUS;
  }

  /**
   * Make a small chart the large one.
   * @param {string} id
   */
  choose(id) {
    this.chosen = id;
    setQuery({ metric: id });
    this._arrange();
    if (this.isLarge) this.board.load();
    else if (this.group.answer) this._showRows(this.group.answer);
  }

  /** Show live values and marks anew. */
  refresh() {
    this.rows.refresh();
  }

  /** The chart that is large: what its reader chose, else SM activity where GPUs report it. */
  _spec() {
    const specs = this.group.specs.slice(0, CHARTS.length);
    const known = this.group.answer;
    const hasSm = !known || [...known.series, ...(known.bands ?? [])].some((series) => series.metric === CHARTS[0].metric);
    return specs.find((spec) => spec.id === this.chosen) ?? specs[hasSm ? 0 : 1];
  }

  /** @param {Dashboard.History} answer */
  _answered(answer) {
    this._arrange();
    if (!this.isLarge) this._showRows(answer);
  }

  /** @param {Dashboard.History} answer */
  _showRows(answer) {
    this.rows.show(this.options.shape?.(answer) ?? answer, this._spec(), this.options.gpus());
  }

  _arrange() {
    const { id } = this._spec();
    for (const chart of this.group.charts) chart.host.hidden = (chart.spec.id === id) === Boolean(chart.spec.isSmall);
  }
}
