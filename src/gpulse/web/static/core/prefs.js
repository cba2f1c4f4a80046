// What a reader chose, kept in the browser. Works without storage too: then it lasts as long as the page.

const PREFIX = "gpulse.";
const memory = new Map();

/** What was written under a key, or the fallback. */
export function read(key, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? memoryOr(key, fallback) : JSON.parse(text);
  } catch {
    return memoryOr(key, fallback);
  }
}

/** Keep a value under a key; null forgets it. */
export function write(key, value) {
  memory.set(key, value);
  try {
    if (value === null || value === undefined) {
      localStorage.removeItem(PREFIX + key);
    } else {
      localStorage.setItem(PREFIX + key, JSON.stringify(value));
    }
  } catch {
    // No storage here: what is in memory will do.
  }
}

function memoryOr(key, fallback) {
  return memory.get(key) ?? fallback;
}
