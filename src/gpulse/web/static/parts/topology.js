// Topology of a node as a picture and as a table: GPUs, network adapters, PCIe switches, NUMA nodes, NVLinks.

import { byName } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing, svg } from "../vendor/lit-html.js";

/**
 * Devices behind one PCIe switch, or a single one; `upward` is the level of the path to the others of its NUMA node.
 * @typedef {{ gpus: Api.GpuHardware[], adapters: string[], level: string | null, upward: string | null }} Cluster
 * @typedef {{ numa: number | null, cpus: string | null, clusters: Cluster[] }} Socket
 * @typedef {{ sockets: Socket[], paths: PathTable, links: number, hasSwitch: boolean }} Topology
 * @typedef {{ x: number, y: number, width: number, height: number }} Box
 */

const LEVELS = ["PIX", "PXB", "PHB", "NODE", "SYS"];
/** What the levels mean, as in the legend of `nvidia-smi topo -m`. */
const MEANINGS = {
  NV: "number of NVLinks",
  PIX: "one PCIe switch",
  PXB: "several PCIe switches",
  PHB: "a PCIe host bridge",
  NODE: "two host bridges of one NUMA node",
  SYS: "the link between NUMA nodes",
};
const NEAR = 2;

/** Paths between devices, in both directions. */
export class PathTable {
  /** @param {Api.HardwarePath[]} paths */
  constructor(paths) {
    /** @type {Map<string, Api.HardwarePath>} */
    this._paths = new Map();
    for (const path of paths) {
      const [one, other] = path.between;
      this._paths.set(`${one}\n${other}`, path);
      this._paths.set(`${other}\n${one}`, path);
    }
  }

  /**
   * @param {string} one
   * @param {string} other
   */
  between(one, other) {
    return this._paths.get(`${one}\n${other}`) ?? null;
  }

  /**
   * How near two devices are over PCIe: 0 for one switch; unknown is the farthest.
   * @param {string} one
   * @param {string} other
   */
  distance(one, other) {
    const place = LEVELS.indexOf(this.between(one, other)?.pcie ?? "");
    return place < 0 ? LEVELS.length : place;
  }
}

/**
 * What the cell of two devices says: `X`, `NV18`, `PIX`, or a dash.
 * @param {PathTable} paths
 * @param {string} one
 * @param {string} other
 */
export function cellText(paths, one, other) {
  if (one === other) return "X";
  const path = paths.between(one, other);
  return path?.nvlinks ? `NV${path.nvlinks}` : (path?.pcie ?? format.UNKNOWN);
}

/**
 * Sort the devices of a node into NUMA nodes, and in these into groups that share a PCIe switch.
 * @param {Api.NodeHardware} hardware
 * @returns {Topology}
 */
export function arrange(hardware) {
  const paths = new PathTable(hardware.paths);
  const gpus = hardware.gpus.filter((gpu) => !gpu.id.includes(":"));
  const adapters = placeAdapters(hardware.adapters, gpus, paths);
  /** @type {Map<number | null, Api.GpuHardware[]>} */
  const byNode = new Map();
  for (const gpu of gpus) byNode.set(gpu.numa_node, [...(byNode.get(gpu.numa_node) ?? []), gpu]);
  const sockets = [...byNode]
    .sort(([a], [b]) => (a ?? Number.MAX_SAFE_INTEGER) - (b ?? Number.MAX_SAFE_INTEGER))
    .map(([numa, own]) => socketOf(numa, own, adapters, paths, hardware));
  const switched = hardware.paths.filter((path) => path.switched);
  return { sockets, paths, links: Math.max(0, ...switched.map((path) => path.nvlinks ?? 0)), hasSwitch: switched.length > 0 };
}

/**
 * Each network adapter belongs to its nearest GPU.
 * @param {string[]} names
 * @param {Api.GpuHardware[]} gpus
 * @param {PathTable} paths
 */
function placeAdapters(names, gpus, paths) {
  /** @type {Map<string, string[]>} */
  const found = new Map();
  for (const name of names) {
    const [nearest] = [...gpus].sort((a, b) => paths.distance(a.uuid, name) - paths.distance(b.uuid, name));
    if (nearest) found.set(nearest.uuid, [...(found.get(nearest.uuid) ?? []), name]);
  }
  return found;
}

/**
 * @param {number | null} numa
 * @param {Api.GpuHardware[]} gpus
 * @param {Map<string, string[]>} adapters
 * @param {PathTable} paths
 * @param {Api.NodeHardware} hardware
 * @returns {Socket}
 */
function socketOf(numa, gpus, adapters, paths, hardware) {
  /** @type {Api.GpuHardware[][]} */
  const groups = [];
  for (const gpu of gpus) {
    const near = groups.find((group) => group.some((other) => paths.distance(gpu.uuid, other.uuid) < NEAR));
    if (near) near.push(gpu);
    else groups.push([gpu]);
  }
  const [first, second] = groups;
  const upward = second ? (paths.between(first[0].uuid, second[0].uuid)?.pcie ?? null) : null;
  const apart = gpus.flatMap((gpu) =>
    (adapters.get(gpu.uuid) ?? []).filter((name) => paths.distance(gpu.uuid, name) >= NEAR).map((name) => ({ gpu, name })),
  );
  return {
    numa,
    cpus: (numa !== null && hardware.numa_cpus[numa]) || (gpus[0]?.cpu_affinity ?? null),
    clusters: [
      ...groups.map((group) => ({ ...clusterOf(group, adapters, paths), upward })),
      ...apart.map(({ gpu, name }) => ({ gpus: [], adapters: [name], level: null, upward: paths.between(gpu.uuid, name)?.pcie ?? null })),
    ],
  };
}

/**
 * @param {Api.GpuHardware[]} gpus
 * @param {Map<string, string[]>} adapters
 * @param {PathTable} paths
 */
function clusterOf(gpus, adapters, paths) {
  const own = gpus.flatMap((gpu) => (adapters.get(gpu.uuid) ?? []).filter((name) => paths.distance(gpu.uuid, name) < NEAR)).sort(byName);
  const members = [...gpus.map((gpu) => gpu.uuid), ...own];
  const near = gpus.flatMap((gpu) => members.map((other) => paths.distance(gpu.uuid, other))).filter((distance) => distance < NEAR);
  return { gpus, adapters: own, level: near.length ? LEVELS[Math.max(...near)] : null };
}

const GPU = { width: 66, height: 34 };
const ADAPTER = { width: 48, height: 22 };
const MAX_ADAPTER_WIDTH = 110;
/** Where the wire of a GPU is, from its left edge; network adapters stand above a GPU, to the right of its wire. */
const GPU_WIRE = 8;
const CHARACTER = 6.2;
const FONT_SIZE = 11;
const GAP = 10;
const PAD = 10;
const CPU_HEIGHT = 26;
const PCIE_HEIGHT = 20;
const WIRE = 22;
const ARC = 16;
const FOOT = 7;
/** Below this width NUMA nodes stand below each other. */
const NARROW = 700;
/** A picture that is still too wide can be scrolled: its text must stay readable. */
const MIN_SCALE = 0.8;

/**
 * The topology as a picture.
 * @param {Api.NodeHardware} hardware
 * @param {{ node: string, room: number }} options `room` is the width for it in pixels
 */
export function topologyPicture(hardware, { node, room }) {
  const topology = arrange(hardware);
  const columns = room < NARROW ? 1 : 2;
  const order = topology.sockets.flatMap((socket) => socket.clusters.flatMap((cluster) => cluster.gpus.map((gpu) => gpu.uuid)));
  const arcs = placeArcs(directLinks(hardware.paths), order);
  const boxes = placeSockets(topology, columns, Math.max(0, ...arcs.map((arc) => arc.depth)));
  const width = Math.max(...boxes.map((box) => box.x + box.width));
  const height = Math.max(...boxes.map((box) => box.y + box.height));
  const scale = Math.max(MIN_SCALE, Math.min(1, room / width));
  /** @type {Map<string, { x: number, y: number }>} */
  const feet = new Map();
  const drawn = boxes.map((box, at) => socketPart(topology, topology.sockets[at], box, node, feet));
  return html`<div class="topology-scroll" tabindex="0" role="group" aria-label="Topology of ${format.text(node)}">
    <svg class="topology" viewBox="0 0 ${width} ${height}" width=${width * scale} height=${height * scale} role="group" aria-label=${summary(topology, hardware)}>
      ${boxes.slice(1).map((box, at) => socketLink(boxes[at], box))}
      ${drawn}
      ${topology.hasSwitch ? switchPart(boxes, topology.links, feet) : nothing}
      ${arcs.map((arc) => arcPart(arc, feet))}
    </svg></div>`;
}

/**
 * What the picture shows, in a sentence.
 * @param {Topology} topology
 * @param {Api.NodeHardware} hardware
 */
export function summary(topology, hardware) {
  const gpus = topology.sockets.flatMap((socket) => socket.clusters.flatMap((cluster) => cluster.gpus)).length;
  const direct = directLinks(hardware.paths).length;
  return [
    counted(gpus, "GPU", "GPUs"),
    topology.sockets.some((socket) => socket.numa !== null) ? counted(topology.sockets.length, "NUMA node", "NUMA nodes") : null,
    hardware.adapters.length ? counted(hardware.adapters.length, "network adapter", "network adapters") : null,
    topology.hasSwitch ? `${topology.links} NVLinks from each GPU to NVSwitches` : null,
    direct ? counted(direct, "pair of GPUs with NVLinks", "pairs of GPUs with NVLinks") : null,
  ]
    .filter(Boolean)
    .join(", ");
}

/**
 * @param {number} count
 * @param {string} one
 * @param {string} many
 */
const counted = (count, one, many) => `${count} ${count === 1 ? one : many}`;

/** @param {Api.HardwarePath[]} paths */
const directLinks = (paths) => paths.filter((path) => path.nvlinks && !path.switched);

/** @param {string} name */
const adapterWidth = (name) => Math.min(MAX_ADAPTER_WIDTH, Math.max(ADAPTER.width, name.length * CHARACTER + 8));

/**
 * The width for one GPU and the network adapter above it.
 * @param {Cluster} cluster
 */
const slotWidth = (cluster) => Math.max(GPU.width, ...cluster.adapters.map((name) => adapterWidth(name) + 2 * GPU_WIRE + 2));

/** @param {Cluster} cluster */
const clusterWidth = (cluster) => Math.max(cluster.gpus.length, cluster.adapters.length) * (slotWidth(cluster) + GAP) - GAP;

/**
 * NVLinks between two GPUs in the picture: how deep their line is below the GPUs, and where it begins and ends there.
 * @typedef {{ path: Api.HardwarePath, depth: number, shifts: [number, number] }} Arc
 */

/**
 * Give every line a depth at which it meets no other one, short lines first, and a foot of its own at each GPU.
 * @param {Api.HardwarePath[]} paths
 * @param {string[]} order UUIDs of the GPUs from left to right
 * @returns {Arc[]}
 */
export function placeArcs(paths, order) {
  /** @param {Api.HardwarePath} path */
  const ends = (path) => path.between.map((uuid) => order.indexOf(uuid)).sort((a, b) => a - b);
  /** @type {number[][][]} */
  const taken = [];
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const uuid of paths.flatMap((path) => path.between)) counts.set(uuid, (counts.get(uuid) ?? 0) + 1);
  /** @type {Map<string, number>} */
  const used = new Map();
  /** @param {string} uuid */
  const shift = (uuid) => {
    const at = used.get(uuid) ?? 0;
    used.set(uuid, at + 1);
    return (at - ((counts.get(uuid) ?? 1) - 1) / 2) * FOOT;
  };
  const sorted = [...paths].sort((a, b) => ends(a)[1] - ends(a)[0] - (ends(b)[1] - ends(b)[0]) || ends(a)[0] - ends(b)[0]);
  return sorted.map((path) => {
    const [first, last] = ends(path);
    const free = taken.findIndex((others) => others.every(([from, to]) => last < from || first > to));
    const level = free < 0 ? taken.length : free;
    taken[level] = [...(taken[level] ?? []), [first, last]];
    return { path, depth: level + 1, shifts: [shift(path.between[0]), shift(path.between[1])] };
  });
}

/**
 * @param {Topology} topology
 * @param {number} columns
 * @param {number} arcs
 * @returns {Box[]}
 */
function placeSockets(topology, columns, arcs) {
  const hasAdapters = topology.sockets.some((socket) => socket.clusters.some((cluster) => cluster.adapters.length));
  const below = topology.hasSwitch ? WIRE + PCIE_HEIGHT : arcs * ARC + (arcs ? GAP : 0);
  const height = PAD + CPU_HEIGHT + WIRE + PCIE_HEIGHT + WIRE + (hasAdapters ? ADAPTER.height + GAP : 0) + GPU.height + below + PAD;
  let x = 0;
  let y = 0;
  let inRow = 0;
  return topology.sockets.map((socket) => {
    const inner = socket.clusters.reduce((sum, cluster) => sum + clusterWidth(cluster) + 2 * GAP, -2 * GAP);
    const box = { x, y, width: Math.max(inner, 2 * GPU.width) + 2 * PAD, height };
    inRow += 1;
    if (inRow >= columns) {
      inRow = 0;
      x = 0;
      y += height + WIRE;
    } else {
      x += box.width + 2 * WIRE;
    }
    return box;
  });
}

/**
 * The link between two NUMA nodes, from CPU to CPU.
 * @param {Box} one
 * @param {Box} other
 */
function socketLink(one, other) {
  if (one.y === other.y) {
    const y = one.y + PAD + CPU_HEIGHT / 2;
    const [from, to] = [one.x + one.width - PAD, other.x + PAD];
    return svg`<path class="wire" d="M${from} ${y}H${to}"/><text class="wire-label" x=${(from + to) / 2} y=${y - 4}>SYS</text>`;
  }
  const x = one.x + PAD / 2;
  return svg`<path class="wire" d="M${x + PAD / 2} ${one.y + PAD + CPU_HEIGHT / 2}H${x}V${other.y + PAD + CPU_HEIGHT / 2}H${x + PAD / 2}"/>
    <text class="wire-label" x=${x + 18} y=${other.y - 8}>SYS</text>`;
}

/**
 * @param {Topology} topology
 * @param {Socket} socket
 * @param {Box} box
 * @param {string} node
 * @param {Map<string, { x: number, y: number }>} feet
 */
function socketPart(topology, socket, box, node, feet) {
  const hasAdapters = topology.sockets.some((one) => one.clusters.some((cluster) => cluster.adapters.length));
  const cpu = { x: box.x + PAD, y: box.y + PAD, width: box.width - 2 * PAD, height: CPU_HEIGHT };
  const words = [socket.numa === null ? "CPUs" : `NUMA ${socket.numa}`, socket.cpus ? `CPUs ${socket.cpus}` : null];
  let x = box.x + PAD;
  return svg`<rect class="socket" x=${box.x} y=${box.y} width=${box.width} height=${box.height} rx="8"/>
    ${boxPart("cpu", cpu, words.filter(Boolean).join(", "))}
    ${socket.clusters.map((cluster) => {
      const width = clusterWidth(cluster);
      const part = clusterPart(cluster, { x, y: cpu.y + CPU_HEIGHT, width, height: 0 }, node, hasAdapters, feet);
      x += width + 2 * GAP;
      return part;
    })}`;
}

/**
 * @param {Cluster} cluster
 * @param {Box} box
 * @param {string} node
 * @param {boolean} hasAdapters
 * @param {Map<string, { x: number, y: number }>} feet
 */
function clusterPart(cluster, box, node, hasAdapters, feet) {
  const middle = box.x + box.width / 2;
  const top = box.y + WIRE;
  const bottom = cluster.level ? top + PCIE_HEIGHT : top;
  const adapterTop = top + PCIE_HEIGHT + WIRE;
  const gpuTop = adapterTop + (hasAdapters ? ADAPTER.height + GAP : 0);
  /** @param {number} at */
  const left = (at) => box.x + at * (slotWidth(cluster) + GAP);
  /** @param {number} at */
  const adapterLeft = (at) => left(at) + slotWidth(cluster) - adapterWidth(cluster.adapters[at]);
  /** @param {number} at */
  const adapterWire = (at) => adapterLeft(at) + adapterWidth(cluster.adapters[at]) / 2;
  const ends = [middle, ...cluster.gpus.map((_, at) => left(at) + GPU_WIRE), ...cluster.adapters.map((_, at) => adapterWire(at))];
  return svg`<path class="wire" d="M${middle} ${box.y}V${top}"/>
    ${cluster.upward ? svg`<text class="wire-label" x=${middle + 18} y=${box.y + 14}>${cluster.upward}</text>` : nothing}
    ${cluster.gpus.map((_, at) => svg`<path class="wire" d="M${left(at) + GPU_WIRE} ${bottom}V${gpuTop}"/>`)}
    ${cluster.adapters.map((_, at) => svg`<path class="wire" d="M${adapterWire(at)} ${bottom}V${adapterTop}"/>`)}
    ${cluster.level ? nothing : svg`<path class="wire" d="M${Math.min(...ends)} ${top}H${Math.max(...ends)}"/>`}
    ${cluster.level ? boxPart("pcie", { x: box.x, y: top, width: box.width, height: PCIE_HEIGHT }, `PCIe ${cluster.level}`) : nothing}
    ${cluster.adapters.map((name, at) => boxPart("adapter", { ...ADAPTER, width: adapterWidth(name), x: adapterLeft(at), y: adapterTop }, name))}
    ${cluster.gpus.map((gpu, at) => {
      feet.set(gpu.uuid, { x: left(at) + GPU.width / 2, y: gpuTop + GPU.height });
      return svg`<a href=${href("gpu", node, gpu.id)}>${boxPart("gpu", { ...GPU, x: left(at), y: gpuTop }, `GPU ${gpu.id}`)}</a>`;
    })}`;
}

/**
 * @param {string} kind
 * @param {Box} box
 * @param {string} words
 */
function boxPart(kind, box, words) {
  const size = Math.min(FONT_SIZE, (FONT_SIZE * (box.width - 4)) / (CHARACTER * words.length));
  return svg`<g class=${`part-${kind}`}><rect x=${box.x} y=${box.y} width=${box.width} height=${box.height} rx="4"/>
    <text x=${box.x + box.width / 2} y=${box.y + box.height / 2} font-size=${size}>${format.text(words)}</text></g>`;
}

/**
 * NVSwitches: a bar below the GPUs of each NUMA node, all of them connected.
 * @param {Box[]} boxes
 * @param {number} links
 * @param {Map<string, { x: number, y: number }>} feet
 */
function switchPart(boxes, links, feet) {
  /** @param {Box} box */
  const barTop = (box) => box.y + box.height - PAD - PCIE_HEIGHT;
  const rows = [...new Set(boxes.map((box) => box.y))].map((y) => boxes.filter((box) => box.y === y));
  return svg`<g class="nvlink">
    ${[...feet.values()].map(({ x, y }) => {
      const box = boxes.find((one) => x > one.x && x < one.x + one.width && y > one.y && y < one.y + one.height) ?? boxes[0];
      return svg`<path class="wire" d="M${x} ${y}V${barTop(box)}"/><text class="wire-label" x=${x + 16} y=${y + 15}>NV${links}</text>`;
    })}
    ${rows.map((row) => {
      const [first] = row;
      const last = row[row.length - 1];
      return boxPart(
        "switch",
        { x: first.x + PAD, y: barTop(first), width: last.x + last.width - first.x - 2 * PAD, height: PCIE_HEIGHT },
        "NVSwitch",
      );
    })}
    ${rows.slice(1).map((row, at) => svg`<path class="wire" d="M${rows[at][0].x + PAD + 30} ${barTop(rows[at][0]) + PCIE_HEIGHT}V${row[0].y + PAD}"/>`)}
  </g>`;
}

/**
 * NVLinks between two GPUs, as a line below them.
 * @param {Arc} arc
 * @param {Map<string, { x: number, y: number }>} feet
 */
function arcPart({ path, depth, shifts }, feet) {
  const [one, other] = path.between.map((uuid) => feet.get(uuid));
  if (!one || !other) return nothing;
  const low = Math.max(one.y, other.y) + depth * ARC;
  const [from, to] = [one.x + shifts[0], other.x + shifts[1]];
  return svg`<g class="nvlink"><path class="wire" d="M${from} ${one.y}V${low}H${to}V${other.y}"/>
    <text class="wire-label" x=${(from + to) / 2} y=${low - 3}>NV${path.nvlinks}</text></g>`;
}

/**
 * The topology as a table, like that of `nvidia-smi topo -m`.
 * @param {Api.NodeHardware} hardware
 */
export function topologyTable(hardware) {
  const paths = new PathTable(hardware.paths);
  const gpus = hardware.gpus.filter((gpu) => !gpu.id.includes(":"));
  const devices = [
    ...gpus.map((gpu) => ({ key: gpu.uuid, words: `GPU ${gpu.id}` })),
    ...hardware.adapters.map((name) => ({ key: name, words: name })),
  ];
  const used = new Set(gpus.flatMap((gpu) => devices.map((other) => cellText(paths, gpu.uuid, other.key).replace(/\d+$/, ""))));
  const legend = Object.entries(MEANINGS).filter(([word]) => used.has(word));
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="Topology as a table"><table class="table topology-table">
    <caption class="visually-hidden">Connections on the path between two devices</caption>
    <thead><tr><td></td>${devices.map((device) => html`<th scope="col">${format.text(device.words)}</th>`)}<th scope="col">CPUs</th><th scope="col" class="num">NUMA</th></tr></thead>
    <tbody>${gpus.map(
      (
        gpu,
      ) => html`<tr><th scope="row">GPU ${format.text(gpu.id)}</th>${devices.map((other) => html`<td>${cellText(paths, gpu.uuid, other.key)}</td>`)}
      <td>${format.text(gpu.cpu_affinity)}</td><td class="num">${format.count(gpu.numa_node)}</td></tr>`,
    )}</tbody></table></div>
    <p class="muted">${legend.map(([word, meaning], at) => html`${at ? ", " : ""}<strong>${word}</strong> ${meaning}`)}</p>`;
}

/**
 * The panel with the picture and the table.
 * @param {Api.NodeHardware | null} hardware
 * @param {{ node: string, room: number }} options
 */
export function topologyPanel(hardware, options) {
  const isEmpty = hardware !== null && !hardware.gpus.length;
  return html`<section class="card panel topology-panel" aria-label="Topology"><h2>Topology</h2>
    ${
      hardware === null
        ? html`<p class="muted">Loading…</p>`
        : isEmpty
          ? html`<p class="muted">This node has no GPUs.</p>`
          : html`${topologyPicture(hardware, options)}
            <details class="disclosure"><summary>As a table</summary>${topologyTable(hardware)}</details>`
    }</section>`;
}
