// What a small cell stands for, next to it, while it is pointed at or has the focus.

import { h, setHidden } from "../core/dom.js";
import { gpuState, HARVESTED, STATE_TITLES, shownSeverity, usersOf } from "../core/fleet.js";
import { bytesOf, celsius, percent, text, watts } from "../core/format.js";
import { shortFindingTitle } from "./finding-titles.js";
import { Sparkline } from "./fleet-trends.js";
import { glyphElement } from "./glyphs.js";

/** @typedef {import("./fleet-trends.js").Trends} Trends */

const DELAY_MS = 150;
const GAP = 8;
const MAX_FINDINGS = 3;

/** The tip of the cells within an element. */
export class FleetTip {
  /**
   * @param {HTMLElement} area
   * @param {Trends} trends
   * @param {(cell: HTMLElement) => Dashboard.Gpu | null} gpuOf
   */
  constructor(area, trends, gpuOf) {
    this._area = area;
    this._trends = trends;
    this._gpuOf = gpuOf;
    /** @type {HTMLElement | null} */
    this._cell = null;
    this._timer = 0;
    this._spark = new Sparkline();
    this.element = h("div", { class: "fleet-tip", "aria-hidden": "true", hidden: true });
    area.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this._over(event.target));
    area.addEventListener("pointerleave", () => this._show(null));
    area.addEventListener("focusin", (event) => this._focused(event.target));
    area.addEventListener("focusout", () => this._show(null));
  }

  leave() {
    clearTimeout(this._timer);
  }

  /** Bring the numbers up to date. */
  update() {
    if (this._cell) {
      this._fill(this._cell);
    }
  }

  /** @param {EventTarget | null} target */
  _over(target) {
    const cell = target instanceof Element ? /** @type {HTMLElement | null} */ (target.closest(".cell")) : null;
    if (cell !== this._cell) {
      clearTimeout(this._timer);
      this._timer = setTimeout(() => this._show(cell), this._cell ? 0 : DELAY_MS);
    }
  }

  /** @param {EventTarget | null} target */
  _focused(target) {
    const isCell = target instanceof HTMLElement && target.matches(".cell:focus-visible");
    this._show(isCell ? target : null);
  }

  /** @param {HTMLElement | null} cell */
  _show(cell) {
    clearTimeout(this._timer);
    this._cell = cell;
    setHidden(this.element, cell === null);
    if (cell) {
      this._fill(cell);
      this._place(cell);
    }
  }

  /** @param {HTMLElement} cell */
  _fill(cell) {
    const gpu = this._gpuOf(cell);
    if (gpu === null || !cell.isConnected) {
      this._cell = null;
      setHidden(this.element, true);
      return;
    }
    const { values } = gpu;
    const state = gpuState(gpu);
    this._spark.set(this._trends.of(gpu), 1);
    const users = usersOf(gpu).map(text);
    const jobs = [...new Set((gpu.processes ?? []).flatMap((process) => (process.job ? [text(process.job)] : [])))];
    const who = state === "harvested" ? HARVESTED : [...users.slice(0, 3), ...jobs.slice(0, 2)].join(" ");
    this.element.replaceChildren(
      h(
        "p",
        { class: "tip-head" },
        h("strong", {}, `${text(gpu.node.name)} · GPU ${text(gpu.label)}`),
        h("span", {}, glyphElement("state", state), STATE_TITLES[state]),
      ),
      ...(who ? [h("p", { class: "tip-who" }, who)] : []),
      h(
        "p",
        { class: "tip-values" },
        this._spark.element,
        h("span", {}, h("b", {}, percent(values.gpu_utilization_ratio)), " util"),
        h("span", {}, h("b", {}, watts(values.power_watts))),
        h("span", {}, h("b", {}, celsius(values.temperature_celsius))),
      ),
      h("p", { class: "tip-memory" }, `${bytesOf(values.memory_used_bytes, values.memory_total_bytes)} memory, ${text(gpu.name)}`),
      ...gpu.findings
        .slice(0, MAX_FINDINGS)
        .map((finding) => h("p", { class: "tip-finding" }, glyphElement("severity", shownSeverity(finding)), shortFindingTitle(finding))),
      h("p", { class: "tip-keys" }, "Enter opens the GPU; E opens its node here"),
    );
  }

  /** @param {HTMLElement} cell */
  _place(cell) {
    const outer = this._area.getBoundingClientRect();
    const inner = cell.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const isLeft = inner.right + GAP + width > innerWidth - GAP;
    const left = isLeft ? inner.left - GAP - width : inner.right + GAP;
    const top = Math.min(inner.top, innerHeight - GAP - height);
    this.element.style.left = `${Math.max(0, left - outer.left)}px`;
    this.element.style.top = `${Math.max(0, top - outer.top)}px`;
  }
}
