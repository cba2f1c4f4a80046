// One node: its GPUs, its CPUs, memory, disks and network, now and over time.

import { byName, gpuState, hasFault, isUnit, lastHeard, worst } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { figure, figureRow, measured, partOf, pill } from "../parts/figures.js";
import { findingBanners } from "../parts/finding-banners.js";
import { factList, loadHardware } from "../parts/hardware.js";
import { HistoryPage, staleNote, stateMark, unknownNote } from "../parts/history-page.js";
import { jobHref, processTable } from "../parts/processes.js";
import { processBars, processNote, XIDS } from "../parts/timeline-items.js";
import { topologyPanel } from "../parts/topology.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const MAX_LANES = 8;
/** Borders and padding of a panel, in pixels. */
const PANEL_EDGES = 28;
const FULL = 0.9;
/** @param {Api.HistorySeries} series */
const gpuName = (series) => `GPU ${series.gpu ?? series.subject}`;
/** @param {Api.HistorySeries} series */
const moves = (series) => series.values.some((value) => (value ?? 0) > 0);

/** @param {string} metric */
const eachGpu = (metric) => ({ metric, name: gpuName });
const GPUS = [
  { id: "gpus-utilization", title: "GPU utilization", unit: "ratio", top: 1, height: 190, each: eachGpu("gpu_utilization_ratio") },
  { id: "gpus-memory", title: "GPU memory", unit: "bytes", height: 190, each: eachGpu("memory_used_bytes") },
  { id: "gpus-power", title: "GPU power", unit: "watts", each: eachGpu("power_watts") },
  { id: "gpus-temperature", title: "GPU temperature", unit: "celsius", bottom: 20, top: 90, each: eachGpu("temperature_celsius") },
];

/** @type {Dashboard.ChartSpec[]} */
const HOST = [
  {
    id: "cpu",
    title: "CPU",
    unit: "ratio",
    top: 1,
    fill: true,
    lines: [
      { metric: "cpu_utilization_ratio", title: "working" },
      { metric: "cpu_iowait_ratio", title: "I/O wait" },
    ],
  },
  {
    id: "ram",
    title: "Memory and swap",
    unit: "bytes",
    fill: true,
    lines: [
      { metric: "memory_total_bytes", minus: "memory_available_bytes", title: "used" },
      { metric: "memory_cached_bytes", title: "file cache" },
      { metric: "swap_total_bytes", minus: "swap_free_bytes", title: "swap used" },
      { metric: "memory_total_bytes", title: "total", isLimit: true },
    ],
  },
  {
    id: "load",
    title: "Load",
    unit: "1",
    lines: [
      { metric: "load1", title: "1 min" },
      { metric: "load5", title: "5 min" },
      { metric: "cpus", title: "CPUs", isLimit: true },
    ],
  },
  {
    id: "pressure",
    title: "Resource pressure (PSI)",
    unit: "ratio",
    hint: "Fraction of the time during which tasks waited for a resource",
    why: "pressure stall information (PSI) is disabled in the kernel",
    lines: [
      { metric: "pressure_cpu_some_ratio", title: "CPU (some tasks stalled)" },
      { metric: "pressure_io_some_ratio", title: "disks (some tasks stalled)" },
      { metric: "pressure_memory_some_ratio", title: "memory (some tasks stalled)" },
      { metric: "pressure_memory_full_ratio", title: "memory (all tasks stalled)" },
    ],
  },
];
/** @type {Record<string, string>} */
const WORDS = {
  read_bytes_per_second: "read",
  written_bytes_per_second: "written",
  rx_bytes_per_second: "received",
  tx_bytes_per_second: "sent",
};
/** @param {Api.HistorySeries} series */
const named = (series) => `${series.subject} ${WORDS[series.metric]}`;
/** @type {Array<[string, Dashboard.ChartSpec & { each: Dashboard.EachSpec }]>} */
const GROUPS = [
  [
    "disk",
    {
      id: "disks",
      title: "Disks",
      unit: "bytes/second",
      only: moves,
      why: "no disk activity in this time range",
      each: { metrics: ["read_bytes_per_second", "written_bytes_per_second"], name: named },
    },
  ],
  [
    "network",
    {
      id: "network",
      title: "Network",
      unit: "bytes/second",
      only: moves,
      why: "no network traffic in this time range",
      each: { metrics: ["rx_bytes_per_second", "tx_bytes_per_second"], name: named },
    },
  ],
  [
    "filesystem",
    {
      id: "filesystems",
      title: "File systems",
      unit: "ratio",
      top: 1,
      hint: "Fraction of each file system in use",
      each: { metric: "used_bytes", over: "size_bytes", name: (series) => series.subject },
    },
  ],
];
const HOST_METRICS = [
  "cpu_utilization_ratio",
  "cpus",
  "load1",
  "memory_total_bytes",
  "memory_available_bytes",
  "swap_total_bytes",
  "swap_free_bytes",
];

/**
 * The page's title.
 * @param {Dashboard.Route} route
 */
export const title = (route) => route.parts[0] ?? "Node";

/**
 * Show one node.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const [name = ""] = route.parts;
  /** @type {Api.NodeHardware | null} */
  let hardware = null;
  const page = new HistoryPage(root, route, app, { nodes: () => [name], why, draw: (own) => draw(own, name, hardware) });
  const nodes = [name];
  page.board.add(page.grid, {
    scope: "gpu",
    nodes,
    metrics: [...GPUS.map((spec) => spec.each.metric), ...XIDS],
    specs: GPUS,
    answered: (answer) => page.takeXids(answer),
  });
  page.relane = () => page.timeline.show(lanes(page, name));
  page.start(name);
  page.board.add(page.grid, {
    scope: "host",
    nodes,
    metrics: [...new Set(HOST.flatMap((spec) => (spec.lines ?? []).flatMap((line) => [line.metric, line.minus ?? []].flat())))],
    specs: HOST,
  });
  for (const [scope, spec] of GROUPS) {
    const { metric, metrics, over } = spec.each;
    page.board.add(page.grid, { scope, nodes, metrics: [metrics ?? [], metric ?? [], over ?? []].flat(), specs: [spec] });
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
    async (signal) => {
      hardware = await loadHardware(name, signal);
      page.refresh();
    },
  );
  page.relane();
  return page.handle({ nodes, host_metrics: [...HOST_METRICS, "load5", "processes_blocked"] });
}

/**
 * @param {Dashboard.ChartSpec} spec
 * @param {string[]} titles
 */
function why(spec, titles) {
  if (titles.length) return `No data: ${titles.join(", ")}${spec.why ? ` (${spec.why})` : ""}.`;
  return spec.why ? `No data: ${spec.why}.` : "No samples in this time range.";
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 */
function lanes(page, name) {
  const processes = page.processes?.processes ?? [];
  const from = page.processes?.from ?? page.board.view.from;
  const held = new Set(processes.flatMap((process) => process.gpus.map((gpu) => gpu.gpu ?? "")));
  const known = page.app.fleet.nodes.get(name)?.gpus.map((gpu) => gpu.label) ?? [];
  const labels = [...new Set([...(known.length <= MAX_LANES ? known : []), ...held])].sort(byName);
  /** @type {Dashboard.Lane[]} */
  const rows = labels.map((label) => ({
    key: `gpu ${label}`,
    label: `GPU ${label}`,
    kind: "process",
    empty: "no processes",
    rows: 2,
    items: processBars(processes, { node: name, gpu: label, from, now: page.board.view.to }),
  }));
  const first = rows.length
    ? rows
    : [{ key: "gpus", label: "GPUs", kind: "process", empty: page.processes ? "no processes on GPUs in this time range" : "…", items: [] }];
  first[0].note = processNote(page.processes);
  return [...first, ...page.eventLanes({ about: (_, node) => node === name, withPlace: true })];
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 * @param {Api.NodeHardware | null} hardware
 */
function draw(page, name, hardware) {
  const node = page.app.fleet.nodes.get(name);
  render(heading(page, name, node, hardware), page.head);
  render(node ? below(page, node) : nothing, page.more);
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 * @param {Dashboard.Node | undefined} node
 * @param {Api.NodeHardware | null} hardware
 */
function heading(page, name, node, hardware) {
  const isMissing = page.app.fleet.missing.includes(name);
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Breadcrumb"><a href="#/">Overview</a> <span aria-hidden="true">/</span></nav>
      <h1><bdi>${format.text(name)}</bdi></h1>
      ${node ? nodePill(node) : nothing}
      ${node ? html`<span class="muted">${models(node)}</span>` : nothing}
      ${Object.entries(node?.labels ?? {}).map(([key, value]) => html`<span class="badge muted">${key}=${format.text(value)}</span>`)}
      <span class="spring"></span>
      <a class="button" href=${href("sessions", { nodes: name })}>Record a session</a>
    </div>
    ${
      isMissing
        ? html`<p class="error-note">This node is expected but has never reported. Check that its agent is running.</p>`
        : node
          ? html`${numbers(node)} ${staleNote(node, page.app)}
            ${findingBanners(node.details?.findings ?? [], page, name, { withPlace: true })}
            ${now(node, hardware, roomIn(page.head))}`
          : unknownNote(`There is no node ${format.text(name)}.`, page.app)
    }`;
}

/**
 * The width that the topology has, in pixels.
 * @param {HTMLElement} head
 */
function roomIn(head) {
  const column = head.querySelector(".columns-main") ?? head;
  return column.clientWidth - PANEL_EDGES;
}

/** @param {Dashboard.Node} node */
function nodePill(node) {
  if (node.state !== "healthy") return pill(node.state, node.state);
  const faulty = node.gpus.filter((gpu) => gpu.parent === null && hasFault(gpu)).length;
  if (faulty) return pill("faulty", faulty === 1 ? "1 GPU faulty" : `${faulty} GPUs faulty`);
  const severity = worst(node.details?.findings ?? []);
  if (severity === "critical" || severity === "high") return html`<span class="pill" data-state="reporting">reporting</span>`;
  return html`<span class="pill" data-state="healthy"><span aria-hidden="true">✓</span> healthy</span>`;
}

/**
 * `8 × NVIDIA H200`.
 * @param {Dashboard.Node} node
 */
function models(node) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const gpu of node.gpus) if (gpu.parent === null) counts.set(gpu.name, (counts.get(gpu.name) ?? 0) + 1);
  return [...counts].map(([model, count]) => `${count} × ${format.text(model)}`).join(", ");
}

/**
 * @param {Dashboard.MaybeNumber} a
 * @param {Dashboard.MaybeNumber} b
 */
const less = (a, b) => (format.known(a) && format.known(b) ? a - b : null);

/** @param {Dashboard.MaybeNumber[]} values */
function sum(values) {
  const known = values.filter(format.known);
  return known.length ? known.reduce((total, one) => total + one, 0) : null;
}

/** @param {Dashboard.Node} node */
function numbers(node) {
  const h = node.host;
  const states = node.gpus.filter(isUnit).map(gpuState);
  const busy = states.filter((state) => state === "busy").length;
  const harvested = states.filter((state) => state === "harvested").length;
  const links = (node.details?.network ?? []).filter((link) => link.kind !== "loopback" && link.kind !== "virtual");
  const [received, sent] = [sum(links.map((link) => link.rx_bytes_per_second)), sum(links.map((link) => link.tx_bytes_per_second))];
  return figureRow(
    node.state,
    html`${figure("GPUs busy", node.state === "lost" ? format.UNKNOWN : busy, `of ${states.length}${harvested ? `, ${harvested} harvested` : ""}`)}
    ${measured("CPU", format.percent(h.cpu_utilization_ratio), format.known(h.cpus) ? `of ${h.cpus} CPUs` : null)}
    ${measured("Load", format.count(h.load1))}
    ${partOf("Memory", less(h.memory_total_bytes, h.memory_available_bytes), h.memory_total_bytes)}
    ${h.swap_total_bytes === 0 ? nothing : partOf("Swap", less(h.swap_total_bytes, h.swap_free_bytes), h.swap_total_bytes)}
    ${diskFigure(node.details?.filesystems ?? [])}
    ${figure("Network", format.rate(received), `in, ${format.rate(sent)} out`)}
    ${measured("GPU power", format.watts(sum(node.gpus.map((gpu) => gpu.values.power_watts))))}`,
  );
}

/**
 * The fullest file system.
 * @param {Live.Filesystem[]} mounts
 */
function diskFigure(mounts) {
  const full = mounts
    .map((mount) => ({ mount, ratio: usedRatio(mount) }))
    .filter(({ ratio }) => format.known(ratio))
    .sort((a, b) => (b.ratio ?? 0) - (a.ratio ?? 0))[0];
  if (!full) return figure("Fullest disk", format.UNKNOWN);
  const isFull = (full.ratio ?? 0) > FULL;
  return figure(
    "Fullest disk",
    html`<span class=${isFull ? "bad-text" : nothing}>${format.percent(full.ratio).replace("%", "")}</span>`,
    html`% of <bdi>${format.text(full.mount.mount_point)}</bdi>`,
  );
}

/** @param {Live.Filesystem} mount */
const usedRatio = (mount) => (mount.size_bytes && mount.used_bytes !== null ? mount.used_bytes / mount.size_bytes : null);

/**
 * What the node has now: its GPUs, how they are connected, and what it is.
 * @param {Dashboard.Node} node
 * @param {Api.NodeHardware | null} hardware
 * @param {number} room
 */
function now(node, hardware, room) {
  const { details } = node;
  return html`<div class="columns">
    <div class="columns-main">${gpuTable(node)} ${topologyPanel(hardware, { node: node.name, room })}</div>
    <div class="columns-side">${identity(node, hardware)} ${storageCard(details)} ${networkCard(details)}</div>
  </div>`;
}

/**
 * NUMA nodes with their CPUs; those of the GPUs where the node does not report its own.
 * @param {Api.NodeHardware} hardware
 */
function numaWords({ numa_cpus: all, gpus }) {
  if (all.length) return all.map((cpus, at) => `${at}: ${cpus || "no CPUs"}`).join("; ");
  const cpus = new Map(gpus.map((gpu) => [gpu.numa_node, gpu.cpu_affinity]));
  const known = [...cpus].filter(([place]) => place !== null).sort(([a], [b]) => (a ?? 0) - (b ?? 0));
  return known.map(([place, some]) => (some ? `${place}: ${some}` : `${place}`)).join("; ") || null;
}

/**
 * @param {Dashboard.Node} node
 * @param {Api.NodeHardware | null} hardware
 */
function identity(node, hardware) {
  const facts = node.details?.facts;
  return html`<section class="card panel" aria-label="Identity"><h2>Identity</h2>${factList([
    ["CPU", hardware?.cpu_model ?? facts?.cpu_model],
    ["CPUs", format.known(node.host.cpus) ? format.count(node.host.cpus) : null],
    ["NUMA", hardware ? numaWords(hardware) : null],
    ["Kernel", hardware?.kernel ?? facts?.kernel],
    [
      "Driver, CUDA",
      [hardware?.driver ?? facts?.driver, hardware?.cuda ?? facts?.cuda].map((version) => version ?? format.UNKNOWN).join(", "),
    ],
    ["gpulse", node.details?.version],
  ])}</section>`;
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {Dashboard.Node} node
 */
function below(page, node) {
  const until = lastHeard(node, page.app.fleet.headTime());
  const rows = node.gpus.flatMap((gpu) => (gpu.processes ?? []).map((process) => ({ node: node.name, gpu: gpu.label, process, until })));
  const isUnknown = node.gpus.length > 0 && node.gpus.every((gpu) => gpu.processes === null);
  return html`<section class="card panel" aria-label="Current processes"><h2>Current processes</h2>${
    rows.length
      ? processTable(rows, "Processes on the GPUs of this node now", { withNode: false })
      : html`<p class="muted">${isUnknown ? "The processes on this node are unknown." : "No process uses a GPU of this node."}</p>`
  }</section> ${healthCard(node.details?.health ?? [])}`;
}

/** @param {Dashboard.Node} node */
function gpuTable(node) {
  if (!node.gpus.length) return nothing;
  return html`<section class="card panel" aria-label="GPUs"><h2>GPUs</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Current state of the GPUs"><table class="table stack node-gpus">
    <caption class="visually-hidden">Current state of the GPUs of ${format.text(node.name)}</caption>
    <thead><tr><th scope="col">GPU</th><th scope="col">State</th><th scope="col" class="num">Utilization</th>
      <th scope="col" class="num wide">SM active</th><th scope="col" class="num">Memory</th><th scope="col" class="num wide">Power</th>
      <th scope="col" class="num wide">Temperature</th><th scope="col">Held by</th></tr></thead>
    <tbody>${node.gpus.map((gpu) => gpuRow(node, gpu))}</tbody></table></div></section>`;
}

/**
 * @param {Dashboard.Node} node
 * @param {Dashboard.Gpu} gpu
 */
function gpuRow(node, gpu) {
  const v = gpu.values;
  return html`<tr><th scope="row" data-label="GPU"><a href=${href("gpu", node.name, gpu.label)}>${gpu.label}</a></th>
    <td data-label="State">${stateMark(gpu)}</td>
    <td data-label="Utilization" class="num">${format.percent(v.gpu_utilization_ratio)}</td><td data-label="SM active" class="num wide">${format.percent(v.sm_active_ratio)}</td>
    <td data-label="Memory" class="num">${format.bytesOf(v.memory_used_bytes, v.memory_total_bytes)}</td>
    <td data-label="Power" class="num wide">${format.watts(v.power_watts)}</td><td data-label="Temperature" class="num wide">${format.celsius(v.temperature_celsius)}</td>
    <td data-label="Held by"><span>${gpu.processes === null ? "–" : holders(node, gpu.processes)}</span></td></tr>`;
}

/**
 * The users of processes, each with a link to its job; what they run is in the table of processes.
 * @param {Dashboard.Node} node
 * @param {Live.Process[]} processes
 */
function holders(node, processes) {
  const first = new Map(processes.map((process) => [process.user ?? `pid ${process.pid}`, process]));
  return [...first].map(
    ([user, process], at) => html`${at ? ", " : ""}<a href=${jobHref(node.name, process)}><bdi>${format.text(user)}</bdi></a>`,
  );
}

/** @param {Live.HealthEntry[]} entries */
function healthCard(entries) {
  if (!entries.length) return nothing;
  return html`<section class="card"><h2>Metrics that the agent cannot read</h2><ul class="health">
    ${entries.map(
      (entry) => html`<li><strong>${format.text(entry.subject ?? entry.source)}</strong>: ${format.text(entry.detail)}
      ${entry.hint ? html`<span class="muted">${format.text(entry.hint)}</span>` : nothing}
      <span class="muted">since ${format.dateTime(entry.since)}</span></li>`,
    )}</ul></section>`;
}

/** @param {Live.Details | null} details */
function storageCard(details) {
  const mounts = details?.filesystems ?? [];
  if (!mounts.length) return nothing;
  return html`<section class="card panel"><h2>File systems</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Current use of the file systems"><table class="table">
    <caption class="visually-hidden">Current use of the file systems</caption>
    <thead><tr><th scope="col">Mounted at</th><th scope="col" class="num">Used</th><th scope="col" class="num">%</th></tr></thead>
    <tbody>${mounts.map(
      (
        one,
      ) => html`<tr><th scope="row" title=${format.text([one.device, one.kind, one.type].filter(Boolean).join(", "))}><bdi>${format.text(one.mount_point)}</bdi></th>
      <td class="num">${format.bytesOf(one.used_bytes, one.size_bytes)}</td><td class="num">${format.percent(usedRatio(one)).replace("%", "")}</td></tr>`,
    )}</tbody></table></div></section>`;
}

/** @param {Live.Details | null} details */
function networkCard(details) {
  const links = details?.network ?? [];
  if (!links.length) return nothing;
  return html`<section class="card panel"><h2>Network</h2><div class="table-scroll" tabindex="0" role="region" aria-label="Current network traffic"><table class="table">
    <caption class="visually-hidden">Current traffic of the network interfaces</caption>
    <thead><tr><th scope="col">Interface</th><th scope="col" class="num">In</th><th scope="col" class="num">Out</th><th scope="col" class="num">Link</th></tr></thead>
    <tbody>${links.map(
      (one) => html`<tr><th scope="row" title=${format.text(one.kind)}><bdi>${format.text(one.name)}</bdi></th>
      <td class="num">${format.rate(one.rx_bytes_per_second)}</td><td class="num">${format.rate(one.tx_bytes_per_second)}</td>
      <td class="num">${one.up === false ? "down" : format.bits(one.link_bits_per_second)}</td></tr>`,
    )}</tbody></table></div></section>`;
}
