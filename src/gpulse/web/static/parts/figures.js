// Key figures at the head of a page, and the state of a GPU or node after its name.

import { gpuState, HARVESTED, STATE_TITLES } from "../core/fleet.js";
import * as format from "../core/format.js";
import { html, nothing } from "../vendor/lit-html.js";
import { stateGlyph } from "./glyphs.js";

/**
 * A value of the row of key figures: its name, its number, and its unit or what it is a part of.
 * @param {string} name
 * @param {Dashboard.Content} value
 * @param {Dashboard.Content} [note]
 */
export function figure(name, value, note = null) {
  return html`<div class="figure" data-figure=${name}><dt>${name}</dt><dd>${value}${note ? html` <span class="unit">${note}</span>` : nothing}</dd></div>`;
}

/**
 * A formatted value as a figure, with its unit apart: `139 W` is 139 and W; nothing is in two parts when it is unknown.
 * @param {string} name
 * @param {string} text
 * @param {string | null} [note]
 */
export function measured(name, text, note = null) {
  const [, number, unit] = text.match(/^(-?[\d.]+)\s*(\D*)$/) ?? [null, text, ""];
  return figure(name, number, [unit, note].filter(Boolean).join(" ") || null);
}

/**
 * A part of a whole as a figure: `3.4 of 141 GiB`.
 * @param {string} name
 * @param {Dashboard.MaybeNumber} used
 * @param {Dashboard.MaybeNumber} total
 */
export function partOf(name, used, total) {
  if (!format.known(total)) return measured(name, format.bytes(used));
  const [part, whole] = format.bytesOf(used, total).split(" / ");
  return figure(name, part, `of ${whole}`);
}

/**
 * The row of key figures; the state of its node says whether they are current.
 * @param {string} state
 * @param {Dashboard.Content} content
 */
export function figureRow(state, content) {
  return html`<dl class="figures" data-state=${state} aria-label="Key figures">${content}</dl>`;
}

/**
 * A state as a glyph and a word.
 * @param {string} state
 * @param {string} words
 * @param {string | null} [title]
 */
export function pill(state, words, title = null) {
  return html`<span class="pill" data-state=${state} title=${title ?? nothing}>${stateGlyph(state)} ${words}</span>`;
}

/**
 * What a GPU does, as a glyph and a word.
 * @param {Dashboard.Gpu} gpu
 */
export function statePill(gpu) {
  const state = gpuState(gpu);
  return pill(state, STATE_TITLES[state], state === "harvested" ? HARVESTED : null);
}
