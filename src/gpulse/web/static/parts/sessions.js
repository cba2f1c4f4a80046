// Sessions in words: states, times, what they are of, their files.

import { html } from "../vendor/lit-html.js";
import { url } from "../core/api.js";
import { text } from "../core/format.js";
import { href } from "../core/router.js";

/** The kinds of files. */
export const FORMATS = ["json", "jsonl", "csv", "parquet"];
const STATES = { active: ["good", "● active"], interrupted: ["warn", "▲ interrupted"], finished: ["muted", "■ finished"] };

/** A time of the API in epoch seconds, or null. */
export function seconds(time) {
  if (typeof time === "number") return time;
  const read = Date.parse(time ?? "");
  return Number.isNaN(read) ? null : read / 1000;
}

/** Where a session ends: its end, its interruption, or now. */
export function endOf(session, now) {
  const gaps = session.interruptions ?? [];
  const broken = session.state === "interrupted" && gaps.length ? seconds(gaps[gaps.length - 1].start_time) : null;
  return seconds(session.end_time) ?? broken ?? now;
}

/** How long a session is, in seconds. */
export function length(session, now) {
  return Math.max(0, endOf(session, now) - seconds(session.start_time));
}

/** The state of a session in a word with a shape. */
export function stateBadge(session) {
  const [kind, words] = STATES[session.state] ?? ["muted", session.state];
  return html`<span class="badge ${kind}">${words}</span>`;
}

/** What a session is of: all, or which nodes and GPUs. */
export function what(session) {
  const nodes = session.nodes ?? [];
  const gpus = session.gpus ?? [];
  if (!nodes.length && !gpus.length) return "everything";
  return html`${nodes.map((node) => html`<a href=${href("node", node)}><bdi>${text(node)}</bdi></a> `)}${gpus.map((gpu) => html`${gpuLink(gpu)} `)}`;
}

/** A GPU as a session names it: `node:index`, an index on every node, or a UUID. */
function gpuLink(gpu) {
  const [, node, label] = gpu.match(/^(.+?):(\d+(?::\d+)?)$/) ?? [];
  if (node) {
    return html`<a href=${href("gpu", node, label)}><bdi>${text(node)}</bdi>:${label}</a>`;
  }
  return html`<span>${/^\d+$/.test(gpu) ? `GPU ${gpu}` : text(gpu)}</span>`;
}

/** Links to a session's file in every format. */
export function downloads(session) {
  return html`<span class="downloads">${FORMATS.map((kind) => html`<a href=${url(`/api/v1/sessions/${encodeURIComponent(session.session_id)}/download`, { format: kind })} download aria-label=${`Download ${session.name} as ${kind}`}>${kind}</a> `)}</span>`;
}
