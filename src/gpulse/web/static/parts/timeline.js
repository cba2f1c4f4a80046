// The timeline: lanes with bars for processes and findings and marks for events, on the charts' time axis.

import { find } from "../core/dom.js";
import { dateTime, duration, text } from "../core/format.js";
import { html, nothing, render } from "../vendor/lit-html.js";
import { gestures } from "./chart-input.js";
import { gutter, scaled, timeMarks, timeTicks } from "./chart-theme.js";

/**
 * An item with its element; a mark may stand for several.
 * @typedef {{ item: Dashboard.Item, element: HTMLElement, lane: Dashboard.Lane, members?: Dashboard.Mark[] }} PlacedItem
 */

/** @typedef {{ node: PlacedItem, item: Dashboard.Mark, x: number, members: Dashboard.Mark[] }} PlacedMark */

/** @typedef {{ lane: Dashboard.Lane, top: number, count: number, hidden: number, isEmpty: boolean }} LaneRow */

const NEAR_PIXELS = 16;
const PIXELS_A_TICK = 90;
const LAST_TICK_PIXELS = 56;

/**
 * Lanes: [{key, label, kind, empty, note?, rows?, items: [item]}]. An item is {key, from, to, label, say (for screen readers),
 * tone (1…8) or severity, href?, detail() → template} or, without `to`, a mark {key, time, glyph, tone: "bad|warn|good|muted", …}.
 */
export class Timeline {
  /**
   * @param {HTMLElement} host
   * @param {Dashboard.Board} board
   */
  constructor(host, board) {
    this.host = host;
    this.board = board;
    this.id = `timeline-${Math.random().toString(36).slice(2, 8)}`;
    /** @type {Dashboard.Lane[]} */
    this.lanes = [];
    /** @type {Set<string>} */
    this.opened = new Set();
    /** @type {Map<string, PlacedItem>} */
    this.nodes = new Map();
    /** @type {string | null} */
    this.pinned = null;
    this.stop = new AbortController();
    host.classList.add("timeline", "card");
    render(frame(this), host);
    this.body = find(host, ".tl-body");
    this.axis = find(host, ".tl-axis");
    this.area = find(host, ".tl-area");
    this.line = find(host, ".tl-cursor");
    this.card = find(host, ".tl-detail");
    this.list = find(host, ".tl-text", HTMLDetailsElement);
    for (const part of [this.area, this.axis]) {
      part.style.marginLeft = `${gutter().left}px`;
      part.style.marginRight = `${gutter().right}px`;
    }
    this.endGestures = gestures(this.area, board);
    this._listen();
    board.timelines.push(this);
  }

  /**
   * Take new lanes. What stays keeps its element, and with it the focus.
   * @param {Dashboard.Lane[]} lanes
   */
  show(lanes) {
    this.lanes = lanes;
    this.host.dataset.state = "ready";
    this._build();
    this.board.placeItems();
    if (this.list.open) this._text();
  }

  /** Put everything where the board's view has it. */
  look() {
    const { from, to } = this.board.view;
    const width = this.area.clientWidth || 1;
    const scale = 100 / (to - from);
    for (const { item, element } of this.nodes.values()) {
      if (item.to === undefined) place(element, (item.time - from) * scale, null);
      else place(element, (Math.max(item.from, from) - from) * scale, (Math.min(item.to, to) - Math.max(item.from, from)) * scale);
      if (item.to !== undefined) element.classList.toggle("is-begun", item.from < from);
    }
    this._gather(width, scale);
    this._ticks(width);
  }

  /** @param {number | null} time */
  cursor(time) {
    const { from, to } = this.board.view;
    this.line.hidden = time === null;
    if (time !== null) this.line.style.left = `${((time - from) / (to - from)) * 100}%`;
  }

  destroy() {
    this.stop.abort();
    this.endGestures();
  }

  _build() {
    const before = this.nodes;
    this.nodes = new Map();
    /** @type {LaneRow[]} */
    const rows = [];
    /** @type {HTMLElement[]} */
    const area = [];
    let top = 0;
    for (const lane of this.lanes) {
      const { places, count, hidden } = packed(lane, this.opened.has(lane.key), this.board.view);
      rows.push({ lane, top, count, hidden, isEmpty: !places.length });
      for (const [item, row] of places) {
        const key = `${lane.key} ${item.key}`;
        const element = before.get(key)?.element ?? document.createElement(item.href ? "a" : "button");
        before.delete(key);
        dress(element, item, lane);
        element.style.setProperty("--row", String(top + row));
        this.nodes.set(key, { item, element, lane });
        area.push(element);
      }
      top += count;
    }
    for (const { element } of before.values()) element.remove();
    area.forEach((element, at) => {
      if (this.area.children[at] !== element) this.area.insertBefore(element, this.area.children[at] ?? null);
    });
    this.body.style.setProperty("--rows", String(top));
    this._labels(rows);
    this._roving();
    if (this.pinned && !this.nodes.has(this.pinned)) this._hide();
  }

  /** @param {LaneRow[]} rows */
  _labels(rows) {
    const labels = rows.map(
      ({ lane, hidden, isEmpty }) => html`
      <div class="tl-lane" data-lane=${lane.key}>
        <span class="tl-label" title=${text(lane.label)}>${text(lane.label)}</span>
        ${
          hidden
            ? html`<button type="button" class="tl-more" @click=${() => this._open(lane.key)}
          aria-label=${`Show ${hidden} more rows of ${text(lane.label)}`}>+${hidden}</button>`
            : nothing
        }
        ${isEmpty ? html`<span class="tl-empty">${lane.empty}</span>` : nothing}
      </div>`,
    );
    render(labels, find(this.host, ".tl-labels"));
    for (const { lane, top, count } of rows) {
      const { style } = find(this.host, `.tl-lane[data-lane="${CSS.escape(lane.key)}"]`);
      style.setProperty("--row", String(top));
      style.setProperty("--count", String(count));
    }
    const notes = this.lanes.map((lane) => lane.note).filter(Boolean);
    render(
      notes.map((note) => html`<p class="tl-note">${note}</p>`),
      find(this.host, ".tl-notes"),
    );
    const total = this.lanes.reduce((sum, lane) => sum + lane.items.length, 0);
    find(this.list, "summary").textContent = `Show as a list (${total})`;
  }

  /** @param {string} key */
  _open(key) {
    this.opened.add(key);
    this._build();
    this.look();
  }

  /**
   * Marks that lie on each other become one with a number.
   * @param {number} width
   * @param {number} scale
   */
  _gather(width, scale) {
    const { from } = this.board.view;
    /** @type {PlacedMark | null} */
    let last = null;
    const marks = [...this.nodes.values()].flatMap((node) => (node.item.to === undefined ? [{ node, item: node.item }] : []));
    marks.sort((a, b) => a.node.lane.key.localeCompare(b.node.lane.key) || a.item.time - b.item.time);
    /** @type {PlacedMark[]} */
    const shown = [];
    for (const { node, item } of marks) {
      const { element } = node;
      node.members = [item];
      if (element.hidden) continue;
      const x = ((item.time - from) * scale * width) / 100;
      if (last && last.node.lane === node.lane && x - last.x < NEAR_PIXELS) {
        last.members.push(item);
        element.hidden = true;
      } else {
        last = { node, item, x, members: node.members };
        shown.push(last);
      }
    }
    for (const { node, item, members } of shown) {
      const worst = worstOf(members);
      const isOne = members.length === 1;
      const words = members.map((one) => one.label).join(", ");
      node.element.dataset.tone = worst.tone;
      find(node.element, "span").textContent = isOne ? worst.glyph : String(members.length);
      node.element.setAttribute("aria-label", isOne ? item.say : `${members.length} events from ${dateTime(item.time)}: ${words}`);
    }
  }

  /** @param {number} width */
  _ticks(width) {
    const { from, to } = this.board.view;
    const { times, step } = timeTicks(from, to, Math.max(2, width / scaled(PIXELS_A_TICK)));
    const words = timeMarks(times, step);
    /** @param {number} time */
    const fits = (time) => ((to - time) / (to - from)) * width > scaled(LAST_TICK_PIXELS);
    const marks = times.filter(fits).map((time, at) => {
      const mark = document.createElement("span");
      mark.textContent = words[at];
      mark.style.left = `${((time - from) / (to - from)) * 100}%`;
      return mark;
    });
    this.axis.replaceChildren(...marks);
  }

  _listen() {
    /**
     * @template {keyof HTMLElementEventMap} K
     * @param {HTMLElement} target
     * @param {K} type
     * @param {(event: HTMLElementEventMap[K]) => void} handler
     */
    const listen = (target, type, handler) => target.addEventListener(type, handler, { signal: this.stop.signal });
    /** @param {Event} event */
    const found = (event) => targetOf(event)?.closest("[data-item]")?.getAttribute("data-item") ?? "";
    listen(this.area, "pointerover", (event) => event.pointerType !== "touch" && found(event) && this._detail(found(event), false));
    listen(this.area, "pointerout", (event) => !this.pinned && !this._isInCard(event.relatedTarget) && this._hide());
    listen(this.card, "pointerleave", () => !this.pinned && this._hide());
    listen(
      this.area,
      "focusin",
      (event) => found(event) && targetOf(event)?.matches(":focus-visible") && this._detail(found(event), false),
    );
    listen(this.area, "focusout", (event) => !this.pinned && !this._isInCard(event.relatedTarget) && this._hide());
    listen(this.area, "click", (event) => {
      const key = found(event);
      if (!key || targetOf(event)?.closest("a")) return;
      if (this.pinned === key) this._hide();
      else this._detail(key, true);
    });
    listen(this.host, "keydown", (event) => {
      if (event.key === "Escape" && !this.card.hidden) this._close();
      else if (this.area.contains(targetOf(event))) this._key(event);
    });
    listen(this.list, "toggle", () => this._text());
  }

  /**
   * @param {string} key
   * @param {boolean} isPinned
   */
  _detail(key, isPinned) {
    const node = this.nodes.get(key);
    if (!node || (this.pinned && !isPinned)) return;
    this.pinned = isPinned ? key : null;
    const items = node.members ?? [node.item];
    render(
      html`${items.slice(0, 8).map((item) => item.detail())}
      ${items.length > 8 ? html`<p class="muted">and ${items.length - 8} more: zoom in</p>` : nothing}
      ${isPinned ? html`<button type="button" class="button quiet tl-close" @click=${() => this._close()}>Close</button>` : nothing}`,
      this.card,
    );
    this.card.hidden = false;
    const box = node.element.getBoundingClientRect();
    const own = this.host.getBoundingClientRect();
    const left = Math.min(Math.max(box.left - own.left, 8), Math.max(8, own.width - this.card.offsetWidth - 8));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${box.bottom - own.top + 6}px`;
    node.element.setAttribute("aria-describedby", this.card.id);
  }

  _close() {
    const element = this.nodes.get(this.pinned ?? "")?.element;
    this._hide();
    element?.focus();
  }

  /** @param {EventTarget | null} target */
  _isInCard(target) {
    return target instanceof Node && this.card.contains(target);
  }

  _hide() {
    this.pinned = null;
    this.card.hidden = true;
    this.area.querySelector("[aria-describedby]")?.removeAttribute("aria-describedby");
  }

  _visible() {
    return [...this.nodes.values()].filter(({ element }) => !element.hidden);
  }

  /** One stop for the tab key; arrows go on from there. */
  _roving() {
    const all = [...this.nodes.values()].map(({ element }) => element);
    const current = all.find((element) => element === document.activeElement) ?? all.find((element) => element.tabIndex === 0) ?? all[0];
    for (const element of all) element.tabIndex = element === current ? 0 : -1;
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const all = this._visible();
    const here = all.find(({ element }) => element === event.target);
    const lanes = this.lanes.filter((lane) => all.some((node) => node.lane === lane));
    if (!here || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const laneItems = all.filter((node) => node.lane === here.lane).sort((a, b) => begin(a.item) - begin(b.item));
    const at = laneItems.indexOf(here);
    const steps = new Map([
      ["ArrowLeft", laneItems[at - 1]],
      ["ArrowRight", laneItems[at + 1]],
      ["Home", laneItems[0]],
      ["End", laneItems[laneItems.length - 1]],
    ]);
    const other = lanes[lanes.indexOf(here.lane) + (event.key === "ArrowDown" ? 1 : -1)];
    const others = all.filter((node) => node.lane === other);
    const next = steps.has(event.key) ? steps.get(event.key) : other && nearest(others, begin(here.item));
    if (!next) return;
    for (const { element } of all) element.tabIndex = element === next.element ? 0 : -1;
    next.element.focus();
  }

  _text() {
    const items = this.lanes.flatMap((lane) => lane.items.map((item) => ({ lane, item })));
    items.sort((a, b) => begin(b.item) - begin(a.item));
    render(this.list.open ? asTable(items) : nothing, find(this.list, ".tl-list"));
  }
}

/**
 * @param {Event} event
 * @returns {HTMLElement | null}
 */
function targetOf(event) {
  return event.target instanceof HTMLElement ? event.target : null;
}

/** @param {Timeline} timeline */
function frame(timeline) {
  return html`
    <div class="tl-body">
      <div class="tl-labels"></div>
      <div class="tl-area time-area" role="group" aria-label="Timeline; arrow keys move between items"><div class="tl-cursor" hidden></div></div>
    </div>
    <div class="tl-axis" aria-hidden="true"></div>
    <div class="tl-notes"></div>
    <div class="tl-detail card" id=${timeline.id} role="status" hidden></div>
    <details class="tl-text"><summary>Show as a list</summary><div class="tl-list"></div></details>`;
}

const MAX_ROWS = 6;
const MAX_BARS = 500;
const MAX_TEXT_ROWS = 300;

/**
 * When an item begins.
 * @param {Dashboard.Item} item
 */
export const begin = (item) => item.from ?? item.time;

/**
 * The one of some that begins nearest to a time.
 * @param {PlacedItem[]} nodes
 * @param {number} time
 */
export function nearest(nodes, time) {
  return nodes.reduce((best, node) => (Math.abs(begin(node.item) - time) < Math.abs(begin(best.item) - time) ? node : best));
}

const TONES = ["bad", "warn", "good", "muted"];

/**
 * The gravest of some marks.
 * @param {Dashboard.Mark[]} items
 */
export function worstOf(items) {
  return items.reduce((worst, item) => (TONES.indexOf(item.tone) < TONES.indexOf(worst.tone) ? item : worst));
}

/**
 * Where an element stands, in hundredths of the width; without a width it is a mark.
 * @param {HTMLElement} element
 * @param {number} left
 * @param {number | null} width
 */
export function place(element, left, width) {
  element.hidden = left > 100 || (width === null ? left < 0 : width < 0);
  if (element.hidden) return;
  element.style.left = `${left}%`;
  if (width !== null) element.style.width = `${width}%`;
}

/**
 * Makes an element look like its item.
 * @param {HTMLElement} element
 * @param {Dashboard.Item} item
 * @param {Dashboard.Lane} lane
 */
export function dress(element, item, lane) {
  const isMark = item.to === undefined;
  element.className = isMark ? "tl-mark" : "tl-bar";
  element.dataset.item = `${lane.key} ${item.key}`;
  element.dataset.kind = lane.kind ?? "";
  if (item.href) element.setAttribute("href", item.href);
  else element.setAttribute("type", "button");
  if (item.severity) element.dataset.severity = item.severity;
  else element.dataset.tone = String(item.tone ?? "");
  element.setAttribute("aria-label", item.say);
  const text = isMark ? item.glyph : item.label;
  if (!element.firstElementChild) element.append(document.createElement("span"));
  const words = find(element, "span");
  if (words.textContent !== text) words.textContent = text;
}

/** @param {Dashboard.Item} item */
const lengthOf = (item) => (item.to === undefined ? 0 : item.to - item.from);

/**
 * In which row of a lane each item lies so that bars do not cover each other.
 * @param {Dashboard.Lane} lane
 * @param {boolean} isOpen
 * @param {Dashboard.View} view
 */
export function packed(lane, isOpen, view) {
  /** @type {number[]} */
  const ends = [];
  /** @type {Array<[Dashboard.Item, number]>} */
  const places = [];
  const inView = lane.items.filter((item) => item.to === undefined || (item.to >= view.from && item.from <= view.to));
  const items = inView.length > MAX_BARS ? [...inView].sort((a, b) => lengthOf(b) - lengthOf(a)).slice(0, MAX_BARS) : inView;
  const slack = (view.to - view.from) / 400;
  for (const item of [...items].sort((a, b) => begin(a) - begin(b))) {
    if (item.to === undefined) {
      places.push([item, 0]);
      continue;
    }
    let row = ends.findIndex((end) => end <= item.from);
    if (row < 0) row = ends.length;
    ends[row] = Math.max(item.to, item.from + slack);
    places.push([item, row]);
  }
  const rows = Math.max(1, ends.length);
  const most = isOpen ? rows : Math.min(rows, lane.rows ?? MAX_ROWS);
  return { places: places.filter(([, row]) => row < most), count: most, hidden: rows - most };
}

/**
 * Items as a table.
 * @param {Array<{ lane: Dashboard.Lane, item: Dashboard.Item }>} items
 */
export function asTable(items) {
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="Timeline as a list"><table class="table">
    <caption>Newest first${items.length > MAX_TEXT_ROWS ? `, the last ${MAX_TEXT_ROWS}` : ""}</caption>
    <thead><tr><th scope="col">From</th><th scope="col">Duration</th><th scope="col">Entry</th></tr></thead>
    <tbody>${items.slice(0, MAX_TEXT_ROWS).map(
      ({ lane, item }) => html`<tr>
      <td>${dateTime(begin(item))}</td><td>${item.to === undefined ? "" : duration(item.to - item.from)}</td>
      <td>${lane.label}: ${item.href ? html`<a href=${item.href}>${item.label}</a>` : item.label}</td></tr>`,
    )}</tbody>
  </table></div>`;
}
