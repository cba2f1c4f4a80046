// One node: its GPUs, its CPUs, memory, disks and network, now and over time.
import { html, nothing, render } from "../vendor/lit-html.js";
import { byName, gpuState, isUnit, worst } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { MOST_LINES } from "../parts/chart-lines.js";
import { findingsNow, HistoryPage, stat, stateMark, unknownNote, staleNote } from "../parts/chart-page.js";
import { severityMark } from "../parts/findings.js";
import { facts, jobHref, processBars, processLabel, processNote, XIDS } from "../parts/timeline-data.js";

const MOST_LANES = 8;
const gpuName = (series) => `GPU ${series.gpu ?? series.subject}`;
const moves = (series) => series.values.some((value) => value > 0);

function gpuSpecs(picks) {
  const each = (metric) => ({ metric, name: gpuName, picks, words: "GPUs" });
  return [
    { id: "gpus-utilization", title: "GPU utilization", unit: "ratio", top: 1, height: 190, each: each("gpu_utilization_ratio") },
    { id: "gpus-memory", title: "GPU memory", unit: "bytes", height: 190, each: each("memory_used_bytes") },
    { id: "gpus-power", title: "GPU power", unit: "watts", each: each("power_watts") },
    { id: "gpus-temperature", title: "GPU temperature", unit: "celsius", bottom: 20, top: 90, each: each("temperature_celsius") },
  ];
}

const HOST = [
  { id: "cpu", title: "CPU", unit: "ratio", top: 1, fill: true, lines: [{ metric: "cpu_utilization_ratio", title: "working" }, { metric: "cpu_iowait_ratio", title: "waiting for disks" }] },
  {
    id: "ram", title: "Memory and swap", unit: "bytes", fill: true,
    lines: [
      { metric: "memory_total_bytes", minus: "memory_available_bytes", title: "used" },
      { metric: "memory_cached_bytes", title: "file cache" },
      { metric: "swap_total_bytes", minus: "swap_free_bytes", title: "swap used" },
      { metric: "memory_total_bytes", title: "total", isLimit: true },
    ],
  },
  { id: "load", title: "Load", unit: "1", lines: [{ metric: "load1", title: "1 min" }, { metric: "load5", title: "5 min" }, { metric: "cpus", title: "CPUs", isLimit: true }] },
  {
    id: "pressure", title: "Pressure", unit: "ratio", hint: "Share of time in which tasks waited for a resource", why: "the kernel does not measure it (PSI is off)",
    lines: [
      { metric: "pressure_cpu_some_ratio", title: "CPU, some" },
      { metric: "pressure_io_some_ratio", title: "disks, some" },
      { metric: "pressure_memory_some_ratio", title: "memory, some" },
      { metric: "pressure_memory_full_ratio", title: "memory, all" },
    ],
  },
];
const WORDS = { read_bytes_per_second: "read", written_bytes_per_second: "written", rx_bytes_per_second: "received", tx_bytes_per_second: "sent" };
const named = (series) => `${series.subject} ${WORDS[series.metric]}`;
const GROUPS = [
  ["disk", { id: "disks", title: "Disks", unit: "bytes/second", only: moves, why: "no disk read or wrote in this time",
    each: { metrics: ["read_bytes_per_second", "written_bytes_per_second"], name: named, words: "rates" } }],
  ["network", { id: "network", title: "Network", unit: "bytes/second", only: moves, why: "nothing was sent or received in this time",
    each: { metrics: ["rx_bytes_per_second", "tx_bytes_per_second"], name: named, words: "rates" } }],
  ["filesystem", { id: "filesystems", title: "File systems", unit: "ratio", top: 1, hint: "Share of each file system in use",
    each: { metric: "used_bytes", over: "size_bytes", name: (series) => series.subject, words: "file systems" } }],
];
const HOST_METRICS = ["cpu_utilization_ratio", "cpus", "load1", "memory_total_bytes", "memory_available_bytes", "swap_total_bytes", "swap_free_bytes"];

/** The page's title. */
export const title = (route) => route.parts[0] ?? "Node";

/** Show one node. */
export function mount(root, route, app) {
  const [name = ""] = route.parts;
  const picks = new Set();
  const page = new HistoryPage(root, route, app, { nodes: () => [name], why, draw: (own) => draw(own, name, picks) });
  const nodes = [name];
  const specs = gpuSpecs(picks);
  page.gpus = page.board.add(page.grid, { scope: "gpu", nodes, metrics: [...specs.map((spec) => spec.each.metric), ...XIDS], specs, answered: (answer) => page.takeXids(answer) });
  page.relane = () => page.timeline.show(lanes(page, name));
  page.start(name);
  page.board.add(page.grid, { scope: "host", nodes, metrics: [...new Set(HOST.flatMap((spec) => spec.lines.flatMap((line) => [line.metric, line.minus ?? []].flat())))], specs: HOST });
  for (const [scope, spec] of GROUPS) {
    const { metric, metrics, over } = spec.each;
    page.board.add(page.grid, { scope, nodes, metrics: [...(metrics ?? [metric]), ...(over ? [over] : [])], specs: [spec] });
  }
  page.board.sides.push(
    async (signal) => {
      await page.askProcesses({ nodes }, signal);
      page.relane();
    },
    async (signal) => {
      await page.askEvents(nodes, signal);
      page.relane();
    },
  );
  page.relane();
  return page.handle({ nodes, host_metrics: [...HOST_METRICS, "load5", "processes_blocked"] });
}

function why(spec, titles) {
  if (titles.length) return `Not known here: ${titles.join(", ")}${spec.why ? ` (${spec.why})` : ""}.`;
  return spec.why ? `Nothing to show: ${spec.why}.` : "No samples in this time.";
}

function lanes(page, name) {
  const processes = page.processes?.processes ?? [];
  const held = new Set(processes.flatMap((process) => process.gpus.map((gpu) => gpu.gpu)));
  const known = page.app.fleet.nodes.get(name)?.gpus.map((gpu) => gpu.label) ?? [];
  const labels = [...new Set([...(known.length <= MOST_LANES ? known : []), ...held])].sort(byName);
  const rows = labels.map((label) => ({
    key: `gpu ${label}`, label: `GPU ${label}`, kind: "process", empty: "nobody", rows: 2,
    items: processBars(processes, { node: name, gpu: label, now: page.board.view.to }),
  }));
  const first = rows.length ? rows : [{ key: "gpus", label: "GPUs", kind: "process", empty: page.processes ? "nobody held a GPU in this time" : "…", items: [] }];
  first[0].note = processNote(page.processes);
  return [...first, ...page.eventLanes({ about: (_, node) => node === name, withPlace: true })];
}

function draw(page, name, picks) {
  const node = page.app.fleet.nodes.get(name);
  render(heading(page, name, node), page.head);
  render(node && node.gpus.length > MOST_LINES ? picker(page, node, picks) : nothing, page.picks);
  render(node ? below(page, node) : nothing, page.more);
}

function heading(page, name, node) {
  const isMissing = page.app.fleet.missing.includes(name);
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Where"><a href="#/">Overview</a> <span aria-hidden="true">›</span></nav>
      <h1><bdi>${format.text(name)}</bdi></h1>
      ${node ? stateBadge(node) : nothing}
      ${node ? findingBadge(node.details?.findings ?? []) : nothing}
      ${Object.entries(node?.labels ?? {}).map(([key, value]) => html`<span class="badge muted">${key}=${format.text(value)}</span>`)}
      <span class="spring"></span>
      <a class="button" href=${href("sessions", { nodes: name })}>Record a session</a>
    </div>
    ${isMissing ? html`<p class="error-note">This node is expected, but has never reported. Is its agent running?</p>`
      : node ? html`${numbers(node)} ${staleNote(node, page.app)}` : unknownNote(`The head knows no node ${format.text(name)}.`, page.app)}`;
}

function stateBadge(node) {
  if (node.state === "healthy") return html`<span class="badge good">healthy</span>`;
  return html`<span class="badge ${node.state === "late" ? "warn" : "bad"}">${node.state}</span>`;
}

function findingBadge(findings) {
  const most = worst(findings);
  if (!most) return nothing;
  return html`<span>${severityMark(most)} <span class="muted">${findings.length === 1 ? "1 finding" : `the worst of ${findings.length} findings`}</span></span>`;
}

const less = (a, b) => (format.known(a) && format.known(b) ? a - b : null);

function numbers(node) {
  const h = node.host;
  const busy = node.gpus.filter((gpu) => gpu.values.gpu_utilization_ratio > 0.01).length;
  const harvested = node.gpus.filter((gpu) => isUnit(gpu) && gpuState(gpu) === "harvested").length;
  const watts = node.gpus.map((gpu) => gpu.values.power_watts).filter(format.known);
  return html`<dl class="stats" data-state=${node.state}>
    ${stat("GPUs", `${busy} of ${node.gpus.length}`, harvested ? `at work, ${harvested} harvested` : "at work")}
    ${stat("CPU", format.percent(h.cpu_utilization_ratio), format.known(h.cpus) ? `of ${h.cpus}` : null)}
    ${stat("Load", format.count(h.load1))}
    ${stat("Memory", format.bytesOf(less(h.memory_total_bytes, h.memory_available_bytes), h.memory_total_bytes))}
    ${stat("Swap", h.swap_total_bytes === 0 ? "none" : format.bytesOf(less(h.swap_total_bytes, h.swap_free_bytes), h.swap_total_bytes))}
    ${stat("GPU power", watts.length ? format.watts(watts.reduce((sum, one) => sum + one, 0)) : "–")}
  </dl>`;
}

function picker(page, node, picks) {
  const pick = (event, gpu) => {
    if (event.target.checked) picks.add(`GPU ${gpu.label}`);
    else picks.delete(`GPU ${gpu.label}`);
    page.board.redraw(page.gpus);
  };
  return html`<details class="card gpu-picker"><summary>Show single GPUs in the charts</summary>
    <fieldset><legend class="visually-hidden">GPUs</legend>${node.gpus.map((gpu) => html`<label>
      <input type="checkbox" .checked=${picks.has(`GPU ${gpu.label}`)} @change=${(event) => pick(event, gpu)}> ${gpu.label}</label>`)}</fieldset></details>`;
}

function below(page, node) {
  const { details } = node;
  return html`${findingsNow(details?.findings ?? [], page.book)}
    ${gpuTable(node)} ${healthCard(details?.health ?? [])} ${storageCard(details)} ${networkCard(details)}
    <section class="card"><h2>About it</h2>${facts([
      ["CPU", details?.facts?.cpu_model],
      ["CPUs", format.known(node.host.cpus) ? format.count(node.host.cpus) : null],
      ["Kernel", details?.facts?.kernel],
      ["Driver", details?.facts?.driver],
      ["CUDA", details?.facts?.cuda],
      ["gpulse", details?.version],
    ])}</section>`;
}

function gpuTable(node) {
  if (!node.gpus.length) return nothing;
  return html`<section class="card"><h2>GPUs now</h2><div class="table-scroll" tabindex="0" role="region" aria-label="GPUs now"><table class="table">
    <caption class="visually-hidden">GPUs of ${format.text(node.name)} now</caption>
    <thead><tr><th scope="col">GPU</th><th scope="col">Model</th><th scope="col">State</th><th scope="col" class="num">Utilization</th>
      <th scope="col" class="num">SM active</th><th scope="col" class="num">Memory</th><th scope="col" class="num">Power</th>
      <th scope="col" class="num">Temperature</th><th scope="col">Jobs</th></tr></thead>
    <tbody>${node.gpus.map((gpu) => gpuRow(node, gpu))}</tbody></table></div></section>`;
}

function gpuRow(node, gpu) {
  const v = gpu.values;
  return html`<tr><th scope="row"><a href=${href("gpu", node.name, gpu.label)}>${gpu.label}</a></th>
    <td><bdi>${format.text(gpu.name)}</bdi></td><td>${stateMark(gpu)}</td>
    <td class="num">${format.percent(v.gpu_utilization_ratio)}</td><td class="num">${format.percent(v.sm_active_ratio)}</td>
    <td class="num">${format.bytesOf(v.memory_used_bytes, v.memory_total_bytes)}</td>
    <td class="num">${format.watts(v.power_watts)}</td><td class="num">${format.celsius(v.temperature_celsius)}</td>
    <td>${gpu.processes === null ? "–" : gpu.processes.map((process, at) => html`${at ? ", " : ""}<a href=${jobHref(node.name, process)}><bdi>${processLabel(process)}</bdi></a>`)}</td></tr>`;
}

function healthCard(entries) {
  if (!entries.length) return nothing;
  return html`<section class="card"><h2>Could not be read</h2><ul class="health">
    ${entries.map((entry) => html`<li><strong>${format.text(entry.subject ?? entry.source)}</strong>: ${format.text(entry.detail)}
      ${entry.hint ? html`<span class="muted">${format.text(entry.hint)}</span>` : nothing}
      <span class="muted">since ${format.dateTime(entry.since)}</span></li>`)}</ul></section>`;
}

function storageCard(details) {
  const mounts = details?.filesystems ?? [];
  if (!mounts.length) return nothing;
  return html`<section class="card"><h2>File systems now</h2><div class="table-scroll" tabindex="0" role="region" aria-label="File systems now"><table class="table">
    <caption class="visually-hidden">File systems now</caption>
    <thead><tr><th scope="col">Mounted at</th><th scope="col">Device</th><th scope="col">Kind</th><th scope="col" class="num">Used</th><th scope="col" class="num">Of it</th></tr></thead>
    <tbody>${mounts.map((one) => html`<tr><th scope="row"><bdi>${format.text(one.mount_point)}</bdi></th><td><bdi>${format.text(one.device)}</bdi></td>
      <td>${format.text([one.kind, one.type].filter(Boolean).join(", "))}</td><td class="num">${format.bytesOf(one.used_bytes, one.size_bytes)}</td>
      <td class="num">${format.percent(one.size_bytes ? one.used_bytes / one.size_bytes : null)}</td></tr>`)}</tbody></table></div></section>`;
}

function networkCard(details) {
  const links = details?.network ?? [];
  if (!links.length) return nothing;
  return html`<section class="card"><h2>Network now</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Network now"><table class="table">
    <caption class="visually-hidden">Network interfaces now</caption>
    <thead><tr><th scope="col">Interface</th><th scope="col">Kind</th><th scope="col">State</th><th scope="col" class="num">Received</th><th scope="col" class="num">Sent</th><th scope="col" class="num">Link</th></tr></thead>
    <tbody>${links.map((one) => html`<tr><th scope="row"><bdi>${format.text(one.name)}</bdi></th><td>${format.text(one.kind)}</td>
      <td>${one.up === null || one.up === undefined ? "–" : one.up ? "up" : "down"}</td><td class="num">${format.rate(one.rx_bytes_per_second)}</td>
      <td class="num">${format.rate(one.tx_bytes_per_second)}</td><td class="num">${format.bits(one.link_bits_per_second)}</td></tr>`)}</tbody></table></div></section>`;
}
