// The user's preferences, kept in the browser's storage; without storage, until the page is closed.

const PREFIX = "gpulse.";
const memory = new Map();

/**
 * Return the value of a key, or the fallback.
 * @template T
 * @param {string} key
 * @param {T} fallback
 * @returns {T}
 */
export function read(key, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + key);
    return text === null ? memoryOr(key, fallback) : JSON.parse(text);
  } catch {
    return memoryOr(key, fallback);
  }
}

/**
 * Store a value under a key; null removes it.
 * @param {string} key
 * @param {unknown} value
 */
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

/**
 * @template T
 * @param {string} key
 * @param {T} fallback
 * @returns {T}
 */
function memoryOr(key, fallback) {
  return memory.get(key) ?? fallback;
}
