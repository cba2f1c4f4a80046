// The overview: totals, findings, filters, and the whole fleet as cards, rows or strips.

import { h, oncePerFrame, setHidden } from "../core/dom.js";
import { onKey } from "../core/shortcuts.js";
import { FleetControls } from "../parts/fleet-controls.js";
import { FindingStrip } from "../parts/fleet-findings.js";
import { agentCommand } from "../parts/fleet-rows.js";
import { FleetSummary } from "../parts/fleet-summary.js";
import { FleetTotals } from "../parts/fleet-totals.js";
import { Trends } from "../parts/fleet-trends.js";
import { FleetView } from "../parts/fleet-view.js";

const SORT_AGAIN_MS = 10_000;
const FINDINGS_MS = 2_000;

/** The page's title. */
export const title = () => "Overview";

/**
 * Show the page.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} _route
 * @param {Dashboard.App} app
 */
export function mount(root, _route, app) {
  const page = new Overview(root, app);
  return {
    subscription: {},
    leave: () => page.leave(),
    rerouted: () => page.rerouted(),
  };
}

class Overview {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.App} app
   */
  constructor(root, app) {
    this._app = app;
    /** @type {Set<string>} */
    this._dirty = new Set();
    this._isTick = false;
    /** What changes the order at once. */
    this._states = "";
    this._summary = new FleetSummary(app.fleet);
    this._summary.structure();
    this._trends = new Trends(app.fleet);
    this._controls = new FleetControls(app, this._summary, () => this._chosen());
    this._totals = new FleetTotals(app, this._summary);
    this._findings = new FindingStrip(app);
    this._view = new FleetView(app, this._summary, this._trends, this._controls);
    this._empty = h("div", { class: "empty", id: "nothing", hidden: true });
    this._frame = oncePerFrame(() => this._draw());
    root.append(
      h("h1", { class: "visually-hidden" }, "Overview"),
      this._totals.element,
      this._findings.element,
      this._controls.element,
      this._empty,
      this._view.element,
    );
    this._abort = new AbortController();
    const { signal } = this._abort;
    app.fleet.addEventListener("structure", () => this._structure(), { signal });
    app.fleet.on("values", (names) => this._values(names), { signal });
    app.live.addEventListener("state", () => this._tellEmpty(), { signal });
    this._timers = [
      setInterval(() => this._tick(), 1000),
      setInterval(() => this._view.sort(), SORT_AGAIN_MS),
      setInterval(() => this._findings.update(), FINDINGS_MS),
    ];
    this._undoKey = onKey("Escape", () => this._view.close() || this._controls.clear());
    this._structure();
    this._trends.load(signal);
  }

  leave() {
    for (const timer of this._timers) {
      clearInterval(timer);
    }
    this._abort.abort();
    this._frame.cancel();
    this._undoKey();
    this._controls.leave();
    this._totals.leave();
    this._view.leave();
  }

  rerouted() {
    this._controls.rerouted();
  }

  /** Nodes or GPUs came or went. */
  _structure() {
    this._summary.structure();
    this._controls.showDensity();
    this._controls.update();
    this._findings.update();
    this._totals.update();
    this._chosen();
  }

  /** Another filter, order, density or metric. */
  _chosen() {
    this._view.structure();
    this._view.redraw();
    this._totals.setFilter(this._controls.filter, this._controls.words());
    this._tellEmpty();
    this._values(new Set(this._app.fleet.nodes.keys()));
  }

  /** @param {Set<string>} names */
  _values(names) {
    for (const name of names) {
      this._dirty.add(name);
    }
    this._frame();
  }

  _tick() {
    this._isTick = true;
    this._frame();
  }

  /** What changed since the last frame, all at once. */
  _draw() {
    const dirty = this._dirty;
    this._dirty = new Set();
    if (dirty.size) {
      this._trends.take(dirty);
      this._summary.update(dirty);
      this._controls.update();
      this._totals.update();
      this._sortIfUrgent();
    }
    this._view.draw(dirty, this._isTick);
    this._isTick = false;
    if (dirty.size && !this._empty.hidden) {
      this._tellEmpty();
    }
  }

  /** A node that falls silent, or has another worst finding, changes its place at once. */
  _sortIfUrgent() {
    let key = "";
    for (const { node, severity, counts } of this._summary.nodes.values()) {
      if (node.state !== "healthy" || severity !== null || counts.faulty) {
        key += `${node.name} ${node.state} ${severity} ${counts.faulty}\n`;
      }
    }
    if (key !== this._states) {
      this._states = key;
      this._view.sort();
      this._findings.update();
    }
  }

  _tellEmpty() {
    const { fleet, live } = this._app;
    const hasNodes = fleet.nodes.size + fleet.missing.length > 0;
    for (const part of [this._totals.element, this._controls.element, this._view.element]) {
      setHidden(part, !hasNodes);
    }
    const isEmpty = !this._view.isAny;
    setHidden(this._empty, !isEmpty);
    if (!isEmpty) {
      return;
    }
    if (hasNodes) {
      const clear = h("button", { type: "button", class: "button" }, "Clear the filter");
      clear.addEventListener("click", () => this._controls.clear());
      this._empty.replaceChildren(h("p", {}, "No GPU matches the filter."), clear);
    } else if (fleet.known) {
      this._empty.replaceChildren(
        h("h2", {}, "No node has reported yet"),
        h("p", {}, "Start an agent on every node: ", h("code", {}, agentCommand())),
        h("p", {}, "Or on all nodes at once: ", h("code", {}, "gpulse deploy up --nodes node-list.txt")),
        h("p", {}, "To look around without GPUs: ", h("code", {}, "gpulse demo")),
      );
    } else {
      const isLost = live.state === "lost";
      this._empty.replaceChildren(
        h("p", {}, isLost ? "The head cannot be reached. This page retries automatically." : "Loading the fleet…"),
      );
    }
  }
}
