// The inside of a node: a table of its GPUs with their processes and findings, its host, its labels and versions.

import { Bar, BoxedText, h, setHidden, Text } from "../core/dom.js";
import { bytesOf, known, percent, rate, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { ALMOST_FULL, isWorthShowing } from "./fleet-summary.js";
import { COLUMNS, GpuLines, setLines } from "./gpu-lines.js";

const MAX_FILESYSTEMS = 4;
const GIBIBYTE = 2 ** 30;
/** @type {Record<string, string>} */
const KINDS = { ssd: "SSD", hdd: "HDD", nvme: "NVMe", virtual: "virtual", memory: "memory" };
const LAYERED = /^(dm-|md|loop)\d/;

/** The inside of a node. */
export class NodePanel {
  /** @param {Dashboard.Node} node */
  constructor(node) {
    this._node = node;
    this._host = new HostLines(node);
    this._hiddenNote = new Text(h("p", { class: "muted card-note", hidden: true }));
    this._foot = h("p", { class: "card-foot muted" });
    /** @type {Live.Details | null | undefined} */
    this._footDetails = undefined;
    this._footKey = "";
    this._noGpus = new Text(h("p", { class: "muted card-note", hidden: true }));
    this._memoryTitle = new Text(h("th", { scope: "col", role: "columnheader", class: "num c-memory" }));
    this._body = h("tbody", { role: "rowgroup" });
    this._table = this._makeTable();
    /** @type {GpuLines[]} */
    this._gpus = [];
    /** @type {Dashboard.Gpu[] | null} */
    this._made = null;
    /** @type {Set<Dashboard.Gpu> | null} */
    this._shown = null;
    this.element = h(
      "div",
      { class: "node-panel" },
      this._table,
      this._noGpus.element,
      this._hiddenNote.element,
      this._host.element,
      this._foot,
    );
    this.rebuild();
  }

  /** The node's GPUs may be others than before. */
  rebuild() {
    if (this._made === this._node.gpus) {
      return;
    }
    this._made = this._node.gpus;
    this._gpus = this._made.map((gpu) => new GpuLines(gpu, () => this._arrange()));
    this._table.classList.toggle(
      "divided",
      this._made.some((gpu) => gpu.parent),
    );
    setHidden(this._table, this._made.length === 0);
    setHidden(this._noGpus.element, this._made.length > 0);
    this._arrange();
    this.show(this._shown);
  }

  /** @param {number} now */
  update(now) {
    this._host.update();
    this._noGpus.set(this._node.time === null ? "This node has not reported since the head started." : "This node has no GPUs.");
    this._memoryTitle.set(memoryTitle(this._node));
    for (const lines of this._gpus) {
      lines.update(now);
    }
    if (this._footDetails !== this._node.details) {
      this._footDetails = this._node.details;
      this._setFoot();
    }
  }

  /** @param {number} now */
  tick(now) {
    for (const lines of this._gpus) {
      lines.tick(now);
    }
  }

  /**
   * Which GPUs are shown; all of them with null.
   * @param {Set<Dashboard.Gpu> | null} gpus
   */
  show(gpus) {
    this._shown = gpus;
    let left = 0;
    for (const lines of this._gpus) {
      const isShown = gpus === null || gpus.has(lines.gpu);
      lines.show(isShown);
      left += isShown ? 0 : 1;
    }
    setHidden(this._hiddenNote.element, left === 0);
    this._hiddenNote.set(left ? `${left} more ${left === 1 ? "GPU" : "GPUs"} hidden by the filter` : "");
  }

  _arrange() {
    setLines(this._body, this._gpus);
  }

  _makeTable() {
    const head = h("tr", { role: "row" });
    for (const [name, title, isNumber] of COLUMNS) {
      head.append(
        name === "memory"
          ? this._memoryTitle.element
          : h("th", { scope: "col", role: "columnheader", class: `${isNumber ? "num " : ""}c-${name}` }, title),
      );
    }
    return h(
      "table",
      { class: "gpus", role: "table" },
      h("caption", { class: "visually-hidden" }, `GPUs of ${text(this._node.name)}`),
      h("thead", { role: "rowgroup" }, head),
      this._body,
    );
  }

  _setFoot() {
    const { details, labels } = this._node;
    const words = Object.entries(labels ?? {}).map(([name, value]) => `${name}=${value}`);
    const facts = details?.facts ?? {};
    const driver = facts.driver ? `driver ${facts.driver}` : "";
    const agent = details?.version ? `agent ${details.version}` : "";
    const key = JSON.stringify([words, driver, agent]);
    if (key === this._footKey) {
      return;
    }
    this._footKey = key;
    this._foot.replaceChildren(
      ...words.map((word) => h("span", { class: "badge muted" }, h("bdi", {}, text(word)))),
      ...[driver, agent].filter(Boolean).map((word) => h("span", {}, text(word))),
    );
  }
}

/**
 * `Memory, of 141 GiB`: with the size that all GPUs of a node have.
 * @param {Dashboard.Node} node
 */
function memoryTitle(node) {
  const sizes = new Set(node.gpus.flatMap(({ values }) => (known(values.memory_total_bytes) ? [values.memory_total_bytes] : [])));
  return sizes.size === 1 ? `Memory, of ${Math.round([...sizes][0] / GIBIBYTE)} GiB` : "Memory, GiB";
}

/** CPU, memory, swap, file systems, disks and network. */
class HostLines {
  /** @param {Dashboard.Node} node */
  constructor(node) {
    this._node = node;
    this._cpu = new Bar();
    this._memory = new Bar(ALMOST_FULL);
    this._swap = new Bar(0.5);
    this._disks = new BoxedText(h("dd"));
    this._network = new BoxedText(h("dd"));
    /** @type {Array<{ bar: Bar, element: HTMLElement }>} */
    this._filesystems = [];
    this._filesystemsKey = "";
    this._more = new Text(h("a", { href: href("node", node.name), hidden: true }));
    this._list = h(
      "dl",
      { class: "host" },
      line("CPU", this._cpu.element),
      line("RAM", this._memory.element),
      line("Swap", this._swap.element),
    );
    this._rates = h(
      "dl",
      { class: "host rates" },
      h("div", {}, h("dt", {}, "Disk"), this._disks.outer),
      h("div", {}, h("dt", {}, "Net"), this._network.outer),
    );
    /** @type {Live.Details | null | undefined} */
    this._details = undefined;
    this.element = h("div", { class: "host-lines" }, this._list, this._more.element, this._rates);
  }

  update() {
    const { host, details } = this._node;
    this._cpu.set(host.cpu_utilization_ratio, cpu(host));
    const { memory_total_bytes: total, memory_available_bytes: available } = host;
    const used = known(total) && known(available) ? total - available : null;
    this._memory.set(quotient(used, total), known(total) ? bytesOf(used, total) : UNKNOWN);
    this._setSwap(host);
    if (details !== this._details) {
      this._details = details;
      this._setFilesystems(details?.filesystems ?? null);
      this._disks.set(diskText(details?.disks));
      this._network.set(networkText(details?.network));
    }
  }

  /** @param {Dashboard.Values} options */
  _setSwap({ swap_total_bytes: total, swap_free_bytes: free }) {
    if (total === 0) {
      this._swap.set(0, "none");
      return;
    }
    const used = known(total) && known(free) ? total - free : null;
    this._swap.set(quotient(used, total), known(total) ? bytesOf(used, total) : UNKNOWN);
  }

  /** @param {Live.Filesystem[] | null} filesystems */
  _setFilesystems(filesystems) {
    const all = (filesystems ?? []).filter(isWorthShowing);
    const shown = all.slice(0, MAX_FILESYSTEMS);
    this._more.set(
      all.length > shown.length
        ? `and ${all.length - shown.length} more file ${all.length - shown.length === 1 ? "system" : "systems"}`
        : "",
    );
    setHidden(this._more.element, all.length <= shown.length);
    const key = shown.map((row) => `${row.mount_point}\n${row.kind}`).join("\n\n");
    if (key !== this._filesystemsKey) {
      this._filesystemsKey = key;
      for (const { element } of this._filesystems) {
        element.remove();
      }
      this._filesystems = shown.map((row) => {
        const bar = new Bar(ALMOST_FULL);
        const element = line(h("bdi", { title: text(row.device) }, text(row.mount_point)), bar.element);
        return { bar, element };
      });
      this._list.append(...this._filesystems.map(({ element }) => element));
    }
    shown.forEach((row, at) => {
      const kind = KINDS[row.kind ?? ""] ?? row.type ?? "";
      const ratio = quotient(row.used_bytes, row.size_bytes);
      this._filesystems[at].bar.set(ratio, `${bytesOf(row.used_bytes, row.size_bytes)} ${text(kind || null)}`);
    });
  }
}

/**
 * @param {Node | string} title
 * @param {Node} value
 */
function line(title, value) {
  return h("div", {}, h("dt", {}, title), h("dd", {}, value));
}

/** @param {Dashboard.Values} host */
function cpu(host) {
  const parts = [percent(host.cpu_utilization_ratio)];
  if (known(host.cpus)) {
    parts.push(`of ${host.cpus}`);
  }
  if (known(host.load1)) {
    parts.push(`load ${host.load1.toFixed(host.load1 < 10 ? 1 : 0)}`);
  }
  return parts.join(" · ").replace(" · of", " of");
}

/** @param {Live.Disk[] | undefined} disks */
function diskText(disks) {
  const rows = realOnes((disks ?? []).filter((disk) => disk.kind !== "memory" && !LAYERED.test(disk.name)));
  if (!rows.length) {
    return UNKNOWN;
  }
  /** @param {"read_bytes_per_second" | "written_bytes_per_second"} name */
  const total = (name) => sum(rows.map((disk) => disk[name]));
  const kinds = [...new Set(rows.map((disk) => KINDS[disk.kind ?? ""]).filter(Boolean))].join(", ");
  const names = rows.length === 1 ? kinds || text(rows[0].name) : `${rows.length} disks${kinds ? ` (${kinds})` : ""}`;
  return `${names}: read ${rate(total("read_bytes_per_second"))}, write ${rate(total("written_bytes_per_second"))}`;
}

/** @param {Live.NetworkLink[] | undefined} network */
function networkText(network) {
  const rows = realOnes((network ?? []).filter((row) => row.kind !== "loopback" && row.up !== false));
  if (!rows.length) {
    return UNKNOWN;
  }
  const names = rows.length === 1 ? text(rows[0].name) : `${rows.length} links`;
  return `${names}: in ${rate(sum(rows.map((row) => row.rx_bytes_per_second)))}, out ${rate(sum(rows.map((row) => row.tx_bytes_per_second)))}`;
}

/**
 * Without what only passes on what others carry, unless there is nothing else.
 * @template {{ kind: string | null }} T
 * @param {T[]} rows
 */
function realOnes(rows) {
  const real = rows.filter((row) => row.kind !== "virtual");
  return real.length ? real : rows;
}

/**
 * A part of a whole; null when one of them is not known.
 * @param {Dashboard.MaybeNumber} part
 * @param {Dashboard.MaybeNumber} whole
 */
function quotient(part, whole) {
  return known(part) && known(whole) && whole > 0 ? part / whole : null;
}

/**
 * What is known, added up; null when nothing is.
 * @param {Array<number | null>} numbers
 */
function sum(numbers) {
  const some = numbers.filter(known);
  return some.length ? some.reduce((a, b) => a + b, 0) : null;
}
