// Everything that is wrong across the cluster now, or was at some time of a range, worst first.

import { html, nothing, render } from "../vendor/lit-html.js";
import { get } from "../core/api.js";
import { byName, gpuState } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, setQuery } from "../core/router.js";
import { asText, findingCard, findingKey, grouped, rank, SEVERITIES } from "../parts/findings.js";
import { explanation } from "../parts/explanation.js";
import { emptyManual, familyName, findingTitle, manual } from "../parts/manual.js";
import { copyText, errorNote, later, matches } from "../parts/tables.js";

const EVERY_MS = 30_000;
const SOON_MS = 2_000;
const RANGES = [["3600", "last hour"], ["86400", "last 24 hours"], ["604800", "last 7 days"], ["2592000", "last 30 days"]];

/** What the window is called here. */
export const title = () => "Findings";

/** Show the page. */
export function mount(root, route, app) {
  const page = new FindingsPage(root, app);
  page.rerouted(route);
  return { wish: { details: true, metrics: ["gpu_utilization_ratio", "memory_used_bytes"], host_metrics: [] }, leave: () => page.leave(), rerouted: (next) => page.rerouted(next) };
}

class FindingsPage {
  constructor(root, app) {
    this.root = root;
    this.app = app;
    this.book = emptyManual;
    this.findings = null;
    this.error = null;
    this.filter = { range: "" };
    this.opened = new Map();
    this.live = new Map();
    this.stop = new AbortController();
    this.soon = later(() => this.refresh(), SOON_MS);
    this.timer = setInterval(() => this.refresh(), EVERY_MS);
    const options = { signal: this.stop.signal };
    app.fleet.addEventListener("details", (event) => this.told(event.detail), options);
    app.fleet.addEventListener("structure", () => this.soon(), options); // nodes that do not report are findings, too
    this.refresh();
    manual().then((book) => {
      this.book = book;
      this.draw();
    });
  }

  leave() {
    this.stop.abort();
    this.soon.cancel();
    clearInterval(this.timer);
    render(nothing, this.root);
  }

  rerouted(route) {
    const { severity = "", family = "", node = "", text = "", explain = "", range = "" } = route.query;
    const isOther = range !== (this.filter.range ?? "");
    this.filter = { severity, family, node, text, range };
    this.explained = explain;
    if (isOther) this.refresh();
    this.draw();
  }

  /** Nodes told anew how they are: ask when their findings are others than before. */
  told(names) {
    let isOther = false;
    for (const name of names) {
      const now = findingsKey(this.app.fleet.nodes.get(name));
      isOther = isOther || this.live.get(name) !== now;
      this.live.set(name, now);
    }
    if (isOther) {
      this.soon();
    }
  }

  async refresh() {
    if (document.hidden) {
      return;
    }
    try {
      const { range } = this.filter;
      const answer = await (range ? this.past(Number(range)) : get("/api/v1/findings", {}, { signal: this.stop.signal }));
      if (range !== this.filter.range) return;
      this.findings = answer.findings;
      this.from = answer.from;
      this.isCut = answer.truncated;
      this.error = null;
    } catch (error) {
      if (error.name === "AbortError") {
        return;
      }
      this.error = error;
    }
    this.draw();
  }

  /** What was found in the last so many seconds, each with its own start and end. */
  async past(seconds) {
    const from = this.app.fleet.headTime() - (seconds || 86_400);
    const { spans, truncated } = await get("/api/v1/findings/history", { from: from.toFixed(3) }, { signal: this.stop.signal });
    return { from, truncated, findings: spans.map((span) => ({ ...span, start: span.from, end: span.to, isPast: true })) };
  }

  choose(word, value) {
    this.filter = { ...this.filter, [word]: value };
    setQuery({ [word]: value || null });
    if (word === "range") this.refresh();
    this.draw();
  }

  draw() {
    if (this.stop.signal.aborted) {
      return;
    }
    render(this.view(), this.root);
    this.showExplained();
  }

  view() {
    return html`<h1>Findings</h1>
      ${this.findings ? this.toolbar() : nothing}
      ${errorNote(this.error, () => this.refresh())}
      ${this.findings ? this.results() : this.error ? nothing : html`<p class="empty">Asking the head…</p>`}
      ${this.dialog()}`;
  }

  toolbar() {
    const families = [...new Set(this.findings.map((finding) => finding.family))].sort();
    const nodes = [...new Set(this.findings.map((finding) => finding.node))].sort(byName);
    return html`<form class="toolbar" role="search" aria-label="Filter findings" @submit=${(event) => event.preventDefault()}>
      ${this.select("range", "When", "now", RANGES)}
      ${this.select("severity", "Severity", "all", SEVERITIES.slice(0, 4).map((name) => [name, name === "critical" ? name : `${name} or worse`]))}
      ${this.select("family", "About", "everything", families.map((name) => [name, familyName(name)]))}
      ${this.select("node", "Node", "all", nodes.map((name) => [name, format.text(name)]))}
      <label class="field grow">Search <input type="search" name="text" autocomplete="off" placeholder="words, user, process" .value=${this.filter.text}
        @input=${(event) => this.choose("text", event.target.value)}></label>
    </form>`;
  }

  select(word, label, all, options) {
    const chosen = this.filter[word];
    const known = options.some(([value]) => value === chosen) ? options : chosen ? [...options, [chosen, chosen]] : options;
    return html`<label class="field">${label} <select name=${word} @change=${(event) => this.choose(word, event.target.value)}>
      <option value="" .selected=${!chosen}>${all}</option>
      ${known.map(([value, words]) => html`<option value=${value} .selected=${value === chosen}>${words}</option>`)}</select></label>`;
  }

  results() {
    const shown = this.findings.filter((finding) => this.isShown(finding));
    const groups = grouped(shown);
    if (!this.findings.length) {
      return this.nothingWrong();
    }
    this.openFirst(groups);
    return html`<p class="counts" role="status">${this.counts(shown, groups)}${this.isCut ? "; there were more, these are the latest" : ""}</p>
      ${groups.length ? html`<div class="finding-list">${groups.map((group) => findingCard(group, this.cardView()))}</div>` : html`<p class="empty">No finding fits this filter. <button type="button" class="button" @click=${() => this.clear()}>Show all</button></p>`}`;
  }

  counts(shown, groups) {
    const parts = SEVERITIES.map((severity) => [severity, shown.filter((finding) => finding.severity === severity).length]).filter(([, n]) => n);
    const all = shown.length === this.findings.length ? "" : ` of ${this.findings.length}`;
    const kinds = groups.length === 1 ? "1 kind" : `${groups.length} kinds`;
    return `${shown.length}${all} ${this.findings.length === 1 ? "finding" : "findings"}, ${kinds}${parts.length ? ": " : ""}${parts.map(([severity, n]) => `${n} ${severity}`).join(", ")}`;
  }

  nothingWrong() {
    if (this.filter.range) {
      return html`<p class="empty">No findings in this time range.</p>`;
    }
    const gpus = [...this.app.fleet.nodes.values()].flatMap((node) => node.gpus);
    const seen = gpus.filter((gpu) => gpuState(gpu) !== "lost" && gpuState(gpu) !== "unknown");
    const away = gpus.length - seen.length + this.app.fleet.missing.length;
    if (!this.app.fleet.known) {
      return html`<p class="empty">Asking the head…</p>`;
    }
    if (!seen.length) {
      return html`<p class="empty">No GPU can be looked at now: no node sends readings.</p>`;
    }
    return html`<div class="empty nothing-wrong"><p class="big"><span aria-hidden="true">✓</span> Nothing is wrong.</p>
      <p>${seen.length === 1 ? "1 GPU was" : `${seen.length} GPUs were`} looked at over the last half minute${away ? `; ${gpus.length - seen.length} GPUs and ${this.app.fleet.missing.length} nodes could not be seen` : ""}.</p></div>`;
  }

  isShown(finding) {
    const { severity, family, node, text } = this.filter;
    if ((severity && rank(finding.severity) > rank(severity)) || (family && finding.family !== family) || (node && finding.node !== node)) {
      return false;
    }
    if (!text.trim()) {
      return true;
    }
    const processes = this.processesOf(finding).flatMap((process) => [process.user, process.name, process.job, String(process.pid)]);
    return matches(text, [finding.id, findingTitle(this.book, finding.id), finding.summary, finding.node, finding.label && `GPU ${finding.label}`, finding.family, ...processes]);
  }

  processesOf(finding) {
    const node = this.app.fleet.nodes.get(finding.node);
    const gpus = (node?.gpus ?? []).filter((gpu) => gpu.label === finding.label);
    const pids = new Set(finding.pids ?? []);
    const all = gpus.flatMap((gpu) => gpu.processes ?? []);
    return pids.size ? all.filter((process) => pids.has(process.pid)) : all;
  }

  /** The worst finding is told in full, until the reader wants it otherwise. */
  openFirst([worst]) {
    if (worst && !this.opened.size) {
      this.opened.set(`${worst.key} evidence`, true).set(`${worst.key} advice`, true);
    }
  }

  cardView() {
    return {
      book: this.book,
      from: this.from,
      now: this.app.fleet.headTime(),
      processesOf: (finding) => this.processesOf(finding),
      isOpen: (name) => this.opened.get(name) ?? false,
      toggle: (name, open) => this.toggle(name, open),
      copy: (group) => this.copy(group),
    };
  }

  toggle(name, open) {
    if ((this.opened.get(name) ?? false) !== open) {
      this.opened.set(name, open);
      this.draw();
    }
  }

  async copy(group) {
    const copied = await copyText(asText(group, this.book));
    this.app.toast(copied ? "Copied as text" : "The browser does not allow copying", copied ? "good" : "bad");
  }

  clear() {
    this.filter = { ...this.filter, severity: "", family: "", node: "", text: "" };
    setQuery({ severity: null, family: null, node: null, text: null });
    this.draw();
  }

  dialog() {
    const entry = this.book.findings[this.explained];
    return html`<dialog class="explained" aria-labelledby="explained-title" @close=${() => this.closed()}>
      ${entry ? explanation(entry, this.explained) : nothing}
      <form method="dialog"><button class="button primary">Close</button></form></dialog>`;
  }

  showExplained() {
    const dialog = this.root.querySelector("dialog");
    const wanted = Boolean(this.explained && this.book.findings[this.explained]);
    if (wanted && !dialog.open) {
      dialog.showModal();
      dialog.querySelector("h2").focus();
    } else if (!wanted && dialog.open) {
      dialog.close();
    }
  }

  closed() {
    if (this.explained && current().page === "findings") {
      this.explained = "";
      setQuery({ explain: null });
    }
  }
}

function findingsKey(node) {
  return (node?.details?.findings ?? []).map((finding) => `${findingKey(finding)} ${finding.severity}`).sort().join("\n");
}
