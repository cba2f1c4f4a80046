// Lines of code behind a finding, where the head knows them and shows them to this browser.

import * as format from "../core/format.js";
import { html, nothing } from "../vendor/lit-html.js";

/**
 * `train.py:84 tokenize`: the last parts of the path that tell files apart.
 * @param {Dashboard.CodePlace} place
 */
function lineName({ file, line, function: name }) {
  const parts = file.split("/");
  const short = parts.slice(parts.at(-1)?.startsWith("__") ? -2 : -1).join("/");
  return `${format.text(short)}:${line} ${format.text(name)}`;
}

/**
 * `83 % of 40 stacks, in a worker; in json/encoder.py:258 iterencode`.
 * @param {Dashboard.CodePlace} place
 */
function lineNote({ share, stacks, role, doing }) {
  const inner = doing ? `; in ${format.text(doing)}` : "";
  return `${format.percent(share)} of ${stacks} ${stacks === 1 ? "stack" : "stacks"}${role === "worker" ? ", in a worker" : ""}${inner}`;
}

/**
 * The first line of a finding as plain text; empty without one.
 * @param {Dashboard.CodeFinding} finding
 */
export function lineText({ where, where_note }) {
  return where?.length ? `${lineName(where[0])}, ${lineNote(where[0])}` : (where_note ?? "");
}

/**
 * All lines of a finding, the most frequent first, or why there is none; nothing where no stacks were taken.
 * @param {Dashboard.CodeFinding} finding
 */
export function codeLines({ where, where_note }) {
  if (!where?.length && !where_note) return nothing;
  return html`<div class="code-lines">
    ${where?.length ? html`<ol aria-label="Lines of code">${where.map((place) => html`<li><code title=${format.text(place.file)}>${lineName(place)}</code> <span class="muted">${lineNote(place)}</span></li>`)}</ol>` : nothing}
    ${where_note ? html`<p class="muted">${format.text(where_note)}</p>` : nothing}
  </div>`;
}

/**
 * The first line of a finding, for one line of a list; nothing without one.
 * @param {Dashboard.CodeFinding | undefined} finding
 */
export function firstLine(finding) {
  const place = finding?.where?.[0];
  return place
    ? html` <span class="muted">at</span> <code class="code-line" title=${format.text(place.file)}>${lineName(place)}</code>`
    : nothing;
}
