// The keyboard on the fleet: one stop for Tab, arrows to and between cells, Enter opens a GPU, E its node in place.

const ITEMS = ".cell, h2 > a, .strip-name";

/** Moves the focus within a list of rows. */
export class FleetKeys {
  /**
   * @param {HTMLElement} list
   * @param {(name: string) => void} toggle
   * @param {AbortSignal} signal
   */
  constructor(list, toggle, signal) {
    this._list = list;
    this._toggle = toggle;
    /** @type {HTMLElement | null} */
    this._stop = null;
    list.addEventListener("keydown", (event) => this._key(event));
    document.addEventListener("keydown", (event) => this._enter(event), { signal });
    list.addEventListener("focusin", (event) => {
      if (event.target instanceof HTMLElement && event.target.matches(ITEMS)) {
        this._setStop(event.target);
      }
    });
    this._watch = new MutationObserver(() => this.reset());
    this._watch.observe(list, { childList: true, subtree: true });
  }

  /** Rows are others: there must be one that Tab leads to. */
  reset() {
    if (!this._stop?.isConnected || this._stop.closest("[hidden]")) {
      this._setStop(/** @type {HTMLElement | null} */ (this._list.querySelector("[data-node]:not([hidden]) .cell")));
    }
  }

  /** Put the focus on the first cell that is shown. */
  focus() {
    const first = /** @type {HTMLElement | null} */ (this._list.querySelector("[data-node]:not([hidden]):not(.dim) .cell:not(.dim)"));
    first?.focus();
    return Boolean(first);
  }

  /**
   * Without a focus anywhere on the page, an arrow or E leads to the first cell.
   * @param {KeyboardEvent} event
   */
  _enter(event) {
    const isOurs = event.key.startsWith("Arrow") || event.key === "e" || event.key === "E";
    if (!isOurs || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) {
      return;
    }
    const { activeElement } = document;
    if ((activeElement === null || activeElement.matches("body, main")) && this.focus()) {
      event.preventDefault();
    }
  }

  /** @param {HTMLElement | null} item */
  _setStop(item) {
    if (item !== this._stop) {
      this._stop?.setAttribute("tabindex", "-1");
      item?.setAttribute("tabindex", "0");
      this._stop = item;
    }
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const item = event.target instanceof HTMLElement && event.target.matches(ITEMS) ? event.target : null;
    if (item === null || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    if (event.key === "e" || event.key === "E") {
      this._toggle(item.closest("[data-node]")?.getAttribute("data-node") ?? "");
    } else if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") {
      this._move(item, event.key)?.focus();
    } else {
      return;
    }
    event.preventDefault();
  }

  /**
   * @param {HTMLElement} from
   * @param {string} key
   */
  _move(from, key) {
    const row = /** @type {HTMLElement} */ (from.closest("[data-node]"));
    const items = itemsOf(row);
    const at = items.indexOf(from);
    if (key === "Home" || key === "End") {
      return items.at(key === "Home" ? 0 : -1);
    }
    if (key === "ArrowLeft" && at > 0) {
      return items[at - 1];
    }
    if (key === "ArrowRight" && at < items.length - 1) {
      return items[at + 1];
    }
    return this._neighbor(row, from, key);
  }

  /**
   * The nearest item of another row in the direction of a key.
   * @param {HTMLElement} row
   * @param {HTMLElement} from
   * @param {string} key
   */
  _neighbor(row, from, key) {
    const here = from.getBoundingClientRect();
    const own = row.getBoundingClientRect();
    let best = from;
    let least = Infinity;
    for (const other of this._list.querySelectorAll("[data-node]:not([hidden])")) {
      const there = other.getBoundingClientRect();
      const distance = distanceTo(own, here, there, key);
      const items = distance < least ? itemsOf(/** @type {HTMLElement} */ (other)) : [];
      if (items.length) {
        least = distance;
        best = key === "ArrowLeft" ? items[items.length - 1] : key === "ArrowRight" ? items[0] : nearest(items, here);
      }
    }
    return best;
  }
}

/** @param {HTMLElement} row */
function itemsOf(row) {
  return /** @type {HTMLElement[]} */ ([...row.querySelectorAll(ITEMS)]);
}

/**
 * How far a row is in the direction of a key; Infinity when it is not there.
 * @param {DOMRect} own
 * @param {DOMRect} here
 * @param {DOMRect} there
 * @param {string} key
 */
function distanceTo(own, here, there, key) {
  const overlaps = there.left <= here.right && there.right >= here.left;
  const isLevel = there.top < own.bottom && there.bottom > own.top;
  switch (key) {
    case "ArrowUp":
      return overlaps && there.bottom <= own.top + 1 ? own.top - there.bottom : Infinity;
    case "ArrowDown":
      return overlaps && there.top >= own.bottom - 1 ? there.top - own.bottom : Infinity;
    case "ArrowLeft":
      return isLevel && there.right <= own.left ? own.left - there.right : Infinity;
    default:
      return isLevel && there.left >= own.right ? there.left - own.right : Infinity;
  }
}

/**
 * @param {HTMLElement[]} items
 * @param {DOMRect} here
 */
function nearest(items, here) {
  const middle = (here.left + here.right) / 2;
  const distances = items.map((item) => {
    const { left, right } = item.getBoundingClientRect();
    return Math.abs((left + right) / 2 - middle);
  });
  return items[distances.indexOf(Math.min(...distances))];
}
