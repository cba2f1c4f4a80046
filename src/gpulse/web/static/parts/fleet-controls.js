// What is shown of the fleet, and how: words, states with their numbers, order, density, and what colors the cells.

import { find, h, setAttribute, setHidden, Text } from "../core/dom.js";
import { usersOf } from "../core/fleet.js";
import { text } from "../core/format.js";
import { current, href, setQuery } from "../core/router.js";
import { onKey } from "../core/shortcuts.js";
import { fromQuery, isActive, isAsked, NO_FILTER, SORT_CHOICES, STATE_CHOICES, toQuery, usersSeen } from "./filter.js";
import { CELL_METRICS } from "./fleet-metrics.js";
import { glyphElement } from "./glyphs.js";

/** @typedef {import("./fleet-summary.js").FleetSummary} FleetSummary */
/** @typedef {"cards" | "rows" | "strips"} Density */

const TYPING_MS = 150;
const MAX_CARDS = 4;
/** With more nodes than this, rows have one line and stand in two columns. */
export const MAX_FULL_ROWS = 16;
const MAX_ROWS = 60;
/** @type {Density[]} */
const DENSITIES = ["cards", "rows", "strips"];
const DENSITY_TITLES = { cards: "Cards", rows: "Rows", strips: "Strips" };
const CHIPS = ["all", "busy", "idle", "free", "harvested", "faulty", "lost", "unknown"];
const ON_PHONES = ["all", "free", "mine"];
/** @type {Array<[Dashboard.Severity, string]>} */
const LEGEND = [
  ["critical", "fault"],
  ["high", "high"],
  ["medium", "medium"],
  ["low", "low"],
];

/**
 * The density that fits a number of nodes.
 * @param {number} nodes
 * @returns {Density}
 */
export function automaticDensity(nodes) {
  return nodes <= MAX_CARDS ? "cards" : nodes <= MAX_ROWS ? "rows" : "strips";
}

/** The row of filters, which is also the legend, and the field in the header. Calls `changed` when something is chosen. */
export class FleetControls {
  /**
   * @param {Dashboard.App} app
   * @param {FleetSummary} summary
   * @param {() => void} changed
   */
  constructor(app, summary, changed) {
    this._app = app;
    this._summary = summary;
    this._changed = changed;
    /** @type {Array<() => void>} */
    this._undo = [];
    this._typing = 0;
    this.filter = this._firstFilter();
    /** @type {Density | null} */
    this._chosen = this._firstDensity();
    this.metric = this._firstMetric();
    this._search = find(document, "#fleet-filter", HTMLInputElement);
    this._chips = new Map(CHIPS.map((state) => [state, chip(state)]));
    this._mine = h("button", { type: "button", class: "filter-chip", id: "my-gpus", "data-chip": "mine", "aria-pressed": "false" });
    this._mineText = new Text(h("span"));
    this._mineCount = new Text(h("b"));
    this._mine.append(this._mineText.element, this._mineCount.element);
    this._other = h("button", { type: "button", class: "button quiet", id: "change-me" }, "Change user");
    this._clear = h("button", { type: "button", class: "button quiet", id: "clear-filter" }, "Clear filter");
    this._sort = select("sort", SORT_CHOICES);
    this._metricField = select(
      "metric",
      Object.entries(CELL_METRICS).map(([name, { title }]) => [name, title]),
    );
    this._ramp = h("span", { class: "heat-key" });
    this._rampLow = new Text(h("span"));
    this._rampHigh = new Text(h("span"));
    this._ramp.append(this._rampLow.element, h("span", { class: "heat-ramp", "aria-hidden": "true" }), this._rampHigh.element);
    this._densities = DENSITIES.map((name) =>
      h(
        "button",
        { type: "button", class: "button", "data-density": name, "aria-pressed": "false", title: "Density (D)" },
        DENSITY_TITLES[name],
      ),
    );
    this._more = h(
      "button",
      { type: "button", class: "button phone-only", id: "filter-more", "aria-expanded": "false", "aria-controls": "fleet-tools" },
      "Filter and sort",
    );
    this._sortField = field("Sort:", this._sort);
    this._metricField.setAttribute("aria-label", "Color of cells");
    this._colorField = h("span", { class: "field" }, this._metricField);
    this.element = this._make();
    this._listen();
    this._showChoice();
    setQuery(this.words());
  }

  /** The density in use. */
  get density() {
    const { nodes, missing } = this._app.fleet;
    return this._chosen ?? automaticDensity(nodes.size + missing.length);
  }

  /** Stop listening. */
  leave() {
    clearTimeout(this._typing);
    this._search.value = "";
    for (const undo of this._undo) {
      undo();
    }
  }

  /** The address changed under the page: take its words; one without words is where the reader left off. */
  rerouted() {
    this.filter = this._firstFilter();
    this._chosen = this._firstDensity();
    this.metric = this._firstMetric();
    setQuery(this.words());
    this._showChoice();
    this._changed();
  }

  /** Show how many GPUs are in which state. */
  update() {
    const { counts } = this._summary.total();
    for (const [state, { count, element }] of this._chips) {
      count.set(counts[/** @type {keyof typeof counts} */ (state)].toLocaleString("en"));
      setHidden(element, state === "unknown" && counts.unknown === 0 && this.filter.state !== "unknown");
    }
    const me = this.filter.user || this._me();
    this._mineCount.set(me ? String(countOf(this._app.fleet, me)) : "");
  }

  /** Show the density that is in use. */
  showDensity() {
    const { density } = this;
    for (const button of this._densities) {
      setAttribute(button, "aria-pressed", String(button.dataset.density === density));
    }
    setHidden(this._sortField, density === "strips");
    setHidden(this._colorField, density !== "strips");
    setHidden(this._ramp, density !== "strips");
    const { low, high } = CELL_METRICS[this.metric];
    this._rampLow.set(low);
    this._rampHigh.set(high);
  }

  _make() {
    const chips = h("div", { class: "filter-chips" }, ...[...this._chips.values()].map(({ element }) => element), this._mine);
    const severities = LEGEND.map(([severity, word]) => h("span", {}, glyphElement("severity", severity), word));
    const legend = h("a", { class: "severity-key", id: "with-findings", title: "Show only GPUs with findings", href: "#/" }, ...severities);
    const tools = h(
      "div",
      { class: "fleet-tools", id: "fleet-tools" },
      this._clear,
      this._other,
      legend,
      this._ramp,
      this._colorField,
      this._sortField,
      h("span", { class: "choices", role: "group", "aria-label": "Density" }, ...this._densities),
    );
    return h("section", { class: "fleet-controls", "aria-label": "Filter" }, this._more, chips, tools);
  }

  _firstFilter() {
    const { query } = current();
    return fromQuery(isAsked(query) ? query : this._app.prefs.read("filter", {}));
  }

  /** @returns {Density | null} */
  _firstDensity() {
    const asked = current().query.density ?? this._app.prefs.read("density", "");
    return DENSITIES.find((name) => name === asked) ?? null;
  }

  _firstMetric() {
    const asked = current().query.metric ?? this._app.prefs.read("metric", "");
    return Object.hasOwn(CELL_METRICS, asked) ? asked : "utilization";
  }

  /** The words of the address for what is shown. */
  words() {
    return { ...toQuery(this.filter), density: this._chosen, metric: this.metric === "utilization" ? null : this.metric };
  }

  /**
   * Take the filter that was chosen here, remember it and put it into the address.
   * @param {Partial<Dashboard.Filter>} changes
   */
  change(changes) {
    this.filter = { ...this.filter, ...changes };
    const words = toQuery(this.filter);
    this._app.prefs.write("filter", Object.fromEntries(Object.entries(words).filter(([, value]) => value !== null)));
    this._chose();
  }

  _chose() {
    setQuery(this.words());
    this._showChoice();
    this._changed();
  }

  /** @param {Density | null} density */
  _choose(density) {
    this._chosen = density;
    this._app.prefs.write("density", density);
    this._chose();
    this._app.announce(density ? `${DENSITY_TITLES[density]}` : `Automatic: ${DENSITY_TITLES[this.density]}`);
  }

  _showChoice() {
    const { q, state, user, sort } = this.filter;
    if (this._search.value !== q && document.activeElement !== this._search) {
      this._search.value = q;
    }
    this._sort.value = sort;
    this._metricField.value = this.metric;
    for (const [name, { element }] of this._chips) {
      setAttribute(element, "href", href("overview", { ...this.words(), state: name === "all" ? null : name }));
      setAttribute(element, "aria-current", name === state ? "true" : null);
    }
    const isFindings = state === "findings";
    setAttribute(
      find(this.element, "#with-findings"),
      "href",
      href("overview", { ...this.words(), state: isFindings ? null : "findings" }),
    );
    setAttribute(find(this.element, "#with-findings"), "aria-current", isFindings ? "true" : null);
    setAttribute(this._mine, "aria-pressed", String(user !== ""));
    this._mineText.set(user && user !== this._me() ? text(user) : "Mine");
    setHidden(this._other, !this._me() || user === "");
    setHidden(this._clear, !isActive(this.filter));
    this.update();
    this.showDensity();
  }

  _me() {
    return this._app.prefs.read("me", "");
  }

  async _toggleMine() {
    if (this.filter.user) {
      this.change({ user: "" });
      return;
    }
    const user = this._me() || (await this._askMe());
    if (user) {
      this.change({ user });
    }
  }

  async _askMe() {
    const user = await askUser(usersSeen(this._app.fleet), this._me());
    if (user) {
      this._app.prefs.write("me", user);
    }
    return user;
  }

  _toggleFree() {
    this.change({ state: this.filter.state === "free" ? "all" : "free" });
  }

  /** Show everything again. */
  clear() {
    this._search.value = "";
    this.change({ ...NO_FILTER, sort: this.filter.sort });
  }

  _listen() {
    const stop = new AbortController();
    const { signal } = stop;
    this._search.addEventListener(
      "input",
      () => {
        clearTimeout(this._typing);
        this._typing = setTimeout(() => this.change({ q: this._search.value }), TYPING_MS);
      },
      { signal },
    );
    this._sort.addEventListener("change", () => this.change({ sort: this._sort.value }));
    this._metricField.addEventListener("change", () => {
      this.metric = this._metricField.value;
      this._app.prefs.write("metric", this.metric);
      this._chose();
    });
    for (const [state, { element }] of this._chips) {
      element.addEventListener("click", (event) => {
        if (event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
          event.preventDefault();
          this.change({ state });
        }
      });
    }
    for (const button of this._densities) {
      button.addEventListener("click", () => this._choose(/** @type {Density} */ (button.dataset.density)));
    }
    this._mine.addEventListener("click", () => this._toggleMine());
    this._other.addEventListener("click", async () => {
      const user = await this._askMe();
      if (user) {
        this.change({ user });
      }
    });
    this._clear.addEventListener("click", () => this.clear());
    this._more.addEventListener("click", () => {
      const isOpen = this.element.classList.toggle("open");
      setAttribute(this._more, "aria-expanded", String(isOpen));
    });
    this._undo.push(
      () => stop.abort(),
      onKey("f", () => this._toggleFree()),
      onKey("m", () => this._toggleMine()),
      onKey("d", () => this._choose(DENSITIES[(DENSITIES.indexOf(this.density) + 1) % DENSITIES.length])),
    );
  }
}

/** @param {string} state */
function chip(state) {
  const count = new Text(h("b"));
  const title = STATE_CHOICES.find(([name]) => name === state)?.[1] ?? state;
  const element = h(
    "a",
    { class: "filter-chip", href: "#/", "data-chip": state, "data-phone": ON_PHONES.includes(state) },
    ...(state === "all" ? [] : [glyphElement("state", state)]),
    h("span", {}, title),
    count.element,
  );
  return { element, count };
}

/**
 * @param {Dashboard.Fleet} fleet
 * @param {string} user
 */
function countOf(fleet, user) {
  let count = 0;
  for (const gpu of fleet.gpus()) {
    count += gpu.instances.length === 0 && usersOf(gpu).includes(user) ? 1 : 0;
  }
  return count;
}

/**
 * @param {string} title
 * @param {HTMLElement} input
 */
function field(title, input) {
  return h("label", { class: "field" }, h("span", {}, title), input);
}

/**
 * @param {string} id
 * @param {string[][]} choices
 */
function select(id, choices) {
  return h("select", { id }, ...choices.map(([value, title]) => h("option", { value }, title)));
}

/**
 * Ask for a user name; resolves to it, or to "" when the reader would rather not say.
 * @param {string[]} users
 */
export function askUser(users, before = "") {
  const input = h("input", {
    id: "user-name",
    list: "user-names",
    autocomplete: "username",
    spellcheck: "false",
    required: true,
    value: before,
  });
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "user-title" }, "Which GPUs are yours?"),
    h("p", { class: "muted" }, "Enter your user name on the nodes. It is stored only in this browser."),
    h("label", { class: "field stacked" }, h("span", {}, "User name"), input),
    h("datalist", { id: "user-names" }, ...users.map((user) => h("option", { value: user }))),
    h(
      "p",
      { class: "toolbar dialog-buttons" },
      h("button", { class: "button primary", value: "ok" }, "Show my GPUs"),
      h("button", { class: "button quiet", value: "cancel", type: "button" }, "Cancel"),
    ),
  );
  const dialog = h("dialog", { "aria-labelledby": "user-title" }, form);
  document.body.append(dialog);
  find(form, "[value=cancel]").addEventListener("click", () => dialog.close("cancel"));
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "ok";
      dialog.remove();
      resolve(isGiven ? input.value.trim() : "");
    });
    dialog.showModal();
    input.select();
  });
}
