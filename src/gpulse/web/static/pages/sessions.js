// Sessions: the list, starting and stopping them, and their files.

import { asError, get, isAbort, post } from "../core/api.js";
import { fieldValue } from "../core/dom.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { downloads, length, SessionControls, SessionForm, seconds, stateBadge, what } from "../parts/sessions.js";
import { errorNote, matches, sorted, sortHeader } from "../parts/tables.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const EVERY_MS = 5_000;
/** @type {Record<string, (session: Api.SessionAnswer) => string | number | null>} */
const COLUMNS = {
  name: (session) => session.name,
  state: (session) => session.state,
  start: (session) => seconds(session.start_time),
  length: (session) => length(session, Date.now() / 1000),
  frames: (session) => session.frame_count,
};

/** The page's title. */
export const title = () => "Sessions";

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export const mount = (root, route, app) => new SessionsPage(root, route, app);

class SessionsPage {
  subscription = { details: false, metrics: [], host_metrics: [], interval: 5 };

  /**
   * @param {HTMLElement} root
   * @param {Dashboard.Route} route
   * @param {Dashboard.App} app
   */
  constructor(root, route, app) {
    this.root = root;
    this.app = app;
    /** @type {Api.SessionAnswer[] | null} */
    this.sessions = null;
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    this.filter = "";
    this.sort = { by: "start", down: true };
    this.stop = new AbortController();
    this.controls = new SessionControls(
      root,
      app,
      () => this.draw(),
      () => this.refresh(),
    );
    this.form = new SessionForm(
      () => this.draw(),
      (body) => this.start(body),
    );
    this.form.prefill(route.query);
    this.timer = setInterval(() => document.hidden || this.refresh(), EVERY_MS);
    this.draw();
    this.refresh();
  }

  leave() {
    this.stop.abort();
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  /** @param {Dashboard.Route} route */
  rerouted(route) {
    this.form.prefill(route.query);
    this.draw();
  }

  async refresh() {
    try {
      this.sessions = (await get("/api/v1/sessions", {}, { signal: this.stop.signal })).sessions;
      this.error = null;
    } catch (error) {
      if (isAbort(error)) {
        return;
      }
      this.error = asError(error);
    }
    this.draw();
  }

  /** @param {object} body */
  async start(body) {
    const answer = await post("/profiling/start", body);
    this.app.toast(`Session ${answer.session?.name ?? ""} started`, "good");
    setQuery({ name: null, since: null, nodes: null, gpus: null });
    await this.refresh();
  }

  draw() {
    if (!this.stop.signal.aborted) {
      render(this.view(), this.root);
    }
  }

  view() {
    const active = (this.sessions ?? []).filter((session) => session.is_active);
    return html`<h1>Sessions</h1>
      <p class="lead">A session is a named time range whose samples are written to a file. It can start in the past.</p>
      ${this.form.view(this.app.fleet)}
      ${errorNote(this.controls.error)} ${errorNote(this.error, () => this.refresh())}
      ${
        this.sessions === null
          ? nothing
          : this.sessions.length
            ? html`
      <form class="toolbar" role="search" aria-label="Filter sessions" @submit=${(/** @type {SubmitEvent} */ event) => event.preventDefault()}>
        <label class="field grow">Search <input type="search" autocomplete="off" placeholder="name, label, node" .value=${this.filter} @input=${(/** @type {Event} */ event) => this.search(fieldValue(event))}></label>
        ${active.length > 1 ? html`<button type="button" class="button danger" @click=${() => this.controls.stop(null)}>Stop all ${active.length}</button>` : nothing}
      </form>
      ${this.table()}`
            : html`<p class="empty">No sessions yet. Start one above, or with <code>gpulse session start</code>.</p>`
      }
      ${this.controls.dialog(active.length)}`;
  }

  /** @param {string} text */
  search(text) {
    this.filter = text;
    this.draw();
  }

  /** @param {string} name */
  sortBy(name) {
    this.sort = { by: name, down: this.sort.by === name ? !this.sort.down : name !== "name" && name !== "state" };
    this.draw();
  }

  table() {
    const fitting = (this.sessions ?? []).filter((session) =>
      matches(this.filter, [
        session.name,
        session.state,
        session.session_id,
        ...session.nodes,
        ...session.gpus,
        ...Object.entries(session.labels).map((pair) => pair.join("=")),
      ]),
    );
    const rows = sorted(fitting, COLUMNS[this.sort.by], this.sort.down);
    /**
     * @param {string} name
     * @param {string} words
     * @param {string} [classes]
     */
    const header = (name, words, classes) => sortHeader(name, words, this.sort, (by) => this.sortBy(by), classes);
    return html`<div class="card table-card"><table class="table stack"><caption>${rows.length === 1 ? "1 session" : `${rows.length} sessions`}</caption>
      <thead><tr>${header("name", "Name")}${header("state", "State")}${header("start", "Start")}${header("length", "Duration", "num")}${header("frames", "Frames", "num")}
        <th scope="col">Scope</th><th scope="col">Labels</th><th scope="col">File</th><th scope="col"><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${rows.map((session) => this.row(session))}</tbody></table></div>`;
  }

  /** @param {Api.SessionAnswer} session */
  row(session) {
    const labels = Object.entries(session.labels ?? {});
    return html`<tr>
      <th scope="row" data-label="Name"><a href=${href("sessions", session.session_id)}>${session.name}</a></th>
      <td data-label="State">${stateBadge(session)}</td>
      <td data-label="Start">${format.dateTime(seconds(session.start_time))}</td>
      <td data-label="Duration" class="num">${format.duration(length(session, this.app.fleet.headTime()))}</td>
      <td data-label="Frames" class="num">${format.count(session.frame_count)}</td>
      <td data-label="Scope">${what(session)}</td>
      <td data-label="Labels">${labels.length ? labels.map(([key, value]) => html`<span class="badge muted">${key}=${value}</span> `) : "–"}</td>
      <td data-label="File">${downloads(session)}</td>
      <td class="actions">${this.controls.buttons(session)}</td></tr>`;
  }
}
