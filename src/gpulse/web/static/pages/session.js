// One session: what it is, its file, and what happened during it.

import { html, nothing, render } from "../vendor/lit-html.js";
import { get } from "../core/api.js";
import { byName } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { Board } from "../parts/chart-board.js";
import { asText, findingCard, grouped } from "../parts/findings.js";
import { emptyManual, manual } from "../parts/manual.js";
import { mountRange, Range } from "../parts/range.js";
import { EVENT_KINDS } from "../parts/timeline-data.js";
import { SessionControls } from "../parts/session-forms.js";
import { downloads, endOf, length, seconds, stateBadge, what } from "../parts/sessions.js";
import { copyText, errorNote } from "../parts/tables.js";

const EVERY_MS = 5_000;
const MOST_CHARTED = 64;
const MOST_EVENTS = 200;
const EVENTS_EVERY_MS = 30_000;
const CHARTS = [
  ["gpu_utilization_ratio", "GPU utilization", "ratio", 1],
  ["sm_active_ratio", "SM active", "ratio", 1],
  ["memory_used_bytes", "Memory used", "bytes", 0],
  ["power_watts", "Power", "watts", 0],
  ["temperature_celsius", "Temperature", "celsius", 0],
];

/** What the window is called here. */
export const title = (route) => `Session ${route.parts[0]}`;

/** Show the page. */
export function mount(root, route, app) {
  const page = new SessionPage(root, route, app);
  return { wish: { details: false, metrics: [], host_metrics: [], interval: 5 }, leave: () => page.leave(), rerouted: (next) => page.rerouted(next) };
}

class SessionPage {
  constructor(root, route, app) {
    this.root = root;
    this.app = app;
    this.id = route.parts[0];
    this.query = route.query;
    this.book = emptyManual;
    this.session = null;
    this.events = null;
    this.found = null;
    this.askedAt = -Infinity;
    this.opened = new Map();
    this.controls = new SessionControls(root, app, () => this.draw(), () => this.refresh());
    this.stop = new AbortController();
    this.timer = setInterval(() => document.hidden || this.session?.state === "finished" || this.refresh(), EVERY_MS);
    app.fleet.addEventListener("structure", () => this.chart(), { signal: this.stop.signal });
    manual().then((book) => {
      this.book = book;
      this.draw();
    });
    this.draw();
    this.refresh();
  }

  leave() {
    this.stop.abort();
    clearInterval(this.timer);
    this.endRange?.();
    this.board?.destroy();
    render(nothing, this.root);
  }

  rerouted(route) {
    this.query = route.query;
    this.range?.read(route.query);
  }

  async refresh() {
    const { signal } = this.stop;
    try {
      this.session = await get(`/api/v1/sessions/${encodeURIComponent(this.id)}`, {}, { signal });
      if (this.session.state !== "active" || performance.now() - this.askedAt > EVENTS_EVERY_MS) {
        this.askedAt = performance.now();
        await this.askEvents(signal);
      }
      this.error = null;
    } catch (error) {
      if (error.name === "AbortError") {
        return;
      }
      this.error = error;
    }
    this.draw();
    this.chart();
  }

  /** What was found in its time, and what happened. */
  async askEvents(signal) {
    const [from, to] = this.bounds();
    const time = { from: from.toFixed(3), to: to.toFixed(3), nodes: this.session.nodes };
    const found = await get("/api/v1/findings/history", time, { signal });
    this.found = found.spans;
    this.isCut = found.truncated;
    this.events = (await get("/api/v1/events", { ...time, kinds: EVENT_KINDS }, { signal })).events;
  }

  bounds() {
    const now = this.app.fleet.headTime();
    return [seconds(this.session.start_time), endOf(this.session, now)];
  }

  /** The nodes of the session that are there. */
  nodes() {
    const { nodes, gpus } = this.session;
    const named = new Set([...nodes, ...gpus.filter((gpu) => gpu.includes(":")).map((gpu) => gpu.slice(0, gpu.lastIndexOf(":")))]);
    const all = [...this.app.fleet.nodes.keys()].sort(byName);
    const chosen = all.filter((name) => named.has(name));
    return chosen.length ? chosen : all;
  }

  /** How many GPUs its charts would have. */
  size() {
    if (this.session.gpus.length) {
      return this.session.gpus.length;
    }
    return this.nodes().reduce((sum, name) => sum + (this.app.fleet.nodes.get(name)?.gpus.length ?? 0), 0);
  }

  /** Build the charts, once it is known of what. */
  chart() {
    if (this.board || !this.session || !this.app.fleet.known || this.stop.signal.aborted) {
      return;
    }
    const size = this.size();
    if (size === 0 || size > MOST_CHARTED) {
      return;
    }
    this.draw();
    const [start, end] = this.bounds();
    const isOver = this.session.state !== "active";
    this.range = new Range({ now: () => this.app.fleet.headTime(), fallback: { length: Math.max(end - start, 10), end: isOver ? end : null } });
    this.range.read(this.query);
    this.endRange = mountRange(this.root.querySelector(".session-range"), this.range, { extra: [["Whole session", start, end]] });
    const host = this.root.querySelector(".session-charts");
    this.board = new Board({ range: this.range, host, why: (spec) => `${spec.title} is not known for this time.` });
    this.board.add(host, this.group());
    this.board.load();
    this.draw();
  }

  group() {
    const isOne = this.nodes().length === 1;
    const name = (series) => (isOne ? `GPU ${series.gpu ?? series.subject}` : `${series.node}:${series.gpu ?? series.subject}`);
    return {
      scope: "gpu", nodes: this.session.nodes, gpus: this.session.gpus, metrics: CHARTS.map(([metric]) => metric),
      specs: CHARTS.map(([metric, words, unit, top]) => ({ id: metric, title: words, unit, top: top || undefined, each: { metric, name, words: "GPUs" } })),
    };
  }

  draw() {
    if (!this.stop.signal.aborted) {
      render(this.view(), this.root);
    }
  }

  view() {
    return html`${this.session ? nothing : html`<h1>Session</h1>`}
      ${errorNote(this.error, this.error?.status === 404 ? null : () => this.refresh())}
      ${this.session ? this.body() : this.error ? nothing : html`<p class="empty">Asking the head…</p>`}`;
  }

  body() {
    const { session } = this;
    return html`<div class="history-title"><nav class="crumbs" aria-label="Where"><a href=${href("sessions")}>Sessions</a> <span aria-hidden="true">›</span></nav>
      <h1>${session.name}</h1>${stateBadge(session)}
      <span class="spring"></span>${this.controls.buttons(session)}</div>
      ${errorNote(this.controls.error)}
      ${this.facts()}
      <div class="session-range history-range" ?hidden=${!this.board}></div>
      <div class="session-charts"></div>
      ${this.app.fleet.known && this.size() > MOST_CHARTED ? html`<p class="empty">${this.size()} GPUs are too many for one page of charts. Choose a node below.</p>` : nothing}
      ${this.links()} ${this.findings()} ${this.happened()} ${this.controls.dialog()}`;
  }

  facts() {
    const { session } = this;
    const [start, end] = this.bounds();
    const labels = Object.entries(session.labels ?? {});
    return html`<dl class="card facts">
      <div><dt>Start</dt><dd>${format.dateTime(start)}</dd></div>
      <div><dt>End</dt><dd>${session.end_time ? format.dateTime(end) : "–"}</dd></div>
      <div><dt>Length</dt><dd>${format.duration(length(session, this.app.fleet.headTime()))}</dd></div>
      <div><dt>Frames</dt><dd>${format.count(session.frame_count)} <span class="muted">one each ${format.value("seconds", session.interval_ms / 1000)}</span></dd></div>
      <div><dt>What</dt><dd>${what(session)}</dd></div>
      ${labels.length ? html`<div><dt>Labels</dt><dd>${labels.map(([key, value]) => html`<span class="badge muted"><bdi>${format.text(`${key}=${value}`)}</bdi></span> `)}</dd></div>` : nothing}
      ${session.interruptions?.length ? html`<div><dt>Interruptions</dt><dd>${session.interruptions.map((gap) => html`${interruption(gap)} `)}</dd></div>` : nothing}
      <div><dt>File</dt><dd>${downloads(session)}</dd></div>
    </dl>`;
  }

  links() {
    const [from, to] = this.bounds();
    const query = { from: from.toFixed(1), to: to.toFixed(1) };
    const nodes = this.nodes();
    if (!nodes.length) {
      return nothing;
    }
    return html`<section><h2>Nodes during this time</h2><ul class="chips">${nodes.map((name) => html`<li><a href=${href("node", name, query)}><bdi>${format.text(name)}</bdi></a></li>`)}</ul></section>`;
  }

  /** Every finding of this time, each with its own start and end. */
  told() {
    return (this.found ?? []).filter((span) => this.concerns(span.node, span)).map((span) => ({ ...span, start: span.from, end: span.to, isPast: true }));
  }

  concerns(node, finding) {
    const { gpus } = this.session;
    return !gpus.length || finding.gpu === null || gpus.some((gpu) => gpu === `${node}:${finding.label}` || gpu === String(finding.label) || !/^[^:]*:?\d+(:\d+)?$/.test(gpu));
  }

  findings() {
    const groups = grouped(this.told());
    return html`<section class="session-findings"><h2>Findings during this time</h2>
      ${groups.length ? html`<div class="finding-list">${groups.map((group) => findingCard(group, this.cardView()))}</div>` : html`<p class="muted">${this.found ? "No findings in this time range." : "Asking the head…"}</p>`}
      ${this.isCut ? html`<p class="muted">There were more; these are the latest.</p>` : nothing}</section>`;
  }

  cardView() {
    return {
      book: this.book,
      from: this.bounds()[0],
      now: this.bounds()[1],
      processesOf: () => [],
      isOpen: (name) => this.opened.get(name) ?? false,
      toggle: (name, open) => {
        if ((this.opened.get(name) ?? false) !== open) {
          this.opened.set(name, open);
          this.draw();
        }
      },
      copy: async (group) => {
        const copied = await copyText(asText(group, this.book));
        this.app.toast(copied ? "Copied as text" : "The browser does not allow copying", copied ? "good" : "bad");
      },
    };
  }

  happened() {
    const events = (this.events ?? []).slice(-MOST_EVENTS);
    if (!events.length) {
      return nothing;
    }
    return html`<section><h2>Events during this time</h2><div class="card table-card"><table class="table stack">
      <caption>Oldest first${this.events.length > MOST_EVENTS ? `, the last ${MOST_EVENTS} of them` : ""}</caption>
      <thead><tr><th scope="col">Time</th><th scope="col">What</th><th scope="col">Node</th><th scope="col">More</th></tr></thead>
      <tbody>${events.map((event) => html`<tr><td data-label="Time">${format.dateTime(seconds(event.time))}</td><th scope="row" data-label="What">${format.text(words(event.kind))}</th>
        <td data-label="Node">${event.node ? html`<a href=${href("node", event.node)}><bdi>${format.text(event.node)}</bdi></a>` : "–"}</td><td data-label="More"><bdi>${more(event.detail)}</bdi></td></tr>`)}</tbody></table></div></section>`;
  }
}

function interruption(gap) {
  const [start, end] = [seconds(gap.start_time), seconds(gap.end_time)];
  if (end === null) return `since ${format.dateTime(start)}`;
  const missing = missingFrames(gap);
  return `${format.dateTime(start)} to ${format.clock(end)}${missing ? `: ${missing}` : ""}.`;
}

/** What is missing of an interruption; empty when the head does not say. */
function missingFrames({ missing, pending }) {
  if (!Array.isArray(missing) || !Array.isArray(pending)) return "";
  const told = missing.map(({ node, seconds }) => `no frames of ${format.text(node)} for ${format.duration(seconds)}`);
  if (pending.length) told.push(`not known yet for ${pending.map(format.text).join(", ")}`);
  return told.join("; ") || "no frames are missing";
}

function words(kind) {
  const text = String(kind).replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function more(detail) {
  const parts = Object.entries(detail ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  return format.text(parts.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", "));
}
