// The keyboard: a few keys that work everywhere, and the dialog that lists them.

import { href, go } from "./router.js";

const KEYS = [
  [["/"], "filter nodes and GPUs"],
  [["Esc"], "clear the filter, close a dialog"],
  [["j"], "jump to a node by its name"],
  [["f"], "free GPUs only, and back"],
  [["m"], "my GPUs only, and back"],
  [["g", "o"], "overview"],
  [["g", "m"], "map"],
  [["g", "f"], "findings"],
  [["g", "s"], "sessions"],
  [["g", "w"], "who"],
  [["←", "↑", "→", "↓"], "on the map: move from GPU to GPU; Enter opens it"],
  [["?"], "this list"],
];
const PLACES = { o: "overview", m: "map", f: "findings", s: "sessions", w: "who" };
const handlers = new Map();

let isGoing = 0;
let dialog = null;

/** Let a page answer a key ("/", "f", "m", "j", "Escape"); the answer is how to take it back. */
export function onKey(key, handle) {
  handlers.set(key, handle);
  return () => {
    if (handlers.get(key) === handle) {
      handlers.delete(key);
    }
  };
}

/** Listen to the keyboard from now on. */
export function watchKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) {
      return;
    }
    if (isTyping(event.target)) {
      return;
    }
    if (take(event.key)) {
      event.preventDefault();
    }
  });
}

/** Show what the keys do. */
export function openShortcuts() {
  dialog ??= makeDialog();
  if (!dialog.open) {
    dialog.showModal();
  }
}

function take(key) {
  if (isGoing && Date.now() - isGoing < 1500 && PLACES[key]) {
    isGoing = 0;
    go(href(PLACES[key]));
    return true;
  }
  isGoing = key === "g" ? Date.now() : 0;
  if (key === "?") {
    openShortcuts();
    return true;
  }
  const handle = handlers.get(key);
  if (handle) {
    handle();
  }
  return Boolean(handle);
}

function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName));
}

function makeDialog() {
  const made = document.createElement("dialog");
  made.setAttribute("aria-labelledby", "keys-title");
  const title = document.createElement("h2");
  title.id = "keys-title";
  title.textContent = "Keyboard shortcuts";
  const list = document.createElement("dl");
  list.className = "keys";
  for (const [keys, text] of KEYS) {
    const term = document.createElement("dt");
    keys.forEach((key, at) => {
      const cap = document.createElement("kbd");
      cap.textContent = key;
      term.append(at ? " " : "", cap);
    });
    const meaning = document.createElement("dd");
    meaning.textContent = text;
    list.append(term, meaning);
  }
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button primary";
  close.textContent = "Close";
  close.addEventListener("click", () => made.close());
  made.append(title, list, close);
  document.body.append(made);
  return made;
}
