// The fills and numbers of a row of small cells, on one canvas below them: painting is much cheaper than styling.

import { contextOf, h } from "../core/dom.js";

/** @typedef {import("./fleet-metrics.js").Heat} Heat */

/** The sizes of cells; a strip has cells of a fixed width and no numbers. */
const SIZES = {
  plain: { width: 0, height: 24, gap: 2, radius: 4, columns: 8 },
  strip: { width: 22, height: 22, gap: 2, radius: 3, columns: 16 },
};
const DIM = 0.22;
const LETTERS = 12;

/** A canvas for the cells of one node. */
export class CellCanvas {
  /** @param {"plain" | "strip"} kind */
  constructor(kind) {
    this._size = SIZES[kind];
    this.element = h("canvas", { class: "cells-canvas", "aria-hidden": "true" });
    this._context = contextOf(this.element);
    this._cellWidth = 0;
    this._columns = 1;
    this._font = "";
  }

  /**
   * Take the room of the cells; what was painted is gone.
   * @param {number} count How many cells there are.
   * @param {number} most How many cells the fullest node has.
   */
  measure(count, most) {
    const { width, height, gap, columns } = this._size;
    const parent = this.element.parentElement;
    this._columns = Math.max(1, Math.min(columns, most));
    const room = parent?.clientWidth ?? 0;
    this._cellWidth = width || (room - gap * (this._columns - 1)) / this._columns;
    const lines = Math.max(1, Math.ceil(count / this._columns));
    const [wide, tall] = [this._columns * (this._cellWidth + gap), lines * (height + gap)];
    const scale = devicePixelRatio || 1;
    this.element.width = Math.max(1, Math.round(wide * scale));
    this.element.height = Math.round(tall * scale);
    this.element.style.width = `${wide}px`;
    this.element.style.height = `${tall}px`;
    this._context.setTransform(scale, 0, 0, scale, 0, 0);
    const font = parent ? getComputedStyle(parent).fontFamily : "sans-serif";
    this._context.font = `${LETTERS}px ${font}`;
    this._context.textAlign = "center";
    this._context.textBaseline = "middle";
  }

  /**
   * Paint a cell anew.
   * @param {number} at
   * @param {{ fill: string | null, ink: string, number: string, isDim: boolean }} look
   */
  paint(at, { fill, ink, number, isDim }) {
    const { height, gap, radius } = this._size;
    const context = this._context;
    const x = (at % this._columns) * (this._cellWidth + gap);
    const y = Math.floor(at / this._columns) * (height + gap);
    context.globalAlpha = 1;
    context.clearRect(x, y, this._cellWidth, height);
    context.globalAlpha = isDim ? DIM : 1;
    if (fill !== null) {
      context.fillStyle = fill;
      context.beginPath();
      context.roundRect(x, y, this._cellWidth, height, radius);
      context.fill();
    }
    if (number !== "") {
      context.fillStyle = ink;
      context.fillText(number, x + this._cellWidth / 2, y + height / 2 + 1);
    }
  }
}
