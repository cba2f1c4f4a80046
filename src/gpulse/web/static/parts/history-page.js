// Base of the history pages: heading, time range, timeline, charts, and tables below.

import { get } from "../core/api.js";
import { find } from "../core/dom.js";
import { gpuState, HARVESTED, STATE_GLYPHS, STATE_TITLES, silence } from "../core/fleet.js";
import { onKey } from "../core/shortcuts.js";
import { html, nothing, render } from "../vendor/lit-html.js";
import { Board } from "./chart-board.js";
import { findingKey, rank } from "./findings.js";
import { emptyManual, loadManual } from "./findings-manual.js";
import { errorNote } from "./tables.js";
import { mountRange, PRESETS, Range, rangeText } from "./time-range.js";
import { Timeline } from "./timeline.js";
import { EVENT_KINDS, eventMarks, findingBars, findingSpans, mergedSpans, xidMarks } from "./timeline-items.js";

/** @type {Array<"structure" | "values" | "details">} */
const CHANGES = ["structure", "values", "details"];

/** A history page in its element. `draw(page)` renders what is live into page.head, page.more and page.side; `isNone(error)` is true when it says that there is no such thing. */
export class HistoryPage {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.Route} route
   * @param {Dashboard.App} app
   * @param {Dashboard.HistoryOptions} options
   */
  constructor(
    root,
    route,
    app,
    { nodes = () => null, draw, why = () => "No samples in this time range.", isNone = () => false, fallback, presets = [], range = {} },
  ) {
    this.root = root;
    this.app = app;
    this.nodes = nodes;
    this.draw = draw;
    this.manual = emptyManual;
    /** @type {{ signal: AbortSignal, found: Api.FindingReport, others: Api.EventRow[] } | null} */
    this.events = null;
    /** @type {Api.ProcessReport | null} */
    this.processes = null;
    /** @type {Dashboard.History | null} */
    this.xids = null;
    /** @type {number | null} */
    this.due = null;
    /** Put the items of the timeline's lanes together anew. */
    this.relane = () => {};
    root.classList.add("history");
    render(SKELETON, root);
    /** @param {string} name */
    const slot = (name) => find(root, `.history-${name}`);
    this.head = slot("head");
    this.more = slot("more");
    this.side = slot("side");
    this.lead = slot("lead");
    this.grid = slot("grid");
    this.rows = slot("rows");
    this.errors = slot("errors");
    const length = app.prefs.read("range", 3600);
    this.range = new Range({ now: () => app.fleet.headTime(), fallback: fallback ?? { length, end: null } });
    this.range.read(route.query);
    this.range.addEventListener("change", () => this._ranged());
    this.rangeBar = slot("range");
    this.endRange = mountRange(this.rangeBar, this.range, { extra: presets, ...range });
    this.board = new Board({ range: this.range, host: root, why, failed: (error) => this._failed(error, isNone) });
    this.timeline = new Timeline(slot("timeline"), this.board);
    this.stop = new AbortController();
    for (const type of CHANGES) {
      app.fleet.on(type, (names) => this._changed(names), { signal: this.stop.signal });
    }
    this.endKeys = zoomKeys(this.board);
    loadManual().then((manual) => this._read(manual));
    this.refresh();
  }

  /**
   * The page's interface for the application.
   * @param {Partial<Live.Subscription>} subscription
   * @returns {Dashboard.PageHandle}
   */
  handle(subscription) {
    return { subscription, leave: () => this.leave(), rerouted: (route) => this.range.read(route.query) };
  }

  /**
   * Request everything about a node as soon as the head knows it.
   * @param {string} node
   */
  start(node) {
    const { fleet } = this.app;
    const isUnknown = fleet.known && !fleet.nodes.has(node);
    this.root.toggleAttribute("data-unknown", isUnknown);
    if (!isUnknown) {
      this.board.load();
      return;
    }
    fleet.addEventListener("structure", () => this.start(node), { signal: this.stop.signal, once: true });
  }

  leave() {
    this.stop.abort();
    cancelAnimationFrame(this.due ?? 0);
    this.endRange();
    this.endKeys();
    this.board.destroy();
  }

  /** Render live data before the next frame. */
  refresh() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      if (!this.stop.signal.aborted) this.draw(this);
    });
  }

  /** The time range as parameters of a request. */
  times() {
    const { from, to } = this.board.view;
    return { from: from.toFixed(3), to: this.range.follows ? undefined : to.toFixed(3) };
  }

  /**
   * Request the processes that held GPUs.
   * @param {Dashboard.Words} words
   * @param {AbortSignal} signal
   */
  async askProcesses(words, signal) {
    this.processes = await get("/api/v1/processes", { ...this.times(), ...words }, { signal });
    return this.processes;
  }

  /**
   * Request findings and events of some nodes; of events only new ones after the first time.
   * @param {string[]} nodes
   * @param {AbortSignal} signal
   */
  async askEvents(nodes, signal) {
    const known = this.events?.signal === signal ? this.events.others : [];
    const times = this.times();
    const from = known.length ? (Date.parse(known[known.length - 1].time) / 1000 + 0.0005).toFixed(4) : times.from;
    const [found, { events }] = await Promise.all([
      get("/api/v1/findings/history", { ...times, nodes }, { signal }),
      get("/api/v1/events", { ...times, from, kinds: EVENT_KINDS, nodes }, { signal }),
    ]);
    this.events = { signal, found, others: [...known, ...events] };
    this.refresh();
  }

  /**
   * The entry of the history for a finding that holds now.
   * @param {string} node
   * @param {Live.Finding} finding
   */
  stored(node, finding) {
    const key = findingKey(finding);
    return this.events?.found.spans.find((span) => span.to === null && span.node === node && findingKey(span) === key);
  }

  /**
   * Xid errors of an answer become marks; the lanes are drawn anew only when there are others.
   * @param {Dashboard.History} answer
   */
  takeXids(answer) {
    const before = xidMarks(this.xids)
      .map((mark) => mark.key)
      .join();
    this.xids = answer;
    if (
      xidMarks(answer)
        .map((mark) => mark.key)
        .join() !== before
    )
      this.relane();
  }

  /**
   * Lanes for findings and events; `about` selects findings, `gpu` the events of one GPU. With `isGrouped` a finding that
   * several GPUs have at the same time is one bar.
   * @param {{ about?: (finding: Api.FindingSpanRow, node: string) => boolean, gpu?: string | null, withPlace?: boolean, isGrouped?: boolean }} [options]
   */
  eventLanes({ about = () => true, gpu = null, withPlace = false, isGrouped = false } = {}) {
    if (!this.events) return WAITING;
    const { found, others } = this.events;
    const spans = findingSpans(found, this.board.view.to).filter(
      (span) => span.to >= this.board.view.from && about(span.finding, span.node),
    );
    const marks = [...eventMarks(others, { gpu }), ...xidMarks(this.xids, { withGpu: gpu === null })];
    marks.sort((a, b) => a.time - b.time);
    spans.sort((a, b) => rank(b.severity) - rank(a.severity));
    this.board.annotate({ spans, marks: marks.filter((mark) => mark.tone === "bad") });
    return [
      {
        key: "findings",
        label: "Findings",
        kind: "finding",
        items: findingBars([...(isGrouped ? mergedSpans(spans) : spans)].reverse(), this.manual, { withPlace: withPlace || isGrouped }),
        empty: "none in this time range",
        note: findingsNote(found),
      },
      { key: "events", label: "Events", kind: "event", items: marks, empty: "none in this time range" },
    ];
  }

  /**
   * @param {Error | null} error
   * @param {(error: Error) => boolean} isNone
   */
  _failed(error, isNone) {
    const isUnknown = error !== null && isNone(error);
    this.root.toggleAttribute("data-unknown", isUnknown);
    render(errorNote(isUnknown ? null : error), this.errors);
  }

  _ranged() {
    const { range, app } = this;
    if (range.follows && PRESETS.some(([length]) => length === range.length)) app.prefs.write("range", range.length);
    app.announce(`Time range: ${rangeText(range)}`);
  }

  /** @param {Dashboard.Manual} manual */
  _read(manual) {
    if (this.stop.signal.aborted) return;
    this.manual = manual;
    this.refresh();
    this.relane();
  }

  /** @param {Set<string>} names */
  _changed(names) {
    const own = this.nodes();
    if (own === null || own.some((name) => names.has(name))) this.refresh();
  }
}

/**
 * What is not in an answer about findings.
 * @param {{ truncated: boolean }} options
 */
function findingsNote({ truncated }) {
  return truncated ? "Not all findings are shown; choose a shorter time range." : null;
}

const WAITING = ["Findings", "Events"].map((label) => ({ key: label.toLowerCase(), label, kind: "event", items: [], empty: "…" }));

const SKELETON = html`
  <div class="history-head"></div>
  <div class="history-range"></div>
  <div class="history-errors"></div>
  <div class="history-body">
    <div class="history-main">
      <div class="history-lead"></div>
      <section class="history-timeline" aria-label="Timeline"></section>
      <div class="history-rows"></div>
      <div class="history-grid"></div>
      <div class="history-more"></div>
    </div>
    <div class="history-side"></div>
  </div>`;

/**
 * Let the keys of a page zoom its charts; gives back what ends that.
 * @param {Dashboard.Board} board
 */
export function zoomKeys(board) {
  const ends = [
    onKey("+", () => board.zoomIn()),
    onKey("=", () => board.zoomIn()),
    onKey("-", () => board.zoomOut()),
    onKey("0", () => board.range.reset()),
  ];
  return () => ends.forEach((end) => end());
}

/**
 * A note since when the numbers are stale; nothing for a healthy node.
 * @param {Dashboard.Node} node
 * @param {Dashboard.App} app
 */
export function staleNote(node, app) {
  const words = silence(node, app.fleet.headTime());
  return words ? html`<p class="stale-note" role="note">${words}</p>` : nothing;
}

/**
 * A number with its name, for the line at the head of a page.
 * @param {string} name
 * @param {Dashboard.Content} value
 * @param {Dashboard.Content} [note]
 */
export function stat(name, value, note = null) {
  return html`<div class="stat" data-stat=${name}><dt>${name}</dt><dd>${value}${note ? html` <span class="muted">${note}</span>` : nothing}</dd></div>`;
}

/**
 * What a GPU is doing, as a shape and a word.
 * @param {Dashboard.Gpu} gpu
 */
export function stateMark(gpu) {
  const state = gpuState(gpu);
  return html`<span class="gpu-state" title=${state === "harvested" ? HARVESTED : nothing}><span class="state" data-state=${state} aria-hidden="true">${STATE_GLYPHS[state]}</span> ${STATE_TITLES[state]}</span>`;
}

/**
 * A note for a page about something that the head does not know, or of which it knows only the past.
 * @param {string} what
 * @param {Dashboard.App} app
 * @param {string | null} [node]
 */
export function unknownNote(what, app, node = null) {
  if (!app.fleet.known) return html`<p class="muted" role="status">Loading…</p>`;
  if (node !== null && app.fleet.nodes.has(node))
    return html`<p class="muted">This node has not reported since the head started; only its history is shown.</p>`;
  return html`<p class="empty">${what} <a href="#/">Back to the overview</a></p>`;
}
