// One session: its summary, charts, findings and file, and the comparison with another session.

import { asError, get, isAbort } from "../core/api.js";
import { byName } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, href } from "../core/router.js";
import { findingAside, markedGpus, worstSpan } from "../parts/finding-aside.js";
import { asText, findingCard, grouped } from "../parts/findings.js";
import { GpuCharts } from "../parts/gpu-charts.js";
import { HistoryPage, stat } from "../parts/history-page.js";
import { SessionComparison } from "../parts/session-comparison.js";
import { summaryTable } from "../parts/session-summary.js";
import { downloads, endOf, length, SessionControls, seconds, stateBadge, what } from "../parts/sessions.js";
import { copyText, errorNote } from "../parts/tables.js";
import { facts } from "../parts/timeline-items.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const EVERY_MS = 5_000;
const SUMMARY_EVERY_MS = 30_000;
const PRESETS = [900, 3600, 86400];

/**
 * The page's title.
 * @param {Dashboard.Route} route
 */
export const title = (route) => `Session ${route.parts[0]}`;

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const session = new SessionPage(root, route, app);
  return {
    ...session.page.handle({ details: false, metrics: [], host_metrics: [], interval: 5 }),
    leave: () => session.leave(),
    rerouted: (/** @type {Dashboard.Route} */ next) => session.rerouted(next),
  };
}

class SessionPage {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.Route} route
   * @param {Dashboard.App} app
   */
  constructor(root, route, app) {
    this.root = root;
    this.app = app;
    this.id = route.parts[0];
    /** @type {Api.SessionAnswer | null} */
    this.session = null;
    /** @type {Api.JobReport | null} */
    this.summary = null;
    this.summaryAt = -Infinity;
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    /** @type {Map<string, Dashboard.Severity>} */
    this.marked = new Map();
    /** @type {Map<string, boolean>} */
    this.opened = new Map();
    this.stop = new AbortController();
    this.page = new HistoryPage(root, route, app, {
      nodes: () => (this.session ? this.nodes() : []),
      why: (spec) => `No data for ${spec.title} in this time range${spec.why ? `, or not available: ${spec.why}` : ""}.`,
      draw: () => this.draw(),
      presets: () => (this.session ? [["Whole session", this.bounds()[0], this.session.state === "active" ? null : this.bounds()[1]]] : []),
      range: { presets: PRESETS, extraAfter: 0 },
    });
    root.dataset.layout = "rows";
    root.toggleAttribute("data-unknown", true);
    this.controls = new SessionControls(
      root,
      app,
      () => this.draw(),
      () => this.refresh(),
    );
    this.comparison = new SessionComparison(this.id, route.query, () => this.page.refresh(), this.stop.signal);
    this.charts = new GpuCharts(
      this.page.board,
      { lead: this.page.lead, rows: this.page.rows },
      {
        gpus: () => this.gpus(),
        live: () => null,
        markOf: (word) => this.marked.get(word) ?? null,
        query: () => this.query(),
      },
    );
    this.page.relane = () =>
      this.page.timeline.show(this.page.eventLanes({ about: (finding, node) => this.concerns(node, finding), isGrouped: true }));
    this.page.board.sides.push(async (signal) => {
      await this.page.askEvents(this.nodes(), signal);
      this.page.relane();
    });
    this.isBegun = false;
    this.timer = setInterval(() => document.hidden || this.session?.state === "finished" || this.refresh(), EVERY_MS);
    app.fleet.addEventListener("structure", () => this.begin(), { signal: this.stop.signal });
    this.page.relane();
    this.refresh();
  }

  leave() {
    this.stop.abort();
    clearInterval(this.timer);
    this.page.leave();
    render(nothing, this.root);
  }

  /** @param {Dashboard.Route} route */
  rerouted(route) {
    this.page.range.read(route.query);
    this.comparison.read(route.query);
  }

  async refresh() {
    const { signal } = this.stop;
    const path = encodeURIComponent(this.id);
    try {
      this.session = /** @type {Api.SessionAnswer} */ (await get(`/api/v1/sessions/${path}`, {}, { signal }));
      this.begin();
      if (this.session.state !== "active" || performance.now() - this.summaryAt > SUMMARY_EVERY_MS) {
        this.summaryAt = performance.now();
        this.summary = /** @type {Api.JobReport} */ (
          await get(`/api/v1/jobs/${encodeURIComponent(this.session.name)}`, { kind: "session" }, { signal })
        );
      }
      this.error = null;
    } catch (error) {
      if (isAbort(error)) {
        return;
      }
      this.error = asError(error);
    }
    this.page.refresh();
  }

  /** Look at the session's time, once it is known which GPUs there are. */
  begin() {
    if (this.isBegun || !this.session || !this.app.fleet.known || this.stop.signal.aborted) return;
    this.isBegun = true;
    this.root.toggleAttribute("data-unknown", false);
    const [start, end] = this.bounds();
    const { page } = this;
    page.range.fallback = { length: Math.max(end - start, 10), end: this.session.state === "active" ? null : end };
    const { length: before, end: last } = page.range;
    page.range.read(current().query);
    page.rangeBar.dispatchEvent(new Event("range-presets"));
    if (page.range.length === before && page.range.end === last) page.board.load();
  }

  /** The session, once it is loaded. */
  get known() {
    if (!this.session) throw new Error("the session has not been loaded yet");
    return this.session;
  }

  /** @returns {[number, number]} */
  bounds() {
    const now = this.app.fleet.headTime();
    return [seconds(this.known.start_time) ?? now, endOf(this.known, now)];
  }

  /** The time range, for the addresses of GPUs. */
  query() {
    const [from, to] = this.bounds();
    return { from: from.toFixed(1), to: to.toFixed(1) };
  }

  /** The nodes of the session that are there. */
  nodes() {
    const { nodes, gpus } = this.known;
    const named = new Set([...nodes, ...gpus.filter((gpu) => gpu.includes(":")).map((gpu) => gpu.slice(0, gpu.indexOf(":")))]);
    const all = [...this.app.fleet.nodes.keys()].sort(byName);
    const chosen = all.filter((name) => named.has(name));
    return chosen.length ? chosen : all;
  }

  /** The GPUs of the session, as the head's endpoints name them. */
  gpus() {
    if (!this.session) return [];
    const { gpus } = this.session;
    const all = this.nodes().flatMap((name) =>
      (this.app.fleet.nodes.get(name)?.gpus ?? []).map((gpu) => ({ word: `${name}:${gpu.label}`, gpu })),
    );
    const chosen = gpus.length
      ? all.filter(({ word, gpu }) => gpus.includes(word) || gpus.includes(gpu.label) || gpus.includes(gpu.uuid))
      : all;
    return chosen.map(({ word }) => word);
  }

  /** What was found in this time. */
  found() {
    const [from, to] = this.session ? this.bounds() : [0, 0];
    return (this.page.events?.found.spans ?? []).filter(
      (span) => this.concerns(span.node, span) && span.from <= to && (span.to === null || span.to >= from),
    );
  }

  /**
   * @param {string} node
   * @param {Api.FindingSpanRow} finding
   */
  concerns(node, finding) {
    const gpus = this.session?.gpus ?? [];
    return (
      !gpus.length ||
      finding.gpu === null ||
      gpus.some((gpu) => gpu === `${node}:${finding.label}` || gpu === String(finding.label) || !/^[^:]*:?\d+(:\d+)?$/.test(gpu))
    );
  }

  draw() {
    if (this.stop.signal.aborted) return;
    render(this.heading(), this.page.head);
    if (!this.session) return;
    render(this.aside(), this.charts.side);
    render(
      html`${this.summary ? summaryTable(this.summary) : nothing} ${this.comparison.view(this.session)} ${this.findings()} ${this.controls.dialog()}`,
      this.page.more,
    );
    this.marked = markedGpus(this.found());
    this.charts.refresh();
  }

  heading() {
    const { session } = this;
    const problem = errorNote(this.error, this.error?.status === 404 ? null : () => this.refresh());
    if (!session) return html`<h1>Session</h1>${problem}${this.error ? nothing : html`<p class="empty" role="status">Loading…</p>`}`;
    return html`<div class="history-title"><nav class="crumbs" aria-label="Breadcrumb"><a href=${href("sessions")}>Sessions</a> <span aria-hidden="true">/</span></nav>
      <h1><bdi>${format.text(session.name)}</bdi></h1>${stateBadge(session)}
      <span class="spring"></span>${downloads(session)} ${this.controls.buttons(session)}</div>
      ${problem} ${errorNote(this.controls.error)} ${this.stats(session)}`;
  }

  /** @param {Api.SessionAnswer} session */
  stats(session) {
    const { summary } = this;
    const [start, end] = this.bounds();
    return html`<dl class="stats">
      ${stat("Start", format.dateTime(start).slice(0, 16))}
      ${stat("Duration", format.duration(length(session, this.app.fleet.headTime())), session.end_time ? `until ${format.clock(end).slice(0, 5)}` : "so far")}
      ${stat("Frames", format.count(session.frame_count), `one every ${format.value("seconds", session.interval_ms / 1000)}`)}
      ${
        summary
          ? html`${stat("GPUs", format.count(summary.gpus), summary.nodes.length === 1 ? "on 1 node" : `on ${summary.nodes.length} nodes`)}
        ${stat("GPU-hours", format.hours(summary.gpu_seconds), "held")}
        ${stat("Wasted", format.hours(summary.idle_seconds), summary.gpu_seconds && summary.idle_seconds !== null ? `held idle, ${format.percent(summary.idle_seconds / summary.gpu_seconds)}` : "held idle")}
        ${stat("Utilization", format.percent(summary.utilization_mean), "mean")}
        ${stat("Energy", format.joules(summary.energy_joules))}`
          : nothing
      }
    </dl>`;
  }

  /** The worst finding; without one what the session is of. */
  aside() {
    const session = this.known;
    const spans = this.found();
    const worst = worstSpan(spans);
    const labels = Object.entries(session.labels ?? {});
    const own = facts([
      ["Scope", html`${what(session)}`],
      [
        "Labels",
        labels.length
          ? html`${labels.map(([key, value]) => html`<span class="badge muted"><bdi>${format.text(`${key}=${value}`)}</bdi></span> `)}`
          : null,
      ],
      ["Interrupted", session.interruptions?.length ? html`${session.interruptions.map((gap) => html`${interruption(gap)} `)}` : null],
    ]);
    if (worst) return html`${findingAside(worst, spans, this.page.manual, this.page.board.view.to)}`;
    return html`<section class="card"><h2>${this.page.events ? "No findings in this session" : "Session"}</h2>${own}</section>`;
  }

  findings() {
    const groups = grouped(this.found().map((span) => ({ ...span, start: span.from, end: span.to, isPast: true })));
    if (!groups.length) return nothing;
    return html`<section class="session-findings"><h2>Findings during this time</h2>
      <div class="finding-list">${groups.map((group) => findingCard(group, this.cardView()))}</div>
      ${this.page.events?.found.truncated ? html`<p class="muted">Only the latest are shown.</p>` : nothing}</section>`;
  }

  /** @returns {Dashboard.FindingView} */
  cardView() {
    return {
      manual: this.page.manual,
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
        const copied = await copyText(asText(group, this.page.manual));
        this.app.toast(copied ? "Copied as text" : "The browser does not allow copying to the clipboard", copied ? "good" : "bad");
      },
    };
  }
}

/** @param {Api.SessionInterruption} gap */
function interruption(gap) {
  const [start, end] = [seconds(gap.start_time), seconds(gap.end_time)];
  if (end === null) return `since ${format.dateTime(start)}`;
  const missing = missingFrames(gap);
  return `${format.dateTime(start)} to ${format.clock(end)}${missing ? `: ${missing}` : ""}.`;
}

/**
 * What is missing of an interruption; empty when the head does not say.
 * @param {Api.SessionInterruption} options
 */
function missingFrames({ missing, pending }) {
  if (!Array.isArray(missing) || !Array.isArray(pending)) return "";
  const parts = missing.map(({ node, seconds }) => `no frames from ${format.text(node)} for ${format.duration(seconds)}`);
  if (pending.length) parts.push(`missing frames are not yet known for ${pending.map(format.text).join(", ")}`);
  return parts.join("; ") || "no frames are missing";
}
