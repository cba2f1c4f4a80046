// What the colours and patterns of the map mean.

import { STATES, STATE_TITLES } from "../core/fleet.js";
import { h } from "./dom.js";
import { HEAT_METRICS } from "./heat-paint.js";

const SWATCH = 16;

/** The legend beside the map. */
export class Legend {
  constructor() {
    this.element = h("div", { class: "legend", role: "group", "aria-label": "Legend" });
  }

  /** Say what a metric looks like in the colours of a painter. */
  show(metric, painter) {
    const { low, high } = HEAT_METRICS[metric];
    const scale = low === undefined ? [] : [h("span", {}, low, ramp(painter), high)];
    const states = metric === "state" ? STATES : ["free", "harvested", "idle", "faulty", "unknown", "lost"];
    this.element.replaceChildren(
      ...scale,
      ...states.map((state) => h("span", {}, swatch(painter, metric, state), STATE_TITLES[state])),
      h("span", {}, cornered(painter), "has a finding"),
    );
  }
}

function ramp(painter) {
  const canvas = h("canvas", { width: "128", height: "1", "aria-hidden": "true", class: "legend-ramp" });
  const context = canvas.getContext("2d");
  const steps = painter.ramp.length;
  painter.ramp.forEach((colour, at) => {
    context.fillStyle = colour;
    context.fillRect((at * 128) / steps, 0, 128 / steps + 1, 1);
  });
  return canvas;
}

function swatch(painter, metric, state) {
  return drawn((context, inner) => {
    if (["free", "harvested", "idle", "faulty"].includes(state) && metric !== "state") {
      context.fillStyle = painter.ramp[0];
      context.fillRect(0, 0, inner, inner);
      painter.sign(context, 0, 0, inner, state, painter.ink[0]);
    } else {
      painter.state(context, 0, 0, inner, state);
      if (state === "lost") {
        painter.cross(context, 0, 0, inner, painter.states.lost);
      }
    }
  });
}

function cornered(painter) {
  return drawn((context, inner) => {
    painter.hollow(context, 0, 0, inner, painter.line);
    painter.corner(context, 0, 0, inner);
  });
}

function drawn(draw) {
  const scale = devicePixelRatio || 1;
  const canvas = h("canvas", { width: SWATCH * scale, height: SWATCH * scale, "aria-hidden": "true", class: "legend-swatch" });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  draw(context, SWATCH - 1);
  return canvas;
}
