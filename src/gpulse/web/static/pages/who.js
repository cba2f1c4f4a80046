// Who used the GPUs: GPU-hours, and how many of them were idle, by user or job in a time range.

import { asError, get, isAbort, url } from "../core/api.js";
import { fieldValue, find, formOf } from "../core/dom.js";
import { jobKey } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { errorNote, matches, sorted, sortHeader } from "../parts/tables.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const RANGES = [
  ["today", "Today"],
  ["-24h", "24 h"],
  ["-7d", "7 days"],
  ["-30d", "30 days"],
];
const DEFAULT_RANGE = "-24h";
const PATIENCE_MS = 300;
const AGAIN_MS = 60_000;
const MAX_ROWS = 500;
const HOUR = 3600;
/** @type {Record<string, (row: Api.UsageRow) => string | number | null>} */
const COLUMNS = {
  user: (row) => row.user,
  gpu_seconds: (row) => row.gpu_seconds,
  idle_seconds: (row) => row.idle_seconds,
  harvested_seconds: (row) => row.harvested_seconds,
  utilization_mean: (row) => row.utilization_mean,
  energy_joules: (row) => row.energy_joules,
  gpus: (row) => row.gpus,
  last: (row) => row.last,
};

/** The page's title. */
export const title = () => "Usage";

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const page = new WhoPage(root, app);
  page.rerouted(route);
  return {
    subscription: { details: false, metrics: [], host_metrics: [], interval: 5 },
    leave: () => page.leave(),
    rerouted: (/** @type {Dashboard.Route} */ next) => page.rerouted(next),
  };
}

class WhoPage {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.App} app
   */
  constructor(root, app) {
    this.root = root;
    this.app = app;
    /** @type {Api.UsageReport | null} */
    this.usage = null;
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    this.isSlow = false;
    this.sort = { by: "gpu_seconds", down: true };
    this.filter = "";
    this.isOwn = false;
    /** @type {AbortController | null} */
    this.request = null;
    this.isGone = false;
    this.by = "user";
    this.from = DEFAULT_RANGE;
    this.to = "";
    this.timer = setInterval(() => document.hidden || this.to || this.ask(), AGAIN_MS);
  }

  leave() {
    this.request?.abort();
    this.request = null;
    this.isGone = true;
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  /** @param {Dashboard.Route} options */
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
    this.request?.abort();
    const request = new AbortController();
    this.request = request;
    const slow = setTimeout(() => this.slow(request), PATIENCE_MS);
    this.draw();
    try {
      this.usage = await get("/api/v1/usage", this.words(), { signal: request.signal });
      this.error = null;
    } catch (error) {
      if (!isAbort(error)) {
        this.error = asError(error);
      }
    }
    clearTimeout(slow);
    if (this.request === request) {
      this.request = null;
      this.isSlow = false;
      this.draw();
    }
  }

  /** @param {AbortController} request */
  slow(request) {
    if (this.request === request) {
      this.isSlow = true;
      this.draw();
    }
  }

  /** @param {{ by?: string, from?: string, to?: string | null }} changes */
  choose(changes) {
    setQuery(changes, { replace: false });
    Object.assign(this, "from" in changes ? { from: changes.from, to: changes.to ?? "" } : changes);
    this.ask();
  }

  /** @param {string} text */
  search(text) {
    this.filter = text;
    setQuery({ text: text || null });
    this.draw();
  }

  /** @param {string} name */
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
      <p class="lead">A GPU is held while a process is on it. It is held but idle while it does no work. When several processes hold a GPU at the same time, its time is divided among them, so that the rows add up.${this.hasHarvest() ? " Time and energy of harvests are counted separately." : ""}</p>
      ${this.toolbar()} ${this.isOwn ? this.ownRange() : nothing}
      ${errorNote(this.error, this.error?.status === undefined ? null : () => this.ask())}
      ${this.isSlow ? html`<p class="computing" role="status"><progress aria-label="Computing"></progress> Computing…</p>` : nothing}
      ${this.usage && !this.error ? this.results() : nothing}`;
  }

  /** Whether there is harvested time to tell apart. */
  hasHarvest() {
    return (this.usage?.harvested_seconds ?? 0) > 0;
  }

  toolbar() {
    const chosen = this.isOwn ? null : this.from;
    return html`<div class="toolbar">
      <div class="choices" role="group" aria-label="By">${[
        ["user", "By user"],
        ["job", "By job"],
      ].map(
        ([by, words]) =>
          html`<button type="button" class="button" aria-pressed=${String(this.by === by)} @click=${() => this.choose({ by })}>${words}</button>`,
      )}</div>
      <div class="choices" role="group" aria-label="Time">${RANGES.map(([name, words]) => html`<button type="button" class="button" aria-pressed=${String(chosen === name)} @click=${() => this.preset(name)}>${words}</button>`)}<button type="button" class="button" aria-pressed=${String(this.isOwn)} aria-expanded=${String(this.isOwn)} @click=${() => this.own()}>From … to</button></div>
      <label class="field grow">Search <input type="search" autocomplete="off" placeholder="user, job, node" .value=${this.filter} @input=${(/** @type {Event} */ event) => this.search(fieldValue(event))}></label>
      ${this.csv()}
    </div>`;
  }

  /** The same as a file: of one user where that is what is searched for, else of all rows. */
  csv() {
    const searched = this.filter.trim();
    const user = this.usage?.rows.some((row) => row.user === searched) ? searched : null;
    const about = user ? `all rows of ${format.text(user)}` : searched ? "all rows, regardless of the search," : "all rows";
    return html`<a class="button" href=${url("/api/v1/usage.csv", { ...this.words(), users: user })} title=${`Download ${about} as a CSV file`} download>CSV</a>`;
  }

  /** @param {string} name */
  preset(name) {
    this.isOwn = false;
    this.choose({ from: name, to: null });
  }

  own() {
    this.isOwn = true;
    this.draw();
    find(this.root, "input[name=from]").focus();
  }

  ownRange() {
    const { from, to } = this.usage ?? {};
    return html`<form class="toolbar own-range" aria-label="Time" @submit=${(/** @type {SubmitEvent} */ event) => this.submitRange(event)}>
      <label class="field">From <input type="datetime-local" name="from" required value=${localTime(from)}></label>
      <label class="field">To <input type="datetime-local" name="to" value=${this.to ? localTime(to) : ""}></label>
      <button class="button primary">Show</button></form>`;
  }

  /** @param {SubmitEvent} event */
  submitRange(event) {
    event.preventDefault();
    const [from, to] = ["from", "to"].map((name) => Date.parse(find(formOf(event), `[name=${name}]`, HTMLInputElement).value) / 1000);
    if (Number.isNaN(from)) {
      find(formOf(event), "[name=from]").focus();
      return;
    }
    if (from >= (Number.isNaN(to) ? this.app.fleet.headTime() : to)) {
      this.error = { message: "the start must be before the end" };
      this.draw();
      return;
    }
    this.choose({ from: String(from), to: Number.isNaN(to) ? null : String(to) });
  }

  results() {
    const { rows, from, to, capacity_seconds: capacity } = this.known;
    const fitting = rows.filter((row) => matches(this.filter, [row.user, row.job, row.program, row.node, ...(row.nodes ?? [])]));
    const words = `${format.dateTime(from)} to ${format.dateTime(to)}`;
    if (!rows.length) {
      return html`<p class="empty">Nobody used a GPU from ${words}${capacity ? `; ${gpuHours(capacity)} GPU-hours were available` : ""}.</p>`;
    }
    return html`${this.summary()} ${this.table(fitting, words)}`;
  }

  /** The answer, once it is there. */
  get known() {
    if (!this.usage) throw new Error("the usage has not been loaded yet");
    return this.usage;
  }

  summary() {
    const { capacity_seconds: capacity, gpu_seconds: held, idle_seconds: idled, harvested_seconds: harvested, gpus } = this.known;
    const idle = idled ?? 0;
    const busy = held - idle;
    const free = capacity - held - harvested;
    return html`<div class="card usage-summary">
      <dl class="facts">
        <div><dt>GPUs</dt><dd>${format.count(gpus)}</dd></div>
        <div><dt>GPU-hours available</dt><dd>${gpuHours(capacity)}</dd></div>
        <div><dt><span class="key" data-state="busy" aria-hidden="true"></span>in use</dt><dd>${gpuHours(busy)} <span class="muted">${share(busy, capacity)}</span></dd></div>
        <div><dt><span class="key" data-state="idle" aria-hidden="true"></span>held idle</dt><dd>${gpuHours(idle)} <span class="muted">${share(idle, capacity)}</span></dd></div>
        ${this.hasHarvest() ? html`<div><dt><span class="key" data-state="harvested" aria-hidden="true"></span>harvested</dt><dd>${gpuHours(harvested)} <span class="muted">${share(harvested, capacity)}</span></dd></div>` : nothing}
        <div><dt><span class="key" data-state="free" aria-hidden="true"></span>free</dt><dd>${gpuHours(free)} <span class="muted">${share(free, capacity)}</span></dd></div>
      </dl>
      ${proportion(busy, idle, harvested, capacity, "whole")}
      ${(this.known.incomplete ?? []).map((text) => html`<p class="muted">Incomplete: ${format.text(text)}.</p>`)}
    </div>`;
  }

  /**
   * @param {Api.UsageRow[]} rows
   * @param {string} words
   */
  table(rows, words) {
    const isJobs = this.by === "job";
    /**
     * @param {string} name
     * @param {string} text
     */
    const header = (name, text, classes = "num") => sortHeader(name, text, this.sort, (by) => this.sortBy(by), classes);
    const largest = Math.max(...this.known.rows.map((row) => row.gpu_seconds + row.harvested_seconds));
    const ordered = sorted(rows, (row) => this.value(row), this.sort.down);
    return html`<div class="card table-card"><table class="table stack usage" aria-busy=${String(this.request !== null)}>
      <caption>${isJobs ? "Jobs" : "Users"} from ${words}${this.known.truncated ? ", largest only" : ""}</caption>
      <thead><tr>${header("name", isJobs ? "Job" : "User", "")}${isJobs ? header("user", "User", "") : nothing}${header("gpu_seconds", "GPU-hours")}
        <th scope="col" class="proportions"><span class="visually-hidden">Proportion</span></th>
        ${header("share", "% of capacity")}${header("idle_seconds", "Held idle")}${this.hasHarvest() ? header("harvested_seconds", "Harvested") : nothing}${header("utilization_mean", "Utilization")}${header("energy_joules", "Energy")}${header("gpus", "GPUs")}${header("last", "Last seen")}</tr></thead>
      <tbody>${ordered.slice(0, MAX_ROWS).map((row) => this.row(row, largest))}
        ${ordered.length ? nothing : html`<tr><td colspan=${9 + (isJobs ? 1 : 0) + (this.hasHarvest() ? 1 : 0)}>No row matches the search.</td></tr>`}</tbody>
      ${ordered.length ? this.totals(ordered) : nothing}</table></div>
      ${ordered.length > MAX_ROWS ? html`<p class="muted">${ordered.length - MAX_ROWS} more are in the CSV file; a search finds them here.</p>` : nothing}`;
  }

  /** @param {Api.UsageRow} row */
  value(row) {
    switch (this.sort.by) {
      case "name":
        return this.by === "job" ? (row.job ?? row.program) : row.user;
      case "share":
        return row.gpu_seconds;
      default:
        return COLUMNS[this.sort.by]?.(row);
    }
  }

  /**
   * @param {Api.UsageRow} row
   * @param {number} largest
   */
  row(row, largest) {
    const capacity = this.known.capacity_seconds;
    return html`<tr>
      <th scope="row" data-label=${this.by === "job" ? "Job" : "User"}>${this.by === "job" ? jobLink(row) : userLink(row.user)}</th>
      ${this.by === "job" ? html`<td data-label="User">${userLink(row.user)}</td>` : nothing}
      <td data-label="GPU-hours" class="num">${gpuHours(row.gpu_seconds)}</td>
      <td class="proportions">${proportion(row.gpu_seconds - (row.idle_seconds ?? 0), row.idle_seconds ?? 0, row.harvested_seconds, largest)}</td>
      <td data-label="% of capacity" class="num">${share(row.gpu_seconds, capacity)}</td>
      <td data-label="Held idle" class="num">${gpuHours(row.idle_seconds)} <span class="muted">${row.gpu_seconds ? share(row.idle_seconds, row.gpu_seconds) : nothing}</span></td>
      ${this.hasHarvest() ? harvestedCell(row.harvested_seconds, row.harvested_energy_joules) : nothing}
      <td data-label="Utilization" class="num">${format.percent(row.utilization_mean)}</td>
      <td data-label="Energy" class="num">${format.joules(row.energy_joules)}</td>
      <td data-label="GPUs" class="num" title=${(row.nodes ?? []).map(format.text).join(", ")}>${format.count(row.gpus)}</td>
      <td data-label="Last seen" class="num">${format.dateTime(row.last)}</td></tr>`;
  }

  /** @param {Api.UsageRow[]} rows */
  totals(rows) {
    /** @param {"gpu_seconds" | "idle_seconds" | "harvested_seconds" | "energy_joules" | "harvested_energy_joules"} name */
    const sum = (name) => rows.reduce((all, row) => all + (row[name] ?? 0), 0);
    const [held, idle] = [sum("gpu_seconds"), sum("idle_seconds")];
    /** @param {"energy_joules" | "harvested_energy_joules"} name */
    const energy = (name) => (rows.some((row) => format.known(row[name])) ? sum(name) : null);
    return html`<tfoot><tr>
      <th scope="row" data-label="">${rows.length === 1 ? "1 row" : `All ${rows.length}`}</th>${this.by === "job" ? html`<td></td>` : nothing}
      <td data-label="GPU-hours" class="num">${gpuHours(held)}</td><td class="proportions"></td>
      <td data-label="% of capacity" class="num">${share(held, this.known.capacity_seconds)}</td>
      <td data-label="Held idle" class="num">${gpuHours(idle)} <span class="muted">${share(idle, held)}</span></td>
      ${this.hasHarvest() ? harvestedCell(sum("harvested_seconds"), energy("harvested_energy_joules")) : nothing}<td></td>
      <td data-label="Energy" class="num">${format.joules(energy("energy_joules"))}</td><td></td><td></td></tr></tfoot>`;
  }
}

/**
 * What harvests had, and what that took: neither is in the columns of what people had.
 * @param {Dashboard.MaybeNumber} seconds
 * @param {Dashboard.MaybeNumber} joules
 */
function harvestedCell(seconds, joules) {
  return html`<td data-label="Harvested" class="num">${gpuHours(seconds)}${format.known(joules) ? html` <span class="muted origin">${format.joules(joules)}</span>` : nothing}</td>`;
}

/** @param {string | null} user */
function userLink(user) {
  return user ? html`<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>` : "–";
}

/** @param {Api.UsageRow} row */
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

/** @param {Dashboard.MaybeNumber} seconds */
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

/**
 * @param {Dashboard.MaybeNumber} part
 * @param {Dashboard.MaybeNumber} whole
 */
function share(part, whole) {
  if (!format.known(part) || !whole) {
    return format.UNKNOWN;
  }
  const ratio = part / whole;
  return format.percent(ratio, ratio > 0 && ratio < 0.0995 ? 1 : 0);
}

/**
 * A bar of what was used, what was held without use and what was harvested, as parts of a whole.
 * @param {number} busy
 * @param {number} idle
 * @param {number} harvested
 * @param {number} whole
 */
function proportion(busy, idle, harvested, whole, name = "") {
  /** @param {number} part */
  const width = (part) => `${Math.max(0, Math.min(100, (100 * part) / (whole || 1)))}%`;
  return html`<svg class="proportion ${name}" aria-hidden="true" focusable="false" preserveAspectRatio="none">
    <rect class="part" data-state="free" width="100%" height="100%"></rect>
    <rect class="part" data-state="harvested" width=${width(busy + idle + harvested)} height="100%"></rect>
    <rect class="part" data-state="idle" width=${width(busy + idle)} height="100%"></rect>
    <rect class="part" data-state="busy" width=${width(busy)} height="100%"></rect></svg>`;
}

/** @param {number} now */
function midnight(now) {
  return new Date(now * 1000).setHours(0, 0, 0, 0) / 1000;
}

/** @param {Dashboard.MaybeNumber} epoch */
function localTime(epoch) {
  if (!format.known(epoch)) {
    return "";
  }
  const date = new Date(epoch * 1000);
  return new Date(date.getTime() - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}
