// What the history pages share: head, choice of time, timeline, charts, and the rest below.
import { html, nothing, render } from "../vendor/lit-html.js";
import { get } from "../core/api.js";
import { gpuState, HARVESTED, STATE_GLYPHS, STATE_TITLES } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { silence } from "../core/state.js";
import { Board } from "./chart-board.js";
import { meaningHref, rank, severityMark } from "./findings.js";
import { emptyManual, findingTitle, manual } from "./manual.js";
import { mountRange, PRESETS, Range, rangeText } from "./range.js";
import { errorNote } from "./tables.js";
import { Timeline } from "./timeline.js";
import { EVENT_KINDS, eventMarks, findingBars, findingSpans, jobHref, programOf, xidMarks } from "./timeline-data.js";


/** A history page in its element. `draw(page)` renders what is live into page.head and page.more; `isNone(error)` is true when it says that there is no such thing. */
export class HistoryPage {
  constructor(root, route, app, { nodes = () => null, draw, why = () => "No samples in this time.", isNone = () => false, fallback, presets = [] }) {
    Object.assign(this, { root, app, nodes, draw, book: emptyManual, events: null, processes: null, xids: null });
    root.classList.add("history");
    render(SKELETON, root);
    const slot = (name) => root.querySelector(`.history-${name}`);
    [this.head, this.more, this.grid, this.picks, this.errors] = ["head", "more", "grid", "picks", "errors"].map(slot);
    const length = app.prefs.read("range", 3600);
    this.range = new Range({ now: () => app.fleet.headTime(), fallback: fallback ?? { length, end: null } });
    this.range.read(route.query);
    this.range.addEventListener("change", () => this._ranged());
    this.endRange = mountRange(slot("range"), this.range, { extra: presets });
    this.board = new Board({ range: this.range, host: root, why, failed: (error) => this._failed(error, isNone) });
    this.timeline = new Timeline(slot("timeline"), this.board);
    this.stop = new AbortController();
    for (const type of ["structure", "values", "details"]) {
      app.fleet.addEventListener(type, (event) => this._changed(event.detail), { signal: this.stop.signal });
    }
    manual().then((book) => this._read(book));
    this.refresh();
  }

  /** What the shell wants of a page. */
  handle(wish) {
    return { wish, leave: () => this.leave(), rerouted: (route) => this.range.read(route.query) };
  }

  /** Ask for everything about a node, as soon as the head knows it. */
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
    cancelAnimationFrame(this.due);
    this.endRange();
    this.board.destroy();
  }

  /** Render what is live, once before the next picture. */
  refresh() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      if (!this.stop.signal.aborted) this.draw(this);
    });
  }

  /** The time shown, as the head's endpoints want it. */
  times() {
    const { from, to } = this.board.view;
    return { from: from.toFixed(3), to: this.range.follows ? undefined : to.toFixed(3) };
  }

  /** Ask for the processes that held GPUs. */
  async askProcesses(words, signal) {
    this.processes = await get("/api/v1/processes", { ...this.times(), ...words }, { signal });
    return this.processes;
  }

  /** Ask for what was found and what happened on some nodes; of what happened later on only what is new. */
  async askEvents(nodes, signal) {
    const known = this.events?.signal === signal ? this.events.others : [];
    const times = this.times();
    const from = known.length ? (Date.parse(known.at(-1).time) / 1000 + 0.0005).toFixed(4) : times.from;
    const [found, { events }] = await Promise.all([
      get("/api/v1/findings/history", { ...times, nodes }, { signal }),
      get("/api/v1/events", { ...times, from, kinds: EVENT_KINDS, nodes }, { signal }),
    ]);
    this.events = { signal, found, others: [...known, ...events] };
  }

  /** Xid errors of an answer become marks; the lanes are drawn anew only when there are others. */
  takeXids(answer) {
    const before = xidMarks(this.xids).map((mark) => mark.key).join();
    this.xids = answer;
    if (xidMarks(answer).map((mark) => mark.key).join() !== before) this.relane();
  }

  /** Lanes for findings and events; `about` chooses among findings, `gpu` among what is said of one GPU. */
  eventLanes({ about = () => true, gpu = null, withPlace = false } = {}) {
    if (!this.events) return WAITING;
    const { found, others } = this.events;
    const spans = findingSpans(found, this.board.view.to).filter((span) => span.to >= this.board.view.from && about(span.finding, span.node));
    const marks = [...eventMarks(others, { gpu }), ...xidMarks(this.xids, { withGpu: gpu === null })];
    marks.sort((a, b) => a.time - b.time);
    spans.sort((a, b) => rank(b.severity) - rank(a.severity));
    this.board.annotate({ spans, marks: marks.filter((mark) => mark.tone === "bad") });
    return [
      {
        key: "findings", label: "Findings", kind: "finding", items: findingBars([...spans].reverse(), this.book, { withPlace }),
        empty: "none in this time", note: findingsNote(found),
      },
      { key: "events", label: "Events", kind: "event", items: marks, empty: "none in this time" },
    ];
  }

  _failed(error, isNone) {
    const isUnknown = error !== null && isNone(error);
    this.root.toggleAttribute("data-unknown", isUnknown);
    render(errorNote(isUnknown ? null : error), this.errors);
  }

  _ranged() {
    const { range, app } = this;
    if (range.follows && PRESETS.some(([length]) => length === range.length)) app.prefs.write("range", range.length);
    app.announce(`Time shown: ${rangeText(range)}`);
  }

  _read(book) {
    if (this.stop.signal.aborted) return;
    this.book = book;
    this.refresh();
    this.relane?.();
  }

  _changed(names) {
    const own = this.nodes();
    if (own === null || own.some((name) => names.has(name))) this.refresh();
  }
}

/** What is not in an answer about findings. */
function findingsNote({ truncated }) {
  return truncated ? "Not all findings are shown: choose a shorter time." : null;
}

const WAITING = ["Findings", "Events"].map((label) => ({ key: label.toLowerCase(), label, kind: "event", items: [], empty: "…" }));

const SKELETON = html`
  <div class="history-head"></div>
  <div class="history-range"></div>
  <div class="history-errors"></div>
  <section class="history-timeline" aria-label="What happened"></section>
  <div class="history-picks"></div>
  <div class="history-grid"></div>
  <div class="history-more"></div>`;

/** Since when the numbers are old; nothing while all is well. */
export function staleNote(node, app) {
  const words = silence(node, app.fleet.headTime());
  return words ? html`<p class="stale-note" role="note">${words}</p>` : nothing;
}

/** A number with its name, for the line at the head of a page. */
export function stat(name, value, note = null) {
  return html`<div class="stat" data-stat=${name}><dt>${name}</dt><dd>${value}${note ? html` <span class="muted">${note}</span>` : nothing}</dd></div>`;
}

/** What a GPU is doing, as a shape and a word. */
export function stateMark(gpu) {
  const state = gpuState(gpu);
  return html`<span class="gpu-state" title=${state === "harvested" ? HARVESTED : nothing}><span class="state" data-state=${state} aria-hidden="true">${STATE_GLYPHS[state]}</span> ${STATE_TITLES[state]}</span>`;
}

/** Processes that hold GPUs now, as a table: rows of {node, gpu (label), process, until (when that was so)}. */
export function processTable(rows, caption, { withPlace = true } = {}) {
  if (!rows.length) return nothing;
  return html`<div class="table-scroll"><table class="table jobs-now">
    <caption>${caption}</caption>
    <thead><tr>${withPlace ? html`<th scope="col">GPU</th>` : nothing}<th scope="col">Process</th><th scope="col">User</th><th scope="col">Program</th>
      <th scope="col">Job</th><th scope="col" class="num">GPU memory</th><th scope="col" class="num">SM share</th><th scope="col" class="num">CPU</th>
      <th scope="col" class="num">Running</th></tr></thead>
    <tbody>${rows.map((row) => processRow(row, withPlace))}</tbody></table></div>`;
}

function processRow({ node, gpu, process, until }, withPlace) {
  const job = jobHref(node, process);
  const where = process.job ?? process.container ?? process.pod;
  return html`<tr>
    ${withPlace ? html`<td><a href=${href("gpu", node, gpu)}><bdi>${format.text(node)}</bdi> · ${format.text(gpu)}</a></td>` : nothing}
    <th scope="row"><a href=${job}>${process.pid}</a></th>
    <td>${process.user ? html`<a href=${href("user", process.user)}><bdi>${format.text(process.user)}</bdi></a>` : "–"}</td>
    <td class="program" title=${format.text(process.command?.join(" "))}>${programOf(process)}</td>
    <td><bdi>${format.text(where)}</bdi></td>
    <td class="num">${format.bytes(process.gpu_memory_bytes)}</td>
    <td class="num">${format.percent(process.sm_ratio)}</td>
    <td class="num">${format.known(process.cpu_percent) ? `${Math.round(process.cpu_percent)} %` : "–"}</td>
    <td class="num">${format.known(process.start_time) ? format.duration(until - process.start_time) : "–"}</td>
  </tr>`;
}

/** One finding that holds now, in a line. */
export function findingLine(finding, book, { withPlace = false } = {}) {
  return html`<li>${severityMark(finding.severity)}
    <a href=${meaningHref(finding.id)}>${findingTitle(book, finding.id)}</a>
    ${withPlace && finding.label ? html`<span class="muted">GPU ${format.text(finding.label)}</span>` : nothing}
    <span>${format.text(finding.summary)}</span></li>`;
}

/** Findings that hold now, worst first as they came. */
export function findingsNow(findings, book) {
  if (!findings.length) return nothing;
  return html`<section class="card findings-now" aria-label="Findings now"><h2>Findings now</h2>
    <ul>${findings.map((finding) => findingLine(finding, book, { withPlace: true }))}</ul></section>`;
}

/** A note for a page about something that the head does not know, or of which it knows only the past. */
export function unknownNote(what, app, node = null) {
  if (!app.fleet.known) return html`<p class="muted" role="status">Waiting for the head…</p>`;
  if (app.fleet.nodes.has(node)) return html`<p class="muted">Not heard of since the head started: only its past is known.</p>`;
  return html`<p class="empty">${what} <a href="#/">Back to the overview</a></p>`;
}
