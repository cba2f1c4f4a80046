// One GPU: what it does now, who holds it, and how it was.
import { html, nothing, render } from "../vendor/lit-html.js";
import { gpuState, HARVEST_WORDS, HARVESTED, lastHeard } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { findingLine, HistoryPage, processTable, stat, stateMark, unknownNote, staleNote } from "../parts/chart-page.js";
import { facts, jobHref, processBars, processLabel, processNote, XIDS } from "../parts/timeline-data.js";

const HOPPER = "needs a Hopper GPU or later, and a driver that lets gpulse read its performance counters";
const FIRST = [
  {
    id: "utilization", title: "Utilization", unit: "ratio", top: 1, height: 190, why: HOPPER,
    lines: ["gpu_utilization_ratio", "sm_active_ratio", "tensor_active_ratio", "sm_occupancy_ratio"].map((metric) => ({ metric })),
  },
  {
    id: "memory", title: "Memory", unit: "bytes", height: 190, fill: true,
    lines: [{ metric: "memory_used_bytes", title: "used" }, { metric: "memory_total_bytes", title: "total", isLimit: true }],
  },
  {
    id: "power", title: "Power", unit: "watts", fill: true,
    lines: [{ metric: "power_watts", title: "draw" }, { metric: "power_limit_watts", title: "limit", isLimit: true }],
  },
  {
    id: "temperature", title: "Temperature", unit: "celsius", top: 90, bottom: 20,
    lines: [
      { metric: "temperature_celsius", title: "GPU" },
      { metric: "memory_temperature_celsius", title: "memory" },
      { metric: "temperature_slowdown_celsius", title: "slows down", isLimit: true },
    ],
  },
];
const REST = [
  {
    id: "clocks", title: "Clocks", unit: "hertz",
    lines: [{ metric: "sm_clock_hertz", title: "SM" }, { metric: "memory_clock_hertz", title: "memory" }, { metric: "sm_clock_max_hertz", title: "SM at most", isLimit: true }],
  },
  {
    id: "held-down", title: "Clocks held down", unit: "ratio", hint: "Share of time in which something held the clocks down", why: "the driver does not count it for this GPU",
    lines: [
      { metric: "power_cap_seconds_total", title: "power limit" },
      { metric: "thermal_slowdown_seconds_total", title: "heat" },
      { metric: "hardware_thermal_slowdown_seconds_total", title: "heat, hardware" },
      { metric: "power_brake_seconds_total", title: "power brake" },
    ],
  },
  {
    id: "pipes", title: "Memory bus and pipes", unit: "ratio", why: HOPPER,
    lines: [
      { metric: "dram_active_ratio", title: "DRAM" },
      { metric: "fp16_active_ratio", title: "FP16" },
      { metric: "fp32_active_ratio", title: "FP32" },
      { metric: "fp64_active_ratio", title: "FP64" },
      { metric: "integer_active_ratio", title: "integer" },
    ],
  },
  {
    id: "pcie", title: "PCIe", unit: "bytes/second", top: 1000, why: "the head can ask for it: gpulse head --enable-bandwidth",
    lines: [{ metric: "pcie_rx_bytes_per_second", title: "received" }, { metric: "pcie_tx_bytes_per_second", title: "sent" }],
  },
  {
    id: "nvlink", title: "NVLink", unit: "bytes/second", top: 1000, why: "this GPU has no NVLink, or the head does not ask for it: gpulse head --enable-nvlink",
    lines: [{ metric: "nvlink_rx_bytes_per_second", title: "received" }, { metric: "nvlink_tx_bytes_per_second", title: "sent" }],
  },
];
/** Only where something harvests, or did in the time that is shown. */
const HARVEST = {
  id: "harvested", title: "Harvested", unit: "ratio", top: 1, fill: true, hint: "Share of time in which a program of a harvest had the GPU",
  why: "no harvest watched this GPU", lines: [{ metric: "harvested_seconds_total", title: "harvested" }],
};
const MOST_NOW = 4;
const LIVE = [
  "gpu_utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts", "power_limit_watts", "temperature_celsius",
  "sm_active_ratio", "tensor_active_ratio", "sm_clock_hertz", "sm_clock_max_hertz", "temperature_slowdown_celsius", "performance_state",
  "pcie_link_generation", "pcie_link_width", "nvlink_links_active", "ecc_enabled", "mig_enabled", "harvest_state",
  "harvested_seconds_total", "harvest_preemptions_total",
];

const LEVELS = ["memory_total_bytes", "power_limit_watts", "temperature_slowdown_celsius", "sm_clock_max_hertz"];

/** Specs whose limits stand where the GPU has them now: what never changes has no history. */
function withLevels(specs, gpu) {
  const level = (metric) => () => gpu()?.values[metric] ?? null;
  return specs.map((spec) => ({ ...spec, lines: spec.lines.map((line) => (line.isLimit ? { ...line, level: level(line.metric) } : line)) }));
}

const metricsOf = (specs) => specs.flatMap((spec) => spec.lines.map((line) => line.metric));

/** The page's title. */
export const title = (route) => `GPU ${route.parts[1] ?? ""} of ${route.parts[0] ?? ""}`;

/** Show one GPU. */
export function mount(root, route, app) {
  const [name = "", label = ""] = route.parts;
  const gpu = () => app.fleet.nodes.get(name)?.gpus.find((one) => one.label === label) ?? null;
  let levels = "";
  let rest = null;
  const page = new HistoryPage(root, route, app, {
    nodes: () => [name],
    why,
    isNone: (error) => error.status === 404 && gpu() === null,
    draw: (own) => {
      draw(own, name, label, gpu());
      const now = LEVELS.map((metric) => gpu()?.values[metric] ?? null).join();
      if (now !== levels) own.board.groups.forEach((group) => own.board.redraw(group));
      levels = now;
      showHarvest(rest, gpu());
    },
  });
  const words = { scope: "gpu", gpus: [`${name}:${label}`] };
  page.board.add(page.grid, { ...words, metrics: metricsOf(FIRST), spread: true, specs: withLevels(FIRST, gpu) });
  page.relane = () => page.timeline.show(lanes(page, name, label));
  page.start(name);
  rest = page.board.add(page.grid, {
    ...words, metrics: [...metricsOf([...REST, HARVEST]), ...XIDS], specs: [...withLevels(REST, gpu), HARVEST],
    answered: (answer) => {
      page.takeXids(answer);
      showHarvest({ ...rest, answer }, gpu());
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
  );
  page.relane();
  return page.handle({ nodes: [name], metrics: LIVE });
}

/** The chart of harvested time is there when something harvests now, or did in the time that is shown. */
function showHarvest(group, gpu) {
  const chart = group?.charts.find((one) => one.spec === HARVEST);
  if (!chart) return;
  const harvested = group.answer?.series.find((series) => series.metric === "harvested_seconds_total");
  chart.host.hidden = !format.known(gpu?.values.harvest_state) && !harvested?.values.some((value) => value > 0);
}

function why(spec, titles) {
  if (titles.length) return `Not known for this GPU: ${titles.join(", ")}${spec.why ? ` (${spec.why})` : ""}.`;
  return spec.why ? `Not known for this GPU in this time: ${spec.why}.` : "No samples of this GPU in this time.";
}

function lanes(page, name, label) {
  const about = (finding, node) => node === name && (finding.label === label || finding.label === null);
  const processes = {
    key: "processes", label: "Processes", kind: "process", empty: page.processes ? "nobody held it in this time" : "…",
    items: processBars(page.processes?.processes ?? [], { node: name, gpu: label, now: page.board.view.to }),
    note: processNote(page.processes),
  };
  return [processes, ...page.eventLanes({ about, gpu: label })];
}

function draw(page, name, label, gpu) {
  render(heading(page, name, label, gpu), page.head);
  render(gpu ? below(page, gpu) : nothing, page.more);
}

function heading(page, name, label, gpu) {
  const links = html`<nav class="crumbs" aria-label="Where"><a href="#/">Overview</a> <span aria-hidden="true">›</span>
    <a href=${href("node", name)}><bdi>${format.text(name)}</bdi></a> <span aria-hidden="true">›</span></nav>`;
  return html`<div class="history-title">${links}
      <h1>GPU <bdi>${format.text(label)}</bdi></h1>${gpu ? html`<span class="muted"><bdi>${format.text(gpu.name)}</bdi></span> ${stateMark(gpu)}` : nothing}
      ${gpu && gpu.node.state !== "healthy" ? html`<span class="badge bad">node ${gpu.node.state}</span>` : nothing}
      <span class="spring"></span>
      ${siblings(gpu)}
      <a class="button" href=${href("sessions", { gpus: `${name}:${label}` })}>Record a session</a>
    </div>
    ${gpu ? html`${numbers(gpu)} ${staleNote(gpu.node, page.app)} ${nowLine(page, gpu)}` : noSuchGpu(page.app, name, label)}`;
}

/** What is said instead of numbers: the node has no such GPU, or nothing was heard of it. */
function noSuchGpu(app, name, label) {
  const others = app.fleet.nodes.get(name)?.gpus ?? [];
  if (!others.length) return unknownNote(`The head knows no GPU ${format.text(label)} of ${format.text(name)}.`, app, name);
  return html`<p class="empty"><bdi>${format.text(name)}</bdi> has no GPU <bdi>${format.text(label)}</bdi>. It has
    ${others.map((gpu, at) => html`${at ? ", " : ""}<a href=${href("gpu", name, gpu.label)}>GPU ${format.text(gpu.label)}</a>`)}.</p>`;
}

function siblings(gpu) {
  if (!gpu || gpu.node.gpus.length < 2) return nothing;
  const at = gpu.node.gpus.indexOf(gpu);
  const link = (other, words, sign) => other
    ? html`<a class="button quiet" href=${href("gpu", gpu.node.name, other.label)} aria-label=${words}>${sign === "←" ? html`<span aria-hidden="true">←</span> ` : nothing}GPU ${other.label}${sign === "→" ? html` <span aria-hidden="true">→</span>` : nothing}</a>`
    : nothing;
  return html`${link(gpu.node.gpus[at - 1], "Previous GPU of this node", "←")}${link(gpu.node.gpus[at + 1], "Next GPU of this node", "→")}`;
}

function numbers(gpu) {
  const v = gpu.values;
  return html`<dl class="stats" data-state=${gpu.node.state}>
    ${stat("Utilization", format.percent(v.gpu_utilization_ratio))}
    ${stat("SM active", format.percent(v.sm_active_ratio))}
    ${stat("Tensor", format.percent(v.tensor_active_ratio))}
    ${stat("Memory", format.bytesOf(v.memory_used_bytes, v.memory_total_bytes))}
    ${stat("Power", format.watts(v.power_watts), format.known(v.power_limit_watts) ? `of ${format.watts(v.power_limit_watts)}` : null)}
    ${stat("Temperature", format.celsius(v.temperature_celsius))}
    ${stat("SM clock", format.hertz(v.sm_clock_hertz))}
    ${format.known(v.harvested_seconds_total) ? stat("Harvested", format.hours(v.harvested_seconds_total), "so far") : nothing}
  </dl>`;
}

/** Who holds it and what is wrong with it, in a line each. */
function nowLine(page, gpu) {
  const now = lastHeard(gpu.node, page.app.fleet.headTime());
  const shown = (gpu.processes ?? []).slice(0, MOST_NOW);
  const more = (gpu.processes?.length ?? 0) - shown.length;
  return html`<ul class="now" aria-label="Now">
    ${gpuState(gpu) === "harvested" ? html`<li class="harvested-note">${HARVESTED}</li>` : nothing}
    ${shown.map((process) => html`<li><a href=${jobHref(gpu.node.name, process)}><bdi>${processLabel(process)}</bdi></a>
      <span class="muted"><bdi>${[process.job, format.bytes(process.gpu_memory_bytes), format.known(process.start_time) ? format.duration(now - process.start_time) : null].filter(Boolean).map(format.text).join(" · ")}</bdi></span></li>`)}
    ${more > 0 ? html`<li class="muted">and ${more} more</li>` : nothing}
    ${gpu.findings.map((finding) => findingLine(finding, page.book))}
  </ul>`;
}

/** What a harvest makes of it; nothing where none watches it. */
function harvestWords(values) {
  if (!format.known(values.harvest_state)) return null;
  const times = values.harvest_preemptions_total;
  const given = format.known(times) ? `given back ${times === 1 ? "once" : `${format.count(times)} times`}` : null;
  return [HARVEST_WORDS[values.harvest_state] ?? HARVEST_WORDS[4], given].filter(Boolean).join(", ");
}

function below(page, gpu) {
  const until = lastHeard(gpu.node, page.app.fleet.headTime());
  const rows = (gpu.processes ?? []).map((process) => ({ node: gpu.node.name, gpu: gpu.label, process, until }));
  const v = gpu.values;
  return html`<section class="card"><h2>On it now</h2>
      ${rows.length ? processTable(rows, "Processes that hold this GPU now", { withPlace: false })
        : html`<p class="muted">${gpu.processes === null ? "Who holds it is not known." : "Nobody holds it."}</p>`}</section>
    <section class="card"><h2>About it</h2>${facts([
      ["Model", gpu.name],
      ["UUID", gpu.uuid],
      ["Node", html`<a href=${href("node", gpu.node.name)}><bdi>${format.text(gpu.node.name)}</bdi></a>`],
      ["Driver", gpu.node.details?.facts?.driver],
      ["CUDA", gpu.node.details?.facts?.cuda],
      ["PCIe", format.known(v.pcie_link_generation) ? `generation ${v.pcie_link_generation}, ${format.count(v.pcie_link_width)} lanes` : null],
      ["NVLinks", format.known(v.nvlink_links_active) ? format.count(v.nvlink_links_active) : null],
      ["ECC", format.known(v.ecc_enabled) ? (v.ecc_enabled ? "on" : "off") : null],
      ["MIG", v.mig_enabled ? "on" : null],
      ["Part of", gpu.parent ? html`<a href=${href("gpu", gpu.node.name, gpu.parent.label)}>GPU ${gpu.parent.label}</a>` : null],
      ["Instances", gpu.instances?.length ? html`${gpu.instances.map((one) => html`<a href=${href("gpu", gpu.node.name, one.label)}>${one.label}</a> `)}` : null],
      ["Harvest", harvestWords(v)],
      ["Performance state", format.known(v.performance_state) ? `P${v.performance_state}` : null],
    ])}</section>`;
}
