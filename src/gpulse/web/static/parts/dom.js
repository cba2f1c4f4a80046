// Elements made and changed by hand, where a template would do too much every second.

/** An element: `h("a", {class: "x", href: "…"}, "text", child)`. Text stays text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children);
  return element;
}

/** A text that is only written when it changes. */
export class Text {
  constructor(element) {
    this.element = element;
    this._node = document.createTextNode("");
    element.append(this._node);
    this._text = "";
  }

  set(text) {
    if (text !== this._text) {
      this._text = text;
      this._node.data = text;
    }
  }
}

/** A text in a box of its own size: when it changes, nothing around it has to be laid out again. */
export class BoxedText extends Text {
  constructor(outer) {
    const box = h("span", { class: "boxed" });
    super(box);
    outer.append(box);
    this.outer = outer;
  }
}

/** A bar with a number beside it; the bar is for the eye alone, the number says the same. */
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

  set(ratio, text) {
    this.text.set(text);
    const shown = ratio === null || !Number.isFinite(ratio) ? 0 : Math.round(Math.min(1, Math.max(0, ratio)) * 200);
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

/** Show or hide, touching the document only when that is a change. */
export function setHidden(element, isHidden) {
  if (element.hidden !== isHidden) {
    element.hidden = isHidden;
  }
}

/** Give an element these children in this order; only what is out of place moves, and the focus stays where it was. */
export function setChildren(parent, elements) {
  const focused = document.activeElement;
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
  if (focused !== document.activeElement && parent.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

/** Set an attribute, touching the document only when that is a change; null removes it. */
export function setAttribute(element, name, value) {
  if (value === null) {
    if (element.hasAttribute(name)) {
      element.removeAttribute(name);
    }
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** Do something at most once a frame, however often it is asked for. */
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
