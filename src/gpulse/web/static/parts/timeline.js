// Lanes on the charts' time axis: bars for what lasted, marks for what happened, details in text.
import { html, nothing, render } from "../vendor/lit-html.js";
import { dateTime, text } from "../core/format.js";
import { gestures } from "./chart-gestures.js";
import { gutter, scaled, timeMarks, timeTicks } from "./chart-theme.js";
import { asTable, begin, dress, nearest, packed, place, worstOf } from "./timeline-rows.js";

const NEAR_PIXELS = 16;
const PIXELS_A_TICK = 90;
const LAST_TICK_PIXELS = 56;

/**
 * Lanes: [{key, label, kind, empty, note?, rows?, items: [item]}]. An item is {key, from, to, label, say (for screen readers),
 * tone (1…8) or severity, href?, detail() → template} or, without `to`, a mark {key, time, glyph, tone: "bad|warn|good|muted", …}.
 */
export class Timeline {
  constructor(host, board) {
    this.host = host;
    this.board = board;
    this.lanes = [];
    this.opened = new Set();
    this.nodes = new Map();
    this.pinned = null;
    host.classList.add("timeline", "card");
    render(frame(this), host);
    this.body = host.querySelector(".tl-body");
    this.axis = host.querySelector(".tl-axis");
    this.area = host.querySelector(".tl-area");
    this.line = host.querySelector(".tl-cursor");
    this.card = host.querySelector(".tl-detail");
    for (const part of [this.area, this.axis]) {
      part.style.marginLeft = `${gutter().left}px`;
      part.style.marginRight = `${gutter().right}px`;
    }
    this.endGestures = gestures(this.area, board);
    this._listen();
    board.timelines.push(this);
  }

  /** Take new lanes. What stays keeps its element, and with it the focus. */
  show(lanes) {
    this.lanes = lanes;
    this.host.dataset.state = "ready";
    this._build();
    this.board.placeItems();
    if (this.host.querySelector(".tl-text").open) this._text();
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
    const rows = [];
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
        element.style.setProperty("--row", top + row);
        this.nodes.set(key, { item, element, lane });
        area.push(element);
      }
      top += count;
    }
    for (const { element } of before.values()) element.remove();
    area.forEach((element, at) => {
      if (this.area.children[at] !== element) this.area.insertBefore(element, this.area.children[at] ?? null);
    });
    this.body.style.setProperty("--rows", top);
    this._labels(rows);
    this._roving();
    if (this.pinned && !this.nodes.has(this.pinned)) this._hide();
  }

  _labels(rows) {
    const labels = rows.map(({ lane, top, count, hidden, isEmpty }) => html`
      <div class="tl-lane" data-lane=${lane.key} .lane=${{ top, count }}>
        <span class="tl-label" title=${text(lane.label)}>${text(lane.label)}</span>
        ${hidden ? html`<button type="button" class="tl-more" @click=${() => this._open(lane.key)}
          aria-label=${`Show ${hidden} more rows of ${text(lane.label)}`}>+${hidden}</button>` : nothing}
        ${isEmpty ? html`<span class="tl-empty">${lane.empty}</span>` : nothing}
      </div>`);
    render(labels, this.host.querySelector(".tl-labels"));
    for (const element of this.host.querySelectorAll(".tl-lane")) {
      element.style.setProperty("--row", element.lane.top);
      element.style.setProperty("--count", element.lane.count);
    }
    const notes = this.lanes.map((lane) => lane.note).filter(Boolean);
    render(notes.map((note) => html`<p class="tl-note">${note}</p>`), this.host.querySelector(".tl-notes"));
    const total = this.lanes.reduce((sum, lane) => sum + lane.items.length, 0);
    this.host.querySelector(".tl-text > summary").textContent = `As a list (${total})`;
  }

  _open(key) {
    this.opened.add(key);
    this._build();
    this.look();
  }

  /** Marks that lie on each other become one with a number. */
  _gather(width, scale) {
    const { from } = this.board.view;
    let last = null;
    const marks = [...this.nodes.values()].filter(({ item }) => item.to === undefined);
    marks.sort((a, b) => a.lane.key.localeCompare(b.lane.key) || a.item.time - b.item.time);
    for (const mark of marks) {
      const x = ((mark.item.time - from) * scale * width) / 100;
      const isNear = last && last.lane === mark.lane && x - last.x < NEAR_PIXELS && !mark.element.hidden;
      if (isNear) last.members.push(mark.item);
      else last = mark.element.hidden ? last : Object.assign(mark, { x, members: [mark.item] });
      if (isNear) mark.element.hidden = true;
    }
    for (const mark of marks.filter(({ element }) => !element.hidden)) {
      const many = mark.members?.length ?? 1;
      mark.element.dataset.many = many > 1 ? many : "";
      const glyph = worstOf(mark.members ?? [mark.item]);
      mark.element.dataset.tone = glyph.tone;
      mark.element.firstElementChild.textContent = many > 1 ? String(many) : glyph.glyph;
      mark.element.setAttribute("aria-label", many > 1 ? `${many} events from ${dateTime(mark.item.time)}: ${mark.members.map((item) => item.label).join(", ")}` : mark.item.say);
    }
  }

  _ticks(width) {
    const { from, to } = this.board.view;
    const { times, step } = timeTicks(from, to, Math.max(2, width / scaled(PIXELS_A_TICK)));
    const words = timeMarks(times, step);
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
    this.stop = new AbortController();
    const listen = (target, type, handler) => target.addEventListener(type, handler, { signal: this.stop.signal });
    const found = (event) => event.target.closest?.("[data-item]")?.dataset.item;
    listen(this.area, "pointerover", (event) => event.pointerType !== "touch" && found(event) && this._detail(found(event), false));
    listen(this.area, "pointerout", (event) => !this.pinned && !this.card.contains(event.relatedTarget) && this._hide());
    listen(this.card, "pointerleave", () => !this.pinned && this._hide());
    listen(this.area, "focusin", (event) => found(event) && event.target.matches(":focus-visible") && this._detail(found(event), false));
    listen(this.area, "focusout", (event) => !this.pinned && !this.card.contains(event.relatedTarget) && this._hide());
    listen(this.area, "click", (event) => {
      const key = found(event);
      if (!key || event.target.closest("a")) return;
      if (this.pinned === key) this._hide();
      else this._detail(key, true);
    });
    listen(this.host, "keydown", (event) => {
      if (event.key === "Escape" && !this.card.hidden) this._close();
      else if (this.area.contains(event.target)) this._key(event);
    });
    listen(this.host.querySelector(".tl-text"), "toggle", () => this._text());
  }

  _detail(key, isPinned) {
    const node = this.nodes.get(key);
    if (!node || (this.pinned && !isPinned)) return;
    this.pinned = isPinned ? key : null;
    const items = node.members?.length > 1 ? node.members : [node.item];
    render(html`${items.slice(0, 8).map((item) => item.detail())}
      ${items.length > 8 ? html`<p class="muted">and ${items.length - 8} more: zoom in</p>` : nothing}
      ${isPinned ? html`<button type="button" class="button quiet tl-close" @click=${() => this._close()}>Close</button>` : nothing}`, this.card);
    this.card.hidden = false;
    const box = node.element.getBoundingClientRect();
    const own = this.host.getBoundingClientRect();
    const left = Math.min(Math.max(box.left - own.left, 8), Math.max(8, own.width - this.card.offsetWidth - 8));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${box.bottom - own.top + 6}px`;
    node.element.setAttribute("aria-describedby", this.card.id);
  }

  _close() {
    const element = this.nodes.get(this.pinned)?.element;
    this._hide();
    element?.focus();
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

  _key(event) {
    const all = this._visible();
    const here = all.find(({ element }) => element === event.target);
    const lanes = this.lanes.filter((lane) => all.some((node) => node.lane === lane));
    if (!here || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const beside = all.filter((node) => node.lane === here.lane).sort((a, b) => begin(a.item) - begin(b.item));
    const at = beside.indexOf(here);
    const step = { ArrowLeft: beside[at - 1], ArrowRight: beside[at + 1], Home: beside[0], End: beside.at(-1) };
    const other = lanes[lanes.indexOf(here.lane) + (event.key === "ArrowDown" ? 1 : -1)];
    const next = event.key in step ? step[event.key] : other && nearest(all.filter((node) => node.lane === other), begin(here.item));
    if (!next) return;
    for (const { element } of all) element.tabIndex = element === next.element ? 0 : -1;
    next.element.focus();
  }

  _text() {
    const box = this.host.querySelector(".tl-text");
    const items = this.lanes.flatMap((lane) => lane.items.map((item) => ({ lane, item })));
    items.sort((a, b) => begin(b.item) - begin(a.item));
    render(box.open ? asTable(items) : nothing, box.querySelector(".tl-list"));
  }
}

function frame(timeline) {
  timeline.id = `timeline-${Math.random().toString(36).slice(2, 8)}`;
  return html`
    <div class="tl-body">
      <div class="tl-labels"></div>
      <div class="tl-area time-area" role="group" aria-label="What happened, arrow keys move"><div class="tl-cursor" hidden></div></div>
    </div>
    <div class="tl-axis" aria-hidden="true"></div>
    <div class="tl-notes"></div>
    <div class="tl-detail card" id=${timeline.id} role="status" hidden></div>
    <details class="tl-text"><summary>As a list</summary><div class="tl-list"></div></details>`;
}
