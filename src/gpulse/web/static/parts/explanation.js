// What a finding means, as `gpulse explain` says it.

import { html, nothing } from "../vendor/lit-html.js";

/** An entry of the manual. */
export function explanation(entry, id) {
  return html`<h2 id="explained-title" tabindex="-1">${entry.title}</h2>
    <p>${spelled(entry.means)}</p>
    <dl class="explained-facts">
      <dt>Recognised by</dt><dd>${spelled(entry.recognised)}</dd>
      ${listed("Thresholds", entry.limits)}
      <dt>Severity</dt><dd>${spelled(entry.severity)}${entry.informational ? " Told as a note: it was not seen on a recording of a real run yet." : nothing}</dd>
      ${listed("Needs", entry.needs)}
    </dl>
    ${entry.advice.length ? html`<h3>What to do</h3>${adviceList(entry.advice)}` : nothing}
    <p class="muted">In a terminal: <code>gpulse explain ${id}</code></p>`;
}

/** What to do, why, and how to see whether it was right. */
export function adviceList(items) {
  return html`<ol class="advice">${items.map((item) => html`<li><strong>${spelled(item.do)}</strong>
    ${item.why ? html`<br><span class="muted">Why:</span> ${spelled(item.why)}` : nothing}
    ${item.confirm ? html`<br><span class="muted">To see whether it was right:</span> ${spelled(item.confirm)}` : nothing}</li>`)}</ol>`;
}

function listed(words, items) {
  return items.length ? html`<dt>${words}</dt><dd><ul>${items.map((item) => html`<li>${item}</li>`)}</ul></dd>` : nothing;
}

/** Text in which `backticks` stand for code. */
function spelled(text) {
  return String(text ?? "").split("`").map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));
}
