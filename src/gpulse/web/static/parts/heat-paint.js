// The colours, numbers and patterns of a map's cells.

import { gpuState, STATE_TITLES } from "../core/fleet.js";
import { celsius, known, percent, watts } from "../core/format.js";

const STEPS = 64;
const WORDS_FROM = 30;

/** What a map can show: a title, the share of the range from 0 to 1, the value in words, and short for the cell. */
export const HEAT_METRICS = {
  utilization: {
    title: "Utilization", low: "0 %", high: "100 %",
    ratio: (gpu) => gpu.values.gpu_utilization_ratio, words: (gpu) => percent(gpu.values.gpu_utilization_ratio),
  },
  memory: {
    title: "Memory", low: "0 %", high: "100 %", ratio: memoryRatio, words: (gpu) => percent(memoryRatio(gpu)),
  },
  power: {
    title: "Power", low: "0", high: "its limit",
    ratio: (gpu) => quotient(gpu.values.power_watts, gpu.values.power_limit_watts), words: (gpu) => watts(gpu.values.power_watts),
  },
  temperature: {
    title: "Temperature", low: "30 °C", high: "90 °C",
    ratio: (gpu) => (known(gpu.values.temperature_celsius) ? (gpu.values.temperature_celsius - 30) / 60 : null),
    words: (gpu) => celsius(gpu.values.temperature_celsius),
  },
  sm: {
    title: "SM active", low: "0 %", high: "100 %",
    ratio: (gpu) => gpu.values.sm_active_ratio, words: (gpu) => percent(gpu.values.sm_active_ratio),
  },
  state: { title: "State", ratio: () => null, words: (gpu) => STATE_TITLES[gpuState(gpu)] },
};

/** Paints cells in the colours of the theme in force. */
export class Painter {
  constructor(element) {
    const style = getComputedStyle(element);
    const read = (name) => style.getPropertyValue(name).trim();
    this.text = read("--text");
    this.muted = read("--muted");
    this.surface = read("--surface");
    this.line = read("--line");
    this.focus = read("--focus");
    this.font = read("--font");
    this.states = { free: read("--free"), harvested: read("--harvested"), busy: read("--fill"), idle: read("--held"), faulty: read("--lost"), unknown: this.muted, lost: read("--lost") };
    const stops = ["--heat-0", "--heat-1", "--heat-2"].map((name) => channels(read(name)));
    this.ramp = Array.from({ length: STEPS + 1 }, (_, at) => mixed(stops, at / STEPS));
    this.ink = this.ramp.map((colour) => (luminance(colour) > 0.3 ? "#161310" : "#ffffff"));
    this.ramp = this.ramp.map((colour) => `rgb(${colour.map(Math.round).join(" ")})`);
  }

  /** What a cell looks like, as one word; the same word, the same look. */
  look(gpu, metric, isShown, size) {
    const state = gpuState(gpu);
    const ratio = HEAT_METRICS[metric].ratio(gpu);
    const step = known(ratio) ? Math.round(Math.min(1, Math.max(0, ratio)) * STEPS) : -1;
    const words = size >= WORDS_FROM && metric !== "state" ? short(HEAT_METRICS[metric].words(gpu)) : "";
    return `${state} ${step} ${isShown ? 1 : 0} ${gpu.findings.length ? 1 : 0} ${gpu.node.state} ${words}`;
  }

  /** Paint a cell anew. */
  cell(context, { x, y }, size, gpu, metric, isShown) {
    const state = gpuState(gpu);
    const inner = size - (size >= 8 ? 2 : 1);
    context.clearRect(x, y, size, size);
    context.globalAlpha = isShown ? 1 : 0.16;
    if (state === "lost") {
      this.lost(context, { x, y }, size);
    } else if (metric === "state") {
      this.state(context, x, y, inner, state);
    } else {
      this._value(context, x, y, inner, size, gpu, metric, state);
    }
    if (gpu.findings.length && inner >= 9) {
      this.corner(context, x, y, inner);
    }
    context.globalAlpha = 1;
  }

  _value(context, x, y, inner, size, gpu, metric, state) {
    const ratio = HEAT_METRICS[metric].ratio(gpu);
    if (!known(ratio)) {
      this.hollow(context, x, y, inner, this.muted);
      this.dot(context, x, y, inner, this.muted);
      return;
    }
    const step = Math.round(Math.min(1, Math.max(0, ratio)) * STEPS);
    context.fillStyle = this.ramp[step];
    context.fillRect(x, y, inner, inner);
    context.globalAlpha *= gpu.node.state === "late" ? 0.5 : 1;
    if (size < WORDS_FROM || state === "idle") {
      this.sign(context, x, y, inner, state, this.ink[step]);
    } else {
      const side = inner * 0.3;
      this.sign(context, x + inner * 0.04, y + inner - side * 1.04, side, state, this.ink[step]);
    }
    if (size >= WORDS_FROM) {
      const words = short(HEAT_METRICS[metric].words(gpu));
      context.font = `600 ${Math.min(64, Math.round(size * 0.34))}px ${this.font}`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      if (state === "idle") {
        const width = context.measureText(words).width + 6;
        context.fillStyle = this.ramp[step];
        context.fillRect(x + (inner - width) / 2, y + inner * 0.3, width, inner * 0.42);
      }
      context.fillStyle = this.ink[step];
      context.fillText(words, x + inner / 2, y + inner / 2 + 1);
    }
  }

  state(context, x, y, inner, state) {
    const colour = this.states[state];
    if (state === "busy") {
      context.fillStyle = colour;
      context.fillRect(x, y, inner, inner);
    } else {
      this.hollow(context, x, y, inner, colour);
    }
    if (state === "unknown") {
      this.dot(context, x, y, inner, colour);
    } else {
      this.sign(context, x, y, inner, state, colour);
    }
  }

  /** The shape that tells what a number does not: nobody holds it, a harvest has it, somebody holds it idle, or it has a fault. */
  sign(context, x, y, inner, state, ink) {
    if (state === "free") {
      this.ring(context, x, y, inner, ink);
    } else if (state === "harvested") {
      this.diamond(context, x, y, inner, ink);
    } else if (state === "idle") {
      this.stripes(context, x, y, inner, this.states.idle);
    } else if (state === "faulty") {
      this.exclamation(context, x, y, inner, ink);
    }
  }

  /** What is lost, or was never there. */
  lost(context, { x, y }, size) {
    const inner = size - (size >= 8 ? 2 : 1);
    this.hollow(context, x, y, inner, this.states.lost);
    this.cross(context, x, y, inner, this.states.lost);
  }

  hollow(context, x, y, inner, colour) {
    context.strokeStyle = colour;
    context.lineWidth = stroke(inner);
    const half = context.lineWidth / 2;
    context.strokeRect(x + half, y + half, inner - 2 * half, inner - 2 * half);
  }

  cross(context, x, y, inner, colour) {
    context.strokeStyle = colour;
    context.lineWidth = stroke(inner);
    context.beginPath();
    context.moveTo(x + inner * 0.25, y + inner * 0.25);
    context.lineTo(x + inner * 0.75, y + inner * 0.75);
    context.moveTo(x + inner * 0.75, y + inner * 0.25);
    context.lineTo(x + inner * 0.25, y + inner * 0.75);
    context.stroke();
  }

  stripes(context, x, y, inner, colour) {
    const step = Math.max(3, inner / 4);
    context.save();
    context.beginPath();
    context.rect(x, y, inner, inner);
    context.clip();
    context.strokeStyle = colour;
    context.lineWidth = stroke(inner);
    context.beginPath();
    for (let at = step / 2; at < inner * 2; at += step) {
      context.moveTo(x + at, y);
      context.lineTo(x + at - inner, y + inner);
    }
    context.stroke();
    context.restore();
  }

  ring(context, x, y, inner, colour) {
    context.strokeStyle = colour;
    context.lineWidth = stroke(inner);
    context.beginPath();
    context.arc(x + inner / 2, y + inner / 2, Math.max(1, inner * 0.26), 0, Math.PI * 2);
    context.stroke();
  }

  diamond(context, x, y, inner, colour) {
    const [middle, reach] = [inner / 2, Math.max(1, inner * 0.3)];
    context.strokeStyle = colour;
    context.lineWidth = stroke(inner);
    context.beginPath();
    context.moveTo(x + middle, y + middle - reach);
    context.lineTo(x + middle + reach, y + middle);
    context.lineTo(x + middle, y + middle + reach);
    context.lineTo(x + middle - reach, y + middle);
    context.closePath();
    context.stroke();
  }

  exclamation(context, x, y, inner, colour) {
    const width = Math.max(1, inner * 0.16);
    context.fillStyle = colour;
    context.fillRect(x + (inner - width) / 2, y + inner * 0.18, width, inner * 0.4);
    context.fillRect(x + (inner - width) / 2, y + inner * 0.68, width, width);
  }

  dot(context, x, y, inner, colour) {
    context.fillStyle = colour;
    context.beginPath();
    context.arc(x + inner / 2, y + inner / 2, Math.min(3, Math.max(0.8, inner * 0.1)), 0, Math.PI * 2);
    context.fill();
  }

  corner(context, x, y, inner) {
    const side = Math.max(4, inner * 0.28);
    context.fillStyle = this.states.lost;
    context.beginPath();
    context.moveTo(x + inner, y);
    context.lineTo(x + inner - side, y);
    context.lineTo(x + inner, y + side);
    context.fill();
  }
}

/** How thick lines are in a cell of some size. */
function stroke(inner) {
  return inner >= 20 ? Math.max(2, Math.round(inner / 45)) : 1;
}

function memoryRatio(gpu) {
  return quotient(gpu.values.memory_used_bytes, gpu.values.memory_total_bytes);
}

function quotient(part, whole) {
  return known(part) && whole > 0 ? part / whole : null;
}

function short(words) {
  return words.replace(/ (%|W|°C)$/, "");
}

/** Red, green and blue of any colour that CSS knows. */
function channels(colour) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
}

function mixed(stops, share) {
  const at = share * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return stops[low].map((value, channel) => value + (stops[low + 1][channel] - value) * (at - low));
}

function luminance(colour) {
  const [red, green, blue] = colour.map((value) => {
    const share = value / 255;
    return share <= 0.04 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
