// The chosen finding: what it costs, whom it affects, its evidence, what to do, and the forms to acknowledge and silence it.

import { formOf } from "../core/dom.js";
import * as format from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing, svg } from "../vendor/lit-html.js";
import { codeLines, lineText } from "./code-lines.js";
import { groupGlyph, lostWords, meter, placeWords, shortSpan, shortTime, someNames } from "./finding-rows.js";
import { meaningHref } from "./findings.js";
import { confidenceWord, describeEvidence, findingTitle, spelled, written } from "./findings-manual.js";
import { errorNote } from "./tables.js";

const MAX_MEMBERS = 40;
const MAX_BEFORE = 8;
const MAX_CHOICES = 100;
const HOUR = 3600;
const DAY = 24 * HOUR;
const TREND = { width: 360, height: 20 };
const ENDINGS = { recovered: "resolved", processes_ended: "ended with its processes", not_reporting: "the node stopped reporting" };

/** How far back the trends reach. */
export const TREND_SECONDS = 6 * HOUR;

/**
 * The detail of a row.
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
export function findingDetail(row, view) {
  return html`<article class="card finding-detail" aria-labelledby="finding-title" data-severity=${row.category === "fault" ? "critical" : row.severity}>
    <a class="button quiet finding-back" href=${view.backHref}>← All findings</a>
    <header class="finding-detail-head">
      <h2 id="finding-title" tabindex="-1">${groupGlyph(row)} ${format.text(row.title)}</h2>
      <div class="finding-actions">${actions(row, view)}</div>
    </header>
    <p class="finding-sentence">${format.text(row.summary)}${row.members.length > 1 ? html` <span class="muted">(${placeWords([row.members[0]])}, the worst)</span>` : nothing}</p>
    ${acknowledgedNote(row, view)} ${silencedNote(row, view)}
    ${view.form?.kind === "silence" ? silenceForm(row, view) : view.form ? acknowledgeForm(row, view) : nothing}
    ${figures(row, view)} ${memberTable(row, view)}
    <div class="finding-columns">
      <div>${evidence(row, view)} ${ruledOut(row, view)}</div>
      <div>${todo(row)} ${where(row)}</div>
    </div>
    ${seenBefore(row, view)}
  </article>`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function actions(row, view) {
  const isPast = row.to !== null;
  return html`${isPast || row.is_acknowledged ? nothing : html`<button type="button" class="button" data-form="acknowledge" aria-expanded=${String(view.form?.kind === "acknowledge")} @click=${() => view.open("acknowledge")}>Acknowledge</button>`}
    ${isPast || view.state === "silenced" ? nothing : html`<button type="button" class="button" data-form="silence" aria-expanded=${String(view.form?.kind === "silence")} @click=${() => view.open("silence")}>Silence…</button>`}
    <button type="button" class="button" @click=${() => view.copy()}>Copy as text</button>
    ${view.manual.findings[row.id] ? html`<a class="button quiet" href=${meaningHref(row.id)}>What it means</a>` : nothing}`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function acknowledgedNote(row, view) {
  const known = row.members.map((member) => member.acknowledged).find((one) => one !== null);
  if (!known) return nothing;
  const part = row.is_acknowledged ? "" : ` (${row.members.filter((member) => member.acknowledged).length} of ${row.members.length})`;
  return html`<p class="finding-note">Acknowledged by <strong>${format.text(known.by)}</strong> at ${shortTime(known.time, view.now)}${part}${known.note ? html`: ${format.text(known.note)}` : nothing}</p>`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function silencedNote(row, view) {
  const ids = new Set(row.members.map((member) => member.silence));
  return view.silences
    .filter((silence) => ids.has(silence.id))
    .map(
      (
        silence,
      ) => html`<p class="finding-note">Silenced by <strong>${format.text(silence.by)}</strong> until ${shortTime(silence.until, view.now)}: ${format.text(silence.reason)}
        <button type="button" class="button" @click=${() => view.endSilence(silence.id)}>End silence</button></p>`,
    );
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function acknowledgeForm(row, view) {
  return html`<form class="finding-form" aria-label="Acknowledge" @keydown=${closing(view)} @submit=${(
    /** @type {SubmitEvent} */ event,
  ) => {
    event.preventDefault();
    view.acknowledge(formOf(event));
  }}>
    <strong>Acknowledge</strong> <span>${placeWords(row.members)}</span>
    ${nameField(view)}
    <label class="field grow">note <input name="note" maxlength="200" autocomplete="off" placeholder="what is being done about it"></label>
    ${formButtons("Acknowledge", view)}
  </form>`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function silenceForm(row, view) {
  return html`<form class="finding-form" aria-label="Silence" @keydown=${closing(view)} @submit=${(/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    view.silence(formOf(event));
  }}>
    <strong>Silence</strong>
    <label class="field"><span class="visually-hidden">What to silence</span><select name="what">${silenceChoices(row).map(([name, words]) => html`<option value=${name}>${words}</option>`)}</select></label>
    <label class="field">until <select name="until">${silenceEnds(view.now).map(([time, words]) => html`<option value=${time}>${words}</option>`)}</select></label>
    <label class="field grow">because <input name="reason" required maxlength="200" autocomplete="off" placeholder="reason for the silence"></label>
    ${nameField(view)} ${formButtons("Silence", view)}
  </form>`;
}

/**
 * Close a form with Escape, also from within its fields.
 * @param {Dashboard.FindingDetailView} view
 */
function closing(view) {
  return (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    view.cancel();
  };
}

/** @param {Dashboard.FindingDetailView} view */
function nameField(view) {
  return html`<label class="field">by <input class="finding-by" name="by" required maxlength="200" autocomplete="nickname" placeholder="your name" .value=${view.name}></label>`;
}

/**
 * @param {string} words
 * @param {Dashboard.FindingDetailView} view
 */
function formButtons(words, view) {
  return html`<span class="buttons"><button class="button primary" ?disabled=${view.form?.isBusy}>${words}</button>
    <button type="button" class="button" @click=${() => view.cancel()}>Cancel</button></span>
    ${errorNote(view.form?.error)}`;
}

/**
 * What a silence can be about: its name, and in words.
 * @param {Dashboard.FindingRow} row
 * @returns {Array<[string, string]>}
 */
function silenceChoices(row) {
  const gpus = silencedGpus(row);
  const nodes = [...new Set(row.members.map((member) => member.node))];
  /** @type {Array<[string, string, boolean]>} */
  const choices = [
    ["gpus", gpus.length === 1 ? "this GPU" : `these ${gpus.length} GPUs`, gpus.length > 0 && gpus.length <= MAX_CHOICES],
    [
      "nodes",
      nodes.length === 1 ? "this finding on this node" : `this finding on these ${nodes.length} nodes`,
      nodes.length <= MAX_CHOICES,
    ],
    ["users", `this finding for ${someNames(row.users, 2)}`, row.users.length > 0 && row.users.length <= MAX_CHOICES],
    ["jobs", `this finding in ${someNames(row.jobs, 2)}`, row.jobs.length > 0 && row.jobs.length <= MAX_CHOICES],
    ["everywhere", "this finding everywhere", true],
    ["whole", nodes.length === 1 ? "everything on this node" : `everything on these ${nodes.length} nodes`, nodes.length <= MAX_CHOICES],
  ];
  return choices.filter(([, , isPossible]) => isPossible).map(([name, words]) => [name, words]);
}

/** @param {Dashboard.FindingRow} row */
function silencedGpus(row) {
  return row.members.filter((member) => member.label !== null).map((member) => `${member.node}:${member.label}`);
}

/**
 * The fields of a silence's request.
 * @param {Dashboard.FindingRow} row
 * @param {string} what
 */
export function silenceFields(row, what) {
  const nodes = [...new Set(row.members.map((member) => member.node))];
  const findings = [row.group];
  switch (what) {
    case "gpus":
      return { findings, gpus: silencedGpus(row) };
    case "nodes":
      return { findings, nodes };
    case "users":
      return { findings, users: row.users };
    case "jobs":
      return { findings, jobs: row.jobs };
    case "whole":
      return { nodes };
    default:
      return { findings };
  }
}

/**
 * When a silence may end: epoch seconds, and in words.
 * @param {number} now
 * @returns {Array<[number, string]>}
 */
export function silenceEnds(now) {
  /** @param {number} days @param {number} hour */
  const at = (days, hour) => {
    const moment = new Date(now * 1000);
    moment.setDate(moment.getDate() + days);
    moment.setHours(hour, 0, 0, 0);
    return moment.getTime() / 1000;
  };
  /** @type {Array<[number, string]>} */
  const ends = [
    [now + HOUR, "in 1 hour"],
    [now + 4 * HOUR, "in 4 hours"],
    [at(0, 18), "today 18:00"],
    [at(1, 9), "tomorrow 09:00"],
    [now + 3 * DAY, "in 3 days"],
    [now + 7 * DAY, "in 7 days"],
    [now + 30 * DAY - 60, "in 30 days"],
  ];
  return ends.filter(([time]) => time > now + 600).map(([time, words]) => [Math.round(time), words]);
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function figures(row, view) {
  const share = lostWords(row.members);
  const gpus = new Set(row.members.map((member) => member.label !== null && `${member.node}:${member.label}`)).size;
  const length = format.duration((row.to ?? view.now) - row.from);
  return html`<dl class="finding-figures">
    <div><dt>Lost time</dt><dd>${share ? html`<strong>${share}</strong> of ${gpus === 1 ? "1 GPU" : `${gpus} GPUs`}` : html`<strong>–</strong>`}</dd></div>
    <div><dt>${row.to === null ? "Cost so far" : "Cost"}</dt><dd>${row.gpu_hours === null ? html`<strong>–</strong>` : html`<strong>${row.gpu_hours.toFixed(1)}</strong> GPU-hours`}</dd></div>
    <div><dt>Confidence</dt><dd><strong>${confidenceWord(row.confidence)}</strong></dd></div>
    <div><dt>${row.to === null ? "Since" : "From – to"}</dt><dd><strong>${row.to === null ? shortTime(row.from, view.now) : shortSpan(row.from, row.to, view.now)}</strong> ${length}</dd></div>
    <div><dt>Users</dt><dd>${row.users.length ? userLinks(row.users) : html`<strong>–</strong>`}</dd></div>
  </dl>`;
}

/** @param {string[]} users */
function userLinks(users) {
  const shown = users.slice(0, 4);
  return html`<strong>${shown.map((user, place) => html`${place ? ", " : ""}<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>`)}</strong>${users.length > shown.length ? ` and ${users.length - shown.length} more` : ""}`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function memberTable(row, view) {
  const shown = row.members.slice(0, MAX_MEMBERS);
  const hasGpus = shown.some((member) => member.label !== null);
  return html`<div class="table-scroll"><table class="table stack finding-members">
    <thead><tr><th scope="col">${hasGpus ? "GPU" : "Node"}</th><th scope="col">User</th><th scope="col">Job</th><th scope="col" class="num">Lost time</th>
      ${hasGpus ? html`<th scope="col" class="finding-trend-cell">Utilization, 6 h</th>` : nothing}<th scope="col" class="num">${row.to === null ? "Since" : "From – to"}</th><th scope="col" class="num">Duration</th></tr></thead>
    <tbody>${shown.map(
      (member) => html`<tr><th scope="row">${memberLink(row, member)}</th>
        <td data-label="User"><span>${member.users.length ? userNames(member.users) : "–"}</span></td>
        <td data-label="Job"><span>${member.jobs.length ? member.jobs.map((job, place) => html`${place ? ", " : ""}<a href=${href("job", job)}><bdi>${format.text(job)}</bdi></a>`) : "–"}</span></td>
        <td data-label="Lost time" class="num"><strong>${member.lost_ratio === null ? "–" : format.percent(member.lost_ratio)}</strong></td>
        ${hasGpus ? html`<td data-label="Utilization, 6 h" class="finding-trend-cell">${trend(member, view)}</td>` : nothing}
        <td data-label=${row.to === null ? "Since" : "From – to"} class="num">${member.to === null ? shortTime(member.from, view.now) : shortSpan(member.from, member.to, view.now)}</td>
        <td data-label="Duration" class="num">${format.duration((member.to ?? view.now) - member.from)}</td></tr>`,
    )}</tbody></table>
    ${row.members.length > shown.length ? html`<p class="muted">and ${row.members.length - shown.length} more</p>` : nothing}</div>`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Api.GroupedFinding} member
 */
function memberLink(row, member) {
  if (row.id === "node_missing") return html`<bdi>${format.text(member.node)}</bdi>`;
  const address = member.label === null ? href("node", member.node) : href("gpu", member.node, member.label);
  return html`<a href=${address}>${placeWords([member])}</a>`;
}

/** @param {string[]} users */
function userNames(users) {
  return users.map((user, place) => html`${place ? ", " : ""}<a href=${href("user", user)}><bdi>${format.text(user)}</bdi></a>`);
}

/**
 * Utilization of the last hours, with a bar over the time of the finding.
 * @param {Api.GroupedFinding} member
 * @param {Dashboard.FindingDetailView} view
 */
function trend(member, view) {
  const { history } = view;
  const series = history?.series.find((one) => one.node === member.node && one.gpu === member.label);
  if (!history || !series) return html`<span class="muted">${history ? "no samples" : "…"}</span>`;
  const { width, height } = TREND;
  const whole = history.to - history.from || 1;
  /** @param {number} time */
  const x = (time) => ((Math.min(Math.max(time, history.from), history.to) - history.from) / whole) * width;
  const [from, to] = [x(member.from), x(member.to ?? history.to)];
  return html`<svg class="finding-trend" viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" role="img" aria-label=${trendWords(series.values)}>
    ${runs(history, series.values).map((run) => trendRun(run, x, height))}
    ${to > from ? svg`<rect class="finding-trend-span" x=${from.toFixed(1)} width=${Math.max(1, to - from).toFixed(1)} height="2"/>` : nothing}</svg>`;
}

/** @param {Array<number | null>} values */
function trendWords(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? `mean utilization ${format.percent(known.reduce((sum, value) => sum + value, 0) / known.length)}` : "no samples";
}

/**
 * Times and values without gaps between them.
 * @param {Dashboard.History} history
 * @param {Array<number | null>} values
 */
function runs(history, values) {
  /** @type {Array<Array<[number, number]>>} */
  const found = [[]];
  values.forEach((value, place) => {
    if (value === null) found.push([]);
    else found[found.length - 1].push([history.times[place], value]);
  });
  return found.filter((run) => run.length);
}

/**
 * @param {Array<[number, number]>} run
 * @param {(time: number) => number} x
 * @param {number} height
 */
function trendRun(run, x, height) {
  const points = run.map(
    ([time, value]) => `${x(time).toFixed(1)},${(height - 1 - Math.max(0, Math.min(1, value)) * (height - 5)).toFixed(1)}`,
  );
  const [first, last] = [x(run[0][0]).toFixed(1), x(run[run.length - 1][0]).toFixed(1)];
  return svg`<path class="finding-trend-area" d=${`M${first},${height - 1}L${points.join("L")}L${last},${height - 1}z`}/>
    <path class="finding-trend-line" d=${`M${points.join("L")}`}/>`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function evidence(row, view) {
  const rows = [...row.evidence, ...row.counter_evidence];
  return html`<h3>Evidence <span class="muted">${row.members.length > 1 || row.worst.key !== row.members[0].key ? `${placeWords([row.worst])}, the worst` : nothing}</span></h3>
    ${
      rows.length
        ? html`<table class="table finding-evidence"><thead><tr><th scope="col">Measured</th><th scope="col" class="num">Value</th><th class="finding-lost" aria-hidden="true"></th><th scope="col" class="num">Counts</th></tr></thead>
      <tbody>${rows.map((item) => measure(item, view.manual))}</tbody></table>`
        : html`<p class="muted">No measurements: the driver or the system reported this.</p>`
    }`;
}

/**
 * @param {Api.EvidencePayload} item
 * @param {Dashboard.Manual} manual
 */
function measure(item, manual) {
  const said = describeEvidence(manual, item);
  const unit = manual.signals[item.signal]?.unit ?? "number";
  return html`<tr><th scope="row" title=${`${item.signal}, ${item.statistic}`}>${said.words}</th><td class="num"><strong>${said.value}</strong></td>
    <td class="finding-lost" aria-hidden="true">${bar(item, unit, said.against)}</td><td class="num muted">${said.against ? counts(item, unit) : "–"}</td></tr>`;
}

/**
 * The limit from which, or below which, a value counts.
 * @param {Api.EvidencePayload} item
 * @param {string} unit
 */
function counts(item, unit) {
  const words = { ">=": "at least", ">": "above", "<": "below", "<=": "at most", "==": "exactly" }[item.comparison] ?? item.comparison;
  return `${words} ${written(item.threshold, unit)}`;
}

/**
 * @param {Api.EvidencePayload} item
 * @param {string} unit
 * @param {string} against
 */
function bar(item, unit, against) {
  const { value, threshold } = item;
  if (value === null || unit === "time" || unit === "bits" || item.comparison === "has bit") return nothing;
  const limit = against ? threshold : null;
  if (limit === null && unit !== "share") return nothing;
  return meter(value, unit === "share" ? 1 : 1.2 * Math.max(value, limit ?? 0), limit);
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function ruledOut(row, view) {
  if (!row.ruled_out.length) return nothing;
  return html`<h3>Ruled out</h3><table class="table finding-evidence finding-ruled-out"><tbody>${row.ruled_out.map((item) => {
    const [, names, reason] = String(item).match(/^([a-z0-9_, ]+): (.*)$/s) ?? [];
    const words = names?.split(", ").map((id) => findingTitle(view.manual, id));
    return html`<tr><th scope="row">${words ? words.join("; ") : item}</th><td class="muted">${reason ?? ""}</td></tr>`;
  })}</tbody></table>`;
}

/** @param {Dashboard.FindingRow} row */
function todo(row) {
  if (!row.advice.length) return nothing;
  return html`<h3>What to do</h3><ol class="finding-todo">${row.advice.map((item) => html`<li>${spelled(item.do)}<span class="muted">${spelled(item.why)}</span>${item.confirm ? html`<span class="muted">To check: ${spelled(item.confirm)}</span>` : nothing}</li>`)}</ol>`;
}

/** @param {Dashboard.FindingRow} row */
function where(row) {
  if (!row.where?.length && !row.where_note) return nothing;
  return html`<h3>Where</h3>${codeLines(row)}`;
}

/**
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.FindingDetailView} view
 */
function seenBefore(row, view) {
  const before = view.before?.filter((group) => group.key !== row.key && group.group === row.group);
  if (!before) return html`<section class="finding-before"><h3>Seen before <span class="muted">…</span></h3></section>`;
  const times =
    before.length === 1
      ? "once in the last 30 days"
      : before.length
        ? `${before.length} times in the last 30 days`
        : "not in the last 30 days";
  return html`<section class="finding-before"><h3>Seen before <span class="muted">${times}</span></h3>
    ${
      before.length
        ? html`<div class="table-scroll"><table class="table"><tbody>${before.slice(0, MAX_BEFORE).map(
            (
              group,
            ) => html`<tr><th scope="row"><a href=${view.rowHref(group.key, "past")}>${shortSpan(group.from, group.to, view.now)}</a></th>
              <td>${placeWords(group.members)}</td><td>${[someNames(group.users), someNames(group.jobs)].filter(Boolean).join(" ") || "–"}</td>
              <td class="num">${group.gpu_hours === null ? "–" : `${group.gpu_hours.toFixed(1)} GPU-hours`}</td><td class="muted">${ending(group)}</td></tr>`,
          )}</tbody></table></div>`
        : nothing
    }</section>`;
}

/** @param {Api.FindingGroupRow} group */
function ending(group) {
  const known = group.members.map((member) => member.acknowledged).find((one) => one !== null);
  const how = group.members[0].ending;
  return [known ? `acknowledged by ${format.text(known.by)}` : "", how ? ENDINGS[how] : ""].filter(Boolean).join(", ");
}

/**
 * A row as plain text, for a message to a colleague.
 * @param {Dashboard.FindingRow} row
 * @param {Dashboard.Manual} manual
 * @param {number} now
 */
export function rowText(row, manual, now) {
  const lines = [`${row.category === "fault" ? "FAULT" : row.severity.toUpperCase()} ${row.title}`, row.summary, ""];
  lines.push(
    `Where: ${row.members.map((member) => (member.label === null ? member.node : `${member.node} GPU ${member.label}`)).join(", ")}`,
  );
  if (row.users.length) lines.push(`Users and jobs: ${[...row.users, ...row.jobs].join(", ")}`);
  const code = lineText(row);
  if (code) lines.push(`Code: ${code}`);
  const lost = lostWords(row.members);
  const cost = row.gpu_hours === null ? "" : `; ${row.gpu_hours.toFixed(1)} GPU-hours`;
  lines.push(
    `${lost ? `Lost time: ${lost}${cost}; ` : ""}${confidenceWord(row.confidence)}; ${row.to === null ? `since ${format.dateTime(row.from)} (${format.duration(now - row.from)})` : `${format.dateTime(row.from)} – ${format.dateTime(row.to)}`}`,
    "",
  );
  for (const item of row.evidence) {
    const said = describeEvidence(manual, item);
    lines.push(`- ${said.words} ${said.value}${said.against ? `, threshold: ${said.against}` : ""}`);
  }
  if (row.ruled_out.length) lines.push(`- ruled out: ${row.ruled_out.join("; ")}`);
  for (const [place, item] of row.advice.entries()) lines.push(`${place + 1}. ${item.do} (${item.why})`);
  return lines.join("\n");
}
