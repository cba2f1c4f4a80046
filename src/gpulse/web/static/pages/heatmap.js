// The map: every GPU of the cluster a cell of one picture.

import { gpuState, HARVESTED, isUnit, STATE_TITLES, usersOf } from "../core/fleet.js";
import { bytesOf, percent, text, watts, celsius, known } from "../core/format.js";
import { go, href, setQuery } from "../core/router.js";
import { h, oncePerFrame, setHidden, Text } from "../parts/dom.js";
import { Matcher, order, tally } from "../parts/filter.js";
import { Legend } from "../parts/heat-legend.js";
import { cellAt, layout, neighbour } from "../parts/heat-layout.js";
import { HEAT_METRICS, Painter } from "../parts/heat-paint.js";
import { QuickBar } from "../parts/quickbar.js";

const LEAST_HEIGHT = 260;
const USUAL_LETTERS = 14;
const TABLE_EVERY_MS = 5_000;

/** The page's title. */
export const title = () => "Map";

/** Show the page. */
export function mount(root, route, app) {
  const page = new HeatMap(root, route, app);
  return { wish: {}, leave: () => page.leave(), rerouted: () => page.rerouted() };
}

class HeatMap {
  constructor(root, route, app) {
    this._app = app;
    this._metric = metricFrom(route.query.metric ?? app.prefs.read("map.metric", "utilization"));
    this._names = [];
    this._gpus = [];
    this._looks = [];
    this._layout = layout([], 100, 100);
    this._cursor = -1;
    this._pointed = -1;
    this._bar = new QuickBar(app, { changed: () => this._structure(), jump: (name) => this._jump(name), hasStrip: false });
    this._frame = oncePerFrame(() => this._draw());
    this._make(root);
    this._listen();
    this._structure();
    this._tableTimer = setInterval(() => this._setTable(), TABLE_EVERY_MS);
  }

  leave() {
    clearInterval(this._tableTimer);
    this._abort.abort();
    this._frame.cancel();
    this._resizes.disconnect();
    this._bar.leave();
  }

  rerouted() {
    this._bar.rerouted();
  }

  _make(root) {
    this._root = root;
    this._canvas = h("canvas", { "aria-hidden": "true" });
    this._context = this._canvas.getContext("2d");
    this._tip = h("div", { class: "map-tip", hidden: true });
    this._spoken = h("div", { class: "visually-hidden", role: "status" });
    this._box = h(
      "div",
      {
        class: "map-box", id: "map", tabindex: "0", role: "application", "aria-roledescription": "map of GPUs",
        "aria-label": "Map of all GPUs. Arrow keys go from GPU to GPU, Enter opens one.", "aria-describedby": "map-summary",
      },
      this._canvas, this._tip,
    );
    this._select = h(
      "select", { id: "map-metric" },
      ...Object.entries(HEAT_METRICS).map(([name, metric]) => h("option", { value: name }, metric.title)),
    );
    this._select.value = this._metric;
    this._summary = new Text(h("p", { class: "muted map-summary", id: "map-summary" }));
    this._legend = new Legend();
    this._table = h("details", { class: "map-table", id: "map-table" }, h("summary", {}, "The same as a table"));
    root.append(
      h("h1", { class: "visually-hidden" }, "Map"),
      this._bar.element,
      h(
        "div", { class: "toolbar" },
        h("label", { class: "field" }, h("span", {}, "Colour by"), this._select), this._legend.element,
      ),
      this._box, this._spoken, this._summary.element, this._table,
    );
  }

  _listen() {
    this._abort = new AbortController();
    const { signal } = this._abort;
    const { fleet } = this._app;
    fleet.addEventListener("structure", () => this._structure(), { signal });
    fleet.addEventListener("values", (event) => this._values(event.detail), { signal });
    addEventListener("gpulse-theme", () => this._repaint(), { signal });
    addEventListener("resize", () => this._arrange(), { signal });
    this._resizes = new ResizeObserver(() => this._box.clientWidth !== this._width && this._arrange());
    this._resizes.observe(this._box);
    this._select.addEventListener("change", () => this._choose(this._select.value));
    this._box.addEventListener("pointermove", (event) => this._point(event));
    this._box.addEventListener("pointerleave", () => this._unpoint());
    this._box.addEventListener("click", (event) => this._click(event));
    this._box.addEventListener("keydown", (event) => this._key(event));
    this._box.addEventListener("focus", () => this._setCursor(Math.max(0, this._cursor)));
    this._box.addEventListener("blur", () => this._unpoint());
    this._table.addEventListener("toggle", () => this._setTable());
  }

  _choose(name) {
    this._metric = metricFrom(name);
    this._app.prefs.write("map.metric", this._metric);
    setQuery({ metric: this._metric === "utilization" ? null : this._metric });
    this._repaint();
    this._setTable();
  }

  /** Nodes, GPUs or the filter are others. */
  _structure() {
    const { fleet } = this._app;
    this._bar.structure();
    this._names = order(fleet, this._bar.filter);
    this._nodes = this._names.map((name) => fleet.nodes.get(name) ?? null);
    this._gpus = this._nodes.flatMap((node) => node?.gpus.filter(isUnit) ?? []);
    this._cursor = Math.min(this._cursor, this._gpus.length - 1);
    this._arrange();
    this._setTable();
  }

  /** Give every cell its place. */
  _arrange() {
    this._width = this._box.clientWidth;
    if (!this._width) {
      return;
    }
    this._legend.show(this._metric, new Painter(this._box)); // what is around it takes its room first
    this._tellSummary();
    const top = this._box.getBoundingClientRect().top + scrollY;
    const height = Math.max(LEAST_HEIGHT, Math.floor(innerHeight - top - this._below()));
    this._letters = parseFloat(getComputedStyle(document.documentElement).fontSize) / USUAL_LETTERS || 1;
    const counts = this._nodes.map((node) => node?.gpus.filter(isUnit).length ?? 0);
    this._layout = layout(counts, this._width - 2, height - 2, this._letters);
    const scale = devicePixelRatio || 1;
    const tall = Math.max(60, Math.min(this._layout.height, Math.max(height, this._layout.height)));
    this._canvas.width = Math.round((this._width - 2) * scale);
    this._canvas.height = Math.round(tall * scale);
    this._canvas.style.height = `${tall}px`;
    this._context.setTransform(scale, 0, 0, scale, 0, 0);
    this._repaint();
  }

  /** How much of the page comes after the picture, as long as the table is shut. */
  _below() {
    const opened = this._table.offsetHeight - this._table.firstElementChild.offsetHeight;
    const rest = this._root.getBoundingClientRect().bottom - this._box.getBoundingClientRect().bottom;
    return Math.ceil(rest - opened + (document.querySelector(".site-footer")?.offsetHeight ?? 0));
  }

  /** Paint everything anew: another theme, size or metric. */
  _repaint() {
    this._painter = new Painter(this._box);
    this._looks = [];
    this._context.clearRect(0, 0, this._canvas.width, this._canvas.height);
    this._drawNames();
    this._legend.show(this._metric, this._painter);
    this._frame();
  }

  _values(names) {
    this._bar.values(names);
    this._frame();
  }

  /** Paint the cells that look otherwise than before. */
  _draw() {
    const { size, cells } = this._layout;
    const shown = this._shown();
    for (let at = 0; at < cells.length; at += 1) {
      const gpu = this._gpus[at];
      const isShown = shown === null || shown.has(gpu);
      const look = this._painter.look(gpu, this._metric, isShown, size);
      if (look !== this._looks[at]) {
        this._looks[at] = look;
        this._painter.cell(this._context, cells[at], size, gpu, this._metric, isShown);
        if (at === this._marked) {
          this._marked = -1;
        }
      }
    }
    this._mark();
    this._showTip();
    this._tellSummary();
  }

  _shown() {
    const matcher = new Matcher(this._bar.filter);
    if (!matcher.isActive) {
      return null;
    }
    const shown = new Set();
    for (const node of this._nodes) {
      for (const gpu of (node && matcher.gpus(node)) ?? []) {
        shown.add(gpu);
      }
    }
    return shown;
  }

  _drawNames() {
    const { groups, hasLabels, size } = this._layout;
    const context = this._context;
    if (!hasLabels) {
      this._nodes.forEach((node, at) => node ?? this._painter.lost(context, groups[at], size));
      return;
    }
    context.font = `${Math.round(11 * this._letters)}px ${this._painter.font}`;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    this._names.forEach((name, at) => {
      const node = this._nodes[at];
      const { x, y, width } = groups[at];
      context.fillStyle = node === null || node.state === "lost" ? this._painter.states.lost : this._painter.muted;
      const mark = node === null ? "✕ " : node.state === "healthy" ? "" : node.state === "late" ? "! " : "✕ ";
      context.fillText(fitting(context, mark + text(name), width), x, y + Math.round(10 * this._letters));
    });
  }

  /** The frame around the cell that is pointed at. */
  _mark() {
    const at = this._pointed >= 0 ? this._pointed : document.activeElement === this._box ? this._cursor : -1;
    if (at === this._marked) {
      return;
    }
    const before = this._marked;
    this._marked = at;
    if (before >= 0 && before < this._gpus.length) {
      this._looks[before] = null;
      this._frame();
    }
    if (at >= 0 && at < this._gpus.length) {
      const { x, y } = this._layout.cells[at];
      const { size } = this._layout;
      const inner = size - (size >= 8 ? 2 : 1);
      this._context.strokeStyle = this._painter.text;
      this._context.lineWidth = size >= 12 ? 2 : 1;
      const half = this._context.lineWidth / 2;
      this._context.strokeRect(x + half, y + half, inner - 2 * half, inner - 2 * half);
    }
  }

  _point(event) {
    const { left, top } = this._canvas.getBoundingClientRect();
    this._pointed = cellAt(this._layout, event.clientX - left, event.clientY - top);
    this._canvas.style.cursor = this._pointed >= 0 ? "pointer" : "";
    this._frame();
  }

  _unpoint() {
    this._pointed = -1;
    this._frame();
  }

  _click(event) {
    this._point(event);
    if (this._pointed >= 0) {
      this._open(this._pointed);
    }
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this._gpus.length) {
      return;
    }
    const last = this._gpus.length - 1;
    if (event.key.startsWith("Arrow")) {
      this._setCursor(neighbour(this._layout, Math.max(0, this._cursor), event.key));
    } else if (event.key === "Home" || event.key === "End") {
      this._setCursor(event.key === "Home" ? 0 : last);
    } else if (event.key === "Enter" && this._cursor >= 0) {
      this._open(this._cursor);
    } else {
      return;
    }
    event.preventDefault();
  }

  _setCursor(at) {
    if (at < 0 || at >= this._gpus.length) {
      return;
    }
    this._cursor = at;
    this._pointed = -1;
    this._spoken.textContent = sentence(this._gpus[at], this._metric);
    this._frame();
  }

  _jump(name) {
    const at = this._gpus.findIndex((gpu) => gpu.node.name === name);
    if (at < 0) {
      go(href("node", name));
      return;
    }
    this._cursor = at;
    this._box.focus();
    this._setCursor(at);
  }

  _open(at) {
    const gpu = this._gpus[at];
    go(href("gpu", gpu.node.name, gpu.label));
  }

  _showTip() {
    const at = this._pointed >= 0 ? this._pointed : document.activeElement === this._box ? this._cursor : -1;
    const gpu = this._gpus[at];
    setHidden(this._tip, gpu === undefined);
    if (gpu === undefined) {
      return;
    }
    const lines = tipLines(gpu);
    this._tip.replaceChildren(h("strong", {}, lines[0]), ...lines.slice(1).map((line) => h("div", {}, line)));
    const { x, y } = this._layout.cells[at];
    const { size } = this._layout;
    const width = this._tip.offsetWidth;
    this._tip.style.left = `${Math.max(0, Math.min(x + size + 8, this._width - width))}px`;
    const below = y + size + 6;
    const isBelow = below + this._tip.offsetHeight < this._canvas.clientHeight || y < this._tip.offsetHeight;
    this._tip.style.top = `${isBelow ? below : y - this._tip.offsetHeight - 6}px`;
  }

  _tellSummary() {
    const metric = HEAT_METRICS[this._metric];
    const ratios = this._gpus.map((gpu) => (gpu.node.state === "lost" ? null : metric.ratio(gpu))).filter(known);
    const mean = ratios.length ? ratios.reduce((a, b) => a + b, 0) / ratios.length : null;
    const count = `${this._gpus.length} ${this._gpus.length === 1 ? "GPU" : "GPUs"} on ${this._names.length} nodes`;
    const hasMean = this._metric !== "state" && this._metric !== "temperature";
    this._summary.set(hasMean ? `${count}, ${metric.title} ${percent(mean)} on average` : count);
  }

  /** The map in words, for who cannot see it, or wants to read it. */
  _setTable() {
    if (!this._table.open) {
      return;
    }
    const head = ["Node", "State", "GPUs", "Free", "Harvested", "Busy", "Held idle", "Faulty", "Unknown or lost", "Mean utilization"];
    const rows = this._names.map((name, at) => tableRow(name, this._nodes[at]));
    this._body?.remove();
    this._body = h(
      "div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "GPUs by node" },
      h(
        "table", { class: "table" },
        h("caption", {}, "GPUs by node"),
        h("thead", {}, h("tr", {}, ...head.map((word, at) => h("th", { scope: "col", class: at > 1 ? "num" : "" }, word)))),
        h("tbody", {}, ...rows),
      ),
    );
    this._table.append(this._body);
  }
}

function metricFrom(name) {
  return Object.hasOwn(HEAT_METRICS, name) ? name : "utilization";
}

function tableRow(name, node) {
  const link = h("th", { scope: "row" }, h("a", { href: href("node", name) }, h("bdi", {}, text(name))));
  if (node === null) {
    return h("tr", {}, link, h("td", {}, "never reported"), ...Array.from({ length: 8 }, () => h("td", { class: "num" }, "–")));
  }
  const counts = tally(node.gpus);
  const used = node.gpus.filter(isUnit).map((gpu) => gpu.values.gpu_utilization_ratio).filter(known);
  const mean = used.length && node.state !== "lost" ? used.reduce((a, b) => a + b, 0) / used.length : null;
  const numbers = [counts.all, counts.free, counts.harvested, counts.busy, counts.idle, counts.faulty, counts.unknown + counts.lost, percent(mean)];
  return h("tr", {}, link, h("td", {}, node.state), ...numbers.map((number) => h("td", { class: "num" }, String(number))));
}

function tipLines(gpu) {
  const { values } = gpu;
  const users = usersOf(gpu).map(text);
  return [
    `${text(gpu.node.name)} · GPU ${text(gpu.label)}`,
    `${text(gpu.name)}, ${STATE_TITLES[gpuState(gpu)]}${gpu.node.state === "late" ? " (late)" : ""}`,
    `${percent(values.gpu_utilization_ratio)} utilization, ${percent(values.sm_active_ratio)} SM active`,
    `${bytesOf(values.memory_used_bytes, values.memory_total_bytes)}, ${watts(values.power_watts)}, ${celsius(values.temperature_celsius)}`,
    gpuState(gpu) === "harvested" ? HARVESTED : users.length ? `held by ${users.join(", ")}` : "nobody holds it that can be seen",
    ...gpu.findings.slice(0, 3).map((finding) => `⚠ ${text(finding.summary)}`),
  ];
}

function sentence(gpu, metric) {
  const users = usersOf(gpu).map(text);
  const value = metric === "state" ? "" : `, ${HEAT_METRICS[metric].title.toLowerCase()} ${HEAT_METRICS[metric].words(gpu)}`;
  return `${text(gpu.node.name)}, GPU ${text(gpu.label)}, ${STATE_TITLES[gpuState(gpu)]}${value}${users.length ? `, ${users.join(", ")}` : ""}`;
}

/** As much of a name as fits. */
function fitting(context, name, width) {
  if (context.measureText(name).width <= width) {
    return name;
  }
  let shown = name;
  while (shown.length > 1 && context.measureText(`${shown}…`).width > width) {
    shown = shown.slice(0, -1);
  }
  return `${shown}…`;
}
