// Addresses: which page, of what, with which words. All of it lives after the # of the one document.

const OVERVIEW = "overview";

/** The address of a page: `href("gpu", node, label, {from: "-24h"})`. The last argument may be the query. */
export function href(page, ...parts) {
  const last = parts[parts.length - 1];
  const query = last !== null && typeof last === "object" ? parts.pop() : {};
  const name = page === "session" ? "sessions" : page;
  const path = name === OVERVIEW ? [] : [name, ...parts];
  return `#/${path.map(encodeURIComponent).join("/")}${queryText(query)}`;
}

/** Where the reader is: `{page, parts, query}`. */
export function current() {
  return parse(location.hash);
}

/** Read an address. */
export function parse(hash) {
  const text = hash.replace(/^#?\/?/, "");
  const mark = text.indexOf("?");
  const path = mark < 0 ? text : text.slice(0, mark);
  const [page, ...parts] = path.split("/").filter((part) => part !== "").map(decoded);
  const query = mark < 0 ? {} : Object.fromEntries(new URLSearchParams(text.slice(mark + 1)));
  return { page: page ?? OVERVIEW, parts, query };
}

/** Change words of the query without leaving the page; null removes one. Nothing is mounted anew. */
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

/** Leave for another page. */
export function go(address) {
  location.hash = address;
}

function queryText(query) {
  const words = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return words.length ? `?${new URLSearchParams(words)}` : "";
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
