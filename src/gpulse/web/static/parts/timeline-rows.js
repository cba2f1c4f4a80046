// The items of timelines: in which row they lie, how they look, and all of them as a table.
import { html } from "../vendor/lit-html.js";
import { dateTime, duration } from "../core/format.js";

const MOST_ROWS = 6;
const MOST_BARS = 500;
const MOST_TEXT_ROWS = 300;

/** When an item begins. */
export const begin = (item) => item.from ?? item.time;

/** The one of some that begins nearest to a time. */
export function nearest(nodes, time) {
  return nodes.reduce((best, node) => (Math.abs(begin(node.item) - time) < Math.abs(begin(best.item) - time) ? node : best));
}

const TONES = ["bad", "warn", "good", "muted"];

/** The gravest of some marks. */
export function worstOf(items) {
  return items.reduce((worst, item) => (TONES.indexOf(item.tone) < TONES.indexOf(worst.tone) ? item : worst));
}

/** Where an element stands, in hundredths of the width; without a width it is a mark. */
export function place(element, left, width) {
  element.hidden = left > 100 || (width === null ? left < 0 : width < 0);
  if (element.hidden) return;
  element.style.left = `${left}%`;
  if (width !== null) element.style.width = `${width}%`;
}

/** Makes an element look like its item. */
export function dress(element, item, lane) {
  const isMark = item.to === undefined;
  element.className = isMark ? "tl-mark" : "tl-bar";
  element.dataset.item = `${lane.key} ${item.key}`;
  element.dataset.kind = lane.kind ?? "";
  if (item.href) element.href = item.href;
  else element.type = "button";
  if (item.severity) element.dataset.severity = item.severity;
  else element.dataset.tone = item.tone ?? "";
  element.setAttribute("aria-label", item.say);
  if (!element.firstElementChild) element.append(document.createElement("span"));
  const text = isMark ? item.glyph : item.label;
  if (element.firstElementChild.textContent !== text) element.firstElementChild.textContent = text;
}

/** In which row of a lane each item lies so that bars do not cover each other. */
export function packed(lane, isOpen, view) {
  const ends = [];
  const places = [];
  const inView = lane.items.filter((item) => item.to === undefined || (item.to >= view.from && item.from <= view.to));
  const items = inView.length > MOST_BARS ? [...inView].sort((a, b) => b.to - b.from - (a.to - a.from)).slice(0, MOST_BARS) : inView;
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
  const most = isOpen ? rows : Math.min(rows, lane.rows ?? MOST_ROWS);
  return { places: places.filter(([, row]) => row < most), count: most, hidden: rows - most };
}

/** Items as a table. */
export function asTable(items) {
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="What happened, as a list"><table class="table">
    <caption>Newest first${items.length > MOST_TEXT_ROWS ? `, the last ${MOST_TEXT_ROWS}` : ""}</caption>
    <thead><tr><th scope="col">From</th><th scope="col">Length</th><th scope="col">What</th></tr></thead>
    <tbody>${items.slice(0, MOST_TEXT_ROWS).map(({ lane, item }) => html`<tr>
      <td>${dateTime(begin(item))}</td><td>${item.to === undefined ? "" : duration(item.to - item.from)}</td>
      <td>${lane.label}: ${item.href ? html`<a href=${item.href}>${item.label}</a>` : item.label}</td></tr>`)}</tbody>
  </table></div>`;
}
