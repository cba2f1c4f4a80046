// The totals of the fleet: what is now, from the live stream, with the trend of a day, from the head.

import { get } from "../core/api.js";
import { h, setAttribute, Text } from "../core/dom.js";
import { duration, known, text, UNKNOWN } from "../core/format.js";
import { href } from "../core/router.js";
import { Sparkline } from "./fleet-trends.js";
import { glyphElement } from "./glyphs.js";

/** @typedef {import("./fleet-summary.js").FleetSummary} FleetSummary */
/** @typedef {keyof Omit<Api.FleetDay, "start" | "step_seconds">} DaySeries */

const REFRESH_MS = 60_000;
const KILOWATT = 1000;

/** The six totals. */
export class FleetTotals {
  /**
   * @param {Dashboard.App} app
   * @param {FleetSummary} summary
   */
  constructor(app, summary) {
    this._app = app;
    this._summary = summary;
    /** @type {Api.FleetTotals | null} */
    this._answer = null;
    this._tiles = {
      busy: new Tile("busy", "Busy"),
      idle: new Tile("idle", "Held idle"),
      free: new Tile("free", "Free"),
      faulty: new Tile("faulty", "Faulty"),
      power: new Tile("", "Power, kW"),
      wasted: new Tile("", "Wasted today, GPU-hours", "Wasted, GPU-h"),
    };
    this.element = h("section", { class: "totals", "aria-label": "Totals" }, ...Object.values(this._tiles).map((tile) => tile.element));
    this._stop = new AbortController();
    this._timer = setInterval(() => this._load(), REFRESH_MS);
    this._load();
  }

  leave() {
    this._stop.abort();
    clearInterval(this._timer);
  }

  /**
   * Let the totals filter, and keep what else the address says.
   * @param {Dashboard.Filter} filter
   * @param {Record<string, string | null>} words
   */
  setFilter(filter, words) {
    const { busy, idle, free, faulty, power, wasted } = this._tiles;
    const of = (/** @type {string} */ state) => href("overview", { ...words, state });
    busy.link(of("busy"), filter.state === "busy");
    idle.link(of("idle"), filter.state === "idle");
    free.link(of("free"), filter.state === "free");
    faulty.link(of("faulty"), filter.state === "faulty");
    power.link(href("overview", { ...words, sort: "power" }), filter.sort === "power");
    wasted.link(href("who", { from: "-24h" }), false);
  }

  /** Show what is now. */
  update() {
    const { counts, power, powerLimit } = this._summary.total();
    const { busy, idle, free, faulty, power: watts, wasted } = this._tiles;
    const { nodes, missing } = this._app.fleet;
    const now = this._answer?.now;
    const day = this._answer?.day;
    busy.set(String(counts.busy), `Busy, of ${thousands(counts.all)}`, rangeText(day?.busy, 1));
    const held = this._summary.idle();
    const users = held.users.size;
    const seconds = Math.max(
      counts.idle ? (now?.longest_idle_seconds ?? 0) : 0,
      held.since === null ? 0 : this._app.fleet.headTime() - held.since,
    );
    const longest = seconds > 0 ? `longest ${duration(seconds)}` : "";
    idle.set(
      String(counts.idle),
      "Held idle",
      [users ? `${users} ${users === 1 ? "user" : "users"}` : "", longest].filter(Boolean).join(", "),
    );
    free.set(
      String(counts.free),
      "Free",
      counts.harvested ? `and ${counts.harvested} harvested, freed on demand` : rangeText(day?.free, 1),
    );
    const lost = [...nodes.values()].filter((node) => node.state === "lost");
    faulty.set(String(counts.faulty), "Faulty", awayText(counts.lost, lost, missing));
    faulty.mark(counts.faulty > 0);
    const limit = powerLimit === null ? "" : ` of ${kilowatts(powerLimit)}`;
    watts.set(kilowatts(power), "Power, kW", `${rangeText(day?.power_watts, KILOWATT)}${limit}`.replace(/^ of/, "of"));
    wasted.set(hoursText(now?.wasted_gpu_hours_today), "Wasted today, GPU-hours", wastedText(now));
  }

  async _load() {
    if (document.hidden) {
      return;
    }
    try {
      this._answer = await get("/api/v1/fleet/totals", {}, { signal: this._stop.signal });
    } catch {
      return; // The connection's state is shown anyway; the numbers of now are live.
    }
    const { day } = this._answer;
    const { busy, idle, free, faulty, power, wasted } = this._tiles;
    const most = this._answer.now.gpus;
    busy.draw(day.busy, most);
    idle.draw(day.held_idle);
    free.draw(day.free);
    faulty.draw(day.faulty);
    power.draw(day.power_watts);
    wasted.draw(day.wasted_gpu_hours);
    this.update();
  }
}

/** One total: a number, what it is of, a trend, and a word more. */
class Tile {
  /**
   * @param {string} state
   * @param {string} title
   * @param {string} [short] The title on a phone.
   */
  constructor(state, title, short = "") {
    this._number = new Text(h("span", { class: "total-number" }));
    this._title = new Text(h("span", { class: short ? "wide-only" : "" }));
    this._more = new Text(h("span", { class: "total-more" }));
    this._spark = new Sparkline();
    this._title.set(title);
    this.element = h(
      "a",
      { class: "total young", "data-state": state || null, href: "#/" },
      h(
        "span",
        { class: "total-title" },
        ...(state ? [glyphElement("state", state)] : []),
        this._title.element,
        ...(short ? [h("span", { class: "phone-only" }, short)] : []),
      ),
      this._number.element,
      this._spark.element,
      this._more.element,
    );
  }

  /**
   * @param {string} address
   * @param {boolean} isChosen
   */
  link(address, isChosen) {
    setAttribute(this.element, "href", address);
    setAttribute(this.element, "aria-current", isChosen ? "true" : null);
  }

  /**
   * @param {string} number
   * @param {string} title
   * @param {string} more
   */
  set(number, title, more) {
    this._number.set(number);
    setAttribute(this.element, "data-length", number.length > 4 ? "long" : null);
    this._title.set(title);
    this._more.set(more);
  }

  /** @param {boolean} isBad */
  mark(isBad) {
    this.element.classList.toggle("bad", isBad);
  }

  /**
   * @param {Array<number | null>} values
   * @param {number} [top]
   */
  draw(values, top) {
    const most = Math.max(0, ...values.filter(known));
    this._spark.set(values, Math.max(top ?? 0, most) || 1, true);
    this.element.classList.toggle("young", values.filter(known).length < 2);
  }
}

/**
 * `24 h: 31 to 58`.
 * @param {Array<number | null> | undefined} values
 * @param {number} unit
 */
function rangeText(values, unit) {
  const some = (values ?? []).filter(known);
  if (some.length < 2) {
    return "";
  }
  const words = [Math.min(...some), Math.max(...some)].map((value) => (unit === 1 ? thousands(Math.round(value)) : kilowatts(value)));
  return words[0] === words[1] ? `24 h: always ${words[0]}` : `24 h: ${words.join(" to ")}`;
}

/**
 * `and 8 lost with gpu-09`.
 * @param {number} gpus
 * @param {Dashboard.Node[]} nodes
 * @param {string[]} missing
 */
function awayText(gpus, nodes, missing) {
  const absent = missing.length ? `${missing.length} ${missing.length === 1 ? "node" : "nodes"} missing` : "";
  if (!nodes.length) {
    return absent && `and ${absent}`;
  }
  const where = nodes.length === 1 ? `with ${text(nodes[0].name)}` : `on ${nodes.length} nodes`;
  return absent ? `and ${gpus} lost, ${absent}` : `and ${gpus} lost ${where}`;
}

/** @param {Api.FleetNow | undefined} now */
function wastedText(now) {
  if (!now) {
    return "";
  }
  const { wasted_gpu_hours_today: wasted, held_gpu_hours_today: held, wasted_gpu_hours_yesterday: before } = now;
  const whole = known(held) && held < 1000 ? `${hoursText(held)} held` : "held";
  const share = known(wasted) && known(held) && held > 0 ? `${Math.round((wasted / held) * 100)}% of ${whole}` : "";
  return [share, known(before) ? `${hoursText(before)} yesterday` : ""].filter(Boolean).join(", ");
}

/** @param {Dashboard.MaybeNumber} hours */
function hoursText(hours) {
  return known(hours) ? (hours < 9.95 ? hours.toFixed(1) : thousands(Math.round(hours))) : UNKNOWN;
}

/** @param {Dashboard.MaybeNumber} watts */
function kilowatts(watts) {
  return known(watts) ? (watts / KILOWATT).toFixed(watts < 99_950 ? 1 : 0) : UNKNOWN;
}

/** @param {number} n */
function thousands(n) {
  return n.toLocaleString("en");
}
