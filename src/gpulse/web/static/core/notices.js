// Announcements for screen readers, and toasts: short messages that disappear.

import { find } from "./dom.js";

const TOAST_MS = 6_000;

let clearing = 0;

/**
 * Announce a text to screen readers.
 * @param {string} text
 */
export function announce(text) {
  const place = find(document, "#announcer");
  clearTimeout(clearing);
  place.textContent = text;
  clearing = setTimeout(() => {
    place.textContent = "";
  }, 5_000);
}

/**
 * Show a note for a while; kind: "info", "good", "warn" or "bad" (which stays until it is closed).
 * @param {string} text
 */
export function toast(text, kind = "info") {
  const note = document.createElement("div");
  note.className = `toast ${["good", "warn", "bad"].includes(kind) ? kind : "info"}`;
  const words = document.createElement("span");
  words.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button quiet";
  close.setAttribute("aria-label", "Close this message");
  close.textContent = "✕";
  close.addEventListener("click", () => note.remove());
  note.append(words, close);
  find(document, "#toasts").append(note);
  if (kind !== "bad") {
    setTimeout(() => note.remove(), TOAST_MS);
  }
}
