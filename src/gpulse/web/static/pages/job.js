// One job: its GPUs, how well it used them, and its findings.

import { asError, get } from "../core/api.js";
import { byName, isHarvested, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, href } from "../core/router.js";
import { heldGpus, whileHeld } from "../parts/chart-data.js";
import { findingAside, markedGpus, worstSpan } from "../parts/finding-aside.js";
import { stateGlyph } from "../parts/glyphs.js";
import { GpuCharts } from "../parts/gpu-charts.js";
import { ROW_METRICS } from "../parts/gpu-rows.js";
import { HistoryPage, stat, unknownNote } from "../parts/history-page.js";
import { jobHref, lifeOf, programOf } from "../parts/processes.js";
import { facts } from "../parts/timeline-items.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const AROUND_SECONDS = 300;
/**
 * A scheduler's job, or one process.
 * @typedef {{ job?: string, node: string, pid?: number, start: number | null, words: string }} JobName
 */

/**
 * A job as far as the page knows it.
 * @typedef {object} JobState
 * @property {JobName} who
 * @property {Api.ProcessRow[]} own
 * @property {Dashboard.HeldGpu[]} gpus
 * @property {string[] | null} nodes
 * @property {number} seen
 * @property {Map<string, Api.ProcessRow>} all What is known of its processes, in all time ranges.
 * @property {import("../parts/processes.js").JobLife | null} life
 * @property {Api.UsageRow[] | null} usage
 * @property {boolean | null} isKnown
 */

const LOOK_BACK = ["-1d", "-30d"];
/** Lengths that the page offers, in addition to the whole job. */
const PRESETS = [900, 3600, 86400, 604800];
const MAX_NAMED_GPUS = 16;
const MAX_PROCESSES = 64;
const SAME_START_SECONDS = 1.5;

/**
 * What an address names: a scheduler's job, or one process.
 * @param {string[]} parts
 * @returns {JobName}
 */
export function parsed(parts) {
  const text = parts.join("/");
  const process = /^(.+)\/(\d+)@(-|\d+(?:\.\d+)?)$/.exec(text);
  if (!process) return { job: text, node: "", start: null, words: text };
  const [, node, pid, start] = process;
  return { node, pid: Number(pid), start: start === "-" ? null : Number(start), words: `process ${pid} on ${node}` };
}

/**
 * The page's title.
 * @param {Dashboard.Route} route
 */
export const title = (route) => `Job ${parsed(route.parts).words}`;

/**
 * Show one job.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const who = parsed(route.parts);
  /** @type {JobState} */
  const job = { who, own: [], gpus: [], nodes: null, seen: 0, all: new Map(), life: null, usage: null, isKnown: null };
  const page = new HistoryPage(root, route, app, {
    nodes: () => job.nodes,
    why,
    draw: (own) => {
      marked = markedGpus(found(own, job));
      draw(own, job, charts);
    },
    presets: () => (job.life ? [["Whole job", job.seen, job.life.to]] : []),
    range: { presets: PRESETS, extraAfter: 3600 },
  });
  root.dataset.layout = "rows";
  const gpus = () => job.gpus.map((gpu) => gpu.word);
  /** @type {Map<string, Dashboard.Severity>} */
  let marked = new Map();
  const charts = new GpuCharts(
    page.board,
    { lead: page.lead, rows: page.rows },
    {
      gpus,
      shape: (answer) => whileHeld(answer, job.gpus),
      live: (word, metric) => gpuOf(app.fleet, word)?.values[metric] ?? null,
      markOf: (word) => marked.get(word) ?? null,
      query: () => lifeQuery(job),
    },
  );
  page.relane = () => page.timeline.show(lanes(page, job));
  page.board.sides.push(
    (signal) => askProcesses(page, job, signal),
    async (signal) => {
      if (!job.nodes?.length) return;
      await page.askEvents(job.nodes, signal);
      page.relane();
    },
    (signal) => askUsage(page, job, signal),
  );
  begin(page, job);
  page.relane();
  return page.handle({ nodes: null, metrics: [...ROW_METRICS], host_metrics: ["cpus"], interval: 2 });
}

/**
 * @param {Dashboard.Fleet} fleet
 * @param {string} word
 */
function gpuOf(fleet, word) {
  const at = word.indexOf(":");
  return fleet.nodes.get(word.slice(0, at))?.gpus.find((gpu) => gpu.label === word.slice(at + 1)) ?? null;
}

/**
 * Find out when it lived, and look at that time.
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 */
async function begin(page, job) {
  try {
    const found = await lookUp(job.who, page.stop.signal);
    take(job, found, page.range.now(), page.app.fleet);
  } catch (error) {
    if (!page.stop.signal.aborted) page.board.failed(asError(error));
  }
  if (page.stop.signal.aborted) return;
  job.isKnown = job.own.length > 0;
  page.rangeBar.dispatchEvent(new Event("range-presets"));
  if (job.life) {
    const now = page.range.now();
    const margin = Math.max(((job.life.to ?? now) - job.seen) * 0.03, 15);
    page.range.fallback =
      job.life.to === null
        ? { length: Math.ceil(now - job.seen + margin), end: null }
        : { length: job.life.to - job.seen + 2 * margin, end: job.life.to + margin };
  }
  const { length, end } = page.range;
  page.range.read(current().query);
  if (page.range.length === length && page.range.end === end) page.board.load();
  page.refresh();
}

/**
 * @param {JobName} who
 * @param {AbortSignal} signal
 */
async function lookUp(who, signal) {
  if (who.job) {
    for (const from of LOOK_BACK) {
      const { processes } = await get("/api/v1/processes", { jobs: [who.job], from }, { signal });
      if (processes.length) return processes;
    }
    return [];
  }
  // It was seen when it started, unless its node's agent started later.
  const around = who.start === null ? [] : [{ from: who.start, to: who.start + AROUND_SECONDS }];
  for (const time of [...around, ...LOOK_BACK.map((from) => ({ from }))]) {
    const { processes } = await get("/api/v1/processes", { nodes: [who.node], ...time }, { signal });
    const found = processes.filter((process) => isOwn(process, who));
    if (found.length) return found;
  }
  return [];
}

/**
 * @param {Dashboard.ProcessIdentity & { node: string }} process
 * @param {JobName} who
 */
function isOwn(process, who) {
  if (who.job) return process.job === who.job;
  const isSame = who.start === null || process.start_time === null || Math.abs(process.start_time - who.start) < SAME_START_SECONDS;
  return process.node === who.node && process.pid === who.pid && isSame;
}

/**
 * @param {JobState} job
 * @param {Api.ProcessRow[]} processes
 * @param {number} now
 * @param {Dashboard.Fleet} fleet
 */
function take(job, processes, now, fleet) {
  if (!processes.length) return;
  job.own = processes;
  job.gpus = heldGpus(processes, now);
  job.nodes = [...new Set(processes.map((process) => process.node))].sort(byName);
  for (const process of processes) job.all.set(`${process.node}/${process.pid}@${process.start_time}`, process);
  const all = [...job.all.values()];
  job.seen = Math.min(...all.map((process) => process.first_seen));
  job.life = lifeOf(all, fleet);
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 * @param {AbortSignal} signal
 */
async function askProcesses(page, job, signal) {
  const words = job.who.job ? { jobs: [job.who.job] } : { nodes: [job.who.node] };
  const answer = await page.askProcesses(words, signal);
  const before = job.gpus.map((gpu) => gpu.word).join();
  take(
    job,
    answer.processes.filter((process) => isOwn(process, job.who)),
    answer.to,
    page.app.fleet,
  );
  job.isKnown ||= job.own.length > 0;
  page.relane();
  page.refresh();
  if (job.gpus.map((gpu) => gpu.word).join() !== before) page.board.load();
  else page.board.groups.forEach((group) => page.board.redraw(group));
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 * @param {AbortSignal} signal
 */
async function askUsage(page, job, signal) {
  const answer = await get("/api/v1/usage", { ...page.times(), by: "job", nodes: job.nodes }, { signal });
  const { who } = job;
  const pids = new Set(job.own.map((process) => process.pid));
  job.usage = answer.rows.filter((row) =>
    who.job ? row.job === who.job : row.job === null && row.node === who.node && pids.has(row.pid ?? -1),
  );
  page.refresh();
}

/**
 * @param {Dashboard.ChartSpec} spec
 * @param {string[]} titles
 */
function why(spec, titles) {
  if (titles.length) return `No data: ${titles.join(", ")}.`;
  return `No data for this job in this time range${spec.why ? `, or not available: ${spec.why}` : ""}.`;
}

/**
 * Whether a finding is about this job: about one of its GPUs, and about one of its processes where it names any.
 * @param {JobState} job
 * @returns {(finding: Api.FindingSpanRow, node: string) => boolean}
 */
function aboutJob(job) {
  const pids = new Set(job.own.map((process) => process.pid));
  const labels = new Set(job.gpus.map((gpu) => gpu.word));
  return (finding, node) => labels.has(`${node}:${finding.label}`) && (!finding.pids?.length || finding.pids.some((pid) => pids.has(pid)));
}

/**
 * What was found about this job: what holds now; of an ended job, and on a lost node, everything in its time.
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 */
function found(page, job) {
  const about = aboutJob(job);
  const end = job.life?.to ?? null;
  const { nodes } = page.app.fleet;
  /** @param {Api.FindingSpanRow} span */
  const isShown = ({ node, from, to }) => (end === null ? to === null || nodes.get(node)?.state === "lost" : from < end);
  return (page.events?.found.spans ?? []).filter((span) => about(span, span.node) && isShown(span));
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 */
function lanes(page, job) {
  return page.eventLanes({ about: aboutJob(job), isGrouped: true });
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 * @param {GpuCharts} charts
 */
function draw(page, job, charts) {
  if (job.all.size) job.life = lifeOf([...job.all.values()], page.app.fleet);
  render(heading(page, job, charts), page.head);
  render(job.own.length ? aside(page, job) : nothing, charts.side);
  render(job.own.length ? allProcesses(job, page.app.fleet) : nothing, page.more);
  charts.refresh();
}

/**
 * The worst finding; without one what the job runs.
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 */
function aside(page, job) {
  const spans = found(page, job);
  const worst = worstSpan(spans);
  const [first] = job.own;
  return html`${worst ? findingAside(worst, spans, page.manual, page.board.view.to) : html`<section class="card"><h2>No findings about this job</h2>${details(job, first)}</section>`}`;
}

/**
 * @param {JobState} job
 * @param {Api.ProcessRow} first
 */
function details(job, first) {
  return facts([
    ["Program", first.command?.length ? first.command.join(" ") : first.name],
    ["Container", first.container],
    ["Pod", first.pod],
    ["Nodes", html`${(job.nodes ?? []).map((node) => html`<a href=${href("node", node)}><bdi>${format.text(node)}</bdi></a> `)}`],
  ]);
}

/**
 * @param {Api.UsageRow[]} rows
 * @param {"gpu_seconds" | "harvested_seconds" | "idle_seconds" | "energy_joules" | "harvested_energy_joules"} name
 */
const sum = (rows, name) => {
  const known = rows.map((row) => row[name]).filter(format.known);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
};

/**
 * @param {Dashboard.HistoryPage} page
 * @param {JobState} job
 * @param {GpuCharts} charts
 */
function heading(page, job, charts) {
  const { who, own, life } = job;
  const { fleet } = page.app;
  const users = [...new Set(own.map((process) => process.user).filter(Boolean))];
  const now = fleet.headTime();
  const isRunning = life?.state === "running";
  const words = isRunning ? heldNow(fleet, job) : job.gpus.map((gpu) => gpu.word);
  const nodes = [...new Set(words.map((word) => word.slice(0, word.indexOf(":"))))];
  const session = words.length > MAX_NAMED_GPUS ? { nodes: nodes.join(",") } : { gpus: words.join(",") };
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Breadcrumb"><a href="#/jobs">Jobs</a> <span aria-hidden="true">/</span>
        ${users.map((user) => html`<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a> <span aria-hidden="true">/</span>`)}</nav>
      <h1><bdi>${format.text(who.words)}</bdi></h1>
      ${life ? stateBadge(life.state) : nothing}
      ${own.some(isHarvested) ? html`<span class="badge harvest" title="Stopped as soon as a user needs its GPUs">harvested</span>` : nothing}
      ${own.length ? html`<span class="muted">${programOf(own[0])}</span>` : nothing}
      <span class="spring"></span>
      ${isRunning && words.length ? html`<a class="button" href=${href("sessions", session)}>Record a session</a>` : nothing}
    </div>
    ${job.isKnown === false ? unknownNote(`No process of ${format.text(who.words)} used a GPU in the last 30 days.`, page.app) : nothing}
    ${
      life
        ? html`<dl class="stats">
      ${stat("GPUs", format.count(words.length), html`${placeWords(nodes)}${job.gpus.length > words.length ? `, ${job.gpus.length} in this range` : nothing}`)}
      ${stat(isRunning ? "Running" : "Duration", format.duration(endOf(fleet, job) - life.from), isRunning ? `since ${shortTime(life.from, now)}` : `${life.state === "lost" ? "at least " : ""}until ${shortTime(endOf(fleet, job), now)}`)}
      ${usageStats(job.usage)}
      ${isRunning ? liveStats(fleet, words) : nothing}
      ${life.state === "lost" ? rangeStats(charts) : nothing}
      ${stat("Processes", format.count(own.length))}
    </dl>`
        : nothing
    }`;
}

/** @param {"running" | "lost" | "ended"} state */
function stateBadge(state) {
  if (state === "ended") return html`<span class="badge pill">ended</span>`;
  const why = state === "lost" ? "The job's nodes stopped reporting, so it is unknown whether the job is still running" : nothing;
  return html`<span class="badge pill" title=${why}>${stateGlyph(state === "lost" ? "lost" : "busy")}${state}</span>`;
}

/** @param {string[]} nodes */
function placeWords(nodes) {
  if (!nodes.length) return nothing;
  return nodes.length > 1 ? `on ${nodes.length} nodes` : html`on <bdi>${format.text(nodes[0])}</bdi>`;
}

/**
 * The GPUs that processes of the job hold now, without those that it held only earlier.
 * @param {Dashboard.Fleet} fleet
 * @param {JobState} job
 */
function heldNow(fleet, job) {
  const open = new Set(
    job.own.filter((process) => process.ended === null).flatMap((process) => process.gpus.map((held) => `${process.node}:${held.gpu}`)),
  );
  return job.gpus
    .map((gpu) => gpu.word)
    .filter((word) => {
      const gpu = gpuOf(fleet, word);
      if (!gpu?.processes) return open.has(word);
      const node = gpu.node.name;
      return gpu.node.state !== "lost" && gpu.processes.some((process) => isOwn({ ...process, node }, job.who));
    });
}

/**
 * Until when the job is known to have run: until now, until it ended, or until its nodes were lost.
 * @param {Dashboard.Fleet} fleet
 * @param {JobState} job
 */
function endOf(fleet, job) {
  const now = fleet.headTime();
  if (job.life?.state !== "lost") return job.life?.to ?? now;
  const open = [...job.all.values()].filter((process) => process.ended === null);
  return Math.max(
    ...open.map((process) => {
      const node = fleet.nodes.get(process.node);
      return node ? lastHeard(node, now) : now;
    }),
  );
}

/**
 * A time of today as a time, an earlier one with its day.
 * @param {number} time
 * @param {number} now
 */
function shortTime(time, now) {
  const isToday = new Date(time * 1000).toDateString() === new Date(now * 1000).toDateString();
  return isToday ? format.clock(time).slice(0, 5) : format.dateTime(time).slice(0, 16);
}

/**
 * What its GPUs do now.
 * @param {Dashboard.Fleet} fleet
 * @param {string[]} words
 */
function liveStats(fleet, words) {
  const gpus = words.map((word) => gpuOf(fleet, word));
  /** @param {string} metric */
  const known = (metric) => gpus.map((gpu) => gpu?.values[metric]).filter(format.known);
  const [active, power] = [known("sm_active_ratio"), known("power_watts")];
  const total = power.reduce((sum, value) => sum + value, 0);
  return html`${active.length ? stat("SM active", format.percent(active.reduce((sum, value) => sum + value, 0) / active.length), "current mean") : nothing}
    ${power.length ? stat("Power", total >= 1000 ? `${(total / 1000).toFixed(1)} kW` : format.watts(total)) : nothing}`;
}

/**
 * What its GPUs did in the time range, while it held them.
 * @param {GpuCharts} charts
 */
function rangeStats({ group, options }) {
  if (!group.answer) return nothing;
  const { series } = options.shape?.(group.answer) ?? group.answer;
  /** @param {string} metric */
  const meanOf = (metric) => {
    const known = series.filter((one) => one.metric === metric).flatMap((one) => one.values.filter(format.known));
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  const [active, power] = [meanOf("sm_active_ratio"), meanOf("power_watts")];
  return html`${active === null ? nothing : stat("SM active", format.percent(active), "mean")}
    ${power === null ? nothing : stat("Power", format.watts(power), "mean per GPU")}`;
}

/** @param {Api.UsageRow[] | null} rows */
function usageStats(rows) {
  if (!rows?.length) return nothing;
  const held = sum(rows, "gpu_seconds") ?? 0;
  const harvested = sum(rows, "harvested_seconds") ?? 0;
  const all = held + harvested;
  const idle = sum(rows, "idle_seconds");
  const energies = [sum(rows, "energy_joules"), sum(rows, "harvested_energy_joules")].filter(format.known);
  const weighted = rows
    .map((row) => (format.known(row.utilization_mean) ? row.utilization_mean * (row.gpu_seconds + row.harvested_seconds) : null))
    .filter(format.known);
  return html`${
    harvested
      ? stat("Harvested", format.hours(harvested), "in this range")
      : html`${stat("GPU-hours", format.hours(held), "in this range")}
    ${stat("Wasted", format.hours(idle), held && idle !== null ? `held idle, ${format.percent(idle / held)}` : "held idle")}`
  }
    ${stat("Utilization", weighted.length && all ? format.percent(weighted.reduce((a, b) => a + b, 0) / all) : "–", "mean")}
    ${energies.length ? stat("Energy", format.joules(energies.reduce((a, b) => a + b))) : nothing}`;
}

/** @param {JobState} job */
function lifeQuery(job) {
  const { life } = job;
  return life === null || life.to === null ? {} : { from: (life.from - 30).toFixed(0), to: (life.to + 30).toFixed(0) };
}

/**
 * @param {JobState} job
 * @param {Dashboard.Fleet} fleet
 */
function allProcesses(job, fleet) {
  /** @param {Api.ProcessRow} process */
  const until = ({ ended, node }) =>
    ended === null ? (fleet.nodes.get(node)?.state === "lost" ? "lost" : "running") : format.dateTime(ended);
  return html`<section class="card table-card"><table class="table stack">
    <caption><h2>Processes</h2></caption>
    <thead><tr><th scope="col">Process</th><th scope="col">Node</th><th scope="col">Program</th><th scope="col" class="num">GPUs</th><th scope="col" class="num">Peak memory</th><th scope="col">From</th><th scope="col">Until</th></tr></thead>
    <tbody>${job.own.slice(0, MAX_PROCESSES).map(
      (
        process,
      ) => html`<tr><th scope="row" data-label="Process"><a href=${jobHref(process.node, { ...process, job: null })}>${process.pid}</a></th>
      <td data-label="Node"><a href=${href("node", process.node)}><bdi>${format.text(process.node)}</bdi></a></td><td data-label="Program"><code><bdi>${format.text(process.command?.join(" ") || process.name)}</bdi></code></td>
      <td data-label="GPUs" class="num">${new Set(process.gpus.map((gpu) => gpu.gpu)).size}</td>
      <td data-label="Peak memory" class="num">${format.bytes(Math.max(...process.gpus.map((gpu) => gpu.memory_bytes_max ?? NaN)))}</td>
      <td data-label="From">${format.dateTime(process.start_time ?? process.first_seen)}</td><td data-label="Until">${until(process)}</td></tr>`,
    )}</tbody></table>
    ${job.own.length > MAX_PROCESSES ? html`<p class="muted">And ${job.own.length - MAX_PROCESSES} more processes.</p>` : nothing}</section>`;
}
