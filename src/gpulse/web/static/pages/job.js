// One job: which GPUs it holds or held, how well it used them, and what was found.
import { html, nothing, render } from "../vendor/lit-html.js";
import { get } from "../core/api.js";
import { byName, isHarvested, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { current, href } from "../core/router.js";
import { heldGpus, heldSpecs, whileHeld } from "../parts/chart-held.js";
import { HistoryPage, processTable, stat, unknownNote } from "../parts/chart-page.js";
import { facts, jobHref, processBars, programOf } from "../parts/timeline-data.js";

const AROUND_SECONDS = 300;
const LOOK_BACK = ["-1d", "-30d"];
const MOST_GPUS = 64;
const SAME_START_SECONDS = 1.5;

/** What an address names: a scheduler's job, or one process. */
export function parsed(parts) {
  const text = parts.join("/");
  const process = /^(.+)\/(\d+)@(-|\d+(?:\.\d+)?)$/.exec(text);
  if (!process) return { job: text, words: text };
  const [, node, pid, start] = process;
  return { node, pid: Number(pid), start: start === "-" ? null : Number(start), words: `process ${pid} on ${node}` };
}

/** The page's title. */
export const title = (route) => `Job ${parsed(route.parts).words}`;

/** Show one job. */
export function mount(root, route, app) {
  const who = parsed(route.parts);
  const job = { who, own: [], gpus: [], life: null, usage: null, isKnown: null };
  const page = new HistoryPage(root, route, app, { nodes: () => job.nodes ?? null, why, draw: (own) => draw(own, job) });
  const specs = heldSpecs(() => job.nodes?.length === 1).map((spec) => ({ ...spec, height: 180 }));
  const isIdle = () => !job.gpus.length;
  page.board.add(page.grid, {
    scope: "gpu", isIdle, specs, shape: (answer) => whileHeld(answer, job.gpus),
    metrics: specs.map((spec) => spec.each.metric),
    gpus: () => job.gpus.slice(0, MOST_GPUS).map((gpu) => gpu.word),
  });
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
  return page.handle({ nodes: null, metrics: ["gpu_utilization_ratio"], host_metrics: ["cpus"], interval: 2 });
}

/** Find out when it lived, and look at that time. */
async function begin(page, job) {
  try {
    const found = await lookUp(job.who, page.stop.signal);
    take(job, found, page.range.now());
  } catch (error) {
    if (!page.stop.signal.aborted) page.board.failed(error);
  }
  if (page.stop.signal.aborted) return;
  job.isKnown = job.own.length > 0;
  if (job.life) {
    const now = page.range.now();
    const margin = Math.max(((job.life.to ?? now) - job.seen) * 0.03, 15);
    page.range.fallback = job.life.to === null
      ? { length: Math.ceil(now - job.seen + margin), end: null }
      : { length: job.life.to - job.seen + 2 * margin, end: job.life.to + margin };
  }
  const { length, end } = page.range;
  page.range.read(current().query);
  if (page.range.length === length && page.range.end === end) page.board.load();
  page.refresh();
}

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

function isOwn(process, who) {
  if (who.job) return process.job === who.job;
  const isSame = who.start === null || process.start_time === null || Math.abs(process.start_time - who.start) < SAME_START_SECONDS;
  return process.node === who.node && process.pid === who.pid && isSame;
}

function take(job, processes, now) {
  if (!processes.length) return;
  job.own = processes;
  job.gpus = heldGpus(processes, now);
  job.nodes = [...new Set(processes.map((process) => process.node))].sort(byName);
  const starts = processes.map((process) => Math.min(process.start_time ?? Infinity, process.first_seen));
  const ends = processes.map((process) => process.ended);
  job.seen = Math.min(...processes.map((process) => process.first_seen));
  job.life = { from: Math.min(...starts), to: ends.includes(null) ? null : Math.max(...ends) };
}

async function askProcesses(page, job, signal) {
  const words = job.who.job ? { jobs: [job.who.job] } : { nodes: [job.who.node] };
  const answer = await page.askProcesses(words, signal);
  const before = job.gpus.map((gpu) => gpu.word).join();
  take(job, answer.processes.filter((process) => isOwn(process, job.who)), answer.to);
  job.isKnown ||= job.own.length > 0;
  page.relane();
  page.refresh();
  if (job.gpus.map((gpu) => gpu.word).join() !== before) page.board.load();
  else page.board.groups.forEach((group) => page.board.redraw(group));
}

async function askUsage(page, job, signal) {
  const answer = await get("/api/v1/usage", { ...page.times(), by: "job", nodes: job.nodes }, { signal });
  const { who } = job;
  const pids = new Set(job.own.map((process) => process.pid));
  job.usage = answer.rows.filter((row) => (who.job ? row.job === who.job : row.job === null && row.node === who.node && pids.has(row.pid)));
  page.refresh();
}

function why(spec, titles) {
  if (titles.length) return `Not known: ${titles.join(", ")}.`;
  return `Nothing of this job in this time${spec.why ? `, or not known: ${spec.why}` : ""}.`;
}

function lanes(page, job) {
  const processes = (page.processes?.processes ?? []).filter((process) => isOwn(process, job.who));
  const rows = heldGpus(processes, page.board.view.to).map(({ node, gpu, word }) => ({
    key: word, label: job.nodes?.length === 1 ? `GPU ${gpu}` : format.text(`${node} · ${gpu}`), kind: "process", rows: 2, empty: "",
    items: processBars(processes, { node, gpu, now: page.board.view.to }),
  }));
  const pids = new Set(processes.map((process) => process.pid));
  const labels = new Set(job.gpus.map((gpu) => gpu.word));
  const about = (finding, node) => labels.has(`${node}:${finding.label}`) && (!finding.pids?.length || finding.pids.some((pid) => pids.has(pid)));
  const none = { key: "none", label: "GPUs", kind: "process", items: [], empty: page.processes ? "it held no GPU in this time" : "…" };
  return [...(rows.length ? rows : [none]), ...page.eventLanes({ about, withPlace: true })];
}

function draw(page, job) {
  render(heading(page, job), page.head);
  render(job.own.length ? below(page, job) : nothing, page.more);
}

const sum = (rows, name) => {
  const known = rows.map((row) => row[name]).filter(format.known);
  return known.length ? known.reduce((total, value) => total + value, 0) : null;
};

function heading(page, job) {
  const { who, own, life } = job;
  const users = [...new Set(own.map((process) => process.user).filter(Boolean))];
  const now = page.app.fleet.headTime();
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Where"><a href="#/who">Who</a> <span aria-hidden="true">›</span>
        ${users.map((user) => html`<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a> <span aria-hidden="true">›</span>`)}</nav>
      <h1><bdi>${format.text(who.words)}</bdi></h1>
      ${life ? html`<span class="badge ${life.to === null ? "good" : "muted"}">${life.to === null ? "running" : "ended"}</span>` : nothing}
      ${own.some(isHarvested) ? html`<span class="badge harvest" title="It gives way as soon as somebody uses its GPUs">harvested</span>` : nothing}
      ${own.length ? html`<span class="muted">${programOf(own[0])}</span>` : nothing}
    </div>
    ${job.isKnown === false ? unknownNote(`No process of ${format.text(who.words)} held a GPU, as far back as the head looked.`, page.app) : nothing}
    ${life ? html`<dl class="stats">
      ${stat("GPUs", format.count(job.gpus.length), job.nodes.length > 1 ? `on ${job.nodes.length} nodes` : html`on <bdi>${format.text(job.nodes[0])}</bdi>`)}
      ${stat("Since", format.dateTime(life.from))}
      ${stat(life.to === null ? "Running" : "Ran", format.duration((life.to ?? now) - life.from), life.to === null ? null : `until ${format.dateTime(life.to)}`)}
      ${usageStats(job.usage)}
    </dl>` : nothing}`;
}

function usageStats(rows) {
  if (!rows?.length) return nothing;
  const held = sum(rows, "gpu_seconds");
  const harvested = sum(rows, "harvested_seconds");
  const all = held + harvested;
  const idle = sum(rows, "idle_seconds");
  const energies = ["energy_joules", "harvested_energy_joules"].map((name) => sum(rows, name)).filter(format.known);
  const weighted = rows.map((row) => (format.known(row.utilization_mean) ? row.utilization_mean * (row.gpu_seconds + row.harvested_seconds) : null)).filter(format.known);
  return html`${harvested ? stat("Harvested", format.hours(harvested), "in this time") : html`${stat("GPU-hours", format.hours(held), "in this time")}
    ${stat("Idle but held", format.hours(idle), held ? format.percent(idle / held) : null)}`}
    ${stat("Utilization", weighted.length && all ? format.percent(weighted.reduce((a, b) => a + b, 0) / all) : "–", "mean")}
    ${energies.length ? stat("Energy", format.joules(energies.reduce((a, b) => a + b))) : nothing}`;
}

function below(page, job) {
  const live = [];
  for (const gpu of page.app.fleet.gpus()) {
    for (const process of gpu.processes ?? []) {
      if (!isOwn({ ...process, node: gpu.node.name }, job.who)) continue;
      live.push({ node: gpu.node.name, gpu: gpu.label, process, until: lastHeard(gpu.node, page.app.fleet.headTime()) });
    }
  }
  const [first] = job.own;
  return html`
    ${live.length ? html`<section class="card"><h2>Now</h2>${processTable(live, "Processes of this job now")}</section>` : nothing}
    <section class="card"><h2>Its GPUs</h2><ul class="chips">${job.gpus.map((gpu) => html`<li><a href=${href("gpu", gpu.node, gpu.gpu, lifeQuery(job))}><bdi>${format.text(gpu.node)}</bdi> · GPU ${format.text(gpu.gpu)}</a></li>`)}</ul></section>
    ${allProcesses(job)}
    <section class="card"><h2>About it</h2>${facts([
      ["Program", first.command?.length ? first.command.join(" ") : first.name],
      ["Job", job.who.job ?? first.job],
      ["Container", first.container],
      ["Pod", first.pod],
      ["Nodes", html`${job.nodes.map((node) => html`<a href=${href("node", node)}><bdi>${format.text(node)}</bdi></a> `)}`],
    ])}</section>`;
}

function lifeQuery(job) {
  if (job.life.to === null) return {};
  return { from: (job.life.from - 30).toFixed(0), to: (job.life.to + 30).toFixed(0) };
}

function allProcesses(job) {
  return html`<section class="card"><h2>Its processes</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Its processes"><table class="table">
    <caption class="visually-hidden">Processes of this job that held GPUs</caption>
    <thead><tr><th scope="col">Process</th><th scope="col">Node</th><th scope="col">Program</th><th scope="col">GPUs</th><th scope="col" class="num">Memory at most</th><th scope="col">From</th><th scope="col">Until</th></tr></thead>
    <tbody>${job.own.map((process) => html`<tr><th scope="row"><a href=${jobHref(process.node, { ...process, job: null })}>${process.pid}</a></th>
      <td><a href=${href("node", process.node)}><bdi>${format.text(process.node)}</bdi></a></td><td class="program">${format.text(process.command?.join(" ") || process.name)}</td>
      <td>${[...new Set(process.gpus.map((gpu) => gpu.gpu))].join(", ")}</td>
      <td class="num">${format.bytes(Math.max(...process.gpus.map((gpu) => gpu.memory_bytes_max ?? NaN)))}</td>
      <td>${format.dateTime(process.start_time ?? process.first_seen)}</td><td>${process.ended === null ? "runs" : format.dateTime(process.ended)}</td></tr>`)}</tbody></table></div></section>`;
}
