// The card of the worst finding next to a chart: cause, line of code, and what to do.

import { shownSeverity } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { firstLine } from "./code-lines.js";
import { meaningHref, rank } from "./findings.js";
import { titleOf } from "./findings-manual.js";
import { severityGlyph } from "./glyphs.js";

/**
 * The gravest finding, of several the one that costs most; null without any.
 * @param {Api.FindingSpanRow[]} spans
 */
export function worstSpan(spans) {
  const [worst] = [...spans].sort(
    (a, b) =>
      rank(shownSeverity(a)) - rank(shownSeverity(b)) || rank(a.severity) - rank(b.severity) || (b.lost_ratio ?? 0) - (a.lost_ratio ?? 0),
  );
  return worst ?? null;
}

/**
 * The gravest finding of each GPU that asks for a person.
 * @param {Api.FindingSpanRow[]} spans
 */
export function markedGpus(spans) {
  /** @type {Map<string, Dashboard.Severity>} */
  const worst = new Map();
  for (const span of [...spans].sort((a, b) => rank(shownSeverity(b)) - rank(shownSeverity(a)))) {
    const severity = shownSeverity(span);
    if (rank(severity) <= rank("medium")) worst.set(`${span.node}:${span.label}`, severity);
  }
  return worst;
}

/**
 * The card; `others` are all findings, of which the same one may hold on several GPUs.
 * @param {Api.FindingSpanRow} span
 * @param {Api.FindingSpanRow[]} others
 * @param {Dashboard.Manual} manual
 * @param {number} now
 */
export function findingAside(span, others, manual, now) {
  const severity = shownSeverity(span);
  const same = others.filter((other) => other.id === span.id && other.cause === span.cause);
  const places = new Set(same.map((other) => `${other.node} · ${other.label}`));
  const rest = new Set(others.map((other) => `${other.id} ${other.cause}`)).size - 1;
  const place = places.size > 1 ? `${places.size} GPUs` : [...places][0];
  const since = `${format.clock(span.from).slice(0, 5)}, ${format.duration((span.to ?? now) - span.from)}`;
  return html`<section class="card finding" data-severity=${severity}>
    <h2>${severityGlyph(severity)} ${titleOf(manual, span)}</h2>
    <p>${format.text(span.summary)}</p>
    <dl class="aside-facts">
      <div><dt>On</dt><dd><bdi>${format.text(place)}</bdi> <span class="muted">since ${since}</span></dd></div>
      ${span.where?.length ? html`<div><dt>Where</dt><dd>${firstLine(span)}</dd></div>` : nothing}
      ${span.advice?.length ? html`<div><dt>Do</dt><dd><strong>${format.text(span.advice[0].do)}</strong></dd></div>` : nothing}
    </dl>
    <p class="buttons"><a class="button primary" href=${href("findings", { node: span.node })}>Evidence</a>
      <a class="button" href=${meaningHref(span.id)}>What it means</a></p>
    ${rest > 0 ? html`<p class="muted">And ${rest} other ${rest === 1 ? "finding" : "findings"}, in the timeline.</p>` : nothing}
  </section>`;
}
