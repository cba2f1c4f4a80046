// Who used the GPUs: GPU-hours, and those that were held without being used, by user or job over a chosen time.

import { html, nothing, render } from "../vendor/lit-html.js";
import { get, url } from "../core/api.js";
import { jobKey } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { errorNote, matches, sorted, sortHeader } from "../parts/tables.js";

const RANGES = [["today", "Today"], ["-24h", "24 h"], ["-7d", "7 days"], ["-30d", "30 days"]];
const DEFAULT_RANGE = "-24h";
const PATIENCE_MS = 300;
const AGAIN_MS = 60_000;
const MOST_ROWS = 500;
const HOUR = 3600;

/** What the window is called here. */
export const title = () => "Who";

/** Show the page. */
export function mount(root, route, app) {
  const page = new WhoPage(root, app);
  page.rerouted(route);
  return { wish: { details: false, metrics: [], host_metrics: [], interval: 5 }, leave: () => page.leave(), rerouted: (next) => page.rerouted(next) };
}

class WhoPage {
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.usage = null;
    this.error = null;
    this.isSlow = false;
    this.sort = { by: "gpu_seconds", down: true };
    this.filter = "";
    this.isOwn = false;
    this.asking = null;
    this.timer = setInterval(() => document.hidden || this.to || this.ask(), AGAIN_MS);
  }

  leave() {
    this.asking?.abort();
    this.asking = null;
    this.isGone = true;
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  rerouted({ query }) {
    this.by = query.by === "job" ? "job" : "user";
    this.from = query.from || DEFAULT_RANGE;
    this.to = query.to || "";
    this.filter = query.text || "";
    this.isOwn = this.to !== "" || !RANGES.some(([name]) => name === this.from);
    this.ask();
  }

  /** The words that the head is asked with. */
  words() {
    const start = this.from === "today" ? midnight(this.app.fleet.headTime()) : this.from;
    return { from: start, to: this.to || null, by: this.by };
  }

  async ask() {
    this.asking?.abort();
    const asking = new AbortController();
    this.asking = asking;
    const slow = setTimeout(() => this.slow(asking), PATIENCE_MS);
    this.draw();
    try {
      this.usage = await get("/api/v1/usage", this.words(), { signal: asking.signal });
      this.error = null;
    } catch (error) {
      if (error.name !== "AbortError") {
        this.error = error;
      }
    }
    clearTimeout(slow);
    if (this.asking === asking) {
      this.asking = null;
      this.isSlow = false;
      this.draw();
    }
  }

  slow(asking) {
    if (this.asking === asking) {
      this.isSlow = true;
      this.draw();
    }
  }

  choose(changes) {
    setQuery(changes, { replace: false });
    Object.assign(this, "from" in changes ? { from: changes.from, to: changes.to ?? "" } : changes);
    this.ask();
  }

  search(text) {
    this.filter = text;
    setQuery({ text: text || null });
    this.draw();
  }

  sortBy(name) {
    this.sort = { by: name, down: this.sort.by === name ? !this.sort.down : name !== "name" };
    this.draw();
  }

  draw() {
    if (!this.isGone) {
      render(this.view(), this.root);
    }
  }

  view() {
    return html`<h1>Who used the GPUs</h1>
      <p class="lead">A GPU is held while a process is on it, and idle when it did nothing meanwhile; when several hold it at once its time is divided among them, so that the rows add up.${this.hasHarvest() ? " What a harvest's programs had is nobody's own, and counted apart, its energy too." : ""}</p>
      ${this.toolbar()} ${this.isOwn ? this.ownRange() : nothing}
      ${errorNote(this.error, this.error?.status === undefined ? null : () => this.ask())}
      ${this.isSlow ? html`<p class="computing" role="status"><progress aria-label="The head is adding up"></progress> The head is adding up…</p>` : nothing}
      ${this.usage && !this.error ? this.results() : nothing}`;
  }

  /** Whether there is harvested time to tell apart. */
  hasHarvest() {
    return (this.usage?.harvested_seconds ?? 0) > 0;
  }

  toolbar() {
    const chosen = this.isOwn ? null : this.from;
    return html`<div class="toolbar">
      <div class="choices" role="group" aria-label="By">${[["user", "By user"], ["job", "By job"]].map(([by, words]) => html`<button type="button" class="button" aria-pressed=${String(this.by === by)} @click=${() => this.choose({ by })}>${words}</button>`)}</div>
      <div class="choices" role="group" aria-label="Time">${RANGES.map(([name, words]) => html`<button type="button" class="button" aria-pressed=${String(chosen === name)} @click=${() => this.preset(name)}>${words}</button>`)}<button type="button" class="button" aria-pressed=${String(this.isOwn)} aria-expanded=${String(this.isOwn)} @click=${() => this.own()}>From … to</button></div>
      <label class="field grow">Search <input type="search" autocomplete="off" placeholder="user, job, node" .value=${this.filter} @input=${(event) => this.search(event.target.value)}></label>
      ${this.csv()}
    </div>`;
  }

  /** The same as a file: of one user where that is what is searched for, else of all rows. */
  csv() {
    const searched = this.filter.trim();
    const user = this.usage?.rows.some((row) => row.user === searched) ? searched : null;
    const about = user ? `All rows of ${format.text(user)}` : searched ? "All rows, whatever is searched for," : "All rows";
    return html`<a class="button" href=${url("/api/v1/usage.csv", { ...this.words(), users: user })} title=${`${about} as a file`} download>CSV</a>`;
  }

  preset(name) {
    this.isOwn = false;
    this.choose({ from: name, to: null });
  }

  own() {
    this.isOwn = true;
    this.draw();
    this.root.querySelector("input[name=from]").focus();
  }

  ownRange() {
    const { from, to } = this.usage ?? {};
    return html`<form class="toolbar own-range" aria-label="Time" @submit=${(event) => this.submitRange(event)}>
      <label class="field">From <input type="datetime-local" name="from" required value=${localTime(from)}></label>
      <label class="field">To <input type="datetime-local" name="to" value=${this.to ? localTime(to) : ""}></label>
      <button class="button primary">Show</button></form>`;
  }

  submitRange(event) {
    event.preventDefault();
    const [from, to] = ["from", "to"].map((name) => Date.parse(event.target.elements[name].value) / 1000);
    if (Number.isNaN(from)) {
      event.target.elements.from.focus();
      return;
    }
    if (from >= (Number.isNaN(to) ? this.app.fleet.headTime() : to)) {
      this.error = { message: "the first time must be before the second" };
      this.draw();
      return;
    }
    this.choose({ from: String(from), to: Number.isNaN(to) ? null : String(to) });
  }

  results() {
    const { rows, from, to, capacity_seconds: capacity } = this.usage;
    const fitting = rows.filter((row) => matches(this.filter, [row.user, row.job, row.program, row.node, ...(row.nodes ?? [])]));
    const words = `${format.dateTime(from)} to ${format.dateTime(to)}`;
    if (!rows.length) {
      return html`<p class="empty">Nobody held a GPU from ${words}${capacity ? `, of ${gpuHours(capacity)} GPU-hours that there were` : ""}.</p>`;
    }
    return html`${this.summary()} ${this.table(fitting, words)}`;
  }

  summary() {
    const { capacity_seconds: capacity, gpu_seconds: held, idle_seconds: idle, harvested_seconds: harvested, gpus } = this.usage;
    const busy = held - idle;
    const free = capacity - held - harvested;
    return html`<div class="card usage-summary">
      <dl class="facts">
        <div><dt>GPUs</dt><dd>${format.count(gpus)}</dd></div>
        <div><dt>GPU-hours there were</dt><dd>${gpuHours(capacity)}</dd></div>
        <div><dt><span class="key key-busy" aria-hidden="true"></span>in use</dt><dd>${gpuHours(busy)} <span class="muted">${share(busy, capacity)}</span></dd></div>
        <div><dt><span class="key key-idle" aria-hidden="true"></span>held, idle</dt><dd>${gpuHours(idle)} <span class="muted">${share(idle, capacity)}</span></dd></div>
        ${this.hasHarvest() ? html`<div><dt><span class="key key-harvested" aria-hidden="true"></span>harvested</dt><dd>${gpuHours(harvested)} <span class="muted">${share(harvested, capacity)}</span></dd></div>` : nothing}
        <div><dt><span class="key key-free" aria-hidden="true"></span>free</dt><dd>${gpuHours(free)} <span class="muted">${share(free, capacity)}</span></dd></div>
      </dl>
      ${proportion(busy, idle, harvested, capacity, "whole")}
      ${(this.usage.incomplete ?? []).map((text) => html`<p class="muted">Not all is known: ${format.text(text)}.</p>`)}
    </div>`;
  }

  table(rows, words) {
    const isJobs = this.by === "job";
    const header = (name, text, classes = "num") => sortHeader(name, text, this.sort, (by) => this.sortBy(by), classes);
    const largest = Math.max(...this.usage.rows.map((row) => row.gpu_seconds + row.harvested_seconds));
    const ordered = sorted(rows, (row) => this.value(row), this.sort.down);
    return html`<div class="card table-card"><table class="table stack usage" aria-busy=${String(this.asking !== null)}>
      <caption>${isJobs ? "Jobs" : "Users"} from ${words}${this.usage.truncated ? ", the largest only" : ""}</caption>
      <thead><tr>${header("name", isJobs ? "Job" : "User", "")}${isJobs ? header("user", "User", "") : nothing}${header("gpu_seconds", "GPU-hours")}
        <th scope="col" class="proportions"><span class="visually-hidden">Proportion</span></th>
        ${header("share", "Of all there was")}${header("idle_seconds", "Held, idle")}${this.hasHarvest() ? header("harvested_seconds", "Harvested") : nothing}${header("utilization_mean", "Utilization")}${header("energy_joules", "Energy")}${header("gpus", "GPUs")}${header("last", "Last seen")}</tr></thead>
      <tbody>${ordered.slice(0, MOST_ROWS).map((row) => this.row(row, largest))}
        ${ordered.length ? nothing : html`<tr><td colspan=${9 + (isJobs ? 1 : 0) + (this.hasHarvest() ? 1 : 0)}>Nothing fits this search.</td></tr>`}</tbody>
      ${ordered.length ? this.totals(ordered) : nothing}</table></div>
      ${ordered.length > MOST_ROWS ? html`<p class="muted">${ordered.length - MOST_ROWS} more are in the CSV file; a search finds them here.</p>` : nothing}`;
  }

  value(row) {
    switch (this.sort.by) {
      case "name": return this.by === "job" ? row.job ?? row.program : row.user;
      case "share": return row.gpu_seconds;
      default: return row[this.sort.by];
    }
  }

  row(row, largest) {
    const capacity = this.usage.capacity_seconds;
    return html`<tr>
      <th scope="row" data-label=${this.by === "job" ? "Job" : "User"}>${this.by === "job" ? jobLink(row) : userLink(row.user)}</th>
      ${this.by === "job" ? html`<td data-label="User">${userLink(row.user)}</td>` : nothing}
      <td data-label="GPU-hours" class="num">${gpuHours(row.gpu_seconds)}</td>
      <td class="proportions">${proportion(row.gpu_seconds - row.idle_seconds, row.idle_seconds, row.harvested_seconds, largest)}</td>
      <td data-label="Of all there was" class="num">${share(row.gpu_seconds, capacity)}</td>
      <td data-label="Held, idle" class="num">${gpuHours(row.idle_seconds)} <span class="muted">${row.gpu_seconds ? share(row.idle_seconds, row.gpu_seconds) : nothing}</span></td>
      ${this.hasHarvest() ? harvestedCell(row.harvested_seconds, row.harvested_energy_joules) : nothing}
      <td data-label="Utilization" class="num">${format.percent(row.utilization_mean)}</td>
      <td data-label="Energy" class="num">${format.joules(row.energy_joules)}</td>
      <td data-label="GPUs" class="num" title=${(row.nodes ?? []).map(format.text).join(", ")}>${format.count(row.gpus)}</td>
      <td data-label="Last seen" class="num">${format.dateTime(row.last)}</td></tr>`;
  }

  totals(rows) {
    const sum = (name) => rows.reduce((all, row) => all + (row[name] ?? 0), 0);
    const [held, idle] = [sum("gpu_seconds"), sum("idle_seconds")];
    const energy = (name) => (rows.some((row) => format.known(row[name])) ? sum(name) : null);
    return html`<tfoot><tr>
      <th scope="row" data-label="">${rows.length === 1 ? "1 row" : `All ${rows.length}`}</th>${this.by === "job" ? html`<td></td>` : nothing}
      <td data-label="GPU-hours" class="num">${gpuHours(held)}</td><td class="proportions"></td>
      <td data-label="Of all there was" class="num">${share(held, this.usage.capacity_seconds)}</td>
      <td data-label="Held, idle" class="num">${gpuHours(idle)} <span class="muted">${share(idle, held)}</span></td>
      ${this.hasHarvest() ? harvestedCell(sum("harvested_seconds"), energy("harvested_energy_joules")) : nothing}<td></td>
      <td data-label="Energy" class="num">${format.joules(energy("energy_joules"))}</td><td></td><td></td></tr></tfoot>`;
  }
}

/** What harvests had, and what that took: neither is in the columns of what people had. */
function harvestedCell(seconds, joules) {
  return html`<td data-label="Harvested" class="num">${gpuHours(seconds)}${format.known(joules) ? html` <span class="muted origin">${format.joules(joules)}</span>` : nothing}</td>`;
}

function userLink(user) {
  return user ? html`<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>` : "–";
}

function jobLink(row) {
  const program = row.program ? html`<span class="muted origin"><bdi>${format.text(row.program)}</bdi></span>` : nothing;
  if (row.job) {
    return html`<a href=${href("job", row.job)}><bdi>${format.text(row.job)}</bdi></a>${program}`;
  }
  if (row.node && row.pid) {
    return html`<a href=${href("job", jobKey(row.node, row))}><bdi>${row.program ? format.text(row.program) : `pid ${row.pid}`}</bdi></a><span class="muted origin"><bdi>${format.text(row.node)}</bdi>, pid ${row.pid}</span>`;
  }
  return format.text(row.program);
}

function gpuHours(seconds) {
  if (!format.known(seconds)) {
    return format.UNKNOWN;
  }
  const hours = seconds / HOUR;
  if (hours > 0 && hours < 0.005) {
    return "< 0.01";
  }
  return hours.toFixed(hours >= 99.95 ? 0 : hours >= 9.995 ? 1 : 2);
}

function share(part, whole) {
  if (!format.known(part) || !whole) {
    return format.UNKNOWN;
  }
  const ratio = part / whole;
  return format.percent(ratio, ratio > 0 && ratio < 0.0995 ? 1 : 0);
}

/** A bar of what was used, what was held without use and what was harvested, as parts of a whole. */
function proportion(busy, idle, harvested, whole, name = "") {
  const width = (part) => `${Math.max(0, Math.min(100, (100 * part) / (whole || 1)))}%`;
  return html`<svg class="proportion ${name}" aria-hidden="true" focusable="false" preserveAspectRatio="none">
    <rect class="part-free" width="100%" height="100%"></rect>
    <rect class="part-harvested" width=${width(busy + idle + harvested)} height="100%"></rect>
    <rect class="part-idle" width=${width(busy + idle)} height="100%"></rect>
    <rect class="part-busy" width=${width(busy)} height="100%"></rect></svg>`;
}

function midnight(now) {
  return new Date(now * 1000).setHours(0, 0, 0, 0) / 1000;
}

function localTime(epoch) {
  if (!format.known(epoch)) {
    return "";
  }
  const date = new Date(epoch * 1000);
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
