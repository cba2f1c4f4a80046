// Strips: a line of small colored cells for every node, in columns by rack. Every node keeps its place.

import { h, setAttribute, setHidden, Text } from "../core/dom.js";
import { byName, severityWord } from "../core/fleet.js";
import { percent, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { Cells } from "./fleet-cells.js";
import { Sparkline } from "./fleet-trends.js";
import { glyphElement } from "./glyphs.js";

/** @typedef {import("./fleet-cells.js").CellContext} CellContext */
/** @typedef {import("./fleet-summary.js").NodeSummary} NodeSummary */
/** @typedef {import("./fleet-summary.js").FleetSummary} FleetSummary */

const LABEL = "rack";
const MIN_COLUMN_NODES = 12;

/** The strip of a node. */
export class Strip {
  /**
   * @param {NodeSummary} summary
   * @param {CellContext} context
   * @param {string} name
   */
  constructor(summary, context, name) {
    this.summary = summary;
    this.node = summary.node;
    this._context = context;
    this._mark = h("a", { class: "row-mark", href: href("findings", { node: this.node.name }), tabindex: "-1", hidden: true });
    this._marked = "";
    /** @type {Cells | null} */
    this._cells = null;
    /** @type {Set<Dashboard.Gpu> | null} */
    this._shown = null;
    this.isOpen = false;
    this.element = h(
      "div",
      { class: "strip-row", "data-node": this.node.name, "data-state": this.node.state },
      h(
        "a",
        { class: "strip-name", href: href("node", this.node.name), tabindex: "-1", title: text(this.node.name) },
        h("bdi", {}, text(name)),
      ),
    );
  }

  build() {
    if (this._cells === null) {
      this._cells = new Cells(this.node, "strip", this._context);
      this.element.append(this._cells.element, this._mark);
      this._cells.show(this._shown);
    }
  }

  rebuild() {
    this._cells?.rebuild();
  }

  update() {
    setAttribute(this.element, "data-state", this.node.state);
    this._cells?.update(this.summary.states);
    const { severity, findings } = this.summary;
    const key = severity && severity !== "info" ? `${severity} ${findings}` : "";
    if (key !== this._marked) {
      this._marked = key;
      setHidden(this._mark, key === "");
      this._mark.replaceChildren(...(severity ? [glyphElement("severity", severity), findings > 1 ? String(findings) : ""] : []));
      this._mark.setAttribute(
        "aria-label",
        `${findings} ${findings === 1 ? "finding" : "findings"} on ${text(this.node.name)}, worst ${severityWord(severity ?? "")}`,
      );
    }
  }

  tick() {}

  redraw() {
    this._cells?.redraw();
  }

  /** @param {Set<Dashboard.Gpu> | null} gpus */
  show(gpus) {
    this._shown = gpus;
    this._cells?.show(gpus);
  }

  /** @param {boolean} isOpen */
  open(isOpen) {
    this.isOpen = isOpen;
    this.element.classList.toggle("open", isOpen);
  }
}

/** The strip of a node that has never reported. */
export class MissingStrip {
  /**
   * @param {string} name
   * @param {string} shown
   */
  constructor(name, shown) {
    this.name = name;
    this.element = h(
      "div",
      { class: "strip-row missing", "data-node": name, "data-state": "missing", "aria-label": text(name) },
      h("span", { class: "strip-name", title: text(name) }, h("bdi", {}, text(shown))),
      h("span", { class: "strip-missing" }, glyphElement("state", "missing"), "missing"),
    );
  }
}

/** The columns: racks where nodes are labelled with theirs, else as many as there is room for. */
export class StripColumns {
  /**
   * @param {HTMLElement} element
   * @param {FleetSummary} summary
   * @param {CellContext} context
   */
  constructor(element, summary, context) {
    this._element = element;
    this._summary = summary;
    this._context = context;
    /** @type {Column[]} */
    this._columns = [];
    this.isByRack = false;
  }

  /**
   * Put the strips of these nodes into columns.
   * @param {string[]} names
   * @param {(name: string) => HTMLElement[]} elementOf
   * @param {number} room
   */
  arrange(names, elementOf, room) {
    const racks = this._racks(names);
    this.isByRack = racks !== null;
    const groups = racks ?? even(names, room);
    this._columns = [...groups].map(([title, members]) => new Column(title, members));
    this._columns.forEach((column, at) => {
      column.list.append(...[...groups.values()][at].flatMap(elementOf));
    });
    this._element.replaceChildren(...this._columns.map((column) => column.element));
    this.update();
  }

  /** Bring the heads of the columns up to date. */
  update() {
    for (const column of this._columns) {
      column.update(this._summary);
    }
  }

  /** Draw the trends again. */
  redraw() {
    for (const column of this._columns) {
      column.draw(this._summary, this._context.trends);
    }
  }

  /**
   * Nodes by rack; null when none has that label.
   * @param {string[]} names
   */
  _racks(names) {
    /** @type {Map<string, string[]>} */
    const racks = new Map();
    for (const name of names) {
      const rack = this._summary.nodes.get(name)?.node.labels[LABEL] ?? "";
      racks.set(rack, [...(racks.get(rack) ?? []), name]);
    }
    if ([...racks.keys()].filter(Boolean).length < 2) {
      return null;
    }
    return new Map(
      [...racks].sort(([a], [b]) => (a === "" ? 1 : b === "" ? -1 : byName(a, b))).map(([rack, members]) => [rack || "no rack", members]),
    );
  }
}

/** One column, with its load, power and free GPUs. */
class Column {
  /**
   * @param {string} title
   * @param {string[]} names
   */
  constructor(title, names) {
    this._names = names;
    this._load = new Text(h("span"));
    this._power = new Text(h("span"));
    this._free = new Text(h("span"));
    this._spark = new Sparkline();
    this.list = h("div", { class: "strip-list" });
    this.element = h(
      "section",
      { class: "strip-column", "aria-label": text(title) },
      h(
        "header",
        { class: "strip-head" },
        h("h2", {}, h("bdi", {}, text(title))),
        this._load.element,
        this._power.element,
        h("span", { class: "strip-free" }, glyphElement("state", "free"), this._free.element),
        this._spark.element,
      ),
      this.list,
    );
    this._isDrawn = false;
  }

  /** @param {FleetSummary} summary */
  update(summary) {
    let load = 0;
    let loaded = 0;
    let power = 0;
    let free = 0;
    for (const name of this._names) {
      const node = summary.nodes.get(name);
      load += node?.load ?? 0;
      loaded += node?.loaded ?? 0;
      power += node?.power ?? 0;
      free += node?.counts.free ?? 0;
    }
    this._load.set(loaded ? percent(load / loaded) : UNKNOWN);
    this._power.set(`${(power / 1000).toFixed(power < 9950 ? 1 : 0)} kW`);
    this._free.set(String(free));
  }

  /**
   * @param {FleetSummary} summary
   * @param {CellContext["trends"]} trends
   */
  draw(summary, trends) {
    /** @type {number[]} */
    const sums = [];
    /** @type {number[]} */
    const counts = [];
    for (const name of this._names) {
      for (const gpu of summary.nodes.get(name)?.node.gpus ?? []) {
        if (gpu.parent === null) {
          trends.of(gpu).forEach((value, at) => {
            sums[at] = (sums[at] ?? 0) + (value ?? 0);
            counts[at] = (counts[at] ?? 0) + (value === null ? 0 : 1);
          });
        }
      }
    }
    this._spark.set(
      sums.map((sum, at) => (counts[at] ? sum / counts[at] : null)),
      1,
    );
  }
}

/**
 * Columns of about the same length, named by their first and last node.
 * @param {string[]} names
 * @param {number} room
 */
function even(names, room) {
  const count = Math.max(1, Math.min(room, Math.ceil(names.length / MIN_COLUMN_NODES)));
  const length = Math.max(1, Math.ceil(names.length / count));
  /** @type {Map<string, string[]>} */
  const columns = new Map();
  for (let at = 0; at < names.length; at += length) {
    const members = names.slice(at, at + length);
    columns.set(members.length > 1 ? `${members[0]} to ${members.at(-1)}` : members[0], members);
  }
  return columns;
}
