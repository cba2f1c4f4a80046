// Quick access for large clusters: jump to a node, filter, free GPUs, my GPUs, and a chip for every node.

import { STATE_GLYPHS } from "../core/fleet.js";
import { text } from "../core/format.js";
import { current, href, setQuery } from "../core/router.js";
import { onKey } from "../core/shortcuts.js";
import { h, setAttribute, setChildren, setHidden, Text } from "./dom.js";
import {
  emptyTally, fromQuery, isActive, isAsked, Matcher, NO_FILTER, order, SORT_CHOICES, STATE_CHOICES, tally, tallyText, toQuery,
  usersSeen,
} from "./filter.js";
import { askUser } from "./user-dialog.js";

const TYPING_MS = 150;
const MOST_SUGGESTIONS = 5000;

/** The bar. Tells `changed(filter)` when another filter is chosen and `jump(name)` when a node is. */
export class QuickBar {
  constructor(app, { changed, jump, hasStrip = true }) {
    this._app = app;
    this._changed = changed;
    this._jump = jump;
    this._hasStrip = hasStrip;
    this._chips = new Map();
    this._undo = [];
    this.filter = this._firstFilter();
    this._make();
    this._showFilter();
    setQuery(toQuery(this.filter));
    this._listen();
  }

  /** Stop listening. */
  leave() {
    clearTimeout(this._typing);
    for (const undo of this._undo) {
      undo();
    }
  }

  /** The address changed under the page: take its words; one without words is where the reader left off. */
  rerouted() {
    this._show(this._firstFilter());
    setQuery(toQuery(this.filter));
  }

  /** Nodes came or went. */
  structure() {
    const names = order(this._app.fleet, this.filter);
    const kept = new Map();
    for (const name of names) {
      kept.set(name, this._chips.get(name) ?? this._chip(name));
    }
    setChildren(this._strip, [...kept.values()].map((chip) => chip.element));
    this._chips = kept;
    setHidden(this._stripBox, !this._hasStrip || names.length < 2);
    this.values(names);
  }

  /** Bring counts and the chips of some nodes up to date. */
  values(names) {
    const { fleet } = this._app;
    const matcher = new Matcher(this.filter);
    for (const name of names) {
      const chip = this._chips.get(name);
      if (chip) {
        this._setChip(chip, name, fleet.nodes.get(name), matcher);
      }
    }
    const counts = emptyTally();
    for (const chip of this._chips.values()) {
      for (const state of Object.keys(counts)) {
        counts[state] += chip.counts[state];
      }
    }
    this._counts.set(this._countsText(counts));
  }

  _countsText(counts) {
    const { nodes, missing } = this._app.fleet;
    const away = [...nodes.values()].filter((node) => node.state !== "healthy").length;
    const parts = [tallyText(counts), `${nodes.size + missing.length} ${nodes.size + missing.length === 1 ? "node" : "nodes"}`];
    if (away + missing.length) {
      parts[1] += `, ${away + missing.length} late, lost or missing`;
    }
    return parts.join(" · ");
  }

  _setChip(chip, name, node, matcher) {
    chip.counts = node ? tally(node.gpus) : emptyTally();
    const state = chipState(node, chip.counts);
    setAttribute(chip.glyph.element, "data-state", node?.state === "late" ? "late" : state);
    chip.glyph.set(chipGlyph(node, state));
    chip.count.set(node && chip.counts.all ? `${chip.counts.free}/${chip.counts.all}` : "");
    const title = chipTitle(name, node, chip.counts);
    if (chip.title !== title) {
      chip.title = title;
      chip.element.title = title;
    }
    const isShown = node ? matcher.gpus(node) !== null : matcher.missing(name);
    setHidden(chip.element, !isShown);
  }

  _chip(name) {
    const glyph = new Text(h("span", { class: "state", "aria-hidden": "true" }));
    const count = new Text(h("span", { class: "chip-count" }));
    const element = h(
      "a", { class: "chip", href: href("node", name), "data-jump": name },
      glyph.element, h("bdi", {}, text(name)), count.element,
    );
    return { element, glyph, count, counts: emptyTally(), title: "" };
  }

  _firstFilter() {
    const { query } = current();
    return fromQuery(isAsked(query) ? query : this._app.prefs.read("filter", {}));
  }

  /** Take a filter and tell the page. */
  _show(filter) {
    this.filter = filter;
    this._showFilter();
    this.structure();
    this._changed(filter);
  }

  /** Take the filter that was chosen here, remember it and put it into the address. */
  _set(filter) {
    const words = toQuery(filter);
    this._app.prefs.write("filter", Object.fromEntries(Object.entries(words).filter(([, value]) => value !== null)));
    setQuery(words);
    this._show(filter);
  }

  _change(changes) {
    this._set({ ...this.filter, ...changes });
  }

  _showFilter() {
    const { q, state, user, sort } = this.filter;
    if (this._search.value !== q && document.activeElement !== this._search) {
      this._search.value = q;
    }
    this._state.value = state;
    this._sort.value = sort;
    setAttribute(this._free, "aria-pressed", String(state === "free"));
    setAttribute(this._mine, "aria-pressed", String(user !== ""));
    this._mineText.set(user || this._me() ? `My GPUs (${text(user || this._me())})` : "My GPUs");
    setHidden(this._other, !this._me());
    setHidden(this._clear, !isActive(this.filter));
  }

  _me() {
    return this._app.prefs.read("me", "");
  }

  async _toggleMine() {
    if (this.filter.user) {
      this._change({ user: "" });
      return;
    }
    const user = this._me() || await this._askMe();
    if (user) {
      this._change({ user });
    }
  }

  async _askMe() {
    const user = await askUser(usersSeen(this._app.fleet), this._me());
    if (user) {
      this._app.prefs.write("me", user);
      this._showFilter();
    }
    return user;
  }

  _toggleFree() {
    this._change({ state: this.filter.state === "free" ? "all" : "free" });
  }

  _clearAll() {
    this._search.value = "";
    this._set({ ...NO_FILTER, sort: this.filter.sort });
  }

  _make() {
    this._search = h("input", {
      type: "search", id: "filter", autocomplete: "off", spellcheck: "false", placeholder: "filter by name, user, job, state",
      title: "Every word must match (press / to come here)",
    });
    this._goto = h("input", {
      type: "text", id: "jump", list: "jump-nodes", autocomplete: "off", spellcheck: "false", placeholder: "jump to node",
    });
    this._names = h("datalist", { id: "jump-nodes" });
    this._state = select("state-filter", STATE_CHOICES);
    this._sort = select("sort", SORT_CHOICES);
    this._free = h("button", { type: "button", class: "button", id: "free-gpus", "aria-pressed": "false" }, "Free GPUs");
    this._mine = h("button", { type: "button", class: "button", id: "my-gpus", "aria-pressed": "false" });
    this._mineText = new Text(this._mine);
    this._other = h("button", { type: "button", class: "button quiet", id: "change-me" }, "not you?");
    this._clear = h("button", { type: "button", class: "button quiet", id: "clear-filter" }, "Clear");
    this._counts = new Text(h("p", { class: "tally", id: "counts" }));
    this._strip = h("div", { class: "strip" });
    this._stripBox = h("nav", { class: "strip-box", "aria-label": "Nodes" }, this._strip);
    const tools = h(
      "div", { class: "toolbar", role: "search" },
      field("Filter", this._search, "filter-field"), field("State", this._state),
      h("span", { class: "button-group" }, this._free, this._mine, this._other),
      field("Jump", this._goto, "jump-field"), this._names, field("Sort", this._sort), this._clear,
    );
    this.element = h("section", { class: "quickbar", "aria-label": "Quick access" }, tools, this._counts.element, this._stripBox);
  }

  _listen() {
    this._search.addEventListener("input", () => {
      clearTimeout(this._typing);
      this._typing = setTimeout(() => this._change({ q: this._search.value }), TYPING_MS);
    });
    this._search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        this._search.value = "";
        this._change({ q: "" });
        this._search.blur();
      }
    });
    this._state.addEventListener("change", () => this._change({ state: this._state.value }));
    this._sort.addEventListener("change", () => this._change({ sort: this._sort.value }));
    this._free.addEventListener("click", () => this._toggleFree());
    this._mine.addEventListener("click", () => this._toggleMine());
    this._other.addEventListener("click", async () => {
      const user = await this._askMe();
      if (user) {
        this._change({ user });
      }
    });
    this._clear.addEventListener("click", () => this._clearAll());
    this._goto.addEventListener("focus", () => this._suggest());
    this._goto.addEventListener("input", (event) => {
      const isChosen = event.inputType === "insertReplacementText" || event.inputType === undefined;
      if (isMeant(this._goto.value, [...this._chips.keys()], isChosen)) {
        this._go(this._goto.value);
      }
    });
    this._goto.addEventListener("keydown", (event) => this._gotoKey(event));
    this._strip.addEventListener("click", (event) => this._stripClick(event));
    this._undo.push(
      onKey("/", () => this._search.focus()),
      onKey("j", () => this._goto.focus()),
      onKey("f", () => this._toggleFree()),
      onKey("m", () => this._toggleMine()),
      onKey("Escape", () => this._clearAll()),
    );
  }

  _suggest() {
    const names = [...this._chips.keys()].slice(0, MOST_SUGGESTIONS);
    this._names.replaceChildren(...names.map((name) => h("option", { value: name })));
  }

  _gotoKey(event) {
    if (event.key === "Escape") {
      this._goto.value = "";
      this._goto.blur();
    } else if (event.key === "Enter") {
      event.preventDefault();
      const name = closest(this._goto.value, [...this._chips.keys()]);
      if (name) {
        this._go(name);
      } else {
        this._app.toast(`No node is called like ${this._goto.value}`, "warn");
      }
    }
  }

  _go(name) {
    this._goto.value = "";
    const chip = this._chips.get(name);
    if (chip?.element.hidden) {
      this._clearAll();
    }
    this._jump(name);
  }

  _stripClick(event) {
    const chip = event.target.closest("[data-jump]");
    if (chip && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
      event.preventDefault();
      this._jump(chip.dataset.jump);
    }
  }
}

/** The node meant by a few letters: that name, else one that starts so, else one that holds them. */
export function closest(typed, names) {
  const word = typed.trim().toLowerCase();
  if (!word) {
    return null;
  }
  const lower = names.map((name) => name.toLowerCase());
  const at = [(name) => name === word, (name) => name.startsWith(word), (name) => name.includes(word)]
    .map((fits) => lower.findIndex(fits))
    .find((found) => found >= 0);
  return at === undefined ? null : names[at];
}

/** True for a name that needs no Enter: it was chosen from the list, or no other begins like it. */
export function isMeant(typed, names, isChosen) {
  return names.includes(typed) && (isChosen || !names.some((name) => name !== typed && name.startsWith(typed)));
}

function chipState(node, counts) {
  if (!node || node.state === "lost") {
    return "lost";
  }
  return ["free", "harvested", "idle", "busy", "faulty"].find((state) => counts[state]) ?? "unknown";
}

function chipGlyph(node, state) {
  return node?.state === "late" ? "!" : STATE_GLYPHS[state];
}

function chipTitle(name, node, counts) {
  if (!node) {
    return `${text(name)}: never reported`;
  }
  return `${text(name)}: ${node.state === "healthy" ? "" : `${node.state}, `}${tallyText(counts)}`;
}

function field(title, input, className = "") {
  return h("label", { class: `field ${className}`.trim() }, h("span", {}, title), input);
}

function select(id, choices) {
  return h("select", { id }, ...choices.map(([value, title]) => h("option", { value }, title)));
}
