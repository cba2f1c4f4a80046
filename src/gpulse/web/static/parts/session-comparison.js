// Comparison of a session with another one: what changed, and whether it became better.

import { asError, get, isAbort } from "../core/api.js";
import { fieldValue } from "../core/dom.js";
import * as format from "../core/format.js";
import { href, setQuery } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { seconds } from "./sessions.js";
import { errorNote } from "./tables.js";

const TONES = { better: "good", worse: "bad", mixed: "warn", no_clear_change: "muted", unknown: "muted" };
const FINDING_TONES = { gone: "good", new: "bad", stayed: "warn" };
const EFFECTS = { better: ["good", "▲ better"], worse: ["bad", "▼ worse"] };

export class SessionComparison {
  /**
   * @param {string} id name or ID of the session on the page
   * @param {Record<string, string>} query
   * @param {() => void} draw
   * @param {AbortSignal} signal
   */
  constructor(id, query, draw, signal) {
    this.id = id;
    this.draw = draw;
    this.signal = signal;
    this.other = query.compare ?? "";
    /** @type {Api.SessionAnswer[] | null} */
    this.sessions = null;
    /** @type {Api.RunComparison | null} */
    this.found = null;
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    this.load();
  }

  /**
   * Follow the address of the page.
   * @param {Record<string, string>} query
   */
  read(query) {
    if ((query.compare ?? "") !== this.other) {
      this.other = query.compare ?? "";
      this.compare();
    }
  }

  /** @param {string} other */
  choose(other) {
    setQuery({ compare: other || null }, { replace: false });
    this.other = other;
    this.compare();
  }

  async load() {
    try {
      this.sessions = (await get("/api/v1/sessions", {}, { signal: this.signal })).sessions;
    } catch (error) {
      this.fail(error);
      return;
    }
    this.compare();
  }

  async compare() {
    const wanted = this.other;
    this.found = null;
    this.error = null;
    this.draw();
    const [before, after] = this.order(wanted);
    if (!before || !after) {
      return;
    }
    try {
      const answer = await get(`/api/v1/sessions/${encodeURIComponent(before)}/compare`, { after }, { signal: this.signal });
      if (wanted === this.other) {
        this.found = /** @type {Api.RunComparison} */ (answer);
        this.draw();
      }
    } catch (error) {
      if (wanted === this.other) {
        this.fail(error);
      }
    }
  }

  /** @param {unknown} error */
  fail(error) {
    if (!isAbort(error)) {
      this.error = asError(error);
      this.draw();
    }
  }

  /**
   * The two sessions, the one that started earlier first.
   * @param {string} other
   * @returns {[string, string] | []}
   */
  order(other) {
    const sessions = this.sessions ?? [];
    /** @param {string} name */
    const start = (name) => seconds(sessions.find((each) => each.session_id === name || each.name === name)?.start_time) ?? 0;
    if (!other || !this.sessions) return [];
    return start(other) <= start(this.id) ? [other, this.id] : [this.id, other];
  }

  /**
   * The whole part of the page.
   * @param {Api.SessionAnswer} session
   */
  view(session) {
    const others = (this.sessions ?? []).filter((each) => each.session_id !== session.session_id).reverse();
    return html`<section class="session-comparison"><h2>Compare with another session</h2>
      ${others.length || !this.sessions ? this.chooser(others) : html`<p class="muted">There is no other session yet.</p>`}
      ${errorNote(this.error, () => this.load())}
      ${this.found ? this.result(this.found) : this.other && !this.error ? html`<p class="muted" role="status">Comparing…</p>` : nothing}</section>`;
  }

  /** @param {Api.SessionAnswer[]} others */
  chooser(others) {
    return html`<div class="toolbar"><label class="field">Session
      <select @change=${(/** @type {Event} */ event) => this.choose(fieldValue(event))}>
        <option value="" ?selected=${!this.other}>Choose…</option>
        ${others.map((each) => html`<option value=${each.session_id} ?selected=${each.session_id === this.other || each.name === this.other}>${format.text(each.name)}, ${format.dateTime(seconds(each.start_time))}</option>`)}
      </select></label></div>`;
  }

  /** @param {Api.RunComparison} found */
  result(found) {
    const [before, after] = this.order(this.other);
    return html`<div class="card comparison"><p role="status"><span class="badge ${TONES[found.outcome]}">${found.title}</span> ${format.text(found.verdict)}</p>
      <dl class="facts">${run("Before", before ?? "", found.before)}${run("After", after ?? "", found.after)}</dl>
      ${table("", found.outcome === "unknown" ? [] : found.quantities)}
      ${table("Lost time", found.lost_time)}
      ${found.findings.length ? html`<h3>Findings</h3><ul class="comparison-list">${found.findings.map(finding)}</ul>` : nothing}
      ${found.notes.length ? html`<h3>Notes</h3><ul class="comparison-list muted">${found.notes.map((note) => html`<li dir="auto">${format.text(note)}</li>`)}</ul>` : nothing}</div>`;
  }
}

/**
 * Quantities side by side.
 * @param {string} title
 * @param {Api.ComparedQuantity[]} rows
 */
function table(title, rows) {
  if (!rows.length) {
    return nothing;
  }
  return html`${title ? html`<h3>${title}</h3>` : nothing}<div class="table-card"><table class="table stack">
    <thead><tr><th scope="col">${title ? "Cause" : "Quantity"}</th><th scope="col" class="num">Before</th><th scope="col" class="num">After</th><th scope="col">Change</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><th scope="row">${format.text(row.title)}</th><td data-label="Before" class="num">${row.before_text}</td><td data-label="After" class="num">${row.after_text}</td><td data-label="Change">${change(row)}</td></tr>`)}</tbody></table></div>`;
}

/**
 * One of the two sessions, and what of it is compared.
 * @param {string} word
 * @param {string} id
 * @param {Api.ComparedRun} run
 */
function run(word, id, run) {
  const gpus = `${run.gpus} ${run.gpus === 1 ? "GPU" : "GPUs"}${run.models.length ? `, ${run.models.join(", ")}` : ""}`;
  const programs = run.programs?.length ? `, ${run.programs.join(", ")}` : "";
  return html`<div><dt>${word}</dt><dd><a href=${href("session", id)}><bdi>${format.text(run.name)}</bdi></a> <span class="muted">${format.dateTime(run.from)}, ${format.duration(run.compared_seconds)} compared, ${format.text(gpus + programs)}</span></dd></div>`;
}

/** @param {Api.ComparedQuantity} row */
function change(row) {
  if (row.effect === "none") {
    return html`<span class=${row.change === "rose" || row.change === "fell" ? "" : "muted"}>${row.change_text}</span>`;
  }
  const [tone, words] = EFFECTS[row.effect];
  return html`${row.change_text} <span class="badge ${tone}">${words}</span>`;
}

/** @param {Api.ComparedFinding} found */
function finding(found) {
  return html`<li><span class="badge ${FINDING_TONES[found.change]}">${found.change_text}</span> <a href=${href("findings", { explain: found.id })}>${format.text(found.id)}</a>${found.loss_text ? `: ${found.loss_text}` : nothing}</li>`;
}
