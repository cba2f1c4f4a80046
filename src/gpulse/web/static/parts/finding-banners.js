// The findings of a GPU or node as a banner: what is wrong, where in the code, and what to do.

import { byName, severityWord, shownSeverity } from "../core/fleet.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { firstLine } from "./code-lines.js";
import { meaningHref, rank } from "./findings.js";
import { confidenceWord, titleOf } from "./findings-manual.js";
import { severityGlyph } from "./glyphs.js";

const MAX_BANNERS = 3;

/**
 * Findings that hold now, worst first, the same finding on several GPUs once; nothing without any.
 * @param {Live.Finding[]} findings
 * @param {Dashboard.HistoryPage} page
 * @param {string} node
 * @param {{ withPlace?: boolean }} [options]
 */
export function findingBanners(findings, page, node, { withPlace = false } = {}) {
  if (!findings.length) return nothing;
  const groups = group(findings);
  const more = groups.length - MAX_BANNERS;
  return html`<section class="now finding-banners" aria-label="Current findings">
    ${groups.slice(0, MAX_BANNERS).map((members) => banner(members, page, node, withPlace))}
    ${more > 0 ? html`<p class="muted">and <a href="#/findings">${more} more ${more === 1 ? "finding" : "findings"}</a></p>` : nothing}
  </section>`;
}

/**
 * @param {Live.Finding[]} findings
 * @returns {Live.Finding[][]}
 */
function group(findings) {
  /** @type {Map<string, Live.Finding[]>} */
  const groups = new Map();
  const sorted = [...findings].sort(
    (a, b) =>
      rank(shownSeverity(a)) - rank(shownSeverity(b)) ||
      rank(a.severity) - rank(b.severity) ||
      (b.lost_ratio ?? -1) - (a.lost_ratio ?? -1) ||
      byName(a.label ?? "", b.label ?? ""),
  );
  for (const finding of sorted) {
    const key = `${finding.severity} ${finding.id}${finding.id === "gpu_fault" ? ` ${finding.cause ?? finding.summary}` : ""}`;
    groups.set(key, [...(groups.get(key) ?? []), finding]);
  }
  return [...groups.values()];
}

/**
 * One finding, with the words of the GPU that it costs most.
 * @param {Live.Finding[]} members
 * @param {Dashboard.HistoryPage} page
 * @param {string} node
 * @param {boolean} withPlace
 */
function banner(members, page, node, withPlace) {
  const [finding] = members;
  const stored = members.map((one) => page.stored(node, one)).find((one) => one?.where?.length) ?? page.stored(node, finding);
  const labels = members.map((one) => one.label).filter((label) => label !== null);
  const starts = members.map((one) => one.start).filter(format.known);
  const since = starts.length ? Math.min(...starts) : null;
  const title = titleOf(page.manual, finding);
  const severity = shownSeverity(finding);
  return html`<article class="finding-banner" data-severity=${severity} aria-label=${title}>
    <div>
      <p class="banner-title">${severityGlyph(severity)}<span class="visually-hidden">${severityWord(severity)}</span>
        <strong>${title}</strong>
        ${withPlace && labels.length ? html`<span class="muted">${labels.length === 1 ? "GPU" : "GPUs"} ${labels.sort(byName).map((label, at) => html`${at ? ", " : ""}<a href=${href("gpu", node, label)}>${format.text(label)}</a>`)}</span>` : nothing}
        ${stored && format.known(stored.confidence) ? html`<span class="badge muted">${confidenceWord(stored.confidence)}</span>` : nothing}</p>
      <p>${sentence(format.text(finding.summary))}${since === null ? nothing : html` <span class="muted">Since <strong>${format.clock(since)}</strong>, ${format.duration(Math.max(0, page.app.fleet.headTime() - since))}.</span>`}</p>
    </div>
    ${stored?.where?.length ? html`<p class="banner-where"><span class="muted">where</span>${firstLine(stored)}</p>` : nothing}
    <span class="buttons"><a class="button primary" href=${meaningHref(finding.id)} aria-label=${`What to do: ${title}`}>What to do</a> <a class="button" href=${href("findings", { open: finding.id === "gpu_fault" && finding.cause ? `${finding.id}/${finding.cause}` : finding.id, node, do: "acknowledge" })} aria-label=${`Acknowledge: ${title}`}>Acknowledge</a></span>
  </article>`;
}

/** @param {string} text */
const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
