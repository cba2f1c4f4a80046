// One GPU of a card: what it does, and the jobs that hold it.

import { gpuState, HARVESTED, isHarvested, jobKey, lastHeard, STATE_GLYPHS, STATE_TITLES, usersOf } from "../core/fleet.js";
import { bytes, bytesOf, celsius, duration, known, percent, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { commandOf, programWords } from "./program.js";
import { Bar, BoxedText, h, setAttribute, setChildren, setHidden, Text } from "./dom.js";

const MOST_JOBS = 3;
const FULL = 0.97;

export const COLUMNS = [
  ["gpu", "GPU"], ["memory", "Memory"], ["used", "Util"], ["sm", "SM"], ["tensor", "Tensor"], ["power", "Power"],
  ["heat", "Temp"],
];

/** A GPU's two lines in a table. */
export class GpuRow {
  constructor(gpu) {
    this.gpu = gpu;
    this._glyph = new Text(h("span", { class: "state", "aria-hidden": "true" }));
    this._memory = new Bar(FULL);
    this._used = new Bar();
    this._state = null;
    this._isShown = true;
    this._cells = {};
    this._jobs = new JobList(gpu);
    this.elements = [this._makeValues(), this._jobs.element];
  }

  /** Bring the numbers up to date. */
  update(now) {
    const { values } = this.gpu;
    const state = gpuState(this.gpu);
    if (state !== this._state) {
      this._setState(state);
    }
    const { memory_used_bytes: used, memory_total_bytes: total } = values;
    this._memory.set(known(used) && total > 0 ? used / total : null, bytesOf(used, total));
    this._used.set(values.gpu_utilization_ratio, percent(values.gpu_utilization_ratio));
    this._cells.sm.set(percent(values.sm_active_ratio));
    this._cells.tensor.set(percent(values.tensor_active_ratio));
    this._cells.power.set(power(values.power_watts, values.power_limit_watts));
    this._cells.heat.set(celsius(values.temperature_celsius));
    this._jobs.update(state, this._until(now));
  }

  /** Bring only the times up to date. */
  tick(now) {
    this._jobs.tick(this._until(now));
  }

  _until(now) {
    return lastHeard(this.gpu.node, now);
  }

  /** Show it or leave it out. */
  show(isShown) {
    if (isShown !== this._isShown) {
      this._isShown = isShown;
      for (const element of this.elements) {
        setHidden(element, !isShown);
      }
    }
  }

  _setState(state) {
    this._state = state;
    this._glyph.set(STATE_GLYPHS[state]);
    this._glyph.element.dataset.state = state;
    this._spoken.set(` ${STATE_TITLES[state]}`);
    this.elements[0].dataset.state = state;
    this._link.title = `${text(this.gpu.name)}: ${STATE_TITLES[state]}`;
  }

  _makeValues() {
    const { gpu } = this;
    this._link = h("a", { href: href("gpu", gpu.node.name, gpu.label) }, text(gpu.label));
    this._spoken = new Text(h("span", { class: "visually-hidden" }));
    const row = h(
      "tr", { class: gpu.parent ? "gpu instance" : "gpu", role: "row", "data-gpu": gpu.label, "data-node": gpu.node.name },
      h("th", { scope: "row", role: "rowheader", class: "c-gpu" }, this._glyph.element, this._link, this._spoken.element),
      h("td", { role: "cell", class: "c-memory" }, this._memory.element),
      h("td", { role: "cell", class: "c-used" }, this._used.element),
    );
    for (const [name, title] of COLUMNS.slice(3)) {
      const cell = h("td", { role: "cell", class: `num c-${name}`, "data-short": name === "tensor" ? "TC" : title });
      this._cells[name] = new BoxedText(cell);
      row.append(cell);
    }
    return row;
  }
}

/** The line under a GPU: who holds it. */
class JobList {
  constructor(gpu) {
    this._gpu = gpu;
    this._note = new Text(h("span", { class: "job-note" }));
    this._list = h("ul", { class: "jobs", hidden: true });
    this._findings = h("span", { class: "gpu-findings" });
    this._more = new Text(h("a", { class: "job-more", href: href("gpu", gpu.node.name, gpu.label), hidden: true }));
    this._lines = [];
    this._processes = undefined;
    this._shownFindings = undefined;
    const cell = h(
      "td", { colspan: String(COLUMNS.length), role: "cell" }, this._note.element, this._list, this._more.element, this._findings,
    );
    this.element = h("tr", { class: "gpu-jobs", role: "row", "data-jobs-of": gpu.label }, cell);
  }

  update(state, now) {
    const { processes, findings } = this._gpu;
    if (processes !== this._processes) {
      this._processes = processes;
      this._setProcesses(processes ?? []);
    }
    if (findings !== this._shownFindings) {
      this._setFindings(findings);
    }
    this._note.set(note(this._gpu, state));
    setHidden(this._note.element, this._note.element.textContent === "");
    setAttribute(this._note.element, "data-state", state);
    this.tick(now);
  }

  tick(now) {
    for (const line of this._lines) {
      line.tick(now);
    }
  }

  _setProcesses(processes) {
    const shown = processes.slice(0, MOST_JOBS);
    const before = new Map(this._lines.map((line) => [line.key, line]));
    this._lines = shown.map((process) => {
      const key = lineKey(process);
      const line = before.get(key) ?? new JobLine(this._gpu.node.name, process, key);
      line.update(process);
      return line;
    });
    setChildren(this._list, this._lines.map((line) => line.element));
    setHidden(this._list, shown.length === 0);
    const more = processes.length - shown.length;
    setHidden(this._more.element, more <= 0);
    this._more.set(more > 0 ? `and ${more} more` : "");
  }

  _setFindings(findings) {
    const key = findings.map((finding) => `${finding.id} ${finding.severity} ${finding.summary}`).join("\n");
    this._shownFindings = findings;
    if (key === this._findingsKey) {
      return;
    }
    this._findingsKey = key;
    this._findings.replaceChildren(...findings.map((finding) => findingBadge(finding, this._gpu)));
  }
}

/** One process: pid (user) · program · memory · running time. */
class JobLine {
  constructor(nodeName, process, key) {
    this.key = key;
    this._start = process.start_time;
    this._memory = new BoxedText(h("span", { class: "job-memory" }));
    this._time = new BoxedText(h("span", { class: "job-time" }));
    const job = h("a", { href: href("job", jobKey(nodeName, process)), class: "job-pid" }, String(process.pid));
    this.element = h(
      "li", { class: "job", "data-pid": String(process.pid) },
      h("span", { class: "job-who" }, job, " (", process.user ? userLink(process.user) : UNKNOWN, ")"),
      h("bdi", { class: "job-program", title: text(commandOf(process)) }, text(programWords(process).join(" "))),
      ...wherefrom(process),
      this._memory.outer,
      this._time.outer,
    );
  }

  update(process) {
    this._memory.set(bytes(process.gpu_memory_bytes));
  }

  tick(now) {
    this._time.set(known(this._start) ? duration(now - this._start) : UNKNOWN);
  }
}

function lineKey(process) {
  return [process.pid, process.start_time, process.user, process.job, process.container, process.name, ...(process.command ?? [])].join("\n");
}

function userLink(user) {
  return h("a", { class: "job-user", href: href("user", user) }, h("bdi", {}, text(user)));
}

function wherefrom(process) {
  const made = [];
  if (process.job) {
    made.push(h("a", { class: isHarvested(process) ? "badge harvest" : "badge", href: href("job", process.job), title: text(process.job) }, h("bdi", {}, text(process.job))));
  }
  if (process.container) {
    made.push(h("span", { class: "badge muted", title: `container ${text(process.container)}` }, "▣ ", h("bdi", {}, text(process.container))));
  }
  return made;
}

function findingBadge(finding, gpu) {
  const severity = ["info", "low", "medium", "high", "critical"].includes(finding.severity) ? finding.severity : "info";
  return h(
    "a",
    { class: `badge severity-${severity}`, href: href("gpu", gpu.node.name, gpu.label), title: text(finding.summary) },
    "⚠ ", text(String(finding.id ?? "").replaceAll("_", " ")),
    h("span", { class: "visually-hidden" }, ` (${severity}) ${text(finding.summary)}`),
  );
}

/** What is said of a GPU beside, or instead of, its jobs. */
function note(gpu, state) {
  if (gpu.instances.length) {
    const users = usersOf(gpu);
    return `${gpu.instances.length} MIG instances${users.length ? `, held by ${users.map(text).join(", ")}` : ""}`;
  }
  if (state === "harvested") {
    return HARVESTED;
  }
  if (gpu.processes?.length) {
    return state === "idle" ? "held, idle" : "";
  }
  if (state === "free") {
    return "free";
  }
  if (state === "faulty") {
    return "faulty, nobody holds it";
  }
  if (gpu.processes === null) {
    return state === "idle" ? "held, idle, not known by whom" : "processes not known";
  }
  if (state === "busy" || state === "idle") {
    return `${STATE_TITLES[state]}, by a process that cannot be seen`;
  }
  return "";
}

function power(watts, limit) {
  if (!known(watts)) {
    return UNKNOWN;
  }
  return known(limit) ? `${Math.round(watts)} / ${Math.round(limit)} W` : `${Math.round(watts)} W`;
}
