// Glyphs of states and severities. Shapes carry the meaning without color: round or diamond is a state, an octagon or a
// triangle asks for a person.

import { html, render, svg } from "../vendor/lit-html.js";

const RING = svg`<circle cx="8" cy="8" r="5.500" fill="none" stroke="currentColor" stroke-width="2"/>`;
const CROSS = svg`<path d="M4 4l8 8M12 4l-8 8" fill="none" stroke="currentColor" stroke-width="2" stroke-linecap="round"/>`;
const TRIANGLE = "M8 2l6.500 12h-13z";
const INNER = "var(--surface)";

/** @type {Record<string, unknown>} */
const STATES = {
  busy: svg`<circle cx="8" cy="8" r="6" fill="currentColor"/>`,
  free: RING,
  harvested: svg`<path d="M8 2l6 6-6 6-6-6z" fill="none" stroke="currentColor" stroke-width="2" stroke-linejoin="round"/>`,
  idle: svg`${RING}<path d="M8 2.500a5.500 5.500 0 0 0 0 11z" fill="currentColor"/>`,
  faulty: svg`${RING}<path d="M4.200 11.800l7.600-7.600" stroke="currentColor" stroke-width="2"/>`,
  lost: CROSS,
  late: svg`${RING}<path d="M8 4.500v4l2.500 1.500" fill="none" stroke="currentColor" stroke-width="1.600"/>`,
  missing: svg`<circle cx="8" cy="8" r="5.500" fill="none" stroke="currentColor" stroke-width="2" stroke-dasharray="2 2.300"/>`,
  unknown: svg`<text x="8" y="12.500" text-anchor="middle" font-size="13" font-weight="600" fill="currentColor">?</text>`,
};

/** @type {Record<Dashboard.Severity, unknown>} */
const SEVERITIES = {
  critical: svg`<path d="M5 1.500h6l3.500 3.500v6l-3.500 3.500h-6l-3.500-3.500v-6z" fill="currentColor"/>
    <path d="M8 4.500v4.500" stroke=${INNER} stroke-width="2"/><circle cx="8" cy="11.300" r="1.200" fill=${INNER}/>`,
  high: svg`<path d=${TRIANGLE} fill="currentColor"/>`,
  medium: svg`<path d=${TRIANGLE} fill="none" stroke="currentColor" stroke-width="1.600" stroke-linejoin="round"/>
    <path d="M4.500 9h7l2.500 5h-12z" fill="currentColor"/>`,
  low: svg`<path d=${TRIANGLE} fill="none" stroke="currentColor" stroke-width="1.600" stroke-linejoin="round"/>`,
  info: svg`<path d=${TRIANGLE} fill="none" stroke="currentColor" stroke-width="1.600" stroke-dasharray="2 2"/>`,
};

/**
 * The glyph of a GPU's or node's state: busy, free, harvested, idle (held), faulty, lost, late, missing, unknown.
 * @param {string} state
 */
export function stateGlyph(state) {
  return html`<svg class="glyph" data-state=${state} viewBox="0 0 16 16" aria-hidden="true" focusable="false">
    ${STATES[state] ?? STATES.unknown}
  </svg>`;
}

/**
 * The glyph of a finding's severity; critical is a fault.
 * @param {Dashboard.Severity} severity
 */
export function severityGlyph(severity) {
  return html`<svg class="glyph" data-severity=${severity} viewBox="0 0 16 16" aria-hidden="true" focusable="false">
    ${SEVERITIES[severity] ?? SEVERITIES.info}
  </svg>`;
}

/** @type {Map<string, Element>} */
const made = new Map();

/**
 * A glyph as an element, for what is updated in place.
 * @param {"state" | "severity"} kind
 * @param {string} name
 */
export function glyphElement(kind, name) {
  const key = `${kind} ${name}`;
  let glyph = made.get(key);
  if (glyph === undefined) {
    const holder = document.createElement("div");
    render(kind === "state" ? stateGlyph(name) : severityGlyph(/** @type {Dashboard.Severity} */ (name)), holder);
    glyph = /** @type {Element} */ (holder.firstElementChild);
    made.set(key, glyph);
  }
  return /** @type {Element} */ (glyph.cloneNode(true));
}
