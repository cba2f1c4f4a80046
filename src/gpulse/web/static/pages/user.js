// One user: the GPUs they hold now, their jobs, and what they held over a chosen time.
import { html, nothing, render } from "../vendor/lit-html.js";
import { get, url } from "../core/api.js";
import { isHarvested, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { heldCount, heldGpus, heldSpecs, whileHeld } from "../parts/chart-held.js";
import { HistoryPage, processTable, stat } from "../parts/chart-page.js";
import { jobHref, processBars } from "../parts/timeline-data.js";

const MOST_GPUS = 64;
const MOST_ROWS = 200;
const MOST_LANES = 24;
const HELD = {
  id: "held", title: "GPUs held", unit: "1", height: 190, fill: true,
  lines: [{ metric: "gpus_held", title: "GPUs" }],
};

/** The page's title. */
export const title = (route) => `User ${route.parts[0] ?? ""}`.trim();

/** Show one user. */
export function mount(root, route, app) {
  const [name = ""] = route.parts;
  if (!name) {
    render(html`<h1>User</h1><p class="empty">There is no such user: the address names nobody. <a href="#/who">Who used the GPUs</a></p>`, root);
    return {};
  }
  const user = { name, gpus: [], lanes: [], usage: null };
  const page = new HistoryPage(root, route, app, { why, draw: (own) => draw(own, user) });
  page.board.add(page.grid, {
    specs: [HELD],
    ask: async (signal, points) => {
      await page.askProcesses({ users: [name] }, signal);
      const { processes, to } = page.processes;
      user.lanes = heldGpus(processes, to);
      user.gpus = heldGpus(processes.filter((process) => !isHarvested(process)), to);
      page.relane();
      return heldCount(user.gpus, page.board.view, Math.min(points, 400));
    },
  });
  const specs = heldSpecs(() => new Set(user.gpus.map((gpu) => gpu.node)).size === 1);
  page.board.add(page.grid, {
    scope: "gpu", specs, isIdle: () => !user.gpus.length, shape: (answer) => whileHeld(answer, user.gpus),
    metrics: specs.map((spec) => spec.each.metric),
    gpus: () => user.gpus.slice(0, MOST_GPUS).map((gpu) => gpu.word),
  });
  page.relane = () => page.timeline.show(lanes(page, user));
  page.board.sides.push(async (signal) => {
    user.usage = await get("/api/v1/usage", { ...page.times(), by: "job", users: [name] }, { signal });
    page.refresh();
  });
  page.board.load();
  page.relane();
  return page.handle({ nodes: null, metrics: ["gpu_utilization_ratio"], host_metrics: ["cpus"], interval: 2 });
}

function why(spec, titles) {
  if (titles.length) return `Not known: ${titles.join(", ")}.`;
  return `They held no GPU in this time${spec.why ? `, or it is not known: ${spec.why}` : ""}.`;
}

function lanes(page, user) {
  const processes = page.processes?.processes ?? [];
  const rows = user.lanes.slice(0, MOST_LANES).map(({ node, gpu, word }) => ({
    key: word, label: format.text(`${node} · ${gpu}`), kind: "process", rows: 2, empty: "",
    items: processBars(processes, { node, gpu, now: page.board.view.to }),
  }));
  if (!rows.length) return [{ key: "none", label: "GPUs", kind: "process", items: [], empty: page.processes ? "they held no GPU in this time" : "…" }];
  const more = user.lanes.length - rows.length;
  rows[0].note = more > 0 ? `And ${more} more GPUs: the jobs below have links.` : null;
  return rows;
}

function draw(page, user) {
  const now = heldNow(page.app.fleet, user.name);
  const own = now.filter((row) => !isHarvested(row.process));
  const harvested = now.filter((row) => isHarvested(row.process));
  render(heading(page, user, own, harvested), page.head);
  render(html`
    <section class="card"><h2>Now</h2>${own.length ? processTable(own, `Processes of ${format.text(user.name)} that hold GPUs now`)
      : html`<p class="muted">They hold no GPU now.</p>`}
      ${processTable(harvested, "Processes of their harvest, which gives way as soon as somebody uses the GPUs")}</section>
    ${jobsCard(page, user)}`, page.more);
}

function heldNow(fleet, name) {
  const rows = [];
  for (const gpu of fleet.gpus()) {
    const until = lastHeard(gpu.node, fleet.headTime());
    for (const process of gpu.processes ?? []) if (process.user === name) rows.push({ node: gpu.node.name, gpu: gpu.label, process, until });
  }
  return rows;
}

/** On how many GPUs processes are, in words. */
function gpusOf(processes) {
  const count = new Set(processes.map((row) => `${row.node}:${row.gpu}`)).size;
  return count === 1 ? "1 GPU" : `${count} GPUs`;
}

function heading(page, user, own, harvesting) {
  const rows = user.usage?.rows ?? [];
  const total = (key) => rows.reduce((sum, row) => sum + (row[key] ?? 0), 0);
  const [seconds, idle, harvested] = [total("gpu_seconds"), total("idle_seconds"), total("harvested_seconds")];
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Where"><a href="#/who">Who</a> <span aria-hidden="true">›</span></nav>
      <h1><bdi>${format.text(user.name)}</bdi></h1>
    </div>
    <dl class="stats">
      ${stat("Holds now", gpusOf(own))}
      ${harvesting.length ? stat("Harvests now", gpusOf(harvesting), "not their own") : nothing}
      ${user.usage ? html`${stat("GPU-hours", format.hours(seconds), "in this time")}
        ${stat("Idle but held", format.hours(idle), seconds ? format.percent(idle / seconds) : null)}
        ${harvested ? stat("Harvested", format.hours(harvested), "not their own") : nothing}
        ${stat("Jobs", format.count(rows.length), "in this time")}` : nothing}
    </dl>`;
}

function jobsCard(page, user) {
  if (!user.usage) return nothing;
  const { rows } = user.usage;
  if (!rows.length) return html`<section class="card"><h2>Jobs in this time</h2><p class="muted">None that held a GPU.</p></section>`;
  return html`<section class="card"><h2>Jobs in this time</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Jobs in this time"><table class="table">
    <caption>The most GPU-hours first${rows.length > MOST_ROWS ? `, the first ${MOST_ROWS}` : ""} ·
      <a href=${url("/api/v1/usage.csv", { ...page.times(), by: "job", users: [user.name] })}>as CSV</a></caption>
    <thead><tr><th scope="col">Job</th><th scope="col">Program</th><th scope="col">Nodes</th><th scope="col" class="num">GPUs</th><th scope="col" class="num">GPU-hours</th>
      <th scope="col" class="num">Idle but held</th>${rows.some((row) => row.harvested_seconds) ? html`<th scope="col" class="num">Harvested</th>` : nothing}<th scope="col" class="num">Utilization</th><th scope="col" class="num">Memory at most</th><th scope="col">From</th><th scope="col">Until</th></tr></thead>
    <tbody>${rows.slice(0, MOST_ROWS).map((row) => jobRow(row, rows.some((one) => one.harvested_seconds)))}</tbody></table></div></section>`;
}

function jobRow(row, hasHarvest) {
  const address = row.job ? href("job", row.job) : jobHref(row.node, row);
  const words = row.job ?? `${row.node} · ${row.pid}`;
  return html`<tr><th scope="row"><a href=${address}><bdi>${format.text(words)}</bdi></a></th>
    <td class="program">${format.text(row.program)}</td>
    <td>${(row.nodes ?? []).slice(0, 4).map((node, at) => html`${at ? ", " : ""}<a href=${href("node", node)}><bdi>${format.text(node)}</bdi></a>`)}${(row.nodes?.length ?? 0) > 4 ? ` and ${row.nodes.length - 4} more` : ""}</td>
    <td class="num">${format.count(row.gpus)}</td><td class="num">${format.hours(row.gpu_seconds)}</td>
    <td class="num">${format.hours(row.idle_seconds)}${row.gpu_seconds ? html` <span class="muted">${format.percent(row.idle_seconds / row.gpu_seconds)}</span>` : nothing}</td>
    ${hasHarvest ? html`<td class="num">${format.hours(row.harvested_seconds)}</td>` : nothing}
    <td class="num">${format.percent(row.utilization_mean)}</td><td class="num">${format.bytes(row.memory_bytes_max)}</td>
    <td>${format.dateTime(row.first)}</td><td>${format.dateTime(row.last)}</td></tr>`;
}
