// The live stream: one WebSocket to the head that comes back by itself, and sleeps while nobody looks.

import { login } from "./api.js";

const METRICS = [
  "gpu_utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts", "power_limit_watts",
  "temperature_celsius", "sm_active_ratio", "tensor_active_ratio", "harvest_state",
];
const HOST_METRICS = [
  "cpu_utilization_ratio", "cpus", "load1", "memory_total_bytes", "memory_available_bytes", "swap_total_bytes",
  "swap_free_bytes",
];
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
const FALLS_ASLEEP_MS = 3_000;
const SILENCE_MS = 12_000;
const ANSWER_MS = 5_000;
const PROBE_MS = 5_000;
const CONNECT_MS = 10_000;

/** What a page sees that asks for nothing else. */
export const WISH = { nodes: null, metrics: METRICS, host_metrics: HOST_METRICS, details: true, interval: 1 };

/** The stream. `state` is "connecting", "open", "lost" or "asleep"; events "state" when it changes, "wider" when GPUs are followed anew. */
export class Live extends EventTarget {
  constructor(take, address = liveAddress()) {
    super();
    this.state = "connecting";
    this.lostAt = null;
    this.retryAt = null;
    this.problem = null;
    this._take = take;
    this._address = address;
    this._wish = WISH;
    this._socket = null;
    this._wait = FIRST_WAIT_MS;
    this._timer = 0;
    this._patience = 0;
    this._answer = 0;
    this._sleepTimer = 0;
    this._heard = 0;
    this._watch = setInterval(() => this._watchSilence(), 2_000);
    document.addEventListener("visibilitychange", () => this._visibility());
    addEventListener("online", () => this.retry());
    addEventListener("pagehide", () => this._socket?.close());
    addEventListener("pageshow", (event) => event.persisted && this.retry());
  }

  /** What is wanted now. */
  get wish() {
    return this._wish;
  }

  /** Connect for the first time, or when somebody looks. */
  start() {
    if (document.hidden) {
      this._set("asleep");
    } else {
      this._connect();
    }
  }

  /** Say what is wanted from now on; what is left out is as in `WISH`. */
  want(wish = {}) {
    const wanted = { ...WISH, ...wish };
    if (JSON.stringify(wanted) === JSON.stringify(this._wish)) {
      return;
    }
    const isWider = !covers(this._wish, wanted);
    this._wish = wanted;
    this._sendWish();
    if (isWider) {
      this.dispatchEvent(new Event("wider"));
    }
  }

  /** Try at once, without waiting for the next turn, unless nobody looks. */
  retry() {
    if (document.hidden) {
      return;
    }
    if (this.state === "lost" || this.state === "asleep") {
      clearTimeout(this._timer);
      this._connect();
    }
  }

  _connect() {
    this._drop();
    if (this.state !== "lost") {
      this._set("connecting");
    }
    this.retryAt = null;
    let socket;
    try {
      socket = new WebSocket(this._address);
    } catch {
      this._lose();
      return;
    }
    this._socket = socket;
    this._heard = Date.now();
    this._patience = setTimeout(() => this._lose(), CONNECT_MS);
    socket.onopen = () => this._sendWish();
    socket.onmessage = (event) => this._message(event.data);
    socket.onclose = () => this._lose();
  }

  _message(data) {
    this._heard = Date.now();
    clearTimeout(this._patience);
    this._stopAnswer();
    const message = JSON.parse(data);
    if (message.type === "error") {
      this.problem = message.hint ? `${message.error} (${message.hint})` : message.error;
      this._tell();
      return;
    }
    if (this.state !== "open") {
      this._wait = FIRST_WAIT_MS;
      this.lostAt = null;
      this.problem = null;
      this._set("open");
    }
    this._take(message);
  }

  _lose() {
    this._drop();
    if (this.state === "asleep") {
      return;
    }
    this.lostAt ??= this._heard || Date.now();
    const wait = this._wait * (0.75 + Math.random() / 2);
    this._wait = Math.min(LONGEST_WAIT_MS, this._wait * 1.8);
    this.retryAt = Date.now() + Math.min(wait, LONGEST_WAIT_MS);
    this._timer = setTimeout(() => this._connect(), this.retryAt - Date.now());
    this._set("lost");
    this._ask();
  }

  /** A WebSocket does not say why it was refused; a plain question does. */
  async _ask() {
    const status = await probe();
    if (status === 401) {
      login();
    } else if (this.state === "lost") {
      this.problem = status === 0 ? "it does not answer" : status >= 400 ? `it answered ${status}` : null;
      this._tell();
    }
  }

  /** A head without news is silent, and so is a connection that died while this machine slept: a wish is always answered. */
  _watchSilence() {
    if (this.state !== "open" || this._answer || Date.now() - this._heard < SILENCE_MS) {
      return;
    }
    this._sendWish();
    this._answer = setTimeout(() => this._lose(), ANSWER_MS);
  }

  _visibility() {
    clearTimeout(this._sleepTimer);
    if (document.hidden) {
      this._sleepTimer = setTimeout(() => this._sleep(), FALLS_ASLEEP_MS);
    } else if (this.state === "asleep" || this.state === "lost") {
      this._wait = FIRST_WAIT_MS;
      this.retry();
    }
  }

  _sleep() {
    clearTimeout(this._timer);
    this._set("asleep");
    this._drop();
  }

  _drop() {
    clearTimeout(this._timer);
    clearTimeout(this._patience);
    this._stopAnswer();
    const socket = this._socket;
    this._socket = null;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
  }

  _stopAnswer() {
    clearTimeout(this._answer);
    this._answer = 0;
  }

  _sendWish() {
    if (this._socket?.readyState === WebSocket.OPEN) {
      const { nodes, ...wish } = this._wish;
      this._socket.send(JSON.stringify(nodes ? { nodes, ...wish } : wish));
    }
  }

  _set(state) {
    if (state !== this.state) {
      this.state = state;
      this._tell();
    }
  }

  _tell() {
    this.dispatchEvent(new Event("state"));
  }
}

/** True when whoever had one wish followed all GPUs that another is about. */
function covers(before, wanted) {
  const follows = ({ metrics }) => metrics.includes("gpu_utilization_ratio");
  const hasNodes = before.nodes === null || (wanted.nodes !== null && wanted.nodes.every((name) => before.nodes.includes(name)));
  return !follows(wanted) || (follows(before) && hasNodes);
}

async function probe() {
  try {
    const answer = await fetch("/", { headers: { Accept: "application/json" }, cache: "no-store", signal: AbortSignal.timeout(PROBE_MS) });
    return answer.status;
  } catch {
    return 0;
  }
}

function liveAddress() {
  const url = new URL("/api/v1/live", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}
