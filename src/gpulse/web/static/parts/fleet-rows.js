// A row for every node: its name, its host and a cell for every GPU. A row can be opened in place.

import { h, setAttribute, setHidden, Text } from "../core/dom.js";
import { severityWord } from "../core/fleet.js";
import { clock, dateTime, known, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { Cells } from "./fleet-cells.js";
import { ALMOST_FULL, modelOf } from "./fleet-summary.js";
import { glyphElement } from "./glyphs.js";
import { NodePanel } from "./node-panel.js";

/** @typedef {import("./fleet-cells.js").CellContext} CellContext */
/** @typedef {import("./fleet-summary.js").NodeSummary} NodeSummary */
/** @typedef {{ name: string, isOpen: boolean }} RowOptions */

const DAY_SECONDS = 86400;
const HOST = [
  ["cpu", "CPU"],
  ["memory", "RAM"],
  ["disk", "Disk"],
  ["network", "Net"],
];
const NETWORK_FULL_GIGABYTES = 50;

/** The row of a node. */
export class NodeRow {
  /**
   * @param {NodeSummary} summary
   * @param {CellContext} context
   * @param {"full" | "plain"} kind
   * @param {RowOptions} options
   */
  constructor(summary, context, kind, { name, isOpen }) {
    this.summary = summary;
    this.node = summary.node;
    this._context = context;
    this._kind = kind;
    this._isOpen = isOpen;
    this._sub = new Text(h("span", { class: "row-sub" }));
    this._mark = h("a", { class: "row-mark", href: href("findings", { node: this.node.name }), tabindex: "-1", hidden: true });
    this._marked = "";
    this._state = h("span", { class: "row-state", hidden: true });
    this._stateWords = new Text(h("span"));
    this._stateNote = h("span", { class: "row-advice" }, ", last known values");
    this._shownState = "";
    this.toggle = h("button", { type: "button", class: "row-toggle", tabindex: "-1", "aria-expanded": String(isOpen) });
    this.toggle.setAttribute("aria-label", `Details of ${text(this.node.name)}`);
    this._meters = kind === "full" || context.isPhone ? HOST.map(([key, title]) => new Meter(key, title)) : [];
    this._head = h(
      "div",
      { class: "row-head" },
      this.toggle,
      h("h2", {}, h("a", { href: href("node", this.node.name), tabindex: "-1", title: text(this.node.name) }, h("bdi", {}, text(name)))),
      this._mark,
      this._sub.element,
    );
    this._host = h("div", { class: "row-host" }, ...this._meters.map((meter) => meter.element));
    this.element = h("article", { class: "fleet-row", "data-node": this.node.name, "aria-label": text(this.node.name) }, this._head);
    /** @type {Cells | null} */
    this._cells = null;
    this._none = h("span", { class: "row-none", hidden: true });
    /** @type {Set<Dashboard.Gpu> | null} */
    this._shown = null;
    /** @type {NodePanel | null} */
    this._panel = null;
    /** @type {Dashboard.Gpu[] | null} */
    this._modelOf = null;
    this._model = "";
    this.element.dataset.state = this.node.state;
    this.element.style.setProperty("--lines", String(linesOf(this.node)));
  }

  get isOpen() {
    return this._isOpen;
  }

  /** Make the inside, once it is near the view. */
  build() {
    if (this._cells === null) {
      this._cells = new Cells(this.node, this._kind, this._context);
      this.element.append(this._host, this._state, this._cells.element, this._none);
      this._cells.show(this._shown);
      this.open(this._isOpen);
    }
  }

  /** The node's GPUs may be others than before. */
  rebuild() {
    this._cells?.rebuild();
    this._panel?.rebuild();
    this.element.style.setProperty("--lines", String(linesOf(this.node)));
  }

  /** Bring everything up to date. */
  update() {
    if (this._cells === null) {
      return;
    }
    const { summary, node } = this;
    const { host } = node;
    this._cells.update(summary.states);
    const total = host.memory_total_bytes;
    const free = host.memory_available_bytes;
    const ratios = [host.cpu_utilization_ratio, known(total) && known(free) && total > 0 ? 1 - free / total : null, summary.disk];
    this._meters.forEach((meter, at) => (at < 3 ? meter.share(ratios[at]) : meter.rate(summary.network)));
    this._setState();
    this._setMark();
    const power = summary.power === null ? "" : `${(summary.power / 1000).toFixed(1)} kW`;
    if (node.gpus !== this._modelOf) {
      this._modelOf = node.gpus;
      this._model = modelOf(node);
    }
    this._sub.set(
      this._shownState === "late" ? silentWords(node, this._context.fleet.headTime()) : [this._model, power].filter(Boolean).join(" · "),
    );
    this._panel?.update(this._context.fleet.headTime());
  }

  /**
   * Bring the times up to date.
   * @param {number} now
   */
  tick(now) {
    this._setState();
    this._panel?.tick(now);
  }

  /** Draw trends and colors again. */
  redraw() {
    this._cells?.redraw();
  }

  /**
   * Which GPUs the filter shows; all of them with null.
   * @param {Set<Dashboard.Gpu> | null} gpus
   */
  show(gpus) {
    this._shown = gpus;
    this._cells?.show(gpus);
    this._panel?.show(gpus);
  }

  /**
   * Open or close the node in place.
   * @param {boolean} isOpen
   */
  open(isOpen) {
    this._isOpen = isOpen;
    setAttribute(this.toggle, "aria-expanded", String(isOpen));
    this.element.classList.toggle("open", isOpen);
    if (isOpen && this._panel === null && this._cells !== null) {
      this._panel = new NodePanel(this.node);
      this._panel.show(this._shown);
      this._panel.update(this._context.fleet.headTime());
      this.element.append(this._panel.element);
    } else if (!isOpen) {
      this._panel?.element.remove();
      this._panel = null;
    }
  }

  _setMark() {
    const { severity, findings } = this.summary;
    const isLate = this._shownState === "late";
    const isShown = severity && severity !== "info" && this._shownState !== "lost";
    const key = isLate ? "late" : isShown ? `${severity} ${findings}` : "";
    if (key !== this._marked) {
      this._marked = key;
      setHidden(this._mark, key === "");
      const worst = severity ? [glyphElement("severity", severity), String(findings)] : [];
      this._mark.replaceChildren(...(isLate ? [glyphElement("state", "late"), "late"] : worst));
      this._mark.setAttribute(
        "aria-label",
        `${findings} ${findings === 1 ? "finding" : "findings"} on ${text(this.node.name)}, worst ${severityWord(severity ?? "")}`,
      );
    }
  }

  _setState() {
    const { node } = this;
    const state = node.state === "healthy" && !node.connected ? "late" : node.state;
    if (state !== this._shownState) {
      this._shownState = state;
      this.element.dataset.state = state;
      setHidden(this._state, state !== "lost");
      if (state !== "healthy") {
        const glyph = state === "lost" ? glyphElement("severity", "critical") : glyphElement("state", state);
        this._state.replaceChildren(glyph, h("span", {}, this._stateWords.element, this._stateNote));
      }
    }
    if (state !== "healthy") {
      this._stateWords.set(silentWords(node, this._context.fleet.headTime()));
      setHidden(this._stateNote, node.state === "healthy" || node.time === null);
    }
    setHidden(this._none, node.gpus.length > 0);
    if (node.gpus.length === 0) {
      this._none.textContent = node.time === null ? "has not reported since the head started" : "no GPUs";
    }
  }
}

/** The row of a node that was expected and has never reported. */
export class MissingRow {
  /**
   * @param {string} name
   * @param {string} shown
   */
  constructor(name, shown) {
    this.name = name;
    this.element = h(
      "article",
      { class: "fleet-row missing", "data-node": name, "data-state": "missing", "aria-label": text(name) },
      h("div", { class: "row-head" }, h("span", { class: "row-toggle" }), h("h2", {}, h("bdi", { title: text(name) }, text(shown)))),
      h(
        "p",
        { class: "row-state" },
        glyphElement("state", "missing"),
        h(
          "span",
          {},
          h("strong", {}, "missing"),
          h(
            "span",
            { class: "row-advice" },
            ": the node is in the node list but has never reported. Start its agent with ",
            h("code", {}, agentCommand()),
            " on that node, or remove it from the list.",
          ),
        ),
      ),
    );
  }
}

/** The titles above the columns of rows. */
export class RowTitles {
  constructor() {
    this.element = h("div", { class: "all-titles", "aria-hidden": "true" });
    this._key = "";
  }

  /**
   * @param {number} gpus
   * @param {number} columns
   */
  set(gpus, columns) {
    const key = `${gpus} ${columns}`;
    if (key !== this._key) {
      this._key = key;
      this.element.replaceChildren(...Array.from({ length: columns }, () => titles(gpus)));
    }
  }
}

/** @param {number} gpus */
function titles(gpus) {
  const notes = [" · util %, 15 min", " · line: memory"];
  return h(
    "div",
    { class: "row-titles" },
    h("span", { class: "row-head" }, "Node"),
    h("span", { class: "row-host" }, ...["CPU %", "RAM %", "Disk %", "Net GB/s"].map((title) => h("span", {}, title))),
    h(
      "div",
      { class: "cells" },
      ...Array.from({ length: gpus }, (_, at) => h("span", {}, `GPU ${at}`, h("span", { class: "title-note" }, notes[at] ?? ""))),
    ),
  );
}

/** A number with a line below it. */
class Meter {
  /**
   * @param {string} key
   * @param {string} title
   */
  constructor(key, title) {
    this._text = new Text(h("span", { class: "host-meter-text" }));
    this._fill = h("span");
    this._shown = -1;
    this.element = h(
      "span",
      { class: "host-meter", "data-meter": key },
      h("span", { class: "host-meter-title" }, `${title} `),
      this._text.element,
      h("span", { class: "track", "aria-hidden": "true" }, this._fill),
    );
  }

  /** @param {Dashboard.MaybeNumber} ratio */
  share(ratio) {
    this._text.set(known(ratio) ? String(Math.round(ratio * 100)) : UNKNOWN);
    this._fillTo(ratio, known(ratio) && ratio > ALMOST_FULL && this.element.dataset.meter === "disk");
  }

  /** @param {number | null} gigabytes */
  rate(gigabytes) {
    this._text.set(known(gigabytes) ? (gigabytes < 9.95 ? gigabytes.toFixed(1) : String(Math.round(gigabytes))) : UNKNOWN);
    this._fillTo(known(gigabytes) ? gigabytes / NETWORK_FULL_GIGABYTES : null, false);
  }

  /**
   * @param {Dashboard.MaybeNumber} ratio
   * @param {boolean} isHigh
   */
  _fillTo(ratio, isHigh) {
    const shown = known(ratio) ? Math.round(Math.min(1, ratio) * 50) : 0;
    if (shown !== this._shown) {
      this._shown = shown;
      this._fill.style.transform = `scaleX(${shown / 50})`;
      this.element.toggleAttribute("data-high", isHigh);
    }
  }
}

/**
 * `lost since 14:20`.
 * @param {Dashboard.Node} node
 * @param {number} now
 */
function silentWords(node, now) {
  if (node.state === "healthy") {
    return "not connected";
  }
  const since = node.seen ?? node.time;
  if (!known(since)) {
    return node.state;
  }
  const when = now - since < DAY_SECONDS ? clock(since).slice(0, 5) : dateTime(since).slice(0, 16);
  return `${node.state} since ${when}`;
}

/** What starts an agent for this head. */
export function agentCommand() {
  return `gpulse agent ${location.hostname}:8090`;
}

/** @param {Dashboard.Node} node */
function linesOf(node) {
  return Math.max(1, Math.ceil(node.gpus.filter((gpu) => gpu.parent === null).length / 8));
}
