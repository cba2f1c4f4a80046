// Helpers for pages with tables: sortable headers, search, error notes, and copying.

import { html, nothing } from "../vendor/lit-html.js";

/**
 * A header cell that sorts by its column; `sort` = {by, down}.
 * @param {string} name
 * @param {string} words
 * @param {Dashboard.Sort} sort
 * @param {(name: string) => void} onSort
 */
export function sortHeader(name, words, sort, onSort, classes = "") {
  const state = sort.by !== name ? nothing : sort.down ? "descending" : "ascending";
  const mark = sort.by !== name ? "" : sort.down ? "▼" : "▲";
  return html`<th scope="col" class=${classes} aria-sort=${state}><button type="button" class="sort" @click=${() => onSort(name)}>${words}<span class="sort-mark" aria-hidden="true">${mark}</span></button></th>`;
}

/**
 * Rows by one of their values; what is unknown comes last.
 * @template T
 * @param {T[]} rows
 * @param {(row: T) => string | number | null | undefined} value
 * @param {boolean} down
 */
export function sorted(rows, value, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [left, right] = [value(a), value(b)];
    const known = Number(left === null || left === undefined) - Number(right === null || right === undefined);
    if (known || left === right) return known;
    if (typeof left === "string") return sign * left.localeCompare(String(right), undefined, { numeric: true });
    return sign * (Number(left) - Number(right));
  });
}

/**
 * What went wrong, with what to try.
 * @param {Dashboard.Problem | null | undefined} error
 * @param {(() => void) | null} [again]
 */
export function errorNote(error, again = null) {
  if (!error) return nothing;
  return html`<div class="error-note" role="alert"><p><strong>${sentence(error.message)}</strong></p>
    ${error.hint ? html`<p>${sentence(error.hint)}</p>` : nothing}
    ${again ? html`<p><button type="button" class="button" @click=${again}>Try again</button></p>` : nothing}</div>`;
}

/** @param {string} text */
function sentence(text) {
  const said = String(text ?? "").trim();
  const whole = said.charAt(0).toUpperCase() + said.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/**
 * Put text on the clipboard, also where the browser has none for pages without TLS; whether it worked.
 * @param {string} text
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** @param {string} text */
function copyBySelection(text) {
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  field.setAttribute("aria-hidden", "true");
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  before?.focus();
  return copied;
}

/**
 * Whole words of a filter, each of which must be somewhere in the texts.
 * @param {string} filter
 * @param {Dashboard.MaybeText[]} texts
 */
export function matches(filter, texts) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const all = texts
    .filter((text) => text !== null && text !== undefined)
    .join("\n")
    .toLowerCase();
  return words.every((word) => all.includes(word));
}

/**
 * Wrap a function so that it runs this long after the first call, once for all calls until then.
 * @param {() => void} work
 * @param {number} milliseconds
 */
export function later(work, milliseconds) {
  /** @type {number | undefined} */
  let timer;
  const schedule = () => {
    timer ??= setTimeout(() => {
      timer = undefined;
      work();
    }, milliseconds);
  };
  schedule.cancel = () => clearTimeout(timer);
  return schedule;
}
