// Sessions: state, times, scope and files; start, stop and resume them.

import { asError, post, url } from "../core/api.js";
import { fieldValue, find, formOf, isOpened } from "../core/dom.js";
import { text } from "../core/format.js";
import { href } from "../core/router.js";
import { html, nothing } from "../vendor/lit-html.js";
import { errorNote } from "./tables.js";

/** @typedef {"name" | "since" | "nodes" | "gpus" | "labels" | "interval"} FieldName */
/** @typedef {{ name?: string, since?: string, nodes?: string[], gpus?: string[], labels?: Record<string, string>, interval_ms?: number }} SessionRequest */

/** @type {Array<"nodes" | "gpus">} */
const LISTS = ["nodes", "gpus"];

/** The kinds of files. */
export const FORMATS = ["json", "jsonl", "csv", "parquet"];
const STATES = { active: ["good", "● active"], interrupted: ["warn", "▲ interrupted"], finished: ["muted", "■ finished"] };

/**
 * A time of the API in epoch seconds, or null.
 * @param {string | number | null | undefined} time
 */
export function seconds(time) {
  if (typeof time === "number") return time;
  const read = Date.parse(time ?? "");
  return Number.isNaN(read) ? null : read / 1000;
}

/**
 * Where a session ends: its end, its interruption, or now.
 * @param {Api.SessionAnswer} session
 * @param {number} now
 */
export function endOf(session, now) {
  const gaps = session.interruptions ?? [];
  const broken = session.state === "interrupted" && gaps.length ? seconds(gaps[gaps.length - 1].start_time) : null;
  return seconds(session.end_time) ?? broken ?? now;
}

/**
 * How long a session is, in seconds.
 * @param {Api.SessionAnswer} session
 * @param {number} now
 */
export function length(session, now) {
  return Math.max(0, endOf(session, now) - (seconds(session.start_time) ?? now));
}

/**
 * The state of a session in a word with a shape.
 * @param {Api.SessionAnswer} session
 */
export function stateBadge(session) {
  const [kind, words] = STATES[session.state] ?? ["muted", session.state];
  return html`<span class="badge ${kind}">${words}</span>`;
}

/**
 * What a session is of: all, or which nodes and GPUs.
 * @param {Api.SessionAnswer} session
 */
export function what(session) {
  const nodes = session.nodes ?? [];
  const gpus = session.gpus ?? [];
  if (!nodes.length && !gpus.length) return "everything";
  return html`${nodes.map((node) => html`<a href=${href("node", node)}><bdi>${text(node)}</bdi></a> `)}${gpus.map((gpu) => html`${gpuLink(gpu)} `)}`;
}

/**
 * A GPU as a session names it: `node:index`, an index on every node, or a UUID.
 * @param {string} gpu
 */
function gpuLink(gpu) {
  const [, node, label] = gpu.match(/^(.+?):(\d+(?::\d+)?)$/) ?? [];
  if (node) {
    return html`<a href=${href("gpu", node, label)}><bdi>${text(node)}</bdi>:${label}</a>`;
  }
  return html`<span>${/^\d+$/.test(gpu) ? `GPU ${gpu}` : text(gpu)}</span>`;
}

/**
 * Links to a session's file in every format.
 * @param {Api.SessionAnswer} session
 */
export function downloads(session) {
  return html`<span class="downloads">${FORMATS.map((kind) => html`<a href=${url(`/api/v1/sessions/${encodeURIComponent(session.session_id)}/download`, { format: kind })} download aria-label=${`Download ${session.name} as ${kind}`}>${kind}</a> `)}</span>`;
}

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/;
const LENGTH = /^(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d|w)){1,8}$/;
const PART = /([0-9.]+)(ms|s|m|h|d|w)/g;
/** @type {Record<string, number>} */
const UNITS = { ms: 0.001, s: 1, m: 60, h: 3600, d: 86400, w: 604800 };

/** Buttons that stop a session or go on with it, and the question that comes before a stop. */
export class SessionControls {
  /**
   * @param {HTMLElement} root
   * @param {Dashboard.App} app
   * @param {() => void} draw
   * @param {() => Promise<void>} refresh
   */
  constructor(root, app, draw, refresh) {
    this.root = root;
    this.app = app;
    this.draw = draw;
    this.refresh = refresh;
    /** @type {Api.SessionAnswer | null} */
    this.stopping = null;
    /** @type {Error | null} */
    this.error = null;
  }

  /**
   * What can be done about one session now.
   * @param {Api.SessionAnswer} session
   */
  buttons(session) {
    if (session.state === "finished") {
      return nothing;
    }
    const recover = html`<button type="button" class="button" aria-label=${`Resume ${session.name}`} @click=${() => this.recover(session)}>Resume</button>`;
    return html`${session.state === "interrupted" ? recover : nothing}
      <button type="button" class="button danger" aria-label=${`Stop ${session.name}`} @click=${() => this.stop(session)}>Stop</button>`;
  }

  /** The question before a stop; has to be somewhere on the page. */
  dialog(active = 1) {
    const session = this.stopping;
    return html`<dialog class="stop" aria-labelledby="stop-title">
      <form method="dialog">
        <h2 id="stop-title">${session ? `Stop ${session.name}?` : `Stop ${active === 1 ? "1 active session" : `all ${active} active sessions`}?`}</h2>
        <p>${session ? "The session stops now, and the head writes its session file." : "The sessions stop now, and the head writes their session files."} The samples are kept, but a stopped session cannot be resumed.</p>
        <label class="field">File <select name="format">${FORMATS.map((kind) => html`<option>${kind}</option>`)}</select></label>
        <p class="buttons"><button class="button" value="cancel">Keep running</button> <button class="button danger" value="stop">Stop</button></p>
      </form></dialog>`;
  }

  /**
   * Ask first, then stop one session, or all that are active when none is given.
   * @param {Api.SessionAnswer | null} session
   */
  async stop(session) {
    this.stopping = session;
    this.draw();
    const format = await asked(find(this.root, "dialog.stop", HTMLDialogElement));
    if (format !== null) {
      await this.tell(async () => (await post("/profiling/stop", { name: session?.session_id, format })).message);
    }
  }

  /** @param {Api.SessionAnswer} session */
  async recover(session) {
    await this.tell(async () => {
      await post("/api/v1/sessions/recover", { session_id: session.session_id });
      return `Session ${session.name} resumed`;
    });
  }

  /** @param {() => Promise<string>} work */
  async tell(work) {
    try {
      this.app.toast(await work(), "good");
      this.error = null;
    } catch (error) {
      this.error = asError(error);
    }
    await this.refresh();
  }
}

/**
 * Show a dialog and wait: the chosen format, or null when it was dismissed.
 * @param {HTMLDialogElement} dialog
 */
function asked(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "cancel";
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "stop" ? find(dialog, "select", HTMLSelectElement).value : null),
      {
        once: true,
      },
    );
    dialog.showModal();
    find(dialog, "button[value=cancel]").focus();
  });
}

/** The form that starts a session; checks what it can before the head does. */
export class SessionForm {
  /**
   * @param {() => void} draw
   * @param {(body: SessionRequest) => Promise<void>} start
   */
  constructor(draw, start) {
    this.draw = draw;
    this.start = start;
    this.open = false;
    /** @type {Partial<Record<FieldName, string>>} */
    this.given = {};
    /** @type {Error | null} */
    this.error = null;
    /** @type {Partial<Record<FieldName, string>>} */
    this.wrong = {};
    this.busy = false;
  }

  /**
   * Take what an address asks for, such as gpus=gpu-1:3.
   * @param {Dashboard.Query} options
   */
  prefill({ gpus = "", nodes = "", name = "", since = "" }) {
    if (gpus || nodes || name || since) {
      this.given = { ...this.given, gpus, nodes, name, since };
      this.open = true;
    }
  }

  /** @param {Dashboard.Fleet} fleet */
  view(fleet) {
    return html`<details class="card start" ?open=${this.open} @toggle=${(/** @type {Event} */ event) => {
      this.open = isOpened(event);
    }}>
      <summary><span class="button primary">Start a session</span></summary>
      <form novalidate aria-label="Start a session" @submit=${(/** @type {SubmitEvent} */ event) => this.submit(event)}>
        <div class="fields">
          ${this.field("name", "Name", "chosen by the head if empty", "my_experiment")}
          ${this.field("since", "Start", "how long ago; now if empty", "10m")}
          ${this.field("nodes", "Nodes", "separated by commas; all if empty", someNodes(fleet))}
          ${this.field("gpus", "GPUs", "index, node:index or UUID; all if empty", "0,1 or gpu-1:3")}
          ${this.field("labels", "Labels", "key=value pairs, separated by commas", "team=vision, run=3")}
          ${this.field("interval", "Interval", "time between frames, 50ms to 1h; the agents' sampling interval if empty", "1s")}
        </div>
        ${errorNote(this.error)}
        <p class="buttons"><button class="button primary" ?disabled=${this.busy}>${this.busy ? "Starting…" : "Start"}</button></p>
      </form></details>`;
  }

  /**
   * @param {FieldName} name
   * @param {string} label
   * @param {string} hint
   * @param {string} example
   */
  field(name, label, hint, example) {
    const wrong = this.wrong[name];
    return html`<div class="field"><label for=${`start-${name}`}>${label}</label>
      <input id=${`start-${name}`} name=${name} autocomplete="off" spellcheck="false" placeholder=${example} .value=${this.given[name] ?? ""}
        aria-describedby=${`start-${name}-hint`} aria-invalid=${wrong ? "true" : nothing} @input=${(/** @type {Event} */ event) => {
          this.given[name] = fieldValue(event);
        }}>
      <small id=${`start-${name}-hint`} class=${wrong ? "wrong" : "muted"}>${wrong ?? hint}</small></div>`;
  }

  /** @param {SubmitEvent} event */
  async submit(event) {
    event.preventDefault();
    const [body, wrong] = read(this.given);
    this.wrong = wrong;
    this.error = null;
    this.draw();
    const [first] = Object.keys(wrong);
    if (first) {
      find(formOf(event), `[name=${first}]`).focus();
      return;
    }
    await this.send(body);
  }

  /** @param {SessionRequest} body */
  async send(body) {
    this.busy = true;
    this.draw();
    try {
      await this.start(body);
      this.given = {};
      this.open = false;
    } catch (error) {
      this.error = asError(error);
    }
    this.busy = false;
    this.draw();
  }
}

/** @param {Dashboard.Fleet} fleet */
function someNodes(fleet) {
  return [...fleet.nodes.keys()].slice(0, 2).join(",") || "gpu-1,gpu-2";
}

/**
 * The body of the request and what is wrong with the fields, each by name.
 * @returns {[SessionRequest, Partial<Record<FieldName, string>>]}
 * @param {Partial<Record<FieldName, string>>} given
 */
function read(given) {
  /** @param {FieldName} name */
  const written = (name) => (given[name] ?? "").trim();
  /** @type {Partial<Record<FieldName, string>>} */
  const wrong = {};
  /** @type {SessionRequest} */
  const body = {};
  if (written("name")) {
    body.name = written("name");
    if (!NAME.test(body.name)) wrong.name = "use up to 100 letters, digits, dots, dashes and underscores, starting with a letter or digit";
  }
  if (written("since")) {
    body.since = written("since").replace(/^-/, "");
    if (readLength(body.since) === null) wrong.since = "enter a duration, such as 10m or 1h30m";
  }
  for (const name of LISTS) {
    if (written(name))
      body[name] = written(name)
        .split(",")
        .map((part) => part.trim())
        .filter(Boolean);
  }
  readLabels(written("labels"), body, wrong);
  readInterval(written("interval"), body, wrong);
  return [body, wrong];
}

/**
 * @param {string} text
 * @param {SessionRequest} body
 * @param {Partial<Record<FieldName, string>>} wrong
 */
function readLabels(text, body, wrong) {
  if (!text) return;
  const pairs = text
    .split(",")
    .map((pair) => pair.trim())
    .filter(Boolean)
    .map((pair) => pair.split(/=(.*)/s));
  if (pairs.some(([key, value]) => !key.trim() || value === undefined)) {
    wrong.labels = "enter key=value pairs, separated by commas";
  } else {
    body.labels = Object.fromEntries(pairs.map(([key, value]) => [key.trim(), value.trim()]));
  }
}

/**
 * @param {string} text
 * @param {SessionRequest} body
 * @param {Partial<Record<FieldName, string>>} wrong
 */
function readInterval(text, body, wrong) {
  if (!text) return;
  const length = readLength(text);
  const milliseconds = length === null ? NaN : Math.round(length * 1000);
  if (!(milliseconds >= 50 && milliseconds <= 3_600_000)) {
    wrong.interval = "enter a duration between 50ms and 1h";
  } else {
    body.interval_ms = milliseconds;
  }
}

/**
 * A length of time such as 10m or 1h30m in seconds; null when it is none.
 * @param {string} text
 */
function readLength(text) {
  if (/^[0-9]+(\.[0-9]+)?$/.test(text)) return Number(text);
  if (!LENGTH.test(text)) return null;
  return [...text.matchAll(PART)].reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0);
}
