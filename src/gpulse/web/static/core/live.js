// The live stream: a WebSocket to the head that reconnects by itself, and pauses while the page is hidden.

import { get, login } from "./api.js";

const METRICS = [
  "gpu_utilization_ratio",
  "memory_used_bytes",
  "memory_total_bytes",
  "power_watts",
  "power_limit_watts",
  "temperature_celsius",
  "sm_active_ratio",
  "tensor_active_ratio",
  "harvest_state",
];
const HOST_METRICS = [
  "cpu_utilization_ratio",
  "cpus",
  "load1",
  "memory_total_bytes",
  "memory_available_bytes",
  "swap_total_bytes",
  "swap_free_bytes",
];
const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 10_000;
const FALLS_ASLEEP_MS = 3_000;
const SILENCE_MS = 12_000;
const ANSWER_MS = 5_000;
const PROBE_MS = 5_000;
const CONNECT_MS = 10_000;

/**
 * The default subscription of a page.
 * @type {Live.Subscription}
 */
export const DEFAULT_SUBSCRIPTION = { nodes: null, metrics: METRICS, host_metrics: HOST_METRICS, details: true, interval: 1 };

/** The stream. `state` is "connecting", "open", "lost" or "asleep". Events: "state" when it changes, "wider" when more GPUs are subscribed. */
export class Live extends EventTarget {
  /** @param {(message: Live.Message) => void} take */
  constructor(take, address = liveAddress()) {
    super();
    /** @type {"connecting" | "open" | "lost" | "asleep"} */
    this.state = "connecting";
    /** @type {number | null} */
    this.lostAt = null;
    /** @type {number | null} */
    this.retryAt = null;
    /** @type {string | null} */
    this.problem = null;
    this._take = take;
    this._address = address;
    this._subscription = DEFAULT_SUBSCRIPTION;
    /** @type {WebSocket | null} */
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

  /** The current subscription. */
  get subscription() {
    return this._subscription;
  }

  /** Connect for the first time, or once the page is visible. */
  start() {
    if (document.hidden) {
      this._set("asleep");
    } else {
      this._connect();
    }
  }

  /**
   * Change the subscription; missing fields are those of the default.
   * @param {Partial<Live.Subscription>} [subscription]
   */
  subscribe(subscription = {}) {
    const wanted = { ...DEFAULT_SUBSCRIPTION, ...subscription };
    if (JSON.stringify(wanted) === JSON.stringify(this._subscription)) {
      return;
    }
    const isWider = !covers(this._subscription, wanted);
    this._subscription = wanted;
    this._sendSubscription();
    if (isWider) {
      this.dispatchEvent(new Event("wider"));
    }
  }

  /** Reconnect at once, unless the page is hidden. */
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
    socket.onopen = () => this._sendSubscription();
    socket.onmessage = (event) => this._message(event.data);
    socket.onclose = () => this._lose();
  }

  /** @param {string} data */
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
    this._wait = Math.min(MAX_WAIT_MS, this._wait * 1.8);
    this.retryAt = Date.now() + Math.min(wait, MAX_WAIT_MS);
    this._timer = setTimeout(() => this._connect(), this.retryAt - Date.now());
    this._set("lost");
    this._ask();
  }

  /** Find out why a WebSocket was refused, with an ordinary request. */
  async _ask() {
    const status = await probe();
    if (status === 401) {
      login();
    } else if (this.state === "lost") {
      this.problem = status === 0 ? "the head does not answer" : status >= 400 ? `the head returned status ${status}` : null;
      this._tell();
    }
  }

  /** Check a silent connection, which may be dead or have no changes: a subscription is always answered. */
  _watchSilence() {
    if (this.state !== "open" || this._answer || Date.now() - this._heard < SILENCE_MS) {
      return;
    }
    this._sendSubscription();
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

  _sendSubscription() {
    if (this._socket?.readyState === WebSocket.OPEN) {
      const { nodes, ...subscription } = this._subscription;
      this._socket.send(JSON.stringify(nodes ? { nodes, ...subscription } : subscription));
    }
  }

  /** @param {"connecting" | "open" | "lost" | "asleep"} state */
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

/**
 * True when one subscription includes all GPUs of another.
 * @param {Live.Subscription} before
 * @param {Live.Subscription} wanted
 */
function covers(before, wanted) {
  /** @param {Live.Subscription} options */
  const follows = ({ metrics }) => metrics.includes("gpu_utilization_ratio");
  const hasNodes = before.nodes === null || wanted.nodes?.every((name) => before.nodes?.includes(name));
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

const FROM = "-30s";
const STEP = "5s";

/** Requests the last half minute of activity whenever the stream starts to include GPUs, after their first values. */
export class Recent {
  /**
   * @param {Dashboard.Fleet} fleet
   * @param {Live} live
   */
  constructor(fleet, live) {
    this._fleet = fleet;
    this._live = live;
    /** @type {AbortController | null} */
    this._request = null;
    fleet.addEventListener("hello", () => this._begin());
    live.addEventListener("wider", () => {
      fleet.doubt();
      this._begin();
    });
  }

  _begin() {
    this._request?.abort();
    this._request = new AbortController();
    const { signal } = this._request;
    const heard = () => {
      const metrics = this._fleet.activityMetrics();
      if (metrics.length) {
        this._fleet.removeEventListener("values", heard);
        this._ask(metrics, signal);
      }
    };
    this._fleet.addEventListener("values", heard, { signal });
  }

  /**
   * Without an answer, the states are certain after half a minute of live data.
   * @param {string[]} metrics
   * @param {AbortSignal} signal
   */
  async _ask(metrics, signal) {
    const { nodes } = this._live.subscription;
    const words = { scope: "gpu", statistic: "max", step: STEP, from: FROM, nodes };
    try {
      this._fleet.recall(await Promise.all(metrics.map((metric) => get("/api/v1/query", { metric, ...words }, { signal }))));
    } catch {
      // The live stream provides the states later.
    }
  }
}
