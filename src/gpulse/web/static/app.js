// The application: loads and shows pages, connects to the head, and handles theme and keyboard.

import { returnTo } from "./core/api.js";
import { find } from "./core/dom.js";
import { Fleet } from "./core/fleet.js";
import { clock, duration, text as harmless } from "./core/format.js";
import { Live, Recent } from "./core/live.js";
import { announce, toast } from "./core/notices.js";
import * as prefs from "./core/prefs.js";
import { current, go, href, setQuery } from "./core/router.js";
import { onKey, openShortcuts, watchKeys } from "./core/shortcuts.js";
import { FindingBadge } from "./parts/fleet-findings.js";

/** @type {Record<string, () => Promise<Dashboard.PageModule>>} */
const PAGES = {
  overview: () => import("./pages/overview.js"),
  node: () => import("./pages/node.js"),
  gpu: () => import("./pages/gpu.js"),
  jobs: () => import("./pages/jobs.js"),
  job: () => import("./pages/job.js"),
  user: () => import("./pages/user.js"),
  findings: () => import("./pages/findings.js"),
  sessions: () => import("./pages/sessions.js"),
  session: () => import("./pages/session.js"),
  who: () => import("./pages/who.js"),
};
/** @type {Record<string, string>} The entry of the navigation under which a page is. */
const NAV = { session: "sessions", job: "jobs", user: "who" };
const AHEAD_MS = 1500;

/** @param {string} id */
const byId = (id) => find(document, `#${id}`);
const siteTitle = byId("title").textContent;
const main = byId("main");
const fleet = new Fleet();
const live = new Live((message) => fleet.take(message));
/** @type {Dashboard.App} */
const app = { fleet, live, prefs, announce, toast };

/** @type {{ module: Dashboard.PageModule, route: Dashboard.Route, handle: Dashboard.PageHandle } | null} */
let shown = null;
let turn = 0;
let isUnloaded = false; // the page of the current address failed to load
let wasLost = false; // the connection was lost while that page was loaded, or later
const badge = new FindingBadge(app);

/** Show the page of the current address. */
async function route() {
  if (current().page === "map") {
    history.replaceState(null, "", href("overview", { ...current().query, density: "strips" })); // where the map was
  }
  const where = current();
  const name = where.page === "sessions" && where.parts.length ? "session" : where.page;
  if (shown && isSamePlace(shown.route, where) && shown.handle.rerouted) {
    shown.route = where;
    shown.handle.rerouted(where);
    setTitle(shown.module, where);
    return;
  }
  const mine = ++turn;
  isUnloaded = false;
  wasLost = live.state === "lost";
  const load = Object.hasOwn(PAGES, name) ? PAGES[name] : null;
  let module = null;
  let problem = null;
  try {
    module = load ? await load() : null;
  } catch (error) {
    problem = error;
  }
  if (mine !== turn) {
    return;
  }
  leave();
  if (module === null) {
    if (problem instanceof TypeError) {
      showProblem("The head cannot be reached. The page reloads automatically when the head is back.", null); // the browser could not fetch it
    } else {
      showProblem(problem === null ? "This page does not exist." : "This page could not be loaded.", problem);
    }
    isUnloaded = problem !== null;
    reloadWhenHeadIsBack();
    return;
  }
  enter(module, where, name);
}

/**
 * @param {Dashboard.PageModule} module
 * @param {Dashboard.Route} where
 * @param {string} name
 */
function enter(module, where, name) {
  const root = document.createElement("div");
  root.className = "page";
  root.dataset.page = name;
  main.append(root);
  markNav(name);
  setTitle(module, where);
  try {
    const handle = module.mount(root, where, app) ?? {};
    shown = { module, route: where, handle };
    live.subscribe(handle.subscription ?? {});
    badge.rerouted();
  } catch (error) {
    root.remove();
    showProblem("This page could not be shown.", error);
    throw error;
  }
  if (name === "overview") {
    fetchAhead();
  }
  if (turn > 1) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
}

/** Preload the page that most people open next, when the browser is idle. */
function fetchAhead() {
  if (navigator.connection?.saveData) {
    return;
  }
  const idle = window.requestIdleCallback ?? setTimeout;
  const load = () => live.state === "open" && PAGES.gpu().catch(() => {}); // a browser may not try again what failed once
  setTimeout(() => idle(load), AHEAD_MS);
}

function leave() {
  const before = shown;
  shown = null;
  try {
    before?.handle.leave?.();
  } finally {
    main.replaceChildren();
  }
}

/**
 * @param {Dashboard.Route} a
 * @param {Dashboard.Route} b
 */
function isSamePlace(a, b) {
  return a.page === b.page && a.parts.join("/") === b.parts.join("/");
}

/** @param {string} name */
function markNav(name) {
  const page = NAV[name] ?? name;
  for (const link of document.querySelectorAll(".site-nav a")) {
    if (link.getAttribute("data-page") === page) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
}

/**
 * @param {Dashboard.PageModule} module
 * @param {Dashboard.Route} where
 */
function setTitle(module, where) {
  const text = typeof module.title === "function" ? module.title(where) : "";
  document.title = text ? `${harmless(text)} · ${siteTitle}` : siteTitle;
}

/**
 * @param {string} text
 * @param {unknown} error
 */
function showProblem(text, error) {
  const page = document.createElement("div");
  page.className = "page";
  const note = document.createElement("div");
  note.className = "error-note";
  const said = document.createElement("strong");
  said.textContent = text;
  const back = document.createElement("a");
  back.href = "#/";
  back.textContent = "Back to the overview";
  const more = document.createElement("p");
  more.textContent = error instanceof Error ? error.message : "";
  note.append(said, more, back);
  page.append(note);
  main.replaceChildren(page);
  document.title = siteTitle;
}

/** Show the state of the connection; called every second while it is lost. */
function tellConnection() {
  const state = byId("connection");
  const words = { connecting: "connecting", open: "live", lost: "disconnected", asleep: "paused" }[live.state];
  if (state.dataset.connection !== live.state) {
    state.dataset.connection = live.state;
    byId("connection-word").textContent = words;
    if (live.state === "lost") {
      announce("Connection to the head lost. Values are no longer updated.");
    } else if (live.state === "open" && document.documentElement.classList.contains("is-lost")) {
      announce("Connection to the head restored.");
    }
  }
  const isLost = live.state === "lost";
  document.documentElement.classList.toggle("is-lost", isLost);
  byId("banner").hidden = !isLost;
  if (isLost) {
    byId("banner-text").textContent = `Connection to the head lost ${duration((Date.now() - (live.lostAt ?? 0)) / 1000)} ago`;
    const wait = live.retryAt === null ? 0 : Math.ceil((live.retryAt - Date.now()) / 1000);
    const next = wait > 0 ? `retrying in ${wait} s` : "retrying now";
    byId("banner-more").textContent =
      `${live.problem ? `${live.problem}; ` : ""}${next}. The values shown are from before the connection was lost.`;
  }
}

function setUpConnection() {
  live.addEventListener("state", tellConnection);
  live.addEventListener("state", reloadWhenHeadIsBack);
  setInterval(tellTime, 1000);
  byId("retry").addEventListener("click", () => live.retry());
  fleet.addEventListener("structure", reloadForAnotherVersion);
}

/** Every second: the head's time while the page is live, and how long ago it was lost. */
function tellTime() {
  if (live.state === "lost") {
    tellConnection();
  }
  byId("connection-time").textContent = live.state === "open" ? clock(fleet.headTime()) : "";
}

/** Reload once the head is back: a browser does not request a module again that failed to load. */
function reloadWhenHeadIsBack() {
  wasLost ||= live.state === "lost";
  if (isUnloaded && wasLost && live.state === "open") {
    location.reload();
  }
}

/** Reload once when the head runs another version, which serves another page. */
function reloadForAnotherVersion() {
  app.version ??= fleet.version;
  if (app.version !== null && fleet.version !== app.version) {
    location.reload();
  }
}

function setUpTheme() {
  const select = find(document, "#theme", HTMLSelectElement);
  const root = document.documentElement;
  select.value = root.dataset.theme ?? "auto";
  select.addEventListener("change", () => {
    root.dataset.theme = select.value;
    prefs.write("theme", select.value);
    setQuery({ theme: select.value === "auto" ? null : select.value });
  });
}

/** The field in the header: on the overview it filters while people type, on other pages Enter leads there. */
function setUpSearch() {
  const form = find(document, "#site-search", HTMLFormElement);
  const field = find(document, "#fleet-filter", HTMLInputElement);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (current().page !== "overview") {
      go(href("overview", { q: field.value.trim() }));
    }
    field.blur();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      field.value = "";
      field.dispatchEvent(new Event("input"));
      field.blur();
    }
  });
  const focus = () => {
    document.body.classList.add("searching");
    field.focus();
  };
  onKey("/", focus);
  for (const [id, name] of [
    ["open-search", "searching"],
    ["open-tools", "choosing"],
  ]) {
    byId(id).addEventListener("click", () => {
      const isOpen = document.body.classList.toggle(name);
      byId(id).setAttribute("aria-expanded", String(isOpen));
      if (isOpen && id === "open-search") {
        field.focus();
      }
    });
  }
}

function start() {
  setUpTheme();
  setUpSearch();
  setUpConnection();
  new Recent(fleet, live);
  watchKeys();
  byId("help").addEventListener("click", openShortcuts);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
  addEventListener("hashchange", route);
  const back = returnTo();
  if (back) {
    history.replaceState(null, "", back);
  }
  route();
  live.start();
}

start();
