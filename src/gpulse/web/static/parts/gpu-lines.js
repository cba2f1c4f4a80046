// One GPU in a node's table: a line with its values and its process, and a line for each further process.

import { BoxedText, h, setAttribute, setChildren, setHidden, Text } from "../core/dom.js";
import { gpuState, HARVESTED, isHarvested, jobKey, lastHeard, STATE_TITLES, severityWord, shownSeverity, usersOf } from "../core/fleet.js";
import { bytes, bytesOf, celsius, duration, known, percent, text, UNKNOWN, watts } from "../core/format.js";
import { href } from "../core/router.js";
import { shortFindingTitle } from "./finding-titles.js";
import { glyphElement } from "./glyphs.js";
import { commandOf, programWords } from "./processes.js";

const MAX_PROCESSES = 4;
const GIBIBYTE = 2 ** 30;
/** @type {Dashboard.Severity[]} */
const RANKS = ["critical", "high", "medium", "low", "info"];

/** The columns: their names, titles, and whether they hold numbers. */
export const COLUMNS = /** @type {Array<[name: string, title: string, isNumber: boolean]>} */ ([
  ["gpu", "GPU", false],
  ["used", "Util", true],
  ["sm", "SM", true],
  ["tensor", "Tensor", true],
  ["memory", "Memory", true],
  ["power", "Power", true],
  ["heat", "Temp", true],
  ["user", "User", false],
  ["program", "Program", false],
  ["pid", "PID", true],
  ["holds", "Holds", true],
  ["time", "Running", true],
  ["finding", "Finding", false],
]);
const OF_PROCESS = 7;

/** A GPU's lines. */
export class GpuLines {
  /**
   * @param {Dashboard.Gpu} gpu
   * @param {() => void} changed Called when there are more or fewer lines.
   */
  constructor(gpu, changed) {
    this.gpu = gpu;
    this._changed = changed;
    /** @type {Dashboard.GpuState | null} */
    this._state = null;
    this._isShown = true;
    this._glyph = h("span", { class: "line-glyph" });
    this._spoken = new Text(h("span", { class: "visually-hidden" }));
    this._used = new Gauge("used");
    this._memory = new Gauge("memory");
    /** @type {Record<string, BoxedText>} */
    this._cells = {};
    this._note = new Text(h("span", { class: "job-note" }));
    this._noteCell = h("td", { role: "cell", class: "c-note", colspan: "5", hidden: true }, this._note.element);
    this._findings = h("td", { role: "cell", class: "c-finding" });
    this._findingsKey = "";
    /** @type {Live.Finding[] | undefined} */
    this._shownFindings = undefined;
    /** @type {Live.Process[] | null | undefined} */
    this._processes = undefined;
    /** @type {ProcessCells[]} */
    this._lines = [];
    /** @type {HTMLElement[]} */
    this._more = [];
    this._first = this._makeFirst();
    /** @type {HTMLElement[]} */
    this.elements = [this._first];
  }

  /**
   * Bring the numbers up to date.
   * @param {number} now
   */
  update(now) {
    const { values, processes, findings } = this.gpu;
    const state = gpuState(this.gpu);
    const isOther = state !== this._state;
    if (isOther) {
      this._setState(state);
    }
    const { memory_used_bytes: used, memory_total_bytes: total } = values;
    this._used.set(values.gpu_utilization_ratio, percent(values.gpu_utilization_ratio));
    this._memory.set(known(used) && known(total) && total > 0 ? used / total : null, gibibytes(used), bytesOf(used, total));
    this._cells.sm.set(percent(values.sm_active_ratio));
    this._cells.tensor.set(percent(values.tensor_active_ratio));
    this._cells.power.set(watts(values.power_watts));
    this._cells.heat.set(celsius(values.temperature_celsius));
    if (processes !== this._processes) {
      this._processes = processes;
      this._setProcesses(processes ?? []);
    }
    if (isOther || findings !== this._shownFindings) {
      this._shownFindings = findings;
      this._setFindings(findings, state);
    }
    const words = note(this.gpu, state);
    this._note.set(words);
    setHidden(this._noteCell, this._lines.length > 0);
    this.tick(now);
  }

  /**
   * Bring only the times up to date.
   * @param {number} now
   */
  tick(now) {
    const until = lastHeard(this.gpu.node, now);
    for (const line of this._lines) {
      line.tick(until);
    }
  }

  /**
   * Show it or leave it out.
   * @param {boolean} isShown
   */
  show(isShown) {
    if (isShown !== this._isShown) {
      this._isShown = isShown;
      for (const element of this.elements) {
        setHidden(element, !isShown);
      }
    }
  }

  /** @param {Dashboard.GpuState} state */
  _setState(state) {
    this._state = state;
    this._glyph.replaceChildren(glyphElement("state", state));
    this._spoken.set(` ${STATE_TITLES[state]}`);
    this._first.dataset.state = state;
    setAttribute(this._note.element, "data-state", state);
  }

  _makeFirst() {
    const { gpu } = this;
    const link = h("a", { href: href("gpu", gpu.node.name, gpu.label), title: text(gpu.name) }, text(gpu.label));
    const row = h(
      "tr",
      { class: gpu.parent ? "gpu instance" : "gpu", role: "row", "data-gpu": gpu.label },
      h("th", { scope: "row", role: "rowheader", class: "c-gpu" }, link, this._glyph, this._spoken.element),
      this._used.element,
    );
    for (const [name, title] of COLUMNS.slice(2, OF_PROCESS)) {
      if (name === "memory") {
        row.append(this._memory.element);
        continue;
      }
      const cell = h("td", { role: "cell", class: `num c-${name}`, "data-short": name === "tensor" ? "TC" : title });
      this._cells[name] = new BoxedText(cell);
      row.append(cell);
    }
    row.append(this._noteCell, this._findings);
    return row;
  }

  /** @param {Live.Process[]} processes */
  _setProcesses(processes) {
    const shown = processes.slice(0, MAX_PROCESSES);
    const before = new Map(this._lines.map((line) => [line.key, line]));
    const count = this._more.length;
    for (const line of this._lines) {
      line.remove();
    }
    this._lines = shown.map((process) => {
      const key = lineKey(process);
      const line = before.get(key) ?? new ProcessCells(this.gpu.node.name, process, key);
      line.update(process);
      return line;
    });
    this._noteCell.after(...(this._lines[0]?.elements ?? []));
    this._more = this._lines
      .slice(1)
      .map((line) =>
        h(
          "tr",
          { class: "gpu-process", role: "row", "data-jobs-of": this.gpu.label },
          h("td", { role: "cell", colspan: String(OF_PROCESS), class: "c-blank" }),
          ...line.elements,
          h("td", { role: "cell", class: "c-finding" }),
        ),
      );
    const left = processes.length - shown.length;
    if (left > 0) {
      this._more.push(
        h(
          "tr",
          { class: "gpu-process", role: "row" },
          h("td", { role: "cell", colspan: String(OF_PROCESS), class: "c-blank" }),
          h("td", { role: "cell", colspan: "6" }, h("a", { href: href("gpu", this.gpu.node.name, this.gpu.label) }, `and ${left} more`)),
        ),
      );
    }
    this.elements = [this._first, ...this._more];
    for (const element of this._more) {
      setHidden(element, !this._isShown);
    }
    if (count || this._more.length) {
      this._changed();
    }
  }

  /**
   * The worst finding; of a harvested GPU without one, that it can be had.
   * @param {Live.Finding[]} findings
   * @param {Dashboard.GpuState} state
   */
  _setFindings(findings, state) {
    const isOffered = state === "harvested" && findings.length === 0;
    const key = isOffered ? state : findings.map((finding) => `${finding.id} ${finding.severity} ${finding.summary}`).join("\n");
    if (key !== this._findingsKey) {
      this._findingsKey = key;
      const sorted = [...findings].sort((a, b) => RANKS.indexOf(shownSeverity(a)) - RANKS.indexOf(shownSeverity(b)));
      const more = sorted.slice(1).map(shortFindingTitle);
      this._findings.replaceChildren(
        ...(isOffered ? [h("span", { class: "job-note", "data-state": state, title: HARVESTED }, "freed as soon as you use it")] : []),
        ...sorted.slice(0, 1).map((finding) => findingLink(finding, this.gpu)),
        ...(more.length ? [h("span", { class: "muted", title: more.join(", ") }, `and ${more.length} more`)] : []),
      );
    }
  }
}

/** A bar and a number in a cell. */
class Gauge {
  /** @param {string} name */
  constructor(name) {
    this._fill = h("span");
    this.element = h("td", { role: "cell", class: `c-${name}` }, h("span", { class: "track", "aria-hidden": "true" }, this._fill));
    this._text = new BoxedText(this.element);
    this._shown = -1;
    this._title = "";
  }

  /**
   * @param {Dashboard.MaybeNumber} ratio
   * @param {string} words
   * @param {string} [title]
   */
  set(ratio, words, title = "") {
    this._text.set(words);
    if (title !== this._title) {
      this._title = title;
      this.element.title = title;
    }
    const shown = known(ratio) ? Math.round(Math.min(1, Math.max(0, ratio)) * 100) : 0;
    if (shown !== this._shown) {
      this._shown = shown;
      this._fill.style.transform = `scaleX(${shown / 100})`;
    }
  }
}

/** The cells of one process: user, program, pid, memory, running time. */
class ProcessCells {
  /**
   * @param {string} nodeName
   * @param {Live.Process} process
   * @param {string} key
   */
  constructor(nodeName, process, key) {
    this.key = key;
    this._start = process.start_time;
    const memory = h("td", { role: "cell", class: "num c-holds" });
    const time = h("td", { role: "cell", class: "num c-time" });
    this._memory = new BoxedText(memory);
    this._time = new BoxedText(time);
    const job = href("job", jobKey(nodeName, process));
    this.elements = [
      h("td", { role: "cell", class: "c-user" }, process.user ? userLink(process.user) : UNKNOWN),
      h(
        "td",
        { role: "cell", class: "c-program" },
        h("bdi", { class: "job-program", title: text(commandOf(process)) }, text(programWords(process).join(" "))),
        ...wherefrom(process),
      ),
      h("td", { role: "cell", class: "num c-pid", "data-pid": String(process.pid) }, h("a", { href: job }, String(process.pid))),
      memory,
      time,
    ];
  }

  /** @param {Live.Process} process */
  update(process) {
    this._memory.set(bytes(process.gpu_memory_bytes));
  }

  /** @param {number} now */
  tick(now) {
    this._time.set(known(this._start) ? duration(now - this._start) : UNKNOWN);
  }

  remove() {
    for (const element of this.elements) {
      element.remove();
    }
  }
}

/**
 * `32.9`: GiB, without the unit, which is in the column's title.
 * @param {Dashboard.MaybeNumber} used
 */
function gibibytes(used) {
  return known(used) ? (used / GIBIBYTE).toFixed(1) : UNKNOWN;
}

/** @param {Dashboard.ProcessIdentity} process */
function lineKey(process) {
  return [process.pid, process.start_time, process.user, process.job, process.container, process.name, ...(process.command ?? [])].join(
    "\n",
  );
}

/** @param {string} user */
function userLink(user) {
  return h("a", { class: "job-user", href: href("user", user) }, h("bdi", {}, text(user)));
}

/** @param {Dashboard.ProcessIdentity} process */
function wherefrom(process) {
  const made = [];
  if (process.job) {
    made.push(
      h(
        "a",
        { class: isHarvested(process) ? "badge harvest" : "badge", href: href("job", process.job), title: text(process.job) },
        h("bdi", {}, text(process.job)),
      ),
    );
  }
  if (process.container) {
    made.push(
      h("span", { class: "badge muted", title: `container ${text(process.container)}` }, "▣ ", h("bdi", {}, text(process.container))),
    );
  }
  return made;
}

/**
 * @param {Live.Finding} finding
 * @param {Dashboard.Gpu} gpu
 */
function findingLink(finding, gpu) {
  const severity = shownSeverity(finding);
  return h(
    "a",
    { class: "line-finding", href: href("gpu", gpu.node.name, gpu.label), title: text(finding.summary) },
    glyphElement("severity", severity),
    h("span", { class: "line-finding-title" }, text(shortFindingTitle(finding))),
    h("span", { class: "visually-hidden" }, ` (${severityWord(severity)}) ${text(finding.summary)}`),
  );
}

/**
 * The note about a GPU without a visible process.
 * @param {Dashboard.Gpu} gpu
 * @param {Dashboard.GpuState} state
 */
function note(gpu, state) {
  if (gpu.instances.length) {
    const users = usersOf(gpu);
    return `${gpu.instances.length} MIG instances${users.length ? `, used by ${users.map(text).join(", ")}` : ""}`;
  }
  if (state === "harvested") {
    return HARVESTED;
  }
  if (state === "free") {
    return "free";
  }
  if (state === "faulty") {
    return "faulty, no process";
  }
  if (gpu.processes === null) {
    return state === "idle" ? "held idle, process unknown" : "processes unknown";
  }
  if (state === "busy" || state === "idle") {
    return `${STATE_TITLES[state]}, by a process that the agent cannot see`;
  }
  return "";
}

/**
 * Put the lines of all GPUs into a table's body.
 * @param {HTMLElement} body
 * @param {GpuLines[]} gpus
 */
export function setLines(body, gpus) {
  setChildren(
    body,
    gpus.flatMap((lines) => lines.elements),
  );
}
