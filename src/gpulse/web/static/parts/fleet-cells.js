// The cell of one GPU: number, trend, owner, memory and the worst finding; or only a number, or only a color.

import { h, setAttribute, setChildren, setHidden, Text } from "../core/dom.js";
import { STATE_TITLES, usersOf, worst } from "../core/fleet.js";
import { duration, text } from "../core/format.js";
import { href } from "../core/router.js";
import { CellCanvas } from "./fleet-canvas.js";
import { CELL_METRICS, memoryRatio } from "./fleet-metrics.js";
import { idleSince, ownerOf } from "./fleet-summary.js";
import { Sparkline } from "./fleet-trends.js";
import { glyphElement } from "./glyphs.js";

/** @typedef {import("./fleet-metrics.js").CellMetric} CellMetric */
/** @typedef {import("./fleet-metrics.js").Heat} Heat */
/** @typedef {import("./fleet-trends.js").Trends} Trends */
/** @typedef {{ heat: Heat, trends: Trends, metric: CellMetric, fleet: Dashboard.Fleet, isPhone: boolean, most: number }} CellContext */
/** @typedef {"full" | "plain" | "strip"} CellKind */

const IN_CELLS = new Set(["harvested", "faulty", "lost", "unknown"]);
/** @type {Record<string, string>} */
const WORDS = { idle: "idle", free: "free", faulty: "faulty", unknown: "unknown" };
const MAX_INSTANCES = 16;
const XID = /Xid (\d+)/;

/** The cells of a node, one for each whole GPU; MIG instances are parts of a cell. */
export class Cells {
  /**
   * @param {Dashboard.Node} node
   * @param {CellKind} kind
   * @param {CellContext} context
   */
  constructor(node, kind, context) {
    this._node = node;
    this._kind = kind;
    this._context = context;
    /** @type {Array<FullCell | PaintedCell>} */
    this._cells = [];
    /** @type {Dashboard.Gpu[]} */
    this._gpus = [];
    this._canvas = kind === "full" ? null : new CellCanvas(kind);
    this._isMeasured = false;
    this.element = h("div", { class: "cells", "data-kind": kind });
    this.rebuild();
  }

  /** The node's GPUs may be others than before. */
  rebuild() {
    if (this._gpus === this._node.gpus) {
      return;
    }
    this._gpus = this._node.gpus;
    const whole = this._gpus.filter((gpu) => gpu.parent === null);
    const { _kind: kind, _context: context } = this;
    this._cells = whole.map((gpu) => (kind === "full" ? new FullCell(gpu, context) : new PaintedCell(gpu, context, kind)));
    const elements = this._cells.map((cell) => /** @type {HTMLElement} */ (cell.element));
    setChildren(this.element, this._canvas ? [this._canvas.element, ...elements] : elements);
    this._isMeasured = false;
    setHidden(this.element, whole.length === 0);
  }

  /** @param {Dashboard.GpuState[]} states */
  update(states) {
    if (this._canvas && !this._isMeasured) {
      this._canvas.measure(this._cells.length, this._context.most);
      this._isMeasured = true;
    }
    this._cells.forEach((cell, at) => {
      cell.update(states);
      if (cell instanceof PaintedCell && cell.isOther) {
        this._canvas?.paint(at, cell.look);
      }
    });
  }

  /** Everything must be drawn again: trends, colors of another theme, cells of another size. */
  redraw() {
    this._isMeasured = false;
    for (const cell of this._cells) {
      cell.redraw();
    }
  }

  /**
   * Dim the GPUs that the filter leaves out; none with null.
   * @param {Set<Dashboard.Gpu> | null} gpus
   */
  show(gpus) {
    for (const cell of this._cells) {
      cell.dim(gpus !== null && !gpus.has(cell.gpu));
    }
  }
}

/** What all cells have: a state, its glyph, the worst finding, MIG instances. */
class Cell {
  /**
   * @param {Dashboard.Gpu} gpu
   * @param {CellContext} context
   */
  constructor(gpu, context) {
    this.gpu = gpu;
    this.context = context;
    /** @type {Dashboard.GpuState | null} */
    this.state = null;
    this.isDim = false;
    /** @type {Live.Finding[] | null} */
    this._findings = null;
    /** @type {Live.Process[] | null | undefined} */
    this._processes = undefined;
    this.glyph = h("span", { class: "cell-glyph" });
    this.element = h(
      "a",
      { class: "cell", href: href("gpu", gpu.node.name, gpu.label), tabindex: "-1", "data-gpu": gpu.label },
      this.glyph,
    );
    /** @type {Part[]} */
    this._parts = gpu.instances.slice(0, MAX_INSTANCES).map((instance) => new Part(instance));
    if (this._parts.length) {
      this.element.classList.add("divided");
      this.element.append(h("span", { class: "cell-parts" }, ...this._parts.map((part) => part.element)));
    }
  }

  /** @param {Dashboard.GpuState[]} states */
  update(states) {
    const { gpu } = this;
    const state = states[gpu.index] ?? "unknown";
    const isOther = state !== this.state;
    if (isOther) {
      this.state = state;
      this.element.dataset.state = state;
      this.setGlyph(state);
    }
    const hasOtherDetails = gpu.findings !== this._findings || gpu.processes !== this._processes;
    if (hasOtherDetails) {
      this._findings = gpu.findings;
      this._processes = gpu.processes;
      this.setSeverity(worst(gpu.findings));
    }
    if (isOther || hasOtherDetails) {
      this.setWords(state);
    }
    for (const part of this._parts) {
      part.update(states);
    }
  }

  /** @param {boolean} isDim */
  dim(isDim) {
    if (isDim !== this.isDim) {
      this.isDim = isDim;
      this.element.classList.toggle("dim", isDim);
    }
  }

  /** The step of the fill; -1 for none. */
  get level() {
    const { gpu, state, context } = this;
    if (gpu.instances.length) {
      return -1; // its instances have colors of their own
    }
    const isFilled = state === "busy" || (context.metric !== CELL_METRICS.utilization && state !== "lost" && state !== "faulty");
    return isFilled ? context.heat.level(context.metric.ratio(gpu)) : -1;
  }

  /** The number of the metric, where a state has one. */
  get number() {
    const { gpu, state, context } = this;
    const isShown = gpu.instances.length === 0 && (state === "busy" || state === "harvested" || state === "lost");
    const value = isShown ? context.metric.number(gpu) : null;
    return value === null ? "" : String(Math.round(value));
  }

  /** @param {Dashboard.GpuState} state */
  setGlyph(state) {
    this.glyph.replaceChildren(...(state === "busy" ? [] : [glyphElement("state", state)]));
    this.glyph.classList.toggle("always", IN_CELLS.has(state));
  }

  /** @param {Dashboard.Severity | null} severity */
  setSeverity(severity) {
    setAttribute(this.element, "data-severity", severity === "info" ? null : severity);
  }

  /** @param {Dashboard.GpuState} state */
  setWords(state) {
    setAttribute(this.element, "aria-label", spoken(this.gpu, state));
  }
}

/** A small cell, whose fill and number are on a canvas. */
class PaintedCell extends Cell {
  /**
   * @param {Dashboard.Gpu} gpu
   * @param {CellContext} context
   * @param {CellKind} kind
   */
  constructor(gpu, context, kind) {
    super(gpu, context);
    this._hasNumber = kind === "plain";
    this._level = -1;
    this._number = "";
    this._wasDim = false;
    /** True when it must be painted anew. */
    this.isOther = true;
    this._isStale = true;
  }

  /** @param {Dashboard.GpuState[]} states */
  update(states) {
    super.update(states);
    const { level } = this;
    const number = this._hasNumber ? this.number : "";
    this.isOther = this._isStale || level !== this._level || number !== this._number || this.isDim !== this._wasDim;
    this._level = level;
    this._number = number;
    this._wasDim = this.isDim;
    this._isStale = false;
  }

  redraw() {
    this._isStale = true;
  }

  /** What to paint. */
  get look() {
    const { heat } = this.context;
    return { fill: heat.fills[this._level] ?? null, ink: heat.inks[this._level] ?? heat.text, number: this._number, isDim: this.isDim };
  }
}

/** A cell with everything: number, trend, owner, memory line, severity. */
class FullCell extends Cell {
  /**
   * @param {Dashboard.Gpu} gpu
   * @param {CellContext} context
   */
  constructor(gpu, context) {
    super(gpu, context);
    this._number = new Text(h("span", { class: "cell-number" }));
    this._level = -1;
    this._owner = new Text(h("span", { class: "cell-owner" }));
    this._since = new Text(h("span", { class: "cell-since" }));
    this._severity = h("span", { class: "cell-severity" });
    this._memory = h("span", { class: "cell-memory" });
    this._memoryShown = -1;
    this._isDrawn = false;
    this._spark = new Sparkline();
    this.element.append(this._number.element, this._since.element, this._owner.element, this._spark.element, this._severity, this._memory);
  }

  /** @param {Dashboard.GpuState[]} states */
  update(states) {
    super.update(states);
    const { gpu, state, context } = this;
    const memory = state === "free" ? 0 : Math.round((memoryRatio(gpu) ?? 0) * 100);
    if (memory !== this._memoryShown) {
      this._memoryShown = memory;
      this._memory.style.transform = `scaleX(${memory / 100})`;
    }
    this._since.set(state === "idle" ? idleTime(gpu, context.fleet.headTime()) : "");
    const word = gpu.instances.length && state !== "lost" ? "MIG" : WORDS[state ?? ""];
    this._number.set(word ?? this.number);
    if (context.isPhone) {
      this._fill(this.level);
    }
    if (!this._isDrawn) {
      this._isDrawn = true;
      this._spark.set(context.trends.of(gpu), 1);
    }
  }

  redraw() {
    this._isDrawn = false;
    this._level = -2;
  }

  /** @param {number} level */
  _fill(level) {
    if (level !== this._level) {
      this._level = level;
      const { heat } = this.context;
      this.element.style.backgroundColor = heat.fills[level] ?? "";
      this.element.style.color = heat.inks[level] ?? "";
    }
  }

  /** @param {Dashboard.GpuState} state */
  setGlyph(state) {
    this.glyph.replaceChildren(glyphElement("state", state));
  }

  /** @param {Dashboard.Severity | null} severity */
  setSeverity(severity) {
    super.setSeverity(severity);
    this._severity.replaceChildren(...(severity && severity !== "info" ? [glyphElement("severity", severity)] : []));
  }

  /** @param {Dashboard.GpuState} state */
  setWords(state) {
    super.setWords(state);
    const { gpu } = this;
    const faults = state === "faulty" ? gpu.findings.filter((finding) => finding.id === "gpu_fault") : [];
    const fault = faults.find((finding) => XID.test(finding.summary)) ?? faults[0];
    this._owner.set(this._ownerText(state, fault));
  }

  /**
   * Who is on it, or what else there is to say in a word or two.
   * @param {Dashboard.GpuState} state
   * @param {Live.Finding} [fault]
   */
  _ownerText(state, fault) {
    const { gpu } = this;
    if (gpu.instances.length) {
      return instancesText(gpu);
    }
    if (fault) {
      return text(faultWords(fault));
    }
    const owner = state === "free" ? "" : state === "lost" ? (usersOf(gpu)[0] ?? "") : ownerOf(gpu);
    return owner && text(owner);
  }
}

/** A MIG instance within the cell of its GPU. */
class Part {
  /** @param {Dashboard.Gpu} gpu */
  constructor(gpu) {
    this._gpu = gpu;
    this.element = h("span", { class: "cell-part" });
  }

  /** @param {Dashboard.GpuState[]} states */
  update(states) {
    setAttribute(this.element, "data-state", states[this._gpu.index] ?? "unknown");
  }
}

/**
 * `3 h`: how long a held GPU has been idle.
 * @param {Dashboard.Gpu} gpu
 * @param {number} now
 */
function idleTime(gpu, now) {
  const since = idleSince(gpu);
  return since !== null && now - since >= 60 ? duration(now - since).replace(/(h|d) .*/, "$1") : "";
}

/**
 * `Xid 94`: the cause of a fault in two words.
 * @param {Live.Finding} fault
 */
function faultWords(fault) {
  const xid = XID.exec(fault.summary);
  const cause = String(fault.cause ?? "fault").split(/[_ ]/)[0];
  return xid ? `Xid ${xid[1]}` : cause === "ecc" ? "ECC errors" : cause;
}

/** @param {Dashboard.Gpu} gpu */
function instancesText(gpu) {
  const free = gpu.instances.filter((instance) => !instance.processes?.length).length;
  return `${free} of ${gpu.instances.length} free`;
}

/**
 * A GPU for who cannot see its cell.
 * @param {Dashboard.Gpu} gpu
 * @param {Dashboard.GpuState} state
 */
function spoken(gpu, state) {
  const severity = worst(gpu.findings);
  const users = usersOf(gpu).map(text);
  const parts = [`${text(gpu.node.name)} GPU ${text(gpu.label)}`, STATE_TITLES[state], ...users];
  return [...parts, severity ? (severity === "critical" ? "fault" : `${severity} finding`) : ""].filter(Boolean).join(", ");
}
