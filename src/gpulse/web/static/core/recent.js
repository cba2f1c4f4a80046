// What GPUs did just before this page began to look, so that everybody sees them in the same state.

import { get } from "./api.js";

const FROM = "-30s";
const STEP = "5s";

/** Asks the head for the last half minute whenever the stream begins to tell of GPUs, once their first values are there. */
export class Recent {
  constructor(fleet, live) {
    this._fleet = fleet;
    this._live = live;
    this._asking = null;
    fleet.addEventListener("hello", () => this._begin());
    live.addEventListener("wider", () => {
      fleet.doubt();
      this._begin();
    });
  }

  _begin() {
    this._asking?.abort();
    this._asking = new AbortController();
    const { signal } = this._asking;
    const heard = () => {
      const metrics = this._fleet.activityMetrics();
      if (metrics.length) {
        this._fleet.removeEventListener("values", heard);
        this._ask(metrics, signal);
      }
    };
    this._fleet.addEventListener("values", heard, { signal });
  }

  /** Without an answer the states are sure again after half a minute of looking. */
  async _ask(metrics, signal) {
    const { nodes } = this._live.wish;
    const words = { scope: "gpu", statistic: "max", step: STEP, from: FROM, nodes };
    try {
      this._fleet.recall(await Promise.all(metrics.map((metric) => get("/api/v1/query", { metric, ...words }, { signal }))));
    } catch {
      // The page looks on by itself.
    }
  }
}
