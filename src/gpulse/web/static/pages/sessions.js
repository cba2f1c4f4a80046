// Sessions: the list, starting and stopping them, and their files.

import { html, nothing, render } from "../vendor/lit-html.js";
import { get, post } from "../core/api.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { errorNote, matches, sorted, sortHeader } from "../parts/tables.js";
import { SessionControls, SessionForm } from "../parts/session-forms.js";
import { downloads, length, seconds, stateBadge, what } from "../parts/sessions.js";

const EVERY_MS = 5_000;
const COLUMNS = {
  name: (session) => session.name,
  state: (session) => session.state,
  start: (session) => seconds(session.start_time),
  length: (session) => length(session, Date.now() / 1000),
  frames: (session) => session.frame_count,
};

/** What the window is called here. */
export const title = () => "Sessions";

/** Show the page. */
export function mount(root, route, app) {
  const page = new SessionsPage(root, route, app);
  return { wish: { details: false, metrics: [], host_metrics: [], interval: 5 }, leave: () => page.leave(), rerouted: (next) => page.rerouted(next) };
}

class SessionsPage {
  constructor(root, route, app) {
    this.root = root;
    this.app = app;
    this.sessions = null;
    this.error = null;
    this.filter = "";
    this.sort = { by: "start", down: true };
    this.stop = new AbortController();
    this.controls = new SessionControls(root, app, () => this.draw(), () => this.refresh());
    this.form = new SessionForm(() => this.draw(), (body) => this.start(body));
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

  rerouted(route) {
    this.form.prefill(route.query);
    this.draw();
  }

  async refresh() {
    try {
      this.sessions = (await get("/api/v1/sessions", {}, { signal: this.stop.signal })).sessions;
      this.error = null;
    } catch (error) {
      if (error.name === "AbortError") {
        return;
      }
      this.error = error;
    }
    this.draw();
  }

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
      <p class="lead">A session is a named stretch of time whose readings become a file. It can begin in the past.</p>
      ${this.form.view(this.app.fleet)}
      ${errorNote(this.controls.error)} ${errorNote(this.error, () => this.refresh())}
      ${this.sessions === null ? nothing : this.sessions.length ? html`
      <form class="toolbar" role="search" aria-label="Filter sessions" @submit=${(event) => event.preventDefault()}>
        <label class="field grow">Search <input type="search" autocomplete="off" placeholder="name, label, node" .value=${this.filter} @input=${(event) => this.search(event.target.value)}></label>
        ${active.length > 1 ? html`<button type="button" class="button danger" @click=${() => this.controls.stop(null)}>Stop all ${active.length}</button>` : nothing}
      </form>
      ${this.table()}` : html`<p class="empty">There is no session yet. Start one above, or with <code>gpulse session start</code>.</p>`}
      ${this.controls.dialog(active.length)}`;
  }

  search(text) {
    this.filter = text;
    this.draw();
  }

  sortBy(name) {
    this.sort = { by: name, down: this.sort.by === name ? !this.sort.down : name !== "name" && name !== "state" };
    this.draw();
  }

  table() {
    const fitting = this.sessions.filter((session) => matches(this.filter, [session.name, session.state, session.session_id, ...session.nodes, ...session.gpus, ...Object.entries(session.labels).map((pair) => pair.join("="))]));
    const rows = sorted(fitting, COLUMNS[this.sort.by], this.sort.down);
    const header = (name, words, classes) => sortHeader(name, words, this.sort, (by) => this.sortBy(by), classes);
    return html`<div class="card table-card"><table class="table stack"><caption>${rows.length === 1 ? "1 session" : `${rows.length} sessions`}</caption>
      <thead><tr>${header("name", "Name")}${header("state", "State")}${header("start", "Start")}${header("length", "Length", "num")}${header("frames", "Frames", "num")}
        <th scope="col">What</th><th scope="col">Labels</th><th scope="col">File</th><th scope="col"><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${rows.map((session) => this.row(session))}</tbody></table></div>`;
  }

  row(session) {
    const labels = Object.entries(session.labels ?? {});
    return html`<tr>
      <th scope="row" data-label="Name"><a href=${href("sessions", session.session_id)}>${session.name}</a></th>
      <td data-label="State">${stateBadge(session)}</td>
      <td data-label="Start">${format.dateTime(seconds(session.start_time))}</td>
      <td data-label="Length" class="num">${format.duration(length(session, this.app.fleet.headTime()))}</td>
      <td data-label="Frames" class="num">${format.count(session.frame_count)}</td>
      <td data-label="What">${what(session)}</td>
      <td data-label="Labels">${labels.length ? labels.map(([key, value]) => html`<span class="badge muted">${key}=${value}</span> `) : "–"}</td>
      <td data-label="File">${downloads(session)}</td>
      <td class="actions">${this.controls.buttons(session)}</td></tr>`;
  }
}
