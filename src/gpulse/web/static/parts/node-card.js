// The card of one node: its host and GPUs. Built when it becomes visible, then updated in place.

import { h, setAttribute, setHidden, Text } from "../core/dom.js";
import { severityWord, silence } from "../core/fleet.js";
import { text } from "../core/format.js";
import { href } from "../core/router.js";
import { agentCommand } from "./fleet-rows.js";
import { glyphElement } from "./glyphs.js";
import { NodePanel } from "./node-panel.js";

/** @typedef {import("./fleet-cells.js").CellContext} CellContext */
/** @typedef {import("./fleet-summary.js").NodeSummary} NodeSummary */

/** The card of a node. */
export class NodeCard {
  /**
   * @param {NodeSummary} summary
   * @param {CellContext} context
   */
  constructor(summary, context) {
    this.summary = summary;
    this.node = summary.node;
    this.isOpen = false;
    this._fleet = context.fleet;
    /** @type {Set<Dashboard.Gpu> | null} */
    this._shown = null;
    /** @type {NodePanel | null} */
    this._panel = null;
    this._since = new Text(h("span", { class: "badge", hidden: true }));
    this._findings = h("a", { class: "row-mark", href: href("findings", { node: this.node.name }), hidden: true });
    this._marked = "";
    this._model = new Text(h("bdi", { class: "muted card-model" }));
    this.element = h(
      "article",
      { class: "card node-card", "data-node": this.node.name, tabindex: "-1" },
      h(
        "div",
        { class: "card-head" },
        h("h2", {}, h("a", { href: href("node", this.node.name) }, h("bdi", {}, text(this.node.name)))),
        this._findings,
        this._model.element,
        this._since.element,
      ),
    );
    this._setRoom();
  }

  /** Make the inside, and fill it. */
  build() {
    if (this._panel === null) {
      this._panel = new NodePanel(this.node);
      this._panel.show(this._shown);
      this.element.append(this._panel.element);
      this.element.style.minHeight = "";
      this.update();
    }
  }

  /** The node's GPUs may be others than before. */
  rebuild() {
    this._panel?.rebuild();
    if (!this._panel) {
      this._setRoom();
    }
  }

  /** Bring everything up to date. */
  update() {
    const now = this._fleet.headTime();
    const { power } = this.summary;
    this._model.set([model(this.node), power === null ? "" : `${(power / 1000).toFixed(1)} kW`].filter(Boolean).join(" · "));
    this._setFindings();
    this._panel?.update(now);
    this.tick(now);
  }

  /**
   * Bring the times up to date.
   * @param {number} now
   */
  tick(now) {
    const { node } = this;
    setAttribute(this.element, "data-state", node.state);
    this._since.set(silence(node, now));
    setHidden(this._since.element, node.state === "healthy" && node.connected);
    this._since.element.classList.toggle("warn", node.state === "late" || node.state === "healthy");
    this._since.element.classList.toggle("bad", node.state === "lost");
    this._panel?.tick(now);
  }

  redraw() {}

  open() {}

  /**
   * Which GPUs are shown; all of them with null.
   * @param {Set<Dashboard.Gpu> | null} gpus
   */
  show(gpus) {
    this._shown = gpus;
    this._panel?.show(gpus);
    if (!this._panel) {
      this._setRoom();
    }
  }

  /** Until it is built, the room that it will take. */
  _setRoom() {
    const gpus = this._shown?.size ?? this.node.gpus.length;
    this.element.style.minHeight = `${110 + Math.max(1, gpus) * 22}px`;
  }

  _setFindings() {
    const { severity, findings } = this.summary;
    const key = severity ? `${severity} ${findings}` : "";
    if (key !== this._marked) {
      this._marked = key;
      setHidden(this._findings, key === "");
      const words = findings === 1 ? "1 finding" : `${findings} findings`;
      this._findings.replaceChildren(...(severity ? [glyphElement("severity", severity), words] : []));
      this._findings.title = severity ? `worst: ${severityWord(severity)}` : "";
    }
  }
}

/** The card of a node that was expected and has never reported. */
export class MissingCard {
  /** @param {string} name */
  constructor(name) {
    this.name = name;
    this.element = h(
      "article",
      { class: "card node-card missing-card", "data-node": name, "data-state": "missing", tabindex: "-1" },
      h(
        "div",
        { class: "card-head" },
        h("h2", {}, h("bdi", {}, text(name))),
        h("span", { class: "row-state" }, glyphElement("state", "missing"), h("strong", {}, "missing")),
        h(
          "span",
          { class: "muted" },
          "This node is in the node list but has never reported. Start its agent with ",
          h("code", {}, agentCommand()),
          " on that node.",
        ),
      ),
    );
  }
}

/**
 * `8 × NVIDIA H200`.
 * @param {Dashboard.Node} node
 */
function model(node) {
  const whole = node.gpus.filter((gpu) => gpu.parent === null);
  const names = [...new Set(whole.map((gpu) => text(gpu.name)))];
  return names.length ? `${whole.length} × ${names.join(", ")}` : "";
}
