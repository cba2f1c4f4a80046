// One user: their GPUs now, their jobs, and their use over a time range.

import { get, url } from "../core/api.js";
import { isHarvested, jobKey, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { heldCount, heldGpus, heldSpecs, whileHeld } from "../parts/chart-data.js";
import { HistoryPage, stat } from "../parts/history-page.js";
import { jobHref, livesOf, processTable, programOf } from "../parts/processes.js";
import { facts, heldSince } from "../parts/timeline-items.js";
import { html, nothing, render } from "../vendor/lit-html.js";

/** @typedef {import("../parts/processes.js").LiveRow} HeldProcess */

/**
 * A user as far as the page knows them.
 * @typedef {object} UserState
 * @property {string} name
 * @property {Dashboard.HeldGpu[]} gpus
 * @property {Api.UsageReport | null} usage
 * @property {Api.ProcessRow[]} day Processes of the last day: a job's first ones may have ended before the time range.
 */

const LIVES_RANGE = "-24h";
const MAX_GPUS = 64;
const MAX_ROWS = 200;
const MAX_JOB_ROWS = 12;
const HELD = {
  id: "held",
  title: "GPUs held",
  unit: "1",
  height: 190,
  fill: true,
  lines: [{ metric: "gpus_held", title: "GPUs" }],
};

/**
 * The page's title.
 * @param {Dashboard.Route} route
 */
export const title = (route) => `User ${route.parts[0] ?? ""}`.trim();

/**
 * Show one user.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const [name = ""] = route.parts;
  if (!name) {
    render(html`<h1>User</h1><p class="empty">This address contains no user name. <a href="#/who">Who used the GPUs</a></p>`, root);
    return {};
  }
  /** @type {UserState} */
  const user = { name, gpus: [], usage: null, day: [] };
  const page = new HistoryPage(root, route, app, { why, draw: (own) => draw(own, user) });
  page.board.add(page.grid, {
    specs: [HELD],
    ask: async (signal, points) => {
      const { processes, from, to } = await page.askProcesses({ users: [name] }, signal);
      const own = processes.filter((process) => !isHarvested(process));
      user.gpus = heldGpus(own, to);
      page.relane();
      return heldCount(heldGpus(sinceStart(own, from), to), page.board.view, Math.min(points, 400));
    },
  });
  const specs = heldSpecs(() => new Set(user.gpus.map((gpu) => gpu.node)).size === 1);
  page.board.add(page.grid, {
    scope: "gpu",
    specs,
    isIdle: () => !user.gpus.length,
    shape: (answer) => whileHeld(answer, user.gpus),
    metrics: specs.map((spec) => spec.each.metric),
    gpus: () => user.gpus.slice(0, MAX_GPUS).map((gpu) => gpu.word),
  });
  page.relane = () => page.timeline.show(lanes(page, user));
  page.board.sides.push(async (signal) => {
    const [usage, day] = await Promise.all([
      get("/api/v1/usage", { ...page.times(), by: "job", users: [name] }, { signal }),
      get("/api/v1/processes", { from: LIVES_RANGE, users: [name] }, { signal }),
    ]);
    user.usage = usage;
    user.day = day.processes;
    page.relane();
    page.refresh();
  });
  page.board.load();
  page.relane();
  return page.handle({ nodes: null, metrics: ["gpu_utilization_ratio"], host_metrics: ["cpus"], interval: 2 });
}

/**
 * Processes that hold their GPUs since their start, so that a range does not begin with GPUs that nobody held.
 * @param {Api.ProcessRow[]} processes
 * @param {number} from
 */
function sinceStart(processes, from) {
  return processes.map((process) => ({
    ...process,
    gpus: process.gpus.map((held) => ({ ...held, from: heldSince(process, held, from) })),
  }));
}

/**
 * @param {Dashboard.ChartSpec} spec
 * @param {string[]} titles
 */
function why(spec, titles) {
  if (titles.length) return `No data: ${titles.join(", ")}.`;
  return `No GPU was used in this time range${spec.why ? `, or no data: ${spec.why}` : ""}.`;
}

/**
 * A bar for each job, from its start to the last time that it held a GPU.
 * @param {Dashboard.HistoryPage} page
 * @param {UserState} user
 * @returns {Dashboard.Lane[]}
 */
function lanes(page, user) {
  const now = page.board.view.to;
  const lives = livesOf([...(page.processes?.processes ?? []), ...user.day], page.app.fleet);
  /** @type {Map<string, Api.ProcessRow[]>} */
  const jobs = new Map();
  for (const process of page.processes?.processes ?? []) {
    const key = jobKey(process.node, process);
    jobs.set(key, [...(jobs.get(key) ?? []), process]);
  }
  const items = [...jobs].map(([key, processes]) => jobBar(key, processes, lives.get(key)?.from ?? now, now));
  return [
    {
      key: "jobs",
      label: "Jobs",
      kind: "process",
      rows: MAX_JOB_ROWS,
      items,
      empty: page.processes ? "no GPU used in this time range" : "…",
    },
  ];
}

/**
 * @param {string} key
 * @param {Api.ProcessRow[]} processes
 * @param {number} from
 * @param {number} now
 */
function jobBar(key, processes, from, now) {
  const gpus = heldGpus(processes, now);
  const to = Math.max(...gpus.flatMap((gpu) => gpu.spans).map(([, last]) => last));
  const [first] = processes;
  const count = gpus.length === 1 ? `${gpus[0].node} · ${gpus[0].gpu}` : `${gpus.length} GPUs`;
  const label = [first.job, programOf(first), count].filter(Boolean).map(format.text).join(" · ");
  return {
    key,
    from,
    to,
    label,
    say: `${label}, ${format.duration(to - from)} from ${format.dateTime(from)}`,
    tone: isHarvested(first) ? "harvested" : "process",
    href: jobHref(first.node, first),
    detail: () =>
      facts([
        ["Job", first.job],
        ["Program", first.command?.length ? first.command.join(" ") : first.name],
        ["GPUs", count],
        ["Held", `${format.dateTime(from)} to ${to >= now ? "now" : format.dateTime(to)} (${format.duration(to - from)})`],
      ]),
  };
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {UserState} user
 */
function draw(page, user) {
  const now = heldNow(page.app.fleet, user.name);
  const own = now.filter((row) => !isHarvested(row.process));
  const harvested = now.filter((row) => isHarvested(row.process));
  render(heading(user, own, harvested), page.head);
  render(
    html`
    <section class="card"><h2>Now</h2>${
      own.length ? processTable(own, `Processes of ${format.text(user.name)} on GPUs now`) : html`<p class="muted">No GPU in use now.</p>`
    }
      ${processTable(harvested, "Processes of their harvest, stopped as soon as somebody uses the GPUs")}</section>
    ${jobsCard(page, user)}`,
    page.more,
  );
}

/**
 * @param {Dashboard.Fleet} fleet
 * @param {string} name
 */
function heldNow(fleet, name) {
  const rows = [];
  for (const gpu of fleet.gpus()) {
    const until = lastHeard(gpu.node, fleet.headTime());
    for (const process of gpu.processes ?? [])
      if (process.user === name) rows.push({ node: gpu.node.name, gpu: gpu.label, process, until });
  }
  return rows;
}

/**
 * On how many GPUs processes are, in words.
 * @param {HeldProcess[]} processes
 */
function gpusOf(processes) {
  const count = new Set(processes.map((row) => `${row.node}:${row.gpu}`)).size;
  return count === 1 ? "1 GPU" : `${count} GPUs`;
}

/**
 * @param {UserState} user
 * @param {HeldProcess[]} own
 * @param {HeldProcess[]} harvesting
 */
function heading(user, own, harvesting) {
  const rows = user.usage?.rows ?? [];
  /** @param {"gpu_seconds" | "idle_seconds" | "harvested_seconds"} key */
  const total = (key) => rows.reduce((sum, row) => sum + (row[key] ?? 0), 0);
  const [seconds, idle, harvested] = [total("gpu_seconds"), total("idle_seconds"), total("harvested_seconds")];
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Breadcrumb"><a href="#/who">Usage</a> <span aria-hidden="true">/</span></nav>
      <h1><bdi>${format.text(user.name)}</bdi></h1>
    </div>
    <dl class="stats">
      ${stat("Uses now", gpusOf(own))}
      ${harvesting.length ? stat("Harvests now", gpusOf(harvesting), "counted separately") : nothing}
      ${
        user.usage
          ? html`${stat("GPU-hours", format.hours(seconds), "in this range")}
        ${stat("Wasted", format.hours(idle), seconds ? `held idle, ${format.percent(idle / seconds)}` : "held idle")}
        ${harvested ? stat("Harvested", format.hours(harvested), "counted separately") : nothing}
        ${stat("Jobs", format.count(rows.length), "in this range")}`
          : nothing
      }
    </dl>`;
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {UserState} user
 */
function jobsCard(page, user) {
  if (!user.usage) return nothing;
  const { rows } = user.usage;
  const lives = livesOf([...(page.processes?.processes ?? []), ...user.day], page.app.fleet);
  if (!rows.length) return html`<section class="card"><h2>Jobs in this time range</h2><p class="muted">No job used a GPU.</p></section>`;
  return html`<section class="card"><h2>Jobs in this time range</h2><div class="table-card"><table class="table stack jobs-table">
    <caption>Most GPU-hours first${rows.length > MAX_ROWS ? `, the first ${MAX_ROWS}` : ""} ·
      <a href=${url("/api/v1/usage.csv", { ...page.times(), by: "job", users: [user.name] })}>as CSV</a></caption>
    <thead><tr><th scope="col">Job</th><th scope="col">Program</th><th scope="col">Nodes</th><th scope="col" class="num">GPUs</th><th scope="col" class="num">GPU-hours</th>
      <th scope="col" class="num">Wasted</th>${rows.some((row) => row.harvested_seconds) ? html`<th scope="col" class="num">Harvested</th>` : nothing}<th scope="col" class="num">Utilization</th><th scope="col" class="num">Peak memory</th><th scope="col">From</th><th scope="col">Until</th></tr></thead>
    <tbody>${rows.slice(0, MAX_ROWS).map((row) =>
      jobRow(
        row,
        rows.some((one) => one.harvested_seconds),
        lives.get(jobKey(row.node ?? "", row)),
      ),
    )}</tbody></table></div></section>`;
}

/**
 * @param {Api.UsageRow} row
 * @param {boolean} hasHarvest
 * @param {import("../parts/processes.js").JobLife | undefined} life
 */
function jobRow(row, hasHarvest, life) {
  const address = row.job ? href("job", row.job) : jobHref(row.node, row);
  const words = row.job ?? `${row.node} pid ${row.pid}`;
  const nodes = (row.nodes ?? [])
    .slice(0, 4)
    .map((node, at) => html`${at ? ", " : ""}<a href=${href("node", node)}>${format.text(node)}</a>`);
  const more = (row.nodes?.length ?? 0) > 4 ? ` and ${row.nodes.length - 4} more` : "";
  return html`<tr><th scope="row" data-label="Job"><a href=${address}><bdi>${format.text(words)}</bdi></a></th>
    <td data-label="Program" class="program">${format.text(row.program)}</td>
    <td data-label="Nodes">${nodes}${more}</td>
    <td data-label="GPUs" class="num">${format.count(row.gpus)}</td><td data-label="GPU-hours" class="num">${format.hours(row.gpu_seconds)}</td>
    <td data-label="Wasted" class="num">${format.hours(row.idle_seconds)}${row.gpu_seconds && row.idle_seconds !== null ? html` <span class="muted">${format.percent(row.idle_seconds / row.gpu_seconds)}</span>` : nothing}</td>
    ${hasHarvest ? html`<td data-label="Harvested" class="num">${format.hours(row.harvested_seconds)}</td>` : nothing}
    <td data-label="Utilization" class="num">${format.percent(row.utilization_mean)}</td><td data-label="Peak memory" class="num">${format.bytes(row.memory_bytes_max)}</td>
    <td data-label="From">${format.dateTime(life?.from ?? row.first)}</td><td data-label="Until">${life && life.state !== "ended" ? life.state : format.dateTime(life?.to ?? row.last)}</td></tr>`;
}
