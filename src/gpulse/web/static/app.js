// The shell: one document whose pages come and go, the connection to the head, the theme and the keyboard.

import { returnTo } from "./core/api.js";
import { Fleet } from "./core/fleet.js";
import { duration, text as harmless } from "./core/format.js";
import { Live } from "./core/live.js";
import * as prefs from "./core/prefs.js";
import { Recent } from "./core/recent.js";
import { current, setQuery } from "./core/router.js";
import { announce, toast } from "./core/notices.js";
import { openShortcuts, watchKeys } from "./core/shortcuts.js";

const PAGES = {
  overview: () => import("./pages/overview.js"),
  map: () => import("./pages/heatmap.js"),
  node: () => import("./pages/node.js"),
  gpu: () => import("./pages/gpu.js"),
  job: () => import("./pages/job.js"),
  user: () => import("./pages/user.js"),
  findings: () => import("./pages/findings.js"),
  sessions: () => import("./pages/sessions.js"),
  session: () => import("./pages/session.js"),
  who: () => import("./pages/who.js"),
};
const FRONT_PAGES = ["overview", "map"];
const AHEAD_MS = 1500;

const byId = (id) => document.getElementById(id);
const siteTitle = byId("title").textContent;
const main = byId("main");
const fleet = new Fleet();
const live = new Live((message) => fleet.take(message));
const app = { fleet, live, prefs, announce, toast };

let shown = null;
let turn = 0;
let isUnloaded = false; // the page that the address names could not be loaded
let wasLost = false; // the head was lost while that page was loaded, or later

/** Show the page that the address names. */
async function route() {
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
    showProblem(problem === null ? "There is no such page." : "This page could not be loaded.", problem);
    isUnloaded = problem !== null;
    reloadWhenHeadIsBack();
    return;
  }
  enter(module, where, name);
}

function enter(module, where, name) {
  const root = document.createElement("div");
  root.className = "page";
  root.dataset.page = name;
  main.append(root);
  markNav(name);
  setTitle(module, where);
  try {
    const handle = module.mount(root, where, app) ?? {};
    shown = { module, route: where, handle, root };
    live.want(handle.wish ?? {});
  } catch (error) {
    root.remove();
    showProblem("This page could not be shown.", error);
    throw error;
  }
  if (FRONT_PAGES.includes(name)) {
    prefs.write("view", name);
    fetchAhead();
  }
  if (turn > 1) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
}

/** Load the page that most people look at next as soon as there is nothing else to do. */
function fetchAhead() {
  if (navigator.connection?.saveData) {
    return;
  }
  const idle = window.requestIdleCallback ?? ((work) => work());
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

function isSamePlace(a, b) {
  return a.page === b.page && a.parts.join("/") === b.parts.join("/");
}

function markNav(name) {
  const page = name === "session" ? "sessions" : name;
  for (const link of document.querySelectorAll(".site-nav a")) {
    if (link.dataset.page === page) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
}

function setTitle(module, where) {
  const text = typeof module.title === "function" ? module.title(where) : "";
  document.title = text ? `${harmless(text)} · ${siteTitle}` : siteTitle;
}

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
  more.textContent = error ? String(error.message ?? error) : "";
  note.append(said, more, back);
  page.append(note);
  main.replaceChildren(page);
  document.title = siteTitle;
}

/** The connection in words; counted on by itself while the head is lost. */
function tellConnection() {
  const state = byId("connection");
  const words = { connecting: "connecting", open: "live", lost: "head lost", asleep: "asleep" }[live.state];
  if (state.dataset.connection !== live.state) {
    state.dataset.connection = live.state;
    state.textContent = words;
    if (live.state === "lost") {
      announce("Lost the head. Values are as they were.");
    } else if (live.state === "open" && document.documentElement.classList.contains("is-lost")) {
      announce("The head is back.");
    }
  }
  const isLost = live.state === "lost";
  document.documentElement.classList.toggle("is-lost", isLost);
  byId("banner").hidden = !isLost;
  if (isLost) {
    byId("banner-text").textContent = `Lost the head ${duration((Date.now() - live.lostAt) / 1000)} ago`;
    const wait = live.retryAt === null ? 0 : Math.ceil((live.retryAt - Date.now()) / 1000);
    const next = wait > 0 ? `trying again in ${wait} s` : "trying again now";
    byId("banner-more").textContent = `${live.problem ? `${live.problem}; ` : ""}${next}. Values are as they were then.`;
  }
}

function setUpConnection() {
  live.addEventListener("state", tellConnection);
  live.addEventListener("state", reloadWhenHeadIsBack);
  setInterval(() => live.state === "lost" && tellConnection(), 1000);
  byId("retry").addEventListener("click", () => live.retry());
  fleet.addEventListener("structure", reloadForAnotherVersion);
}

/** Load the document again once the head is back: a browser does not request a module again that could not be loaded. */
function reloadWhenHeadIsBack() {
  wasLost ||= live.state === "lost";
  if (isUnloaded && wasLost && live.state === "open") {
    location.reload();
  }
}

/** A head of another version serves another page: take it, once. */
function reloadForAnotherVersion() {
  app.version ??= fleet.version;
  if (app.version !== null && fleet.version !== app.version) {
    location.reload();
  }
}

function setUpTheme() {
  const select = byId("theme");
  const root = document.documentElement;
  select.value = root.dataset.theme;
  select.addEventListener("change", () => {
    root.dataset.theme = select.value;
    prefs.write("theme", select.value);
    setQuery({ theme: select.value === "yellow" ? null : select.value });
    dispatchEvent(new Event("gpulse-theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("gpulse-theme")));
}

function start() {
  setUpTheme();
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
  } else if (location.hash === "" && prefs.read("view", "overview") === "map") {
    history.replaceState(null, "", "#/map");
  }
  route();
  live.start();
}

start();
