// Keyboard shortcuts, and the dialog that lists them.

import { go, href } from "./router.js";

/** @type {Array<[string[], string]>} */
const KEYS = [
  [["/"], "filter nodes and GPUs"],
  [["Esc"], "close the open panel, or clear the filter"],
  [["f"], "switch between free GPUs and all GPUs"],
  [["m"], "switch between my GPUs and all GPUs"],
  [["d"], "change the density: cards, rows or strips"],
  [["←", "↑", "→", "↓"], "move between GPUs, starting at the first one; Enter opens a GPU"],
  [["e"], "open the node of the selected GPU in place, or select the first GPU"],
  [["g", "o"], "go to the overview"],
  [["g", "f"], "go to findings"],
  [["g", "j"], "go to jobs"],
  [["g", "s"], "go to sessions"],
  [["g", "w"], "go to usage by user and job"],
  [["j"], "findings: select the next one"],
  [["k"], "findings: select the previous one"],
  [["a"], "findings: acknowledge the selected one"],
  [["s"], "findings: silence the selected one"],
  [["+"], "charts: zoom in"],
  [["-"], "charts: zoom out"],
  [["0"], "charts: return to the initial time range"],
  [["drag"], "charts: zoom into a time range; with Shift, move in time"],
  [["Ctrl", "wheel"], "charts: zoom at the pointer; use Shift and the wheel to move in time"],
  [["pinch"], "charts: zoom with two fingers"],
  [["double click"], "charts: zoom out"],
  [["?"], "show this list"],
];
/** @type {Record<string, string>} */
const PLACES = { o: "overview", f: "findings", j: "jobs", s: "sessions", w: "who" };
const handlers = new Map();

let isGoing = 0;
/** @type {HTMLDialogElement | null} */
let dialog = null;

/**
 * Let a page answer a key ("/", "f", "m", "d", "Escape"); the answer is how to take it back.
 * @param {string} key
 * @param {() => void} handle
 */
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

/** @param {string} key */
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

/** @param {EventTarget | null} target */
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
