// Hardware of a node and its GPUs: requests, and the panels about identity, health and Xid errors.

import { get, url } from "../core/api.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";

const XID_DAYS = 90;
const MAX_XIDS = 12;

/**
 * An Xid error of a GPU.
 * @typedef {{ key: string, time: number, code: number, errors: number, meaning: string | null, holders: XidHolder[] | null }} Xid
 * @typedef {{ pid: number, user?: string | null, name?: string | null }} XidHolder
 */

/**
 * Request the hardware of a node.
 * @param {string} node
 * @param {AbortSignal} signal
 * @returns {Promise<Api.NodeHardware>}
 */
export async function loadHardware(node, signal) {
  return /** @type {Promise<Api.NodeHardware>} */ (get(url(`/api/v1/nodes/${encodeURIComponent(node)}/hardware`), {}, { signal }));
}

/**
 * Request the Xid errors of a GPU in the last months, newest first.
 * @param {string} node
 * @param {(detail: Record<string, unknown>) => boolean} isOwn
 * @param {AbortSignal} signal
 * @returns {Promise<Xid[]>}
 */
export async function loadXids(node, isOwn, signal) {
  const { events } = await get("/api/v1/events", { kinds: ["xid"], nodes: [node], from: `-${XID_DAYS}d` }, { signal });
  /** @type {Map<string, Api.EventRow>} */
  const first = new Map(); // an agent that restarts may report an error again
  for (const event of events) {
    const key = `${event.detail.code} ${event.detail.time}`;
    if (isOwn(event.detail) && !first.has(key)) first.set(key, event);
  }
  return [...first]
    .map(([key, event]) => ({
      key,
      time: Date.parse(event.time) / 1000,
      code: Number(event.detail.code),
      errors: Number(event.detail.errors ?? 1),
      meaning: /** @type {string | null} */ (event.detail.meaning ?? null),
      holders: /** @type {XidHolder[] | null} */ (event.detail.holders ?? null),
    }))
    .sort((a, b) => b.time - a.time);
}

/**
 * Pairs of words, one below the other; what is unknown is a dash.
 * @param {Array<[name: string, value: Dashboard.Content]>} rows
 */
export function factList(rows) {
  return html`<dl class="fact-list">${rows.map(
    ([name, value]) =>
      html`<div><dt>${name}</dt><dd>${typeof value === "string" || value === null || value === undefined ? html`<bdi>${format.text(value)}</bdi>` : value}</dd></div>`,
  )}</dl>`;
}

/** @param {Dashboard.MaybeText} text */
const code = (text) => (text ? html`<bdi class="identifier">${format.text(text)}</bdi>` : null);

/**
 * Who a GPU is: numbers on its board, where it is plugged in, and what drives it.
 * @param {Api.GpuHardware | null} known
 * @param {Api.NodeHardware | null} node
 * @param {Array<[string, Dashboard.Content]>} [more]
 */
export function identityPanel(known, node, more = []) {
  const chip = [known?.architecture, known?.compute_capability && `compute ${known.compute_capability}`].filter(Boolean).join(", ");
  const near = [
    format.known(known?.numa_node) ? `NUMA ${known.numa_node}` : null,
    known?.cpu_affinity ? `CPUs ${known.cpu_affinity}` : null,
  ].filter(Boolean);
  return html`<section class="card panel" aria-label="Identity"><h2>Identity</h2>${
    known
      ? factList([
          ["Serial", code(known.serial)],
          ["UUID", code(known.uuid)],
          ["Bus", code(shortBusId(known.bus_id))],
          ["Nearest", near.length ? near.join(", ") : null],
          ["Board", code(known.board_part_number)],
          ["VBIOS", code(known.vbios)],
          ["Chip", chip || null],
          ["Driver, CUDA", [node?.driver, node?.cuda].map((version) => version ?? format.UNKNOWN).join(", ")],
          ...more,
        ])
      : html`<p class="muted">${node ? "No information about this GPU is available." : "Loading…"}</p>`
  }</section>`;
}

/**
 * `00000000:2a:00.0` as the kernel writes it: `0000:2a:00.0`.
 * @param {Dashboard.MaybeText} text
 */
function shortBusId(text) {
  return text?.replace(/^0000(?=[0-9a-f]{4}:)/, "") ?? null;
}

/** Counters since the driver was loaded, and over the lifetime of the board. */
const ECC = [
  ["corrected", "ecc_corrected_errors_total", "ecc_corrected_errors_lifetime_total"],
  ["uncorrected", "ecc_uncorrected_errors_total", "ecc_uncorrected_errors_lifetime_total"],
];
const LIFETIME = [
  ["rows remapped after corrected errors", "remapped_rows_corrected"],
  ["rows remapped after uncorrected errors", "remapped_rows_uncorrected"],
  ["pages retired after corrected errors", "retired_pages_corrected"],
  ["pages retired after uncorrected errors", "retired_pages_uncorrected"],
];
const PENDING = [
  ["remapped_rows_pending", "a row will be remapped at the next reset"],
  ["remapped_rows_failed", "a row could not be remapped"],
  ["retired_pages_pending", "a page will be retired at the next reset"],
];

/** Live metrics of the panel about health. */
export const HEALTH_METRICS = [
  "ecc_enabled",
  ...ECC.flatMap(([, boot, lifetime]) => [boot, lifetime]),
  ...LIFETIME.map(([, metric]) => metric),
  ...PENDING.map(([metric]) => metric),
  "recovery_action",
  "nvlink_links",
  "nvlink_links_active",
  "nvlink_link_bytes_per_second",
  "nvlink_errors_total",
  "pcie_link_generation",
  "pcie_link_generation_max",
  "pcie_link_width",
  "pcie_link_width_max",
  "pcie_replays_total",
];

/**
 * Memory errors and repairs, NVLinks and the PCIe link.
 * @param {Dashboard.Values} v
 * @param {{ facts?: Record<string, number>, isFaulty: boolean, isLost: boolean }} options
 */
export function healthPanel(v, { facts = {}, isFaulty, isLost }) {
  return html`<section class="card panel" aria-label="Health">
    <div class="panel-head"><h2>Health</h2>${verdict(v, isFaulty)}</div>
    ${memoryErrors(v, isLost)}
    ${factList([
      ["NVLink", nvlinkWords(v)],
      ["PCIe", pcieWords({ ...facts, ...v })],
    ])}</section>`;
}

/**
 * @param {Dashboard.Values} v
 * @param {boolean} isFaulty
 */
function verdict(v, isFaulty) {
  const due = PENDING.filter(([metric]) => v[metric]).map(([, words]) => words);
  if (v.recovery_action) due.push("the driver requests a recovery action");
  if (due.length) return html`<strong class="bad-text">${due.join("; ")}</strong>`;
  if (isFaulty) return html`<strong class="bad-text">see the finding above</strong>`;
  if (!ECC.some(([, boot]) => format.known(v[boot])) && !format.known(v.remapped_rows_pending)) return nothing;
  return html`<span class="good-text"><span aria-hidden="true">✓</span> no action needed</span>`;
}

/**
 * @param {Dashboard.Values} v
 * @param {boolean} isLost whether the connection to the head is lost
 */
function memoryErrors(v, isLost) {
  const isLoaded = "ecc_enabled" in v; // the head sends what was requested, also what is unknown
  if (!isLoaded && isLost) return html`<p class="muted">Unknown while the head cannot be reached.</p>`;
  if (!Object.keys(v).length) return html`<p class="muted">The node has not reported since the head started.</p>`;
  if (!isLoaded) return html`<p class="muted">Loading…</p>`;
  const lifetime = LIFETIME.filter(([, metric]) => format.known(v[metric]));
  if (!lifetime.length && !ECC.some(([, boot, whole]) => format.known(v[boot]) || format.known(v[whole]))) {
    const words = v.ecc_enabled === 0 ? "Error correction (ECC) is off." : "The driver reports no memory error counters for this GPU.";
    return html`<p class="muted">${words}</p>`;
  }
  const flags = ["remapped_rows_pending", "remapped_rows_failed"].map((metric) => v[metric]);
  return html`<table class="table health-table"><caption class="visually-hidden">Memory errors</caption>
    <thead><tr><th scope="col">ECC errors</th><th scope="col" class="num">Since boot</th><th scope="col" class="num">Lifetime</th></tr></thead>
    <tbody>${ECC.map(([words, boot, whole]) => counterRow(words, v[boot], v[whole]))}
      ${lifetime.map(([words, metric]) => counterRow(words, null, v[metric]))}
      ${flags.some(format.known) ? html`<tr><th scope="row">remap pending, failed</th><td class="num" colspan="2">${flags.map((flag) => (format.known(flag) ? (flag ? "yes" : "no") : format.UNKNOWN)).join(", ")}</td></tr>` : nothing}
    </tbody></table>`;
}

/**
 * @param {string} words
 * @param {Dashboard.MaybeNumber} boot
 * @param {Dashboard.MaybeNumber} lifetime
 */
function counterRow(words, boot, lifetime) {
  return html`<tr><th scope="row">${words}</th><td class="num">${format.count(boot)}</td><td class="num">${format.count(lifetime)}</td></tr>`;
}

/**
 * `18 of 18 up, 26.6 GB/s each, 0 errors`.
 * @param {Dashboard.Values} v
 */
function nvlinkWords(v) {
  if (!format.known(v.nvlink_links)) return null;
  const speed = v.nvlink_link_bytes_per_second;
  const errors = v.nvlink_errors_total;
  return [
    `${format.count(v.nvlink_links_active)} of ${v.nvlink_links} up`,
    speed ? `${format.rate(speed)} each` : null,
    format.known(errors) ? `${format.count(errors)} ${errors === 1 ? "error" : "errors"}` : null,
  ]
    .filter(Boolean)
    .join(", ");
}

/**
 * `gen 5 ×16, 3 replays since boot`; with what would be possible when that is more.
 * @param {Dashboard.Values} v
 */
function pcieWords(v) {
  const { pcie_link_generation: generation, pcie_link_width: width, pcie_replays_total: replays } = v;
  const link = format.known(generation) ? linkText(generation, width) : null;
  const most = format.known(v.pcie_link_generation_max) ? linkText(v.pcie_link_generation_max, v.pcie_link_width_max) : null;
  return (
    [
      link && most && most !== link ? `${link} of ${most}` : (link ?? (most && `up to ${most}`)),
      format.known(replays) ? `${format.count(replays)} ${replays === 1 ? "replay" : "replays"} since boot` : null,
    ]
      .filter(Boolean)
      .join(", ") || null
  );
}

/**
 * @param {number} generation
 * @param {Dashboard.MaybeNumber} width
 */
const linkText = (generation, width) => `gen ${generation}${format.known(width) ? ` ×${width}` : ""}`;

/**
 * The Xid errors of a GPU with their meaning, newest first.
 * @param {Xid[] | null} xids
 */
export function xidPanel(xids) {
  const shown = xids?.slice(0, MAX_XIDS) ?? [];
  const more = (xids?.length ?? 0) - shown.length;
  return html`<section class="card panel" aria-label="Xid errors">
    <div class="panel-head"><h2>Xid errors</h2><span class="muted">${XID_DAYS} days</span></div>
    ${
      xids === null
        ? html`<p class="muted">Loading…</p>`
        : shown.length
          ? html`<table class="table xids"><caption class="visually-hidden">Xid errors of this GPU in the last ${XID_DAYS} days</caption>
            <thead><tr><th scope="col">When</th><th scope="col" class="num">Xid</th><th scope="col">Meaning</th></tr></thead>
            <tbody>${shown.map(xidRow)}</tbody></table>`
          : html`<p class="muted">No Xid errors in the last ${XID_DAYS} days.</p>`
    }
    ${more > 0 ? html`<p class="muted">and ${more} older ${more === 1 ? "one" : "ones"}</p>` : nothing}</section>`;
}

/** @param {Xid} xid */
function xidRow(xid) {
  return html`<tr><td><time datetime=${new Date(xid.time * 1000).toISOString()}>${format.dayTime(xid.time)}</time></td>
    <th scope="row" class="num">${xid.code}</th>
    <td>${xid.meaning ?? "not in the list of meanings"}${xid.errors > 1 ? `, ${xid.errors} times` : ""}${holderWords(xid.holders)}</td></tr>`;
}

/**
 * Who was on the GPU: the users, and the program when there was one.
 * @param {XidHolder[] | null} holders
 */
function holderWords(holders) {
  if (holders === null) return nothing;
  if (!holders.length) return html`<div class="muted">no program on the GPU</div>`;
  const users = [...new Set(holders.map((holder) => holder.user ?? "").filter(Boolean))];
  const program = holders.length === 1 ? (holders[0].name ?? `pid ${holders[0].pid}`) : `${holders.length} programs`;
  return html`<div class="muted">${users.map((user) => html`<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>, `)}<bdi>${format.text(program)}</bdi></div>`;
}
