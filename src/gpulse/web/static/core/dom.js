// Helpers for elements that are updated in place, where rendering a template every second would be too slow.

import { known } from "./format.js";

/**
 * The element that a selector finds; the page's own templates have it.
 * @template {HTMLElement} [T=HTMLElement]
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => T} [type]
 * @returns {T}
 */
export function find(root, selector, type) {
  const found = root.querySelector(selector);
  if (!(found instanceof (type ?? HTMLElement))) {
    throw new Error(`element ${selector} not found`);
  }
  return /** @type {T} */ (found);
}

/**
 * An element: `h("a", {class: "x", href: "…"}, "text", child)`. Text stays text.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {...(Node | string)} children
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children);
  return element;
}

/** A text node that is only written when its text changes. */
export class Text {
  /** @param {HTMLElement} element */
  constructor(element) {
    this.element = element;
    this._node = document.createTextNode("");
    element.append(this._node);
    this._text = "";
  }

  /** @param {string} text */
  set(text) {
    if (text !== this._text) {
      this._text = text;
      this._node.data = text;
    }
  }
}

/** A text in a box of its own size: when it changes, nothing around it has to be laid out again. */
export class BoxedText extends Text {
  /** @param {HTMLElement} outer */
  constructor(outer) {
    const box = h("span", { class: "boxed" });
    super(box);
    outer.append(box);
    this.outer = outer;
  }
}

/** A bar with a number; the bar is hidden from screen readers, because the number says the same. */
export class Bar {
  constructor(high = 2) {
    this._fill = h("span");
    this._track = h("span", { class: "track", "aria-hidden": "true" }, this._fill);
    this.text = new Text(h("span", { class: "bar-text boxed" }));
    this.element = h("span", { class: "bar" }, this.text.element, this._track);
    this._high = high;
    this._shown = -1;
    this._isHigh = false;
  }

  /**
   * @param {Dashboard.MaybeNumber} ratio
   * @param {string} text
   */
  set(ratio, text) {
    this.text.set(text);
    const shown = !known(ratio) ? 0 : Math.round(Math.min(1, Math.max(0, ratio)) * 200);
    if (shown === this._shown) {
      return;
    }
    this._shown = shown;
    this._fill.style.transform = `scaleX(${shown / 200})`;
    const isHigh = shown / 200 >= this._high;
    if (isHigh !== this._isHigh) {
      this._isHigh = isHigh;
      this._track.toggleAttribute("data-high", isHigh);
    }
  }
}

/**
 * Show or hide, touching the document only when that is a change.
 * @param {HTMLElement} element
 * @param {boolean} isHidden
 */
export function setHidden(element, isHidden) {
  if (element.hidden !== isHidden) {
    element.hidden = isHidden;
  }
}

/**
 * Give an element these children in this order; only what is out of place moves, and the focus stays where it was.
 * @param {HTMLElement} parent
 * @param {HTMLElement[]} elements
 */
export function setChildren(parent, elements) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  let at = parent.firstChild;
  for (const element of elements) {
    if (element === at) {
      at = at.nextSibling;
    } else {
      parent.insertBefore(element, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
  if (focused && focused !== document.activeElement && parent.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

/**
 * Set an attribute, touching the document only when that is a change; null removes it.
 * @param {Element} element
 * @param {string} name
 * @param {string | null} value
 */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) {
      element.removeAttribute(name);
    }
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/**
 * Wrap a function so that it runs at most once per animation frame.
 * @param {() => void} work
 */
export function oncePerFrame(work) {
  let asked = 0;
  const run = () => {
    asked = 0;
    work();
  };
  const ask = () => {
    asked ||= requestAnimationFrame(run);
  };
  ask.cancel = () => {
    cancelAnimationFrame(asked);
    asked = 0;
  };
  return ask;
}

/**
 * The value of the field that an event comes from.
 * @param {Event} event
 */
export function fieldValue(event) {
  return /** @type {HTMLInputElement | HTMLSelectElement} */ (event.target).value;
}

/**
 * Whether the `details` element that an event comes from is open.
 * @param {Event} event
 */
export function isOpened(event) {
  return /** @type {HTMLDetailsElement} */ (event.target).open;
}

/**
 * The form that an event comes from.
 * @param {Event} event
 */
export function formOf(event) {
  return /** @type {HTMLFormElement} */ (event.target);
}

/**
 * The drawing context of a canvas.
 * @param {HTMLCanvasElement} canvas
 */
export function contextOf(canvas) {
  const context = canvas.getContext("2d");
  if (context === null) {
    throw new Error("this browser does not support canvas elements");
  }
  return context;
}
