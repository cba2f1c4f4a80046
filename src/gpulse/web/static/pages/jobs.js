// Jobs: those that run and those of a time range, with their GPU-hours, what they wasted, and their worst finding.

import { asError, get, isAbort, url } from "../core/api.js";
import { fieldValue } from "../core/dom.js";
import { jobKey, shownSeverity } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { meaningHref, rank } from "../parts/findings.js";
import { emptyManual, loadManual, titleOf } from "../parts/findings-manual.js";
import { severityGlyph, stateGlyph } from "../parts/glyphs.js";
import { jobHref, livesOf } from "../parts/processes.js";
import { errorNote, later, matches, sorted, sortHeader } from "../parts/tables.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const RANGES = [
  ["-1h", "1 h"],
  ["-24h", "24 h"],
  ["-7d", "7 d"],
  ["-30d", "30 d"],
];
const DEFAULT_RANGE = "-24h";
const STATES = [
  ["", "all"],
  ["running", "running"],
  ["ended", "ended"],
];
/** Of shorter ranges, processes of this time are asked for: a job's first ones may have ended before the range. */
const LIVES_RANGE = "-24h";
const AGAIN_MS = 30_000;
const REDRAW_MS = 1000;
const MAX_ROWS = 500;

/**
 * A job of the list.
 * @typedef {Api.UsageRow & { key: string, state: "running" | "lost" | "ended", since: number | null, worst: Api.FindingSpanRow | null }} Job
 */

/** @type {Record<string, (job: Job) => string | number | null>} */
const COLUMNS = {
  job: (job) => job.job ?? job.program,
  user: (job) => job.user,
  gpus: (job) => job.gpus,
  since: (job) => job.since,
  gpu_seconds: (job) => job.gpu_seconds + job.harvested_seconds,
  idle_seconds: (job) => job.idle_seconds,
  utilization: (job) => job.utilization_mean,
  worst: (job) => (job.worst ? -rank(shownSeverity(job.worst)) : null),
};
const WORDS = ["job", "user"];

/** The page's title. */
export const title = () => "Jobs";

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export const mount = (root, route, app) => new JobsPage(root, route, app);

class JobsPage {
  subscription = { nodes: null, details: true, metrics: [], host_metrics: [], interval: 5 };

  /**
   * @param {HTMLElement} root
   * @param {Dashboard.Route} route
   * @param {Dashboard.App} app
   */
  constructor(root, route, app) {
    this.root = root;
    this.app = app;
    this.manual = emptyManual;
    /** @type {Api.UsageReport | null} */
    this.usage = null;
    /** @type {Api.ProcessRow[]} */
    this.processes = [];
    /** @type {Map<string, Api.FindingSpanRow>} The worst finding of each job. */
    this.worst = new Map();
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    this.sort = { by: "since", down: true };
    /** @type {AbortController | null} */
    this.request = null;
    this.stop = new AbortController();
    const redraw = later(() => this.draw(), REDRAW_MS);
    for (const type of /** @type {const} */ (["structure", "details"])) app.fleet.on(type, redraw, { signal: this.stop.signal });
    this.stop.signal.addEventListener("abort", redraw.cancel);
    loadManual().then((manual) => {
      this.manual = manual;
      this.draw();
    });
    this.timer = setInterval(() => document.hidden || this.ask(), AGAIN_MS);
    this.rerouted(route);
  }

  leave() {
    this.stop.abort();
    this.request?.abort();
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  /** @param {Dashboard.Route} route */
  rerouted({ query }) {
    this.from = RANGES.some(([name]) => name === query.from) ? query.from : DEFAULT_RANGE;
    this.user = query.user ?? "";
    this.state = STATES.some(([name]) => name === query.state) ? query.state : "";
    this.text = query.text ?? "";
    this.ask();
  }

  async ask() {
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    this.draw();
    const { signal } = request;
    const times = { from: this.from };
    try {
      const [usage, held, found] = await Promise.all([
        get("/api/v1/usage", { ...times, by: "job" }, { signal }),
        get("/api/v1/processes", { from: this.from === RANGES[0][0] ? LIVES_RANGE : this.from }, { signal }),
        get("/api/v1/findings/history", times, { signal }),
      ]);
      this.usage = usage;
      this.processes = held.processes;
      this.worst = worstOfJobs(held.processes, found.spans);
      this.error = null;
    } catch (error) {
      if (isAbort(error)) return;
      this.error = asError(error);
    }
    if (this.request === request) this.request = null;
    this.draw();
  }

  /** @param {Record<string, string>} changes */
  choose(changes) {
    setQuery(changes, { replace: false });
    Object.assign(this, changes);
    if (changes.from) this.ask();
    else this.draw();
  }

  /** @param {string} name */
  sortBy(name) {
    this.sort = { by: name, down: this.sort.by === name ? !this.sort.down : !WORDS.includes(name) };
    this.draw();
  }

  /** All jobs of the time range, with what is known of them now. */
  jobs() {
    const { fleet } = this.app;
    const lives = livesOf(this.processes, fleet);
    const running = new Set();
    for (const gpu of fleet.gpus()) {
      if (gpu.node.state !== "lost") for (const process of gpu.processes ?? []) running.add(jobKey(gpu.node.name, process));
    }
    return (this.usage?.rows ?? []).map((row) => {
      const key = jobKey(row.node ?? "", row);
      const life = lives.get(key);
      /** @type {Job["state"]} */
      const state = running.has(key) ? "running" : life?.state === "lost" ? "lost" : "ended";
      return { ...row, key, state, since: life?.from ?? row.start_time ?? row.first, worst: this.worst.get(key) ?? null };
    });
  }

  draw() {
    if (!this.stop.signal.aborted) render(this.view(), this.root);
  }

  view() {
    const jobs = this.jobs();
    const count = jobs.filter((job) => job.state === "running").length;
    return html`<div class="history-title"><h1>Jobs</h1>${this.usage ? html`<span class="muted">${count} running, ${jobs.length} in this time range</span>` : nothing}</div>
      ${this.toolbar(jobs)}
      ${errorNote(this.error, () => this.ask())}
      ${this.usage ? this.table(jobs) : this.error ? nothing : html`<p class="empty" role="status" aria-busy="true">Loading…</p>`}`;
  }

  /** @param {Job[]} jobs */
  toolbar(jobs) {
    const users = [...new Set([...jobs.map((job) => job.user), this.user].filter(Boolean))].sort();
    /**
     * @param {string} words
     * @param {string} value
     * @param {"state" | "from"} name
     */
    const button = (words, value, name) => html`<button type="button" class="button" aria-pressed=${String(this[name] === value)}
      @click=${() => this.choose({ [name]: value })}>${words}</button>`;
    return html`<div class="toolbar">
      <div class="choices" role="group" aria-label="Time">${RANGES.map(([value, words]) => button(words, value, "from"))}</div>
      <div class="choices" role="group" aria-label="State">${STATES.map(([value, words]) => button(words, value, "state"))}</div>
      <label class="field">User <select @change=${(/** @type {Event} */ event) => this.choose({ user: fieldValue(event) })}>
        <option value="" ?selected=${!this.user}>all</option>
        ${users.map((user) => html`<option value=${user ?? ""} ?selected=${user === this.user}>${format.text(user)}</option>`)}</select></label>
      <label class="field grow">Search <input type="search" autocomplete="off" placeholder="job, program, node" .value=${this.text ?? ""}
        @input=${(/** @type {Event} */ event) => this.search(fieldValue(event))}></label>
      <a class="button" href=${url("/api/v1/usage.csv", { from: this.from, by: "job" })} title="Download all jobs of this time range as a CSV file" download>CSV</a>
    </div>`;
  }

  /** @param {string} text */
  search(text) {
    this.text = text;
    setQuery({ text: text || null });
    this.draw();
  }

  /** @param {Job[]} jobs */
  table(jobs) {
    const fitting = jobs.filter(
      (job) =>
        (!this.user || job.user === this.user) &&
        (!this.state || this.state === job.state) &&
        matches(this.text ?? "", [job.job, job.user, job.program, ...job.nodes]),
    );
    const rows = sorted(fitting, COLUMNS[this.sort.by], this.sort.down);
    /**
     * @param {string} name
     * @param {string} words
     * @param {string} [classes]
     */
    const header = (name, words, classes) => sortHeader(name, words, this.sort, (by) => this.sortBy(by), classes);
    if (!jobs.length) return html`<p class="empty">No job used a GPU in this time range.</p>`;
    if (!rows.length)
      return html`<p class="empty">No job matches. <button type="button" class="button" @click=${() => this.choose({ user: "", state: "", text: "" })}>Show all</button></p>`;
    return html`<div class="card table-card"><table class="table stack jobs-table" aria-busy=${String(this.request !== null)}>
      <caption class="visually-hidden">Jobs in this time range</caption>
      <thead><tr>${header("job", "Job")}${header("user", "User")}<th scope="col">State</th>${header("gpus", "GPUs", "num")}${header("since", "Since")}
        ${header("gpu_seconds", "GPU-hours", "num")}${header("idle_seconds", "Wasted", "num")}${header("utilization", "Utilization", "num")}${header("worst", "Worst finding")}</tr></thead>
      <tbody>${rows.slice(0, MAX_ROWS).map((job) => this.row(job))}</tbody></table></div>
      ${rows.length > MAX_ROWS ? html`<p class="muted">${rows.length - MAX_ROWS} more are in the CSV file; a search finds them here.</p>` : nothing}
      ${(this.usage?.incomplete ?? []).map((text) => html`<p class="muted">Incomplete: ${format.text(text)}.</p>`)}`;
  }

  /** @param {Job} job */
  row(job) {
    const hours = job.gpu_seconds + job.harvested_seconds;
    const place = job.nodes.length === 1 ? html`<bdi>${format.text(job.nodes[0])}</bdi>` : `${job.nodes.length} nodes`;
    return html`<tr>
      <th scope="row" data-label="Job"><a href=${job.job ? href("job", job.job) : jobHref(job.node, job)}><bdi>${format.text(job.job ?? job.program)}</bdi></a>
        <span class="muted origin"><bdi>${job.job ? format.text(job.program) : `${format.text(job.node)}, pid ${job.pid}`}</bdi></span></th>
      <td data-label="User">${job.user ? html`<a href=${href("user", job.user)}><bdi>${format.text(job.user)}</bdi></a>` : "–"}</td>
      <td data-label="State"><span class="state-word">${job.state === "ended" ? nothing : stateGlyph(job.state === "running" ? "busy" : "lost")} ${job.state}</span></td>
      <td data-label="GPUs" class="num">${format.count(job.gpus)} <span class="muted origin">on ${place}</span></td>
      <td data-label="Since">${format.dateTime(job.since).slice(0, 16)} <span class="muted origin">${lasted(job, this.app.fleet.headTime())}</span></td>
      <td data-label="GPU-hours" class="num">${format.hours(hours)}${job.harvested_seconds ? html` <span class="muted">harvested</span>` : nothing}</td>
      <td data-label="Wasted" class="num">${format.hours(job.idle_seconds)} ${job.gpu_seconds && job.idle_seconds !== null ? html`<span class="muted origin">${format.percent(job.idle_seconds / job.gpu_seconds)}</span>` : nothing}</td>
      <td data-label="Utilization" class="num">${format.percent(job.utilization_mean)}</td>
      <td data-label="Worst finding">${job.worst ? html`<span class="finding-word">${severityGlyph(shownSeverity(job.worst))} <a href=${meaningHref(job.worst.id)}>${titleOf(this.manual, job.worst)}</a></span>` : "–"}</td>
    </tr>`;
  }
}

/**
 * How long a job has run, or ran.
 * @param {Job} job
 * @param {number} now
 */
function lasted(job, now) {
  const end = job.state === "running" ? now : job.last;
  return job.since !== null && end !== null ? format.duration(Math.max(0, end - job.since)) : "";
}

/**
 * The worst finding of each job: about one of its processes, or about a GPU while the job held it.
 * @param {Api.ProcessRow[]} processes
 * @param {Api.FindingSpanRow[]} spans
 */
export function worstOfJobs(processes, spans) {
  /** @type {Map<string, Api.ProcessRow[]>} */
  const onGpu = new Map();
  for (const process of processes) {
    for (const held of process.gpus) {
      const word = `${process.node}:${held.gpu}`;
      onGpu.set(word, [...(onGpu.get(word) ?? []), process]);
    }
  }
  /** @type {Map<string, Api.FindingSpanRow>} */
  const worst = new Map();
  for (const span of spans) {
    for (const process of onGpu.get(`${span.node}:${span.label}`) ?? []) {
      const held = process.gpus.find((gpu) => gpu.gpu === span.label);
      const isThen = held && held.from <= (span.to ?? Infinity) && (process.ended === null || held.to >= span.from);
      if (!isThen || (span.pids.length && !span.pids.includes(process.pid))) continue;
      const key = jobKey(process.node, process);
      const before = worst.get(key);
      if (!before || rank(shownSeverity(span)) < rank(shownSeverity(before))) worst.set(key, span);
    }
  }
  return worst;
}
