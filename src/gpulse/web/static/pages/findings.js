// All findings of the cluster: a list grouped by cause, and the details of the chosen one.

import { asError, get, isAbort, post } from "../core/api.js";
import { fieldValue, find } from "../core/dom.js";
import { byName, gpuState } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, go, href, setQuery } from "../core/router.js";
import { onKey } from "../core/shortcuts.js";
import { findingDetail, rowText, silenceFields, TREND_SECONDS } from "../parts/finding-detail.js";
import { findingRows, findingSections, GROUPINGS, pastSection, severityCounts } from "../parts/finding-rows.js";
import { findingKey } from "../parts/findings.js";
import { emptyManual, explanation, loadManual } from "../parts/findings-manual.js";
import { severityGlyph } from "../parts/glyphs.js";
import { copyText, errorNote, later } from "../parts/tables.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const EVERY_MS = 30_000;
const SOON_MS = 2_000;
const DAY_SECONDS = 86_400;
const MAX_TRENDS = 40;
const MAX_PAST_BELOW = 6;
/** @type {Array<[Dashboard.FindingState, string]>} */
const STATES = [
  ["now", "Now"],
  ["past", "Past"],
  ["acknowledged", "Acknowledged"],
  ["silenced", "Silenced"],
];
const RANGES = [
  ["86400", "last 24 hours"],
  ["604800", "last 7 days"],
  ["2592000", "last 30 days"],
];

/** The page's title. */
export const title = () => "Findings";

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const page = new FindingsPage(root, app);
  page.rerouted(route);
  return {
    subscription: { details: true, metrics: ["gpu_utilization_ratio", "memory_used_bytes"], host_metrics: [] },
    leave: () => page.leave(),
    rerouted: (/** @type {Dashboard.Route} */ next) => page.rerouted(next),
  };
}

class FindingsPage {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.App} app
   */
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.manual = emptyManual;
    /** @type {Api.FindingGroups | null} */
    this.answer = null;
    /** @type {Api.FindingGroupRow[]} */
    this.past = [];
    /** @type {Api.SilenceAnswer[]} */
    this.silences = [];
    /** @type {Dashboard.Problem | null} */
    this.error = null;
    this.query = { state: "now", open: "", by: "cause", whose: "", node: "", severity: "", range: "", explain: "" };
    /** @type {Dashboard.FindingForm | null} */
    this.form = null;
    /** The form that the address says to open. */
    this.wanted = "";
    /** What the chosen finding needs besides: trends, and when it was seen before. */
    this.more = {
      row: "",
      /** @type {Dashboard.History | null} */ history: null,
      /** @type {Api.FindingGroupRow[] | null} */ before: null,
    };
    /** @type {Map<string, string>} */
    this.live = new Map();
    this.turn = 0;
    this.stop = new AbortController();
    this.soon = later(() => this.refresh(), SOON_MS);
    this.timer = setInterval(() => this.refresh(), EVERY_MS);
    const options = { signal: this.stop.signal };
    app.fleet.on("details", (names) => this.detailsChanged(names), options);
    app.fleet.addEventListener("structure", () => this.soon(), options); // nodes that do not report are findings, too
    this.keys = [
      onKey("j", () => this.move(1)),
      onKey("k", () => this.move(-1)),
      onKey("a", () => this.open("acknowledge")),
      onKey("s", () => this.open("silence")),
      onKey("Escape", () => this.cancel()),
    ];
    loadManual().then((manual) => {
      this.manual = manual;
      this.draw();
    });
  }

  leave() {
    this.stop.abort();
    this.soon.cancel();
    for (const release of this.keys) release();
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  get state() {
    return STATES.find(([name]) => name === this.query.state)?.[0] ?? "now";
  }

  /** @param {Dashboard.Route} route */
  rerouted(route) {
    const { state = "now", open = "", by = "cause", whose = "", node = "", severity = "", range = "", explain = "" } = route.query;
    const before = this.query;
    this.query = { state, open, by, whose, node, severity, range, explain };
    if (open !== before.open || state !== before.state) this.form = null;
    if (state !== before.state || range !== before.range || this.turn === 0) {
      this.answer = null;
      this.refresh();
    }
    this.wanted = route.query.do ?? "";
    this.draw();
    this.openWanted();
    if (open && open !== before.open && isPhone()) this.root.querySelector("#finding-title")?.scrollIntoView({ block: "center" });
  }

  /**
   * Request findings again when those of some nodes have changed.
   * @param {Set<string>} names
   */
  detailsChanged(names) {
    let isOther = false;
    for (const name of names) {
      const now = findingsKey(this.app.fleet.nodes.get(name));
      isOther = isOther || this.live.get(name) !== now;
      this.live.set(name, now);
    }
    if (isOther) this.soon();
  }

  async refresh() {
    if (document.hidden && this.answer) return;
    const mine = ++this.turn;
    const { signal } = this.stop;
    const from = `-${Number(this.query.range) || DAY_SECONDS}s`;
    try {
      const [answer, past, silences] = await Promise.all([
        get("/api/v1/findings/groups", { state: this.state, from }, { signal }),
        this.state === "now" ? get("/api/v1/findings/groups", { state: "past" }, { signal }) : null,
        this.state === "now" || this.state === "past" ? null : get("/api/v1/silences", {}, { signal }),
      ]);
      if (mine !== this.turn) return;
      this.answer = answer;
      this.past = past?.groups ?? [];
      this.silences = silences?.silences ?? [];
      this.error = null;
    } catch (error) {
      if (isAbort(error) || mine !== this.turn) return;
      this.error = asError(error);
    }
    this.draw();
    this.openWanted();
  }

  /** The rows of the list, in order; past ones of the last day stand below those of now. */
  rows() {
    const { by, whose, node, severity } = this.query;
    const grouping = GROUPINGS.some(([name]) => name === by) ? by : "cause";
    const filter = { whose, node, severity };
    const found = findingRows(this.answer?.groups ?? [], this.state === "past" ? "cause" : grouping, filter);
    return { found, past: findingRows(this.past, "cause", filter).slice(0, MAX_PAST_BELOW) };
  }

  /**
   * The chosen row; on a wide screen the first one until another is chosen. While a form is open, it is the form's row
   * even if the finding ends meanwhile: what was typed must not disappear.
   * @param {Dashboard.FindingRow[]} rows
   */
  chosen(rows) {
    const { open } = this.query;
    if (this.form) {
      const { row } = this.form;
      return rows.find((one) => one.row === row.row && one.to === null) ?? row;
    }
    return rows.find((row) => row.row === open) ?? (open ? rows.find((row) => row.key === open) : rows[0]);
  }

  /**
   * The address of this page with changes.
   * @param {Record<string, string | null>} changes
   */
  address(changes) {
    const { query } = current();
    return href("findings", { ...query, explain: null, do: null, ...changes });
  }

  /**
   * Choose the next row, or the one before.
   * @param {number} step
   */
  move(step) {
    const { found, past } = this.rows();
    const rows = [...found, ...past];
    const now = this.chosen(rows);
    const next = rows[Math.max(0, Math.min(rows.length - 1, (now ? rows.indexOf(now) : -1) + step))];
    if (!next || next === now) return;
    this.query = { ...this.query, open: next.row };
    this.form = null;
    setQuery({ open: next.row });
    this.draw();
    this.root.querySelector('.finding-row[aria-current="true"]')?.scrollIntoView({ block: "nearest" });
    this.app.announce(next.title);
  }

  /**
   * Open a form for the chosen row.
   * @param {Dashboard.FindingForm["kind"]} kind
   */
  open(kind) {
    const row = this.row();
    const isDone = kind === "acknowledge" ? row?.is_acknowledged : this.state === "silenced";
    if (!row || row.to !== null || isDone) return;
    this.form = { kind, row, isBusy: false, error: null };
    this.draw();
    const field = this.root.querySelector(kind === "silence" ? 'input[name="reason"]' : 'input[name="by"]');
    if (field instanceof HTMLElement) field.focus();
  }

  /** Close the form; the focus returns to the button that opens it. */
  cancel() {
    if (!this.form) return;
    const { kind } = this.form;
    this.form = null;
    this.draw();
    const button = this.root.querySelector(`.finding-actions button[data-form="${kind}"]`);
    if (button instanceof HTMLElement) button.focus();
  }

  /** Open the form that the address names, once the finding is there; it is named only once. */
  openWanted() {
    const { wanted } = this;
    if (!wanted || !this.answer) return;
    this.wanted = "";
    setQuery({ do: null });
    if (wanted === "acknowledge" || wanted === "silence") this.open(wanted);
  }

  row() {
    const { found, past } = this.rows();
    return this.chosen([...found, ...past]);
  }

  /**
   * Send what a form says.
   * @param {string} path
   * @param {object} body
   * @param {string} done
   */
  async send(path, body, done) {
    this.form = this.form && { ...this.form, isBusy: true, error: null };
    this.draw();
    try {
      await post(path, body, { signal: this.stop.signal });
      this.form = null;
      this.app.toast(done, "good");
      await this.refresh();
    } catch (error) {
      if (isAbort(error)) return;
      if (this.form) this.form = { ...this.form, isBusy: false, error: asError(error) };
      else this.app.toast(asError(error).message, "bad");
      this.draw();
    }
  }

  /** @param {FormDataEntryValue | null} name */
  remember(name) {
    this.app.prefs.write("name", String(name ?? "").trim());
    return String(name ?? "").trim();
  }

  /** @param {HTMLFormElement} form */
  acknowledge(form) {
    const row = this.row();
    if (!row) return;
    const data = new FormData(form);
    const note = String(data.get("note") ?? "").trim();
    const keys = row.members.filter((member) => !member.acknowledged).map((member) => member.key);
    this.send("/api/v1/findings/acknowledge", { keys, by: this.remember(data.get("by")), note: note || null }, "Acknowledged");
  }

  /** @param {HTMLFormElement} form */
  silence(form) {
    const row = this.row();
    if (!row) return;
    const data = new FormData(form);
    const fields = silenceFields(row, String(data.get("what")));
    const [until, reason] = [Number(data.get("until")), String(data.get("reason") ?? "").trim()];
    this.send("/api/v1/silences", { ...fields, until, reason, by: this.remember(data.get("by")) }, "Silenced");
  }

  /** @param {string} id */
  endSilence(id) {
    const by = this.app.prefs.read("name", "") || "dashboard";
    this.send(`/api/v1/silences/${encodeURIComponent(id)}/end`, { by }, "The silence has ended");
  }

  async copy() {
    const row = this.row();
    if (!row) return;
    const copied = await copyText(rowText(row, this.manual, this.app.fleet.headTime()));
    this.app.toast(copied ? "Copied as text" : "The browser does not allow copying to the clipboard", copied ? "good" : "bad");
  }

  /**
   * Request trends, and when the finding was seen before, once for each row.
   * @param {Dashboard.FindingRow} row
   */
  async fill(row) {
    const key = `${this.state} ${row.row} ${row.members.length}`;
    if (this.more.row === key) return;
    this.more = { row: key, history: null, before: null };
    const { signal } = this.stop;
    const to = row.to === null ? this.app.fleet.headTime() : Math.min(row.to + TREND_SECONDS / 6, this.app.fleet.headTime());
    const gpus = row.members.filter((member) => member.label !== null).map((member) => `${member.node}:${member.label}`);
    const history = gpus.length
      ? get(
          "/api/v1/history",
          {
            metrics: "gpu_utilization_ratio",
            gpus: gpus.slice(0, MAX_TRENDS),
            from: (to - TREND_SECONDS).toFixed(0),
            to: to.toFixed(0),
            points: 120,
          },
          { signal },
        ).catch(() => null)
      : null;
    const before = get("/api/v1/findings/groups", { state: "past", findings: row.id, from: "-30d" }, { signal }).catch(() => null);
    const answers = await Promise.all([history, before]);
    if (this.more.row !== key || signal.aborted) return;
    this.more = { row: key, history: answers[0] ?? { from: to, to, step: 1, times: [], series: [] }, before: answers[1]?.groups ?? [] };
    this.draw();
  }

  draw() {
    if (this.stop.signal.aborted) return;
    render(this.view(), this.root);
    this.showExplained();
  }

  view() {
    const { found, past } = this.rows();
    const chosen = this.answer ? this.chosen([...found, ...past]) : undefined;
    if (chosen) this.fill(chosen);
    return html`<div class="finding-head-row"><h1>Findings</h1> ${this.tabs()} ${this.severities()} <span class="spring"></span> ${this.tools()}</div>
      ${errorNote(this.error, () => this.refresh())}
      ${this.answer ? this.body(found, past, chosen) : this.error ? nothing : this.loading()}
      ${this.dialog()}`;
  }

  loading() {
    return html`<div class="finding-split" aria-busy="true"><section class="card finding-index"><p class="empty">Loading…</p></section></div>`;
  }

  tabs() {
    const counts = this.answer?.counts;
    return html`<nav class="choices" aria-label="State of findings">${STATES.map(
      ([
        name,
        words,
      ]) => html`<a class="button" href=${this.address({ state: name === "now" ? null : name, open: null, severity: null, range: null })}
        aria-current=${name === this.state ? "page" : nothing}>${words}${counts ? html` <span class="count">${counts[name]}</span>` : nothing}</a>`,
    )}</nav>`;
  }

  severities() {
    if (!this.answer || this.state === "past") return nothing;
    const { severity } = this.query;
    return html`<ul class="finding-counts" aria-label="Severities">${severityCounts(this.answer.groups).map(
      ([name, glyph, count]) =>
        html`<li><a href=${this.address({ severity: severity === name ? null : name, open: null })} aria-current=${severity === name ? "true" : nothing}>${severityGlyph(glyph)} ${name} <strong>${count}</strong></a></li>`,
    )}</ul>`;
  }

  tools() {
    const users = [...new Set((this.answer?.groups ?? []).flatMap((group) => group.users))].sort(byName);
    const { whose, node } = this.query;
    const listed = whose && !users.includes(whose) ? [...users, whose] : users;
    return html`<form class="finding-tools-row" role="search" aria-label="Filter findings" @submit=${(/** @type {SubmitEvent} */ event) => event.preventDefault()}>
      ${node ? html`<a class="button" href=${this.address({ node: null, open: null })} aria-label=${`Show all nodes, not only ${format.text(node)}`}>${format.text(node)} ✕</a>` : nothing}
      ${
        this.state === "past"
          ? this.select(
              "range",
              "Time",
              RANGES.map(([value, words], place) => [place ? value : "", words]),
            )
          : this.select(
              "by",
              "Group by",
              GROUPINGS.map(([name, words], place) => [place ? name : "", words]),
            )
      }
      ${this.select("whose", "User", [["", "all"], ...listed.map((name) => [name, format.text(name)])])}
      <span class="finding-keys muted" aria-hidden="true"><kbd>J</kbd> <kbd>K</kbd> move <kbd>A</kbd> acknowledge <kbd>S</kbd> silence</span>
    </form>`;
  }

  /**
   * @param {"by" | "whose" | "range"} word
   * @param {string} label
   * @param {string[][]} options
   */
  select(word, label, options) {
    const chosen = this.query[word] === "cause" ? "" : this.query[word];
    return html`<label class="field">${label} <select name=${word} @change=${(/** @type {Event} */ event) => go(this.address({ [word]: fieldValue(event) || null, open: null }))}>
      ${options.map(([value, words]) => html`<option value=${value} .selected=${value === chosen}>${words}</option>`)}</select></label>`;
  }

  /**
   * @param {Dashboard.FindingRow[]} found
   * @param {Dashboard.FindingRow[]} past
   * @param {Dashboard.FindingRow | undefined} chosen
   */
  body(found, past, chosen) {
    const now = this.app.fleet.headTime();
    const view = { chosen: chosen?.row ?? "", now, address: (/** @type {string} */ row) => this.address({ open: row }) };
    const isCut = this.answer?.truncated && this.state === "past";
    return html`<div class="finding-split ${this.query.open ? "is-open" : ""}">
      <section class="card finding-index" aria-label="List of findings">
        ${found.length ? (this.state === "past" ? pastSection(found, { ...view, heading: "Past" }) : findingSections(found, view)) : this.nothingFound()}
        ${isCut ? html`<p class="muted">Only the latest are shown.</p>` : nothing}
        ${(this.answer?.incomplete ?? []).map((text) => html`<p class="muted">Incomplete: ${format.text(text)}.</p>`)}
        ${past.length ? pastSection(past, { ...view, heading: html`Past <span class="muted">24 hours</span> <a class="muted" href=${this.address({ state: "past", open: null, severity: null })}>all ${this.answer?.counts.past ?? ""}</a>` }) : nothing}
      </section>
      ${chosen ? findingDetail(chosen, this.detailView(now)) : this.query.open ? this.gone() : nothing}
    </div>`;
  }

  gone() {
    return html`<article class="card finding-detail"><a class="button quiet finding-back" href=${this.address({ open: null })}>← All findings</a>
      <p class="empty">This finding is no longer in this list. <a href=${this.address({ state: "past", open: null })}>Past findings</a></p></article>`;
  }

  /**
   * @param {number} now
   * @returns {Dashboard.FindingDetailView}
   */
  detailView(now) {
    return {
      manual: this.manual,
      now,
      state: this.state,
      history: this.more.history,
      before: this.more.before,
      silences: this.silences,
      form: this.form,
      name: String(this.app.prefs.read("name", "")),
      backHref: this.address({ open: null }),
      rowHref: (row, state) =>
        this.address(state === "past" ? { state, open: row, range: "2592000", by: null, severity: null } : { open: row }),
      open: (kind) => this.open(kind),
      cancel: () => this.cancel(),
      acknowledge: (form) => this.acknowledge(form),
      silence: (form) => this.silence(form),
      endSilence: (id) => this.endSilence(id),
      copy: () => this.copy(),
    };
  }

  nothingFound() {
    const { whose, node, severity } = this.query;
    if (whose || node || severity) {
      return html`<p class="empty">No finding matches the filter. <a class="button" href=${this.address({ whose: null, node: null, severity: null, open: null })}>Show all</a></p>`;
    }
    /** @type {Partial<Record<Dashboard.FindingState, string>>} */
    const words = {
      past: "No findings ended in this time range.",
      acknowledged: "No current finding has been acknowledged.",
      silenced: "No current finding is silenced.",
    };
    return words[this.state] ? html`<p class="empty">${words[this.state]}</p>` : this.nothingWrong();
  }

  nothingWrong() {
    const { fleet } = this.app;
    const gpus = [...fleet.nodes.values()].flatMap((node) => node.gpus);
    const seen = gpus.filter((gpu) => gpuState(gpu) !== "lost" && gpuState(gpu) !== "unknown");
    if (!fleet.known) return html`<p class="empty">Loading…</p>`;
    if (!seen.length) return html`<p class="empty">No GPU can be diagnosed now: no node is sending data.</p>`;
    return html`<div class="empty nothing-wrong"><p class="big"><span aria-hidden="true">✓</span> No problems found.</p>
      <p>${seen.length === 1 ? "1 GPU was" : `${seen.length} GPUs were`} checked over the last half minute.</p></div>`;
  }

  dialog() {
    const entry = this.manual.findings[this.query.explain];
    return html`<dialog class="explained" aria-labelledby="explained-title" @cancel=${(/** @type {Event} */ event) => {
      event.preventDefault();
      this.closeExplained();
    }}>
      ${entry ? explanation(entry, this.query.explain) : nothing}
      <button type="button" class="button primary" @click=${() => this.closeExplained()}>Close</button></dialog>`;
  }

  showExplained() {
    const dialog = find(this.root, "dialog", HTMLDialogElement);
    const wanted = Boolean(this.query.explain && this.manual.findings[this.query.explain]);
    if (wanted && !dialog.open) {
      dialog.showModal();
      find(dialog, "h2").focus();
    } else if (!wanted && dialog.open) {
      dialog.close();
    }
  }

  /** Remove the explanation from the address first: the dialog is drawn from it, and would be opened again. */
  closeExplained() {
    this.query = { ...this.query, explain: "" };
    setQuery({ explain: null });
    this.draw();
  }
}

function isPhone() {
  return matchMedia("(max-width: 900px)").matches;
}

/** @param {Dashboard.Node | undefined} node */
function findingsKey(node) {
  return (node?.details?.findings ?? [])
    .map((finding) => `${findingKey(finding)} ${finding.severity}`)
    .sort()
    .join("\n");
}
