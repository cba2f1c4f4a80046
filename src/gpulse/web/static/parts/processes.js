// Describe processes: program, label, link to the job, and the table.

import { jobKey } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";

/**
 * A process as far as it takes to say what it runs.
 * @typedef {{ pid: number, name: string | null, command: string[] }} NamedProcess
 */

/**
 * A process that holds a GPU, and until when that was so.
 * @typedef {{ node: string, gpu: string, process: Live.Process, until: number }} LiveRow
 */

/**
 * When a job began and ended, and its state: running, ended, or lost when all nodes that it runs on are.
 * @typedef {{ from: number, to: number | null, state: "running" | "lost" | "ended" }} JobLife
 */

const INTERPRETER = /^(python[\d.]*|pypy[\d.]*|bash|sh|zsh|dash|perl|ruby|node|Rscript|julia)$/;
const TAKES_A_WORD = new Set(["-W", "-X", "--check-hash-based-pycs"]);

/**
 * The words of a command from its script on, without directories: `train.py --x`; of another program all of them.
 * @param {NamedProcess} process
 */
export function programWords(process) {
  const [first, ...rest] = process.command ?? [];
  if (first === undefined) {
    return [process.name ?? `pid ${process.pid}`];
  }
  const name = base(first);
  const at = INTERPRETER.test(name) ? scriptAt(rest) : -1;
  return at < 0 ? [name, ...rest] : [base(rest[at]), ...rest.slice(at + 1)];
}

/**
 * A process's whole command, or its name.
 * @param {NamedProcess} process
 */
export function commandOf(process) {
  return process.command?.length ? process.command.join(" ") : process.name;
}

/**
 * Where an interpreter's script or module stands among its words; -1 when it has none.
 * @param {string[]} words
 */
function scriptAt(words) {
  for (let at = 0; at < words.length; at += 1) {
    if (words[at] === "-m") {
      return at + 1 < words.length ? at + 1 : -1;
    }
    if (words[at] === "-c" || words[at] === "-e" || words[at] === "-") {
      return -1;
    }
    if (TAKES_A_WORD.has(words[at])) {
      at += 1;
    } else if (!words[at].startsWith("-")) {
      return words[at].trim() ? at : -1;
    }
  }
  return -1;
}

/** @param {string} path */
function base(path) {
  return path.slice(path.lastIndexOf("/") + 1) || path;
}

/**
 * What a process runs, in a few words: `train.py --lr 0.1`.
 * @param {NamedProcess} process
 */
export function programOf(process) {
  const words = programWords(process).slice(0, MAX_WORDS).join(" ");
  return format.text(words.length > MAX_CHARS ? `${words.slice(0, MAX_CHARS)}…` : words);
}

/**
 * Label of a process on a bar: its user and its program.
 * @param {NamedProcess & { user: string | null }} process
 */
export function processLabel(process) {
  return `${format.text(process.user ?? "?")} · ${programOf(process)}`;
}

/**
 * The address of the page about a process's job.
 * @param {string | null} node
 * @param {{ pid: number | null, start_time: number | null, job: string | null }} process
 * @param {Record<string, string>} [query]
 */
export function jobHref(node, process, query = {}) {
  const job = process.job;
  if (job) return href("job", job, query);
  const [, key] = jobKey("", process).split("/");
  return href("job", node, key, query);
}

const MAX_WORDS = 3;

const MAX_CHARS = 48;

/**
 * Processes that hold GPUs now, as a table: rows of {node, gpu (label), process, until (when that was so)}.
 * @param {LiveRow[]} rows
 * @param {string} caption
 * @param {{ withPlace?: boolean, withNode?: boolean }} [options]
 */
export function processTable(rows, caption, { withPlace = true, withNode = true } = {}) {
  if (!rows.length) return nothing;
  return html`<div class="table-scroll"><table class="table stack jobs-now">
    <caption>${caption}</caption>
    <thead><tr>${withPlace ? html`<th scope="col">GPU</th>` : nothing}<th scope="col">Process</th><th scope="col">User</th><th scope="col">Program</th>
      <th scope="col">Job</th><th scope="col" class="num">GPU memory</th><th scope="col" class="num">SM share</th><th scope="col" class="num">CPU</th>
      <th scope="col" class="num">Running</th></tr></thead>
    <tbody>${rows.map((row) => processRow(row, withPlace, withNode))}</tbody></table></div>`;
}

/**
 * @param {LiveRow} options
 * @param {boolean} withPlace
 * @param {boolean} withNode
 */
function processRow({ node, gpu, process, until }, withPlace, withNode) {
  const job = jobHref(node, process);
  const where = process.job ?? process.container ?? process.pod;
  return html`<tr>
    ${withPlace ? html`<td data-label="GPU"><a href=${href("gpu", node, gpu)}>${withNode ? html`<bdi>${format.text(node)}</bdi> ` : nothing}GPU ${format.text(gpu)}</a></td>` : nothing}
    <th scope="row" data-label="Process"><a href=${job}>${process.pid}</a></th>
    <td data-label="User">${process.user ? html`<a href=${href("user", process.user)}><bdi>${format.text(process.user)}</bdi></a>` : "–"}</td>
    <td data-label="Program" class="program" title=${format.text(process.command?.join(" "))}>${programOf(process)}</td>
    <td data-label="Job"><bdi>${format.text(where)}</bdi></td>
    <td data-label="GPU memory" class="num">${format.bytes(process.gpu_memory_bytes)}</td>
    <td data-label="SM share" class="num">${format.percent(process.sm_ratio)}</td>
    <td data-label="CPU" class="num">${format.known(process.cpu_percent) ? `${Math.round(process.cpu_percent)}%` : "–"}</td>
    <td data-label="Running" class="num">${format.known(process.start_time) ? format.duration(until - process.start_time) : "–"}</td>
  </tr>`;
}

/**
 * The life of a job with these processes. Its start is that of its first process, in every time range.
 * @param {Api.ProcessRow[]} processes
 * @param {Dashboard.Fleet} fleet
 * @returns {JobLife}
 */
export function lifeOf(processes, fleet) {
  const open = processes.filter((process) => process.ended === null);
  const from = Math.min(...processes.map(startOf));
  if (!open.length) return { from, to: Math.max(...processes.map((process) => process.ended ?? 0)), state: "ended" };
  const isLost = open.every((process) => fleet.nodes.get(process.node)?.state === "lost");
  return { from, to: null, state: isLost ? "lost" : "running" };
}

/**
 * The lives of all jobs of some processes, by `jobKey`.
 * @param {Api.ProcessRow[]} processes
 * @param {Dashboard.Fleet} fleet
 * @returns {Map<string, JobLife>}
 */
export function livesOf(processes, fleet) {
  /** @type {Map<string, Api.ProcessRow[]>} */
  const jobs = new Map();
  for (const process of processes) {
    const key = jobKey(process.node, process);
    const known = jobs.get(key);
    if (known) known.push(process);
    else jobs.set(key, [process]);
  }
  return new Map([...jobs].map(([key, own]) => [key, lifeOf(own, fleet)]));
}

/**
 * When a process started; when it was first seen where that is unknown.
 * @param {Api.ProcessRow} process
 */
export function startOf(process) {
  return Math.min(process.start_time ?? Infinity, process.first_seen);
}
