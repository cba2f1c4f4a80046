// One node: its host, its GPUs, and since when it is silent. Built when it comes into view, changed in place.

import { worst } from "../core/fleet.js";
import { bytesOf, known, percent, rate, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { silence } from "../core/state.js";
import { Bar, BoxedText, h, setAttribute, setHidden, Text } from "./dom.js";
import { COLUMNS, GpuRow } from "./rows.js";

const ALMOST_FULL = 0.92;
const MOST_FILESYSTEMS = 4;
const KINDS = { ssd: "SSD", hdd: "HDD", nvme: "NVMe", virtual: "virtual", memory: "memory" };
const LAYERED = /^(dm-|md|loop)\d/;

/** The card of a node. */
export class NodeCard {
  constructor(node, fleet) {
    this.node = node;
    this._fleet = fleet;
    this._shown = null;
    this._body = null;
    this._since = new Text(h("span", { class: "badge", hidden: true }));
    this._findings = new Text(h("a", { class: "badge", href: href("findings", { node: node.name }), hidden: true }));
    this._model = new Text(h("bdi", { class: "muted card-model" }));
    this._head = h(
      "div", { class: "card-head" },
      h("h2", {}, h("a", { href: href("node", node.name) }, h("bdi", {}, text(node.name)))),
      this._model.element, this._since.element, this._findings.element,
    );
    this.element = h("article", { class: "card node-card", "data-node": node.name, tabindex: "-1" }, this._head);
    this._setRoom();
  }

  /** True once its inside is there. */
  get isBuilt() {
    return this._body !== null;
  }

  /** Make the inside, and fill it. */
  build() {
    this._body = new CardBody(this.node);
    this.element.append(...this._body.elements);
    this.element.style.minHeight = "";
    this._body.show(this._shown);
    this.update();
  }

  /** Let go of the inside; the card keeps its height. */
  unbuild(height) {
    for (const element of this._body.elements) {
      element.remove();
    }
    this._body = null;
    this.element.style.minHeight = `${Math.round(height)}px`;
  }

  /** Bring everything up to date. */
  update() {
    const now = this._fleet.headTime();
    this._model.set(model(this.node));
    this._setFindings();
    this._body?.update(now);
    this.tick(now);
  }

  /** Bring the times up to date. */
  tick(now) {
    const { node } = this;
    setAttribute(this.element, "data-state", node.state);
    this._since.set(silence(node, now));
    setHidden(this._since.element, node.state === "healthy" && node.connected);
    this._since.element.classList.toggle("warn", node.state === "late" || node.state === "healthy");
    this._since.element.classList.toggle("bad", node.state === "lost");
    this._body?.tick(now);
  }

  /** Which GPUs are shown; all of them with null. */
  show(gpus) {
    this._shown = gpus;
    this._body?.show(gpus);
    if (!this._body) {
      this._setRoom();
    }
  }

  /** The node's GPUs are others than before. */
  rebuild() {
    if (this._body) {
      this.unbuild(0);
      this.build();
    } else {
      this._setRoom();
    }
  }

  /** Until it is built, the room that it will take. */
  _setRoom() {
    const gpus = this._shown?.size ?? this.node.gpus.length;
    this.element.style.minHeight = `${9.6 + Math.max(1, gpus) * 3.15}rem`;
  }

  _setFindings() {
    const findings = this.node.details?.findings ?? [];
    setHidden(this._findings.element, findings.length === 0);
    if (findings.length) {
      const severity = worst(findings) ?? "info";
      this._findings.set(`⚠ ${findings.length} ${findings.length === 1 ? "finding" : "findings"}, worst ${severity}`);
      setAttribute(this._findings.element, "class", `badge severity-${severity}`);
    }
  }
}

/** The card of a node that was expected and has never reported. */
export class MissingCard {
  constructor(name) {
    this.element = h(
      "article", { class: "card node-card missing-card", "data-node": name, "data-state": "missing", tabindex: "-1" },
      h(
        "div", { class: "card-head" },
        h("h2", {}, h("span", { class: "state", "data-state": "missing", "aria-hidden": "true" }, "✕"), h("bdi", {}, text(name))),
        h("span", { class: "badge bad" }, "never reported"),
      ),
      h("p", {}, "This node is expected, but has never been heard of. Is its agent running?"),
      h("p", { class: "muted" }, "Try: ", h("code", {}, "gpulse deploy status --nodes FILE")),
    );
  }
}

class CardBody {
  constructor(node) {
    this._node = node;
    this._host = new HostLines(node);
    this._rows = node.gpus.map((gpu) => new GpuRow(gpu));
    this._hiddenNote = new Text(h("p", { class: "muted card-note", hidden: true }));
    this._foot = h("p", { class: "card-foot muted" });
    this._footDetails = undefined;
    this._noGpus = this._rows.length ? null : new Text(h("p", { class: "muted card-note" }));
    const gpus = this._noGpus?.element ?? table(node, this._rows);
    this.elements = [this._host.element, gpus, this._hiddenNote.element, this._foot];
  }

  update(now) {
    this._host.update();
    this._noGpus?.set(this._node.time === null ? "No reading has come from this node since the head started." : "This node has no GPUs.");
    for (const row of this._rows) {
      row.update(now);
    }
    if (this._footDetails !== this._node.details) {
      this._footDetails = this._node.details;
      this._setFoot();
    }
  }

  tick(now) {
    for (const row of this._rows) {
      row.tick(now);
    }
  }

  show(gpus) {
    let left = 0;
    for (const row of this._rows) {
      const isShown = gpus === null || gpus.has(row.gpu);
      row.show(isShown);
      left += isShown ? 0 : 1;
    }
    setHidden(this._hiddenNote.element, left === 0);
    this._hiddenNote.set(left ? `${left} more ${left === 1 ? "GPU" : "GPUs"} not shown by the filter` : "");
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

function table(node, rows) {
  const head = h("tr", { role: "row" });
  for (const [name, title] of COLUMNS) {
    head.append(h("th", { scope: "col", role: "columnheader", class: name === "gpu" || name === "memory" || name === "used" ? `c-${name}` : `num c-${name}` }, title));
  }
  return h(
    "table", { class: rows.some((row) => row.gpu.parent) ? "gpus divided" : "gpus", role: "table" },
    h("caption", { class: "visually-hidden" }, `GPUs of ${text(node.name)}`),
    h("thead", { role: "rowgroup" }, head),
    h("tbody", { role: "rowgroup" }, ...rows.flatMap((row) => row.elements)),
  );
}

/** CPU, memory, swap, file systems, disks and network. */
class HostLines {
  constructor(node) {
    this._node = node;
    this._cpu = new Bar();
    this._memory = new Bar(ALMOST_FULL);
    this._swap = new Bar(0.5);
    this._disks = new BoxedText(h("dd"));
    this._network = new BoxedText(h("dd"));
    this._filesystems = [];
    this._more = new Text(h("a", { href: href("node", node.name), hidden: true }));
    this._list = h(
      "dl", { class: "host" },
      line("CPU", this._cpu.element), line("RAM", this._memory.element), line("Swap", this._swap.element),
    );
    this._rates = h(
      "dl", { class: "host rates" },
      h("div", {}, h("dt", {}, "Disk"), this._disks.outer), h("div", {}, h("dt", {}, "Net"), this._network.outer),
    );
    this._details = undefined;
    this.element = h("div", { class: "host-lines" }, this._list, this._more.element, this._rates);
  }

  update() {
    const { host, details } = this._node;
    this._cpu.set(host.cpu_utilization_ratio, cpu(host));
    const { memory_total_bytes: total, memory_available_bytes: available } = host;
    const used = known(total) && known(available) ? total - available : null;
    this._memory.set(used === null ? null : used / total, known(total) ? bytesOf(used, total) : UNKNOWN);
    this._setSwap(host);
    if (details !== this._details) {
      this._details = details;
      this._setFilesystems(details?.filesystems ?? null);
      this._disks.set(diskText(details?.disks));
      this._network.set(networkText(details?.network));
    }
  }

  _setSwap({ swap_total_bytes: total, swap_free_bytes: free }) {
    if (total === 0) {
      this._swap.set(0, "none");
      return;
    }
    const used = known(total) && known(free) ? total - free : null;
    this._swap.set(used === null ? null : used / total, known(total) ? bytesOf(used, total) : UNKNOWN);
  }

  _setFilesystems(filesystems) {
    const all = (filesystems ?? []).filter(isWorthShowing);
    const shown = all.slice(0, MOST_FILESYSTEMS);
    this._more.set(all.length > shown.length ? `and ${all.length - shown.length} more file systems` : "");
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
      const kind = KINDS[row.kind] ?? row.type ?? "";
      const ratio = known(row.used_bytes) && row.size_bytes > 0 ? row.used_bytes / row.size_bytes : null;
      this._filesystems[at].bar.set(ratio, `${bytesOf(row.used_bytes, row.size_bytes)} ${text(kind || null)}`);
    });
  }
}

function line(title, value) {
  return h("div", {}, h("dt", {}, title), h("dd", {}, value));
}

function isWorthShowing(row) {
  return row.kind !== "memory" && !row.mount_point.startsWith("/boot") && !row.mount_point.startsWith("/snap");
}

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

function diskText(disks) {
  const rows = realOnes((disks ?? []).filter((disk) => disk.kind !== "memory" && !LAYERED.test(disk.name)));
  if (!rows.length) {
    return UNKNOWN;
  }
  const total = (name) => sum(rows.map((disk) => disk[name]));
  const kinds = [...new Set(rows.map((disk) => KINDS[disk.kind]).filter(Boolean))].join(", ");
  const names = rows.length === 1 ? kinds || text(rows[0].name) : `${rows.length} disks${kinds ? ` (${kinds})` : ""}`;
  return `${names}: read ${rate(total("read_bytes_per_second"))}, write ${rate(total("written_bytes_per_second"))}`;
}

function networkText(network) {
  const rows = realOnes((network ?? []).filter((row) => row.kind !== "loopback" && row.up !== false));
  if (!rows.length) {
    return UNKNOWN;
  }
  const names = rows.length === 1 ? text(rows[0].name) : `${rows.length} links`;
  return `${names}: in ${rate(sum(rows.map((row) => row.rx_bytes_per_second)))}, out ${rate(sum(rows.map((row) => row.tx_bytes_per_second)))}`;
}

/** Without what only passes on what others carry, unless there is nothing else. */
function realOnes(rows) {
  const real = rows.filter((row) => row.kind !== "virtual");
  return real.length ? real : rows;
}

/** What is known, added up; null when nothing is. */
function sum(numbers) {
  const some = numbers.filter(known);
  return some.length ? some.reduce((a, b) => a + b, 0) : null;
}

/** `8 × NVIDIA H200`. */
function model(node) {
  const whole = node.gpus.filter((gpu) => gpu.parent === null);
  const names = [...new Set(whole.map((gpu) => text(gpu.name)))];
  return names.length ? `${whole.length} × ${names.join(", ")}` : "";
}
