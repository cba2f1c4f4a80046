// Routing: the page, its path and its query are in the URL's fragment, after the #.

const OVERVIEW = "overview";

/**
 * The address of a page: `href("gpu", node, label, {from: "-24h"})`. The last argument may be the query.
 * @param {string} page
 * @param {...(string | number | null | Record<string, string | number | null | undefined>)} parts
 */
export function href(page, ...parts) {
  const last = parts.at(-1);
  const query = last !== null && typeof last === "object" ? last : {};
  const names = query === last ? parts.slice(0, -1) : parts;
  const name = page === "session" ? "sessions" : page;
  const path = name === OVERVIEW ? [] : [name, ...names];
  return `#/${path.map((part) => encodeURIComponent(String(part))).join("/")}${queryText(query)}`;
}

/** The current route: `{page, parts, query}`. */
export function current() {
  return parse(location.hash);
}

/**
 * Read an address.
 * @param {string} hash
 */
export function parse(hash) {
  const text = hash.replace(/^#?\/?/, "");
  const mark = text.indexOf("?");
  const path = mark < 0 ? text : text.slice(0, mark);
  const [page, ...parts] = path
    .split("/")
    .filter((part) => part !== "")
    .map(decoded);
  const query = mark < 0 ? {} : Object.fromEntries(new URLSearchParams(text.slice(mark + 1)));
  return { page: page ?? OVERVIEW, parts, query };
}

/**
 * Change parameters of the query without leaving the page; null removes one.
 * @param {Record<string, string | number | null | undefined>} changes
 */
export function setQuery(changes, { replace = true } = {}) {
  const { page, parts, query } = current();
  for (const [word, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") {
      delete query[word];
    } else {
      query[word] = String(value);
    }
  }
  const address = href(page, ...parts, query);
  if (address === location.hash || (address === "#/" && location.hash === "")) {
    return;
  }
  history[replace ? "replaceState" : "pushState"](history.state, "", address);
}

/**
 * Leave for another page.
 * @param {string} address
 */
export function go(address) {
  location.hash = address;
}

/** @param {Record<string, string | number | null | undefined>} query */
function queryText(query) {
  const words = Object.entries(query)
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([word, value]) => [word, String(value)]);
  return words.length ? `?${new URLSearchParams(words)}` : "";
}

/** @param {string} part */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
