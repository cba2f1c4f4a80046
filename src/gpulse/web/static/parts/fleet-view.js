// The nodes of the fleet as cards, rows or strips. Only what is in view is updated; the rest when it comes into view.

import { h, setChildren, setHidden } from "../core/dom.js";
import { Matcher, order } from "./filter.js";
import { MAX_FULL_ROWS } from "./fleet-controls.js";
import { FleetKeys } from "./fleet-keys.js";
import { CELL_METRICS, Heat } from "./fleet-metrics.js";
import { MissingRow, NodeRow, RowTitles } from "./fleet-rows.js";
import { MissingStrip, Strip, StripColumns } from "./fleet-strips.js";
import { shortNames } from "./fleet-summary.js";
import { FleetTip } from "./fleet-tip.js";
import { MissingCard, NodeCard } from "./node-card.js";
import { NodePanel } from "./node-panel.js";

/** @typedef {import("./fleet-controls.js").FleetControls} FleetControls */
/** @typedef {import("./fleet-summary.js").FleetSummary} FleetSummary */
/** @typedef {import("./fleet-trends.js").Trends} Trends */
/** @typedef {NodeCard | NodeRow | Strip} Shown */
/** @typedef {MissingCard | MissingRow | MissingStrip} Absent */

const NEAR = "600px 0px";
const IN_VIEW = "60px 0px";
const CELL_WIDTH = { full: 96, plain: 44, strip: 24 };
const HOST_WIDTH = 208;
const STRIP_MARK_WIDTH = 30;
const LETTER_WIDTH = 8.4;
const MIN_NAME_WIDTH = { rows: 108, lines: 48, strips: 48, cards: 88 };
const STRIP_LETTER_WIDTH = 6.7;
const MAX_NAME_LETTERS = 24;

/** The nodes. */
export class FleetView {
  /**
   * @param {Dashboard.App} app
   * @param {FleetSummary} summary
   * @param {Trends} trends
   * @param {FleetControls} controls
   */
  constructor(app, summary, trends, controls) {
    this._app = app;
    this._summary = summary;
    this._controls = controls;
    /** @type {Map<string, Shown | Absent>} */
    this._rows = new Map();
    /** @type {Set<string>} */
    this._inView = new Set();
    /** @type {Set<string>} */
    this._opened = new Set();
    this._kind = "";
    this._matcher = new Matcher(controls.filter);
    const phone = matchMedia("(max-width: 760px)");
    this._context = { heat: new Heat(), trends, metric: CELL_METRICS[controls.metric], fleet: app.fleet, isPhone: phone.matches, most: 8 };
    this._titles = new RowTitles();
    this._list = h("div", { class: "fleet-list", id: "nodes" });
    this._sheet = h("section", { class: "fleet-sheet", "aria-label": "Opened node", hidden: true });
    /** @type {NodePanel | null} */
    this._sheetPanel = null;
    this.element = h("div", { class: "fleet" }, this._titles.element, this._list, this._sheet);
    this._columns = new StripColumns(this._list, summary, this._context);
    this._tip = new FleetTip(this.element, trends, (cell) => this.gpuAt(cell));
    this.element.append(this._tip.element);
    this._stop = new AbortController();
    const { signal } = this._stop;
    this._keys = new FleetKeys(this._list, (name) => this.toggle(name), signal);
    this._builder = new IntersectionObserver((entries) => this._cameNear(entries), { rootMargin: NEAR });
    this._viewer = new IntersectionObserver((entries) => this._cameIntoView(entries), { rootMargin: IN_VIEW });
    this._width = 0;
    this._sizes = new ResizeObserver(() => this._resized());
    this._sizes.observe(this.element);
    addEventListener("gpulse-theme", () => this._recolor(), { signal });
    trends.addEventListener("step", () => this._step(), { signal });
    phone.addEventListener("change", () => this._changeForm(phone.matches), { signal });
    this._list.addEventListener("click", (event) => this._clicked(event));
  }

  leave() {
    this._stop.abort();
    this._builder.disconnect();
    this._viewer.disconnect();
    this._sizes.disconnect();
    this._tip.leave();
    this._rows.clear();
  }

  /** True when something is shown. */
  get isAny() {
    return [...this._rows.values()].some((row) => !row.element.hidden);
  }

  /** Nodes or GPUs came or went, or something else was chosen: make rows, let go of rows, put them in order. */
  structure() {
    const { fleet } = this._app;
    this._context.metric = CELL_METRICS[this._controls.metric];
    this._setKind();
    for (const [name, row] of this._rows) {
      if ("node" in row ? row.node !== fleet.nodes.get(name) : !fleet.missing.includes(name)) {
        this._forget(name, row);
      }
    }
    const names = shortNames([...fleet.nodes.keys(), ...fleet.missing]);
    for (const node of fleet.nodes.values()) {
      const row = this._rows.get(node.name);
      if (row && "node" in row) {
        row.rebuild();
      } else {
        const summary = this._summary.nodes.get(node.name);
        if (summary) {
          this._add(node.name, this._make(summary, fitting(names.get(node.name) ?? node.name)));
        }
      }
    }
    for (const name of fleet.missing) {
      if (!this._rows.has(name)) {
        this._add(name, this._makeMissing(name, fitting(names.get(name) ?? name)));
      }
    }
    this._setWidths([...names.values()]);
    this._arrange();
    this._keys.reset();
  }

  /** Put the rows in order, and leave out what the filter does not show. */
  _arrange() {
    const isStrips = this._kind === "strips";
    const names = order(this._app.fleet, isStrips ? { ...this._controls.filter, sort: "name" } : this._controls.filter);
    const elementOf = (/** @type {string} */ name) => this._rows.get(name)?.element ?? [];
    if (isStrips) {
      this._columns.arrange(names, (name) => [elementOf(name)].flat(), this._room());
    } else {
      setChildren(this._list, names.flatMap(elementOf));
    }
    this._matcher = new Matcher(this._controls.filter);
    for (const name of names) {
      this._match(name);
    }
  }

  /** Sort again, without making anything anew. */
  sort() {
    if (this._kind !== "strips") {
      this._arrange();
    }
  }

  /**
   * What changed since the last frame.
   * @param {Set<string>} dirty
   * @param {boolean} isTick
   */
  draw(dirty, isTick) {
    if (this._matcher.isActive) {
      for (const name of dirty) {
        this._match(name);
      }
    }
    const now = this._app.fleet.headTime();
    for (const name of this._inView) {
      const row = this._rows.get(name);
      if (row && "node" in row) {
        if (dirty.has(name)) {
          row.update();
        } else if (isTick) {
          row.tick(now);
        }
      }
    }
    if (this._kind === "strips" && dirty.size) {
      this._columns.update();
    }
    this._sheetPanel?.update(now);
    this._tip.update();
  }

  /**
   * The GPU of a cell.
   * @param {HTMLElement} cell
   * @returns {Dashboard.Gpu | null}
   */
  gpuAt(cell) {
    const name = cell.closest("[data-node]")?.getAttribute("data-node") ?? "";
    return this._app.fleet.nodes.get(name)?.gpus.find((gpu) => gpu.label === cell.dataset.gpu) ?? null;
  }

  /**
   * Open a node in place, or close it.
   * @param {string} name
   */
  toggle(name) {
    const row = this._rows.get(name);
    if (!row || !("node" in row) || this._kind === "cards") {
      return;
    }
    const isOpen = !row.isOpen;
    if (this._kind === "strips") {
      this.close();
      this._openSheet(row.node, isOpen);
    }
    row.open(isOpen);
    if (isOpen) {
      this._opened.add(name);
    } else {
      this._opened.delete(name);
    }
    this._app.announce(`${name} ${isOpen ? "opened" : "closed"}`);
  }

  /** Close what is open; false when nothing is. */
  close() {
    const wasOpen = this._opened.size > 0;
    for (const name of this._opened) {
      const row = this._rows.get(name);
      if (row && "node" in row) {
        row.open(false);
      }
    }
    this._opened.clear();
    this._openSheet(null, false);
    return wasOpen;
  }

  /** Put the focus on the first cell that is shown. */
  focus() {
    this._keys.focus();
  }

  /** Draw trends and colors again, with the next update. */
  redraw() {
    for (const row of this._rows.values()) {
      if ("node" in row) {
        row.redraw();
      }
    }
  }

  /**
   * @param {Dashboard.Node | null} node
   * @param {boolean} isOpen
   */
  _openSheet(node, isOpen) {
    setHidden(this._sheet, !isOpen);
    this._sheetPanel = isOpen && node ? new NodePanel(node) : null;
    if (!this._sheetPanel || !node) {
      this._sheet.replaceChildren();
      return;
    }
    const close = h("button", { type: "button", class: "button quiet", "aria-label": `Close ${node.name}` }, "✕");
    close.addEventListener("click", () => this.toggle(node.name));
    this._sheet.replaceChildren(h("div", { class: "sheet-head" }, h("h2", {}, node.name), close), this._sheetPanel.element);
    this._sheetPanel.update(this._app.fleet.headTime());
  }

  /** Another density has other rows. */
  _setKind() {
    const { fleet } = this._app;
    const { density } = this._controls;
    const kind = density === "rows" && fleet.nodes.size + fleet.missing.length > MAX_FULL_ROWS ? "lines" : density;
    if (kind !== this._kind) {
      if (this._kind === "strips") {
        this.close();
      }
      for (const [name, row] of this._rows) {
        this._forget(name, row);
      }
      this._list.replaceChildren();
      this._kind = kind;
      this.element.dataset.density = kind;
    }
    this.element.dataset.metric = this._controls.metric;
    setHidden(this._titles.element, kind !== "rows");
  }

  /**
   * @param {import("./fleet-summary.js").NodeSummary} summary
   * @param {string} name
   * @returns {Shown}
   */
  _make(summary, name) {
    switch (this._kind) {
      case "cards":
        return new NodeCard(summary, this._context);
      case "strips":
        return new Strip(summary, this._context, name);
      default:
        return new NodeRow(summary, this._context, this._kind === "rows" || this._context.isPhone ? "full" : "plain", {
          name,
          isOpen: this._opened.has(summary.node.name),
        });
    }
  }

  /**
   * @param {string} name
   * @param {string} shown
   * @returns {Absent}
   */
  _makeMissing(name, shown) {
    switch (this._kind) {
      case "cards":
        return new MissingCard(name);
      case "strips":
        return new MissingStrip(name, shown);
      default:
        return new MissingRow(name, shown);
    }
  }

  /**
   * @param {string} name
   * @param {Shown | Absent} row
   */
  _add(name, row) {
    this._rows.set(name, row);
    this._builder.observe(row.element);
    this._viewer.observe(row.element);
  }

  /**
   * @param {string} name
   * @param {Shown | Absent} row
   */
  _forget(name, row) {
    this._builder.unobserve(row.element);
    this._viewer.unobserve(row.element);
    row.element.remove();
    this._rows.delete(name);
    this._inView.delete(name);
  }

  /** @param {string} name */
  _match(name) {
    const row = this._rows.get(name);
    if (!row) {
      return;
    }
    const isPlaced = this._kind === "strips";
    if (!("node" in row)) {
      const isShown = this._matcher.missing(name);
      setHidden(row.element, !isShown && !isPlaced);
      row.element.classList.toggle("dim", !isShown && isPlaced);
      return;
    }
    const gpus = this._matcher.gpus(row.node);
    setHidden(row.element, gpus === null && !isPlaced);
    row.element.classList.toggle("dim", gpus === null && isPlaced);
    row.show(this._matcher.isActive ? (gpus ?? new Set()) : null);
  }

  /** How wide names and cells are, and how many columns there is room for. */
  _setWidths(/** @type {string[]} */ names) {
    const letters = Math.min(MAX_NAME_LETTERS, Math.max(5, ...names.map((name) => name.length)));
    const least = MIN_NAME_WIDTH[/** @type {keyof typeof MIN_NAME_WIDTH} */ (this._kind)] ?? 48;
    this._nameWidth = Math.max(least, Math.round(letters * (this._kind === "strips" ? STRIP_LETTER_WIDTH : LETTER_WIDTH)));
    this._gpuCount = Math.max(
      1,
      ...[...this._app.fleet.nodes.values()].map((node) => node.gpus.filter((gpu) => gpu.parent === null).length),
    );
    this._context.most = this._gpuCount;
    this.element.style.setProperty("--name-width", `${this._nameWidth}px`);
    this.element.style.setProperty("--most-gpus", String(Math.min(8, this._gpuCount)));
    this.element.style.setProperty("--strip-gpus", String(Math.min(16, this._gpuCount)));
    this.element.style.setProperty("--columns", String(this._room()));
    this._titles.set(Math.min(8, this._gpuCount), this._room());
  }

  /** How many columns there is room for. */
  _room() {
    const width = this.element.clientWidth || innerWidth;
    const name = this._nameWidth ?? 80;
    const gpus = Math.min(8, this._gpuCount ?? 8);
    switch (this._kind) {
      case "strips":
        return Math.max(
          1,
          Math.floor((width + 12) / (name + Math.min(16, this._gpuCount ?? 8) * CELL_WIDTH.strip + STRIP_MARK_WIDTH + 12)),
        );
      case "lines":
        return Math.max(1, Math.floor((width + 16) / (name + 84 + gpus * CELL_WIDTH.plain + 16)));
      case "rows":
        return Math.max(1, Math.floor((width + 16) / (name + 40 + HOST_WIDTH + gpus * CELL_WIDTH.full + 16)));
      default:
        return 1;
    }
  }

  _resized() {
    const width = this.element.clientWidth;
    if (width !== this._width) {
      this._width = width;
      const before = this.element.style.getPropertyValue("--columns");
      this.element.style.setProperty("--columns", String(this._room()));
      this._titles.set(Math.min(8, this._gpuCount ?? 8), this._room());
      if (before !== String(this._room())) {
        this.structure();
      }
      this._recolor();
    }
  }

  /**
   * On a phone, rows have another form.
   * @param {boolean} isPhone
   */
  _changeForm(isPhone) {
    this._context.isPhone = isPhone;
    for (const [name, row] of this._rows) {
      this._forget(name, row);
    }
    this.structure();
  }

  /** The theme is another, or the cells have another size. */
  _recolor() {
    this._context.heat.read();
    this.redraw();
    this.draw(new Set(this._inView), false);
  }

  /** Every trend has another value. */
  _step() {
    if (this._kind === "rows" || this._context.isPhone) {
      this.redraw();
    }
    this._columns.redraw();
    this.draw(new Set(this._inView), false);
  }

  /** @param {IntersectionObserverEntry[]} entries */
  _cameNear(entries) {
    for (const { target, isIntersecting } of entries) {
      const row = this._rows.get(target.getAttribute("data-node") ?? "");
      if (isIntersecting && row && "node" in row) {
        row.build();
      }
    }
  }

  /** @param {IntersectionObserverEntry[]} entries */
  _cameIntoView(entries) {
    for (const { target, isIntersecting } of entries) {
      const name = target.getAttribute("data-node") ?? "";
      const row = this._rows.get(name);
      if (isIntersecting && row && "node" in row) {
        this._inView.add(name);
        row.build();
        row.update();
      } else {
        this._inView.delete(name);
      }
    }
  }

  /** @param {MouseEvent} event */
  _clicked(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const name = target.closest("[data-node]")?.getAttribute("data-node");
    const isHead = target.closest(".row-head") && !target.closest("a");
    if (name && (target.closest(".row-toggle") || isHead)) {
      this.toggle(name);
    }
  }
}

/**
 * A name with its middle left out where it would be too long: how names begin and end tells nodes apart.
 * @param {string} name
 */
function fitting(name) {
  if (name.length <= MAX_NAME_LETTERS) {
    return name;
  }
  const half = Math.floor((MAX_NAME_LETTERS - 1) / 2);
  return `${name.slice(0, half)}…${name.slice(-half)}`;
}
