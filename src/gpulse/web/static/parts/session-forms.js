// What can be done about sessions: starting one, stopping one or all, going on with one that was interrupted.

import { html, nothing } from "../vendor/lit-html.js";
import { post } from "../core/api.js";
import { FORMATS } from "./sessions.js";
import { errorNote } from "./tables.js";

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/;
const LENGTH = /^(?:[0-9]{1,12}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d|w)){1,8}$/;
const PART = /([0-9.]+)(ms|s|m|h|d|w)/g;
const UNITS = { ms: 0.001, s: 1, m: 60, h: 3600, d: 86400, w: 604800 };

/** Buttons that stop a session or go on with it, and the question that comes before a stop. */
export class SessionControls {
  constructor(root, app, draw, refresh) {
    Object.assign(this, { root, app, draw, refresh, stopping: null, error: null });
  }

  /** What can be done about one session now. */
  buttons(session) {
    if (session.state === "finished") {
      return nothing;
    }
    const recover = html`<button type="button" class="button" aria-label=${`Go on with ${session.name}`} @click=${() => this.recover(session)}>Go on</button>`;
    return html`${session.state === "interrupted" ? recover : nothing}
      <button type="button" class="button danger" aria-label=${`Stop ${session.name}`} @click=${() => this.stop(session)}>Stop</button>`;
  }

  /** The question before a stop; has to be somewhere on the page. */
  dialog(active = 1) {
    const session = this.stopping;
    return html`<dialog class="stop" aria-labelledby="stop-title">
      <form method="dialog">
        <h2 id="stop-title">${session ? `Stop ${session.name}?` : `Stop all ${active} active sessions?`}</h2>
        <p>${session ? "It ends now, and its file is written where the head keeps such files." : "They end now, and their files are written where the head keeps such files."} The readings stay; a stopped session cannot go on.</p>
        <label class="field">File <select name="format">${FORMATS.map((kind) => html`<option>${kind}</option>`)}</select></label>
        <p class="buttons"><button class="button" value="cancel">Keep going</button> <button class="button danger" value="stop">Stop</button></p>
      </form></dialog>`;
  }

  /** Ask first, then stop one session, or all that are active when none is given. */
  async stop(session) {
    this.stopping = session;
    this.draw();
    const format = await asked(this.root.querySelector("dialog.stop"));
    if (format !== null) {
      await this.tell(async () => (await post("/profiling/stop", { name: session?.session_id, format })).message);
    }
  }

  async recover(session) {
    await this.tell(async () => {
      await post("/api/v1/sessions/recover", { session_id: session.session_id });
      return `Session ${session.name} goes on`;
    });
  }

  async tell(work) {
    try {
      this.app.toast(await work(), "good");
      this.error = null;
    } catch (error) {
      this.error = error;
    }
    await this.refresh();
  }
}

/** Show a dialog and wait: the chosen format, or null when it was dismissed. */
function asked(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "stop" ? dialog.querySelector("select").value : null), { once: true });
    dialog.showModal();
    dialog.querySelector("button[value=cancel]").focus();
  });
}

/** The form that starts a session; checks what it can before the head does. */
export class SessionForm {
  constructor(draw, start) {
    this.draw = draw;
    this.start = start;
    this.open = false;
    this.given = {};
    this.error = null;
    this.wrong = {};
    this.busy = false;
  }

  /** Take what an address asks for, such as gpus=gpu-1:3. */
  prefill({ gpus = "", nodes = "", name = "", since = "" }) {
    if (gpus || nodes || name || since) {
      this.given = { ...this.given, gpus, nodes, name, since };
      this.open = true;
    }
  }

  view(fleet) {
    return html`<details class="card start" ?open=${this.open} @toggle=${(event) => { this.open = event.target.open; }}>
      <summary><span class="button primary">Start a session</span></summary>
      <form novalidate aria-label="Start a session" @submit=${(event) => this.submit(event)}>
        <div class="fields">
          ${this.field("name", "Name", "made up when left empty", "my_experiment")}
          ${this.field("since", "Begin", "how long ago; now when left empty", "10m")}
          ${this.field("nodes", "Nodes", "with commas; all when left empty", someNodes(fleet))}
          ${this.field("gpus", "GPUs", "index, node:index or UUID; all when left empty", "0,1 or gpu-1:3")}
          ${this.field("labels", "Labels", "to find it again", "team=vision, run=3")}
          ${this.field("interval", "A frame covers", "50ms to 1h; as agents sample when left empty", "1s")}
        </div>
        ${errorNote(this.error)}
        <p class="buttons"><button class="button primary" ?disabled=${this.busy}>${this.busy ? "Starting…" : "Start"}</button></p>
      </form></details>`;
  }

  field(name, label, hint, example) {
    const wrong = this.wrong[name];
    return html`<div class="field"><label for=${`start-${name}`}>${label}</label>
      <input id=${`start-${name}`} name=${name} autocomplete="off" spellcheck="false" placeholder=${example} .value=${this.given[name] ?? ""}
        aria-describedby=${`start-${name}-hint`} aria-invalid=${wrong ? "true" : nothing} @input=${(event) => { this.given[name] = event.target.value; }}>
      <small id=${`start-${name}-hint`} class=${wrong ? "wrong" : "muted"}>${wrong ?? hint}</small></div>`;
  }

  async submit(event) {
    event.preventDefault();
    const [body, wrong] = read(this.given);
    this.wrong = wrong;
    this.error = null;
    this.draw();
    const [first] = Object.keys(wrong);
    if (first) {
      event.target.elements[first].focus();
      return;
    }
    await this.send(body);
  }

  async send(body) {
    this.busy = true;
    this.draw();
    try {
      await this.start(body);
      this.given = {};
      this.open = false;
    } catch (error) {
      this.error = error;
    }
    this.busy = false;
    this.draw();
  }
}

function someNodes(fleet) {
  return [...fleet.nodes.keys()].slice(0, 2).join(",") || "gpu-1,gpu-2";
}

/** The body of the request and what is wrong with the fields, each by name. */
function read(given) {
  const written = (name) => (given[name] ?? "").trim();
  const wrong = {};
  const body = {};
  if (written("name")) {
    body.name = written("name");
    if (!NAME.test(body.name)) wrong.name = "letters, digits, dots, dashes and underscores, at most 100, beginning with a letter or digit";
  }
  if (written("since")) {
    body.since = written("since").replace(/^-/, "");
    if (readLength(body.since) === null) wrong.since = "a length of time, such as 10m or 1h30m";
  }
  for (const name of ["nodes", "gpus"]) {
    if (written(name)) body[name] = written(name).split(",").map((part) => part.trim()).filter(Boolean);
  }
  readLabels(written("labels"), body, wrong);
  readInterval(written("interval"), body, wrong);
  return [body, wrong];
}

function readLabels(text, body, wrong) {
  if (!text) return;
  const pairs = text.split(",").map((pair) => pair.trim()).filter(Boolean).map((pair) => pair.split(/=(.*)/s));
  if (pairs.some(([key, value]) => !key.trim() || value === undefined)) {
    wrong.labels = "key=value, with commas between several";
  } else {
    body.labels = Object.fromEntries(pairs.map(([key, value]) => [key.trim(), value.trim()]));
  }
}

function readInterval(text, body, wrong) {
  if (!text) return;
  const length = readLength(text);
  const milliseconds = length === null ? NaN : Math.round(length * 1000);
  if (!(milliseconds >= 50 && milliseconds <= 3_600_000)) {
    wrong.interval = "a length of time from 50ms to 1h";
  } else {
    body.interval_ms = milliseconds;
  }
}

/** A length of time such as 10m or 1h30m in seconds; null when it is none. */
function readLength(text) {
  if (/^[0-9]+(\.[0-9]+)?$/.test(text)) return Number(text);
  if (!LENGTH.test(text)) return null;
  return [...text.matchAll(PART)].reduce((sum, [, number, unit]) => sum + Number(number) * UNITS[unit], 0);
}
