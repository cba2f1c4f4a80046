// One GPU: its current state, its processes, and its history.

import { ApiError } from "../core/api.js";
import { gpuState, HARVEST_WORDS, HARVESTED, hasFault, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { figure, figureRow, measured, partOf, pill, statePill } from "../parts/figures.js";
import { findingBanners } from "../parts/finding-banners.js";
import { HEALTH_METRICS, healthPanel, identityPanel, loadHardware, loadXids, xidPanel } from "../parts/hardware.js";
import { HistoryPage, staleNote, unknownNote } from "../parts/history-page.js";
import { jobHref, processTable } from "../parts/processes.js";
import { processBars, processNote, XIDS } from "../parts/timeline-items.js";
import { html, nothing, render } from "../vendor/lit-html.js";

const HOPPER = "requires a Hopper GPU or newer, and a driver that lets gpulse read its performance counters";
const FIRST = [
  {
    id: "utilization",
    title: "Utilization",
    unit: "ratio",
    top: 1,
    why: HOPPER,
    lines: [
      { metric: "gpu_utilization_ratio", title: "GPU" },
      { metric: "sm_active_ratio", title: "SM" },
      { metric: "tensor_active_ratio", title: "tensor" },
    ],
  },
  {
    id: "memory",
    title: "Memory",
    unit: "bytes",
    fill: true,
    lines: [
      { metric: "memory_used_bytes", title: "used" },
      { metric: "memory_total_bytes", title: "total", isLimit: true },
    ],
  },
  {
    id: "power",
    title: "Power",
    unit: "watts",
    fill: true,
    lines: [
      { metric: "power_watts", title: "draw" },
      { metric: "power_limit_watts", title: "limit", isLimit: true },
    ],
  },
  {
    id: "temperature",
    title: "Temperature",
    unit: "celsius",
    top: 90,
    bottom: 20,
    lines: [
      { metric: "temperature_celsius", title: "GPU" },
      { metric: "memory_temperature_celsius", title: "memory" },
      { metric: "temperature_slowdown_celsius", title: "slowdown limit", isLimit: true },
    ],
  },
];
const REST = [
  {
    id: "pcie",
    title: "PCIe",
    unit: "bytes/second",
    top: 1000,
    why: "PCIe metrics may be off; enable them with: gpulse settings --bandwidth",
    lines: [
      { metric: "pcie_rx_bytes_per_second", title: "received" },
      { metric: "pcie_tx_bytes_per_second", title: "sent" },
    ],
  },
  {
    id: "clocks",
    title: "Clocks",
    unit: "hertz",
    lines: [
      { metric: "sm_clock_hertz", title: "SM" },
      { metric: "memory_clock_hertz", title: "memory" },
      { metric: "sm_clock_max_hertz", title: "SM maximum", isLimit: true },
    ],
  },
  {
    id: "held-down",
    title: "Clock throttling",
    unit: "ratio",
    hint: "Fraction of the time during which the clocks were throttled, by reason",
    why: "the driver does not report these metrics for this GPU",
    lines: [
      { metric: "power_cap_seconds_total", title: "power limit" },
      { metric: "thermal_slowdown_seconds_total", title: "heat" },
      { metric: "hardware_thermal_slowdown_seconds_total", title: "heat (hardware slowdown)" },
      { metric: "power_brake_seconds_total", title: "power brake" },
    ],
  },
  {
    id: "pipes",
    title: "Occupancy, memory bus and compute pipes",
    unit: "ratio",
    why: HOPPER,
    lines: [
      { metric: "sm_occupancy_ratio", title: "SM occupancy" },
      { metric: "dram_active_ratio", title: "DRAM" },
      { metric: "fp16_active_ratio", title: "FP16" },
      { metric: "fp32_active_ratio", title: "FP32" },
      { metric: "fp64_active_ratio", title: "FP64" },
      { metric: "integer_active_ratio", title: "integer" },
    ],
  },
  {
    id: "nvlink",
    title: "NVLink",
    unit: "bytes/second",
    top: 1000,
    why: "this GPU has no NVLink, or NVLink metrics are off; enable them with: gpulse settings --nvlink",
    lines: [
      { metric: "nvlink_rx_bytes_per_second", title: "received" },
      { metric: "nvlink_tx_bytes_per_second", title: "sent" },
    ],
  },
];
/** Only where something harvests, or did in the time that is shown. */
const HARVEST = {
  id: "harvested",
  title: "Harvested",
  unit: "ratio",
  top: 1,
  fill: true,
  hint: "Fraction of the time during which the GPU was harvested",
  why: "this GPU was not harvested",
  lines: [{ metric: "harvested_seconds_total", title: "harvested" }],
};
const LIVE = [
  "gpu_utilization_ratio",
  "memory_used_bytes",
  "memory_total_bytes",
  "power_watts",
  "power_limit_watts",
  "temperature_celsius",
  "sm_active_ratio",
  "tensor_active_ratio",
  "sm_clock_hertz",
  "sm_clock_max_hertz",
  "temperature_slowdown_celsius",
  "performance_state",
  "mig_enabled",
  ...HEALTH_METRICS,
  "harvest_state",
  "harvested_seconds_total",
  "harvest_preemptions_total",
];

const LEVELS = ["memory_total_bytes", "power_limit_watts", "temperature_slowdown_celsius", "sm_clock_max_hertz"];

/**
 * Specs whose limits stand where the GPU has them now: what never changes has no history.
 * @param {Dashboard.ChartSpec[]} specs
 * @param {() => Dashboard.Gpu | null} gpu
 */
function withLevels(specs, gpu) {
  /** @param {string} metric */
  const level = (metric) => () => gpu()?.values[metric] ?? null;
  return specs.map((spec) => ({
    ...spec,
    lines: spec.lines?.map((line) => (line.isLimit ? { ...line, level: level(line.metric) } : line)),
  }));
}

/** @param {Dashboard.ChartSpec[]} specs */
const metricsOf = (specs) => specs.flatMap((spec) => (spec.lines ?? []).map((line) => line.metric));

/**
 * The page's title.
 * @param {Dashboard.Route} route
 */
export const title = (route) => `${route.parts[0] ?? ""} GPU ${route.parts[1] ?? ""}`;

/**
 * Show one GPU.
 * @param {HTMLElement} root
 * @param {Dashboard.Route} route
 * @param {Dashboard.App} app
 */
export function mount(root, route, app) {
  const [name = "", label = ""] = route.parts;
  const gpu = () => app.fleet.nodes.get(name)?.gpus.find((one) => one.label === label) ?? null;
  let levels = "";
  /** @type {Dashboard.LoadedGroup | null} */
  let rest = null;
  /** @type {Known} */
  const known = { hardware: null, xids: null };
  const page = new HistoryPage(root, route, app, {
    nodes: () => [name],
    why,
    isNone: (error) => error instanceof ApiError && error.status === 404 && gpu() === null,
    draw: (own) => {
      draw(own, name, label, gpu(), known);
      const now = LEVELS.map((metric) => gpu()?.values[metric] ?? null).join();
      if (now !== levels) own.board.groups.forEach((group) => own.board.redraw(group));
      levels = now;
      showHarvest(rest, gpu());
    },
  });
  app.live.addEventListener("state", () => page.refresh(), { signal: page.stop.signal });
  const words = { scope: "gpu", gpus: [`${name}:${label}`] };
  page.board.add(page.grid, { ...words, metrics: metricsOf(FIRST), spread: true, specs: withLevels(FIRST, gpu) });
  page.relane = () => page.timeline.show(lanes(page, name, label));
  page.start(name);
  rest = page.board.add(page.grid, {
    ...words,
    metrics: [...metricsOf([...REST, HARVEST]), ...XIDS],
    specs: [...withLevels(REST, gpu), HARVEST],
    answered: (answer) => {
      page.takeXids(answer);
      showHarvest(rest && { ...rest, answer }, gpu());
    },
  });
  showHarvest(rest, gpu());
  page.board.sides.push(
    async (signal) => {
      await page.askProcesses({ nodes: [name], gpus: words.gpus }, signal);
      page.relane();
    },
    async (signal) => {
      await page.askEvents([name], signal);
      page.relane();
    },
    async (signal) => {
      known.hardware = await loadHardware(name, signal);
      page.refresh();
    },
    async (signal) => {
      known.xids = await loadXids(name, (detail) => isOwn(detail, label, known.hardware), signal);
      page.refresh();
    },
  );
  page.relane();
  return page.handle({ nodes: [name], metrics: LIVE });
}

/**
 * What is known about the hardware; null until the head has answered.
 * @typedef {{ hardware: Api.NodeHardware | null, xids: import("../parts/hardware.js").Xid[] | null }} Known
 */

/**
 * Whether an Xid error is of this GPU, by its UUID where that is known: indexes change when a GPU is replaced.
 * @param {Record<string, unknown>} detail
 * @param {string} label
 * @param {Api.NodeHardware | null} hardware
 */
function isOwn(detail, label, hardware) {
  const own = hardware?.gpus.find((gpu) => gpu.id === label.split(":")[0]);
  return own ? detail.uuid === own.uuid : detail.gpu === label;
}

/**
 * The chart of harvested time is there when something harvests now, or did in the time that is shown.
 * @param {Dashboard.LoadedGroup | null} group
 * @param {Dashboard.Gpu | null} gpu
 */
function showHarvest(group, gpu) {
  const chart = group?.charts.find((one) => one.spec === HARVEST);
  if (!chart) return;
  const harvested = group?.answer?.series.find((series) => series.metric === "harvested_seconds_total");
  chart.host.hidden = !format.known(gpu?.values.harvest_state) && !harvested?.values.some((value) => (value ?? 0) > 0);
}

/**
 * @param {Dashboard.ChartSpec} spec
 * @param {string[]} titles
 */
function why(spec, titles) {
  if (titles.length) return `No data for this GPU: ${titles.join(", ")}${spec.why ? ` (${spec.why})` : ""}.`;
  return spec.why ? `No data for this GPU in this time range: ${spec.why}.` : "No samples from this GPU in this time range.";
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 * @param {string} label
 */
function lanes(page, name, label) {
  /**
   * @param {Dashboard.FindingIdentity} finding
   * @param {string} node
   */
  const about = (finding, node) => node === name && (finding.label === label || finding.label === null);
  const processes = {
    key: "processes",
    label: "Processes",
    kind: "process",
    empty: page.processes ? "no processes in this time range" : "…",
    items: processBars(page.processes?.processes ?? [], {
      node: name,
      gpu: label,
      from: page.processes?.from ?? page.board.view.from,
      now: page.board.view.to,
    }),
    note: processNote(page.processes),
  };
  return [processes, ...page.eventLanes({ about, gpu: label })];
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 * @param {string} label
 * @param {Dashboard.Gpu | null} gpu
 * @param {Known} known
 */
function draw(page, name, label, gpu, known) {
  render(heading(page, name, label, gpu), page.head);
  render(gpu ? below(page, gpu) : nothing, page.more);
  render(gpu ? panels(gpu, known, page.app.live.state === "lost") : nothing, page.side);
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {string} name
 * @param {string} label
 * @param {Dashboard.Gpu | null} gpu
 */
function heading(page, name, label, gpu) {
  const total = gpu?.values.memory_total_bytes;
  return html`<div class="history-title">
      <nav class="crumbs" aria-label="Breadcrumb"><a href="#/">Overview</a> <span aria-hidden="true">/</span>
        <a href=${href("node", name)}><bdi>${format.text(name)}</bdi></a> <span aria-hidden="true">/</span></nav>
      <h1>GPU <bdi>${format.text(label)}</bdi></h1>
      ${gpu ? html`${statePill(gpu)} <span class="muted"><bdi>${format.text(gpu.name)}</bdi>${format.known(total) ? `, ${format.bytes(total)}` : ""}</span>` : nothing}
      ${gpu && gpu.node.state !== "healthy" ? pill(gpu.node.state, `node ${gpu.node.state}`) : nothing}
      <span class="spring"></span>
      ${siblings(gpu)}
      <a class="button" href=${href("sessions", { gpus: `${name}:${label}` })}>Record a session</a>
    </div>
    ${gpu ? html`${numbers(page, gpu)} ${staleNote(gpu.node, page.app)} ${gpuState(gpu) === "harvested" ? html`<p class="harvested-note">${HARVESTED}</p>` : nothing} ${findingBanners(gpu.findings, page, gpu.node.name)}` : noSuchGpu(page.app, name, label)}`;
}

/**
 * Note in place of numbers: the node has no such GPU, or has not reported.
 * @param {Dashboard.App} app
 * @param {string} name
 * @param {string} label
 */
function noSuchGpu(app, name, label) {
  const others = app.fleet.nodes.get(name)?.gpus ?? [];
  if (!others.length) return unknownNote(`There is no GPU ${format.text(label)} on ${format.text(name)}.`, app, name);
  return html`<p class="empty"><bdi>${format.text(name)}</bdi> has no GPU <bdi>${format.text(label)}</bdi>. It has
    ${others.map((gpu, at) => html`${at ? ", " : ""}<a href=${href("gpu", name, gpu.label)}>GPU ${format.text(gpu.label)}</a>`)}.</p>`;
}

/** @param {Dashboard.Gpu | null} gpu */
function siblings(gpu) {
  if (!gpu || gpu.node.gpus.length < 2) return nothing;
  const at = gpu.node.gpus.indexOf(gpu);
  /**
   * @param {Dashboard.Gpu | undefined} other
   * @param {string} words
   * @param {string} sign
   */
  const link = (other, words, sign) =>
    other
      ? html`<a class="button quiet" href=${href("gpu", gpu.node.name, other.label)} aria-label=${words}>${sign === "←" ? html`<span aria-hidden="true">←</span> ` : nothing}GPU ${other.label}${sign === "→" ? html` <span aria-hidden="true">→</span>` : nothing}</a>`
      : nothing;
  return html`${link(gpu.node.gpus[at - 1], "Previous GPU of this node", "←")}${link(gpu.node.gpus[at + 1], "Next GPU of this node", "→")}`;
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {Dashboard.Gpu} gpu
 */
function numbers(page, gpu) {
  const v = gpu.values;
  return figureRow(
    gpu.node.state,
    html`${measured("Utilization", format.percent(v.gpu_utilization_ratio))}
    ${measured("SM active", format.percent(v.sm_active_ratio))}
    ${measured("Tensor active", format.percent(v.tensor_active_ratio))}
    ${partOf("Memory", v.memory_used_bytes, v.memory_total_bytes)}
    ${format.known(v.power_limit_watts) && format.known(v.power_watts) ? figure("Power", Math.round(v.power_watts), `of ${format.watts(v.power_limit_watts)}`) : measured("Power", format.watts(v.power_watts))}
    ${measured("Temperature", format.celsius(v.temperature_celsius))}
    ${measured("SM clock", format.hertz(v.sm_clock_hertz))}
    ${holderFigure(page, gpu)}
    ${lostFigure(page, gpu)}
    ${format.known(v.harvested_seconds_total) ? measured("Harvested", format.hours(v.harvested_seconds_total), "so far") : nothing}`,
  );
}

/**
 * Who holds it, and for how long; several users are counted.
 * @param {Dashboard.HistoryPage} page
 * @param {Dashboard.Gpu} gpu
 */
function holderFigure(page, gpu) {
  if (gpu.processes === null) return figure("Held by", format.UNKNOWN);
  if (!gpu.processes.length) return figure("Held by", "nobody");
  const now = lastHeard(gpu.node, page.app.fleet.headTime());
  const users = [...new Set(gpu.processes.map((process) => process.user))];
  const starts = gpu.processes.map((process) => process.start_time).filter(format.known);
  const length = starts.length ? format.duration(now - Math.min(...starts)) : null;
  const [process] = gpu.processes;
  const who = users.length === 1 ? format.text(users[0] ?? `pid ${process.pid}`) : `${users.length} users`;
  return figure("Held by", html`<a href=${jobHref(gpu.node.name, process)}><bdi>${who}</bdi></a>`, length);
}

/**
 * GPU time that the worst finding has cost so far; nothing where no finding says how much it costs.
 * @param {Dashboard.HistoryPage} page
 * @param {Dashboard.Gpu} gpu
 */
function lostFigure(page, gpu) {
  const now = lastHeard(gpu.node, page.app.fleet.headTime());
  const lost = gpu.findings.map(({ lost_ratio: ratio, start }) => (format.known(ratio) && format.known(start) ? ratio * (now - start) : 0));
  const most = Math.max(0, ...lost);
  return most > 0 ? figure("Time lost so far", format.hours(most).replace(" h", ""), "GPU-hours") : nothing;
}

/**
 * What a harvest makes of it; nothing where none watches it.
 * @param {Dashboard.Values} values
 */
function harvestWords(values) {
  if (!format.known(values.harvest_state)) return null;
  const times = values.harvest_preemptions_total;
  const given = format.known(times) ? `freed ${times === 1 ? "once" : `${format.count(times)} times`}` : null;
  return [HARVEST_WORDS[values.harvest_state] ?? HARVEST_WORDS[4], given].filter(Boolean).join(", ");
}

/**
 * @param {Dashboard.HistoryPage} page
 * @param {Dashboard.Gpu} gpu
 */
function below(page, gpu) {
  const until = lastHeard(gpu.node, page.app.fleet.headTime());
  const rows = (gpu.processes ?? []).map((process) => ({ node: gpu.node.name, gpu: gpu.label, process, until }));
  return html`<section class="card panel" aria-label="Current processes"><h2>Current processes</h2>
      ${
        rows.length
          ? processTable(rows, "Processes that currently hold this GPU", { withPlace: false })
          : html`<p class="muted">${gpu.processes === null ? "The processes on this GPU are unknown." : "No process uses this GPU."}</p>`
      }</section>`;
}

/**
 * Identity, health and Xid errors, in the column at the right.
 * @param {Dashboard.Gpu} gpu
 * @param {Known} known
 * @param {boolean} isLost
 */
function panels(gpu, { hardware, xids }, isLost) {
  const v = gpu.values;
  const own = hardware?.gpus.find((one) => one.uuid === gpu.uuid) ?? null;
  /** @type {Array<[string, Dashboard.Content]>} */
  const more = [];
  if (gpu.parent) more.push(["Part of", html`<a href=${href("gpu", gpu.node.name, gpu.parent.label)}>GPU ${gpu.parent.label}</a>`]);
  if (gpu.instances.length) {
    more.push(["Instances", html`${gpu.instances.map((one) => html`<a href=${href("gpu", gpu.node.name, one.label)}>${one.label}</a> `)}`]);
  }
  if (v.mig_enabled) more.push(["MIG", "on"]);
  if (format.known(v.performance_state)) more.push(["Performance state", `P${v.performance_state}`]);
  const harvest = harvestWords(v);
  if (harvest) more.push(["Harvest", harvest]);
  return html`${identityPanel(own, hardware, more)}
    ${gpu.parent ? nothing : healthPanel(v, { facts: own?.facts, isFaulty: hasFault(gpu), isLost })}
    ${xidPanel(xids)}`;
}
