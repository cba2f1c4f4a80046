// What the cells of the fleet can be colored by, and those colors.

import { celsius, known, percent, watts } from "../core/format.js";
import { HEAT_STEPS, heatRamp } from "./chart-theme.js";
import { usedOf } from "./fleet-summary.js";

/** As many colors as an eye tells apart: small changes of the load repaint nothing. */
const LEVELS = 16;

/**
 * What a cell can show: a title, the ends of its range, the share of that range from 0 to 1, the number in a cell, the value in words.
 * @typedef {{ title: string, low: string, high: string, ratio: (gpu: Dashboard.Gpu) => number | null, number: (gpu: Dashboard.Gpu) => number | null, words: (gpu: Dashboard.Gpu) => string }} CellMetric
 */

/** @type {Record<string, CellMetric>} */
export const CELL_METRICS = {
  utilization: share("Utilization", usedOf),
  memory: share("Memory", memoryRatio),
  power: {
    title: "Power",
    low: "0",
    high: "limit",
    ratio: (gpu) => quotient(gpu.values.power_watts, gpu.values.power_limit_watts),
    number: (gpu) => gpu.values.power_watts ?? null,
    words: (gpu) => watts(gpu.values.power_watts),
  },
  temperature: {
    title: "Temperature",
    low: "30",
    high: "90 °C",
    ratio: ({ values }) => (known(values.temperature_celsius) ? (values.temperature_celsius - 30) / 60 : null),
    number: (gpu) => gpu.values.temperature_celsius ?? null,
    words: (gpu) => celsius(gpu.values.temperature_celsius),
  },
  sm: share("SM active", (gpu) => gpu.values.sm_active_ratio ?? null),
};

/**
 * @param {string} title
 * @param {(gpu: Dashboard.Gpu) => number | null} ratio
 * @returns {CellMetric}
 */
function share(title, ratio) {
  return {
    title,
    low: "0",
    high: "100%",
    ratio,
    number: (gpu) => {
      const value = ratio(gpu);
      return value === null ? null : value * 100;
    },
    words: (gpu) => percent(ratio(gpu)),
  };
}

/**
 * The share of a GPU's memory that is used.
 * @param {Dashboard.Gpu} gpu
 */
export function memoryRatio({ values }) {
  return quotient(values.memory_used_bytes, values.memory_total_bytes);
}

/**
 * @param {Dashboard.MaybeNumber} part
 * @param {Dashboard.MaybeNumber} whole
 */
function quotient(part, whole) {
  return known(part) && known(whole) && whole > 0 ? part / whole : null;
}

/** The colors of the theme in force: a fill for every step from least to most, and a color for letters on it. */
export class Heat {
  constructor() {
    /** @type {string[]} */
    this.fills = [];
    /** @type {string[]} */
    this.inks = [];
    this.text = "";
    this.read();
  }

  /** Read the colors again: the theme is another. */
  read() {
    const style = getComputedStyle(document.documentElement);
    const colors = heatRamp(style);
    this.text = style.getPropertyValue("--text-2").trim();
    this.fills = colors.map((color) => `rgb(${color.join(" ")})`);
    this.inks = colors.map((color) => (luminance(color) > 0.179 ? "#000" : "#fff"));
  }

  /**
   * The step of a share of the range; -1 when it is unknown.
   * @param {number | null} ratio
   */
  level(ratio) {
    return ratio === null ? -1 : Math.round(Math.min(1, Math.max(0, ratio)) * LEVELS) * (HEAT_STEPS / LEVELS);
  }
}

/**
 * How bright a color is, as contrast counts it.
 * @param {number[]} color
 */
function luminance(color) {
  const [red, green, blue] = color.map((value) => (value / 255 <= 0.04 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
